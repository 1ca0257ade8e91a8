"""Lines, bars and heat maps show a tidy table's numbers, each at its place."""

import numpy as np
import pandas as pd
import pytest

from mechtv.errors import InvalidInput
from mechtv.plots import Labels, tidy_bars, tidy_heat, tidy_lines
from mechtv.plots.style import LOOKS
from mechtv.plots.tidy import looks_of

LABELS = Labels(
    title="Accuracy",
    x="Layer",
    y="Accuracy",
    lines=("made up",),
    names={"given heads": "Key heads"},
)


def table() -> pd.DataFrame:
    """Two tasks, two series at two layers, and one without a layer."""
    rows = [
        {"task": task, "series": series, "layer": layer, "value": value, "n": 20}
        for task in ("plural", "past")
        for series, layer, value in (
            ("learned", 8.0, 0.5),
            ("learned", 4.0, 0.25),
            ("given heads", 4.0, 0.125),
            ("given heads", 8.0, 0.75),
            ("zero-shot", np.nan, 0.1),
        )
    ]
    return pd.DataFrame(rows).assign(
        low=lambda t: t["value"] - 0.1, high=lambda t: t["value"] + 0.2
    )


def lines(**options):
    return tidy_lines(table(), LABELS, x="layer", by="series", panel="task", **options)


def bars(**options):
    own = table().dropna()
    return tidy_bars(own, LABELS, x="layer", by="series", panel="task", **options)


def heat(**options):
    own = table()[lambda t: t["task"] == "past"].dropna()
    return tidy_heat(own, LABELS, x="layer", y="series", **options)


def test_a_line_runs_through_its_values_in_rising_order():
    figure = lines()
    (one, other) = (trace for trace in figure.data if trace.legendgroup == "learned")
    assert (list(one.x), list(one.y)) == ([4.0, 8.0], [0.25, 0.5])
    assert list(one.error_y.array) == pytest.approx([0.2, 0.2])
    assert list(one.error_y.arrayminus) == pytest.approx([0.1, 0.1])
    assert one.xaxis != other.xaxis
    assert [trace.showlegend for trace in (one, other)] == [True, False]


def test_what_has_no_place_is_a_horizontal_line():
    across = [t for t in lines().data if t.legendgroup == "zero-shot" and t.mode == "lines"]
    assert len(across) == 2
    assert all(set(trace.y) == {0.1} for trace in across)
    assert across[0].x[0] < 4 < 8 < across[0].x[-1]


def test_names_and_hovers_say_what_a_point_is():
    (trace, _) = (t for t in lines().data if t.legendgroup == "given heads")
    assert trace.name == "Key heads"
    assert trace.hovertext[1].startswith("<b>Key heads, layer 8.0</b><br>0.75 [0.65, 0.95]<br>")
    assert trace.hovertext[1].endswith("95 % interval, n = 20")
    without = table().drop(columns=["low", "high", "n"])
    figure = tidy_lines(without, LABELS, x="layer", by="series", panel="task")
    (trace, _) = (t for t in figure.data if t.legendgroup == "given heads")
    assert trace.hovertext[0] == "<b>Key heads, layer 4.0</b><br>0.125"


def test_bars_of_a_group_stand_side_by_side():
    figure = bars()
    learned, heads = figure.data[:2]
    assert list(learned.y) == [0.5, 0.25]
    assert list(heads.y) == [0.125, 0.75]
    assert list(learned.x) == pytest.approx([-0.2, 0.8])  # the groups in the table's order
    assert list(heads.x) == pytest.approx([1.2, 0.2])
    assert learned.width == pytest.approx(0.4)
    assert list(figure.layout.xaxis.ticktext) == ["8.0", "4.0"]


def test_a_logarithmic_axis_has_points_in_the_place_of_bars():
    figure = bars(log=True)
    assert {trace.type for trace in figure.data} == {"scatter"}
    assert figure.layout.yaxis.type == "log"


def test_numbers_as_names_keep_their_order():
    own = table().dropna().assign(layer=lambda t: t["layer"].map("{:g}".format))
    figure = tidy_lines(own, LABELS, x="layer", by="series", panel="task")
    assert figure.layout.xaxis.type == "category"


def test_shares_run_from_0_to_1():
    assert list(lines(share=True).layout.yaxis.range) == [-0.03, 1.03]


