"""Additive vectors form a vector space; applying a sum is applying its terms."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from vectors.naive import (
    IDS,
    SOME_FAMILIES,
    additive,
    by_hand,
    noise,
    operation,
    tiny_shared,
    vector_of,
)

from mechtv.errors import InvalidInput
from mechtv.forward import last_logits
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Site, TaskVector

EXACT = {"atol": 1e-12, "rtol": 1e-12}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def add_at(site: Site, *shape: int, seed: int = 0, **card: Any) -> TaskVector:
    edit = Edit(site=site, operation=Add(value=noise(*shape, seed=seed)))
    return TaskVector(edits=(edit,), card=Card(method="learned", **card))


HERE, THERE = Site(layer=1), Site(layer=2, component="attn_out", positions=(-2, -1))


def test_values_at_one_site_are_summed() -> None:
    theta, fv = add_at(HERE, 32, seed=1), add_at(HERE, 32, seed=2)
    total = theta + 0.5 * fv
    assert total.sites == (HERE,)
    assert_close(total.value(), theta.value() + 0.5 * fv.value(), **EXACT)
    assert_close((theta - fv).value(), theta.value() - fv.value(), **EXACT)
    assert_close((-theta).value(), -theta.value(), **EXACT)
    assert_close((theta * 3.0).value(), 3.0 * theta.value(), **EXACT)
    assert_close(theta.scaled(2.0).value(), 2 * theta.value(), **EXACT)


def test_values_at_other_sites_are_joined() -> None:
    theta, fv = add_at(HERE, 32, seed=1), add_at(THERE, 2, 32, seed=2)
    total = theta + fv
    assert total.sites == (HERE, THERE)
    assert torch.equal(total.edits[0].operation.value, theta.value())
    assert torch.equal(total.edits[1].operation.value, fv.value())
    # the same place in other positions is another site
    other = add_at(Site(layer=1, positions=(-2, -1)), 32)
    assert len((theta + other).edits) == 2


def test_a_shared_value_and_one_for_each_position_are_summed_position_by_position() -> None:
    shared, each = add_at(THERE, 32, seed=1), add_at(THERE, 2, 32, seed=2)
    for total in (shared + each, each + shared):
        assert_close(total.value(), each.value() + shared.value()[None], **EXACT)


def test_edits_at_one_site_of_one_vector_are_summed_too() -> None:
    twice = vector_of(*add_at(HERE, 32, seed=1).edits, *add_at(HERE, 32, seed=2).edits)
    one, other = (edit.operation.value for edit in twice.edits)
    assert_close(twice.scaled(2.0).value(), 2 * (one + other), **EXACT)
    more = add_at(HERE, 32, seed=3)
    assert_close((twice + more).value(), one + other + more.value(), **EXACT)


@pytest.mark.parametrize("acts_on", ["prompt", "both"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_applying_a_sum_equals_applying_its_terms(family: str, acts_on: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS)
    a = vector_of(
        *additive(model, layer=0, component="z", seed=1).edits,
        *additive(model, layer=1, positions=(-3, -1), seed=2).edits,
        acts_on=acts_on,
    )
    b = vector_of(
        *additive(model, layer=1, positions=(-3, -1), seed=3).edits,
        *additive(model, layer=1, positions="all", seed=4).edits,
        acts_on=acts_on,
    )
    total = a + 0.5 * b
    logits = last_logits(model, prompts, total)
    with a.applied(model):
        nested = last_logits(model, prompts, b.scaled(0.5))
    assert_close(logits, nested, atol=1e-12, rtol=1e-10)
    both = vector_of(*a.edits, *b.scaled(0.5).edits, acts_on=acts_on)
    alone = torch.stack([by_hand(model, ids, both)[-1] for ids in IDS])
    assert_close(logits, alone, atol=1e-10, rtol=1e-10)


def test_a_vector_minus_itself_does_nothing() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    theta = additive(model, positions=(-3, -1))
    plain = last_logits(model, prompts)
    assert_close(last_logits(model, prompts, theta - theta), plain, atol=1e-12, rtol=1e-12)
    assert torch.equal(last_logits(model, prompts, 0.0 * theta), last_logits(model, prompts))


def test_vectors_of_several_precisions_are_summed_in_the_wider() -> None:
    theta, fv = add_at(HERE, 32, seed=1), add_at(HERE, 32, seed=2)
    assert (theta.to(torch.bfloat16) + fv.to(torch.float32)).value().dtype == torch.float32
    assert (0.5 * theta.to(torch.bfloat16)).value().dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["add", "replace", "affine", "linear"])
def test_a_vector_in_another_precision_is_the_same_vector(name: str) -> None:
    vector = vector_of(Edit(site=THERE, operation=operation(name, (2, 32))), acts_on="both")
    half = vector.to(torch.bfloat16)
    assert type(half.edits[0].operation) is type(vector.edits[0].operation)
    assert (half.sites, half.acts_on, half.card) == (vector.sites, "both", vector.card)
    for key, tensor in vector.edits[0].operation.tensors().items():
        assert torch.equal(half.edits[0].operation.tensors()[key], tensor.to(torch.bfloat16))
    same = vector.to("cpu").edits[0].operation.tensors()
    assert all(torch.equal(same[k], x) for k, x in vector.edits[0].operation.tensors().items())


def test_arithmetic_leaves_its_operands_alone() -> None:
    theta, fv = add_at(HERE, 32, seed=1), add_at(HERE, 32, seed=2)
    before = theta.value().clone(), fv.value().clone()
    _ = theta + fv, theta - fv, -theta, theta.scaled(3.0), 2.0 * fv
    assert torch.equal(theta.value(), before[0])
    assert torch.equal(fv.value(), before[1])


def test_the_card_of_a_sum_names_its_sources_and_keeps_what_they_agree_on() -> None:
    theta = add_at(HERE, 32, model="tiny", task="past", seed=1)
    fv = add_at(HERE, 32, model="tiny", task="plural", seed=2)
    card = (theta + 0.5 * fv).card
    assert card.method == "sum"
    assert (card.model, card.task) == ("tiny", "unknown")
    first, second = card.sources
    assert first == theta.card
    assert (second.method, second.settings, second.sources) == (
        "scaled",
        {"factor": 0.5},
        (fv.card,),
    )
    assert second.task == "plural"
    assert (-theta).card.settings == {"factor": -1.0}


def test_acts_on_survives_arithmetic() -> None:
    theta = add_at(HERE, 32).acting_on("both")
    for vector in (theta + theta, theta - theta, -theta, 2.0 * theta, theta.to(torch.float32)):
        assert vector.acts_on == "both"


@pytest.mark.parametrize("name", ["replace", "affine", "linear"])
def test_only_additive_vectors_are_added_or_scaled(name: str) -> None:
    theta = add_at(HERE, 32)
    other = vector_of(Edit(site=THERE, operation=operation(name, (2, 32))))
    sentence = f"Only additive vectors can be added or scaled; this one has a '{name}' edit at "
    operations: list[Callable[[], TaskVector]] = [
        lambda: theta + other,
        lambda: other + theta,
        lambda: theta - other,
        lambda: other - theta,
        lambda: other.scaled(2.0),
        lambda: 2.0 * other,
        lambda: -other,
    ]
    for wrong in operations:
        with pytest.raises(InvalidInput, match=sentence) as caught:
            wrong()
        assert str(THERE) in str(caught.value)


def test_vectors_that_act_on_other_tokens_are_not_added() -> None:
    theta = add_at(HERE, 32)
    for combine in (operator.add, operator.sub):
        with pytest.raises(InvalidInput, match="acts on 'prompt', the other on 'new'") as caught:
            combine(theta, theta.acting_on("new"))
        assert ".acting_on(" in str(caught.value)


def test_vectors_of_other_widths_are_not_added() -> None:
    narrow, wide = add_at(HERE, 16), add_at(HERE, 32)
    with pytest.raises(InvalidInput, match=r"shapes \(16,\) and \(32,\) at resid_pre\[1\] at -1"):
        narrow + wide
    heads, more = (add_at(Site(layer=1, component="z"), n, 8) for n in (2, 4))
    with pytest.raises(InvalidInput, match=r"shapes \(2, 8\) and \(4, 8\) at z\[1\] at -1"):
        heads + more
    one = add_at(Site(layer=1, component="z"), 1, 8)
    with pytest.raises(InvalidInput, match=r"shapes \(1, 8\) and \(4, 8\)"):
        one + more


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_vector_or_number_is_a_type_error() -> None:
    theta = add_at(HERE, 32)
    with pytest.raises(TypeError, match="unsupported operand"):
        theta + 1.0
    with pytest.raises(TypeError, match="unsupported operand"):
        theta - 1.0
    with pytest.raises(TypeError, match="unsupported operand"):
        theta * theta
    with pytest.raises(TypeError):
        "2" * theta


@pytest.mark.usefixtures("unchecked")
def test_any_real_number_scales_a_vector() -> None:
    theta = add_at(HERE, 32)
    for two in (2, np.float32(2), np.int64(2), True + True):
        scaled = two * theta
        assert torch.equal(scaled.value(), 2.0 * theta.value())
        assert torch.equal((theta * two).value(), 2.0 * theta.value())
        assert type(scaled.card.settings["factor"]) is float


def test_a_placed_vector_is_the_same_value_at_each_place() -> None:
    model = tiny_shared("llama")
    theta = additive(model, layer=1)
    one = TaskVector(
        edits=(Edit(site=HERE, operation=Add(value=theta.value()[0])),), card=Card(method="made")
    )
    placed = one.placed((2, 0), (-1, -3))
    assert str(theta.placed((2, 0), (-1, -3)).sites) == str(placed.sites)  # a row for one position
    assert torch.equal(theta.placed([2]).value(), one.value())
    wanted = vector_of(
        *(
            Edit(
                site=Site(layer=layer, positions=(-3, -1)),
                operation=Add(value=torch.stack([one.value()] * 2)),
            )
            for layer in (0, 2)
        )
    )
    ids = [5, 9, 33, 12, 80]
    assert placed.sites == wanted.sites
    assert_close(by_hand(model, ids, placed), by_hand(model, ids, wanted), atol=0, rtol=0)
    assert placed.card.sources == (one.card,)
    assert placed.card.settings == {"layers": [0, 2], "positions": [-3, -1]}
    everywhere = one.placed([1], "all")
    assert everywhere.sites == (Site(layer=1, positions="all"),)


def test_several_values_cannot_be_placed() -> None:
    several = additive(tiny_shared("llama"), positions=(-2, -1))
    two = vector_of(*several.edits, *several.edits)
    for vector in (several, two):
        with pytest.raises(InvalidInput, match="holds several values; only a single one"):
            vector.placed([1])
    with pytest.raises(InvalidInput, match=r"layers=\[1, 1\] names a layer twice"):
        add_at(HERE, 32).placed([1, 1])
