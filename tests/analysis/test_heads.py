"""Saliency and ablation of heads, one prompt at a time with plain hooks, against the ranking."""

import functools

import numpy as np
import pytest
import torch
from builders import N_HEADS, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits, row_of
from methods.untouched import left_alone
from scipy import stats
from vectors.naive import additive

import mechtv
from mechtv.analysis.heads import HeadRanking, rank_heads
from mechtv.errors import InvalidInput
from mechtv.evaluation import intervals
from mechtv.evaluation.provenance import Provenance
from mechtv.methods import extract_hidden_state
from mechtv.tasks.prompts import Prompts

SOME = ("llama", "gpt2", "gemma2", "neox", "native")
N = 2


def rows_of(model, task, split, n):
    """Each query's real ids, and the first token of its answer."""
    prompts = Prompts.of(model, task, split=split, n=n)
    return [(row_of(prompts, row), prompts.answers[row][0]) for row in range(n)]


def log_p(model, ids, answer, vector, extra=()):
    logits = naive_logits(model, ids, len(ids), vector, extra)
    return float(logits[-1].log_softmax(-1)[answer])


def at_head(layer, head, change):
    """A hook that changes one head's output at the last token of an unpadded prompt."""

    def hook(z, hook):
        z = z.clone()
        z[0, -1, head] = change(z[0, -1, head])
        return z

    return f"blocks.{layer}.attn.hook_z", hook


def naive_saliency(model, ids, answer, vector, layers):
    """Each head's sum_d a_d dp/da_d, by autograd through a full pass of one prompt."""
    leaves = {}

    def watched(z, hook):
        leaves[hook.name] = z.detach().requires_grad_()
        return leaves[hook.name]

    def added(x, hook):
        x = x.clone()
        x[0, -1] = x[0, -1] + vector.value().reshape(-1)
        return x

    slopes = []
    for layer in layers:  # one block a pass: a leaf cuts off what lies before it
        leaves.clear()
        hooks = [(vector.sites[0].hook_name, added), (f"blocks.{layer}.attn.hook_z", watched)]
        logits = model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)
        (z,) = leaves.values()
        (slope,) = torch.autograd.grad(logits[0, -1].softmax(-1)[answer], z)
        slopes.append((z * slope)[0, -1].sum(dim=-1))
    return torch.stack(slopes).detach().numpy()


@pytest.mark.parametrize("family", SOME)
def test_saliency_is_that_of_single_passes(family):
    model, task = model_of(family), task_of()
    vector = additive(model, layer=1, seed=3)
    found = rank_heads(model, task, vector, n=N).per_query
    assert found.shape == (N_LAYERS - 1, N_HEADS, N)
    for number, (ids, answer) in enumerate(rows_of(model, task, "validation", N)):
        wanted = naive_saliency(model, ids, answer, vector, range(1, N_LAYERS))
        np.testing.assert_allclose(found[..., number], wanted, atol=1e-12, rtol=1e-8)
        assert np.abs(wanted).max() > 1e-6


def test_saliency_is_the_slope_along_the_heads_output():
    model, task = model_of("qwen3"), task_of(LABELS)
    vector = additive(model, layer=0, seed=3)
    found = rank_heads(model, task, vector, n=1, score="log-probability").per_query
    ((ids, answer),) = rows_of(model, task, "validation", 1)
    for layer, head in ((0, 2), (2, 1)):
        up, down = (
            log_p(model, ids, answer, vector, [at_head(layer, head, lambda z, s=s: s * z)])
            for s in (1 + 1e-5, 1 - 1e-5)
        )
        assert found[layer, head, 0] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("mode", ["zero", "mean"])
