"""Every way to obtain a task vector."""

from mechtv.methods.choosing import LayerChoice, choose_layer
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.learned import learn

__all__ = ["LayerChoice", "choose_layer", "extract_hidden_state", "learn"]
