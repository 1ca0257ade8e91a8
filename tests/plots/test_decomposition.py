"""Figures of decompositions and head maps, from results made by hand: no model is needed."""

import webbrowser

import numpy as np
import plotly.graph_objects as go
import plotly.io
import pytest
import torch

from mechtv.analysis.decomposition import Decomposition, Part
from mechtv.analysis.head_maps import HeadMaps
from mechtv.evaluation import intervals
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.decomposition import (
    KINDS,
    decomposition,
    decomposition_by_block,
    decomposition_by_head,
)
from mechtv.plots.head_maps import head_maps

FIRST, LAST, HEADS, QUERIES = 3, 6, 4, 20


def parts_of(post_norms: bool) -> tuple[Part, ...]:
    parts = [Part(kind="theta")]
    for layer in range(FIRST, LAST):
        for kind in ("values", "pattern", "product"):
            parts += [Part(kind=kind, layer=layer, head=head) for head in range(HEADS)]
        parts += [Part(kind="attention scale", layer=layer)] * post_norms
        parts += [Part(kind="MLP", layer=layer)] + [
            Part(kind="MLP scale", layer=layer)
        ] * post_norms
    return (*parts, Part(kind="final norm scale"))


def fake(
    post_norms: bool = False, n: int = QUERIES, model: str = "smollm2-135m", scale: float = 1.0
) -> Decomposition:
    """Contributions around values that tell parts apart."""
    parts = parts_of(post_norms)
    rng = np.random.default_rng(0)
    contributions = scale * rng.normal(0.1, 1, (len(parts), n))
    return Decomposition(
        task="present-past",
        layer=FIRST,
        split="test",
        queries=tuple((f"word {i}",) for i in range(n)),
        against="zero-shot",
        parts=parts,
        contributions=contributions,
        norms=np.abs(contributions),
        change=contributions.sum(axis=0),
        state_change=np.full(n, 10.0),
        errors=np.full(n, 2e-7),
        provenance=provenance(model),
    )


def fake_maps(n: int = QUERIES, norm: str = "frozen", tokens: str = "<b>") -> HeadMaps:
    rng = np.random.default_rng(1)
    shape = (LAST - FIRST, HEADS)
    return HeadMaps(
        task="present-past",
        injection_layer=FIRST,
        split="test",
        norm=norm,
        layers=tuple(range(FIRST, LAST)),
        outputs=torch.ones(*shape, 8),
        norms=np.full(shape, 3.25),
        cosines=np.full(shape, -0.5),
        contributions=rng.normal(0.1, 1, (*shape, n)),
        attention=np.full(shape, 0.25),
        singular_values=np.ones((*shape, 2)),
        tokens=(((tokens,),) * HEADS,) * (LAST - FIRST),
        provenance=provenance("smollm2-135m"),
    )


def provenance(model: str) -> Provenance:
    return Provenance(model=model, revision="1", weights="raw", template="t", seed=0)


DRAWN = [
    (decomposition, fake),
    (decomposition_by_block, fake),
    (decomposition_by_head, fake),
    (head_maps, fake_maps),
]


@pytest.mark.parametrize(("draw", "made"), DRAWN)
def test_the_figure_is_returned_and_neither_shown_nor_printed(draw, made, capfd, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    figure = draw(made())
    assert isinstance(figure, go.Figure)
    assert figure.layout.template.layout.colorway
    assert draw(made(n=1)).to_json()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("draw", "made"), DRAWN)
def test_the_title_says_what_is_shown(draw, made):
    title = draw(made()).layout.title
    assert "effect" in title.text or "OV map" in title.text
    for part in ("present-past", "smollm2-135m", "θ at block 3", f"n = {QUERIES} test queries"):
        assert part in title.subtitle.text


def test_text_of_users_cannot_become_markup():
    assert "&lt;b&gt;m" in decomposition(fake(model="<b>m")).layout.title.subtitle.text
    (drawn,) = head_maps(fake_maps(tokens="<i>")).data
    assert "&lt;i&gt;" in drawn.hovertext[0][0]


