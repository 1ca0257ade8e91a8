"""Put edits into a model for the length of a `with` block, and leave nothing behind.

The edits are TransformerLens hooks at the sites' hook points. Which columns they touch is decided
anew for every pass: from the layout that `forward.run` declares, or, for any other call, from the
call itself (its mask, its cache, and whether it is a step of a generation).
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.utilities import get_attention_mask

from mechtv.errors import InvalidInput
from mechtv.vectors.edits import Edit
from mechtv.vectors.layout import ActsOn, Layout, Selection
from mechtv.vectors.site import Site


@contextmanager
def inject(
    model: TransformerBridge, edits: Sequence[Edit], *, acts_on: ActsOn = "prompt"
) -> Iterator[None]:
    """Apply `edits` to every pass of `model` inside the block.

    Raises:
        InvalidInput: if an edit names a layer or a width that the model does not have.
    """
    for edit in edits:
        check_fits(model, edit)
    with ExitStack() as stack:
        calls = stack.enter_context(_watched(model))
        for edit in edits:
            hook = partial(_edit, edit=edit, acts_on=acts_on, calls=calls)
            stack.enter_context(hooked(model, edit.site, hook))
        yield


@contextmanager
def declared_layout(model: TransformerBridge, layout: Layout) -> Iterator[None]:
    """Tell all edits injected into `model` which columns the passes inside the block have."""
    with _watched(model) as calls:
        outer, calls.declared = calls.declared, layout
        try:
            yield
        finally:
            calls.declared = outer


@contextmanager
def hooked(
    model: TransformerBridge, site: Site, hook: Callable[..., Tensor | None]
) -> Iterator[None]:
    """One TransformerLens hook at a site. It survives `model.reset_hooks()` inside the block."""
    with hooked_at(hook_point(model, site), hook):
        yield


@contextmanager
def hooked_at(point: HookPoint, hook: Callable[..., Tensor | None]) -> Iterator[None]:
    """The same at any hook point."""
    handle = point.add_hook(hook, is_permanent=True)
    try:
        yield
    finally:
        handle.hook.remove()
        point.fwd_hooks[:] = [other for other in point.fwd_hooks if other is not handle]


def hook_point(model: TransformerBridge, site: Site) -> HookPoint:
    """The hook point of a site.

    Raises:
        InvalidInput: if the model has no such layer or head, or its blocks lack the component.
    """
    if site.layer >= model.cfg.n_layers:
        raise InvalidInput(
            f"layer={site.layer} does not exist: this model has layers 0 to "
            f"{model.cfg.n_layers - 1}."
        )
    if site.heads is not None and max(site.heads) >= model.cfg.n_heads:
        raise InvalidInput(
            f"Head {max(site.heads)} does not exist: this model has heads 0 to "
            f"{model.cfg.n_heads - 1}."
        )
    point = model.get_hook_point(site.hook_name)
    if point is None:
        raise InvalidInput(
            f"This model has no hook point {site.hook_name!r}; choose another component than "
            f"{site.component!r}."
        )
    return point


def check_fits(model: TransformerBridge, edit: Edit) -> None:
    """Raise `InvalidInput` unless the model has the edit's layer, width and number of heads."""
    hook_point(model, edit.site)
    at_heads = edit.site.component == "z"
    width = model.cfg.d_head if at_heads else model.cfg.d_model
    if edit.width != width:
        raise InvalidInput(
            f"This vector has width {edit.width} but the model's "
            f"{'d_head' if at_heads else 'd_model'} is {width}; a vector fits only models of its "
            "own width."
        )
    if not at_heads:
        return
    heads = edit.operation.tensors()["value"].shape[-2]
    if edit.site.heads is None and heads != model.cfg.n_heads:
        raise InvalidInput(
            f"This vector has {heads} heads but the model has {model.cfg.n_heads}; give one value "
            "for each query head."
        )


def _edit(
    activation: Float[Tensor, "batch pos *feature"],
    hook: HookPoint,
    *,
    edit: Edit,
    acts_on: ActsOn,
    calls: "_Calls",
) -> Float[Tensor, "batch pos *feature"] | None:
    return edited(activation, edit, calls.layout(activation).select(edit.site, acts_on))


