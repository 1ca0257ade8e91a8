"""The layer-wise diagnostics, against states read prompt by prompt."""

import functools

import numpy as np
import pytest
import torch
from analysis.test_logit_lens import CLOSE, streams
from builders import N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import row_of
from methods.untouched import left_alone
from vectors.naive import additive, noise, vector_of

import mechtv
from mechtv.analysis.alignment import AnswerSpan, task_alignment
from mechtv.analysis.diagnostics import CHANGE, SIZE, STATE, diagnostics
from mechtv.analysis.logit_lens import logit_lens
from mechtv.errors import InvalidInput
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Site, TaskVector

N = 3


@functools.cache
def found(family, labels=LABELS):
    return diagnostics(model_of(family), task_of(labels), vectors_of(family), n=N)


@functools.cache
def vectors_of(family):
    """Given out of order; one written at the output of the block before."""
    model = model_of(family)
    value = noise(32, seed=5)
    post = vector_of(Edit(site=Site(layer=1, component="resid_post"), operation=Add(value=value)))
    return (post, additive(model, layer=0, seed=4))


def states(family, vector=None):
    model, prompts = model_of(family), Prompts.of(model_of(family), task_of(LABELS), n=N)
    rows = [torch.stack(streams(model, row_of(prompts, r), vector)) for r in range(N)]
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi", "qwen3"])
def test_alignments_and_sizes_are_those_of_single_passes(family) -> None:
    result, plain = found(family), states(family)
    span = AnswerSpan.of(model_of(family), task_of(LABELS))
    np.testing.assert_allclose(result.plain_state, span.alignment(plain), **CLOSE)
    centred = family in ("gpt2", "phi")
    for layer, vector in zip((2, 0), vectors_of(family), strict=True):
        under = states(family, vector)
        change = (under - plain)[layer:]
        before = plain[layer:]
        if centred:
            change = change - change.mean(dim=-1, keepdim=True)
            before = before - before.mean(dim=-1, keepdim=True)
        one = result[layer]
        np.testing.assert_allclose(one.state, span.alignment(under), **CLOSE)
        np.testing.assert_allclose(one.change, span.alignment(change), **CLOSE)
        sizes = change.norm(dim=-1) / before.norm(dim=-1)
        np.testing.assert_allclose(one.size, sizes, **CLOSE)
        assert one.size.min() > 1e-3
        assert len(one.change) == N_LAYERS + 1 - layer


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_change_begins_as_the_vector(family) -> None:
    model, result = model_of(family), found(family)
    assert result.layers == (0, 2)
    for layer, vector in zip((2, 0), vectors_of(family), strict=True):
        own = task_alignment(model, task_of(LABELS), {"theta": vector})["theta"]
        np.testing.assert_allclose(result[layer].change[0], own, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_with_labels_the_readings_are_those_of_the_lens(family) -> None:
    result = found(family)
    for layer, vector in zip((2, 0), vectors_of(family), strict=True):
        lens = logit_lens(model_of(family), task_of(LABELS), vector, n=N)
        for ours, theirs in ((result.plain, lens.plain), (result[layer].readings, lens.injected)):
            for name in ("log_probability", "logit_difference", "rank", "correct_label"):
                np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), **CLOSE)


def test_open_answers_have_the_same_rivals_under_every_vector() -> None:
    model, task = model_of("llama"), task_of()
    result = found("llama", None)
    prompts = Prompts.of(model, task, n=N)
    runs = [mechtv.forward.run(model, prompts, v)[:, 0].detach() for v in vectors_of("llama")]
    answers = prompts.first_answer_tokens
    wrong = ((runs[0] + runs[1]) / 2).scatter(1, answers[:, None], -torch.inf).argmax(dim=1)
    row = torch.arange(N)
    for layer, logits in zip((2, 0), runs, strict=True):
        wanted = logits[row, answers] - logits[row, wrong]
        np.testing.assert_allclose(result[layer].readings.logit_difference[-1], wanted, **CLOSE)
    plain = mechtv.forward.run(model, prompts)[:, 0].detach()
    wanted = plain[row, answers] - plain[row, wrong]
    np.testing.assert_allclose(result.plain.logit_difference[-1], wanted, **CLOSE)


def test_the_table_has_every_run_layer_score_and_depth_once() -> None:
    result = found("llama")
    table = result.table()
    assert not table.duplicated(["run", "layer", "score", "depth"]).any()
    assert (table["n"] == N).all()
    assert (table["low"] <= table["high"]).all()
    assert set(table["run"]) == {"plain", "injected", "change"}
    depths = table.query("run == 'change' and layer == 2 and score == @SIZE")["depth"].tolist()
    assert depths == [2, 3]
    shown = table.query("run == 'injected' and layer == 0 and score == @STATE")
    np.testing.assert_allclose(shown["value"], result[0].state.mean(axis=1), **CLOSE)
    assert table["weights"].unique().tolist() == ["raw"]


def test_vectors_may_be_given_by_layer_and_the_seed_is_theirs() -> None:
    model = tiny("llama")
    card = mechtv.Card(method="made", seed=5)
    by_layer = {
        layer: TaskVector(edits=additive(model, layer=layer).edits, card=card) for layer in (2, 1)
    }
    with left_alone(model):
        result = diagnostics(model, task_of(LABELS), by_layer, n=N)
    assert result.layers == (1, 2)
    assert result.queries == tuple(e.key for e in task_of(LABELS).split("test", n=N, seed=5))
    assert result.provenance.seed == 5
    assert {change.setting for change in result.changes} == {"made"}


def test_answers_that_span_everything_have_no_alignment() -> None:
    model = tiny("llama", hidden_size=8)
    edit = Edit(site=Site(layer=1), operation=Add(value=noise(8)))
    result = diagnostics(model, task_of(), [vector_of(edit)], n=N)
    assert not {STATE, CHANGE} & set(result.table()["score"])
    assert SIZE in set(result.table()["score"])
    some = diagnostics(model, task_of(), [vector_of(edit)], n=N, dimensions=2)
    assert {STATE, CHANGE} <= set(some.table()["score"])


@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_one_sentence() -> None:
    model, task = model_of("llama"), task_of(LABELS)
    one = additive(model, layer=1)
    with pytest.raises(InvalidInput, match="There are no vectors to diagnose"):
        diagnostics(model, task, [])
    with pytest.raises(InvalidInput, match="Two vectors are added at layer 1; give one for each"):
        diagnostics(model, task, [one, additive(model, layer=0, component="resid_post")])
    with pytest.raises(InvalidInput, match="vector under 2 is added at layer 1; give it under 1"):
        diagnostics(model, task, {2: one})
    with pytest.raises(InvalidInput, match="one value added to the residual stream"):
        diagnostics(model, task, [additive(model, layer=1, positions=(-2, -1))])
