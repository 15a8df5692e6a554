"""Faults, injected into whole jobs of real processes: does each end as the README promises?

    python bench/faults.py            # all, 15 to 20 minutes on two cores; one JSON line last
    python bench/faults.py --only searcher_killed engine_hung
    python bench/faults.py --list

Every fault is a function below: it starts a job (1 trainer and 1 searcher, a tiny random model,
sums), does something to it, and checks the promise in its decorator. Jobs that are resumed count
trajectories lost: those in the buffer of the checkpoint that are not in that of the run's end.
A hang is a job that has not ended in time. tests/test_faults.py runs the same functions.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from bench.measure import say  # noqa: E402
from experiments import warm  # noqa: E402

ENDS_WITHIN_S = 90.0  # for a job that ends, from the fault on
NOTICED_WITHIN_S = 30.0  # a rank that died


# --------------------------------------------------------------------------- faults by name


@dataclass(frozen=True, slots=True)
class Fault:
    """One way of things going wrong."""

    name: str
    promise: str  # what the user is promised, for the README
    inject: Callable[[Place], int]  # trajectories lost; AssertionError: the promise is broken
    slow: bool  # left out of the default tests
    needs: str  # "vllm" | "root" | "mount" | ""


FAULTS: dict[str, Fault] = {}


def fault(promise: str, *, slow: bool = False, needs: str = "") -> Callable[..., Any]:
    """Registers a function of a `Place` as the fault of its name."""

    def register(function: Callable[[Place], int]) -> Callable[[Place], int]:
        name = function.__name__
        FAULTS[name] = Fault(name, promise, function, slow, needs)
        return function

    return register


# --------------------------------------------------------------------------- jobs


class Hang(AssertionError):
    """A job has not ended in time."""


@dataclass(slots=True)
class Place:
    """Where jobs of one fault run, and what they start from."""

    folder: Path
    model: str  # folder of the tiny model
    server: warm.Server
    seconds: dict[str, float] = field(default_factory=dict)  # measured, by what

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "runs" / "run"

    def overrides(self, *more: str) -> list[str]:
        """Of the command line, for a job that goes on until something happens to it."""
        other_task = any(override.startswith("task=") for override in more)
        return [
            *([] if other_task else ["task=arithmetic", "task.num_test=16"]),
            "model=custom",
            f"model.path={self.model}",
            "engine=hf",
            "engine.kv_cache_gb=0.1",
            "trainer.steps=100000",
            "trainer.batch_size=32",
            "trainer.responses_per_prompt=4",
            "searcher.responses_per_prompt=4",
            "searcher.prompts_in_flight=8",
            "buffer.deduplicate=true",
            "buffer.capacity_per_prompt=100000",
            "buffer.initial_trajectories=32",
            "rewards.num_workers=1",
            "eval.before=false",
            "cluster.timeout_s=40",
            "cluster.heartbeat_timeout_s=10",
            "checkpoint.every=20",
            "eval.every=0",
            "run.log_every_s=1",
            f"run.root={self.folder / 'runs'}",
            "run.name=run",
            *more,
        ]

    @contextmanager
    def job(self, num_ranks: int, *more: str) -> Iterator[Job]:
        """A job that has been started; nothing of it is left afterwards."""
        number = len(list(self.folder.glob("job-*")))
        logs = [self.folder / f"job-{number}-rank-{rank}.log" for rank in range(num_ranks)]
        job = Job(self.server.start(self.overrides(*more), logs), logs)
        try:
            yield job
        finally:
            job.kill_all()

    def finish(self, num_ranks: int, steps: int, *more: str) -> Job:
        """Goes on with the run by `resume=auto` for `steps` steps, which must succeed."""
        target = newest_step(self.run) + steps
        with self.job(num_ranks, f"trainer.steps={target}", "resume=auto", *more) as job:
            assert job.end(timeout_s=150) == [0] * num_ranks, job.output()
        assert (self.run / "summary.json").is_file()
        return job

    def command(self, *arguments: str, timeout_s: float = 100.0, **env: str) -> tuple[int, str]:
        """Exit code and output of `python train.py` with these arguments alone."""
        done = subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return done.returncode, done.stdout + done.stderr


class Job:
    """Ranks of a job, each a process with a log."""

    def __init__(self, processes: Sequence[Any], logs: Sequence[Path]) -> None:
        self.processes, self.logs = list(processes), list(logs)
        self._everyone: dict[int, psutil.Process] = {}

    def output(self) -> str:
        """What all ranks have printed."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs if log.exists())

    def wait_until(self, happened: Callable[[], bool], what: str, timeout_s: float = 100.0) -> None:
        """Until it has; trainer 0 must live so long."""
        begun = time.monotonic()
        while not happened():
            waited = time.monotonic() - begun
            if waited > timeout_s or not self.processes[0].is_alive():
                raise AssertionError(f"no {what} after {waited:.0f} s in\n{self.output()}")
            time.sleep(0.02)

    def wait_for(self, pattern: str, timeout_s: float = 100.0) -> None:
        """Until the output matches."""
        self.wait_until(lambda: bool(re.search(pattern, self.output())), pattern, timeout_s)

    def wait_for_step(self, run: Path, step: int, timeout_s: float = 100.0) -> None:
        """Until the metrics of a step are there."""
        self.wait_until(lambda: last_step(run) >= step, f"step {step}", timeout_s)

    def wait_for_checkpoint(self, run: Path, after: int = 0) -> None:
        """Until there is a whole checkpoint of a later step."""
        self.wait_until(lambda: newest_step(run) > after, "checkpoint")

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank."""
        self._note()
        os.kill(self.processes[rank].pid, number)

    def engines(self) -> list[psutil.Process]:
        """vLLM's core processes."""
        self._note()
        return [p for p in self._everyone.values() if _is_engine(p)]

    def end(self, timeout_s: float = ENDS_WITHIN_S) -> list[int]:
        """Exit codes of the ranks, once all they have started is gone.

        Raises:
            Hang: a process is still there.
        """
        self._note()
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                raise Hang(f"{process.name} has not ended:\n{self.output()}")
        _, alive = psutil.wait_procs(list(self._everyone.values()), timeout=15)
        if alive:
            raise Hang(f"still there: {[p.cmdline() for p in alive]}")
        return [process.exitcode for process in self.processes]

    def kill_all(self) -> None:
        """At once, with all that they have started."""
        self._note()
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
        for one in self._everyone.values():
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def _note(self) -> None:
        """Remembers what the ranks have started so far."""
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    self._everyone[child.pid] = child


