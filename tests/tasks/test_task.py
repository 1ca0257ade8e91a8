"""Tasks: what they refuse, their splits, and the draw of demonstrations."""

import random
from collections import Counter

import pytest
import torch

from mechtv.errors import InvalidInput, UnknownName
from mechtv.tasks.example import Example
from mechtv.tasks.task import SIZES, Task, draw_demonstrations
from mechtv.tasks.template import TEMPLATES, Template

ARROW = TEMPLATES["arrow"]


def open_task(n=100, **settings):
    examples = tuple(Example.pair(f"word {number}", f"drow {number}") for number in range(n))
    return Task(name="invented", examples=examples, template=ARROW, **settings)


def closed_task(n=120, labels=("red", "green", "blue"), shares=None):
    answers = [
        label for label, share in zip(labels, shares or [1] * 9, strict=False) for _ in range(share)
    ]
    examples = tuple(
        Example.pair(f"word {number}", answers[number % len(answers)]) for number in range(n)
    )
    return Task(name="invented", examples=examples, template=ARROW, labels=labels)


def keys(examples):
    return {example.key for example in examples}


@pytest.mark.parametrize("n", [3, 4, 5, 37, 100, 2000])
@pytest.mark.parametrize("seed", [0, 1])
def test_splits_are_disjoint_filled_and_capped(n, seed):
    splits = open_task(n).splits(seed)
    parts = (splits.train, splits.validation, splits.test)
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*map(keys, parts))) == min(n, 1400)
    held = min(max(1, n // 5), 400)
    assert (len(splits.validation), len(splits.test)) == (held, held)
    assert SIZES == {"train": 600, "validation": 400, "test": 400}
    assert len(splits.train) == min(n - 2 * held, 600)


def test_splits_are_fixed_by_the_seed_and_the_task():
    task = open_task()
    assert task.splits(3) == open_task().splits(3)
    assert task.splits(3) != task.splits(4)
    assert task.splits() == task.splits(0)


def test_splits_do_not_change_with_template_or_labels():
    task = closed_task()
    assert task.with_template("qa").splits() == task.splits()
    assert task.with_labels(None).splits() == task.splits()


def test_a_test_set_of_its_own_is_the_test_split_and_nothing_else():
    own = tuple(Example.pair(f"test {number}", "x") for number in range(500))
    task = open_task(100, test_examples=own)
    splits = task.splits()
    assert len(task) == 600
    assert keys(splits.test) < keys(own)
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (80, 20, 400)


def test_a_split_is_a_prefix_of_a_larger_one():
    task = open_task()
    assert task.split("test", n=5) == task.split("test")[:5] == task.splits().test[:5]


@pytest.mark.parametrize("n", [0, -1, 21])
def test_n_out_of_range_names_both_numbers(n):
    with pytest.raises(InvalidInput, match=rf"n={n} .*holds 20; give n between 1 and 20"):
        open_task().split("validation", n=n)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_split_suggests_near_ones():
    with pytest.raises(UnknownName, match="'validation'"):
        open_task().split("validations")


@pytest.mark.parametrize("task", [open_task(), closed_task()], ids=["open", "closed"])
@pytest.mark.parametrize("shots", [0, 1, 5, 8])
def test_demonstrations_are_distinct_training_examples_other_than_the_query(task, shots):
    train = keys(task.splits().train)
    for query in (*task.split("train", n=20), *task.split("test", n=20)):
        drawn = task.demonstrations(query, shots)
        assert len(keys(drawn)) == len(drawn) == shots
        assert keys(drawn) <= train - {query.key}


def test_the_query_stays_out_even_when_all_others_are_drawn():
    task = closed_task(30)
    query = task.splits().train[0]
    drawn = task.demonstrations(query, len(task.splits().train) - 1)
    assert keys(drawn) == keys(task.splits().train) - {query.key}


@pytest.mark.parametrize("shots", range(25))
def test_labels_are_balanced_for_every_number_of_shots(shots):
    task = closed_task()
    for query in (None, *task.split("test", n=5)):
        counts = Counter(example.answer for example in task.demonstrations(query, shots))
        per_label = [counts[label] for label in task.labels]
        assert max(per_label) - min(per_label) <= 1


def test_a_rare_label_is_used_up_and_the_others_stay_balanced():
    task = closed_task(120, shares=[10, 9, 1])
    rare = sum(example.answer == "blue" for example in task.splits().train)
    counts = Counter(example.answer for example in task.demonstrations(None, 40))
    assert counts["blue"] == rare
    assert abs(counts["red"] - counts["green"]) <= 1


def test_the_remainder_and_the_order_favour_no_label():
    task = closed_task()
    drawn = [task.demonstrations(query, 4) for query in task.split("train", n=70)]
    firsts = Counter(examples[0].answer for examples in drawn)
    twice = Counter(Counter(e.answer for e in examples).most_common(1)[0][0] for examples in drawn)
    assert min(firsts[label] for label in task.labels) >= 10
    assert min(twice[label] for label in task.labels) >= 10


def test_the_draw_for_a_query_depends_on_the_query_and_the_seed_alone():
    task = closed_task()
    first, second = task.split("test", n=2)
    alone = task.demonstrations(second, 5)
    task.demonstrations(first, 5)
    assert task.demonstrations(second, 5) == alone
    assert task.demonstrations(first, 5) != alone
    assert task.demonstrations(second, 5, seed=1) != alone
    same_text = Example(fields=dict(second.fields), answer="another")
    assert task.demonstrations(same_text, 5) == alone


def test_without_a_query_there_is_one_fixed_set():
    task = closed_task()
    assert task.demonstrations(None, 6) == task.demonstrations(None, 6)
    assert task.demonstrations(None, 6) != task.demonstrations(None, 6, seed=1)


def test_a_pool_at_hand_gives_the_same_draw():
    task = open_task()
    query = task.split("test", n=1)[0]
    drawn = draw_demonstrations(task, task.splits(2).train, query, 7, seed=2)
    assert drawn == task.demonstrations(query, 7, seed=2)


def test_more_shots_than_the_pool_holds_names_both_numbers():
    task = open_task(20)
    query = task.splits().train[0]
    with pytest.raises(InvalidInput, match=r"shots=12 .* holds 11 besides .* at most 11"):
        task.demonstrations(query, 12)
    assert len(task.demonstrations(task.splits().test[0], 12)) == 12


def test_negative_shots_are_refused():
    with pytest.raises(InvalidInput, match="shots=-1 is negative"):
        open_task().demonstrations(None, -1)


@pytest.mark.usefixtures("unchecked")
def test_the_global_random_state_is_neither_read_nor_changed():
    task = closed_task()
    random.seed(1)
    torch.manual_seed(1)
    states = random.getstate(), torch.get_rng_state()
    first = task.splits(), task.demonstrations(task.examples[0], 5)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    random.seed(2)
    assert (task.splits(), task.demonstrations(task.examples[0], 5)) == first


@pytest.mark.parametrize("template", ["qa", "Q: {input}\nA: {answer}", TEMPLATES["qa"]])
def test_a_template_is_given_by_name_text_or_object(template):
    assert open_task().with_template(template).template == TEMPLATES["qa"]


def test_an_unknown_template_suggests_near_ones():
    with pytest.raises(UnknownName, match=r"did you mean 'arrow'\?.*A text such as"):
        open_task().with_template("arrows")


def test_a_template_must_read_fields_that_the_examples_have():
    with pytest.raises(InvalidInput, match="reads text, but the examples of 'invented' have input"):
        open_task().with_template("topic")


@pytest.mark.parametrize(
    "text", ["{input} ->", "{answer} or {answer}", "{input} {answer} {answer}"]
)
def test_a_template_holds_the_answer_exactly_once(text):
    with pytest.raises(InvalidInput, match=r"\{answer\} exactly once"):
        open_task().with_template(text)


def test_a_template_has_something_before_the_answer():
    with pytest.raises(InvalidInput, match="nothing before"):
        Template(text=" {answer} {input}")


def test_query_and_answer_make_up_the_demonstration():
    example = Example.pair("jump {answer} \\1", "jumped")
    for template in (ARROW, TEMPLATES["qa"], Template(text="<{input}>\t{answer}</>")):
        whole = template.demonstration(example)
        assert whole.startswith(template.query(example) + template.answer("jumped"))
        assert whole == template.text.replace("{answer}", "jumped").replace(
            "{input}", "jump {answer} \\1"
        )
        assert not template.query(example)[-1].isspace()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_anchor_ends_every_query(name):
    template = TEMPLATES[name]
    example = Example(fields=dict.fromkeys(template.fields, "some words"), answer="x")
    assert template.query(example).endswith(template.anchor)


def test_repeated_inputs_are_refused_also_between_examples_and_test_set():
    again = Example.pair("word 3", "other")
    with pytest.raises(InvalidInput, match="holds the input 'word 3' twice"):
        open_task(test_examples=(again,))


def test_answers_outside_the_labels_are_refused_by_name():
    with pytest.raises(InvalidInput, match=r"labels \('red', 'green'\).*answers \['blue'\]"):
        closed_task().with_labels(["red", "green"])
    with pytest.raises(InvalidInput, match="list every label"):
        closed_task().with_labels([])


def test_labels_may_be_more_than_the_answers_or_none():
    task = closed_task().with_labels(["blue", "red", "green", "black"])
    assert task.labels == ("blue", "red", "green", "black")
    assert task.with_labels(None).labels is None


def test_too_few_examples_for_three_splits_are_refused():
    with pytest.raises(InvalidInput, match="has 2 examples; three splits need at least 3"):
        open_task(2)
