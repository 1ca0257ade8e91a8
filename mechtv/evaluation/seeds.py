"""The seed on whose splits vectors were made, so that they are scored on queries they never saw."""

from collections.abc import Iterable

from mechtv.errors import InvalidInput
from mechtv.vectors.card import Card
from mechtv.vectors.vector import TaskVector


def seed_for(vector: TaskVector | None) -> int:
    """The seed of a vector, or of those that it was computed from; 0 if there is none.

    Raises:
        InvalidInput: if it was computed from vectors of several seeds.
    """
    return 0 if vector is None else common_seed([vector])


def common_seed(vectors: Iterable[TaskVector]) -> int:
    """The seed whose splits all the vectors were made on; 0 if none of them has a seed.

    Raises:
        InvalidInput: if there are several.
    """
    seeds = set[int]().union(*(_seeds(vector.card) for vector in vectors))
    if len(seeds) > 1:
        raise InvalidInput(
            f"The vectors were made on the splits of the seeds {sorted(seeds)}, so one's test "
            "queries are another's training queries; give seed=, or make them with one seed."
        )
    return seeds.pop() if seeds else 0


def _seeds(card: Card) -> set[int]:
    if card.seed is not None:
        return {card.seed}
    return set[int]().union(*map(_seeds, card.sources))
