"""What each operation does, against hooks written by hand from the formulas."""

import itertools
from dataclasses import replace

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
from mechtv.vectors.edits import ResidualMLP

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


# --- maps ---


def mlp(depth: int = 3, width: int = 32) -> ResidualMLP:
    """A random one; its tensors are large enough that every part is seen."""
    return ResidualMLP(
        weights=noise(depth, width, width, seed=1, scale=0.2),
        biases=noise(depth, width, seed=2, scale=0.5),
        centre=noise(width, seed=3),
        scale=torch.tensor(1.7, dtype=torch.float64),
        gain=torch.tensor(0.6, dtype=torch.float64),
    )


def mapped_by_hand(operation: Linear | ResidualMLP, h: torch.Tensor) -> torch.Tensor:
    """One state under a map, as its formula says, component by component."""
    if isinstance(operation, Linear):
        assert operation.bias is not None
        return h + torch.einsum("ij,j->i", operation.matrix, h) + operation.bias
    x = (h - operation.centre) / operation.scale
    last = len(operation.weights) - 1
    for layer in range(last):
        inner = torch.einsum("ij,j->i", operation.weights[layer], x) + operation.biases[layer]
        x = x + inner * 0.5 * (1 + torch.erf(inner / 2**0.5))  # gelu
    out = torch.einsum("ij,j->i", operation.weights[last], x) + operation.biases[last]
    return h + operation.gain * out


MAPS = {
    "affine map": lambda: Linear(matrix=noise(32, 32, scale=0.3), bias=noise(32, seed=1)),
    "one layer": lambda: mlp(depth=1),
    "four layers": lambda: mlp(depth=4),
}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("positions", [(-1,), (-3, -1), "all"], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "native"])
def test_a_map_equals_a_hook_written_by_hand(
    family: str, positions: tuple[int, ...] | str, name: str
) -> None:
    model, made = tiny_shared(family), MAPS[name]()
    vector = vector_of(Edit(site=Site(layer=1, positions=positions), operation=made))

    def hook(activation: torch.Tensor, hook: object) -> torch.Tensor:
        after = activation.clone()
        length = activation.shape[1]
        places = range(length) if positions == "all" else [length + p for p in positions]
        for place in places:
            after[0, place] = mapped_by_hand(made, activation[0, place])
        return after

    wanted = [
        model.run_with_hooks(torch.tensor([ids]), fwd_hooks=[("blocks.1.hook_resid_pre", hook)])
        for ids in IDS
    ]
    prompts = Prompts.from_ids(model, IDS)
    given = last_logits(model, prompts, vector)
    assert_close(given, torch.cat([logits[:, -1] for logits in wanted]), **EXACT)
    assert (given - last_logits(model, prompts)).abs().amax(dim=1).min() > 1e-2


def test_a_bias_of_zeros_is_none() -> None:
    model, prompts = tiny_shared("llama"), Prompts.from_ids(tiny_shared("llama"), IDS)
    matrix = noise(32, 32, scale=0.3)
    with_zeros, without, shifted = (
        vector_of(Edit(site=Site(layer=1), operation=Linear(matrix=matrix, bias=bias)))
        for bias in (torch.zeros(32).double(), None, noise(32))
    )
    wanted = last_logits(model, prompts, without)
    assert torch.equal(last_logits(model, prompts, with_zeros), wanted)
    assert (last_logits(model, prompts, shifted) - wanted).abs().max() > 0.1
    assert list(without.edits[0].operation.tensors()) == ["matrix"]
    assert (without.n_parameters, shifted.n_parameters) == (32 * 32, 32 * 33)
    assert list(shifted.table()["tensor"]) == ["matrix", "bias"]
    assert {x.dtype for x in shifted.to(torch.float32).edits[0].operation.tensors().values()} == {
        torch.float32
    }
    assert without.to(torch.float32).edits[0].operation.bias is None


def test_a_map_of_many_parts_is_counted_and_moved_whole() -> None:
    vector = vector_of(Edit(site=Site(layer=1), operation=mlp(depth=3)))
    assert vector.n_parameters == 3 * 32 * 32 + 3 * 32 + 32 + 2
    assert vector.edits[0].width == 32
    assert set(vector.table()["operation"]) == {"residual_mlp"}
    moved = vector.to(torch.float32).edits[0].operation.tensors()
    assert len(moved) == 5
    assert {x.dtype for x in moved.values()} == {torch.float32}


@pytest.mark.parametrize("name", MAPS)
def test_a_float32_map_of_bfloat16_states_is_computed_in_float32(name: str) -> None:
    operation = MAPS[name]().map(lambda x: x.float())
    h = noise(4, 32).to(torch.bfloat16)
    slot = torch.zeros(4, dtype=torch.long)
    given = operation(h, slot)
    assert given.dtype == torch.float32
    assert torch.equal(given, operation(h.float(), slot))


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
def test_a_map_cannot_stand_at_the_heads() -> None:
    site = Site(layer=1, component="z")
    with pytest.raises(InvalidInput, match=r"Linear edit .* cannot stand at z"):
        Edit(site=site, operation=Linear(matrix=noise(16, 16)))
    with pytest.raises(InvalidInput, match=r"ResidualMLP edit .* cannot stand at z"):
        Edit(site=site, operation=mlp(width=16))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("shape", [(31,), (1, 32), ()])
def test_a_bias_of_another_width_is_one_sentence(shape: tuple[int, ...]) -> None:
    sentence = f"matrix of shape (32, 32) needs a bias of shape (32,); this one is {shape}"
    with pytest.raises(InvalidInput) as caught:
        Edit(site=Site(layer=1), operation=Linear(matrix=noise(32, 32), bias=noise(*shape)))
    assert sentence in str(caught.value)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("weights", (32, 32), "needs weights of shape (layers, width, width); these are (32, 32)"),
        ("weights", (3, 32, 16), "these are (3, 32, 16)"),
        ("weights", (0, 32, 32), "these are (0, 32, 32)"),
        ("biases", (2, 32), "needs biases of shape (3, 32); this one is (2, 32)"),
        ("centre", (16,), "needs centre of shape (32,); this one is (16,)"),
        ("scale", (1,), "needs scale of shape (); this one is (1,)"),
        ("gain", (32,), "needs gain of shape (); this one is (32,)"),
    ],
)
def test_parts_of_an_mlp_that_do_not_fit_are_one_sentence(
    name: str, shape: tuple[int, ...], sentence: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        Edit(site=Site(layer=1), operation=replace(mlp(), **{name: noise(*shape)}))
    assert sentence in str(caught.value)


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


@pytest.mark.parametrize("made", [Linear(matrix=noise(16, 16)), mlp(width=16)], ids=type)
def test_a_map_for_another_width_is_one_sentence(made: Linear | ResidualMLP) -> None:
    model = tiny_shared("llama")
    vector = vector_of(Edit(site=Site(layer=1), operation=made))
    with pytest.raises(InvalidInput, match="This vector has width 16"), vector.applied(model):
        pass


def test_a_layer_beyond_the_model_is_one_sentence() -> None:
    model = tiny_shared("llama")
    sentence = "layer=3 does not exist: this model has layers 0 to 2"
    with pytest.raises(InvalidInput, match=sentence), additive(model, layer=3).applied(model):
        pass
