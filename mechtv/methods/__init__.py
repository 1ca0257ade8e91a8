"""Every way to obtain a task vector."""

from mechtv.methods.choosing import LayerChoice, choose_layer
from mechtv.methods.function_vector import extract_function_vector
from mechtv.methods.head_effects import HeadEffects, measure_head_effects, universal_heads
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.i2cl import extract_i2cl
from mechtv.methods.learned import learn
from mechtv.methods.linear import fit_linear
from mechtv.methods.mapping import fit_mapping
from mechtv.methods.mapping_scores import compare_mappings
from mechtv.methods.state_vector import extract_state_vector

__all__ = [
    "HeadEffects",
    "LayerChoice",
    "choose_layer",
    "compare_mappings",
    "extract_function_vector",
    "extract_hidden_state",
    "extract_i2cl",
    "extract_state_vector",
    "fit_linear",
    "fit_mapping",
    "learn",
    "measure_head_effects",
    "universal_heads",
]