def _is_engine(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return "EngineCore" in " ".join(process.cmdline()) and process.is_running()
    return False


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl."""
    from metrics import read_metrics

    return max((r["step"] for r in read_metrics(run)), default=0)


def newest_step(run: Path) -> int:
    """Of the newest checkpoint; 0: there is none."""
    from checkpoint import MANIFEST, steps_in

    folder = run / "checkpoints"
    whole = (step for step in steps_in(folder) if (folder / f"step-{step}" / MANIFEST).is_file())
    return max(whole, default=0)


def stored(checkpoint: Path) -> set[tuple[int, bytes]]:
    """(prompt id, response tokens) of all that is in the buffers of a checkpoint."""
    from safetensors.numpy import load_file

    found: set[tuple[int, bytes]] = set()
    for path in sorted((checkpoint / "state").glob("*.safetensors")):
        arrays = load_file(path)
        ends = np.cumsum(arrays["buffer/length"])[:-1]
        responses = np.split(arrays["buffer/tokens"], ends)
        prompts = arrays["buffer/prompt_id"].tolist()
        found |= {(p, tokens.tobytes()) for p, tokens in zip(prompts, responses, strict=True)}
    return found


def keep_aside(place: Place) -> set[tuple[int, bytes]]:
    """What the newest checkpoint holds now."""
    step = newest_step(place.run)
    assert step > 0
    return stored(place.run / "checkpoints" / f"step-{step}")


def lost(place: Place, before: set[tuple[int, bytes]]) -> int:
    """How many of `before` are not in the newest checkpoint any more."""
    assert before
    return len(before - keep_aside(place))


def only_reason(job: Job, *words: str) -> str:
    """The one line that says why the job ended; it holds the words."""
    lines = [line for line in job.output().splitlines() if "the job ends" in line]
    assert len(lines) == 1, job.output()
    assert all(word in lines[0] for word in words), lines[0]
    return lines[0]


# --------------------------------------------------------------------------- processes


@fault("every rank exits non-zero with the reason; `resume=auto` goes on from the checkpoint")
def searcher_killed(place: Place) -> int:
    with place.job(2) as job:
        job.wait_for_checkpoint(place.run)
        job.signal(1, signal.SIGKILL)
        begun = time.monotonic()
        codes = job.end()
        place.seconds["dead searcher noticed"] = time.monotonic() - begun
        assert place.seconds["dead searcher noticed"] < NOTICED_WITHIN_S
        assert codes[0] not in (0, None)
        only_reason(job, "searcher")
    before = keep_aside(place)
    place.finish(2, 20)
    return lost(place, before)


@fault("the same", slow=True)
def trainer_killed(place: Place) -> int:
    with place.job(2) as job:
        job.wait_for_checkpoint(place.run)
        job.signal(0, signal.SIGKILL)
        assert job.end()[1] not in (0, None)
        only_reason(job, "trainer 0")
    before = keep_aside(place)
    place.finish(2, 20)
    return lost(place, before)


@fault("the same; the policy and the optimizer are sharded over two trainers", slow=True)
def second_trainer_killed(place: Place) -> int:
    with place.job(3, "cluster.trainers=2") as job:
        job.wait_for_checkpoint(place.run)
        job.signal(1, signal.SIGKILL)
        codes = job.end()
        assert codes[0] not in (0, None) and codes[2] not in (0, None)
    before = keep_aside(place)
    place.finish(3, 20, "cluster.trainers=2")
    return lost(place, before)


@fault("the run goes on with another number of trainers and searchers", slow=True)
def resumed_on_other_ranks(place: Place) -> int:
    with place.job(3, "cluster.trainers=2") as job:
        job.wait_for_checkpoint(place.run)
        job.kill_all()
    before = keep_aside(place)
    place.finish(3, 20)
    missing = lost(place, before)
    place.finish(4, 20, "cluster.trainers=3", "trainer.batch_size=24")
    return missing + lost(place, before)


@fault(
    "`torchrun --max-restarts` starts the ranks again, and they go on from the checkpoint",
    slow=True,
)
def restarted_by_torchrun(place: Place) -> int:
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=2"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, *launcher, "train.py", *place.overrides("resume=auto")]
    command += ["trainer.steps=200"]
    log = place.folder / "torchrun.log"
    with log.open("w") as file:
        agent = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 100
        while newest_step(place.run) == 0:
            assert time.monotonic() < deadline and agent.poll() is None, log.read_text()
            time.sleep(0.02)
        before = keep_aside(place)
        searcher = next(
            p for p in psutil.Process(agent.pid).children() if p.environ().get("RANK") == "1"
        )
        searcher.kill()
        try:
            assert agent.wait(timeout=150) == 0, log.read_text()
        except subprocess.TimeoutExpired:
            raise Hang(log.read_text()) from None
    finally:
        everyone = []
        with suppress(psutil.NoSuchProcess):
            everyone = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        agent.wait()
        for one in everyone:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    assert "going on from" in log.read_text()
    return lost(place, before)


@fault("the previous checkpoint is used, what was written of the other is removed")
def killed_while_writing_a_checkpoint(place: Place) -> int:
    folder = place.run / "checkpoints"
    with place.job(2, "checkpoint.every=1", "checkpoint.keep=1000") as job:
        job.wait_for_checkpoint(place.run)
        deadline = time.monotonic() + 60
        partial: list[Path] = []
        while not partial:  # stopped first, so that the moment is the right one
            assert time.monotonic() < deadline, "no checkpoint was caught half-way"
            if any(folder.glob(".step-*.partial")):
                job.signal(0, signal.SIGSTOP)
                partial = list(folder.glob(".step-*.partial"))
                if not partial:
                    job.signal(0, signal.SIGCONT)
        job.signal(0, signal.SIGKILL)
        job.end()
    before = keep_aside(place)
    place.finish(2, 20)
    assert not list(folder.glob(".*.partial"))
    return lost(place, before)


def _stopped(place: Place, ask: Callable[[Job], None]) -> int:
    with place.job(2, "checkpoint.every=0") as job:
        job.wait_for_step(place.run, 10)
        ask(job)
        assert job.end() == [75, 75], job.output()
        assert job.output().count("the job stops:") == 1
        assert "saved at step" in job.output()
    before = keep_aside(place)
    assert newest_step(place.run) >= last_step(place.run)
    place.finish(2, 20)
    return lost(place, before)


@fault("a checkpoint, then every rank exits with code 75")
def sigterm(place: Place) -> int:
    return _stopped(place, lambda job: [job.signal(r, signal.SIGTERM) for r in (0, 1)])


@fault("the same, whichever rank it is sent to", slow=True)
def sigusr1_to_a_searcher(place: Place) -> int:
    return _stopped(place, lambda job: job.signal(1, signal.SIGUSR1))


@fault("the same: Slurm's notice of the time limit makes `launch/` write this file", slow=True)
def stop_file(place: Place) -> int:
    return _stopped(place, lambda job: (place.run / "stop").touch())


@fault("the same: the last step was saved before; what is left is the evaluation", slow=True)
def sigterm_in_the_last_evaluation(place: Place) -> int:
    long = ["trainer.steps=12", "checkpoint.every=0", "task.max_operand=99", "task.num_test=4000"]
    with place.job(2, *long, "eval.num_problems=4000") as job:
        job.wait_for_checkpoint(place.run)
        job.signal(0, signal.SIGTERM)
        assert job.end() == [75, 75], job.output()
        assert "SIGTERM: saved at step 12" in job.output()
    before = keep_aside(place)
    with place.job(2, *long, "eval.num_problems=16", "resume=auto") as job:
        assert job.end(timeout_s=150) == [0, 0], job.output()
    summary = json.loads((place.run / "summary.json").read_text())
    assert list(summary["held_out_by_step"]) == ["12"] and last_step(place.run) == 12
    return lost(place, before)


@fault("every rank exits, and the message names the rank", slow=True)
def searcher_stopped(place: Place) -> int:
    with place.job(2) as job:
        job.wait_for_step(place.run, 5)
        job.signal(1, signal.SIGSTOP)
        begun = time.monotonic()
        job.processes[0].join(timeout=ENDS_WITHIN_S)
        place.seconds["stopped searcher noticed"] = time.monotonic() - begun
        if job.processes[0].is_alive():
            raise Hang(job.output())
        only_reason(job, "searcher 0 (rank 1) has been silent")
    return 0


@fault("the same", slow=True)
def trainer_stopped(place: Place) -> int:
    with place.job(2) as job:
        job.wait_for_step(place.run, 5)
        job.signal(0, signal.SIGSTOP)
        job.processes[1].join(timeout=ENDS_WITHIN_S)
        if job.processes[1].is_alive():
            raise Hang(job.output())
        only_reason(job, "trainer 0 (rank 0)")
    return 0


def _engine_fault(place: Place, harm: Callable[[psutil.Process], None]) -> int:
    more = ("engine=vllm", "engine.hang_timeout_s=8", "trainer.steps=100000")
    with place.job(2, *more) as job:
        job.wait_for_step(place.run, 5, timeout_s=150)
        step = last_step(place.run)
        harm(job.engines()[0])
        begun = time.monotonic()
        job.wait_for("the engine is back", timeout_s=100)
        place.seconds["engine back"] = time.monotonic() - begun
        job.wait_for_step(place.run, max(last_step(place.run), step) + 50)
        (place.run / "stop").touch()
        assert job.end() == [75, 75], job.output()
    before = keep_aside(place)
    from metrics import read_metrics

    records = read_metrics(place.run)
    assert max(r.get("faults/engine_restarts", 0) for r in records) == 1
    place.finish(2, 20)
    return lost(place, before)


@fault(
    "its searcher starts it again with the current weights; its prompts are done again",
    slow=True,
    needs="vllm",
)
def engine_killed(place: Place) -> int:
    return _engine_fault(place, lambda engine: engine.kill())


@fault("the same, after `engine.hang_timeout_s`", slow=True, needs="vllm")
def engine_hung(place: Place) -> int:
    return _engine_fault(place, lambda engine: engine.suspend())


@fault("within the heartbeat's limit every node exits with the reason", slow=True, needs="root")
def node_cut_off(place: Place) -> int:
    launcher = [sys.executable, "launch/namespaces.py", "--name", "run", "--partition-after", "1"]
    launcher += ["--logs", str(place.folder / "logs"), "--"]
    try:
        done = subprocess.run(
            [*launcher, *place.overrides()],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    except subprocess.TimeoutExpired as error:
        raise Hang(str(error)) from error
    assert done.returncode == 1, done.stdout + done.stderr
    named = [x for x in done.stdout.splitlines() if "the job ends" in x and "[node0]" in x]
    assert len(named) == 1 and "searcher 1 (rank 2)" in named[0], done.stdout
    return 0


# --------------------------------------------------------------------------- checkpoints


def _two_checkpoints(place: Place) -> tuple[int, int]:
    with place.job(2, "checkpoint.every=5") as job:
        whole = place.run / "checkpoints"
        job.wait_until(lambda: len(list(whole.glob("step-*/manifest.json"))) >= 2, "2 checkpoints")
        job.kill_all()
    steps = sorted(int(p.name[5:]) for p in (place.run / "checkpoints").glob("step-*"))
    return steps[-2], steps[-1]


def _damaged(place: Place, damage: Callable[[Path], None], *words: str) -> int:
    """The newest of two checkpoints is damaged; the other is used, the reason is in the log."""
    older, newer = _two_checkpoints(place)
    folder = place.run / "checkpoints"
    damage(folder / f"step-{newer}")
    before = stored(folder / f"step-{older}")
    with place.job(2, f"trainer.steps={older + 10}", "resume=auto") as job:
        assert job.end(timeout_s=150) == [0, 0], job.output()
    assert f"going on from {folder / f'step-{older}'}" in job.output(), job.output()
    [line] = [x for x in job.output().splitlines() if "passing over a checkpoint" in x]
    assert all(word in line for word in words), line
    return len(before - stored(folder / f"step-{older + 10}"))


@fault("it is passed over by name, and the previous one is used", slow=True)
def checkpoint_truncated(place: Place) -> int:
    def damage(folder: Path) -> None:
        os.truncate(folder / "model.safetensors", 1000)

    return _damaged(place, damage, "model.safetensors", "bytes")


@fault("the same")
def checkpoint_bit_flipped(place: Place) -> int:
    def damage(folder: Path) -> None:
        path = folder / "state" / "trainer-0.safetensors"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    return _damaged(place, damage, "trainer-0.safetensors", "damaged")


@fault("the same; `resume=<path>` refuses it", slow=True)
def checkpoint_of_another_model(place: Place) -> int:
    other = place.folder / "other-model"
    _smaller_model(Path(place.model), other)
    with place.job(2, f"model.path={other}", "run.name=other", "trainer.steps=5") as job:
        assert job.end(timeout_s=150) == [0, 0], job.output()
    foreign = place.run.with_name("other") / "checkpoints" / "step-5"

    def damage(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(foreign, folder)

    missing = _damaged(place, damage, "another model")
    with place.job(2, "run.name=fork", f"resume={foreign}") as job:
        assert job.end()[0] == 2, job.output()
        only_reason(job, "another model", "resume=")
    return missing


def _smaller_model(model: Path, folder: Path) -> None:
    """The same model with a layer less, untrained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder)
    shape = AutoConfig.from_pretrained(folder)
    shape.num_hidden_layers -= 1
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)


