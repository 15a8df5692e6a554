"""Scoring in processes of their own: a reward that fails costs its response, never the run.

    RewardWorkers   processes that hold the task and score responses one by one, under a time limit
    LocalScorer     the task in this process, in batches: for rewards that are models on its device
    make_scorer     the one of the two that a task needs

Concurrency: one thread a worker. Consumes: responses, from the queue that `submit` fills. Produces:
what `collect` returns. Waits for: the queue, and its process up to the limit. A process that is
late, ends or can't be understood is killed with all it has started; the response it was at is
blamed, another process goes on with the rest. Ends: `close()`, and the processes with this one,
whatever way it ends. An error here (no worker starts) is raised by `collect`.

Messages are lines of JSON over pipes, never pickle. Run as a program, this file is a worker.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import io
import json
import logging
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, fields
from types import TracebackType
from typing import IO, Any, Protocol, TextIO

from metrics import escape_control
from tasks.task import Problem, Task, Unparsed, reward_range

logger = logging.getLogger("tba")

# What a task's `score` may take, by keyword, beside problems and responses.
FACTS = ("truncated", "num_tokens", "reference_logprob")

# What can go wrong with the scoring of a response; all but the first cost the penalty.
FAILURES = ("unparsed", "timeout", "error", "nan", "range", "crash")

_MAX_CHUNK = 64  # responses in one message to a worker
_START_LIMIT_S = 120.0  # for a worker to import and build its task
_START_TRIES = 3
_GLANCE_S = 0.2  # between two looks at whether a silent process still is
_MAX_PARTS = 32
_ROUNDING = 1e-6  # by which a sum of parts may miss the declared range
_MAX_REPLY_BYTES = 1 << 20
_PART_NAME = re.compile(r"[a-z0-9_]{1,64}")  # as in the metric reward/<part>
_PROBLEM_FIELDS = [f.name for f in fields(Problem)]


@dataclass
class RewardConfig:
    """How each searcher scores its responses."""

    # Processes of each searcher; 0: in the searcher itself, without a limit (for a debugger). A
    # task whose reward is a model (`in_workers = False`) has none either.
    num_workers: int = 2
    time_limit_s: float = 10.0  # per response
    memory_limit_gb: float = 4.0  # of a worker's own data
    penalty: float = 0.0  # reward of a response whose scoring failed


@dataclass(slots=True, frozen=True, kw_only=True)
class Scored:
    """How the scoring of one response went.

    Attributes:
        parts: named parts of the reward, finite; {"penalty": ...} alone where scoring failed.
        status: 'ok', or one of FAILURES: 'unparsed' (the task found nothing to grade; its parts
            stand), 'timeout', 'error' (an exception, or a result of the wrong form), 'nan' (a part
            or the sum is not finite), 'range' (the sum is outside of the range that the task has
            declared), 'crash' (the process ended).
        reason: one line about a failure, else empty.
    """

    parts: dict[str, float]
    status: str = "ok"
    reason: str = ""

    @property
    def reward(self) -> float:
        """The sum of the parts."""
        return float(sum(self.parts.values()))

    @property
    def graded(self) -> bool:
        """Whether the parts are the task's, not the penalty for scoring that failed."""
        return self.status in ("ok", "unparsed")


class Scorer(Protocol):
    """What searchers and evaluation use; `submit` may return before anything is scored.

    Attributes:
        facts: those of FACTS that the task takes; others that are given are left out.
    """

    facts: tuple[str, ...]

    def submit(
        self, problems: Sequence[Problem], responses: Sequence[str], **facts: Sequence[Any]
    ) -> Future[list[Scored]]: ...

    def collect(
        self, scores: Future[list[Scored]], *, on_progress: Callable[[], None] = lambda: None
    ) -> list[Scored]: ...

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str], **facts: Sequence[Any]
    ) -> list[Scored]: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


def make_scorer(
    task: Task, node: Mapping[str, Any], cfg: RewardConfig, *, device: Any = None
) -> Scorer:
    """Workers, or for a task that says `in_workers = False` the task itself.

    Args:
        node: what `task` was built from (see `build_task`).
        device: where a reward that is a model shall run; None: where it is.

    Raises:
        ValueError: the task declares a range that is none.
    """
    reward_range(task)
    if cfg.num_workers == 0 or not getattr(task, "in_workers", True):
        if device is not None and hasattr(task, "place"):
            task.place(device)
        return LocalScorer(task, penalty=cfg.penalty)
    return RewardWorkers(node, cfg, facts=facts_taken(task))


