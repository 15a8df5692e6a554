"""Weights from the trainer into running engines.

Trainer rank 0 owns a `Publisher`: `publish(version)` copies the parameters into one flat buffer in
the engines' dtype and returns; a background thread broadcasts it in buckets to every engine worker.
Each engine worker owns a `Receiver`: a background thread takes every broadcast into a staging
buffer, so that no broadcast waits for a generation; `take()` loads the newest staged version
between two generations. `EngineWeights` is the vLLM worker extension that holds a Receiver.

A newer snapshot replaces a waiting one. A version that must be seen by all (`evaluate`, `final`) is
pinned: it is neither replaced on the trainer nor overwritten on the engine before it was loaded.
Names, shapes and dtypes are checked once, a checksum of the bytes at every version.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lora import adapted_layers, merged_weight
from parallel import device_of, full, is_sharded

logger = logging.getLogger("tba")

WeightGroup: TypeAlias = Any  # ProcessGroupGloo or ProcessGroupNCCL, without a common base class
FOREVER = timedelta(days=3650)
FLAG_EVALUATE, FLAG_FINAL = 1, 2
_ALIGN = 16  # bytes; every tensor starts at a multiple, so that views of any dtype are aligned
_CLOSE = -1  # the version of the header that ends a receiver's thread


@dataclass
class WeightsConfig:
    """How parameters travel from trainer 0 to the engines."""

    bucket_mb: int = 64  # one broadcast moves at most this much
    backend: str = "auto"  # auto | gloo | nccl; auto: nccl where trainer and engines use GPUs
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


def gather_for_publisher(model: torch.nn.Module) -> None:
    """A sharded model's other ranks join in each time its publisher may copy the parameters."""
    if is_sharded(model):
        for _ in named_weights(model):
            pass


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
        offset += -(-spec.num_bytes // _ALIGN) * _ALIGN
    return specs


def flat_bytes(specs: Sequence[TensorSpec]) -> int:
    """Length of the flat buffer, in bytes (a multiple of 16)."""
    return -(-(specs[-1].offset + specs[-1].num_bytes) // _ALIGN) * _ALIGN


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


def checksum(flat: torch.Tensor, *, chunk_bytes: int = 1 << 24) -> int:
    """Position-weighted sum of the buffer's 32-bit words, modulo 2^63; `flat` is uint8 [4 n].

    Runs on the buffer's own device; a temporary of 2 x chunk_bytes. Unlike a plain sum it notices
    tensors that changed places.
    """
    words = flat.view(torch.int32)
    step = chunk_bytes // 4
    ramp = torch.arange(1, min(step, len(words)) + 1, device=flat.device)
    total = 0
    for start in range(0, len(words), step):
        part = words[start : start + step].to(torch.int64)
        total = (31 * total + int((part * ramp[: len(part)]).sum())) % (1 << 63)
    return total


def make_group(
    host: str, port: int, rank: int, size: int, *, backend: str, timeout_s: float
) -> WeightGroup:
    """A process group of its own for trainer 0 (rank 0) and all engine workers (1..size-1).

    It is made beside the default group, over the control store, because an engine worker is not a
    rank of the job. `timeout_s` bounds the meeting; afterwards a receiver may wait for ever (the
    watchdog of the control plane looks after that).
    """
    server = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    store = dist.PrefixStore("weights", server)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return dist.ProcessGroupNCCL(store, rank, size, options)
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    group._set_default_timeout(FOREVER)
    return group


def _broadcast(group: WeightGroup, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout = FOREVER
    group.broadcast([tensor], options).wait()


def _broadcast_flat(group: WeightGroup, flat: torch.Tensor, bucket_bytes: int) -> None:
    for start in range(0, len(flat), bucket_bytes):
        _broadcast(group, flat[start : start + bucket_bytes])
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()


def _side_stream(device: torch.device):
    """A CUDA stream of its own for a background thread; nothing on CPU."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


# --------------------------------------------------------------------------- trainer side


@dataclass
class _Snapshot:
    flat: torch.Tensor
    version: int = 0
    flags: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


class Publisher:
    """Trainer rank 0's end.

    Consumes: the policy's parameters, at `publish`. Produces: broadcasts, in version order.
    Waits for: `publish` waits only when a pinned version is asked for while another one is still
    waiting. Ends: `close()` sends the closing header. An error in the thread is raised by the next
    `publish` or `close`.
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
    ) -> None:
        self.specs = manifest(model, dtype)
        self.last_broadcast_s = 0.0
        self.num_bytes = flat_bytes(self.specs)
        self._wire_device = device_of(model) if backend == "nccl" else "cpu"
        self._free = [self._new_snapshot(), self._new_snapshot()]
        self._waiting: _Snapshot | None = None
        self._busy_since: float | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._condition = threading.Condition()
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._address = (host, port, 0, num_workers + 1)
        self._meeting: dict[str, Any] = {"backend": backend, "timeout_s": meeting_timeout_s}
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

        Raises RuntimeError if an earlier broadcast failed or has taken over `timeout_s`.
        """
        flags = FLAG_EVALUATE * evaluate | FLAG_FINAL * final
        with self._condition:
            self._check()
            skipped = self._waiting is not None and self._waiting.flags != 0 and not flags
            if not skipped:
                while self._waiting is not None and self._waiting.flags:
                    self._condition.wait(0.5)
                    self._check()
                snapshot = self._waiting or self._free.pop()
                self._waiting = None  # the thread must not take it while it is being written
        if skipped:
            gather_for_publisher(model)
            return False
        for (_, weight), (_, view) in zip(
            named_weights(model), views(snapshot.flat, self.specs), strict=True
        ):
            view.copy_(weight)
        if snapshot.flat.is_cuda:
            torch.cuda.current_stream().synchronize()  # the thread reads on a stream of its own
        snapshot.version, snapshot.flags, snapshot.meta = version, flags, meta or {}
        with self._condition:
            self._waiting = snapshot
            self._condition.notify_all()
        return True

    def close(self) -> None:
        """Ends the receivers' threads and this one's, after what is waiting was broadcast."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        while self._thread.is_alive():
            self._thread.join(timeout=0.5)
            with self._condition:
                self._check()
        with self._condition:
            self._check()

    def _new_snapshot(self) -> _Snapshot:
        return _Snapshot(torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._wire_device))

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
            device = torch.device(self._wire_device)
            group = make_group(*self._address, **self._meeting)
            with _side_stream(device):
                self._send_text(group, json.dumps([asdict(spec) for spec in self.specs]))
                while (snapshot := self._next()) is not None:
                    self._send(group, snapshot)
                self._send_header(group, [_CLOSE, 0, 0, 0])
        except BaseException as error:
            logger.debug("the publisher's thread ends", exc_info=True)
            with self._condition:
                # Without its traceback, whose frames keep the group: the last reference to a gloo
                # group closes its connections, so that the other ends fail too instead of waiting.
                self._error = error.with_traceback(None)
                self._condition.notify_all()

    def _next(self) -> _Snapshot | None:
        with self._condition:
            while self._waiting is None:
                if self._closed:
                    return None
                self._condition.wait()
            snapshot, self._waiting = self._waiting, None
            self._busy_since = time.monotonic()
            self._condition.notify_all()
            return snapshot

    def _send(self, group: WeightGroup, snapshot: _Snapshot) -> None:
        start = time.monotonic()
        text = json.dumps(snapshot.meta)
        self._send_header(
            group, [snapshot.version, snapshot.flags, checksum(snapshot.flat), len(text.encode())]
        )
        self._send_text(group, text, with_size=False)
        _broadcast_flat(group, snapshot.flat, self._bucket_bytes)
        with self._condition:
            self.last_broadcast_s = time.monotonic() - start
            self._busy_since = None
            self._free.append(snapshot)

    def _send_header(self, group: WeightGroup, values: list[int]) -> None:
        _broadcast(group, torch.tensor(values, device=self._wire_device))

    def _send_text(self, group: WeightGroup, text: str, *, with_size: bool = True) -> None:
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self._wire_device)
        if with_size:
            self._send_header(group, [len(data), 0, 0, 0])
        if len(data):
            _broadcast(group, data)


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


