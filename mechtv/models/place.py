"""Find where a named model's files are, and which version of the model they are.

A name is looked up in this order: bundled names, what exists on this machine, the hub. GGUF files
are converted on the way, so what comes out is always a Hugging Face folder or a hub id. Loads no
weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from huggingface_hub import hf_hub_download

from mechtv.errors import InvalidInput, UnknownName
from mechtv.models import hub
from mechtv.models.bundled import BUNDLED
from mechtv.models.card import UNKNOWN
from mechtv.models.gguf import converted_gguf, source_of

_LONGEST = 200  # characters of another library's message


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model's files are.

    Attributes:
        path: A folder or a hub id.
        revision: The version found: a hub commit, the sha256 of a GGUF file, or "unknown".
        hub_revision: The version to ask the hub for, where `path` is a hub id.
    """

    path: str
    revision: str = UNKNOWN
    hub_revision: str | None = None


def find(name: str, revision: str | None = None, gguf_file: str | None = None) -> Place:
    """Find a bundled name, a hub id, a local folder or a GGUF file.

    Args:
        name: As given to `open_model`.
        revision: Branch, tag or commit; for hub ids only.
        gguf_file: A GGUF file inside the folder or hub model.

    Raises:
        UnknownName: A short name that is not bundled.
        InvalidInput: Nothing is there, or the arguments do not go with this kind of name.
    """
    path = Path(name).expanduser()
    on_hub = name not in BUNDLED and not path.exists() and _is_hub_id(name)
    if on_hub:
        return _on_hub(name, revision, gguf_file)
    if revision is not None:
        raise InvalidInput(
            f"revision={revision!r} is for hub models, and {name!r} is none: leave it out."
        )
    if gguf_file is not None:
        if name in BUNDLED or not path.is_dir():
            raise InvalidInput(f"gguf_file={gguf_file!r} needs a folder or a hub id, got {name!r}.")
        return _in_gguf(path / gguf_file)
    if name in BUNDLED:
        source = BUNDLED[name]
        return Place(path=str(converted_gguf(source)), revision=source.sha256)
    return _here(name, path)


def _here(name: str, path: Path) -> Place:
    """A folder or a file of this machine."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidInput(
                f"The folder {path} has no config.json; give a folder that `save_pretrained` "
                "wrote, or the path of a GGUF file."
            )
        return Place(path=str(path), revision=_snapshot_commit(path))
    if path.is_file() or path.suffix.lower() == ".gguf":
        return _in_gguf(path)
    if Path(name).name == name:
        hint = "A hub id (org/name), a local folder or the path of a GGUF file can be opened too."
        raise UnknownName("bundled model", name, BUNDLED, hint)
    raise InvalidInput(f"There is no folder or file {path}; give a path that exists or a hub id.")


def _is_hub_id(name: str) -> bool:
    organisation, _, rest = name.partition("/")
    plain = bool(organisation and rest) and "/" not in rest
    return plain and organisation[0] not in ".~" and not name.lower().endswith(".gguf")


def _on_hub(name: str, revision: str | None, gguf_file: str | None) -> Place:
    path, commit = hub.locate(name, revision)
    online = path == name
    if gguf_file is None:
        return Place(path=path, revision=commit, hub_revision=revision if online else None)
    if not online:
        return _in_gguf(Path(path) / gguf_file)
    with readable(name):
        file = Path(hf_hub_download(name, gguf_file, revision=revision))
    return _in_gguf(file)


def _in_gguf(path: Path) -> Place:
    source = source_of(path)
    return Place(path=str(converted_gguf(source)), revision=source.sha256)


def _snapshot_commit(folder: Path) -> str:
    """The commit of a folder in the hub's cache (…/snapshots/<commit>); other folders have none."""
    folder = folder.resolve()
    return folder.name if folder.parent.name == "snapshots" else UNKNOWN


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turn the errors of files that are missing or of an unknown kind into one sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        why = shorten(why, width=_LONGEST, placeholder=" …")  # some list every known architecture
        raise InvalidInput(f"The model {name!r} cannot be opened: {why}") from error
