"""How much staleness each objective bears: the arithmetic task on the real asynchronous loop.

    python experiments/staleness.py --plan        # what would run, and for how long
    python experiments/staleness.py               # run it; the same command goes on after a stop
    python experiments/staleness.py --objectives tb_vargrad rloo --k 1 64 trainer.max_grad_norm=2

In order: a sweep of learning rates, equal for every objective, at one setting (k = 4, m = 0.5);
then the grid of objective x k (steps between two publications of the weights) x m (share of the
prompts drawn from what the last publication brought) x seed, each at its objective's best rate.
A run is `train.run` as torchrun would start it, 1 trainer and 1 searcher over gloo, except that its
two processes are forked from a server that has imported everything. After every run results.json,
staleness.md and staleness.png are written anew. A run that ended (or diverged: that is a result) is
not repeated while its resolved config is the same: a digest of it is part of the run's name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.warm import NUM_RANKS, Server, UserError  # noqa: E402
from metrics import read_metrics  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OBJECTIVES = ("tb_vargrad", "kimi", "rloo", "proximal_rloo", "grpo", "dr_grpo", "dpo")
FOCUS = "tb_vargrad"  # whose place among the others is spelled out
SWEEP_K, SWEEP_M, SWEEP_SEED = 4, 0.5, 100
MAX_FAILURES = 3  # in a row, before the study gives up: such runs don't fail by chance
# Without a finished run to go by: starting, and training one response, on one core a rank.
GUESS_START_S, GUESS_RESPONSE_S = {"hf": 6.0, "vllm": 50.0}, 0.001

# How the log of a policy that blew up reads: in the trainer, in sampling, in the probe.
DIVERGED = re.compile(r"FloatingPointError|probability tensor contains|differ by (?:nan|inf)")
OWN_KEYS = {  # set by the study: naming one as an override would make the tables lie
    "loss": "--objectives",
    "engine": "--engine",
    "seed": "--seeds",
    "trainer.publish_every": "--k",
    "buffer.recency_prob": "--m",
    "trainer.lr.peak": "--learning-rates",
    "trainer.steps": "--steps",
    "trainer.batch_size": "--batch-size",
    "eval.every": "--eval-every",
    "eval.num_problems": "--num-problems",
    "searcher.prompts_in_flight": "--prompts-in-flight",
    "run.root": "--runs",
    "run.name": "--runs",
    "mode": "no option: the study is of asynchrony",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all runs share, and the grid."""

    objectives: tuple[str, ...] = OBJECTIVES
    ks: tuple[int, ...] = (1, 4, 16, 64)
    ms: tuple[float, ...] = (1.0, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)
    learning_rates: tuple[float, ...] = (5e-5, 1e-4, 2e-4)
    steps: int = 256
    batch_size: int = 128  # responses a step
    eval_every: int = 64  # steps; held-out accuracy is measured where that is a publication
    num_problems: int = 256
    prompts_in_flight: int = 16  # so few that at k = 1 they are but a few steps old
    engine: str = "hf"
    overrides: tuple[str, ...] = ()
    runs: Path = Path("runs/staleness")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    objective: str
    k: int  # steps between two publications
    m: float  # buffer.recency_prob
    learning_rate: float  # peak
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.objective} k={self.k} m={self.m:g} "
            f"learning rate {self.learning_rate:g} seed {self.seed}"
        )


@dataclass(slots=True, kw_only=True)
class Result:
    """What came of a run."""

    run: Run
    name: str  # of the run's folder
    status: str  # finished | diverged | failed
    reason: str = ""  # why it did not finish
    accuracy: float | None = None  # held-out, of the last version that was evaluated
    accuracy_by_step: dict[int, float] = field(default_factory=dict)
    wall_s_by_step: dict[int, float] = field(default_factory=dict)  # since the first step began
    staleness_mean: float | None = None  # optimizer steps
    wall_s: float | None = None  # of training
    total_s: float | None = None  # of the run, from the fork of its processes to their end
    trainer_idle_fraction: float | None = None
    searcher_idle_fraction: float | None = None
    trajectories: int | None = None  # generated
    commit: str | None = None

    @property
    def counts(self) -> bool:
        """Whether there is an accuracy to report: a diverged run's is the last it had."""
        return self.status in ("finished", "diverged") and self.accuracy is not None


# --------------------------------------------------------------------------- plan


def sweep_runs(study: Study) -> list[Run]:
    """The runs that choose a learning rate; none where there is one rate to choose from."""
    if len(study.learning_rates) == 1:
        return []
    return [
        Run(objective=objective, k=SWEEP_K, m=SWEEP_M, learning_rate=rate, seed=SWEEP_SEED)
        for rate in study.learning_rates
        for objective in study.objectives
    ]


