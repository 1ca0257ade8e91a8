"""Every way to obtain a task vector."""

from mechtv.methods.choosing import LayerChoice, choose_layer
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.i2cl import extract_i2cl
from mechtv.methods.learned import learn
from mechtv.methods.state_vector import extract_state_vector

__all__ = [
    "LayerChoice",
    "choose_layer",
    "extract_hidden_state",
    "extract_i2cl",
    "extract_state_vector",
    "learn",
]
