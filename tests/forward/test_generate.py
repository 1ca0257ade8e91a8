"""Greedy continuations of prompts, under a vector and without one."""

import pytest
import torch
from vectors.naive import IDS, additive, generate_by_hand, tiny_shared

from mechtv.forward.generate import greedy
from mechtv.tasks.prompts import Prompts


@pytest.mark.parametrize("acts_on", [None, "prompt", "new", "both"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "native"])
def test_prompts_are_continued_as_each_is_alone(family: str, acts_on: str | None) -> None:
    model = tiny_shared(family)
    vector = None if acts_on is None else additive(model, positions=(-3, -1), acts_on=acts_on)
    with torch.no_grad():
        wanted = [generate_by_hand(model, ids, vector, 3)[0] for ids in IDS]
    for side in ("left", "right"):
        prompts = Prompts.from_ids(model, IDS, padding_side=side)
        assert greedy(model, prompts, vector, new_tokens=3).tolist() == wanted


def test_generation_goes_on_behind_the_end_of_a_sequence() -> None:
    model = tiny_shared("llama")
    assert greedy(model, Prompts.from_ids(model, IDS), new_tokens=12).shape == (3, 12)
