"""In-context regression as text: a function of several numbers, written with four decimals.

The tasks of *Distributional Alignment as a Criterion for Designing Task Vectors in In-Context
Learning* (protocol D5). One function belongs to a task; inputs and weights are drawn as
in Garg et al. 2022, *What Can Transformers Learn In-Context?*: x and w from N(0, I), and the output
weights of the two-layer network from N(0, 2/r). The mean of f(x)² over functions and inputs is then
the dimension for both kinds, so their errors are on one scale.
"""

import math
from collections.abc import Callable, Collection
from typing import Literal, get_args

from mechtv.errors import InvalidInput
from mechtv.seeds import python_rng
from mechtv.tasks.example import Example
from mechtv.tasks.task import Task
from mechtv.tasks.template import Template

Kind = Literal["linear", "relu"]
Function = Callable[[Collection[float]], float]

DECIMALS = 4
DIMENSION, HIDDEN, N = 6, 100, 1000
MOST = 10_000  # of one dimension there are not many more inputs that differ in four decimals
TEMPLATE = Template(text="x: {x}\ny: {answer}")
REGRESSIONS: dict[str, Kind] = {"regression-linear": "linear", "regression-relu": "relu"}
FORMULAS: dict[Kind, str] = {"linear": "w·x", "relu": "Σᵢ αᵢ ReLU(wᵢ·x)"}


def regression_task(
    kind: Kind,
    *,
    dimension: int = DIMENSION,
    hidden: int = HIDDEN,
    n: int = N,
    seed: int = 0,
) -> Task:
    """Inputs of one random function, with its values as answers.

    A demonstration reads `x: [0.1234, -1.2000, ...]`, new line, `y: 0.5678`. The value is that of
    the numbers as they stand in the text, rounded; the first `n` examples do not depend on `n`.

    Args:
        kind: `linear`, f(x) = w·x, or `relu`, f(x) = Σᵢ αᵢ ReLU(wᵢ·x).
        dimension: how many numbers an input has.
        hidden: how many terms the sum of `relu` has (r); `linear` has none.
        n: how many examples; 1,000 give 600 to train and 200 each to validate and to test.
        seed: fixes the function and the inputs.

    Returns:
        A task named `regression-linear` or `regression-relu`, and after every setting that is not
        the default one, such as `regression-relu-hidden50-seed1`.

    Raises:
        InvalidInput: for an unknown kind, sizes below 1, or `n` outside 3 to 10,000.
    """
    function = regression_function(kind, dimension=dimension, hidden=hidden, seed=seed)
    if not 3 <= n <= MOST:
        raise InvalidInput(f"n={n} examples cannot be drawn; use 3 to {MOST}.")
    return Task(
        name=_name(kind, dimension=dimension, hidden=hidden, n=n, seed=seed),
        description=f"The input is {dimension} numbers x; the answer is f(x) = {FORMULAS[kind]}.",
        template=TEMPLATE,
        examples=tuple(
            Example(
                fields={"x": f"[{', '.join(map(_shown, x))}]"},
                answer=_shown(_rounded(function(x))),
            )
            for x in _distinct_inputs(kind, dimension, n, seed)
        ),
    )


def regression_function(
    kind: Kind, *, dimension: int = DIMENSION, hidden: int = HIDDEN, seed: int = 0
) -> Function:
    """The function of `regression_task` with the same settings, from `dimension` numbers to one.

    Raises:
        InvalidInput: for an unknown kind, or sizes below 1.
    """
    if kind not in get_args(Kind):
        raise InvalidInput(f"kind={kind!r} is unknown; use one of {', '.join(get_args(Kind))}.")
    for name, size in (("dimension", dimension), ("hidden", hidden)):
        if size < 1:
            raise InvalidInput(f"{name}={size} is too small; use 1 or more.")
    rng = python_rng(seed, f"function of regression-{kind}")

    def vector(size: int, std: float = 1.0) -> list[float]:
        return [rng.gauss(0.0, std) for _ in range(size)]

    if kind == "linear":
        weights = vector(dimension)
        return lambda x: _dot(weights, x)
    outer = vector(hidden, std=math.sqrt(2 / hidden))
    inner = [vector(dimension) for _ in range(hidden)]
    return lambda x: _dot(outer, [max(_dot(w, x), 0.0) for w in inner])


def _distinct_inputs(kind: Kind, dimension: int, n: int, seed: int) -> list[tuple[float, ...]]:
    rng = python_rng(seed, f"inputs of regression-{kind}")
    drawn: dict[tuple[float, ...], None] = {}
    while len(drawn) < n:
        drawn[tuple(_rounded(rng.gauss(0.0, 1.0)) for _ in range(dimension))] = None
    return list(drawn)


def _name(kind: Kind, **settings: int) -> str:
    usual = {"dimension": DIMENSION, "hidden": HIDDEN, "n": N, "seed": 0}
    if kind == "linear":
        del usual["hidden"]
    others = [f"{name}{settings[name]}" for name in usual if settings[name] != usual[name]]
    return "-".join(["regression", kind, *others])


def _dot(a: Collection[float], b: Collection[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _rounded(number: float) -> float:
    return round(number, DECIMALS) + 0.0  # which makes -0.0 a plain zero


def _shown(number: float) -> str:
    return f"{number:.{DECIMALS}f}"
