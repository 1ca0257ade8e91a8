"""How much faster a pass is that recomputes only what its edits can change.

Every row is a ratio of two medians measured in one run, turn by turn: the full hooked pass against
the suffix engine, and the engine against the matrix products of its own shapes alone, which no
implementation can beat. Run it on a quiet machine:

    make bench                             (out/bench/engine.csv and .json)
    python benchmarks/engine.py --pairs 9 --only step
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
from torch import Tensor
from transformer_lens.model_bridge.generalized_components.linear import LinearBridge

import mechtv
from mechtv.files import write_whole
from mechtv.forward import (
    capture,
    forget,
    full_passes,
    in_batches,
    keep_at_most,
    last_logits,
    likelihood,
    scan,
)
from mechtv.forward.linear import product
from mechtv.forward.memory import memory_of
from mechtv.methods.frozen import frozen
from mechtv.methods.objectives import Answer
from mechtv.tasks.prompts import Prompts
from mechtv.vectors import Add, Card, Edit, Replace, Site, TaskVector

PROMPTS = 64  # of the smallest memory run, and of each batch
PLAIN_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    if options.child:
        print(json.dumps(_peak(options.child, options.scale)))
        return
    model = mechtv.open_model()
    rows: list[dict[str, object]] = []
    with frozen(model):
        if options.only in (None, "step"):
            middle, late = model.cfg.n_layers // 2, 3 * model.cfg.n_layers // 4
            for layer, n_tokens, batch in (
                (middle, 64, 32),
                (late, 64, 32),
                (middle, 4, 64),
                (middle, 64, 64),
            ):
                rows.append(_step(model, layer, n_tokens, batch, options.pairs))
                print(rows[-1], file=sys.stderr, flush=True)
        if options.only in (None, "bfloat16"):
            rows += _bfloat16(model, options.pairs)
        if options.only in (None, "scan"):
            for template in ("{input} -> {answer}", "Q: {input}\nA: {answer}"):
                rows.append(_scan(model, template, options.pairs))
                print(rows[-1], file=sys.stderr, flush=True)
    if options.only in (None, "memory"):
        rows += _memory()
    table = pd.DataFrame(rows)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "pairs": options.pairs,
        "command": "python benchmarks/engine.py " + " ".join(sys.argv[1:]),
    }
    write_whole(out / "engine.csv", table.to_csv(index=False).encode())
    found = {"about": about, "rows": rows}
    write_whole(out / "engine.json", json.dumps(found, indent=1).encode())
    print(table.to_string(index=False))


# --- one learning step -------------------------------------------------------------------------


def _step(model, layer: int, n_tokens: int, batch: int, pairs: int) -> dict[str, object]:
    """-log p(answer) of a one-token answer, and its gradient in theta at the last token."""
    prompts = _random_prompts(model, batch, n_tokens)
    theta = torch.zeros(model.cfg.d_model, requires_grad=True)
    vector = _vector(Edit(site=Site(layer=layer), operation=Add(value=theta)))
    objective, rows = Answer(model, prompts), torch.arange(batch)

    step = partial(_descend, objective, vector, rows)

    def full() -> None:
        with full_passes():
            step()

    def all_logits() -> None:
        """As `run_with_hooks` does it, without saying which logits are wanted."""
        theta.grad = None
        with vector.applied(model):
            logits = model(prompts.tokens, attention_mask=prompts.mask.long())[:, -1]
        answers = prompts.first_answer_tokens
        torch.nn.functional.cross_entropy(logits, answers).backward()

    products = _products(model, layer, batch, n_tokens)
    with objective.prepared(vector, False):
        all_s, full_s, engine_s, products_s = _turns(pairs, all_logits, full, step, products)
        inside = statistics.median(_share_inside(model, layer, step) for _ in range(2 * pairs))
    return {
        "what": "learning step",
        "layer": layer,
        "tokens": n_tokens,
        "batch": batch,
        "full_s": full_s,
        "engine_s": engine_s,
        "products_s": products_s,
        "speedup": full_s / engine_s,
        "speedup_all_logits": all_s / engine_s,
        "speedup_limit": full_s / products_s,
        "outside_products": 1 - products_s / engine_s,
        "outside": 1 - inside,
    }


def _share_inside(model, layer: int, step: Callable[[], None]) -> float:
    """Which share of one step is spent in products, attention and the unembedding, both ways.

    The gradient's product with the unembedding stands in the loss, which finishes it at once.
    """
    seconds = [0.0]

    def timed_product(x: Tensor, weight: Tensor) -> Tensor:
        began = time.perf_counter()
        found = product(x, weight)
        seconds[0] += time.perf_counter() - began
        return found

    mlps = [model.blocks[i].mlp for i in range(layer, model.cfg.n_layers)]
    watched = [model.blocks[i].attn for i in range(layer, model.cfg.n_layers)]
    watched += [part for mlp in mlps for part in mlp.modules() if type(part) is LinearBridge]
    with ExitStack() as stack:
        for module in (*watched, model.unembed):
            vars(module)["forward"] = partial(_timed, module.forward, seconds)
            stack.callback(vars(module).pop, "forward")
        stack.enter_context(patch.object(likelihood, "product", timed_product))
        began = time.perf_counter()
        step()
        return seconds[0] / (time.perf_counter() - began)


def _timed(forward: Callable[..., Any], seconds: list[float], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`; its time, and that of its gradients, is added to `seconds`."""
    given = kwargs.get("hidden_states", args[0] if args else None)
    marked = _Clock.apply(given, seconds, 1)
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = marked
    else:
        args = (marked, *args[1:])
    began = time.perf_counter()
    output = forward(*args, **kwargs)
    seconds[0] += time.perf_counter() - began
    if isinstance(output, tuple):
        return _Clock.apply(output[0], seconds, -1), *output[1:]
    return _Clock.apply(output, seconds, -1)


