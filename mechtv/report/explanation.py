"""The page of an explanation: one section a part, with its finding, figures and table.

Like the page of a run it is one file that asks nothing of the network.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechtv import plots
from mechtv.files import write_whole
from mechtv.plots.style import fixed, look_of
from mechtv.report.drawing import drawn, scripts
from mechtv.report.findings import finding
from mechtv.report.markup import NOTHING, Html, facts, key_figure, table, text
from mechtv.report.origin import DTYPE, duration, template_words
from mechtv.report.page import style, template
from mechtv.study.explain import Explanation, Finding

MOST_ROWS = 60
DIGITS = 3
SAME = {"task", "split", "model", "revision", "weights", "template", "seed", "dtype"}
"""Columns that say the same in every row; they stand in the facts of the page."""

Draw = Callable[[Any], go.Figure]


@dataclass(frozen=True, kw_only=True)
class Section:
    """How a part is shown."""

    title: str
    about: str
    figures: tuple[Draw, ...] = ()


def write_explanation(explanation: Explanation, path: str | Path) -> Path:
    """Write the page to `path`, whole or not at all.

    Raises:
        InvalidInput: if the folder does not exist or cannot be written.
    """
    return write_whole(path, explanation_html(explanation).encode("utf-8"))


def explanation_html(explanation: Explanation) -> str:
    """The page as text: about 5 MB, nearly all of it Plotly's own code."""
    e, card = explanation, explanation.vector.card
    parts: dict[str, Html] = {
        "style": style(),
        "title": text(f"Why a vector for {e.task.name} works"),
        "subtitle": text(_subtitle(e)),
        "scripts": scripts(),
        "answers": _answers(e),
        "key_figures": _key_figures(e),
        "sections": Html("\n".join(_section(found) for found in e.findings)),
        "facts": facts(_facts(e)),
        "seconds_table": frame("Seconds that each part took.", e.table()),
        "command": text(_command(e)),
        "version": text(card.versions.get("mechtv", "")),
    }
    return template("explanation.html").substitute(parts)


def frame(caption: str, rows: pd.DataFrame) -> Html:
    """A data frame as a table, without what is the same in every row of the page."""
    shown = rows[[name for name in rows.columns if name not in SAME]]
    if len(shown) > MOST_ROWS:
        caption = f"{caption} The first {MOST_ROWS} of {len(shown)} rows."
    return table(
        caption,
        [str(name) for name in shown.columns],
        [
            [_cell(value) for value in row.values()]
            for row in shown.head(MOST_ROWS).to_dict("records")
        ],
    )


def _section(found: Finding) -> Html:
    about = SECTIONS[found.name]
    sentence = finding(found)
    figures = "\n".join(
        f'<figure><div class="drawing">{drawn(draw(found.result), f"{found.name}-{number}")}'
        "</div></figure>"
        for number, draw in enumerate(() if found.refusal else about.figures)
    )
    return Html(
        f'<section aria-labelledby="{found.name}">\n<h2 id="{found.name}">{text(about.title)}</h2>'
        f'\n<p class="muted">{text(about.about)}</p>\n'
        + (f"<p>{text(sentence)}</p>\n" if sentence else "")
        + figures
        + f"\n<details><summary>The numbers</summary>\n{frame(about.title, found.table())}"
        "\n</details>\n</section>"
    )


def _cell(value: object) -> Html:
    if value is None or value is pd.NA or (isinstance(value, float) and pd.isna(value)):
        return NOTHING
    if isinstance(value, float):
        small = value and abs(value) < 10**-DIGITS
        return text(f"{value:.1e}" if small else fixed(value, DIGITS))
    return text(str(value))


def _subtitle(e: Explanation) -> str:
    method = look_of(e.vector.card.method).label
    n = e.injected.accuracy.n
    return f"{e.model.name} · {e.task.name} · {method}, layer {e.layer} · {n} test queries"


def _answers(e: Explanation) -> Html:
    sentences = map(finding, e.findings)
    return Html("\n".join(f"<li>{text(said)}</li>" for said in sentences if said))


def _key_figures(e: Explanation) -> Html:
    shown = (("zero-shot", "Zero-shot", e.zero_shot), (e.vector.card.method, "", e.injected))
    return Html(
        "\n".join(
            key_figure(
                label or f"{look_of(name).label}, layer {e.layer}",
                scores.accuracy,
                "var(--ink)" if name == "zero-shot" else look_of(name).color,
            )
            for name, label, scores in shown
        )
    )


def _facts(e: Explanation) -> Mapping[str, str]:
    card, norm = e.vector.card, float(_theta(e).norm())
    made = ", ".join(f"{name} {_short(value)}" for name, value in card.settings.items())
    shape = f"{e.model.n_layers} layers, {e.model.n_heads} heads, width {e.model.d_model}"
    return {
        "Model": f"{e.model.name}: {shape}, vocabulary {e.model.d_vocab:,}",
        "Revision": e.model.revision,
        "Weights": f"{e.model.weights}, {e.model.dtype}",
        "Task": ": ".join(filter(None, (e.task.name, e.task.description))),
        "Template": e.task.template.description.replace("\n", "↵"),
        "Vector": f"{card.method}, added at the input of block {e.layer}, norm {fixed(norm, 1)}",
        "Made with": made or "–",
        "Test queries": str(e.injected.accuracy.n),
        "Seed": str(e.seed),
        "Versions": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
        "Duration": duration(e.seconds),
    }