@fault(
    "the run goes on without that checkpoint; it ends after `checkpoint.max_failures` in a row",
    needs="mount",
)
def disk_full(place: Place) -> int:
    disk = place.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)], check=True)
    ballast = disk / "ballast"
    try:
        with place.job(2, f"run.root={disk}", "checkpoint.every=10") as job:
            run = disk / "run"
            job.wait_for_checkpoint(run)
            before = stored(run / "checkpoints" / f"step-{newest_step(run)}")
            with suppress(OSError):
                with ballast.open("wb") as file:
                    while True:
                        file.write(bytes(1 << 16))
            job.wait_for(r"could not be written .*1 of checkpoint.max_failures=3")
            ballast.unlink()
            job.wait_for_checkpoint(run, after=newest_step(run))
            missing = len(before - stored(run / "checkpoints" / f"step-{newest_step(run)}"))
            with suppress(OSError):
                with ballast.open("wb") as file:
                    while True:
                        file.write(bytes(1 << 16))
            assert job.end()[0] == 1
            only_reason(job, "checkpoints in a row could not be written")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    return missing


# --------------------------------------------------------------------------- numbers


def unsound_loss(batch: Any, *, beta: float, first: int, last: int) -> Any:
    """Trajectory balance that is NaN in its calls `first` to `last`, from 1, of this process."""
    from losses import tb_vargrad

    unsound_loss.calls = getattr(unsound_loss, "calls", 0) + 1  # type: ignore[attr-defined]
    output = tb_vargrad(batch, beta=beta)
    if first <= unsound_loss.calls <= last:  # type: ignore[attr-defined]
        output.loss = output.loss * float("nan")
    return output


