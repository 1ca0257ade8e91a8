"""The command line, on a tiny model saved to a folder."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from builders import tiny_hf, tiny_tokenizer
from typer.testing import CliRunner, Result

from mechtv import TaskVector, UnknownName, get_task
from mechtv.cli import app, main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a file of pairs."""
    place = tmp_path_factory.mktemp("model")
    tiny_hf("llama").save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    pairs = [
        {"input": e.fields["input"], "output": e.answer} for e in get_task("capitalize").examples
    ]
    (place / "pairs.json").write_text(json.dumps(pairs[:40]))
    return place


def call(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_run_writes_the_page_the_tables_and_the_vectors(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    options = ["--layers", "0,2", "--shots", 2, "--n", 5, "--out", out]
    result = call("run", "--model", folder, "--task", folder / "pairs.json", *options)
    assert result.exit_code == 0, result.output
    assert "learned, layer 2: accuracy" in result.output
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")
    names = {path.name for path in (out / "vectors").iterdir()}
    assert names == {
        f"{m}-layer0{x}.safetensors" for m in ("learned", "hidden_state") for x in (0, 2)
    }
    assert set(pd.read_csv(out / "results.csv")["setting"]) >= {"zero-shot", "learned"}
    assert len(pd.read_csv(out / "comparisons.csv")) == 2
    assert set(pd.read_csv(out / "curves.csv")["layer"]) == {0, 2}


def test_learn_evaluate_and_show_work_on_one_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    about = ["--model", folder, "--task", folder / "pairs.json"]
    trained = call(
        "learn", "--out", file, *about, "--layers", "1", "--positions", "-2,-1", "--epochs", 2
    )
    assert trained.exit_code == 0, trained.output
    assert TaskVector.load(file).sites[0].positions == (-2, -1)
    scored = call(
        "evaluate",
        file,
        *about,
        "--n",
        5,
        "--icl-shots",
        2,
        "--template",
        r"Q: {input}\nA: {answer}",
    )
    assert "accuracy, full vocabulary" in scored.output
    assert "dNTP over vocabulary" in scored.output
    with pytest.raises(UnknownName, match="no task named 'pairs'"):
        call("evaluate", file)  # the card's model, and its task, which was a file
    shown = call("show", file)
    assert '"method": "learned"' in shown.output
    assert "validation_loss" in shown.output


def test_evaluate_takes_what_is_left_out_from_the_card(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "v.safetensors"
    about = ["--model", folder, "--task", "number-word", "--seed", 3, "--template", "qa"]
    call("learn", "--out", file, *about, "--epochs", 1)
    few = ["--n", 4, "--icl-shots", 1]
    assert call("evaluate", file, *few).output == call("evaluate", file, *about, *few).output
    assert call("evaluate", file, *few).output != call("evaluate", file, "--seed", 0, *few).output


@pytest.mark.parametrize(
    ("method", "options", "sites"),
    [
        ("hidden_state", ["--layer", "1", "--option", "shots=2", "--option", "n=3"], 1),
        ("linear", ["--option", "shots=2", "--option", "n=4", "--option", "ridge=1e3"], 1),
        ("i2cl", ["--option", "shots=2", "--option", "calibrate=false"], 6),
        ("state_vector", ["--layer", "1", "--option", "optimisation=none"], 2),
    ],
)
def test_extract_saves_the_vector_of_any_method(
    folder: Path, tmp_path: Path, method: str, options: list[str], sites: int
) -> None:
    task = ["--model", folder, "--task", folder / "pairs.json"]
    file = tmp_path / "vector.safetensors"
    call("extract", method, "--out", file, *task, "--seed", "3", *options)
    vector = TaskVector.load(file)
    assert (vector.card.method, vector.card.seed, len(vector.sites)) == (method, 3, sites)


def test_compare_writes_tables_and_a_figure_and_keeps_its_cells(
    folder: Path, tmp_path: Path
) -> None:
    words = ["compare", folder / "pairs.json", "--model", folder]
    words += ["--methods", "hidden_state,linear", "--layers", "0,2", "--shots", "2", "--n", "4"]
    words += ["--option", "hidden_state.shots=2", "--option", "hidden_state.n=3"]
    words += ["--option", "linear.shots=2", "--option", "linear.n=4", "--out", tmp_path]
    first, again = call(*words), call(*words)
    assert "pairs: hidden_state, layer 2: accuracy, full vocabulary" in first.output
    assert "layer 2: accuracy" not in again.output
    table = pd.read_csv(tmp_path / "methods.csv")
    assert len(table[["method", "layer"]].drop_duplicates()) == 6
    assert pd.read_csv(tmp_path / "best.csv")["method"].tolist() == [
        "zero-shot", "in-context", "hidden_state", "linear"
    ]  # fmt: skip
    assert "Plotly.newPlot" in (tmp_path / "methods.html").read_text()
    assert len(list((tmp_path / "cells").glob("*.json"))) == 6


def test_tasks_are_listed_with_their_sizes() -> None:
    output = call("tasks").output
    assert "present-past" in output
    assert "sst2" in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "--task", "present-pst"], "did you mean 'present-past'"),
        (["run", "--layers", "one"], "'one' is not a list of numbers"),
        (["evaluate", "--dtype", "float23"], "did you mean"),
        (["show", "nowhere.safetensors"], "There is no file 'nowhere.safetensors'"),
        (["learn", "--out", "nowhere/v.safetensors"], "There is no folder"),
        (["extract", "lineer", "--out", "v"], "did you mean 'linear'"),
        (["extract", "linear", "--out", "v", "--option", "rigde=5"], "did you mean 'ridge'"),
        (["extract", "linear", "--out", "v", "--option", "ridge"], "write it like shots=5"),
        (["extract", "i2cl", "--out", "v", "--layer", "3"], "writes to all layers"),
        (["compare", "present-past", "--option", "epochs=5"], "write it like learned.epochs=5"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["mechtv", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("mechtv: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is made before the input is known to be good"


def test_the_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from mechtv.cli import main; main()", "tasks"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
