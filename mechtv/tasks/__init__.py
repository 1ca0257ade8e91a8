"""Tasks: examples, templates, splits, and the prompts made of them."""

from mechtv.tasks.example import Example
from mechtv.tasks.prompts import Prompts
from mechtv.tasks.registry import get_task, list_tasks
from mechtv.tasks.task import Splits, Task
from mechtv.tasks.template import TEMPLATES, Template

__all__ = [
    "TEMPLATES",
    "Example",
    "Prompts",
    "Splits",
    "Task",
    "Template",
    "get_task",
    "list_tasks",
]
