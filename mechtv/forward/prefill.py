"""Run prompts once, and keep of the pass what edits cannot change."""

import inspect
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers.cache_utils import DynamicCache

from mechtv.forward.arguments import Recorder, Unreplayable
from mechtv.forward.chunks import in_chunks
from mechtv.forward.prefix import Prefix
from mechtv.forward.rectangle import Suffix
from mechtv.forward.setting import device_of
from mechtv.progress import progress_bar

BATCH_SIZE = 64


def prefill(
    model: TransformerBridge, suffix: Suffix, layer: int, *, show: bool | None = False
) -> Prefix:
    """Run the rows once, in batches of like size, for the blocks from `layer` on.

    Raises:
        Unreplayable: if the model's blocks cannot be called again for a part of their columns.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _in_batches(model, suffix, layer, show)


def _in_batches(model: TransformerBridge, suffix: Suffix, layer: int, show: bool | None) -> Prefix:
    before, inside = suffix.lengths().T
    order = (inside * suffix.tokens.shape[1] + before).argsort(stable=True)
    n_rows = len(suffix)
    whole: Prefix | None = None

    def one_pass(rows: Int[Tensor, " row"]) -> Prefix:
        some = suffix if len(rows) == n_rows else suffix.select(rows.tolist())
        return _one_pass(model, some, layer)

    with progress_bar(title="prompts", total=n_rows, show=show) as bar:
        for rows, part in in_chunks(order, BATCH_SIZE, one_pass):
            if len(rows) == n_rows:
                return part
            whole = part.room_for(n_rows, suffix.width, suffix.length) if whole is None else whole
            whole.put(rows, part)
            bar.update(len(rows))
            del part  # not beside the next batch's
    assert whole is not None
    return whole


def takes_a_cache(model: TransformerBridge) -> bool:
    """Whether the model can go on from the keys and values of earlier columns."""
    return "past_key_values" in _options(model)


def _one_pass(model: TransformerBridge, suffix: Suffix, layer: int) -> Prefix:
    device = device_of(model)
    cache = _Keeping(layer, suffix.width) if suffix.width else None
    options: dict[str, Any] = {"past_key_values": cache, "use_cache": True} if cache else {}
    if "logits_to_keep" in _options(model):
        options["logits_to_keep"] = 1
    n_rows, n_columns = suffix.tokens.shape
    recorder = Recorder(n_rows=n_rows, n_columns=n_columns, width=suffix.width)
    entering: list[Tensor] = []

    def note(_: object, args: tuple[Any, ...], kwargs: dict[str, Any], block: Any) -> None:
        recorder.add(block.original_component.forward, args, kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        entering.append(hidden[:, suffix.width :].clone())

    with ExitStack() as stack:
        for block in list(model.blocks)[layer:]:
            hook = partial(note, block=block)
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        model(suffix.tokens.to(device), attention_mask=suffix.mask.long().to(device), **options)
    n_blocks = model.cfg.n_layers - layer
    if len(entering) != n_blocks:
        raise Unreplayable("its blocks are not each run once")
    keys, values = cache.in_order(n_blocks) if cache else ((), ())
    return Prefix(
        layer=layer,
        width=suffix.width,
        entering=tuple(entering),
        keys=keys,
        values=values,
        arguments=recorder.arguments(),
    )


class _Keeping(DynamicCache):
    """An empty cache that takes note of the first `width` keys and values of some blocks."""

    def __init__(self, layer: int, width: int) -> None:
        super().__init__()
        self._layer, self._width = layer, width
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __bool__(self) -> bool:
        return True

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand back what came in."""
        if layer_idx >= self._layer:
            self._kept[layer_idx] = _own(key_states, self._width), _own(value_states, self._width)
        return key_states, value_states

    def in_order(self, n_blocks: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The keys and the values of the last blocks."""
        if sorted(self._kept) != list(range(self._layer, self._layer + n_blocks)):
            raise Unreplayable("not all of its blocks keep keys and values in a cache")
        pairs = [self._kept[index] for index in sorted(self._kept)]
        return tuple(keys for keys, _ in pairs), tuple(values for _, values in pairs)


def _own(states: Tensor, width: int) -> Tensor:
    """A copy of the first columns, laid out as attention multiplies them."""
    return states[:, :, :width].clone(memory_format=torch.contiguous_format)


def _options(model: TransformerBridge) -> frozenset[str]:
    return frozenset(inspect.signature(model.original_model.forward).parameters)
