"""Files of data: where a data set's lie, and what is in them; a user's own CSV, Parquet or npz as a data set.

A directory that the user names (`data_dir`, then FLMARKET_DATA) is trusted as it is: the loaders check the
format, not the checksum, so that a user can bring a variant of her own. What is downloaded is checked against
a pinned sha256 of the uncompressed content before it gets its name in the cache; that is what makes mirrors
and plain http acceptable. What would break it: a cache directory that others can write to, since files in it
are not hashed again.
"""

import gzip
import hashlib
import http.client
import io
import os
import struct
import tomllib
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from flmarket.bids import FloatArray, IntArray
from flmarket.errors import ConfigError, DataUnavailable, InvalidInput, needed
from flmarket.files import write_file
from flmarket.learning.data import DataSet, Encoding, Scaling, stratified_split
from flmarket.learning.predict import Columns, Refused, columns, texts

DATA_VARIABLE = "FLMARKET_DATA"
CACHE_VARIABLE = "FLMARKET_CACHE"
TIMEOUT_SECONDS = 30.0
MAX_FILE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20

MAX_CATEGORIES = 1000  # of one column; more is a name or a number, not a category
FEW_CATEGORIES = 20  # what has no more of them is a category, whatever it looks like
LARGEST_NUMBER = 1e100  # of a column; squares of larger ones leave what a float can hold
MOST_CLASSES = 100_000  # what a model that travels may have (`flmarket.learning.predict`)
LEAST_RECORDS = 10
SPLIT_SEED = 20_221
SOURCES = tomllib.loads((files("flmarket.learning.data") / "sources.toml").read_text(encoding="utf-8"))
TEST_SHARE = 0.2

Opener = Callable[[str, float], AbstractContextManager[IO[bytes]]]


@dataclass(frozen=True)
class RemoteFile:
    """One file and its public home. `unpack`: file names inside nested zip archives, outermost first."""

    name: str
    sha256: str
    url: str
    unpack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The files of a data set. `stand_ins`: single files that serve instead of all of them."""

    name: str
    files: tuple[RemoteFile, ...]
    stand_ins: tuple[str, ...] = ()

    @classmethod
    def known(cls, name: str) -> "Source":
        """One of `sources.toml`: files by name with their sha256, from a home that has `{}` for the name."""
        about = SOURCES[name]
        unpack, home = tuple(about.get("unpack", ())), about["home"]
        files = (RemoteFile(file, sha256, home.format(quote(file)), unpack) for file, sha256 in about["files"].items())
        return cls(name, tuple(files), tuple(about.get("stand_ins", ())))


def cache_directory() -> Path:
    """FLMARKET_CACHE, or flmarket in the user's cache directory."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "flmarket"


def _open_url(url: str, timeout: float) -> AbstractContextManager[IO[bytes]]:
    # Only the loaders' own constants come here, so no one can smuggle in a file: or ftp: address.
    request = urllib.request.Request(url, headers={"User-Agent": "flmarket"})  # noqa: S310
    opened: AbstractContextManager[IO[bytes]] = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    return opened


@dataclass(frozen=True)
class Locator:
    """Where to look and whether to download."""

    data_dir: Path | None = None
    download: bool = True
    opener: Opener = _open_url

    def locate(self, source: Source) -> dict[str, Path]:
        """Paths by file name: all files of the source, or one stand-in."""
        looked: list[Path] = []
        for directory in self._user_directories(source):
            if found := _found_in(directory, source):
                return found
            looked.append(directory)
        cache = cache_directory() / source.name
        looked.append(cache)
        found = _found_in(cache, source, may_be_partial=True)  # a download may have been interrupted
        if any(name in found for name in source.stand_ins):
            return found
        for file in source.files:
            if file.name in found:
                continue
            if not self.download:
                raise DataUnavailable(_advice(source, looked, "downloading is off"))
            try:
                found[file.name] = _download(file, cache, self.opener)
            except _DownloadFailed as failure:
                raise DataUnavailable(_advice(source, looked, str(failure))) from failure
        return found

    def _user_directories(self, source: Source) -> list[Path]:
        roots = []
        if self.data_dir is not None:
            if not self.data_dir.is_dir():
                raise InvalidInput("data_dir", str(self.data_dir), "an existing directory")
            roots.append(self.data_dir)
        if named := os.environ.get(DATA_VARIABLE):
            root = Path(named).expanduser()
            if not root.is_dir():
                raise ConfigError(DATA_VARIABLE, named, "an existing directory")
            roots.append(root)
        return [directory for root in roots for directory in (root / source.name, root)]


