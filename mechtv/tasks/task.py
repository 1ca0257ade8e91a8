"""A task: examples, a template, perhaps a closed label set, and splits that never overlap."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mechtv.errors import InvalidInput, UnknownName
from mechtv.seeds import python_rng
from mechtv.tasks.example import Example
from mechtv.tasks.template import TEMPLATES, Template

SplitName = Literal["train", "validation", "test"]
SIZES: dict[SplitName, int] = {"train": 600, "validation": 400, "test": 400}
SHARE_HELD_OUT = 5


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Three disjoint sets of examples. Demonstrations come from `train`."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Examples with a template.

    Args:
        name: the task's name.
        examples: all of them; inputs are distinct.
        template: how an example becomes text.
        labels: the closed label set, or None where answers are open.
        description: one sentence.
        test_examples: the test set, for data that come with their own; else it is held out of
            `examples`.
        source: the file that the task was read from, if any.

    Raises:
        InvalidInput: for repeated inputs, answers outside `labels`, or a template that reads fields
            which the examples lack.
    """

    name: str
    examples: tuple[Example, ...]
    template: Template
    labels: tuple[str, ...] | None = None
    description: str = ""
    test_examples: tuple[Example, ...] = ()
    source: str | None = None

    def __post_init__(self) -> None:
        every = self.examples + self.test_examples
        if len(self.examples) < 3:
            raise InvalidInput(
                f"Task {self.name!r} has {len(self.examples)} examples; three splits need at "
                "least 3."
            )
        _check_distinct(self.name, every)
        missing = self.template.fields - set(every[0].fields)
        if missing:
            raise InvalidInput(
                f"The template {self.template.text!r} reads {', '.join(sorted(missing))}, but the "
                f"examples of {self.name!r} have {', '.join(sorted(every[0].fields))}."
            )
        if self.labels is not None:
            _check_labels(self.name, every, self.labels)

    def __len__(self) -> int:
        return len(self.examples) + len(self.test_examples)

    def checksum(self) -> str:
        """A number, as text, of all that decides the prompts and splits: for caches.

        A file may change and keep its name; one border between training and test makes other
        splits.
        """
        parts = [[[e.key, e.answer] for e in part] for part in (self.examples, self.test_examples)]
        whole = [self.name, parts, self.labels, self.template.description]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]

    def with_template(self, template: str | Template) -> "Task":
        """The same task under another template: a name of `TEMPLATES`, a text, or a `Template`.

        Raises:
            UnknownName: for a word that is neither a template's name nor a text with {answer}.
        """
        return replace(self, template=as_template(template))

    def as_chat(self, system: str | None = None) -> "Task":
        """The same task as turns of a chat, for instruction-tuned models; see `Template`.

        Args:
            system: the chat's system message; None for that of the model's chat template, if any,
                "" for an empty one.
        """
        return replace(self, template=self.template.as_chat(system))

    def with_labels(self, labels: Sequence[str] | None) -> "Task":
        """The same task with another closed label set, or with open answers (None)."""
        return replace(self, labels=None if labels is None else tuple(labels))

    def splits(self, seed: int = 0) -> Splits:
        """Disjoint train, validation and test sets, fixed by the task and the seed.

        A fifth of the examples each for validation and test (at most 400 and 400), the rest for
        training (at most 600); what training leaves goes to validation while it has under 400.
        """
        shuffled = _shuffled(self.examples, seed, f"splits of {self.name}")
        held = max(1, len(shuffled) // SHARE_HELD_OUT)
        n_test = 0 if self.test_examples else min(held, SIZES["test"])
        beyond_training = len(shuffled) - n_test - SIZES["train"]
        n_validation = min(max(held, beyond_training), SIZES["validation"])
        own_test = _shuffled(self.test_examples, seed, f"test set of {self.name}")
        test = own_test[: SIZES["test"]] if self.test_examples else shuffled[:n_test]
        rest = shuffled[n_test + n_validation :]
        return Splits(
            test=test,
            validation=shuffled[n_test : n_test + n_validation],
            train=rest[: SIZES["train"]],
        )

    def split(self, name: SplitName, *, n: int | None = None, seed: int = 0) -> tuple[Example, ...]:
        """The first `n` examples of a split, or all of them.

        Raises:
            UnknownName: for another split name.
            InvalidInput: if `n` is not between 1 and the split's size.
        """
        if name not in SIZES:
            raise UnknownName("split", name, SIZES)
        examples: tuple[Example, ...] = getattr(self.splits(seed), name)
        if n is not None and not 1 <= n <= len(examples):
            raise InvalidInput(
                f"n={n} examples were asked of the {name} split of {self.name!r}, which holds "
                f"{len(examples)}; give n between 1 and {len(examples)}."
            )
        return examples[:n]

    def demonstrations(
        self, query: Example | None, shots: int, *, seed: int = 0
    ) -> tuple[Example, ...]:
        """`shots` training examples for one query: never the query itself, balanced over labels.

        The draw depends on the query's text, so it does not change with the other queries. With no
        query, the draw is the task's one fixed set.

        Raises:
            InvalidInput: if the training split holds fewer others than `shots`.
        """
        return draw_demonstrations(self, self.splits(seed).train, query, shots, seed=seed)


def draw_demonstrations(
    task: Task, pool: tuple[Example, ...], query: Example | None, shots: int, *, seed: int
) -> tuple[Example, ...]:
    """`Task.demonstrations` from a training split that the caller has at hand."""
    if shots < 0:
        raise InvalidInput(f"shots={shots} is negative; use 0 (zero-shot) or more.")
    key = () if query is None else query.key
    others = [example for example in pool if example.key != key]
    if shots > len(others):
        raise InvalidInput(
            f"shots={shots} demonstrations were asked, but the training split of {task.name!r} "
            f"holds {len(others)} besides the query; ask for at most {len(others)}."
        )
    rng = python_rng(seed, f"demonstrations of {task.name} for {key!r}")
    if task.labels is None:
        return tuple(rng.sample(others, shots))
    rng.shuffle(others)
    chosen = _balanced(others, shots)
    rng.shuffle(chosen)
    return tuple(chosen)


def as_template(template: str | Template) -> Template:
    """A template from a name, a text or a description of one, or itself."""
    if isinstance(template, Template):
        return template
    if template in TEMPLATES:
        return TEMPLATES[template]
    if "{" in template:
        return Template.from_description(template)
    raise UnknownName(
        "template", template, TEMPLATES, 'A text such as "{input} -> {answer}" also works.'
    )


def _shuffled(examples: tuple[Example, ...], seed: int, purpose: str) -> tuple[Example, ...]:
    return tuple(python_rng(seed, purpose).sample(examples, len(examples)))


def _balanced(pool: list[Example], shots: int) -> list[Example]:
    """Take the labels in turn, in the order of the (shuffled) pool, until there are enough."""
    by_label: dict[str, list[Example]] = defaultdict(list)
    for example in pool:
        by_label[example.answer].append(example)
    rounds = [
        group[turn]
        for turn in range(max(map(len, by_label.values()), default=0))
        for group in by_label.values()
        if turn < len(group)
    ]
    return rounds[:shots]


def _check_distinct(name: str, examples: tuple[Example, ...]) -> None:
    seen: set[tuple[str, ...]] = set()
    for example in examples:
        if example.key in seen:
            raise InvalidInput(
                f"Task {name!r} holds the input {' / '.join(example.key)!r} twice; "
                "give each input once, or splits would overlap."
            )
        seen.add(example.key)


def _check_labels(name: str, examples: tuple[Example, ...], labels: tuple[str, ...]) -> None:
    strange = {example.answer for example in examples} - set(labels)
    if not labels or strange:
        raise InvalidInput(
            f"Task {name!r} has the labels {labels!r}, but also the answers "
            f"{sorted(strange)[:5]!r}; list every label, or pass labels=None for open answers."
        )
