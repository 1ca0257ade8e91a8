"""Vectors run side by side do what each does by itself."""

import functools

import pytest
import torch
from builders import FAMILIES, N_HEADS, N_LAYERS
from forward.engine import frozen_tiny, reasons
from torch import Tensor
from torch.testing import assert_close
from vectors.naive import additive, by_hand, noise, operation, random_ids, vector_of

import mechtv.forward.variants as module
from mechtv.errors import InvalidInput
from mechtv.forward import full_passes, last_logits, scan
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Replace, Site

EXACT = {"atol": 1e-10, "rtol": 1e-10}
IDS = [random_ids(length, seed) for seed, length in enumerate((21, 8, 15, 20))]

shared = functools.cache(frozen_tiny)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def head(model, layer: int, number: int, positions=(-1,)):
    """A vector that replaces one head's z."""
    value = noise(1, model.cfg.d_head, seed=10 * layer + number)
    site = Site(component="z", layer=layer, heads=(number,), positions=positions)
    return vector_of(Edit(site=site, operation=Replace(value=value)))


def many(model, positions=(-1,)):
    """Vectors of every kind, in no order of layers."""
    vectors = [head(model, layer, h, positions) for h in range(N_HEADS) for layer in (2, 0, 1)]
    for layer in range(N_LAYERS):
        vectors.append(additive(model, layer=layer, positions=positions, seed=layer))
        vectors.append(additive(model, layer=layer, component="mlp_out", seed=layer))
    linear = Edit(site=Site(layer=1), operation=operation("linear", ()))
    vectors.append(vector_of(linear, *vectors[0].edits, *vectors[-1].edits))
    vectors.append(vector_of(*vectors[1].edits, *vectors[0].edits, acts_on="both"))
    return vectors


