"""What a trainer's step costs: arithmetic, seconds by phase, memory; a trace of a few steps.

    ModelFlops    FLOPs that a model needs of given sequences, forward and backward
    product_peak  the rate of a matrix product on this machine, which utilisation is measured by
    Phases        seconds of the named parts of a step
    Profiler      torch's profiler over a few steps, `trainer.profile=true`
    Accounting    the four for one trainer, step by step

Utilisation (MFU: arXiv 2204.02311, App. B) counts what must be computed and no more: products of
weights with the tokens of the rows, the head at response tokens alone, attention to the tokens that
each token sees. Padding is not counted, nor what is computed again (activation checkpointing, the
second pass over a large group, logits in the backward pass).
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from packing import layer_windows
from parallel import device_of

logger = logging.getLogger("tba")

CPU = torch.device("cpu")


# --------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one forward and one backward pass; a multiplication and an addition are two."""

    token: float  # of the weights but the head's, for each token of a row
    response_token: float  # of the head, for each token that is predicted
    pair: Mapping[int | None, float]  # by window: of the attention, for each token a token sees

    def of(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        *,
        share_prompts: bool,
    ) -> float:
        """FLOPs that the log-probs of these responses and their gradient need.

        Equal pairs count once, as the trainer computes them. A response's last token predicts
        nothing and counts for the head alone.

        Args:
            prompts: int [P] each.
            responses: int [T] each, T > 0.
            share_prompts: equal prompts count once, too.

        >>> flops = ModelFlops(token=100, response_token=10, pair={None: 1})
        >>> p, y = np.array([5, 6, 7]), [np.array([8, 9]), np.array([4])]
        >>> flops.of([p, p], y, share_prompts=True)  # 4 tokens; 3; 1 + 2 + 3 and 4
        440.0
        >>> flops.of([p, p], y, share_prompts=False)  # 4 + 3 tokens; 3; 1 + 2 + 3 + 4 and 1 + 2 + 3
        746.0
        """
        pairs = {}
        for prompt, response in zip(prompts, responses, strict=True):
            pairs[prompt.tobytes(), response.tobytes()] = len(prompt), len(response)
        segments: list[tuple[int, int]] = []  # tokens before it, its own tokens
        if share_prompts:
            once = {prompt: length for (prompt, _), (length, _) in pairs.items()}
            segments += [(0, length) for length in once.values()]
            segments += [(before, length - 1) for before, length in pairs.values()]
        else:
            segments += [(0, before + length - 1) for before, length in pairs.values()]
        total = self.token * sum(length for _, length in segments)
        total += self.response_token * sum(length for _, length in pairs.values())
        for window, flops in self.pair.items():
            total += flops * sum(_num_seen(before, length, window) for before, length in segments)
        return float(total)


def _num_seen(before: int, length: int, window: int | None) -> int:
    """Tokens that `length` tokens after `before` others see, all of them together, with itself."""
    seen = np.arange(before + 1, before + length + 1)
    return int((seen if window is None else np.minimum(seen, window)).sum())


def model_flops(model: PreTrainedModel) -> ModelFlops:
    """Counts a model's arithmetic by its weights, adapters included, and its attention.

    A weight that is trained needs three products (forward, gradient of the input, gradient of the
    weight), a frozen one two. Embeddings are looked up, which is no arithmetic; norms, biases and
    activations are left out, as is usual.

    Args:
        model: after adapters are put in and weights frozen; sharded (DTensor) or not.

    Raises:
        ValueError: it has weights or layers whose arithmetic is not known here.
    """
    config: Any = model.config.get_text_config()
    head = model.get_output_embeddings()
    of_head = {id(module) for module in head.modules()}
    flops = {True: 0.0, False: 0.0}  # a token: of the head, and of all else
    counted: set[int] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            weight = module.weight
            products = 3 if weight.requires_grad else 2
            flops[id(module) in of_head] += 2.0 * products * weight.numel()
        if isinstance(module, torch.nn.Linear | Conv1D | torch.nn.Embedding):
            counted.add(id(module.weight))
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and id(weight) not in counted:
            raise ValueError(f"the arithmetic of {config.model_type} is not known: {name}")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Scores and their sum of values forward; of both, the gradients of both factors backward.
    pair = 3 * 2 * 2 * config.num_attention_heads * size
    return ModelFlops(
        token=flops[False],
        response_token=flops[True],
        pair={
            window: float(pair * layers)
            for window, layers in Counter(layer_windows(config)).items()
        },
    )


