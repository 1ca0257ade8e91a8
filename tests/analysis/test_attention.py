"""The attention of heads in four parts, against patterns of single passes."""

import functools

import numpy as np
import pytest
import torch
from builders import N_HEADS, N_LAYERS
from evaluation.invented import model_of, task_of
from evaluation.naive import naive_logits, row_of
from methods.untouched import left_alone
from vectors.naive import additive

import mechtv
from mechtv.analysis.attention import PARTS, AttentionShares, attention_of_heads
from mechtv.errors import InvalidInput
from mechtv.evaluation import intervals
from mechtv.methods import extract_hidden_state
from mechtv.tasks.prompts import Prompts

SOME = ("llama", "gpt2", "gemma2", "neox", "native")
HEADS = [(2, 1), (1, 0), (2, 3)]
N = 3


def ids_of(model, task, n):
    prompts = Prompts.of(model, task, n=n)
    return [row_of(prompts, row) for row in range(n)]


def parts_by_hand(model, ids, vector, layer, head, final):
    """First token, rest, final tokens without the last, the last: summed key by key."""
    found = []
    hook = (f"blocks.{layer}.attn.hook_pattern", lambda x, hook: found.append(x[0, head, -1]))
    naive_logits(model, ids, len(ids), vector, [hook])
    sums = dict.fromkeys(PARTS, 0.0)
    for key, paid in enumerate(found[0].tolist()):
        from_end = len(ids) - 1 - key
        if from_end == 0:
            sums["last token"] += paid
        elif key == 0:
            sums["first token"] += paid
        else:
            sums["final tokens" if from_end < final else "rest"] += paid
    return list(sums.values())


@pytest.mark.parametrize("family", SOME)
def test_shares_are_those_of_single_passes(family):
    model, task = model_of(family), task_of()
    vector = additive(model, layer=1, seed=3)
    found = attention_of_heads(model, task, vector, HEADS, final=2, n_random=5, n=N)
    assert found.heads == ((1, 0), (2, 1), (2, 3))
    for heads, shares in (
        (found.heads, found.shares),
        (found.random_heads, found.random_shares),
    ):
        for (layer, head), own in zip(heads, shares, strict=True):
            for ids, parts in zip(ids_of(model, task, N), own, strict=True):
                assert len(ids) > 3
                wanted = parts_by_hand(model, ids, vector, layer, head, 2)
                np.testing.assert_allclose(parts, wanted, atol=1e-10)
    assert found.shares.max() > 0.1
    for shares in (found.shares, found.random_shares):
        np.testing.assert_allclose(shares.sum(axis=-1), 1, atol=1e-10)


def test_the_vector_changes_where_heads_look():
    model, task = model_of(), task_of()
    options = {"n_random": 5, "n": N}
    first, second = (
        attention_of_heads(model, task, additive(model, layer=1, seed=seed), HEADS, **options)
        for seed in (3, 4)
    )
    assert np.abs(first.shares - second.shares).max() > 1e-3


def test_how_many_tokens_are_final_moves_attention_between_two_parts_only():
    model, task = model_of("gpt2"), task_of()
    vector = additive(model, layer=1, seed=3)
    one, three, all_of_them = (
        attention_of_heads(model, task, vector, HEADS, final=final, n_random=5).shares
        for final in (1, 3, 99)
    )
    first, rest, final, last = range(4)
    assert (one[..., final] == 0).all()
    assert (all_of_them[..., rest] == 0).all()
    for shares in (one, all_of_them):
        np.testing.assert_allclose(shares[..., [first, last]], three[..., [first, last]])
        both = shares[..., rest] + shares[..., final]
        np.testing.assert_allclose(both, three[..., rest] + three[..., final])
    assert (three[..., [rest, final]] > 0).any(axis=(0, 1)).all()


