"""Where trainer 0 and all engine workers make the group over which weights travel, and remake it.

A process group is a fixed set of processes, so an engine that is restarted needs another one. The
control store counts restarts; each count has a group of its own. What is sent over it is in
weights.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

FOREVER = timedelta(days=3650)
_RESTARTS = "restarts"  # in the control store: engines restarted so far
_CLOSED = "closed"  # in the control store: nothing more is published
_CONNECT_S = 60.0  # to make a group's connections, once all its members are there
_MEETING_PERIOD_S = 0.05  # between looks at who is there
_RESTART_PERIOD_S = 0.5  # between looks whether an engine was restarted
_COMPLETION_PERIOD_S = 0.0002  # between looks whether NCCL has finished


@dataclass
class WeightGroup:
    """Trainer 0 and all engine workers: small messages by gloo, buckets by gloo or NCCL.

    A GPU that waits for a message by NCCL is busy, and the next version may be minutes away.
    The last reference to a gloo group closes its connections, so that the other ends fail too
    instead of waiting: whoever gives a group up must keep none, nor a traceback whose frames do.
    """

    messages: Any  # ProcessGroupGloo
    buckets: Any  # the same, or ProcessGroupNCCL

    def abort(self) -> None:
        """Ends what is under way by NCCL. This has not been run on several GPUs yet."""
        if self.buckets is not self.messages:
            self.buckets.abort()


class RestartedError(RuntimeError):
    """An engine was restarted: the present group of the weights is to be left."""


def count_restart(host: str, port: int, *, timeout_s: float, key: str = "") -> None:
    """Tells trainer 0 and all engine workers, by the control store, to meet anew.

    To be called after the old workers' end and before the new ones' start.
    """
    _open_store(host, port, timeout_s, key).add(_RESTARTS, 1)


def _open_store(host: str, port: int, timeout_s: float, key: str) -> dist.Store:
    server = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(f"weights{key}", server)


class Meeting:
    """Where trainer 0 (rank 0) and all engine workers (1..size-1) make their group.

    Over the control store, because an engine worker is not a rank of the job. The store counts
    restarts of engines; every count has a group of its own, a generation. First all say that they
    are there, which can be given up for a newer generation, then they connect. Used by one thread.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        *,
        backend: str,
        timeout_s: float,
        key: str = "",
        restart_timeout_s: float = 0.0,
    ) -> None:
        """Connects to the store.

        Args:
            timeout_s: bounds a meeting; afterwards a receiver may wait for ever (the watchdog of
                the control plane looks after that).
            key: part of the names that they meet under.
            restart_timeout_s: what the news of a restart may take after a group has failed; 0:
                engines are not restarted.
        """
        self._store = _open_store(host, port, timeout_s, key)
        self._rank, self._size, self._backend = rank, size, backend
        self._timeout_s, self._restart_timeout_s = timeout_s, restart_timeout_s
        self._generation = 0
        self._looked_at = 0.0  # time.monotonic() of the last look at the count

    @property
    def period_s(self) -> float | None:
        """How often whoever waits should `check`; None: never."""
        return _RESTART_PERIOD_S if self._restart_timeout_s else None

    def join(self) -> WeightGroup:
        """The group of the newest generation, when all its members are there.

        Raises:
            TimeoutError: some have not come.
            RuntimeError: they could not be connected.
        """
        while True:
            self._generation = self._store.add(_RESTARTS, 0)
            store = dist.PrefixStore(str(self._generation), self._store)
            if self._all_there(store):
                return self._connect(store)

    def check(self) -> None:
        """Raises RestartedError if an engine was restarted since `join`; cheap if called often."""
        now = time.monotonic()
        if self._restart_timeout_s and now - self._looked_at >= _RESTART_PERIOD_S:
            self._looked_at = now
            if self._is_over():
                raise RestartedError("an engine was restarted")

    def wait_for_restart(self) -> bool:
        """After the group has failed: whether all are to meet again.

        False: it was closed, or no engine was restarted in time.
        """
        deadline = time.monotonic() + self._restart_timeout_s
        while not self._is_over():
            if time.monotonic() >= deadline or self.is_closed():
                return False
            time.sleep(_MEETING_PERIOD_S)
        return True

    def close(self) -> None:
        """Says that nobody needs the group any more."""
        self._store.set(_CLOSED, "1")

    def is_closed(self) -> bool:
        """Whether anybody has said so."""
        return self._store.check([_CLOSED])

    def finish(self, work: dist.Work) -> None:
        """Waits for a broadcast.

        Raises:
            RuntimeError: it failed, or an engine was restarted.
        """
        # NCCL's `wait` returns before the broadcast has ended, and what waits for the stream then
        # would wait for a dead member for ever.
        while self._backend == "nccl" and self._restart_timeout_s and not work.is_completed():
            self.check()
            time.sleep(_COMPLETION_PERIOD_S)
        work.wait()

    def _is_over(self) -> bool:
        return self._store.add(_RESTARTS, 0) != self._generation

    def _all_there(self, store: dist.Store) -> bool:
        """Waits for all members; False: there is a newer generation."""
        deadline = time.monotonic() + self._timeout_s
        store.set(f"there/{self._rank}", "1")
        members = [f"there/{rank}" for rank in range(self._size)]
        while not store.check(members):
            if self._is_over():
                return False
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(members) if not store.check([key])]
                raise TimeoutError(
                    f"ranks {missing} of the weights' group have not come within "
                    f"{self._timeout_s:.0f} s (0 is trainer 0, the others are engine workers)"
                )
            time.sleep(_MEETING_PERIOD_S)
        return True

    def _connect(self, store: dist.Store) -> WeightGroup:
        limit = timedelta(seconds=min(self._timeout_s, _CONNECT_S))
        messages = dist.ProcessGroupGloo(store, self._rank, self._size, limit)
        messages._set_default_timeout(FOREVER)
        if self._backend != "nccl":
            return WeightGroup(messages, messages)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        buckets = dist.ProcessGroupNCCL(
            dist.PrefixStore("nccl", store), self._rank, self._size, options
        )
        return WeightGroup(messages, buckets)
