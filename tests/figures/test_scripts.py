"""Every figure script runs from nothing to its files, on a tiny model, and goes on where it was."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch
from builders import tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import mechtv
from mechtv.errors import InvalidInput

SCRIPTS = Path(__file__).parents[2] / "figures"
NAMES = sorted(script.stem for script in SCRIPTS.glob("[dl][0-9]*_*.py"))
ENDINGS = ("csv", "html", "json")
# The tiny tokenizer needs hundreds of tokens for a text, and gives A and B one first token.
TASKS = {
    "d1": "present-past,capitalize",
    "d2": "present-past,capitalize",
    "d3": "present-past,capitalize",
    "l13": "delayed-reward-open",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("figures")
    for seed, name in enumerate(("tiny", "other")):
        save_model(place / name, seed)
    return place


def save_model(folder: Path, seed: int) -> None:
    """Random weights; heads enough for sets of random ones, positions enough for texts."""
    torch.manual_seed(seed)
    words = tiny_tokenizer(True)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.fixture
def script(monkeypatch, place):
    """Imports a script; pictures need a browser, and are not drawn."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    save = mechtv.plots.save
    monkeypatch.setattr(
        mechtv.plots, "save", lambda figure, path: path.suffix == ".html" and save(figure, path)
    )
    yield import_module
    for module in [m for m in sys.modules.values() if str(SCRIPTS) in str(vars(m).get("__file__"))]:
        del sys.modules[module.__name__]


def setup_of(script, figure, place):
    return script("common").setup_of(
        figure,
        str(place / "tiny"),
        TASKS.get(figure.name.partition("_")[0], ""),
        quick=True,
        n=4,
        data=None,
        out=place / "out",
    )


def test_there_is_one_script_for_each_figure_and_table_of_both_papers():
    numbers = {name.partition("_")[0] for name in NAMES}
    assert numbers == {f"l{n:02}" for n in range(1, 14)} | {f"d{n}" for n in range(1, 9)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("unchecked")
def test_a_script_leaves_its_table_its_page_and_where_they_come_from(
    script, place, name, monkeypatch
):
    module = script(name)
    if name.startswith("d7"):
        monkeypatch.setattr(module, "OTHER", str(place / "other"))
    if name.startswith("d5"):
        monkeypatch.setattr(module, "SHOTS", 2)
    common = script("common")
    table = common.run(module.FIGURE, setup_of(script, module.FIGURE, place))
    files = {ending: place / "out" / f"{name}.{ending}" for ending in ENDINGS}
    assert len(pd.read_csv(files["csv"])) == len(table) > 0
    origin = json.loads(files["json"].read_text())
    assert origin["claim"] == module.FIGURE.claim
    assert origin["settings"]["quick"]
    assert str(place) not in origin["command"]
    assert "quick run" in files["html"].read_text()


@pytest.mark.usefixtures("unchecked")
def test_a_second_run_computes_nothing_and_gives_the_same_bytes(script, place, monkeypatch):
    module, common = script("l04_reconstruction"), script("common")
    setup = setup_of(script, module.FIGURE, place)
    common.run(module.FIGURE, setup)
    before = (place / "out" / "l04_reconstruction.csv").read_bytes()
    monkeypatch.setattr(mechtv, "learn", None)
    monkeypatch.setattr(mechtv, "reconstruct_ov", None)
    common.run(module.FIGURE, setup)
    assert (place / "out" / "l04_reconstruction.csv").read_bytes() == before


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["l04_reconstruction", "d6_robustness"])
def test_from_nothing_the_same_seed_gives_the_same_bytes(script, place, tmp_path, name):
    module, common = script(name), script("common")
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        common.run(module.FIGURE, replace(setup_of(script, module.FIGURE, place), out=folder))
        table = pd.read_csv(folder / f"{name}.csv")
        timed = [column for column in table if column.startswith("seconds")]
        written.append(table.drop(columns=timed).to_csv())
    assert written[0] == written[1]


def test_several_seeds_are_pooled_by_their_means(script):
    pooled = script("common").pooled
    table = pd.DataFrame(
        {"task": "a", "seed": [0, 1], "value": [0.2, 0.6], "low": [0.1, 0.4], "high": 1.0, "n": 5}
    )
    (row,) = pooled(table, ["task"]).to_dict("records")
    assert row == pytest.approx({"task": "a", "value": 0.4, "low": 0.25, "high": 1.0, "n": 5})


def test_a_task_is_asked_for_no_more_examples_than_it_has(script):
    task = mechtv.get_task("country-capital")
    asked = {"n_train": 10**6, "n_validation": 3, "epochs": 4}
    assert script("common").fitting(task, asked) == {
        "n_train": len(task.splits(0).train),
        "n_validation": 3,
        "epochs": 4,
    }


@pytest.mark.usefixtures("unchecked")
def test_a_cell_that_fails_leaves_no_figure(script, place, tmp_path):
    module = script("l01_accuracy_by_layer")
    setup = replace(setup_of(script, module.FIGURE, place), tasks=("present-past",), out=tmp_path)
    with pytest.raises(InvalidInput, match="1 of 1 cells are failed"):
        setup.study(methods=[{"name": "learned", "n_train": 10**6}], layers=[1], shots=2)


def test_a_figure_says_once_what_it_is_of(script, place):
    common = script("common")
    setup = setup_of(script, script("l01_accuracy_by_layer").FIGURE, place)
    drawn = mechtv.plots.tidy_bars(
        pd.DataFrame({"x": ["a"], "by": ["b"], "value": [0.5]}),
        mechtv.plots.Labels(title="A title", lines=("tiny · n = 4 test queries",)),
        x="x",
        by="by",
    )
    common.under_title(drawn, setup)
    assert drawn.layout.title.subtitle.text == (
        "present-past · quick run<br>tiny · n = 4 test queries"
    )