@pytest.mark.parametrize("family", SOME)
def test_ablation_is_that_of_single_passes(family, mode):
    model, task = model_of(family), task_of()
    vector = additive(model, layer=1, seed=3)
    options = {"by": "ablation", "mode": mode, "score": "log-probability", "n": N, "n_train": 4}
    found = rank_heads(model, task, vector, **options).per_query
    training = [ids for ids, _ in rows_of(model, task, "train", 4)]
    for layer in range(1, N_LAYERS):
        mean = 0.0
        for ids in training if mode == "mean" else ():
            keep = {f"blocks.{layer}.attn.hook_z": None}
            naive_logits(model, ids, len(ids), vector, keep=keep)
            (z,) = (x for x in keep.values() if x is not None)  # named as its hook is
            mean = mean + z[-1] / 4
        for head in range(N_HEADS):
            value = mean[head] if mode == "mean" else 0.0
            hook = at_head(layer, head, lambda z, value=value: value + 0 * z)
            for number, (ids, answer) in enumerate(rows_of(model, task, "validation", N)):
                intact = log_p(model, ids, answer, vector)
                drop = intact - log_p(model, ids, answer, vector, [hook])
                assert found[layer - 1, head, number] == pytest.approx(drop, abs=1e-10)
                assert abs(drop) > 1e-6


def test_the_drop_of_a_probability_is_that_of_its_logarithm():
    model, task = model_of(), task_of()
    vector = additive(model, layer=1, seed=3)
    options = {"by": "ablation", "mode": "zero", "n": N}
    drop = rank_heads(model, task, vector, **options).per_query
    logarithm = rank_heads(model, task, vector, **options, score="log-probability").per_query
    rows = rows_of(model, task, "validation", N)
    p = np.exp([log_p(model, ids, answer, vector) for ids, answer in rows])
    np.testing.assert_allclose(drop, p * (1 - np.exp(-logarithm)), atol=1e-12)


def test_a_head_that_writes_nothing_has_no_saliency_and_no_drop():
    model, task = tiny("llama"), task_of()
    vector, width = additive(model, layer=1, seed=3), model.cfg.d_head
    with torch.no_grad():
        weight = model.blocks[2].attn.o.original_component.weight
        weight[:, 3 * width : 4 * width] = 0
    for by in ("saliency", "ablation"):
        ranking = rank_heads(model, task, vector, by=by, n=N)
        assert ranking.importance[1, 3] < 1e-14
        assert (np.delete(ranking.importance.ravel(), 7) > 1e-7).all()
        assert ranking.top(8)[-1] == (2, 3)


@pytest.mark.parametrize("by", ["saliency", "ablation"])
def test_padding_on_the_other_side_changes_nothing(by, monkeypatch):
    model, task = model_of("gpt2"), task_of()
    vector = additive(model, layer=1, seed=3)
    left = rank_heads(model, task, vector, by=by)
    assert len({len(ids) for ids, _ in rows_of(model, task, "validation", 8)}) > 1
    monkeypatch.setattr(Prompts, "of", functools.partial(Prompts.of, padding_side="right"))
    right = rank_heads(model, task, vector, by=by)
    np.testing.assert_allclose(left.per_query, right.per_query, atol=1e-12)


def test_the_model_is_left_alone_also_without_gradients_and_numbers_repeat():
    model, task = model_of("gemma2"), task_of()
    vector = additive(model, layer=1, seed=3)
    with left_alone(model):
        first = rank_heads(model, task, vector, n=N)
        with torch.no_grad():
            again = rank_heads(model, task, vector, n=N)
        with torch.inference_mode():
            once_more = rank_heads(model, task, vector, n=N)
    assert (first.per_query == again.per_query).all()
    assert (first.per_query == once_more.per_query).all()
    other = rank_heads(model, task, vector, n=N, seed=1)
    assert first.queries != other.queries
    assert first.queries == tuple(e.key for e in task.split("validation", n=N, seed=0))


def made(per_query, layer=4, model="m", **options):
    return HeadRanking(
        **{"task": "t", "layer": layer, "by": "saliency", "mode": None, "split": "test"}
        | {"score": "probability", "change": "absolute"}
        | options,
        queries=tuple((str(i),) for i in range(per_query.shape[-1])),
        per_query=per_query,
        provenance=Provenance(model=model),
    )


