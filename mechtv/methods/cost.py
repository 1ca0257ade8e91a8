"""What a pass costs: seconds for each query beside the plain model's, and the memory at its peak.

Each prompt is run in full, as one that was never seen before. Use `benchmarks/` to time mechtv
itself.
"""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypedDict

import torch
from torch import Tensor

from mechtv.tasks.prompts import Prompts

Pass = Callable[[Prompts], Tensor]


class Costs(TypedDict):
    """The costs of a pass, as a `Baseline` holds them; see there."""

    seconds_per_query: float
    seconds_plain: float
    batch_size: int
    peak_bytes: int | None


def costs_of(
    compute: Pass, prompts: Prompts, plain: Pass, zero_shot: Prompts, *, batch_size: int
) -> Costs:
    """The costs of a pass beside those of the plain model's pass over as many prompts.

    The two are timed in turn, so that what else the machine does hits both.
    """
    ours, theirs = _batches(prompts, batch_size), _batches(zero_shot, batch_size)
    compute(ours[-1])  # to warm up
    plain(theirs[-1])
    seconds, seconds_plain = [], []
    for batch, other in zip(ours, theirs, strict=True):
        seconds.append(_seconds(compute, batch))
        seconds_plain.append(_seconds(plain, other))
    return {
        "seconds_per_query": median(seconds),
        "seconds_plain": median(seconds_plain),
        "batch_size": batch_size,
        "peak_bytes": peak_bytes(compute, ours[-1]),
    }


def peak_bytes(compute: Pass, batch: Prompts) -> int | None:
    """The bytes that a pass over a batch takes above what is there before it.

    On a GPU the allocator's; on Linux the process's, a lower bound, since the pass may take memory
    that the process has already; None where neither can be read. What the device or the process
    held at its peak before is forgotten.
    """
    device = compute(batch).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        compute(batch)
        return int(torch.cuda.max_memory_allocated(device) - before)
    if device.type != "cpu" or not _can_read_sizes():
        return None
    before = _resident("VmRSS")
    compute(batch)
    return max(_resident("VmHWM") - before, 0)


def mean_length(prompts: Prompts) -> float:
    """The prompts' mean number of tokens."""
    return float(prompts.lengths.double().mean())


def _batches(prompts: Prompts, batch_size: int) -> list[Prompts]:
    """Whole batches of rows of like length; the rows that are left over only if there are none."""
    chunks = prompts.lengths.argsort(stable=True).split(batch_size)
    whole = [rows for rows in chunks if len(rows) == batch_size] or list(chunks)
    return [prompts.select(rows.tolist()) for rows in whole]


def _seconds(compute: Pass, batch: Prompts) -> float:
    """The seconds that one pass takes for each of its queries."""
    started = time.perf_counter()
    compute(batch)[:1, :1].tolist()  # waits for the device
    return (time.perf_counter() - started) / len(batch)


def _can_read_sizes() -> bool:
    """On Linux, after giving back what the allocator keeps and forgetting the peak so far."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):  # not allowed in some containers; other C libraries
        return False
    return True


def _resident(name: str) -> int:
    """A size of this process in bytes, as Linux says it in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
