"""Randomness that depends on a seed and on nothing else.

Every random choice draws from a generator made here, named after what it decides, so the global
random state is neither read nor changed and two choices never share a stream.
"""

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def _number(seed: int, purpose: str) -> int:
    digest = hashlib.sha256(f"{purpose}:{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def python_rng(seed: int, purpose: str) -> random.Random:
    """A `random.Random` for one purpose, the same on every platform."""
    return random.Random(_number(seed, purpose))


def torch_rng(seed: int, purpose: str) -> "torch.Generator":
    """A CPU `torch.Generator` for one purpose; draw on the CPU, then move, so devices agree."""
    import torch  # here, so that listing tasks does not wait for it

    return torch.Generator().manual_seed(_number(seed, purpose))
