"""Choices between two options, against single passes by hand."""

import math

import numpy as np
import pytest
import torch
from builders import D_MODEL
from evaluation.invented import LABELS, model_of, task_of
from evaluation.naive import next_logits, row_of

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation.choice import Choices, evaluate_choice, swapped
from mechtv.evaluation.intervals import share
from mechtv.tasks.choice import delayed_reward
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.tasks.template import Template
from mechtv.tasks.tokens import continuation_ids, fragment_ids
from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector

ROWS = [
    [f"{word} {number}?", f"{now} now", f"{later} later on"]
    for number in range(4)
    for word, now, later in [
        ("jump", "a cat", "two cats"),
        ("walk", "a word", "old dogs"),
        ("talk", "hot", "fast trees"),
        ("look", "one house", "big"),
        ("play", "a tree", "new"),
    ]
]
PLAIN = {"description": "Invented choices.", "rows": ROWS}
# the tiny tokenizer begins " A" and " B" with one token, a space
LETTERS = "{question}\nA. {option_a}\nB. {option_b}\nAnswer:{answer}"
FORMS = {
    "letters": delayed_reward("now-or-later", PLAIN, template="choice").with_template(LETTERS),
    "options": delayed_reward("now-or-later-open", PLAIN, template="open-choice"),
}


def vector_of(acts_on="prompt"):
    value = 2 * torch.randn(D_MODEL, generator=torch.Generator().manual_seed(0)).double()
    edit = Edit(site=Site(layer=1), operation=Add(value=value))
    return TaskVector(edits=(edit,), card=Card(method="by hand"), acts_on=acts_on)


def log_softmax(logits):
    largest = max(logits)
    return [x - largest - math.log(sum(math.exp(y - largest) for y in logits)) for x in logits]


def naive_scores(model, task, example, shown, vector):
    """The log-probabilities of the first and of the second option, from their definitions."""
    ids = row_of(Prompts.from_examples(model, task, [example], [shown]), 0)

    if task.labels:
        logits = next_logits(model, tuple(ids), len(ids), vector)
        return log_softmax([logits[fragment_ids(model, letter)[0]] for letter in "AB"])
    means = []
    for name in ("option_a", "option_b"):
        answer = continuation_ids(model, "Answer:", f" {example.fields[name]}")
        parts = [
            log_softmax(next_logits(model, (*ids, *answer[:k]), len(ids), vector))[token]
            for k, token in enumerate(answer)
        ]
        means.append(sum(parts) / len(parts))
    return means


