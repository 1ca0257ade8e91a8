"""Adapters in the training loop: the loss falls, the best epoch is left, scores are right."""

import numpy as np
import pytest
import torch
from builders import tiny_hf
from evaluation.invented import LABELS, task_of
from methods.plain import mean_log_probabilities, model_of

from mechtv.evaluation import evaluate
from mechtv.methods.adapter_training import score_adapter, train_adapter
from mechtv.methods.adapters import lora_adapter, prefix_adapter, prompt_adapter
from mechtv.methods.plain_model import Network, plain_model
from mechtv.methods.training import Plan
from mechtv.tasks.prompts import Prompts


def adapter_of(kind):
    made = {"seed": 0, "purpose": "test"}
    if kind == "lora":
        return lora_adapter(model_of(), layer=None, target=None, **made)
    return {"prompt": prompt_adapter, "prefix": prefix_adapter}[kind](model_of(), **made)


@pytest.mark.parametrize("kind", ["prompt", "prefix", "lora"])
def test_training_lowers_the_loss_and_leaves_the_best_epoch(kind):
    adapter, task = adapter_of(kind), task_of()
    validation = Prompts.of(model_of(), task, split="validation")
    curve = train_adapter(
        adapter.network,
        Prompts.of(model_of(), task, split="train"),
        validation,
        step=0.3 * adapter.unit,
        plan=Plan(epochs=6, batch_size=8, patience=6, schedule="cosine", weight_decay=0.01),
        rng=torch.Generator().manual_seed(0),
        title="test",
        show=False,
    )
    losses = [point["train_loss"] for point in curve[1:]]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1
    best = max(curve, key=lambda p: (p["validation_accuracy"], -p["validation_loss"]))
    with torch.no_grad():
        left = -adapter.network.forced(validation).mean_log_probability().mean()
    assert float(left) == pytest.approx(best["validation_loss"], abs=1e-5)


@pytest.mark.parametrize("labels", [None, LABELS], ids=["open", "closed"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_scores_are_those_of_evaluate(family, labels):
    model, task = model_of(family), task_of(labels)
    prompts = Prompts.of(model, task)
    network = Network(module=plain_model(model))
    found = score_adapter(network, model, task, prompts, setting="plain", split="test", seed=0)
    wanted = evaluate(model, task)
    one_by_one = mean_log_probabilities(tiny_hf(family, torch.float32), prompts)
    np.testing.assert_allclose(found.log_probabilities, one_by_one, atol=2e-4, rtol=0)
    assert found.accuracy == wanted.accuracy
    assert found.label_accuracy == wanted.label_accuracy
    assert found.exact_match == wanted.exact_match
    assert found.predictions == wanted.predictions
    assert found.provenance == wanted.provenance
    assert found.compare(wanted).difference.value == 0
