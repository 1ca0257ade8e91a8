"""Logits at chosen columns, activations at chosen sites, and prompts in batches."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from vectors.naive import (
    HOOK_NAMES,
    IDS,
    SOME_FAMILIES,
    additive,
    by_hand,
    hooks_by_hand,
    random_ids,
    tiny_shared,
    vector_of,
)

from mechtv.errors import InvalidInput
from mechtv.forward import capture, in_batches, last_logits, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SIDES = ("left", "right")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


# --- logits ---


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_logits_at_columns_are_those_of_the_full_pass(family: str, side: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    full = model(prompts.tokens, attention_mask=prompts.mask.long())
    width = prompts.tokens.shape[1]
    every = torch.arange(width).expand(len(IDS), -1)
    assert_close(run(model, prompts, columns=every), full, **EXACT)
    columns = torch.tensor([[6, 4, 4], [0, 3, 1], [2, 6, 5]])  # in no order, one of them twice
    wanted = full[torch.arange(3)[:, None], columns]
    assert_close(run(model, prompts, columns=columns), wanted, **EXACT)
    turned = columns.T.contiguous().T  # the same numbers, laid out otherwise
    assert_close(run(model, prompts, columns=turned), wanted, **EXACT)


@pytest.mark.parametrize("side", SIDES)
def test_without_columns_the_logits_are_those_of_each_last_prompt_token(side: str) -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    vector = additive(model)
    assert run(model, prompts, vector).shape == (3, 1, 384)
    assert torch.equal(run(model, prompts, vector)[:, 0], last_logits(model, prompts, vector))
    wanted = run(model, prompts, vector, columns=prompts.last[:, None])
    assert torch.equal(run(model, prompts, vector), wanted)


def test_the_logits_at_a_models_own_columns_do_not_depend_on_the_others() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    vector = additive(model, positions=(-3, -1))
    every = run(model, prompts, vector, columns=torch.arange(7).expand(3, -1))
    for column in range(7):
        one = run(model, prompts, vector, columns=torch.full((3, 1), column))
        assert_close(one[:, 0], every[:, column], **EXACT)


# --- activations ---


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("injected", [False, True])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_captured_activations_are_those_of_each_prompt_alone(
    family: str, injected: bool, side: str
) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    vector = vector_of(
        *additive(model, layer=0, component="mlp_out", positions="all", seed=1).edits,
        *additive(model, layer=1, positions=(-3, -1), seed=2).edits,
        *additive(model, layer=1, component="z", seed=3).edits,
    )
    sites = [
        Site(layer=layer, component=component, positions=positions)
        for layer, positions in ((1, (-3, -1)), (2, (-2,)), (0, "all"))
        for component in HOOK_NAMES
    ]
    taken = capture(model, prompts, sites, vector if injected else None)
    assert set(taken) == set(sites)
    names = [site.hook_name for site in sites]
    for row, ids in enumerate(IDS):
        hooks = hooks_by_hand(vector, len(ids), len(ids)) if injected else []
        with model.hooks(fwd_hooks=hooks):
            _, cache = model.run_with_cache(torch.tensor([ids]), names_filter=names)
        for site in sites:
            alone = cache[site.hook_name][0]
            if site.positions == "all":
                assert_close(taken[site][row][prompts.mask[row]], alone, **EXACT)
            else:
                assert_close(taken[site][row], alone[list(site.positions)], **EXACT)


def test_what_is_captured_does_not_depend_on_where_the_pass_ends() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    vector = additive(model, layer=0)
    sites = [
        Site(layer=layer, component=component, positions="all")
        for layer in range(3)
        for component in HOOK_NAMES
    ]
    together = capture(model, prompts, sites, vector)
    for site in sites:
        assert torch.equal(capture(model, prompts, [site], vector)[site], together[site])


def test_a_capture_ends_behind_the_last_block_that_it_needs() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    for layer in range(3):
        seen: list[str] = []

        def look(activation: Tensor, hook: object) -> None:
            seen.append(hook.name)  # noqa: B023

        names = [f"blocks.{later}.mlp.hook_out" for later in range(3)]
        with model.hooks([(name, look) for name in names]):
            capture(model, prompts, [Site(layer=layer, component="resid_post")])
        assert seen == names[: layer + 1]


def test_what_follows_a_prompt_is_not_captured() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS, answers=((7, 8, 9), (10, 11), (12, 13, 14)))
    site = Site(layer=1, positions=(-3, -1))
    wanted = capture(model, prompts, [site])[site]
    assert_close(capture(model, prompts.with_answers(), [site])[site], wanted, **EXACT)


def test_a_row_too_short_for_a_captured_position_is_one_sentence() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    with pytest.raises(InvalidInput, match="Position -4 does not exist in a prompt"):
        capture(model, prompts, [Site(layer=0, positions=(-4, -1))])


def test_a_captured_layer_beyond_the_model_is_one_sentence() -> None:
    model = tiny_shared("llama")
    with pytest.raises(InvalidInput, match="layer=7 does not exist: this model has layers 0 to 2"):
        capture(model, Prompts.from_ids(model, IDS), [Site(layer=7)])


def test_nothing_to_capture_is_one_sentence() -> None:
    model = tiny_shared("llama")
    with pytest.raises(InvalidInput, match="There are no sites to capture; give at least one"):
        capture(model, Prompts.from_ids(model, IDS), [])


# --- batches ---


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 100])
def test_rows_come_back_in_order_whatever_the_batch_size(batch_size: int, side: str) -> None:
    model = tiny_shared("llama")
    lengths = (9, 4, 12, 4, 7, 3, 20)
    ids = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    prompts = Prompts.from_ids(model, ids, padding_side=side)
    vector = additive(model, positions=(-3, -1))
    sizes: list[list[int]] = []

    def compute(batch: Prompts) -> Tensor:
        sizes.append(batch.lengths.tolist())
        assert batch.tokens.shape[1] == int(batch.lengths.max()), "padded no more than needed"
        return last_logits(model, batch, vector)

    logits = in_batches(prompts, compute, batch_size=batch_size, show=False)
    alone = torch.stack([by_hand(model, row, vector)[-1] for row in ids])
    assert_close(logits, alone, **EXACT)
    assert_close(logits, last_logits(model, prompts, vector), **EXACT)
    assert [length for batch in sizes for length in batch] == sorted(lengths)
    assert all(len(batch) == batch_size for batch in sizes[:-1])


def test_a_batch_knows_its_rows() -> None:
    model = tiny_shared("llama")
    answers = ((7, 8), (9,), (10, 11, 12))
    prompts = Prompts.from_ids(model, IDS, answers=answers, texts=("one", "two", "three"))

    def compute(batch: Prompts) -> Tensor:
        order = [("one", "two", "three").index(text) for text in batch.texts]
        assert batch.answers == tuple(answers[row] for row in order)
        for row, number in enumerate(order):
            assert batch.tokens[row][batch.mask[row]].tolist() == IDS[number]
        return torch.tensor(order)

    assert in_batches(prompts, compute, batch_size=2, show=False).tolist() == [0, 1, 2]


@pytest.mark.parametrize("batch_size", [0, -3])
def test_a_batch_holds_at_least_one_row(batch_size: int) -> None:
    prompts = Prompts.from_ids(tiny_shared("llama"), IDS)
    with pytest.raises(InvalidInput, match=f"batch_size={batch_size} is too small; use 1 or more"):
        in_batches(prompts, lambda batch: batch.last, batch_size=batch_size)
