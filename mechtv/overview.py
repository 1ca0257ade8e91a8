"""The main job: what learned vectors do on one task, beside the plain model and extracted vectors.

Scores zero-shot, in-context, and, at several depths, the learned and the hidden-state vector, all
on the same test queries. Among the learned vectors the best depth is chosen on the validation
split.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
from transformer_lens.model_bridge import TransformerBridge

from mechtv.analysis.lens import top_tokens
from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import Evaluation
from mechtv.evaluation.dntp import Divergence
from mechtv.evaluation.generated import text_of
from mechtv.evaluation.scoring import Scorer
from mechtv.forward.generate import greedy
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.learned import learn
from mechtv.models import ModelCard, describe
from mechtv.progress import progress as progress_over
from mechtv.tasks.chat import ChatTemplate, template_for
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.inject import hook_point
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

N_DEPTHS = 4
EPOCHS = 6
N_EXAMPLES = 12
NEW_TOKENS = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """One way to run the model, scored.

    Args:
        name: `zero-shot`, `in-context`, `learned` or `hidden_state`.
        layer: the block whose input a vector is written to; None without a vector.
        evaluation: accuracies and log-probability on the test split.
        divergences: dNTP over `labels` and over the `vocabulary`.
        top_tokens: the vector's favourite tokens under the logit lens, best first.
    """

    name: str
    layer: int | None
    vector: TaskVector | None
    evaluation: Evaluation
    divergences: tuple[Divergence, ...]
    top_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """Everything the main job found; `mechtv.report` makes a page of it.

    Args:
        examples: one row a query: the true answer and what each setting answered.
        best_layer: the learned vector's depth with the best validation accuracy.
        seconds: the job's duration.
    """

    model: ModelCard
    task: Task
    shots: int
    seed: int
    settings: tuple[Setting, ...]
    best_layer: int
    examples: pd.DataFrame
    seconds: float

    def __getitem__(self, key: str | tuple[str, int]) -> Setting:
        """A setting by name, or by name and layer.

        Raises:
            KeyError: if there is none.
        """
        name, layer = (key, None) if isinstance(key, str) else key
        for setting in self.settings:
            if setting.name == name and setting.layer == layer:
                return setting
        raise KeyError(key)

    @property
    def layers(self) -> tuple[int, ...]:
        """The depths that were tried."""
        return tuple(s.layer for s in self.settings if s.name == "learned" and s.layer is not None)

    def table(self) -> pd.DataFrame:
        """One row a (setting, layer, score): value, 95 % interval, n."""
        parts = []
        for setting in self.settings:
            scores = [setting.evaluation.table(), *(d.table() for d in setting.divergences)]
            parts.append(pd.concat(scores).assign(setting=setting.name, layer=setting.layer))
        columns = ["task", "setting", "layer", "score", "value", "low", "high", "n"]
        return pd.concat(parts, ignore_index=True)[columns].astype({"layer": "Int64"})

    def comparisons(self) -> pd.DataFrame:
        """Learned minus hidden-state accuracy (full vocabulary) at each depth, McNemar's p."""
        rows = []
        for layer in self.layers:
            learned, hidden = self["learned", layer], self["hidden_state", layer]
            result = learned.evaluation.compare(hidden.evaluation)
            rows.append(
                {
                    "layer": layer,
                    "learned": learned.evaluation.accuracy.value,
                    "hidden_state": hidden.evaluation.accuracy.value,
                    "difference": result.difference.value,
                    "low": result.difference.low,
                    "high": result.difference.high,
                    "p_value": result.p_value,
                    "n": result.difference.n,
                }
            )
        return pd.DataFrame(rows)

    def curves(self) -> pd.DataFrame:
        """The training curves of the learned vectors, one row a (layer, epoch)."""
        curves = [
            setting.vector.training_curve().assign(layer=setting.layer)
            for setting in self.settings
            if setting.vector is not None and _trained(setting)
        ]
        return pd.concat(curves, ignore_index=True)


