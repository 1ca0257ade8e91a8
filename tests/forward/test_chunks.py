"""Where memory runs out, fewer rows run at once, a line says so, and the numbers are the same."""

import pytest
import torch
from evaluation.invented import task_of
from forward.engine import frozen_tiny

from mechtv.forward import forget, in_batches, last_logits, prefill, scan, variants
from mechtv.forward.chunks import in_chunks, is_out_of_memory
from mechtv.methods import learn, objectives
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Site, TaskVector


class Small:
    """A function that has room for so many rows."""

    def __init__(self, room, error=torch.OutOfMemoryError):
        self.room, self.error, self.sizes = room, error, []

    def __call__(self, rows):
        self.sizes.append(len(rows))
        if len(rows) > self.room:
            raise self.error("DefaultCPUAllocator: can't allocate memory: you tried to")
        return 2 * rows


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
def test_chunks_are_halved_from_where_memory_runs_out(error, caplog):
    compute = Small(3, error)
    found = list(in_chunks(torch.arange(11), 8, compute))
    assert torch.cat([rows for rows, _ in found]).tolist() == list(range(11))
    assert torch.cat([twice for _, twice in found]).tolist() == list(range(0, 22, 2))
    assert compute.sizes == [8, 4, 2, 2, 2, 2, 2, 1]
    assert [r.getMessage() for r in caplog.records if r.name == "mechtv.forward"] == [
        "Memory ran out for 8 rows at once; going on with 4.",
        "Memory ran out for 4 rows at once; going on with 2.",
    ]


def test_one_row_for_which_it_runs_out_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        list(in_chunks(torch.arange(4), 4, Small(0)))


def test_another_error_is_not_taken_for_it():
    def broken(rows):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        list(in_chunks(torch.arange(4), 4, broken))
    assert not is_out_of_memory(ValueError("out of memory"))


@pytest.fixture(scope="module")
def model():
    return frozen_tiny("llama")


@pytest.fixture(scope="module")
def prompts(model):
    return Prompts.of(model, task_of(), split="train")


def test_a_batch_that_does_not_fit_is_run_in_parts(model, prompts):
    whole = in_batches(prompts, lambda batch: last_logits(model, batch))

    def compute(batch):
        if len(batch) > 5:
            raise torch.OutOfMemoryError("out of memory")
        return last_logits(model, batch)

    torch.testing.assert_close(in_batches(prompts, compute), whole, atol=1e-10, rtol=0)


def vector(seed):
    value = torch.randn(32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    edit = Edit(site=Site(layer=1), operation=Add(value=value))
    return TaskVector(edits=(edit,), card=Card(method="test"))


def test_variants_and_prompts_that_do_not_fit_run_in_parts(model, prompts, monkeypatch, caplog):
    vectors = [vector(seed) for seed in range(5)]
    whole = scan(model, prompts, vectors)
    side_by_side, one_pass = variants._side_by_side, prefill._one_pass

    def few_variants(model, prefix, some, *rest):
        if len(some) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return side_by_side(model, prefix, some, *rest)

    def few_rows(model, suffix, layer):
        if len(suffix) > 7:
            raise torch.OutOfMemoryError("out of memory")
        return one_pass(model, suffix, layer)

    monkeypatch.setattr(variants, "_side_by_side", few_variants)
    monkeypatch.setattr(prefill, "_one_pass", few_rows)
    forget(model)
    torch.testing.assert_close(scan(model, prompts, vectors), whole, atol=1e-10, rtol=0)
    assert "Memory ran out for 5 rows at once; going on with 3." in caplog.text
    assert "Memory ran out for 24 rows at once; going on with 12." in caplog.text


def test_a_step_that_does_not_fit_has_the_same_gradient_in_parts(model, monkeypatch):
    options = {"layer": 1, "epochs": 2, "batch_size": 8, "progress": False}
    whole = learn(model, task_of(), **options)
    original = objectives.Answer.loss

    def loss(self, vector, rows):
        if len(rows) > 3:
            partly = original(self, vector, rows[:1]).sum()
            partly.backward(retain_graph=True)  # what a pass leaves behind that dies on its way
            raise torch.OutOfMemoryError("out of memory")
        return original(self, vector, rows)

    monkeypatch.setattr(objectives.Answer, "loss", loss)
    parts = learn(model, task_of(), **options)
    torch.testing.assert_close(parts.value(), whole.value(), atol=1e-8, rtol=0)
    assert not torch.equal(whole.value(), torch.zeros_like(whole.value()))
