"""What benches share: peak memory, in a process that does nothing else, and progress lines."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

START = time.perf_counter()


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` in a process that has done nothing before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(function, *args).result()


def start_peak(device: torch.device) -> int:
    """Bytes in use now; from here on `peak_bytes` counts.

    On a GPU what torch has allocated, else the process's resident set (Linux).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, see proc(5)
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Most bytes in use at a time since `start_peak`."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status("VmHWM")


def _status(key: str) -> int:
    """Bytes that the kernel tells of this process."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def say(text: str) -> None:
    """A progress line with the seconds since the bench began."""
    print(f"[{time.perf_counter() - START:5.1f} s] {text}", flush=True)
