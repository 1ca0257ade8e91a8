"""Text to token ids, the way the model wants them: one BOS or none, answers as continuations.

An answer is tokenized behind the literal text that precedes it in the template, so " jumped" is
what the model would have to produce, whatever the tokenizer does with leading spaces.
"""

from bisect import bisect_left
from typing import Any

from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput


def tokenizer_of(model: TransformerBridge) -> Any:
    """The model's tokenizer.

    Raises:
        InvalidInput: if it has none.
    """
    if model.tokenizer is None:
        raise InvalidInput(
            "This model has no tokenizer; open it with open_model(..., tokenizer=...)."
        )
    return model.tokenizer


def fragment_ids(model: TransformerBridge, text: str) -> list[int]:
    """The ids of a piece of text, without BOS."""
    ids: list[int] = tokenizer_of(model)(text, add_special_tokens=False)["input_ids"]
    return ids


def bos_ids(model: TransformerBridge) -> list[int]:
    """What stands before every prompt: one BOS id, or nothing."""
    bos = tokenizer_of(model).bos_token_id
    return [bos] if model.cfg.default_prepend_bos and bos is not None else []


def prompt_ids(model: TransformerBridge, text: str) -> list[int]:
    """The ids of a prompt, with exactly as many BOS as the model wants."""
    ids = fragment_ids(model, text)
    bos = bos_ids(model)
    ids = ids if bos and ids[:1] == bos else bos + ids
    if not ids:
        raise InvalidInput(f"The prompt {text!r} has no tokens; every prompt needs at least one.")
    return ids


def continuation_ids(model: TransformerBridge, anchor: str, text: str) -> tuple[int, ...]:
    """The ids of `text` where it follows `anchor`.

    Raises:
        InvalidInput: if the text is empty.
    """
    anchor = anchor or "x"  # some word: at the start of a text, some tokenizers add a space
    before, whole = fragment_ids(model, anchor), fragment_ids(model, anchor + text)
    splits_cleanly = whole[: len(before)] == before
    ids = whole[len(before) :] if splits_cleanly else fragment_ids(model, text)
    if not text.strip() or not ids:
        raise InvalidInput(f"The answer {text!r} is empty; give every example a non-empty answer.")
    return tuple(ids)


def token_of_characters(model: TransformerBridge, text: str, ends: list[int]) -> list[int]:
    """For each character offset, the column of the token that holds the last character before it.

    Columns count the prompt's own tokens, BOS included.
    """
    tokenizer = tokenizer_of(model)
    shift = len(prompt_ids(model, text)) - len(fragment_ids(model, text))
    if not tokenizer.is_fast:
        ids = fragment_ids(model, text)
        return [shift + _token_without_offsets(model, ids, text[:end]) for end in ends]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    token_starts = [start for start, _ in offsets]
    return [shift + bisect_left(token_starts, end) - 1 for end in ends]


def _token_without_offsets(model: TransformerBridge, ids: list[int], before: str) -> int:
    """Which of the ids holds the last character of `before`, with which their text begins."""
    own = fragment_ids(model, before)
    if ids[: len(own)] == own:
        return len(own) - 1
    decode = tokenizer_of(model).decode  # "\n\n" may be one token at the end of a text only
    n_characters = len(decode(own))
    lengths = (len(decode(ids[: count + 1]).rstrip("\ufffd")) for count in range(len(ids)))
    return next(i for i, length in enumerate(lengths) if length >= n_characters)