_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_LONG_S = 0.01  # a product that takes longer is large enough


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product: the best of several, of growing sides.

    On the calling thread's own threads or device; it takes less than a second, and up to 800 MB on
    a GPU.
    """
    generator = torch.Generator(device).manual_seed(0)
    best = 0.0
    for side in _SIDES:
        left, right = (
            torch.randn(side, side, device=device, generator=generator).to(dtype) for _ in range(2)
        )
        out = torch.empty_like(left)
        phases = Phases(device)
        shortest = math.inf
        for _ in range(8):
            with phases("product"):
                torch.mm(left, right, out=out)
            shortest = min(shortest, phases.take()["product"])
        best = max(best, 2 * side**3 / shortest)
        if shortest > _LONG_S:
            break
    return best


# --------------------------------------------------------------------------- time


class Phases:
    """Seconds of named parts of a step, as the device spends them.

    Belongs to one thread. On a GPU a phase is the time between two events on the current stream;
    they are read by `take`, so that nothing waits for the GPU in between. Phases may nest; an outer
    one includes the inner.

    Args:
        device: where the work runs.
        annotate: name the phases in a profiler's trace.
        now: clock in seconds, for CPUs.

    >>> ticks = iter([0.0, 2.0, 5.0, 6.0])
    >>> phases = Phases(torch.device("cpu"), now=lambda: next(ticks))
    >>> for _ in range(2):
    ...     with phases("forward"):
    ...         pass
    >>> phases.take(), phases.take()
    ({'forward': 3.0}, {})
    """

    def __init__(
        self,
        device: torch.device,
        *,
        annotate: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cuda = device.type == "cuda"
        self._annotate = annotate
        self._now = now
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with record_function(name) if self._annotate else nullcontext():
            start = self._mark()
            try:
                yield
            finally:
                self._spans.append((name, start, self._mark()))

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call; on a GPU it waits for the last phase to end."""
        spans, self._spans = self._spans, []
        if self._cuda and spans:
            spans[-1][2].synchronize()
        seconds: dict[str, float] = {}
        for name, start, end in spans:
            took = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            seconds[name] = seconds.get(name, 0.0) + took
        return seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


# --------------------------------------------------------------------------- memory