class Receiver:
    """An engine worker's end.

    Consumes: broadcasts, in its thread, into one staging buffer. Produces: loaded weights, at
    `take`. Waits for: the thread waits before it overwrites a pinned version that was not loaded
    yet, and while `take` runs. Ends: the publisher's closing header. An error in the thread is
    raised by the next `take`.
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
    ) -> None:
        self.version = -1  # loaded version; -1 before the first
        self._expected, self._load = expected, load
        self._wire_device = device if backend == "nccl" else torch.device("cpu")
        self._bucket_bytes = bucket_bytes
        self._staged: tuple[int, int, dict] | None = None  # version, flags, meta
        self._receiving, self._taking, self._closed = False, False, False
        self._error: BaseException | None = None
        self._condition = threading.Condition()
        self._address = (host, port, rank, size)
        self._meeting: dict[str, Any] = {"backend": backend, "timeout_s": timeout_s}
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def staged_version(self) -> int:
        """Version that `take` would load, -1 if there is none."""
        with self._condition:
            if self._error is not None:
                return 0  # `take` raises it
            return -1 if self._staged is None else self._staged[0]

    def take(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Loads the newest staged version; None if there is none.

        With `wait_for`, waits until that version, a newer or a pinned one has come. A broadcast
        that has begun is waited for in any case.

        Raises:
            RuntimeError: receiving failed (with the cause), or `wait_for` did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._taking = wait_for is None
            try:
                while True:
                    if self._error is not None:
                        raise RuntimeError(f"receiving weights failed: {self._error}")
                    # a pinned version holds back newer ones: it is due whatever is waited for
                    due = self._staged is not None and (
                        self._staged[0] >= (wait_for or 0) or self._staged[1] != 0
                    )
                    if not self._receiving and (due or wait_for is None):
                        break
                    if wait_for is not None and time.monotonic() > deadline:
                        raise RuntimeError(
                            f"version {wait_for} has not come within {timeout_s:.0f} s"
                        )
                    self._condition.wait(0.2)
                if self._staged is None:
                    return None
                version, flags, meta = self._staged
                start = time.monotonic()
                self._load(views(self._flat, self._expected))
                self._staged, self.version = None, version
            finally:
                self._taking = False
                self._condition.notify_all()
        return WeightUpdate(
            version=version,
            evaluate=bool(flags & FLAG_EVALUATE),
            final=bool(flags & FLAG_FINAL),
            meta=meta,
            load_s=time.monotonic() - start,
        )

    def close(self, timeout_s: float = 30.0) -> None:
        """Waits for the publisher's closing header."""
        self._thread.join(timeout=timeout_s)

    def _run(self) -> None:
        try:
            group = make_group(*self._address, **self._meeting)
            with _side_stream(self._wire_device):
                specs = [
                    TensorSpec(s["name"], tuple(s["shape"]), s["dtype"], s["offset"])
                    for s in json.loads(self._receive_text(group, self._receive_header(group)[0]))
                ]
                check_manifest(specs, self._expected)
                self._expected = specs  # same tensors; the trainer's order and offsets
                self._flat = torch.zeros(
                    flat_bytes(specs), dtype=torch.uint8, device=self._wire_device
                )
                while self._receive(group):
                    pass
        except BaseException as error:
            logger.debug("the receiver's thread ends", exc_info=True)
            with self._condition:
                # without its traceback: see Publisher._run
                self._error, self._receiving = error.with_traceback(None), False
                self._condition.notify_all()

    def _receive(self, group: WeightGroup) -> bool:
        version, flags, expected_sum, text_bytes = self._receive_header(group)
        if version == _CLOSE:
            return False
        with self._condition:
            while self._taking or (self._staged is not None and self._staged[1]):
                self._condition.wait()
            self._staged, self._receiving = None, True
        meta = json.loads(self._receive_text(group, text_bytes))
        _broadcast_flat(group, self._flat, self._bucket_bytes)
        received_sum = checksum(self._flat)
        if received_sum != expected_sum:
            raise ValueError(
                f"checksum of version {version} is {received_sum}, the trainer's is {expected_sum}"
            )
        with self._condition:
            self._staged, self._receiving = (version, flags, meta), False
            self._condition.notify_all()
        return True

    def _receive_header(self, group: WeightGroup) -> list[int]:
        header = torch.zeros(4, dtype=torch.int64, device=self._wire_device)
        _broadcast(group, header)
        return header.tolist()

    def _receive_text(self, group: WeightGroup, num_bytes: int) -> str:
        data = torch.zeros(num_bytes, dtype=torch.uint8, device=self._wire_device)
        if num_bytes:
            _broadcast(group, data)
        return bytes(data.tolist()).decode()


