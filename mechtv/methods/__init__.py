"""Every way to obtain a task vector, to carry it elsewhere, and what it is compared with."""

from mechtv.methods.baselines import train_baseline
from mechtv.methods.carry import carry, carry_vector
from mechtv.methods.choosing import LayerChoice, choose_layer
from mechtv.methods.efficiency import Baseline, Efficiency, efficiency
from mechtv.methods.function_vector import extract_function_vector
from mechtv.methods.head_effects import HeadEffects, measure_head_effects, universal_heads
from mechtv.methods.hidden_state import extract_hidden_state
from mechtv.methods.i2cl import extract_i2cl
from mechtv.methods.learned import learn
from mechtv.methods.linear import fit_linear
from mechtv.methods.mapping import fit_mapping
from mechtv.methods.mapping_scores import compare_mappings
from mechtv.methods.state_vector import extract_state_vector
from mechtv.methods.unembedding_map import UnembeddingMap, unembedding_map

__all__ = [
    "Baseline",
    "Efficiency",
    "HeadEffects",
    "LayerChoice",
    "UnembeddingMap",
    "carry",
    "carry_vector",
    "choose_layer",
    "compare_mappings",
    "efficiency",
    "extract_function_vector",
    "extract_hidden_state",
    "extract_i2cl",
    "extract_state_vector",
    "fit_linear",
    "fit_mapping",
    "learn",
    "measure_head_effects",
    "train_baseline",
    "unembedding_map",
    "universal_heads",
]
