"""Head effects against single full passes, one head and one prompt at a time; how heads rank."""

import math
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from builders import FAMILIES, N_HEADS, N_LAYERS, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits
from hypothesis import given
from hypothesis import strategies as st
from methods.untouched import left_alone
from scipy import stats

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import intervals
from mechtv.evaluation.provenance import Provenance
from mechtv.methods.head_effects import (
    HeadEffects,
    mean_head_outputs,
    measure_head_effects,
    universal_heads,
)
from mechtv.methods.shuffled import exchanged, shuffled_prompts

SHAPE = (N_LAYERS, N_HEADS)
OPTIONS = {"shots": 3, "n": 4, "n_shuffled": 3, "seed": 4}


def lines_of(query, shown):
    """A prompt as text, written here by hand."""
    lines = [f"{example.fields['input']} -> {example.answer}" for example in shown]
    return "\n".join([*lines, f"{query.fields['input']} ->"])


def ids_of(model, text):
    return model.to_tokens(text)[0].tolist()


def naive_means(model, task, shots, n, seed):
    """Each head's z at the last token, the mean over clean prompts, one pass each."""
    total = 0.0
    for query in task.split("train", n=n, seed=seed):
        ids = ids_of(model, lines_of(query, task.demonstrations(query, shots, seed=seed)))
        points = [
            model.get_hook_point(f"blocks.{layer}.attn.hook_z").name for layer in range(N_LAYERS)
        ]
        keep = dict.fromkeys(points)
        naive_logits(model, ids, len(ids), keep=keep)
        total = total + torch.stack([keep[point][-1] for point in points])
    return total / n


def naive_probability(model, task, text, answer, extra=()):
    """The probability of the answer's first token, read off the text behind the arrow."""
    ids = ids_of(model, text)
    anchor = model.tokenizer(" ->")["input_ids"]
    token = model.tokenizer(f" -> {answer}")["input_ids"][len(anchor)]
    return naive_logits(model, ids, len(ids), extra=extra)[-1].softmax(-1)[token]


def naive_effects(model, task, means, n_shuffled, shots, seed):
    """The definition: each head's output replaced at the last token, one full pass each."""
    queries = task.split("validation", n=n_shuffled, seed=seed)
    texts = shuffled_prompts(model, task, shots=shots, n=n_shuffled, seed=seed).texts
    effects = torch.zeros(*SHAPE, n_shuffled, dtype=torch.float64)
    for i, (query, text) in enumerate(zip(queries, texts, strict=True)):
        without = naive_probability(model, task, text, query.answer)
        for layer, head in np.ndindex(SHAPE):

            def patch(z, hook, layer=layer, head=head):
                z = z.clone()
                z[0, -1, head] = means[layer, head]
                return z

            hook = (f"blocks.{layer}.attn.hook_z", patch)
            patched = naive_probability(model, task, text, query.answer, extra=[hook])
            effects[layer, head, i] = patched - without
    return effects.numpy()


@cache
def measured(family="llama", labels=None):
    """Effects that are only read."""
    return measure_head_effects(model_of(family), task_of(labels), **OPTIONS)


def made(mean, *, spread=0.0, n_prompts=5, task="made", provenance=None):
    """Effects by hand, with the given AIE."""
    mean = np.asarray(mean, dtype=float)
    steps = np.linspace(-1, 1, n_prompts)
    return HeadEffects(
        task=task,
        queries=tuple((f"query {i}",) for i in range(n_prompts)),
        shots=2,
        n=3,
        per_prompt=mean[..., None] + spread * steps,
        baseline=np.full(n_prompts, 0.25),
        means=torch.zeros(*mean.shape, 8),
        provenance=provenance or Provenance(),
    )


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "neox"])
def test_every_effect_is_that_of_a_single_full_pass(family, labels):
    model, task, effects = model_of(family), task_of(labels), measured(family, labels)
    means = naive_means(model, task, 3, 4, 4)
    torch.testing.assert_close(effects.means, means, atol=1e-10, rtol=0)
    wanted = naive_effects(model, task, means, 3, 3, 4)
    np.testing.assert_allclose(effects.per_prompt, wanted, atol=1e-10, rtol=0)
    np.testing.assert_allclose(effects.mean, wanted.mean(axis=-1), atol=1e-10, rtol=0)
    assert (np.abs(wanted).max(axis=-1) > 1e-7).all()
    texts = shuffled_prompts(model, task, shots=3, n=3, seed=4).texts
    for i, query in enumerate(task.split("validation", n=3, seed=4)):
        assert effects.baseline[i] == pytest.approx(
            float(naive_probability(model, task, texts[i], query.answer)), abs=1e-12
        )
        assert effects.queries[i] == query.key


