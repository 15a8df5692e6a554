"""Weights from the trainer into running engines.

`Publisher.publish(version)` copies what this trainer holds of the policy, all of it or its shard,
into a buffer in the engines' dtype and returns; a background thread sends it in buckets to every
engine worker, after gathering each bucket from the trainers of a sharded policy (`shards.py`).
Each engine worker owns a `Receiver`: a background thread takes every broadcast into one of two
staging buffers, so that no broadcast waits for a generation and no generation for a broadcast;
`take()` loads the newest complete version. `EngineWeights` is the vLLM worker extension that holds
a Receiver.

A process group is a fixed set of ranks, so an engine that was restarted needs a new one: all
members leave theirs and meet again (`Meeting`), and the newest snapshot is sent again.

A newer snapshot replaces a waiting one. A version that must be seen by all (`evaluate`, `final`) is
pinned: it is neither replaced on the trainer nor dropped on the engine before it was loaded.
Names, shapes and dtypes are checked once, a checksum of the bytes at every version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lora import adapted_layers, merged_weight
from meeting import Meeting, WeightGroup
from parallel import device_of, full, is_sharded, own_part, own_rows, reshard
from shards import ALIGN, make_buckets, own_specs, plan, scratch_bytes, send_pieces

logger = logging.getLogger("tba")

FOREVER = timedelta(days=3650)
FLAG_EVALUATE, FLAG_FINAL = 1, 2
_CLOSE, _FAILED, _SKIPPED = -1, -2, -3  # instead of a version, of a snapshot's number or place
_TAG = 1  # of messages between trainers; their weights travel under 0
_MAX_MANIFEST_BYTES, _MAX_META_BYTES = 1 << 27, 1 << 24  # of their texts
_SUM_WORDS, _SUM_ROWS = 4096, 64  # 32-bit words of a row of the checksum; rows at a time


@dataclass
class WeightsConfig:
    """How parameters travel from trainer 0 to the engines."""

    bucket_mb: int = 64  # one broadcast moves at most this much
    # auto | gloo | nccl | vllm_nccl (vLLM's own transfer, see weights_vllm.py); auto: nccl where
    # trainer and engines use GPUs
    backend: str = "auto"
    probe_every: int = 10  # every n-th version is checked end to end by log-probs of fixed prompts
    max_logprob_gap: float = 0.5  # nats a token; a larger mean gap at a probe ends the job


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the wire format, in Hugging Face (checkpoint) names."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as in `str(torch.float32)`
    offset: int  # bytes from the start of the flat buffer

    @property
    def num_bytes(self) -> int:
        size = _dtype(self.dtype).itemsize
        for dim in self.shape:
            size *= dim
        return size


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r} in the weights manifest")
    return dtype


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights in checkpoint names, made one at a time; adapters are merged into their layers.

    Each shared tensor comes once: a tied head travels with its embedding. A merged weight is a new
    float32 tensor, any other is the parameter's own memory or, of a sharded model, gathered; every
    rank must then take them all.
    """
    for name, parameter, adapted in _checkpoint_parameters(model):
        yield name, full(parameter) if adapted is None else merged_weight(adapted, full)


def _checkpoint_parameters(
    model: torch.nn.Module,
) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module | None]]:
    """(checkpoint name, parameter, the layer whose adapter changes it) without adapters' own."""
    layers = adapted_layers(model)
    for name, parameter in model.named_parameters(remove_duplicate=True):
        if name.partition(".lora_")[0] in layers:
            continue
        layer, inside, last = name.partition(".base_layer.")
        if inside and layer in layers:
            yield f"{layer}.{last}", parameter, layers[layer] if last == "weight" else None
        else:
            yield name, parameter, None


def _own_weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """What this rank holds of each of `named_weights`, and whether it was made for this.

    Of a sharded model its rows. Merging an adapter into its rows of a layer takes the adapter's
    whole matrices, which are small: only these are gathered here, and every rank must take part.
    """
    for _, parameter, adapted in _checkpoint_parameters(model):
        if adapted is None:
            yield own_part(parameter), False
        else:
            yield merged_weight(adapted, full, own_part, own_rows(parameter)), True


