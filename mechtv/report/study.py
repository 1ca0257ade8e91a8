"""The page of a study: question, answer, figures, claims, state, provenance, for each model."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from mechtv.errors import InvalidInput
from mechtv.files import write_whole
from mechtv.plots import accuracy_of_methods, dntp_against_accuracy, methods_table_bars
from mechtv.report import study_words as words
from mechtv.report.cells import ModelScores, scores_of
from mechtv.report.drawing import drawn, scripts
from mechtv.report.markup import NOTHING, Html, facts, number, table, text
from mechtv.report.page import style, template
from mechtv.report.toml import toml
from mechtv.study import MethodComparison, StudyResults
from mechtv.study.averages import best_layers, over_seeds
from mechtv.study.claims import FAILS, HOLDS, claims
from mechtv.study.code import code_version
from mechtv.study.compare import CHOOSES

FULL, LABELS, DNTP = CHOOSES[False], CHOOSES[True], "dNTP over labels"
MOST_ERRORS = 5
VERDICTS = {HOLDS: "holds", FAILS: "fails"}

Draw = Callable[[], go.Figure]


def write_study(results: StudyResults, path: str | Path, *, accept_older: bool = False) -> Path:
    """Write the page to `path`, whole or not at all.

    Args:
        accept_older: as in `study_html`.

    Raises:
        InvalidInput: as `study_html` does, or if the folder does not exist or cannot be written.
    """
    return write_whole(path, study_html(results, accept_older=accept_older).encode("utf-8"))


def study_html(results: StudyResults, *, accept_older: bool = False) -> str:
    """The page as text: about 5 MB, nearly all of it Plotly's own code.

    Args:
        accept_older: show the scores of cells that other code computed, too.

    Raises:
        InvalidInput: if a cell of one model and seed stands twice, as of two tasks of one name.
    """
    study, models = results.study, scores_of(results, accept_older=accept_older)
    sections = [
        _model(scores, place, several=len(models) > 1) for place, scores in enumerate(models)
    ]
    versions = code_version()
    parts: dict[str, Html] = {
        "style": style(),
        "scripts": scripts(),
        "title": text(f"Study: {study.name}"),
        "subtitle": text(words.state(results)),
        "question": text(words.question(study)),
        "models": Html("\n".join(sections or [_no_answer()])),
        "state": _state(results, accept_older=accept_older),
        "facts": facts(_facts(results)),
        "description": text(toml(study)),
        "command": text(_commands(results)),
        "version": text(versions["mechtv"]),
    }
    return template("study.html").substitute(parts)


def _model(scores: ModelScores, place: int, *, several: bool) -> Html:
    """The sections of one model, named after it if there are several."""
    of = f": {scores.name}" if several else ""
    return Html(
        "\n".join(
            f'<section aria-labelledby="{name}-{place}">\n<h2 id="{name}-{place}">'
            f"{text(title + of)}</h2>\n{content}\n</section>"
            for name, title, content in (
                ("answer", "Answer", _answer(scores)),
                ("figures", "Figures", _figures(scores, place)),
                ("claims", "What holds and what does not", _claims(scores)),
            )
        )
    )


def _no_answer() -> Html:
    return Html(
        '<section aria-labelledby="answer">\n<h2 id="answer">Answer</h2>\n<p>There is none yet: no '
        "cell is done.</p>\n</section>"
    )


def _answer(scores: ModelScores) -> Html:
    best, references = words.choices(scores)
    sentences = "\n".join(f"<li>{text(said)}</li>" for said in words.answers(scores))
    note = words.averages_note(scores)
    rows = [
        [
            text(row["task"]),
            text(row["score"]),
            text(words.vectors_text(row["vectors"])),
            number(words.estimate(row)),
            *([text(f"{row['least']:.2f} – {row['most']:.2f}")] if note else []),
            *(number(references.get((row["task"], name))) for name in ("zero-shot", "in-context")),
            text(str(row["n"])),
        ]
        for row in best.to_dict("records")
    ]
    head = ["Task", "Score", "Best vector", "Its score"]
    head += ["Lowest – highest seed"] if note else []
    head += ["Zero-shot", "In context", "Test queries"]
    chosen = table(
        "Each task’s best vector, with its layer chosen on the validation split.",
        head,
        rows,
        kind="best",
    )
    return Html(
        f'<ul class="findings">\n{sentences}\n</ul>\n'
        + (f"<p>{text(note)}</p>\n" if note else "")
        + (f"{chosen}\n" if rows else "")
        + '<p class="muted">Brackets are 95 % intervals: Wilson’s for accuracies, the bootstrap’s '
        "for dNTP. Methods that write to all layers at once have no validation score; they are in "
        "the table of all methods only.</p>\n<details><summary>All methods at their best layers"
        f"</summary>\n{_all_methods(scores)}\n</details>"
    )


def _all_methods(scores: ModelScores) -> Html:
    best = best_layers(scores.rows)
    shown = [score for score in (FULL, LABELS, DNTP, "log-probability") if _has(best, score)]
    rows = []
    for (task, method), own in best.groupby(["task", "method"], sort=False):
        found = {row["score"]: words.estimate(row) for row in own.to_dict("records")}
        layers, seconds = own["layers"].iloc[0], own["seconds_to_fit"].iloc[0]
        rows.append(
            [
                text(str(task)),
                text(words.label(str(method))),
                text(layers) if layers else NOTHING,
                *(number(found.get(score)) for score in shown),
                text(f"{seconds:.1f}"),
            ]
        )
    head = ["Task", "Method", "Layer", *(score[:1].upper() + score[1:] for score in shown)]
    caption = "Test scores; layers are chosen on the validation split. dNTP and log-probability "
    caption += "are in nats."
    return table(caption, [*head, "Seconds to fit"], rows)


def _figures(scores: ModelScores, place: int) -> Html:
    """The figures in tabs, which are radio buttons: they work by keyboard and without a script."""
    tabs = "\n".join(
        f'<input type="radio" name="tabs-{place}" id="tab-{place}-{number}"'
        f"{' checked' if number == 0 else ''}>"
        f'<label for="tab-{place}-{number}">{text(title)}</label>\n'
        f'<figure><div class="drawing">{_drawn(draw, f"figure-{place}-{number}")}</div></figure>'
        for number, (title, draw) in enumerate(_tabs(scores))
    )
    return Html(f'<div class="tabs" role="group" aria-label="Figures">\n{tabs}\n</div>')


def _tabs(scores: ModelScores) -> Iterator[tuple[str, Draw]]:
    every = MethodComparison(rows=over_seeds(scores.rows))
    best = MethodComparison(rows=best_layers(scores.rows))
    yield "Accuracy by layer", lambda: accuracy_of_methods(every)
    yield "At the best layer", lambda: methods_table_bars(best)
    if _has(scores.rows, LABELS):
        yield "Among labels, by layer", lambda: accuracy_of_methods(every, LABELS)
        yield "Among labels, at the best", lambda: methods_table_bars(best, LABELS)
    yield "dNTP", lambda: methods_table_bars(best, DNTP)
    yield "dNTP against accuracy", lambda: dntp_against_accuracy(every)


def _drawn(draw: Draw, name: str) -> Html:
    """The figure, or why there is none."""
    try:
        return drawn(draw(), name)
    except InvalidInput as error:
        return Html(f"<p>{text(str(error))}</p>")


def _claims(scores: ModelScores) -> Html:
    found = claims(MethodComparison(rows=scores.rows), kinds=scores.kinds).to_dict("records")
    rows = [
        [
            text(row["claim"]),
            Html(
                f'<span class="verdict {VERDICTS.get(row["verdict"], "")}">{row["verdict"]}</span>'
            ),
            number(words.estimate(row)) if row["n"] else NOTHING,
            text(str(row["n"])),
            text(row["sentence"]),
        ]
        for row in found
    ]
    head = ["Claim", "Verdict", "What decides", "n", "In words"]
    return Html(
        table("Claims of the two papers that a grid can test.", head, rows, kind="claims")
        + '\n<p class="muted">The first four say that differences of accuracies, or of dNTP in '
        "nats, are all positive. Their intervals hold together at 95 % for each claim, and take "
        "the two scores as unpaired, which is right or too wide. “Clearly” means that the interval "
        "does not include 0. A claim holds only if all do so. Vectors of one task share test "
        "queries, so the interval of the correlation may be too narrow.</p>"
    )


def _state(results: StudyResults, *, accept_older: bool) -> Html:
    errors, status = results.errors(), results.status()
    said = [words.state(results), *results.notices()]
    if accept_older and "older" in results.counts():
        said.append("The numbers of this page include those of older code.")
    failed = [f"{row.cell}: {row.error}" for row in errors.head(MOST_ERRORS).itertuples()]
    more = len(errors) - len(failed)
    failed += [f"and {more} more, which mechtv study status lists."] if more else []
    listed = "\n".join(f"<li>{text(error)}</li>" for error in failed)
    rows = [[text(str(value)) for value in row] for row in status.itertuples(index=False)]
    cells = table("Cells by state.", [name.capitalize() for name in status.columns], rows)
    return Html(
        "\n".join(f"<p>{text(sentence)}</p>" for sentence in said)
        + (f'\n<h3>First errors</h3>\n<ul class="findings">\n{listed}\n</ul>' if failed else "")
        + f"\n<details><summary>By model, task and method</summary>\n{cells}\n</details>"
    )


def _facts(results: StudyResults) -> dict[str, str]:
    models = {str(cell.model): key["model"] for cell, key, _ in results.states}
    described = [
        f"{one['name']}, revision {one['revision']}, {one['dtype']}" for one in models.values()
    ]
    tasks = {cell.task: cell.task.load() for cell in results.study.cells}
    about = {f"Model {i}" if len(described) > 1 else "Model": m for i, m in enumerate(described, 1)}
    about |= {
        f"Task {task.name}": f"{task.description or 'no description'} Template: "
        f"{task.template.description.replace(chr(10), '↵')}"
        for task in tasks.values()
    }
    versions = ", ".join(f"{name} {version}" for name, version in code_version().items())
    return about | {"Versions": versions}


def _commands(results: StudyResults) -> str:
    folder = shlex.quote(f"out/{results.study.name}")
    return f"mechtv study run study.toml\nmechtv report {folder}"


def _has(rows: pd.DataFrame, score: str) -> bool:
    return bool((rows["score"] == score).any())
