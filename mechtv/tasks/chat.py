"""Templates in the chat form of one model: what its tokenizer's chat template makes of the turns.

Each demonstration is a user turn (the template's query) and an assistant turn (the answer); the
query is the last user turn, and the tokenizer's generation prompt follows it, which the answer
continues. Where answers and demonstrations lie is found from the text that the chat template puts
around its turns, and every prompt is checked against that. Base models have no chat template; use
the plain form there.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import cycle
from typing import Any

from jinja2 import TemplateError
from transformer_lens.model_bridge import TransformerBridge

from mechtv.errors import InvalidInput
from mechtv.models import describe
from mechtv.tasks.example import Example
from mechtv.tasks.template import PromptText, Template
from mechtv.tasks.tokens import tokenizer_of

QUESTION, ANSWER = "\ue000question\ue001", "\ue000answer\ue001"


def template_for(model: TransformerBridge, template: Template) -> "Template | ChatTemplate":
    """What writes a model's prompts: the template itself, or its chat form.

    Raises:
        InvalidInput: for the chat form, if the tokenizer has no chat template.
    """
    return ChatTemplate(model, template) if template.chat else template


class ChatTemplate:
    """The chat form of a template for one model, with the methods of a plain `Template`.

    White space at the ends of a turn is left out, as many chat templates do. A system message that
    the chat template puts in by itself stays.

    Raises:
        InvalidInput: if the tokenizer has no chat template; when text is asked for, if the chat
            template refuses the turns (or has no place for the system message), changes their
            text, or puts something between its generation prompt and an answer (a thinking
            block, say).
    """

    def __init__(self, model: TransformerBridge, template: Template) -> None:
        self._tokenizer: Any = tokenizer_of(model)
        self._model = describe(model).name
        self._template = template
        self._texts: dict[int, tuple[str, ...]] = {}
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidInput(
                f"The tokenizer of {self._model!r} has no chat template; use the task's plain "
                "template, without as_chat(), or an instruction-tuned model."
            )

    @property
    def anchor(self) -> str:
        """The text between a query and its answer: the end of the user turn, generation prompt."""
        return self._around(0)[-1]

    @property
    def closing(self) -> str:
        """The text that ends an assistant turn, such as "<|im_end|>"; "" if there is none."""
        return self._closing(self._around(1)[2])

    def query(self, example: Example) -> str:
        """What the user says."""
        return self._template.query(example).strip()

    def answer(self, text: str) -> str:
        """An answer or label as it continues the generation prompt."""
        return self._around(1)[1].removeprefix(self.anchor) + text.strip()

    def demonstration(self, example: Example) -> str:
        """A whole example as it stands before a query, from the beginning of the chat."""
        prompt = self.prompt(example, [example])
        return prompt.text[: prompt.ends[0]]

    def prompt(self, query: Example, demonstrations: Sequence[Example] = ()) -> PromptText:
        """A query behind its demonstrations. A demonstration ends with the text that ends its turn.

        The white space between turns is not part of a demonstration.
        """
        pairs = [(self.query(example), example.answer.strip()) for example in demonstrations]
        around = self._around(len(pairs))
        text, separators, ends = around[0], [], []
        for (question, answer), before, after in zip(
            pairs, around[1:-1:2], around[2::2], strict=True
        ):
            separators.append(len(text + question + self.anchor))
            text += question + before + answer
            ends.append(len(text + self._closing(after)))
            text += after
        text += self.query(query) + self.anchor
        turns = [turn for pair in pairs for turn in pair] + [self.query(query)]
        if text != self._rendered(turns):
            raise self._error(f"changes what is said in its turns, here in {text!r}")
        return PromptText(text=text, separators=tuple(separators), ends=tuple(ends))

    def _around(self, n_demonstrations: int) -> tuple[str, ...]:
        """The text before, between and after the turns of some demonstrations and a query."""
        if n_demonstrations not in self._texts:
            turns = [f"\ue000{number}\ue001" for number in range(2 * n_demonstrations + 1)]
            pieces, rest = [], self._rendered(turns)
            for turn in turns:
                piece, found, rest = rest.partition(turn)
                if not found:
                    raise self._error("does not write every turn, or not in order")
                pieces.append(piece)
            self._check(pieces, rest)
            self._texts[n_demonstrations] = (*pieces, rest)
        return self._texts[n_demonstrations]

    def _check(self, pieces: Sequence[str], anchor: str) -> None:
        """Answers must follow what a query ends with, but for white space."""
        for before in pieces[1::2]:
            if not before.startswith(anchor) or before.removeprefix(anchor).strip():
                raise self._error(
                    f"ends a prompt with {anchor!r}, but puts {before!r} before an answer"
                )
        if anchor.endswith(" "):
            raise self._error(
                f"ends a prompt with {anchor!r}, whose last space tokenizers give to the answer"
            )
        if (self._template.system or "").strip() not in "".join(pieces):
            raise self._error("has no place for a system message")

    def _closing(self, after: str) -> str:
        """The part of the text after an answer that stands there whatever follows."""
        return _common_start(after, self._after_last_answer).rstrip()

    @cached_property
    def _after_last_answer(self) -> str:
        """What follows an answer with which the chat ends."""
        return self._rendered((QUESTION, ANSWER), to_answer=False).partition(ANSWER)[2]

    def _rendered(self, turns: Sequence[str], *, to_answer: bool = True) -> str:
        """The chat as text, by the tokenizer's chat template."""
        system = self._template.system
        messages = [] if system is None else [{"role": "system", "content": system.strip()}]
        roles = cycle(("user", "assistant"))
        messages += [
            {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)
        ]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=to_answer
            )
        except (TemplateError, TypeError, ValueError) as error:
            what = "the turns" if system is None else "the turns or the system message"
            raise self._error(f"refuses {what} ({error})") from error
        return text

    def _error(self, what: str) -> InvalidInput:
        return InvalidInput(
            f"The chat template of {self._model!r} {what}; use the task's plain template, without "
            "as_chat(), or another model."
        )


def _common_start(a: str, b: str) -> str:
    equal = [mine == other for mine, other in zip(a, b, strict=False)]
    return a[: [*equal, False].index(False)]
