"""The methods' options in the figures that are grids: shared, so that their cells are shared."""

from common import Setup

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
    "learned": {"epochs": 10, "batch_size": 32, "n_train": 150, "n_validation": 60},
    "learned-dntp": {"epochs": 10, "batch_size": 32, "n_train": 150, "n_validation": 60},
}


def everything(setup: Setup):
    """All methods at several layers: the cells of D1, D2 and D3."""
    return setup.study(methods=methods_of(setup, EVERY), layers=setup.layers(2, 4), shots=8)


def methods_of(setup: Setup, names: tuple[str, ...]) -> list[dict[str, object]]:
    """Each method with its options."""
    options = QUICK if setup.quick else FULL
    return [{"name": name, **options.get(name, {})} for name in names]
