"""Read a GGUF file into a Hugging Face folder of safetensors.

GGUF weights are quantised; here they are unpacked to float32, which makes the folder several times
larger than the file and lets every analysis see plain matrices. Not for running quantised: the
memory that quantisation saves is not saved here.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from mechtv.errors import InvalidInput
from mechtv.models.cache import Source, converted, file_sha256

logger = logging.getLogger(__name__)

MAGIC = b"GGUF"


def source_of(path: Path) -> Source:
    """The conversion source of a user's GGUF file, known by its contents.

    Raises:
        InvalidInput: There is no such file, or it is no GGUF file.
    """
    if not path.is_file():
        raise InvalidInput(f"There is no GGUF file {path}; check the path.")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidInput(f"{path} is no GGUF file: it does not begin with {MAGIC!r}.")
    return Source(
        name=path.stem,
        sha256=file_sha256(path),
        fetch=lambda scratch: path,
        remedy="it changed while it was being read; open it again",
    )


def converted_gguf(source: Source) -> Path:
    """The Hugging Face folder of a GGUF source, from the cache if it is there.

    Raises:
        InvalidInput: `transformers` cannot read the file, or it is not the file it should be.
    """
    return converted(source, write_model)


def write_model(file: Path, folder: Path) -> None:
    """Read a GGUF file and write its model and tokenizer as an ordinary Hugging Face folder.

    Raises:
        InvalidInput: `transformers` does not know the architecture, or weights are missing.
    """
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    load: Any = AutoModelForCausalLM.from_pretrained  # its annotations do not know the report
    try:
        with no_loading_bars(), _no_unpacking_bar():
            model, report = load(**where, dtype=torch.float32, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, NotImplementedError) as error:
        raise InvalidInput(f"transformers cannot read the GGUF file {file}: {error}") from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise InvalidInput(f"The GGUF file {file} lacks weights of its model, such as {missing}.")
    _forget_quantization(model)
    with no_loading_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    """Make the unpacked model one that `save_pretrained` writes as what it is now."""
    for holder in (model, model.config):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None
    model.config.architectures = [type(model).__name__]  # some GGUF files leave it empty


@contextmanager
def _no_unpacking_bar() -> Iterator[None]:
    """Hide the one bar of `transformers` that has no switch, while a GGUF file is unpacked."""
    original = modeling_gguf_pytorch_utils.__dict__.get("tqdm")
    setattr(modeling_gguf_pytorch_utils, "tqdm", lambda items, *args, **kwargs: items)  # noqa: B010
    try:
        yield
    finally:
        setattr(modeling_gguf_pytorch_utils, "tqdm", original)  # noqa: B010


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Hide the bars of `transformers` inside the block; the hub's download bars stay as set."""
    loading = transformers_logging.is_progress_bar_enabled()
    downloading = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # switches the hub's bars off as well
    if downloading:
        enable_progress_bars()
    try:
        yield
    finally:
        if loading:
            transformers_logging.enable_progress_bar()  # switches the hub's bars on as well
            if not downloading:
                disable_progress_bars()
