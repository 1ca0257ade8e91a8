"""Injections leave a model as they found it, and live beside the hooks of its user."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformer_lens.model_bridge import TransformerBridge
from vectors.naive import TEXTS, additive, by_hand, ids_of, noise, operation, tiny_shared, vector_of

from mechtv.errors import InvalidInput
from mechtv.forward import capture, last_logits, run
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Edit, Site, TaskVector
from mechtv.vectors.inject import _WATCHED

EXACT = {"atol": 1e-10, "rtol": 1e-10}
TEXT = TEXTS[0]
PRE = "blocks.1.hook_resid_pre"


class Stop(Exception):
    """An error of the user's own."""


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(params=[torch.float64, torch.float32], ids=["own forward", "forward of the class"])
def model(request: pytest.FixtureRequest) -> TransformerBridge:
    """The float64 models of the tests have a `forward` of their own, the float32 ones do not."""
    bridge = tiny_shared("llama", request.param)
    assert ("forward" in bridge.__dict__) == (request.param == torch.float64)
    bridge(list(TEXTS), padding_side="left")  # the bridge itself leaves traces of its first calls
    bridge.generate(TEXT, max_new_tokens=1, verbose=False)
    bridge.run_with_cache(TEXT)
    return bridge


def traces(model: TransformerBridge) -> dict[str, Any]:
    """Everything that an injection could leave behind, with the identity of what is there."""
    hooks = {
        name: ([id(h) for h in point.fwd_hooks], [id(h) for h in point.bwd_hooks])
        for name, point in model.hook_dict.items()
    }
    torch_hooks = {
        name: [
            [id(hook) for hook in getattr(module, kind).values()]
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        ]
        + [list(module._forward_hooks_with_kwargs), list(module._forward_pre_hooks_with_kwargs)]
        for root in (model, model.original_model)
        for name, module in root.named_modules()
    }
    own = {name: id(value) for name, value in model.__dict__.items()}
    return {
        "hooks": hooks,
        "torch hooks": torch_hooks,
        "own": own,
        "original": sorted(model.original_model.__dict__),
        "names": list(model.__dict__),
        "level": model.context_level,
        "listed": repr(model.list_hooks()),
        "watched": model in _WATCHED,
    }


def everywhere(model: TransformerBridge, acts_on: str = "both") -> TaskVector:
    components = ("resid_pre", "resid_post", "attn_out", "mlp_out", "z")
    edits = [
        edit
        for layer in range(3)
        for component in components
        for edit in additive(model, layer=layer, component=component).edits
    ]
    return vector_of(*edits, acts_on=acts_on)


# --- nothing remains ---


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nothing_remains_after_the_block_however_it_ends(
    model: TransformerBridge, error: type[BaseException] | None
) -> None:
    before, plain = traces(model), model(TEXT)
    vector = everywhere(model)
    with nullcontext() if error is None else pytest.raises(error), vector.applied(model):
        assert traces(model) != before
        assert not torch.equal(model(TEXT), plain)
        model.generate(TEXT, max_new_tokens=2, do_sample=False, verbose=False)
        if error is not None:
            raise error
    assert traces(model) == before
    assert torch.equal(model(TEXT), plain)


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_nothing_remains_after_an_error_within_a_pass(
    model: TransformerBridge, error: type[BaseException]
) -> None:
    before, plain = traces(model), model(TEXT)
    prompts = Prompts.from_texts(model, [TEXT])
    calls: list[Callable[[], Any]] = [
        lambda: model(TEXT),
        lambda: model.generate(TEXT, verbose=False),
        lambda: list(model.generate_stream(TEXT, verbose=False)),
        lambda: run(model, prompts, everywhere(model)),
        lambda: capture(model, prompts, [Site(layer=2)]),
    ]

    def interrupt(activation: Tensor, hook: object) -> None:
        raise error

    for call in calls:
        with (
            pytest.raises(error),
            everywhere(model).applied(model),
            model.hooks([("blocks.2.hook_resid_pre", interrupt)]),
        ):
            call()
        assert traces(model) == before
    assert torch.equal(model(TEXT), plain)


def test_nothing_remains_of_a_vector_that_does_not_fit(model: TransformerBridge) -> None:
    before = traces(model)
    fits = additive(model).edits
    beyond = Edit(site=Site(layer=3), operation=Add(value=noise(32)))
    for edits in ((*fits, beyond), (beyond, *fits)):
        with pytest.raises(InvalidInput, match="layer=3"), vector_of(*edits).applied(model):
            pass
        assert traces(model) == before
    prompts = Prompts.from_texts(model, [TEXT])
    with pytest.raises(InvalidInput, match="layer=3"):
        run(model, prompts, vector_of(beyond))
    with pytest.raises(InvalidInput, match="layer=3"):
        capture(model, prompts, [Site(layer=0), beyond.site])
    with pytest.raises(InvalidInput, match="Position -50"):
        run(model, prompts, additive(model, positions=(-50,)))
    assert traces(model) == before


