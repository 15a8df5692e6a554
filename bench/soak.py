"""The demo for a given time, with faults injected at random: what is left of it?

    python bench/soak.py --minutes 30      # on two cores; one JSON line last, a figure beside it

One trainer and one searcher with vLLM (`--engine hf`: transformers). For two thirds of the time a
fault comes every two minutes on average: an engine, a reward worker, a searcher or a trainer is
killed, an engine or a rank is stopped for a while, the job is told to stop. What ends is started
again with `resume=auto`. The last third is calm, and there memory, open files and threads are
measured. Trajectories: `generated` is what searchers say they shipped, `received` what the buffer
was given, `dropped_by_policy` what it forgot by its rules (duplicates, bounds), `stored` the rest;
`lost` is what is missing in any of these sums. What a dead job made after its last checkpoint is in
none of them: it is made again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from bench.faults import Job, last_step, newest_step  # noqa: E402
from bench.measure import say  # noqa: E402
from experiments import warm  # noqa: E402

MEAN_S = 120.0  # between two faults, at most twice as long
SAMPLE_S = 5.0
RESULTS = ROOT / "bench" / "results"


@dataclass(slots=True, kw_only=True)
class Sample:
    """What the processes of one role hold at a moment."""

    seconds: float  # since the soak began
    role: str
    # resident; not the private part alone, which grows as what a fork shared is written to
    megabytes: float
    files: int
    threads: int


@dataclass(slots=True)
class Soak:
    """The run and what became of it."""

    folder: Path
    engine: str
    server: warm.Server
    rng: np.random.Generator
    begun: float = field(default_factory=time.monotonic)
    starts: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    job: Job | None = None

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def start(self, *more: str) -> Job:
        """Starts the job, or goes on with it."""
        self.starts += 1
        logs = [self.folder / f"start-{self.starts}-rank-{rank}.log" for rank in (0, 1)]
        overrides = [
            f"engine={self.engine}",
            "engine.hang_timeout_s=15",
            "trainer.steps=1000000",
            "trainer.lr.kind=constant",
            "buffer.max_tokens=200000",  # full after a minute: it grows no more
            "cluster.timeout_s=120",
            "cluster.heartbeat_timeout_s=15",
            "checkpoint.every=50",
            "eval.every=500",
            "resume=auto",
            f"run.root={self.folder}",
            "run.name=run",
            *more,
        ]
        self.job = Job(self.server.start(overrides, logs), logs)
        return self.job

    def wait(self, seconds: float) -> bool:
        """Takes samples meanwhile; False if the job has ended before."""
        until = self.seconds + seconds
        while self.seconds < until:
            time.sleep(min(SAMPLE_S, max(0.0, until - self.seconds)))
            assert self.job is not None
            if not all(process.is_alive() for process in self.job.processes):
                return False
            self.samples += take_samples(self.job, self.seconds)
        return True

    def wait_for_training(self) -> None:
        """Until a step was made since the start."""
        assert self.job is not None
        step = last_step(self.run)
        self.job.wait_for_step(self.run, step + 1, timeout_s=240)


def take_samples(job: Job, seconds: float) -> list[Sample]:
    """One sample a role."""
    found: dict[str, list[psutil.Process]] = {"trainer": [], "searcher": [], "engine": []}
    found["trainer"].append(psutil.Process(job.processes[0].pid))
    searcher = psutil.Process(job.processes[1].pid)
    found["searcher"].append(searcher)
    found["engine"] += job.engines()
    samples = []
    for role, processes in found.items():
        with suppress(psutil.NoSuchProcess):
            samples.append(
                Sample(
                    seconds=seconds,
                    role=role,
                    megabytes=sum(p.memory_info().rss for p in processes) / 1e6,
                    files=sum(p.num_fds() for p in processes),
                    threads=sum(p.num_threads() for p in processes),
                )
            )
    return samples


# --------------------------------------------------------------------------- faults


def kill_rank(rank: int) -> Callable[[Job], None]:
    return lambda job: job.signal(rank, signal.SIGKILL)


def stop_for_a_while(job: Job) -> None:
    """Less than the heartbeat's limit: forgiven."""
    job.signal(1, signal.SIGSTOP)
    time.sleep(4.0)
    job.signal(1, signal.SIGCONT)


def harm_engine(job: Job, how: Callable[[psutil.Process], None]) -> None:
    for process in job.engines():
        with suppress(psutil.NoSuchProcess):
            how(process)


