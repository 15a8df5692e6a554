"""An engine over several devices: its workers load one version, and agree with the trainer."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist

from engine import (
    Completion,
    EngineConfig,
    EngineOptions,
    Sampling,
    VLLMEngine,
    check_heads,
    engine_port,
)
from model import load_policy, response_logprobs
from weights import Publisher, Receiver, manifest, process_is_alive

CPU = torch.device("cpu")
TP = 2
TOLERANCE = 1e-4  # nats a token, float32; other weights change log-probs by tenths


def options(path: str, tp: int, **others: Any) -> EngineOptions:
    return EngineOptions(
        path=path,
        stop_token_ids=[tiny.EOS],
        pad_token_id=tiny.PAD,
        max_model_len=tiny.MAX_LENGTH,
        dtype=torch.float32,
        device=CPU,
        seed=1,
        tp=tp,
        **others,
    )


def start_publisher(policy: torch.nn.Module, num_workers: int) -> tuple[Publisher, dict[str, Any]]:
    """A publisher, and what its receivers must know."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wire = {"host": "127.0.0.1", "port": store.port, "backend": "gloo", "bucket_bytes": 1 << 14}
    publisher = Publisher(
        policy,
        num_workers=num_workers,
        dtype=torch.float32,
        timeout_s=60,
        meeting_timeout_s=60,
        **wire,
    )
    publisher.store = store
    return publisher, {**wire, "size": 1 + num_workers, "timeout_s": 60}


# --------------------------------------------------------------------------- one version


class Worker:
    """What a vLLM worker does of `EngineWeights`, with one weight; now and then it is late."""

    def __init__(self, rank: int, delays_s: Iterator[float], wire: dict[str, Any]) -> None:
        self.loaded: list[float] = []
        self.delays_s = delays_s
        model = torch.nn.Linear(64, 64, bias=False)
        self.receiver = Receiver(
            manifest(model, torch.float32), self.load, rank=rank, device=CPU, **wire
        )
        receive = self.receiver._receive

        def late(*args: Any) -> bool:
            time.sleep(next(self.delays_s))
            return receive(*args)

        self.receiver._receive = late

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        ((_, weight),) = weights
        assert weight.min() == weight.max(), "a mixture of two versions"
        self.loaded.append(float(weight[0, 0]))

    def call(self, method: str, args: tuple) -> Any:
        if method == "tba_hold":
            return self.receiver.hold(*args)
        assert method == "tba_take"
        wait_for, timeout_s = args
        return self.receiver.take(wait_for=wait_for, timeout_s=timeout_s)


class Workers:
    """Stands for vLLM: asks each worker in turn, with time between them."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.disagreed = 0

    def collective_rpc(self, method: str, args: tuple) -> list[Any]:
        answers = []
        for worker in self.workers:
            answers.append(worker.call(method, args))
            time.sleep(0.002)
        if method == "tba_hold":
            self.disagreed += len(set(answers)) > 1
        return answers


def test_workers_load_the_same_version_while_newer_ones_come() -> None:
    """Published as fast as they can be sent, with workers that are late in turn."""
    policy = torch.nn.Linear(64, 64, bias=False)
    publisher, wire = start_publisher(policy, 3)
    delays = [[0.0, 0.01, 0.0], [0.005, 0.0, 0.0, 0.0], [0.0, 0.0, 0.004, 0.0, 0.02]]
    workers = [Worker(rank, itertools.cycle(delays[rank - 1]), wire) for rank in (1, 2, 3)]
    engine = object.__new__(VLLMEngine)  # the engine's own way to agree, without its processes
    engine._watch = SimpleNamespace(asking=nullcontext)
    engine._llm = Workers(workers)
    num_versions, pinned = 150, {0, 40, 149}

    def publish() -> None:
        for version in range(num_versions):
            with torch.no_grad():
                policy.weight.fill_(float(version))
            publisher.publish(policy, version, evaluate=version in pinned)
            time.sleep(0.01)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    version, seen = -1, []
    while version < num_versions - 1:
        wait_for = version + 3 if len(seen) % 2 == 0 else None
        version = engine._agree(wait_for, 20.0)
        assert version >= (wait_for or 0) or version in pinned
        updates = engine._llm.collective_rpc("tba_take", (version, 20.0))
        assert [update.version for update in updates] == [version] * 3
        assert [worker.loaded[-1] for worker in workers] == [float(version)] * 3
        seen.append(version)
        time.sleep(0.003)
    thread.join()
    publisher.close()
    assert seen == sorted(set(seen)) and pinned <= set(seen)
    assert len(set(seen) - pinned) > 5, "versions that newer ones may replace are taken too"
    assert engine._llm.disagreed > 5, "the workers were never apart: nothing was tried"


def test_an_agreement_that_does_not_come_ends_in_time() -> None:
    policy = torch.nn.Linear(64, 64, bias=False)
    publisher, wire = start_publisher(policy, 1)
    worker = Worker(1, itertools.repeat(0.0), wire)
    engine = object.__new__(VLLMEngine)
    engine._watch = SimpleNamespace(asking=nullcontext)
    engine._llm = Workers([worker])
    torch.nn.init.ones_(policy.weight)
    publisher.publish(policy, 0)
    assert engine._agree(0, 20.0) == 0
    worker.call("tba_take", (0, 20.0))
    with pytest.raises(RuntimeError, match="version 1 has not come within 0 s"):
        engine._agree(1, 0.1)
    publisher.close()


def test_a_receiver_that_failed_says_so() -> None:
    policy = torch.nn.Linear(64, 32, bias=False)  # not what the receiver expects
    publisher, wire = start_publisher(policy, 1)
    worker = Worker(1, itertools.repeat(0.0), wire)
    worker.receiver._thread.join(timeout=20)
    engine = object.__new__(VLLMEngine)
    engine._watch = SimpleNamespace(asking=nullcontext)
    engine._llm = Workers([worker])
    with pytest.raises(RuntimeError, match=r"receiving weights failed: 'weight' is"):
        engine._agree(None, 20.0)
    with pytest.raises(RuntimeError, match="publishing weights failed"):
        publisher.publish(policy, 0)
        publisher.close()


# --------------------------------------------------------------------------- heads


def test_heads_must_be_shared_out(tmp_path: Path) -> None:
    path = tiny.save_llama(tmp_path, heads=(4, 2))
    for tp in (1, 2, 4):
        check_heads(path, tp)
    with pytest.raises(
        ValueError,
        match=r"searcher.tp=3 does not fit the model's 4 attention heads \(2 of keys and values\): "
        "choose one of 1, 2, 4",
    ):
        check_heads(path, 3)


# --------------------------------------------------------------------------- vLLM


def make_prompts() -> list[np.ndarray]:
    return tiny.random_tokens(np.random.default_rng(0), [3, 12, 33, 17])


def gap(policy: torch.nn.Module, pairs: list[tuple[np.ndarray, Completion]], temperature: float):
    """Largest |engine - trainer| of a token's log-probs: as sampled, or old ones."""
    with torch.no_grad():
        want = response_logprobs(
            policy, [p for p, _ in pairs], [c.tokens for _, c in pairs], temperature=temperature
        )
    values = [c.logprobs if c.old_logprobs is None else c.old_logprobs for _, c in pairs]
    return float(np.abs(np.concatenate(values) - want.numpy()).max())


