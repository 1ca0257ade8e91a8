"""Load a model's tokenizer so that it does what it does by itself, and no more.

TransformerLens reopens every tokenizer with `add_bos_token=True`; prompts of models that know no
beginning-of-sequence token then get one. Here a tokenizer is loaded plainly and kept so.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mechtv.errors import InvalidInput
from mechtv.models import hub

Tokenizer = PreTrainedTokenizerBase | str | os.PathLike[str]

_REMEDY = "pass tokenizer=, a tokenizer or the folder of one."


def given_tokenizer(source: Tokenizer, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer that a user names: a copy of the object, or one loaded from folder or hub.

    Raises:
        InvalidInput: There is none in that place.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        return copy.deepcopy(source)  # the bridge adds a padding token; the user's stays as it is
    where = str(Path(source).expanduser())
    if not Path(where).exists():
        where, _ = hub.locate(os.fspath(source), None)
    return load_tokenizer(where, trust_remote_code=trust_remote_code)


def load_tokenizer(where: str, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id, with no option that makes it add tokens.

    Raises:
        InvalidInput: There is none in that place.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(where, **options)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"No tokenizer could be read from {where!r}; {_REMEDY}") from error
    return tokenizer


def tokenizer_of_loaded(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer from where a loaded model came from, if that is on this machine.

    Raises:
        InvalidInput: It is not, or the model does not say.
    """
    origin = getattr(model.config, "_name_or_path", "")
    if not origin:
        raise InvalidInput(f"The loaded {type(model).__name__} brings no tokenizer; {_REMEDY}")
    return load_tokenizer(origin, local_files_only=True)


@contextmanager
def kept_as_is(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Keep the bridge from reopening the tokenizer while it is being built.

    It leaves alone a tokenizer that says `add_bos_token` already. Saying so in `init_kwargs` has no
    other effect: those are only the notes of how the tokenizer was made.
    """
    before = tokenizer.init_kwargs
    notes = {"name_or_path": "", **before, "add_bos_token": True}  # unnamed: built in memory
    tokenizer.init_kwargs = notes
    try:
        yield
    finally:
        tokenizer.init_kwargs = before
