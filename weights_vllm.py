"""Weights by vLLM's own weight-transfer engine (`weights.backend=vllm_nccl`), beside weights.py.

THIS PATH HAS NOT BEEN RUN ON A GPU. It is written against vLLM 0.32
(`vllm/distributed/weight_transfer`); its tests put memory in NCCL's place. Use
`weights.backend=auto` unless you are ready to look after it.

What is different from `weights.Publisher` and `weights.Receiver`:
- Nothing is received in the background. An engine that is offered a version stops decoding, says
  that it is ready, and loads while the trainer's thread sends; every engine waits for the slowest.
  So engines stand still for the whole transfer, not for a copy on their own device.
- No second copy of the model lies on the engines' devices: tensors arrive in buckets, and each
  worker of a tensor-parallel engine keeps its part of each.
- There is no checksum; the probes (`weights.probe_every`) are what tells that weights are wrong.
- Every version that is offered is loaded by all. Newer snapshots replace one that waits to be
  offered, so that only the newest is offered next.

The control plane of a transfer is vLLM's protocol of four calls (`VLLMWeightSyncClient`), carried
by keys of the job's control store. Trainer: `init` (where to meet), `offer/v` (version, flags,
meta), `update/v` (the tensors). Engine s: `joined/s`, `ready/v/s`, `loaded/v/s`. NCCL's group meets
over a store of vLLM's own, which pickles: the job's network must be trusted.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weights import (
    FLAG_EVALUATE,
    FLAG_FINAL,
    Publisher,
    TensorSpec,
    views,
)

logger = logging.getLogger("tba")

BACKEND = "vllm_nccl"  # in `weights.backend`
_POLL_PERIOD_S = 0.02
_FOREVER = timedelta(days=20)  # the store counts milliseconds in 31 bits


def check_device(device: torch.device) -> None:
    """Raises ValueError if this backend can't work on `device`."""
    if device.type != "cuda":
        raise ValueError(
            f"weights.backend={BACKEND} needs GPUs (vLLM transfers by NCCL): set it to auto or gloo"
        )


def open_store(host: str, port: int, timeout_s: float, key: str = "") -> dist.Store:
    """A connection of its own to the job's control store; `key` is part of all names."""
    server = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(f"weights{key}", server)


# --------------------------------------------------------------------------- trainer side


class StoreClient:
    """vLLM's `VLLMWeightSyncClient`: its calls reach every searcher through the control store.

    Consumes: the engines' answers. Produces: offers. Waits for: all engines, for ever, in `start_
    weight_update` (an engine may be evaluating) and `update_weights`; a dead one ends the job by
    its silence.
    """

    def __init__(
        self, store: dist.Store, num_engines: int, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._store, self._on_ready = store, on_ready
        self._engines = range(num_engines)
        self.offer: dict[str, Any] = {"version": 0, "flags": 0, "meta": {}}  # the next to be sent

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Tells the engines where to meet; returns when all have."""
        self._store.set("init", json.dumps(init_info))
        self._store.wait([f"joined/{s}" for s in self._engines], _FOREVER)

    def start_weight_update(self) -> None:
        """Offers a version; returns when every engine stands still for it."""
        version = self.offer["version"]
        self._store.set(f"offer/{version}", json.dumps(self.offer))
        self._store.set("offered", str(version))
        self._wait_for_all("ready")
        self._on_ready()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Says which tensors come; returns when every engine has loaded them."""
        version = self.offer["version"]
        self._store.set(f"update/{version}", json.dumps(update_info))
        self._wait_for_all("loaded")
        for key in ("offer", "update"):
            self._store.delete_key(f"{key}/{version}")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Engines finish by themselves, before they say that they have loaded."""

    def _wait_for_all(self, what: str) -> None:
        keys = [f"{what}/{self.offer['version']}/{s}" for s in self._engines]
        self._store.wait(keys, _FOREVER)
        for key in keys:
            self._store.delete_key(key)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def snapshot_source(specs: Sequence[TensorSpec]) -> Any:
    """vLLM's `WeightSource` over a flat buffer; `source.flat` is set before each transfer."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class SnapshotSource(WeightSource):
        flat: torch.Tensor  # uint8

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(spec.name, _dtype(spec.dtype), spec.shape) for spec in specs]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return views(self.flat, specs)

    return SnapshotSource()


