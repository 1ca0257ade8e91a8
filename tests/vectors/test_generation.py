"""Generation under a vector: on the prompt, on new tokens or on both, with a cache or without.

The reference decodes by full passes of one unpadded row, with hooks at columns fixed by hand.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from builders import FAMILIES
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.model_bridge import TransformerBridge
from vectors.naive import (
    SOME_FAMILIES,
    TEXTS,
    additive,
    generate_by_hand,
    ids_of,
    noise,
    tiny_shared,
    vector_of,
)

from mechtv.forward import last_logits
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Edit, Replace, Site, TaskVector

EXACT = {"atol": 1e-9, "rtol": 1e-9}
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}  # to which Hugging Face rounds the logits it generates with
STEPS = 3
GREEDY: dict[str, Any] = {"max_new_tokens": STEPS, "do_sample": False, "stop_at_eos": False}
QUIET: dict[str, Any] = {**GREEDY, "verbose": False}
HUGGING_FACE = tuple(family for family in SOME_FAMILIES if family != "native")
ACTS_ON = ("prompt", "new", "both")
Decoded = tuple[list[int], Tensor]  # new tokens, and the logits that chose them


def two_sites(model: TransformerBridge, acts_on: str) -> TaskVector:
    """Edits of one position, of two and of all, so that every kind is generated with."""
    edits = (
        additive(model, layer=0, component="attn_out", positions="all", seed=1).edits
        + additive(model, layer=1, positions=(-3, -1), seed=2).edits
        + additive(model, layer=2, component="z", seed=3).edits
    )
    return vector_of(*edits, acts_on=acts_on)


def generated(output: Any) -> tuple[list[list[int]], Tensor]:
    """The new tokens of each row, and the logits (row x step x vocabulary) that chose them."""
    return output.sequences[:, -STEPS:].tolist(), torch.stack(output.logits, dim=1)


def decoded(family: str, vector: TaskVector | None, texts: Sequence[str]) -> list[Decoded]:
    model = tiny_shared(family)
    return [generate_by_hand(model, ids_of(model, text), vector, STEPS) for text in texts]


@functools.cache
def decoded_at_two_sites(family: str, acts_on: str) -> list[Decoded]:
    """What `two_sites` makes of the texts; three tests compare with it."""
    return decoded(family, two_sites(tiny_shared(family), acts_on), TEXTS)


def check(output: Any, wanted: list[Decoded]) -> None:
    tokens, logits = generated(output)
    close = EXACT if logits.dtype == torch.float64 else FLOAT32
    assert tokens == [alone for alone, _ in wanted]
    assert_close(logits, torch.stack([x for _, x in wanted]), **close, check_dtype=False)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("acts_on", ACTS_ON)
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_cached_and_uncached_generation_equal_full_passes_by_hand(
    family: str, acts_on: str
) -> None:
    model = tiny_shared(family)
    vector, wanted = two_sites(model, acts_on), decoded_at_two_sites(family, acts_on)
    for cached in (True, False):
        call = {**QUIET, "use_past_kv_cache": cached, "output_logits": True}
        with vector.applied(model):
            one = model.generate(TEXTS[0], **call)
            several = model.generate(list(TEXTS), **call)
        check(one, wanted[:1])
        check(several, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_without_a_vector_is_right_with_and_without_a_cache(family: str) -> None:
    """The canary for transformers 5.24, whose cache stays empty in the bridge."""
    model = tiny_shared(family)
    wanted = decoded(family, None, TEXTS)
    for cached in (True, False):
        call = {**QUIET, "use_past_kv_cache": cached, "output_logits": True}
        check(model.generate(list(TEXTS), **call), wanted)


@pytest.mark.parametrize("acts_on", ACTS_ON)
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_hugging_face_generation_equals_full_passes_by_hand(family: str, acts_on: str) -> None:
    model = tiny_shared(family)
    vector = two_sites(model, acts_on)
    for cached in (True, False):
        cache = {"use_past_kv_cache": cached, "use_cache": cached}
        with vector.applied(model):
            output = model.hf_generate(
                list(TEXTS), **GREEDY, **cache, return_type="tokens", output_logits=True
            )
        check(output, decoded_at_two_sites(family, acts_on))


@pytest.mark.parametrize("acts_on", ACTS_ON)
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_streamed_generation_equals_full_passes_by_hand(family: str, acts_on: str) -> None:
    model = tiny_shared(family)
    vector = two_sites(model, acts_on)
    call = {**QUIET, "return_type": "tokens", "max_tokens_per_yield": 1}
    for cached in (True, False):
        with vector.applied(model):
            chunks = list(model.generate_stream(TEXTS[0], **call, use_past_kv_cache=cached))
        alone, _ = decoded_at_two_sites(family, acts_on)[0]
        assert torch.cat(chunks, dim=1)[0].tolist() == ids_of(model, TEXTS[0]) + alone


def test_a_stream_that_is_left_unfinished_does_not_change_other_calls() -> None:
    model = tiny_shared("llama")
    vector = two_sites(model, "both")
    prompts = Prompts.from_texts(model, TEXTS[2:])
    wanted = last_logits(model, prompts, vector)
    alone, _ = decoded_at_two_sites("llama", "both")[1]
    call = {**QUIET, "return_type": "tokens", "max_tokens_per_yield": 1}
    with vector.applied(model):
        stream = model.generate_stream(TEXTS[1], **call)
        first = next(stream)
        assert_close(model(TEXTS[2])[:, -1], wanted, **EXACT)
        rest = list(stream)
        assert torch.cat([first, *rest], dim=1)[0, -STEPS:].tolist() == alone
        next(model.generate_stream(TEXTS[1], **call))
        assert_close(model(TEXTS[2])[:, -1], wanted, **EXACT)


@pytest.mark.parametrize("acts_on", ACTS_ON)
def test_a_padded_tensor_with_its_mask_generates_as_its_rows_do_alone(acts_on: str) -> None:
    model = tiny_shared("llama")
    vector = two_sites(model, acts_on)
    prompts = Prompts.from_texts(model, TEXTS)
    for cached in (True, False):
        call = {**QUIET, "use_past_kv_cache": cached, "output_logits": True}
        with vector.applied(model):
            output = model.generate(prompts.tokens, attention_mask=prompts.mask.long(), **call)
        check(output, decoded_at_two_sites("llama", acts_on))


def test_embeddings_generate_as_their_tokens_do() -> None:
    model = tiny_shared("llama")
    vector = two_sites(model, "both")
    tokens = torch.tensor([ids_of(model, TEXTS[0])])
    embeddings = model.original_model.get_input_embeddings()(tokens)
    with vector.applied(model):
        output = model.generate(embeddings, **QUIET, output_logits=True)
    check(output, decoded_at_two_sites("llama", "both")[:1])


@pytest.mark.parametrize("cached", [True, False])
def test_a_large_vector_at_the_prompts_last_token_decides_the_first_new_token(
    cached: bool,
) -> None:
    model = tiny_shared("llama")
    call = {**QUIET, "use_past_kv_cache": cached, "return_type": "tokens"}
    plain = model.generate(TEXTS[0], **call)[0, -STEPS:].tolist()
    vector = additive(model, layer=2, component="resid_post", scale=1000.0)
    direction = model.original_model.model.norm(vector.value())
    wanted = int((model.original_model.lm_head(direction)).argmax())
    with vector.applied(model):
        steered = model.generate(TEXTS[0], **call)[0, -STEPS:].tolist()
    assert steered[0] == wanted != plain[0]


@pytest.mark.parametrize("cached", [True, False])
def test_a_vector_on_new_tokens_leaves_the_first_new_token_as_it_was(cached: bool) -> None:
    model = tiny_shared("llama")
    call = {**QUIET, "use_past_kv_cache": cached, "output_logits": True}
    _, plain = generated(model.generate(list(TEXTS), **call))
    vector = additive(model, layer=1, scale=1000.0)
    with vector.acting_on("new").applied(model):
        _, new = generated(model.generate(list(TEXTS), **call))
    with vector.acting_on("prompt").applied(model):
        _, prompt = generated(model.generate(list(TEXTS), **call))
    assert_close(new[:, 0], plain[:, 0], **EXACT)
    assert ((new[:, 1] - plain[:, 1]).abs().amax(dim=-1) > 0.1).all()
    assert ((prompt[:, 0] - plain[:, 0]).abs().amax(dim=-1) > 0.1).all()


@pytest.mark.parametrize("acts_on", ACTS_ON)
def test_a_replacement_generates_alike_with_and_without_a_cache(acts_on: str) -> None:
    model = tiny_shared("llama")
    edit = Edit(site=Site(layer=1, positions=(-2, -1)), operation=Replace(value=noise(2, 32)))
    vector = vector_of(edit, acts_on=acts_on)
    wanted = decoded("llama", vector, TEXTS)
    for cached in (True, False):
        call = {**QUIET, "use_past_kv_cache": cached, "output_logits": True}
        with vector.applied(model):
            output = model.generate(list(TEXTS), **call)
        check(output, wanted)


def test_generation_ends_where_it_failed_and_the_next_call_is_a_prompt_again() -> None:
    model = tiny_shared("llama")
    vector = additive(model)
    wanted = last_logits(model, Prompts.from_texts(model, TEXTS[2:]), vector)
    steps = []

    def hook(activation: Tensor, hook: object) -> None:
        steps.append(activation.shape[1])
        if len(steps) == 2:
            raise ZeroDivisionError

    with vector.applied(model):
        with pytest.raises(ZeroDivisionError), model.hooks([("blocks.0.hook_resid_pre", hook)]):
            model.generate(TEXTS[1], **QUIET)
        assert_close(model(TEXTS[2])[:, -1], wanted, **EXACT)
    assert steps[1] == 1, "the second step had a cache"


def test_one_generation_after_another_begins_with_its_own_prompt() -> None:
    model = tiny_shared("llama")
    vector = two_sites(model, "both")
    with vector.applied(model):
        outputs = [model.generate(text, **QUIET, output_logits=True) for text in TEXTS]
    for output, wanted in zip(outputs, decoded_at_two_sites("llama", "both"), strict=True):
        check(output, [wanted])


def test_the_cache_returned_by_generate_holds_the_vector_at_the_prompts_last_token() -> None:
    model = tiny_shared("llama")
    vector = additive(model)
    ids = ids_of(model, TEXTS[0])
    name = "blocks.1.hook_resid_pre"
    with vector.applied(model):
        _, cache = model.generate(TEXTS[0], **QUIET, return_cache=True, names_filter=name)
    alone, _ = generate_by_hand(model, ids, vector, STEPS)
    _, plain = model.run_with_cache(torch.tensor([ids + alone]), names_filter=name)
    difference = torch.zeros(len(ids) + STEPS, 32, dtype=torch.float64)
    difference[len(ids) - 1] = vector.value()
    assert_close(cache[name][0] - plain[name][0], difference, **EXACT)