def one_by_one(model, prompts, vectors) -> Tensor:
    with full_passes():
        return torch.stack([last_logits(model, prompts, vector) for vector in vectors])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [(-1,), (-3, -1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_side_by_side_is_one_by_one(
    family: str, positions: tuple[int, ...], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    vectors = many(model, positions)
    sizes = watched(monkeypatch)
    found = scan(model, prompts, vectors, show=False)
    assert (max(sizes, default=0) > 4) == (family != "native")
    assert_close(found, one_by_one(model, prompts, vectors), **EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [(-1,), (-3, -1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_edits_that_all_share_are_run_once_up_to_each_vectors_own(
    family: str, positions: tuple[int, ...], side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS, padding_side=side)
    theta = additive(model, layer=0, positions=positions, seed=1)
    late = additive(model, layer=1, component="mlp_out", seed=2)  # behind some of the vectors' own
    common = (*theta.edits, *late.edits)
    vectors = [vector_of(*common)]
    vectors += [
        vector_of(*common, *head(model, layer, h, positions).edits)
        for layer in (2, 0, 1)
        for h in range(N_HEADS)
    ]
    begun: list[int] = []
    original = module._side_by_side

    def side_by_side(model, prefix, some, *rest):
        begun.append(prefix.layer)
        return original(model, prefix, some, *rest)

    monkeypatch.setattr(module, "_side_by_side", side_by_side)
    found = scan(model, prompts, vectors, show=False)
    assert sorted(set(begun)) == ([] if family == "native" else [0, 1, 2])
    assert_close(found, one_by_one(model, prompts, vectors), **EXACT)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many vectors run at once, each time that some do."""
    sizes: list[int] = []
    original = module._side_by_side

    def side_by_side(model, prefix, some, *rest):
        sizes.append(len(some))
        return original(model, prefix, some, *rest)

    monkeypatch.setattr(module, "_side_by_side", side_by_side)
    return sizes


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom", "neox", "native"])
def test_whole_rows_stand_side_by_side_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared(family)
    prompts = Prompts.from_ids(model, IDS)
    vectors = [additive(model, layer=2, positions="all", seed=seed) for seed in range(5)]
    sizes = watched(monkeypatch)
    found = scan(model, prompts, vectors, show=False)
    assert sizes == ([1] * 5 if family == "native" else [5])
    assert_close(found, one_by_one(model, prompts, vectors), **EXACT)


def test_blocks_that_mix_neighbours_run_one_vector_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = frozen_tiny("llama")
    layer = model.original_model.model.layers[1]
    original = layer.mlp.forward

    def mixing(hidden: Tensor) -> Tensor:
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return original(hidden) + (0.5 * before if mixing.on else 0)

    mixing.on = True
    vars(layer.mlp)["forward"] = mixing
    prompts = Prompts.from_ids(model, IDS)
    vectors = [additive(model, layer=2, seed=1), additive(model, layer=1, positions="all", seed=2)]
    vectors += [additive(model, layer=1, positions="all", seed=seed) for seed in range(3)]
    sizes = watched(monkeypatch)
    found = scan(model, prompts, vectors, show=False)
    assert set(sizes) <= {1}
    assert_close(found, one_by_one(model, prompts, vectors), **EXACT)
    assert any(
        "one by one" in line or "positions are recomputed" in line for line in reasons(caplog)
    )


def test_a_heads_edit_is_what_its_formula_says() -> None:
    model = shared("qwen3")
    for layer, number in ((0, 3), (2, 1)):
        vector = head(model, layer, number)
        value = vector.edits[0].operation.value

        def replaced(z: Tensor, hook: object) -> Tensor:
            z = z.clone()
            z[0, -1, number] = value[0]  # noqa: B023
            return z

        with model.hooks([(f"blocks.{layer}.attn.hook_z", replaced)]):
            wanted = by_hand(model, IDS[0])[-1]
        found = scan(model, Prompts.from_ids(model, IDS), [vector], show=False)
        assert_close(found[0, 0], wanted, **EXACT)


def test_all_heads_one_by_one_are_all_heads_at_once() -> None:
    model, prompts = shared("llama"), Prompts.from_ids(shared("llama"), IDS)
    value = noise(2, N_HEADS, model.cfg.d_head)
    site = Site(component="z", layer=1, positions=(-2, -1))
    whole = vector_of(Edit(site=site, operation=Add(value=value)))
    parts = [
        Edit(
            site=Site(component="z", layer=1, positions=(-2, -1), heads=heads),
            operation=Add(value=value[:, list(heads)]),
        )
        for heads in ((2,), (0, 3), (1,))
    ]
    found = scan(model, prompts, [whole, vector_of(*parts)], show=False)
    assert_close(found[0], found[1], **EXACT)


def test_vectors_do_not_see_each_other() -> None:
    model, prompts = shared("llama"), Prompts.from_ids(shared("llama"), IDS)
    loud = additive(model, layer=1, positions=(-3, -1), scale=1e3)
    quiet = additive(model, layer=1, positions=(-3, -1), scale=0.0)
    together = scan(model, prompts, [quiet, loud, quiet], show=False)
    assert_close(together[0], together[2], **EXACT)
    assert_close(together[0], last_logits(model, prompts), **EXACT)


@pytest.mark.parametrize("n_bytes", [1, 10**6, 10**9])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_neither_the_budget_nor_the_batches_matter(
    n_bytes: int, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared("llama")
    prompts = Prompts.from_ids(model, IDS)
    vectors = many(model)
    sizes = watched(monkeypatch)
    found = scan(model, prompts, vectors, batch_size=batch_size, n_bytes=n_bytes, show=False)
    assert_close(found, one_by_one(model, prompts, vectors), **EXACT)
    assert (max(sizes) == 1) == (n_bytes == 1)
    assert max(sizes) <= module.MOST_COLUMNS


def test_what_is_measured_comes_back_in_the_order_of_vectors_and_prompts() -> None:
    model = shared("llama")
    prompts = Prompts.from_ids(model, IDS, answers=((3,), (4,), (5,), (6,)))
    vectors = many(model)

    def measure(logits: Tensor, batch: Prompts) -> Tensor:
        answer = batch.first_answer_tokens[:, None]
        return torch.cat([logits.take_along_dim(answer, 1), logits.amax(1, keepdim=True)], dim=1)

    found = scan(model, prompts, vectors, measure, batch_size=2, show=False)
    logits = one_by_one(model, prompts, vectors)
    assert found.shape == (len(vectors), 4, 2)
    assert_close(found[:, :, 0], logits[:, torch.arange(4), torch.arange(3, 7)], **EXACT)
    assert_close(found[:, :, 1], logits.amax(2), **EXACT)


def test_some_tokens_are_those_of_all() -> None:
    model, prompts = shared("gemma2"), Prompts.from_ids(shared("gemma2"), IDS)
    vectors, tokens = many(model), torch.tensor([300, 7])
    found = scan(model, prompts, vectors, tokens=tokens, show=False)
    assert_close(found, one_by_one(model, prompts, vectors)[:, :, tokens], **EXACT)


def test_gradients_flow_to_every_vector() -> None:
    model, prompts = shared("llama"), Prompts.from_ids(shared("llama"), IDS)
    with torch.enable_grad():
        vectors = [additive(model, layer=1, seed=seed) for seed in range(3)]
        values = [vector.edits[0].operation.value.requires_grad_() for vector in vectors]
        found = scan(model, prompts, vectors, show=False)
        ours = torch.autograd.grad(found.square().sum(), values)
        with full_passes():
            logits = torch.stack([last_logits(model, prompts, vector) for vector in vectors])
        assert_close(ours, torch.autograd.grad(logits.square().sum(), values), **EXACT)


def test_a_users_hook_is_obeyed_by_every_vector() -> None:
    model, prompts = frozen_tiny("llama"), Prompts.from_ids(shared("llama"), IDS)
    vectors = [additive(model, layer=2, seed=seed) for seed in range(3)]
    with model.hooks([("blocks.0.hook_mlp_out", lambda x, hook: 2 * x)]):
        found = scan(model, prompts, vectors, show=False)
        assert torch.equal(found, one_by_one(model, prompts, vectors))


def test_an_error_while_measuring_leaves_nothing_behind() -> None:
    model, prompts = frozen_tiny("llama"), Prompts.from_ids(shared("llama"), IDS)

    def fail(logits: Tensor, batch: Prompts) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scan(model, prompts, many(model), fail, show=False)
    assert not any(p.fwd_hooks for p in model.hook_dict.values())
    found = scan(model, prompts, many(model), show=False)
    assert_close(found, one_by_one(model, prompts, many(model)), **EXACT)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_bytes": 0}, "n_bytes=0 is too small; use 1 or more"),
        ({"batch_size": 0}, "batch_size=0 is too small; use 1 or more"),
    ],
)
def test_a_budget_of_nothing_is_one_sentence(options: dict[str, int], sentence: str) -> None:
    model, prompts = shared("llama"), Prompts.from_ids(shared("llama"), IDS)
    with pytest.raises(InvalidInput, match=sentence):
        scan(model, prompts, [additive(model)], **options)


def test_no_vectors_are_one_sentence() -> None:
    model, prompts = shared("llama"), Prompts.from_ids(shared("llama"), IDS)
    with pytest.raises(InvalidInput, match="There are no vectors to scan; give at least one"):
        scan(model, prompts, [])


def test_a_head_that_does_not_exist_names_those_that_do() -> None:
    model, prompts = shared("llama"), Prompts.from_ids(shared("llama"), IDS)
    site = Site(component="z", layer=1, heads=(4,))
    beyond = vector_of(Edit(site=site, operation=Replace(value=noise(1, 16))))
    with pytest.raises(InvalidInput, match="Head 4 does not exist: this model has heads 0 to 3"):
        scan(model, prompts, [beyond])
