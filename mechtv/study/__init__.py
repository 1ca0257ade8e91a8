"""Studies: many cells of models, tasks, methods and layers; what is done stays done."""

from mechtv.study.compare import MethodComparison, compare_methods
from mechtv.study.correlation import dntp_accuracy_correlation
from mechtv.study.flexibility import flexibility

__all__ = ["MethodComparison", "compare_methods", "dntp_accuracy_correlation", "flexibility"]
