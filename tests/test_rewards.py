"""Reward workers are real processes here, and their tasks do their worst (`reward_tasks`)."""

from __future__ import annotations

import doctest
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from reward_tasks import Facts, Told

import rewards
from rewards import (
    FAILURES,
    LocalScorer,
    RewardConfig,
    RewardWorkers,
    Scored,
    build_task,
    facts_taken,
    make_scorer,
)
from tasks.task import Problem

LIMIT_S = 2.5  # far more than a response takes here, whatever else the machine does
NODE = {"_target_": "reward_tasks.Told"}
CFG = RewardConfig(num_workers=2, time_limit_s=LIMIT_S, memory_limit_gb=0.5, penalty=-1.5)

Outcome = tuple[dict[str, float], str, str]  # parts, status, part of the reason
FAILED = {"penalty": -1.5}
WORST: dict[str, Outcome] = {
    "nan": (FAILED, "nan", "part 'value' is nan"),
    "infinite": (FAILED, "nan", "part 'other' is -inf"),
    "huge_sum": (FAILED, "nan", "sum of the parts"),
    "huge_int": (FAILED, "nan", "part 'value' is inf"),
    "beyond": (FAILED, "range", "reward 2e+09 is outside of the declared range -1e+09 to 1e+09"),
    "nothing": (FAILED, "error", "NoneType for a response, not a dict"),
    "number": (FAILED, "error", "float for a response, not a dict"),
    "text_part": (FAILED, "error", "part 'value' is a str"),
    "none_part": (FAILED, "error", "part 'value' is a NoneType"),
    "no_parts": (FAILED, "error", "0 parts"),
    "bad_name": (FAILED, "error", "part 'Total Reward': write names with"),
    "number_name": (FAILED, "error", "part 1: write names with"),
    "many_parts": (FAILED, "error", "100000 parts"),
    "long_name": (FAILED, "error", "xxx"),
    "true": ({"value": 1.0}, "ok", ""),
    "unparsed": ({"value": -0.5}, "unparsed", ""),
    "unparsed_nan": (FAILED, "nan", "part 'value' is nan"),
    "raises": (FAILED, "error", r"KeyError (reward_tasks.py, line "),
    "raises_much": (FAILED, "error", "xxx..."),
    "raises_unprintable": (FAILED, "error", "Silent"),
    "recurses": (FAILED, "error", "RecursionError"),
    "exits": (FAILED, "error", "SystemExit"),
    "interrupts": (FAILED, "error", "KeyboardInterrupt"),
    "asks": (FAILED, "error", "EOFError"),
    "fills_memory": (FAILED, "error", "MemoryError"),
    "leaves": (FAILED, "crash", "exit code 7"),
    "kills_itself": (FAILED, "crash", "killed by SIGKILL"),
    "reads_null": (FAILED, "crash", "killed by SIG"),
    "closes_files": (FAILED, "crash", "ended with exit code"),
    "loops": (FAILED, "timeout", "no result within 2.5 s"),
    "holds_the_lock": (FAILED, "timeout", "no result within 2.5 s"),
    "ignores_signals": (FAILED, "timeout", "no result within 2.5 s"),
    "starts_another": (FAILED, "timeout", "no result within 2.5 s"),
    "prints": ({"value": 3.0}, "ok", ""),
    "forks": ({"value": 0.0}, "ok", ""),
    "changes_folder": ({"value": 4.0}, "ok", ""),
}


def problem(answer: int = 0) -> Problem:
    return Problem(prompt_id=answer, prompt="?", answer=str(answer))


def value(number: float, answer: int = 0) -> Scored:
    return Scored(parts={"value": float(number), "of": float(answer)})


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Any, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def workers() -> Iterator[RewardWorkers]:
    made = RewardWorkers(NODE, CFG)
    yield made
    made.close()


def test_examples() -> None:
    results = doctest.testmod(rewards)
    assert results.attempted > 0 and results.failed == 0


# --------------------------------------------------------------------------- the worst


