"""Finding a data set's files: the user's directory, the environment's, the cache, the public home.

A directory that the user names (`data_dir`, then FLMARKET_DATA) is trusted as it is: the loaders check the
format, not the checksum, so that a user can bring a variant of her own. What is downloaded is checked against
a pinned sha256 of the uncompressed content before it gets its name in the cache; that is what makes mirrors
and plain http acceptable. What would break it: a cache directory that others can write to, since files in it
are not hashed again.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import os
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from flmarket.errors import ConfigError, DataUnavailable, InvalidInput

__all__ = ["DATA_VARIABLE", "Locator", "RemoteFile", "Source", "cache_directory", "read_bytes"]

DATA_VARIABLE = "FLMARKET_DATA"
CACHE_VARIABLE = "FLMARKET_CACHE"
TIMEOUT_SECONDS = 30.0
MAX_FILE_BYTES = 256 << 20
CHUNK_BYTES = 1 << 20

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
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "wb") as target:
                target.write(content)
            os.replace(temporary, directory / file.name)
        except BaseException:
            os.unlink(temporary)
            raise
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
