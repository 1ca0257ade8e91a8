"""The maps inside a block, against what attention and norms really do."""

import functools

import pytest
import torch
from builders import D_MODEL, FAMILIES, N_HEADS, tiny
from einops import einsum, repeat
from torch.testing import assert_close
from vectors.naive import noise, random_ids, tiny_shared

from mechtv.analysis.circuits import (
    Circuits,
    check_heads,
    frozen,
    gain,
    is_parallel,
    normed,
    output_bias,
    post_norm,
)
from mechtv.errors import InvalidInput

EXACT = {"atol": 1e-10, "rtol": 1e-10}
LAYER, IDS = 1, torch.tensor([random_ids(7)])
LAYER_NORM = ("gpt2", "neox", "phi", "bloom", "opt", "native")


def seen(model, *names, hooks=()):
    """What stands at some hook points in one pass over one prompt."""
    found = {}
    keep = [(name, lambda x, hook: found.update({hook.name: x.detach()})) for name in names]
    with torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=[*hooks, *keep])
    return [found[model.get_hook_point(name).name] for name in names]


def point(name):
    return f"blocks.{LAYER}.attn.{name}"


@functools.cache
def measured(family):
    """How the attention output changes at the last token if its values there read x + shift."""
    model, shift = tiny_shared(family), noise(D_MODEL, seed=2)

    def move(x, hook):
        return torch.cat([x[:, :-1], x[:, -1:] + shift], dim=1)

    before, pattern = seen(model, point("hook_out"), point("hook_pattern"))
    after, same = seen(
        model, point("hook_out"), point("hook_pattern"), hooks=[(point("v.hook_in"), move)]
    )
    assert_close(pattern, same, **EXACT)
    return shift, pattern[0, :, -1, -1], (after - before)[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_query_head_writes_its_ov_map_times_its_attention(family) -> None:
    shift, attention, change = measured(family)
    written = Circuits.of(tiny_shared(family), LAYER).ov(shift)
    assert written.shape == (N_HEADS, D_MODEL)
    assert_close(einsum(attention, written, "head, head d -> d"), change, **EXACT)
    assert float(change.norm()) > 0.1


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "mistral", "gemma2", "gemma3"])
def test_query_heads_that_shared_values_in_another_order_would_be_wrong(family) -> None:
    shift, attention, change = measured(family)
    block, right = tiny_shared(family).blocks[LAYER], Circuits.of(tiny_shared(family), LAYER)
    interleaved = repeat(block.attn.W_V.detach(), "kv d w -> (share kv) d w", share=2)
    wrong = Circuits(layer=LAYER, values=interleaved, outputs=right.outputs).ov(shift)
    assert float((einsum(attention, wrong, "head, head d -> d") - change).norm()) > 0.1


def test_one_key_value_head_serves_every_query_head() -> None:
    circuits = Circuits.of(tiny("llama", num_key_value_heads=1), LAYER)
    assert circuits.values.shape[0] == N_HEADS
    assert torch.equal(circuits.values[0], circuits.values[3])
    assert not torch.equal(circuits.outputs[0], circuits.outputs[3])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_heads_own_outputs_and_their_matrices_are_the_same_maps(family) -> None:
    model = tiny_shared(family)
    circuits, x = Circuits.of(model, LAYER), noise(2, 3, D_MODEL)
    by_matrix = einsum(circuits.matrices(), x, "head o i, b pos i -> b pos head o")
    assert_close(circuits.ov(x), by_matrix, **EXACT)
    rank = torch.linalg.matrix_rank(circuits.matrices())
    assert rank.tolist() == [model.cfg.d_head] * N_HEADS
    assert not circuits.values.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_the_heads_and_the_output_bias_make_the_attention_output(family) -> None:
    model = tiny_shared(family)
    # what Bloom calls its attention's output holds the residual stream too
    name = f"blocks.{LAYER}.hook_attn_out" if family == "bloom" else point("hook_out")
    z, out = seen(model, point("hook_z"), name)
    heads = einsum(z, Circuits.of(model, LAYER).outputs, "b p head w, head w d -> b p d")
    bias = output_bias(model, LAYER)
    assert_close(heads + bias, out, **EXACT)
    assert (float(bias.abs().max()) > 0) == (family in LAYER_NORM)