def run_overview(
    model: TransformerBridge,
    task: Task,
    *,
    layers: Sequence[int] | None = None,
    shots: int = 8,
    epochs: int = EPOCHS,
    n: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
    on_finished: Callable[[Setting], None] | None = None,
) -> Overview:
    """Run the main job on one model and task.

    Args:
        layers: the depths; four evenly spread ones if None.
        shots: demonstrations of the in-context run and of the extracted vector.
        epochs: of training at each depth, at most.
        n: how many test queries; all if None.
        on_finished: called with each setting as soon as it is scored, so nothing is lost if the job
            is interrupted.

    Raises:
        InvalidInput: for a layer that the model lacks, or too few examples for the shots.
    """
    began = time.perf_counter()
    layers = evenly_spread(model.cfg.n_layers) if layers is None else tuple(layers)
    if not layers or len(set(layers)) < len(layers):
        raise InvalidInput(
            f"layers={list(layers)} must name one or more distinct blocks; or leave it out."
        )
    for depth in layers:
        hook_point(model, Site(layer=depth))
    scorer = Scorer(model, task, shots=shots, n=n, seed=seed, progress=progress)
    makers: list[tuple[str, int | None, Callable[[], TaskVector | None]]] = [
        ("zero-shot", None, lambda: None),
        ("in-context", None, lambda: None),
    ]
    for depth in layers:
        extract = partial(
            extract_hidden_state, model, task, depth, shots=shots, seed=seed, progress=progress
        )
        train = partial(learn, model, task, depth, epochs=epochs, seed=seed, progress=progress)
        makers += [("hidden_state", depth, extract), ("learned", depth, train)]
    settings: list[Setting] = []
    for name, layer, make in progress_over(makers, title=task.name, show=progress):
        settings.append(_setting(model, scorer, name, layer, make()))
        if on_finished is not None:
            on_finished(settings[-1])
    best = max((s for s in settings if _trained(s)), key=_validation_accuracy)
    return Overview(
        model=describe(model),
        task=task,
        shots=shots,
        seed=seed,
        settings=tuple(settings),
        best_layer=best.layer or 0,
        examples=_examples(model, scorer, settings, best.layer),
        seconds=time.perf_counter() - began,
    )


def evenly_spread(n_layers: int, n: int = N_DEPTHS) -> tuple[int, ...]:
    """So many depths in the middle of as many equal parts of the model; fewer for tiny models."""
    middles = (n_layers * (2 * part + 1) // (2 * n) for part in range(n))
    return tuple(dict.fromkeys(middles))


def _setting(
    model: TransformerBridge,
    scorer: Scorer,
    name: str,
    layer: int | None,
    vector: TaskVector | None,
) -> Setting:
    scores = scorer.score(name, vector)
    return Setting(
        name=name,
        layer=layer,
        vector=vector,
        evaluation=scores.evaluation,
        divergences=scores.divergences,
        top_tokens=() if vector is None else tuple(top_tokens(model, vector)["token"]),
    )


def _examples(
    model: TransformerBridge, scorer: Scorer, settings: Sequence[Setting], layer: int | None
) -> pd.DataFrame:
    """Greedy answers to the first test queries: alone, in context, and under the vectors."""
    shown = [s for s in settings if s.layer in (None, layer)]
    queries = scorer.zero_shot.examples[:N_EXAMPLES]
    table = pd.DataFrame(
        {
            "query": [scorer.task.template.query(example) for example in queries],
            "answer": [example.answer for example in queries],
        }
    )
    for setting in shown:
        prompts = scorer.in_context if setting.name == "in-context" else scorer.zero_shot
        prompts = prompts.select(range(len(queries)))
        table[setting.name] = _answers(model, prompts, setting.vector, scorer.task)
    return table


def _answers(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None, task: Task
) -> list[str]:
    """What greedy decoding answers (at most six tokens, up to what follows an answer)."""
    written = greedy(model, prompts, vector, new_tokens=NEW_TOKENS)
    texts = [text_of(model, row) for row in written.tolist()]
    template = template_for(model, task.template)
    end = template.closing if isinstance(template, ChatTemplate) else template.separator
    return [text.partition(end)[0].strip() if end else text.strip() for text in texts]


def _trained(setting: Setting) -> bool:
    return setting.vector is not None and bool(setting.vector.card.curve)


def _validation_accuracy(setting: Setting) -> tuple[float, float]:
    assert setting.vector is not None
    return max(
        (point["validation_accuracy"], -point["validation_loss"])
        for point in setting.vector.card.curve
    )