def facts_taken(task: Task) -> tuple[str, ...]:
    """Those of FACTS that the task's `score` takes."""
    parameters = inspect.signature(task.score).parameters
    return tuple(name for name in FACTS if name in parameters)


def build_task(node: Any) -> Any:
    """What a config node stands for: `_target_` called with the other keys, inner nodes first.

    As Hydra's `instantiate` does, whose import takes longer than starting a worker.

    >>> build_task({"_target_": "fractions.Fraction", "numerator": 1, "denominator": 2})
    Fraction(1, 2)
    """
    if isinstance(node, Mapping):
        values = {
            key: build_task(value)
            for key, value in node.items()
            if key not in ("_target_", "_partial_", "_convert_", "_recursive_")
        }
        if "_target_" not in node:
            return values
        module, _, name = node["_target_"].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        return (
            functools.partial(function, **values) if node.get("_partial_") else function(**values)
        )
    if isinstance(node, list):
        return [build_task(item) for item in node]
    return node


# --------------------------------------------------------------------------- one response


def score_one(
    task: Task,
    problem: Problem,
    response: str,
    facts: Mapping[str, Any],
    *,
    catch: type[BaseException] = Exception,
) -> Scored:
    """Scores one response, whatever the task does short of ending or stopping the process.

    `parts` is empty where it failed: the penalty is the caller's.
    """
    try:
        lists = {name: [value] for name, value in facts.items()}
        return judge(task.score([problem], [response], **lists), reward_range(task))
    except catch as error:
        return Scored(parts={}, status="error", reason=describe(error))


def judge(scores: Any, limits: tuple[float, float] = (-math.inf, math.inf)) -> Scored:
    """What `task.score` returned for one response, checked.

    Args:
        limits: between which the reward lies (`reward_range`).

    >>> judge([{"correct": True}])
    Scored(parts={'correct': 1.0}, status='ok', reason='')
    >>> judge([{"correct": float("nan")}])
    Scored(parts={}, status='nan', reason="part 'correct' is nan")
    >>> judge([1.0]).reason
    'score returned float for a response, not a dict of named parts'
    >>> judge([{"correct": 1.0, "bonus": 0.5}], limits=(0.0, 1.0)).reason
    'the reward 1.5 is outside of the declared range 0 to 1'
    """

    def failed(status: str, reason: str) -> Scored:
        return Scored(parts={}, status=status, reason=printable(reason))

    if not isinstance(scores, list | tuple) or len(scores) != 1:
        found = type(scores).__name__
        found = f"{found} of {len(scores)}" if isinstance(scores, list | tuple) else found
        return failed("error", f"score returned {found} for one response, not a list of one")
    (parts,) = scores
    if not isinstance(parts, Mapping):
        found = type(parts).__name__
        return failed("error", f"score returned {found} for a response, not a dict of named parts")
    if not 1 <= len(parts) <= _MAX_PARTS:
        return failed("error", f"score returned {len(parts)} parts, not 1 to {_MAX_PARTS}")
    values: dict[str, float] = {}
    for name, value in parts.items():
        if not isinstance(name, str) or not _PART_NAME.fullmatch(name):
            shown = ascii(name)[:80]
            return failed("error", f"part {shown}: write names with a-z, 0-9 and _ (64 at most)")
        if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
            return failed("error", f"part {name!r} is a {type(value).__name__}, not a number")
        try:
            values[name] = float(value)
        except OverflowError:
            values[name] = math.inf
        if not math.isfinite(values[name]):
            return failed("nan", f"part {name!r} is {values[name]}")
    reward = sum(values.values())
    if not math.isfinite(reward):
        return failed("nan", "the sum of the parts is not finite")
    low, high = limits
    if not low - _ROUNDING <= reward <= high + _ROUNDING:
        reason = f"the reward {reward:g} is outside of the declared range {low:g} to {high:g}"
        return failed("range", reason)
    return Scored(parts=values, status="unparsed" if isinstance(parts, Unparsed) else "ok")


def equal_rewards_warning(reward: float, count: int) -> str:
    """What to tell a user all of whose first responses have one and the same reward.

    Args:
        count: of the responses.
    """
    return (
        f"all {count} responses so far have the same reward, {reward:g}: nothing tells a better "
        "one from a worse. Look in rollouts/ whether they end (task.max_response_tokens) and the "
        "task reads their answers; else start from a model that solves some problems"
    )