class VLLMPublisher(Publisher):
    """As `weights.Publisher`, but its thread sends with vLLM's trainer-side engine.

    Waits for: every engine to stand still, without limit; then for the transfer, `timeout_s`.
    """

    def __init__(self, model: torch.nn.Module, *, num_engines: int, **options: Any) -> None:
        self._num_engines = num_engines
        super().__init__(model, **{**options, "backend": "nccl"})

    def _run(self) -> None:
        try:
            self._transfer_all()
        except BaseException as error:
            logger.debug("the publisher's thread ends", exc_info=True)
            with self._condition:
                self._error = error.with_traceback(None)
                self._condition.notify_all()

    def _transfer_all(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        device = torch.device(self._wire_device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread; NCCL's group is made on it
        host, port, _, size = self._address
        store = open_store(host, port, self._meeting["timeout_s"], self._meeting["key"])
        client = StoreClient(store, self._num_engines, self._mark_busy)
        source = snapshot_source(self.specs)
        info = trainer_init_info(host, free_port(), size, self._bucket_bytes)
        engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
        while (snapshot := self._next()) is not None:
            with self._condition:
                self._busy_since = None  # engines may evaluate first
            client.offer = {
                "version": snapshot.version,
                "flags": snapshot.flags,
                "meta": snapshot.meta,
            }
            source.flat = snapshot.flat
            engine.send_weights()
            with self._condition:
                self.last_broadcast_s = time.monotonic() - (self._busy_since or time.monotonic())
                self._busy_since = None
                self._free.append(snapshot)
        engine.shutdown()

    def _mark_busy(self) -> None:
        with self._condition:
            self._busy_since = time.monotonic()


def trainer_init_info(host: str, port: int, size: int, bucket_bytes: int) -> Any:
    """vLLM's description of the transfer.

    Args:
        size: ranks of the NCCL group: the trainer and every worker of every engine.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        master_address=host,
        master_port=port,
        world_size=size,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
        rank=0,
    )


def free_port() -> int:
    """A TCP port of this host that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


# --------------------------------------------------------------------------- engine side


def engine_config() -> Any:
    """What an engine must be started with (`LLM(weight_transfer_config=)`)."""
    from vllm.config.weight_transfer import WeightTransferConfig

    return WeightTransferConfig(backend="nccl")


class TransferEnd:
    """An engine's end, in its searcher's process; used by the thread that uses the engine.

    Consumes: the trainer's offers. Produces: loaded weights, at `take`, which waits for the trainer
    and all other engines.
    """

    def __init__(
        self,
        llm: Any,
        *,
        host: str,
        port: int,
        rank: int,
        tp: int,
        timeout_s: float,
        key: str = "",
        **unused: Any,
    ) -> None:
        """Meets the trainer and the other engines.

        Args:
            llm: vLLM's `LLM`.
            rank: of the engine's first worker in the NCCL group.
            tp: the engine's workers.
            unused: what only `weights.Receiver` needs.
        """
        index = (rank - 1) // tp  # of the searcher
        self._llm, self._index, self._loaded = llm, index, -1
        self._store = open_store(host, port, timeout_s, key)
        self._store.wait(["init"], timedelta(seconds=timeout_s))
        info = {**json.loads(self._store.get("init")), "rank_offset": rank}
        llm.init_weight_transfer_engine({"init_info": info})
        self._store.set(f"joined/{index}", "1")

    def offered(self) -> bool:
        """Whether the trainer waits for this engine."""
        return self._store.check(["offered"]) and int(self._store.get("offered")) > self._loaded

    def take(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> dict | None:
        """Loads the version that is offered; the fields of `WeightUpdate`, None if there is none.

        With `wait_for`, waits for that version, a newer or a pinned one.

        Raises:
            RuntimeError: `wait_for` was not offered in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if self.offered():
                update = self._load(timeout_s)
                if update["version"] >= (wait_for or 0) or update["evaluate"] or update["final"]:
                    return update
            elif wait_for is None:
                return None
            if time.monotonic() > deadline:
                raise RuntimeError(f"version {wait_for} has not come within {timeout_s:.0f} s")
            time.sleep(_POLL_PERIOD_S)

    def leave(self) -> None:
        """Leaves the group."""
        self._llm.shutdown_weight_transfer_engine()

    def _load(self, timeout_s: float) -> dict:
        version = int(self._store.get("offered"))
        offer = json.loads(self._store.get(f"offer/{version}"))
        start = time.monotonic()
        self._llm.start_weight_update()
        self._store.set(f"ready/{version}/{self._index}", "1")
        # the slowest engine is waited for here, for ever: the watchdog looks after it
        self._store.wait([f"update/{version}"], _FOREVER)
        update = json.loads(self._store.get(f"update/{version}"))
        self._llm.update_weights({"update_info": update})
        self._llm.finish_weight_update()
        self._loaded = version
        self._store.set(f"loaded/{version}/{self._index}", "1")
        return {
            "version": version,
            "evaluate": bool(offer["flags"] & FLAG_EVALUATE),
            "final": bool(offer["flags"] & FLAG_FINAL),
            "meta": offer["meta"],
            "load_s": time.monotonic() - start,
        }
