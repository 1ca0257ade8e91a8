"""Match the tokens of two vocabularies by the texts they stand for, whatever their spelling."""

import re
from collections import Counter
from collections.abc import Collection

from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.tasks.tokens import fragment_ids, tokenizer_of

BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # what stands for a byte that no other token covers
FRAGMENT = "\N{REPLACEMENT CHARACTER}"  # what part of a character decodes to


def token_texts(model: TransformerBridge) -> dict[str, int]:
    """The model's tokens by the text each stands for within a text, leading space included.

    Whatever marks a space in the tokenizer's own spelling (`Ġthe`, `▁the`), the key is `" the"`.
    Left out are special tokens, fragments of characters, and texts that several tokens stand for.
    """
    tokenizer = tokenizer_of(model)
    before = fragment_ids(model, "x")  # at the start of a text, some tokenizers drop a space
    start = len(tokenizer.decode(before, clean_up_tokenization_spaces=False))
    special = set(tokenizer.all_special_ids)
    ids = sorted(
        token
        for spelling, token in tokenizer.get_vocab().items()
        if token < model.cfg.d_vocab and token not in special and not BYTE.fullmatch(spelling)
    )
    texts = [
        tokenizer.decode([*before, token], clean_up_tokenization_spaces=False)[start:]
        for token in ids
    ]
    counts = Counter(texts)
    return {
        text: token
        for text, token in zip(texts, ids, strict=True)
        if text and counts[text] == 1 and FRAGMENT not in text
    }


def shared_tokens(
    first: TransformerBridge, second: TransformerBridge, only: Collection[str] | None = None
) -> tuple[list[int], list[int]]:
    """The ids of the tokens that both vocabularies have, in the first's and in the second's.

    Args:
        only: the texts to keep to, such as `" cat"`; all shared ones if None.

    Raises:
        InvalidInput: if one of `only` is not shared.
    """
    in_first, in_second = token_texts(first), token_texts(second)
    shared = [text for text in in_first if text in in_second]
    if only is not None:
        wanted = set(only)
        missing = sorted(wanted.difference(shared))
        if missing:
            raise InvalidInput(
                f"The tokens {missing[:5]!r} are not shared by the two vocabularies; leave them "
                "out."
            )
        shared = [text for text in shared if text in wanted]
    return [in_first[text] for text in shared], [in_second[text] for text in shared]
