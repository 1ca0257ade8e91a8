"""Inside `applied` every TransformerLens call sees the vector, each row at its own last token."""

import pytest
import torch
from builders import tiny
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.model_bridge import TransformerBridge
from vectors.naive import (
    SOME_FAMILIES,
    TEXTS,
    additive,
    by_hand,
    ids_of,
    tiny_shared,
    vector_of,
)

from mechtv.errors import InvalidInput
from mechtv.forward import last_logits, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import TaskVector

EXACT = {"atol": 1e-10, "rtol": 1e-10}


def three_kinds(model: TransformerBridge, acts_on: str = "prompt") -> TaskVector:
    edits = (
        additive(model, layer=0, component="mlp_out", positions="all", seed=1).edits
        + additive(model, layer=1, positions=(-3, -1), seed=2).edits
        + additive(model, layer=2, component="z", seed=3).edits
    )
    return vector_of(*edits, acts_on=acts_on)


def rows_by_hand(model: TransformerBridge, vector: TaskVector | None) -> list[Tensor]:
    return [by_hand(model, ids_of(model, text), vector) for text in TEXTS]


def check(logits: Tensor, wanted: list[Tensor], side: str = "right") -> None:
    """Compare the real columns of a padded batch."""
    for row, alone in zip(logits, wanted, strict=True):
        real = row[: len(alone)] if side == "right" else row[-len(alone) :]
        assert_close(real, alone, **EXACT)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_every_call_gives_the_logits_of_run(family: str) -> None:
    model = tiny_shared(family)
    vector, texts = three_kinds(model), list(TEXTS)
    prompts = Prompts.from_texts(model, texts)
    wanted = rows_by_hand(model, vector)
    every = torch.arange(prompts.tokens.shape[1]).repeat(len(texts), 1)
    check(run(model, prompts, vector, columns=every), wanted, "left")
    tokens, mask = prompts.tokens, prompts.mask.long()
    right = Prompts.from_texts(model, texts, padding_side="right")
    with vector.applied(model) as same:
        assert same is model
        check(model(texts[0]), wanted[:1])
        check(model([texts[0]]), wanted[:1])
        check(model(torch.tensor(ids_of(model, texts[0]))), wanted[:1])
        check(model(input=texts), wanted)
        check(model(texts), wanted)
        check(model.forward(texts), wanted)
        check(model(texts, padding_side="left"), wanted, "left")
        check(model(tokens, attention_mask=mask), wanted, "left")
        check(model(right.tokens, attention_mask=right.mask.long()), wanted)
        check(model.run_with_cache(texts[0])[0], wanted[:1])
        check(model.run_with_cache(texts)[0], wanted)
        check(model.run_with_cache(tokens, attention_mask=mask)[0], wanted, "left")
        check(model.run_with_hooks(texts), wanted)
        check(model.run_with_hooks(tokens, attention_mask=mask), wanted, "left")
    check(model(texts), rows_by_hand(model, None))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_of_the_tokenizer_is_respected(side: str) -> None:
    model = tiny("llama")
    vector = three_kinds(model)
    wanted = rows_by_hand(model, vector)
    model.tokenizer.padding_side = side
    with vector.applied(model):
        check(model(list(TEXTS)), wanted, side)
        for other in ("left", "right"):
            check(model(list(TEXTS), padding_side=other), wanted, other)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["eos_token", "bos_token"])
def test_a_padding_token_with_another_meaning_is_still_padding(pad: str, side: str) -> None:
    model = tiny("gpt2", bos=True)
    model.tokenizer.pad_token = getattr(model.tokenizer, pad)
    vector = three_kinds(model)
    wanted = [by_hand(model, ids_of(model, text), vector) for text in TEXTS]
    with vector.applied(model):
        check(model(list(TEXTS), padding_side=side), wanted, side)


@pytest.mark.parametrize("bos", [True, False])
def test_a_bos_is_a_token_like_others_if_there_is_one(bos: bool) -> None:
    model = tiny("llama", bos=True)
    vector = three_kinds(model)
    ids = [ids_of(model, text)[0 if bos else 1 :] for text in TEXTS]
    wanted = [by_hand(model, row, vector) for row in ids]
    with vector.applied(model):
        check(model(list(TEXTS), prepend_bos=bos), wanted)
        check(model(TEXTS[0], prepend_bos=bos), wanted[:1])
        check(model.run_with_cache(TEXTS[0], prepend_bos=bos)[0], wanted[:1])