@torch.no_grad()
def copy_weights(model: torch.nn.Module, targets: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copies this rank's part of the weights into `targets` (`views`), in their dtype."""
    to, source = [], []
    for (weight, is_new), (_, target) in zip(_own_weights(model), targets, strict=True):
        if is_new:  # copied at once: all of them would be a second copy of the model
            target.copy_(weight, non_blocking=True)
        else:
            to.append(target)
            source.append(weight)
    if to:
        torch._foreach_copy_(to, source, non_blocking=True)


def manifest(model: torch.nn.Module, dtype: torch.dtype) -> list[TensorSpec]:
    """The layout of `model`'s weights in one flat buffer of `dtype`, in the order of
    `named_weights`, from their names and shapes alone.

    >>> [(s.name, s.offset) for s in manifest(torch.nn.Linear(3, 2), torch.bfloat16)]
    [('weight', 0), ('bias', 16)]
    """
    specs, offset = [], 0
    for name, parameter, _ in _checkpoint_parameters(model):
        spec = TensorSpec(name, tuple(parameter.shape), str(dtype), offset)
        specs.append(spec)
        offset += -(-spec.num_bytes // ALIGN) * ALIGN
    return specs


def read_manifest(text: str) -> list[TensorSpec]:
    """The manifest in a message, which is JSON; nothing is allocated for what it describes.

    Raises:
        ValueError: it is not what `manifest` makes: tensors of distinct names without gaps or
            overlaps. Nothing else is ever raised.
    """
    try:
        specs = [
            TensorSpec(row["name"], tuple(row["shape"]), row["dtype"], row["offset"])
            for row in json.loads(text)
        ]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"the weights manifest can't be read: {error!r}") from error
    offset = 0
    names: set[str] = set()
    for spec in specs:
        plain = isinstance(spec.name, str) and isinstance(spec.dtype, str)
        if not plain or any(type(dim) is not int or dim < 0 for dim in spec.shape):
            raise ValueError(f"the weights manifest holds no tensor in {str(spec)[:200]}")
        if spec.name in names or type(spec.offset) is not int or spec.offset != offset:
            raise ValueError(
                f"the weights manifest has {spec.name[:100]!r} twice, or not at its offset {offset}"
            )
        names.add(spec.name)
        offset += -(-spec.num_bytes // ALIGN) * ALIGN
    return specs


def flat_bytes(specs: Sequence[TensorSpec]) -> int:
    """Length of the flat buffer, in bytes (a multiple of 16)."""
    return -(-(specs[-1].offset + specs[-1].num_bytes) // ALIGN) * ALIGN


def check_manifest(specs: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> None:
    """Raises ValueError that names the first tensor on which trainer and engine disagree."""
    mine, theirs = {s.name: s for s in expected}, {s.name: s for s in specs}
    if missing := sorted(mine.keys() - theirs.keys()):
        raise ValueError(f"the trainer does not publish {missing[0]!r} ({len(missing)} missing)")
    if extra := sorted(theirs.keys() - mine.keys()):
        raise ValueError(f"the engine's model has no {extra[0]!r} ({len(extra)} too many)")
    for name, spec in theirs.items():
        if (spec.shape, spec.dtype) != (mine[name].shape, mine[name].dtype):
            raise ValueError(
                f"{name!r} is {spec.dtype}{list(spec.shape)} at the trainer but "
                f"{mine[name].dtype}{list(mine[name].shape)} at the engine"
            )


def views(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) views into the flat uint8 buffer."""
    for spec in specs:
        data = flat[spec.offset : spec.offset + spec.num_bytes]
        yield spec.name, data.view(_dtype(spec.dtype)).view(spec.shape)


def checksum(flat: torch.Tensor, bucket_bytes: int) -> int:
    """The `Checksum` of a buffer, uint8 [4 n], that travels in buckets."""
    total = Checksum()
    for start in range(0, len(flat), bucket_bytes):
        total.add(flat[start : start + bucket_bytes])
    return total.value()


class Checksum:
    """A digest of the buckets of one version, added as they travel.

    A bucket's 32-bit words are laid out in rows; the sums of every row and of every column, modulo
    2^32, go into a BLAKE2 digest. One changed bit changes two sums, and so do two words, or whole
    tensors, that changed places. It costs two reductions of the memory, on the buffer's own device
    and with all of torch's threads, without a temporary.
    """

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def add(self, bucket: torch.Tensor) -> None:
        """Takes in the next bucket, uint8 [4 n]."""
        words = bucket.view(torch.int32)
        whole = len(words) // _SUM_WORDS * _SUM_WORDS
        sums = [words[whole:]]
        # 1 MiB at a time: the second reduction finds it in a core's cache
        for part in words[:whole].view(-1, _SUM_WORDS).split(_SUM_ROWS):
            sums += [part.sum(0, dtype=torch.int32), part.sum(1, dtype=torch.int32)]
        self._digest.update(torch.cat(sums).cpu().numpy().tobytes())

    def value(self) -> int:
        """In 0..2^63."""
        return int.from_bytes(self._digest.digest(), "little") >> 1


def _start_broadcast(group: Any, tensor: torch.Tensor) -> dist.Work:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = FOREVER
    return group.broadcast([tensor], options)


def _send_numbers(group: WeightGroup, values: list[int]) -> None:
    _start_broadcast(group.messages, torch.tensor(values)).wait()


def _receive_numbers(group: WeightGroup, count: int) -> list[int]:
    values = torch.zeros(count, dtype=torch.int64)
    _start_broadcast(group.messages, values).wait()
    return values.tolist()


def _send_text(group: WeightGroup, text: str) -> None:
    """Of a length that the receivers know, at least one byte."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    _start_broadcast(group.messages, data).wait()


def _receive_text(group: WeightGroup, num_bytes: int, limit: int) -> str:
    if not 0 < num_bytes <= limit:
        raise ValueError(f"a text of {num_bytes} bytes is announced; 1 to {limit} are possible")
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    _start_broadcast(group.messages, data).wait()
    return data.numpy().tobytes().decode()


def _side_stream(device: torch.device):
    """A CUDA stream of its own for a background thread; nothing on CPU."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


# --------------------------------------------------------------------------- trainer side


@dataclass(eq=False)
class _Snapshot:
    flat: torch.Tensor  # uint8: all weights, or a sharded policy's rows of this trainer
    place: int  # which of the two it is; the same on all trainers
    number: int = 0  # counts the snapshots taken; the same on all trainers
    version: int = 0
    flags: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


class Publisher:
    """The trainer's end: of trainer 0, or of every trainer of a sharded policy.

    Consumes: the parameters that this rank holds, at `publish`. Produces: broadcasts, in version
    order, by trainer 0's thread. It decides alone which snapshot is sent next; the others' threads
    send their rows of the one it names. Which snapshot a new one replaces is decided by trainer 0
    in `publish`, where all trainers are in lock-step: what its thread has taken is out of reach,
    what it decided to replace the thread can no longer take.
    Waits for: `publish` waits only when a pinned version is asked for while another one is still
    waiting; a trainer's thread for its own main thread to finish the copy that trainer 0 named.
    Ends: `close()` sends the closing header, to engines and trainers. An error in the thread is
    raised by the next `publish` or `close`; trainer 0's thread tells the other trainers. When an
    engine was restarted, trainer 0's thread leaves the group, meets all engines again, and sends
    again what it sent last, as long as its memory is not taken.
    Memory: two buffers of this rank's part of the weights and, on trainer 0 of a sharded policy,
    three buckets; in host memory (pinned for a GPU) where the weights travel by gloo.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        host: str,
        port: int,
        num_workers: int,
        dtype: torch.dtype,
        backend: str,
        bucket_bytes: int,
        timeout_s: float,
        meeting_timeout_s: float,
        key: str = "",
        restart_timeout_s: float = 0.0,
        trainers: dist.ProcessGroup | None = None,
        gathering: dist.ProcessGroup | None = None,
    ) -> None:
        """Every trainer of a sharded policy must make one, trainer 0 as rank 0 of both groups.

        Args:
            num_workers: engine workers, which trainer 0 waits for, in its thread.
            key: of the job, the same for all receivers.
            dtype: the engines'.
            bucket_bytes: a multiple of 4.
            timeout_s: of one broadcast.
            meeting_timeout_s, restart_timeout_s: see `Meeting`.
            trainers: of a sharded policy, for collectives of the main thread.
            gathering: of a sharded policy, for this thread alone (`shards.make_gathering_group`).
        """
        self.specs = manifest(model, dtype)
        self.num_bytes = flat_bytes(self.specs)
        self.last_broadcast_s, self.last_gather_s = 0.0, 0.0
        self._trainers, self._gathering = trainers, gathering
        self._rank, self._size = 0, 1
        self._device = device_of(model)
        self._wire_device = self._device if backend == "nccl" else torch.device("cpu")
        self._own_specs = self.specs
        if is_sharded(model):  # by one trainer, too: its rows are all
            assert trainers is not None and gathering is not None
            self._rank, self._size = dist.get_rank(trainers), dist.get_world_size(trainers)
            self._own_specs = own_specs(self.specs, self._rank, self._size)
            self._pieces = plan(self.specs, self._size, bucket_bytes, self.num_bytes)
        self._snapshots = [_Snapshot(self._memory(flat_bytes(self._own_specs)), i) for i in (0, 1)]
        self._buckets: list[torch.Tensor] = []
        if self._size > 1 and self._rank == 0:
            num_bytes = min(bucket_bytes, self.num_bytes)
            self._buckets = [self._memory(num_bytes), self._memory(num_bytes)]
            self._scratch = self._memory(scratch_bytes(self._pieces))
        self._free = list(self._snapshots)
        self._waiting: _Snapshot | None = None
        self._again: _Snapshot | None = None  # to be sent again, before the one that waits
        self._sending: _Snapshot | None = None
        self._is_copying = False  # the main thread makes the next one to wait
        self._last: _Snapshot | None = None  # sent last
        self._num_taken = 0
        self._busy_since: float | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._condition = threading.Condition()
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._address = (host, port, 0, num_workers + 1)
        self._meeting: dict[str, Any] = {
            "backend": backend,
            "timeout_s": meeting_timeout_s,
            "key": key,
            "restart_timeout_s": restart_timeout_s,
        }
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    def publish(
        self,
        model: torch.nn.Module,
        version: int,
        *,
        evaluate: bool = False,
        final: bool = False,
        meta: dict[str, Any] | None = None,
    ) -> bool:
        """Copies the weights as `version` and returns; False if a pinned one is still waiting.

        Every trainer of a sharded policy must call it, with the same `version` and flags; `meta` is
        trainer 0's. The engines get it with `published_at`, seconds since 1970 when this began.

        Raises RuntimeError if an earlier broadcast failed or has taken over `timeout_s`.
        """
        meta = {**(meta or {}), "published_at": time.time()}
        flags = FLAG_EVALUATE * evaluate | FLAG_FINAL * final
        snapshot = self._claim_together(flags) if self._size > 1 else self._claim(flags)
        if snapshot is None:
            return False
        reshard(model)
        copy_weights(model, views(snapshot.flat, self._own_specs))
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the thread reads on a stream of its own
        with self._condition:
            self._num_taken += 1
            snapshot.number = self._num_taken
            snapshot.version, snapshot.flags, snapshot.meta = version, flags, meta
            self._waiting, self._is_copying = snapshot, False
            self._condition.notify_all()
        return True

    def close(self) -> None:
        """Ends the receivers' threads and this one's, after what is waiting was broadcast.

        On other trainers than 0 it waits for trainer 0 to do so.
        """
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)
            with self._condition:
                self._check()
        with self._condition:
            self._check()

    def _memory(self, num_bytes: int) -> torch.Tensor:
        pinned = self._device.type == "cuda" and self._wire_device.type == "cpu"
        return torch.zeros(
            num_bytes, dtype=torch.uint8, device=self._wire_device, pin_memory=pinned
        )

    def _claim(self, flags: int) -> _Snapshot | None:
        """The memory for a new snapshot, which the thread can't take; None: leave it out."""
        with self._condition:
            self._check()
            while self._waiting is not None and self._waiting.flags:
                if not flags:
                    return None
                self._condition.wait(0.5)
                self._check()
            # the oldest: what was sent last may have to be sent again
            snapshot = self._waiting or self._free.pop(0)
            self._waiting, self._is_copying = None, True
            return snapshot

    def _claim_together(self, flags: int) -> _Snapshot | None:
        """What trainer 0 claims, on all trainers."""
        answer = torch.tensor(_FAILED, device=self._device)
        if self._rank == 0:
            try:
                snapshot = self._claim(flags)
                answer.fill_(_SKIPPED if snapshot is None else snapshot.place)
            finally:
                dist.broadcast(answer, group=self._trainers, group_src=0)
            return snapshot
        with self._condition:
            self._check()
        dist.broadcast(answer, group=self._trainers, group_src=0)
        place = int(answer)
        if place == _FAILED:
            raise RuntimeError("publishing weights failed on trainer 0")
        return None if place == _SKIPPED else self._snapshots[place]

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"publishing weights failed: {self._error}") from self._error
        if self._busy_since is not None and time.monotonic() - self._busy_since > self._timeout_s:
            raise RuntimeError(
                f"a weight broadcast has not finished for {self._timeout_s:.0f} s: an engine does "
                "not receive (cluster.timeout_s)"
            )

    def _run(self) -> None:
        try:
            with _side_stream(self._wire_device):
                if self._rank == 0:
                    self._send_all()
                else:
                    self._join_all()
        except BaseException as error:
            logger.debug("the publisher's thread ends", exc_info=True)
            with self._condition:
                # without its traceback, whose frames keep the group: see WeightGroup
                self._error = error.with_traceback(None)
                self._condition.notify_all()
            if self._rank == 0:
                with suppress(RuntimeError):
                    self._tell_trainers(_FAILED)

    # ----------------------------------------------------------------------- trainer 0's thread

    def _send_all(self) -> None:
        meeting = Meeting(*self._address, **self._meeting)
        while not self._send_over_one_group(meeting):
            pass
        self._tell_trainers(_CLOSE)

    def _send_over_one_group(self, meeting: Meeting) -> bool:
        """Whether all has been sent; False: all are to meet again."""
        group = None
        try:
            group = meeting.join()
            self._introduce(group)
            self._repeat_last()
            while (snapshot := self._next(meeting)) is not None:
                self._tell_trainers(snapshot.number)
                self._send(meeting, group, snapshot)
        except RuntimeError as error:
            if group is not None:
                group.abort()
            self._take_back()
            if not meeting.wait_for_restart():
                raise
            logger.debug("all engines meet again for weights: %s", error)
            return False
        meeting.close()
        # An engine that dies now is missed by nobody: all have evaluated the last version.
        with suppress(RuntimeError) if meeting.period_s else nullcontext():
            _send_numbers(group, [_CLOSE, 0, 0])
        return True

    def _introduce(self, group: WeightGroup) -> None:
        text = json.dumps([asdict(spec) for spec in self.specs])
        _send_numbers(group, [len(text.encode())])
        _send_text(group, text)

    def _repeat_last(self) -> None:
        """A new group gets what was sent last, unless a newer snapshot has taken its memory."""
        with self._condition:
            if self._last in self._free:
                assert self._last is not None and self._again is None
                self._free.remove(self._last)
                self._again = self._last

    def _take_back(self) -> None:
        """What a lost group did not get whole waits again, if it is the newest or pinned."""
        with self._condition:
            snapshot, self._sending, self._busy_since = self._sending, None, None
            if snapshot is None:
                return
            if self._waiting is None and not self._is_copying:
                self._waiting = snapshot
            elif snapshot.flags:
                self._again = snapshot
            else:
                self._free.insert(0, snapshot)
            self._condition.notify_all()

    def _next(self, meeting: Meeting | None = None) -> _Snapshot | None:
        """Takes the snapshot that is due; None: there will be none."""
        while True:
            with self._condition:
                snapshot = self._again or self._waiting
                if snapshot is not None:
                    if self._again is None:
                        self._waiting = None
                    self._again, self._sending = None, snapshot
                    self._busy_since = time.monotonic()
                    self._condition.notify_all()
                    return snapshot
                if self._closed:
                    return None
                self._condition.wait(None if meeting is None else meeting.period_s)
            if meeting is not None:
                meeting.check()

    def _tell_trainers(self, number: int) -> None:
        """One message to each, so that the living hear of an error whoever has died."""
        message = torch.tensor([number])
        works: list[dist.Work | None] = []
        self._told = message, works  # gloo reads the memory until it is sent
        for rank in range(1, self._size):
            with suppress(RuntimeError) if number == _FAILED else nullcontext():
                works.append(dist.isend(message, group=self._gathering, group_dst=rank, tag=_TAG))
        for work in works:
            assert work is not None
            if number != _FAILED:
                work.wait()

    def _send(self, meeting: Meeting, group: WeightGroup, snapshot: _Snapshot) -> None:
        start = time.monotonic()
        buckets = self._buckets_of(snapshot)
        try:
            gather_s = self._send_buckets(meeting, group, snapshot, buckets)
        except RuntimeError:
            for _ in buckets:  # the other trainers send all of theirs, whatever happens here
                pass
            raise
        with self._condition:
            self.last_broadcast_s = time.monotonic() - start
            self.last_gather_s = gather_s
            self._busy_since, self._sending, self._last = None, None, snapshot
            self._free.append(snapshot)

    def _send_buckets(
        self,
        meeting: Meeting,
        group: WeightGroup,
        snapshot: _Snapshot,
        buckets: Iterator[torch.Tensor],
    ) -> float:
        """Sends a whole version; seconds in which it waited for the other trainers' parts."""
        text = json.dumps(snapshot.meta)
        _send_numbers(group, [snapshot.version, snapshot.flags, len(text.encode())])
        _send_text(group, text)
        total = Checksum()
        gather_s, before = 0.0, time.monotonic()
        works: list[dist.Work] = []
        for bucket in buckets:
            gather_s += time.monotonic() - before
            works.append(_start_broadcast(group.buckets, bucket))
            total.add(bucket)  # while it travels
            if len(works) > 1:  # the memory of the one before is used for the next
                meeting.finish(works.pop(0))
            before = time.monotonic()
        for work in works:
            meeting.finish(work)
        if self._wire_device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        _send_numbers(group, [total.value()])
        return gather_s

    def _buckets_of(self, snapshot: _Snapshot) -> Iterator[torch.Tensor]:
        if self._size == 1:
            yield from snapshot.flat.split(self._bucket_bytes)
            return
        assert self._gathering is not None
        yield from make_buckets(
            snapshot.flat,
            self._pieces,
            self._bucket_bytes,
            self.num_bytes,
            self._gathering,
            self._buckets,
            self._scratch,
        )

    # ----------------------------------------------------------------------- other trainers' thread

    def _join_all(self) -> None:
        assert self._gathering is not None
        message = torch.zeros(1, dtype=torch.int64)
        while True:
            dist.recv(message, group=self._gathering, group_src=0, tag=_TAG)
            number = int(message)
            if number == _CLOSE:
                return
            if number == _FAILED:
                raise RuntimeError("trainer 0 has failed")
            snapshot = self._named(number)
            send_pieces(snapshot.flat, self._pieces, self._rank, self._gathering)
            with self._condition:
                self._busy_since = None

    def _named(self, number: int) -> _Snapshot:
        """The snapshot of that number, once this rank's main thread has made it."""
        with self._condition:
            while True:
                for snapshot in self._snapshots:
                    if snapshot.number == number:
                        self._busy_since = time.monotonic()
                        return snapshot
                self._condition.wait()


# --------------------------------------------------------------------------- engine side


@dataclass(slots=True, kw_only=True)
class WeightUpdate:
    """What an engine loaded."""

    version: int
    evaluate: bool  # evaluate the held-out problems under this version
    final: bool  # the last version of the run: the searcher ends after it
    meta: dict[str, Any]
    load_s: float  # seconds to load, without the wait
    stall_s: float = 0.0  # seconds in which the engine decoded nothing because of it


@dataclass(slots=True, eq=False)
class _Staged:
    """A complete version that is ready to be loaded."""

    flat: torch.Tensor  # uint8, one of the receiver's two buffers
    version: int
    flags: int
    meta: dict[str, Any]


class Receiver:
    """An engine worker's end.

    Consumes: broadcasts, in its thread, into one of two buffers while the other holds a complete
    version. Produces: loaded weights, at `take`. A complete version replaces one that was not
    loaded yet, unless that one is pinned or held. Waits for: the thread waits before it overwrites
    a pinned or held version that was not loaded yet. Ends: the publisher's closing header. An error
    in the thread is raised by the next `take`, `hold` or `staged_version`. When another engine was
    restarted, all meet again; a version that comes a second time is received and dropped.
    Memory: two flat buffers of all weights in the engine's dtype, on the engine's device where the
    weights travel by NCCL, else in host memory.
    """

    def __init__(
        self,
        expected: Sequence[TensorSpec],
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], None],
        *,
        host: str,
        port: int,
        rank: int,
        size: int,
        backend: str,
        bucket_bytes: int,
        timeout_s: float,
        device: torch.device,
        key: str = "",
        restart_timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            timeout_s, restart_timeout_s: see `Meeting`.
        """
        self.version = -1  # loaded version; -1 before the first
        self._expected, self._load = expected, load
        self._wire_device = device if backend == "nccl" else torch.device("cpu")
        self._bucket_bytes = bucket_bytes
        self._num_bytes = 0  # of all weights; 0 before the first meeting
        self._buffers: list[torch.Tensor] = []  # those that hold nothing
        self._staged: list[_Staged] = []  # in version order; all but the last are kept
        self._coming = -1  # version that is being received
        self._newest = -1  # of the complete versions, loaded or not
        self._hold: int | None = None  # this version, or a newer one, is kept until it is taken
        self._error: BaseException | None = None
        self._condition = threading.Condition()
        self._address = (host, port, rank, size)
        self._meeting: dict[str, Any] = {
            "backend": backend,
            "timeout_s": timeout_s,
            "key": key,
            "restart_timeout_s": restart_timeout_s,
        }
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def staged_version(self) -> int:
        """The version that `take` would load now; -1 if there is none. Any thread may ask.

        Raises:
            RuntimeError: receiving failed.
        """
        with self._condition:
            self._check()
            return self._staged[0].version if self._staged else -1

    def hold(self, version: int) -> tuple[int, bool]:
        """From now on a complete version that is `version` or newer is kept until it is taken.

        Returns:
            The version that is kept and True; or the one that is being received, -1 if there is
            none, and False. A pinned version is kept in any case.

        Raises:
            RuntimeError: receiving failed.
        """
        with self._condition:
            self._check()
            self._hold = version
            given_up = [s for s in self._staged[:-1] if not self._is_kept(s)]
            self._staged = [s for s in self._staged if s not in given_up]
            self._buffers += [s.flat for s in given_up]
            self._condition.notify_all()
            if self._staged and self._is_kept(self._staged[0]):
                return self._staged[0].version, True
            return self._coming, False

    def _is_kept(self, staged: _Staged) -> bool:
        """Whether it may not be given up for a newer version."""
        return staged.flags != 0 or (self._hold is not None and staged.version >= self._hold)

    def take(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Loads the newest complete version, or an older pinned one; None at once if there is none.

        With `wait_for`, waits until that version, a newer or a pinned one has come. Without, a
        broadcast that has begun is not waited for.

        Raises:
            RuntimeError: receiving failed (with the cause), or `wait_for` did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while True:
                self._check()
                # a pinned version holds back newer ones: it is due whatever is waited for
                if self._staged and (
                    self._staged[0].flags or self._staged[0].version >= (wait_for or 0)
                ):
                    break
                if wait_for is None:
                    return None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"version {wait_for} has not come within {timeout_s:.0f} s")
                self._condition.wait(0.2)
            staged = self._staged.pop(0)  # the thread can neither drop nor overwrite it now
        start = time.monotonic()
        self._load(views(staged.flat, self._expected))
        if self._wire_device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the thread writes on a stream of its own
        with self._condition:
            self.version, self._hold = staged.version, None
            self._buffers.append(staged.flat)
            self._condition.notify_all()
        return WeightUpdate(
            version=staged.version,
            evaluate=bool(staged.flags & FLAG_EVALUATE),
            final=bool(staged.flags & FLAG_FINAL),
            meta=staged.meta,
            load_s=time.monotonic() - start,
        )

    def close(self, timeout_s: float = 30.0) -> bool:
        """Waits for the publisher's closing header; whether it has come, or never will."""
        self._thread.join(timeout=timeout_s)
        return not self._thread.is_alive()

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"receiving weights failed: {self._error}")

    def _run(self) -> None:
        try:
            meeting = Meeting(*self._address, **self._meeting)
            with _side_stream(self._wire_device):
                while not self._receive_over_one_group(meeting):
                    pass
        except BaseException as error:
            logger.debug("the receiver's thread ends", exc_info=True)
            with self._condition:
                # without its traceback, whose frames keep the group: see WeightGroup
                self._error = error.with_traceback(None)
                self._condition.notify_all()

    def _receive_over_one_group(self, meeting: Meeting) -> bool:
        """Whether the publisher has closed; False: all are to meet again."""
        group = None
        try:
            group = meeting.join()
            self._meet_publisher(group)
            while self._receive(meeting, group):
                pass
        except RuntimeError:
            if group is not None:
                group.abort()
            if meeting.wait_for_restart():
                return False
            if not meeting.is_closed():
                raise
        return True

    def _meet_publisher(self, group: WeightGroup) -> None:
        """Learns what will come, once a group; memory for it is made once."""
        (num_bytes,) = _receive_numbers(group, 1)
        specs = read_manifest(_receive_text(group, num_bytes, _MAX_MANIFEST_BYTES))
        check_manifest(specs, self._expected)
        if self._num_bytes:
            return
        self._expected = specs  # same tensors; the trainer's order and offsets
        self._num_bytes = flat_bytes(specs)
        self._buffers = [self._memory(self._num_bytes) for _ in range(2)]

    def _memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._wire_device)

    def _receive(self, meeting: Meeting, group: WeightGroup) -> bool:
        version, flags, text_bytes = _receive_numbers(group, 3)
        if version == _CLOSE:
            return False
        meta = json.loads(_receive_text(group, text_bytes, _MAX_META_BYTES))
        if version <= self._newest:
            self._receive_in_vain(meeting, group)
            return True
        flat = self._free_buffer(meeting, version)
        try:
            self._receive_whole(meeting, group, flat, version)
        except RuntimeError:
            with self._condition:
                self._buffers.append(flat)
                self._coming = -1
            raise
        with self._condition:
            self._buffers += [staged.flat for staged in self._staged if not self._is_kept(staged)]
            self._staged = [staged for staged in self._staged if self._is_kept(staged)]
            self._staged.append(_Staged(flat, version, flags, meta))
            self._coming, self._newest = -1, version
            self._condition.notify_all()
        return True

    def _receive_whole(
        self, meeting: Meeting, group: WeightGroup, flat: torch.Tensor, version: int
    ) -> None:
        received = self._receive_flat(meeting, group, flat)
        (sent,) = _receive_numbers(group, 1)
        if received != sent:
            raise ValueError(
                f"checksum of version {version} is {received}, the trainer's is {sent}"
            )

    def _receive_in_vain(self, meeting: Meeting, group: WeightGroup) -> None:
        """Takes part in a broadcast that others need."""
        scratch = self._memory(min(self._bucket_bytes, self._num_bytes))
        for start in range(0, self._num_bytes, self._bucket_bytes):
            bucket = scratch[: self._num_bytes - start]
            meeting.finish(_start_broadcast(group.buckets, bucket))
        _receive_numbers(group, 1)

    def _free_buffer(self, meeting: Meeting, version: int) -> torch.Tensor:
        """Memory for the next version; the last staged one is given up for it if need be.

        Raises:
            RestartedError: an engine was restarted meanwhile.
        """
        while True:
            with self._condition:
                if self._buffers:
                    self._coming = version
                    return self._buffers.pop()
                if self._staged and not self._is_kept(self._staged[-1]):
                    self._coming = version
                    return self._staged.pop().flat
                self._coming = version
                self._condition.wait(meeting.period_s)
            meeting.check()

    def _receive_flat(self, meeting: Meeting, group: WeightGroup, flat: torch.Tensor) -> int:
        """Fills the buffer; the checksum of what has come."""
        total = Checksum()
        under_way: list[tuple[dist.Work, torch.Tensor]] = []

        def finish_oldest() -> None:
            work, bucket = under_way.pop(0)
            meeting.finish(work)
            total.add(bucket)  # while the next one travels

        for bucket in flat.split(self._bucket_bytes):
            under_way.append((_start_broadcast(group.buckets, bucket), bucket))
            if len(under_way) > 1:
                finish_oldest()
        while under_way:
            finish_oldest()
        if flat.is_cuda:
            torch.cuda.current_stream().synchronize()
        return total.value()