@pytest.fixture(scope="module")
def worst(tmp_path_factory) -> tuple[dict[str, Scored], list[Scored], list[Any], Path]:
    """Results of every command, of the numbers between them, log records, and a folder."""
    folder = tmp_path_factory.mktemp("rewards")
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    rewards.logger.addHandler(handler)
    made = RewardWorkers({**NODE, "folder": str(folder)}, CFG)
    responses = [text for i, command in enumerate(WORST) for text in (command, str(i))]
    try:
        scored = made.score([problem(i // 2) for i in range(len(responses))], responses)
    finally:
        made.close()
        rewards.logger.removeHandler(handler)
    return dict(zip(WORST, scored[::2], strict=True)), scored[1::2], records, folder


@pytest.mark.parametrize("command", WORST)
def test_a_response_gets_what_it_deserves(worst, command) -> None:
    parts, status, reason = WORST[command]
    scored = worst[0][command]
    assert (scored.parts, scored.status) == (parts, status), scored
    assert reason in scored.reason and bool(scored.reason) == (status not in ("ok", "unparsed"))
    assert len(scored.reason) <= 300 and scored.reason.isprintable()
    assert scored.reward == sum(parts.values())


def test_its_neighbours_are_scored_in_order_as_if_nothing_had_happened(worst) -> None:
    assert worst[1] == [value(i, i) for i in range(len(WORST))]


def test_what_a_reward_has_started_ends_with_it(worst) -> None:
    pid = int((worst[3] / "sleep.pid").read_text())
    assert until(lambda: not alive(pid))


def test_the_first_failures_of_every_kind_are_logged(worst) -> None:
    messages = [record.getMessage() for record in worst[2]]
    statuses = [status for _, status, _ in WORST.values()]
    for status in ("timeout", "error", "nan", "crash"):
        lines = [m for m in messages if f"({status}, no. " in m]
        assert len(lines) == 3 + (statuses.count(status) >= 10)
    (line,) = [m for m in messages if "exit code 7" in m]
    number = list(WORST).index("leaves")
    assert f"prompt {number}, response 'leaves'" in line and "penalty -1.5" in line


def test_what_a_reward_prints_does_not_steer_the_terminal(capfd) -> None:
    made = RewardWorkers(NODE, CFG)
    assert made.score([problem()], ["prints"])[0].status == "ok"
    made.close()
    printed = capfd.readouterr().err
    assert "\\x1b]0;title\\x07 tab\there\n" in printed and "\x1b" not in printed
    assert printed.count('{"failed": ""}\n') == 10


# --------------------------------------------------------------------------- order and sharing


def test_many_responses_keep_their_order(workers) -> None:
    problems = [problem(i % 7) for i in range(5000)]
    scored = workers.score(problems, [str(i) for i in range(5000)])
    assert scored == [value(i, i % 7) for i in range(5000)]


def test_all_workers_share_a_job_of_slow_responses() -> None:
    made = RewardWorkers({"_target_": "reward_tasks.Slow"}, replace(CFG, num_workers=4))
    pids = {scored.parts["pid"] for scored in made.score([problem()] * 8, ["0.4"] * 8)}
    assert len(pids) == 4  # 2 each: nobody took more than a share
    made.close()


def test_the_limit_is_of_each_response_not_of_a_job() -> None:
    made = RewardWorkers({"_target_": "reward_tasks.Slow"}, replace(CFG, num_workers=1))
    started = time.monotonic()
    scored = made.score([problem()] * 12, ["0.3"] * 12)
    assert time.monotonic() - started > LIMIT_S
    assert {s.status for s in scored} == {"ok"}
    made.close()


def test_jobs_are_collected_in_any_order_and_scored_meanwhile(workers) -> None:
    first = workers.submit([problem()] * 200, ["1"] * 200)
    second = workers.submit([problem()] * 3, ["2", "leaves", "3"])
    assert [s.status for s in workers.collect(second)] == ["ok", "crash", "ok"]
    third = workers.submit([problem()], ["4"])
    assert until(third.done)  # nobody collects it
    assert workers.collect(first) == [value(1)] * 200
    assert workers.collect(third) == [value(4)]
    assert workers.score([], []) == []


def test_progress_is_reported_while_responses_get_scored() -> None:
    made = RewardWorkers({"_target_": "reward_tasks.Slow"}, replace(CFG, num_workers=1))
    calls: list[float] = []
    scores = made.submit([problem()] * 8, ["0.3"] * 8)
    made.collect(scores, on_progress=lambda: calls.append(time.monotonic()))
    assert 2 <= len(calls) <= 9  # not while nothing is done
    made.close()


def test_any_text_comes_through() -> None:
    texts = ["", "\n", "\0", '"', "\\", "é", "𝄞", "\ud800", "x" * 1_000_000]
    made = RewardWorkers({"_target_": "reward_tasks.Echo"}, CFG)
    scored = made.score([problem()] * len(texts), texts)
    assert [s.parts for s in scored] == [
        {"length": len(text), "sum": float(sum(map(ord, text)))} for text in texts
    ]
    made.close()


def test_facts_come_through_and_only_those_that_the_task_takes() -> None:
    facts = {
        "truncated": [True, False],
        "num_tokens": [3, 4],
        "reference_logprob": [-0.5, math.nan],
    }
    want = [
        {"num_tokens": 3.0, "unknown": 0.0, "logprob": -0.5},
        {"num_tokens": 4.0, "unknown": 1.0, "logprob": 0.0},
    ]
    node = {"_target_": "reward_tasks.Facts"}
    for cfg in (CFG, replace(CFG, num_workers=0)):
        scorer = make_scorer(Facts(), node, cfg)
        assert scorer.facts == facts_taken(Facts()) == ("num_tokens", "reference_logprob")
        assert [s.parts for s in scorer.score([problem()] * 2, ["a", "b"], **facts)] == want
        assert scorer.score([problem()], ["a"])[0].parts["num_tokens"] == -1.0
        with pytest.raises(AssertionError, match="truncate"):
            scorer.score([problem()], ["a"], truncate=[True])
        scorer.close()


def test_a_config_is_built_as_hydra_would() -> None:
    from hydra.utils import instantiate

    node = {
        "_target_": "reward_tasks.Wrapper",
        "inner": {"_target_": "reward_tasks.Told", "scale": 3.0},
        "settings": {"factors": [1, 2]},
    }
    assert build_task(node).scale == instantiate(node).scale == 6.0
    made = RewardWorkers(node, CFG)
    assert made.score([problem()], ["2"]) == [value(12.0)]
    made.close()
    partial = {"_target_": "reward_tasks.Told", "_partial_": True, "scale": 2.0}
    assert build_task(partial)().scale == 2.0


def test_a_process_whose_memory_is_full_is_replaced() -> None:
    made = RewardWorkers(NODE, replace(CFG, num_workers=1))
    assert made.score([problem()], ["raises"])[0].status == "error"
    before = made.pids()
    made.score([problem()], ["raises"])
    assert made.pids() == before  # an ordinary exception does no harm
    assert "MemoryError" in made.score([problem()], ["fills_memory"])[0].reason
    assert made.score([problem()], ["1"]) == [value(1)]
    assert made.pids() != before
    made.close()


# --------------------------------------------------------------------------- what cannot start


@pytest.mark.parametrize(
    ("node", "fragments"),
    [
        ({**NODE, "refuse": "task.refuse: no"}, ["ValueError", "task.refuse: no"]),
        ({"_target_": "reward_tasks.Nobody"}, ["AttributeError", "Nobody"]),
        ({"_target_": "nowhere.Told"}, ["ModuleNotFoundError", "nowhere"]),
    ],
)
def test_a_task_that_cannot_be_built_is_an_error_not_a_penalty(node, fragments) -> None:
    made = RewardWorkers(node, replace(CFG, num_workers=1))
    with pytest.raises(RuntimeError) as caught:
        made.score([problem()], ["1"])
    for fragment in ("a reward worker can't start", *fragments):
        assert fragment in str(caught.value)
    with pytest.raises(RuntimeError, match="can't start"):  # no later one waits for ever
        made.score([problem()], ["1"])
    made.close()
    assert made.pids() == []


def test_a_config_that_is_no_plain_values_is_refused() -> None:
    with pytest.raises(ValueError, match="task: .*plain values.*object"):
        RewardWorkers({**NODE, "scale": object()}, CFG)


# --------------------------------------------------------------------------- what is left behind


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_fifty_crashes_leave_nothing_behind(workers) -> None:
    workers.score([problem()], ["1"])
    before = num_files(), threading.active_count(), len(psutil.Process().children(recursive=True))
    scored = workers.score([problem()] * 60, (["leaves"] * 5 + ["1"]) * 10)
    assert [s.status for s in scored] == (["crash"] * 5 + ["ok"]) * 10
    workers.score([problem()], ["1"])
    after = num_files(), threading.active_count(), len(psutil.Process().children(recursive=True))
    # A process that has just been lost is replaced at once: there is one more, or one less.
    assert abs(after[0] - before[0]) <= 4 and after[1] == before[1]
    assert abs(after[2] - before[2]) <= 2 and len(workers.pids()) <= 2


def test_close_ends_all_and_later_jobs_fail() -> None:
    files, threads = num_files(), threading.active_count()
    made = RewardWorkers(NODE, CFG)
    made.score([problem()], ["1"])
    assert until(lambda: len(made.pids()) == 2)
    pids = made.pids()
    hanging = made.submit([problem()] * 2, ["loops", "1"])
    started = time.monotonic()
    made.close()
    assert time.monotonic() - started < LIMIT_S
    assert not any(alive(pid) for pid in pids) and made.pids() == []
    assert threading.active_count() == threads and num_files() == files
    for job in (hanging, made.submit([problem()], ["1"])):
        with pytest.raises(RuntimeError, match="closed"):
            made.collect(job)
    made.close()


PARENT = """
import sys
from rewards import RewardConfig, RewardWorkers
from tasks.task import Problem

workers = RewardWorkers({"_target_": "reward_tasks.Told"}, RewardConfig(num_workers=3))
p = Problem(prompt_id=0, prompt="", answer="0")
workers.score([p] * 64, ["1"] * 64)
workers.submit([p, p], ["holds_the_lock", "ignores_signals"])  # the third waits for work
print(*workers.pids(), flush=True)
input()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit"])
def test_no_worker_outlives_its_parent(end) -> None:
    paths = os.pathsep.join(p for p in sys.path if p)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
        cwd=Path(rewards.__file__).parent,
    )
    assert parent.stdout is not None and parent.stdin is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    try:
        assert len(pids) == 3 and all(map(alive, pids))
        time.sleep(0.3)  # two are at their responses
        if end == "exit":
            parent.stdin.close()
        else:
            os.kill(parent.pid, signal.Signals[end])
        parent.wait(timeout=20)
        assert until(lambda: not any(map(alive, pids)))
    finally:
        parent.kill()
        parent.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


# --------------------------------------------------------------------------- a run


def test_a_run_survives_and_counts_them_all(tmp_path) -> None:
    """Two passes over eight problems, of which six have rewards that fail."""
    from sft import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed=0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    settings = {
        "model.path": tmp_path / "model",
        "trainer.steps": 4,
        "trainer.batch_size": 8,
        "trainer.responses_per_prompt": 2,
        "searcher.responses_per_prompt": 2,
        "rewards.time_limit_s": 1.5,
        "rewards.penalty": -1,
        "run.root": tmp_path,
        "run.name": "run",
    }
    root = Path(rewards.__file__).parent
    done = subprocess.run(
        [
            *(sys.executable, "train.py", "--config-dir", "tests/conf", "task=unruly"),
            *("model=custom", "engine=hf"),
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "tests"), str(root)])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "loss/total" in line]
    for status in FAILURES:
        shares = [line[f"reward/{status}_fraction"] for line in steps]
        assert len(shares) == 4 and sum(shares) / 4 == 1 / 8, (status, shares)
    assert {line["reward/penalty"] for line in steps if "reward/penalty" in line} == {-1.0}
    assert "reward failed (timeout, no. 1): no result within 1.5 s" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    # Evaluation goes on as well: five penalties, a reward of -0.5 and two of 1.
    assert summary["held_out_by_step"]["0"]["reward"] == (-5 - 0.5 + 2) / 8
    assert summary["accuracy_before"] == 2 / 8


# --------------------------------------------------------------------------- in this process


class Model(Told):
    """A task that wants to score in batches, on a device."""

    in_workers = False

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.device = ""

    def place(self, device: str) -> None:
        self.device = device

    def score(self, problems: list[Problem], responses: list[str]) -> list[Any]:
        self.sizes.append(len(responses))
        if "short" in responses:
            return [{"value": 1.0}]
        return super().score(problems, responses)


def test_a_model_is_asked_for_whole_batches_on_its_device() -> None:
    task = Model()
    scorer = make_scorer(task, NODE, CFG, device="cuda:3")
    assert isinstance(scorer, LocalScorer) and task.device == "cuda:3"
    assert scorer.score([problem()] * 3, ["1", "nan", "unparsed"]) == [
        value(1),
        Scored(parts=FAILED, status="nan", reason="part 'value' is nan"),
        Scored(parts={"value": -0.5}, status="unparsed"),
    ]
    assert scorer.score([], []) == [] and task.sizes == [3]


@pytest.mark.parametrize(("culprit", "status"), [("raises", "error"), ("short", "ok")])
def test_a_batch_that_fails_is_taken_apart(culprit, status) -> None:
    task = Model()
    scored = LocalScorer(task, penalty=-1.5).score([problem()] * 3, ["1", culprit, "2"])
    assert [s.status for s in scored] == ["ok", status, "ok"] and task.sizes == [3, 1, 1, 1]
    assert scored[0] == value(1) and scored[2] == value(2)


def test_a_model_that_never_works_ends_the_run_and_ctrl_c_is_not_swallowed() -> None:
    scorer = LocalScorer(Model(), penalty=0.0)
    with pytest.raises(KeyError):
        scorer.score([problem()] * 2, ["raises", "raises"])
    with pytest.raises(KeyboardInterrupt):
        scorer.score([problem()] * 2, ["1", "interrupts"])


def test_other_tasks_get_workers_unless_there_shall_be_none() -> None:
    assert isinstance(make_scorer(Told(), NODE, replace(CFG, num_workers=0)), LocalScorer)
    scorer = make_scorer(Told(), NODE, CFG)
    assert isinstance(scorer, RewardWorkers)
    scorer.close()


def test_failures_are_named_like_their_metrics() -> None:
    from metrics import METRICS

    for status in FAILURES:
        assert f"reward/{status}_fraction" in METRICS
    assert {status for _, status, _ in WORST.values()} == {"ok", *FAILURES}
