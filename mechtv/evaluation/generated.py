"""What the model writes by greedy decoding, compared with the answer as text.

`evaluate` reads exact match off one pass under teacher forcing: whether the answer's tokens come
first. Here the tokens are generated, so what follows the answer counts too: "jumped" is right,
"jumpedness" is not. A vector acts on the prompt, on new tokens or on both, as `acting_on` says.

Use `evaluate` where the answer's tokens are enough: it needs one pass instead of one for each
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.evaluation.intervals import Comparison, Estimate, compare_shares, share
from mechtv.evaluation.provenance import UNKNOWN, Provenance, setting_of
from mechtv.evaluation.seeds import seed_for
from mechtv.forward.generate import greedy
from mechtv.forward.run import in_batches
from mechtv.tasks.chat import template_for
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import SplitName, Task
from mechtv.tasks.tokens import continuation_ids, tokenizer_of
from mechtv.vectors.layout import ActsOn
from mechtv.vectors.vector import TaskVector

BEHIND_ANSWER = 2  # tokens that show whether the longest answer ends where it should


@dataclass(frozen=True, kw_only=True, eq=False)
class Generated:
    """The answers that a model wrote.

    Args:
        task, setting, shots, split: what was scored; `setting` is the vector's method, `zero-shot`
            or `in-context`.
        acts_on: the tokens on which the vector acted; None without one.
        new_tokens: how many tokens were written for each query; `stop` the text that ends one.
        queries: the prompts' queries, in order.
        answers: the right answers; `texts` what was written up to `stop`. Both without white space
            at their ends.
        correct: where the two are equal.
        correct_start: where the first tokens written are the answer's, whatever follows. This is
            the exact match of `evaluate`.
        provenance: model, weights, template and seed.
    """

    task: str
    setting: str
    acts_on: ActsOn | None
    shots: int
    split: str
    new_tokens: int
    stop: str | None
    queries: tuple[tuple[str, ...], ...]
    answers: tuple[str, ...]
    texts: tuple[str, ...]
    correct: Bool[np.ndarray, " query"]
    correct_start: Bool[np.ndarray, " query"]
    provenance: Provenance = UNKNOWN

    @property
    def exact_match(self) -> Estimate:
        """The share of queries whose text is the answer, with the Wilson interval."""
        return share(self.correct)

    @property
    def starts_with_answer(self) -> Estimate:
        """The share of queries whose first tokens are the answer's, with the Wilson interval."""
        return share(self.correct_start)

    def table(self) -> pd.DataFrame:
        """One row a score: value, 95 % interval, n."""
        about = {
            "task": self.task,
            "setting": self.setting,
            "acts on": self.acts_on,
            "shots": self.shots,
            "split": self.split,
        }
        scores = {
            "exact match, generated": self.exact_match,
            "starts with the answer": self.starts_with_answer,
        }
        return pd.DataFrame(
            about
            | {"score": name, "value": e.value, "low": e.low, "high": e.high, "n": e.n}
            | self.provenance.columns()
            for name, e in scores.items()
        )

    def compare(self, other: "Generated") -> Comparison:
        """This exact match minus another's on the same queries, with the exact McNemar test.

        Raises:
            InvalidInput: if the queries differ.
        """
        if self.queries != other.queries:
            raise InvalidInput(
                f"{self.setting!r} and {other.setting!r} were scored on different queries; "
                "use the same task, split, n and seed for both."
            )
        return compare_shares(self.correct, other.correct)


