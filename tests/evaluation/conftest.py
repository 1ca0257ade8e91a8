"""Fixtures of this folder's tests."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Without the type checks of the tests, which come before our own and draw random numbers."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