def grid_runs(study: Study, rates: Mapping[str, float]) -> list[Run]:
    """The grid, seed by seed, so that a study that is stopped has all settings of some seeds."""
    return [
        Run(objective=objective, k=k, m=m, learning_rate=rates[objective], seed=seed)
        for seed in study.seeds
        for m in study.ms
        for k in study.ks
        for objective in study.objectives
        if objective in rates
    ]


def choose_rates(study: Study, results: Sequence[Result]) -> dict[str, float]:
    """The best learning rate by objective: of equal ones the smaller, a diverged run the last.

    An objective none of whose runs has an accuracy is left out.
    """
    if len(study.learning_rates) == 1:
        return dict.fromkeys(study.objectives, study.learning_rates[0])
    rates = {}
    for objective in study.objectives:
        tried = [r for r in results if r.run.objective == objective and r.counts]
        if tried:
            best = max(
                tried,
                key=lambda r: (r.status == "finished", r.accuracy or 0.0, -r.run.learning_rate),
            )
            rates[objective] = best.run.learning_rate
    return rates


def run_overrides(study: Study, run: Run, name: str = "unnamed") -> list[str]:
    """The command line of train.py for this run."""
    return [
        "task=arithmetic",
        "model=tiny",
        f"engine={study.engine}",
        f"loss={run.objective}",
        "mode=async",
        f"seed={run.seed}",
        f"trainer.publish_every={run.k}",
        f"buffer.recency_prob={run.m}",
        f"trainer.lr.peak={run.learning_rate}",
        f"trainer.steps={study.steps}",
        f"trainer.batch_size={study.batch_size}",
        f"eval.every={study.eval_every}",
        f"eval.num_problems={study.num_problems}",
        f"searcher.prompts_in_flight={study.prompts_in_flight}",
        "run.rollouts_every=0",
        f"run.root={json.dumps(str(study.runs.resolve()))}",
        f"run.name={name}",
        *study.overrides,
    ]


def run_name(run: Run, resolved: Mapping[str, Any]) -> str:
    """The run's folder name, with a digest of its resolved config but for where it is written."""
    settings = {key: value for key, value in resolved.items() if key != "run"}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    rate = f"{run.learning_rate:.3g}"
    return f"{run.objective}-k{run.k}-m{run.m:g}-lr{rate}-seed{run.seed}-{digest}"


# --------------------------------------------------------------------------- one run


def perform(server: Server, study: Study, run: Run, name: str, *, timeout_s: float) -> Result:
    """Runs it, over what an earlier try that did not end may have left."""
    folder = study.runs / name
    study.runs.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    logs = [study.runs / f"{name}.rank{rank}.log" for rank in range(NUM_RANKS)]
    started = time.monotonic()
    reason = server.execute(run_overrides(study, run, name), logs, timeout_s=timeout_s)
    total_s = time.monotonic() - started
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # hundreds of policies
    if reason or not (folder / "summary.json").is_file():
        text = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
        status = "diverged" if DIVERGED.search(text) else "failed"
        reason = explain_log(text) or reason or "no summary.json"
        if status == "failed":
            reason = f"{reason} (see {logs[0].name} and {logs[1].name} in {study.runs})"
    else:
        status = "finished"
    outcome = {"status": status, "reason": reason, "total_s": round(total_s, 2)}
    write(study.runs / f"{name}.outcome.json", json.dumps(outcome, indent=2) + "\n")
    result = read_result(study, run, name)
    assert result is not None
    return result


