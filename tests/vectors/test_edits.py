"""What each operation does, against hooks written by hand from the formulas."""

import itertools

import pytest
import torch
from torch.testing import assert_close
from vectors.naive import (
    HOOK_NAMES,
    IDS,
    SOME_FAMILIES,
    additive,
    by_hand,
    feature,
    noise,
    operation,
    tiny_shared,
    vector_of,
)

from mechtv.errors import InvalidInput
from mechtv.forward import last_logits, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Affine, Edit, Linear, Replace, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
OPERATIONS = ("add", "replace", "affine", "linear")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("component", HOOK_NAMES)
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_every_operation_equals_a_hook_written_by_hand(family: str, component: str) -> None:
    model = tiny_shared(family)
    two = IDS[:2]
    prompts = Prompts.from_ids(model, two)
    plain = last_logits(model, prompts)
    shape = feature(model, component)
    own, shared, every = ((-3, -1), (2, *shape)), ((-3, -1), shape), ("all", shape)
    cases = itertools.product(OPERATIONS, (own, shared, every))
    if family != "llama":  # the others with a kind of value each
        cases = zip(OPERATIONS, (own, own, every, shared), strict=True)
    for name, (positions, value) in cases:
        if (name, component) == ("linear", "z"):
            continue
        site = Site(layer=1, component=component, positions=positions)
        vector = vector_of(Edit(site=site, operation=operation(name, value)))
        logits = last_logits(model, prompts, vector)
        alone = torch.stack([by_hand(model, ids, vector)[-1] for ids in two])
        assert_close(logits, alone, **EXACT, msg=f"{name} at {site} with {value}")
        assert ((logits - plain).abs().amax(dim=1) > 1e-2).all(), f"{name} at {site} is seen"


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_edits_at_several_sites_act_together(family: str) -> None:
    model = tiny_shared(family)
    sites_and_operations = [
        (Site(layer=0, component="attn_out", positions=(-2, -1)), "add"),
        (Site(layer=0, component="mlp_out", positions="all"), "affine"),
        (Site(layer=1, component="z", positions=(-3,)), "replace"),
        (Site(layer=1, component="resid_post"), "linear"),
        (Site(layer=2, component="resid_pre", positions=(-3, -2)), "affine"),
    ]
    vector = vector_of(
        *(
            Edit(site=site, operation=operation(name, feature(model, site.component), seed))
            for seed, (site, name) in enumerate(sites_and_operations)
        )
    )
    alone = torch.stack([by_hand(model, ids, vector)[-1] for ids in IDS])
    assert_close(last_logits(model, Prompts.from_ids(model, IDS), vector), alone, **EXACT)


def test_edits_at_one_site_act_in_order() -> None:
    model = tiny_shared("llama")
    site = Site(layer=1)
    doubled = Affine(scale=torch.tensor(2.0, dtype=torch.float64), value=noise(32, seed=1))
    first, second = Add(value=noise(32)), doubled
    prompts = Prompts.from_ids(model, IDS)
    in_order = vector_of(Edit(site=site, operation=first), Edit(site=site, operation=second))
    both = Affine(scale=doubled.scale, value=2.0 * first.value + doubled.value)
    at_once = vector_of(Edit(site=site, operation=both))
    wanted = last_logits(model, prompts, at_once)
    assert_close(last_logits(model, prompts, in_order), wanted, **EXACT)
    turned = vector_of(*reversed(in_order.edits))
    assert (last_logits(model, prompts, turned) - wanted).abs().max() > 0.1


def test_rows_of_a_value_belong_to_the_positions_in_rising_order() -> None:
    site = Site(layer=1, positions=(-1, -3))
    assert site.positions == (-3, -1)
    model = tiny_shared("llama")
    value = noise(2, 32)
    vector = vector_of(Edit(site=site, operation=Add(value=value)))

    def hook(activation: torch.Tensor, hook: object) -> torch.Tensor:
        after = activation.clone()
        after[0, -3] += value[0]
        after[0, -1] += value[1]
        return after

    ids = IDS[1]
    wanted = model.run_with_hooks(
        torch.tensor([ids]), fwd_hooks=[("blocks.1.hook_resid_pre", hook)]
    )
    every = torch.arange(len(ids))[None]
    assert_close(run(model, Prompts.from_ids(model, [ids]), vector, columns=every), wanted, **EXACT)