def _unsound(first: int, last: int) -> list[str]:
    node = f"{{_target_: bench.faults.unsound_loss, _partial_: true, first: {first}, last: {last}}}"
    return ["~loss", f"+loss={node}", "trainer.tokens_per_micro_batch=100000"]


@fault("the step changes nothing and is counted; training goes on")
def loss_not_finite_once(place: Place) -> int:
    with place.job(2, *_unsound(5, 6), "trainer.steps=20") as job:
        assert job.end() == [0, 0], job.output()
    assert json.loads((place.run / "summary.json").read_text())["skipped_steps"] == 2
    return 0


@fault("the job ends after `trainer.max_skipped_steps`, and keeps the batch")
def loss_never_finite(place: Place) -> int:
    from offline import read_trajectories

    with place.job(2, *_unsound(5, 10**9), "trainer.max_skipped_steps=3") as job:
        assert job.end()[0] == 1
        only_reason(job, "not finite", "trainer.max_skipped_steps")
    [dump] = (place.run / "bad_batch").glob("*.traj")
    assert len(list(read_trajectories(dump))) == 32
    return 0


def greedy_loss(batch: Any, *, beta: float) -> Any:
    """Asks for more memory than any machine has."""
    import torch

    return torch.empty(1 << 60, dtype=torch.uint8)