def test_tokens_without_a_mask_are_all_real() -> None:
    model = tiny_shared("llama")
    vector = three_kinds(model)
    ids = [*ids_of(model, TEXTS[0]), 2, 2]  # 2 pads texts; here somebody means it
    wanted = [by_hand(model, ids, vector)]
    with vector.applied(model):
        check(model(torch.tensor([ids])), wanted)


def test_embeddings_are_injected_as_their_tokens_are() -> None:
    model = tiny_shared("llama")
    vector = three_kinds(model)
    prompts = Prompts.from_texts(model, TEXTS)
    embeddings = model.original_model.get_input_embeddings()(prompts.tokens)
    positions = (prompts.mask.long().cumsum(1) - 1).clamp(min=0)
    call = {"attention_mask": prompts.mask.long(), "position_ids": positions}
    wanted = rows_by_hand(model, vector)
    with vector.applied(model):
        check(model(embeddings, **call), wanted, "left")


def test_a_run_that_starts_at_a_layer_is_injected_from_there() -> None:
    model = tiny_shared("llama")
    vector = additive(model, layer=2, positions=(-3, -1))
    tokens = torch.tensor([ids_of(model, TEXTS[0])])
    _, cache = model.run_with_cache(tokens)
    with vector.applied(model):
        logits = model(cache["blocks.1.hook_resid_pre"], start_at_layer=1)
    check(logits, [by_hand(model, tokens[0].tolist(), vector)])


def test_a_run_that_stops_at_a_layer_shows_the_edits_before_it() -> None:
    model = tiny_shared("llama")
    vector = additive(model, layer=1)
    tokens = torch.tensor([ids_of(model, TEXTS[0])])
    with vector.applied(model):
        _, cache = model.run_with_cache(tokens)
        stopped = model(tokens, stop_at_layer=2)
    assert_close(stopped, cache["blocks.2.hook_resid_pre"], **EXACT)
    assert not torch.equal(stopped, model(tokens, stop_at_layer=2))


def test_the_loss_is_that_of_the_injected_logits() -> None:
    model = tiny_shared("llama")
    vector = three_kinds(model)
    ids = ids_of(model, TEXTS[0])
    scores = by_hand(model, ids, vector)[:-1].log_softmax(dim=-1)
    wanted = -scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].mean()
    with vector.applied(model):
        loss = model(TEXTS[0], return_type="loss")
    assert_close(loss, wanted, **EXACT)


@pytest.mark.parametrize("acts_on", ["prompt", "new", "both"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "neox"])
def test_what_follows_a_given_cache_is_new(family: str, acts_on: str) -> None:
    model = tiny_shared(family)
    vector = three_kinds(model, acts_on)
    more = [[7, 8, 9], [10, 11, 12], [13, 14, 15]]
    prompts = Prompts.from_texts(model, TEXTS)
    mask = torch.cat([prompts.mask.long(), torch.ones(3, 3, dtype=torch.long)], dim=1)
    with vector.applied(model):
        first, cache = model(
            prompts.tokens,
            attention_mask=prompts.mask.long(),
            return_type="logits_and_cache",
            use_cache=True,
        )
        one, cache = model(
            torch.tensor(more)[:, :1],
            attention_mask=mask[:, :-2],
            past_key_values=cache,
            return_type="logits_and_cache",
        )
        rest = model(torch.tensor(more)[:, 1:], attention_mask=mask, past_key_values=cache)
    for row, text in enumerate(TEXTS):
        ids = ids_of(model, text)
        wanted = by_hand(model, [*ids, *more[row]], vector, prompt=len(ids))
        assert_close(first[row, -len(ids) :], wanted[: len(ids)], **EXACT)
        assert_close(torch.cat([one[row], rest[row]]), wanted[len(ids) :], **EXACT)


