"""What is a vector under study, what is not, and random vectors like it."""

import pytest
import torch
from builders import D_MODEL, N_LAYERS
from torch.testing import assert_close
from vectors.naive import additive, by_hand, noise, random_ids, tiny_shared, vector_of

from mechtv.analysis.subject import Subject, random_like
from mechtv.errors import InvalidInput
from mechtv.forward import run
from mechtv.seeds import torch_rng
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Linear, Replace, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
IDS = [random_ids(length, length) for length in (5, 8)]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_behind_one_block_is_before_the_next(family) -> None:
    model = tiny_shared(family)
    prompts = Prompts.from_ids(model, IDS)
    post = Subject.of(model, additive(model, layer=0, component="resid_post", seed=3))
    pre = Subject.of(model, additive(model, layer=1, seed=3))
    assert post.layer == pre.layer == 1
    assert torch.equal(post.theta, pre.theta)
    given = additive(model, layer=0, component="resid_post", seed=3)
    with torch.no_grad():
        logits = run(model, prompts, post.vector())[:, 0]
        for row, ids in enumerate(IDS):
            assert_close(logits[row], by_hand(model, ids, given)[-1], **EXACT)


@pytest.mark.parametrize("slots", [(), (1,)])
def test_theta_is_detached_and_flat_and_another_takes_its_place(slots) -> None:
    model = tiny_shared("llama")
    value = noise(*slots, D_MODEL).requires_grad_()
    subject = Subject.of(model, vector_of(Edit(site=Site(layer=2), operation=Add(value=value))))
    assert subject.theta.shape == (D_MODEL,)
    assert not subject.theta.requires_grad
    (edit,) = subject.vector(2 * subject.theta).edits
    assert edit.site == Site(layer=2)
    assert_close(edit.operation.value, 2 * value.detach().reshape(-1))
    assert torch.equal(subject.vector().value(), value.detach().reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_the_norms_cannot_see_is_no_subject(dtype) -> None:
    def subject(family, value):
        edit = Edit(site=Site(layer=1), operation=Add(value=value.to(dtype)))
        return Subject.of(tiny_shared(family), vector_of(edit))

    constant = torch.full((D_MODEL,), 0.3)
    for family, value in (
        ("llama", torch.zeros(D_MODEL)), ("gpt2", torch.zeros(D_MODEL)), ("gpt2", constant),
        ("llama", torch.full((D_MODEL,), torch.nan)),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match="neither zero nor constant nor NaN"):
            subject(family, value)
    assert torch.equal(subject("llama", constant).theta, constant.to(dtype))
    assert subject("gpt2", noise(D_MODEL)).layer == 1


def test_a_vector_that_acts_on_new_tokens_too_is_the_same_at_the_prompt() -> None:
    model = tiny_shared("llama")
    both = Subject.of(model, additive(model, layer=1, acts_on="both"))
    assert both.vector().acts_on == "prompt"


REFUSED = {
    "another operation": (lambda m: replaced(m), r"resid_pre\[1\] at -1 \(Replace\)"),
    "a map": (lambda m: mapped(m), r"resid_pre\[1\] at -1 \(Linear\)"),
    "another component": (lambda m: additive(m, component="mlp_out"), r"mlp_out\[1\] at -1"),
    "heads": (lambda m: additive(m, component="z"), r"z\[1\] at -1 \(Add\)"),
    "several positions": (lambda m: additive(m, positions=(-2, -1)), r"at -2,-1 \(Add\)"),
    "another position": (lambda m: additive(m, positions=(-2,)), r"at -2 \(Add\)"),
    "every position": (lambda m: additive(m, positions="all"), r"at all \(Add\)"),
    "new tokens": (lambda m: additive(m, acts_on="new"), "acting on 'new'"),
    "several edits": (
        lambda m: additive(m, layer=0) + additive(m, layer=2),
        r"resid_pre\[0\] at -1 \(Add\), resid_pre\[2\] at -1 \(Add\)",
    ),
}


def replaced(model):
    return vector_of(Edit(site=Site(layer=1), operation=Replace(value=noise(D_MODEL))))


def mapped(model):
    return vector_of(Edit(site=Site(layer=1), operation=Linear(matrix=noise(D_MODEL, D_MODEL))))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_another_form_is_named(name) -> None:
    model = tiny_shared("llama")
    make, named = REFUSED[name]
    with pytest.raises(InvalidInput, match=f"{named}.*Give a vector with a single Add at resid"):
        Subject.of(model, make(model))


def test_a_vector_behind_the_last_block_has_nothing_left_to_explain() -> None:
    model = tiny_shared("llama")
    last = additive(model, layer=N_LAYERS - 1, component="resid_post")
    with pytest.raises(InvalidInput, match=r"behind the last block \(layer 2\)"):
        Subject.of(model, last)


@pytest.mark.usefixtures("unchecked")
def test_a_vector_for_another_model_is_refused() -> None:
    model = tiny_shared("llama")
    narrow = vector_of(Edit(site=Site(layer=1), operation=Add(value=noise(5))))
    with pytest.raises(InvalidInput, match="5"):
        Subject.of(model, narrow)
    with pytest.raises(InvalidInput, match="layer=9 does not exist"):
        Subject.of(model, additive(model, layer=9))


def test_layer_norm_models_see_the_centred_vector() -> None:
    x = noise(4, D_MODEL) + 5
    for family, centred in (("llama", False), ("gemma2", False), ("gpt2", True), ("native", True)):
        model = tiny_shared(family)
        subject = Subject.of(model, additive(model))
        seen = subject.as_seen(model, x)
        assert subject.is_centred(model) == centred
        assert bool((seen.mean(dim=-1).abs() < 1e-12).all()) == centred
        assert_close(model.ln_final(seen), model.ln_final(x), **EXACT) if centred else None
        assert centred or torch.equal(seen, x)


@pytest.mark.parametrize("cosine", [None, -1.0, -0.3, 0.0, 0.5, 1.0])
def test_random_vectors_have_thetas_norm_and_the_cosine_asked_for(cosine) -> None:
    theta = noise(D_MODEL, seed=1)
    drawn = random_like(theta, 500, torch_rng(0, "test"), cosine)
    assert_close(drawn.norm(dim=1), theta.norm().expand(500), **EXACT)
    cosines = drawn @ theta / theta.norm() ** 2
    if cosine is None:
        assert abs(float(cosines.mean())) < 3 / (500 * D_MODEL) ** 0.5
        assert float(cosines.std()) == pytest.approx(D_MODEL**-0.5, rel=0.15)
        return
    assert_close(cosines, torch.full_like(cosines, cosine), **EXACT)
    across = drawn - cosines[:, None] * theta
    if abs(cosine) < 1:  # otherwise random: they share no other direction
        assert float(across.mean(dim=0).norm() / across.norm(dim=1).mean()) < 0.1


def test_the_generator_alone_decides_what_is_drawn_in_thetas_type() -> None:
    theta = noise(D_MODEL).float()
    first, again = (random_like(theta, 3, torch_rng(4, "test"), 0.5) for _ in range(2))
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert not torch.equal(first, random_like(theta, 3, torch_rng(5, "test"), 0.5))


def test_a_cosine_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"cosine=1.5 is none; use -1 to 1"):
        random_like(noise(D_MODEL), 1, torch_rng(0, "test"), 1.5)
