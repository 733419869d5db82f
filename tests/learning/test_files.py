from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import threading
import urllib.error
import zipfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import pytest

from flmarket.errors import ConfigError, DataUnavailable, InvalidInput
from flmarket.learning.data import files
from flmarket.learning.data.files import Locator, RemoteFile, Source, cache_directory, read_bytes

CONTENT = b"one,two\n" * 50
HOME = "https://example.org/"


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__MACOSX/._" + name, b"junk")
        archive.writestr("__MACOSX/" + name, b"junk")
        archive.writestr("folder/" + name, content)
    return buffer.getvalue()


class Web:
    """A pretended network that remembers what was asked for."""

    def __init__(self, **pages: bytes | Exception) -> None:
        self.pages = {HOME + name: page for name, page in pages.items()}
        self.asked: list[str] = []

    def __call__(self, url: str, timeout: float) -> AbstractContextManager[IO[bytes]]:
        assert timeout > 0
        self.asked.append(url)
        page = self.pages.get(url, urllib.error.URLError("no such host"))
        if isinstance(page, Exception):
            raise page
        return io.BytesIO(page)


def source(*names: str, content: bytes = CONTENT, suffix: str = "", stand_ins: tuple[str, ...] = ()) -> Source:
    digest = hashlib.sha256(content).hexdigest()
    return Source("toy", tuple(RemoteFile(n, digest, HOME + n + suffix) for n in names), stand_ins)


def cached() -> list[str]:
    return sorted(str(p.relative_to(cache_directory())) for p in cache_directory().rglob("*") if p.is_file())


def test_download_is_checked_cached_and_not_repeated() -> None:
    web = Web(a=CONTENT)
    path = Locator(opener=web).locate(source("a"))["a"]
    assert path.read_bytes() == CONTENT
    assert cached() == ["toy/a"]
    assert Locator(opener=web).locate(source("a"))["a"] == path
    assert len(web.asked) == 1


def test_what_is_hashed_and_kept_is_the_uncompressed_content() -> None:
    web = Web(**{"a.gz": gzip.compress(CONTENT)})
    assert Locator(opener=web).locate(source("a", suffix=".gz"))["a"].read_bytes() == CONTENT


def test_archives_in_archives() -> None:
    web = Web(**{"outer.zip": zipped("inner.zip", zipped("a", CONTENT))})
    digest = hashlib.sha256(CONTENT).hexdigest()
    nested = Source("toy", (RemoteFile("a", digest, HOME + "outer.zip", ("inner.zip", "a")),))
    assert Locator(opener=web).locate(nested)["a"].read_bytes() == CONTENT
    lost = Source("toy", (RemoteFile("b", digest, HOME + "outer.zip", ("inner.zip", "b")),))
    with pytest.raises(DataUnavailable, match="does not hold one b"):
        Locator(opener=web).locate(lost)


@pytest.mark.parametrize(
    ("page", "suffix", "reason"),
    [
        (CONTENT + b"x", "", "checksum"),
        (b"", "", "checksum"),
        (gzip.compress(CONTENT + b"x", mtime=0), ".gz", "checksum"),
        (gzip.compress(CONTENT, mtime=0)[:-9], ".gz", "failed"),
        (b"<html>moved</html>", ".gz", "failed"),
        (urllib.error.URLError("no route"), "", "no route"),
        (TimeoutError("timed out"), "", "timed out"),
        (urllib.error.HTTPError(HOME, 404, "gone", None, None), "", "404"),  # type: ignore[arg-type]
        (CONTENT * 1000, "", "more than"),
        (gzip.compress(CONTENT * 1000, mtime=0), ".gz", "more than"),
    ],
    ids=[
        "longer",
        "empty",
        "gzip longer",
        "gzip cut",
        "not gzip",
        "no route",
        "slow",
        "gone",
        "too large",
        "gzip too large",
    ],
)
def test_a_bad_download_is_refused_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, page: bytes | Exception, suffix: str, reason: str
) -> None:
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 100_000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    with pytest.raises(DataUnavailable) as caught:
        Locator(opener=Web(**{"a" + suffix: page})).locate(source("a", suffix=suffix))
    assert reason in str(caught.value)
    assert cached() == []


def test_a_write_that_fails_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(src: str, dst: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataUnavailable, match="disk full"):
        Locator(opener=Web(a=CONTENT)).locate(source("a"))
    assert cached() == []


def test_the_error_says_what_to_do_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailable) as caught:
        Locator(tmp_path, download=False, opener=Web(a=CONTENT)).locate(source("a", "b", stand_ins=("c.npz",)))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("a and b", "c.npz", str(tmp_path), "data_dir", "FLMARKET_DATA", str(cache_directory()), "off"):
        assert part in message


def test_an_interrupted_set_is_completed() -> None:
    web = Web(a=CONTENT)
    with pytest.raises(DataUnavailable):
        Locator(opener=web).locate(source("a", "b"))
    web.pages[HOME + "b"] = CONTENT
    assert set(Locator(opener=web).locate(source("a", "b"))) == {"a", "b"}
    assert web.asked == [HOME + "a", HOME + "b", HOME + "b"]


def test_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web(a=CONTENT)
    in_cache = Locator(opener=web).locate(source("a"))["a"]
    named, argument = tmp_path / "named", tmp_path / "argument"
    expected = [in_cache]
    monkeypatch.setenv("FLMARKET_DATA", str(named))
    for root, place in (
        (named, named / "a.gz"),
        (named, named / "toy" / "a"),
        (argument, argument / "a"),
        (argument, argument / "toy" / "a"),
    ):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(gzip.compress(b"own") if place.suffix else b"own")
        directory = argument if root is argument else None
        expected.append(place)
        found = Locator(directory, opener=web).locate(source("a"))["a"]
        assert found == place
        assert read_bytes(found) == b"own"  # a user's file is not compared with the checksum
    assert len(web.asked) == 1


def test_half_a_set_in_the_users_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT)
    with pytest.raises(DataUnavailable, match="has a but not b"):
        Locator(tmp_path, opener=Web(a=CONTENT, b=CONTENT)).locate(source("a", "b"))


def test_a_stand_in_serves_for_the_set(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"")
    assert Locator(tmp_path).locate(source("a", "b", stand_ins=("c",))) == {"c": tmp_path / "c"}


def test_directories_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match="data_dir"):
        Locator(tmp_path / "nowhere").locate(source("a"))
    monkeypatch.setenv("FLMARKET_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="FLMARKET_DATA"):
        Locator().locate(source("a"))


def test_the_cache_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLMARKET_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/flmarket")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "flmarket"


def test_a_broken_gzip_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT)[:-10])
    with pytest.raises(ConfigError, match="gzip"):
        read_bytes(tmp_path / "a.gz")


def test_over_real_http() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = gzip.compress(CONTENT) if self.path == "/a.gz" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        digest = hashlib.sha256(CONTENT).hexdigest()
        found = Locator().locate(Source("toy", (RemoteFile("a", digest, home + "a.gz"),)))
        assert found["a"].read_bytes() == CONTENT
        with pytest.raises(DataUnavailable, match="404"):
            Locator().locate(Source("toy", (RemoteFile("b", digest, home + "b.gz"),)))
        server.shutdown()
