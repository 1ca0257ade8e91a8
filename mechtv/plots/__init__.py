"""One function per figure: a result goes in, a Plotly figure comes out. Nothing is shown."""

from mechtv.plots.ablation import ablation
from mechtv.plots.accuracy import accuracy_by_layer
from mechtv.plots.attention import attention_shares
from mechtv.plots.decomposition import (
    decomposition,
    decomposition_by_block,
    decomposition_by_head,
)
from mechtv.plots.diagnostics import alignment_bars, alignment_by_layer, diagnostics_panels
from mechtv.plots.distance import dntp_bars
from mechtv.plots.dntp_accuracy import dntp_against_accuracy
from mechtv.plots.head_effects import head_effects
from mechtv.plots.head_maps import head_maps
from mechtv.plots.key_heads import key_heads
from mechtv.plots.lens import lens_curves, lens_tokens
from mechtv.plots.linearity import linearity
from mechtv.plots.method_bars import flexibility_bars, methods_table_bars
from mechtv.plots.methods import accuracy_of_methods
from mechtv.plots.printing import for_print
from mechtv.plots.propagation import propagation_accuracy, propagation_r2
from mechtv.plots.readers import reader_settings, reader_shares
from mechtv.plots.reconstruction import reconstruction
from mechtv.plots.rotation import rotation_by_layer, singular_spectrum
from mechtv.plots.saving import save
from mechtv.plots.themes import dark
from mechtv.plots.tidy import Labels, tidy_bars, tidy_heat, tidy_lines
from mechtv.plots.training import training_curves

__all__ = [
    "Labels",
    "ablation",
    "accuracy_by_layer",
    "accuracy_of_methods",
    "alignment_bars",
    "alignment_by_layer",
    "attention_shares",
    "dark",
    "decomposition",
    "decomposition_by_block",
    "decomposition_by_head",
    "diagnostics_panels",
    "dntp_against_accuracy",
    "dntp_bars",
    "flexibility_bars",
    "for_print",
    "head_effects",
    "head_maps",
    "key_heads",
    "lens_curves",
    "lens_tokens",
    "linearity",
    "methods_table_bars",
    "propagation_accuracy",
    "propagation_r2",
    "reader_settings",
    "reader_shares",
    "reconstruction",
    "rotation_by_layer",
    "save",
    "singular_spectrum",
    "tidy_bars",
    "tidy_heat",
    "tidy_lines",
    "training_curves",
]
