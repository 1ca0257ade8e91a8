"""One function per figure: a result goes in, a Plotly figure comes out. Nothing is shown."""

from mechtv.plots.accuracy import accuracy_by_layer
from mechtv.plots.distance import dntp_bars
from mechtv.plots.dntp_accuracy import dntp_against_accuracy
from mechtv.plots.head_effects import head_effects
from mechtv.plots.method_bars import flexibility_bars, methods_table_bars
from mechtv.plots.methods import accuracy_of_methods
from mechtv.plots.training import training_curves

__all__ = [
    "accuracy_by_layer",
    "accuracy_of_methods",
    "dntp_against_accuracy",
    "dntp_bars",
    "flexibility_bars",
    "head_effects",
    "methods_table_bars",
    "training_curves",
]
