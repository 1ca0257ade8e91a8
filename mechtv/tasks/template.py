"""How an example becomes text: the template's literal text around the example's fields.

A template is plain text, or (`as_chat`) the turns of a chat. What stands around those turns differs
from model to model: `mechtv.tasks.chat.template_for` writes them for one.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mechtv.errors import InvalidInput
from mechtv.tasks.example import Example

SEPARATOR = "\n"
FIELD = re.compile(r"\{(\w+)\}")
MARKS = ("[chat", "[separator")
"""How the descriptions begin that are more than a text, and no text."""
JSON_TEXT = r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
DESCRIPTION = re.compile(
    rf"\[(?:(chat)(?:, system ({JSON_TEXT}))?|separator ({JSON_TEXT}))\] (.*)", re.DOTALL
)


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """A prompt, and for each demonstration two places in it.

    Args:
        text: the prompt.
        separators: how many characters stand before each demonstration's answer and the white
            space that belongs to it.
        ends: how many stand before each demonstration's end.
    """

    text: str
    separators: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Template:
    """A text such as `"{input} -> {answer}"`, and what joins demonstrations.

    The query is everything before `{answer}` without trailing white space; that white space belongs
    to the answer (" jumped"), as tokenizers want it. Text after `{answer}` closes a demonstration.

    In the chat form the query is what the user says and the answer what the assistant says. The
    model's own chat template then stands for `separator` and for the text after `{answer}`.

    Args:
        text: literal text and fields.
        separator: what joins demonstrations.
        chat: whether demonstrations and query are turns of a chat.
        system: the chat's system message; None for that of the model's chat template, if any, ""
            for an empty one.

    Raises:
        InvalidInput: if `{answer}` is missing or stands twice, nothing stands before it, or there
            is a system message without a chat.
    """

    text: str
    separator: str = SEPARATOR
    chat: bool = False
    system: str | None = None

    def __post_init__(self) -> None:
        if self.text.startswith(MARKS):
            raise InvalidInput(
                f"The template text {self.text!r} begins like the description of a template; "
                "read it with Template.from_description, or begin the text with something else."
            )
        if self.system is not None and not self.chat:
            raise InvalidInput(
                f"The system message {self.system!r} needs the chat form; use "
                "template.as_chat(system=...)."
            )
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

    def as_chat(self, system: str | None = None) -> "Template":
        """The same template in the chat form, for instruction-tuned models."""
        return replace(self, chat=True, system=system)

    @property
    def description(self) -> str:
        """The text, and before it whatever is not as usual: all that decides prompts; for records.

        Such as `[chat, system "..."] {input} -> {answer}` or `[separator "; "] {input}: {answer}`.
        """
        if self.chat:
            system = "" if self.system is None else f", system {_quoted(self.system)}"
            return f"[chat{system}] {self.text}"
        if self.separator != SEPARATOR:
            return f"[separator {_quoted(self.separator)}] {self.text}"
        return self.text

    @classmethod
    def from_description(cls, description: str) -> "Template":
        """The template that `description` describes.

        Raises:
            InvalidInput: if it begins like a description that is more than a text, and is none.
        """
        if not description.startswith(MARKS):
            return cls(text=description)
        found = DESCRIPTION.fullmatch(description)
        if found is None:
            raise InvalidInput(
                f"{description!r} describes no template; write '[chat] {{input}} -> {{answer}}', "
                "'[chat, system \"...\"] ...' or '[separator \"...\"] ...', with message and "
                "separator as JSON strings."
            )
        chat, system, separator, text = found.groups()
        if chat is None:
            return cls(text=text, separator=json.loads(separator, strict=False))
        system = None if system is None else json.loads(system, strict=False)
        return cls(text=text, chat=True, system=system)

    @property
    def anchor(self) -> str:
        """The literal text just before the answer, e.g. " ->": the same for every query.

        Raises:
            InvalidInput: in the chat form; so do `answer`, `demonstration` and `prompt`.
        """
        self._check_plain()
        return FIELD.split(self._parts[0])[-1]

    def query(self, example: Example) -> str:
        """The prompt for one example, up to the answer; in the chat form, what the user says."""
        return _filled(self._parts[0], example)

    def answer(self, text: str) -> str:
        """An answer or label as it continues the query."""
        self._check_plain()
        return self._parts[1] + text

    def demonstration(self, example: Example) -> str:
        """A whole example."""
        closing = _filled(self._parts[2], example)
        return self.query(example) + self.answer(example.answer) + closing

    def prompt(self, query: Example, demonstrations: Sequence[Example] = ()) -> PromptText:
        """A query behind its demonstrations."""
        self._check_plain()
        text, separators, ends = "", [], []
        for example in demonstrations:
            separators.append(len(text) + len(self.query(example)))
            ends.append(len(text) + len(self.demonstration(example)))
            text += self.demonstration(example) + self.separator
        return PromptText(
            text=text + self.query(query), separators=tuple(separators), ends=tuple(ends)
        )

    def _check_plain(self) -> None:
        if self.chat:
            raise InvalidInput(
                "The text around the turns of a chat differs from model to model; use "
                "mechtv.tasks.chat.template_for(model, task.template)."
            )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


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
"""The templates of the papers and of the built-in tasks, by name."""
