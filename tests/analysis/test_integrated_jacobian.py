"""The integrated Jacobian against torch's own of plain hooked passes, and its identities."""

import numpy as np
import pytest
import torch
from builders import FAMILIES, tiny
from evaluation.invented import model_of, task_of
from methods.untouched import left_alone
from torch.testing import assert_close
from transformer_lens.tools.analysis import JacobianLens
from vectors.naive import additive, ids_of, noise

import mechtv
from mechtv.analysis import integrated_jacobian as module
from mechtv.analysis.integrated_jacobian import (
    directional_derivatives,
    gauss_legendre,
    integrate_jacobian,
    mean_jacobian,
)
from mechtv.analysis.perturbations import residuals_under
from mechtv.analysis.subject import Subject
from mechtv.errors import InvalidInput
from mechtv.forward import full_passes
from mechtv.tasks.prompts import Prompts

EXACT = {"atol": 1e-10, "rtol": 1e-10}
SEVERAL = ("llama", "gpt2", "gemma2", "neox", "native")
FINAL = "blocks.2.hook_resid_post"


def final_state(model, ids, layer):
    """h_final of one unpadded prompt as a function of what is added at its last token."""

    def function(shift):
        kept = []

        def add(x, hook):
            return torch.cat([x[:, :-1], x[:, -1:] + shift], dim=1)

        hooks = [(f"blocks.{layer}.hook_resid_pre", add)]
        hooks.append((FINAL, lambda x, hook: kept.append(x[0, -1])))
        model.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)
        return kept[0]

    return function


def queries_of(model, task, split, n):
    return [
        ids_of(model, f"{query.fields['input']} ->") for query in task.split(split, n=n, seed=0)
    ]


