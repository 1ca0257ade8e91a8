import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
import torch
from builders import tiny
from plotly.offline import get_plotlyjs
from plots.fake import LAYERS, example_table, fake_overview
from typer.testing import CliRunner

from mechtv.errors import InvalidInput
from mechtv.overview import run_overview
from mechtv.report import report_html, write_report
from mechtv.report.markup import visible
from mechtv.report.origin import command, duration
from mechtv.report.tables import begins_with
from mechtv.report.words import answer, p_text, signed
from mechtv.tasks.example import Example
from mechtv.tasks.task import Task
from mechtv.tasks.template import Template

EVIL = "</script><script>alert('x')</script>&<img src=http://evil.example/x onerror=alert(1)>"
CHROME = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    CHROME is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)


class Page(HTMLParser):
    """What the tests ask of a page: its elements, its visible text, and whether tags balance."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def html() -> str:
    return report_html(fake_overview())


@pytest.fixture(scope="module")
def evil() -> str:
    examples = example_table()
    examples.loc[0] = [EVIL, "a", EVIL, "b\nc", "", " "]
    return report_html(
        fake_overview(
            name=EVIL,
            model=EVIL,
            examples=examples,
            labels=(EVIL, "good"),
            tokens=(EVIL, "\n", " ", "", "\u202e"),
        )
    )


# --- the answer in words ----------------------------------------------------------------------


def words(**given: object) -> str:
    overview = fake_overview(**given)  # type: ignore[arg-type]
    text = answer(overview, overview.comparisons())
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_answer_states_the_numbers_of_the_overview() -> None:
    text = words()
    for part in (
        "best learned vector (layer 26, chosen on the validation split) gets 0.60 [0.50, 0.69]",
        "0.76 [0.67, 0.83] in context with 8 demonstrations",
        "0.00 [0.00, 0.04] zero-shot",
        "79 % of what the demonstrations gain",
        "hidden-state vector reaches 0.30 [0.22, 0.40] at its best depth (layer 18",
        "beats the hidden-state vector at every depth",
        "beyond chance (exact McNemar test, p < 0.05, not corrected for 4 tests) at every depth.",
        "the paired difference is +0.56",
        "(p < 0.001)",
    ):
        assert part in text


def test_the_answer_does_not_claim_what_is_not_so() -> None:
    text = words(
        learned={3: 0.1, 11: 0.2, 18: 0.5}, hidden={3: 0.4, 11: 0.19, 18: 0.1}, in_context=0.0
    )
    assert "beats the hidden-state vector at 2 of 3 depths (layers 11 and 18)" in text
    assert "at 2 of 3 depths (layers 3 and 18); the hidden-state vector wins at layer 3." in text
    assert "Demonstrations bring no gain" in text
    assert "at no depth" in words(learned={3: 0.1}, hidden={3: 0.1})


def test_p_values_and_differences_are_written_as_people_do() -> None:
    values = (0.0001, 0.012, 0.051, 0.25, 1.0)
    assert [p_text(p) for p in values] == ["< 0.001", "= 0.012", "= 0.051", "= 0.25", "= 1"]
    assert [signed(d) for d in (0.5, -0.5, 0.0, -0.001)] == ["+0.50", "−0.50", "0.00", "0.00"]


# --- the page ---------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_small(html: str) -> None:
    assert Page(html).open == []
    assert len(html.encode()) < 6_000_000


def test_the_page_holds_the_library_once_and_asks_for_nothing(html: str) -> None:
    assert html.count(get_plotlyjs()) == 1
    rest = html.replace(get_plotlyjs(), "")
    assert not re.search(r"(src|href|action|data)\s*=\s*[\"']?\s*(https?:)?//", rest)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest", rest)
    page = Page(html)
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.elements)
    (policy,) = (a["content"] for _, a in page.elements if a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy


def test_the_page_is_accessible(html: str) -> None:
    page = Page(html)
    assert ("html", {"lang": "en"}) in page.elements
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.count("caption") == page.count("table") == 4
    assert all(attributes.get("scope") for tag, attributes in page.elements if tag == "th")
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(names)) == len(names)
    assert "prefers-color-scheme: dark" in html


def test_every_setting_has_a_row_with_its_numbers(html: str) -> None:
    text = Page(html).text
    assert text.count("Learned vector ★") == 1
    for part in ("−1.87 [−2.20, −1.54]", "5.80 [5.47, 6.13]", "·jumped", "\\u200b", "↵"):
        assert part in text
    assert "label-restricted" not in text
    assert "label-restricted" in Page(report_html(fake_overview(labels=("yes", "no")))).text


def test_right_and_wrong_have_a_sign_a_word_and_a_colour(html: str) -> None:
    right = re.findall(r'<span class="right"><span aria-hidden="true">✓</span>.*?right: ', html)
    wrong = re.findall(r'<span class="wrong"><span aria-hidden="true">✗</span>.*?wrong: ', html)
    assert (len(right), len(wrong)) == (8, 8)


@pytest.mark.parametrize(
    ("written", "right"),
    [("jumped", True), ("jumped. He", True), ("jumpedly", False), ("jump", False), ("", False)],
)
def test_an_answer_is_right_if_the_text_begins_with_it(written: str, right: bool) -> None:
    assert begins_with(written, "jumped") is right


def test_the_page_says_how_it_was_made(html: str) -> None:
    text = Page(html).text
    for part in (
        "sha256:0123456789abcdef",
        "raw, float32",
        "{input} -> {answer}",
        "205 training, 68 validation, 100 test",
        "step_size 0.1",
        "torch ",
        "12 min 34 s",
        "mechtv run --model smollm2-135m --task present-past",
    ):
        assert part in text


def test_hostile_text_is_shown_and_never_run(evil: str) -> None:
    page = Page(evil)
    assert page.open == []
    assert page.count("img") == 0
    assert page.count("script") == 5, "the library and four figures"
    assert "<img" not in evil.replace(get_plotlyjs(), "")
    assert EVIL.replace(" ", "·") in page.text, "as a token"
    assert EVIL in page.text, "as a query"


def test_what_cannot_be_seen_is_shown() -> None:
    assert visible(" a\n\t\r", spaces=True) == "·a↵⇥␍"
    assert visible(" a\u200b\x00\xa0", spaces=False) == " a\\u200b\\u0000\\u00a0"
    assert visible("é日本\u202e", spaces=True) == "é日本\\u202e"


# --- the command ------------------------------------------------------------------------------


def test_the_command_names_only_what_it_would_not_take_by_itself() -> None:
    plain = "mechtv run --model smollm2-135m --task present-past --shots 8 --seed 0"
    assert command(fake_overview()) == plain
    other = command(fake_overview(learned={2: 0.1, 5: 0.3}, hidden={2: 0.0, 5: 0.0}))
    assert "--layers 2,5" in other
    assert "--template '{input} -> {answer}'" in command(fake_overview(name="my task"))
    assert "--task 'my task'" in command(fake_overview(name="my task"))


def test_the_command_has_options_that_the_command_line_knows() -> None:
    from mechtv.cli import app

    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).output
    shown = re.sub(r"\x1b\[[\d;]*m", "", shown)
    for option in ("--model", "--task", "--layers", "--n", "--template", "--dtype", "--shots"):
        assert option in shown


def test_durations_are_written_as_people_do() -> None:
    assert [duration(s) for s in (0.4, 59.7, 754.2, 7322.0)] == [
        "0 s",
        "1 min 0 s",
        "12 min 34 s",
        "2 h 2 min 2 s",
    ]


# --- writing ----------------------------------------------------------------------------------


def test_the_report_is_written_whole(tmp_path: Path, html: str) -> None:
    path = write_report(fake_overview(), tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == html
    assert os.listdir(tmp_path) == ["report.html"]


def test_an_interrupted_write_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InvalidInput, match="No space left"):
        write_report(fake_overview(), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_missing_folder_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="There is no folder"):
        write_report(fake_overview(), tmp_path / "nowhere" / "report.html")


# --- a real overview, a real browser ----------------------------------------------------------


def small_task(labels: tuple[str, ...] | None) -> Task:
    answers = labels or ("cats", "dogs", "houses", "trees")
    return Task(
        name="small",
        examples=tuple(Example.pair(f"w{i}", answers[i % len(answers)]) for i in range(30)),
        template=Template(text="{input} -> {answer}"),
        labels=labels,
    )


@pytest.mark.parametrize("labels", [None, ("good", "bad")])
def test_a_tiny_models_overview_makes_a_page(labels: tuple[str, ...] | None) -> None:
    model = tiny("llama", torch.float32)
    task = small_task(labels)
    overview = run_overview(model, task, layers=(1,), shots=2, n=4, progress=False)
    page = Page(report_html(overview))
    assert page.open == []
    assert page.count("table") == 4
    assert isinstance(overview.examples, pd.DataFrame)


def browse(path: Path, profile: Path, width: int = 1200, *options: str) -> tuple[str, str]:
    """The page after its scripts ran, and what the browser logged."""
    assert CHROME is not None
    done = subprocess.run(
        [
            CHROME,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            f"--window-size={width},2000",
            "--virtual-time-budget=5000",
            "--enable-logging=stderr",
            *options,
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, done.stderr


@needs_browser
@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
def test_a_browser_draws_every_figure_without_an_error(
    hostile: bool, tmp_path: Path, html: str, evil: str
) -> None:
    path = tmp_path / "report.html"
    probe = (
        "<script>document.documentElement.dataset.overflow ="
        " document.documentElement.scrollWidth - document.documentElement.clientWidth</script>"
    )
    path.write_text((evil if hostile else html).replace("</body>", f"{probe}</body>"), "utf-8")
    for width in (600, 1200):
        dom, log = browse(path, tmp_path / "profile", width)
        assert "CONSOLE" not in log, log
        for name in ("accuracy", "training", "vocabulary", "labels"):
            drawn = re.search(rf'id="figure-{name}".*?class="main-svg"', dom, re.DOTALL)
            assert drawn, f"{name} at {width} px"
        assert 'data-overflow="0"' in dom, f"the page scrolls sideways at {width} px"


@needs_browser
def test_the_browser_test_would_see_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text("<!doctype html><title>x</title><script>Plotly.newPlot()</script>")
    _, log = browse(path, tmp_path / "profile")
    assert "CONSOLE" in log


def test_the_layers_of_the_fake_are_those_that_the_job_would_choose() -> None:
    assert fake_overview().layers == LAYERS
