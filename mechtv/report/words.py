"""The answer in words, computed from the numbers: plain text, escaped by whoever shows it."""

import re

import pandas as pd

from mechtv.overview import Overview, Setting
from mechtv.plots.style import estimate_text, fixed

LEVEL = 0.05
LEAST_GAIN = 0.02


def answer(overview: Overview, comparisons: pd.DataFrame) -> str:
    """The best learned vector beside the model alone, then beside the hidden-state vector."""
    sentences = (
        _best_learned(overview),
        _share_of_gain(overview),
        _best_hidden(overview),
        _depths(comparisons),
        _at_best(overview, comparisons),
    )
    return _unbroken(" ".join(sentences))


def subtitle(overview: Overview) -> str:
    """Model, task, and how many queries were scored."""
    n = overview.settings[0].evaluation.accuracy.n
    about = overview.task.description.rstrip(".")
    task = f"{overview.task.name} ({about})" if about else overview.task.name
    return f"{overview.model.name} · {task} · {n} test queries"


def distance_note(overview: Overview) -> str:
    """Which tokens the two figures compare."""
    over = {d.over: d.n_tokens for d in overview["zero-shot"].divergences}
    tokens = "labels" if overview.task.labels else "distinct answers"
    return (
        f"The first figure takes the whole distribution over {over['vocabulary']:,} tokens, the "
        f"second only its part on the first tokens of the task’s {over['labels']:,} {tokens}, "
        "renormalised."
    )


def best(overview: Overview, name: str) -> Setting:
    """The depth to show for a method: the learned vector's by validation, others by test."""
    if name == "learned":
        return overview[name, overview.best_layer]
    settings = [s for s in overview.settings if s.name == name]
    return max(settings, key=lambda s: s.evaluation.accuracy.value)


def p_text(p: float) -> str:
    """A p-value with its relation, such as "= 0.012" or "< 0.001"."""
    if p < 0.001:
        return "< 0.001"
    return f"= {p:.3f}" if p < 0.1 else f"= {p:.2g}"


def signed(value: float) -> str:
    """A difference, with its sign."""
    number = fixed(value)
    return number if number.startswith("−") or float(number) == 0 else f"+{number}"


def _unbroken(text: str) -> str:
    """The text with spaces that do not break lines inside intervals and before numbers."""
    return re.sub(r"(?<=[\d,<=p]) (?=[<=\d+−%\[])", "\N{NO-BREAK SPACE}", text)


def _accuracy(overview: Overview, name: str) -> str:
    return estimate_text(best(overview, name).evaluation.accuracy)


def _best_learned(overview: Overview) -> str:
    n = overview.settings[0].evaluation.accuracy.n
    return (
        f"The best learned vector (layer {overview.best_layer}, chosen on the validation split) "
        f"gets {_accuracy(overview, 'learned')} of {n} test queries right, beside "
        f"{_accuracy(overview, 'in-context')} in context with {overview.shots} demonstrations and "
        f"{_accuracy(overview, 'zero-shot')} zero-shot."
    )


def _share_of_gain(overview: Overview) -> str:
    value = {
        name: best(overview, name).evaluation.accuracy.value
        for name in ("learned", "in-context", "zero-shot")
    }
    gain = value["in-context"] - value["zero-shot"]
    if gain < LEAST_GAIN:
        return "Demonstrations bring no gain here, so there is no share of it to report."
    share = (value["learned"] - value["zero-shot"]) / gain
    return f"That is {100 * share:.0f} % of what the demonstrations gain over zero-shot."


def _best_hidden(overview: Overview) -> str:
    return (
        f"The hidden-state vector reaches {_accuracy(overview, 'hidden_state')} at its best depth "
        f"(layer {best(overview, 'hidden_state').layer}, picked on these test queries, which "
        "favours it)."
    )


def _depths(comparisons: pd.DataFrame) -> str:
    """At how many depths the learned vector wins, and where the difference is beyond chance."""
    wins = comparisons[comparisons["difference"] > 0]
    clear = comparisons[comparisons["p_value"] < LEVEL]
    lost = clear[clear["difference"] < 0]
    tests = len(comparisons)
    correction = f", not corrected for {tests} tests" if tests > 1 else ""
    against = f"; the hidden-state vector wins at {_listed(lost['layer'])}" if len(lost) else ""
    return (
        f"The learned vector beats the hidden-state vector {_count(wins, comparisons)}; the "
        f"difference is beyond chance (exact McNemar test, p < {LEVEL}{correction}) "
        f"{_count(clear, comparisons)}{against}."
    )


def _count(some: pd.DataFrame, every: pd.DataFrame) -> str:
    if len(some) == len(every):
        return "at every depth" if len(every) > 1 else f"at {_listed(every['layer'])}"
    if some.empty:
        return "at no depth"
    return f"at {len(some)} of {len(every)} depths ({_listed(some['layer'])})"


def _listed(layers: "pd.Series[int]") -> str:
    *firsts, last = map(str, layers)
    return f"layers {', '.join(firsts)} and {last}" if firsts else f"layer {last}"


def _at_best(overview: Overview, comparisons: pd.DataFrame) -> str:
    row = comparisons[comparisons["layer"] == overview.best_layer].iloc[0]
    interval = f"[{signed(row['low'])}, {signed(row['high'])}]"
    known = pd.notna(row["low"]) and pd.notna(row["high"])
    return (
        f"At layer {overview.best_layer} the paired difference is {signed(row['difference'])}"
        f"{f' {interval}' if known else ''} (p {p_text(row['p_value'])})."
    )
