"""The heat map of head effects, from effects made by hand: no model is needed."""

import webbrowser

import numpy as np
import plotly.graph_objects as go
import plotly.io
import pytest
import torch

from mechtv.evaluation import intervals
from mechtv.evaluation.provenance import Provenance
from mechtv.methods.head_effects import HeadEffects
from mechtv.plots.head_effects import head_effects

LAYERS, HEADS, PROMPTS = 6, 4, 25


def fake(
    layers: int = LAYERS, heads: int = HEADS, n: int = PROMPTS, model: str = "smollm2-135m"
) -> HeadEffects:
    """Small effects, with one strong head that raises the probability and one that lowers it."""
    rng = np.random.default_rng(0)
    per_prompt = rng.normal(0, 0.001, size=(layers, heads, n))
    per_prompt[-1, 0] += 0.0987
    per_prompt[0, -1] -= 0.05
    return HeadEffects(
        task="present-past",
        queries=tuple((f"word {i}",) for i in range(n)),
        shots=10,
        n=100,
        per_prompt=per_prompt,
        baseline=np.full(n, 0.1),
        means=torch.zeros(layers, heads, 8),
        provenance=Provenance(model=model, revision="1", weights="raw", template="t", seed=0),
    )


def test_the_figure_is_returned_and_neither_shown_nor_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    assert isinstance(head_effects(fake()), go.Figure)
    assert capfd.readouterr() == ("", "")


def test_the_title_says_what_is_shown() -> None:
    title = head_effects(fake()).layout.title
    assert "10 shots" in title.text
    for part in ("present-past", "smollm2-135m", "n = 25 shuffled", "100 clean prompts"):
        assert part in title.subtitle.text


def test_text_of_users_cannot_become_markup_and_a_long_name_keeps_its_end() -> None:
    subtitle = head_effects(fake(model="/home/" + 9 * "folder/" + "<b>model")).layout.title.subtitle
    assert "&lt;b&gt;model" in subtitle.text
    assert len(subtitle.text.split(" · ")[1]) < 50


def test_layers_run_to_the_right_and_heads_down_and_0_is_white() -> None:
    effects = fake()
    figure = head_effects(effects)
    (drawn,) = figure.data
    assert np.shape(drawn.z) == (HEADS, LAYERS)
    np.testing.assert_array_equal(drawn.z, effects.mean.T)
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("Layer", "Head")
    assert figure.layout.yaxis.autorange == "reversed"
    assert drawn.zmax == -drawn.zmin == pytest.approx(0.0987, abs=1e-3)
    assert drawn.colorscale[1] == (0.5, "#ffffff")
    assert len({color for _, color in drawn.colorscale}) == 3


def test_the_text_at_the_pointer_has_value_interval_and_rank() -> None:
    effects = fake()
    (drawn,) = head_effects(effects).data
    for layer, head in ((LAYERS - 1, 0), (2, 3)):
        e = intervals.mean(effects.per_prompt[layer, head])
        text = drawn.hovertext[head][layer].replace("−", "-")
        assert f"Layer {layer}, head {head}" in text
        assert f"{e.value:z.4f} [{e.low:z.4f}, {e.high:z.4f}]" in text
        assert "n = 25" in text
    assert "(rank 1)" in drawn.hovertext[0][LAYERS - 1]
    assert f"(rank {LAYERS * HEADS})" in drawn.hovertext[HEADS - 1][0]
    assert "−0.0" in drawn.hovertext[HEADS - 1][0]


def test_the_ten_strongest_heads_are_numbered() -> None:
    effects = fake()
    (drawn,) = head_effects(effects).data
    numbered = {
        int(text): (layer, head)
        for head, row in enumerate(drawn.text)
        for layer, text in enumerate(row)
        if text
    }
    assert tuple(numbered[rank] for rank in range(1, 11)) == effects.top(10)
    assert len(numbered) == 10


def test_one_head_one_prompt_and_no_effect_are_enough() -> None:
    assert head_effects(fake(layers=1, heads=1, n=1)).to_json()
    none = fake()
    none.per_prompt[:] = 0
    (drawn,) = head_effects(none).data
    assert drawn.zmin < 0 < drawn.zmax


def test_every_head_has_its_tick_unless_there_are_too_many() -> None:
    few, many = head_effects(fake()).layout, head_effects(fake(layers=37, heads=40, n=2)).layout
    assert (few.xaxis.dtick, few.yaxis.dtick) == (1, 1)
    assert (many.xaxis.dtick, many.yaxis.dtick) == (None, None)
    assert few.height < many.height <= 1000
