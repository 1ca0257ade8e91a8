"""The page of a study: its numbers, its state, and that it works in a real browser."""

import json
import re
import tomllib
from html import unescape
from itertools import pairwise

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from study.small import METHODS, save_model, small
from test_cli import call
from test_report import Page, browse, needs_browser

from mechtv.plots import dark
from mechtv.plots.style import fixed
from mechtv.report import study_html, write_study
from mechtv.report.drawing import changed
from mechtv.report.toml import toml
from mechtv.study import MethodComparison, Study, StudyResults, claims, run_study
from mechtv.study.averages import best_layers

EVIL = "</script><img src=x onerror=alert(1)>&"
FULL = "accuracy, full vocabulary"
FIRST, LAST = "figure-0-0", "figure-0-3"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def results(place):
    return run_study(small(place), place / "out")


@pytest.fixture(scope="module")
def html(results):
    return study_html(results)


def rest_of(html):
    """The page without Plotly's own code."""
    return html.replace(get_plotlyjs(), "")


# --- what it says -----------------------------------------------------------------------------


def test_the_question_is_made_from_the_study(html):
    text = Page(html).text
    assert "Study: small" in text
    assert "with a task vector, beside zero-shot and in context? The grid: method" in text
    assert "layers 0 and 2; seeds 0, 1 and 2. Each vector is tried on at most 5 test" in text
    assert "12 cells: 12 done." in text


def test_the_numbers_are_those_of_the_table(html, results):
    text, table = Page(html).text, results.table()
    own = table[(table["split"] == "test") & (table["score"] == FULL)]
    plain = own[own["method"] == "zero-shot"][["value", "low", "high"]].mean()
    shown = f"{fixed(plain['value'])} [{fixed(plain['low'])}, {fixed(plain['high'])}]"
    assert f"beside {shown} zero-shot" in text
    best = best_layers(table)
    for row in best[best["score"].isin([FULL, "log-probability"])].to_dict("records"):
        interval = f"[{fixed(row['low'])}, {fixed(row['high'])}]"
        assert f"{fixed(row['value'])} {interval}" in text, row


def test_several_seeds_are_said_to_be_averaged(html, place):
    assert "means over 3 seeds (0, 1 and 2)" in Page(html).text
    one = StudyResults(study=small(place, seeds=[0]), folder=place / "out")
    assert "seeds (" not in Page(study_html(one)).text


def test_every_claim_has_its_verdict_and_sentence(html, results):
    text = Page(html).text
    for row in claims(MethodComparison(rows=results.table())).to_dict("records"):
        assert f"{row['claim']} {row['verdict']} " in text
        assert row["sentence"] in text


def test_the_description_runs_again(html, results):
    written = toml(results.study)
    assert Study.from_plain(tomllib.loads(written)) == results.study
    assert unescape(re.search(r"<pre><code>(.*?)</code>", html, re.DOTALL)[1]) == written
    labelled = Study(
        name='a "b"\n',
        models=[{"name": "m", "dtype": "bfloat16"}],
        tasks=["t"],
        methods=[{"name": "learned", "label": "é", "epochs": 2}],
        layers=[0.25, 3],
        positions=[[-1], [-3, -1]],
    )
    assert Study.from_plain(tomllib.loads(toml(labelled))) == labelled


def test_models_revisions_and_versions_are_there(html, results):
    _, key, _ = results.states[0]
    text = Page(html).text
    for value in (key["model"]["revision"], *key["versions"].values()):
        assert value in text
    assert "mechtv study run study.toml mechtv report out/small" in text


# --- what is not as it should be --------------------------------------------------------------


def test_failed_and_missing_cells_are_said(place, tmp_path):
    broken = {"name": "hidden_state", "label": "broken", "shots": 99}
    study = small(place, methods=(*METHODS, broken), seeds=[0])
    failed = run_study(study, tmp_path)
    text = Page(study_html(failed)).text
    assert "6 cells: 4 done and 2 failed." in text
    assert "broken, layer 0, seed 0: InvalidInput: shots=99 demonstrations" in text
    wider = StudyResults(study=small(place, methods=study.methods, seeds=[0, 1]), folder=tmp_path)
    assert "12 cells: 4 done, 2 failed and 6 missing." in Page(study_html(wider)).text


def test_cells_of_older_code_are_shown_only_if_they_are_accepted(
    place, results, tmp_path, monkeypatch
):
    monkeypatch.setattr("mechtv.study.grid.code_version", lambda: {"mechtv": "0", "code": "new"})
    older = StudyResults(study=results.study, folder=results.folder)
    text = Page(study_html(older)).text
    assert "12 cells: 12 of older code." in text
    assert "There is none yet: no cell is done." in text
    accepted = Page(study_html(older, accept_older=True)).text
    assert "The numbers of this page include those of older code." in accepted
    assert "Hidden-state vector, layer" in accepted


def test_a_study_that_was_never_run_has_a_page(place):
    text = Page(study_html(StudyResults(study=small(place), folder=None))).text
    assert "12 cells: 12 missing." in text


def test_a_study_of_the_plain_model_alone_has_a_page(place, tmp_path):
    for methods in (["in-context"], ["zero-shot"]):
        plain = run_study(small(place, methods=methods, seeds=[0]), tmp_path)
        assert "No vector has a validation score" in Page(study_html(plain)).text


# --- several of a kind ------------------------------------------------------------------------


def test_each_model_has_sections_of_its_own(place, tmp_path):
    other = save_model(tmp_path / "other", seed=1)
    both = small(place, models=[str(place / "model"), str(other)], seeds=[0])
    page = Page(study_html(run_study(both, tmp_path / "out")))
    for name in ("model", "other"):
        assert re.search(rf"Answer: \S*{name}\b", page.text)
        assert re.search(rf"What holds and what does not: \S*{name}\b", page.text)
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(names)) == len(names)


