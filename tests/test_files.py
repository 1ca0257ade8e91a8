"""Files are whole or not there, whatever goes wrong."""

import errno
import os

import pytest

from mechtv.errors import CannotWrite
from mechtv.files import remove, sweep, write_once, write_whole


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def test_the_last_writer_of_a_whole_file_wins_and_the_first_of_one_written_once(tmp_path):
    assert write_whole(tmp_path / "a", b"1") == tmp_path / "a"
    write_whole(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2"
    assert write_once(tmp_path / "b", b"1")
    assert not write_once(tmp_path / "b", b"2")
    assert (tmp_path / "b").read_bytes() == b"1"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


@pytest.mark.parametrize(
    ("function", "broken"), [(write_whole, "replace"), (write_once, "link"), (write_once, "fsync")]
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, monkeypatch, function, broken):
    monkeypatch.setattr(os, broken, failing(errno.ENOSPC))
    with pytest.raises(CannotWrite, match=r"cannot be written: No space left on device\."):
        function(tmp_path / "a", b"1")
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_swept_and_nothing_else(tmp_path):
    left, new, other = (tmp_path / name for name in (f".a.{'0' * 32}", f".b.{'1' * 32}", ".c.d"))
    for path in (left, new, other):
        path.touch()
    os.utime(left, (1, 1))
    os.utime(other, (1, 1))
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {new, other}


def test_what_cannot_be_removed_is_one_sentence(tmp_path):
    remove(tmp_path / "gone")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CannotWrite, match="cannot be removed: Is a directory"):
        remove(tmp_path / "folder")


def test_without_hard_links_a_file_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    assert write_once(tmp_path / "a", b"1")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"1"]


@pytest.mark.parametrize("function", [write_whole, write_once])
def test_a_folder_that_is_not_there_is_one_sentence(tmp_path, function):
    with pytest.raises(CannotWrite, match=r"There is no folder .* to write 'a' into"):
        function(tmp_path / "none" / "a", b"1")
