"""A small task, and the tiny models that these tests only read."""

from functools import cache

from builders import tiny

from mechtv.tasks.example import Example
from mechtv.tasks.task import Task
from mechtv.tasks.template import TEMPLATES

WORDS = ("jump", "walk", "play", "look", "talk", "hot", "cold", "big", "France", "tree")
LABELS = ("jump", "hot", "talked")


def task_of(labels=None, n=40):
    """Answers of one to four tokens, or labels; 24 training, 8 validation and 8 test examples."""
    answers = labels or [f"{word}{'ed' * (i % 3)}" for i, word in enumerate(WORDS * 2)]
    examples = tuple(
        Example.pair(f"{WORDS[i % 10]} {'x' * (i // 10)}", answers[i % len(answers)])
        for i in range(n)
    )
    return Task(name="invented", examples=examples, template=TEMPLATES["arrow"], labels=labels)


@cache
def model_of(family="llama"):
    """A model that is only read."""
    return tiny(family)
