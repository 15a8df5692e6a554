"""Runs a function in several real processes that share a gloo process group.

    results = run_ranks(function, 3, "argument")     # function(rank, world_size, "argument")

The function must be at the top level of a module. Arguments and results are plain Python or numpy
values. The processes are forked from a clean server process that has imported torch and the like,
so that one starts in a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# What the slow imports of test modules are; a module that is not there is no error.
PRELOAD = ["numpy", "torch", "transformers", "pytest", "hypothesis", "tiny", "engine", "gradient"]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    may_die: Sequence[int] = (),
    join: bool = True,
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` in that many processes, torchrun's variables set.

    No process leaves before all have returned, so that no rank sees another's sockets close.

    Args:
        may_die: ranks that the test kills; their result is None.
        join: make the default process group (gloo, over a file); False leaves that to `function`.

    Returns:
        Results by rank.

    Raises:
        RuntimeError: with the traceback of the first rank that raised, or the exit code of one
            that ended without a result.
        TimeoutError: some rank has not returned within `timeout_s`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        port = free_port()
        try:
            for rank in range(world_size):
                here, there = context.Pipe()
                process = context.Process(
                    target=_child,
                    args=(there, function, rank, world_size, port, folder, join, args),
                    daemon=True,
                )
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            results = _collect(pipes, processes, timeout_s, may_die)
            for pipe in pipes:
                with suppress(OSError):
                    pipe.send("leave")
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _collect(
    pipes: list[Connection],
    processes: list[Any],
    timeout_s: float,
    may_die: Sequence[int],
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    open_ranks = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout_s
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            ranks = sorted(open_ranks.values())
            raise TimeoutError(f"ranks {ranks} have not returned within {timeout_s:.0f} s")
        for pipe in ready:
            rank = open_ranks.pop(pipe)
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                if rank in may_die:
                    continue
                processes[rank].join(timeout=5)
                code = processes[rank].exitcode
                raise RuntimeError(f"rank {rank} ended with exit code {code}") from None
            if not ok:
                raise RuntimeError(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return results


def _child(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    join: bool,
    args: tuple,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if join:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        pipe.send((True, function(rank, world_size, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    with suppress(EOFError, OSError):  # the parent has gone: leave too
        pipe.recv()
    pipe.close()
    os._exit(0)  # no waiting for threads of a test that failed half-way