def test_a_heat_map_has_each_pair_at_its_place():
    figure = heat()
    (trace,) = figure.data
    assert list(trace.x) == ["8.0", "4.0"]
    assert list(trace.y) == ["learned", "Key heads"]
    assert np.array(trace.z).tolist() == [[0.5, 0.25], [0.75, 0.125]]
    assert list(trace.text[1]) == ["0.75", "0.12"]
    assert trace.customdata[1][0].startswith("<b>Key heads → 8.0</b><br>0.75 [0.65, 0.95]")
    assert heat(middle=0.0).data[0].zmid == 0


def test_a_method_has_its_own_look_and_others_the_ones_that_are_left():
    looks = looks_of(["first", "learned", "second"], LABELS)
    assert looks["learned"].color == LOOKS["learned"].color
    assert len({look.color for look in looks.values()}) == 3
    assert len(looks_of([str(number) for number in range(20)], LABELS)) == 20


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.drop(columns="value"), "has no column 'value'; it has task, series"),
        (lambda t: t.drop(columns="layer"), "has no column 'layer'"),
        (lambda t: t.iloc[:0], "has no rows"),
    ],
)
@pytest.mark.parametrize("draw", [tidy_lines, tidy_bars])
def test_a_table_without_what_is_drawn_is_one_sentence(change, sentence, draw):
    with pytest.raises(InvalidInput, match=sentence):
        draw(change(table()), LABELS, x="layer", by="series")


def test_a_pair_that_stands_twice_is_one_sentence():
    with pytest.raises(InvalidInput, match="a pair of layer and series twice"):
        tidy_heat(table(), LABELS, x="layer", y="series")


def test_names_on_the_axis_keep_the_order_of_the_table():
    own = table().dropna().assign(layer=lambda t: t["layer"].map({8.0: "5", 4.0: "10000"}))
    figure = tidy_lines(own, LABELS, x="layer", by="series", panel="task")
    assert list(figure.data[0].x) == ["5", "10000"]  # not "10000" first, as letters would be


def test_names_below_bars_break_between_words_where_the_room_ends():
    own = table().dropna()
    places = {8.0: "every 4th layer, last 5 positions", 4.0: "last token"}
    own = own.assign(layer=own["layer"].map(places))
    wide = tidy_bars(own, LABELS, x="layer", by="series").layout.xaxis.ticktext
    assert wide == ("every 4th layer, last 5 positions", "last token")
    narrow = tidy_bars(own, LABELS, x="layer", by="series", panel="task").layout.xaxis.ticktext
    assert narrow == ("every 4th layer,<br>last 5 positions", "last token")


def test_without_intervals_there_are_no_caps():
    own = table().dropna().drop(columns=["low", "high"])
    assert not any(
        trace.error_y.visible for trace in tidy_bars(own, LABELS, x="layer", by="series").data
    )
    assert all(trace.error_y.visible for trace in bars().data)


def test_a_heading_may_have_several_lines():
    own = table().assign(task=lambda t: t["task"] + "\nlog-probability")
    figure = tidy_lines(own, LABELS, x="layer", by="series", panel="task")
    assert figure.layout.annotations[0].text == "plural<br>log-probability"
    assert figure.layout.margin.t > lines().layout.margin.t


def test_panels_that_share_an_axis_have_room_for_every_interval_and_for_zero():
    low, high = lines().layout.yaxis.range
    assert low == 0
    assert table()["high"].max() < high < 1.1 * table()["high"].max()
    own = table().assign(value=lambda t: -t["value"], low=-2.0, high=-0.1)
    low, high = tidy_lines(own, LABELS, x="layer", by="series", panel="task").layout.yaxis.range
    assert low < -2 < high == 0
    nothing = table().assign(value=0.0, low=0.0, high=0.0)
    low, high = tidy_lines(nothing, LABELS, x="layer", by="series").layout.yaxis.range
    assert low == 0 < high
    (low, high) = lines(log=True).layout.yaxis.range
    assert 10**low < table()["value"].min() < table()["high"].max() < 10**high


def test_panels_of_other_quantities_have_axes_of_their_own():
    figure = lines(own_y=True)
    assert figure.layout.yaxis2.matches is None
    assert figure.layout.yaxis2.showticklabels
    assert figure.layout.yaxis2.range is None


def test_nothing_above_zero_is_refused_on_a_logarithmic_axis():
    nothing = table().dropna().assign(value=0.0, low=0.0, high=0.0)
    with pytest.raises(InvalidInput, match="No value is above 0"):
        tidy_lines(nothing, LABELS, x="layer", by="series", log=True)