def sampled(engine: VLLMEngine, sampling: Sampling) -> list[tuple[np.ndarray, Completion]]:
    groups = engine.generate(make_prompts(), sampling)
    return [(p, c) for p, group in zip(make_prompts(), groups, strict=True) for c in group]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.vllm
@needs.VLLM
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_workers_are_one_engine(tmp_path: Path, tied: bool) -> None:
    """Log-probs before and after updates, one of them in the middle of a response."""
    path = tiny.save_llama(tmp_path, tied=tied, heads=(2, 2))
    policy = load_policy(path, device=CPU, dtype=torch.float32)
    available = sorted(os.sched_getaffinity(0))
    cores = [available[0], available[-1]]
    settings = options(
        path, TP, cores=cores, port=engine_port(0, str(os.getpid())), policy_temperature=0.7
    )
    engine = VLLMEngine(EngineConfig(max_num_seqs=32, kv_cache_gb=0.1), settings)
    try:
        engine.pin(cores)
        where = [os.sched_getaffinity(pid) for pid in engine._worker_pids]
        assert where == [{core} for core in cores]
        publisher, wire = start_publisher(policy, TP)
        engine.join_weights(rank=1, **wire)
        plain = Sampling(n=4, temperature=0.7, max_tokens=12)
        explored = Sampling(n=4, temperature=1.1, top_p=0.9, max_tokens=12)
        for version in range(3):
            torch.manual_seed(version)
            tiny.perturb(policy, 0.05)
            publisher.publish(policy, version)
            if version == 1:
                wait_until(engine.has_update)
            update = engine.update(wait_for=None if version == 1 else version, timeout_s=60)
            assert update is not None and update.version == version
            gaps = [gap(policy, sampled(engine, s), 0.7) for s in (plain, explored)]
            scores = engine.score_responses(
                [p[:2] for p in make_prompts()], [p[2:] for p in make_prompts()], temperature=1.3
            )
            want = [tiny.plain_logprobs(policy, p[:2], p[2:], 1.3).detach() for p in make_prompts()]
            both = zip(scores, want, strict=True)
            gaps.append(max(float((torch.tensor(s) - w).abs().max()) for s, w in both))
            print(f"version {version}: largest gaps {gaps}, loaded in {update.load_s * 1e3:.0f} ms")
            assert max(gaps) < TOLERANCE

        # in the middle of generations, and with a third version under way
        for key, prompt in enumerate(make_prompts()):
            engine.add(key, prompt, Sampling(n=2, temperature=0.7, max_tokens=30))
        old = load_policy(path, device=CPU, dtype=torch.float32)
        old.load_state_dict(policy.state_dict())
        groups: dict[int, list[Completion]] = dict(engine.step())
        tiny.perturb(policy, 0.05)
        publisher.publish(policy, 3)
        while engine._under_way:
            if (update := engine.update()) is not None:
                assert update.version == 3 and update.stall_s >= update.load_s
            groups.update(engine.step())
        groups.update(engine.step())
        both = 0
        for key, group in groups.items():
            for completion in group:
                want = [
                    tiny.plain_logprobs(m, make_prompts()[key], completion.tokens, 0.7).detach()
                    for m in (old, policy)
                ]
                bounds = [*[start for _, start in completion.versions], len(completion.tokens)]
                for (version, start), end in zip(completion.versions, bounds[1:], strict=True):
                    apart = np.abs(completion.logprobs - want[version - 2].numpy())[start:end]
                    assert apart.max() < TOLERANCE
                both += len(completion.versions) == 2
        assert both > 0
        publisher.close()
        engine.leave_weights()
        pids = list(engine._pids)
        engine.close()
    finally:
        engine.kill()
    wait_until(lambda: not any(process_is_alive(pid) for pid in pids))
