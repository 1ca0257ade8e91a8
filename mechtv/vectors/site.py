"""Where in the model an edit acts: a component of one layer, at chosen token positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from mechtv.errors import InvalidInput

Component = Literal["resid_pre", "resid_post", "attn_out", "mlp_out", "z"]
Positions = tuple[int, ...] | Literal["all"]

COMPONENTS: tuple[Component, ...] = get_args(Component)


@dataclass(frozen=True, kw_only=True)
class Site:
    """A component x a layer x token positions.

    Args:
        component: `resid_pre` (the input of the block), `resid_post`, `attn_out`, `mlp_out`, or `z`
            (the heads' outputs before W_O).
        layer: the block, counted from 0.
        positions: counted from each row's own last real token, which is -1; or `"all"` real tokens.
            They are kept in rising order, (-3, -1), which is also the order of a value's rows.
        heads: at `z`, the query heads, counted from 0 and kept in rising order; all if None.

    Raises:
        InvalidInput: for an unknown component, a negative layer, positions that are not distinct
            negative numbers, or heads that are not distinct or stand elsewhere than at `z`.
    """

    layer: int
    component: Component = "resid_pre"
    positions: Positions = (-1,)
    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.component not in COMPONENTS:
            raise InvalidInput(
                f"component={self.component!r} is unknown; use one of {', '.join(COMPONENTS)}."
            )
        if self.layer < 0:
            raise InvalidInput(f"layer={self.layer} is negative; layers count up from 0.")
        object.__setattr__(self, "positions", checked_positions(self.positions))
        if self.heads is not None:
            object.__setattr__(self, "heads", _checked_heads(self.heads, self.component))

    @property
    def hook_name(self) -> str:
        """The TransformerLens hook point of this site."""
        place = "attn.hook_z" if self.component == "z" else f"hook_{self.component}"
        return f"blocks.{self.layer}.{place}"

    def __str__(self) -> str:
        places = "all" if self.positions == "all" else ",".join(map(str, self.positions))
        heads = "" if self.heads is None else f" heads {','.join(map(str, self.heads))}"
        return f"{self.component}[{self.layer}]{heads} at {places}"


def checked_positions(positions: object) -> Positions:
    """Positions in their one form: `"all"`, or distinct negative numbers in rising order."""
    if positions == "all":
        return "all"
    numbers = _distinct(positions, lambda position: position < 0)
    if numbers is None:
        raise InvalidInput(
            f"positions={positions!r} are not positions; use distinct negative numbers counted "
            'from the last real token (-1 is that token), or "all".'
        )
    return numbers


def _checked_heads(heads: object, component: Component) -> tuple[int, ...]:
    if component != "z":
        raise InvalidInput(f"heads={heads!r} name heads, but {component} has none; use z.")
    numbers = _distinct(heads, lambda head: head >= 0)
    if numbers is None:
        raise InvalidInput(f"heads={heads!r} are not heads; use distinct numbers from 0 on.")
    return numbers


def _distinct(given: object, allowed: Callable[[int], bool]) -> tuple[int, ...] | None:
    """One or several distinct allowed numbers in rising order; None if they are not that."""
    numbers = (given,) if isinstance(given, int) else given
    if (
        not isinstance(numbers, (tuple, list, range))
        or not numbers
        or not all(isinstance(number, int) and allowed(number) for number in numbers)
        or len(set(numbers)) != len(numbers)
    ):
        return None
    return tuple(sorted(numbers))
