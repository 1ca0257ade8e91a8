"""Ablated heads, one prompt at a time with plain hooks, against the scores of sets of heads."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import N_HEADS, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits, row_of
from methods.untouched import left_alone
from vectors.naive import additive

import mechtv
from mechtv.analysis.ablation import Ablation, ablate_heads
from mechtv.analysis.answers import Answers, rivals
from mechtv.analysis.circuits import output_bias
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation import evaluate
from mechtv.forward import last_logits
from mechtv.methods import extract_hidden_state
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Edit, Replace, Site, TaskVector

SOME = ("llama", "gpt2", "gemma2", "neox", "native")
HEADS = [(2, 1), (1, 0), (2, 3)]
N, N_TRAIN = 3, 4


def rows_of(model, task, split, n):
    """Each query's real ids, and the first token of its answer."""
    prompts = Prompts.of(model, task, split=split, n=n)
    return [(row_of(prompts, row), prompts.answers[row][0]) for row in range(n)]


def outputs_of(model, ids, vector):
    """Each block's hook_z on the injected run of one prompt, by layer."""
    found = {}

    def keep(z, hook, layer):
        found[layer] = z[0].clone()

    hooks = [
        (f"blocks.{layer}.attn.hook_z", functools.partial(keep, layer=layer))
        for layer in range(N_LAYERS)
    ]
    naive_logits(model, ids, len(ids), vector, hooks)
    return found


def exchanged(heads, values, columns=slice(-1, None)):
    """Hooks that put values (by layer) in the place of heads' outputs at some columns."""

    def hook(z, hook, layer, head):
        z = z.clone()
        z[0, columns, head] = values[layer][..., head, :]
        return z

    return [
        (f"blocks.{layer}.attn.hook_z", functools.partial(hook, layer=layer, head=head))
        for layer, head in heads
    ]


def log_p(model, ids, answer, vector, extra=()):
    logits = naive_logits(model, ids, len(ids), vector, extra)[-1]
    return float(logits.log_softmax(-1)[answer])


def values_of(model, task, vector, mode, columns):
    """By layer what `zero` or `mean` put in the heads' place, from single passes."""
    if mode == "zero":
        return dict.fromkeys(range(N_LAYERS), torch.zeros(N_HEADS, model.cfg.d_head).double())
    training = rows_of(model, task, "train", N_TRAIN)
    outputs = [outputs_of(model, ids, vector) for ids, _ in training]
    if columns == slice(None):  # all tokens share one mean
        return {
            layer: torch.cat([found[layer] for found in outputs]).mean(dim=0)
            for layer in range(N_LAYERS)
        }
    return {
        layer: torch.stack([found[layer][columns] for found in outputs]).mean(dim=0)
        for layer in range(N_LAYERS)
    }


def check_by_hand(family, mode, positions, columns):
    model, task = model_of(family), task_of()
    vector = additive(model, layer=0, seed=3)
    options = {"mode": mode, "positions": positions, "n_random": 20, "n_train": N_TRAIN}
    found = ablate_heads(model, task, vector, HEADS, n=N, **options)
    values = values_of(model, task, vector, mode, columns)
    for number, (ids, answer) in enumerate(rows_of(model, task, "test", N)):
        intact = log_p(model, ids, answer, vector)
        assert found.intact.log_probability[number] == pytest.approx(intact, abs=1e-10)
        for heads, answers in (
            (found.heads, found.ablated),
            (found.random_sets[0], found.random[0]),
            (found.random_sets[-1], found.random[-1]),
        ):
            wanted = log_p(model, ids, answer, vector, exchanged(heads, values, columns))
            assert answers.log_probability[number] == pytest.approx(wanted, abs=1e-10)
            assert abs(wanted - intact) > 1e-5


@pytest.mark.parametrize("mode", ["zero", "mean"])
@pytest.mark.parametrize("family", SOME)
def test_sets_of_heads_are_ablated_as_by_hand(family, mode):
    check_by_hand(family, mode, (-1,), slice(-1, None))


