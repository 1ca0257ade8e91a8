"""What the tests of vectors share."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the type checks of the tests: what a user sees who gives a wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