def peak_memory_gb(device: torch.device) -> float:
    """10^9 bytes: on a GPU the most that torch had allocated on it, else the process's largest
    resident set since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


# --------------------------------------------------------------------------- trace


class Profiler:
    """torch's profiler over three steps, or all if there are fewer, after two others if there are.

    Leaves `<name>.json.gz`, a trace for ui.perfetto.dev or chrome://tracing, and `<name>.txt`, see
    `operator_table`.

    Args:
        folder: made when there is something to write.
        name: of the files.
        device: where the work runs.
        total_steps: of the run.
    """

    def __init__(self, folder: Path, name: str, *, device: torch.device, total_steps: int) -> None:
        self._folder, self._name, self._device = folder, name, device
        active = min(3, total_steps)
        # Torch takes its own first traced step for a warm-up and throws it away.
        warmup = min(1, total_steps - active)
        wait = min(1, total_steps - active - warmup)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active, repeat=1),
            on_trace_ready=self._write,
        )
        self._left = wait + warmup + active

    def start(self) -> None:
        """Before the first step."""
        assert self._profile is not None
        self._profile.start()

    def step(self) -> None:
        """After every step; writes after the last one of the trace."""
        if self._profile is None:
            return
        self._profile.step()
        self._left -= 1
        if self._left == 0:
            self._profile.stop()
            self._profile = None  # and with it the memory of the trace

    def _write(self, trace: profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        plain = self._folder / f"{self._name}.json"
        trace.export_chrome_trace(str(plain))
        text = plain.read_bytes()
        path = plain.with_suffix(".json.gz")
        # Torch's own compression and table would hold up the trainer for many seconds.
        with gzip.open(path, "wb", compresslevel=3) as file:
            file.write(text)
        plain.unlink()
        table = operator_table(json.loads(text)["traceEvents"])
        plain.with_suffix(".txt").write_text(table)
        logger.info("profile: %s, to open in ui.perfetto.dev; operators: %s.txt", path, self._name)


_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def operator_table(events: Sequence[Mapping[str, Any]], *, num_rows: int = 40) -> str:
    """The operators that took longest, without what they called; of the GPU and of the host.

    Args:
        events: `traceEvents` of a Chrome trace; microseconds.
        num_rows: of each of the two.

    >>> outer = {"ph": "X", "cat": "cpu_op", "tid": 1, "name": "linear", "ts": 0, "dur": 4000}
    >>> print(operator_table([outer, {**outer, "name": "mm", "ts": 1000, "dur": 3000}]))
    host: 4 ms
        self ms   share     calls  name
          3.000   75.0%         1  mm
          1.000   25.0%         1  linear
    <BLANKLINE>
    """
    spans = [e for e in events if e.get("ph") == "X" and "dur" in e]
    where = {
        "GPU": [e for e in spans if e.get("cat") in _ON_GPU],
        "host": [
            e
            for e in spans
            if e.get("cat") not in (*_ON_GPU, "gpu_user_annotation", "overhead", "Trace")
        ],
    }
    lines = []
    for place, chosen in where.items():
        own_us, calls = Counter[str](), Counter[str]()
        open_spans: list[tuple[Any, float, str]] = []  # thread, end and name of those we are in
        for e in sorted(chosen, key=lambda e: (str(e["tid"]), e["ts"], -e["dur"])):
            while open_spans and (open_spans[-1][0] != e["tid"] or open_spans[-1][1] <= e["ts"]):
                open_spans.pop()
            if open_spans:
                own_us[open_spans[-1][2]] -= e["dur"]
            own_us[e["name"]] += e["dur"]
            calls[e["name"]] += 1
            open_spans.append((e["tid"], e["ts"] + e["dur"], e["name"]))
        if chosen:
            total = max(sum(own_us.values()), 1e-9)
            lines += [f"{place}: {total / 1e3:.4g} ms", "    self ms   share     calls  name"]
        for name, us in own_us.most_common(num_rows):
            lines.append(f"{us / 1e3:11.3f} {us / total:7.1%} {calls[name]:9d}  {name}")
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------- a trainer's


class Accounting:
    """What one trainer's steps cost. Belongs to the thread that trains.

    Args:
        device: of the policy.
        flops: of the policy; None: not known, so there is no utilisation.
        peak: FLOP/s of `product_peak`.
        profiler: None: no trace.
    """

    def __init__(
        self,
        device: torch.device = CPU,
        *,
        flops: ModelFlops | None = None,
        peak: float = math.nan,
        profiler: Profiler | None = None,
    ) -> None:
        self.peak = peak
        self.phases = Phases(device, annotate=profiler is not None)
        self._device, self._flops, self._profiler = device, flops, profiler
        self._seconds: Counter[str] = Counter()  # by phase, since the first step
        self._total_flops = 0.0
        self._steps = 0

    @property
    def mark(self) -> Callable[[str], AbstractContextManager[Any]]:
        """Names other parts of a step in the trace, where there is one."""
        return nullcontext if self._profiler is None else record_function

    def start(self) -> None:
        """Before the first step: peak memory of a GPU is counted from here, the trace begins."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._profiler is not None:
            self._profiler.start()

    def end_step(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        *,
        share_prompts: bool,
    ) -> dict[str, float]:
        """Closes a step that trained on these responses; returns its `time/` and `memory/` metrics.

        Utilisation is of the gradient and the optimizer's step: of the time in which this trainer
        could compute. Waiting for other trainers' gradients is in it.
        """
        seconds = self.phases.take()
        self._seconds.update(seconds)
        self._steps += 1
        metrics = {f"time/{name}_s": s / self._steps for name, s in self._seconds.items()}
        metrics["memory/peak_gb"] = peak_memory_gb(self._device)
        if self._flops is not None:
            flops = self._flops.of(prompts, responses, share_prompts=share_prompts)
            self._total_flops += flops
            rate = flops / _computing(seconds)
            metrics |= {"time/model_tflop_per_s": rate / 1e12, "time/mfu": rate / self.peak}
        if self._profiler is not None:
            self._profiler.step()
        return metrics

    def summary(self) -> dict[str, float | None]:
        """Of all steps, for summary.json; None where the model's arithmetic is not known."""
        rate = None
        if self._flops is not None and self._steps:
            rate = self._total_flops / _computing(self._seconds)
        return {
            "mfu": None if rate is None else rate / self.peak,
            "model_tflop_per_s": None if rate is None else rate / 1e12,
            "product_tflop_per_s": self.peak / 1e12,
            "peak_memory_gb": peak_memory_gb(self._device),
        }


def _computing(seconds: Mapping[str, float]) -> float:
    return seconds["gradient"] + seconds["optimizer"]


def make_accounting(
    policy: PreTrainedModel,
    *,
    dtype: torch.dtype,
    profile_folder: Path | None,
    name: str,
    total_steps: int,
) -> Accounting:
    """Measures the machine (less than a second) and counts the policy's arithmetic.

    Args:
        policy: as it will be trained.
        dtype: of its matrix products.
        profile_folder: where a trace goes; None: no trace.
        name: of the trace's files.
        total_steps: of the run.
    """
    device = device_of(policy)
    peak = product_peak(device, dtype)
    logger.info("matrix products: %.3g TFLOP/s in %s", peak / 1e12, str(dtype).split(".")[1])
    flops = None
    try:
        flops = model_flops(policy)
    except ValueError as error:
        logger.warning("no time/mfu: %s", error)
    profiler = None
    if profile_folder is not None:
        profiler = Profiler(profile_folder, name, device=device, total_steps=total_steps)
    return Accounting(device, flops=flops, peak=peak, profiler=profiler)
