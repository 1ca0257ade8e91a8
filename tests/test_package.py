"""The package as a whole: light to import, complete, and versioned once."""

import subprocess
import sys
from importlib.metadata import version
from importlib.resources import files

import pytest

import mechtv

HEAVY = ("torch", "transformers", "transformer_lens")
HELP = "from mechtv.cli import main; sys.argv = ['mechtv', '--help']; main()"


def heavy_modules_after(statement: str) -> list[str]:
    """Which heavy packages a fresh interpreter holds after it ran `statement`."""
    code = f"""
import sys
try:
    {statement}
except SystemExit as end:
    assert not end.code, end.code
sys.stderr.write("heavy: " + " ".join(name for name in {HEAVY} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr.rpartition("heavy:")[2].split()


@pytest.mark.parametrize("statement", ["import mechtv", HELP], ids=["import", "help"])
def test_nothing_heavy_is_imported_before_it_is_needed(statement: str) -> None:
    assert heavy_modules_after(statement) == []


def test_the_probe_would_see_a_heavy_import() -> None:
    assert "torch" in heavy_modules_after("import torch")


def test_version_is_that_of_the_distribution() -> None:
    assert mechtv.__version__ == version("mechtv")


@pytest.mark.parametrize("name", mechtv.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(mechtv, name) is not None
    assert name in dir(mechtv)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        mechtv.no_such_name  # noqa: B018


def test_public_names_are_listed_once() -> None:
    assert len(set(mechtv.__all__)) == len(mechtv.__all__)


def test_type_marker_and_built_in_tasks_are_in_the_package() -> None:
    package = files("mechtv")
    assert package.joinpath("py.typed").is_file()
    data = {path.name for path in package.joinpath("tasks", "data").iterdir()}
    assert "present-past.json" in data
