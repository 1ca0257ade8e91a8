"""Convert a file once, keep the result, and trust it only as far as its checksums go.

Reading a GGUF file takes `transformers` many seconds, reading safetensors takes it one. `converted`
keeps the safetensors copy in a folder that several processes may share: one of them converts under
a lock, the others wait. A conversion is written beside its place and moved there when complete, so
a process that is killed leaves nothing that could be taken for a model. Not for downloads: the hub
has its own cache.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from mechtv.errors import InvalidInput

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "MECHTV_CACHE"
MANIFEST = "mechtv.json"
FORMAT = 1  # raise it when what a conversion writes changes: older copies are then made anew

Writer = Callable[[Path, Path], None]
"""Reads the source file (first) and writes the model's files into a folder (second)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file to be converted.

    Attributes:
        name: What the copy is called in the cache and in log lines.
        sha256: The checksum that the file must have, 64 hexadecimal digits.
        fetch: Gives the file's path; may use the scratch folder it is handed to put it together.
        remedy: What to do if the file is not the right one, a sentence without its full stop.
    """

    name: str
    sha256: str
    fetch: Callable[[Path], Path]
    remedy: str


def cache_folder() -> Path:
    """The folder of converted models: $MECHTV_CACHE, or the user's cache folder for mechtv."""
    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("mechtv")).expanduser() / "models"


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted(source: Source, write: Writer) -> Path:
    """Return the folder that holds the converted source, converting it if there is no sound copy.

    Args:
        source: The file, with its checksum.
        write: Does the conversion; called at most once.

    Raises:
        InvalidInput: The source has another checksum, or the cache folder cannot be written.
    """
    folder = cache_folder() / f"{source.name}-{source.sha256[:16]}"
    if _fault(folder, source) is None:
        return folder
    with _lock(folder):
        fault = _fault(folder, source)  # another process may have converted while this one waited
        if fault is not None:
            level = logging.WARNING if folder.exists() else logging.INFO
            logger.log(level, "%s: %s; converting %s (once)", folder, fault, source.name)
            _convert(source, folder, write)
    return folder


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of one converted model; the system frees it if the process is killed."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for another process that is converting %s", folder.name)
            lock.acquire()
    except OSError as error:
        raise InvalidInput(
            f"The cache folder {folder.parent} cannot be written ({error.strerror or error}); "
            f"set {CACHE_VARIABLE} to a folder that can."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _convert(source: Source, folder: Path, write: Writer) -> None:
    prefix = f".tmp-{folder.name}-"
    for leftover in folder.parent.iterdir():  # of a killed process: whoever lives holds the lock
        if leftover.name.startswith(prefix):
            shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        file = source.fetch(scratch)
        _check_source(file, source)
        staged = scratch / "model"
        staged.mkdir()
        write(file, staged)
        _write_manifest(staged, source)
        if folder.exists():
            os.replace(folder, scratch / "damaged")
        os.replace(staged, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_source(file: Path, source: Source) -> None:
    found = file_sha256(file)
    if found != source.sha256:
        raise InvalidInput(
            f"{file} is not the file that {source.name!r} needs: its sha256 is {found}, it should "
            f"be {source.sha256}; {source.remedy}."
        )


def _write_manifest(folder: Path, source: Source) -> None:
    manifest = {
        "format": FORMAT,
        "source": source.name,
        "source_sha256": source.sha256,
        "files": {
            str(path.relative_to(folder)): {
                "bytes": path.stat().st_size,
                "sha256": file_sha256(path),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
        "versions": _versions("mechtv", "torch", "transformers", "safetensors", "gguf"),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _versions(*packages: str) -> dict[str, str | None]:
    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {package: installed(package) for package in packages}


def _fault(folder: Path, source: Source) -> str | None:
    """What is wrong with a converted copy, or None if it is sound."""
    if not folder.is_dir():
        return "there is no converted copy yet"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["source_sha256"] != source.sha256:
            return "the copy was made from another file or by another version of mechtv"
        faults = (_file_fault(folder / name, wanted) for name, wanted in manifest["files"].items())
        return next((fault for fault in faults if fault is not None), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"the copy's manifest cannot be read ({error})"


def _file_fault(path: Path, wanted: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != wanted["bytes"]:
        return f"{path.name} has {path.stat().st_size:,} bytes instead of {wanted['bytes']:,}"
    if file_sha256(path) != wanted["sha256"]:
        return f"{path.name} is damaged (its sha256 has changed)"
    return None
