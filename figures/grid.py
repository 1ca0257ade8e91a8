"""The grid of all methods behind D1, D2 and D3, whose cells they share."""

import pandas as pd
from common import TRAINING, Setup, fitting

from mechtv.tasks.sources import TEXT_SOURCES

TASKS = ("present-past", "singular-plural", "country-capital", "antonym", "sentiment", "topic")
QUICK_TASKS = ("present-past", "sentiment")
TEXTS = ("sst2", "trec", "ag-news")
EVERY = (
    "zero-shot",
    "in-context",
    "hidden_state",
    "function_vector",
    "state_vector",
    "i2cl",
    "linear",
    "learned",
    "learned-dntp",
)

QUICK = {
    "hidden_state": {"n": 16},
    "function_vector": {"n": 8, "n_shuffled": 4},
    "state_vector": {"n": 16},
    "i2cl": {"epochs": 3},
    "linear": {"n": 32, "shots": 8},
    "learned": {"epochs": 3, "batch_size": 32, "n_train": 64, "n_validation": 24},
    "learned-dntp": {"epochs": 3, "batch_size": 32, "n_train": 32, "n_validation": 16},
}
FULL = {
    "i2cl": {"epochs": 30},
    "linear": {"n": 128, "shots": 8, "ridge": 1e4},
    "learned": TRAINING,
    "learned-dntp": TRAINING,
}
# Texts and sentences are many times as long as words, so fewer of them are read.
OF_TEXTS = {
    "hidden_state": {"n": 32, "shots": 5},
    "function_vector": {"n": 24, "n_shuffled": 12, "shots": 5},
    "state_vector": {"n": 32},
    "i2cl": {"epochs": 15},
    "linear": {"n": 64, "shots": 8, "ridge": 1e4},
    "learned": {"epochs": 6, "batch_size": 32, "n_train": 100, "n_validation": 50},
    "learned-dntp": {
        "epochs": 6,
        "batch_size": 32,
        "n_train": 64,
        "n_validation": 32,
        "icl_shots": 4,
    },
}


def everything(setup: Setup) -> pd.DataFrame:
    """All methods at every other layer of L1: the cells of D1, D2 and D3."""
    return grid(setup, EVERY, of_l1(setup)[1::2] or of_l1(setup))


def of_l1(setup: Setup) -> tuple[int, ...]:
    """The layers of L1."""
    return setup.layers(4, 8)


def grid(setup: Setup, methods: tuple[str, ...], layers: tuple[int, ...]) -> pd.DataFrame:
    """The table of these methods at these layers, over the setup's tasks and seeds."""
    tables = []
    for name in setup.tasks:
        task = setup.task(name)
        long = name in TEXT_SOURCES or task.labels is not None
        options = QUICK if setup.quick else OF_TEXTS if long else FULL
        own = [{"name": one, **fitting(task, options.get(one, {}))} for one in methods]
        tables.append(setup.study(tasks=[name], methods=own, layers=layers, shots=8))
    return pd.concat(tables, ignore_index=True)
