"""An overview made by hand, with numbers like those of a real run: no model is needed."""

import math

import numpy as np
import pandas as pd
import torch

from mechtv.evaluation.accuracy import Evaluation
from mechtv.evaluation.dntp import Divergence
from mechtv.models import ModelCard
from mechtv.overview import Overview, Setting
from mechtv.tasks.example import Example
from mechtv.tasks.task import Task
from mechtv.tasks.template import Template
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Edit
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

N = 100
LAYERS = (3, 11, 18, 26)
LEARNED = {3: 0.15, 11: 0.38, 18: 0.55, 26: 0.60}
HIDDEN = {3: 0.00, 11: 0.18, 18: 0.30, 26: 0.04}
TOKENS = (" jumped", " past", "ed", "\n", " ", "<b>&", " was", "\u200b")
VOCABULARY = 49_152


def fake_overview(
    *,
    learned: dict[int, float] = LEARNED,
    hidden: dict[int, float] = HIDDEN,
    in_context: float = 0.76,
    zero_shot: float = 0.0,
    n: int = N,
    name: str = "present-past",
    model: str = "smollm2-135m",
    labels: tuple[str, ...] | None = None,
    examples: pd.DataFrame | None = None,
    tokens: tuple[str, ...] = TOKENS,
) -> Overview:
    """Accuracies by layer; the learned vectors with the curves that lead there."""
    make = _Maker(n=n, task=name, labels=labels, tokens=tokens)
    settings = [
        make.setting("zero-shot", None, zero_shot, distance=5.8),
        make.setting("in-context", None, in_context, distance=0.0),
    ]
    for layer in learned:
        settings.append(make.setting("hidden_state", layer, hidden[layer], distance=3.5))
        settings.append(make.setting("learned", layer, learned[layer], distance=1.4))
    return Overview(
        model=model_card(model),
        task=task(name, labels, n),
        shots=8,
        seed=0,
        settings=tuple(settings),
        best_layer=max(learned, key=lambda layer: learned[layer]),
        examples=example_table() if examples is None else examples,
        seconds=754.2,
    )


def model_card(name: str) -> ModelCard:
    return ModelCard(
        name=name,
        revision="sha256:" + "0123456789abcdef" * 4,
        n_layers=30,
        n_heads=9,
        d_model=576,
        d_vocab=VOCABULARY,
        dtype="float32",
        weights="raw",
    )


def task(name: str, labels: tuple[str, ...] | None, n: int) -> Task:
    answers = labels or ("jumped",)
    return Task(
        name=name,
        examples=tuple(
            Example.pair(f"word {i}", answers[i % len(answers)]) for i in range(5 * max(n, 2))
        ),
        template=Template(text="{input} -> {answer}"),
        labels=labels,
        description="The past tense of an English verb.",
    )


def example_table() -> pd.DataFrame:
    verbs = [("jump", "jumped"), ("go", "went"), ("walk", "walked"), ("see", "saw")]
    wrong = ["jump", "the door", "", "seeing, that is"]
    return pd.DataFrame(
        {
            "query": [f"{verb} ->" for verb, _ in verbs],
            "answer": [past for _, past in verbs],
            "zero-shot": wrong,
            "in-context": [past for _, past in verbs],
            "hidden_state": [verbs[0][1], *wrong[1:]],
            "learned": [past for _, past in verbs[:3]] + ["seed"],
        }
    )


class _Maker:
    def __init__(
        self, *, n: int, task: str, labels: tuple[str, ...] | None, tokens: tuple[str, ...]
    ) -> None:
        self.n, self.task, self.labels, self.tokens = n, task, labels, tokens

    def setting(self, name: str, layer: int | None, accuracy: float, *, distance: float) -> Setting:
        return Setting(
            name=name,
            layer=layer,
            vector=None if layer is None else self.vector(name, layer, accuracy),
            evaluation=self.evaluation(name, accuracy),
            divergences=(
                self.divergence(name, "labels", distance / 2),
                self.divergence(name, "vocabulary", distance),
            ),
            top_tokens=() if layer is None else self.tokens,
        )

    def evaluation(self, name: str, accuracy: float) -> Evaluation:
        correct = np.arange(self.n) < round(accuracy * self.n)
        return Evaluation(
            task=self.task,
            setting=name,
            shots=8 if name == "in-context" else 0,
            split="test",
            queries=tuple((f"word {i}",) for i in range(self.n)),
            correct=correct,
            correct_label=correct if self.labels else None,
            correct_exact=correct,
            log_probabilities=np.where(correct, -0.4, -4.0) - 0.01 * (np.arange(self.n) % 7),
            predictions=tuple(" jumped" if hit else " the" for hit in correct),
        )

    def divergence(self, name: str, over: str, distance: float) -> Divergence:
        return Divergence(
            task=self.task,
            setting=name,
            over=over,  # type: ignore[arg-type]
            n_tokens=VOCABULARY if over == "vocabulary" else 91,
            shots=8,
            per_query=distance * (0.5 + np.linspace(0, 1, self.n)),
        )

    def vector(self, name: str, layer: int, accuracy: float) -> TaskVector:
        trained = name == "learned"
        measured = {
            "layers": [layer],
            "positions": [-1],
            "component": "resid_pre",
            "objective": "answer",
            "step_size": 0.1,
            "epochs": 6,
            "batch_size": 32,
            "n_train": 205,
            "n_validation": 68,
            "residual_norms": [[211.5 + layer]],
            "steps": [[0.88]],
        }
        card = Card(
            method=name,
            settings=measured if trained else {"shots": 8},
            model="smollm2-135m",
            task=self.task,
            template="{input} -> {answer}",
            seed=0,
            curve=tuple(curve(accuracy)) if trained else (),
        )
        edit = Edit(site=Site(layer=layer), operation=Add(value=torch.ones(4)))
        return TaskVector(edits=(edit,), card=card)


def curve(accuracy: float, epochs: int = 8) -> list[dict[str, float]]:
    """A curve that rises to `accuracy` at the epoch before the last."""
    rows = [{"epoch": 0.0, "step": 0.0, "validation_loss": 6.0, "validation_accuracy": 0.0}]
    for epoch in range(1, epochs + 1):
        done = 1 - math.exp(-epoch / 2)
        rows.append(
            {
                "epoch": float(epoch),
                "step": 7.0 * epoch,
                "train_loss": 6.0 - (4.0 + accuracy) * done,
                "validation_loss": 6.0 - (3.0 + 2 * accuracy) * done,
                "validation_accuracy": accuracy * done - (0.05 if epoch == epochs else 0.0),
            }
        )
    return rows