def edited(
    activation: Float[Tensor, "batch pos *feature"], edit: Edit, chosen: Selection
) -> Float[Tensor, "batch pos *feature"] | None:
    """The activation with the edit made at the chosen places, or None where there are none."""
    row, column, slot = (x.to(activation.device) for x in (chosen.row, chosen.column, chosen.slot))
    if not len(row):
        return None
    flat = rearrange(activation, "b p ... -> (b p) ...")
    there = row * activation.shape[1] + column  # one index: its gradient is far cheaper than two's
    before = flat.index_select(0, there)
    if edit.site.heads is None:
        after = edit.operation(before, slot).to(activation.dtype)
    else:
        heads = torch.tensor(edit.site.heads, device=activation.device)
        some = edit.operation(before.index_select(1, heads), slot).to(activation.dtype)
        after = before.index_copy(1, heads, some)
    return flat.index_copy(0, there, after).reshape(activation.shape)


@contextmanager
def inject_side_by_side(
    model: TransformerBridge, variants: Sequence[tuple[Sequence[Edit], ActsOn]], layout: Layout
) -> Iterator[None]:
    """Apply each variant's edits to its own columns: activations hold the variants in a row.

    Args:
        variants: what each variant edits, and on which tokens it acts.
        layout: the columns of one variant.

    Raises:
        InvalidInput: if an edit names a layer, a head or a width that the model does not have.
    """
    by_point: dict[str, list[tuple[int, Edit, Selection]]] = {}
    known: dict[tuple[object, ...], Selection] = {}
    for number, (edits, acts_on) in enumerate(variants):
        for edit in edits:
            check_fits(model, edit)
            places = (edit.site.positions, acts_on)
            if places not in known:
                known[places] = layout.select(edit.site, acts_on)
            by_point.setdefault(edit.site.hook_name, []).append((number, edit, known[places]))
    with ExitStack() as stack:
        for made in by_point.values():
            hook = partial(_edit_side_by_side, made=made, width=layout.prompt.shape[1])
            stack.enter_context(hooked(model, made[0][1].site, hook))
        yield


def _edit_side_by_side(
    activation: Float[Tensor, "batch pos *feature"],
    hook: HookPoint,
    *,
    made: Sequence[tuple[int, Edit, Selection]],
    width: int,
) -> Float[Tensor, "batch pos *feature"]:
    parts = list(activation.split(width, dim=1))
    for number, edit, chosen in made:
        after = edited(parts[number], edit, chosen)
        parts[number] = parts[number] if after is None else after
    return torch.cat(parts, dim=1)


@dataclass
class _Generation:
    """One generation: how many columns its prompt has, which its first step shows."""

    prompt_columns: int | None = None


