"""What the tests of the suffix engine share: passes in parts, known to be in parts."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from builders import tiny
from transformer_lens.model_bridge import TransformerBridge

from mechtv.forward.memory import _FULL, Memory, memory_of


def frozen_tiny(family: str, **overrides: object) -> TransformerBridge:
    """A tiny model of one's own, its weights out of the graph (else gradients need full passes)."""
    model = tiny(family, **overrides)  # type: ignore[arg-type]
    for weight in model.original_model.parameters():
        weight.requires_grad_(False)
    return model


@contextmanager
def all_cut(monkeypatch: pytest.MonkeyPatch, expected: bool = True) -> Iterator[None]:
    """Check that every pass inside the block that is not told to be full is cut (or none is)."""
    with counted(monkeypatch) as passes:
        yield
    assert passes.cut + passes.full > 0
    assert not (passes.full if expected else passes.cut)


class Passes:
    """How many passes were cut to a rectangle, how many ran in full."""

    def __init__(self) -> None:
        self.cut = self.full = 0


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    """Count the passes inside the block."""
    passes, original = Passes(), Memory.cut

    def cut(self: Memory, *args: object, **kwargs: object) -> object:
        found = original(self, *args, **kwargs)  # type: ignore[arg-type]
        if not _FULL.get():
            passes.cut += found is not None
            passes.full += found is None
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "cut", cut)
        yield passes


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the engine's log says."""
    return [r.getMessage() for r in caplog.records if r.name == "mechtv.forward"]


def kept_bytes(model: TransformerBridge) -> int:
    """How much is kept of a model's prompts between passes."""
    return memory_of(model).nbytes