def describe(error: BaseException) -> str:
    """An exception in one line: its type, where it was raised, what it says."""
    try:
        text = str(error)
    except BaseException:  # a `__str__` that raises
        text = ""
    trace: TracebackType | None = error.__traceback__
    where = ""
    while trace is not None:
        file = os.path.basename(trace.tb_frame.f_code.co_filename)
        where = f" ({file}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return printable(f"{type(error).__name__}{where}: {text}")


def printable(text: str, limit: int = 300) -> str:
    r"""A text in one line of bounded length.

    >>> printable("a\nb" + "c" * 9, limit=8)
    'a\\nbc...'
    """
    cut = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:limit])
    return cut if len(cut) <= limit and len(text) <= limit else cut[: limit - 3] + "..."


class _FailureLog:
    """Gives failures their penalty and logs them: each kind's first three, then ever fewer."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def take(self, scored: Scored, problem: Problem, response: str) -> Scored:
        """`scored` as it is to be used."""
        if scored.status in ("ok", "unparsed"):
            return scored
        with self._lock:
            self._counts[scored.status] += 1
            count = self._counts[scored.status]
        if count <= 3 or count in (10, 100, 1000) or count % 10_000 == 0:
            logger.warning(
                "reward failed (%s, no. %d): %s; penalty %g; prompt %s, response %s",
                *(scored.status, count, scored.reason, self._penalty, problem.prompt_id),
                ascii(response[:80]),
            )
        parts = {"penalty": self._penalty}
        return Scored(parts=parts, status=scored.status, reason=scored.reason)


# --------------------------------------------------------------------------- in this process


class LocalScorer:
    """The task in this process, in the batches that come, without a time limit.

    Where a batch raises or does not give one result each, its responses are scored one by one, and
    those that fail alone are blamed. Where every one of them does, the task itself is broken (a
    model that does not fit the device, say) and its exception is raised.
    """

    def __init__(self, task: Task, *, penalty: float) -> None:
        self.facts = facts_taken(task)
        self._task = task
        self._log = _FailureLog(penalty)

    def submit(
        self, problems: Sequence[Problem], responses: Sequence[str], **facts: Sequence[Any]
    ) -> Future[list[Scored]]:
        """Scores; the result is there when this returns."""
        done: Future[list[Scored]] = Future()
        done.set_result(self.score(problems, responses, **facts))
        return done

    def collect(
        self, scores: Future[list[Scored]], *, on_progress: Callable[[], None] = lambda: None
    ) -> list[Scored]:
        """What `submit` has found."""
        return scores.result()

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str], **facts: Sequence[Any]
    ) -> list[Scored]:
        """One result a response, in order."""
        if not responses:
            return []
        taken, limits = _taken(self.facts, facts, len(responses)), reward_range(self._task)
        failure: Exception | None = None
        try:
            batch = self._task.score(problems, responses, **taken)
            whole = isinstance(batch, list | tuple) and len(batch) == len(responses)
        except Exception as error:
            failure, whole = error, False
        if whole:
            scored = [judge([parts], limits) for parts in batch]
        else:
            scored = [
                score_one(self._task, problem, response, _facts_of(taken, i))
                for i, (problem, response) in enumerate(zip(problems, responses, strict=True))
            ]
            if failure is not None and len(scored) > 1 and all(s.status == "error" for s in scored):
                raise failure
        return [
            self._log.take(result, problem, response)
            for result, problem, response in zip(scored, problems, responses, strict=True)
        ]

    def kill(self) -> None:
        """Nothing outlives this process."""

    def close(self) -> None:
        """Nothing to end."""


def _taken(
    names: Iterable[str], facts: Mapping[str, Sequence[Any]], count: int
) -> dict[str, Sequence[Any]]:
    """The facts that a task takes."""
    unknown = set(facts) - set(FACTS)
    assert not unknown, f"{unknown} are none of rewards.FACTS"
    assert all(len(values) == count for values in facts.values()), "as many facts as responses"
    return {name: facts[name] for name in names if name in facts}


def _facts_of(facts: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any]:
    """Those of one response."""
    return {name: values[i] for name, values in facts.items()}


# --------------------------------------------------------------------------- in worker processes


class _Lost(Exception):
    """A worker process that can't be used any more: `status`, and why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Job:
    """Responses that were submitted together. Compared by identity."""

    def __init__(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        facts: Mapping[str, Sequence[Any]],
    ) -> None:
        self.problems, self.responses, self.facts = problems, responses, facts
        self.results: list[Scored | None] = [None] * len(responses)
        self.num_left = len(responses)
        self.done: Future[list[Scored]] = Future()


