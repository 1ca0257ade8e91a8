"""Errors of numbers that the model writes: in-context regression (protocol D5).

Greedy decoding; the first number on the first line counts. A text without a number counts as the
number 0, which is what both kinds of `regression_task` give on average over functions. So every
setting is scored on the same queries and none gains by silence; the share of such texts stands in
the table beside the errors.
"""

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.generated import text_of, write
from mechtv.evaluation.intervals import Comparison, Estimate, compare_means, mean, share
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import seed_for
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.vectors.vector import TaskVector

SHOTS = 12
IF_UNREADABLE = 0.0
LARGEST = 1e100  # larger numbers could not be squared and averaged
BASELINE = "mean of the training answers"

Score = Literal["MSE", "MAE"]

_MINUS = "[-−–]"
_NUMBER = re.compile(
    rf"(?<![\w.])(?:[+]|{_MINUS})?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    rf"(?:[eE](?:[+]|{_MINUS})?[0-9]+)?"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Regression:
    """The numbers that a model wrote, and their errors.

    Args:
        task, setting, shots, split: what was scored; `setting` is the vector's method, `zero-shot`
            or `in-context`.
        new_tokens: how many tokens were written for each query.
        queries: the prompts' queries, in order.
        answers: the right numbers; `texts` what was written for them.
        predictions: the numbers that were read; NaN where a text holds none.
        training_mean: the mean of the training answers, which the baseline predicts always.
        provenance: model, weights, template and seed.
    """

    task: str
    setting: str
    shots: int
    split: str
    new_tokens: int
    queries: tuple[tuple[str, ...], ...]
    answers: Float[np.ndarray, " query"]
    texts: tuple[str, ...]
    predictions: Float[np.ndarray, " query"]
    training_mean: float
    provenance: Provenance = UNKNOWN

    @property
    def errors(self) -> Float[np.ndarray, " query"]:
        """Prediction minus answer; a text without a number counts as 0."""
        errors: np.ndarray = np.nan_to_num(self.predictions, nan=IF_UNREADABLE) - self.answers
        return errors

    @property
    def baseline_errors(self) -> Float[np.ndarray, " query"]:
        """The same for a prediction of the mean of the training answers."""
        errors: np.ndarray = self.training_mean - self.answers
        return errors

    @property
    def mse(self) -> Estimate:
        """The mean squared error, with the bootstrap interval."""
        return mean(self.errors**2)

    @property
    def rmse(self) -> Estimate:
        """The square root of the mean squared error and of its interval's ends."""
        return _root(self.mse)

    @property
    def mae(self) -> Estimate:
        """The mean absolute error, with the bootstrap interval."""
        return mean(np.abs(self.errors))

    @property
    def unparsed(self) -> Estimate:
        """The share of texts that hold no number, with the Wilson interval."""
        return share(np.isnan(self.predictions))

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n; then the baseline's errors."""
        own = _scores(self.errors) | {"no number": self.unparsed}
        rows = [(self.setting, self.shots, name, e) for name, e in own.items()]
        rows += [(BASELINE, 0, name, e) for name, e in _scores(self.baseline_errors).items()]
        return pd.DataFrame(
            {"task": self.task, "setting": setting, "shots": shots, "split": self.split}
            | {"score": name, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
            | self.provenance.columns()
            for setting, shots, name, e in rows
        )

    def compare(self, other: "Regression", score: Score = "MSE") -> Comparison:
        """This error minus another's on the same queries, with the Wilcoxon signed-rank test.

        Args:
            score: `MSE` or `MAE`.

        Raises:
            InvalidInput: for another score, or if the queries differ.
        """
        if score not in get_args(Score):
            raise InvalidInput(f"score={score!r} cannot be compared; use 'MSE' or 'MAE'.")
        if self.queries != other.queries:
            raise InvalidInput(
                f"{self.setting!r} and {other.setting!r} were scored on different queries; "
                "use the same task, split, n and seed for both."
            )
        power = 2 if score == "MSE" else 1
        return compare_means(np.abs(self.errors) ** power, np.abs(other.errors) ** power)


def evaluate_regression(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector | None = None,
    *,
    shots: int | None = None,
    split: SplitName = "test",
    n: int | None = None,
    new_tokens: int = 15,
    demonstrations: Literal["per query", "fixed"] = "per query",
    seed: int | None = None,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Regression:
    """Let the plain model, the in-context model, or a vector write the numbers of one split.

    Args:
        task: one whose answers are numbers, such as `regression_task("linear")`.
        vector: None for the plain model.
        shots: demonstrations before each query: 0 is zero-shot. If None, 12 for the plain model
            (the paper's) and 0 under a vector.
        n: how many queries; the whole split if None.
        new_tokens: how many tokens are written (the paper's 15).
        demonstrations: drawn anew for each query, or one fixed set.
        seed: fixes the splits and the demonstrations; the vector's own, or 0, if None.

    Raises:
        InvalidInput: if an answer is no number, the vector does not fit the model, the pool is too
            small, or a prompt with `new_tokens` exceeds the context.
    """
    seed = seed_for(vector) if seed is None else seed
    if shots is None:
        shots = SHOTS if vector is None else 0
    setting = setting_of(vector, shots)
    training = _numbers(task, [example.answer for example in task.splits(seed).train])
    prompts = Prompts.of(
        model, task, split=split, shots=shots, n=n, seed=seed, demonstrations=demonstrations
    )
    answers = _numbers(task, [example.answer for example in prompts.examples])
    rows: list[list[int]] = write(
        model,
        prompts,
        vector,
        new_tokens=new_tokens,
        batch_size=batch_size,
        title=f"{setting} numbers, {task.name}",
        progress=progress,
    ).tolist()
    texts = tuple(text_of(model, row) for row in rows)
    return Regression(
        task=task.name,
        setting=setting,
        shots=shots,
        split=split,
        new_tokens=new_tokens,
        queries=tuple(example.key for example in prompts.examples),
        answers=answers,
        texts=texts,
        predictions=np.array([read_number(text) for text in texts]),
        training_mean=float(training.mean()),
        provenance=Provenance.of(model, task, seed),
    )


def read_number(text: str) -> float:
    """The first number on the first line of a text; NaN if there is none.

    A number has a decimal point, perhaps a sign directly before it (a hyphen, "−" or "–") and an
    exponent. Digits inside a word ("x1") are none, and neither is one beyond 1e100.
    """
    line = re.split(r"[\r\n]", text, maxsplit=1)[0]
    found = _NUMBER.search(line)
    number = float(re.sub(_MINUS, "-", found[0])) if found else math.nan
    return number if abs(number) <= LARGEST else math.nan


def _numbers(task: Task, answers: list[str]) -> Float[np.ndarray, " answer"]:
    numbers = np.array([read_number(answer) for answer in answers])
    strange = [a for a, number in zip(answers, numbers, strict=True) if math.isnan(number)]
    if strange:
        raise InvalidInput(
            f"The answers of {task.name!r} are not all numbers ({strange[0]!r} is none); use a "
            'task such as regression_task("linear").'
        )
    return numbers


def _scores(errors: Float[np.ndarray, " query"]) -> dict[str, Estimate]:
    squared = mean(errors**2)
    return {"MSE": squared, "RMSE": _root(squared), "MAE": mean(np.abs(errors))}


def _root(e: Estimate) -> Estimate:
    return Estimate(value=math.sqrt(e.value), low=math.sqrt(e.low), high=math.sqrt(e.high), n=e.n)
