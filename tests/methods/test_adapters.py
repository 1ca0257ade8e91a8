"""Adapters against passes of one row by the plain model: how they start, and what they become."""

import sys

import numpy as np
import pytest
import torch
from builders import D_MODEL, N_LAYERS, VOCABULARY, tiny_hf
from evaluation.invented import task_of
from methods.plain import SHORT, mean_log_probabilities, model_of

from mechtv.errors import InvalidInput
from mechtv.methods import baselines
from mechtv.methods.adapters import _projections, lora_adapter, prefix_adapter, prompt_adapter
from mechtv.methods.baselines import train_baseline
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts

FAMILIES = ["llama", "gpt2", "qwen3", "mistral", "gemma2", "gemma3", "neox", "phi", "opt", "bloom"]


@pytest.fixture
def trained(monkeypatch):
    """The adapters that `train_baseline` makes, as they are when it has ended."""
    made = []
    original = baselines._adapter
    monkeypatch.setattr(
        baselines, "_adapter", lambda *args: (made.append(original(*args)), made[-1])[1]
    )
    return made


# --- how they start ---


def one(token, family, prompts):
    """Mean log-probabilities of the plain model with a token before each prompt, or without."""
    plain = tiny_hf(family, torch.float32)
    with torch.no_grad():
        before = plain.get_input_embeddings()(token)
    found = [mean_log_probabilities(plain, prompts, x) for x in (before, None)]
    return torch.tensor(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_starts_as_a_token_before_each_query(family):
    model = model_of(family)
    prompts = Prompts.of(model, task_of(), n=4)
    token = torch.randint(VOCABULARY, (1,), generator=torch_rng(0, "test"))
    adapter = prefix_adapter(model, seed=0, purpose="test")
    with torch.no_grad():
        found = adapter.network.forced(prompts).mean_log_probability()
    wanted, without = one(token, family, prompts)
    torch.testing.assert_close(found, wanted, atol=5e-4, rtol=0)
    assert (wanted - without).abs().max() > 1e-2
    (weight,) = adapter.network.trained
    assert adapter.unit == pytest.approx(float(weight.detach().square().mean().sqrt()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_prompt_starts_as_the_embedding_of_a_token(family):
    model = model_of(family)
    adapter = prompt_adapter(model, seed=0, purpose="test")
    (weight,) = adapter.network.trained
    with torch.no_grad():
        every = adapter.network.base.get_input_embeddings()(torch.arange(VOCABULARY))
    assert (every == weight).all(dim=1).sum() == 1
    assert adapter.unit == pytest.approx(float(every.square().mean().sqrt()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "neox"])
def test_lora_starts_as_the_plain_model(family):
    model = model_of(family)
    prompts = Prompts.of(model, task_of(), n=4)
    adapter = lora_adapter(model, layer=None, target=None, seed=0, purpose="test")
    with torch.no_grad():
        found = adapter.network.forced(prompts).mean_log_probability()
    wanted = torch.tensor(mean_log_probabilities(tiny_hf(family, torch.float32), prompts))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    assert adapter.unit == 1


@pytest.mark.parametrize("make", [prompt_adapter, prefix_adapter])
def test_a_start_depends_on_the_seed_alone(make):
    def weight(seed):
        return make(model_of(), seed=seed, purpose="test").network.trained[0]

    torch.manual_seed(1)
    first, state = weight(0), torch.get_rng_state()
    torch.rand(1)
    assert torch.equal(weight(0), first)
    assert not torch.equal(weight(1), first)
    torch.set_rng_state(state)
    weight(0)
    assert torch.equal(torch.get_rng_state(), state)


# --- what they become ---


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_a_trained_prompt_is_an_embedding_before_each_query(family, trained):
    model, task = model_of(family), task_of()
    found = train_baseline(model, task, "prompt", **SHORT)
    (embedding,) = trained[0].network.trained
    assert embedding.shape == (1, D_MODEL)
    plain = tiny_hf(family, torch.float32)
    wanted = mean_log_probabilities(plain, Prompts.of(model, task, n=4), embedding)
    np.testing.assert_allclose(found.evaluation.log_probabilities, wanted, atol=2e-4, rtol=0)
    without = mean_log_probabilities(plain, Prompts.of(model, task, n=4))
    assert not np.allclose(wanted, without, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "weight"),
    [("llama", "model.layers.1.self_attn.o_proj"), ("gpt2", "transformer.h.1.attn.c_proj")],
)
def test_a_trained_lora_is_a_rank_one_change_of_one_weight(family, weight, trained):
    model, task = model_of(family), task_of()
    found = train_baseline(model, task, "lora", **{**SHORT, "epochs": 3}, step_size=0.03)
    into, out = trained[0].network.trained
    assert (into.shape[0], out.shape[1]) == (1, 1)
    assert out.abs().max() > 0
    assert found.settings["projection"] == weight
    plain = tiny_hf(family, torch.float32)
    change = (out @ into).detach()
    plain.get_submodule(weight).weight.data += change.T if family == "gpt2" else change
    wanted = mean_log_probabilities(plain, Prompts.of(model, task, n=4))
    np.testing.assert_allclose(found.evaluation.log_probabilities, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_query_does_not_change_when_batched_with_a_longer_one(family, trained):
    model, task = model_of(family), task_of()
    found = train_baseline(model, task, "prefix", **SHORT)
    prompts = Prompts.of(model, task, n=4)
    assert len(set(prompts.lengths.tolist())) > 1
    with torch.no_grad():
        alone = torch.cat(
            [
                trained[0].network.forced(prompts.select([i])).mean_log_probability()
                for i in range(4)
            ]
        )
    np.testing.assert_allclose(found.evaluation.log_probabilities, alone, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "kind", "options", "n_parameters"),
    [
        ("llama", "prompt", {}, D_MODEL),
        ("llama", "prefix", {}, 2 * N_LAYERS * 2 * 16),
        ("llama", "lora", {}, 64 + D_MODEL),
        ("qwen2", "lora", {}, 2 * D_MODEL),
        ("qwen2", "lora", {"target": "q_proj", "layer": 2}, 2 * D_MODEL),
        ("qwen2", "lora", {"target": "mlp.down_proj"}, D_MODEL + 64),
        ("gpt2", "lora", {"target": "attn.c_attn"}, D_MODEL + 3 * D_MODEL),
    ],
)
def test_parameters_are_counted(family, kind, options, n_parameters):
    found = train_baseline(model_of(family), task_of(), kind, **SHORT, **options)
    assert found.n_parameters == n_parameters
    assert found.table()["parameters"].tolist() == [n_parameters]
    if options:
        assert options["target"] in found.settings["projection"]


def test_the_first_number_in_a_name_is_the_blocks():
    def block():
        experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
        return torch.nn.ModuleDict({"experts": experts})

    base = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(block() for _ in range(3))})
    wanted = {f"layers.1.experts.{i}": f"experts.{i}" for i in range(3)}
    assert _projections(base, 1) == wanted


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        InvalidInput, match=r"need the peft library; .*pip install 'mechtv\[peft\]'"
    ):
        prompt_adapter(model_of(), seed=0, purpose="test")


@pytest.mark.parametrize(
    ("layer", "target", "sentence"),
    [
        (3, None, "layer=3 does not exist: this model has layers 0 to 2"),
        (-1, None, "layer=-1 does not exist"),
        (
            None,
            "proj",
            "target='proj' names 0 projections of block 1; .* one of: mlp.down_proj, .*q_proj",
        ),
    ],
)
def test_what_lora_cannot_be_added_to_is_one_sentence(layer, target, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        lora_adapter(model_of(), layer=layer, target=target, seed=0, purpose="test")
