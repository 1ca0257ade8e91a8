"""What every test shares: no network, one thread a process, one real model."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import jaxtyping
import pytest
import torch

import mechtv


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much on a busy machine


@pytest.fixture(scope="session")
def model():
    """The real default model. A test that asks for it is marked `model`; leave it as it was."""
    return mechtv.open_model()


@pytest.fixture
def unchecked():
    """Without the type checks of the tests, which come before our own and draw random numbers."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
