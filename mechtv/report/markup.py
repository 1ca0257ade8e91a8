"""HTML from text. Only these functions make `Html`, and all that enters them as text is escaped."""

import unicodedata
from collections.abc import Mapping, Sequence
from html import escape
from typing import NewType

from mechtv.evaluation.intervals import Estimate
from mechtv.plots.style import fixed, interval_text

Html = NewType("Html", str)

NOTHING = Html('<span class="muted">–</span>')
SIGNS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}
UNSEEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"}


def text(plain: str) -> Html:
    """Plain text."""
    return Html(escape(plain))


def visible(plain: str, *, spaces: bool) -> str:
    r"""Text in which line breaks, and perhaps `spaces`, are signs, and what cannot be seen a code.

    So " a\n" reads "·a↵", and a zero-width space reads "\u200b".
    """
    return "".join(c if c == " " and not spaces else _sign(c) for c in plain)


def literal(plain: str) -> Html:
    """Text from a prompt or a model, in the typewriter face; nothing at all is said in words."""
    if not plain:
        return Html('<span class="muted">(nothing)</span>')
    return Html(f'<bdi class="text">{escape(visible(plain, spaces=False))}</bdi>')


def chips(tokens: Sequence[str]) -> Html:
    """Tokens, each in a box of its own, spaces shown."""
    if not tokens:
        return NOTHING
    items = "".join(
        f"<li><bdi>{escape(visible(token, spaces=True)) or '∅'}</bdi></li>" for token in tokens
    )
    return Html(f'<ul class="chips">{items}</ul>')


def number(estimate: Estimate | None, digits: int = 2) -> Html:
    """A value with its interval below; a dash where there is none."""
    if estimate is None:
        return NOTHING
    interval = interval_text(estimate, digits)
    below = f'<span class="interval">{interval}</span>' if interval else ""
    return Html(f"{fixed(estimate.value, digits)} {below}")


def marked(plain: str, right: bool) -> Html:
    """An answer of a model with a sign, a colour and a spoken word for right or wrong."""
    kind, sign, word = ("right", "✓", "right") if right else ("wrong", "✗", "wrong")
    return Html(
        f'<span class="{kind}"><span aria-hidden="true">{sign}</span>'
        f'<span class="unseen">{word}: </span> {literal(plain)}</span>'
    )


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Html]],
    *,
    kind: str = "",
    chosen: Sequence[bool] = (),
) -> Html:
    """A table that scrolls inside its own box; the first cell of each row is its header."""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    flags = chosen or [False] * len(rows)
    body = "\n".join(_row(cells, flag) for cells, flag in zip(rows, flags, strict=True))
    return Html(
        f'<div class="scroll {kind}" tabindex="0" role="region" aria-label="{escape(caption)}">\n'
        f"<table><caption><span>{escape(caption)}</span></caption>\n"
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def facts(pairs: Mapping[str, str]) -> Html:
    """Names and values for a description list."""
    return Html("\n".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in pairs.items()))


def key_figure(label: str, estimate: Estimate, color: str) -> Html:
    """One big number with its interval."""
    below = " · ".join(filter(None, (interval_text(estimate), f"n = {estimate.n}")))
    return Html(
        f'<div style="--mark: {escape(color)}"><dt>{escape(label)}</dt>'
        f'<dd class="number">{fixed(estimate.value)}</dd><dd class="muted">{below}</dd></div>'
    )


def _row(cells: Sequence[Html], chosen: bool) -> str:
    first, *others = cells
    opening = '<tr class="chosen">' if chosen else "<tr>"
    return f'{opening}<th scope="row">{first}</th>{"".join(f"<td>{c}</td>" for c in others)}</tr>'


def _sign(character: str) -> str:
    if character in SIGNS:
        return SIGNS[character]
    if unicodedata.category(character) in UNSEEN:
        return f"\\u{ord(character):04x}"
    return character