class EngineWeights:
    """vLLM worker extension (`worker_extension_cls="weights.EngineWeights"`).

    vLLM mixes this class into its worker, so `self` is the worker; the methods are called through
    `collective_rpc` and are prefixed to stay clear of the worker's own names.
    """

    def tba_start(self, owner_pid: int, policy_temperature: float | None) -> None:
        """The first call to a worker: what must hold before anything is generated.

        Args:
            policy_temperature: of the log-probs that stand in second place wherever at least two
                are asked for; None: that of the second most probable token, as in vLLM.
        """
        _die_with(owner_pid)
        worker: Any = self
        if policy_temperature is not None:
            _record_old_logprobs(worker.model_runner.sampler, policy_temperature)
        if worker.device.type == "cpu":
            # Linux kills a process (SIGILL) that uses Intel's AMX without having asked for it, as
            # vLLM's bfloat16 attention does; a large matrix product asks, but may come later.
            torch.cpu._init_amx()

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

    def tba_leave(self) -> None:
        self._tba_receiver.close()


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
        while os.getppid() == core_pid and _alive(owner_pid):
            time.sleep(1.0)
        if os.getppid() == core_pid and core_pid not in (0, 1, owner_pid):
            os.kill(core_pid, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()


def _alive(pid: int) -> bool:
    """True while the process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
    except OSError:
        return True  # no /proc: never kill by mistake