def explain_log(text: str) -> str:
    """The one line of the ranks' output that says why the job ended; "" if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for mark in ("the job ends: ", "error: "):
        for line in lines:
            if mark in line:
                return line.partition(mark)[2][:300]
    return lines[-1][:300] if lines else ""


def read_result(study: Study, run: Run, name: str) -> Result | None:
    """What an earlier run left; None where there is none, or one that was cut off."""
    folder = study.runs / name
    outcome = _read_json(study.runs / f"{name}.outcome.json") or {}
    summary = _read_json(folder / "summary.json")
    if summary is None and not outcome:
        return None
    commit = (_read_json(folder / "origin.json") or {}).get("commit")
    clock = wall_s_by_step(folder)
    if summary is None:
        accuracy = {
            int(record["eval/version"]): record["eval/accuracy"]
            for record in (read_metrics(folder) if clock else [])
            if record.get("eval/accuracy") is not None
        }
        return Result(
            run=run,
            name=name,
            status=outcome["status"],
            reason=outcome["reason"],
            accuracy=accuracy[max(accuracy)] if accuracy else None,
            accuracy_by_step=dict(sorted(accuracy.items())),
            wall_s_by_step={step: clock[step] for step in sorted(accuracy) if step in clock},
            total_s=outcome.get("total_s"),
            commit=commit,
        )
    by_step = {int(step): value for step, value in summary["accuracy_by_step"].items()}
    by_step = dict(sorted(by_step.items()))
    return Result(
        run=run,
        name=name,
        status="finished",
        accuracy=summary["accuracy_after"],
        accuracy_by_step=by_step,
        wall_s_by_step={step: clock[step] for step in by_step if step in clock},
        staleness_mean=summary["staleness_mean"],
        wall_s=summary["wall_s"],
        total_s=outcome.get("total_s"),
        trainer_idle_fraction=summary["trainer_idle_fraction"],
        searcher_idle_fraction=summary["searcher_idle_fraction"],
        trajectories=summary["trajectories"],
        commit=commit,
    )


def wall_s_by_step(folder: Path) -> dict[int, float]:
    """Seconds from the start of the first step to the end of each; step 0 is 0. Empty: no step.

    A version's accuracy is measured while training goes on; its time is that of its last step.
    """
    try:
        records = [r for r in read_metrics(folder) if r.get("time/step_s") is not None]
    except OSError:
        return {}
    if not records:
        return {}
    start = records[0]["wall_s"] - records[0]["time/step_s"]
    return {0: 0.0, **{int(r["step"]): round(r["wall_s"] - start, 3) for r in records}}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None


def write(path: Path, text: str) -> None:
    """Beside and then renamed: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(text, "utf-8")
    os.replace(beside, path)


# --------------------------------------------------------------------------- tables


@dataclass(slots=True, kw_only=True)
class Cell:
    """The seeds of one setting."""

    by_seed: dict[int, float]  # accuracy
    num_diverged: int
    num_failed: int
    staleness: float | None  # mean over the seeds, optimizer steps

    @property
    def mean(self) -> float:
        return fmean(self.by_seed.values())

    def __str__(self) -> str:
        if not self.by_seed:
            return "failed" if self.num_failed else "–"
        text = spread(list(self.by_seed.values()))
        for count, word in ((self.num_diverged, "diverged"), (self.num_failed, "failed")):
            text += f", {count} {word}" if count else ""
        return text


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Mean, least and greatest of the seeds; the number itself if there is one.

    >>> spread([0.5, 0.75, 1.0]), spread([0.5])
    ('0.750 (0.500 to 1.000)', '0.500')
    """
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def cells(results: Sequence[Result]) -> dict[tuple[str, float, int], Cell]:
    """Results of the grid by (objective, m, k)."""
    grouped: dict[tuple[str, float, int], list[Result]] = {}
    for result in results:
        grouped.setdefault((result.run.objective, result.run.m, result.run.k), []).append(result)
    table = {}
    for key, group in grouped.items():
        stale = [r.staleness_mean for r in group if r.staleness_mean is not None]
        table[key] = Cell(
            by_seed={r.run.seed: r.accuracy for r in group if r.counts and r.accuracy is not None},
            num_diverged=sum(r.status == "diverged" for r in group),
            num_failed=sum(r.status == "failed" for r in group),
            staleness=fmean(stale) if stale else None,
        )
    return table


def losses_of(
    study: Study, table: Mapping[tuple[str, float, int], Cell], m: float
) -> dict[str, list[float]]:
    """Accuracy lost from the least to the greatest k, by objective: one number a seed."""
    first, last = min(study.ks), max(study.ks)
    lost = {}
    for objective in study.objectives:
        fresh, stale = table.get((objective, m, first)), table.get((objective, m, last))
        if fresh and stale:
            seeds = sorted(fresh.by_seed.keys() & stale.by_seed.keys())
            if seeds:
                lost[objective] = [fresh.by_seed[s] - stale.by_seed[s] for s in seeds]
    return lost


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [header, *rows]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([text[0], f"|{'---|' * len(header)}", *text[1:]])


def order(values: Mapping[str, Sequence[float]]) -> str:
    """Objectives from the greatest mean down, with what the seeds say of neighbours.

    `a > b`: every seed of a lies above every seed of b, and both have several; `a ~ b`: not so.

    >>> order({"b": [0.4, 0.5], "a": [0.6, 0.7], "c": [0.45, 0.5]})
    'a > c ~ b'
    """
    names = sorted(values, key=lambda name: (-fmean(values[name]), name))
    text = "".join(
        f"{name} {'>' if clearly_above(values[name], values[after]) else '~'} "
        for name, after in zip(names, names[1:], strict=False)
    )
    return text + names[-1] if names else ""


def clearly_above(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether all of several seeds lie above all of several others."""
    return len(values) > 1 and len(others) > 1 and min(values) > max(others)


