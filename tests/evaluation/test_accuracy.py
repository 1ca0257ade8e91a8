"""evaluate and score against a loop over single prompts, single tokens and full passes."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import greedy, next_logits, row_of

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import Evaluation, dntp, evaluate
from mechtv.evaluation.accuracy import score
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector

ABOUT = {"task": "invented", "setting": "a test", "shots": 0, "split": "test"}


def vector_of(acts_on="prompt"):
    """An addition at two positions of one layer, a replacement at the last of another."""
    draw = torch.Generator().manual_seed(0)
    added = torch.randn(2, D_MODEL, generator=draw, dtype=torch.float64)
    written = 2 * torch.randn(D_MODEL, generator=draw, dtype=torch.float64)
    edits = (
        Edit(site=Site(layer=0, positions=(-2, -1)), operation=Add(value=2 * added)),
        Edit(site=Site(layer=1, component="attn_out"), operation=Replace(value=written)),
    )
    return TaskVector(edits=edits, card=Card(method="by hand"), acts_on=acts_on)


VECTORS = {"none": None, "prompt": vector_of(), "both": vector_of("both"), "new": vector_of("new")}


def random_prompts(model, vector, side):
    """Twelve rows of unequal length, three labels.

    Every third answer is a label. Of the others every second one is the model's own greedy
    continuation, and the rest differ from that in the first, the last or a middle token.
    """
    draw = torch.Generator().manual_seed(1)
    ids, answers = [], []
    for row in range(12):
        length = int(torch.randint(3, 9, (), generator=draw))
        ids.append(torch.randint(3, 384, (length,), generator=draw).tolist())
        own = greedy(model, ids[row], 1 + row % 4, vector)
        if row % 2:
            changed = (0, -1, len(own) // 2)[row // 2 % 3]
            own[changed] = (own[changed] + 1) % 384
        answers.append(tuple(own))
    labels = [[5, 6], [70], [301, 302, 303]]
    for row in range(0, 12, 3):
        answers[row] = tuple(labels[row // 3 % 3])
    return replace(
        Prompts.from_ids(model, ids, answers=tuple(answers), padding_side=side),
        labels=("one", "two", "three"),
        label_tokens=tuple(map(tuple, labels)),
    )


def naive_scores(model, prompts, vector):
    """The three hits, the log-probability and the best token of each row, from the definitions."""
    rows = []
    for row in range(len(prompts)):
        ids, answer = row_of(prompts, row), list(prompts.answers[row])
        first = next_logits(model, tuple(ids), len(ids), vector)
        best = max(range(len(first)), key=first.__getitem__)
        words = [first[tokens[0]] for tokens in prompts.label_tokens]
        total = 0.0
        for column, token in enumerate(answer):
            logits = next_logits(model, tuple(ids + answer[:column]), len(ids), vector)
            largest = max(logits)
            total += logits[token] - largest
            total -= math.log(sum(math.exp(x - largest) for x in logits))
        rows.append(
            {
                "correct": best == answer[0],
                "correct_label": bool(words)
                and prompts.label_tokens[words.index(max(words))][0] == answer[0],
                "correct_exact": greedy(model, ids, len(answer), vector) == answer,
                "log_probabilities": total / len(answer),
                "predictions": model.tokenizer.decode([best]),
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def check(scores, wanted, labels):
    assert scores.correct.tolist() == wanted["correct"]
    assert scores.correct_exact.tolist() == wanted["correct_exact"]
    np.testing.assert_allclose(
        scores.log_probabilities, wanted["log_probabilities"], atol=1e-10, rtol=0
    )
    assert list(scores.predictions) == wanted["predictions"]
    if labels:
        assert scores.correct_label.tolist() == wanted["correct_label"]
        assert scores.label_accuracy.value == sum(wanted["correct_label"]) / len(scores.correct)
    else:
        assert scores.correct_label is None
        assert scores.label_accuracy is None
    assert scores.accuracy.value == sum(wanted["correct"]) / len(scores.correct)
    assert scores.exact_match.value == sum(wanted["correct_exact"]) / len(scores.correct)
    assert scores.log_probability.value == pytest.approx(
        sum(wanted["log_probabilities"]) / len(scores.correct), abs=1e-10
    )


@pytest.mark.parametrize(
    ("family", "side", "vector"),
    [
        ("llama", "left", "none"),
        ("llama", "right", "prompt"),
        ("llama", "left", "both"),
        ("llama", "left", "new"),
        ("gpt2", "right", "none"),
        ("gpt2", "left", "both"),
        ("gemma2", "left", "prompt"),
    ],
)
def test_scores_equal_greedy_decoding_and_teacher_forcing_by_hand(family, side, vector):
    vector = VECTORS[vector]
    model = model_of(family)
    prompts = random_prompts(model, vector, side)
    wanted = naive_scores(model, prompts, vector)
    assert 1 < sum(wanted["correct_exact"]) < sum(wanted["correct"]) < 11, "hits and misses"
    assert sum(wanted["correct_label"]) > 0
    assert wanted["correct_label"] != wanted["correct"]
    check(score(model, prompts, vector, **ABOUT, batch_size=5), wanted, labels=True)
    unlabelled = replace(prompts, labels=(), label_tokens=())
    check(score(model, unlabelled, vector, **ABOUT), wanted, labels=False)


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("vector", [None, VECTORS["prompt"]], ids=["plain", "vector"])
def test_evaluate_is_the_score_of_the_tasks_prompts(vector, shots, labels):
    model, task = model_of("qwen3"), task_of(labels)
    scores = evaluate(model, task, vector, shots=shots, seed=3)
    prompts = Prompts.of(model, task, shots=shots, seed=3)
    check(scores, naive_scores(model, prompts, vector), labels)
    assert scores.queries == tuple(example.key for example in task.splits(3).test)
    assert (scores.task, scores.shots, scores.split) == ("invented", shots, "test")
    plain = "in-context" if shots else "zero-shot"
    assert scores.setting == ("by hand" if vector else plain)


def test_a_vector_is_scored_on_the_splits_that_it_was_made_on():
    model, task = model_of(), task_of()
    made = replace(VECTORS["prompt"], card=Card(method="by hand", seed=3))
    assert evaluate(model, task, made).queries == evaluate(model, task, seed=3).queries
    assert evaluate(model, task, made, seed=0).queries == evaluate(model, task).queries
    assert evaluate(model, task).queries == evaluate(model, task, VECTORS["prompt"]).queries
    assert evaluate(model, task).queries != evaluate(model, task, made).queries


def test_batch_size_does_not_matter():
    model = model_of()
    prompts = random_prompts(model, VECTORS["prompt"], "left")
    whole, *others = (
        score(model, prompts, VECTORS["prompt"], **ABOUT, batch_size=size)
        for size in (64, 1, 5, 12)
    )
    for other in others:
        np.testing.assert_allclose(
            other.log_probabilities, whole.log_probabilities, atol=1e-10, rtol=0
        )
        assert other.predictions == whole.predictions
        assert (other.correct == whole.correct).all()
        assert (other.correct_exact == whole.correct_exact).all()
    with pytest.raises(InvalidInput, match="batch_size=0 is too small; use 1 or more"):
        score(model, prompts, **ABOUT, batch_size=0)


def test_evaluation_does_not_need_or_leave_gradients():
    model = tiny("llama")
    theta = VECTORS["prompt"].edits[0].operation.value.clone().requires_grad_()
    edit = Edit(site=Site(layer=0, positions=(-2, -1)), operation=Add(value=theta))
    evaluate(model, task_of(), TaskVector(edits=(edit,), card=Card(method="by hand")), n=2)
    assert theta.grad is None
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.usefixtures("unchecked")
def test_global_random_states_are_neither_read_nor_changed():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    scores = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = states()
        scores.append(evaluate(model_of(), task_of(LABELS), shots=3))
        _ = scores[-1].table()
        assert states() == before
    assert (scores[0].log_probabilities == scores[1].log_probabilities).all()
    assert scores[0].table().equals(scores[1].table())


def test_n_takes_the_first_queries_and_no_more_than_there_are():
    model, task = model_of(), task_of()
    few, all_ = evaluate(model, task, n=3), evaluate(model, task)
    assert few.queries == all_.queries[:3]
    assert few.accuracy.n == 3
    np.testing.assert_allclose(
        few.log_probabilities, all_.log_probabilities[:3], atol=1e-10, rtol=0
    )
    with pytest.raises(InvalidInput, match=r"n=9 .*the test split .* holds 8"):
        evaluate(model, task, n=9)


def test_the_table_has_one_row_a_score():
    model = model_of()
    closed = evaluate(model, task_of(LABELS), shots=1)
    table = closed.table()
    assert list(table) == [
        "task",
        "setting",
        "shots",
        "split",
        "score",
        "value",
        "low",
        "high",
        "n",
        *("model", "revision", "weights", "template", "seed"),
    ]
    assert set(table.weights) == {"raw"}
    assert set(table.seed) == {0}
    assert list(table.score) == [
        "accuracy, full vocabulary",
        "accuracy, label-restricted",
        "exact match",
        "log-probability",
    ]
    assert (table.n == 8).all()
    assert list(table.value) == [
        closed.accuracy.value,
        closed.label_accuracy.value,
        closed.exact_match.value,
        closed.log_probability.value,
    ]
    assert ((table.low <= table.value) & (table.value <= table.high)).all()
    assert len(evaluate(model, task_of()).table()) == 3, "no label score for open answers"


def invented(correct, queries=None):
    n = len(correct)
    hits = np.array(correct, dtype=bool)
    return Evaluation(
        task="invented",
        setting="first",
        shots=0,
        split="test",
        queries=queries or tuple((str(i),) for i in range(n)),
        correct=hits,
        correct_label=None,
        correct_exact=~hits,
        log_probabilities=np.zeros(n),
        predictions=("",) * n,
    )


def test_a_comparison_is_of_full_vocabulary_hits_first_minus_second():
    first, second = invented([1, 1, 1, 1, 0, 1, 1, 1]), invented([0, 0, 0, 1, 1, 0, 0, 0])
    compared = first.compare(second)
    assert compared.difference.value == (6 - 1) / 8
    assert compared.p_value == pytest.approx(2 * (1 + 7) / 2**7)
    assert second.compare(first).difference.value == -5 / 8
    assert second.compare(first).p_value == compared.p_value


def test_each_score_has_its_paired_test():
    first, second = invented([1, 1, 1, 1, 0, 1, 1, 1]), invented([0, 0, 0, 1, 1, 0, 0, 0])
    assert first.compare(second, "exact match").difference.value == -5 / 8
    nearer = replace(second, log_probabilities=np.arange(8) - 9.5)
    compared = first.compare(nearer, "log-probability")
    assert compared.difference.value == pytest.approx(np.mean(9.5 - np.arange(8)))
    assert compared.test == "Wilcoxon signed-rank"
    assert compared.p_value == pytest.approx(2 / 2**8)
    with pytest.raises(InvalidInput, match="open answers, so it has no 'label-restricted' score"):
        first.compare(second, "label-restricted")
    labelled = [replace(x, correct_label=x.correct_exact) for x in (first, second)]
    assert labelled[0].compare(labelled[1], "label-restricted").difference.value == -5 / 8


def test_a_vector_is_scored_on_the_splits_of_its_own_seed():
    model, task = model_of(), task_of()
    edit = Edit(site=Site(layer=1), operation=Add(value=torch.ones(32)))
    vector = TaskVector(edits=(edit,), card=Card(method="made", seed=5))
    own = evaluate(model, task, vector)
    assert own.provenance.seed == 5
    assert own.queries == evaluate(model, task, seed=5).queries
    assert own.queries != evaluate(model, task, vector, seed=0).queries
    assert dntp(model, task, vector, shots=2).provenance.seed == 5
    assert evaluate(model, task).provenance.seed == 0
    made_of_it = (vector.scaled(2.0), vector + vector.scaled(0.5), vector.placed([2]))
    for other in made_of_it:
        assert other.card.seed is None
        assert evaluate(model, task, other).queries == own.queries
    mixed = vector + replace(vector, card=Card(method="made", seed=6))
    with pytest.raises(InvalidInput, match=r"splits of the seeds \[5, 6\]"):
        evaluate(model, task, mixed)
    assert evaluate(model, task, mixed, seed=5).queries == own.queries


def test_results_on_different_queries_are_not_compared():
    first = invented([1, 0])
    for queries in ((("0",), ("2",)), (("1",), ("0",))):
        with pytest.raises(InvalidInput, match="scored on different queries; use the same task"):
            first.compare(invented([1, 0], queries=queries))
    with pytest.raises(InvalidInput, match="different queries"):
        evaluate(model_of(), task_of()).compare(evaluate(model_of(), task_of(), n=3))


def test_prompts_without_answers_cannot_be_scored():
    prompts = Prompts.from_texts(model_of(), ["jump ->"])
    with pytest.raises(InvalidInput, match="no answers; build them from a task"):
        score(model_of(), prompts, **ABOUT)


def test_a_model_in_float32_is_scored_in_float32_or_better():
    """bfloat16 logits are made wider before the softmax, so probabilities add up."""
    exact = evaluate(tiny("llama", torch.float32), task_of()).log_probabilities
    coarse = evaluate(tiny("llama", torch.bfloat16), task_of()).log_probabilities
    assert 0 < np.abs(coarse - exact).max() < 0.5
    assert len({float(x) for x in coarse % 0.03125}) > 1, "not rounded to eight bits"


@pytest.mark.model
def test_the_real_model_learns_in_context(model):
    task = mechtv.get_task("singular-plural")
    in_context = evaluate(model, task, shots=8, n=16)
    zero_shot = evaluate(model, task, n=16)
    assert in_context.accuracy.value > 0.8
    assert zero_shot.accuracy.value < 0.2
    assert in_context.log_probability.value > zero_shot.log_probability.value
    assert in_context.compare(zero_shot).p_value < 0.01
