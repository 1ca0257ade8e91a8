"""How the numbers of a page were made, and the command that makes them again."""

import shlex

from mechtv.overview import EPOCHS, Overview, evenly_spread
from mechtv.tasks.builtin import builtin_names, load_builtin
from mechtv.tasks.task import Task
from mechtv.tasks.template import Template
from mechtv.vectors.card import Card

DTYPE = "float32"
MEASURED = ("layers", "residual_norms", "steps", "n_train", "n_validation")
"""Entries of a learned vector's settings that the page shows elsewhere."""


def learned_card(overview: Overview) -> Card:
    """The card of the learned vector that was chosen."""
    vector = overview["learned", overview.best_layer].vector
    assert vector is not None
    return vector.card


def provenance(overview: Overview) -> dict[str, str]:
    """Model, data, and what they were run with."""
    model, task, card = overview.model, overview.task, learned_card(overview)
    n_test = overview.settings[0].evaluation.accuracy.n
    shape = f"{model.n_layers} layers, {model.n_heads} heads, width {model.d_model}"
    about = {
        "Model": f"{model.name}: {shape}, vocabulary {model.d_vocab:,}",
        "Revision": model.revision,
        "Weights": f"{model.weights}, {model.dtype}",
        "Task": ": ".join(filter(None, (task.name, task.description))),
        "Template": task.template.description.replace("\n", "↵"),
        "Labels": ", ".join(task.labels or ()),
        "Queries": f"{card.settings.get('n_train', '?')} training, "
        f"{card.settings.get('n_validation', '?')} validation, {n_test} test",
        "Demonstrations in context": str(overview.shots),
        "Layers": ", ".join(map(str, overview.layers)),
        "Seed": str(overview.seed),
        "Versions": ", ".join(f"{name} {version}" for name, version in card.versions.items()),
        "Duration": duration(overview.seconds),
    }
    return {name: value for name, value in about.items() if value}


def learn_settings(overview: Overview) -> dict[str, str]:
    """Every option of `mechtv.learn`, as its card has it."""
    settings = learned_card(overview).settings
    return {name: _value(v) for name, v in settings.items() if name not in MEASURED}


def command(overview: Overview) -> str:
    """The command line that makes the page again; what it takes by itself is left out."""
    words = [
        "mechtv",
        "run",
        "--model",
        overview.model.name,
        "--task",
        overview.task.source or overview.task.name,
    ]
    if overview.layers != evenly_spread(overview.model.n_layers):
        words += ["--layers", ",".join(map(str, overview.layers))]
    n_test = overview.settings[0].evaluation.accuracy.n
    if n_test != len(overview.task.split("test", seed=overview.seed)):
        words += ["--n", str(n_test)]
    words += template_words(overview.task)
    if overview.model.dtype != DTYPE:
        words += ["--dtype", overview.model.dtype]
    epochs = learned_card(overview).settings.get("epochs", EPOCHS)
    if epochs != EPOCHS:
        words += ["--epochs", str(epochs)]
    words += ["--shots", str(overview.shots), "--seed", str(overview.seed)]
    return shlex.join(words)


def template_words(task: Task) -> list[str]:
    """The option that gives a task its template; none where the task comes with it."""
    if task.template == _own_template(task):
        return []
    return ["--template", task.template.description.replace("\n", "\\n")]


def duration(seconds: float) -> str:
    """A duration such as "12 min 34 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "min"), (rest, "s")]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{amount} {unit}" for amount, unit in parts)


def _own_template(task: Task) -> Template | None:
    """The template that a built-in task comes with; None for other tasks."""
    built_in = task.source is None and task.name in builtin_names()
    return load_builtin(task.name).template if built_in else None


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