def _advice(source: Source, looked: list[Path], problem: str) -> str:
    wanted = " and ".join(file.name for file in source.files)
    if source.stand_ins:
        wanted += f" (or {' or '.join(source.stand_ins)})"
    return (
        f"{source.name}: put {wanted}, plain or .gz, into a directory and name it with data_dir or the "
        f"variable {DATA_VARIABLE}; not found in {', '.join(map(str, looked))}; {problem}"
    )


def _found_in(directory: Path, source: Source, *, may_be_partial: bool = False) -> dict[str, Path]:
    """The source's files in one directory. Half a set in a user's directory is an error."""
    for name in source.stand_ins:
        if (directory / name).is_file():
            return {name: directory / name}
    found = {}
    for file in source.files:
        for path in (directory / file.name, directory / f"{file.name}.gz"):
            if path.is_file():
                found[file.name] = path
                break
    if found and len(found) < len(source.files) and not may_be_partial:
        missing = ", ".join(file.name for file in source.files if file.name not in found)
        raise DataUnavailable(f"{source.name}: {directory} has {', '.join(found)} but not {missing}; add it there")
    return found


class _DownloadFailed(Exception):
    """Why a file could not be fetched."""


def _download(file: RemoteFile, directory: Path, opener: Opener) -> Path:
    try:
        with opener(file.url, TIMEOUT_SECONDS) as response:
            content = _unpacked(file, _limited(response))
        digest = hashlib.sha256(content).hexdigest()
        if digest != file.sha256:
            raise _DownloadFailed(f"{file.url} gave content with another checksum ({digest[:12]}…), not kept")
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / file.name, content)
    except (OSError, http.client.HTTPException, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _DownloadFailed(f"download of {file.url} failed ({error or type(error).__name__})") from error
    return directory / file.name


def _unpacked(file: RemoteFile, content: bytes) -> bytes:
    for member in file.unpack:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = [n for n in archive.namelist() if PurePosixPath(n).name == member and "__MACOSX" not in n]
            if len(names) != 1:
                raise _DownloadFailed(f"{file.url} does not hold one {member}")
            with archive.open(names[0]) as stream:
                content = _limited(stream)
    if file.url.endswith(".gz") and not file.name.endswith(".gz"):
        with gzip.open(io.BytesIO(content)) as unzipped:
            content = _limited(unzipped)
    return content


def _limited(stream: IO[bytes] | gzip.GzipFile) -> bytes:
    """Everything in the stream, refusing to fill the memory with it."""
    content = bytearray()
    while chunk := stream.read(CHUNK_BYTES):
        content += chunk
        if len(content) > MAX_FILE_BYTES:
            raise OSError(f"more than {MAX_FILE_BYTES >> 20} MB")
    return bytes(content)


def read_bytes(path: Path) -> bytes:
    """The content of a plain or gzipped file, or a typed error."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as unzipped:
                return _limited(unzipped)
        with path.open("rb") as stream:
            return _limited(stream)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError("data file", str(path), f"a readable plain or gzipped file ({error})") from None


# --- a user's own files -----------------------------------------------------------------------------------------------


def from_files(
    train: Path, test: Path | None = None, *, label: str | None = None, scaling: Scaling | None = None, name: str = ""
) -> DataSet:
    """A data set from one's own files; without a test file, a fifth of the records is put aside, always the same.

    CSV and Parquet have named columns, one of them the `label`; columns of numbers are standardised unless `scaling`
    says otherwise, all others are categories. An npz holds `x` and `y`, or `x_train`, `y_train`, `x_test` and `y_test`,
    and is taken as it is unless `scaling` is given.
    """
    if test is not None and (train.suffix == ".npz") != (test.suffix == ".npz"):
        raise ConfigError("test", str(test), f"a file of columns or of arrays, as {train.name} is")
    title = name or train.name.partition(".")[0]
    source = f"{train.name}{'' if test is None else f' and {test.name}'}"
    if train.suffix == ".npz":
        parts = read_npz(train) if test is None else (*read_npz(train)[:2], *read_npz(test)[:2])
        return _from_arrays(title, parts, scaling or "none", train, source)
    tables = [read_table(train)]
    if label is None or label not in tables[0]:
        raise ConfigError(f"{train}: label", label, f"one of its columns {', '.join(tables[0])}")
    classes, first = _classes(tables[0][label], f"{train}: {label}")
    if test is None:
        chosen = stratified_split(first, test_share=TEST_SHARE, seed=SPLIT_SEED)
        tables = [{column: values[rows] for column, values in tables[0].items()} for rows in chosen]
    encoding = _fitted({key: values for key, values in tables[0].items() if key != label}, train, scaling or "standard")
    if test is not None:  # what is text in the one file is text in the other, though all of it may look like numbers
        tables.append(read_table(test, encoding.categories))
    labels = [_coded(table, label, classes, path) for table, path in zip(tables, (train, test or train), strict=True)]
    x = [_encoded(encoding, table, path) for table, path in zip(tables, (train, test or train), strict=True)]
    return DataSet(title, x[0], labels[0], x[1], labels[1], classes=classes, source=source, encoding=encoding)


def read_table(path: Path, categories: Collection[str] = ()) -> Columns:
    """Columns by name from a CSV (plain or gzipped; `,`, `;` or tabs) or Parquet file; of numbers where all are, but
    for those that are `categories`."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.name.removesuffix(".gz").rpartition(".")[2] not in ("csv", "tsv", "txt"):
        raise ConfigError("data file", str(path), "a .csv, .tsv, .parquet or .npz file")
    return {name: values if name in categories else _numbers(values) for name, values in read_csv(path).items()}


# what NumPy and zipfile raise on a broken file; RuntimeError for compression and encryption that nobody supports
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError)


