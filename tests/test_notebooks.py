"""Notebooks hold no secret state: they import only mechtv and are saved as one run left them."""

import ast
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST = 2**20  # bytes
OF_A_MACHINE = ("/home/", "/root/", "/tmp/", "/opt/", "/usr/", "site-packages", "Traceback")


def test_there_are_five():
    assert len(NOTEBOOKS) == 5


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param


def test_they_import_only_mechtv(notebook):
    tree = ast.parse("\n".join(source(cell) for cell in code(notebook)))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(one) for one in imports] == ["import mechtv"]


def test_they_are_saved_as_one_run_from_the_top_left_them(notebook):
    assert [cell["execution_count"] for cell in code(notebook)] == [
        *range(1, len(code(notebook)) + 1)
    ]


def test_what_they_show_is_about_no_machine(notebook):
    shown = json.dumps([cell["outputs"] for cell in code(notebook)])
    assert not [word for word in OF_A_MACHINE if word in shown]
    streams = [o["name"] for cell in code(notebook) for o in cell["outputs"] if "name" in o]
    assert "stderr" not in streams  # no progress bars, no warnings


def test_they_are_small(notebook):
    assert notebook.stat().st_size < MOST


def code(notebook):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])