@fault("one line says which keys to change")
def out_of_memory(place: Place) -> int:
    node = "{_target_: bench.faults.greedy_loss, _partial_: true}"
    with place.job(2, "~loss", f"+loss={node}") as job:
        assert job.end()[0] == 1
        only_reason(job, "trainer.tokens_per_micro_batch")
    return 0


# --------------------------------------------------------------------------- rewards


def _reward_fault(place: Place, how: str, status: str) -> int:
    from metrics import read_metrics

    more = ["task._target_=bench.unruly.Unruly", f"+task.how={how}", "rewards.time_limit_s=0.3"]
    with place.job(2, *more, "trainer.steps=60") as job:
        assert job.end(timeout_s=150) == [0, 0], job.output()
    shares = [r.get(f"reward/{status}_fraction", 0.0) for r in read_metrics(place.run)]
    assert 0.0 < max(shares) < 1.0, shares
    return 0


@fault(
    "the response costs `rewards.penalty` after `rewards.time_limit_s`, and is counted", slow=True
)
def reward_hangs(place: Place) -> int:
    return _reward_fault(place, "hang", "timeout")


@fault(
    "its worker is started again; the response costs `rewards.penalty`, and is counted", slow=True
)
def reward_crashes(place: Place) -> int:
    return _reward_fault(place, "crash", "crash")


