"""What the tests of vectors and passes compare with: every edit by hand, one prompt at a time.

`by_hand` runs one unpadded prompt with explicit TransformerLens hooks at columns that are counted
here. It shares no code with mechtv: not the positions, not the operations, not the hook names.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from builders import D_MODEL, N_HEADS, VOCABULARY, tiny
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.vectors import Add, Affine, Card, Edit, Linear, Operation, Replace, Site, TaskVector

SOME_FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "neox", "native")
HOOK_NAMES = {
    "resid_pre": "blocks.{}.hook_resid_pre",
    "resid_post": "blocks.{}.hook_resid_post",
    "attn_out": "blocks.{}.hook_attn_out",
    "mlp_out": "blocks.{}.hook_mlp_out",
    "z": "blocks.{}.attn.hook_z",
}
IDS = ([5, 310, 77], [9, 41, 300, 12, 260, 33, 8], [120, 64, 290, 17, 202])  # longest: 7
TEXTS = ("jump -> jumped, walk", "big -> small", "France -> Paris, Italy ->")  # longest: the last

tiny_shared = functools.cache(tiny)  # for tests that leave the model as it was


def noise(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    """Random float64 numbers, large enough that no effect drowns."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def feature(model: TransformerBridge, component: str) -> tuple[int, ...]:
    """The shape of one activation."""
    return (N_HEADS, model.cfg.d_head) if component == "z" else (D_MODEL,)


def operation(name: str, shape: Sequence[int], seed: int = 0) -> Operation:
    """One of the four operations, random, with a value of this shape."""
    if name == "linear":
        return Linear(matrix=noise(D_MODEL, D_MODEL, seed=seed, scale=0.3))
    value = noise(*shape, seed=seed)
    scale = torch.tensor(-0.7, dtype=torch.float64)
    makers: dict[str, Callable[[], Operation]] = {
        "add": lambda: Add(value=value),
        "replace": lambda: Replace(value=value),
        "affine": lambda: Affine(scale=scale, value=value),
    }
    return makers[name]()


def vector_of(*edits: Edit, acts_on: str = "prompt") -> TaskVector:
    """A task vector that nobody extracted."""
    return TaskVector(edits=edits, card=Card(method="test"), acts_on=acts_on)  # type: ignore[arg-type]


def additive(
    model: TransformerBridge,
    *,
    layer: int = 1,
    component: str = "resid_pre",
    positions: tuple[int, ...] | str = (-1,),
    acts_on: str = "prompt",
    seed: int = 0,
    scale: float = 2.0,
) -> TaskVector:
    """A random additive vector: a value for each position, or one for `"all"`."""
    slots = () if positions == "all" else (len(positions),)
    value = noise(*slots, *feature(model, component), seed=seed, scale=scale)
    site = Site(layer=layer, component=component, positions=positions)  # type: ignore[arg-type]
    return vector_of(Edit(site=site, operation=Add(value=value)), acts_on=acts_on)


def touched(
    positions: tuple[int, ...] | str, acts_on: str, prompt: int, total: int
) -> list[tuple[int, int]]:
    """Pairs of column and slot in a row of `total` tokens, the first `prompt` of them given."""
    pairs = []
    if acts_on in ("prompt", "both"):
        if positions == "all":
            pairs += [(column, 0) for column in range(prompt)]
        else:
            pairs += [(prompt + position, slot) for slot, position in enumerate(positions)]
    if acts_on in ("new", "both"):
        if positions == "all":
            pairs += [(column, 0) for column in range(prompt, total)]
        elif -1 in positions:
            pairs += [(column, list(positions).index(-1)) for column in range(prompt, total)]
    return pairs


def formula(edit: Edit, h: Tensor, slot: int) -> Tensor:
    """The edit of one activation, as the papers write it."""
    what = edit.operation
    if isinstance(what, Linear):
        return h + torch.einsum("ij,j->i", what.matrix, h)
    value = what.value[slot] if what.value.ndim > h.ndim else what.value
    if isinstance(what, Affine):
        return what.scale * h + value
    return h + value if isinstance(what, Add) else value


def by_hand(
    model: TransformerBridge,
    ids: Sequence[int],
    vector: TaskVector | None = None,
    *,
    prompt: int | None = None,
) -> Tensor:
    """The logits (pos x vocabulary) of one unpadded row; its first `prompt` tokens are given."""
    hooks = hooks_by_hand(vector, len(ids) if prompt is None else prompt, len(ids))
    logits: Tensor = model.run_with_hooks(torch.tensor([list(ids)]), fwd_hooks=hooks)
    return logits[0]


def hooks_by_hand(
    vector: TaskVector | None, prompt: int, total: int
) -> list[tuple[str, Callable[..., Tensor]]]:
    """TransformerLens hooks that do what the vector does to one unpadded row."""
    return [
        (
            HOOK_NAMES[edit.site.component].format(edit.site.layer),
            _hook(edit, touched(edit.site.positions, vector.acts_on, prompt, total)),
        )
        for edit in (() if vector is None else vector.edits)
    ]


def generate_by_hand(
    model: TransformerBridge, ids: Sequence[int], vector: TaskVector | None, steps: int
) -> tuple[list[int], Tensor]:
    """Greedy decoding by full passes: the new tokens, and the logits that chose them."""
    row, logits = list(ids), []
    for _ in range(steps):
        logits.append(by_hand(model, row, vector, prompt=len(ids))[-1])
        row.append(int(logits[-1].argmax()))
    return row[len(ids) :], torch.stack(logits)


def ids_of(model: TransformerBridge, text: str) -> list[int]:
    """A text's token ids; the tiny tokenizer adds none of its own."""
    ids: list[int] = model.tokenizer(text)["input_ids"]
    return ids


def random_ids(length: int, seed: int = 0) -> list[int]:
    """Token ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return ids


def _hook(edit: Edit, pairs: list[tuple[int, int]]) -> Callable[..., Tensor]:
    def hook(activation: Tensor, hook: object) -> Tensor:
        after = activation.clone()
        for column, slot in pairs:
            after[0, column] = formula(edit, activation[0, column], slot)
        return after

    return hook
