"""How good a vector is: accuracies with intervals, dNTP, choices, generated text, regression."""

from mechtv.evaluation.accuracy import Evaluation, evaluate
from mechtv.evaluation.choice import Choices, evaluate_choice
from mechtv.evaluation.composition import Composition, evaluate_composition
from mechtv.evaluation.dntp import Divergence, dntp
from mechtv.evaluation.generated import Generated, evaluate_generated
from mechtv.evaluation.intervals import Comparison, Estimate
from mechtv.evaluation.regression import Regression, evaluate_regression
from mechtv.evaluation.transfer import TransferMatrix, transfer_matrix

__all__ = [
    "Choices",
    "Comparison",
    "Composition",
    "Divergence",
    "Estimate",
    "Evaluation",
    "Generated",
    "Regression",
    "TransferMatrix",
    "dntp",
    "evaluate",
    "evaluate_choice",
    "evaluate_composition",
    "evaluate_generated",
    "evaluate_regression",
    "transfer_matrix",
]