def kill_reward_worker(job: Job) -> None:
    for child in psutil.Process(job.processes[1].pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "rewards.py" in " ".join(child.cmdline()):
                child.kill()
                return


FAULTS: dict[str, Callable[[Job], None]] = {
    "searcher killed": kill_rank(1),
    "trainer killed": kill_rank(0),
    "told to stop": lambda job: job.signal(0, signal.SIGTERM),
    "searcher stopped for 4 s": stop_for_a_while,
    "reward worker killed": kill_reward_worker,
    "engine killed": lambda job: harm_engine(job, psutil.Process.kill),
    "engine hung": lambda job: harm_engine(job, psutil.Process.suspend),
}


# --------------------------------------------------------------------------- figures


def growth_per_hour(samples: Sequence[Sample], role: str, since: float) -> float | None:
    """Slope of a role's memory (MB an hour), by least squares over the samples since then."""
    mine = [s for s in samples if s.role == role and s.seconds >= since]
    if len(mine) < 10:
        return None
    slope = np.polyfit([s.seconds for s in mine], [s.megabytes for s in mine], 1)[0]
    return round(float(slope) * 3600, 1)


def accounts(run: Path) -> dict[str, int]:
    """Sums over the life of the run, from its last checkpoint."""
    folder = run / "checkpoints" / f"step-{newest_step(run)}" / "state"
    info = json.loads((folder / "trainer-0.json").read_text())
    buffer = info["buffer"]
    generated, received = info["shared"]["arrivals"]["generated"], buffer["num_received"]
    names = ("duplicates", "evicted", "expired", "dropped", "used_up")
    dropped = sum(buffer[f"num_{name}"] for name in names)
    from safetensors import safe_open

    with safe_open(folder / "trainer-0.safetensors", "np") as file:
        stored = len(file.get_tensor("buffer/arrival"))
        completed = int(file.get_tensor("completed").sum())
    return {
        "generated": generated,
        "received": received,
        "dropped_by_policy": dropped,
        "stored": stored,
        "lost": abs(generated - received)
        + abs(received - dropped - stored)
        + abs(completed - received),
    }


def draw(samples: Sequence[Sample], faults: Sequence[tuple[float, str]], path: Path) -> None:
    """Memory, open files and threads by role, with the moments of the faults."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    for ax, (name, label) in zip(
        axes,
        (("megabytes", "resident memory, MB"), ("files", "open files"), ("threads", "threads")),
        strict=True,
    ):
        for role, color in (("trainer", "C0"), ("searcher", "C2"), ("engine", "C1")):
            mine = [s for s in samples if s.role == role]
            minutes = [s.seconds / 60 for s in mine]
            ax.plot(minutes, [getattr(s, name) for s in mine], ".", ms=2, color=color, label=role)
        for seconds, _ in faults:
            ax.axvline(seconds / 60, color="gray", lw=0.6, alpha=0.6)
        ax.set_ylabel(label)
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
    axes[0].legend(loc="upper left", fontsize=8)
    axes[0].set_title("Soak: gray lines are faults")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--engine", choices=["vllm", "hf"], default="vllm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of soak.png")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, options.engine, warm.Server(), np.random.default_rng(options.seed))
    possible = [n for n in FAULTS if options.engine == "vllm" or not n.startswith("engine")]
    total_s, moments = options.minutes * 60, []
    try:
        soak.start()
        soak.wait_for_training()
        while soak.seconds < total_s * 2 / 3:
            if soak.wait(min(float(soak.rng.exponential(MEAN_S)), 2 * MEAN_S)):
                name = possible[int(soak.rng.integers(len(possible)))]
                soak.faults[name] += 1
                moments.append((soak.seconds, name))
                say(f"step {last_step(soak.run)}: {name}")
                FAULTS[name](soak.job)
                soak.wait(20.0)
            if not all(process.is_alive() for process in soak.job.processes):
                codes = soak.job.end(timeout_s=120)
                say(f"the job has ended ({codes}): it goes on from step {newest_step(soak.run)}")
                soak.start()
                soak.wait_for_training()
        say("calm from here on")
        soak.wait(60.0)
        calm = soak.seconds
        soak.wait(max(60.0, total_s - soak.seconds))
        (soak.run / "stop").touch()
        soak.job.end(timeout_s=120)
        job = soak.start(f"trainer.steps={newest_step(soak.run) + 10}")
        assert job.end(timeout_s=300) == [0, 0], job.output()
        last = {s.role: s for s in soak.samples}
        result = {
            "minutes": round(soak.seconds / 60, 1),
            "steps": last_step(soak.run),
            **accounts(soak.run),
            "faults": dict(soak.faults),
            "restarts": soak.starts - 1,
            "memory_growth_mb_per_hour": {
                role: growth_per_hour(soak.samples, role, calm) for role in last
            },
            "memory_mb": {role: round(s.megabytes) for role, s in last.items()},
            "open_files": {role: s.files for role, s in last.items()},
            "threads": {role: s.threads for role, s in last.items()},
        }
        options.out.mkdir(parents=True, exist_ok=True)
        draw(soak.samples, moments, options.out / "soak.png")
        print(json.dumps(result))
    except BaseException:
        say(f"see the logs in {folder}")
        raise
    else:
        shutil.rmtree(folder)
    finally:
        if soak.job is not None:
            soak.job.kill_all()


if __name__ == "__main__":
    main()
