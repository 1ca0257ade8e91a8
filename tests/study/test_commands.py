"""`mechtv study`: from a file to a table, and sentences where something is wrong."""

import pandas as pd
import pytest
from study.small import save_model, save_pairs
from test_cli import call

from mechtv.errors import InvalidInput, UnknownName
from mechtv.study import Study, estimate, run_study


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    place = tmp_path_factory.mktemp("study")
    save_model(place / "model")
    save_pairs(place / "pairs.json")
    path = place / "my.toml"
    path.write_text(
        f'models = ["{place / "model"}"]\ntasks = ["{place / "pairs.json"}"]\n'
        'methods = ["zero-shot", {name = "hidden_state", shots = 2, n = 4}]\n'
        "layers = [0, 2]\nshots = 2\nn = 5\nn_validation = 5\n"
    )
    return path


def test_a_study_is_planned_run_looked_at_and_exported(file, tmp_path):
    planned = call("study", "plan", file)
    assert planned.output.startswith("3 cells, 3 of them to be computed: about ")
    assert "counted, to a factor of three" in planned.output
    out = tmp_path / "out"
    ran = call("study", "run", file, "--out", out)
    assert "3 of 3 cells are done." in ran.output
    assert "3 of 3 cells are done." in call("study", "resume", out).output
    status = call("study", "status", out).output
    assert status.split()[:4] == ["model", "task", "method", "done"]
    call("study", "export", out, tmp_path / "all.csv")
    table = pd.read_csv(tmp_path / "all.csv")
    assert set(table["method"]) == {"zero-shot", "hidden_state"}
    assert len(table[["method", "layer"]].drop_duplicates()) == 3


def test_a_failed_cell_is_shown_with_its_error(file, tmp_path):
    study = Study.read(file)
    broken = Study(**{**study.to_plain(), "methods": [{"name": "hidden_state", "shots": 99}]})
    run_study(broken, tmp_path)
    output = call("study", "status", tmp_path).output
    assert "2 of 2 cells are failed" in " ".join(output.split())
    assert "hidden_state, layer 0, seed 0: InvalidInput: shots=99 demonstrations" in output


def test_names_that_are_not_there_are_one_sentence(file, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(file.read_text().replace("hidden_state", "hidden_sate"))
    with pytest.raises(UnknownName, match="did you mean 'hidden_state'"):
        call("study", "plan", wrong)
    with pytest.raises(InvalidInput, match="is no folder of a study"):
        call("study", "status", tmp_path)


def test_an_estimate_is_measured_where_cells_are_there(file, tmp_path):
    study = Study.read(file)
    before = estimate(study, tmp_path / "none")
    assert (before.cells, before.missing, before.measured) == (3, 3, 0.0)
    assert before.seconds > 0
    assert before.nbytes > 2**30
    few = Study(**{**study.to_plain(), "layers": [0]})
    run_study(few, tmp_path)
    after = estimate(study, tmp_path)
    assert (after.missing, after.measured) == (1, 1.0)
    assert "(measured)" in after.sentence()
    run_study(study, tmp_path)
    assert estimate(study, tmp_path).sentence() == "3 cells, none of them to be computed."


def test_an_estimate_counts_failed_cells_only_if_they_are_tried_again(file, tmp_path):
    broken = Study(
        **{**Study.read(file).to_plain(), "methods": [{"name": "hidden_state", "shots": 99}]}
    )
    run_study(broken, tmp_path)
    left, again = (estimate(broken, tmp_path, retry_failed=retry) for retry in (False, True))
    assert (left.missing, left.failed, again.missing, again.failed) == (0, 2, 2, 0)
    assert left.sentence().endswith("2 failed before and are left out.")
