"""Answers of states, a few queries at a time, against those of all at once."""

import sys

import numpy as np
import pytest
import torch
from evaluation.invented import LABELS, model_of, task_of
from vectors.naive import additive

from mechtv.analysis import final_states, fit_propagation, linearity
from mechtv.analysis.answers import Answers
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts

N = 8


@pytest.fixture
def sizes(monkeypatch):
    """Three queries at a time; how many each call of the unembedding had."""
    seen, plain = [], final_states.lens_logits

    def spy(model, states):
        seen.append(len(states))
        return plain(model, states)

    monkeypatch.setattr(final_states, "ROWS", 3)
    monkeypatch.setattr(sys.modules["mechtv.analysis.logit_lens"], "ROWS", 3)
    monkeypatch.setattr(final_states, "lens_logits", spy)
    return seen


@pytest.mark.parametrize("labels", [None, LABELS])
@pytest.mark.parametrize("given", [True, False])
def test_they_are_those_of_all_queries_at_once(labels, given, sizes) -> None:
    model = model_of()
    prompts = Prompts.of(model, task_of(labels), split="test", n=N, seed=0)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(N, model.cfg.d_model, generator=generator, dtype=torch.float64)
    against = torch.arange(2 * N).reshape(N, 2) if given else None
    found = final_states.answers_of(model, states, prompts, against).scores()
    logits = unembedded(model, states[None])[0].detach()
    wanted = Answers.of(logits, prompts, against).scores()
    assert sizes == [3, 3, 2]
    assert found.keys() == wanted.keys()
    for score, values in wanted.items():
        np.testing.assert_allclose(found[score], values, rtol=1e-12)


@pytest.mark.parametrize("analyse", [linearity, fit_propagation])
def test_analyses_give_the_same_in_parts(analyse, request) -> None:
    options = {"n_null": 1, "nodes": 2} if analyse is linearity else {"n_held_out": 4, "n": 2}
    vector = additive(model_of(), layer=1)
    whole = analyse(model_of(), task_of(LABELS), vector, **options).table()
    sizes = request.getfixturevalue("sizes")
    parts = analyse(model_of(), task_of(LABELS), vector, **options).table()
    assert max(sizes) == 3
    columns = ["value", "low", "high"]
    np.testing.assert_allclose(parts[columns], whole[columns], rtol=1e-9, atol=1e-12)
    assert parts.drop(columns=columns).equals(whole.drop(columns=columns))