def ranking(study: Study, results: Sequence[Result]) -> str:
    """In words: the order of the objectives at each setting, and what of it the seeds support."""
    table = cells(results)
    lines = []
    for m in study.ms:
        for k in sorted(study.ks):
            values = {
                objective: list(cell.by_seed.values())
                for objective in study.objectives
                if (cell := table.get((objective, m, k))) and cell.by_seed
            }
            if len(values) > 1:
                place = _place(values, "by mean accuracy", greater_is_better=True)
                lines.append(f"- m = {m:g}, k = {k}: {order(values)}.{place}")
        lost = losses_of(study, table, m)
        if len(lost) > 1 and min(study.ks) < max(study.ks):
            place = _place(lost, "by least accuracy lost", greater_is_better=False)
            lines.append(
                f"- m = {m:g}, accuracy lost from k = {min(study.ks)} to {max(study.ks)}, most "
                f"first: {order(lost)}.{place}"
            )
    return "\n".join(lines)


def _place(values: Mapping[str, Sequence[float]], what: str, *, greater_is_better: bool) -> str:
    """The place of the objective that the study is about."""
    if FOCUS not in values:
        return ""
    sign = 1 if greater_is_better else -1
    mine = fmean(values[FOCUS]) * sign
    place = 1 + sum(fmean(value) * sign > mine for value in values.values())
    above = [o for o in values if clearly_above(values[FOCUS], values[o])]
    below = [o for o in values if clearly_above(values[o], values[FOCUS])]
    better, worse = (above, below) if greater_is_better else (below, above)
    text = f" {FOCUS} is number {place} of {len(values)} {what}"
    text += f"; better in every seed than {', '.join(better)}" if better else ""
    text += f"; worse in every seed than {', '.join(worse)}" if worse else ""
    return text + "."


def report(
    study: Study,
    sweep: Sequence[Result],
    rates: Mapping[str, float],
    grid: Sequence[Result],
    *,
    command: str,
    machine: str,
) -> str:
    """staleness.md."""
    table, ks = cells(grid), sorted(study.ks)
    settings = [(objective, m) for m in study.ms for objective in study.objectives]
    header = ["objective", "m", *(f"k = {k}" for k in ks)]
    accuracy, stale = [], []
    for objective, m in settings:
        row = [table.get((objective, m, k)) for k in ks]
        accuracy.append([objective, f"{m:g}", *(str(cell) if cell else "–" for cell in row)])
        stale.append(
            [objective, f"{m:g}"]
            + [f"{c.staleness:.1f}" if c and c.staleness is not None else "–" for c in row]
        )
    lost = []
    for m in study.ms:
        for objective, values in losses_of(study, table, m).items():
            fresh, worst = (table[(objective, m, k)].mean for k in (ks[0], ks[-1]))
            lost.append(
                [objective, f"{m:g}", f"{fresh:.3f}", f"{worst:.3f}", spread(values, "+.3f")]
            )
    every = [*sweep, *grid]
    planned = len(study.objectives) * len(study.ms) * len(study.ks) * len(study.seeds)
    before = sorted({r.accuracy_by_step[0] for r in every if 0 in r.accuracy_by_step})
    error = math.sqrt(0.25 / study.num_problems)
    notes = [
        f"Command: `{command}`",
        f"Machine: {machine}; 1 trainer and 1 searcher, engine {study.engine}.",
        f"Settings: {study.steps} steps of {study.batch_size} responses, seeds "
        f"{', '.join(map(str, study.seeds))}, {study.num_problems} held-out problems, "
        f"{study.prompts_in_flight} prompts in flight"
        + (f", overrides `{' '.join(study.overrides)}`." if study.overrides else "."),
        f"Runs of the grid: {sum(r.status == 'finished' for r in grid)} finished, "
        f"{sum(r.status == 'diverged' for r in grid)} diverged, "
        f"{sum(r.status == 'failed' for r in grid)} failed, "
        f"{planned - len(grid)} of {planned} not run.",
        f"Commits: {', '.join(sorted({r.commit for r in every if r.commit})) or 'unknown'}.",
    ]
    if before:
        shown = " to ".join(f"{value:.3f}" for value in dict.fromkeys((before[0], before[-1])))
        notes.append(f"Held-out accuracy before training: {shown}.")
    sections = [
        "# Staleness by objective",
        "\n\n".join(notes),
        f"## Final held-out accuracy\n\nMean over seeds (least to greatest). k: steps between two "
        f"publications of the weights; m: share of prompts drawn from what arrived since the last "
        f"one. The problems alone give one accuracy a standard error of up to {error:.3f}. A "
        f"diverged run counts with the last accuracy that it had.\n\n"
        f"{markdown(header, accuracy)}",
        f"## Staleness measured\n\nMean age of the responses trained on, optimizer steps.\n\n"
        f"{markdown(header, stale)}",
    ]
    if len(ks) > 1:
        header = ["objective", "m", f"k = {ks[0]}", f"k = {ks[-1]}", "lost"]
        sections.append(
            f"## Accuracy lost from k = {ks[0]} to k = {ks[-1]}\n\nSeed by seed, then mean (least "
            f"to greatest).\n\n{markdown(header, lost)}"
        )
    n = len(study.seeds)
    sections.append(
        "## Order of the objectives\n\n`a > b`: every seed of a lies above every seed of b (by "
        f"chance alone, between equal objectives, once in {math.comb(2 * n, n)} with {n} seeds); "
        f"`a ~ b`: not so.\n\n{ranking(study, grid) or 'Nothing yet.'}"
    )
    sections.append(_sweep_section(study, sweep, rates))
    failures = [r for r in every if r.status != "finished"]
    if failures:
        lines = [f"- {r.run}: {r.status}, {r.reason}" for r in failures]
        sections.append("## Runs that did not finish\n\n" + "\n".join(lines))
    return "\n\n".join(sections) + "\n"


