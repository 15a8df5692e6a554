"""How the job scales: throughput, staleness and idle time from 1 to 1,024 searchers.

    python experiments/scale.py                         # the study: 1B to 70B on H100, 2 minutes
    python experiments/scale.py --gpu A100 --sizes 7B 70B --publish-every 4
    python experiments/scale.py --measured runs/NAME    # the same with a finished run's costs
    python experiments/scale.py --validate              # real jobs, 1 to 3 searchers: 5 minutes

Nothing but --validate runs the job: scale_model.py simulates it, event by event, and its docstring
states each cost as a formula; scale_costs.py says where the costs come from: published peaks of
GPUs with assumed efficiencies, or a run. For each size and number of searchers the study predicts
responses and tokens a second, generated and trained on, staleness, and what waits; it names the
stage that is short, the searchers a trainer at which that changes, and, with trainers added as
searchers are, which stage is short next. It writes <name>.md, .png and .json.

By default each response is trained on once at most (`max_reuse=1`), the newest first (m = 1), so
that trainers without data wait and it shows: without the bound they would draw old responses again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.scale_costs import GPUS, MODELS, fewest_trainers, given, measured  # noqa: E402
from experiments.scale_model import (  # noqa: E402
    Costs,
    Result,
    System,
    capacities,
    loads,
    response_s,
    simulate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = (1, 8, 64, 512, 1024)  # numbers of searchers in the tables
MAX_EVENTS = 30_000  # ends of responses that a point may simulate, about
LARGEST = 1 << 16  # searchers up to which the next bottleneck is looked for
STAGES = {  # what is short, in words
    "generation": "searchers",
    "training": "trainers",
    "receiving": "trainers' receiving of trajectories",
    "inserting": "inserting into the buffers",
    "broadcast": "broadcast",
    "heartbeats": "heartbeats",
}

Make = Callable[[int, int | None], tuple[Costs, System]]  # (searchers, trainers or None) -> a job


class UserError(ValueError):
    """A mistake in the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One model on one kind of device, over numbers of searchers."""

    name: str
    make: Make
    points: dict[int, Result]  # by number of searchers

    def job(self, searchers: int, trainers: int | None = None) -> tuple[Costs, System]:
        return self.make(searchers, trainers)


# --------------------------------------------------------------------------- what is short


def balance(costs: Costs, system: System) -> float:
    """Searchers a trainer at which both are as fast: below it searchers are short.

    Infinite where taking each version would cost searchers all of their time.
    """
    training = capacities(costs, system)["training"]
    left = 1 - loads(costs, system, training)["updates"]
    if left <= 0:
        return math.inf
    return training * response_s(costs, system) / left / system.trainers


def bottleneck(costs: Costs, system: System) -> str:
    """The stage that bounds the flow of fresh responses, each trained on once.

    A broadcast that lasts longer than a step holds nothing up, but makes what is generated older;
    a late heartbeat is a false alarm: these two are not stages of the flow.
    """
    rates = capacities(costs, system)
    return min(("generation", "training", "receiving", "inserting"), key=lambda s: rates[s])


def limits_in_proportion(curve: Curve) -> dict[str, tuple[int, int]]:
    """(searchers, trainers) from which on a stage is short, if trainers grow with searchers.

    Trainers are added at the balance of the fewest, and should bring as much as those do.
    `training` is short where they bring less than 80% of that; `updates` where taking versions
    costs searchers half of their time; the others where the flow is more than they can take. Stages
    that aren't short up to LARGEST searchers are left out.
    """
    costs, system = curve.job(1)
    ratio = balance(costs, system)
    one = capacities(costs, system)["training"] / system.trainers
    most = {"training": 1.25, "updates": 0.5, "generation": math.inf}
    found: dict[str, tuple[int, int]] = {}
    searchers = 1
    while searchers <= LARGEST:
        trainers = round(searchers / ratio) if ratio < math.inf else 0
        if trainers >= system.trainers:
            costs, job = curve.job(searchers, trainers)
            for stage, share in loads(costs, job, trainers * one).items():
                if share >= most.get(stage, 1.0):
                    found.setdefault(stage, (searchers, trainers))
        searchers *= 2
    return found


_SHORT = {  # in proportion
    "training": "more trainers bring too little: gathering a policy sharded over all of them",
    "updates": "taking every version costs searchers half of their time",
    "broadcast": "a broadcast lasts longer than the steps between two",
    "receiving": "the trainers' receiving threads are full",
    "inserting": "inserting takes all of the trainers' time",
    "heartbeats": "a round of heartbeats lasts longer than its period",
}


def in_words(curve: Curve) -> str:
    """Where the bottleneck is, and where the next ones are."""
    costs, system = curve.job(1)
    ratio = balance(costs, system)
    flip = ratio * system.trainers
    gpus = ratio * system.workers_per_searcher
    text = (
        f"**{curve.name}**: {_count(system.trainers, 'trainer')}, "
        f"{_count(system.workers_per_searcher, 'GPU')} a searcher. Up to {_number(flip)} searchers "
        f"({_number(ratio)} a trainer, {_number(gpus)} GPUs a trainer) these are short, beyond "
        "trainers"
    )
    fixed: dict[str, int] = {}
    for searchers in sorted(curve.points):
        stage = bottleneck(*curve.job(searchers))
        if stage not in ("generation", "training"):
            fixed.setdefault(stage, searchers)
    for stage, searchers in fixed.items():
        text += f", from {searchers:,} searchers on {STAGES[stage]}"
    costly = [n for n, r in sorted(curve.points.items()) if r.insert_fraction > 0.1]
    if costly:
        text += f"; from {costly[0]:,} on, inserting costs them over 10% of their time"
    limits = sorted((at, stage) for stage, at in limits_in_proportion(curve).items())
    if not limits:
        return f"{text}. In proportion, nothing else is short up to {LARGEST:,} searchers."
    parts = [
        f"at {searchers:,} searchers and {_count(trainers, 'trainer')} {_SHORT[stage]}"
        for (searchers, trainers), stage in limits
    ]
    return f"{text}. With trainers added in that proportion, {'; '.join(parts)}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def _number(value: float) -> str:
    """
    >>> _number(0.123), _number(3.21), _number(45.6), _number(12345.6)
    ('0.12', '3.2', '46', '12,346')
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


