"""Scores of answers from logits, against numbers by hand and against the model's weights."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import FAMILIES
from evaluation.invented import LABELS, model_of, task_of

from mechtv.analysis.answers import Answers, contrast, rivals
from mechtv.errors import InvalidInput, UnknownName
from mechtv.forward import capture, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Site

LOGITS = torch.tensor([[1.0, 4.0, 0.0, 2.0, 3.0], [5.0, 0.0, 1.0, 1.0, 0.0]])


def prompts_with(answers, labels=()):
    """Two rows with given answer ids, and labels of given first tokens."""
    plain = Prompts.from_ids(model_of("llama"), [[3, 4], [5, 6]], answers=answers)
    tokens = tuple((token, 9) for token in labels)
    return replace(plain, labels=tuple(map(str, labels)), label_tokens=tokens)


def test_open_answers_by_hand() -> None:
    found = Answers.of(LOGITS, prompts_with(((1, 2), (2,))))
    assert found.correct.tolist() == [True, False]
    assert found.correct_label is None
    total = [sum(math.exp(x) for x in row) for row in LOGITS.tolist()]
    wanted = [4 - math.log(total[0]), 1 - math.log(total[1])]
    np.testing.assert_allclose(found.log_probability, wanted, rtol=1e-6)
    np.testing.assert_allclose(found.logit_difference, [4 - 3, 1 - 5])


def test_labels_by_hand() -> None:
    prompts = prompts_with(((3,), (2,)), labels=(0, 2, 3))
    found = Answers.of(LOGITS, prompts)
    assert found.correct.tolist() == [False, False]
    assert found.correct_label.tolist() == [True, False]
    np.testing.assert_allclose(found.logit_difference, [2 - (1 + 0) / 2, 1 - (5 + 1) / 2])
    assert rivals(LOGITS, prompts).tolist() == [[0, 2], [0, 3]]


def test_the_rival_of_an_open_answer_is_the_best_wrong_token() -> None:
    assert rivals(LOGITS, prompts_with(((1,), (2,)))).tolist() == [[4], [0]]
    given = torch.tensor([[0], [1]])
    found = Answers.of(LOGITS, prompts_with(((1,), (2,))), given)
    np.testing.assert_allclose(found.logit_difference, [4 - 1, 1 - 0])


def test_a_single_label_stands_against_the_best_wrong_token() -> None:
    prompts = prompts_with(((1,), (1,)), labels=(1,))
    found = Answers.of(LOGITS, prompts)
    np.testing.assert_allclose(found.logit_difference, [4 - 3, 0 - 5])
    assert found.correct_label.all()


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    prompts = prompts_with(((1,), (2,)), labels=(1, 2))
    first, second = (Answers.of(x, prompts) for x in (LOGITS.double(), LOGITS.double() + 30))
    np.testing.assert_allclose(first.log_probability, second.log_probability, rtol=1e-12)
    np.testing.assert_allclose(first.logit_difference, second.logit_difference, rtol=1e-12)


def test_bfloat16_logits_are_read_in_float32() -> None:
    prompts = prompts_with(((1,), (2,)))
    short = Answers.of(LOGITS.bfloat16(), prompts)
    np.testing.assert_allclose(
        short.log_probability, Answers.of(LOGITS, prompts).log_probability, rtol=1e-6
    )


def test_the_table_has_each_score_with_its_interval() -> None:
    table = Answers.of(LOGITS, prompts_with(((3,), (2,)), labels=(0, 2, 3))).table()
    assert table["score"].tolist() == [
        "accuracy, full vocabulary",
        "accuracy, label-restricted",
        "log-probability",
        "logit difference",
    ]
    assert table["n"].tolist() == [2] * 4
    assert table["value"].tolist()[:2] == [0.0, 0.5]
    assert (table["low"] <= table["value"]).all()
    assert (table["value"] <= table["high"]).all()


def test_labels_that_share_a_token_and_rows_without_answers_are_refused() -> None:
    with pytest.raises(InvalidInput, match="share a first token"):
        Answers.of(LOGITS, prompts_with(((1,), (2,)), labels=(1, 1, 2)))
    with pytest.raises(InvalidInput, match="have no answers"):
        Answers.of(LOGITS, prompts_with(((1,), ())))


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_contrast_is_the_logit_difference_but_for_the_unembeddings_bias(family, labels):
    model = model_of(family)
    prompts = Prompts.of(model, task_of(labels), n=3)
    site = Site(component="resid_post", layer=model.cfg.n_layers - 1)
    with torch.no_grad():
        states = model.ln_final(capture(model, prompts, [site])[site][:, 0])
        logits = run(model, prompts)[:, 0]
    against = rivals(logits, prompts)
    cap = getattr(model.cfg, "output_logits_soft_cap", None) or 0.0
    logits = cap * torch.atanh(logits / cap) if cap > 0 else logits
    found = (contrast(model, prompts, against) * states).sum(dim=1)
    wanted = Answers.of(logits, prompts, against).logit_difference
    bias = model.b_U.detach()
    shift = bias[prompts.first_answer_tokens] - bias[against].mean(dim=1)
    np.testing.assert_allclose(found + shift, wanted, atol=1e-9)
    assert (float(shift.abs().max()) > 1e-3) == (family == "phi")


@pytest.mark.parametrize("labels", [(), (0, 2, 3)], ids=["open", "closed"])
def test_columns_hold_all_scores(labels) -> None:
    answers = Answers.of(LOGITS, prompts_with(((3,), (2,)), labels=labels))
    columns = answers.columns()
    assert columns.shape == (2, 4)
    assert columns.dtype == torch.float64
    back = Answers.of_columns(columns, closed=bool(labels))
    assert back.scores().keys() == answers.scores().keys()
    for name, values in answers.scores().items():
        assert back.values(name).dtype == values.dtype
        assert back.values(name).tolist() == values.tolist()


def test_a_score_is_asked_for_by_the_name_that_the_table_has() -> None:
    answers = Answers.of(LOGITS, prompts_with(((1, 2), (2,))))
    assert list(answers.scores()) == answers.table()["score"].tolist()
    assert answers.values("accuracy, full vocabulary").tolist() == [True, False]
    assert answers.values("logit difference").tolist() == [1, -4]
    with pytest.raises(UnknownName, match="no score named 'accuracy, label-restricted'; did you"):
        answers.values("accuracy, label-restricted")
