"""What a score was made with: it stands in every result, so that two can be told apart."""

from dataclasses import asdict, dataclass

from transformer_lens.model_bridge import TransformerBridge

from mechtv.models import describe
from mechtv.tasks.task import Task
from mechtv.vectors.vector import TaskVector


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The model with its revision, raw or processed weights, the template, and the seed."""

    model: str = "unknown"
    revision: str = "unknown"
    weights: str = "unknown"
    template: str = "unknown"
    seed: int | None = None

    @classmethod
    def of(cls, model: TransformerBridge, task: Task, seed: int) -> "Provenance":
        """That of a model's score on a task."""
        about = describe(model)
        return cls(
            model=about.name,
            revision=about.revision,
            weights=about.weights,
            template=task.template.description,
            seed=int(seed),
        )

    def columns(self) -> dict[str, str | int | None]:
        """Its entries as columns of a table."""
        return asdict(self)


UNKNOWN = Provenance()
"""That of scores made by hand."""


def setting_of(vector: TaskVector | None, shots: int) -> str:
    """What a run is called in results: the vector's method, `in-context`, or `zero-shot`."""
    if vector is not None:
        return vector.card.method
    return "in-context" if shots else "zero-shot"
