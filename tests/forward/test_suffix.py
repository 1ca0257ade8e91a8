"""A pass that recomputes only what its edits can change gives what the full hooked pass gives."""

import functools
from dataclasses import replace

import pytest
import torch
from builders import FAMILIES, N_LAYERS
from forward.engine import all_cut, counted, frozen_tiny, kept_bytes, reasons
from torch import Tensor
from torch.testing import assert_close
from vectors.naive import (
    HOOK_NAMES,
    additive,
    by_hand,
    feature,
    noise,
    operation,
    random_ids,
    vector_of,
)

from mechtv.errors import InvalidInput
from mechtv.forward import (
    capture,
    forget,
    full_passes,
    keep_at_most,
    kept,
    last_logits,
    logits_at,
    run,
    steady,
)
from mechtv.methods.frozen import frozen
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Linear, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SIDES = ("left", "right")
LENGTHS = (21, 5, 14)
IDS = [random_ids(length, seed) for seed, length in enumerate(LENGTHS)]
ANSWERS = ((7, 8, 9), (10, 11), (12,))

shared = functools.cache(frozen_tiny)


def prompts_of(family: str, side: str = "left", answers: bool = False) -> Prompts:
    prompts = Prompts.from_ids(shared(family), IDS, padding_side=side, answers=ANSWERS)
    return prompts.with_answers() if answers else prompts


def places(prompts: Prompts) -> tuple[Tensor, Tensor]:
    row = torch.tensor([0, 0, 0, 1, 1, 2])
    return row, prompts.last[row] + torch.tensor([0, 1, 2, 0, 1, 0])


def both(family: str, prompts: Prompts, vector, where=None):
    """Logits and their gradients in the vector's tensors: in parts, and by the full pass.

    In parts it is, but for the native model's early layers: see `test_a_model_without_a_cache`.
    """
    found = []
    tensors = [x for edit in vector.edits for x in edit.operation.tensors().values()]
    for tensor in tensors:
        tensor.requires_grad_()
    where = (torch.arange(len(prompts)), prompts.last) if where is None else where
    for full in (False, True):
        if full:
            with full_passes():
                logits = logits_at(shared(family), prompts, *where, vector)
        else:
            early = family == "native" and min(site.layer for site in vector.sites) < 2
            with pytest.MonkeyPatch.context() as patch, all_cut(patch, expected=not early):
                logits = logits_at(shared(family), prompts, *where, vector)
        loss = (logits.log_softmax(-1) * noise(*logits.shape, seed=9)).sum()
        found.append((logits.detach(), torch.autograd.grad(loss, tensors)))
    return found


