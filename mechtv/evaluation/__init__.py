"""How good a vector is: accuracies with intervals, and dNTP."""

from mechtv.evaluation.accuracy import Evaluation, evaluate
from mechtv.evaluation.dntp import Divergence, dntp
from mechtv.evaluation.intervals import Comparison, Estimate

__all__ = ["Comparison", "Divergence", "Estimate", "Evaluation", "dntp", "evaluate"]
