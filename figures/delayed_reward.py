"""Reward now or later: the share of immediate choices without a vector, in context, and learned.

    python figures/delayed_reward.py

Every query is asked in both orders of its options, since models prefer an option for where it
stands. The learned vector's layer is chosen on the validation split. Writes
figures/results/delayed_reward.csv.
"""

from functools import partial
from pathlib import Path

import pandas as pd
import typer

import mechtv
from mechtv.files import write_whole

TASKS = ("delayed-reward", "delayed-reward-open")
LAYERS = (8, 15, 22)
SHOTS = 8


def main(seed: int = 0, results: Path = Path(__file__).parent / "results") -> None:
    model = mechtv.open_model()
    tables = []
    for name in TASKS:
        task = mechtv.get_task(name)
        train = partial(mechtv.learn, model, task, epochs=10, batch_size=32, seed=seed)
        choice = mechtv.choose_layer(model, task, train, LAYERS)
        score = partial(mechtv.evaluate_choice, model, task, both_orders=True, seed=seed)
        settings = {None: score(), 0: score(shots=SHOTS), choice.layer: score(choice.vector)}
        tables += [found.table().assign(layer=layer or None) for layer, found in settings.items()]
        table = pd.concat(tables, ignore_index=True)
        write_whole(results / "delayed_reward.csv", table.to_csv(index=False).encode())


if __name__ == "__main__":
    typer.run(main)