class EngineWeights:
    """vLLM worker extension (`worker_extension_cls="weights.EngineWeights"`).

    vLLM mixes this class into its worker, so `self` is the worker; the methods are called through
    `collective_rpc` and are prefixed to stay clear of the worker's own names.
    """

    def tba_start(self, owner_pid: int, policy_temperature: float | None) -> int:
        """The first call to a worker: what must hold before anything is generated.

        Args:
            policy_temperature: of the log-probs that stand in second place wherever at least two
                are asked for; None: that of the second most probable token, as in vLLM.

        Returns:
            The id of its process.
        """
        _die_with(owner_pid)
        worker: Any = self
        if policy_temperature is not None:
            _record_old_logprobs(worker.model_runner.sampler, policy_temperature)
        if worker.device.type == "cpu":
            # Linux kills a process (SIGILL) that uses Intel's AMX without having asked for it, as
            # vLLM's bfloat16 attention does; a large matrix product asks, but may come later.
            torch.cpu._init_amx()
        return os.getpid()

    def tba_join(self, expected: list[dict], options: dict) -> None:
        """Starts the receiver; `options` are Receiver's keywords, `rank` that of TP worker 0."""
        worker: Any = self
        options = {**options, "rank": options["rank"] + worker.rank}
        specs = [
            TensorSpec(s["name"], tuple(s["shape"]), s["dtype"], s["offset"]) for s in expected
        ]
        self._tba_receiver = Receiver(
            specs, lambda weights: _load_vllm(worker, weights), device=worker.device, **options
        )

    def tba_staged(self) -> int:
        """`Receiver.staged_version`."""
        return self._tba_receiver.staged_version

    def tba_hold(self, version: int) -> tuple[int, bool]:
        """`Receiver.hold`."""
        return self._tba_receiver.hold(version)

    def tba_take(self, wait_for: int | None, timeout_s: float) -> dict | None:
        """`Receiver.take` as a plain dict."""
        with torch.inference_mode():
            update = self._tba_receiver.take(wait_for=wait_for, timeout_s=timeout_s)
        if update is None:
            return None
        return {name: value for name, value in asdict(update).items() if name != "stall_s"}

    def tba_divide_logits(self, temperature: float | None) -> None:
        """From now on the model's logits are float32, divided by `temperature`; None: as before.

        At the model, because all that samples or scores goes through its `compute_logits`: vLLM's
        two model runners take log-probs of a prompt in different places, none with a temperature.
        """
        worker: Any = self
        model = worker.model_runner.get_model()
        vars(model).pop("compute_logits", None)  # the class's own method counts again
        if temperature is None:
            return
        compute_logits = model.compute_logits

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits = compute_logits(*args, **kwargs)  # None on tensor-parallel workers but one
            return None if logits is None else logits.float().div_(temperature)

        model.compute_logits = divided

    def tba_leave(self, timeout_s: float) -> bool:
        """`Receiver.close`."""
        return self._tba_receiver.close(timeout_s)