def _theta(e: Explanation) -> Any:
    return e.vector.edits[0].operation.tensors()["value"].detach().float()


def _short(value: object) -> str:
    words = str(value)
    return words if len(words) <= 40 else f"{words[:39]}…"


def _command(e: Explanation) -> str:
    """The command line that makes the page again; what the vector's card says is left out."""
    card, words = e.vector.card, ["mechtv", "explain", "VECTOR"]
    if e.model.name != card.model:
        words += ["--model", e.model.name]
    if e.task.source is not None or e.task.name != card.task:
        words += ["--task", e.task.source or e.task.name]
    by_card = e.task.name == card.task and e.task.source is None
    if not (by_card and e.task.template.description == card.template):
        words += template_words(e.task)
    if e.model.dtype != DTYPE:
        words += ["--dtype", e.model.dtype]
    words += ["--n", str(e.injected.accuracy.n), "--seed", str(e.seed)]
    parts = [found.name for found in e.findings]
    if not set(parts) >= set(SECTIONS):
        words += ["--parts", ",".join(parts)]
    return shlex.join(words)


SECTIONS: dict[str, Section] = {
    "reconstruction": Section(
        title="OV circuits in the place of θ",
        about="θ is taken out of the residual stream; what each block’s OV circuits (or MLP) make "
        "of it is added at that block instead. The share recovered is of θ’s gain in "
        "log-probability. Nulls are random vectors of the same norm, and of the same norm and "
        "cosine with θ.",
        figures=(plots.reconstruction,),
    ),
    "readers": Section(
        title="Who reads θ",
        about="θ stays out of the residual stream, and is shown to some of its readers only, in "
        "all sixteen ways. Shapley shares divide the gain among the readers.",
        figures=(plots.reader_settings, plots.reader_shares),
    ),
    "decomposition": Section(
        title="What the effect is made of",
        about="The change of the final residual stream, split exactly into θ, heads (values under "
        "the old pattern, pattern, their product) and MLPs, each projected on the answer’s logit "
        "difference.",
        figures=(
            plots.decomposition,
            plots.decomposition_by_block,
            plots.decomposition_by_head,
        ),
    ),
    "heads": Section(
        title="Key heads",
        about="Heads at and behind θ’s block, ranked on validation queries by saliency (one "
        "backward pass), and by ablating each in turn.",
        figures=(
            lambda found: plots.key_heads(found.saliency),
            lambda found: plots.key_heads(found.ablation),
        ),
    ),
    "ablation": Section(
        title="Without the key heads",
        about="The outputs of the key heads (a tenth of the heads) are replaced by their means at "
        "the last token; the same for random sets of as many other heads.",
        figures=(plots.ablation,),
    ),
    "attention": Section(
        title="Where key heads look",
        about="Attention from the last token in the injected run, in parts that add up to 1.",
        figures=(plots.attention_shares,),
    ),
    "head_maps": Section(
        title="What each head’s OV map makes of θ",
        about="θ through each head’s values and outputs, as if the head attended to it alone.",
        figures=(plots.head_maps,),
    ),
    "propagation": Section(
        title="Is the way to the output linear?",
        about="A linear map is fitted from perturbed vectors to their mean effects on the final "
        "residual stream, and tried on held-out ones.",
        figures=(plots.propagation_r2, plots.propagation_accuracy),
    ),
    "jacobian": Section(
        title="The integrated Jacobian",
        about="The Jacobian of the final residual stream averaged along the way from 0 to θ: it "
        "maps θ to its mean effect, however nonlinear the network.",
    ),
    "rotation": Section(
        title="Rotation and stretch",
        about="The polar decomposition W = QΣ of the fitted and of the integrated map, beside "
        "random vectors of θ’s norm.",
        figures=(plots.rotation_by_layer, plots.singular_spectrum),
    ),
    "alignment": Section(
        title="Task alignment",
        about="The part of a vector that lies in the span of the answers’ unembedding rows. Q and "
        "W are those of the integrated Jacobian.",
        figures=(plots.alignment_bars,),
    ),
    "linearity": Section(
        title="Tests of linearity",
        about="The effect of a multiple of θ, first-order predictions of each query’s answer, and "
        "the effect of a sum, beside random vectors of θ’s norm.",
        figures=(plots.linearity,),
    ),
    "lens": Section(
        title="Logit lens",
        about="The residual stream at the last token, read behind every block through the final "
        "norm and the unembedding, plain and under θ.",
        figures=(plots.lens_curves, plots.lens_tokens),
    ),
    "diagnostics": Section(
        title="Layer by layer",
        about="Accuracy, logit difference and alignment of the stream and of its change.",
        figures=(plots.diagnostics_panels, plots.alignment_by_layer),
    ),
}
