"""Prompts: token ids, mask and answers for one set of queries, ready for the model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.tasks.chat import ChatTemplate, template_for
from mechtv.tasks.example import Example
from mechtv.tasks.task import SplitName, Task, draw_demonstrations
from mechtv.tasks.template import PromptText, Template
from mechtv.tasks.tokens import continuation_ids, prompt_ids, token_of_characters, tokenizer_of

PaddingSide = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompts:
    """One set of queries as the model reads them.

    Args:
        tokens: token ids, padded.
        mask: which of them are real.
        last: the column of each row's last prompt token, from which positions count.
        answers: each row's answer ids; a row may have several, or none for bare text.
        labels: the label words, and `label_tokens` their ids, for tasks with a closed label set.
        texts: the prompts as text.
        examples: the queries.
        separators: for each demonstration, the column of the token just before its answer; -1 where
            a row has fewer demonstrations than another.
        demonstration_ends: likewise, the column of each demonstration's last token; in the chat
            form, of the token that ends the assistant's turn, such as "<|im_end|>".
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"]
    last: Int[Tensor, " batch"]
    answers: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    label_tokens: tuple[tuple[int, ...], ...] = ()
    examples: tuple[Example, ...] = ()
    separators: Int[Tensor, "batch demonstration"]
    demonstration_ends: Int[Tensor, "batch demonstration"]

    @classmethod
    def of(
        cls,
        model: TransformerBridge,
        task: Task,
        *,
        split: SplitName = "test",
        shots: int = 0,
        n: int | None = None,
        seed: int = 0,
        demonstrations: Literal["per query", "fixed"] = "per query",
        padding_side: PaddingSide = "left",
    ) -> "Prompts":
        """The prompts of one split of a task.

        Args:
            split: where the queries come from; demonstrations always come from `train`.
            shots: how many demonstrations precede each query.
            n: how many queries; all of the split if None.
            demonstrations: drawn anew for each query, or one fixed set.

        Raises:
            InvalidInput: if the pool holds too few demonstrations, or a prompt with its answer is
                longer than the model's context.
        """
        queries = task.split(split, n=n, seed=seed)
        pool = task.splits(seed).train
        fixed = demonstrations == "fixed"
        shown = [
            draw_demonstrations(task, pool, None if fixed else query, shots, seed=seed)
            for query in queries
        ]
        if fixed and any(query.key in {e.key for e in shown[0]} for query in queries):
            raise InvalidInput(
                f"A query of the {split} split is among the fixed demonstrations; take queries "
                "from another split than train."
            )
        return cls.from_examples(model, task, queries, shown, padding_side=padding_side)

    @classmethod
    def from_examples(
        cls,
        model: TransformerBridge,
        task: Task,
        queries: Sequence[Example],
        demonstrations: Sequence[Sequence[Example]],
        *,
        padding_side: PaddingSide = "left",
    ) -> "Prompts":
        """Prompts for given queries, each with its own demonstrations.

        Raises:
            InvalidInput: for the chat form, if the model has no chat template or one that mechtv
                cannot follow (`mechtv.tasks.chat`); for an empty answer.
        """
        template = template_for(model, task.template)
        written = [
            template.prompt(query, shown)
            for query, shown in zip(queries, demonstrations, strict=True)
        ]
        texts = tuple(prompt.text for prompt in written)
        plain = cls.from_ids(
            model,
            [prompt_ids(model, text) for text in texts],
            answers=tuple(_answer_ids(model, template, query.answer) for query in queries),
            texts=texts,
            padding_side=padding_side,
        )
        labels = task.labels or ()
        separators, ends = _demonstration_columns(model, plain, written)
        return replace(
            plain,
            labels=labels,
            label_tokens=tuple(_answer_ids(model, template, label) for label in labels),
            examples=tuple(queries),
            separators=separators,
            demonstration_ends=ends,
        )

    @classmethod
    def from_texts(
        cls, model: TransformerBridge, texts: Sequence[str], *, padding_side: PaddingSide = "left"
    ) -> "Prompts":
        """Bare texts, without answers."""
        ids = [prompt_ids(model, text) for text in texts]
        return cls.from_ids(model, ids, texts=tuple(texts), padding_side=padding_side)

    @classmethod
    def from_ids(
        cls,
        model: TransformerBridge,
        ids: Sequence[Sequence[int]],
        *,
        answers: tuple[tuple[int, ...], ...] | None = None,
        texts: tuple[str, ...] = (),
        padding_side: PaddingSide = "left",
    ) -> "Prompts":
        """Token ids as they are, padded to one rectangle.

        Raises:
            InvalidInput: for no rows, an empty row, or one longer than the model's context.
        """
        _check_some(ids)
        answers = answers or ((),) * len(ids)
        _check_length(model, ids, answers)
        tokens, mask = _padded(ids, _pad_id(model), padding_side)
        lengths = torch.tensor([len(row) for row in ids])
        none = torch.zeros(len(ids), 0, dtype=torch.long)
        return cls(
            tokens=tokens,
            mask=mask,
            last=mask.long().argmax(dim=1) + lengths - 1,
            answers=answers,
            texts=texts or ("",) * len(ids),
            separators=none,
            demonstration_ends=none,
        )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Int[Tensor, " batch"]:
        """How many real tokens each row has."""
        return self.mask.sum(dim=1)

    @property
    def first_answer_tokens(self) -> Int[Tensor, " batch"]:
        """The first token of each answer.

        Raises:
            InvalidInput: if a row has no answer.
        """
        if not all(self.answers):
            raise InvalidInput("These prompts have no answers; build them from a task.")
        return torch.tensor([ids[0] for ids in self.answers])

    @property
    def first_label_tokens(self) -> Int[Tensor, " label"]:
        """The first token of each label.

        Raises:
            InvalidInput: if the task has no closed label set, or labels share a first token.
        """
        if not self.labels:
            raise InvalidInput(
                "This task has open answers, no closed label set; use the full vocabulary, or "
                "give it labels with task.with_labels([...])."
            )
        firsts = [ids[0] for ids in self.label_tokens]
        shared = [
            label
            for label, first in zip(self.labels, firsts, strict=True)
            if firsts.count(first) > 1
        ]
        if shared:
            raise InvalidInput(
                f"The labels {', '.join(map(repr, shared))} share a first token, so the "
                "label-restricted score is meaningless; rename them, or use task.with_labels(None)."
            )
        return torch.tensor(firsts)

    def select(self, rows: Sequence[int]) -> "Prompts":
        """Some of the rows, without the padding that only the others needed.

        Raises:
            InvalidInput: for no rows.
        """
        _check_some(rows)
        index = torch.tensor(rows)
        used = torch.nonzero(self.mask[index].any(dim=0)).flatten()
        first, end = int(used[0]), int(used[-1]) + 1
        return replace(
            self,
            tokens=self.tokens[index, first:end],
            mask=self.mask[index, first:end],
            last=self.last[index] - first,
            answers=tuple(self.answers[row] for row in rows),
            texts=tuple(self.texts[row] for row in rows),
            examples=tuple(self.examples[row] for row in rows) if self.examples else (),
            separators=_shifted(self.separators[index], first),
            demonstration_ends=_shifted(self.demonstration_ends[index], first),
        )

    def with_answers(self) -> "Prompts":
        """The prompts followed by their answers but for each answer's last token (teacher forcing).

        `last` still points at the prompt's own last token, so positions mean what they meant.
        """
        rows = range(len(self))
        ids = [[*self._real_ids(row), *self.answers[row][:-1]] for row in rows]
        pad = int(self.tokens[~self.mask][0]) if not bool(self.mask.all()) else 0
        tokens, mask = _padded(ids, pad, "left")
        starts = mask.long().argmax(dim=1)
        moved = starts - self.mask.long().argmax(dim=1)
        return replace(
            self,
            tokens=tokens,
            mask=mask,
            last=self.last + moved,
            separators=_shifted(self.separators, -moved[:, None]),
            demonstration_ends=_shifted(self.demonstration_ends, -moved[:, None]),
        )

    def _real_ids(self, row: int) -> list[int]:
        ids: list[int] = self.tokens[row][self.mask[row]].tolist()
        return ids


