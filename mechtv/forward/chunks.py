"""Rows a chunk at a time, in smaller chunks where memory runs out: on a GPU, or on the CPU."""

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

logger = logging.getLogger("mechtv.forward")

Found = TypeVar("Found")

_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def in_chunks(
    rows: Int[Tensor, " row"], size: int, compute: Callable[[Int[Tensor, " some"]], Found]
) -> Iterator[tuple[Int[Tensor, " some"], Found]]:
    """What `compute` gives for chunks of at most `size` rows, in order.

    A chunk for which memory runs out is halved, and so are those behind it; a line in the log says
    so. One row for which it runs out is an error as ever.
    """
    chunks = deque(rows.split(size))
    while chunks:
        some = chunks.popleft()
        try:
            found = compute(some)
        except (RuntimeError, MemoryError) as error:
            if len(some) < 2 or not is_out_of_memory(error):
                raise
            size = (len(some) + 1) // 2
        else:
            yield some, found
            del found  # not beside the next chunk's
            continue
        logger.warning("Memory ran out for %d rows at once; going on with %d.", len(some), size)
        chunks = deque(torch.cat([some, *chunks]).split(size))
        _release()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on whatever device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAYINGS)


def lost_device(error: BaseException) -> bool:
    """Whether this process can use its GPU no more, as after some of CUDA's errors."""
    if "CUDA" not in str(error) or is_out_of_memory(error):
        return False
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError as again:
        return not is_out_of_memory(again)
    return False


def _release() -> None:
    """Give back what the failed pass held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
