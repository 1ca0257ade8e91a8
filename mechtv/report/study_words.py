"""What a study asks and answers, in sentences made from it: plain text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mechtv.evaluation.intervals import Estimate
from mechtv.plots.style import LOOKS, estimate_text
from mechtv.report.cells import ModelScores
from mechtv.study.averages import best_vectors, over_seeds, without_layer
from mechtv.study.correlation import choosing
from mechtv.study.grid import Study
from mechtv.study.results import StudyResults
from mechtv.study.scoring import REFERENCES

BESIDE = {"zero-shot": "zero-shot", "in-context": "in context"}
MOST_SENTENCES = 8  # tasks that have one; the table has all


def question(study: Study) -> str:
    """What was varied, and how each vector was tried."""
    beside = [words for name, words in BESIDE.items() if name in {m.name for m in study.methods}]
    varied = {
        "method": [label(m.title) for m in study.methods if m.name not in REFERENCES],
        "model": [model.name for model in study.models],
        "task": [task.name for task in study.tasks],
        "layer": _layers(study),
        "positions": [str(list(where)) for where in study.positions or ()],
        "seed": list(map(str, study.seeds)),
    }
    grid = "; ".join(
        f"{name if len(values) == 1 else _plural(name)} {listed(values)}"
        for name, values in varied.items()
        if values
    )
    queries = "all test queries" if study.n is None else f"at most {study.n} test queries"
    return (
        f"How accurate does a model become with a task vector"
        f"{', beside ' + listed(beside) if beside else ''}? The grid: {grid}. Each vector is tried "
        f"on {queries} of a task, without demonstrations; in context there are {study.shots}."
    )


def answers(scores: ModelScores) -> list[str]:
    """The best vector of each task beside zero-shot and in context."""
    best, references = choices(scores)
    if best.empty:
        return [
            "No vector has a validation score, by which the best one is chosen: the study has none "
            "for a layer, or none is done."
        ]
    rows = best.to_dict("records")
    said = [_answer(row, references) for row in rows[:MOST_SENTENCES]]
    return [*said, *_reached(rows, references)]


def choices(
    scores: ModelScores,
) -> tuple[pd.DataFrame, Mapping[tuple[str, str], Estimate]]:
    """The accuracy of each task's best vector, and of the (task, reference)."""
    vectors = best_vectors(scores.rows)
    best = choosing(without_layer(vectors.assign(method="", split="test")))
    found = choosing(over_seeds(scores.rows))
    references = {
        (row["task"], row["method"]): estimate(row)
        for row in found[found["method"].isin(REFERENCES)].to_dict("records")
    }
    return best, references


def estimate(row: Mapping[Any, Any]) -> Estimate:
    """The value of a row with its interval."""
    return Estimate(value=row["value"], low=row["low"], high=row["high"], n=int(row["n"]))


def vectors_text(chosen: Sequence[tuple[str, int]]) -> str:
    """The vectors that were chosen, with how many seeds chose each where they differ."""
    counts = Counter(chosen)
    return ", ".join(
        f"{label(method)}, layer {layer}"
        + ("" if len(counts) == 1 else f" ({n} seed{'s' if n > 1 else ''})")
        for (method, layer), n in counts.most_common()
    )


def label(method: str) -> str:
    """A method's name for people; a label that the study gives stays as it is."""
    return LOOKS[method].label if method in LOOKS else method


def averages_note(scores: ModelScores) -> str:
    """How several seeds are averaged; empty for one."""
    seeds = scores.seeds
    if len(seeds) == 1:
        return ""
    return (
        f"All numbers are means over {len(seeds)} seeds ({listed(list(map(str, seeds)))}). Each "
        "seed chooses on its own validation split. The ends of intervals are the means of the "
        "seeds’ own: they are for the drawing of test queries, not for how seeds differ."
    )


def state(results: StudyResults) -> str:
    """How many cells are in which state."""
    counts = results.counts()
    parts = [f"{n} {'of older code' if name == 'older' else name}" for name, n in counts.items()]
    return f"{len(results.study.cells)} cells: {listed(parts)}."


def listed(names: Sequence[str]) -> str:
    """Such as "a, b and c"."""
    *firsts, last = names or [""]
    return f"{', '.join(firsts)} and {last}" if firsts else last


def _answer(row: Mapping[Any, Any], references: Mapping[tuple[str, str], Estimate]) -> str:
    task = row["task"]
    beside = [
        f"{estimate_text(references[task, name])} {words}"
        for name, words in BESIDE.items()
        if (task, name) in references
    ]
    return (
        f"{task}: {vectors_text(row['vectors'])}, gets {estimate_text(estimate(row))} of "
        f"{row['n']} test queries right{', beside ' + listed(beside) if beside else ''}."
    )


def _reached(
    rows: Sequence[Mapping[Any, Any]], references: Mapping[tuple[str, str], Estimate]
) -> list[str]:
    """On how many tasks the best vector gets as far as demonstrations do."""
    pairs = [
        (row["value"], references[row["task"], "in-context"].value)
        for row in rows
        if (row["task"], "in-context") in references
    ]
    if len(pairs) < 2:
        return []
    reached = sum(value >= in_context for value, in_context in pairs)
    return [
        f"The best vector is at least as accurate as in context on {reached} of {len(pairs)} tasks."
    ]


def _layers(study: Study) -> list[str]:
    if study.layers is None:
        return ["four, evenly spread"]
    if isinstance(study.layers, str):
        return ["all"]
    return [str(n) if isinstance(n, int) else f"{100 * n:g} % of the depth" for n in study.layers]


def _plural(name: str) -> str:
    return name if name == "positions" else f"{name}s"
