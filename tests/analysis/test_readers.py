"""Readers of theta: passes by hand for some settings, the two ends, and Shapley's definition."""

import functools
import sys
from itertools import permutations

import numpy as np
import pytest
import torch
from builders import FAMILIES, N_LAYERS, RARE_FAMILIES, tiny
from evaluation.invented import LABELS, task_of
from forward.engine import all_cut, frozen_tiny
from methods.untouched import left_alone
from torch.testing import assert_close
from vectors.naive import additive, random_ids

import mechtv
from mechtv.analysis.answers import Answers
from mechtv.analysis.readers import READERS, SETTINGS, Readers, _moved, _residual, readers
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput, UnknownName
from mechtv.forward import full_passes, kept, last_logits
from mechtv.forward.unembed import unembedded
from mechtv.tasks.prompts import Prompts

LAYER = 1
EXACT = {"atol": 1e-10, "rtol": 1e-10}
ATTENTION = {"values": ("v",), "queries and keys": ("q", "k")}


@functools.cache
def model_of(family: str = "llama"):
    """A model that is only read."""
    return frozen_tiny(family)


def norm_by_hand(norm, x):
    """LayerNorm or RMSNorm from its formula."""
    inner = norm.original_component
    eps = next(getattr(inner, k) for k in ("variance_epsilon", "eps") if hasattr(inner, k))
    gain = inner.weight + 1 if "Gemma" in type(inner).__name__ else inner.weight
    if getattr(inner, "bias", None) is None and "RMS" in type(inner).__name__:
        return x / (x.square().mean() + eps).sqrt() * gain
    x = x - x.mean()
    return x / (x.square().mean() + eps).sqrt() * gain + inner.bias


def logits_by_hand(model, ids, theta, shown, blocks):
    """One unpadded prompt, a full pass: each reader's input is exchanged at the last token."""
    hooks, seen = [], {}

    def look(x, hook, norm, key):
        seen[key] = norm_by_hand(norm, x.reshape(-1, x.shape[-1])[-1] + theta)

    def give(x, hook, key):
        x = x.clone()
        x.reshape(-1, x.shape[-1])[-1] = seen[key]
        return x

    for i in blocks:
        block, name = model.blocks[i], f"blocks.{i}."
        for norm in ("ln1", "ln2"):
            if hasattr(block, norm):
                watch = functools.partial(look, norm=getattr(block, norm), key=(i, norm))
                hooks.append((f"{name}{norm}.hook_in", watch))
        for reader, letters in ATTENTION.items():
            if reader in shown:
                tell = functools.partial(give, key=(i, "ln1"))
                hooks += [(f"{name}attn.{letter}.hook_in", tell) for letter in letters]
        if "MLPs" in shown:
            norm = "ln2" if hasattr(block, "ln2") else "ln1"
            hooks.append((f"{name}mlp.hook_in", functools.partial(give, key=(i, norm))))
    if "final norm" in shown:
        shift = torch.zeros(len(ids), 1, dtype=theta.dtype)
        shift[-1] = 1
        hooks.append(("ln_final.hook_in", lambda x, hook: x + shift * theta))
    with torch.no_grad():
        return model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0, -1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "neox", "phi", "opt"])
