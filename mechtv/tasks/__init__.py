"""Tasks: examples, templates and splits. The prompts made of them are in `mechtv.tasks.prompts`."""

from mechtv.tasks.example import Example
from mechtv.tasks.registry import get_task, list_tasks
from mechtv.tasks.regression import regression_task
from mechtv.tasks.task import Splits, Task
from mechtv.tasks.template import TEMPLATES, Template

__all__ = [
    "TEMPLATES",
    "Example",
    "Splits",
    "Task",
    "Template",
    "get_task",
    "list_tasks",
    "regression_task",
]