class _Calls:
    """What is known of the pass that is running: set by the wrappers that `_watched` installs."""

    def __init__(self, model: TransformerBridge) -> None:
        self._model = weakref.ref(model)
        self.users = 0
        self.undo = ExitStack()
        self.declared: Layout | None = None
        self._running: list[Layout | None] = []
        self._generation: _Generation | None = None
        self._text_options: dict[str, Any] | None = None

    def layout(self, activation: Tensor) -> Layout:
        """The layout of the pass that `activation` belongs to."""
        layout = self.declared or (self._running[-1] if self._running else None)
        if layout is None or layout.prompt.shape != activation.shape[:2]:
            raise InvalidInput(
                "This call hands the model something other than tokens (batch x position), so the "
                "last real token is unknown; pass token ids, text, or embeddings of that form."
            )
        return layout

    @contextmanager
    def generation(self, running: "_Generation") -> Iterator[None]:
        """During steps of one generation, of which the first holds the prompt."""
        outer, self._generation = self._generation, running
        try:
            yield
        finally:
            self._generation = outer

    @contextmanager
    def text(self, given: object, options: dict[str, Any]) -> Iterator[None]:
        """During a call with text, whose padding only the tokenizer knows."""
        outer = self._text_options
        self._text_options = options if isinstance(given, (str, list)) else None
        try:
            yield
        finally:
            self._text_options = outer

    def before_pass(self, _module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the layout off the arguments with which the bridge calls the wrapped model."""
        self._running.append(None)  # first, since `after_pass` follows whatever happens here
        if self.declared is None:
            self._running[-1] = self._layout_of(args, kwargs)

    def after_pass(self, *_: object) -> None:
        """Return to the pass around this one: a user's hook may run the model inside a pass."""
        self._running.pop()

    def _layout_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | None:
        tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            return None
        cache = kwargs.get("past_key_values")
        start = int(cache.get_seq_length()) if cache is not None else 0
        total = start + tokens.shape[1]
        real = self._real_tokens(tokens, kwargs.get("attention_mask"), start)
        if self._generation is None:
            boundary = start or total
        else:
            boundary = self._generation.prompt_columns = self._generation.prompt_columns or total
        is_new = torch.arange(total, device=real.device) >= boundary
        return Layout(
            prompt=(real & ~is_new)[:, start:],
            new=(real & is_new)[:, start:],
            whole_prompt=start == 0,
        )

    def _real_tokens(self, tokens: Tensor, mask: object, start: int) -> Bool[Tensor, "b p"]:
        total = start + tokens.shape[1]
        if mask is None and self._text_options is not None and start == 0:
            mask = self._mask_of_text(tokens)
        if mask is None:
            return torch.ones(tokens.shape[0], total, dtype=torch.bool, device=tokens.device)
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            raise InvalidInput(
                "Under a vector the attention mask must be batch x position, 1 for real tokens; "
                "this call's has another form (static caches make such): use the default cache."
            )
        real = mask.bool()
        earlier = torch.ones(
            real.shape[0], total - real.shape[1], dtype=torch.bool, device=real.device
        )
        return torch.cat([earlier, real], dim=1)

    def _mask_of_text(self, tokens: Tensor) -> Tensor:
        model, options = self._model(), self._text_options or {}
        assert model is not None
        prepend = options.get("prepend_bos")
        side = options.get("padding_side") or model.tokenizer.padding_side
        return get_attention_mask(
            model.tokenizer,
            tokens,
            prepend_bos=model.cfg.default_prepend_bos if prepend is None else prepend,
            padding_side=side,
        )


_WATCHED: "weakref.WeakKeyDictionary[TransformerBridge, _Calls]" = weakref.WeakKeyDictionary()


@contextmanager
def _watched(model: TransformerBridge) -> Iterator[_Calls]:
    """Follow the model's calls. Uses at one time share one watch; the last to end removes it."""
    calls = _WATCHED.get(model)
    if calls is None:
        calls = _WATCHED[model] = _Calls(model)
        calls.undo.callback(_WATCHED.pop, model)
    calls.users += 1
    try:
        if calls.users == 1:
            _install(model, calls, calls.undo)
        yield calls
    finally:
        calls.users -= 1
        if not calls.users:
            calls.undo.close()


def _install(model: TransformerBridge, calls: _Calls, stack: ExitStack) -> None:
    inner = model.original_model
    before = inner.register_forward_pre_hook(calls.before_pass, with_kwargs=True)
    stack.callback(before.remove)
    stack.callback(inner.register_forward_hook(calls.after_pass, always_call=True).remove)
    for name, wrapper in _WRAPPERS.items():
        _shadow(model, name, partial(wrapper, getattr(model, name), calls), stack)


def _forward(
    original: Callable[..., Any], calls: _Calls, input: object, *args: Any, **kwargs: Any
) -> Any:
    with calls.text(input, kwargs):
        return original(input, *args, **kwargs)


def _generate(original: Callable[..., Any], calls: _Calls, *args: Any, **kwargs: Any) -> Any:
    with calls.generation(_Generation()):
        return original(*args, **kwargs)


def _generate_stream(
    original: Callable[..., Any], calls: _Calls, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    running, end = _Generation(), object()
    with closing(original(*args, **kwargs)) as chunks:
        while True:
            with calls.generation(running):  # not while the caller holds a chunk
                chunk = next(chunks, end)
            if chunk is end:
                return
            yield chunk


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "generate": _generate,
    "hf_generate": _generate,
    "generate_stream": _generate_stream,
}


def _shadow(model: TransformerBridge, name: str, wrapper: object, stack: ExitStack) -> None:
    """Set an instance attribute over a method, and put back exactly what stood there."""
    own = model.__dict__
    if name in own:
        stack.callback(own.__setitem__, name, own[name])
    else:
        stack.callback(own.pop, name, None)
    own[name] = wrapper
