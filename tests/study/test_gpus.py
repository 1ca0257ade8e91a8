"""Each process of a machine has a GPU of its own while there are enough."""

from types import SimpleNamespace

import pytest
import torch

from mechtv.study import gpus


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of two GPUs, where each call stands for a process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = {0: SimpleNamespace(uuid="a"), 1: SimpleNamespace(uuid="b")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    held = []
    monkeypatch.setattr(gpus, "_HELD", held)
    yield held
    for lock in held:
        lock.release(force=True)


def test_processes_take_different_gpus_and_share_when_none_is_left(machine):
    take = gpus.gpu.__wrapped__
    assert [take(), take()] == ["cuda:0", "cuda:1"]
    assert take() in ("cuda:0", "cuda:1")
    machine[0].release()
    assert take() == "cuda:0"


def test_without_a_gpu_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert gpus.gpu() is None
