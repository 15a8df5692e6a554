"""New weights from the trainer into running vLLM engines: against a raw broadcast, and who waits.

    python bench/weight_sync.py             SmolLM2-135M to 1 and 2 engines; one JSON object last
    python bench/weight_sync.py --quick     fewer rounds

The publisher and the engines run as in a job: this process is the trainer, each engine belongs to
a process of its own and has worker processes below that. The ways take turns within each round, in
an order that changes; a ratio is the median over rounds.

    raw         one broadcast of the same bytes in one flat buffer by gloo, to the same worker
                processes, then the engine loads them, as it does in ours. Snapshot, checksums,
                version, names and buckets are what ours does more
    ours        from the call of `Publisher.publish` until every engine holds the version
    per tensor  (a model of 300 small tensors, to a process without an engine) a broadcast a tensor,
                in names and order agreed before, each copied into its parameter when it has come

`fraction_of_raw` is raw / ours and `bucketed_over_per_tensor` per tensor / ours. The trainer's
stall is the time that `publish` holds up the main thread, also as a share of an optimizer step of
SmolLM2 measured here. The searcher's stall lasts from pausing an engine that generates 16 responses
until it goes on, the load included; beside it the time of that load, and of a decoding step of
these responses. `first_token` is from the call of `publish` to the first token under the new
weights, of an engine that asks after each step whether a version is complete.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure import in_fresh_process, say

import weights
from engine import EngineConfig, EngineOptions, Sampling, VLLMEngine, engine_port
from model import load_policy, load_tokenizer, stop_token_ids
from pretrained import build_smollm2, cached
from weights import EngineWeights, Publisher, Receiver, manifest

CPU = torch.device("cpu")
BUCKET_BYTES = weights.WeightsConfig().bucket_mb << 20
TIMEOUT_S = 120.0
SMALL_TENSORS, SMALL_SHAPE = 300, (64, 64)
STEP_GROUPS, STEP_RESPONSES = 4, 4  # of the optimizer step
SEQUENCES, PROMPT_TOKENS, STEPS_BEFORE = 16, 60, 8  # of the engine that generates


def make_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def raw_group(port: int, rank: int, size: int) -> dist.ProcessGroupGloo:
    """A gloo group beside the weights' own."""
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    limit = timedelta(seconds=TIMEOUT_S)
    return dist.ProcessGroupGloo(dist.PrefixStore("raw", server), rank, size, limit)


def broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor) -> None:
    weights._start_broadcast(group, tensor).wait()


def make_publisher(
    model: torch.nn.Module, port: int, num_workers: int, dtype: torch.dtype
) -> Publisher:
    return Publisher(
        model,
        host="127.0.0.1",
        port=port,
        num_workers=num_workers,
        dtype=dtype,
        backend="gloo",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
        meeting_timeout_s=TIMEOUT_S,
    )


# --------------------------------------------------------------------------- engines


class BenchWeights(EngineWeights):
    """vLLM's worker extension, which can also take a raw broadcast."""

    def bench_join(self, port: int, rank: int, size: int) -> None:
        self._bench_group = raw_group(port, rank, size)

    def bench_take_raw(self) -> float:
        """Receives one flat buffer and loads it; seconds of the load."""
        receiver = self._tba_receiver
        flat = receiver._buffers[0]
        broadcast(self._bench_group, flat)
        start = time.monotonic()
        with torch.inference_mode():
            receiver._load(weights.views(flat, receiver._expected))
        return time.monotonic() - start