def test_a_method_at_several_positions_is_told_apart(place, tmp_path):
    study = small(place, positions=[[-1], [-2]], seeds=[0])
    text = Page(study_html(run_study(study, tmp_path))).text
    assert "hidden_state at [-1]" in text
    assert "hidden_state at [-2]" in text


def test_a_labelled_reference_is_still_one(place, tmp_path):
    methods = [{"name": "zero-shot", "label": "plain"}, *METHODS[1:]]
    results = run_study(small(place, methods=methods, seeds=[0]), tmp_path)
    assert re.search(r"beside [^.]*zero-shot and ", Page(study_html(results)).text)


# --- the page ---------------------------------------------------------------------------------


def test_the_page_is_one_small_file_that_asks_for_nothing(html):
    page = Page(html)
    assert page.open == []
    assert len(html.encode()) < 6_000_000
    assert html.count(get_plotlyjs()) == 1
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", rest_of(html))
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.elements)
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none';")


def test_the_page_is_accessible(html):
    page = Page(html)
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.count("caption") == page.count("table")
    assert all(attributes.get("scope") for tag, attributes in page.elements if tag == "th")
    radios = [a["id"] for tag, a in page.elements if tag == "input" and a["type"] == "radio"]
    assert radios == [a["for"] for tag, a in page.elements if tag == "label"]
    drawings = [a for _, a in page.elements if a.get("role") == "img"]
    assert all(drawing["aria-label"] for drawing in drawings)
    assert "Accuracy (full vocabulary) by injection layer" in drawings[0]["aria-label"]


def test_names_are_shown_and_never_run(place, tmp_path):
    study = small(place, name=EVIL, methods=[{**METHODS[2], "label": EVIL}], seeds=[0])
    html = study_html(run_study(study, tmp_path))
    page = Page(html)
    assert page.open == []
    assert page.count("img") == 0
    assert "<img" not in rest_of(html)
    assert f"Study: {EVIL}" in page.text


def test_the_command_writes_the_page(results, tmp_path):
    out = tmp_path / "page.html"
    assert "12 of 12 cells are done." in call("report", results.folder, "--out", out).output
    assert out.read_text("utf-8") == study_html(results)
    assert write_study(results, out) == out


# --- figures in the dark ----------------------------------------------------------------------


def put(tree, leaves):
    """What `change` in draw.js does."""
    for key, value in leaves.items():
        old = tree[key] if isinstance(tree, list) else tree.get(key)
        if isinstance(value, dict) and isinstance(old, dict | list):
            put(old, value)
        else:
            tree[key] = value
    return tree


def test_a_dark_figure_is_the_light_one_with_its_changed_leaves():
    light = go.Figure(go.Scatter(y=[1, 2], marker={"color": ["#000000", "#ff0000"]}))
    light.update_layout(paper_bgcolor="white", title_text="kept")
    one, other = light.to_plotly_json(), dark(light).to_plotly_json()
    one["layout"]["template"] = other["layout"]["template"] = None
    leaves = changed(one, other)
    assert "title" not in leaves["layout"]
    assert list(leaves["data"]) == [0]
    assert put(one, leaves) == other


def test_nothing_changes_between_the_same():
    assert changed({"a": [1, {"b": 2}]}, {"a": [1, {"b": 2}]}) == {}
    assert changed({"a": [1, 2]}, {"a": [1, 3]}) == {"a": {1: 3}}
    assert changed({"a": [1, 2]}, {"a": [1]}) == {"a": [1]}


# --- a real browser ---------------------------------------------------------------------------

PROBE = """<script>
const press = (tab) => document.querySelector(`label[for="tab-0-${tab}"]`).click();
const soon = (act) => setTimeout(act, 500);
addEventListener("load", () => soon(() => {
  const page = document.documentElement;
  const [first, other] = [0, 2].map((tab) => document.getElementById(`figure-0-${tab}`));
  const found = {before: other.offsetWidth};
  press(2);
  soon(() => {
    const paper = other.querySelector(".main-svg");
    found.gone = first.offsetWidth;
    Object.assign(found, {width: other.offsetWidth, drawn: paper.clientWidth});
    found.paper = getComputedStyle(paper).backgroundColor;
    press(0);
    soon(() => {
      const curveNumber = first.data.findIndex((trace) => trace.hovertext);
      Plotly.Fx.hover(first, [{curveNumber, pointNumber: 0}]);
      found.hover = first.querySelector(".hoverlayer .hovertext").textContent;
      found.aside = page.scrollWidth - page.clientWidth;
      document.title = JSON.stringify(found);
    });
  });
}));
</script>"""


@needs_browser
@pytest.mark.parametrize(
    ("width", "scheme", "paper"), [(600, 1, "rgb(255, 255, 255)"), (1200, 0, "rgb(26, 32, 39)")]
)
def test_tabs_and_hovers_work_in_a_browser(html, tmp_path, width, scheme, paper):
    path = tmp_path / "page.html"
    path.write_text(html.replace("</body>", f"{PROBE}</body>"), "utf-8")
    option = f"--blink-settings=preferredColorScheme={scheme}"
    dom, log = browse(path, tmp_path / "profile", width, option)
    assert "CONSOLE" not in log, log
    found = json.loads(unescape(re.search("<title>(.*?)</title>", dom)[1]))
    assert found["before"] == found["gone"] == 0
    assert 0.7 * width < found["drawn"] <= found["width"]
    assert found["paper"] == paper
    assert "95 % interval" in found["hover"]
    assert found["aside"] == 0
