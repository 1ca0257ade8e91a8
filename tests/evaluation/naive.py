"""What the tests compare against: one prompt at a time, full passes, edits as plain hooks."""

from functools import cache

import torch


def naive_logits(model, ids, n_prompt, vector=None, extra=(), keep=None):
    """The logits of one row of ids, of which the first `n_prompt` are the prompt.

    Args:
        vector: its edits are made by hand, from their definition.
        extra: further (hook name, function) pairs, which run after the edits.
        keep: a dictionary that takes the activations at the hook points which it names.
    """
    hooks = [] if vector is None else [_edit(e, vector.acts_on, n_prompt) for e in vector.edits]
    for name in keep or ():
        hooks.append((name, lambda x, hook: keep.update({hook.name: x[0].clone()})))
    with torch.no_grad():
        return model.run_with_hooks(torch.tensor([ids]), fwd_hooks=[*hooks, *extra])[0]


def _edit(edit, acts_on, n_prompt):
    site, operation = edit.site, edit.operation
    name = "attn.hook_z" if site.component == "z" else f"hook_{site.component}"

    def change(x, hook):
        x = x.clone()
        for column in range(x.shape[1]):
            from_end = column - n_prompt  # -1 is the last prompt token
            value = _value(operation.value, site, from_end, acts_on, n_features=x.ndim - 2)
            if value is None:
                continue
            if type(operation).__name__ == "Add":
                x[0, column] = x[0, column] + value
            else:
                assert type(operation).__name__ == "Replace"
                x[0, column] = value
        return x

    return f"blocks.{site.layer}.{name}", change


def _value(value, site, from_end, acts_on, n_features):
    value = value.detach()
    in_prompt = from_end < 0
    if not in_prompt:
        if acts_on == "prompt":
            return None
        from_end = -1  # at each new token stands what stands at the last prompt token
    elif acts_on == "new":
        return None
    if site.positions == "all":
        return value
    if from_end not in site.positions:
        return None
    shared = value.ndim == n_features
    return value if shared else value[site.positions.index(from_end)]


def row_of(prompts, row):
    """The real ids of one row of prompts."""
    return [
        i
        for i, real in zip(prompts.tokens[row].tolist(), prompts.mask[row].tolist(), strict=True)
        if real
    ]


@cache
def next_logits(model, ids, n_prompt, vector):
    """The logits after the last of `ids`, as numbers; each pass is made once."""
    return naive_logits(model, list(ids), n_prompt, vector)[-1].tolist()


def greedy(model, ids, n_tokens, vector=None):
    """`n_tokens` tokens by greedy decoding, each with a full pass of its own."""
    written = list(ids)
    for _ in range(n_tokens):
        logits = next_logits(model, tuple(written), len(ids), vector)
        written.append(max(range(len(logits)), key=logits.__getitem__))
    return written[len(ids) :]
