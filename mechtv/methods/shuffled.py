"""Prompts whose demonstrations have exchanged their answers: the format without the task."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from transformer_lens.model_bridge import TransformerBridge

from mechtv.seeds import python_rng
from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.task import Task, draw_demonstrations


def shuffled_prompts(
    model: TransformerBridge, task: Task, *, shots: int, n: int, seed: int = 0
) -> Prompts:
    """Validation queries behind training examples that have exchanged their answers."""
    splits = task.splits(seed)
    queries = task.split("validation", n=min(n, len(splits.validation)), seed=seed)
    shown = []
    for query in queries:
        examples = draw_demonstrations(task, splits.train, query, shots, seed=seed)
        answers = exchanged(
            [example.answer for example in examples],
            seed=seed,
            purpose=f"shuffled answers of {task.name} for {query.key!r}",
        )
        shown.append(_with_answers(examples, answers))
    return Prompts.from_examples(model, task, queries, shown)


def exchanged(answers: Sequence[str], *, seed: int, purpose: str) -> tuple[str, ...]:
    """The answers in an order in which as few as possible stand where they stood.

    None does unless one answer makes up more than half. In a random order where equal answers stand
    together, each place takes the answer that is as far ahead as the commonest one is long.
    """
    rng = python_rng(seed, purpose)
    places = rng.sample(range(len(answers)), len(answers))
    first = {answer: turn for turn, answer in enumerate(dict.fromkeys(answers[p] for p in places))}
    places.sort(key=lambda place: first[answers[place]])
    step = max(Counter(answers).values())
    moved = dict(zip(places, places[step:] + places[:step], strict=True))
    return tuple(answers[moved[place]] for place in range(len(answers)))


def _with_answers(examples: Sequence[Example], answers: Sequence[str]) -> list[Example]:
    return [replace(e, answer=answer) for e, answer in zip(examples, answers, strict=True)]
