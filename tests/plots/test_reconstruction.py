"""The figure of reconstructions by layer, from results made by hand: no model is needed."""

import numpy as np
import plotly.graph_objects as go
import pytest

from mechtv.analysis.answers import Answers
from mechtv.analysis.ov import Settings
from mechtv.analysis.reconstructed import Outcome, Reconstruction, ReconstructionByLayer
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.reconstruction import reconstruction

QUERIES = 60
PARTS = {"zero-shot": -9.0, "theta": -2.0, "OV": -5.0, "MLP": -4.0, "OV + MLP": -3.0}


def outcome(log_p: float, rng: np.random.Generator, closed: bool) -> Outcome:
    drawn = log_p + rng.normal(0, 1, QUERIES)
    correct = drawn > -3
    answers = Answers(
        correct=correct,
        correct_label=correct | (rng.random(QUERIES) < 0.3) if closed else None,
        log_probability=drawn,
        logit_difference=drawn + 3,
    )
    return Outcome(answers=answers, cosine=np.full(QUERIES, 0.4), norm=np.full(QUERIES, 1.2))


def fake(layer: int = 11, closed: bool = False, n_null: int = 10, **settings) -> Reconstruction:
    rng = np.random.default_rng(layer)
    kinds = ("norm", "norm and cosine") if n_null else ()
    return Reconstruction(
        task="present-past",
        layer=layer,
        split="test",
        settings=Settings(**settings),
        outcomes={name: outcome(log_p, rng, closed) for name, log_p in PARTS.items()},
        nulls={
            (part, kind): tuple(
                outcome(-9 + 2 * place + rng.normal(0, 0.4), rng, closed) for _ in range(n_null)
            )
            for part in ("OV", "MLP")
            for place, kind in enumerate(kinds)
        },
        shares={},
        provenance=Provenance(
            model="smollm2-135m", revision="1", weights="raw", template="t", seed=0
        ),
    )


def by_layer(**options) -> ReconstructionByLayer:
    return ReconstructionByLayer(layers=tuple(fake(layer, **options) for layer in (3, 11, 18, 26)))


def named(figure: go.Figure, name: str) -> list[go.Scatter]:
    return [trace for trace in figure.data if trace.name == name]


def test_the_figure_is_returned_and_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert isinstance(reconstruction(by_layer()), go.Figure)
    assert capfd.readouterr() == ("", "")


def test_title_and_subtitle_say_what_is_shown() -> None:
    figure = reconstruction(by_layer(reading="packed", rescale="theta"))
    assert "by layer" in figure.layout.title.text
    for part in ("present-past", "smollm2-135m", "n = 60 test queries", "Packed", "‖θ‖"):
        assert part in figure.layout.title.subtitle.text
    titles = [note.text for note in figure.layout.annotations]
    assert "Accuracy (full vocabulary)" in titles
    closed = reconstruction(by_layer(closed=True))
    assert "Accuracy (label-restricted)" in [note.text for note in closed.layout.annotations]


def test_the_values_and_intervals_are_those_of_the_table() -> None:
    found = by_layer()
    table, figure = found.table(), reconstruction(found)
    for label, part, null in (
        ("OV circuits only", "OV", ""),
        ("Whole vector θ", "theta", ""),
        ("Random, norm as OV", "OV", "norm"),
    ):
        accuracy, share = named(figure, label)
        for trace, score in (
            (accuracy, "accuracy, full vocabulary"),
            (share, "share of the gain recovered"),
        ):
            rows = table[
                (table["part"] == part) & (table["null"] == null) & (table["score"] == score)
            ].sort_values("layer")
            np.testing.assert_array_equal(trace.y, rows["value"])
            np.testing.assert_allclose(trace.x, [3, 11, 18, 26], atol=3)
            low, high = ("lowest", "highest") if null else ("low", "high")
            np.testing.assert_allclose(
                np.subtract(trace.y, trace.error_y.arrayminus), rows[low], atol=1e-12
            )
            np.testing.assert_allclose(np.add(trace.y, trace.error_y.array), rows[high], atol=1e-12)


def test_each_part_has_one_entry_in_the_legend_and_a_text_at_the_pointer() -> None:
    figure = reconstruction(by_layer())
    shown = [trace.name for trace in figure.data if trace.showlegend]
    assert len(shown) == len(set(shown)) == 7
    (_, null) = named(figure, "Random, norm and cosine as OV")
    assert "layer 3" in null.hovertext[0]
    assert "lowest and highest of 10 draws, n = 60" in null.hovertext[0]
    (whole, _) = named(figure, "Whole vector θ")
    assert "95 % interval, n = 60" in whole.hovertext[0]


def test_a_single_layer_without_nulls_and_without_a_gain_is_enough() -> None:
    one = fake(n_null=0)
    figure = reconstruction(one)
    assert {trace.mode for trace in figure.data} == {"markers"}
    assert len(figure.data) == 10
    none = dict(one.outcomes) | {"theta": one.outcomes["zero-shot"]}
    lost = Reconstruction(
        task="t", layer=0, split="test", settings=one.settings, outcomes=none, nulls={}, shares={}
    )
    assert reconstruction(lost).to_json()
