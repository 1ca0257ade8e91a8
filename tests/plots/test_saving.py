"""Figures as files."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest
from plots.gallery import BUILDERS, drawn

from mechtv.errors import InvalidInput
from mechtv.plots import dark, save
from mechtv.plots.saving import PICTURES

BROWSERS = ("chrome", "google-chrome", "chromium", "chromium-browser")
FIGURE = "methods_table_bars"  # with patterns, areas and a legend


@pytest.fixture
def browser():
    """A browser that draws pictures, and kaleido that asks it to."""
    pytest.importorskip("kaleido", reason="pictures need the extra `static`")
    if not (os.environ.get("BROWSER_PATH") or any(map(shutil.which, BROWSERS))):
        pytest.skip("pictures need a Chrome or Chromium, and none is on the path")


def test_a_page_is_one_file_that_asks_nothing_of_the_network(tmp_path: Path) -> None:
    path = save(drawn(FIGURE), tmp_path / "figure.html")
    page = path.read_text("utf-8")
    assert list(tmp_path.iterdir()) == [path]
    assert "plotly.js v" in page
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    assert "<title>Accuracy (full vocabulary) at the best layer of each method</title>" in page


def test_a_page_has_the_paper_of_its_figure_and_markup_of_users_stays_text(tmp_path: Path) -> None:
    figure = go.Figure(drawn(FIGURE)).update_layout(title_text="<b>&lt;i&gt;x</b>")
    page = save(dark(figure), tmp_path / "figure.HTML").read_text("utf-8")
    assert "background: #1a2027" in page
    assert "<title>&lt;i&gt;x</title>" in page


def test_the_same_figure_is_the_same_page_also_after_it_was_copied(tmp_path: Path) -> None:
    figure = BUILDERS[FIGURE]()
    one = save(figure, tmp_path / "a.html").read_bytes()
    dark(figure)
    assert save(figure, tmp_path / "b.html").read_bytes() == one
    assert save(BUILDERS[FIGURE](), tmp_path / "c.html").read_bytes() == one


def test_pictures_have_their_format_and_size(tmp_path: Path, browser) -> None:
    figure = go.Figure(drawn(FIGURE)).update_layout(width=640, height=600)
    before = json.loads(figure.to_json())
    pictures = {ending: save(figure, tmp_path / f"a{ending}").read_bytes() for ending in PICTURES}
    assert pictures[".png"].startswith(b"\x89PNG")
    size = [int.from_bytes(pictures[".png"][at : at + 4]) for at in (16, 20)]
    assert size == [2 * 640, 2 * 600]
    assert b'width="640" height="600"' in pictures[".svg"][:300]
    assert pictures[".pdf"].startswith(b"%PDF")
    box = re.search(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", pictures[".pdf"])
    assert box
    assert [float(side) for side in box.groups()] == pytest.approx([480, 450], abs=0.5)
    assert json.loads(figure.to_json()) == before


def test_the_same_figure_is_the_same_svg(tmp_path: Path, browser) -> None:
    one, other = (save(drawn(FIGURE), tmp_path / f"{i}.svg").read_text() for i in range(2))
    assert one == other
    asked = set(re.findall(r"url\(['\"]?#([^'\")]*)", one))
    assert asked
    assert asked <= set(re.findall(r'id="([^"]*)"', one)), "patterns and clips are still found"


def test_what_cannot_be_saved_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(FIGURE)
    with pytest.raises(InvalidInput, match=r"saved as 'a\.gif'; the endings are \.html, \.png"):
        save(figure, tmp_path / "a.gif")
    with pytest.raises(InvalidInput, match="no folder"):
        save(figure, tmp_path / "none" / "a.html")
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(InvalidInput, match=r"kaleido is needed: pip install 'mechtv\[static\]'"):
        save(figure, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", ["none", "false"])
def test_without_a_browser_the_sentence_names_the_way_out(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kaleido", reason="pictures need the extra `static`")
    path = shutil.which(program) or str(tmp_path / program)
    monkeypatch.setenv("BROWSER_PATH", path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidInput, match=r"Chrome or Chromium is needed.*BROWSER_PATH"):
        save(drawn(FIGURE), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