def evaluate_generated(
    model: TransformerBridge,
    task: Task,
    vector: TaskVector | None = None,
    *,
    shots: int = 0,
    new_tokens: int | None = None,
    split: SplitName = "test",
    n: int | None = None,
    seed: int | None = None,
    batch_size: int = 32,
    stop: str | None = "\n",
    progress: bool | None = None,
) -> Generated:
    r"""Let the plain model, the in-context model, or a vector write the answers of one split.

    Args:
        vector: None for the plain model; `vector.acting_on("both")` lets it act while writing.
        shots: demonstrations before each query: 0 is zero-shot.
        new_tokens: how many tokens are written; two more than the task's longest answer has if
            None. With fewer, a text may be cut where it happens to be right.
        n: how many queries; the whole split if None.
        seed: fixes the splits and the demonstrations; the vector's own, or 0, if None.
        stop: the text at which an answer ends; for a template that closes its demonstrations, such
            as "{input} -> {answer}.", give that text. A special token ends every answer. None
            takes all that was written.

    Raises:
        InvalidInput: if the vector does not fit the model, the pool is too small, an answer holds
            `stop`, or a prompt with `new_tokens` exceeds the context.
    """
    seed = seed_for(vector) if seed is None else seed
    prompts = Prompts.of(model, task, split=split, shots=shots, n=n, seed=seed)
    _check_stop(stop, prompts.examples)
    new_tokens = _enough_tokens(model, task) if new_tokens is None else new_tokens
    setting = setting_of(vector, shots)
    rows: list[list[int]] = write(
        model,
        prompts,
        vector,
        new_tokens=new_tokens,
        batch_size=batch_size,
        title=f"{setting} texts, {task.name}",
        progress=progress,
    ).tolist()
    space = template_for(model, task.template).answer("")  # it may hold the stop text itself
    written = [text_of(model, row).removeprefix(space) for row in rows]
    texts = tuple(_up_to(stop, text).strip() for text in written)
    answers = tuple(example.answer.strip() for example in prompts.examples)
    starts = [tuple(row[: len(a)]) == a for row, a in zip(rows, prompts.answers, strict=True)]
    return Generated(
        task=task.name,
        setting=setting,
        acts_on=None if vector is None else vector.acts_on,
        shots=shots,
        split=split,
        new_tokens=new_tokens,
        stop=stop,
        queries=tuple(example.key for example in prompts.examples),
        answers=answers,
        texts=texts,
        correct=np.array([text == right for text, right in zip(texts, answers, strict=True)]),
        correct_start=np.array(starts),
        provenance=Provenance.of(model, task, seed),
    )


def write(
    model: TransformerBridge,
    prompts: Prompts,
    vector: TaskVector | None = None,
    *,
    new_tokens: int,
    batch_size: int = 32,
    title: str = "texts",
    progress: bool | None = None,
) -> Int[Tensor, "query new"]:
    """The greedy continuation of each prompt, in batches of prompts of like length.

    Raises:
        InvalidInput: if `new_tokens` or `batch_size` is below 1, or the longest prompt with them
            exceeds the context.
    """
    if new_tokens < 1:
        raise InvalidInput(f"new_tokens={new_tokens} leaves nothing to read; use 1 or more.")
    longest = int(prompts.lengths.max())
    if longest + new_tokens > model.cfg.n_ctx:
        raise InvalidInput(
            f"A prompt of {longest} tokens and new_tokens={new_tokens} exceed the model's context "
            f"of {model.cfg.n_ctx}; use fewer shots, or fewer new tokens."
        )

    def compute(batch: Prompts) -> Int[Tensor, "batch new"]:
        return greedy(model, batch, vector, new_tokens=new_tokens).cpu()

    with torch.no_grad():
        return in_batches(prompts, compute, batch_size=batch_size, title=title, show=progress)


def text_of(model: TransformerBridge, ids: Sequence[int]) -> str:
    """New tokens as text, up to the first special token (the end of a sequence, or padding)."""
    tokenizer = tokenizer_of(model)
    special = set(tokenizer.all_special_ids)
    end = next((place for place, token in enumerate(ids) if token in special), len(ids))
    text: str = tokenizer.decode(list(ids[:end]), clean_up_tokenization_spaces=False)
    return text


def _up_to(stop: str | None, text: str) -> str:
    return text if stop is None else text.partition(stop)[0]


def _enough_tokens(model: TransformerBridge, task: Task) -> int:
    template, examples = template_for(model, task.template), task.examples + task.test_examples
    answers = task.labels or dict.fromkeys(example.answer for example in examples)
    lengths = [len(continuation_ids(model, template.anchor, template.answer(a))) for a in answers]
    return max(lengths) + BEHIND_ANSWER


def _check_stop(stop: str | None, examples: Sequence[Example]) -> None:
    if stop is None:
        return
    if not stop:
        raise InvalidInput(
            "stop='' ends every text before it begins; give the text that follows an answer, or "
            "None."
        )
    cut = next((e.answer for e in examples if stop in e.answer.strip()), None)
    if cut is not None:
        raise InvalidInput(
            f"The answer {cut!r} holds the stop text {stop!r}, so it could never be written; give "
            "a text that follows answers, or None."
        )