@pytest.mark.parametrize(
    ("positions", "columns"), [("all", slice(None)), ((-2, -1), slice(-2, None))]
)
@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_other_positions_are_ablated_as_by_hand(mode, positions, columns):
    check_by_hand("llama", mode, positions, columns)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_resampling_takes_the_outputs_of_one_other_training_query(family):
    model, task = model_of(family), task_of()
    vector = additive(model, layer=1, seed=3)  # before which one of the heads lies
    heads = [(0, 2), (2, 1)]
    options = {"mode": "resample", "n": 5, "n_train": N_TRAIN}
    found = ablate_heads(model, task, vector, heads, **options)
    outputs = [
        {layer: z[-1:] for layer, z in outputs_of(model, ids, vector).items()}
        for ids, _ in rows_of(model, task, "train", N_TRAIN)
    ]
    donors = set()
    for number, (ids, answer) in enumerate(rows_of(model, task, "test", 5)):
        for which, scores in (
            (found.heads, found.ablated),
            (found.random_sets[3], found.random[3]),
        ):
            by_donor = [log_p(model, ids, answer, vector, exchanged(which, o)) for o in outputs]
            near = np.flatnonzero(np.abs(by_donor - scores.log_probability[number]) < 1e-10)
            assert len(near) == 1
            donors.add((number, int(near[0])))
    assert len(donors) == 5  # the same for every set
    assert len({donor for _, donor in donors}) > 1


def test_no_query_is_its_own_donor():
    model, task = model_of(), task_of()
    vector = additive(model, layer=0, seed=3)
    options = {"mode": "resample", "split": "train", "n_random": 0}
    found = ablate_heads(model, task, vector, HEADS, n=2, n_train=2, **options)
    assert (np.abs(found.ablated.log_probability - found.intact.log_probability) > 1e-5).all()
    with pytest.raises(InvalidInput, match="no other training query"):
        ablate_heads(model, task, vector, HEADS, n=1, n_train=1, **options)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_zeroing_a_head_everywhere_is_the_model_without_its_part_of_w_o(family):
    model, task = tiny(family), task_of()
    vector, width = additive(model, layer=1, seed=3), model.cfg.d_head
    options = {"mode": "zero", "positions": "all", "n_random": 0}
    found = ablate_heads(model, task, vector, [(1, 2)], **options)
    span = slice(2 * width, 3 * width)

    def after_w_o(x, hook):  # the mistake: the same columns of what W_O gives
        x = x.clone()
        x[..., span] = 0
        return x

    rows = rows_of(model, task, "test", 8)
    wrong = [
        log_p(model, ids, y, vector, [("blocks.1.hook_attn_out", after_w_o)]) for ids, y in rows
    ]
    with torch.no_grad():
        weight = model.blocks[1].attn.o.original_component.weight
        (weight if family == "gpt2" else weight.T)[span] = 0
    right = [log_p(model, ids, y, vector) for ids, y in rows]
    np.testing.assert_allclose(found.ablated.log_probability, right, atol=1e-10)
    assert np.abs(found.ablated.log_probability - wrong).max() > 0.1


@pytest.mark.parametrize("family", SOME)
def test_without_its_heads_a_blocks_attention_is_its_output_bias(family):
    model, task = model_of(family), task_of()
    vector = additive(model, layer=0, seed=3)
    heads = [(2, head) for head in range(N_HEADS)]
    options = {"mode": "zero", "positions": "all", "n_random": 0}
    found = ablate_heads(model, task, vector, heads, n=N, **options)
    bias = output_bias(model, 2)
    only_bias = [("blocks.2.attn.hook_out", lambda x, hook: bias.expand_as(x).clone())]
    for number, (ids, answer) in enumerate(rows_of(model, task, "test", N)):
        wanted = log_p(model, ids, answer, vector, only_bias)
        assert found.ablated.log_probability[number] == pytest.approx(wanted, abs=1e-10)


def test_intact_is_what_evaluate_says():
    model, task = model_of("gpt2"), task_of(LABELS)
    vector = additive(model, layer=0, seed=3)
    found = ablate_heads(model, task, vector, HEADS)
    wanted = evaluate(model, task, vector)
    assert (found.intact.correct == wanted.correct).all()
    assert (found.intact.correct_label == wanted.correct_label).all()
    assert found.queries == wanted.queries
    assert ablate_heads(model, task_of(), vector, HEADS, n=N).intact.correct_label is None