def _answer_ids(
    model: TransformerBridge, template: Template | ChatTemplate, answer: str
) -> tuple[int, ...]:
    return continuation_ids(model, template.anchor, template.answer(answer))


def _demonstration_columns(
    model: TransformerBridge, prompts: Prompts, written: Sequence[PromptText]
) -> Int[Tensor, "2 batch demonstration"]:
    """The columns of each demonstration's separator and of its last token."""
    width = max(len(prompt.ends) for prompt in written)
    columns = torch.full((2, len(written), width), -1, dtype=torch.long)
    starts = prompts.mask.long().argmax(dim=1)
    for row, prompt in enumerate(written):
        if prompt.ends:
            offsets = [*prompt.separators, *prompt.ends]
            tokens = torch.tensor(token_of_characters(model, prompt.text, offsets))
            both = rearrange(tokens, "(mark shown) -> mark shown", mark=2)
            columns[:, row, : both.shape[1]] = starts[row] + both
    return columns


def _padded(
    ids: Sequence[Sequence[int]], pad: int, side: PaddingSide
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    width = max(map(len, ids))
    tokens = torch.full((len(ids), width), pad, dtype=torch.long)
    mask = torch.zeros(len(ids), width, dtype=torch.bool)
    for row, own in enumerate(ids):
        columns = slice(width - len(own), width) if side == "left" else slice(0, len(own))
        tokens[row, columns] = torch.tensor(own)
        mask[row, columns] = True
    return tokens, mask


def _shifted(columns: Tensor, by: int | Tensor) -> Tensor:
    return torch.where(columns >= 0, columns - by, columns)


def _pad_id(model: TransformerBridge) -> int:
    if model.tokenizer is None:
        return 0
    tokenizer = tokenizer_of(model)
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(i) for i in ids if i is not None)


def _check_some(rows: Sequence[object]) -> None:
    if not rows:
        raise InvalidInput("There are no prompts; give at least one.")


def _check_length(
    model: TransformerBridge, ids: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> None:
    lengths = [len(row) + max(len(answer) - 1, 0) for row, answer in zip(ids, answers, strict=True)]
    longest, shortest = max(lengths), min(map(len, ids))
    if not shortest:
        raise InvalidInput(
            f"Row {list(map(len, ids)).index(0)} has no real token; every "
            "prompt needs at least one."
        )
    if longest > model.cfg.n_ctx:
        raise InvalidInput(
            f"Prompt {lengths.index(longest)} has {longest} tokens with its answer, but the "
            f"model's context holds {model.cfg.n_ctx}; use fewer shots, a shorter "
            "template, or shorter inputs."
        )
