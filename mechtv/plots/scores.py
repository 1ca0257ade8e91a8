"""How each score is named and drawn, and the rows of a table by method."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Estimate
from mechtv.plots.style import LOOKS, about, basis_text, estimate_text, label_of, look_of, plain

FULL = "accuracy, full vocabulary"
MOST_DECADES = 4
LEAST = 1e-12  # a logarithmic axis has no zero; an interval's lower end may be one


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How a score is named and drawn."""

    name: str
    title: str
    unit: str = ""
    digits: int = 2
    log: bool = False

    @classmethod
    def of(cls, score: str) -> "Scale":
        """The scale of a score of `compare_methods` or `flexibility`."""
        if score.startswith("dNTP"):
            return cls(name=score, title=f"{score} (nats)", unit="nats", digits=3, log=True)
        first, _, rest = score.partition(", ")
        name = first[:1].upper() + first[1:] + (f" ({rest})" if rest else "")
        if score == "log-probability":
            return cls(name=name, title="Log-probability (nats per token)", unit="nats")
        return cls(name=name, title=name)

    def shown(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The rows that the axis can show.

        Raises:
            InvalidInput: if there are none.
        """
        shown = rows[rows["value"] > 0] if self.log else rows
        if shown.empty:
            raise InvalidInput(f"No {self.name} here is above 0: a logarithmic axis shows none.")
        return shown

    def estimate(self, row: dict[Hashable, Any]) -> Estimate:
        """What the axis shows of a row."""
        low = max(row["low"], LEAST) if self.log else row["low"]
        return Estimate(value=row["value"], low=low, high=row["high"], n=row["n"])

    def axis(self, values: pd.Series, *ends: pd.Series) -> dict[str, Any]:
        """Plotly's options of an axis that shows these values and the ends of their intervals."""
        every = pd.concat([values, *ends]).dropna()
        if self.log:
            return _log_axis(max(every.min(), values.min() / 3), every.max())
        if self.unit:
            return {"range": [1.04 * every.min(), max(0, every.max())]}
        return {"range": [-0.03, 1.03], "dtick": 0.2}

    @property
    def note(self) -> str:
        """What the subtitle has to add."""
        return " · in context is 0 by definition" if self.log else ""


def by_method(rows: pd.DataFrame, table: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Each method's name, label and rows, in the order of the legend."""
    shots = table.loc[table["method"] == "in-context", "shots"]
    order = {name: place for place, name in enumerate(LOOKS)}
    names = sorted(rows["method"].unique(), key=lambda name: order.get(name, len(order)))
    return [
        (name, label_of(name, int(shots.max()) if len(shots) else 0), rows[rows["method"] == name])
        for name in names
    ]


def hovers(label: str, rows: pd.DataFrame, scale: Scale) -> list[str]:
    """The text at each row's pointer: method, layer, value, interval, n."""
    return [
        f"<b>{plain(label)}{at_layer(row['layer'])}</b><br>"
        f"{estimate_text(estimate, scale.digits, scale.unit)}<br>{basis_text(estimate)}"
        for row in rows.to_dict("records")
        for estimate in [scale.estimate(row)]
    ]


def at_layer(layer: Any) -> str:
    """The layer as it follows a method's name; nothing where there is none."""
    return "" if pd.isna(layer) else f", layer {layer}"


def marker(name: str, size: int) -> dict[str, Any]:
    """A method's marker, with a thin outline that light colours need."""
    look = look_of(name)
    return {"symbol": look.symbol, "color": look.color, "size": size, "line": {"width": 0.5}}


def about_rows(rows: pd.DataFrame) -> str:
    """Model and number of queries."""
    sizes = sorted({int(n) for n in rows["n"]})
    n = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    queries = "test queries" if rows["task"].nunique() == 1 else "test queries a task"
    names = [rows["task"].iloc[0]] if rows["task"].nunique() == 1 else []
    names += rows["model"].unique().tolist() if "model" in rows else []
    return " · ".join([*([about(*names)] if names else []), f"n = {n} {queries}"])


def lines_without(table: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """The lines that name the tasks without the score."""
    left_out = [task for task in table["task"].unique() if task not in set(rows["task"])]
    text = f"Without this score, left out: {', '.join(left_out)}"
    return [plain(text)] if left_out else []


def _log_axis(low: float, high: float) -> dict[str, Any]:
    """A logarithmic axis around what it shows, with ticks at 1 and 3 of each power of ten."""
    ends = math.log10(low) - 0.15, math.log10(high) + 0.15
    powers = range(math.floor(ends[0]), math.ceil(ends[1]) + 1)
    steps = (1, 3) if ends[1] - ends[0] < MOST_DECADES else (1,)
    ticks = [step * 10.0**power for power in powers for step in steps]
    texts = [f"{tick:g}" for tick in ticks]
    return {"type": "log", "range": list(ends), "tickvals": ticks, "ticktext": texts}