@fault("the response costs `rewards.penalty`, and is counted", slow=True)
def reward_raises(place: Place) -> int:
    return _reward_fault(place, "raise", "error")


@fault("the same", slow=True)
def reward_not_finite(place: Place) -> int:
    return _reward_fault(place, "nan", "nan")


# --------------------------------------------------------------------------- input


def _refused(place: Place, words: Sequence[str], *more: str, num_ranks: int = 2) -> int:
    """One line with the words, exit code 2, and no run folder."""
    with place.job(num_ranks, *more) as job:
        codes = job.end()
        lines = [x for x in job.output().splitlines() if all(word in x for word in words)]
        assert codes[0] == 2 and lines, job.output()
        assert "Traceback" not in job.output(), job.output()
    assert not (place.run / "metrics.jsonl").exists()
    return 0


def _gsm8k(place: Place, content: bytes, *words: str) -> int:
    folder = place.folder / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(content)
    (folder / "test.jsonl").write_bytes(b'{"question": "1+1?", "answer": "#### 2"}\n' * 4)
    more = ["task=gsm8k", f"task.data_dir={folder}", "trainer.steps=10"]
    more += ["task.max_prompt_tokens=16", "task.max_response_tokens=8"]
    return _refused(place, ["task.data_dir", *words], *more)


