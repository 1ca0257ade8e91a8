"""Files that are whole or not there: written under a temporary name, then renamed."""

import os
import uuid
from pathlib import Path

from mechtv.errors import InvalidInput


def write_whole(path: str | Path, content: bytes) -> Path:
    """Write `content` to `path` so that no reader ever sees a part of it.

    Raises:
        InvalidInput: if the folder does not exist or cannot be written.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InvalidInput(f"There is no folder {str(path.parent)!r} to write {path.name!r} into.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return path
