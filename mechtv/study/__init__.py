"""Studies: many methods, layers and tasks, one vector in every way; what is done stays done."""

from mechtv.study.claims import claims
from mechtv.study.compare import MethodComparison, compare_methods
from mechtv.study.correlation import dntp_accuracy_correlation
from mechtv.study.estimate import Estimate, estimate
from mechtv.study.explain import Explanation, explain
from mechtv.study.flexibility import flexibility
from mechtv.study.grid import Study
from mechtv.study.results import StudyResults
from mechtv.study.running import run_study

__all__ = [
    "Estimate",
    "Explanation",
    "MethodComparison",
    "Study",
    "StudyResults",
    "claims",
    "compare_methods",
    "dntp_accuracy_correlation",
    "estimate",
    "explain",
    "flexibility",
    "run_study",
]
