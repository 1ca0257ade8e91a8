"""Which code computed a cell: what can change its numbers, as a short checksum."""

import ast
import hashlib
from functools import cache
from pathlib import Path

from mechtv.vectors.card import library_versions

PACKAGES = ("models", "tasks", "vectors", "forward", "methods", "evaluation")
MODULES = ("seeds.py", "study/scoring.py")

_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def code_version(*more: str) -> dict[str, str]:
    """The versions of the libraries and, as `code`, the checksum of mechtv's own source.

    Comments, docstrings and layout do not count.

    Args:
        more: packages that count beside those on which every cell depends, such as "analysis".
    """
    root = Path(__file__).parent.parent
    files = [
        file for package in (*PACKAGES, *more) for file in sorted((root / package).rglob("*.py"))
    ]
    digest = hashlib.sha256()
    for file in (*files, *(root / module for module in MODULES)):
        digest.update(f"{file.relative_to(root).as_posix()}\n".encode())
        digest.update(meaning(file.read_text()).encode())
    return library_versions() | {"code": digest.hexdigest()[:12]}


def meaning(source: str) -> str:
    """What of a source text can change what it does."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return _written(tree)


def _written(node: object) -> str:
    """A syntax tree as text, the same in every version of Python, which `ast.dump` is not."""
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = (
        f"{name}={_written(value)}"
        for name, value in ast.iter_fields(node)
        if value is not None and value != []
    )
    return f"{type(node).__name__}({', '.join(parts)})"