class Owner:
    """An engine's process: it does what it is told through a pipe."""

    def __init__(self, pipe: Connection, index: int, path: str, cores: Sequence[int]) -> None:
        import vllm

        tokenizer = load_tokenizer(path)
        options = EngineOptions(
            path=path,
            stop_token_ids=stop_token_ids(path, tokenizer),
            pad_token_id=int(tokenizer.pad_token_id),
            max_model_len=512,
            dtype=torch.float32,
            device=CPU,
            seed=index,
            cores=cores,
            port=engine_port(index, str(os.getpid())),
        )
        original = vllm.LLM
        vllm.LLM = lambda **o: original(**{**o, "worker_extension_cls": "weight_sync.BenchWeights"})
        self.pipe = pipe
        self.engine = VLLMEngine(EngineConfig(max_num_seqs=SEQUENCES, kv_cache_gb=0.5), options)
        vllm.LLM = original
        self.llm: Any = self.engine._llm
        self.engine.pin(cores)

    def join(self, port: int, rank: int, size: int) -> None:
        self.engine.join_weights(
            host="127.0.0.1",
            port=port,
            rank=rank,
            size=size,
            backend="gloo",
            bucket_bytes=BUCKET_BYTES,
            timeout_s=TIMEOUT_S,
        )
        self.llm.collective_rpc("bench_join", args=(port, rank, size))

    def leave(self) -> None:
        self.engine.leave_weights()

    def take(self, version: int) -> tuple[float, float]:
        """When the version was loaded, on the clock of all processes, and the load's seconds."""
        update = self.engine.update(wait_for=version, timeout_s=TIMEOUT_S)
        assert update is not None and update.version == version
        return time.monotonic(), update.load_s

    def take_raw(self) -> tuple[float, float]:
        load_s = self.llm.collective_rpc("bench_take_raw")[0]
        self.llm.reset_prefix_cache()
        return time.monotonic(), load_s

    def update_in_flight(self) -> dict[str, float]:
        """Generates, asks for a new version, takes it as soon as it is complete, and goes on."""
        engine, rng = self.engine, np.random.default_rng(0)
        sampling = Sampling(n=1, temperature=1.0, max_tokens=400 - PROMPT_TOKENS)
        for key in range(SEQUENCES):
            engine.add(key, rng.integers(100, 40_000, PROMPT_TOKENS), sampling)
        engine.step()  # the prompts
        seconds = [timed(engine.step) for _ in range(STEPS_BEFORE)]
        self.pipe.send("publish")
        while not engine.has_update():
            engine.step()
        start = time.monotonic()
        update = engine.update()
        stall_s = time.monotonic() - start  # from before the pause until it goes on
        assert update is not None
        requests = self.llm.llm_engine.output_processor.request_states
        first: str | None = None
        while first != str(update.version):  # what was computed before the pause comes first
            engine.step()
            first = next(iter(requests.values())).weight_version_starts[-1][0]
        first_token_s = time.time() - update.meta["published_at"]
        engine.drop()
        return {
            "stall_s": stall_s,
            "pause_s": stall_s - update.stall_s,
            "load_s": update.load_s,
            "decode_step_s": median(seconds),
            "first_token_s": first_token_s,
        }

    def close(self) -> None:
        self.engine.close()


def own_engine(pipe: Connection, index: int, path: str, cores: Sequence[int]) -> None:
    """The life of an engine's process."""
    owner = Owner(pipe, index, path, cores)
    pipe.send("ready")
    while True:
        name, arguments = pipe.recv()
        pipe.send(getattr(owner, name)(*arguments))
        if name == "close":
            return


