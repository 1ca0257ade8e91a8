"""Prompt tuning, prefix tuning and LoRA beside task vectors, trained as `learn` trains a vector.

The baselines of protocol L3 of *Task Vectors, Learned Not Extracted* (arXiv 2509.24169): the same
training data and objective, at a matched number of parameters, through the `peft` library (the
extra `mechtv[peft]`). They are trained on a plain Hugging Face model that shares the bridge's
weights and is gone afterwards; the bridge itself is not touched. `efficiency` sets them beside
vectors.
"""

import math
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.methods.adapter_training import score_adapter, train_adapter
from mechtv.methods.adapters import Adapter, Kind, lora_adapter, prefix_adapter, prompt_adapter
from mechtv.methods.cost import costs_of, mean_length
from mechtv.methods.efficiency import Baseline
from mechtv.methods.frozen import frozen
from mechtv.methods.plain_model import Network, check_same, plain_model
from mechtv.methods.ranges import check_at_least, check_choices, check_not_negative
from mechtv.methods.training import Plan
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task

Schedule = Literal["cosine", "constant"]

STEPS: dict[Kind, float] = {"prompt": 0.2, "prefix": 0.03, "lora": 0.1}


@dataclass(frozen=True, kw_only=True)
class BaselineSettings:
    """Every option of `train_baseline`; see there.

    Raises:
        InvalidInput: for a value outside its range.
    """

    kind: Kind
    layer: int | None
    target: str | None
    step_size: float | None
    weight_decay: float
    epochs: int
    batch_size: int
    patience: int
    schedule: Schedule
    n_train: int | None
    n_validation: int | None

    def __post_init__(self) -> None:
        check_choices(self, kind=Kind, schedule=Schedule)
        check_at_least(self, 1, "epochs", "batch_size", "patience")
        for name in ("layer", "target"):
            if self.kind != "lora" and getattr(self, name) is not None:
                raise InvalidInput(
                    f"{name}={getattr(self, name)!r} is an option of kind='lora' only; leave it "
                    f"out for kind={self.kind!r}."
                )
        if not 0 < self.step < math.inf:
            raise InvalidInput(f"step_size={self.step} must be above 0 and finite.")
        check_not_negative(self, "weight_decay", "0.01 is usual")

    @property
    def step(self) -> float:
        """The step size, in the kind's units."""
        return STEPS[self.kind] if self.step_size is None else self.step_size

    @property
    def plan(self) -> Plan:
        """The options of the training loop."""
        return Plan(
            epochs=self.epochs,
            batch_size=self.batch_size,
            patience=self.patience,
            schedule=self.schedule,
            weight_decay=self.weight_decay,
        )


def train_baseline(
    model: TransformerBridge,
    task: Task,
    kind: Kind = "prompt",
    *,
    layer: int | None = None,
    target: str | None = None,
    step_size: float | None = None,
    weight_decay: float = 0.01,
    epochs: int = 10,
    batch_size: int = 16,
    patience: int = 3,
    schedule: Schedule = "cosine",
    n_train: int | None = None,
    n_validation: int | None = None,
    split: SplitName = "test",
    n: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Baseline:
    """Train one `peft` adapter as `learn` trains a vector, and score it.

    The objective is the cross-entropy of the answer's tokens on zero-shot queries, by AdamW, with
    the best epoch on the validation split kept.

    Args:
        kind: `prompt` puts one trained embedding before the prompt (d_model parameters, the
            one-token prefix of METHODS); `prefix` one trained key and value before it at every
            layer (2 x n_layers x key-value width); `lora` adds a rank-1 matrix to one projection
            (its two widths, 2 d_model for a square one). `prompt` and `prefix` start from what the
            model makes of a token drawn from its vocabulary.
        layer: for `lora`, the block; the middle one if None.
        target: for `lora`, the end of the projection's name in that block, such as `q_proj` or
            `mlp.down_proj`; the attention's output projection if None.
        step_size: AdamW's step: for `prompt` in units of the embeddings' size, for `prefix` of its
            start's (the root of the mean square), for `lora` in absolute units. If None: 0.2, 0.03
            and 0.1.
        weight_decay, epochs, batch_size, patience, schedule, n_train, n_validation: as in `learn`.
        split, n: the queries that it is scored and timed on.
        seed: fixes the splits, the start and the batch order.

    Returns:
        Its accuracy and its costs; the adapter itself is not kept.

    Raises:
        InvalidInput: if `peft` is missing, the model is none of Hugging Face's or its weights were
            processed, an option is out of range, or no single projection has that name.
    """
    settings = BaselineSettings(
        kind=kind,
        layer=layer,
        target=target,
        step_size=step_size,
        weight_decay=weight_decay,
        epochs=epochs,
        batch_size=batch_size,
        patience=patience,
        schedule=schedule,
        n_train=n_train,
        n_validation=n_validation,
    )
    training = Prompts.of(model, task, split="train", n=n_train, seed=seed)
    validation = Prompts.of(model, task, split="validation", n=n_validation, seed=seed)
    queries = Prompts.of(model, task, split=split, n=n, seed=seed)
    with frozen(model):
        adapter = _adapter(model, settings, seed, f"start of baseline {kind} for {task.name}")
        network, plain = adapter.network, Network(module=plain_model(model))
        check_same(model, plain, training)
        started = time.perf_counter()
        curve = train_adapter(
            network,
            training,
            validation,
            step=settings.step * adapter.unit,
            plan=settings.plan,
            rng=torch_rng(seed, f"batches of baseline {kind} for {task.name}"),
            title=f"{kind} for {task.name}",
            show=progress,
        )
        seconds_training = time.perf_counter() - started
        with torch.no_grad():
            evaluation = score_adapter(
                network, model, task, queries, setting=kind, split=split, seed=seed
            )
            costs = costs_of(
                network.next_token, queries, plain.next_token, queries, batch_size=batch_size
            )
    measured = {
        "projection": adapter.projection,
        "step_size": settings.step,
        "unit": adapter.unit,
        "n_train": len(training),
        "n_validation": len(validation),
        "seed": int(seed),
    }
    return Baseline(
        name=kind,
        n_parameters=sum(weight.numel() for weight in network.trained),
        evaluation=evaluation,
        tokens_per_query=mean_length(queries) + network.n_virtual,
        seconds_training=seconds_training,
        settings=asdict(settings) | measured,
        curve=tuple(curve),
        **costs,
    )


def _adapter(
    model: TransformerBridge, settings: BaselineSettings, seed: int, purpose: str
) -> Adapter:
    if settings.kind == "lora":
        return lora_adapter(
            model, layer=settings.layer, target=settings.target, seed=seed, purpose=purpose
        )
    make = prompt_adapter if settings.kind == "prompt" else prefix_adapter
    return make(model, seed=seed, purpose=purpose)
