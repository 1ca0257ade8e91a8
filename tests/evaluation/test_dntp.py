"""dNTP: its direction, its mean, its edge cases, and the runs that it compares."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from builders import D_MODEL, VOCABULARY, tiny
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import naive_logits, row_of
from scipy.stats import entropy

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import dntp, evaluate
from mechtv.evaluation.dntp import (
    answer_space,
    kl_divergence,
    next_token_log_probabilities,
    restricted,
)
from mechtv.evaluation.scoring import Scorer
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES
from mechtv.vectors import Add, Card, Edit, Site, TaskVector


@cache
def vector():
    theta = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edit = Edit(site=Site(layer=1), operation=Add(value=3 * theta))
    return TaskVector(edits=(edit,), card=Card(method="by hand"))


def random_logits(seed, *shape):
    draw = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(shape, generator=draw, dtype=torch.float64)


def distribution(logits, tokens=None):
    """The softmax of a list of numbers, with plain arithmetic."""
    chosen = logits if tokens is None else [logits[token] for token in tokens]
    largest = max(chosen)
    weights = [math.exp(x - largest) for x in chosen]
    return [weight / sum(weights) for weight in weights]


def divergence(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


# --- the formula ---


def test_the_in_context_distribution_is_the_one_that_weighs():
    """KL((1/2, 1/2) || (9/10, 1/10)) is not KL((9/10, 1/10) || (1/2, 1/2))."""
    even = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    uneven = torch.tensor([[0.9, 0.1]], dtype=torch.float64).log()
    forth = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    back = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert kl_divergence(even, uneven).tolist() == pytest.approx([forth], abs=1e-14)
    assert kl_divergence(uneven, even).tolist() == pytest.approx([back], abs=1e-14)
    assert abs(forth - back) > 0.1


def test_each_row_is_the_relative_entropy_of_scipy():
    first, second = random_logits(0, 5, 30), random_logits(1, 5, 30)
    ours = kl_divergence(restricted(first, None), restricted(second, None))
    theirs = entropy(first.softmax(1).numpy(), second.softmax(1).numpy(), axis=1)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-12, rtol=0)
    assert (ours > 0.5).all()


def test_tokens_without_probability_count_nothing():
    first, second = random_logits(0, 4, 10), random_logits(1, 4, 10)
    first[:, 3:5] = second[:, 4:6] = -math.inf
    first[:, 5] = -math.inf
    ours = kl_divergence(restricted(first, None), restricted(second, None))
    assert torch.isinf(ours).sum() == 0
    rest = [0, 1, 2, 6, 7, 8, 9]
    for row, value in enumerate(ours.tolist()):
        p, q = first[row].softmax(0), second[row].softmax(0)
        assert value == pytest.approx(divergence(p[rest].tolist(), q[rest].tolist()), abs=1e-12)


def test_a_token_that_only_the_context_expects_is_infinitely_far():
    first, second = random_logits(0, 1, 4), random_logits(1, 1, 4)
    second[0, 2] = -math.inf
    assert kl_divergence(restricted(first, None), restricted(second, None)).tolist() == [math.inf]


def test_probabilities_that_round_to_zero_do_no_harm():
    first = torch.tensor([[0.0, -2000.0]])
    second = torch.tensor([[-2000.0, 0.0]])
    assert kl_divergence(first.log_softmax(1), first.log_softmax(1)).tolist() == [0.0]
    assert kl_divergence(first.log_softmax(1), second.log_softmax(1)).tolist() == [2000.0]


def test_a_constant_added_to_all_logits_changes_nothing():
    first, second = random_logits(0, 5, 30), random_logits(1, 5, 30)
    tokens = torch.tensor([3, 9, 4])
    for chosen in (None, tokens):
        plain = kl_divergence(restricted(first, chosen), restricted(second, chosen))
        moved = kl_divergence(restricted(first + 70, chosen), restricted(second - 50, chosen))
        torch.testing.assert_close(moved, plain, atol=1e-12, rtol=0)


def test_over_some_tokens_their_probabilities_are_renormalised():
    logits = random_logits(0, 3, 20)
    tokens = torch.tensor([7, 2, 11])
    ours = restricted(logits, tokens).exp()
    p = logits.softmax(1)[:, [7, 2, 11]]
    torch.testing.assert_close(ours, p / p.sum(1, keepdim=True), atol=1e-14, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_coarse_logits_are_made_float32_before_the_softmax(dtype):
    made = restricted(random_logits(0, 3, 20).to(dtype), None)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.exp().sum(1), torch.ones(3), atol=1e-6, rtol=0)
    assert restricted(random_logits(0, 3, 20), None).dtype == torch.float64


def test_no_queries_are_an_error():
    with pytest.raises(InvalidInput, match="There are no queries to compare"):
        kl_divergence(torch.zeros(0, 5), torch.zeros(0, 5))


def test_gradients_reach_the_vectors_distribution_and_are_finite_at_zeros():
    first, second = random_logits(0, 4, 10), random_logits(1, 4, 10)
    first[:, 3] = second[:, 3] = first[:, 4] = -math.inf
    second.requires_grad_()
    kl_divergence(restricted(first, None), restricted(second, None)).sum().backward()
    assert torch.isfinite(second.grad).all()
    wanted = second.detach().softmax(1) - first.softmax(1)
    torch.testing.assert_close(second.grad, wanted, atol=1e-12, rtol=0)


# --- the runs ---


def naive_dntp(model, task, vector, *, shots, vector_shots, tokens, seed):
    """The divergence of each query: two full passes and plain arithmetic."""
    values = []
    for query in task.split("test", seed=seed):
        p, q = (
            distribution(naive_pass(model, task, query, k, applied, seed), tokens)
            for k, applied in ((shots, None), (vector_shots, vector))
        )
        values.append(divergence(p, q))
    return values


def naive_pass(model, task, query, shots, vector, seed):
    shown = task.demonstrations(query, shots, seed=seed)
    text = "\n".join([f"{e.fields['input']} -> {e.answer}" for e in (*shown,)])
    text = f"{text}\n{query.fields['input']} ->" if shown else f"{query.fields['input']} ->"
    ids = model.to_tokens(text)[0].tolist()
    return naive_logits(model, ids, len(ids), vector)[-1].tolist()


@pytest.mark.parametrize("over", ["labels", "vocabulary"])
@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize(
    ("family", "applied", "vector_shots"), [("llama", True, 0), ("gpt2", False, 1)]
)
def test_dntp_equals_single_passes_and_plain_arithmetic(
    family, applied, vector_shots, labels, over
):
    model, task = model_of(family), task_of(labels)
    theta = vector() if applied else None
    measured = dntp(
        model, task, theta, shots=3, vector_shots=vector_shots, over=over, seed=2, batch_size=3
    )
    words = labels or [example.answer for example in task.examples]
    firsts = [model.tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in words]
    tokens = None if over == "vocabulary" else sorted(set(firsts))
    wanted = naive_dntp(
        model, task, theta, shots=3, vector_shots=vector_shots, tokens=tokens, seed=2
    )
    np.testing.assert_allclose(measured.per_query, wanted, atol=1e-10, rtol=0)
    assert measured.value == float(measured) == pytest.approx(sum(wanted) / len(wanted), abs=1e-10)
    assert min(wanted) > 1e-3
    assert measured.n_tokens == (VOCABULARY if tokens is None else len(tokens))
    assert measured.setting == ("by hand" if applied else "in-context")
    assert (measured.task, measured.shots, measured.over) == ("invented", 3, over)


@pytest.mark.parametrize("over", ["labels", "vocabulary"])
def test_the_in_context_run_is_at_no_distance_from_itself(over):
    same = dntp(model_of(), task_of(LABELS), None, shots=3, vector_shots=3, over=over)
    assert same.per_query.tolist() == [0.0] * 8
    assert same.value == 0.0
    assert dntp(model_of(), task_of(LABELS), None, shots=3, over=over).value > 0.01


def test_the_defaults_are_eight_shots_and_a_zero_shot_vector():
    model, task = tiny("llama", max_position_embeddings=400), task_of(LABELS)
    assert dntp(model, task, vector(), n=3).per_query.tolist() == (
        dntp(model, task, vector(), shots=8, vector_shots=0, over="labels", n=3).per_query.tolist()
    )
    assert dntp(model, task, n=3).setting == "zero-shot"


def test_a_vector_is_compared_on_the_splits_that_it_was_made_on():
    model, task = model_of(), task_of()
    made = replace(vector(), card=Card(method="by hand", seed=3))
    own, same, other = (dntp(model, task, made, shots=2, seed=seed) for seed in (None, 3, 0))
    assert own.per_query.tolist() == same.per_query.tolist()
    assert other.per_query.tolist() == dntp(model, task, vector(), shots=2).per_query.tolist()
    assert own.per_query.tolist() != other.per_query.tolist()


def test_open_answers_range_over_their_distinct_first_tokens():
    model = model_of()
    task = task_of()
    own = Example.pair("of the test set", "dogs")
    with_test = Task(
        name="invented", examples=task.examples, template=task.template, test_examples=(own,)
    )
    answers = {example.answer for example in task.examples}
    firsts = [model.tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in answers]
    assert len(set(firsts)) < len(firsts), "some answers share a first token"
    assert sorted(answer_space(model, task).tolist()) == sorted(set(firsts))
    dog = model.tokenizer(" dogs", add_special_tokens=False)["input_ids"][0]
    assert sorted(answer_space(model, with_test).tolist()) == sorted({*firsts, dog})


def test_closed_labels_are_in_their_order_and_distinct():
    model = model_of()
    firsts = [model.tokenizer(f" {w}", add_special_tokens=False)["input_ids"][0] for w in LABELS]
    assert answer_space(model, task_of(LABELS)).tolist() == firsts
    with pytest.raises(InvalidInput, match="The labels 'jump', 'jumped' share a first token"):
        answer_space(model, task_of(("jump", "hot", "jumped")))


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_over_is_refused():
    with pytest.raises(InvalidInput, match="over='label' is unknown; use 'labels' or 'vocabulary'"):
        dntp(model_of(), task_of(), over="label")


def test_n_takes_the_first_queries():
    whole, few = (dntp(model_of(), task_of(), vector(), shots=2, n=n) for n in (None, 3))
    np.testing.assert_allclose(few.per_query, whole.per_query[:3], atol=1e-10, rtol=0)
    with pytest.raises(InvalidInput, match=r"n=9 .* holds 8"):
        dntp(model_of(), task_of(), shots=2, n=9)


def test_distributions_do_not_depend_on_the_batch():
    model = model_of()
    prompts = Prompts.of(model, task_of(), shots=2)
    whole, single = (
        next_token_log_probabilities(model, prompts, vector(), None, batch_size=size)
        for size in (64, 1)
    )
    torch.testing.assert_close(whole, single, atol=1e-10, rtol=0)
    ids = row_of(prompts, 3)
    wanted = naive_logits(model, ids, len(ids), vector())[-1].log_softmax(0)
    torch.testing.assert_close(whole[3], wanted, atol=1e-10, rtol=0)


def test_the_table_is_one_row_with_its_interval():
    measured = dntp(model_of(), task_of(LABELS), vector(), shots=3)
    (row,) = measured.table().to_dict("records")
    assert list(row) == [
        *("task", "setting", "shots", "score", "value", "low", "high", "n", "tokens"),
        *("model", "revision", "weights", "template", "seed"),
    ]
    assert row["score"] == "dNTP over labels"
    assert row["low"] < row["value"] < row["high"]
    assert (row["value"], row["n"], row["tokens"]) == (measured.value, 8, 3)


@pytest.mark.model
def test_more_shots_bring_the_real_model_nearer_to_eight(model):
    task = mechtv.get_task("singular-plural")
    distances = [
        dntp(model, task, shots=8, vector_shots=k, over="vocabulary", n=8).value for k in (0, 2)
    ]
    assert distances[0] > 2 * distances[1] > 0


def test_answers_that_begin_with_one_token_have_no_distribution_over_labels():
    model = model_of()
    examples = tuple(Example.pair(f"x{i}", f"jump{'ed' * i}") for i in range(1, 9))
    task = Task(name="alike", examples=examples, template=TEMPLATES["arrow"])
    with pytest.raises(InvalidInput, match=r"begin with one token.*use over='vocabulary'"):
        dntp(model, task, shots=2)
    assert dntp(model, task, shots=2, over="vocabulary").value > 0
    (divergence,) = Scorer(model, task, shots=2).score("zero-shot").divergences
    assert divergence.over == "vocabulary"


def test_the_scorer_scores_as_evaluate_and_dntp_do():
    model, task = model_of(), task_of(LABELS)
    scorer = Scorer(model, task, shots=2, n=5, seed=1, split="validation")
    options = {"n": 5, "seed": 1, "split": "validation"}
    settings = (("by hand", 0, vector()), ("zero-shot", 0, None), ("in-context", 2, None))
    for name, shots, applied in settings:
        scores = scorer.score(name, applied)
        alone = evaluate(model, task, applied, shots=shots, **options)
        assert (scores.evaluation.log_probabilities == alone.log_probabilities).all()
        for found, over in zip(scores.divergences, ("labels", "vocabulary"), strict=True):
            wanted = dntp(model, task, applied, shots=2, over=over, vector_shots=shots, **options)
            assert found.value == pytest.approx(wanted.value, abs=1e-9)
        assert scores.seconds_per_query > 0
    with pytest.raises(InvalidInput, match="in-context run has no vector"):
        scorer.score("in-context", vector())