GOOD = b'{"question": "1+1?", "answer": "1+1=2\\n#### 2"}\n'


@fault("one line names file and line; nothing is started")
def data_malformed(place: Place) -> int:
    return _gsm8k(place, GOOD + b'{"question": "1+', "line 2", "JSON")


@fault("the same", slow=True)
def data_empty(place: Place) -> int:
    return _gsm8k(place, b"", "the train split has no problems")


@fault("the same, with the nearest name", slow=True)
def data_wrong_field(place: Place) -> int:
    return _gsm8k(place, GOOD + GOOD.replace(b"question", b"qestion"), "line 2", "question")


@fault("the same", slow=True)
def data_binary(place: Place) -> int:
    return _gsm8k(place, GOOD + b"\x80\xff\x00" * 9, "line 2", "UTF-8")


@fault("one line names the key and the nearest known one")
def config_typo(place: Place) -> int:
    code, output = place.command("trainer.stepz=3")
    assert code == 2 and "unknown key trainer.stepz; did you mean trainer.steps?" in output, output
    assert "Traceback" not in output
    return 0


@fault("one line says how to go on with it or to choose another name")
def run_folder_taken(place: Place) -> int:
    place.run.mkdir(parents=True)
    (place.run / "summary.json").write_text("{}")
    _refused(place, ["run.name='run'", "resume=auto"])
    assert (place.run / "summary.json").read_text() == "{}"
    return 0


@fault("the second is refused in one line; the first goes on", slow=True)
def run_started_twice(place: Place) -> int:
    with place.job(2, "resume=auto") as job:
        job.wait_for_checkpoint(place.run)
        before = keep_aside(place)
        origin = (place.run / "origin.json").read_text()
        with place.job(2, "resume=auto") as second:
            assert second.end()[0] == 2, second.output()
            only_reason(second, "another job is writing into", str(place.run), "process")
        assert (place.run / "origin.json").read_text() == origin
        job.wait_for_checkpoint(place.run, after=newest_step(place.run))
        missing = lost(place, before)
        job.kill_all()
    before = keep_aside(place)
    place.finish(2, 20)
    return missing + lost(place, before)


@fault("one line names `run.root`", slow=True)
def run_folder_unwritable(place: Place) -> int:
    (place.folder / "file").write_text("")
    return _refused(place, ["run.root="], f"run.root={place.folder / 'file'}")


@fault("one line names the tokenizer and the model; nothing is started")
def tokenizer_of_another_model(place: Place) -> int:
    from safetensors.numpy import load_file, save_file

    small = place.folder / "small"
    shutil.copytree(place.model, small)
    config = json.loads((small / "config.json").read_text())
    weights = load_file(small / "model.safetensors")
    rows = config["vocab_size"] // 2
    for name, values in weights.items():
        if values.shape[0] == config["vocab_size"]:
            weights[name] = values[:rows].copy()
    save_file(weights, small / "model.safetensors", metadata={"format": "pt"})
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return _refused(place, ["tokenizer"], f"model.path={small}")