@pytest.mark.parametrize("family", [*FAMILIES, "olmo"])
def test_the_frozen_norm_is_the_norm_itself_at_its_own_scale_but_for_a_bias(family) -> None:
    model = tiny_shared(family)
    names = [f"blocks.{LAYER}.ln1.hook_{what}" for what in ("in", "scale", "out")]
    norm, (x, scale, out) = model.blocks[LAYER].ln1, seen(model, *names)
    bias = getattr(norm.original_component, "bias", None)
    bias = torch.zeros(D_MODEL, dtype=x.dtype) if bias is None else bias.detach()
    assert_close(frozen(norm, scale, x) + bias, out, **EXACT)
    assert_close(normed(norm, x), out, **EXACT)
    assert (float(bias.abs().max()) > 0) == (family in LAYER_NORM)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "native"])
def test_the_frozen_norm_is_linear_and_centres_where_the_norm_does(family) -> None:
    norm = tiny_shared(family).blocks[LAYER].ln1
    x, y, scale = noise(3, D_MODEL), noise(3, D_MODEL, seed=1), torch.tensor([[0.5], [1.0], [3.0]])
    both = frozen(norm, scale, x) - 2 * frozen(norm, scale, y)
    assert_close(frozen(norm, scale, x - 2 * y), both, **EXACT)
    constant = frozen(norm, scale, torch.ones_like(x))
    assert (float(constant.abs().max()) < 1e-12) == (family in LAYER_NORM)


def test_a_scale_is_broadcast_over_states_and_states_over_scales() -> None:
    norm, x = tiny_shared("gpt2").blocks[LAYER].ln1, noise(2, 3, D_MODEL)
    scale = torch.tensor([[[0.5]], [[2.0]]])
    assert_close(frozen(norm, scale, x), frozen(norm, scale.expand(2, 3, 1), x), **EXACT)
    scales = torch.tensor([[0.5], [2.0]])
    one = x[0, :1]
    assert_close(frozen(norm, scales, one), frozen(norm, scales, one.expand(2, -1)), **EXACT)


def test_gemmas_gain_is_one_more_than_its_weight() -> None:
    norm = tiny_shared("gemma2").blocks[LAYER].ln1
    assert_close(gain(norm), 1 + norm.original_component.weight.detach())
    assert abs(float(gain(norm).mean()) - 1) < 0.1
    plain = tiny_shared("llama").blocks[LAYER].ln1
    assert_close(gain(plain), plain.original_component.weight.detach())


def test_families_are_told_apart() -> None:
    assert {f for f in FAMILIES if is_parallel(tiny_shared(f))} == {"neox", "phi"}
    with_norm = {f for f in FAMILIES if post_norm(tiny_shared(f), LAYER) is not None}
    assert with_norm == {"gemma2", "gemma3"}


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_the_post_norm_stands_between_attention_and_the_stream(family) -> None:
    model = tiny_shared(family)
    out, added = seen(model, point("hook_out"), f"blocks.{LAYER}.hook_attn_out")
    assert_close(normed(post_norm(model, LAYER), out), added, **EXACT)
    assert float((out - added).norm()) > 0.1


@pytest.mark.usefixtures("unchecked")
def test_heads_are_checked_and_ordered() -> None:
    model = tiny_shared("llama")
    assert check_heads(model, [(2, 1), (0, 3), (0, 1)]) == ((0, 1), (0, 3), (2, 1))
    for wrong in ([], 3, [(1,)], [(0, 1.5)], [3], None):
        with pytest.raises(InvalidInput, match="are no heads; give pairs"):
            check_heads(model, wrong)
    for layer, head in ((3, 0), (0, 4), (-1, 0), (0, -1)):
        sentence = rf"Head \({layer}, {head}\) does not exist: .* layers 0 to 2 with heads 0 to 3"
        with pytest.raises(InvalidInput, match=sentence):
            check_heads(model, [(0, 0), (layer, head)])
    with pytest.raises(InvalidInput, match=r"Head \(1, 2\) is named twice"):
        check_heads(model, [(1, 2), (0, 0), (1, 2)])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "native"])
def test_a_norm_of_a_short_type_takes_longer_states(family) -> None:
    norm, x = tiny(family, torch.bfloat16).blocks[LAYER].ln1, noise(3, D_MODEL).float()
    assert normed(norm, x).dtype == torch.float32
    rough = normed(norm, x.bfloat16())
    assert rough.dtype == torch.bfloat16
    assert_close(normed(norm, x), rough.float(), atol=0.05, rtol=0.05)