@pytest.mark.parametrize("family", FAMILIES)
def test_the_means_are_those_of_single_passes_in_every_family(family):
    model, task = model_of(family), task_of()
    means = mean_head_outputs(model, task, shots=2, n=3)
    torch.testing.assert_close(means, naive_means(model, task, 2, 3, 0), atol=1e-10, rtol=0)


def test_a_prompts_own_output_in_place_of_itself_has_no_effect(monkeypatch):
    """If mean and shuffled prompts are one and the same prompt, nothing is replaced."""
    model, task = model_of(), task_of()
    prompts = shuffled_prompts(model, task, shots=2, n=1)
    monkeypatch.setattr(mechtv.Prompts, "of", lambda *_, **__: prompts)
    effects = measure_head_effects(model, task, shots=2, n=1, n_shuffled=1)
    np.testing.assert_allclose(effects.per_prompt, 0, atol=1e-12)


# --- shuffled prompts ----------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=9), st.integers(0, 99))
def test_answers_are_exchanged_and_stay_only_where_they_must(answers, seed):
    moved = exchanged(answers, seed=seed, purpose="a test")
    assert Counter(moved) == Counter(answers)
    stay = sum(before == after for before, after in zip(answers, moved, strict=True))
    commonest = max(Counter(answers).values())
    assert stay == max(0, 2 * commonest - len(answers))


def test_every_seed_exchanges_answers_in_another_way():
    orders = {exchanged("abcdefgh", seed=seed, purpose="a test") for seed in range(20)}
    assert len(orders) == 20
    assert exchanged("abcd", seed=1, purpose="x") == exchanged("abcd", seed=1, purpose="x")


def test_shuffled_prompts_differ_from_clean_ones_in_the_demonstrations_answers_alone():
    model, task = model_of(), task_of()
    prompts = shuffled_prompts(model, task, shots=4, n=8, seed=1)
    assert len(prompts) == 8
    orders = set()
    for text, query in zip(prompts.texts, task.split("validation", seed=1), strict=True):
        shown = task.demonstrations(query, 4, seed=1)
        clean = lines_of(query, shown).split("\n")
        lines = text.split("\n")
        assert lines[-1] == clean[-1]
        pairs = [line.split(" -> ") for line in lines[:-1]]
        assert [x for x, _ in pairs] == [example.fields["input"] for example in shown]
        assert sorted(y for _, y in pairs) == sorted(example.answer for example in shown)
        if len({example.answer for example in shown}) == 4:
            assert all(y != example.answer for (_, y), example in zip(pairs, shown, strict=True))
            answers = [example.answer for example in shown]
            orders.add(tuple(answers.index(y) for _, y in pairs))
    assert len(orders) > 1
    assert prompts.examples == task.split("validation", seed=1)


# --- what is recorded ----------------------------------------------------------------------------


def test_smaller_splits_reduce_the_numbers_and_say_so():
    effects = measure_head_effects(model_of(), task_of(), shots=2, n=1000, n_shuffled=1000)
    assert (effects.n, effects.n_shuffled, len(effects.baseline)) == (24, 8, 8)
    assert effects.table()["n"].eq(8).all()


def test_it_is_the_same_every_time_and_another_for_another_seed():
    first = measured()
    again = measure_head_effects(model_of(), task_of(), **OPTIONS)
    other = measure_head_effects(model_of(), task_of(), **{**OPTIONS, "seed": 5})
    assert (first.per_prompt == again.per_prompt).all()
    assert torch.equal(first.means, again.means)
    assert not np.allclose(first.mean, other.mean)


def test_half_precision_outputs_are_averaged_in_single_precision():
    effects = measure_head_effects(tiny("llama", torch.bfloat16), task_of(), **OPTIONS)
    assert effects.means.dtype == torch.float32
    assert (effects.means != effects.means.bfloat16()).any()


def test_weights_gradients_and_hooks_are_left_alone():
    model = tiny("gpt2")
    with left_alone(model):
        measure_head_effects(model, task_of(), **OPTIONS)


# --- the table -----------------------------------------------------------------------------------


def test_the_table_has_one_row_a_head_with_the_interval_of_a_mean():
    effects = measured()
    table = effects.table().set_index(["layer", "head"])
    assert len(table) == N_LAYERS * N_HEADS
    for (layer, head), row in table.iterrows():
        wanted = intervals.mean(effects.per_prompt[layer, head])
        assert (row["effect"], row["low"], row["high"], row["n"]) == (
            wanted.value, wanted.low, wanted.high, wanted.n
        )  # fmt: skip
    assert tuple(table.sort_values("rank").index) == effects.top(N_LAYERS * N_HEADS)
    assert table["model"].iloc[0] == mechtv.models.describe(model_of()).name
    assert set(table["task"]) == {"invented"}


