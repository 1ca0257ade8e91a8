"""The code's version is that of what it does."""

import pytest

from mechtv.study.code import code_version, meaning
from mechtv.vectors.card import library_versions

SOURCE = '''"""A module."""
X = 1


def f(x):
    """Say what it does."""
    return x + X


class C:
    """Say what it is."""

    def g(self):
        """Only this."""
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [("A module", "One"), ("X = 1", "X = 1  # why"), ("    return", "\n    return")],
)
def test_comments_docstrings_and_layout_do_not_count(old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    assert meaning(changed) == meaning(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"), [("X = 1", "X = 2"), ("x + X", "x - X"), ('    """Only', '    x = """Only')]
)
def test_code_does(old, new):
    assert meaning(SOURCE.replace(old, new)) != meaning(SOURCE)


def test_the_libraries_are_named_beside_the_code():
    found = code_version()
    assert set(found) == {*library_versions(), "code"}
    assert found == code_version()
    assert len(found["code"]) == 12
