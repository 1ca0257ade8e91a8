"""Bad input to the methods is one clear sentence: what was given, what is allowed, what to do."""

from functools import partial

import pytest
from builders import tiny
from evaluation.invented import LABELS, model_of, task_of

from mechtv.errors import InvalidInput
from mechtv.evaluation import dntp, evaluate
from mechtv.methods import (
    extract_function_vector,
    extract_hidden_state,
    extract_i2cl,
    extract_state_vector,
    fit_linear,
    fit_mapping,
    learn,
)
from mechtv.tasks.example import Example
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES

READERS = {
    "hidden_state": partial(extract_hidden_state, n=2),
    "function_vector": partial(extract_function_vector, n=2, n_shuffled=2),
    "state_vector": partial(extract_state_vector, optimisation="none"),
    "i2cl": partial(extract_i2cl, calibrate=False),
    "linear": partial(fit_linear, n=2),
    "mapping": partial(fit_mapping, mapping="constant", n=2),
    "learned": lambda model, task, shots: learn(
        model, task, objective="dntp", icl_shots=shots, epochs=1, n_train=2, n_validation=2
    ),
}


@pytest.mark.parametrize("method", [name for name in READERS if name != "i2cl"])
def test_prompts_longer_than_the_context(method):
    with pytest.raises(InvalidInput, match=r"tokens with its answer, but the .* holds 128"):
        READERS[method](model_of(), task_of(), shots=20)


def test_a_demonstration_longer_than_the_context():
    long = Example.pair("walk " * 200, "walked")
    task = Task(name="long", examples=(long, *task_of().examples), template=TEMPLATES["arrow"])
    shots = len(task.splits().train)
    with pytest.raises(InvalidInput, match="model's context holds 128; use fewer shots"):
        extract_i2cl(model_of(), task, shots=shots, calibrate=False)


@pytest.mark.parametrize("method", READERS)
def test_more_demonstrations_than_the_pool_holds(method):
    sentence = r"shots=99 demonstrations were asked, but the training split .* holds 2[34]"
    with pytest.raises(InvalidInput, match=sentence):
        READERS[method](model_of(), task_of(), shots=99)


def test_a_vector_of_another_width():
    vector = extract_hidden_state(model_of(), task_of(), shots=2, n=2)
    wide = tiny("llama", hidden_size=48)
    with pytest.raises(InvalidInput, match="width 32 but the model's d_model is 48; a vector fits"):
        evaluate(wide, task_of(), vector)


@pytest.mark.parametrize("score", [evaluate, dntp])
def test_labels_with_one_first_token(score):
    alike = task_of(("jump", "jumped", "hot"))
    with pytest.raises(InvalidInput, match="'jump', 'jumped' share a first token"):
        score(model_of(), alike)


@pytest.mark.parametrize("fit", [fit_linear, partial(fit_mapping, mapping="mlp")])
def test_too_few_queries_for_a_map(fit):
    with pytest.raises(InvalidInput, match="n=1 queries are too few to fit a map; use 2 or more"):
        fit(model_of(), task_of(), shots=2, n=1)
    with pytest.raises(InvalidInput, match=r"besides shots=\d+ demonstrations 1 of them are left"):
        fit(model_of(), task_of(), shots=23, n=8)


def test_an_empty_label_set():
    with pytest.raises(
        InvalidInput, match=r"has the labels \(\), but also .* labels=None for open"
    ):
        task_of(LABELS).with_labels(())


@pytest.mark.parametrize("method", READERS)
def test_a_base_model_without_a_chat_template(method):
    sentence = "has no chat template; use the task's plain template, without as_chat"
    with pytest.raises(InvalidInput, match=sentence):
        READERS[method](model_of(), task_of().as_chat(), shots=2)