def test_the_bars_of_the_kinds_add_up_to_the_last_one():
    parts = fake(post_norms=True)
    figure = decomposition(parts)
    *kinds, measured = figure.data
    assert len(kinds) == len(KINDS) == 8
    assert sum(bar.y[0] for bar in kinds) == pytest.approx(measured.y[0], abs=1e-9)
    assert measured.y[0] == pytest.approx(parts.change.mean())
    assert measured.x == ("Measured change",)
    for bar, row in zip(kinds, parts.by_kind().to_dict("records"), strict=True):
        assert bar.y[0] + bar.error_y.array[0] == pytest.approx(row["high"])
        assert bar.y[0] - bar.error_y.arrayminus[0] == pytest.approx(row["low"])
        assert f"n = {QUERIES}" in bar.hovertext[0]
    assert "logits" in figure.layout.yaxis.title.text
    assert "2e-07" in figure.layout.title.subtitle.text


def test_each_blocks_bars_and_the_running_sum_end_at_the_measured_change():
    parts = fake()
    figure = decomposition_by_block(parts)
    *bars, line = figure.data
    assert [bar.name for bar in bars] == [
        look.label for kind, look in KINDS.items() if kind not in ("attention scale", "MLP scale")
    ]
    order = ("θ", "3", "4", "5", "final<br>norm")
    assert figure.layout.xaxis.categoryarray == line.x == order
    assert figure.layout.barmode == "relative"
    total = 0.0
    for place, so_far in zip(order, line.y, strict=True):
        total += sum(y for bar in bars for x, y in zip(bar.x, bar.y, strict=True) if x == place)
        assert so_far == pytest.approx(total, abs=1e-9)
    assert line.y[-1] == pytest.approx(parts.change.mean(), abs=1e-9)
    mlp = next(bar for bar in bars if bar.name == "MLP")
    at = parts.parts.index(Part(kind="MLP", layer=4))
    assert mlp.y[mlp.x.index("4")] == pytest.approx(parts.contributions[at].mean())
    assert mlp.hovertext[1].startswith("<b>Block 4, MLP</b>")


def test_no_two_kinds_look_alike():
    assert len({look.color for look in KINDS.values()}) == len(KINDS)


@pytest.mark.parametrize("which", ["decomposition", "maps"])
def test_heads_run_down_blocks_to_the_right_and_the_largest_are_numbered(which):
    if which == "maps":
        made = fake_maps()
        values, figure = made.mean, head_maps(made)
    else:
        parts = fake()
        rows = parts.by_head()
        values = np.array(rows["value"], dtype=float).reshape(LAST - FIRST, HEADS)
        figure = decomposition_by_head(parts)
    (drawn,) = figure.data
    np.testing.assert_allclose(drawn.z, values.T)
    assert drawn.x == (3, 4, 5)
    assert drawn.zmax == -drawn.zmin == pytest.approx(np.abs(values).max())
    assert drawn.colorscale[1] == (0.5, "#ffffff")
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("Block", "Head")
    assert figure.layout.yaxis.autorange == "reversed"
    best = np.unravel_index(np.abs(values).argmax(), values.shape)
    assert drawn.text[best[1]][best[0]] == "1"
    assert sum(bool(text) for row in drawn.text for text in row) == 10
    assert drawn.hovertext[2][1].startswith("<b>Block 4, head 2</b>")


def test_the_text_at_a_heads_pointer_has_value_interval_and_direction():
    made = fake_maps()
    (drawn,) = head_maps(made).data
    e = intervals.mean(made.contributions[1, 2])
    text = drawn.hovertext[2][1].replace("−", "-")
    for part in (f"{e.value:z.3f} [{e.low:z.3f}, {e.high:z.3f}]", "norm 3.2", "-0.50", "0.25"):
        assert part in text
    assert "without the norm" in head_maps(fake_maps(norm="none")).layout.title.subtitle.text


def test_no_effect_at_all_can_be_drawn():
    none = fake(scale=0.0)
    assert none.by_kind()["share"].isna().all()
    for draw in (decomposition, decomposition_by_block, decomposition_by_head):
        assert draw(none).to_json()
    (drawn,) = decomposition_by_head(none).data
    assert drawn.zmin < 0 < drawn.zmax
