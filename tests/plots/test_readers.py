"""The figures of theta's readers, from results made by hand: no model is needed."""

from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
import pytest

from mechtv.analysis.answers import Answers
from mechtv.analysis.readers import READERS, SETTINGS, Readers
from mechtv.errors import InvalidInput, UnknownName
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.readers import reader_settings, reader_shares

PARTS = dict(zip(READERS, (1.0, -0.5, 3.0, 0.5), strict=True))
N = 20


def answers(level: float, seed: int) -> Answers:
    rng = np.random.default_rng(seed)
    return Answers(
        correct=rng.random(N) < 0.1 + 0.2 * max(level, 0),
        correct_label=None,
        log_probability=-9 + level + 0.3 * rng.normal(size=N),
        logit_difference=level + rng.normal(size=N),
    )


def fake(blocks: tuple[range, ...] = (range(11, 30),), model: str = "smollm2-135m") -> Readers:
    return Readers(
        task="present-past",
        split="test",
        layer=11,
        blocks=blocks,
        answers=tuple(
            tuple(
                answers(sum(PARTS[r] for r in some) / (k + 1), i) for i, some in enumerate(SETTINGS)
            )
            for k in range(len(blocks))
        ),
        provenance=Provenance(model=model, revision="1", weights="raw", template="t", seed=0),
    )


THREE = (range(11, 16), range(16, 23), range(23, 30))


@pytest.mark.parametrize("draw", [reader_settings, reader_shares])
def test_the_figure_is_returned_and_says_what_it_shows(draw, capfd) -> None:
    figure = draw(fake(model="<b>model"))
    assert isinstance(figure, go.Figure)
    assert capfd.readouterr() == ("", "")
    assert "og-probability" in figure.layout.title.text
    for part in ("present-past", "&lt;b&gt;model", "layer 11", "blocks 11–29", "n = 20"):
        assert part in figure.layout.title.subtitle.text
    assert "og-probability (nats)" in figure.layout.yaxis.title.text


def test_bars_run_from_the_plain_run_to_each_setting_with_its_interval() -> None:
    result = fake()
    bars, _, dots = reader_settings(result).data
    values = np.asarray(bars.y) + bars.base
    order = []
    for x in range(16):
        marks = [c for place, c in zip(dots.x, dots.marker.color, strict=True) if place == x]
        order.append(tuple(r for r, c in zip(READERS, marks, strict=True) if c == "#1f2328"))
    assert set(order) == set(SETTINGS)
    sizes = list(map(len, order))
    assert sizes == sorted(sizes)
    for some, value, high, text in zip(
        order, values, bars.error_y.array, bars.hovertext, strict=True
    ):
        e = result.of(*some).estimates()["log-probability"]
        assert value == pytest.approx(e.value)
        assert value + high == pytest.approx(e.high)
        assert (" + ".join(some) or "none") in text
        assert f"{e.value:.2f}".replace("-", "−") in text
    for first, second in zip(range(1, 4), range(2, 5), strict=True):  # rising within a size
        assert values[first] <= values[second]


def test_a_range_and_a_score_can_be_chosen() -> None:
    result = fake(THREE)
    figure = reader_settings(result, "accuracy, full vocabulary", blocks=THREE[1])
    assert "blocks 16–22<br>" in figure.layout.title.subtitle.text
    assert figure.layout.title.text.startswith("<b>Accuracy (full vocabulary)")
    assert figure.data[0].base == pytest.approx(result.of(blocks=THREE[1]).correct.mean())
    with pytest.raises(UnknownName, match="no score named 'accuracy, label-restricted'"):
        reader_settings(result, "accuracy, label-restricted")
    with pytest.raises(InvalidInput, match="were not measured"):
        reader_settings(result, blocks=range(11, 30))


def test_shares_stand_above_the_shapley_values() -> None:
    result = fake()
    effects = result.effects()
    figure = reader_shares(result)
    bars, alone, withheld = figure.data
    for trace, effect in ((bars, "Shapley value"), (alone, "alone"), (withheld, "withheld")):
        assert list(trace.y) == effects[effects.effect == effect]["value"].tolist()
    rows = effects[effects.effect == "Shapley value"]
    texts = [note.text.replace("−", "-") for note in figure.layout.annotations]
    for text, share, low, high in zip(
        texts, rows["share"], rows["share_low"], rows["share_high"], strict=True
    ):
        assert text == f"{100 * share:z.0f} [{100 * low:z.0f}, {100 * high:z.0f}] %"
    assert figure.layout.xaxis.ticktext == ("Values", "Queries and keys", "MLPs", "Final norm")


def test_ranges_stand_side_by_side_in_colours_of_their_own() -> None:
    figure = reader_shares(fake(THREE))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [bar.name for bar in bars] == [
        f"Shapley value, blocks {span}" for span in ("11–15", "16–22", "23–29")
    ]
    assert len({bar.marker.color for bar in bars}) == 3
    edges = sorted((x - bar.width / 2, x + bar.width / 2) for bar in bars for x in bar.x)
    assert all(end < start for (_, end), (start, _) in pairwise(edges))
    assert sum(trace.showlegend is not False for trace in figure.data) == 5
    assert all(note.text.endswith(" %") for note in figure.layout.annotations)


def test_the_shares_of_many_ranges_stand_upright_and_of_very_many_are_not_written() -> None:
    def figure(n: int) -> go.Figure:
        return reader_shares(fake(tuple(range(i, i + 1) for i in range(n))))

    assert {note.textangle for note in figure(2).layout.annotations} == {0}
    assert {note.textangle for note in figure(3).layout.annotations} == {-90}
    assert not figure(13).layout.annotations
    assert "13 ranges of blocks" in figure(13).layout.title.subtitle.text
    assert "share of the gain" not in figure(13).layout.title.subtitle.text
    assert figure(13).layout.height > figure(5).layout.height


def test_no_gain_has_no_share() -> None:
    result = fake()
    same = tuple(result.answers[0][0] for _ in SETTINGS)
    figure = reader_shares(
        Readers(task="t", split="test", layer=1, blocks=(range(1, 2),), answers=(same,))
    )
    assert {note.text for note in figure.layout.annotations} == {"no gain"}
    assert figure.to_json()