class _Clock(torch.autograd.Function):
    """The identity; when its gradient passes, the time is added with a sign."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: list[float], sign: int) -> Tensor:
        ctx.seconds, ctx.sign = seconds, sign
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.seconds[0] += ctx.sign * time.perf_counter()
        return gradient, None, None


def _products(model, layer: int, batch: int, n_tokens: int) -> Callable[[], None]:
    """The matrix products, attention and softmaxes of one such step, forward and backward."""
    cfg = model.cfg
    blocks = [
        [w for w in model.blocks[i].original_component.parameters() if w.ndim == 2]
        for i in range(layer, cfg.n_layers)
    ]
    widths = {size for weights in blocks for w in weights for size in w.shape}
    inputs = {size: torch.randn(batch, size) for size in widths}
    unembedding = model.unembed.original_component.weight
    final, logits = torch.randn(batch, cfg.d_model), torch.randn(batch, cfg.d_vocab)
    kv, group = cfg.n_key_value_heads, cfg.n_heads // cfg.n_key_value_heads
    past = torch.randn(batch, kv, n_tokens, cfg.d_head)
    queries = torch.randn(batch, kv, group, cfg.d_head)
    scores = torch.randn(batch, kv, group, n_tokens)

    @torch.no_grad()
    def products() -> None:
        for weights in blocks:
            for w in weights:
                product(inputs[w.shape[1]], w)
            torch.matmul((queries @ past.mT).softmax(-1), past)
        product(final, unembedding).log_softmax(-1)
        product(logits.softmax(-1), unembedding.T)
        for weights in blocks:
            torch.matmul(queries @ past.mT, past), scores.softmax(-1)
            for w in weights:
                product(inputs[w.shape[0]], w.T)

    return products


# --- short weights -----------------------------------------------------------------------------


def _bfloat16(model, pairs: int) -> list[dict[str, object]]:
    """What bfloat16 weights gain in time, and cost in accuracy."""
    short = mechtv.open_model(dtype=torch.bfloat16)
    layer, n_tokens, batch = model.cfg.n_layers // 2, 64, 32
    steps = []
    with ExitStack() as stack:
        for each in (model, short):
            stack.enter_context(frozen(each))
            theta = torch.zeros(each.cfg.d_model, requires_grad=True)
            vector = _vector(Edit(site=Site(layer=layer), operation=Add(value=theta)))
            objective = Answer(each, _random_prompts(each, batch, n_tokens))
            stack.enter_context(objective.prepared(vector, False))
            steps.append(partial(_descend, objective, vector, torch.arange(batch)))
        wide_s, short_s = _turns(pairs, *steps)
    rows: list[dict[str, object]] = [
        {
            "what": "learning step in bfloat16, against float32 (both by the engine)",
            "layer": layer,
            "tokens": n_tokens,
            "batch": batch,
            "full_s": wide_s,
            "engine_s": short_s,
            "speedup": wide_s / short_s,
        }
    ]
    for name in ("present-past", "sentiment"):
        task = mechtv.get_task(name)
        for each in (model, short):
            began = time.perf_counter()
            in_context = mechtv.evaluate(each, task, shots=8, batch_size=16)
            seconds = time.perf_counter() - began
            theta = mechtv.learn(each, task, layer=8, epochs=6, batch_size=32)
            learned = mechtv.evaluate(each, task, theta)
            rows.append(
                {
                    "what": f"accuracy, {name}, {str(each.cfg.dtype).removeprefix('torch.')}",
                    "layer": 8,
                    "in_context": str(in_context.accuracy),
                    "in_context_s": seconds,
                    "learned": str(learned.accuracy),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _descend(objective: Answer, vector: TaskVector, rows: Tensor) -> None:
    vector.value().grad = None
    objective.loss(vector, rows).mean().backward()


# --- a scan of all heads -----------------------------------------------------------------------


def _scan(model, template: str, pairs: int) -> dict[str, object]:
    """Each head's z at the last token replaced, over 25 ten-shot prompts: p(answer) per head."""
    task = mechtv.get_task("present-past").with_template(template)
    prompts = Prompts.of(model, task, shots=10, n=25)
    heads = [(layer, h) for layer in range(model.cfg.n_layers) for h in range(model.cfg.n_heads)]
    vectors = [
        _vector(
            Edit(
                site=Site(component="z", layer=layer, heads=(head,)),
                operation=Replace(value=torch.randn(1, model.cfg.d_head)),
            )
        )
        for layer, head in heads
    ]

    def probability(logits: Tensor, batch: Prompts) -> Tensor:
        answers = batch.first_answer_tokens[:, None]
        return logits.log_softmax(-1).take_along_dim(answers, 1)[:, 0].exp()

    some = [vectors[i] for i in range(0, len(vectors), len(vectors) // pairs)][:pairs]
    engine, full = [], []
    with torch.no_grad():
        for vector in some:
            with full_passes():
                began = time.perf_counter()
                one = probability(last_logits(model, prompts, vector), prompts)
                full.append(time.perf_counter() - began)
            if len(engine) < max(5, pairs // 2):
                forget(model)
                began = time.perf_counter()
                found = scan(model, prompts, vectors, probability, show=False)
                engine.append(time.perf_counter() - began)
            error = (found[vectors.index(vector)] - one).abs().max()
            assert error < 1e-4, f"the scan is off by {error}"
    full_s, engine_s = len(vectors) * statistics.median(full), statistics.median(engine)
    return {
        "what": f"scan of {len(vectors)} heads, 25 ten-shot prompts {template!r}",
        "tokens": int(prompts.lengths.float().mean()),
        "batch": 25,
        "full_s": full_s,
        "engine_s": engine_s,
        "speedup": full_s / engine_s,
    }


# --- memory ------------------------------------------------------------------------------------


def _memory() -> list[dict[str, object]]:
    """Peak memory above the model, in a process of its own for each size.

    Each block of memory is asked of the system and given back by itself, so that the resident size
    is what lives, and nothing hides in blocks that the allocator keeps for later.
    """
    rows = []
    for what in ("extraction", "learning", "scan"):
        for scale in (1, 2, 4):
            command = [sys.executable, __file__, "--child", what, "--scale", str(scale)]
            environment = os.environ | PLAIN_ALLOCATOR
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            rows.append({"what": f"memory: {what}", **found})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _peak(what: str, scale: int) -> dict[str, object]:
    """The highest resident size of one run above that before it.

    A run of the smallest size comes first, for whatever a first run leaves behind.
    """
    model = mechtv.open_model()
    run = {"extraction": _extracted, "learning": _learned, "scan": _scanned}[what]
    with frozen(model):
        for n in (PROMPTS, PROMPTS * scale):
            prompts = _random_prompts(model, n, 64)
            forget(model)
            gc.collect()
            before = _reset_peak()
            kept = run(model, prompts)
            peak = _status("VmHWM") - before
    return {
        "tokens": 64,
        "batch": n,
        "kept_mb": kept / 1e6,
        "peak_mb": peak * 1024 / 1e6,
        "rest_mb": (peak * 1024 - kept) / 1e6,
    }


def _extracted(model, prompts: Prompts) -> int:
    """The states at the middle layer; their bytes."""
    site = Site(layer=model.cfg.n_layers // 2)
    with torch.no_grad():
        states = in_batches(
            prompts, lambda b: capture(model, b, [site])[site], batch_size=PROMPTS, show=False
        )
    return states.nbytes


def _learned(model, prompts: Prompts) -> int:
    """An epoch of steps at the middle layer; the bytes of what is kept of the prompts."""
    theta = torch.zeros(model.cfg.d_model, requires_grad=True)
    vector = _vector(Edit(site=Site(layer=model.cfg.n_layers // 2), operation=Add(value=theta)))
    objective = Answer(model, prompts)
    with keep_at_most(2**34), objective.prepared(vector, False):
        kept = memory_of(model).nbytes
        for rows in torch.arange(prompts.tokens.shape[0]).split(PROMPTS):
            _descend(objective, vector, rows)
    return kept


def _scanned(model, prompts: Prompts) -> int:
    """32 edits of heads at the middle layer; the bytes of their scores."""
    edits = [
        Edit(
            site=Site(component="z", layer=model.cfg.n_layers // 2, heads=(i % model.cfg.n_heads,)),
            operation=Replace(value=torch.zeros(1, model.cfg.d_head)),
        )
        for i in range(32)
    ]
    with torch.no_grad():
        found = scan(
            model,
            prompts,
            [_vector(edit) for edit in edits],
            lambda logits, _: logits.max(-1).values,
            batch_size=PROMPTS,
            n_bytes=2**27,
            show=False,
        )
    return found.nbytes


def _reset_peak() -> int:
    """Forget the highest resident size so far (Linux), and give the size now, in kB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


# --- what all share ----------------------------------------------------------------------------


def _random_prompts(model, n: int, length: int) -> Prompts:
    ids = torch.randint(100, model.cfg.d_vocab, (n, length)).tolist()
    return Prompts.from_ids(model, ids, answers=tuple((1000 + i,) for i in range(n)))


def _vector(*edits: Edit) -> TaskVector:
    return TaskVector(edits=edits, card=Card(method="benchmark"))


def _turns(pairs: int, *runs: Callable[[], None]) -> list[float]:
    """The median seconds of each, run in turns after one turn to warm up.

    What takes less than a second runs five times a turn, as learning steps follow one another.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(pairs + 1):
        for run, own in zip(runs, seconds, strict=True):
            repeats = 5 if own and own[0] < 1 else 1
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            own.append((time.perf_counter() - began) / repeats)
    return [statistics.median(own[1:]) for own in seconds]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="how many turns are timed")
    parser.add_argument(
        "--only", choices=["step", "scan", "bfloat16", "memory"], help="one part alone"
    )
    parser.add_argument("--out", default="out/bench", help="the folder for CSV and JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
