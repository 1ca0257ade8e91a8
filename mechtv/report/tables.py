"""The tables of the page."""

from collections.abc import Sequence

import pandas as pd

from mechtv.evaluation.intervals import Estimate
from mechtv.overview import NEW_TOKENS, Overview, Setting
from mechtv.plots.distance import divergence_of
from mechtv.plots.style import LOOKS, fixed, label_of
from mechtv.plots.training import kept_epoch
from mechtv.report.markup import NOTHING, Html, chips, literal, marked, number, table, text
from mechtv.report.words import p_text, signed

ORDER = ("zero-shot", "in-context", "learned", "hidden_state")
INPUTS = ("query", "answer")


def settings_table(overview: Overview) -> Html:
    """Every setting under every score."""
    settings = sorted(overview.settings, key=lambda s: (_place(s.name), s.layer or 0))
    restricted = overview.task.labels is not None
    head = [
        "Setting",
        "Layer",
        "Accuracy, full vocabulary",
        *(["Accuracy, label-restricted"] if restricted else []),
        "Exact match",
        "Log-probability (nats per answer token)",
        f"dNTP, {'labels' if restricted else 'answer tokens'} (nats)",
        "dNTP, vocabulary (nats)",
        "Top tokens of the vector (logit lens)",
    ]
    return table(
        "Every setting on the same test queries, with 95 % intervals. The marked row is the "
        "learned vector chosen on the validation split. In tokens, · is a space and ↵ a line "
        "break.",
        head,
        [_setting_row(overview, setting, restricted) for setting in settings],
        kind="settings",
        chosen=[_chosen(overview, setting) for setting in settings],
    )


def comparison_table(comparisons: pd.DataFrame) -> Html:
    """Learned minus hidden-state at each depth."""
    head = ["Layer", "Learned", "Hidden-state", "Difference", "p (McNemar, exact)", "n"]
    return table(
        "Full-vocabulary accuracy of the two vectors on the same queries: learned minus "
        "hidden-state, with its paired 95 % bootstrap interval.",
        head,
        [
            [
                text(str(row["layer"])),
                text(fixed(row["learned"])),
                text(fixed(row["hidden_state"])),
                _difference(row["difference"], row["low"], row["high"]),
                text(p_text(row["p_value"]).removeprefix("= ")),
                text(str(row["n"])),
            ]
            for row in comparisons.to_dict("records")
        ],
    )


def examples_table(overview: Overview) -> Html:
    """What the model answered before and after injection."""
    frame = overview.examples
    names = sorted((c for c in frame.columns if c not in INPUTS), key=_place)
    return table(
        f"Greedy answers (at most {NEW_TOKENS} tokens, up to the line break) before injection "
        f"(zero-shot) and after it (vectors at layer {overview.best_layer}). ✓: the text begins "
        "with the whole true answer; ✗: it does not.",
        ["Query", "True answer", *(label_of(name, overview.shots) for name in names)],
        [
            [
                literal(row["query"]),
                literal(row["answer"]),
                *(marked(row[name], begins_with(row[name], row["answer"])) for name in names),
            ]
            for row in frame.to_dict("records")
        ],
        kind="examples",
    )


def training_table(overview: Overview) -> Html:
    """How the training of each learned vector went."""
    learned = [s for s in overview.settings if s.name == "learned" and s.vector is not None]
    head = [
        "Layer",
        "Mean residual norm",
        "AdamW step",
        "Epochs run",
        "Epoch kept",
        "Validation accuracy (exact match)",
        "Validation loss (nats per answer token)",
    ]
    return table(
        "Training at each depth. The step is step_size × residual norm / √width.",
        head,
        [_training_row(setting) for setting in learned],
        chosen=[_chosen(overview, setting) for setting in learned],
    )


def begins_with(written: str, answer: str) -> bool:
    """Whether a text begins with the answer, and the answer's last word ends there."""
    following = written[len(answer) : len(answer) + 1]
    return bool(answer) and written.startswith(answer) and not following.isalnum()


def _place(name: str) -> int:
    known = (*ORDER, *(look for look in LOOKS if look not in ORDER))
    return known.index(name) if name in known else len(known)


def _chosen(overview: Overview, setting: Setting) -> bool:
    return setting.name == "learned" and setting.layer == overview.best_layer


def _setting_row(overview: Overview, setting: Setting, restricted: bool) -> list[Html]:
    scores = setting.evaluation
    star = " ★" if _chosen(overview, setting) else ""
    estimates: Sequence[Estimate | None] = (
        scores.accuracy,
        *([scores.label_accuracy] if restricted else []),
        scores.exact_match,
        scores.log_probability,
        divergence_of(setting, "labels").estimate,
        divergence_of(setting, "vocabulary").estimate,
    )
    return [
        text(label_of(setting.name, overview.shots) + star),
        NOTHING if setting.layer is None else text(str(setting.layer)),
        *map(number, estimates),
        chips(setting.top_tokens),
    ]


def _training_row(setting: Setting) -> list[Html]:
    assert setting.vector is not None
    card = setting.vector.card
    curve = setting.vector.training_curve()
    epoch = kept_epoch(curve)
    kept = curve[curve["epoch"] == epoch].iloc[0]
    return [
        text(str(setting.layer)),
        text(_numbers(card.settings.get("residual_norms", ()), 1)),
        text(_numbers(card.settings.get("steps", ()), 3)),
        text(str(int(curve["epoch"].max()))),
        text(str(epoch)),
        text(fixed(kept["validation_accuracy"])),
        text(fixed(kept["validation_loss"])),
    ]


def _numbers(sites: Sequence[Sequence[float]], digits: int) -> str:
    """The numbers of every site and position."""
    return ", ".join(fixed(value, digits) for values in sites for value in values) or "–"


def _difference(value: float, low: float, high: float) -> Html:
    known = pd.notna(low) and pd.notna(high)
    interval = f' <span class="interval">[{signed(low)}, {signed(high)}]</span>' if known else ""
    return Html(signed(value) + interval)
