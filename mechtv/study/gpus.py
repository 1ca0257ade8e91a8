"""One GPU for each process of a machine, without anyone who deals them out.

A process takes the first GPU whose lock is free, and holds the lock as long as it lives; the system
frees it when the process dies. A process that shows itself but one GPU, by CUDA_VISIBLE_DEVICES,
takes that one.
"""

import os
import tempfile
from functools import cache
from getpass import getuser
from pathlib import Path

import torch
from filelock import FileLock, Timeout

_HELD: list[FileLock] = []  # a lock that nobody refers to is freed


@cache
def gpu() -> str | None:
    """This process's GPU, such as "cuda:1"; None without any.

    If there are more processes than GPUs, the rest share.
    """
    if not torch.cuda.is_available():
        return None
    number_of = torch.cuda.device_count()
    for number in range(number_of):
        lock = FileLock(_place(number))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        _HELD.append(lock)
        return f"cuda:{number}"
    return f"cuda:{os.getpid() % number_of}"


def _place(number: int) -> Path:
    """A GPU's lock, by its own name: its number is that of this process's choice of GPUs."""
    name = torch.cuda.get_device_properties(number).uuid
    return Path(tempfile.gettempdir()) / f"mechtv-{getuser()}-gpu-{name}.lock"
