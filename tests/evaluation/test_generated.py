"""Answers as the model writes them, against greedy decoding by hand and teacher forcing."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from builders import D_MODEL, tiny
from evaluation.invented import LABELS, WORDS, model_of, task_of
from evaluation.naive import greedy, row_of

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation import evaluate
from mechtv.evaluation.generated import Generated, evaluate_generated, text_of, write
from mechtv.evaluation.intervals import share
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.tasks.template import Template
from mechtv.tasks.tokens import continuation_ids, fragment_ids, prompt_ids
from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector

ACTS_ON = (None, "prompt", "new", "both")
TIGHT = Template(text="{input} ->{answer}")  # answers without a space before them


def vector_of(acts_on="prompt"):
    value = 2 * torch.randn(D_MODEL, generator=torch.Generator().manual_seed(0)).double()
    edit = Edit(site=Site(layer=1), operation=Add(value=value))
    return TaskVector(edits=(edit,), card=Card(method="by hand"), acts_on=acts_on)


def writes(model, text, acts_on):
    """A vector under which every token (of the prompt's last, of new ones) is followed by one."""
    (token,) = fragment_ids(model, text)
    value = 3 * model.W_U[:, token].detach().clone()
    edit = Edit(site=Site(layer=2, component="resid_post"), operation=Replace(value=value))
    return TaskVector(edits=(edit,), card=Card(method="constant"), acts_on=acts_on)


def decoded(model, ids, n_tokens, vector):
    """The tokens by hand up to a special one, as text."""
    tokens = greedy(model, ids, n_tokens, vector)
    end = next((i for i, token in enumerate(tokens) if token < 3), len(tokens))
    return model.tokenizer.decode(tokens[:end])


def test_white_space_of_the_template_before_an_answer_ends_no_text():
    task = Task(
        name="lines",
        examples=task_of(LABELS).examples,
        template=Template(text="{input}\n{answer}"),
        labels=LABELS,
    )
    model = model_of()
    (ids,) = {continuation_ids(model, "", "\njump")}
    rows = torch.tensor([[*ids, *fragment_ids(model, "\nmore")]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "mechtv.evaluation.generated.greedy",
            lambda model, batch, vector, new_tokens: rows.expand(len(batch), -1),
        )
        found = evaluate_generated(model, task)
    assert set(found.texts) == {"jump"}
    assert found.exact_match.value == np.mean([answer == "jump" for answer in found.answers])
    assert found.exact_match.value > 0


@pytest.mark.parametrize(
    ("family", "acts_on", "stop"),
    [
        ("llama", None, "\n"),
        ("llama", "prompt", "s"),
        ("llama", "new", None),
        ("gpt2", "both", "s"),
        ("gemma2", "new", "\n"),
    ],
)
def test_texts_equal_greedy_decoding_by_hand(family, acts_on, stop):
    model, task = model_of(family), task_of()
    vector = None if acts_on is None else vector_of(acts_on)
    found = evaluate_generated(
        model, task, vector, shots=1, new_tokens=6, stop=stop, n=5, seed=2, batch_size=2
    )
    prompts = Prompts.of(model, task, shots=1, n=5, seed=2)
    for row, example in enumerate(task.split("test", n=5, seed=2)):
        text = decoded(model, row_of(prompts, row), 6, vector)
        wanted = (text if stop is None else text.split(stop)[0]).strip()
        assert found.texts[row] == wanted
        assert found.correct[row] == (wanted == example.answer)
    assert found.acts_on == acts_on
    assert found.setting == ("by hand" if vector else "in-context")


@cache
def own_task(family, acts_on, n_tokens):
    """Answers of which most are what the model writes: all, or all but the last token."""
    model, vector = model_of(family), None if acts_on is None else vector_of(acts_on)
    examples = []
    for number in range(40):
        text = f"{WORDS[number % 10]} {'x' * (number // 10)}"
        ids = prompt_ids(model, f"{text} ->")
        own = greedy(model, ids, n_tokens, vector)
        answer = model.tokenizer.decode(own[: 1 + number % n_tokens])
        examples.append(Example.pair(text, answer if answer.strip() else "cold"))
    return Task(name="own", examples=tuple(examples), template=TIGHT)


@pytest.mark.parametrize(
    ("family", "acts_on"), [*(("llama", acts_on) for acts_on in ACTS_ON), ("gpt2", "both")]
)
def test_teacher_forcing_finds_the_answers_that_are_written_first(family, acts_on):
    """Exact match of `evaluate` is: the first tokens written are the answer's."""
    model, task = model_of(family), own_task(family, acts_on, 3)
    vector = None if acts_on is None else vector_of(acts_on)
    forced = evaluate(model, task, vector)
    found = evaluate_generated(model, task, vector, stop=None)
    assert forced.correct_exact.any()
    assert (found.correct_start == forced.correct_exact).all()
    assert found.starts_with_answer == forced.exact_match
    for row, example in enumerate(task.split("test")):
        if found.correct_start[row] and "\ufffd" not in example.answer:
            assert found.texts[row].startswith(example.answer.strip())


def one_token_task(model, extra=""):
    """Answers that are the first token that the model writes, every fourth with more behind."""
    examples = []
    for number in range(40):
        text = f"{WORDS[number % 10]} {'x' * (number // 10)}"
        (own,) = greedy(model, prompt_ids(model, f"{text} ->"), 1)
        answer = model.tokenizer.decode([own])
        examples.append(Example.pair(text, answer + (extra if number % 4 == 0 else "")))
    return Task(name="first tokens", examples=tuple(examples), template=TIGHT)


def test_what_follows_the_answer_decides():
    """Where a new line follows every token, the first token is the text; else more follows."""
    model = model_of()
    task = one_token_task(model)
    ends = writes(model, "\n", "new")
    goes_on = writes(model, "x", "new")
    plain = [
        len(continuation_ids(model, " ->", e.answer)) == 1
        and e.answer.strip() == e.answer
        and "\ufffd" not in e.answer
        for e in task.split("test")
    ]
    assert sum(plain) > 3
    stopped = evaluate_generated(model, task, ends, new_tokens=3)
    assert (stopped.correct_start & stopped.correct)[plain].all()
    running = evaluate_generated(model, task, goes_on, new_tokens=3)
    assert running.correct_start[plain].all()
    assert not running.correct[plain].any()
    assert all(text.endswith("xx") for text in running.texts)
    cut = evaluate_generated(model, task, goes_on, new_tokens=3, stop="x")
    assert cut.correct[plain].all()
    short = evaluate_generated(model, task, goes_on, new_tokens=1)
    assert short.correct[plain].all(), "what would follow is not seen"


def test_a_longer_answer_is_missed_by_both_scores():
    model = model_of()
    task = one_token_task(model, extra="ed")
    found = evaluate_generated(model, task, writes(model, "\n", "new"), new_tokens=4)
    longer = [example.answer.endswith("ed") for example in task.split("test")]
    assert any(longer)
    assert not found.correct[longer].any()
    assert not found.correct_start[longer].any()


def test_the_same_text_in_other_tokens_is_right_but_does_not_start_with_the_answers_tokens():
    model = model_of()
    vector = writes(model, "l", "both")
    template = Template(text="{input} -> {answer}")
    task = replace(task_of(), template=template)
    task = replace(
        task, examples=tuple(Example(fields=e.fields, answer="lll") for e in task.examples)
    )
    found = evaluate_generated(model, task, vector, new_tokens=3)
    assert set(found.texts) == {"lll"}
    assert found.correct.all()
    assert not found.correct_start.any(), "the answer's first token begins with a space"


def test_an_answer_ends_at_a_special_token():
    model = model_of()
    ids = [*fragment_ids(model, "jumped"), 1, *fragment_ids(model, "walked")]
    assert text_of(model, ids) == "jumped"
    assert text_of(model, [2, *ids]) == ""
    vector = writes(model, "</s>", "new")
    found = evaluate_generated(model, task_of(), vector, new_tokens=4, stop=None)
    alone = evaluate_generated(model, task_of(), new_tokens=1, stop=None)
    assert found.texts == alone.texts


def test_a_text_is_left_as_it_was_written():
    model, text = model_of(), "what , is . it 's"
    assert text_of(model, fragment_ids(model, text)) == text


@pytest.mark.parametrize("labels", [None, LABELS])
def test_the_usual_number_of_tokens_is_two_more_than_the_longest_answers(labels):
    model, task = model_of(), task_of(labels)
    lengths = [
        len(continuation_ids(model, " ->", f" {example.answer}")) for example in task.examples
    ]
    few, every = (evaluate_generated(model, task, n=n) for n in (1, None))
    assert few.new_tokens == every.new_tokens == max(lengths) + 2
    assert few.texts == every.texts[:1]


def test_prompts_are_continued_in_their_order_whatever_the_batches():
    model = model_of()
    prompts = Prompts.from_texts(model, ["jump ->", "hot and cold and hot ->", "a", "France ->"])
    wanted = [greedy(model, row_of(prompts, row), 3) for row in range(4)]
    for size in (1, 2, 32):
        assert write(model, prompts, new_tokens=3, batch_size=size).tolist() == wanted


def test_the_table_and_the_comparison():
    model, task = model_of(), task_of()
    found = evaluate_generated(model, task, vector_of("both"), n=5, new_tokens=2)
    table = found.table()
    assert list(table.score) == ["exact match, generated", "starts with the answer"]
    assert list(table["acts on"]) == ["both"] * 2
    assert (table.n == 5).all()
    assert list(table.value) == [found.correct.mean(), found.correct_start.mean()]
    assert set(table.seed) == {0}

    def invented(correct, queries=None):
        hits, n = np.array(correct, dtype=bool), len(correct)
        return Generated(
            task="invented",
            setting="first",
            acts_on=None,
            shots=0,
            split="test",
            new_tokens=2,
            stop="\n",
            queries=queries or tuple((str(i),) for i in range(n)),
            answers=("",) * n,
            texts=("",) * n,
            correct=hits,
            correct_start=~hits,
        )

    one, other = invented([1, 1, 1, 1]), invented([0, 0, 0, 1])
    assert one.compare(other).difference.value == 0.75
    assert one.compare(other).test == "McNemar, exact"
    assert one.exact_match == share(np.ones(4, dtype=bool))
    assert one.starts_with_answer.value == 0
    with pytest.raises(InvalidInput, match="scored on different queries"):
        one.compare(invented([1], queries=(("9",),)))


def test_the_seed_of_the_vector_decides_and_the_model_is_left_alone():
    model, task = tiny("llama"), task_of()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    seeded = TaskVector(edits=vector_of().edits, card=Card(method="by hand", seed=4))
    one, again = (evaluate_generated(model, task, seeded, new_tokens=2) for _ in range(2))
    assert one.texts == again.texts
    assert one.queries == tuple(query.key for query in task.split("test", seed=4))
    assert one.queries != evaluate_generated(model, task, seeded, new_tokens=1, seed=0).queries
    for name, weight in model.named_parameters():
        assert weight.grad is None
        assert (weight == before[name]).all()
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_what_cannot_be_written_is_refused():
    model, task = model_of(), task_of()
    with pytest.raises(InvalidInput, match="new_tokens=0 leaves nothing to read; use 1 or more"):
        evaluate_generated(model, task, new_tokens=0)
    with pytest.raises(InvalidInput, match=r"n=9 .*the test split .* holds 8"):
        evaluate_generated(model, task, n=9)
    with pytest.raises(InvalidInput, match="batch_size=0 is too small"):
        evaluate_generated(model, task, batch_size=0)
    with pytest.raises(InvalidInput, match=r"new_tokens=126 exceed the model's context of 128"):
        evaluate_generated(model, task, new_tokens=126)
    with pytest.raises(InvalidInput, match="stop='' ends every text before it begins"):
        evaluate_generated(model, task, stop="")
    with pytest.raises(InvalidInput, match=r"answer '\w*ed\w*' holds the stop text 'ed'"):
        evaluate_generated(model, task, stop="ed")


@pytest.mark.model
def test_the_real_model_writes_what_teacher_forcing_predicts(model):
    task = mechtv.get_task("singular-plural")
    found = evaluate_generated(model, task, shots=4, n=6)
    assert (found.correct_start == evaluate(model, task, shots=4, n=6).correct_exact).all()
    assert found.exact_match.value >= 0.5
    assert not found.correct[~found.correct_start].any()