@pytest.mark.parametrize(
    ("family", "shots", "vector", "both_orders"),
    [
        ("llama", 0, None, False),
        ("llama", 1, "both", True),
        ("gpt2", 0, "prompt", True),
        ("gemma2", 1, None, False),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_scores_equal_single_passes_by_hand(form, family, shots, vector, both_orders):
    model, task = model_of(family), FORMS[form]
    vector = None if vector is None else vector_of(vector)
    found = evaluate_choice(model, task, vector, shots=shots, both_orders=both_orders, n=3)
    queries = task.split("test", n=3)
    assert found.queries == tuple(query.key for query in queries)
    assert found.form == form
    for row, query in enumerate(queries):
        shown = task.demonstrations(query, shots)
        for order, example in enumerate([query, swapped(task, query)][: 1 + both_orders]):
            wanted = naive_scores(model, task, example, shown, vector)
            got = found.log_probabilities[row, order]
            np.testing.assert_allclose(got, wanted, atol=1e-10, rtol=0)
            chosen = example.fields["option_a" if wanted[0] > wanted[1] else "option_b"]
            assert found.chose_immediate[row, order] == ("now" in chosen or chosen == "hot now")
            assert found.chose_first[row, order] == (wanted[0] > wanted[1])
            assert found.immediate_first[row, order] == ("now" in example.fields["option_a"])
    assert found.immediate.value == found.chose_immediate.mean()
    assert found.first.value == found.chose_first.mean()


@pytest.mark.parametrize("form", FORMS)
def test_a_swapped_example_exchanges_its_options_and_its_letter(form):
    task = FORMS[form]
    for example in task.examples:
        other = swapped(task, example)
        assert other.fields["option_a"] == example.fields["option_b"]
        assert other.fields["option_b"] == example.fields["option_a"]
        assert other.fields["question"] == example.fields["question"]
        assert swapped(task, other) == example
        if form == "letters":
            assert {example.answer, other.answer} == {"A", "B"}
            named = {"A": "option_a", "B": "option_b"}
            right = example.fields[named[example.answer]]
            assert other.fields[named[other.answer]] == right
            assert "now" in right
        else:
            assert other.answer == example.answer


@pytest.mark.parametrize("form", FORMS)
def test_the_second_order_is_the_first_order_of_the_swapped_task(form):
    model, task = model_of(), FORMS[form]
    other = Task(
        name=task.name,
        examples=tuple(swapped(task, example) for example in task.examples),
        template=task.template,
        labels=task.labels,
    )
    both = evaluate_choice(model, task, both_orders=True)
    given, exchanged = evaluate_choice(model, task), evaluate_choice(model, other)
    for order, alone in enumerate((given, exchanged)):
        np.testing.assert_allclose(
            both.log_probabilities[:, order], alone.log_probabilities[:, 0], atol=1e-10, rtol=0
        )
        assert (both.immediate_first[:, order] == alone.immediate_first[:, 0]).all()
    assert both.immediate.value == pytest.approx(
        (given.immediate.value + exchanged.immediate.value) / 2
    )


def test_a_model_that_always_says_the_same_letter_has_no_preference_over_both_orders():
    model, task = model_of(), FORMS["letters"]
    value = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(3)).double()
    edit = Edit(site=Site(layer=2, component="resid_post"), operation=Replace(value=value))
    vector = TaskVector(edits=(edit,), card=Card(method="constant"))
    both = evaluate_choice(model, task, vector, both_orders=True)
    assert both.immediate.value == 0.5
    assert both.consistent.value == 0.0
    assert both.first.value in (0.0, 1.0)
    one = evaluate_choice(model, task, vector)
    first = one.n_immediate_first / len(one.queries)
    assert one.immediate.value == pytest.approx(first if both.first.value else 1 - first)
    assert one.consistent is None


def invented(log_probabilities, immediate_first, **other):
    settings = {"task": "invented", "setting": "a test", "shots": 0, "split": "test"}
    return Choices(
        form="letters",
        queries=tuple((str(i),) for i in range(len(immediate_first))),
        immediate_first=np.array(immediate_first),
        log_probabilities=np.array(log_probabilities),
        **settings,
        **other,
    )


A, B = [-0.1, -2.0], [-2.0, -0.1]


def test_shares_by_hand():
    both = invented([[A, A], [A, B], [B, A], [B, B]], [[True, False]] * 3 + [[False, True]])
    assert both.chose_first.tolist() == [[1, 1], [1, 0], [0, 1], [0, 0]]
    assert both.chose_immediate.tolist() == [[1, 0], [1, 1], [0, 0], [1, 0]]
    assert both.immediate.value == both.first.value == 0.5
    assert both.consistent == share(np.array([False, True, True, False]))
    assert both.n_immediate_first == 3
    tie = invented([[[-0.7, -0.7]]], [[False]])
    assert tie.chose_first.all()
    assert not tie.chose_immediate.any()


@pytest.mark.parametrize("hits", [0, 1, 5, 8])
def test_the_interval_of_both_orders_is_wilsons_for_as_many_trials_as_queries(hits):
    right = [True] * hits + [False] * (8 - hits)
    one = invented([[A if x else B] for x in right], [[True]] * 8)
    both = invented([[A, B] if x else [B, A] for x in right], [[True, False]] * 8)
    assert one.immediate == share(np.array(right))
    for name in ("value", "low", "high", "n"):
        wanted = getattr(one.immediate, name)
        assert getattr(both.immediate, name) == pytest.approx(wanted, abs=1e-12)
    halves = invented([[A, A]] * 8, [[True, False]] * 8).immediate
    assert halves.n == 8
    assert 0.1 < halves.low < 0.5 < halves.high < 0.9


def test_the_table_tells_the_order_of_the_options():
    found = evaluate_choice(model_of(), FORMS["letters"], n=3)
    assert list(found.table().score) == ["immediate reward", "first option"]
    table = evaluate_choice(model_of(), FORMS["letters"], n=3, both_orders=True).table()
    assert list(table.score) == ["immediate reward", "first option", "same choice in both orders"]
    queries = FORMS["letters"].split("test", n=3)
    assert set(table["immediate first"]) == {sum(query.answer == "A" for query in queries)}
    assert set(table.orders) == {2}
    assert set(table.n) == {3}
    assert ((table.low <= table.value) & (table.value <= table.high)).all()
    assert set(table.template) == {FORMS["letters"].template.text}


@pytest.mark.parametrize("name", ["delayed-reward", "delayed-reward-open"])
def test_the_built_in_tasks_put_each_option_first_half_of_the_time(name):
    task = mechtv.get_task(name)
    first = [e.answer in ("A", e.fields["option_a"]) for e in task.examples]
    assert sum(first) * 2 == len(task.examples)


def test_comparisons_are_paired():
    one, other = (invented([[x] for x in rows], [[True]] * 4) for rows in ([A] * 4, [A, B, B, B]))
    compared = one.compare(other)
    assert compared.difference.value == 0.75
    assert compared.test == "McNemar, exact"
    assert compared.p_value == pytest.approx(2 / 2**3)
    both = invented([[A, B]] * 4, [[True, False]] * 4)
    halves = invented([[A, A]] * 4, [[True, False]] * 4)
    assert both.compare(halves).difference.value == 0.5
    assert both.compare(halves).test == "Wilcoxon signed-rank"
    for strange in (both, invented([[A]] * 3, [[True]] * 3), invented([[A]] * 4, [[False]] * 4)):
        with pytest.raises(InvalidInput, match="scored on different queries or orders"):
            one.compare(strange)


def test_the_seed_of_the_vector_decides_and_the_same_seed_gives_the_same_bits():
    model, task, edits = model_of(), FORMS["options"], vector_of().edits
    seeded = TaskVector(edits=edits, card=Card(method="by hand", seed=4))
    one, again = (evaluate_choice(model, task, seeded, both_orders=True) for _ in range(2))
    assert one.queries == tuple(query.key for query in task.split("test", seed=4))
    assert (one.log_probabilities == again.log_probabilities).all()
    assert evaluate_choice(model, task, seeded, seed=0).queries != one.queries
    assert all(weight.grad is None for weight in model.parameters())


def of_two(a, b, answer, labels=None):
    examples = tuple(
        Example(fields={"q": str(i), "option_a": a, "option_b": b}, answer=answer) for i in range(9)
    )
    template = Template(text="{q}: {option_a} or {option_b}? {answer}")
    return Task(name="odd", examples=examples, template=template, labels=labels)


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (task_of(), "'invented' is no choice: its examples have the fields input, but option_a"),
        (task_of(LABELS), "'invented' is no choice"),
        (of_two("now", "later", "soon"), r"'soon' .*'odd' must be exactly one of .*'now', 'later'"),
        (of_two("now", "now", "now"), "must be exactly one of its options"),
        (of_two("now", "later", "A", ("A", "B", "C")), "'odd' has 3 labels; a choice needs two"),
        (of_two("now", "later", "a cat", ("a cat", "a dog")), "share a first token"),
    ],
)
def test_a_task_of_another_form_is_refused(task, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        evaluate_choice(model_of(), task)


def test_queries_and_demonstrations_that_are_not_there_are_refused():
    model, task = model_of(), FORMS["letters"]
    with pytest.raises(InvalidInput, match=r"n=5 .*the test split .* holds 4"):
        evaluate_choice(model, task, n=5)
    with pytest.raises(InvalidInput, match="shots=13 demonstrations were asked"):
        evaluate_choice(model, task, shots=13)
    with pytest.raises(InvalidInput, match="batch_size=0 is too small"):
        evaluate_choice(model, task, batch_size=0)


@pytest.mark.model
def test_the_real_model_chooses_in_both_forms(model):
    for name in ("delayed-reward", "delayed-reward-open"):
        found = evaluate_choice(model, mechtv.get_task(name), n=2, both_orders=True)
        assert found.log_probabilities.shape == (2, 2, 2)
        assert np.isfinite(found.log_probabilities).all()
        assert (found.immediate_first[:, 0] != found.immediate_first[:, 1]).all()