def read_npz(path: Path) -> tuple[NDArray[Any], ...]:
    """(x, y), or (x_train, y_train, x_test, y_test); objects are refused, as reading them would run code."""
    try:
        with np.load(io.BytesIO(read_bytes(path)), allow_pickle=False) as stored:
            keys = ("x", "y") if "x" in stored else ("x_train", "y_train", "x_test", "y_test")
            if not set(keys) <= set(stored):
                raise KeyError(f"it has {', '.join(sorted(stored)[:20]) or 'nothing'}")
            return tuple(stored[key] for key in keys)
    except (*_UNREADABLE, zipfile.BadZipFile, zlib.error, struct.error) as error:
        wanted = "an npz with x and y, or with x_train, y_train, x_test, y_test"
        raise ConfigError(str(path), str(error), wanted) from None


def _from_arrays(title: str, parts: tuple[NDArray[Any], ...], scaling: Scaling, path: Path, source: str) -> DataSet:
    for part, y in zip(parts[::2], parts[1::2], strict=True):
        if part.dtype.kind not in "fiub" or part.ndim < 2:
            raise ConfigError(f"{path}: x", f"{part.dtype} {part.shape}", "numbers, (records, features)")
        if y.dtype.kind not in "fiub" or y.ndim != 1 or (y != np.floor(y)).any() or y.min(initial=0) < 0:
            raise ConfigError(f"{path}: y", f"{y.dtype} {y.shape}", "classes, numbered from 0")
        if len(y) != len(part) or y.max(initial=0) >= MOST_CLASSES:
            found = f"{len(y)} classes for {len(part)} records, the largest {y.max(initial=0):.0f}"
            raise ConfigError(f"{path}: y", found, f"one for each record, below {MOST_CLASSES}")
        if not (np.abs(part.astype(np.float64)) <= LARGEST_NUMBER).all():
            raise ConfigError(f"{path}: x", "NaN, or numbers beyond all measure", f"numbers within ±{LARGEST_NUMBER:g}")
    if len(parts) == 2:
        rows = stratified_split(parts[1], test_share=TEST_SHARE, seed=SPLIT_SEED)
        parts = tuple(part[chosen] for chosen in rows for part in parts)
    x_train, x_test = (part.reshape(len(part), -1).astype(np.float64) for part in parts[::2])
    y_train, y_test = (part.astype(np.int64) for part in parts[1::2])
    names = [f"x{i}" for i in range(x_train.shape[1])]
    encoding = Encoding.fit(dict(zip(names, x_train.T, strict=True)), names, {}, scaling)
    if scaling != "none":
        x_train, x_test = (encoding.encode(dict(zip(names, x.T, strict=True))) for x in (x_train, x_test))
    classes = tuple(str(k) for k in range(int(max(y_train.max(initial=0), y_test.max(initial=0))) + 1))
    shape = tuple(parts[0].shape[1:]) if parts[0].ndim > 2 else ()
    return DataSet(
        title, x_train, y_train, x_test, y_test, classes=classes, source=source, encoding=encoding, shape=shape
    )


