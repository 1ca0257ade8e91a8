"""The model without its bridge: Hugging Face's own, over the same memory."""

import pytest
import torch
from builders import tiny, tiny_hf, tiny_tokenizer
from evaluation.invented import LABELS, task_of
from methods.plain import mean_log_probabilities, model_of

import mechtv
from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import force
from mechtv.methods.plain_model import Network, check_same, plain_model
from mechtv.tasks.prompts import Prompts


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2", "neox", "phi", "bloom"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_plain_model_is_hugging_faces_and_shares_the_weights(family, tied):
    settings = {} if family == "gpt2" and not tied else {"tie_word_embeddings": tied}
    model, own = tiny(family, torch.float32, **settings), tiny_hf(family, torch.float32, **settings)
    plain = plain_model(model)
    tokens = torch.tensor([[5, 9, 40, 77, 12]])
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, own(tokens).logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(plain(tokens).logits, model(tokens), atol=1e-4, rtol=1e-5)
    theirs = {x.data_ptr() for x in model.original_model.parameters()}
    assert {x.data_ptr() for x in plain.parameters()} <= theirs
    assert not any(x.requires_grad for x in plain.parameters())
    assert not any("Bridge" in type(module).__name__ for module in plain.modules())


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom"])
def test_a_network_reads_prompts_as_the_bridge_does(family):
    model, task = model_of(family), task_of(LABELS)
    prompts, plain = Prompts.of(model, task), plain_model(model)
    network = Network(module=plain)
    assert len(set(prompts.lengths.tolist())) > 1
    with torch.no_grad():
        found, wanted = network.forced(prompts), force(model, prompts.with_answers())
        alone = torch.cat([network.next_token(prompts.select([i])) for i in range(len(prompts))])
        torch.testing.assert_close(network.next_token(prompts), alone, atol=2e-4, rtol=0)
    torch.testing.assert_close(found.log_probabilities, wanted.log_probabilities, atol=2e-4, rtol=0)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.first, wanted.first)
    one_by_one = torch.tensor(mean_log_probabilities(plain, prompts))
    torch.testing.assert_close(found.mean_log_probability(), one_by_one, atol=2e-4, rtol=0)
    assert network.base is plain
    assert network.trained == []


def test_another_models_logits_are_noticed():
    model, task = model_of(), task_of()
    prompts = Prompts.of(model, task, n=3)
    check_same(model, Network(module=plain_model(model)), prompts)
    other = Network(module=tiny_hf("llama", torch.float32, seed=1))
    with pytest.raises(
        InvalidInput, match=r"differ by .* of their size, .* open it in raw weights"
    ):
        check_same(model, other, prompts)


def test_processed_weights_are_refused():
    model = mechtv.open_model(tiny_hf("gpt2", torch.float32), tokenizer=tiny_tokenizer())
    model.enable_compatibility_mode()
    prompts = Prompts.of(model, task_of(), n=3)
    with pytest.raises(InvalidInput, match=r"open it in raw weights|cannot be built"):
        check_same(model, Network(module=plain_model(model)), prompts)


def test_a_model_that_is_none_of_hugging_faces_is_refused():
    with pytest.raises(InvalidInput, match="wraps a NativeModel, but peft works on models of Hug"):
        plain_model(model_of("native"))


def test_a_weight_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("mechtv.methods.plain_model._plain_name", lambda name: name)
    with pytest.raises(
        InvalidInput, match=r"has no 'model.embed_tokens.*' of LlamaForCausalLM, so"
    ):
        plain_model(model_of())
