"""How an example becomes text: the template's literal text around the example's fields."""

import re
from dataclasses import dataclass

from mechtv.errors import InvalidInput
from mechtv.tasks.example import Example

FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True)
class Template:
    """A text such as `"{input} -> {answer}"`, and what joins demonstrations.

    The query is everything before `{answer}` without trailing white space; that white space belongs
    to the answer (" jumped"), as tokenizers want it. Text after `{answer}` closes a demonstration.

    Raises:
        InvalidInput: if `{answer}` is missing or stands twice, or nothing stands before it.
    """

    text: str
    separator: str = "\n"

    def __post_init__(self) -> None:
        if self.text.count("{answer}") != 1:
            raise InvalidInput(
                f"The template {self.text!r} must hold {{answer}} exactly once, "
                'for example "{input} -> {answer}".'
            )
        if re.search(r"[{}]", FIELD.sub("", self.text)):
            raise InvalidInput(
                f"The template {self.text!r} has a brace that belongs to no field; write fields "
                "like {input}, and no other braces."
            )
        if not self._parts[0]:
            raise InvalidInput(f"The template {self.text!r} has nothing before {{answer}}.")

    @property
    def _parts(self) -> tuple[str, str, str]:
        """The query, the white space before the answer, and the text after the answer."""
        before, after = self.text.split("{answer}")
        query = before.rstrip()
        return query, before[len(query) :], after

    @property
    def fields(self) -> frozenset[str]:
        """The example fields that the template reads."""
        return frozenset(FIELD.findall(self.text)) - {"answer"}

    @property
    def anchor(self) -> str:
        """The literal text just before the answer, e.g. " ->": the same for every query."""
        return FIELD.split(self._parts[0])[-1]

    def query(self, example: Example) -> str:
        """The prompt for one example, up to the answer."""
        return _filled(self._parts[0], example)

    def answer(self, text: str) -> str:
        """An answer or label as it continues the query."""
        return self._parts[1] + text

    def demonstration(self, example: Example) -> str:
        """A whole example."""
        return self.query(example) + self.answer(example.answer) + self._parts[2]


def _filled(text: str, example: Example) -> str:
    return FIELD.sub(lambda match: example.fields[match[1]], text)


TEMPLATES: dict[str, Template] = {
    "arrow": Template(text="{input} -> {answer}"),
    "qa": Template(text="Q: {input}\nA: {answer}"),
    "sentiment": Template(text="Review: {text}\nSentiment: {answer}"),
    "sentence-sentiment": Template(text="Sentence: {text}\nSentiment: {answer}"),
    "label": Template(text="Sentence: {text}\nLabel: {answer}"),
    "question": Template(text="Question: {text}\nAnswer Type: {answer}"),
    "text-label": Template(text="Text: {text}\nLabel: {answer}"),
    "topic": Template(text="News: {text}\nType: {answer}"),
    "input-label": Template(text="Input: {text}\nLabel: {answer}"),
    "entailment": Template(
        text="The question is: {premise} ? The answer is: {hypothesis} {answer}"
    ),
    "premise-hypothesis": Template(
        text="Premise: {premise}\nHypothesis: {hypothesis}\nAnswer: {answer}"
    ),
    "choice": Template(text="{question}\nA. {option_a}\nB. {option_b}\nAnswer: {answer}"),
    "open-choice": Template(text="{question}\nEither {option_a} or {option_b}.\nAnswer: {answer}"),
}
"""The templates of the papers and of the built-in tasks, by name (METHODS, section 5)."""
