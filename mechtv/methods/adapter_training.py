"""Train an adapter with the loop and the objective of `learn`, and score it as `evaluate` does.

The adapter sits in the model, so unlike a vector it changes every pass from its first token on.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.evaluation.accuracy import Evaluation, forced_scores
from mechtv.evaluation.provenance import Provenance
from mechtv.forward.run import in_batches
from mechtv.methods.plain_model import Network
from mechtv.methods.training import Curve, Plan, train
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task
from mechtv.vectors.card import Card
from mechtv.vectors.edits import Add, Edit
from mechtv.vectors.site import Site
from mechtv.vectors.vector import TaskVector

NO_VECTOR = TaskVector(  # the loop hands on what it trains as a vector; an adapter is none
    edits=(Edit(site=Site(layer=0), operation=Add(value=torch.zeros(1))),),
    card=Card(method="baseline"),
)


class AdapterAnswer:
    """The objective `answer` of `learn`, for an adapter that sits in the model."""

    def __init__(self, network: Network, prompts: Prompts) -> None:
        self.network = network
        self.prompts = replace(prompts, labels=(), label_tokens=())

    def prepared(self, vector: TaskVector, show: bool | None) -> AbstractContextManager[None]:
        """Nothing is kept of passes that change from their first token on."""
        return nullcontext()

    def loss(self, vector: TaskVector, rows: Int[Tensor, " row"]) -> Float[Tensor, " row"]:
        """The cross-entropy of each row's answer."""
        return -self.network.forced(self.prompts.select(rows.tolist())).mean_log_probability()

    def score(self, vector: TaskVector) -> dict[str, float]:
        """The mean loss, and the share of answers that greedy decoding gets wholly right."""
        _, _, exact, log_probability, _ = _scores(self.network, self.prompts).mean(dim=0).tolist()
        return {"validation_loss": -log_probability, "validation_accuracy": exact}


def train_adapter(
    network: Network,
    training: Prompts,
    validation: Prompts,
    *,
    step: float,
    plan: Plan,
    rng: torch.Generator,
    title: str,
    show: bool | None,
) -> Curve:
    """Train the adapter in place, and leave it as it was at its best epoch.

    Returns:
        The curve of `training.train`.
    """
    weights = network.trained
    best, curve = train(
        weights,
        as_vector=lambda _: NO_VECTOR,
        training=AdapterAnswer(network, training),
        validation=AdapterAnswer(network, validation),
        steps=[step] * len(weights),
        plan=plan,
        rng=rng,
        title=title,
        show=show,
    )
    with torch.no_grad():
        for weight, value in zip(weights, best, strict=True):
            weight.copy_(value)
    return curve


def score_adapter(
    network: Network,
    model: TransformerBridge,
    task: Task,
    prompts: Prompts,
    *,
    setting: str,
    split: str,
    seed: int,
) -> Evaluation:
    """The scores of `evaluate`, of a network on a task's zero-shot prompts."""
    correct, label, exact, log_probability, predicted = _scores(network, prompts).numpy().T
    return Evaluation(
        task=task.name,
        setting=setting,
        shots=0,
        split=split,
        queries=tuple(example.key for example in prompts.examples),
        correct=correct.astype(bool),
        correct_label=label.astype(bool) if prompts.labels else None,
        correct_exact=exact.astype(bool),
        log_probabilities=log_probability,
        predictions=tuple(model.tokenizer.decode([int(token)]) for token in predicted),
        provenance=Provenance.of(model, task, seed),
    )


def _scores(network: Network, prompts: Prompts) -> Float[Tensor, "row score"]:
    with torch.no_grad():
        return in_batches(
            prompts, lambda batch: forced_scores(network.forced(batch), batch), show=False
        )
