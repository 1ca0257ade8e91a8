"""The logit lens of states and vectors."""

import pytest
import torch
from builders import tiny

from mechtv import Add, Card, Edit, InvalidInput, Linear, Prompts, Site, TaskVector
from mechtv.analysis import top_tokens
from mechtv.analysis.lens import lens_logits
from mechtv.forward import capture, run

FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "neox", "native")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_at_the_last_layer_is_the_models_own_output(family: str) -> None:
    model = tiny(family)
    prompts = Prompts.from_ids(model, [[5, 6, 7, 8], [9, 10, 11, 12]])
    site = Site(component="resid_post", layer=model.cfg.n_layers - 1)
    with torch.no_grad():
        state = capture(model, prompts, [site])[site][:, 0]
        output = run(model, prompts)[:, 0]
    torch.testing.assert_close(lens_logits(model, state), output, atol=1e-10, rtol=0)


def test_top_tokens_are_those_of_the_largest_logits_for_each_position() -> None:
    model = tiny("llama")
    value = torch.randn(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    edit = Edit(site=Site(layer=1, positions=(-2, -1)), operation=Add(value=value))
    table = top_tokens(model, TaskVector(edits=(edit,), card=Card(method="made")), k=3)
    logits = lens_logits(model, value)
    expected = [model.tokenizer.decode([int(i)]) for i in logits.topk(3).indices.flatten()]
    assert list(table["token"]) == expected
    assert list(table["position"]) == [-2, -2, -2, -1, -1, -1]
    assert list(table["rank"]) == [1, 2, 3, 1, 2, 3]


def test_a_vector_without_a_value_in_the_stream_is_refused() -> None:
    edit = Edit(site=Site(layer=1), operation=Linear(matrix=torch.eye(32)))
    with pytest.raises(InvalidInput, match="no value in the residual stream"):
        top_tokens(tiny("llama"), TaskVector(edits=(edit,), card=Card(method="made")))
