"""Is asynchrony faster to the same accuracy? Arithmetic, real engine, one core a role.

    python bench/async_vs_sync.py                    3 seeds; the same command goes on after a stop
    python bench/async_vs_sync.py --plan             what would run
    python bench/async_vs_sync.py --seeds 0 --steps 20 --gain 0.01 eval.every=5

Every run is `torchrun --nproc_per_node=2 train.py` with task=arithmetic, model=tiny and vLLM: the
trainer on one core, the searcher with its engine on another (the first two that may be used). Runs
of both modes take turns, seed by seed. A run that has ended is not repeated while its command is
the same: a digest of it is part of the name of its folder in --folder.

Measured is the time to a gain: seconds from the beginning of the first step until held-out greedy
accuracy first reaches that before training plus 0.25, on a line between two evaluations. An
accuracy belongs to the end of the step that made its version. In both modes neither starting
engines nor generating the first batch counts. Evaluating is the searcher's work; in lock-step the
trainer waits for it, and that time is taken off its clock. Asynchronous runs get nothing taken off.

    same_objective_ratio   sync over async, both with the first of SAME, the same settings but those
                           that belong to the mode (SETTINGS): the median of the seeds' ratios
    best_objective_ratio   the same with each mode's fastest objective of BEST, by the median of the
                           seeds; a run that does not reach the gain is the slowest
    trainer_idle, searcher_idle   shares of the wall-clock of the asynchronous runs of the first of
                           SAME in which each side waited, median

A seed counts in a ratio if both of its runs reached the gain. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from experiments.staleness import explain_log, markdown, wall_s_by_step, write  # noqa: E402
from metrics import read_metrics  # noqa: E402

# Overrides of train.py: those of both modes, then those of one.
SETTINGS: dict[str, dict[str, Any]] = {
    "both": {
        "task": "arithmetic",
        "model": "tiny",
        "engine": "vllm",
        "trainer.batch_size": 512,
        "eval.every": 20,
        # Momentum makes an optimizer overshoot on gradients of samples a few steps old; lock-step
        # learns as fast with less of it.
        "trainer.adam_betas": "[0.5,0.99]",
        # Never; but trainers then hold the reference: both roles have about the same to do.
        "trainer.reference_reset_every": 1_000_000,
        "buffer.initial_trajectories": 512,
        "run.rollouts_every": 0,
    },
    "sync": {"trainer.steps": 140},
    "async": {
        "trainer.steps": 220,
        "buffer.recency_prob": 1.0,
        "buffer.max_staleness": 4,
        "searcher.prompts_in_flight": 32,
        "searcher.score_every_s": 0.05,
        "engine.kv_after_update": "keep",  # the objective reads no behavior log-probs
    },
}
SAME = ("tb_vargrad",)  # objectives compared with themselves
BEST = {"sync": ("tb_vargrad", "rloo"), "async": ("tb_vargrad",)}  # each mode's candidates
GAIN = 0.25  # of held-out greedy accuracy
MODES = ("sync", "async")
NUM_RANKS = 2
OWN_KEYS = ("mode", "loss", "seed", "run.root", "run.name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    mode: str
    objective: str
    seed: int
    overrides: tuple[str, ...]  # key=value, without where the run is written

    @property
    def name(self) -> str:
        """Of its folder, with a digest of the settings."""
        digest = hashlib.sha256("\n".join(self.overrides).encode()).hexdigest()[:8]
        return f"{self.mode}-{self.objective}-seed{self.seed}-{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a run."""

    run: Run
    accuracy_before: float
    accuracy_after: float
    time_s: float | None  # to the gain; None: not reached
    step: float | None  # at which it was reached, between two evaluations
    wall_s: float
    steps: int
    trainer_idle: float
    searcher_idle: float
    staleness: float | None


# --------------------------------------------------------------------------- plan


def plan(
    seeds: Sequence[int],
    *,
    steps: int | None = None,
    extra: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS,
) -> list[Run]:
    """All runs, seed by seed, the modes taking turns.

    Args:
        steps: optimizer steps of every run; None: as in `settings`.
        extra: overrides of every run, which come last.
    """
    others = [o for o in dict.fromkeys([*BEST["sync"], *BEST["async"]]) if o not in SAME]
    runs = []
    for objectives in (SAME, others):  # what the first ratio needs comes first
        for number, seed in enumerate(seeds):
            for objective in objectives:
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    if objective not in (*SAME, *BEST[mode]):
                        continue
                    values = {**settings["both"], **settings[mode]}
                    if steps is not None:
                        values["trainer.steps"] = steps
                    for override in extra:
                        key, _, value = override.partition("=")
                        values[key] = value
                    values |= {"mode": mode, "loss": objective, "seed": seed}
                    overrides = tuple(f"{key}={value}" for key, value in values.items())
                    runs.append(Run(mode=mode, objective=objective, seed=seed, overrides=overrides))
    return runs


# --------------------------------------------------------------------------- one run