def _record_old_logprobs(sampler: Any, temperature: float) -> None:
    """The second log-prob of each sampled token becomes the policy's own at `temperature`.

    vLLM gives log-probs either before or after temperature and top-p. A response explored with
    others needs both, and each under the weights that sampled the token: later is too late.
    """
    forward = sampler.forward

    def recorded(logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = sampling_metadata.max_num_logprobs  # None: by nobody
        policy = (logits.float() / temperature).log_softmax(-1) if wanted else None  # [N, V]
        output = forward(logits, sampling_metadata, *args, **kwargs)
        if policy is not None:
            sampled = output.sampled_token_ids[:, :1].long()  # [N, 1]
            output.logprobs_tensors.logprobs[:, 1:2] = policy.gather(1, sampled)
        return output

    sampler.forward = recorded


def _load_vllm(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader: checkpoint names and shapes into vLLM's fused, repacked layers.

    `model.load_weights` alone can't: vLLM's CPU linear layers repack their weight and free the
    original. `reload_weights` restores them first, but leaves a tied output head on the copy that
    was packed from the old embedding, so the head is packed again here.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    worker.model_runner.reload_weights(weights_iterator=weights)
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, ParallelLMHead) and module.quant_method is not None:
            module.quant_method.process_weights_after_loading(module)


def _die_with(owner_pid: int) -> None:
    """Ends this engine worker, and the engine core above it, soon after its searcher has died.

    A searcher killed by SIGKILL can't end its engine, which would keep its memory and cores.
    """

    def watch() -> None:
        core_pid = os.getppid()
        while os.getppid() == core_pid and process_is_alive(owner_pid):
            time.sleep(1.0)
        if os.getppid() == core_pid and core_pid not in (0, 1, owner_pid):
            os.kill(core_pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()


def process_is_alive(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
    except OSError:
        return True  # no /proc: never kill by mistake
