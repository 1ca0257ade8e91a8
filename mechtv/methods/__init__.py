"""Every way to obtain a task vector."""

from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.learned import learn

__all__ = ["extract_hidden_state", "learn"]
