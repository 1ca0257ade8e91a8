"""Seconds are medians over whole batches; memory holds at least the logits."""

import sys

import numpy as np
import pytest
import torch
from builders import tiny
from evaluation.invented import task_of
from methods.plain import model_of

from mechtv.methods import cost
from mechtv.methods.cost import costs_of, mean_length, peak_bytes
from mechtv.tasks.prompts import Prompts


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sizes are read from Linux")
def test_a_pass_takes_at_least_its_logits_in_memory():
    model = tiny("llama", torch.float32, max_position_embeddings=512)
    ids = [[5 + i % 7] * 400 for i in range(16)]
    prompts = Prompts.from_ids(model, ids)

    def compute(batch):
        with torch.no_grad():
            return model(batch.tokens)[:, -1]

    size = 16 * 400 * model.cfg.d_vocab * 4
    whole = peak_bytes(compute, prompts)
    assert size < whole < 40 * size
    assert peak_bytes(compute, prompts.select([0])) < whole / 3


def test_times_are_medians_over_whole_batches(monkeypatch):
    model, task = model_of(), task_of()
    prompts = Prompts.of(model, task, split="train", n=10)
    seen = []

    def compute(batch):
        seen.append(len(batch))
        return torch.zeros(len(batch), 3)

    clock = iter(np.cumsum([0, 3, 1, 30, 1, 6, 1, 30, 1, 900, 1, 30]).tolist())
    monkeypatch.setattr(cost.time, "perf_counter", lambda: float(next(clock)))
    costs = costs_of(compute, prompts, compute, prompts, batch_size=3)
    assert set(seen) == {3}
    assert costs["seconds_per_query"] == 2
    assert costs["seconds_plain"] == 10
    assert costs["batch_size"] == 3


def test_fewer_queries_than_a_batch_are_timed_together():
    prompts = Prompts.of(model_of(), task_of(), n=3)
    seen = []

    def compute(batch):
        seen.append(len(batch))
        return torch.zeros(len(batch), 3)

    costs_of(compute, prompts, compute, prompts, batch_size=5)
    assert set(seen) == {3}


def test_where_sizes_cannot_be_read_there_is_none(monkeypatch):
    prompts = Prompts.of(model_of(), task_of(), n=2)

    def refused(*args):
        raise PermissionError

    monkeypatch.setattr(cost.Path, "write_text", refused)
    assert peak_bytes(lambda batch: torch.zeros(len(batch), 3), prompts) is None
    monkeypatch.setattr(cost.sys, "platform", "darwin")
    assert peak_bytes(lambda batch: torch.zeros(len(batch), 3), prompts) is None


def test_the_mean_length_is_that_of_the_tokens():
    prompts = Prompts.from_ids(model_of(), [[5], [5, 6, 7, 8]])
    assert mean_length(prompts) == 2.5