def test_random_sets_are_distinct_and_of_other_heads_behind_the_vector():
    model, task = model_of(), task_of()
    vector = additive(model, layer=1, seed=3)
    found = ablate_heads(model, task, vector, [(2, 1), (0, 3)], n=1)
    assert found.heads == ((0, 3), (2, 1))
    assert len(set(found.random_sets)) == 20
    for heads in found.random_sets:
        assert len(set(heads)) == 2
        assert heads == tuple(sorted(heads))
        assert not set(heads) & set(found.heads)
        assert min(layer for layer, _ in heads) >= 1
    assert {head for heads in found.random_sets for head in heads} == {
        (layer, head) for layer in (1, 2) for head in range(N_HEADS)
    } - set(found.heads)


@pytest.mark.parametrize("mode", ["mean", "resample"])
def test_padding_on_the_other_side_changes_nothing(mode, monkeypatch):
    model, task = model_of("gpt2"), task_of()
    vector = additive(model, layer=0, seed=3)
    left = ablate_heads(model, task, vector, HEADS, mode=mode)
    assert len({len(ids) for ids, _ in rows_of(model, task, "test", 8)}) > 1
    monkeypatch.setattr(Prompts, "of", functools.partial(Prompts.of, padding_side="right"))
    right = ablate_heads(model, task, vector, HEADS, mode=mode)
    for one, other in zip(left.random, right.random, strict=True):
        np.testing.assert_allclose(one.log_probability, other.log_probability, atol=1e-10)
    assert left.compare().difference.value == pytest.approx(right.compare().difference.value)


def test_the_model_is_left_alone_and_numbers_repeat():
    model, task = model_of("gemma2"), task_of()
    vector = additive(model, layer=0, seed=3)
    with left_alone(model):
        first, again = (
            ablate_heads(model, task, vector, HEADS, n=N, mode="resample") for _ in range(2)
        )
    assert first.random_sets == again.random_sets
    assert (first.random_values() == again.random_values()).all()
    other = ablate_heads(model, task, vector, HEADS, n=N, mode="resample", seed=1)
    assert (first.random_sets, first.queries) != (other.random_sets, other.queries)


def answers(log_probability, correct=0.5):
    n = len(log_probability)
    return Answers(
        correct=np.arange(n) < correct * n,
        correct_label=None,
        log_probability=log_probability,
        logit_difference=np.zeros(n),
    )


def made(own=-3.0, n_sets=20):
    rng = np.random.default_rng(0)
    return Ablation(
        task="t",
        layer=1,
        heads=((1, 0),),
        random_sets=tuple(((2, i),) for i in range(n_sets)),
        mode="mean",
        positions=(-1,),
        split="test",
        queries=tuple((str(i),) for i in range(10)),
        intact=answers(rng.normal(-1, 0.1, 10), 0.8),
        ablated=answers(rng.normal(own, 0.1, 10), 0.2),
        random=tuple(answers(np.full(10, -1 - i / 10), 0.7) for i in range(n_sets)),
    )


def test_the_table_has_intact_given_and_random_heads_with_the_rank_among_the_sets():
    found = made()
    table = found.table().set_index(["score", "condition"])
    row = table.loc["log-probability", "random heads"]
    values = -1 - np.arange(20) / 10
    assert row["value"] == pytest.approx(values.mean())
    assert (row["low"], row["high"]) == pytest.approx(tuple(np.quantile(values, [0.025, 0.975])))
    assert (row["n"], row["n_sets"]) == (10, 20)
    given = table.loc["log-probability", "given heads"]
    estimate = found.ablated.estimates()["log-probability"]
    assert (given["value"], given["low"]) == (estimate.value, estimate.low)
    assert given["p_value"] == pytest.approx(1 / 21)
    assert table.loc["accuracy, full vocabulary", "intact"]["value"] == 0.8
    assert table.loc["accuracy, full vocabulary", "given heads"]["p_value"] == pytest.approx(1 / 21)
    assert made(own=0).p_value() == 1
    assert made(own=-2.15).p_value() == pytest.approx((1 + 8) / 21)
    assert np.isnan(made(n_sets=0).p_value())
    assert "random heads" not in set(made(n_sets=0).table()["condition"])


