import math

import plotly.graph_objects as go
import plotly.io
import pytest

from mechtv.evaluation.intervals import Estimate
from mechtv.plots.style import (
    LOOKS,
    TEMPLATE,
    about,
    basis_text,
    depth_colors,
    estimate_text,
    fixed,
    label_of,
    look_of,
    plain,
    titled,
    wrapped,
)


def test_no_two_settings_share_a_colour_a_marker_or_a_dash() -> None:
    for feature in ("color", "symbol", "dash", "label"):
        values = [getattr(look, feature) for look in LOOKS.values()]
        assert len(set(values)) == len(values), feature
    bars = [(look.color, look.pattern) for look in LOOKS.values()]  # Plotly has eight patterns
    assert len(set(bars)) == len(bars)


def test_every_look_is_one_that_plotly_knows() -> None:
    for name, look in LOOKS.items():
        go.Scatter(
            marker={"symbol": look.symbol, "color": look.color}, line={"dash": look.dash}, name=name
        )
        go.Bar(marker={"pattern": {"shape": look.pattern}})


@pytest.mark.parametrize(
    ("name", "shots", "label"),
    [
        ("learned", 8, "Learned vector"),
        ("hidden_state", 8, "Hidden-state vector"),
        ("in-context", 8, "In context (8 shots)"),
        ("in-context", 1, "In context (1 shot)"),
        ("zero-shot", 8, "Zero-shot"),
        ("my_new_method", 8, "My new method"),
    ],
)
def test_settings_have_names_for_people(name: str, shots: int, label: str) -> None:
    assert label_of(name, shots) == label


def test_a_method_without_a_look_gets_one_that_nobody_else_has() -> None:
    assert look_of("my_new_method").color not in {look.color for look in LOOKS.values()}


def test_the_users_own_plotly_defaults_stay() -> None:
    before = plotly.io.templates.default
    figure = titled("A title", "a subtitle", height=400)
    assert figure.layout.template == TEMPLATE
    assert plotly.io.templates.default == before
    assert not any(plotly.io.templates[name] == TEMPLATE for name in plotly.io.templates)


def test_text_of_users_cannot_become_markup_in_a_figure() -> None:
    assert plain('<a href="x">&</a>') == '&lt;a href="x"&gt;&amp;&lt;/a&gt;'
    assert "<b>" not in about("<b>bold", "a model")


def test_a_long_model_name_keeps_its_end() -> None:
    text = about("a task", "/home/someone/" + 5 * "a/long/folder/" + "my-model")
    assert text.endswith("my-model")
    assert len(text) < 60


@pytest.mark.parametrize("n", [1, 2, 4, 12])
def test_there_are_as_many_depth_colours_as_depths(n: int) -> None:
    assert len(set(depth_colors(n))) == n


def test_numbers_are_written_with_their_interval_where_it_is_known() -> None:
    known = Estimate(value=0.6, low=-0.5, high=0.694, n=100)
    unknown = Estimate(value=-0.001, low=math.nan, high=math.nan, n=1)
    assert estimate_text(known) == "0.60 [−0.50, 0.69]"
    assert estimate_text(known, unit="nats") == "0.60 [−0.50, 0.69] nats"
    assert estimate_text(unknown) == "0.00"
    assert fixed(-1.25, 1) == "−1.2"


def test_an_interval_is_claimed_only_where_there_is_one() -> None:
    known = Estimate(value=0.5, low=0.4, high=0.6, n=20)
    one = Estimate(value=0.5, low=math.nan, high=math.nan, n=1)
    assert basis_text(known) == "95 % interval, n = 20"
    assert basis_text(one) == "n = 1"


@pytest.mark.parametrize("widest", [10, 20, 40, 80])
def test_broken_lines_hold_every_word_and_none_is_too_long(widest: int) -> None:
    text = "one task · a model · n = 20 test queries; 95 % intervals of what was measured"
    lines = wrapped(text, widest)
    assert max(map(len, lines)) <= max(widest, len("n = 20"))
    assert " ".join(lines).replace(" ·", "") == text.replace(" ·", "")
    assert all(part in "|".join(lines) for part in ("n = 20", "95 %")), "numbers and units stay"


def test_lines_are_broken_behind_a_part_where_one_ends() -> None:
    assert wrapped("one task · a model; and all the rest", 20) == [
        "one task · a model;",
        "and all the rest",
    ]
    assert wrapped("one task · a long model · n", 16) == ["one task", "a long model · n"]
    assert wrapped("a<br>b", 20) == ["a", "b"]
    assert wrapped("unbreakable", 4) == ["unbreakable"]