class RewardWorkers:
    """Worker processes that score responses one by one, each under a hard time limit.

    Workers start at once, in the background: make one after an engine, which takes processes that
    start meanwhile for its own. Any thread may submit and collect, also several.

    Args:
        node: the task's config, plain values: `_target_` and the constructor's keywords.
        cfg: how many workers, their limits and the penalty.
        facts: those of FACTS that the task's `score` takes (`facts_taken`).

    Raises:
        ValueError: the node holds something other than plain values.
    """

    def __init__(
        self, node: Mapping[str, Any], cfg: RewardConfig, *, facts: tuple[str, ...] = ()
    ) -> None:
        self.facts = facts
        setup = {
            "path": sys.path,
            "task": node,
            "memory_bytes": int(cfg.memory_limit_gb * (1 << 30)),
        }
        try:
            self._setup = _line(setup)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"task: its keys must be plain values (text, numbers, lists, dicts) for worker "
                f"processes to build it too: {error}"
            ) from error
        self._cfg = cfg
        self._log = _FailureLog(cfg.penalty)
        self._state = threading.Condition()  # of all below
        self._queue: deque[tuple[_Job, int]] = deque()  # what no worker has taken
        self._jobs: set[_Job] = set()  # not done
        self._processes: set[_Process] = set()
        self._num_scored = 0
        self._closed = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"reward {i}", daemon=True)
            for i in range(cfg.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, problems: Sequence[Problem], responses: Sequence[str], **facts: Sequence[Any]
    ) -> Future[list[Scored]]:
        """Hands responses over and returns at once; `collect` what this returns.

        Args:
            problems: the problem each response answers, as many as `responses`.
            facts: of each response, by a name of FACTS.
        """
        assert len(problems) == len(responses), "as many problems as responses"
        job = _Job(problems, responses, _taken(self.facts, facts, len(responses)))
        with self._state:
            if self._error is not None:
                job.done.set_exception(self._error)
            elif self._closed:
                job.done.set_exception(RuntimeError("the reward workers are closed"))
            elif not responses:
                job.done.set_result([])
            else:
                self._jobs.add(job)
                self._queue += [(job, i) for i in range(len(responses))]
                self._state.notify_all()
        return job.done

    def collect(
        self, scores: Future[list[Scored]], *, on_progress: Callable[[], None] = lambda: None
    ) -> list[Scored]:
        """Waits for what was submitted; one result a response, in order.

        Args:
            on_progress: called now and then while responses get scored.

        Raises:
            RuntimeError: no worker starts, or they were closed.
        """
        seen = -1
        while not wait([scores], timeout=0.5).done:
            if self._num_scored != seen:
                seen = self._num_scored
                on_progress()
        return scores.result()

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str], **facts: Sequence[Any]
    ) -> list[Scored]:
        """`submit` and `collect`."""
        return self.collect(self.submit(problems, responses, **facts))

    def pids(self) -> list[int]:
        """Of the worker processes there are now."""
        with self._state:
            return sorted(process.pid for process in self._processes)

    def kill(self) -> None:
        """Ends the processes at once and waits for nobody; what is not scored yet fails."""
        with self._state:
            self._closed = True
            self._state.notify_all()
            for process in self._processes:
                process.interrupt()

    def close(self) -> None:
        """Ends the processes and their threads; what is not scored yet fails."""
        self.kill()
        for thread in self._threads:
            thread.join(timeout=30)

    # What follows runs in the workers' threads.

    def _work(self) -> None:
        """One worker's life: start a process, feed it, replace it when it is lost."""
        process: _Process | None = None
        error: BaseException = RuntimeError("the reward workers were closed")
        try:
            while not self._closed:
                if process is None:
                    process = self._start()
                chunk = self._take()
                if chunk and not self._score(process, chunk):
                    self._end(process)
                    process = None
        except BaseException as failure:
            if not self._closed:
                error = failure
        if process is not None:
            self._end(process)
        self._give_up(error)

    def _start(self) -> _Process:
        """A process with the task built in it.

        Raises:
            RuntimeError: it fails again and again, so not because of a response.
        """
        reason = ""
        for _ in range(_START_TRIES):
            process = _Process()
            with self._state:
                self._processes.add(process)
                if self._closed:  # `kill` came before it was known
                    process.interrupt()
            try:
                process.send(self._setup, limit_s=_START_LIMIT_S)
                reason = process.receive(limit_s=_START_LIMIT_S)["failed"]
            except _Lost as lost:
                reason = lost.reason
            if not reason:
                return process
            self._end(process)
        raise RuntimeError(f"a reward worker can't start: {reason}")

    def _end(self, process: _Process) -> None:
        with self._state:
            self._processes.discard(process)
        process.end()

    def _take(self) -> list[tuple[_Job, int]]:
        """The next responses for a worker: fewer as the queue runs out; none at the end.

        Small chunks at the end keep all workers busy until the last response.
        """
        with self._state:
            while not self._queue and not self._closed:
                self._state.wait()
            if self._closed:
                return []
            size = min(max(len(self._queue) // (2 * self._cfg.num_workers), 1), _MAX_CHUNK)
            return [self._queue.popleft() for _ in range(min(size, len(self._queue)))]

    def _score(self, process: _Process, chunk: Sequence[tuple[_Job, int]]) -> bool:
        """Has a chunk scored; False if the process is lost, which is the first response's fault
        that has no result. Those behind it go back to the queue."""
        left = deque(chunk)
        try:
            process.send(_chunk_message(chunk), limit_s=self._cfg.time_limit_s)
            usable = True
            while left and usable:
                parts, status, reason, usable = process.receive(limit_s=self._cfg.time_limit_s)
                self._finish(*left.popleft(), Scored(parts=parts, status=status, reason=reason))
        except _Lost as lost:
            usable = False
            if not self._closed:
                scored = Scored(parts={}, status=lost.status, reason=lost.reason)
                self._finish(*left.popleft(), scored)
        if left:
            with self._state:
                self._queue.extendleft(reversed(left))
                self._state.notify_all()
        return usable

    def _finish(self, job: _Job, i: int, scored: Scored) -> None:
        result = self._log.take(scored, job.problems[i], job.responses[i])
        with self._state:
            job.results[i] = result
            job.num_left -= 1
            self._num_scored += 1
            done = job.num_left == 0 and job in self._jobs
            if done:
                self._jobs.remove(job)
        if done:
            job.done.set_result([r for r in job.results if r is not None])

    def _give_up(self, error: BaseException) -> None:
        """Nothing more is scored: every job that is not done gets the error."""
        with self._state:
            self._error = self._error or error
            self._closed = True
            self._queue.clear()
            jobs, self._jobs = self._jobs, set()
            self._state.notify_all()
        for job in jobs:
            job.done.set_exception(self._error)


def _line(value: Any) -> bytes:
    """One message: ASCII, so that whatever text a model writes comes through as it is."""
    return json.dumps(value).encode("ascii") + b"\n"


def _chunk_message(chunk: Iterable[tuple[_Job, int]]) -> bytes:
    """Responses, each with the number of its problem; a problem of many responses goes once."""
    number_of: dict[int, int] = {}
    problems: list[dict[str, Any]] = []
    items: list[tuple[int, str, dict[str, Any]]] = []
    for job, i in chunk:
        problem = job.problems[i]
        number = number_of.setdefault(id(problem), len(problems))
        if number == len(problems):
            problems.append({name: getattr(problem, name) for name in _PROBLEM_FIELDS})
        items.append((number, job.responses[i], _facts_of(job.facts, i)))
    return _line({"problems": problems, "items": items})


class _Process:
    """A worker process and its two pipes, used by one thread; `interrupt` is for any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = False
        # A session of its own: Ctrl-C is for the run to handle, and what a reward has started
        # can be killed with it.
        self._popen = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "CUDA_VISIBLE_DEVICES": "",  # device memory is the engine's
            },
        )
        self.pid = self._popen.pid
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._pipes: tuple[IO[bytes], IO[bytes]] = (self._popen.stdin, self._popen.stdout)
        self._to, self._from = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self._to, False)
        self._lines: deque[bytes] = deque()
        self._rest = b""  # the beginning of a line

    def send(self, message: bytes, *, limit_s: float) -> None:
        """Writes one message; raises _Lost."""
        deadline = time.monotonic() + limit_s
        left = memoryview(message)
        while left:
            self._wait(self._to, select.POLLOUT, deadline, limit_s)
            try:
                left = left[os.write(self._to, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise _Lost("crash", self._how_it_ended()) from None

    def receive(self, *, limit_s: float) -> Any:
        """The next message; raises _Lost if there is none within the limit."""
        deadline = time.monotonic() + limit_s
        while not self._lines:
            self._wait(self._from, select.POLLIN, deadline, limit_s)
            data = os.read(self._from, 1 << 16)
            if not data:
                raise _Lost("crash", self._how_it_ended())
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._lines += lines
            if len(self._rest) > _MAX_REPLY_BYTES:
                raise _Lost("crash", "its answer has no end")
        try:
            return json.loads(self._lines.popleft())
        except ValueError:
            raise _Lost("crash", "its answer can't be read") from None

    def interrupt(self) -> None:
        """Kills it and all of its session; the thread that uses it then calls `end`."""
        with self._lock:
            if not self._ended:  # else the id may be another's by now
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills it, and leaves nothing of it."""
        self.interrupt()
        with self._lock:
            self._ended = True
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=10)
        for pipe in self._pipes:
            pipe.close()

    def _wait(self, fd: int, event: int, deadline: float, limit_s: float) -> None:
        """Until a pipe is ready or closed; raises _Lost."""
        poller = select.poll()
        poller.register(fd, event)
        while True:
            # The deadline counts only if a look at the pipe that came after it finds nothing: this
            # thread may have been kept from running for long.
            left = deadline - time.monotonic()
            if poller.poll(1000 * min(max(left, 0.0), _GLANCE_S)):
                return
            if left <= _GLANCE_S:
                raise _Lost("timeout", f"no result within {limit_s:g} s")
            # A process that it forked may hold the pipe open.
            if self._exit() is not None and not poller.poll(0):
                raise _Lost("crash", self._how_it_ended())

    def _exit(self) -> str | None:
        """How it ended, or None; its id stays taken until `end`."""
        try:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # this process ignores SIGCHLD
            return "the process ended"
        if result is None:
            return None
        if result.si_code == os.CLD_EXITED:
            return f"the process ended with exit code {result.si_status}"
        names = {number.value: number.name for number in signal.Signals}
        return f"the process was killed by {names.get(result.si_status, result.si_status)}"

    def _how_it_ended(self) -> str:
        """After its pipes have closed: it ends at any moment, if it does."""
        for _ in range(20):
            reason = self._exit()
            if reason is not None:
                return reason
            time.sleep(0.05)
        return "the process closed its pipes"


# --------------------------------------------------------------------------- the worker itself


def serve(parent: int) -> None:
    """A worker process: builds the task, then scores what comes until its parent has gone."""
    _die_with(parent)
    with suppress(OSError):  # where memory runs out, the kernel takes a worker and not the engine
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    # Whatever a reward prints goes to stderr: stdout was the way back.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr = _Escaped(sys.stderr)

    def reply(value: Any) -> None:
        data = memoryview(_line(value))
        while data:
            data = data[os.write(replies, data) :]

    setup = json.loads(requests.readline() or b"null")
    if setup is None:
        return
    sys.path[:] = setup["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (setup["memory_bytes"], setup["memory_bytes"]))
    try:
        task = build_task(setup["task"])
    except BaseException as error:
        reply({"failed": describe(error)})
        return
    reply({"failed": ""})
    me = os.getpid()
    for line in requests:
        chunk = json.loads(line)
        problems = [Problem(**values) for values in chunk["problems"]]
        for number, response, facts in chunk["items"]:
            # SystemExit too: the process need not end with the response.
            scored = score_one(task, problems[number], response, facts, catch=BaseException)
            if os.getpid() != me:  # a reward forked, and its child came back here
                os._exit(0)
            # What has filled the memory may stay: the next response needs another process.
            usable = not scored.reason.startswith("MemoryError")
            reply((scored.parts, scored.status, scored.reason, usable))


class _Escaped(io.TextIOBase):
    """What a task prints, which may be a response, with its control characters escaped."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._out.write(escape_control(text, keep="\n\t"))
        self._out.flush()
        return len(text)


def _die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends (Linux).

    Elsewhere it ends when its pipe does, which a reward that hangs keeps it from seeing.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before
        os._exit(0)


if __name__ == "__main__":
    try:
        serve(int(sys.argv[1]))
    except BrokenPipeError:
        pass  # the parent has gone
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # threads that a reward has left are not waited for
