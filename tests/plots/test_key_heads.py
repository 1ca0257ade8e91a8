"""Figures of key heads, their ablation and their attention, from results made by hand."""

import webbrowser
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import plotly.io
import pytest

from mechtv.analysis.ablation import Ablation
from mechtv.analysis.answers import Answers
from mechtv.analysis.attention import AttentionShares
from mechtv.analysis.heads import HeadRanking
from mechtv.errors import InvalidInput
from mechtv.evaluation.provenance import Provenance
from mechtv.plots.ablation import ablation
from mechtv.plots.attention import attention_shares
from mechtv.plots.key_heads import key_heads

LAYER, LAYERS, HEADS, QUERIES = 11, 6, 4, 25
PROVENANCE = Provenance(model="smollm2-135m", revision="1", weights="raw", template="t", seed=0)
ABOUT = {"task": "present-past", "layer": LAYER, "split": "test", "provenance": PROVENANCE}
ABOUT["queries"] = tuple((f"word {i}",) for i in range(QUERIES))


def ranking(**options) -> HeadRanking:
    per_query = np.random.default_rng(0).normal(0, 0.001, size=(LAYERS, HEADS, QUERIES))
    per_query[0, 2] -= 0.05
    per_query[3, 1] += 0.04
    how = {"by": "saliency", "mode": None, "score": "probability", "change": "absolute"}
    return HeadRanking(**ABOUT | how | options, per_query=per_query)


def answers(accuracy: float, log_probability: float) -> Answers:
    return Answers(
        correct=np.arange(QUERIES) < accuracy * QUERIES,
        correct_label=None,
        log_probability=log_probability - np.arange(QUERIES) / QUERIES,
        logit_difference=np.arange(QUERIES) / 10 + log_probability,
    )


