"""Forward passes of a model under a task vector."""

from mechtv.forward.memory import forget, full_passes, keep_at_most, steady
from mechtv.forward.run import capture, in_batches, kept, last_logits, logits_at, run
from mechtv.forward.variants import scan

__all__ = [
    "capture",
    "forget",
    "full_passes",
    "in_batches",
    "keep_at_most",
    "kept",
    "last_logits",
    "logits_at",
    "run",
    "scan",
    "steady",
]
