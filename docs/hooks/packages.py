"""A hook of mkdocs: one page a package, with what its `__init__` makes public.

A result stands beside the function that gives it, as their module has them. Names are documented
where they are defined, since several functions are called as their module is. Other pages refer to
`learn` of `mechtv.methods` as [methods.learn].
"""

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = "mechtv"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the pages that the navigation asks for under api/."""
    root = Path(config.config_file_path).parent / ROOT
    for entry in next(entry["API"] for entry in config.nav or () if "API" in entry):
        for package, page in entry.items() if isinstance(entry, dict) else ():
            tree = ast.parse((root / package / "__init__.py").read_text())
            files.append(File.generated(config, page, content=_page(package, tree)))
    return files


def _page(package: str, tree: ast.Module) -> str:
    names = [
        f"[](){{#{package}.{name.name}}}\n\n::: {node.module}.{name.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    ]
    return "\n\n".join([f"# {ROOT}.{package}", ast.get_docstring(tree) or "", *names]) + "\n"