def ablated(n_sets: int = 20, **options) -> Ablation:
    fields = {
        "heads": ((11, 2), (14, 1)),
        "random_sets": tuple(((12, i % 4), (13 + i // 4, 0)) for i in range(n_sets)),
        "mode": "mean",
        "positions": (-1,),
        "intact": answers(0.8, -1),
        "ablated": answers(0.2, -4),
        "random": tuple(answers(0.6 + i / 100, -1 - i / 50) for i in range(n_sets)),
    }
    return Ablation(**ABOUT | fields | options)


def attended(n_heads: int = 3) -> AttentionShares:
    rng = np.random.default_rng(0)
    return AttentionShares(
        **ABOUT,
        heads=tuple((11 + i, 0) for i in range(n_heads)),
        random_heads=tuple((12, i) for i in range(1, 4)),
        final=5,
        shares=rng.dirichlet(np.ones(4), size=(n_heads, QUERIES)),
        random_shares=rng.dirichlet(np.ones(4), size=(3, QUERIES)),
    )


FIGURES = {
    "key heads": lambda **about: key_heads(replace(ranking(), **about)),
    "ablation": lambda **about: ablation(replace(ablated(), **about)),
    "attention": lambda **about: attention_shares(replace(attended(), **about)),
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_figure_is_returned_and_neither_shown_nor_printed(name, capfd, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a figure was shown")

    monkeypatch.setattr(plotly.io, "show", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    assert isinstance(FIGURES[name](), go.Figure)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", FIGURES)
def test_titles_say_what_is_shown_and_text_cannot_become_markup(name):
    subtitle = FIGURES[name](task="<i>tenses").layout.title.subtitle.text
    for part in ("&lt;i&gt;tenses", "smollm2-135m", "n = 25 test queries"):
        assert part in subtitle


def test_heads_are_coloured_by_what_they_are_ranked_by_and_key_heads_numbered():
    made = ranking()
    heat, bars = key_heads(made, 5).data
    np.testing.assert_array_equal(heat.z, made.importance.T)
    assert list(heat.x) == [11, 12, 13, 14, 15, 16]
    assert heat.zmin == 0
    numbered = {
        int(text): (LAYER + layer, head)
        for head, row in enumerate(heat.text)
        for layer, text in enumerate(row)
        if text
    }
    assert tuple(numbered[rank] for rank in range(1, 6)) == made.top(5)
    assert len(numbered) == 5
    assert list(bars.y) == made.histogram(5)["key_heads"].tolist()
    assert sum(bars.y) == 5
    assert "Block 11, head 2</b> (rank 1)" in heat.hovertext[2][0]
    assert "n = 25" in heat.hovertext[2][0]


def test_counts_have_whole_ticks():
    assert key_heads(ranking(), 2).layout.yaxis2.dtick == 1
    wide = replace(ranking(), per_query=np.ones((1, 30, QUERIES)))
    assert key_heads(wide, 20).layout.yaxis2.dtick == 3


def test_key_heads_are_framed_where_numbers_would_be_too_small():
    large = replace(ranking(), per_query=np.random.default_rng(0).normal(size=(50, HEADS, QUERIES)))
    heat, _, frames = key_heads(large, 5).data
    assert not any(text for row in heat.text for text in row)
    assert tuple(zip(frames.x, frames.y, strict=True)) == large.top(5)
    assert "framed: the 5 key heads of 200" in key_heads(large, 5).layout.title.subtitle.text


def test_one_query_has_no_interval():
    one = {"queries": (("word",),), "per_query": ranking().per_query[..., :1]}
    heat = key_heads(replace(ranking(), **one)).data[0]
    assert heat.hovertext[0][0].endswith("probability<br>n = 1")


def test_signed_changes_have_colours_that_are_symmetric_about_0():
    made = ranking(change="signed", by="ablation", mode="zero", score="log-probability")
    figure = key_heads(made)
    heat = figure.data[0]
    assert heat.zmin == -heat.zmax == pytest.approx(-0.05, abs=1e-3)
    assert heat.colorscale[1] == (0.5, "#ffffff")
    assert heat.colorbar.title.text == "Nats"
    assert "Mean drop (zero ablation) of the answer's log-probability" in (
        figure.layout.title.subtitle.text
    )


def test_the_bars_are_intact_key_and_random_heads_with_a_dot_for_each_set():
    made = ablated()
    figure = ablation(made)
    intact, key, random, dots = figure.data
    assert [*intact.y, *key.y, *random.y] == pytest.approx(
        [0.8, 0.2, made.random_values("accuracy, full vocabulary").mean()]
    )
    np.testing.assert_array_equal(dots.y, made.random_values("accuracy, full vocabulary"))
    assert len(set(dots.x)) == 20
    assert "p = 0.048" in key.hovertext[0]
    assert "95 % range of 20 sets" in random.hovertext[0]
    assert figure.layout.yaxis.range == (-0.03, 1.03)


def test_other_scores_have_axes_of_their_own():
    figure = ablation(ablated(), "log-probability")
    assert figure.layout.yaxis.range is None
    assert "nats" in figure.layout.yaxis.title.text
    assert ablation(ablated(), "logit difference").data[1].y[0] < 0
    with pytest.raises(InvalidInput, match="no score 'accuracy, label-restricted'; there are"):
        ablation(ablated(), "accuracy, label-restricted")
    with pytest.raises(InvalidInput, match="no ablations to draw"):
        ablation([])


def test_several_ablations_stand_side_by_side():
    second = ablated(n_sets=0, task="trec", mode="zero")
    figure = ablation([ablated(), second])
    assert list(figure.layout.xaxis.ticktext) == [
        "present-past<br>θ at block 11, mean",
        "trec<br>θ at block 11, zero",
    ]
    assert "n = 25 test queries · mean, zero ablation" in figure.layout.title.subtitle.text
    names = [trace.name for trace in figure.data]
    assert names.count("Random sets") == 1
    assert [len(trace.y) for trace in figure.data] == [2, 2, 1, 20]


def test_the_subtitle_and_the_labels_tell_splits_and_models_apart():
    other = replace(PROVENANCE, model="gpt2")
    figure = ablation([ablated(), ablated(split="validation", provenance=other)])
    subtitle = figure.layout.title.subtitle.text
    assert subtitle.startswith("present-past · 2 models · n = 25 test, validation queries")
    assert list(figure.layout.xaxis.ticktext) == [
        "present-past<br>θ at block 11, test, smollm2-135m",
        "present-past<br>θ at block 11, validation, gpt2",
    ]


def test_no_p_value_is_shown_of_heads_before_the_vectors_block():
    assert "p = " not in ablation(ablated(heads=((10, 0), (11, 2)))).data[1].hovertext[0]


def test_shares_are_stacked_to_1_for_groups_and_each_key_head():
    made = attended()
    figure = attention_shares(made)
    assert figure.layout.barmode == "stack"
    assert len(figure.data) == 4
    np.testing.assert_allclose(np.sum([trace.y for trace in figure.data], axis=0), 1)
    last = figure.data[-1]
    assert "θ" in last.name
    wanted = [made.estimates(group)["last token"].value for group in ("key", "random")]
    wanted += made.shares[..., 3].mean(axis=1).tolist()
    assert list(last.y) == pytest.approx(wanted)
    assert list(figure.layout.xaxis.ticktext) == [
        "Key<br>heads", "Random<br>heads", "11.0", "12.0", "13.0",
    ]  # fmt: skip
    assert "n = 3 heads" in last.hovertext[0]
    assert "n = 25 queries" in last.hovertext[2]


def test_labels_of_many_heads_stand_upright_and_of_very_many_are_left_out():
    many = attention_shares(attended(30)).layout
    assert many.xaxis.tickangle == -90
    assert many.xaxis.ticktext[1:] == ("Random heads", *(f"{11 + i}.0" for i in range(30)))
    assert many.height > attention_shares(attended()).layout.height
    very_many = attention_shares(attended(100)).layout.xaxis
    assert very_many.ticktext[:4] == ("Key heads", "Random heads", "11.0", "14.0")
    assert very_many.tickvals[:4] == (0, 1, 2, 5)
