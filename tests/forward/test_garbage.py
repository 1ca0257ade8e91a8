"""What a pass made goes when the pass is over; nothing big waits for the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from builders import FAMILIES
from forward.engine import frozen_tiny
from vectors.naive import additive, random_ids

from mechtv.forward import capture, forget, last_logits, scan
from mechtv.forward.chunks import in_chunks
from mechtv.methods.objectives import Answer
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Site


@contextmanager
def tidy() -> Iterator[None]:
    """Check that no tensor is left over that only the garbage collector finds."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [one for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left, f"{len(left)} tensors are left over"


@pytest.mark.parametrize("family", FAMILIES)
def test_passes_leave_no_tensors_behind(family: str) -> None:
    model = frozen_tiny(family)
    ids = [random_ids(length, seed) for seed, length in enumerate((9, 6, 8))]
    prompts = Prompts.from_ids(model, ids, answers=((5,), (6,), (7,)))
    vectors = [additive(model, layer=layer, seed=layer) for layer in (1, 2)]

    def passes() -> None:
        with torch.no_grad():
            last_logits(model, prompts, vectors[0])
            capture(model, prompts, [Site(layer=1)])
            scan(model, prompts, vectors, show=False)
        forget(model)

    passes()  # what the first ones leave behind stays
    with tidy():
        passes()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_learning_step_leaves_no_tensors_behind(family: str) -> None:
    model = frozen_tiny(family)
    prompts = Prompts.from_ids(
        model, [random_ids(9, seed) for seed in range(4)], answers=((5,), (6,), (7,), (8,))
    )

    def step() -> None:
        vector = additive(model, layer=2, seed=0)
        vector.value().requires_grad_()
        objective = Answer(model, prompts)
        with objective.prepared(vector, False):
            objective.loss(vector, torch.arange(4)).mean().backward()
        forget(model)

    step()
    with tidy():
        step()


def test_a_chunk_is_gone_before_the_next_is_made() -> None:
    class Found:
        alive = 0

        def __init__(self) -> None:
            Found.alive += 1

        def __del__(self) -> None:
            Found.alive -= 1

    def compute(rows: torch.Tensor) -> Found:
        assert Found.alive == 0
        return Found()

    n = 0
    for _, found in in_chunks(torch.arange(6), 2, compute):
        n += 1
        del found
    assert n == 3