# --------------------------------------------------------------------------- study


def simulate_curve(name: str, make: Make, searchers: Sequence[int]) -> Curve:
    """All points of one model."""
    points = {}
    for count in searchers:
        costs, system = make(count, None)
        points[count] = simulate(costs, within_reach(costs, system))
    return Curve(name=name, make=make, points=points)


def within_reach(costs: Costs, system: System) -> System:
    """Fewer engines simulated one by one, where a step would take too many responses.

    Where inserting alone takes trainers as long as generating takes searchers, steps grow ever
    longer: the simulation ends early.
    """
    rates = capacities(costs, system)
    step_s = system.batch_size / min(rates["generation"], rates["training"])
    step_s /= max(1 - loads(costs, system, rates["generation"])["inserting"], 0.1)
    of_one = system.steps * step_s / response_s(costs, system)  # responses of one searcher
    few = max(min(system.max_engines, round(MAX_EVENTS / of_one)), 1)
    most = 4.0 * MAX_EVENTS * system.searchers / min(few, system.searchers)
    return replace(system, max_engines=few, max_responses=most)


def report(
    curves: Sequence[Curve],
    others: Mapping[str, Curve],
    workload: System,
    *,
    title: str,
    command: str,
) -> str:
    """The tables and the words, as Markdown."""
    shown = [n for n in SHOWN if all(n in curve.points for curve in curves)]
    sections = [
        f"# {title}",
        f"Command: `{command}`",
        "Simulated, not run. " + describe(workload),
        "## Balance and bottleneck\n\n"
        "Responses a second: one searcher alone, all trainers on each once. Balance: searchers a "
        "trainer at which both are as fast, what taking weights costs searchers included. Then the "
        "stage that is short at so many searchers.\n\n" + _balance_table(curves, shown),
        "\n\n".join(in_words(curve) for curve in curves),
        "## What the simulation gives\n\n"
        "Staleness in optimizer steps, of first tokens (mean, 95th percentile) and of last tokens "
        "(mean). Updates: share of the searchers' time that loading weights and computing keys and "
        "values anew takes. Broadcast: share of the time with one under way. Inserting: share of "
        "the trainers' time.\n\n" + _points_table(curves, shown),
    ]
    if others:
        sections.append(
            "## When searchers take weights\n\n"
            f"{next(iter(others.values())).name.partition(',')[0]}: optimizer steps a second "
            "(mean staleness of first tokens, of last tokens).\n\n" + _modes_table(others, shown)
        )
    return "\n\n".join(sections) + "\n"


