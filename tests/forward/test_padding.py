"""A prompt is the same prompt alone and in a batch, whatever stands beside it and on which side."""

import pytest
import torch
from builders import FAMILIES
from torch.testing import assert_close
from vectors.naive import IDS, SOME_FAMILIES, additive, by_hand, tiny_shared

from mechtv.errors import InvalidInput
from mechtv.forward import last_logits, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors.layout import last_real

EXACT = {"atol": 1e-10, "rtol": 1e-10}
ANSWERS = ((7, 8, 9), (10,), (11, 12))
POSITIONS = ((-1,), (-3, -1), "all")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_does_not_change_when_batched_with_a_longer_one(family: str, side: str) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    plain = last_logits(model, prompts)
    assert_close(plain, torch.stack([by_hand(model, ids)[-1] for ids in IDS]), **EXACT)
    for positions in POSITIONS:
        vector = additive(model, positions=positions)
        alone = torch.stack([by_hand(model, ids, vector)[-1] for ids in IDS])
        injected = last_logits(model, prompts, vector)
        assert_close(injected, alone, **EXACT)
        assert ((injected - plain).abs().amax(dim=1) > 0.1).all(), "the vector must be seen"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_float32_and_bfloat16_rows_stay_apart_too(
    positions: tuple[int, ...] | str, side: str
) -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.3)):
        model = tiny_shared("llama", dtype)
        prompts = Prompts.from_ids(model, IDS, padding_side=side)
        vector = additive(model, positions=positions).to(dtype)
        alone = torch.stack([by_hand(model, ids, vector)[-1] for ids in IDS])
        assert_close(last_logits(model, prompts, vector), alone, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_count_from_each_rows_own_last_token(side: str) -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    ends = prompts.tokens[torch.arange(len(IDS)), prompts.last].tolist()
    assert ends == [ids[-1] for ids in IDS]
    assert prompts.lengths.tolist() == [len(ids) for ids in IDS]


def test_the_last_real_token_of_00111_is_4_and_of_11100_is_2() -> None:
    masks = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 0]])
    assert last_real(masks.bool()).tolist() == [4, 2, 4, 1]


def test_a_row_with_no_real_token_is_one_sentence() -> None:
    model = tiny_shared("llama")
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(InvalidInput, match="Row 1 has no real token; every prompt needs"):
        last_real(mask.bool())
    with pytest.raises(InvalidInput, match="Row 1 has no real token; every prompt needs"):
        Prompts.from_ids(model, [[5, 6, 7], []])
    for positions in POSITIONS:
        with (
            additive(model, positions=positions).applied(model),
            pytest.raises(InvalidInput, match="Row 1 has no real token; every prompt needs"),
        ):
            model(torch.tensor([[5, 6, 7], [5, 6, 7]]), attention_mask=mask)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_too_short_for_a_position_is_one_sentence(side: str) -> None:
    model = tiny_shared("llama")
    vector = additive(model, positions=(-4, -1))
    sentence = r"Position -4 does not exist in a prompt of 3 tokens; use positions from -3"
    with pytest.raises(InvalidInput, match=sentence):
        run(model, Prompts.from_ids(model, IDS, padding_side=side), vector)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    with vector.applied(model), pytest.raises(InvalidInput, match=sentence):
        model(prompts.tokens, attention_mask=prompts.mask.long())
    with pytest.raises(InvalidInput, match="Position -4 does not exist in a prompt"):
        run(model, Prompts.from_ids(model, [[5, 6, 7]], answers=((8, 9),)).with_answers(), vector)


@pytest.mark.parametrize("side", ["left", "right"])
def test_teacher_forced_answers_do_not_move_positions(side: str) -> None:
    model = tiny_shared("llama")
    prompts = Prompts.from_ids(model, IDS, answers=ANSWERS, padding_side=side)
    forced = prompts.with_answers()
    assert forced.lengths.tolist() == [3 + 2, 7 + 0, 5 + 1]
    for row, (ids, answer) in enumerate(zip(IDS, ANSWERS, strict=True)):
        assert forced.tokens[row][forced.mask[row]].tolist() == [*ids, *answer[:-1]]
        last = int(forced.last[row])
        assert forced.tokens[row, last - len(ids) + 1 : last + 1].tolist() == ids
    for positions in POSITIONS:
        vector = additive(model, positions=positions)
        wanted = last_logits(model, prompts, vector)
        assert_close(last_logits(model, forced, vector), wanted, **EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("acts_on", ["prompt", "new", "both"])
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_teacher_forced_logits_equal_hooks_at_fixed_columns(
    family: str, acts_on: str, side: str
) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS, answers=ANSWERS, padding_side=side).with_answers()
    every = torch.arange(prompts.tokens.shape[1]).expand(len(IDS), -1)
    for positions in (*POSITIONS, (-3, -2)):  # the last of which name no new token
        vector = additive(model, positions=positions, acts_on=acts_on)
        logits = run(model, prompts, vector, columns=every)
        for row, (ids, answer) in enumerate(zip(IDS, ANSWERS, strict=True)):
            alone = by_hand(model, [*ids, *answer[:-1]], vector, prompt=len(ids))
            assert_close(logits[row][prompts.mask[row]], alone, **EXACT)
