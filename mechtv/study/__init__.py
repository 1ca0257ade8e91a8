"""Studies: many methods, layers and tasks, one vector in every way; what is done stays done."""

from mechtv.study.compare import MethodComparison, compare_methods
from mechtv.study.correlation import dntp_accuracy_correlation
from mechtv.study.explain import Explanation, explain
from mechtv.study.flexibility import flexibility

__all__ = [
    "Explanation",
    "MethodComparison",
    "compare_methods",
    "dntp_accuracy_correlation",
    "explain",
    "flexibility",
]