def naive(model, task, layer, theta, nodes, n):
    """The definition: node by node, prompt by prompt, by `torch.autograd.functional.jacobian`."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    matrix, effect = 0.0, 0.0
    for ids in queries_of(model, task, "train", n):
        function = final_state(model, ids, layer)
        effect = effect + (function(theta) - function(torch.zeros_like(theta))) / n
        for point, weight in zip(points, weights, strict=True):
            at = (point + 1) / 2 * theta
            matrix = matrix + weight / 2 / n * torch.autograd.functional.jacobian(function, at)
    return matrix, effect.detach()


@pytest.mark.parametrize("family", SEVERAL)
def test_it_is_the_definition(family, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 3)  # chunks that end within a query's nodes
    monkeypatch.setattr(module, "COTANGENTS", 7 * 3)
    model, task = model_of(family), task_of()
    vector = additive(model, layer=1, positions=(-1,))
    found = integrate_jacobian(model, task, vector, nodes=2, n=2)
    theta = vector.edits[0].operation.value.reshape(-1)
    matrix, effect = naive(model, task, 1, theta, nodes=2, n=2)
    assert_close(found.matrix, matrix, **EXACT)
    assert_close(found.effect, effect, **EXACT)
    wanted = float((matrix @ theta - effect).norm() / effect.norm())
    assert found.error == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("family", SEVERAL)
def test_it_maps_the_vector_to_its_mean_effect_once_there_are_enough_nodes(family):
    model, task = model_of(family), task_of()
    errors = [
        integrate_jacobian(model, task, additive(model, layer=1), nodes=nodes, n=4).error
        for nodes in (1, 4, 24)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] > 1e-2
    assert errors[2] < 1e-9


def test_the_full_pass_gives_the_same():
    model, task, vector = model_of(), task_of(), additive(model_of(), layer=1)
    cut = integrate_jacobian(model, task, vector, nodes=2, n=3)
    with full_passes():
        assert_close(integrate_jacobian(model, task, vector, nodes=2, n=3).matrix, cut.matrix)


@pytest.mark.parametrize("family", FAMILIES)
def test_directional_derivatives_are_central_differences_and_the_jacobian_times_the_step(family):
    model, task = model_of(family), task_of()
    prompts = Prompts.of(model, task, n=3)
    subject = Subject(layer=1, theta=noise(model.cfg.d_model, seed=1))
    at = torch.stack([0 * subject.theta, 0.7 * subject.theta])
    along = noise(2, model.cfg.d_model, seed=2)
    found = directional_derivatives(model, prompts, 1, at, along)
    step = 1e-5
    up, down = (
        residuals_under(model, prompts, subject, at + sign * step * along) for sign in (1, -1)
    )
    assert_close(found, (up - down) / (2 * step), atol=1e-7, rtol=1e-6)
    matrix = mean_jacobian(model, prompts, 1, at[1:], torch.ones(1))
    each = directional_derivatives(model, prompts, 1, at[1:], along[1:])[0]
    assert_close(matrix @ along[1], each.mean(dim=0), **EXACT)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_at_zero_it_is_the_jacobian_lens_of_prompts_with_one_valid_position(family):
    """The lens excludes the final position, so each prompt gets one more token behind it."""
    model = tiny(family, torch.float32)
    texts = [f"{query.fields['input']} ->" for query in task_of().split("test", n=3, seed=0)]
    prompts = Prompts.from_texts(model, texts)
    lens = 0.0
    for text in texts:
        longer = f"{text} hot"
        ids = ids_of(model, text)
        assert ids_of(model, longer)[: len(ids)] == ids
        fitted = JacobianLens.fit(
            model,
            [longer],
            corpus="one valid position",
            source_layers=[0],
            max_seq_len=len(ids) + 1,
            skip_first_positions=len(ids) - 1,
            show_progress=False,
        )
        lens = lens + fitted.jacobians[0] / len(texts)
    ours = mean_jacobian(model, prompts, 1, torch.zeros(1, model.cfg.d_model), torch.ones(1))
    assert_close(ours, lens, atol=1e-4, rtol=1e-4)


def test_without_attention_and_mlps_it_is_the_identity():
    model = tiny("llama")
    for block in model.original_model.model.layers:
        block.self_attn.o_proj.weight.data.zero_()
        block.mlp.down_proj.weight.data.zero_()
    found = integrate_jacobian(model, task_of(), additive(model, layer=0), nodes=2, n=3)
    assert_close(found.matrix, torch.eye(model.cfg.d_model, dtype=torch.float64), **EXACT)
    assert_close(found.effect, found.theta, **EXACT)


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_quadrature_is_exact_for_polynomials(nodes):
    points, weights = gauss_legendre(nodes)
    assert ((points > 0) & (points < 1)).all()
    for degree in range(2 * nodes):
        assert float((weights * points**degree).sum()) == pytest.approx(1 / (degree + 1))
    assert float((weights * points ** (2 * nodes)).sum()) != pytest.approx(1 / (2 * nodes + 1))


def test_the_result_says_what_it_is_of():
    model, task = model_of("gpt2"), task_of()
    vector = additive(model, layer=2)
    found = integrate_jacobian(model, task, vector, nodes=2, n=3, split="validation", seed=5)
    (row,) = found.table().to_dict("records")
    assert (row["task"], row["layer"], row["name"], row["split"]) == (
        "invented", 2, "integrated", "validation",
    )  # fmt: skip
    assert (row["nodes"], row["n"], row["seed"], row["value"]) == (2, 3, 5, found.error)
    assert found.centred
    assert not integrate_jacobian(
        model_of(), task, additive(model_of(), layer=2), nodes=1, n=1
    ).centred
    assert not found.matrix.requires_grad


def test_it_is_the_same_every_time_and_of_other_queries_for_another_seed():
    model, task, vector = model_of(), task_of(), additive(model_of(), layer=2)
    first, again, other = (
        integrate_jacobian(model, task, vector, nodes=1, n=3, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first.matrix, again.matrix)
    assert not torch.allclose(first.matrix, other.matrix)


def test_the_model_is_left_alone_and_no_grad_does_not_matter():
    model, task = tiny("llama"), task_of()
    vector = additive(model, layer=1)
    prompts = Prompts.of(model, task, n=2)
    at = noise(1, model.cfg.d_model)
    with left_alone(model):
        found = integrate_jacobian(model, task, vector, nodes=2, n=2)
        with torch.no_grad():
            same = integrate_jacobian(model, task, vector, nodes=2, n=2)
            directional_derivatives(model, prompts, 1, at, at)
    assert torch.equal(found.matrix, same.matrix)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nodes": 0}, "nodes=0 is too few to integrate with; use 1 or more"),
        ({"n": 0}, "n=0 examples"),
        ({"n": 25}, "n=25 examples .* holds 24"),
    ],
)
def test_what_cannot_be_is_one_sentence(options, sentence):
    model = model_of()
    with pytest.raises(InvalidInput, match=sentence):
        integrate_jacobian(model, task_of(), additive(model), **{"nodes": 1, "n": 2, **options})


def test_a_vector_at_another_place_is_refused():
    model = model_of()
    with pytest.raises(InvalidInput, match="one value added to the residual stream"):
        integrate_jacobian(model, task_of(), additive(model, positions=(-2,)))


@pytest.mark.model
def test_on_the_real_model_the_path_adds_up_and_the_start_alone_does_not(model):
    task = mechtv.get_task("present-past")
    prompts = Prompts.of(model, task, n=4)
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(model.cfg.d_model, generator=generator)
    subject = Subject(layer=27, theta=theta * (300 / theta.norm()))
    plain, under = residuals_under(
        model, prompts, subject, torch.stack([0 * subject.theta, subject.theta])
    )
    alphas, weights = gauss_legendre(16)
    at = torch.cat([torch.zeros(1), alphas.float()])[:, None] * subject.theta
    found = directional_derivatives(model, prompts, 27, at, subject.theta.expand_as(at))
    path = torch.einsum("k,kqd->qd", weights.float(), found[1:])
    effect = under - plain
    assert float((path - effect).norm() / effect.norm()) < 0.01
    assert float((found[0] - effect).norm() / effect.norm()) > 0.05