def _sweep_section(study: Study, sweep: Sequence[Result], rates: Mapping[str, float]) -> str:
    title = "## Learning rates\n\n"
    if len(study.learning_rates) == 1:
        return f"{title}{study.learning_rates[0]:g} for every objective; there was no sweep."
    tried = {(r.run.objective, r.run.learning_rate): r for r in sweep}
    rows = []
    for objective in study.objectives:
        row = [objective]
        for rate in study.learning_rates:
            result = tried.get((objective, rate))
            text = "–" if result is None else "failed"
            if result is not None and result.accuracy is not None and result.counts:
                text = f"{result.accuracy:.3f}"
                text += ", diverged" if result.status == "diverged" else ""
            row.append(f"**{text}**" if result and rates.get(objective) == rate else text)
        rows.append(row)
    return (
        f"{title}Final held-out accuracy at k = {SWEEP_K}, m = {SWEEP_M}, seed {SWEEP_SEED}; the "
        "best rate of each objective (of equal ones the smaller), in bold, is that of all its "
        "runs above.\n\n"
        + markdown(["objective", *(f"{rate:g}" for rate in study.learning_rates)], rows)
    )


# --------------------------------------------------------------------------- figure

_STYLES = {  # colours that also differ in lightness, and a mark each
    "tb_vargrad": ("#1f5fa8", "o"),
    "kimi": ("#2a9d58", "s"),
    "rloo": ("#d95f02", "^"),
    "proximal_rloo": ("#e6ab02", "v"),
    "grpo": ("#7b3fa0", "D"),
    "dr_grpo": ("#c2569a", "P"),
    "dpo": ("#6b6b6b", "X"),
}
_MORE = (("#17858f", "<"), ("#8c510a", ">"), ("#000000", "*"))