# --- equal to the full pass ---


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("component", HOOK_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_full_pass(
    family: str, component: str, side: str
) -> None:
    prompts = prompts_of(family, side)
    for layer in (0, N_LAYERS - 1):
        for positions in ((-1,), (-4, -3, -1)):
            vector = additive(shared(family), layer=layer, component=component, positions=positions)
            ours, full = both(family, prompts, vector)
            assert_close(ours, full, **EXACT)
            assert full[1][0].abs().max() > 1e-3


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_behind_the_prompts_are_no_obstacle(family: str, side: str) -> None:
    prompts = prompts_of(family, side, answers=True)
    for acts_on in ("prompt", "new", "both"):
        vector = additive(shared(family), layer=2, acts_on=acts_on)
        ours, full = both(family, prompts, vector, places(prompts))
        assert_close(ours, full, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_at_several_layers_and_positions_start_where_the_first_does(family: str) -> None:
    prompts = prompts_of(family)
    model = shared(family)
    vector = vector_of(
        *additive(model, layer=2, component="z", positions=(-2,), seed=1).edits,
        *additive(model, layer=1, component="mlp_out", positions=(-4, -1), seed=2).edits,
        *additive(model, layer=2, component="resid_post", seed=3).edits,
        *additive(model, layer=1, component="attn_out", seed=4).edits,
        Edit(site=Site(layer=2), operation=operation("linear", ())),
    )
    ours, full = both(family, prompts, vector)
    assert_close(ours, full, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_at_all_positions_skips_the_blocks_before_it(family: str) -> None:
    vector = additive(shared(family), layer=2, positions="all")
    ours, full = both(family, prompts_of(family), vector)
    assert_close(ours, full, **EXACT)


@pytest.mark.parametrize("name", ["replace", "affine", "linear"])
@pytest.mark.parametrize("component", ["resid_pre", "mlp_out"])
def test_every_operation_is_cut_alike(name: str, component: str) -> None:
    site = Site(layer=1, component=component, positions=(-3, -1))
    vector = vector_of(Edit(site=site, operation=operation(name, (2, 32))))
    ours, full = both("llama", prompts_of("llama"), vector)
    assert_close(ours, full, **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_and_rows_of_one_length_are_cut_alike(family: str) -> None:
    model = shared(family)
    for ids in ([IDS[0]], [random_ids(9, seed) for seed in range(3)], [[5], [6]]):
        prompts = Prompts.from_ids(model, ids)
        ours, full = both(family, prompts, additive(model, layer=2))
        assert_close(ours, full, **EXACT)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom"])
def test_without_gradients_long_prompts_are_cut_too(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(family)
    ids = [random_ids(length, length) for length in (30, 24)]
    prompts, vector = Prompts.from_ids(model, ids), additive(model, layer=1)
    with torch.no_grad(), counted(monkeypatch) as passes:
        found = last_logits(model, prompts, vector)
    assert passes.cut == 1
    by_hands = torch.stack([by_hand(model, row, vector)[-1] for row in ids])
    assert_close(found, by_hands, **EXACT)


def test_wanted_columns_before_the_edit_are_those_of_the_plain_model(monkeypatch) -> None:
    model, prompts = shared("llama"), prompts_of("llama")
    vector = additive(model, layer=1)
    vector.edits[0].operation.value.requires_grad_()
    columns = prompts.last[:, None] - torch.tensor([[3, 1, 0]])
    with all_cut(monkeypatch):
        found = run(model, prompts, vector, columns=columns)
    assert_close(found[:, :2], run(model, prompts, columns=columns)[:, :2], **EXACT)
    with full_passes():
        assert_close(found, run(model, prompts, vector, columns=columns), **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_some_tokens_are_unembedded_as_all_are(family: str, monkeypatch) -> None:
    model, prompts = shared(family), prompts_of(family)
    vector, tokens = additive(model, layer=2), torch.tensor([7, 300, 8])
    for gradients in (False, True):
        vector.edits[0].operation.value.requires_grad_(gradients)
        with all_cut(monkeypatch, expected=gradients or family != "native"):
            some = last_logits(model, prompts, vector, tokens=tokens)
        with full_passes():
            assert_close(some, last_logits(model, prompts, vector)[:, tokens], **EXACT)


@pytest.mark.parametrize("family", ["llama", "gemma2", "neox", "native"])
def test_what_is_captured_under_a_vector_is_what_the_full_pass_has(
    family: str, monkeypatch
) -> None:
    model, prompts = shared(family), prompts_of(family, answers=True)
    first = 2 if family == "native" else 1
    vector = additive(model, layer=first, positions=(-2, -1))
    value = vector.edits[0].operation.value.requires_grad_()
    for last_layer in range(first, 3):
        sites = [
            Site(layer=layer, component=component, positions=(-3, -1))
            for layer in range(first, last_layer + 1)
            for component in HOOK_NAMES
        ]
        with all_cut(monkeypatch):
            ours = capture(model, prompts, sites, vector)
        with full_passes():
            full = capture(model, prompts, sites, vector)
        assert_close(ours, full, **EXACT)
        total = [sum(x.square().sum() for x in found.values()) for found in (ours, full)]
        assert_close(*(torch.autograd.grad(x, value) for x in total), **EXACT)


def test_single_precision_stays_within_its_rounding(monkeypatch) -> None:
    for family in ("llama", "gpt2", "gemma3"):
        model = frozen_tiny(family, dtype=torch.float32)
        prompts = Prompts.from_ids(model, IDS)
        vector = additive(model, layer=1).to(torch.float32)
        vector.edits[0].operation.value.requires_grad_()
        with all_cut(monkeypatch):
            found = last_logits(model, prompts, vector)
        with full_passes():
            assert_close(found, last_logits(model, prompts, vector), atol=1e-4, rtol=0)


def test_a_short_model_takes_a_wide_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen_tiny("llama", dtype=torch.bfloat16)
    prompts = Prompts.from_ids(model, IDS)
    value = noise(32).float().requires_grad_()
    vector = vector_of(Edit(site=Site(layer=1), operation=Add(value=value)))
    with counted(monkeypatch) as passes:
        found = last_logits(model, prompts, vector)
    assert passes.cut == 1
    assert found.dtype == torch.bfloat16
    with full_passes():
        full = last_logits(model, prompts, vector)
    assert (found - full).abs().max() < 0.05 * full.abs().max()
    (gradient,) = torch.autograd.grad(found.float().square().mean(), value)
    assert gradient.dtype == torch.float32


# --- what is kept ---


def test_prompts_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen_tiny("llama")
    prompts = Prompts.from_ids(model, IDS)
    seen = _runs(model)
    for seed in range(3):
        vector = additive(model, layer=1, seed=seed)
        vector.edits[0].operation.value.requires_grad_()
        last_logits(model, prompts, vector)
    assert seen == [(3, 21), (2, 21)], "one pass over the prompts, one to check two of the rows"


def test_any_rows_of_kept_prompts_begin_from_there() -> None:
    model = frozen_tiny("llama")
    ids = [random_ids(3 + seed % 17, seed) for seed in range(150)]  # three batches
    answers = tuple((7,) * (1 + seed % 3) for seed in range(150))
    forced = Prompts.from_ids(model, ids, answers=answers).with_answers()
    vector = additive(model, layer=1)
    row = torch.arange(150)
    seen = _runs(model)
    with kept(model, forced, vector, places=(row, forced.last)):
        n_before = len(seen)
        for rows in ([3, 140, 7, 66], [5], list(range(149, 100, -7))):
            some = forced.select(rows)
            where = torch.arange(len(rows)), some.last
            found = logits_at(model, some, *where, vector)
            assert len(seen) == n_before, "nothing ran again"
            with full_passes():
                full = logits_at(model, some, *where, vector)
            seen[:] = seen[:n_before]
            assert_close(found, full, **EXACT)


def test_what_was_kept_for_a_block_goes_afterwards() -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=1)
    seen = _runs(model)
    with kept(model, prompts, vector), kept(model, prompts, vector):
        pass
    assert len(seen) == 3, "two sets, of which the first was checked"
    vector.edits[0].operation.value.requires_grad_()
    last_logits(model, prompts, vector)
    assert len(seen) == 4


def test_an_earlier_layer_needs_the_prompts_again_and_a_later_one_does_not() -> None:
    model = frozen_tiny("llama")
    prompts, seen = Prompts.from_ids(model, IDS), _runs(model)
    for layer, passes in ((1, 2), (2, 0), (1, 0), (0, 2), (2, 0)):
        vector = additive(model, layer=layer)
        vector.edits[0].operation.value.requires_grad_()
        del seen[:]
        last_logits(model, prompts, vector)
        assert len(seen) == passes


def test_no_more_is_kept_than_allowed() -> None:
    model = frozen_tiny("llama")
    vector = additive(model, layer=1)
    vector.edits[0].operation.value.requires_grad_()
    many = [Prompts.from_ids(model, [random_ids(20, seed)] * 4) for seed in range(6)]
    sizes, seen = [], _runs(model)
    for prompts in many:
        last_logits(model, prompts, vector)
        sizes.append(kept_bytes(model))
    assert sizes == [sizes[0] * (n + 1) for n in range(6)]
    with keep_at_most(3 * sizes[0]):
        last_logits(model, many[0], vector)
        assert kept_bytes(model) == 3 * sizes[0]
        del seen[:]
        last_logits(model, many[0], vector)
        assert not seen, "the one that was used last stays"
        last_logits(model, many[1], vector)
        assert seen
    with keep_at_most(0):
        last_logits(model, many[2], vector)
        assert kept_bytes(model) == 0
    last_logits(model, many[2], vector)
    assert kept_bytes(model) == sizes[0]
    forget(model)
    assert kept_bytes(model) == 0


def test_a_set_that_is_too_large_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=1)
    seen = _runs(model)
    with keep_at_most(1000), kept(model, prompts, vector):
        assert not seen
    assert "more than 1000 bytes" in reasons(caplog)[0]


def test_a_negative_budget_is_one_sentence() -> None:
    with (
        pytest.raises(InvalidInput, match="n_bytes=-1 is negative; use 0"),
        keep_at_most(-1),
    ):
        pass


def test_calls_with_equal_arguments_give_equal_bits() -> None:
    model = frozen_tiny("llama", dtype=torch.float32)
    prompts, other = Prompts.from_ids(model, IDS), Prompts.from_ids(model, IDS[:2])
    vector = additive(model, layer=1).to(torch.float32)
    vector.edits[0].operation.value.requires_grad_()
    first = last_logits(model, prompts, vector)
    last_logits(model, other, vector)
    assert torch.equal(first, last_logits(model, prompts, vector))
    forget(model)
    assert torch.equal(first, last_logits(model, prompts, vector))


def test_what_ran_without_gradients_serves_those_with_them() -> None:
    model = frozen_tiny("llama")
    ids = [random_ids(3 + seed % 40, seed) for seed in range(70)]  # more than one batch
    prompts, vector = Prompts.from_ids(model, ids), additive(model, layer=2)
    value = vector.edits[0].operation.value.requires_grad_()
    with torch.inference_mode(), kept(model, prompts, vector):
        last_logits(model, prompts.select([3, 5]), vector)
    with torch.inference_mode():
        last_logits(model, prompts, vector)
    found = last_logits(model, prompts, vector)
    with full_passes():
        full = last_logits(model, prompts, vector)
    assert_close(found, full, **EXACT)
    gradients = [torch.autograd.grad(x.square().sum(), value) for x in (found, full)]
    assert_close(*gradients, **EXACT)


# --- what is not the same model any more ---


WAYS = ["in place", "through .data", "one number", "rows swapped", "new", "scaling", "forward"]


@pytest.mark.parametrize("how", WAYS)
def test_a_changed_model_is_seen(how: str) -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    before = last_logits(model, prompts, vector)
    projection = model.original_model.model.layers[0].self_attn.v_proj.original_component
    weight = projection.weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(2.0)
        elif how == "through .data":
            weight.data[3] = 0.0
        elif how == "one number":
            weight.data[3, 5] += 0.5
        elif how == "rows swapped":
            weight.data[[0, 1]] = weight.data[[1, 0]]
        elif how == "scaling":
            model.original_model.model.layers[0].self_attn._original_component.scaling *= 3
        elif how == "forward":
            mlp = model.original_model.model.layers[0].mlp
            original = mlp.forward
            vars(mlp)["forward"] = lambda *args, **kwargs: 3 * original(*args, **kwargs)
        else:
            projection.weight = torch.nn.Parameter(-weight, requires_grad=False)
    found = last_logits(model, prompts, vector)
    with full_passes():
        assert_close(found, last_logits(model, prompts, vector), **EXACT)
    assert (found - before).abs().max() > 1e-6


def test_a_write_to_the_weights_inside_a_block_is_seen() -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    weight = model.original_model.model.layers[0].self_attn.v_proj.original_component.weight
    with kept(model, prompts, vector):
        before = last_logits(model, prompts, vector)
        with torch.no_grad():
            weight.mul_(2.0)
        found = last_logits(model, prompts, vector)
        with full_passes():
            assert_close(found, last_logits(model, prompts, vector), **EXACT)
    assert (found - before).abs().max() > 1e-6


def test_inside_a_steady_block_the_weights_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mechtv.forward.memory as memory

    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=1)
    vector.edits[0].operation.value.requires_grad_()
    looks = []
    monkeypatch.setattr(memory, "stamp", lambda model: looks.append(1) or (1,))
    for _ in range(2):
        last_logits(model, prompts, vector)
    assert len(looks) == 2
    with steady(model):
        for _ in range(3):
            last_logits(model, prompts, vector)
    assert len(looks) == 3


# --- where the full pass has to run ---


def _full_only(model, monkeypatch, caplog) -> str:
    """The reason for which the pass under a vector is a full one."""
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    with counted(monkeypatch) as passes:
        last_logits(model, prompts, vector)
    assert (passes.cut, passes.full) == (0, 1)
    assert not kept_bytes(model)
    (reason,) = reasons(caplog)
    return reason


@pytest.mark.parametrize("layer", range(N_LAYERS))
@pytest.mark.parametrize("kept_before", [False, True])
def test_a_users_hook_on_any_block_fires_on_every_column(
    layer: int, kept_before: bool, monkeypatch, caplog
) -> None:
    model = frozen_tiny("llama")
    vector = additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    prompts = Prompts.from_ids(model, IDS)
    if kept_before:
        last_logits(model, prompts, vector)
        monkeypatch.setattr("mechtv.forward.memory.Memory.nbytes", 0)
    seen = []
    name = f"blocks.{layer}.hook_mlp_out"

    def look(activation: Tensor, hook: object) -> None:
        seen.append(tuple(activation.shape))

    with model.hooks([(name, look)]):
        reason = _full_only(model, monkeypatch, caplog)
    assert seen == [(3, 21, 32)]
    assert reason.startswith("The full pass runs: a hook stands at blocks.")


def test_a_users_hook_that_edits_is_obeyed() -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    before = last_logits(model, prompts, vector)
    with model.hooks([("blocks.0.hook_resid_pre", lambda x, hook: 2 * x)]):
        during = last_logits(model, prompts, vector)
        with full_passes():
            assert torch.equal(during, last_logits(model, prompts, vector))
    assert (during - before).abs().max() > 1e-3
    assert torch.equal(last_logits(model, prompts, vector), before)


def test_a_hook_of_torch_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    seen = []
    layer = model.original_model.model.layers[0]
    handle = layer.mlp.register_forward_hook(lambda *_: seen.append(1))
    assert "a hook stands on the model's" in _full_only(model, monkeypatch, caplog)
    assert seen == [1]
    handle.remove()


def test_a_hook_of_torch_at_a_hook_point_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    point = model.get_hook_point("blocks.0.hook_resid_pre")
    handle = point.register_forward_hook(lambda *_: None)
    assert "a hook stands at" in _full_only(model, monkeypatch, caplog)
    handle.remove()


def test_a_pre_hook_of_torch_at_a_hook_point_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    point = model.get_hook_point("blocks.0.hook_resid_pre")
    handle = point.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    assert "a hook stands at" in _full_only(model, monkeypatch, caplog)
    handle.remove()


def test_a_hook_on_all_modules_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "a hook stands on all modules" in _full_only(model, monkeypatch, caplog)
    finally:
        handle.remove()


def test_padding_between_tokens_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    mask = prompts.mask.clone()
    mask[2, 15] = False
    with all_cut(monkeypatch, expected=False):
        last_logits(model, replace(prompts, mask=mask), vector)
    assert "a prompt has padding between its tokens" in reasons(caplog)[0]


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_model_that_attends_both_ways_is_not_cut_wrongly(family: str) -> None:
    both_ways = {"gemma3": {"use_bidirectional_attention": True}, "llama": {"is_causal": False}}
    model = frozen_tiny(family, **both_ways[family])
    for side in SIDES:
        prompts = Prompts.from_ids(model, IDS, padding_side=side)
        for layer in range(N_LAYERS):
            vector = additive(model, layer=layer, positions=(-2, -1))
            vector.edits[0].operation.value.requires_grad_()
            found = last_logits(model, prompts, vector)
            with full_passes():
                assert_close(found, last_logits(model, prompts, vector), **EXACT)


def test_running_out_of_memory_is_no_property_of_the_model(monkeypatch) -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr("mechtv.forward.fitness.prefill", fail)
        with pytest.raises(RuntimeError, match="not enough memory"):
            last_logits(model, prompts, vector)
    with all_cut(monkeypatch):
        last_logits(model, prompts, vector)


def test_a_backward_hook_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    with model.hooks(bwd_hooks=[("blocks.2.hook_mlp_out", lambda gradient, hook: None)]):
        assert "a hook stands at" in _full_only(model, monkeypatch, caplog)


def test_another_vector_on_the_model_needs_the_full_pass() -> None:
    model = frozen_tiny("llama")
    prompts = Prompts.from_ids(model, IDS)
    first, second = additive(model, layer=0, seed=1), additive(model, layer=2, seed=2)
    second.edits[0].operation.value.requires_grad_()
    with first.applied(model):
        found = last_logits(model, prompts, second)
    both_at_once = last_logits(model, prompts, vector_of(*first.edits, *second.edits))
    assert_close(found, both_at_once, **EXACT)


def test_dropout_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("gpt2", resid_pdrop=0.5)
    model.original_model.train()
    assert "training mode" in _full_only(model, monkeypatch, caplog)


def test_gradients_of_the_weights_need_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    next(model.original_model.parameters()).requires_grad_()
    assert "gradients of the weights are wanted" in _full_only(model, monkeypatch, caplog)


def test_autocast_needs_the_full_pass(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast is on" in _full_only(model, monkeypatch, caplog)


def test_a_model_whose_parts_differ_from_the_whole_runs_in_full(monkeypatch, caplog) -> None:
    model = frozen_tiny("llama")
    norm = model.original_model.model.norm
    monkeypatch.setattr(
        "mechtv.forward.fitness.unembedded", lambda model, x: model.unembed(x) + 0 * norm.weight[0]
    )
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    with counted(monkeypatch) as passes:
        found = last_logits(model, prompts, vector)
        found = last_logits(model, prompts, vector)
    assert passes.cut == 0
    with full_passes():
        assert torch.equal(found, last_logits(model, prompts, vector))
    said = reasons(caplog)
    assert "cannot go on from earlier positions (its numbers differ by" in said[0]
    assert "The full pass runs: this model cannot be run in parts (its numbers differ by" in said[1]
    assert len(said) == 2, "said once"


def test_blocks_with_unknown_arguments_run_in_full(monkeypatch, caplog) -> None:
    import mechtv.forward.arguments as arguments

    monkeypatch.setattr(arguments, "_POSITIONS", ())
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    found = last_logits(model, prompts, vector)
    with full_passes():
        assert torch.equal(found, last_logits(model, prompts, vector))
    assert "its blocks take a position_embeddings of shape" in reasons(caplog)[0]


def test_a_model_without_a_cache_says_that_it_recomputes_all_positions(caplog) -> None:
    model = frozen_tiny("native")
    vector = additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    last_logits(model, Prompts.from_ids(model, IDS), vector)
    assert reasons(caplog) == [
        "All positions are recomputed, earlier blocks alone are skipped: this model cannot go on "
        "from earlier positions (it has no cache of keys and values)."
    ]


def test_columns_of_padding_are_left_to_the_full_pass(monkeypatch) -> None:
    model, prompts = shared("llama"), prompts_of("llama")
    every = torch.arange(prompts.tokens.shape[1]).expand(3, -1)
    vector = additive(model, layer=2)
    vector.edits[0].operation.value.requires_grad_()
    with counted(monkeypatch) as passes:
        found = run(model, prompts, vector, columns=every)
    assert (passes.cut, passes.full) == (0, 0)
    for row, ids in enumerate(IDS):
        alone = by_hand(model, ids, vector)
        assert_close(found[row][prompts.mask[row]], alone, **EXACT)


def test_nothing_stays_on_the_model_after_an_error(monkeypatch) -> None:
    model = frozen_tiny("llama")
    prompts, vector = Prompts.from_ids(model, IDS), additive(model, layer=1)
    vector.edits[0].operation.value.requires_grad_()
    before = last_logits(model, prompts, vector)

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(vars(model.blocks[2]), "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            last_logits(model, prompts, vector)
        with pytest.raises(KeyboardInterrupt):
            last_logits(model, Prompts.from_ids(model, IDS[:1]), vector)
    assert not any(block._forward_pre_hooks for block in model.blocks)
    assert torch.equal(last_logits(model, prompts, vector), before)


@pytest.mark.parametrize("column", [-1, 21])
def test_a_column_that_does_not_exist_is_one_sentence(column: int) -> None:
    with pytest.raises(InvalidInput, match=f"Column {column} does not exist in prompts of 21"):
        run(shared("llama"), prompts_of("llama"), columns=torch.full((3, 1), column))


def test_a_vector_that_does_not_fit_is_refused_as_by_the_full_pass() -> None:
    model, prompts = shared("llama"), prompts_of("llama")
    with pytest.raises(InvalidInput, match="layer=7 does not exist"):
        last_logits(model, prompts, additive(model, layer=7))
    with pytest.raises(InvalidInput, match="Position -6 does not exist in a prompt of 5 tokens"):
        last_logits(model, prompts, additive(model, positions=(-6,)))
    narrow = vector_of(Edit(site=Site(layer=1), operation=Add(value=noise(31))))
    with pytest.raises(InvalidInput, match="width 31 but the model's d_model is 32"):
        last_logits(model, prompts, narrow)
    assert feature(model, "resid_pre") == (32,)
    square = vector_of(Edit(site=Site(layer=2), operation=Linear(matrix=noise(31, 31))))
    with pytest.raises(InvalidInput, match="width 31"):
        last_logits(model, prompts, square)


def _runs(model) -> list[tuple[int, ...]]:
    """The shapes of all passes that the wrapped model makes from now on."""
    seen: list[tuple[int, ...]] = []
    inner = model.original_model
    original = inner.forward

    def forward(input_ids, *args, **kwargs):
        seen.append(tuple(input_ids.shape))
        return original(input_ids, *args, **kwargs)

    functools.update_wrapper(forward, original)
    inner.forward = forward
    return seen


# --- the real model ---


@pytest.mark.model
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layer", [0, 15, 29])
@pytest.mark.parametrize("positions", [(-1,), (-3, -2, -1)])
def test_the_default_models_logits_are_those_of_the_full_pass(
    model, layer: int, positions: tuple[int, ...], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["jump -> jumped, walk -> walked, talk ->", "one, two, three, four, five, six,", "The"]
    prompts = Prompts.from_texts(model, [*texts[:2], texts[0] + " talked, look ->"])
    if side == "right":
        ids = [row[real].tolist() for row, real in zip(prompts.tokens, prompts.mask, strict=True)]
        prompts = Prompts.from_ids(model, ids, padding_side="right")
    generator = torch.Generator().manual_seed(0)
    value = 30 * torch.randn(len(positions), 576, generator=generator)  # of the stream's size
    with frozen(model):
        value = value.requires_grad_()
        edit = Edit(site=Site(layer=layer, positions=positions), operation=Add(value=value))
        results = []
        with all_cut(monkeypatch):
            results.append(last_logits(model, prompts, vector_of(edit)))
        with full_passes():
            results.append(last_logits(model, prompts, vector_of(edit)))
        gradients = [torch.autograd.grad(x.log_softmax(-1)[:, 7].sum(), value)[0] for x in results]
    assert_close(*(x.detach() for x in results), atol=1e-4, rtol=0)
    assert_close(*gradients, atol=1e-4, rtol=0)
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[1].norm()
    plain = last_logits(model, prompts)
    assert (results[1] - plain).abs().max() > 0.1
