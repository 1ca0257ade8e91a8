"""Every figure function once, from results made by hand: no model is needed."""

from collections.abc import Callable
from functools import cache

import plotly.graph_objects as go
from plots import test_decomposition as parts
from plots import test_head_effects as effects
from plots import test_key_heads as heads
from plots import test_lens as lens
from plots import test_linearity as linear
from plots import test_methods as methods
from plots import test_propagation as fits
from plots import test_readers as readers
from plots import test_reconstruction as circuits
from plots import test_tidy as tidy
from plots.fake import fake_overview

from mechtv import plots


def _maps() -> list[fits.Propagation]:
    return [fits.fake(layer) for layer in fits.LAYERS]


BUILDERS: dict[str, Callable[[], go.Figure]] = {
    "ablation": lambda: plots.ablation(heads.ablated()),
    "accuracy_by_layer": lambda: plots.accuracy_by_layer(fake_overview()),
    "accuracy_of_methods": lambda: plots.accuracy_of_methods(methods.fake_comparison()),
    "alignment_bars": lambda: plots.alignment_bars(lens.fake_alignment()),
    "alignment_by_layer": lambda: plots.alignment_by_layer(lens.fake_diagnostics()),
    "attention_shares": lambda: plots.attention_shares(heads.attended(12)),
    "decomposition": lambda: plots.decomposition(parts.fake(post_norms=True)),
    "decomposition_by_block": lambda: plots.decomposition_by_block(parts.fake(post_norms=True)),
    "decomposition_by_head": lambda: plots.decomposition_by_head(parts.fake()),
    "diagnostics_panels": lambda: plots.diagnostics_panels(lens.fake_diagnostics()),
    "dntp_against_accuracy": lambda: plots.dntp_against_accuracy(methods.fake_comparison()),
    "dntp_bars": lambda: plots.dntp_bars(fake_overview()),
    "flexibility_bars": lambda: plots.flexibility_bars(methods.flexibility_table()),
    "head_effects": lambda: plots.head_effects(effects.fake()),
    "head_maps": lambda: plots.head_maps(parts.fake_maps()),
    "key_heads": lambda: plots.key_heads(heads.ranking()),
    "lens_curves": lambda: plots.lens_curves(lens.fake_lens()),
    "lens_tokens": lambda: plots.lens_tokens(lens.fake_lens()),
    "linearity": lambda: plots.linearity(linear.fake()),
    "methods_table_bars": lambda: plots.methods_table_bars(methods.fake_comparison()),
    "propagation_accuracy": lambda: plots.propagation_accuracy(_maps()),
    "propagation_r2": lambda: plots.propagation_r2(_maps()),
    "reader_settings": lambda: plots.reader_settings(readers.fake()),
    "reader_shares": lambda: plots.reader_shares(readers.fake(readers.THREE)),
    "reconstruction": lambda: plots.reconstruction(circuits.by_layer()),
    "rotation_by_layer": lambda: plots.rotation_by_layer(fits.turned()),
    "singular_spectrum": lambda: plots.singular_spectrum(fits.turned()),
    "tidy_bars": lambda: tidy.bars(),
    "tidy_heat": lambda: tidy.heat(),
    "tidy_lines": lambda: tidy.lines(),
    "training_curves": lambda: plots.training_curves(fake_overview()),
}


@cache
def drawn(name: str) -> go.Figure:
    """The figure, drawn once for all tests; they leave it as it is."""
    return BUILDERS[name]()