def test_a_cache_can_be_continued_without_a_mask() -> None:
    model = tiny_shared("llama")
    vector = three_kinds(model, "both")
    ids = ids_of(model, TEXTS[0])
    with vector.applied(model):
        _, cache = model(torch.tensor([ids]), return_type="logits_and_cache", use_cache=True)
        logits = model(torch.tensor([[7, 8]]), past_key_values=cache)
    assert_close(logits[0], by_hand(model, [*ids, 7, 8], vector, prompt=len(ids))[-2:], **EXACT)


def test_a_run_inside_the_block_is_injected_with_both_vectors() -> None:
    model = tiny_shared("llama")
    outer, inner = three_kinds(model), additive(model, layer=1, component="resid_post", seed=9)
    both = vector_of(*outer.edits, *inner.edits)
    prompts = Prompts.from_texts(model, TEXTS, padding_side="right")
    wanted = torch.stack([row[-1] for row in rows_by_hand(model, both)])
    wanted_outside = rows_by_hand(model, outer)
    with outer.applied(model):
        check(model([TEXTS[1], TEXTS[0], TEXTS[2]])[[1, 0, 2]], wanted_outside)
        assert_close(last_logits(model, prompts, inner), wanted, **EXACT)
        check(model([TEXTS[1], TEXTS[0], TEXTS[2]])[[1, 0, 2]], wanted_outside)


def test_two_models_are_injected_apart() -> None:
    one, other = tiny_shared("llama"), tiny_shared("gpt2")
    first, second = three_kinds(one), additive(other, layer=1)
    wanted = rows_by_hand(one, first), rows_by_hand(other, second)
    with first.applied(one), second.applied(other):
        check(one(list(TEXTS)), wanted[0])
        check(other(list(TEXTS)), wanted[1])


def test_a_mask_that_does_not_say_what_is_real_is_one_sentence() -> None:
    model = tiny_shared("llama")
    allowed = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    sentence = "the attention mask must be batch x position, 1 for real tokens"
    with additive(model).applied(model):
        with pytest.raises(InvalidInput, match=sentence):
            model(torch.tensor([[5, 6, 7]]), attention_mask=allowed)
        with pytest.raises(InvalidInput, match=sentence):
            model.hf_generate(TEXTS[0], cache_implementation="static")


def test_a_call_without_a_known_last_token_is_one_sentence() -> None:
    model = tiny_shared("llama")
    sentence = "the last real token is unknown; pass token ids"
    with additive(model).applied(model), pytest.raises(InvalidInput, match=sentence):
        model.original_model.model(torch.tensor([[5, 6, 7]]))


def test_a_run_within_a_run_does_not_move_the_positions_of_the_outer_one() -> None:
    model = tiny_shared("llama")
    vector = additive(model, layer=2, positions=(-3, -1))
    prompts = Prompts.from_texts(model, TEXTS)
    other = Prompts.from_texts(model, TEXTS[1:2])
    wanted, inner = last_logits(model, prompts, vector), []

    def look(activation: Tensor, hook: object) -> None:
        if not inner:
            inner.append(None)
            inner.append(last_logits(model, other))

    with model.hooks([("blocks.0.hook_resid_pre", look)]):
        assert_close(last_logits(model, prompts, vector), wanted, **EXACT)
    assert len(inner) == 2


def test_a_users_hook_may_run_the_model_inside_a_pass():
    """The inner pass has its own columns; afterwards the outer one's are in force again."""
    model = tiny("llama")
    vector = additive(model, layer=2)
    outer, inner = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 10]])
    seen = []

    def nested(activation, hook):
        if not seen:
            seen.append(None)
            seen[0] = model(inner)

    with torch.no_grad(), vector.applied(model):
        alone = model(outer), model(inner)
        with model.hooks([("blocks.0.hook_resid_pre", nested)]):
            assert torch.equal(model(outer), alone[0])
        assert torch.equal(seen[0], alone[1])


def test_after_a_pass_that_failed_the_next_one_is_right():
    model = tiny("llama")
    vector = additive(model, layer=1)
    tokens = torch.tensor([[5, 6, 7]])

    def fail(activation, hook):
        raise RuntimeError("the user's own")

    with torch.no_grad(), vector.applied(model):
        before = model(tokens)
        with pytest.raises(RuntimeError, match="the user's own"):
            model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", fail)])
        assert torch.equal(model(tokens), before)