def test_nothing_remains_of_run_and_capture(model: TransformerBridge) -> None:
    before = traces(model)
    prompts = Prompts.from_texts(model, list(TEXTS))
    run(model, prompts, everywhere(model))
    capture(model, prompts, [Site(layer=1), Site(layer=2, component="z")], everywhere(model))
    assert traces(model) == before


def test_nothing_remains_of_a_stream_that_outlives_the_block(model: TransformerBridge) -> None:
    before = traces(model)
    with additive(model).applied(model):
        stream = model.generate_stream(
            TEXT, max_tokens_per_yield=1, verbose=False, do_sample=False, stop_at_eos=False
        )
        next(stream)
    assert len(list(stream)) >= 9, "the stream goes on, without the vector"
    assert traces(model) == before


def test_a_block_can_be_entered_again(model: TransformerBridge) -> None:
    before, vector = traces(model), additive(model)
    outputs = []
    for _ in range(3):
        with vector.applied(model):
            outputs.append(model(TEXT))
        assert traces(model) == before
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_the_values_of_a_vector_are_not_changed_by_its_use() -> None:
    model = tiny_shared("llama")
    edits = [
        Edit(site=Site(layer=1, positions="all"), operation=operation(name, (32,)))
        for name in ("add", "replace", "affine", "linear")
    ]
    vector = vector_of(*edits)
    before = [x.clone() for edit in edits for x in edit.operation.tensors().values()]
    last_logits(model, Prompts.from_texts(model, [TEXT]), vector)
    after = [x for edit in edits for x in edit.operation.tensors().values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


# --- beside the user's hooks ---


@pytest.mark.parametrize("permanent", [False, True])
def test_a_users_own_hook_fires_in_the_block_and_after_it(
    model: TransformerBridge, permanent: bool
) -> None:
    seen: list[Tensor] = []

    def look(activation: Tensor, hook: object) -> None:
        seen.append(activation)

    before = traces(model)
    vector = additive(model)
    model.add_hook(PRE, look, is_permanent=permanent)
    with_hook = traces(model)
    model(TEXT)
    with vector.applied(model):
        model(TEXT)
    assert traces(model) == with_hook
    model(TEXT)
    assert len(seen) == 3
    assert torch.equal(seen[0], seen[1]), "it was there first, so it sees what was there first"
    assert torch.equal(seen[0], seen[2])
    model.reset_hooks(including_permanent=True)
    assert traces(model)["hooks"] == before["hooks"]


def test_a_hook_added_in_the_block_sees_the_edit_and_stays_after_it(
    model: TransformerBridge,
) -> None:
    seen: list[Tensor] = []

    def look(activation: Tensor, hook: object) -> None:
        seen.append(activation)

    vector = additive(model)
    with vector.applied(model):
        model.add_hook(PRE, look)
        model(TEXT)
    model(TEXT)
    model.reset_hooks()
    assert len(seen) == 2
    value = vector.value()[0].to(seen[0].dtype)
    assert_close((seen[0] - seen[1])[0, -1], value, **close_to(model))


def test_a_hook_that_changes_the_activation_adds_to_the_edit(model: TransformerBridge) -> None:
    vector = additive(model).to(model.cfg.dtype)
    more = noise(32, seed=5).to(model.cfg.dtype)

    def add(activation: Tensor, hook: object) -> Tensor:
        activation = activation.clone()
        activation[:, -1] += more
        return activation

    both = vector_of(*vector.edits, Edit(site=Site(layer=1), operation=Add(value=more)))
    wanted = last_logits(model, Prompts.from_texts(model, [TEXT]), both)
    with vector.applied(model):
        inside = model.run_with_hooks(TEXT, fwd_hooks=[(PRE, add)])[:, -1]
        with model.hooks([(PRE, add)]):
            within = model(TEXT)[:, -1]
    with model.hooks([(PRE, add)]), vector.applied(model):
        around = model(TEXT)[:, -1]
    for logits in (inside, within, around):
        assert_close(logits, wanted, **close_to(model))


def close_to(model: TransformerBridge) -> dict[str, float]:
    return EXACT if model.cfg.dtype == torch.float64 else {"atol": 1e-4, "rtol": 1e-4}


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.reset_hooks(),
        lambda model: model.reset_hooks(clear_contexts=True, direction="both"),
        lambda model: model.run_with_hooks(TEXT, fwd_hooks=[(PRE, lambda x, hook: x)]),
        lambda model: model.run_with_hooks(
            TEXT, fwd_hooks=[(lambda name: "hook_resid" in name, lambda x, hook: None)]
        ),
        lambda model: model.run_with_cache(TEXT),
        lambda model: model.generate(TEXT, max_new_tokens=1, verbose=False),
    ],
    ids=[
        "reset",
        "reset with contexts",
        "run_with_hooks",
        "all hooks",
        "run_with_cache",
        "generate",
    ],
)
def test_what_a_user_does_in_the_block_does_not_remove_the_vector(
    model: TransformerBridge, call: Callable[[TransformerBridge], Any]
) -> None:
    before = traces(model)
    with additive(model).applied(model):
        wanted = model(TEXT)
        call(model)
        assert torch.equal(model(TEXT), wanted)
    assert traces(model) == before


