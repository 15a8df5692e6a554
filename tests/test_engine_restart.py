"""Engines that die or hang: their searcher starts another, and no prompt is lost or doubled."""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from test_end_to_end import Job, endless, random_model, summary_of  # noqa: F401 (a fixture)
from test_searcher import RecordingEngine, make_parts, reports, shipped

from comm import Kind
from engine import Completion, EngineDied, Sampling
from offline import read_trajectories
from searcher import SearcherConfig, SearcherParts, search
from weights import WeightUpdate

# --------------------------------------------------------------------------- the searcher's loop


@dataclass
class Trainer:
    """What publishes: a new version after every so many steps, the newest again to a new engine."""

    last: int
    steps_per_version: int
    evaluated: frozenset[int] = frozenset()
    version: int = 0
    steps: int = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps % self.steps_per_version == 0:
            self.version = min(self.version + 1, self.last)


@dataclass
class MortalEngine(RecordingEngine):
    """Dies at the `dies_at`-th call; whatever is asked of it then raises."""

    trainer: Trainer = field(default_factory=lambda: Trainer(last=0, steps_per_version=1))
    dies_at: int = 0
    lockstep: bool = False
    count: int = 0
    generated: list[int] = field(default_factory=list)  # versions under which it evaluated

    def asked(self) -> None:
        self.count += 1
        if self.count >= self.dies_at:
            raise EngineDied("killed")

    def add(
        self, key: int, prompt: np.ndarray, sampling: Sampling, *, seed: int | None = None
    ) -> None:
        self.asked()
        assert self.version >= 0, "prompts before weights"
        super().add(key, prompt, sampling)

    def step(self) -> list[tuple[int, list[Completion]]]:
        self.asked()
        if not self.lockstep:
            self.trainer.step()
        return super().step()

    def drop(self) -> None:
        self.asked()
        super().drop()

    def has_update(self) -> bool:
        self.asked()
        return self.trainer.version > self.version

    def update(self, *, wait_for: int | None, timeout_s: float) -> WeightUpdate | None:
        self.asked()
        if self.lockstep and wait_for is not None:
            # the trainer publishes the next version when it has the round; the last one again
            self.trainer.version = max(self.trainer.version, wait_for)
        version = self.trainer.version
        if version == self.version:
            return None
        if self.lockstep and self.version < 0 and version - 1 in self.trainer.evaluated:
            version -= 1  # pinned: it comes first, again
        self.version = version
        return WeightUpdate(
            version=version,
            evaluate=version in self.trainer.evaluated,
            final=version == self.trainer.last,
            meta={},
            load_s=0.0,
        )

    def generate(self, prompts: Any, sampling: Sampling, seeds: Any = None) -> list:
        self.asked()
        self.generated.append(self.version)
        return [self.evaluated(sampling) for _ in prompts]

    def evaluated(self, sampling: Sampling) -> list[Completion]:
        return [
            Completion(
                tokens=np.array([3], dtype=np.int32),
                logprobs=np.zeros(1, np.float32),
                truncated=True,
            )
        ] * sampling.n


def mortal_run(path: str, dies_at: int, *, lockstep: bool, between: bool) -> SearcherParts:
    """A searcher whose first engine dies at its `dies_at`-th call, whatever that is."""
    trainer = Trainer(last=4, steps_per_version=3, evaluated=frozenset({0, 2, 4}))

    def engine(dies_at: int) -> MortalEngine:
        return MortalEngine(
            trainer=trainer, dies_at=dies_at, lockstep=lockstep, steps_of=lambda key: 1 + key % 3
        )

    parts = make_parts(
        path,
        engine(dies_at),
        reference=None,
        restart_engine=lambda restarts: engine(1 << 30),
        max_engine_restarts=1,
    )
    parts.held_out = parts.problems[:2]
    parts.held_out_tokens = parts.prompt_tokens[:2]
    cfg = SearcherConfig(responses_per_prompt=2, score_every_s=0.0)
    search(cfg, parts, prompts_in_flight=4, lockstep=lockstep, between=between)
    return parts


