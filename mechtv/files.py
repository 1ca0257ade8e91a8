"""Files that are whole or not there: written under a temporary name, then put in their place."""

import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mechtv.errors import CannotWrite

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EOPNOTSUPP}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}  # of folders, in some file systems
_TEMPORARY = re.compile(r"\.[0-9a-f]{32}$")


def made_folder(path: str | Path) -> Path:
    """A folder, made if need be with those that hold it.

    Raises:
        CannotWrite: if it cannot be made.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotWrite(f"The folder {str(path)!r} cannot be made: {error.strerror}.") from error
    return path


def write_whole(path: str | Path, content: bytes) -> Path:
    """Write `content` to `path` so that no reader ever sees a part of it.

    Raises:
        CannotWrite: if the folder does not exist or cannot be written, or the disk is full.
    """
    path = Path(path)
    with _written(path, content) as temporary:
        os.replace(temporary, path)
    return path


def write_once(path: str | Path, content: bytes) -> bool:
    """As `write_whole`, but a file that is there already stays; then False is returned.

    Of several writers at once the first wins. What was written outlives a loss of power. Where a
    file system has no hard links the last one wins.

    Raises:
        CannotWrite: if the folder does not exist or cannot be written, or the disk is full.
    """
    path = Path(path)
    with _written(path, content, lasting=True) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(temporary, path)
        _keep_entry(path.parent)
    return True


def remove(path: str | Path) -> None:
    """Remove a file; it may be gone already.

    Raises:
        CannotWrite: if it cannot be removed.
    """
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise CannotWrite(f"{str(path)!r} cannot be removed: {error.strerror}.") from error


def sweep(folder: str | Path, *, seconds: float = 3600.0) -> None:
    """Remove what writers that were killed so long ago left in a folder.

    Raises:
        CannotWrite: if it cannot be removed.
    """
    for path in Path(folder).glob(".*"):
        with suppress(FileNotFoundError):  # its writer lives, and has finished
            if _TEMPORARY.search(path.name) and time.time() - path.stat().st_mtime > seconds:
                remove(path)


@contextmanager
def _written(path: Path, content: bytes, *, lasting: bool = False) -> Iterator[Path]:
    """The content in a file beside `path`, which is gone afterwards."""
    if not path.parent.is_dir():
        raise CannotWrite(f"There is no folder {str(path.parent)!r} to write {path.name!r} into.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        if lasting:
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        yield temporary
    except OSError as error:
        raise CannotWrite(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)


def _keep_entry(folder: Path) -> None:
    """Let a new file's place in its folder outlive a loss of power, where folders can be opened."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in _NO_SYNC:
                raise
        finally:
            os.close(number)