def test_padding_on_the_other_side_changes_nothing(monkeypatch):
    model, task = model_of("gpt2"), task_of()
    vector = additive(model, layer=1, seed=3)
    left = attention_of_heads(model, task, vector, HEADS, n_random=5)
    assert len({len(ids) for ids in ids_of(model, task, 8)}) > 1
    monkeypatch.setattr(Prompts, "of", functools.partial(Prompts.of, padding_side="right"))
    right = attention_of_heads(model, task, vector, HEADS, n_random=5)
    np.testing.assert_allclose(left.shares, right.shares, atol=1e-10)


def test_random_heads_are_others_at_or_behind_the_vectors_block_and_repeat():
    model, task = model_of("gemma2"), task_of()
    vector = additive(model, layer=1, seed=3)
    with left_alone(model):
        found, again = (
            attention_of_heads(model, task, vector, HEADS, n_random=5, n=N) for _ in range(2)
        )
    every = {(layer, head) for layer in range(1, N_LAYERS) for head in range(N_HEADS)}
    assert set(found.random_heads) == every - set(HEADS)
    assert (found.shares == again.shares).all()
    two = {
        attention_of_heads(model, task, vector, HEADS, n_random=2, n=1, seed=seed).random_heads
        for seed in range(4)
    }
    assert len(two) > 1


def test_the_table_has_groups_over_heads_and_heads_over_queries():
    rng = np.random.default_rng(0)
    shares, others = (rng.dirichlet(np.ones(4), size=(n, 6)) for n in (2, 3))
    found = AttentionShares(
        task="t",
        layer=1,
        heads=((1, 0), (2, 1)),
        random_heads=((1, 1), (1, 2), (2, 2)),
        final=5,
        split="test",
        queries=tuple((str(i),) for i in range(6)),
        shares=shares,
        random_shares=others,
    )
    table = found.table()
    assert len(table) == 4 * (2 + 2 + 3)
    groups = table[table["layer"].isna()].set_index(["group", "part"])
    e = intervals.mean(others.mean(axis=1)[:, 3])
    row = groups.loc["random", "last token"]
    assert (row["value"], row["low"], row["high"], row["n"]) == (e.value, e.low, e.high, 3)
    single = table.dropna(subset="layer").set_index(["group", "layer", "head", "part"])
    row = single.loc["key", 2, 1, "first token"]
    assert (row["value"], row["n"]) == (pytest.approx(shares[1, :, 0].mean()), 6)
    assert groups.loc["key", "value"].sum() == pytest.approx(1)
    with pytest.raises(InvalidInput, match="group='other' is unknown; use key or random"):
        found.estimates("other")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("heads", "options", "sentence"),
    [
        ([(1, 4)], {}, r"Head \(1, 4\) does not exist: .* heads 0 to 3"),
        (HEADS, {"final": 0}, "final=0 is no count; use a whole number, 1 or more"),
        (HEADS, {"final": 1.5}, "final=1.5 is no count; use a whole number"),
        (HEADS, {"n_random": 0}, "n_random=0 is no count"),
        (HEADS, {"n_random": 6}, "There are 5 other heads .* not the n_random=6 wanted"),
        (HEADS, {"n": 0, "n_random": 5}, "n=0 examples"),
    ],
)
def test_what_cannot_be_is_one_sentence(heads, options, sentence):
    model = model_of()
    with pytest.raises(InvalidInput, match=sentence):
        attention_of_heads(model, task_of(), additive(model, layer=1), heads, **options)


@pytest.mark.model
def test_heads_of_the_real_model_mostly_look_at_the_first_token(model):
    task = mechtv.get_task("singular-plural")
    vector = extract_hidden_state(model, task, 24, shots=5, n=8, operation="add")
    found = attention_of_heads(model, task, vector, [(24, 0), (29, 1)], n=4)
    for shares in (found.shares, found.random_shares):
        np.testing.assert_allclose(shares.sum(axis=-1), 1, atol=1e-4)
    assert found.estimates("random")["first token"].value > 0.5
    assert torch.is_grad_enabled()
