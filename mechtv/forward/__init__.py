"""Forward passes of a model under a task vector."""

from mechtv.forward.run import capture, in_batches, last_logits, run

__all__ = ["capture", "in_batches", "last_logits", "run"]
