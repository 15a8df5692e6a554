"""Runs of `train.run` whose processes are forked from a server that has imported everything.

For studies of many short runs: each is what torchrun would start, 1 trainer and 1 searcher over
gloo with their own processes, but for the seconds that importing torch and transformers takes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parent.parent
NUM_RANKS = 2
GRACE_S = 45.0  # for the other rank to leave by itself

# What a rank imports sooner or later; forked, it has them at once.
PRELOAD = [
    "train",  # first: it sets a variable that must be there before torch
    "torch._dynamo",  # an optimizer imports it
    "torch.utils.tensorboard",
    "transformers.generation",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "sft",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
]


class UserError(ValueError):
    """A mistake in the command line."""


class Server:
    """Forks processes that have already imported what a rank needs."""

    def __init__(self) -> None:
        # The server process takes over the environment as it is when the first child is forked.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(ROOT) not in paths:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def resolve(self, override_lists: Sequence[list[str]]) -> list[dict[str, Any]]:
        """The resolved config of each list of overrides.

        Raises:
            UserError: a config that is not valid, with the key and the fix.
        """
        here, there = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_resolve_all, args=(there, override_lists))
        process.start()
        there.close()
        try:
            kind, value = here.recv()
        except EOFError:
            raise RuntimeError("the process that checks the configs died") from None
        finally:
            process.join()
        if kind == "error":
            raise UserError(value)
        return value

    def start(
        self,
        overrides: list[str],
        logs: Sequence[Path],
        *,
        before: Callable[[], None] | None = None,
    ) -> list[Any]:
        """The processes of one run, a rank and a log file each; the caller sees to their end.

        Args:
            before: called in each process before the run; it must be importable there.
        """
        port = _free_port()
        processes: list[Any] = [
            self._context.Process(
                target=_rank,
                args=(rank, len(logs), port, overrides, str(log), before),
                name=f"rank {rank}",
            )
            for rank, log in enumerate(logs)
        ]
        started: list[Any] = []
        try:
            for process in processes:
                process.start()
                started.append(process)
        except BaseException:
            _end(started)
            raise
        return started

    def execute(
        self,
        overrides: list[str],
        logs: Sequence[Path],
        *,
        timeout_s: float,
        before: Callable[[], None] | None = None,
    ) -> str:
        """One run, a process a log file; returns why it failed, or "" after a whole run.

        All its processes have ended afterwards, also where this raises KeyboardInterrupt.

        Args:
            before: called in each process before the run; it must be importable there.
        """
        started: list[Any] = []
        reason = ""
        try:
            started += self.start(overrides, logs, before=before)
            waiting = {process.sentinel: process for process in started}
            deadline = time.monotonic() + timeout_s
            while waiting:
                ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    return reason or f"not finished within {timeout_s:.0f} s"
                for sentinel in ready:
                    process = waiting.pop(sentinel)
                    process.join()
                    if process.exitcode != 0 and not reason:
                        reason = f"{process.name} ended with exit code {process.exitcode}"
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:
            _end(started)
        return reason


def _end(processes: Sequence[Any]) -> None:
    """Ends what is still alive: first as SIGTERM does, so that engines go along, then for good."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.terminate()
    for process in alive:
        process.join(timeout=GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _rank(
    rank: int,
    world_size: int,
    port: int,
    overrides: list[str],
    log: str,
    before: Callable[[], None] | None,
) -> None:
    """The life of one rank, in a process of its own."""
    started = time.monotonic()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    if before is not None:
        before()
    run_rank(overrides, started=started)


def run_rank(overrides: list[str], *, started: float) -> None:
    """`train.run` as the rank that the environment says, with exit code 2 for a user's mistake.

    Args:
        started: time.monotonic() when the process began.
    """
    from omegaconf import OmegaConf

    import train

    cfg = _compose(overrides)
    OmegaConf.set_readonly(cfg, True)
    try:
        train.run(cfg, started=started)
    except ValueError as error:  # as in train.main: a mistake that every rank sees
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _end_with_parent() -> None:
    """A study that was killed leaves no run behind."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _resolve_all(pipe: Connection, override_lists: Sequence[list[str]]) -> None:
    """`Server.resolve`, in a process of its own: the study's needs neither torch nor Hydra."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    import config
    from comm import Ranks

    resolved = []
    try:
        for overrides in override_lists:
            try:
                cfg = _compose(overrides)
            except (HydraException, OmegaConfBaseException) as error:
                raise ValueError(config.explain(error, overrides)) from error
            ranks = Ranks(
                rank=0,
                world_size=NUM_RANKS,
                local_rank=0,
                local_world_size=NUM_RANKS,
                num_trainers=cfg.cluster.trainers,
            )
            config.validate(cfg, ranks)
            resolved.append(OmegaConf.to_container(cfg, resolve=True))
    except ValueError as error:
        pipe.send(("error", str(error)))
        return
    pipe.send(("configs", resolved))


def _compose(overrides: list[str]) -> DictConfig:
    """The config, as Hydra composes it for train.py."""
    from hydra import compose, initialize_config_dir

    import config

    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        return compose("config", overrides=overrides)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
