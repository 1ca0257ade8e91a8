"""Choices between a reward now and a larger one later, in two forms.

The *A/B form* asks for a letter; the *open form* asks for the option's own words. In both, the
immediate option stands first in exactly half of the examples, so a preference for the first option
(or for "A") is not mistaken for a preference for reward now. The answer is always the immediate
option: accuracy is the share of immediate-reward answers.
"""

from typing import Any

from mechtv.tasks.example import Example
from mechtv.tasks.task import Task, as_template


def delayed_reward(name: str, plain: dict[str, Any], *, template: str) -> Task:
    """The delayed-reward task under `choice` (A/B form) or `open-choice` (open form)."""
    by_letter = template == "choice"
    return Task(
        name=name,
        description=plain["description"],
        labels=("A", "B") if by_letter else None,
        template=as_template(template),
        examples=tuple(
            _example(row, immediate_first=index % 2 == 0, by_letter=by_letter)
            for index, row in enumerate(plain["rows"])
        ),
    )


def _example(row: list[str], *, immediate_first: bool, by_letter: bool) -> Example:
    question, immediate, delayed = row
    first, second = (immediate, delayed) if immediate_first else (delayed, immediate)
    letter = "A" if immediate_first else "B"
    return Example(
        fields={"question": question, "option_a": first, "option_b": second},
        answer=letter if by_letter else immediate,
    )