def test_even_a_reset_of_permanent_hooks_ends_well(model: TransformerBridge) -> None:
    before, plain = traces(model), model(TEXT)
    with additive(model).applied(model):
        model.reset_hooks(including_permanent=True)
        assert torch.equal(model(TEXT), plain)
    assert traces(model) == before


@pytest.mark.parametrize("error", [Stop("mine"), KeyboardInterrupt(), ValueError("mine too")])
def test_an_error_of_the_users_hook_arrives_unchanged(
    model: TransformerBridge, error: BaseException
) -> None:
    def fail(activation: Tensor, hook: object) -> None:
        raise error

    prompts = Prompts.from_texts(model, [TEXT])
    calls: list[Callable[[], Any]] = [
        lambda: model(TEXT),
        lambda: model.generate(TEXT, verbose=False),
        lambda: next(model.generate_stream(TEXT, verbose=False)),
        lambda: run(model, prompts, additive(model, component="z")),
        lambda: capture(model, prompts, [Site(layer=2)]),
    ]
    for call in calls:
        with (
            pytest.raises(type(error)) as caught,
            additive(model).applied(model),
            model.hooks([(PRE, fail)]),
        ):
            call()
        assert caught.value is error
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None


# --- nested ---


def test_nested_injections_add_up_and_end_in_order(model: TransformerBridge) -> None:
    before = traces(model)
    outer = additive(model, layer=0, positions=(-2, -1), seed=1).to(model.cfg.dtype)
    inner = additive(model, layer=0, positions=(-2, -1), seed=2).to(model.cfg.dtype)
    ids = ids_of(model, TEXT)
    alone = {
        "none": by_hand(model, ids),
        "outer": by_hand(model, ids, outer),
        "both": by_hand(model, ids, vector_of(*outer.edits, *inner.edits)),
    }
    with outer.applied(model):
        assert_close(model(TEXT)[0], alone["outer"], **close_to(model))
        with inner.applied(model):
            assert_close(model(TEXT)[0], alone["both"], **close_to(model))
        assert_close(model(TEXT)[0], alone["outer"], **close_to(model))
        with pytest.raises(Stop), inner.applied(model):
            raise Stop
        assert_close(model(TEXT)[0], alone["outer"], **close_to(model))
        assert_close(
            model.generate(TEXT, max_new_tokens=1, do_sample=False, output_logits=True,
                           verbose=False).logits[0][0],
            alone["outer"][-1], **close_to(model),
        )  # fmt: skip
    assert traces(model) == before
    assert_close(model(TEXT)[0], alone["none"], **close_to(model))


def test_the_outer_edit_acts_before_the_inner_one() -> None:
    model = tiny_shared("llama")
    site = Site(layer=1)
    outer = vector_of(Edit(site=site, operation=operation("add", (32,), seed=1)))
    inner = vector_of(Edit(site=site, operation=operation("replace", (32,), seed=2)))
    ids = ids_of(model, TEXT)
    wanted = by_hand(model, ids, inner)
    turned = by_hand(model, ids, vector_of(*inner.edits, *outer.edits))
    with outer.applied(model), inner.applied(model):
        assert_close(model(TEXT)[0], wanted, **EXACT)
    with inner.applied(model), outer.applied(model):
        assert_close(model(TEXT)[0], turned, **EXACT)


def test_blocks_that_end_in_the_wrong_order_still_leave_nothing(model: TransformerBridge) -> None:
    before = traces(model)
    first, second = additive(model, seed=1), additive(model, seed=2)
    wanted = by_hand(model, ids_of(model, TEXT), second.to(model.cfg.dtype))
    one, other = first.applied(model), second.applied(model)
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert_close(model(TEXT)[0], wanted, **close_to(model))
    other.__exit__(None, None, None)
    assert traces(model) == before


def test_one_vector_nested_in_itself_acts_twice() -> None:
    model = tiny_shared("llama")
    vector = additive(model)
    wanted = by_hand(model, ids_of(model, TEXT), vector.scaled(2.0))
    with vector.applied(model), vector.applied(model):
        assert_close(model(TEXT)[0], wanted, **EXACT)