def _classes(values: NDArray[Any], field: str) -> tuple[tuple[str, ...], IntArray]:
    known, codes = np.unique(values, return_inverse=True)
    missing = not np.isfinite(known).all() if known.dtype == np.float64 else "" in known
    if missing or not 2 <= len(known) <= min(MAX_CATEGORIES, len(values) // 2):
        found = "a missing class" if missing else f"{len(known)} different values in {len(values)} records"
        raise ConfigError(field, found, f"2 to {MAX_CATEGORIES} classes, one for every record, shared by many")
    return tuple(texts(known).tolist()), codes


def _coded(table: Columns, label: str, classes: tuple[str, ...], path: Path) -> IntArray:
    if label not in table:
        raise ConfigError(f"{path}: label", label, f"one of its columns {', '.join(table)}")
    codes = {name: code for code, name in enumerate(classes)}
    said = texts(table[label]).tolist()
    if unknown := [text for text in said if text not in codes]:
        raise ConfigError(f"{path}: {label}", unknown[0], f"a class of the training file: {', '.join(classes)}")
    return np.array([codes[text] for text in said], dtype=np.int64)


def _fitted(table: Columns, path: Path, scaling: Scaling) -> Encoding:
    numbers = [name for name, values in table.items() if values.dtype == np.float64]
    categories = {name: np.unique(values) for name, values in table.items() if name not in numbers}
    for name, known in categories.items():
        _check_category(table[name], known, f"{path}: {name}")
    if not table:
        raise ConfigError(str(path), "no column but the label", "a column to tell classes by")
    check_finite(table, numbers, path)
    return Encoding.fit(table, numbers, {name: known.tolist() for name, known in categories.items()}, scaling)


def _check_category(values: NDArray[Any], known: NDArray[Any], field: str) -> None:
    """Refuse texts that are no category: numbers with a flaw in some field, dates, names."""
    if len(known) <= FEW_CATEGORIES:
        return
    flaws = [text for text in known.tolist() if _numbers(np.array(text)).dtype.kind == "U"]
    if 2 * len(flaws) < len(known):
        accepted = "numbers in every record, with a point before decimals; leave those records out, or the column"
        raise ConfigError(field, f"{', '.join(flaws[:3])} among numbers", accepted)
    if len(known) > min(MAX_CATEGORIES, len(values) / 2):
        accepted = f"a category of at most {MAX_CATEGORIES}, shared by many records; leave names, dates and keys out"
        raise ConfigError(field, f"{len(known)} different texts in {len(values)} records, such as {known[0]}", accepted)


def _encoded(encoding: Encoding, table: Columns, path: Path) -> FloatArray:
    for name in (*encoding.numbers, *encoding.categories):
        if name not in table:
            raise ConfigError(str(path), ", ".join(table), f"a column {name}, as in the training file")
    check_finite(table, encoding.numbers, path)
    categories = {name: texts(table[name]) for name in encoding.categories}
    return encoding.encode({name: table[name] for name in encoding.numbers} | categories)


def check_finite(table: Columns, numbers: list[str] | tuple[str, ...], path: Path) -> None:
    """Raise where a column has a value that is missing or no number."""
    for name in numbers:
        if table[name].dtype != np.float64 or not np.isfinite(table[name]).all():
            raise ConfigError(f"{path}: {name}", "a value that is missing or no number", "finite numbers")
        if not (np.abs(table[name]) <= LARGEST_NUMBER).all():
            raise ConfigError(f"{path}: {name}", "numbers beyond all measure", f"numbers within ±{LARGEST_NUMBER:g}")


def _numbers(values: NDArray[np.str_]) -> NDArray[Any]:
    """Numbers if all are, an empty field NaN (to be refused where numbers are needed); else the texts as they are."""
    try:
        return np.where(values == "", "nan", values).astype(np.float64)
    except ValueError:
        return values


def read_csv(
    path: Path, delimiter: str = "", needs: Sequence[str] = (), *, least: int = LEAST_RECORDS
) -> dict[str, NDArray[Any]]:
    """The fields as text, by a header with the names that are needed."""
    try:
        found = columns(read_bytes(path).decode("utf-8-sig"), delimiter, needs, least)
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), str(error), "text in UTF-8") from None
    except Refused as problem:
        raise ConfigError(str(path), problem.value, problem.accepted) from None
    if "" in found:
        accepted = "a header of different names, none empty (pandas: to_csv(index=False) leaves row numbers out)"
        raise ConfigError(str(path), list(found), accepted)
    return found


def _read_parquet(path: Path) -> Columns:
    with needed("parquet", "pyarrow"):
        from pyarrow import ArrowException, parquet, types
    try:
        table = parquet.read_table(io.BytesIO(read_bytes(path)))
    except (ArrowException, OSError) as error:
        raise ConfigError(str(path), str(error), "a Parquet file") from None
    columns: Columns = {}
    for name in table.column_names:
        values = table.column(name)
        if values.null_count:
            raise ConfigError(f"{path}: {name}", "a missing value", "a value in every record")
        kind = values.type.value_type if types.is_dictionary(values.type) else values.type
        if types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind):
            raise ConfigError(f"{path}: {name}", str(kind), "a column of numbers or texts")
        if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
            columns[name] = np.array(values.to_pylist(), dtype=np.float64)
        else:
            columns[name] = np.array([str(value) for value in values.to_pylist()])
    if table.num_rows < LEAST_RECORDS:
        raise ConfigError(str(path), f"{table.num_rows} records", f"at least {LEAST_RECORDS}")
    return columns
