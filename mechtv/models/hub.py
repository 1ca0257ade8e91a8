"""Find a model of the Hugging Face hub: online if the hub answers, else among the downloads.

Left to themselves, `transformers` and the hub's client retry every file for twenty seconds when
there is no network. Here the hub is asked once; without an answer the downloaded copy is opened as
the local folder it is. It downloads nothing itself: `transformers` does, with its own bars.
"""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
)

from mechtv.errors import InvalidInput

# The base of every error of the HTTP library, whichever one the installed hub client uses.
_HTTPError = HfHubHTTPError.__bases__[0]
_TIMEOUT = 10.0  # seconds


def locate(name: str, revision: str | None) -> tuple[str, str]:
    """Say from where to load a hub model, and which commit that is.

    Args:
        name: A hub id, "org/name".
        revision: A branch, tag or commit; None is the default branch.

    Returns:
        The hub id itself, or the folder of the downloaded copy if the hub does not answer; and the
        commit's hash.

    Raises:
        InvalidInput: The hub has no such model or does not answer, and there is no downloaded copy.
    """
    try:
        return name, HfApi().model_info(name, revision=revision, timeout=_TIMEOUT).sha or "unknown"
    except (_HTTPError, OSError, HFValidationError) as error:  # type: ignore[misc]
        cause = error
    try:
        folder = snapshot_download(name, revision=revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        raise InvalidInput(_sentence(name, revision, cause)) from cause
    return folder, Path(folder).name


def _sentence(name: str, revision: str | None, cause: Exception) -> str:
    at = f" at revision {revision!r}" if revision else ""
    why = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return (
        f"The hub model {name!r}{at} is neither in the local hub cache nor to be had from the hub "
        f"({why}); without a network, open a bundled name (mechtv.list_models()), a local folder, "
        "a GGUF file, or a hub model that was downloaded before."
    )