def draw(study: Study, grid: Sequence[Result], path: Path) -> None:
    """Draws staleness.png: a row an m; final accuracy against k, and learning at the greatest k.

    Bars and bands reach from the least to the greatest seed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FixedLocator, NullLocator

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(15, 4.4 * len(study.ms) + 0.6), dpi=110, layout=layout)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(study.ms), 3, squeeze=False, sharey=True)
    table, last = cells(grid), max(study.ks)
    before = [r.accuracy_by_step[0] for r in grid if 0 in r.accuracy_by_step]
    handles: dict[str, Any] = {}
    for row, m in zip(axes, study.ms, strict=True):
        final, steps, clock = row
        for number, objective in enumerate(study.objectives):
            color, marker = _STYLES.get(objective) or _MORE[number % len(_MORE)]
            style = {
                "color": color,
                "marker": marker,
                "markersize": 5.5,
                "linewidth": 2.4 if objective == FOCUS else 1.4,
                "zorder": 3 if objective == FOCUS else 2,
            }
            shift = 2 ** ((number - (len(study.objectives) - 1) / 2) * 0.07)  # bars side by side
            _draw_final(final, table, objective, m, sorted(study.ks), shift, style)
            runs = [
                r
                for r in grid
                if (r.run.objective, r.run.m, r.run.k) == (objective, m, last) and r.counts
            ]
            _draw_curve(steps, runs, style)
            _draw_curve(clock, runs, style, by_clock=True)
            handles[objective] = final.plot([], [], label=objective, **style)[0]
        for panel in row:
            if before:
                line = panel.axhline(fmean(before), color="#9a9a9a", linestyle=":", linewidth=1.3)
                handles["before training"] = line
            panel.grid(alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        final.set_xscale("log", base=2)
        final.xaxis.set_major_locator(FixedLocator(sorted(study.ks)))
        final.xaxis.set_minor_locator(NullLocator())
        final.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        final.set(
            title=f"m = {m:g}: after {study.steps} steps",
            xlabel="k, steps between two publications",
            ylabel="held-out accuracy",
        )
        steps.set(title=f"m = {m:g}, k = {last}", xlabel="optimizer steps")
        clock.set(title=f"m = {m:g}, k = {last}", xlabel="wall-clock of training, s")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=8, frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial.png")
    figure.savefig(beside)
    os.replace(beside, path)


def _draw_final(
    axes: Axes,
    table: Mapping[tuple[str, float, int], Cell],
    objective: str,
    m: float,
    ks: Sequence[int],
    shift: float,
    style: Mapping[str, Any],
) -> None:
    known = [(k, cell) for k in ks if (cell := table.get((objective, m, k))) and cell.by_seed]
    if known:
        means = [cell.mean for _, cell in known]
        axes.errorbar(
            [k * shift for k, _ in known],
            means,
            yerr=[
                [y - min(c.by_seed.values()) for y, (_, c) in zip(means, known, strict=True)],
                [max(c.by_seed.values()) - y for y, (_, c) in zip(means, known, strict=True)],
            ],
            elinewidth=1.0,
            capsize=2.5,
            **style,
        )


def _draw_curve(
    axes: Axes, runs: Sequence[Result], style: Mapping[str, Any], *, by_clock: bool = False
) -> None:
    """Accuracy at each evaluation, mean over the runs that have it; the clock's too."""
    points = []
    for step in sorted({step for run in runs for step in run.accuracy_by_step}):
        having = [r for r in runs if step in r.accuracy_by_step and step in r.wall_s_by_step]
        if having:
            values = [r.accuracy_by_step[step] for r in having]
            x = fmean(r.wall_s_by_step[step] for r in having) if by_clock else step
            points.append((x, fmean(values), min(values), max(values)))
    if points:
        along, mean, low, high = zip(*points, strict=True)
        axes.plot(along, mean, **style)
        axes.fill_between(along, low, high, color=style["color"], alpha=0.10, linewidth=0)


# --------------------------------------------------------------------------- study


@dataclass(slots=True, kw_only=True)
class Planned:
    """A run, its name, and what is known of it already."""

    run: Run
    name: str
    result: Result | None


def look_up(server: Server, study: Study, runs: Sequence[Run]) -> list[Planned]:
    """Names every run and finds those that need no repeating; a run that failed does.

    Raises:
        UserError: a config that is not valid.
    """
    if not runs:
        return []
    resolved = server.resolve([run_overrides(study, run) for run in runs])
    planned = []
    for run, tree in zip(runs, resolved, strict=True):
        name = run_name(run, tree)
        result = read_result(study, run, name)
        if result is not None and result.status == "failed":
            result = None
        planned.append(Planned(run=run, name=name, result=result))
    return planned


def estimate_s(study: Study, known: Sequence[Planned]) -> tuple[float, bool]:
    """Seconds of one run, and whether that was measured or is a guess."""
    took = [p.result.total_s for p in known if p.result and p.result.total_s]
    if took:
        return fmean(took), True
    guess = GUESS_START_S[study.engine] + GUESS_RESPONSE_S * study.steps * study.batch_size
    return guess, False


def describe_plan(study: Study, sweep: Sequence[Planned], grid: Sequence[Planned] | None) -> str:
    """The plan in words; `grid` is None while the sweep has not chosen the rates."""
    size = len(study.objectives) * len(study.ks) * len(study.ms) * len(study.seeds)
    known = [*sweep, *(grid or [])]
    left = sum(p.result is None for p in known) + (size if grid is None else 0)
    one_s, measured = estimate_s(study, known)
    return "\n".join(
        [
            f"learning rates: {len(sweep)} runs, {len(study.objectives)} objectives x "
            f"{', '.join(f'{rate:g}' for rate in study.learning_rates)} at k={SWEEP_K} "
            f"m={SWEEP_M} seed={SWEEP_SEED}"
            if sweep
            else f"learning rate {study.learning_rates[0]:g} for every objective",
            f"grid: {size} runs, objectives {', '.join(study.objectives)}; "
            f"k {', '.join(map(str, study.ks))}; m {', '.join(f'{m:g}' for m in study.ms)}; "
            f"seeds {', '.join(map(str, study.seeds))}",
            f"each: {study.steps} steps of {study.batch_size} responses, engine {study.engine}",
            f"left: {left} runs of {len(sweep) + size}, about {minutes(left * one_s)} at "
            f"{one_s:.0f} s a run ({'measured' if measured else 'a guess'})",
        ]
    )


