"""Which of two options a model prefers: reward now or later (protocol L13).

In the form of *letters* the model is asked for A or B, and the more probable letter counts. In the
form of *options* it is asked for the option's own words, and the option with the larger mean token
log-probability under teacher forcing counts. Models also prefer an option for where it stands, so
the share of first options is reported beside the share of immediate rewards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.accuracy import force
from mechtv.evaluation.intervals import (
    Comparison,
    Estimate,
    compare_means,
    compare_shares,
    mean_share,
    share,
)
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.memory import steady
from mechtv.forward.run import in_batches, last_logits, log_probabilities
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task, draw_demonstrations
from mechtv.vectors.vector import TaskVector

Form = Literal["letters", "options"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """What was chosen on one set of queries, each asked in one or in both orders of its options.

    Args:
        task, setting, shots, split: what was scored; `setting` is the vector's method, `zero-shot`
            or `in-context`.
        form: whether `letters` or the `options` themselves were compared.
        queries: the queries as the task has them, in order; order 0 is theirs, order 1 the swapped.
        immediate_first: where the immediate option stands first.
        log_probabilities: of the first and of the second option (natural log): of its letter, of
            the two letters; or the mean over its tokens.
        provenance: model, weights, template and seed.
    """

    task: str
    setting: str
    shots: int
    split: str
    form: Form
    queries: tuple[tuple[str, ...], ...]
    immediate_first: Bool[np.ndarray, "query order"]
    log_probabilities: Float[np.ndarray, "query order option"]
    provenance: Provenance = UNKNOWN

    @property
    def chose_first(self) -> Bool[np.ndarray, "query order"]:
        """Where the first option was chosen; it also wins a tie."""
        chosen: np.ndarray = self.log_probabilities[..., 0] >= self.log_probabilities[..., 1]
        return chosen

    @property
    def chose_immediate(self) -> Bool[np.ndarray, "query order"]:
        """Where the immediate option was chosen."""
        chosen: np.ndarray = self.chose_first == self.immediate_first
        return chosen

    @property
    def immediate(self) -> Estimate:
        """The share of immediate choices; over both orders the mean. Wilson interval."""
        return mean_share(self.chose_immediate)

    @property
    def first(self) -> Estimate:
        """The share of first options; over both orders, one half says that no place is preferred.

        In one order a preference for an option shows too, unless each stands first equally often.
        """
        return mean_share(self.chose_first)

    @property
    def consistent(self) -> Estimate | None:
        """The share of queries with one choice in both orders; None if one order was asked."""
        chosen = self.chose_immediate
        return share(chosen[:, 0] == chosen[:, 1]) if chosen.shape[1] == 2 else None

    @property
    def n_immediate_first(self) -> int:
        """On how many queries the task itself puts the immediate option first."""
        return int(self.immediate_first[:, 0].sum())

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n, and how the options were ordered."""
        scores = {
            "immediate reward": self.immediate,
            "first option": self.first,
            "same choice in both orders": self.consistent,
        }
        n_orders = self.immediate_first.shape[1]
        return pd.DataFrame(
            {"task": self.task, "setting": self.setting, "shots": self.shots, "split": self.split}
            | {"score": name, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
            | {"orders": n_orders, "immediate first": self.n_immediate_first}
            | self.provenance.columns()
            for name, e in scores.items()
            if e is not None
        )

    def compare(self, other: "Choices") -> Comparison:
        """This share of immediate choices minus another's on the same queries.

        Returns:
            The difference with its paired bootstrap interval, and the exact McNemar test for one
            order or the Wilcoxon signed-rank test of the queries' means for both.

        Raises:
            InvalidInput: if the queries or the orders differ.
        """
        same_orders = np.array_equal(self.immediate_first, other.immediate_first)
        if self.queries != other.queries or not same_orders:
            raise InvalidInput(
                f"{self.setting!r} and {other.setting!r} were scored on different queries or "
                "orders; use the same task, split, n, seed and both_orders for both."
            )
        first, second = self.chose_immediate, other.chose_immediate
        if first.shape[1] == 1:
            return compare_shares(first[:, 0], second[:, 0])
        return compare_means(first.mean(axis=1), second.mean(axis=1))


def evaluate_choice(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector | None = None,
    *,
    shots: int = 0,
    split: SplitName = "test",
    n: int | None = None,
    both_orders: bool = False,
    seed: int | None = None,
    batch_size: int = 64,
    progress: bool | None = None,
) -> Choices:
    """How often the plain model, the in-context model, or a vector takes the immediate option.

    Args:
        task: one with the fields `option_a` and `option_b` whose answer is the immediate option:
            one of two labels, or, for open answers, the option itself. `delayed-reward` and
            `delayed-reward-open` are such.
        vector: None for the plain model.
        shots: demonstrations before each query (with immediate answers): 0 is zero-shot.
        n: how many queries; the whole split if None.
        both_orders: ask every query a second time with its options exchanged, behind the same
            demonstrations.
        seed: fixes the splits and the demonstrations; the vector's own, or 0, if None.

    Raises:
        InvalidInput: for a task of another form, labels that share a first token, a vector that
            does not fit the model, or a pool that is too small.
    """
    form = _form(task)
    seed = seed_for(vector) if seed is None else seed
    setting = setting_of(vector, shots)
    queries = task.split(split, n=n, seed=seed)
    orders = [[q, swapped(task, q)] if both_orders else [q] for q in queries]
    pool = task.splits(seed).train
    shown = [draw_demonstrations(task, pool, query, shots, seed=seed) for query in queries]
    rows = [[row for example in order for row in _rows(example, form)] for order in orders]
    prompts = Prompts.from_examples(
        model,
        task,
        [row for group in rows for row in group],
        [demonstrations for demonstrations, group in zip(shown, rows, strict=True) for _ in group],
    )
    with torch.no_grad(), steady(model):
        scores = in_batches(
            prompts,
            _scorer(model, prompts, vector, form),
            batch_size=batch_size,
            title=f"{setting} choices, {task.name}",
            show=progress,
        )
    return Choices(
        task=task.name,
        setting=setting,
        shots=shots,
        split=split,
        form=form,
        queries=tuple(query.key for query in queries),
        immediate_first=np.array([[_first_is_right(task, e) for e in order] for order in orders]),
        log_probabilities=rearrange(
            scores.flatten().cpu().double().numpy(),
            "(query order option) -> query order option",
            query=len(queries),
            option=2,
        ),
        provenance=Provenance.of(model, task, seed),
    )


def swapped(task: Task, example: Example) -> Example:
    """The same query with its options exchanged, and with them the letter of the answer."""
    fields = example.fields
    exchanged = {"option_a": fields["option_b"], "option_b": fields["option_a"]}
    answer = example.answer
    if task.labels is not None:
        first, second = task.labels
        answer = second if answer == first else first
    return Example(fields={**fields, **exchanged}, answer=answer)


def _scorer(
    model: TransformerBridge, prompts: Prompts, vector: TaskVector | None, form: Form
) -> Callable[[Prompts], Tensor]:
    """What to compute of some rows: two letters' log-probabilities, or one option's."""
    if form == "letters":
        letters = prompts.first_label_tokens
        return lambda batch: log_probabilities(last_logits(model, batch, vector, tokens=letters))
    return lambda batch: force(model, batch.with_answers(), vector).mean_log_probability()


def _rows(example: Example, form: Form) -> list[Example]:
    """The query itself, from which both letters are read; or once with each option to follow."""
    if form == "letters":
        return [example]
    return [replace(example, answer=example.fields[name]) for name in ("option_a", "option_b")]


def _first_is_right(task: Task, example: Example) -> bool:
    first = example.fields["option_a"] if task.labels is None else task.labels[0]
    return example.answer == first


def _form(task: Task) -> Form:
    fields = {"option_a", "option_b"}
    examples = task.examples + task.test_examples
    if not all(fields <= set(example.fields) for example in examples):
        raise InvalidInput(
            f"The task {task.name!r} is no choice: its examples have the fields "
            f"{', '.join(sorted(examples[0].fields))}, but option_a and option_b are needed; use "
            "a task such as 'delayed-reward'."
        )
    if task.labels is None:
        _check_answers(task, examples)
        return "options"
    if len(task.labels) != 2:
        raise InvalidInput(
            f"The task {task.name!r} has {len(task.labels)} labels; a choice needs two, the first "
            "for option_a, or none, for answers in the options' own words."
        )
    return "letters"


def _check_answers(task: Task, examples: tuple[Example, ...]) -> None:
    for example in examples:
        options = [example.fields["option_a"], example.fields["option_b"]]
        if options.count(example.answer) != 1:
            raise InvalidInput(
                f"The answer {example.answer!r} of the task {task.name!r} must be exactly one of "
                f"its options {options}; write it as option_a or option_b, or give the task two "
                "labels."
            )