def test_one_prompt_has_no_interval_and_equal_ones_have_one_without_width():
    table = made([[0.5, 0.25]], n_prompts=1).table()
    assert table[["low", "high"]].isna().all(axis=None)
    table = made([[0.5, 0.25]]).table()
    assert table["low"].tolist() == table["high"].tolist() == [0.5, 0.25]


# --- which heads ---------------------------------------------------------------------------------


def test_the_strongest_heads_come_first_and_equal_ones_by_place():
    effects = made([[0.1, -0.9, 0.3], [0.3, 0.1, 0.0]])
    assert effects.top(6) == ((0, 2), (1, 0), (0, 0), (1, 1), (1, 2), (0, 1))
    assert effects.top(1) == ((0, 2),)


@pytest.mark.parametrize(
    ("shape", "share", "count"),
    [
        ((2, 5), 0.1, 1),
        ((2, 5), 0.11, 2),
        ((2, 5), 0.99, 10),
        ((10, 10), 0.07, 7),
        ((3, 1), 0.1, 1),
    ],
)
def test_a_share_of_the_heads_is_rounded_up(shape, share, count):
    assert len(made(np.zeros(shape)).top(share)) == count


@pytest.mark.parametrize("how_many", [0, -1, 7])
def test_no_heads_or_more_than_there_are_is_one_sentence(how_many):
    with pytest.raises(
        InvalidInput, match=f"{how_many} heads were asked for, of 6 that are ranked"
    ):
        made(np.zeros((2, 3))).top(how_many)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, -0.1, math.nan])
def test_a_share_outside_0_to_1_is_one_sentence(share):
    with pytest.raises(InvalidInput, match=f"{share} is no share of the heads; use one between"):
        made(np.zeros((2, 3))).top(share)


def test_universal_heads_weigh_every_task_the_same():
    strong = made([[0.9, 0.0], [0.2, 0.3]], task="one")
    weak = made([[0.0, 0.2], [0.2, 0.0]], task="two")
    assert universal_heads([strong, weak], 4) == ((0, 0), (1, 0), (1, 1), (0, 1))
    assert universal_heads([strong, weak], 0.25) == ((0, 0),)
    assert universal_heads([strong], 4) == strong.top(4)
    thrice = [weak, weak, weak, made([[0.5, 0.0], [0.0, 0.0]], task="one")]
    assert universal_heads(thrice, 1) == ((0, 0),), "three runs of one task count as one"


def test_two_models_are_not_ranked_together():
    one = made(np.zeros((2, 3)), provenance=Provenance(model="one", weights="raw"))
    processed = replace(one, provenance=Provenance(model="one", weights="processed"))
    for other in (processed, made(np.zeros((2, 3))), made(np.zeros((3, 2)))):
        with pytest.raises(InvalidInput, match="Heads of two models cannot be compared: one"):
            universal_heads([one, other], 1)
        with pytest.raises(InvalidInput, match="Heads of two models cannot be compared: one"):
            one.rank_correlation(other)
    with pytest.raises(InvalidInput, match="no effects to rank heads by"):
        universal_heads([], 1)


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    first, second = made(rng.normal(size=(3, 4))), made(rng.normal(size=(3, 4)))
    ranks = [stats.rankdata(effects.mean) for effects in (first, second)]
    assert first.rank_correlation(second) == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert first.rank_correlation(made(np.exp(first.mean))) == pytest.approx(1)
    assert first.rank_correlation(made(-first.mean)) == pytest.approx(-1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"shots": 1}, "shots=1 leaves no answers to shuffle; use 2 or more"),
        ({"shots": -1}, "shots=-1 leaves no answers to shuffle"),
        ({"n": 0}, "n=0 is too small; use 1 or more"),
        ({"n_shuffled": 0}, "n_shuffled=0 is too small; use 1 or more"),
        ({"shots": 25}, "shots=25 demonstrations .* holds 24 besides the query"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        measure_head_effects(model_of(), task_of(), **{**OPTIONS, **options})


@pytest.mark.model
def test_a_head_of_the_real_model_carries_its_task(model):
    task = mechtv.get_task("singular-plural")
    effects = measure_head_effects(model, task, n=16, n_shuffled=4)
    assert effects.mean.shape == (30, 9)
    (best,) = effects.top(1)
    assert effects.mean[best] > 0
    assert (effects.per_prompt[best] > 0).sum() >= 3