def minutes(seconds: float) -> str:
    """
    >>> minutes(40), minutes(600), minutes(9000)
    ('40 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Stop(Exception):
    """The study ends before its end."""


class Driver:
    """Performs runs one after the other and writes what is known after each.

    Args:
        command: shown in the report.
        max_minutes: no run is begun that would probably end later than this.
    """

    def __init__(
        self,
        study: Study,
        server: Server,
        out: Path,
        *,
        command: str,
        max_minutes: float,
        run_timeout_s: float,
    ) -> None:
        self._study, self._server, self._out = study, server, out
        self._command, self._run_timeout_s = command, run_timeout_s
        self._limit_s = max_minutes * 60
        self._started = time.monotonic()
        self._took: list[float] = []
        self._failures = 0
        self.sweep: list[Planned] = []
        self.grid: list[Planned] = []
        self.rates: dict[str, float] = {}

    def run(self) -> None:
        """The whole study.

        Raises:
            Stop: time is up, or runs keep failing.
        """
        study = self._study
        with self._progress() as say:
            self.sweep = look_up(self._server, study, sweep_runs(study))
            # all of the grid is checked now, whatever the rates will be
            default = dict.fromkeys(study.objectives, study.learning_rates[0])
            self.grid = look_up(self._server, study, grid_runs(study, default))
            self._total = len(self.sweep) + len(self.grid)
            if self.sweep:
                for planned in self.grid:
                    planned.result = None
                self._perform(self.sweep, say)
            self.rates = choose_rates(study, [p.result for p in self.sweep if p.result])
            for objective in study.objectives:
                if objective not in self.rates:
                    say(f"{objective} is left out: no run of its sweep has an accuracy")
            self.grid = look_up(self._server, study, grid_runs(study, self.rates))
            self._total = len(self.sweep) + len(self.grid)
            self._perform(self.grid, say)
            self.write()

    def _perform(self, planned: Sequence[Planned], say: Any) -> None:
        for one in planned:
            if one.result is not None:
                continue
            left = sum(p.result is None for p in (*self.sweep, *self.grid))
            one_s = fmean(self._took) if self._took else 0.0
            elapsed = time.monotonic() - self._started
            if elapsed + one_s > self._limit_s:
                raise Stop(f"the time is up: {left} runs left; the same command goes on")
            say(None, now=str(one.run), eta_s=left * one_s)
            one.result = perform(
                self._server, self._study, one.run, one.name, timeout_s=self._run_timeout_s
            )
            self._took.append(one.result.total_s or 0.0)
            say(
                f"[{self._total - left + 1}/{self._total}] {one.run}: {outcome(one.result)}; "
                f"{minutes((left - 1) * fmean(self._took))} left"
            )
            self._failures = self._failures + 1 if one.result.status == "failed" else 0
            self.write()
            if self._failures == MAX_FAILURES:
                raise Stop(f"{MAX_FAILURES} runs in a row failed, the last: {one.result.reason}")

    def write(self) -> None:
        """results.json, staleness.md and staleness.png, of what is known now."""
        study, machine = self._study, describe_machine()
        sweep = [p.result for p in self.sweep if p.result]
        grid = [p.result for p in self.grid if p.result]
        if not sweep and not grid:
            return
        rates = self.rates or choose_rates(study, sweep)
        settings = asdict(study)
        settings.pop("runs")
        content = {
            "command": self._command,
            "machine": machine,
            "settings": settings,
            "learning_rates": rates,
            "sweep": [asdict(r) for r in sweep],
            "grid": [asdict(r) for r in grid],
        }
        write(self._out / "results.json", json.dumps(content, indent=1) + "\n")
        text = report(study, sweep, rates, grid, command=self._command, machine=machine)
        write(self._out / "staleness.md", text)
        draw(study, grid, self._out / "staleness.png")

    @contextmanager
    def _progress(self) -> Iterator[Any]:
        """A function that prints a line above the bar, or changes what the bar says."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}", markup=False),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("study", total=None, now="importing torch")

            def say(text: str | None, *, now: str = "", eta_s: float = 0.0) -> None:
                done = sum(p.result is not None for p in (*self.sweep, *self.grid))
                if now:
                    left = f", {minutes(eta_s)} left" if eta_s else ""
                    bar.update(task, completed=done, total=self._total, now=now + left)
                if text is not None:
                    bar.update(task, completed=done)
                    console.print(text)

            yield say


def outcome(result: Result) -> str:
    """In a few words."""
    accuracy = "" if result.accuracy is None else f"accuracy {result.accuracy:.3f}, "
    if result.status != "finished":
        return f"{accuracy}{result.status.upper()}: {result.reason}"
    return (
        f"{accuracy}staleness {result.staleness_mean:.1f}, "
        f"training {result.wall_s:.0f} s, run {result.total_s or 0.0:.0f} s"
    )