@fault("one line names the first of them", slow=True)
def weights_missing_in_the_model(place: Place) -> int:
    from safetensors.numpy import load_file, save_file

    folder = place.folder / "holes"
    shutil.copytree(place.model, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    words = [f"model.path='{folder}'", "lack 1 of the model's weights", "model.norm.weight"]
    return _refused(place, words, f"model.path={folder}")


@fault("one line names the key and the longest prompt", slow=True)
def prompt_too_long(place: Place) -> int:
    return _refused(place, ["task.max_prompt_tokens=3"], "task.max_prompt_tokens=3")


# --------------------------------------------------------------------------- strangers


@fault("the job goes on", slow=True)
def garbage_on_its_ports(place: Place) -> int:
    with place.job(2) as job:
        job.wait_for_step(place.run, 5)
        ports = {
            connection.laddr
            for process in job.processes
            for connection in psutil.Process(process.pid).net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert ports
        rng = np.random.default_rng(0)
        for address in ports:
            for size in (0, 3, 4096):
                kind = socket.AF_INET6 if ":" in address.ip else socket.AF_INET
                with socket.socket(kind) as stranger, suppress(OSError):
                    stranger.settimeout(2)
                    stranger.connect((address.ip, address.port))
                    stranger.sendall(rng.bytes(size))
        job.wait_for_step(place.run, last_step(place.run) + 30)
        (place.run / "stop").touch()
        assert job.end() == [75, 75], job.output()
    return 0


# --------------------------------------------------------------------------- bench


def make_place(folder: Path, model: str, server: warm.Server) -> Place:
    """An empty folder for one fault."""
    folder.mkdir(parents=True)
    return Place(folder=folder, model=model, server=server)


def make_model(folder: Path) -> str:
    """A tiny random model that knows digits."""
    from sft import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def can_have(needs: str) -> bool:
    """Whether this machine has what a fault needs."""
    if needs == "vllm":
        return importlib.util.find_spec("vllm") is not None
    if needs == "root":
        return os.geteuid() == 0
    if needs == "mount":
        with tempfile.TemporaryDirectory() as folder:
            mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
            if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
                return False
            subprocess.run(["umount", folder], check=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="names and promises")
    options = parser.parse_args()
    if options.list:
        for one in FAULTS.values():
            print(f"{one.name}: {one.promise}")
        return
    chosen = [FAULTS[name] for name in options.only or FAULTS]
    left_out = [one.name for one in chosen if not can_have(one.needs)]
    chosen = [one for one in chosen if can_have(one.needs)]
    survived, hangs, missing, seconds = [], [], 0, {}
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        model, server = make_model(work / "model"), warm.Server()
        for number, one in enumerate(chosen, start=1):
            place = make_place(work / one.name, model, server)
            begun = time.monotonic()
            try:
                count = one.inject(place)
                missing += count
                survived.append(one.name)
                outcome = "survived" + (f", {count} trajectories lost" if count else "")
            except Exception as error:
                hangs += [one.name] if isinstance(error, Hang) else []
                logs = place.folder.parent / f"{one.name}.txt"
                logs.write_text(traceback.format_exc())
                outcome = f"NOT AS PROMISED: {str(error)[:200]!r}, see {logs}"
            seconds |= place.seconds
            took = time.monotonic() - begun
            say(f"{number}/{len(chosen)} {one.name} ({took:.0f} s): {outcome}")
            shutil.rmtree(place.folder, ignore_errors=True)
    finally:
        shutil.rmtree(work / "model", ignore_errors=True)
        with suppress(OSError):
            work.rmdir()  # but for the logs of promises that were broken
    result = {
        "faults_tried": len(chosen),
        "survived_as_promised": len(survived),
        "trajectories_lost": missing,
        "hangs": len(hangs),
        "not_as_promised": [one.name for one in chosen if one.name not in survived],
        "not_tried": left_out,
        **{f"{what.replace(' ', '_')}_s": round(value, 1) for what, value in seconds.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