def perform(run: Run, folder: Path, *, cores: Sequence[int], timeout_s: float) -> None:
    """Runs it, over what an earlier try that did not end may have left; shows evaluations.

    Raises:
        RuntimeError: it failed, or took over `timeout_s`.
    """
    shutil.rmtree(folder / run.name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{run.name}.log"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={NUM_RANKS}"),
        # a rendezvous of its own on a free port
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *(str(ROOT / "train.py"), *run.overrides),
        *(f"run.root={json.dumps(str(folder))}", f"run.name={run.name}"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        if cores:  # at once: what it starts inherits them
            os.sched_setaffinity(process.pid, cores)
        follow(process, run, folder, timeout_s=timeout_s)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torchrun ends its ranks, they end their engines
            process.wait()
    shutil.rmtree(folder / run.name / "checkpoints", ignore_errors=True)
    if process.returncode != 0 or not (folder / run.name / "summary.json").is_file():
        reason = explain_log(log.read_text(errors="replace"))
        raise RuntimeError(f"{run.name} failed (exit code {process.returncode}): {reason}\n({log})")


def follow(process: subprocess.Popen, run: Run, folder: Path, *, timeout_s: float) -> None:
    """Waits for its end; prints each evaluation as it comes."""
    deadline = time.monotonic() + timeout_s
    seen = 0
    while True:
        ended = process.poll() is not None
        evaluations = [r for r in read_metrics(folder / run.name) if "eval/accuracy" in r]
        for record in evaluations[seen:]:
            print(f"    step {record['step']}: {record['eval/accuracy']:.3f}", flush=True)
        seen = len(evaluations)
        if ended:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{run.name}: not finished within {timeout_s:.0f} s")
        time.sleep(1.0)


def read_result(run: Run, folder: Path, gain: float) -> Result | None:
    """What an ended run left; None: there is none."""
    try:
        summary = json.loads((folder / run.name / "summary.json").read_text())
    except FileNotFoundError:
        return None
    clock = wall_s_by_step(folder / run.name)
    accuracy = {int(step): value for step, value in summary["accuracy_by_step"].items()}
    if run.mode == "sync":
        clock = without_evaluations(clock, evaluation_s(folder / run.name))
    step, time_s = reach(accuracy, clock, accuracy[0] + gain)
    return Result(
        run=run,
        accuracy_before=accuracy[0],
        accuracy_after=summary["accuracy_after"],
        time_s=time_s,
        step=step,
        wall_s=summary["wall_s"],
        steps=summary["steps"],
        trainer_idle=summary["trainer_idle_fraction"],
        searcher_idle=summary["searcher_idle_fraction"],
        staleness=summary["staleness_mean"],
    )


def evaluation_s(run_dir: Path) -> dict[int, float]:
    """Seconds that each version's evaluation took."""
    return {
        int(r["eval/version"]): r["eval/seconds"]
        for r in read_metrics(run_dir)
        if r.get("eval/seconds") is not None
    }


def without_evaluations(
    clock: Mapping[int, float], seconds: Mapping[int, float]
) -> dict[int, float]:
    """The clock of a lock-step run that did not wait for evaluations.

    That of version v delays all steps after v; version 0's comes before the first step.

    >>> without_evaluations({0: 0.0, 1: 2.0, 2: 9.0}, {0: 3.0, 1: 5.0, 2: 4.0})
    {0: 0.0, 1: 2.0, 2: 4.0}
    """
    return {
        step: at - sum(s for version, s in seconds.items() if 0 < version < step)
        for step, at in clock.items()
    }


def reach(
    accuracy: Mapping[int, float], clock: Mapping[int, float], target: float
) -> tuple[float | None, float | None]:
    """(step, seconds) at which accuracy first reaches `target`, linear between evaluations.

    >>> reach({0: 0.4, 10: 0.6, 20: 0.8}, {0: 0.0, 10: 5.0, 20: 9.0}, 0.7)
    (15.0, 7.0)
    >>> reach({0: 0.4, 10: 0.6}, {0: 0.0, 10: 5.0}, 0.7)
    (None, None)
    """
    steps = sorted(accuracy.keys() & clock.keys())
    for before, after in zip(steps, steps[1:], strict=False):
        low, high = accuracy[before], accuracy[after]
        if high >= target > low:
            share = (target - low) / (high - low)
            step = before + share * (after - before)
            time_s = clock[before] + share * (clock[after] - clock[before])
            return round(step, 3), round(time_s, 3)
    return None, None


# --------------------------------------------------------------------------- figures


def times(results: Sequence[Result], mode: str, objective: str) -> dict[int, float]:
    """Seconds to the gain by seed; infinite where it was not reached."""
    return {
        r.run.seed: math.inf if r.time_s is None else r.time_s
        for r in results
        if (r.run.mode, r.run.objective) == (mode, objective)
    }


def ratio(slow: Mapping[int, float], fast: Mapping[int, float]) -> float | None:
    """Median of the seeds' ratios; None: no seed has both.

    >>> ratio({0: 4.0, 1: 9.0, 2: math.inf}, {0: 2.0, 1: 3.0, 2: 1.0})
    2.5
    """
    ratios = [
        slow[seed] / fast[seed]
        for seed in slow.keys() & fast.keys()
        if math.isfinite(slow[seed]) and math.isfinite(fast[seed]) and fast[seed] > 0
    ]
    return median(ratios) if ratios else None


def fastest(results: Sequence[Result], mode: str) -> str | None:
    """The candidate with the least median time; None: no run of any has ended."""
    known = {o: times(results, mode, o) for o in BEST[mode]}
    known = {objective: by_seed for objective, by_seed in known.items() if by_seed}
    return min(known, key=lambda o: median(known[o].values())) if known else None


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """The JSON object."""
    first = SAME[0]
    ours = [r for r in results if (r.run.mode, r.run.objective) == ("async", first)]
    best = {mode: fastest(results, mode) for mode in MODES}
    both = [times(results, mode, best[mode] or "") for mode in MODES]
    return {
        "same_objective_ratio": _rounded(
            ratio(times(results, "sync", first), times(results, "async", first))
        ),
        "best_objective_ratio": _rounded(ratio(both[0], both[1])),
        "trainer_idle": _rounded(median(r.trainer_idle for r in ours) if ours else None),
        "searcher_idle": _rounded(median(r.searcher_idle for r in ours) if ours else None),
        "objective": first,
        "best_objectives": best,
        "same_objective_ratios": {
            objective: _rounded(
                ratio(times(results, "sync", objective), times(results, "async", objective))
            )
            for objective in SAME
        },
        "runs": len(results),
        "not_reached": sum(r.time_s is None for r in results),
        "seeds": sorted({r.run.seed for r in results}),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def table(results: Sequence[Result], gain: float) -> str:
    """Markdown: a line a run."""
    header = [
        "mode",
        "objective",
        "seed",
        "before",
        "after",
        f"s to +{gain:g}",
        "steps to it",
        "s of training",
        "steps",
        "trainer idle",
        "searcher idle",
        "staleness",
    ]
    rows = [
        [
            r.run.mode,
            r.run.objective,
            str(r.run.seed),
            f"{r.accuracy_before:.3f}",
            f"{r.accuracy_after:.3f}",
            "not reached" if r.time_s is None else f"{r.time_s:.1f}",
            "–" if r.step is None else f"{r.step:.0f}",
            f"{r.wall_s:.0f}",
            str(r.steps),
            f"{r.trainer_idle:.1%}",
            f"{r.searcher_idle:.1%}",
            "–" if r.staleness is None else f"{r.staleness:.1f}",
        ]
        for r in sorted(results, key=lambda r: (r.run.objective, r.run.seed, r.run.mode))
    ]
    return markdown(header, rows)


# --------------------------------------------------------------------------- entry


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: an option or override that can't be used.
    """
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        epilog="key=value overrides of train.py go to every run",
    )
    add = parser.add_argument
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, help="optimizer steps of every run (default: as in SETTINGS)")
    add("--gain", type=float, default=GAIN, help="of held-out accuracy")
    add("--folder", type=Path, default=Path("runs/async_vs_sync"), help="of the run folders")
    add("--timeout-s", type=float, default=3600.0, help="of a run")
    add("--plan", action="store_true", help="print the commands only")
    overrides = [a for a in arguments if re.match(r"[A-Za-z_][\w./]*=", a)]
    options = parser.parse_args([a for a in arguments if a not in overrides])
    for override in overrides:
        if override.partition("=")[0] in OWN_KEYS:
            parser.error(f"{override.partition('=')[0]} is set by the bench")
    options.overrides = overrides
    return options


def main(arguments: Sequence[str]) -> dict[str, Any]:
    options = parse(arguments)
    folder = options.folder.resolve()
    runs = plan(options.seeds, steps=options.steps, extra=options.overrides)
    results = []
    if options.plan:
        for run in runs:
            done = "ended" if read_result(run, folder, options.gain) else "to run"
            print(f"{run.name} ({done}): {' '.join(run.overrides)}")
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = available[:NUM_RANKS]
    for number, run in enumerate(runs, start=1):
        result = read_result(run, folder, options.gain)
        if result is None and not options.plan:
            print(f"[{number}/{len(runs)}] {run.name}", flush=True)
            perform(run, folder, cores=cores, timeout_s=options.timeout_s)
            result = read_result(run, folder, options.gain)
        if result is not None:
            results.append(result)
            reached = "not reached" if result.time_s is None else f"{result.time_s:.1f} s"
            print(f"[{number}/{len(runs)}] {run.name}: {reached}", flush=True)
    text = table(results, options.gain)
    print(text, flush=True)
    if results:
        write(folder / "async_vs_sync.md", text + "\n")
    return {**figures(results), "gain": options.gain}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run under way ends too
    try:
        print(json.dumps(main(sys.argv[1:])))
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        sys.exit(130)
