"""Files that are there whole or not at all, files that only their owner may read; and their text: CSV, strict JSON.

Content goes into a new file beside the old one, which takes its name only when everything is written: a reader never
sees half a file, and a crash leaves the old one (and perhaps a `.part` that nobody reads). Breaks on file systems where
renaming is not atomic; private files also where there are no permissions, and against the machine's administrator.
"""

import csv
import io
import math
import os
import secrets
import sqlite3
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from flmarket.errors import ConfigError, InvalidInput

Name = str | os.PathLike[str]
_BESIDE = ("-wal", "-shm", "-journal")  # what SQLite has beside a file


@contextmanager
def whole_file(path: Name, *, sync: bool = False, private: bool = False, new: bool = False) -> Iterator[IO[bytes]]:
    """A file to write into that becomes `path` at the end, or nothing if there is an error.

    `sync`: its content and its name survive a power cut. `private`: mode 0600, whatever the umask. `new`: it takes
    nobody's place; FileExistsError if there is a file by then.
    """
    final = Path(path)
    part = final.with_name(f".{final.name}.{secrets.token_hex(6)}.part")
    # exclusive: never follow or overwrite what someone else put there
    handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(handle)
        if new:
            os.link(part, final)
        else:
            os.replace(part, final)
    finally:
        part.unlink(missing_ok=True)
    if sync:
        sync_folder(final.parent)


def write_file(path: Name, content: str | bytes, *, sync: bool = False, private: bool = False) -> None:
    """Write a file whole (`whole_file`)."""
    with whole_file(path, sync=sync, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_files(out_dir: Name, files: Mapping[str, str | bytes]) -> Path:
    """Write named files into a directory, made if needed; all are written before the first takes its name."""
    directory = Path(out_dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InvalidInput("out_dir", str(directory), "a directory, or a path where one can be made") from None
    with ExitStack() as waiting:
        for name, content in files.items():
            file = waiting.enter_context(whole_file(directory / name))
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
    return directory


def csv_text(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table as CSV."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return buffer.getvalue()


def jsonable(value: Any) -> Any:
    """Tuples as lists, and no number that JSON does not have: infinities become null."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def sync_folder(folder: Name) -> None:
    """Names of new files in this folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def start_databases(images: Mapping[Path, Callable[[], bytes]], *, sync: bool) -> None:
    """Make these SQLite files where there are none, with mode 0600 and a write-ahead log: each whole or not at all.

    An image is a database in memory, serialised. Writing it down takes one file; SQLite's own transactions for the
    same take a journal each, which a power cut or a slow disk makes dear. Where something of an earlier file lies
    beside (SQLite alone knows what it is worth), or there are no links, nothing is made: SQLite does that. With `sync`
    contents are on disk before names are given, and all names of a folder before this returns, in one go.
    """
    folders = dict[Path, None]()
    for path, image in images.items():
        if any(os.path.lexists(f"{path}{suffix}") for suffix in ("", *_BESIDE)):
            continue
        content = bytearray(image())
        content[18:20] = b"\2\2"  # the file format's word for a write-ahead log, which a database in memory cannot have
        with suppress(OSError), whole_file(path, private=True, new=True) as file:
            file.write(content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
                folders[path.parent] = None
    for folder in folders:
        with suppress(OSError):
            sync_folder(folder)


def start_database(path: Path, image: Callable[[], bytes], *, sync: bool) -> None:
    """`start_databases` for one."""
    start_databases({path: image}, sync=sync)


def read_toml(path: Name, what: str) -> dict[str, Any]:
    """A file's values, or a typed error that says what cannot be read."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors put a mark before everything
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what, str(path), f"a readable UTF-8 file ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), str(error), "valid TOML") from None


def keep_private(path: Name) -> None:
    """Make this SQLite file with mode 0600 if there is none, whatever the umask; take others' rights from an old one.

    SQLite gives the files beside it (write-ahead log, its index, journal) the mode of the file itself; those that a
    crash left behind are tightened too. What cannot be made or belongs to somebody else is left to SQLite to refuse.
    A new file has its write-ahead log from the start: of several processes that change one to it at the same time,
    SQLite lets some fail without waiting for the others.
    """
    start_database(Path(path), _no_tables, sync=False)
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    for suffix in ("", *_BESIDE):
        with suppress(OSError):
            mode = stat.S_IMODE(os.stat(f"{path}{suffix}").st_mode)
            if mode & 0o077:
                os.chmod(f"{path}{suffix}", mode & 0o700)


def _no_tables() -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA user_version = 0")  # writes the first page
        return connection.serialize()