def describe_machine() -> str:
    """Cores that may be used, and their kind."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} CPU cores ({platform.machine()})"


# --------------------------------------------------------------------------- entry


def parse(argv: Sequence[str]) -> tuple[Study, argparse.Namespace]:
    """The command line.

    Raises:
        UserError: values that make no study.
    """
    default = Study()
    parser = argparse.ArgumentParser(
        description="Held-out accuracy by objective and staleness, on the asynchronous loop.",
        epilog="key=value overrides of train.py go to every run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--objectives", nargs="+", default=default.objectives, help="files of conf/loss")
    add("--k", nargs="+", type=int, default=default.ks, help="steps between publications")
    add("--m", nargs="+", type=float, default=default.ms, help="values of buffer.recency_prob")
    add("--seeds", nargs="+", type=int, default=default.seeds, help=f"not {SWEEP_SEED}: the sweep")
    add("--learning-rates", nargs="+", type=float, default=default.learning_rates, help="to try")
    add("--steps", type=int, default=default.steps, help="optimizer steps a run")
    add("--batch-size", type=int, default=default.batch_size, help="responses a step")
    add("--eval-every", type=int, default=default.eval_every, help="steps, multiple of every k")
    add("--num-problems", type=int, default=default.num_problems, help="held-out, <= task.num_test")
    add("--prompts-in-flight", type=int, default=default.prompts_in_flight, help="of the searcher")
    add("--engine", choices=("hf", "vllm"), default=default.engine, help="of the searcher")
    add("--out", type=Path, default=Path("experiments/results/staleness"), help="tables, figure")
    add("--runs", type=Path, default=default.runs, help="folder of the run folders")
    add("--max-minutes", type=float, default=math.inf, help="begin no run that would end later")
    add("--run-timeout-s", type=float, default=1800.0, help="a run that takes longer has failed")
    add("--plan", action="store_true", help="print the plan and an estimate only")
    # overrides may follow an option that takes several values
    overrides = [a for a in argv if re.match(r"[+~]*[A-Za-z_][\w./@]*=", a)]
    options = parser.parse_args([a for a in argv if a not in overrides])
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key in OWN_KEYS:
            raise UserError(f"{key} is set by the study: use {OWN_KEYS[key]}")
    study = Study(
        objectives=tuple(dict.fromkeys(options.objectives)),
        ks=tuple(dict.fromkeys(options.k)),
        ms=tuple(dict.fromkeys(options.m)),
        seeds=tuple(dict.fromkeys(options.seeds)),
        learning_rates=tuple(sorted(set(options.learning_rates))),
        steps=options.steps,
        batch_size=options.batch_size,
        eval_every=options.eval_every,
        num_problems=options.num_problems,
        prompts_in_flight=options.prompts_in_flight,
        engine=options.engine,
        overrides=tuple(overrides),
        runs=options.runs,
    )
    if min(study.ks) < 1 or max(study.ks) > study.steps:
        raise UserError(f"--k {max(study.ks)}: must lie in 1..{study.steps} (--steps)")
    if any(study.eval_every % k for k in study.ks):
        raise UserError(
            f"--eval-every {study.eval_every} is not a multiple of every --k: a version is only "
            f"evaluated where it is published; try {math.lcm(*study.ks)}"
        )
    if SWEEP_SEED in study.seeds and len(study.learning_rates) > 1:
        raise UserError(f"--seeds {SWEEP_SEED}: that seed chooses the learning rates")
    return study, options


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, also where time was up; 1 failures; 2 mistakes; 130 Ctrl-C."""
    # as Ctrl-C does: the processes of the run under way are ended too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        study, options = parse(argv)
        server = Server()
        if options.plan:
            sweep = look_up(server, study, sweep_runs(study))
            grid = None
            if all(p.result for p in sweep):
                rates = choose_rates(study, [p.result for p in sweep if p.result])
                grid = look_up(server, study, grid_runs(study, rates))
            print(describe_plan(study, sweep, grid))
            return 0
        driver = Driver(
            study,
            server,
            options.out,
            command=shlex.join(["python", "experiments/staleness.py", *argv]),
            max_minutes=options.max_minutes,
            run_timeout_s=options.run_timeout_s,
        )
        try:
            driver.run()
        except Stop as stop:
            driver.write()
            print(stop, file=sys.stderr)
            return 1 if "failed" in str(stop) else 0
        results = [p.result for p in (*driver.sweep, *driver.grid) if p.result]
        print(ranking(study, [p.result for p in driver.grid if p.result]))
        print(f"written: {options.out}/staleness.md, staleness.png, results.json")
        return 1 if any(r.status == "failed" for r in results) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: the same command goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