def whole_groups(parts: SearcherParts) -> Counter[int]:
    """Prompt -> groups shipped; every group came with all its responses."""
    responses = Counter(t.prompt_id for t in shipped(parts))
    assert all(count % 2 == 0 for count in responses.values())
    return Counter({prompt: count // 2 for prompt, count in responses.items()})


MODES = [
    pytest.param({"lockstep": False, "between": False}, id="inflight"),
    pytest.param({"lockstep": False, "between": True}, id="between"),
    pytest.param({"lockstep": True, "between": False}, id="lockstep"),
]


@pytest.mark.parametrize("mode", MODES)
def test_whenever_an_engine_dies_nothing_is_lost_or_doubled(tiny_llama: str, mode: dict) -> None:
    immortal = mortal_run(tiny_llama, 1 << 30, **mode)
    calls = immortal.engine.count
    assert immortal.engine_restarts == 0 and calls > 20
    for dies_at in range(1, calls + 1):
        parts = mortal_run(tiny_llama, dies_at, **mode)
        assert parts.engine_restarts == 1 and not parts.engine.left  # nothing begun in vain
        groups = whole_groups(parts)
        if mode["lockstep"]:  # the same rounds, each once
            assert groups == whole_groups(immortal)
            assert len(set(t.version_start for t in shipped(parts))) == 4
            assert all(t.version_start == t.version_end for t in shipped(parts))
        else:
            # started in the order of the epochs, of which at most 4 are under way at the end
            number = groups.total()
            assert number >= 4 and max(groups.values()) <= -(-(number + 4) // 12)
        evaluated = [m["version"] for _, kind, m in parts.channel.sent if kind is Kind.EVALUATION]
        assert evaluated[-1] == 4 and evaluated == sorted(evaluated)
        last = {name: reports(parts, name)[-1] for name in ("engine_restarts", "requeued_prompts")}
        assert last["engine_restarts"] == 1 and last["requeued_prompts"] <= 4


def test_one_death_too_many_ends_the_searcher_with_the_reason(tiny_llama: str) -> None:
    parts = make_parts(tiny_llama, MortalEngine(dies_at=1), reference=None)
    with pytest.raises(RuntimeError, match=r"killed; .* 0 times \(engine.max_restarts\)"):
        search(SearcherConfig(), parts, prompts_in_flight=4)


# --------------------------------------------------------------------------- real engines


SMALL = ["engine.kv_cache_gb=0.1", "engine=vllm", "weights.probe_every=2", "eval.every=0"]
# so that the trainer can't go to the end on what it has
HUNGRY = ["buffer.capacity_per_prompt=8", "trainer.max_reuse=2"]


def start(tmp_path: Path, model: str, num_ranks: int, *overrides: str) -> Job:
    pytest.importorskip("vllm")
    return Job(
        tmp_path,
        num_ranks,
        *SMALL,
        f"model.path={model}",
        f"run.root={tmp_path}",
        "run.name=run",
        "run.save_trajectories=true",
        *overrides,
    )


def engine_processes(job: Job, name: str = "EngineCore") -> list[psutil.Process]:
    """In the order of the searchers that started them."""
    found = []
    for process in job.processes():
        try:
            if name in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda process: process.ppid())


def steps_done(job: Job, count: int) -> Callable[[], bool]:
    path = job.log.parent / "run" / "metrics.jsonl"
    return lambda: path.exists() and path.read_text().count("loss/total") >= count


def wait(job: Job, condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert job.process.poll() is None, job.log.read_text()
        assert time.monotonic() < deadline, job.log.read_text()
        time.sleep(0.05)


def ends_well(job: Job, tmp_path: Path, *, restarts: int = 1, timeout_s: float = 180.0) -> dict:
    """Code 0, restarts counted, the engine right afterwards, every group once; the summary."""
    code = job.end(timeout_s)
    text = job.log.read_text()
    assert code == 0, text
    assert text.count("restarting it") == restarts
    summary = summary_of(tmp_path / "run")
    assert summary["engine_restarts"] == restarts
    assert 0 <= summary["engine_logprob_gap"] < 1e-3
    return summary


def records(tmp_path: Path) -> list[dict]:
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss/total" in record]


def every_group_once(tmp_path: Path, num_searchers: int, in_flight: int = 16) -> None:
    """Shipped is the beginning of each searcher's stream of prompts, but what was under way."""
    trajectories = [
        t for path in (tmp_path / "run" / "trajectories").iterdir() for t in read_trajectories(path)
    ]
    responses = Counter(t.prompt_id for t in trajectories)
    assert all(count % 8 == 0 for count in responses.values())
    for searcher in range(num_searchers):
        groups = {p: n // 8 for p, n in responses.items() if p % num_searchers == searcher}
        prompts = np.arange(searcher, 64, num_searchers)
        epochs = itertools.count()
        stream: list[int] = []
        while len(stream) < sum(groups.values()) + in_flight:
            rng = np.random.default_rng([0, 1, searcher, next(epochs)])
            stream += rng.permutation(prompts).tolist()
        started = Counter(stream[: sum(groups.values()) + in_flight])
        assert all(number <= started[prompt] for prompt, number in groups.items())


@pytest.mark.vllm
def test_a_killed_engine_is_restarted(tmp_path, random_model):  # noqa: F811
    # some prompts always wait for the first to end: there is no moment with none under way
    queued = ["searcher.prompts_in_flight=16", "engine.max_num_seqs=40"]
    job = start(tmp_path, random_model, 2, *HUNGRY, *queued, "trainer.steps=60")
    wait(job, steps_done(job, 3))
    engine_processes(job)[0].kill()
    summary = ends_well(job, tmp_path)
    assert 0 < summary["requeued_prompts"] <= 16
    every_group_once(tmp_path, 1)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_other_searcher_and_the_trainer_go_on(tmp_path, random_model):  # noqa: F811
    job = start(tmp_path, random_model, 3, "trainer.steps=600")
    wait(job, steps_done(job, 5))
    before = len(records(tmp_path))
    engine_processes(job)[1].kill()
    ends_well(job, tmp_path)
    every_group_once(tmp_path, 2)
    meanwhile = [r for r in records(tmp_path)[before:] if r["faults/engine_restarts"] == 0]
    received = [r["buffer/received"] for r in meanwhile]
    assert len(meanwhile) > 5 and received[-1] - received[0] > 2 * 16 * 8


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_and_restarted(tmp_path, random_model):  # noqa: F811
    job = start(tmp_path, random_model, 2, *HUNGRY, "trainer.steps=60", "engine.hang_timeout_s=8")
    wait(job, steps_done(job, 3))
    engine_processes(job)[0].send_signal(signal.SIGSTOP)
    ends_well(job, tmp_path)
    assert "has not answered for 8 s (engine.hang_timeout_s)" in job.log.read_text()
    every_group_once(tmp_path, 1)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_of_two_dies(tmp_path, random_model, sent):  # noqa: F811
    options = ["searcher.tp=2", *HUNGRY, "trainer.steps=60", "cluster.timeout_s=200"]
    job = start(tmp_path, random_model, 3, *options, "engine.hang_timeout_s=15")
    wait(job, steps_done(job, 3), timeout_s=200)
    workers = engine_processes(job, "VLLM::Worker")
    assert len(workers) == 2
    workers[1].send_signal(sent)
    ends_well(job, tmp_path, timeout_s=300)
    every_group_once(tmp_path, 1)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [0, 3])
def test_lockstep_keeps_every_round(tmp_path, random_model, num_ranks):  # noqa: F811
    job = start(tmp_path, random_model, num_ranks, "mode=sync", "trainer.steps=60")
    wait(job, steps_done(job, 3))
    engine_processes(job)[0].kill()
    summary = ends_well(job, tmp_path)
    assert summary["staleness_max"] == 0
    assert summary["trajectories"] == summary["trained_trajectories"] == 60 * 64


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_dies_in_the_last_evaluation(tmp_path, random_model):  # noqa: F811
    """The other searcher, which is done, stays until this one has evaluated again."""
    slow = ["engine.max_num_seqs=1", "task.max_response_tokens=100", "searcher.update=between"]
    job = start(tmp_path, random_model, 3, *slow, "trainer.steps=10", "eval.before=false")
    job.wait_for(r"step 10/10")
    time.sleep(1.0)
    assert "held-out" not in job.log.read_text()
    engine_processes(job)[1].kill()
    summary = ends_well(job, tmp_path)
    assert list(summary["held_out_by_step"]) == ["10"]
    assert job.log.read_text().count("held-out at step 10") == 1


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_engine_ends_the_job_where_none_is_restarted(tmp_path, random_model):  # noqa: F811
    options = endless(tmp_path, random_model, "vllm")
    job = Job(tmp_path, 2, *options, "engine.max_restarts=0")
    job.wait_for(r"step \d+/100000", timeout_s=180)
    everyone = [psutil.Process(job.process.pid), *job.processes()]
    engine_processes(job)[0].kill()
    assert job.all_gone(everyone, timeout_s=90) != 0
    text = job.log.read_text()
    assert text.count("the job ends:") == 1 and "core (process" in text