def test_random_sets_are_no_measure_of_heads_before_the_vectors_block():
    assert np.isnan(replace(made(), layer=2).p_value())


def test_ablated_and_intact_are_compared_on_the_same_queries():
    found = made()
    difference = found.ablated.log_probability - found.intact.log_probability
    assert found.compare().difference.value == pytest.approx(difference.mean())
    hits = found.compare("accuracy, full vocabulary")
    assert (hits.test, hits.difference.value) == ("McNemar, exact", pytest.approx(-0.6))
    with pytest.raises(UnknownName, match="no score named 'label'; known: accuracy, full"):
        found.compare("label")
    with pytest.raises(UnknownName, match="no score named 'accuracy, label-restricted'"):
        found.random_values("accuracy, label-restricted")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("heads", "options", "sentence"),
    [
        ([(1, 4)], {}, r"Head \(1, 4\) does not exist: .* heads 0 to 3"),
        ([(3, 0)], {}, "layers 0 to 2"),
        ([], {}, "are no heads"),
        ([(1, 0), (1, 0)], {}, "named twice"),
        (HEADS, {"mode": "noise"}, "mode='noise' is unknown; use one of mean, zero, resample"),
        (HEADS, {"mode": "resample", "positions": "all"}, "at the last token only"),
        (HEADS, {"positions": (0,)}, "are not positions"),
        (HEADS, {"positions": (-99, -1)}, "Position -99 does not exist"),
        (HEADS, {"n_random": 5}, "n_random=5 is too few to tell chance; use 20 or more, or 0"),
        ([(1, 0)], {}, "11 heads besides the 1 given, which make 11 sets .* not the 20 wanted"),
        (HEADS, {"n_train": 0}, "n=0 examples were asked of the train split"),
    ],
)
def test_what_cannot_be_is_one_sentence(heads, options, sentence):
    model = model_of()
    with pytest.raises(InvalidInput, match=sentence):
        ablate_heads(model, task_of(), additive(model, layer=0), heads, **options)


@pytest.mark.model
def test_without_all_heads_behind_it_a_vector_of_the_real_model_loses_its_effect(model):
    task = mechtv.get_task("singular-plural")
    vector = extract_hidden_state(model, task, 24, shots=5, n=8, operation="add")
    heads = [(layer, head) for layer in range(24, 30) for head in range(9)]
    found = ablate_heads(model, task, vector, heads, n=8, n_train=8, n_random=0)
    few = ablate_heads(model, task, vector, heads[:2], n=8, n_train=8)
    lost = found.compare().difference
    assert lost.high < 0
    assert lost.value < few.compare().difference.low


def test_logit_differences_of_all_runs_are_against_the_rivals_of_the_intact_run() -> None:
    model, task = model_of("llama"), task_of()
    vector = additive(model, layer=1, seed=3)
    heads = [(layer, head) for layer in (1, 2) for head in range(N_HEADS)]
    found = ablate_heads(model, task, vector, heads, mode="zero", n=6, n_random=0)
    prompts = Prompts.of(model, task, n=6)
    with torch.no_grad():
        against = rivals(last_logits(model, prompts, vector), prompts)
        zero = Replace(value=torch.zeros(N_HEADS, model.cfg.d_head, dtype=torch.float64))
        gone = [Edit(site=Site(component="z", layer=layer), operation=zero) for layer in (1, 2)]
        without_it = TaskVector(edits=(*vector.edits, *gone), card=vector.card)
        logits = last_logits(model, prompts, without_it)
    answers = prompts.first_answer_tokens[:, None]
    wanted = (logits.gather(1, answers) - logits.gather(1, against))[:, 0]
    assert (against != rivals(logits, prompts)).any()  # its own rivals would be others
    np.testing.assert_allclose(found.ablated.logit_difference, wanted, atol=1e-10)
