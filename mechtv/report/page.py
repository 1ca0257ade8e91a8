"""The page: its layout is `template.html`; here everything is put in its place.

It is one file that works without a network; its policy forbids the browser any request.
"""

from importlib.resources import files
from pathlib import Path
from string import Template

from mechtv.files import write_whole
from mechtv.overview import Overview
from mechtv.plots import accuracy_by_layer, dntp_bars, training_curves
from mechtv.plots.style import label_of, look_of
from mechtv.report import origin, tables, words
from mechtv.report.drawing import drawn, scripts
from mechtv.report.markup import Html, facts, key_figure, text

KEY_SETTINGS = ("learned", "in-context", "hidden_state", "zero-shot")


def write_report(overview: Overview, path: str | Path) -> Path:
    """Write the page to `path`, whole or not at all.

    Raises:
        InvalidInput: if the folder does not exist or cannot be written.
    """
    return write_whole(path, report_html(overview).encode("utf-8"))


def report_html(overview: Overview) -> str:
    """The page as text: about 5 MB, nearly all of it Plotly's own code."""
    comparisons = overview.comparisons()
    parts: dict[str, Html] = {
        "style": style(),
        "title": text(f"Task vectors for {overview.task.name}"),
        "subtitle": text(words.subtitle(overview)),
        "scripts": scripts(),
        "answer": text(words.answer(overview, comparisons)),
        "key_figures": _key_figures(overview),
        "accuracy_figure": drawn(accuracy_by_layer(overview), "figure-accuracy"),
        "training_figure": drawn(training_curves(overview), "figure-training"),
        "vocabulary_figure": drawn(dntp_bars(overview), "figure-vocabulary"),
        "labels_figure": drawn(dntp_bars(overview, over="labels"), "figure-labels"),
        "distance_note": text(words.distance_note(overview)),
        "settings_table": tables.settings_table(overview),
        "comparison_table": tables.comparison_table(comparisons),
        "examples_table": tables.examples_table(overview),
        "facts": facts(origin.provenance(overview)),
        "training_table": tables.training_table(overview),
        "learn_settings": facts(origin.learn_settings(overview)),
        "command": text(origin.command(overview)),
        "version": text(origin.learned_card(overview).versions.get("mechtv", "")),
    }
    return template("template.html").substitute(parts)


def template(name: str) -> Template:
    """A page's layout."""
    return Template(_read(name))


def style() -> Html:
    """The pages' style sheet."""
    return Html(_read("style.css"))


def _read(name: str) -> str:
    return (files("mechtv.report") / name).read_text(encoding="utf-8")


def _key_figures(overview: Overview) -> Html:
    return Html("\n".join(_key_figure(overview, name) for name in KEY_SETTINGS))


def _key_figure(overview: Overview, name: str) -> Html:
    setting = words.best(overview, name)
    depth = "" if setting.layer is None else f", layer {setting.layer}"
    color = "var(--ink)" if name == "zero-shot" else look_of(name).color
    label = label_of(name, overview.shots) + depth
    return key_figure(label, setting.evaluation.accuracy, color)