class Engines:
    """The engines' processes, by their pipes."""

    def __init__(self, path: str) -> None:
        self._path, self._context = path, multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def start_another(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        index = len(self._pipes)
        here, there = self._context.Pipe()
        own = [cores[-1 - index % len(cores)]]
        process = self._context.Process(target=own_engine, args=(there, index, self._path, own))
        process.start()
        there.close()
        self._pipes.append(here)
        self._processes.append(process)
        assert here.recv() == "ready"

    def __len__(self) -> int:
        return len(self._pipes)

    def tell(self, name: str, *arguments: Any, each: Sequence[Any] | None = None) -> None:
        """`each`: a last argument for each engine."""
        for i, pipe in enumerate(self._pipes):
            pipe.send((name, (*arguments, *([each[i]] if each else []))))

    def answers(self) -> list[Any]:
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        self.tell("close")
        for process in self._processes:
            process.join(timeout=30)


def timed(function: Callable[[], Any]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


# --------------------------------------------------------------------------- the ways


def to_engines(
    policy: torch.nn.Module, engines: Engines, rounds: int, dtype: torch.dtype
) -> dict[str, float]:
    """Raw and ours in turns, then updates of engines that generate."""
    size = 1 + len(engines)
    store = make_store()
    publisher = make_publisher(policy, store.port, len(engines), dtype)
    for i, pipe in enumerate(engines._pipes):
        pipe.send(("join", (store.port, 1 + i, size)))
    group = raw_group(store.port, 0, size)
    engines.answers()
    flat = torch.zeros(publisher.num_bytes, dtype=torch.uint8)
    weights.copy_weights(policy, weights.views(flat, publisher.specs))
    version, stalls = -1, []

    def ours() -> tuple[float, float]:
        nonlocal version
        version += 1
        engines.tell("take", version)
        time.sleep(0.2)  # the engines wait for it
        start = time.monotonic()
        publisher.publish(policy, version)
        stalls.append(time.monotonic() - start)
        answers = engines.answers()
        return max(at for at, _ in answers) - start, max(load_s for _, load_s in answers)

    def raw() -> tuple[float, float]:
        engines.tell("take_raw")
        time.sleep(0.2)
        start = time.monotonic()
        broadcast(group, flat)
        answers = engines.answers()
        return max(at for at, _ in answers) - start, max(load_s for _, load_s in answers)

    ours(), raw()
    stalls.clear()
    ratios, loads, seconds = [], [], {"ours": [], "raw": []}
    for i in range(rounds):
        taken = {}
        for way in (ours, raw) if i % 2 else (raw, ours):
            taken[way.__name__], load_s = way()
            seconds[way.__name__].append(taken[way.__name__])
            loads.append(load_s)
        ratios.append(taken["raw"] / taken["ours"])
        say(
            f"{len(engines)} engine(s), round {i + 1}: ours {taken['ours']:.3f} s, "
            f"raw {taken['raw']:.3f} s, of which the load {loads[-1]:.3f} s"
        )
    updates = []
    for i in range(rounds):
        engines.tell("update_in_flight")
        assert set(engines.answers()) == {"publish"}
        version += 1
        start = time.monotonic()
        publisher.publish(policy, version)
        stalls.append(time.monotonic() - start)
        updates += engines.answers()
        last = updates[-1]
        say(
            f"{len(engines)} engine(s), in flight {i + 1}: stall {1e3 * last['stall_s']:.0f} ms, "
            f"load {1e3 * last['load_s']:.0f}, decoding step {1e3 * last['decode_step_s']:.0f}"
        )
    publisher.close()
    engines.tell("leave")
    engines.answers()
    return {
        "fraction_of_raw": median(ratios),
        "ours_s": median(seconds["ours"]),
        "raw_s": median(seconds["raw"]),
        "reload_s": median(loads),
        "trainer_stall_ms": 1e3 * median(stalls),
        "searcher_stall_ms": 1e3 * median(u["stall_s"] for u in updates),
        "pause_ms": 1e3 * median(u["pause_s"] for u in updates),
        "stall_limit_ms": 1e3 * median(u["load_s"] + u["decode_step_s"] for u in updates),
        "first_token_s": median(u["first_token_s"] for u in updates),
        "gb": publisher.num_bytes / 1e9,
    }


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ParameterList(torch.randn(SMALL_SHAPE) for _ in range(SMALL_TENSORS))


def receive_small(pipe: Connection, port: int, rounds: int) -> None:
    """The engine's side of `small_tensors`; says when it has loaded all."""
    torch.set_num_threads(1)
    model = small_model()
    mine = dict(model.named_parameters())

    @torch.no_grad()
    def load(tensors: Any) -> None:
        for name, tensor in tensors:
            mine[name].copy_(tensor)

    receiver = Receiver(
        manifest(model, torch.float32),
        load,
        host="127.0.0.1",
        port=port,
        rank=1,
        size=2,
        backend="gloo",
        bucket_bytes=BUCKET_BYTES,
        timeout_s=TIMEOUT_S,
        device=CPU,
    )
    group = raw_group(port, 1, 2)
    for i in range(rounds):
        receiver.take(wait_for=i, timeout_s=TIMEOUT_S)
        pipe.send(time.monotonic())
        for parameter in mine.values():
            received = torch.empty_like(parameter)
            broadcast(group, received)
            with torch.no_grad():
                parameter.copy_(received)
        pipe.send(time.monotonic())
    receiver.close()


def small_tensors(rounds: int) -> float:
    """Per tensor over ours, until all is loaded."""
    store = make_store()
    model = small_model()
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=receive_small, args=(there, store.port, rounds))
    process.start()
    publisher = make_publisher(model, store.port, 1, torch.float32)
    group = raw_group(store.port, 0, 2)
    ratios = []
    for i in range(rounds):
        start = time.monotonic()
        publisher.publish(model, i)
        ours = here.recv() - start
        time.sleep(0.02)
        start = time.monotonic()
        for parameter in model.parameters():
            broadcast(group, parameter.detach())
        ratios.append((here.recv() - start) / ours)
        time.sleep(0.02)
    publisher.close()
    process.join()
    return median(ratios[1:])


def optimizer_step() -> float:
    """Seconds of one step of SmolLM2, with the trainer's ordinary code."""
    from trainer_step import (
        ANSWERS,
        QUESTIONS,
        Size,
        draw_lengths,
        make_groups,
        make_optimizer,
        open_policy,
        prepare,
        step,
    )

    rng = np.random.default_rng(0)
    count = STEP_GROUPS * STEP_RESPONSES
    size = Size(quick=False, groups=STEP_GROUPS, responses=STEP_RESPONSES, rounds=1)
    policy = open_policy(size)
    prepare(policy, "packed")
    prompts = draw_lengths(QUESTIONS, STEP_GROUPS, rng)
    groups = make_groups(prompts, draw_lengths(ANSWERS, count, rng), policy.config.vocab_size)
    optimizer = make_optimizer(policy)
    step("packed", policy, optimizer, groups[:1])  # makes the optimizer's states
    return timed(partial(step, "packed", policy, optimizer, groups))


def main(arguments: Sequence[str]) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    rounds = 3 if quick else 7
    torch.set_num_threads(1)
    ratio = in_fresh_process(small_tensors, 10 if quick else 30)
    say(f"{SMALL_TENSORS} small tensors: one broadcast each takes {ratio:.1f} times ours")
    path = str(cached("smollm2", build_smollm2))
    step_s = in_fresh_process(optimizer_step)
    say(f"an optimizer step of SmolLM2: {step_s:.1f} s")
    policy = load_policy(path, device=CPU, dtype=torch.float32)
    engines = Engines(path)
    try:
        results = []
        for count in (1, 2):
            engines.start_another()
            say(f"{count} engine(s) started")
            results.append(to_engines(policy, engines, rounds, torch.float32))
    finally:
        engines.close()
    one, two = results
    share = one["trainer_stall_ms"] / 1e3 / step_s
    return {
        "fraction_of_raw": one.pop("fraction_of_raw"),
        "bucketed_over_per_tensor": ratio,
        "trainer_stall_ms": one.pop("trainer_stall_ms"),
        "searcher_stall_ms": one.pop("searcher_stall_ms"),
        "trainer_stall_of_step": share,
        "step_s": step_s,
        **one,
        **{f"{name}_2_engines": value for name, value in two.items()},
    }


if __name__ == "__main__":
    print(json.dumps({name: round(value, 4) for name, value in main(sys.argv[1:]).items()}))
