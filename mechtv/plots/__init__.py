"""One function per figure: a result goes in, a Plotly figure comes out. Nothing is shown."""

from mechtv.plots.accuracy import accuracy_by_layer
from mechtv.plots.distance import dntp_bars
from mechtv.plots.head_effects import head_effects
from mechtv.plots.training import training_curves

__all__ = ["accuracy_by_layer", "dntp_bars", "head_effects", "training_curves"]