def test_settings_are_what_passes_by_hand_give(family: str) -> None:
    model, vector, task = model_of(family), additive(model_of(family), layer=LAYER), task_of(LABELS)
    theta = vector.value().reshape(-1)
    found = readers(model, task, vector, blocks=[range(1, 3), range(1, 2)], n=4)
    prompts = Prompts.of(model, task, split="test", n=4)
    ids = [row[mask].tolist() for row, mask in zip(prompts.tokens, prompts.mask, strict=True)]
    for blocks in found.blocks:
        for shown in (SETTINGS[1], SETTINGS[2], SETTINGS[3], SETTINGS[7], SETTINGS[12]):
            inside = shown if blocks[-1] == N_LAYERS - 1 else set(shown) - {"final norm"}
            rows = [logits_by_hand(model, row, theta, inside, blocks) for row in ids]
            wanted = Answers.of(torch.stack(rows), prompts)
            answers = found.of(*shown, blocks=blocks)
            for score in ("log_probability", "logit_difference"):
                np.testing.assert_allclose(
                    getattr(answers, score), getattr(wanted, score), atol=1e-10
                )
            assert (answers.correct_label == wanted.correct_label).all()
            assert (answers.correct == wanted.correct).all()


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "full"])
@pytest.mark.parametrize("family", [*FAMILIES, *RARE_FAMILIES])
def test_all_readers_are_the_injected_run_and_none_is_the_plain_run(
    family: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family)
    vector = additive(model, layer=LAYER)
    subject, everywhere = Subject.of(model, vector), range(LAYER, N_LAYERS)
    ids = [random_ids(length, seed) for seed, length in enumerate((9, 6, 12))]
    prompts = Prompts.from_ids(model, ids)

    def logits():
        plain = _residual(model, prompts, subject, everywhere, ())
        together = _moved(_residual(model, prompts, subject, everywhere, READERS[:-1]), subject)
        return (unembedded(model, x[None])[0] for x in (plain, together))

    with torch.no_grad():
        wanted, injected = last_logits(model, prompts), last_logits(model, prompts, vector)
        if cut:
            possible = family != "native"  # which has no cache of keys and values
            with kept(model, prompts, vector), all_cut(monkeypatch, expected=possible):
                plain, together = logits()
        else:
            with full_passes():
                plain, together = logits()
    assert_close(plain, wanted, **EXACT)
    assert_close(together, injected, **EXACT)
    assert float((wanted - injected).abs().max()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_each_projection_reads_its_own_copy(family: str) -> None:
    model = model_of(family)
    names = {letter: f"blocks.1.attn.hook_{letter}" for letter in "qkv"}
    ids = torch.tensor([random_ids(6)])

    def run(changed=None):
        kept = {}
        hooks = [
            (name, lambda x, hook, letter=letter: kept.update({letter: x}))
            for letter, name in names.items()
        ]
        if changed:
            hooks.append((f"blocks.1.attn.{changed}.hook_in", lambda x, hook: x + 1.5 * x.flip(1)))
        with torch.no_grad():
            model.run_with_hooks(ids, fwd_hooks=hooks)
        return kept

    plain = run()
    for letter in "qkv":
        after = run(letter)
        moved = {other for other in "qkv" if not after[other].equal(plain[other])}
        assert moved == {letter}


def test_the_result_says_what_it_is_of_and_holds_the_two_ends() -> None:
    model, task = model_of(), task_of(LABELS)
    vector = additive(model, layer=LAYER)
    found = readers(model, task, vector, n=5, split="validation", seed=3)
    assert found.error < 1e-12
    assert (found.task, found.layer, found.blocks) == ("invented", 1, (range(1, 3),))
    assert found.provenance.seed == 3
    prompts = Prompts.of(model, task, split="validation", n=5, seed=3)
    assert found.queries == tuple(e.key for e in prompts.examples)
    with torch.no_grad():
        injected, plain = last_logits(model, prompts, vector), last_logits(model, prompts)
    for shown, logits in (((), plain), (READERS, injected)):
        wanted = Answers.of(logits, prompts)
        np.testing.assert_allclose(
            found.of(*shown).logit_difference, wanted.logit_difference, atol=1e-10
        )
        assert (found.of(*shown).correct == wanted.correct).all()
    table = found.table()
    assert len(table) == 16 * 4
    assert set(table["n_readers"]) == {0, 1, 2, 3, 4}
    row = table[(table.readers == "values + MLPs") & (table.score == "log-probability")].iloc[0]
    assert row["value"] == pytest.approx(found.of("MLPs", "values").log_probability.mean())
    assert row["low"] < row["value"] < row["high"]
    assert (row["blocks"], row["n"], row["split"]) == ("1-2", 5, "validation")


def test_behind_a_range_that_ends_early_the_final_norm_is_blind() -> None:
    model = model_of()
    vector = additive(model, layer=0)
    found = readers(model, task_of(), vector, blocks=[range(1), range(1, 2), range(3)], n=3)
    whole = readers(model, task_of(), vector, n=3)
    for shown in SETTINGS:
        before = set(shown) - {"final norm"}
        for blocks in found.blocks[:2]:
            first, second = found.of(*shown, blocks=blocks), found.of(*before, blocks=blocks)
            assert (first.log_probability == second.log_probability).all()
        np.testing.assert_allclose(
            found.of(*shown, blocks=range(3)).log_probability,
            whole.of(*shown).log_probability,
            atol=1e-10,
        )
    effects = found.effects()
    final = effects[(effects.reader == "final norm") & (effects.effect == "Shapley value")]
    assert final.set_index("blocks")["value"].loc[["0", "1"]].tolist() == pytest.approx([0, 0])
    assert abs(final["value"].iloc[2]) > 1e-3


def test_no_pass_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain run serves all ranges and gives the rivals; the final norm needs no own pass."""
    module, model = sys.modules["mechtv.analysis.readers"], model_of()
    passes = {"of readers": 0, "full": 0}

    def counted(name, original):
        def call(*args, **kwargs):
            passes[name] += 1
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(module, "_residual", counted("of readers", _residual))
    answers = sys.modules["mechtv.analysis.answers"]
    monkeypatch.setattr(answers, "last_logits", counted("full", last_logits))
    readers(model, task_of(), additive(model, layer=1), blocks=[range(1, 2), range(2, 3)], n=3)
    assert passes == {"of readers": 2 + 1 + 2 * 7, "full": 0}


def test_the_same_seed_gives_the_same_numbers_and_the_model_is_left_alone() -> None:
    model, task = tiny("gpt2"), task_of()
    vector = additive(model, layer=LAYER)
    with left_alone(model):
        first, second = (readers(model, task, vector, n=4) for _ in range(2))
    assert first.table().equals(second.table())
    assert first.effects().equals(second.effects())
    for shown in SETTINGS:  # without labels it is the margin to the best wrong token
        assert ((first.of(*shown).logit_difference > 0) == first.of(*shown).correct).all()


# --- the game ------------------------------------------------------------------------------------


def made_up(values) -> Readers:
    """A result with these log-probabilities: one row a setting, one column a query."""
    answers = tuple(
        Answers(correct=row > 0, correct_label=None, log_probability=row, logit_difference=2 * row)
        for row in np.asarray(values, dtype=float)
    )
    return Readers(task="t", split="test", layer=1, blocks=(range(1, 3),), answers=(answers,))


def random_values(n=7, seed=0, gain=3.0):
    values = np.random.default_rng(seed).normal(size=(16, n))
    values[-1] = values[0] + gain + 0.1 * values[-1]
    return values


def chosen(effects, kind):
    return effects[effects.effect == kind].set_index(["reader", "with"])


def test_shapley_values_are_means_over_all_orders() -> None:
    values = random_values()
    v = {frozenset(shown): row.mean() for shown, row in zip(SETTINGS, values, strict=True)}
    effects = made_up(values).effects()
    found, orders = chosen(effects, "Shapley value"), list(permutations(READERS))
    for reader in READERS:
        steps = []
        for order in orders:
            before = frozenset(order[: order.index(reader)])
            steps.append(v[before | {reader}] - v[before])
        assert found.loc[(reader, ""), "value"] == pytest.approx(np.mean(steps), abs=1e-12)
    assert found["value"].sum() == pytest.approx(values[-1].mean() - values[0].mean(), abs=1e-12)
    assert found["share"].sum() == pytest.approx(1, abs=1e-12)


def test_shapley_interactions_are_shapley_values_of_a_pair_acting_as_one() -> None:
    """I(i, j) = value of {i, j} as one player - value of i without j - value of j without i."""
    values = random_values(seed=1)
    v = {frozenset(shown): row.mean() for shown, row in zip(SETTINGS, values, strict=True)}

    def shapley(players, one):
        steps = []
        for order in permutations(players):
            before = frozenset().union(*order[: order.index(one)])
            steps.append(v[before | one] - v[before])
        return np.mean(steps)

    found = chosen(made_up(values).effects(), "Shapley interaction")
    assert len(found) == 6
    for (i, j), row in found.iterrows():
        a, b = frozenset({i}), frozenset({j})
        rest = [frozenset({other}) for other in READERS if other not in (i, j)]
        wanted = shapley([*rest, a | b], a | b) - shapley([*rest, a], a) - shapley([*rest, b], b)
        assert row["value"] == pytest.approx(wanted, abs=1e-12)


def test_an_additive_game_has_exact_shares_and_no_interactions() -> None:
    parts = dict(zip(READERS, (1.0, 0.5, 2.0, 0.5), strict=True))
    start = np.random.default_rng(0).normal(size=9)
    effects = made_up([start + sum(parts[r] for r in shown) for shown in SETTINGS]).effects()
    for kind in ("alone", "withheld", "Shapley value"):
        found = chosen(effects, kind)
        for reader, part in parts.items():
            row = found.loc[(reader, "")]
            numbers = row[["value", "share", "share_low", "share_high"]].tolist()
            assert numbers == pytest.approx([part, part / 4, part / 4, part / 4], abs=1e-12)
    assert np.abs(chosen(effects, "Shapley interaction")["value"]).max() < 1e-12


def test_alone_withheld_and_other_scores() -> None:
    values = random_values(seed=2)
    result = made_up(values)
    effects = result.effects("logit difference")
    place = {frozenset(shown): number for number, shown in enumerate(SETTINGS)}
    for reader in READERS:
        alone = 2 * (values[place[frozenset({reader})]] - values[0]).mean()
        without = 2 * (values[15] - values[place[frozenset(READERS) - {reader}]]).mean()
        assert chosen(effects, "alone").loc[(reader, ""), "value"] == pytest.approx(alone)
        assert chosen(effects, "withheld").loc[(reader, ""), "value"] == pytest.approx(without)
    hits = (values > 0).mean(axis=1)
    gained = chosen(result.effects("accuracy, full vocabulary"), "Shapley value")["value"].sum()
    assert gained == pytest.approx(hits[-1] - hits[0])
    with pytest.raises(UnknownName, match="no score named 'accuracy, label-restricted'"):
        result.effects("accuracy, label-restricted")


def test_a_shares_interval_is_the_bootstrap_of_the_ratio() -> None:
    values = random_values(n=30, seed=3)
    row = chosen(made_up(values).effects(), "withheld").loc[("values", "")]
    effect = values[15] - values[SETTINGS.index(READERS[1:])]
    gain, rng = values[15] - values[0], np.random.default_rng(5)
    drawn = rng.integers(30, size=(4000, 30))
    ratios = effect[drawn].mean(axis=1) / gain[drawn].mean(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    assert row["share"] == pytest.approx(effect.mean() / gain.mean())
    assert (row["share_low"], row["share_high"]) == pytest.approx((low, high), abs=0.03)


def test_where_the_gain_may_be_nothing_shares_have_no_interval() -> None:
    values = random_values(seed=4)
    values[-1] = values[0] + np.resize([1.0, -0.9], 7)
    effects = made_up(values).effects()
    assert effects["share_low"].isna().all()
    assert effects["share_high"].isna().all()
    assert np.isfinite(effects["share"]).all()
    values[-1] = values[0]
    assert made_up(values).effects()["share"].isna().all()
    one = made_up(random_values(n=1)).effects()
    assert one[["low", "share_low"]].isna().all(axis=None)
    assert chosen(one, "Shapley value")["share"].sum() == pytest.approx(1)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "blocks",
    [range(2), range(1, 4), range(1, 1), range(1, 3, 2), [], [range(1, 3)] * 2, [(1, 2)], 3],
)
def test_ranges_that_cannot_be_are_one_sentence(blocks) -> None:
    model = model_of()
    with pytest.raises(InvalidInput, match=r"distinct ones within range\(1, 3\)"):
        readers(model, task_of(), additive(model, layer=1), blocks=blocks, n=2)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_reader_and_an_unknown_range_are_named() -> None:
    result = made_up(random_values())
    with pytest.raises(UnknownName, match="no reader named 'value'; did you mean 'values'"):
        result.of("value")
    with pytest.raises(InvalidInput, match=r"range\(0, 2\) were not measured; use one of range\(1"):
        result.of("values", blocks=range(2))


def test_a_model_that_reads_the_stream_otherwise_is_refused(monkeypatch) -> None:
    model = model_of()
    monkeypatch.setattr(sys.modules["mechtv.analysis.readers"], "normed", lambda norm, x: x)
    with pytest.raises(InvalidInput, match=r"miss the injected run by \d+% of theta's effect"):
        readers(model, task_of(), additive(model, layer=1), n=2)


@pytest.mark.model
def test_on_the_real_model_all_readers_are_the_vector(model) -> None:
    task = mechtv.get_task("present-past")
    hidden = mechtv.extract_hidden_state(model, task, 24, shots=5, n=8, operation="add")
    found = readers(model, task, hidden, n=8)
    assert found.error < 1e-4
    plain, injected = (mechtv.evaluate(model, task, v, n=8) for v in (None, hidden))
    assert (found.of().correct == plain.correct).all()
    assert (found.of(*READERS).correct == injected.correct).all()
    effects = found.effects()
    shares = effects[effects.effect == "Shapley value"]["share"]
    assert shares.sum() == pytest.approx(1)
    assert shares.max() > 0.3