def describe(workload: System) -> str:
    """The workload in words."""
    reuse = "often" if workload.max_reuse is None else f"{workload.max_reuse} x at most"
    cache = "computed anew after an update" if workload.kv_recompute else "kept over updates"
    return (
        f"mode={workload.mode}, update={workload.update}, keys and values {cache}; steps of "
        f"{workload.batch_size} responses, {workload.responses_per_prompt} a prompt; "
        f"{workload.mean_tokens:g} tokens a response (log-normal, deviation {workload.cv_tokens:g} "
        f"of that, cut at {workload.max_tokens:,}), prompts of {workload.prompt_tokens:g}; weights "
        f"published every {_count(workload.publish_every, 'step')}; m = {workload.recency_prob:g}; "
        f"each response drawn {reuse}. {workload.steps - workload.warmup_steps} steps after "
        f"{workload.warmup_steps} that do not count."
    )


def _balance_table(curves: Sequence[Curve], shown: Sequence[int]) -> str:
    rows = []
    for curve in curves:
        costs, system = curve.job(1)
        rates = capacities(costs, system)
        rows.append(
            [
                curve.name,
                str(system.workers_per_searcher),
                str(system.trainers),
                str(system.max_num_seqs),
                _number(rates["generation"]),
                _number(rates["training"]),
                _number(balance(costs, system)),
                *(STAGES[bottleneck(*curve.job(n))] for n in shown),
            ]
        )
    header = ["model", "GPUs a searcher", "trainers", "requests in an engine"]
    header += ["one searcher", "trainers together", "balance", *(f"at {n:,}" for n in shown)]
    return markdown(header, rows)


def _points_table(curves: Sequence[Curve], shown: Sequence[int]) -> str:
    rows = []
    for curve in curves:
        for count in shown:
            r = curve.points[count]
            rows.append(
                [
                    curve.name,
                    f"{count:,}",
                    f"{r.steps_per_s:.3g}",
                    f"{r.generated_responses_per_s:,.0f}",
                    f"{r.generated_tokens_per_s:,.0f}",
                    f"{r.trained_tokens_per_s:,.0f}",
                    f"{r.staleness_mean:.1f}, {r.staleness_p95:.0f}; {r.staleness_last_mean:.1f}",
                    f"{r.reuse_mean:.2f}",
                    f"{r.trainer_idle_fraction:.0%}",
                    f"{r.searcher_idle_fraction:.0%}",
                    f"{r.searcher_update_fraction:.1%}",
                    f"{r.broadcast_fraction:.1%}",
                    f"{r.insert_fraction:.1%}",
                ]
            )
    header = ["model", "searchers", "steps/s", "responses/s", "tokens/s generated"]
    header += ["tokens/s trained on", "staleness", "reuse", "trainers idle", "searchers idle"]
    return markdown([*header, "updates", "broadcast", "inserting"], rows)


