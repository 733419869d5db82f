"""Files are written whole or not at all."""

import os

import pytest

from flmarket.files import whole_file, write_file, write_files


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_whole_or_as_before(tmp_path, sync):
    path = tmp_path / "state.json"
    write_file(path, "old", sync=sync)
    with pytest.raises(ZeroDivisionError), whole_file(path, sync=sync) as file:
        file.write(b"half" * (file.write(b"half") // 0))
    assert path.read_text() == "old"
    write_file(path, b"new", sync=sync)
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["state.json"]


def test_several_files_appear_together(tmp_path):
    write_files(tmp_path / "out", {"a": "1", "b": b"2"})
    with pytest.raises(FileNotFoundError):
        write_files(tmp_path / "out", {"a": "3", "no/such/folder": "4"})
    assert {name: (tmp_path / "out" / name).read_text() for name in os.listdir(tmp_path / "out")} == {
        "a": "1",
        "b": "2",
    }


def test_a_private_file_is_private_under_any_umask_and_follows_no_link(tmp_path):
    before = os.umask(0)
    try:
        write_file(tmp_path / "key", "secret", private=True)
        write_file(tmp_path / "open", "shown")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o666
    (tmp_path / "link").symlink_to(tmp_path / "open")
    write_file(tmp_path / "link", "other")
    assert (tmp_path / "open").read_text() == "shown"
    assert not (tmp_path / "link").is_symlink()