def test_the_ranking_goes_by_the_mean_absolute_or_signed_change():
    per_query = np.array([[[1.0, -1.0], [0.4, 0.4]], [[0.1, 0.1], [-0.5, -0.5]]])
    absolute, signed = made(per_query), made(per_query, change="signed")
    assert absolute.top(4) == ((4, 0), (5, 1), (4, 1), (5, 0))
    assert signed.top(4) == ((4, 1), (5, 0), (4, 0), (5, 1))
    assert absolute.measure == "mean absolute saliency for the answer's probability"
    assert made(per_query, by="ablation", mode="zero", change="signed").measure == (
        "mean drop (zero ablation) of the answer's probability"
    )
    assert absolute.top(0.3) == absolute.top(2)
    with pytest.raises(InvalidInput, match="give 1 to 4"):
        absolute.top(5)


def test_the_table_has_each_heads_interval_and_rank():
    per_query = np.random.default_rng(0).normal(size=(2, 3, 9))
    ranking = made(per_query)
    table = ranking.table()
    assert len(table) == 6
    for _, row in table.iterrows():
        e = intervals.mean(np.abs(per_query[row["layer"] - 4, row["head"]]))
        assert (row["value"], row["low"], row["high"]) == pytest.approx((e.value, e.low, e.high))
        assert ranking.top(6)[row["rank"] - 1] == (row["layer"], row["head"])
    assert set(table["injection layer"]) == {4}
    assert set(table["n"]) == {9}


def test_the_histogram_counts_key_heads_by_layer():
    per_query = np.array([[[3.0], [1.0]], [[0.0], [0.0]], [[5.0], [4.0]]])
    table = made(per_query).histogram(3)
    assert table["layer"].tolist() == [4, 5, 6]
    assert table["key_heads"].tolist() == [1, 0, 2]


def test_rankings_are_compared_by_ranks_over_the_heads_that_both_have():
    values = np.abs(np.random.default_rng(0).normal(size=(5, 6, 1)))
    noise = np.abs(np.random.default_rng(1).normal(size=(5, 6, 1)))
    first, second = made(values), made(noise + values)
    assert first.compare(made(values**3)).value == pytest.approx(1)
    assert first.compare(made(1 / values)).value == pytest.approx(-1)
    found = first.compare(second)
    assert found.value == pytest.approx(
        stats.spearmanr(values.ravel(), (noise + values).ravel())[0]
    )
    assert found.low < found.value < found.high
    assert found.n == 30
    later = made(values[2:], layer=6)
    assert later.compare(first).value == pytest.approx(1)
    assert later.compare(first).n == 18
    assert np.isnan(first.compare(made(np.ones_like(values))).value)
    for other in (made(values[:, :4]), made(values, model="another")):
        with pytest.raises(InvalidInput, match="heads of two models"):
            first.compare(other)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"by": "aie"}, "by='aie' is unknown; use saliency or ablation"),
        ({"score": "logit"}, "score='logit' is unknown; use probability or log-probability"),
        ({"change": "squared"}, "change='squared' is unknown; use absolute or signed"),
        ({"by": "ablation", "mode": "resample"}, "mode='resample' does not rank heads"),
        ({"n": 0}, "n=0 examples"),
        ({"by": "ablation", "n_train": 0}, "n=0 examples were asked of the train split"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    model = model_of()
    with pytest.raises(InvalidInput, match=sentence):
        rank_heads(model, task_of(), additive(model, layer=1), **options)


def test_a_vector_of_another_form_is_refused():
    model, task = model_of(), task_of()
    state = extract_hidden_state(model, task, 1, shots=2, n=2, operation="replace")
    with pytest.raises(InvalidInput, match="one value added to the residual stream"):
        rank_heads(model, task, state)


@pytest.mark.model
def test_saliency_foretells_ablation_on_the_real_model(model):
    task = mechtv.get_task("singular-plural")
    vector = extract_hidden_state(model, task, 26, shots=5, n=8, operation="add")
    options = {"n": 4, "score": "log-probability"}
    saliency = rank_heads(model, task, vector, **options)
    ablation = rank_heads(model, task, vector, by="ablation", mode="zero", **options)
    assert saliency.per_query.shape == (4, 9, 4)
    assert saliency.compare(ablation).low > 0