def _modes_table(others: Mapping[str, Curve], shown: Sequence[int]) -> str:
    rows = []
    for label, curve in others.items():
        row = [label]
        for count in shown:
            r = curve.points[count]
            row.append(f"{r.steps_per_s:.3g} ({r.staleness_mean:.1f}, {r.staleness_last_mean:.1f})")
        rows.append(row)
    return markdown(["", *(f"{n:,} searchers" for n in shown)], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    >>> print(markdown(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(header)}", *lines[1:]])


def write(path: Path, text: str) -> None:
    """Beside and then renamed: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.partial")
    beside.write_text(text, "utf-8")
    os.replace(beside, path)


# --------------------------------------------------------------------------- figure

_COLORS = ("#8ecae6", "#1f5fa8", "#2a9d58", "#e6ab02", "#d95f02", "#7b3fa0")
_MODE_COLORS = ("#1f5fa8", "#8ecae6", "#2a9d58", "#d95f02")


def draw(curves: Sequence[Curve], others: Mapping[str, Curve], path: Path, *, title: str) -> None:
    """Throughput, staleness, idle time, updates and modes against the number of searchers."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, PercentFormatter

    figure = Figure(
        figsize=(16, 8.8), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    )
    FigureCanvasAgg(figure)
    (speed, stale, idle), (unused, weights, modes) = figure.subplots(2, 3)
    handles = []
    for number, curve in enumerate(curves):
        color = _COLORS[number % len(_COLORS)]
        line = _line(speed, curve, lambda r: r.trained_tokens_per_s, color, "-")
        line.set_label(curve.name)
        handles.append(line)
        _line(speed, curve, lambda r: r.generated_tokens_per_s, color, ":")
        _line(stale, curve, lambda r: r.staleness_mean, color, "-")
        _line(stale, curve, lambda r: r.staleness_p95, color, ":")
        _line(idle, curve, lambda r: r.trainer_idle_fraction, color, "-")
        _line(idle, curve, lambda r: r.searcher_idle_fraction, color, ":")
        _line(unused, curve, _surplus, color, "-")
        _line(weights, curve, lambda r: r.searcher_update_fraction, color, "-")
        _line(weights, curve, lambda r: r.broadcast_fraction, color, ":")
        costs, system = curve.job(1)
        flip = balance(costs, system) * system.trainers
        if min(curve.points) < flip < max(curve.points):
            idle.axvline(flip, color=color, linewidth=0.8, alpha=0.6)
    speed.set(title="Response tokens a second: trained on (–), generated (···)")
    speed.set_yscale("log")
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    stale.set(title="Staleness, optimizer steps: mean (–), 95th percentile (···)")
    idle.set(title="Idle: trainers (–), searchers (···); balance (|)", ylim=(-0.02, 1.02))
    unused.set(title="Share of the generated responses that no step takes", ylim=(-0.02, 1.02))
    weights.set(title="Searchers' time for updates (–); a broadcast under way (···)")
    for axes in (idle, unused, weights):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for (label, curve), color in zip(others.items(), _MODE_COLORS, strict=False):
        _line(modes, curve, lambda r: r.steps_per_s, color, "-").set_label(label)
    if others:
        name = next(iter(others.values())).name.partition(",")[0]
        modes.set(title=f"{name}: steps a second, by searcher.update and mode")
        modes.set_yscale("log")
        modes.legend(fontsize=8.5, framealpha=0.9)
    else:
        modes.set_visible(False)
    for axes in (speed, stale, idle, unused, weights, modes):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.set_xlabel("searchers")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=handles, loc="outside lower center", ncols=8, frameon=False)
    figure.suptitle(title, fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial.png")
    figure.savefig(beside)
    os.replace(beside, path)


def _line(axes: Axes, curve: Curve, of: Callable[[Result], float], color: str, style: str) -> Any:
    counts = sorted(curve.points)
    values = [of(curve.points[n]) for n in counts]
    marker = "o" if style == "-" else None
    return axes.plot(counts, values, style, color=color, marker=marker, markersize=3.5)[0]


def _surplus(result: Result) -> float:
    """Of responses generated, those that come in excess of what is trained on."""
    if result.generated_responses_per_s == 0:
        return 0.0
    return max(1 - result.trained_responses_per_s / result.generated_responses_per_s, 0.0)


# --------------------------------------------------------------------------- validation

FIGURES: dict[str, str] = {  # of summary.json -> of Result
    "steps_per_s": "steps_per_s",
    "generated_tokens_per_s": "generated_tokens_per_s",
    "staleness_mean": "staleness_mean",
    "trainer_idle_fraction": "trainer_idle_fraction",
    "searcher_idle_fraction": "searcher_idle_fraction",
}
CORES = 2  # of every job of the validation: with 2 searchers or more, ranks share cores
ALL_TIMEOUT_S = 460.0  # for all jobs; each leaves JOB_S to each one after it
JOB_S = 100.0
CALIBRATED = ("steps_per_s", "generated_tokens_per_s")  # of the run with 1 searcher


def validation_overrides(steps: int, extra: Sequence[str]) -> list[str]:
    """train.py's command line in the validation."""
    return [
        "task=arithmetic",
        "model=tiny",
        "engine=vllm",
        "mode=async",
        f"trainer.steps={steps}",
        "trainer.batch_size=128",
        "buffer.recency_prob=1.0",
        "buffer.initial_trajectories=128",
        "eval.every=0",
        "eval.before=false",
        "eval.num_problems=32",
        "run.rollouts_every=0",
        *extra,
    ]


def run_job(searchers: int, overrides: Sequence[str], runs: Path, *, timeout_s: float) -> Path:
    """The folder of a job of 1 trainer and so many searchers; a finished one is not repeated.

    Raises:
        UserError: it failed or took too long; the message has the end of its output.
    """
    from run_folder import git_commit

    cores = sorted(os.sched_getaffinity(0))[:CORES]
    what = json.dumps([searchers, len(cores), git_commit(), *overrides])
    name = f"searchers-{searchers}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"
    folder = runs / name
    if (folder / "summary.json").is_file():
        print(f"{searchers} searchers: {folder} has been run")
        return folder
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={searchers + 1}"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command = [sys.executable, *launcher, "train.py", *overrides]
    command += [f"run.root={json.dumps(str(runs.resolve()))}", f"run.name={name}"]
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{name}.log"
    print(f"{searchers} searchers: {shlex.join(command)}", flush=True)
    started = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                _end(process)
    if not (folder / "summary.json").is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise UserError(f"the job with {searchers} searchers did not finish ({log}):\n{tail}")
    print(f"{searchers} searchers: {time.monotonic() - started:.0f} s", flush=True)
    return folder


def _end(process: subprocess.Popen) -> None:
    """The job's own session: asked to, then by force."""
    for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=wait_s)
            return
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def measured_figures(folder: Path) -> dict[str, float]:
    """What a run's summary says of the figures that are predicted."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["steps_per_s"] = summary["steps"] / summary["wall_s"]
    return {name: float(summary[name]) for name in FIGURES}


def predict(costs: Costs, system: System, searchers: int, *, cores: int = CORES) -> Result:
    """The same job with so many searchers, its ranks on so many cores."""
    return simulate(costs, replace(system, searchers=searchers, cores=cores))


def calibrate(costs: Costs, system: System, figures: Mapping[str, float]) -> Costs:
    """`costs` with generating and training scaled until the model has the run's own two speeds.

    Training is left as measured where the trainer waits: then it does not set the pace.
    """
    for _ in range(4):
        run = predict(costs, system, system.searchers)
        made = run.generated_tokens_per_s / figures["generated_tokens_per_s"]
        done = run.steps_per_s / figures["steps_per_s"] if run.trainer_idle_fraction < 0.05 else 1.0
        costs = replace(
            costs,
            decode_token_s=costs.decode_token_s * made,
            train_token_s=costs.train_token_s * done,
        )
    return costs


def validation_table(
    predictions: Mapping[int, Result], measurements: Mapping[int, Mapping[str, float]]
) -> str:
    """Predicted against measured, as Markdown."""
    rows = []
    for searchers, result in sorted(predictions.items()):
        for name, attribute in FIGURES.items():
            predicted = getattr(result, attribute)
            real = measurements.get(searchers, {}).get(name, math.nan)
            ratio = f"{predicted / real:.2f}" if real > 0 and "idle" not in name else ""
            kind = "calibrated" if searchers == 1 and name in CALIBRATED else "predicted"
            cells = [
                f"{value:.3g}" if value < 1e3 else f"{value:,.0f}" for value in (predicted, real)
            ]
            rows.append([str(searchers), name, *cells, ratio, kind])
    header = ["searchers", "figure", "model", "measured", "model / measured", ""]
    return markdown(header, rows)


def validate(options: argparse.Namespace, command: str) -> int:
    """Runs the jobs, calibrates on the first, predicts all. Returns the exit code."""
    if len(os.sched_getaffinity(0)) < CORES:
        raise UserError(f"--validate needs {CORES} cores: a run with a core for each rank")
    overrides = validation_overrides(options.validation_steps, options.overrides)
    folders: dict[int, Path] = {}
    failures = []
    started = time.monotonic()
    for searchers in (1, 2, 3):
        try:
            left_s = ALL_TIMEOUT_S - (time.monotonic() - started) - JOB_S * (3 - searchers)
            folders[searchers] = run_job(searchers, overrides, options.runs, timeout_s=left_s)
        except UserError as error:
            if searchers == 1:
                raise
            print(f"error: {error}", file=sys.stderr)
            failures.append(searchers)
    measurements = {searchers: measured_figures(folder) for searchers, folder in folders.items()}
    costs, system = measured(folders[1])
    costs = calibrate(costs, system, measurements[1])
    predictions = {searchers: predict(costs, system, searchers) for searchers in (1, 2, 3)}
    table = validation_table(predictions, measurements)
    text = (
        "# The scale model against the real job\n\n"
        f"Command: `{command}`\n\n"
        f"1 trainer and 1, 2, 3 searchers on {CORES} cores: `train.py {' '.join(overrides)}`. "
        "Calibrated on the run with 1 searcher, which has a core for each rank, and nothing else: "
        f"{costs.decode_token_s * 1e6:.1f} us a token generated, "
        f"{costs.train_token_s * 1e6:.1f} us a token trained on, "
        f"{costs.load_s * 1e3:.1f} ms to load a version, "
        f"{costs.weight_bytes / costs.broadcast_bytes_per_s * 1e3:.1f} ms to broadcast it, "
        f"{system.mean_tokens:.2f} tokens a response; so its steps and tokens a second are no "
        "prediction. All else is: with 2 searchers the trainer shares its core with the second, "
        "with 3 the first and the third share the other.\n\n"
        f"{table}\n"
    )
    write(options.out / "validation.md", text)
    print(table)
    print(f"written: {options.out}/validation.md")
    return 1 if failures else 0


# --------------------------------------------------------------------------- entry


def parse(argv: Sequence[str]) -> tuple[System, argparse.Namespace]:
    """The command line.

    Raises:
        UserError: values that make no study.
    """
    default = System(
        cv_tokens=0.8, max_tokens=8192, max_reuse=1, start_full=True, steps=24, warmup_steps=8
    )
    parser = argparse.ArgumentParser(
        description="Throughput, staleness and idle time from 1 to 1,024 searchers, simulated.",
        epilog="--validate: key=value overrides of train.py go to every job.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--gpu", choices=tuple(GPUS), default="H100", help="kind of GPU, of all ranks")
    add("--sizes", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="models")
    counts = [1 << i for i in range(11)]
    add("--searchers", nargs="+", type=int, default=counts, help="numbers of searchers")
    add("--trainers", type=int, help="GPUs that train; by default as few as hold the policy")
    add("--publish-every", type=int, default=default.publish_every, help="k, steps")
    add("--recency-prob", type=float, default=default.recency_prob, help="m")
    add("--max-reuse", type=int, default=default.max_reuse, help="draws of a response; 0: no bound")
    add("--keep-kv", action="store_true", help="of requests under way, over updates")
    add("--update", choices=("inflight", "between"), default=default.update, help="of weights")
    add("--batch-size", type=int, default=default.batch_size, help="responses a step")
    add("--mean-tokens", type=float, default=default.mean_tokens, help="of a response")
    add("--cv-tokens", type=float, default=default.cv_tokens, help="their deviation over the mean")
    add("--prompt-tokens", type=float, default=default.prompt_tokens, help="of a prompt")
    add("--steps", type=int, default=default.steps, help="of a simulation, a third for warming up")
    add("--measured", type=Path, help="folder of a run whose costs are taken, instead of a GPU's")
    add("--validate", action="store_true", help="run real jobs and compare; nothing else")
    add("--validation-steps", type=int, default=120, help="steps of these jobs")
    add("--runs", type=Path, default=Path("runs/scale"), help="folder of these jobs")
    add("--out", type=Path, default=Path("experiments/results/scale"), help="tables, figure")
    options = parser.parse_args([a for a in argv if not _is_override(a)])
    options.overrides = [a for a in argv if _is_override(a)]
    if options.overrides and not options.validate:
        raise UserError(f"{options.overrides[0]}: overrides are for --validate")
    if min(options.searchers) < 1:
        raise UserError("--searchers: at least 1")
    try:
        workload = replace(
            default,
            publish_every=options.publish_every,
            recency_prob=options.recency_prob,
            max_reuse=options.max_reuse or None,
            update=options.update,
            kv_recompute=not options.keep_kv,
            batch_size=options.batch_size,
            mean_tokens=options.mean_tokens,
            cv_tokens=options.cv_tokens,
            prompt_tokens=options.prompt_tokens,
            steps=options.steps,
            warmup_steps=options.steps // 3,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return workload, options


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and "=" in argument


def study(workload: System, options: argparse.Namespace, command: str) -> int:
    """All curves, tables and the figure. Returns the exit code."""
    searchers = sorted(set(options.searchers))
    others: dict[str, Curve] = {}
    if options.measured:
        name = f"measured-{options.measured.resolve().name}"
        costs, system = measured(options.measured)
        base = replace(
            system,
            max_reuse=workload.max_reuse,
            steps=workload.steps,
            initial_responses=0,
            warmup_steps=workload.warmup_steps,
            trainers=options.trainers or system.trainers,
        )
        title = f"Scale model with the costs of {options.measured}"
        makers: dict[str, Make] = {
            options.measured.resolve().name: lambda n, t: (
                costs,
                replace(base, searchers=n, trainers=t or base.trainers),
            )
        }
        workload = base
    else:
        name, title = f"scale-{options.gpu}", f"Scale model: {options.gpu}"
        makers = {size: _maker(options, workload, size) for size in options.sizes}
    curves = []
    for label, make in makers.items():
        started = time.monotonic()
        curves.append(simulate_curve(label, make, searchers))
        print(f"{label}: {time.monotonic() - started:.0f} s", flush=True)
    if not options.measured:
        size = "7B" if "7B" in options.sizes else options.sizes[0]
        for label, changes in (
            ("inflight, keys and values kept", {"update": "inflight", "kv_recompute": False}),
            ("inflight, computed anew", {"update": "inflight", "kv_recompute": True}),
            ("between", {"update": "between"}),
            ("mode=sync", {"mode": "sync", "start_full": False}),
        ):
            make = _maker(options, replace(workload, **changes), size)
            others[label] = simulate_curve(f"{size}, {label}", make, searchers)
            print(f"{size}, {label}", flush=True)
    text = report(curves, others, workload, title=title, command=command)
    write(options.out / f"{name}.md", text)
    content = {
        "command": command,
        "workload": asdict(workload),
        "results": {
            c.name: {n: asdict(r) for n, r in c.points.items()} for c in (*curves, *others.values())
        },
    }
    write(options.out / f"{name}.json", json.dumps(content, indent=1) + "\n")
    draw(curves, others, options.out / f"{name}.png", title=title)
    print("\n\n".join(in_words(curve) for curve in curves))
    print(f"written: {options.out}/{name}.md, .png, .json")
    return 0


def _maker(options: argparse.Namespace, workload: System, size: str) -> Make:
    gpu, model = GPUS[options.gpu], MODELS[size]

    def make(searchers: int, trainers: int | None) -> tuple[Costs, System]:
        count = trainers or options.trainers or fewest_trainers(gpu, model)
        return given(gpu, model, replace(workload, searchers=searchers), trainers=count)

    return make


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0; 1 a job failed; 2 mistakes; 130 Ctrl-C."""
    command = shlex.join(["python", "experiments/scale.py", *argv])
    try:
        workload, options = parse(argv)
        if options.validate:
            return validate(options, command)
        return study(workload, options, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
