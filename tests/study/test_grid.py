"""A grid is what was described, in an order that shares, and refused before it runs."""

import json
from itertools import groupby

import numpy as np
import pytest
from study.small import save_model, save_pairs, small

from mechtv.errors import InvalidInput, UnknownName
from mechtv.study.grid import Study
from mechtv.study.specs import MethodSpec, ModelSpec, TaskSpec

TOML = """
models = ["smollm2-135m", {name = "smollm2-135m", dtype = "bfloat16"}]
tasks = ["present-past", {name = "antonym", template = "qa"}]
methods = ["in-context", "linear", {name = "learned", label = "short", epochs = 2}]
layers = [0.5, 3]
positions = [[-1], [-2, -1]]
seeds = [0, 7]
n = 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


def test_a_toml_file_says_what_the_arguments_do(tmp_path):
    file = tmp_path / "my-study.toml"
    file.write_text(TOML)
    study = Study.read(file)
    assert study == Study(
        name="my-study",
        models=["smollm2-135m", ModelSpec(name="smollm2-135m", dtype="bfloat16")],
        tasks=["present-past", TaskSpec(name="antonym", template="qa")],
        methods=[
            "in-context",
            "linear",
            MethodSpec(name="learned", label="short", options={"epochs": 2}),
        ],
        layers=[0.5, 3],
        positions=[[-1], [-2, -1]],
        seeds=[0, 7],
        n=10,
    )
    assert Study.from_plain(json.loads(json.dumps(study.to_plain()))) == study


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        ("models = [", InvalidInput, "is no TOML file"),
        ('models = ["a"]', InvalidInput, "has no tasks; add tasks ="),
        ('models = ["a"]\ntasks = ["b"]\nlayer = [1]', UnknownName, "did you mean 'layers'"),
        (
            'models = [{name = "a", dtyp = "x"}]\ntasks = ["b"]',
            UnknownName,
            "entry of ModelSpec named 'dtyp'; did you mean 'dtype'",
        ),
        ('models = [{dtype = "x"}]\ntasks = ["b"]', InvalidInput, "neither a name nor a table"),
    ],
)
def test_a_file_that_says_something_else_is_one_sentence(tmp_path, text, error, sentence):
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(error, match=sentence):
        Study.read(file)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        Study.read(tmp_path / "study.toml")


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"models": []}, InvalidInput, "models is empty"),
        ({"seeds": [1, 1]}, InvalidInput, "seeds names one of them twice"),
        ({"models": [{"name": "a", "dtype": "float23"}]}, UnknownName, "did you mean 'float32'"),
        ({"methods": ["lerned"]}, UnknownName, "did you mean 'learned'"),
        (
            {"methods": [{"name": "learned", "epoch": 2}]},
            UnknownName,
            "There is no option of learned named 'epoch'; did you mean 'epochs'",
        ),
        ({"methods": [{"name": "in-context", "shots": 2}]}, InvalidInput, "has no options"),
        (
            {"methods": ["learned", {"name": "learned", "epochs": 2}]},
            InvalidInput,
            "Two methods are called 'learned'; give one of them a label",
        ),
        ({"layers": [1.5]}, InvalidInput, "fractions from 0.0 to 1.0"),
        ({"layers": "most"}, InvalidInput, "layers='most' is none"),
        ({"layers": [True]}, InvalidInput, "is none"),
        ({"positions": [-1]}, InvalidInput, "no list of lists"),
        ({"positions": [[0]]}, InvalidInput, "count from the last token"),
        ({"shots": 0}, InvalidInput, "shots=0 is no whole number of 1 or more"),
        ({"n": "all"}, InvalidInput, "n='all' is no whole number"),
        ({"n": True}, InvalidInput, "n=True is no whole number"),
        ({"name": 3}, InvalidInput, "name=3 is no text"),
        ({"models": "gpt2"}, InvalidInput, r"models='gpt2' is no list; write models=\['gpt2'\]"),
        ({"tasks": {"name": "a"}}, InvalidInput, "is no list; write tasks="),
        ({"models": [{"name": "a", "dtype": 3}]}, InvalidInput, "dtype=3 .* is not a text"),
        (
            {"models": [{"name": "a", "trust_remote_code": "no"}]},
            InvalidInput,
            "trust_remote_code='no' of a ModelSpec is not true or false",
        ),
        ({"tasks": [{"name": "a", "template": 1}]}, InvalidInput, "template=1 .* is not a text"),
        (
            {"methods": [{"name": "learned", "options": 1}]},
            InvalidInput,
            "options=1 of 'learned' is no table",
        ),
        ({"seeds": 3}, InvalidInput, r"seeds=3 is no list; write seeds=\[3\]"),
        ({"seeds": [0.5]}, InvalidInput, r"seeds holds 0\.5; give whole numbers"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_refused_when_it_is_described(place, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        small(place, **changes)


@pytest.mark.usefixtures("unchecked")
def test_lists_of_any_kind_are_written_down_as_plain_numbers(place):
    study = small(
        place,
        layers=np.arange(2),
        seeds=range(2),
        positions=(range(-2, 0), [np.int64(-1)]),
        methods=(name for name in ["hidden_state"]),
    )
    found = json.loads(json.dumps(study.to_plain()))
    assert (found["layers"], found["seeds"]) == ([0, 1], [0, 1])
    assert found["positions"] == [[-2, -1], [-1]]
    assert len(study.cells) == 8
    assert Study.from_plain(found) == study


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"models": ["smolm2-135m"]}, UnknownName, "did you mean 'smollm2-135m'"),
        ({"tasks": ["presnt-past"]}, UnknownName, "did you mean 'present-past'"),
        ({"layers": [2, 9]}, InvalidInput, r"Layer 9 is none of .* which has 3: give 0 to 2"),
        ({"shots": 24}, InvalidInput, "training split .* holds 24; ask for at most 23"),
    ],
)
def test_what_models_and_tasks_lack_is_refused_by_the_check(place, changes, error, sentence):
    with pytest.raises(error, match=sentence):
        small(place, **changes).check()


def test_cells_that_share_stand_together(place):
    study = small(place)
    assert len(study.cells) == 12
    assert len(list(groupby(study.cells, key=lambda c: (c.model, c.task, c.seed)))) == 3
    for _, own in groupby(study.cells, key=lambda c: (c.seed, c.method.name)):
        layers = [cell.layer for cell in own]
        assert layers in ([None], [0, 2])


@pytest.mark.parametrize(
    ("layers", "found"),
    [([0.0, 0.5, 1.0], (0, 2)), ("all", (0, 1, 2)), ([2, 1], (1, 2)), (None, (0, 1, 2))],
)
def test_layers_are_numbers_or_fractions_of_the_depth(place, layers, found):
    study = small(place, layers=layers)
    assert study.layers_of(study.models[0]) == found


def test_positions_are_for_methods_that_can_be_told_where_to_write(place):
    study = small(place, methods=["in-context", "linear", "learned"], positions=[[-1], [-2, -1]])
    found = {(c.method.name, c.positions) for c in study.cells}
    assert found == {
        ("in-context", None),
        ("linear", None),
        ("learned", (-1,)),
        ("learned", (-2, -1)),
    }
    (cell, *_) = [c for c in study.cells if c.positions == (-2, -1)]
    assert cell.options() == {"positions": [-2, -1]}


def test_whatever_changes_numbers_changes_the_key(place, tmp_path):
    def key(**changes):
        study = small(place, **changes)
        return study.key(study.cells[-1])

    keys = [
        key(),
        key(shots=3),
        key(n=4),
        key(n_validation=4),
        key(seeds=[3]),
        key(layers=[1]),
        key(methods=[{"name": "hidden_state", "shots": 3, "n": 4}]),
        key(methods=[{"name": "hidden_state", "shots": 2, "n": 4}], positions=[[-2]]),
        key(models=[{"name": str(place / "model"), "dtype": "bfloat16"}]),
        key(models=[str(save_model(tmp_path / "model", seed=1))]),
        key(tasks=[{"name": str(place / "pairs.json"), "template": "qa"}]),
        key(tasks=[str(save_pairs(tmp_path / "pairs.json", n=39))]),
    ]
    texts = [json.dumps(one, sort_keys=True) for one in keys]
    assert len(set(texts)) == len(texts)


def test_a_file_that_changes_in_place_changes_the_key(tmp_path):
    study = small(tmp_path)
    keys = [study.key(study.cells[-1])]
    save_pairs(tmp_path / "pairs.json", n=39)
    keys.append(study.key(study.cells[-1]))
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        file = tmp_path / "model" / name
        file.write_bytes(file.read_bytes() + b" ")
        keys.append(study.key(study.cells[-1]))
    (tmp_path / "model" / "README.md").write_text("what it is")
    assert study.key(study.cells[-1]) == keys[-1]
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == 5


def test_parameters_are_counted_without_weights(place, tmp_path):
    spec = small(place).models[0]
    bridge = spec.open()
    real = sum(p.numel() for p in {id(p): p for p in bridge.original_model.parameters()}.values())
    assert spec.n_parameters() == real
    (tmp_path / "config.json").write_text((place / "model" / "config.json").read_text())
    alone = ModelSpec(name=str(tmp_path), dtype="bfloat16")
    assert (alone.n_parameters(), alone.nbytes()) == (real, 2 * real)


def test_a_label_or_other_cells_do_not_change_a_key(place):
    study = small(place)
    named = {"name": "hidden_state", "label": "mine", "shots": 2, "n": 4}
    other = small(place, methods=[named], seeds=[2], name="other")
    assert study.key(study.cells[-1]) == other.key(other.cells[-1])