def test_only_the_chosen_columns_of_an_activation_change() -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS, padding_side="right")
    name = "blocks.1.hook_resid_pre"
    seen = {}
    call = {"attention_mask": prompts.mask.long(), "names_filter": name}
    _, seen["before"] = model.run_with_cache(prompts.tokens, **call)
    with additive(model, positions=(-3, -1)).applied(model):
        _, seen["after"] = model.run_with_cache(prompts.tokens, **call)
    changed = (seen["after"][name] != seen["before"][name]).any(dim=-1)
    columns = [torch.nonzero(row).flatten().tolist() for row in changed]
    assert columns == [[len(ids) - 3, len(ids) - 1] for ids in IDS]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_float32_vector_leaves_a_bfloat16_activation_bfloat16(name: str) -> None:
    model = tiny_shared("llama", torch.bfloat16)
    site = Site(layer=1, positions=(-2, -1))
    vector = vector_of(Edit(site=site, operation=operation(name, (32,)))).to(torch.float32)
    prompts = Prompts.from_ids(model, IDS)
    hook_name = "blocks.1.hook_resid_pre"
    call = {"attention_mask": prompts.mask.long(), "names_filter": hook_name}
    _, before = model.run_with_cache(prompts.tokens, **call)
    with vector.applied(model):
        logits, after = model.run_with_cache(prompts.tokens, **call)
    assert after[hook_name].dtype == logits.dtype == torch.bfloat16
    # computed in float32 and rounded once
    h, what = before[hook_name][:, -1].float(), vector.edits[0].operation
    wanted = {
        Add: lambda: h + what.value,
        Replace: lambda: what.value.expand_as(h),
        Affine: lambda: what.scale * h + what.value,
        Linear: lambda: h + h @ what.matrix.T,
    }[type(what)]()
    assert torch.equal(after[hook_name][:, -1], wanted.to(torch.bfloat16))


def test_a_vector_in_a_lower_precision_than_the_model_is_used_as_it_is() -> None:
    model = tiny_shared("llama")
    vector = additive(model).to(torch.bfloat16)
    prompts = Prompts.from_ids(model, IDS)
    wanted = last_logits(model, prompts, vector.to(torch.float64))
    assert last_logits(model, prompts, vector).dtype == torch.float64
    assert_close(last_logits(model, prompts, vector), wanted, **EXACT)


# --- what does not fit ---


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("component", "positions", "shape", "sentence"),
    [
        ("resid_pre", (-1,), (), "value of shape () does not fit resid_pre[1] at -1"),
        ("resid_pre", (-1,), (2, 32), "one for each of the 1 positions"),
        (
            "attn_out",
            (-3, -1),
            (3, 32),
            "give one value of 1 dimension(s), or one for each of the 2",
        ),
        ("mlp_out", (-1,), (1, 1, 32), "does not fit mlp_out[1] at -1"),
        ("z", (-1,), (16,), "give one value of 2 dimension(s)"),
        ("z", (-2, -1), (3, 4, 16), "does not fit z[1] at -2,-1"),
        ("resid_post", "all", (3, 32), "does not fit resid_post[1] at all; give one value of 1"),
    ],
)
def test_a_value_that_does_not_fit_its_site_is_one_sentence(
    component: str, positions: tuple[int, ...] | str, shape: tuple[int, ...], sentence: str
) -> None:
    site = Site(layer=1, component=component, positions=positions)
    with pytest.raises(InvalidInput) as caught:
        Edit(site=site, operation=Add(value=noise(*shape)))
    assert sentence in str(caught.value)
    assert "all positions" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_a_linear_edit_needs_a_square_matrix() -> None:
    with pytest.raises(InvalidInput, match=r"needs a square matrix; this one is \(32, 16\)"):
        Edit(site=Site(layer=1), operation=Linear(matrix=noise(32, 16)))


@pytest.mark.usefixtures("unchecked")
def test_a_linear_edit_cannot_stand_at_the_heads() -> None:
    with pytest.raises(InvalidInput, match="cannot stand at z"):
        Edit(site=Site(layer=1, component="z"), operation=Linear(matrix=noise(16, 16)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("component", "shape", "sentence"),
    [
        ("resid_pre", (31,), "This vector has width 31 but the model's d_model is 32"),
        ("z", (4, 8), "This vector has width 8 but the model's d_head is 16"),
        ("z", (3, 16), "This vector has 3 heads but the model has 4"),
        ("z", (1, 16), "This vector has 1 heads but the model has 4"),
    ],
)
def test_a_vector_for_another_model_is_one_sentence(
    component: str, shape: tuple[int, ...], sentence: str
) -> None:
    model = tiny_shared("llama")
    site = Site(layer=1, component=component)
    vector = vector_of(Edit(site=site, operation=Add(value=noise(*shape))))
    with pytest.raises(InvalidInput, match=sentence), vector.applied(model):
        pass
    with pytest.raises(InvalidInput, match=sentence):
        last_logits(model, Prompts.from_ids(model, IDS), vector)


def test_a_linear_map_for_another_width_is_one_sentence() -> None:
    model = tiny_shared("llama")
    vector = vector_of(Edit(site=Site(layer=1), operation=Linear(matrix=noise(16, 16))))
    with pytest.raises(InvalidInput, match="This vector has width 16"), vector.applied(model):
        pass


def test_a_layer_beyond_the_model_is_one_sentence() -> None:
    model = tiny_shared("llama")
    sentence = "layer=3 does not exist: this model has layers 0 to 2"
    with pytest.raises(InvalidInput, match=sentence), additive(model, layer=3).applied(model):
        pass
