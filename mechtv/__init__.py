"""mechtv: train, extract, score and explain the task vectors of language models.

The public surface. Names are imported when first used, so `import mechtv` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mechtv import analysis, plots
    from mechtv.errors import InvalidInput, MechtvError, UnknownName
    from mechtv.evaluation import (
        Choices,
        Composition,
        Divergence,
        Evaluation,
        Generated,
        Regression,
        TransferMatrix,
        dntp,
        evaluate,
        evaluate_choice,
        evaluate_composition,
        evaluate_generated,
        evaluate_regression,
        transfer_matrix,
    )
    from mechtv.methods import (
        Baseline,
        Efficiency,
        HeadEffects,
        LayerChoice,
        UnembeddingMap,
        carry,
        carry_vector,
        choose_layer,
        compare_mappings,
        efficiency,
        extract_function_vector,
        extract_hidden_state,
        extract_i2cl,
        extract_state_vector,
        fit_linear,
        fit_mapping,
        learn,
        measure_head_effects,
        train_baseline,
        unembedding_map,
        universal_heads,
    )
    from mechtv.models import list_models, open_model
    from mechtv.study import (
        MethodComparison,
        compare_methods,
        dntp_accuracy_correlation,
        flexibility,
    )
    from mechtv.tasks import Example, Task, Template, get_task, list_tasks, regression_task
    from mechtv.tasks.prompts import Prompts
    from mechtv.vectors import (
        Add,
        Affine,
        Card,
        Edit,
        Linear,
        Replace,
        ResidualMLP,
        Site,
        TaskVector,
    )

_HOMES = {
    "mechtv.errors": ("InvalidInput", "MechtvError", "UnknownName"),
    "mechtv.evaluation": (
        "Choices",
        "Composition",
        "Divergence",
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
    ),
    "mechtv.methods": (
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
    ),
    "mechtv.models": ("list_models", "open_model"),
    "mechtv.study": (
        "MethodComparison",
        "compare_methods",
        "dntp_accuracy_correlation",
        "flexibility",
    ),
    "mechtv.tasks": ("Example", "Task", "Template", "get_task", "list_tasks", "regression_task"),
    "mechtv.tasks.prompts": ("Prompts",),
    "mechtv.vectors": (
        "Add",
        "Affine",
        "Card",
        "Edit",
        "Linear",
        "Replace",
        "ResidualMLP",
        "Site",
        "TaskVector",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("analysis", "plots")

__all__ = [
    "Add",
    "Affine",
    "Baseline",
    "Card",
    "Choices",
    "Composition",
    "Divergence",
    "Edit",
    "Efficiency",
    "Evaluation",
    "Example",
    "Generated",
    "HeadEffects",
    "InvalidInput",
    "LayerChoice",
    "Linear",
    "MechtvError",
    "MethodComparison",
    "Prompts",
    "Regression",
    "Replace",
    "ResidualMLP",
    "Site",
    "Task",
    "TaskVector",
    "Template",
    "TransferMatrix",
    "UnembeddingMap",
    "UnknownName",
    "analysis",
    "carry",
    "carry_vector",
    "choose_layer",
    "compare_mappings",
    "compare_methods",
    "dntp",
    "dntp_accuracy_correlation",
    "efficiency",
    "evaluate",
    "evaluate_choice",
    "evaluate_composition",
    "evaluate_generated",
    "evaluate_regression",
    "extract_function_vector",
    "extract_hidden_state",
    "extract_i2cl",
    "extract_state_vector",
    "fit_linear",
    "fit_mapping",
    "flexibility",
    "get_task",
    "learn",
    "list_models",
    "list_tasks",
    "measure_head_effects",
    "open_model",
    "plots",
    "regression_task",
    "train_baseline",
    "transfer_matrix",
    "unembedding_map",
    "universal_heads",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mechtv.{name}")
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'mechtv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
