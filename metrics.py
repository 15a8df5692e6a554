"""What a run shows while it runs and leaves behind: on rank 0 alone, and of one thread.

    setup_logging   one logger, its lines prefixed `[trainer 0]`
    Metrics         metrics.jsonl, TensorBoard events and a live progress line
    IdleClock       where a loop's wall-clock goes while it waits
    write_rollouts  samples to read, rollouts/rollouts.{jsonl,md}
    write_summary   summary.json
    draw_figure     training.png, from metrics.jsonl alone

METRICS documents every metric by name; logging one that isn't in it fails.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A `<...>` stands for any name of lower-case letters, digits and underscores.
METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the responses that arrived since the last step",
    "reward/<part>": "mean of one named part of that reward",
    "reward/drawn_mean": "mean reward of the responses drawn for this step",
    "reward/response_tokens_mean": "mean length of the responses that arrived, tokens",
    "reward/truncated_fraction": "share of the responses that arrived cut by length or time",
    "reward/cut_fraction": "share of them that searcher.max_response_seconds has ended",
    "reward/unparsed_fraction": "share of the responses scored in which the task found no answer",
    "reward/timeout_fraction": "share whose scoring took longer than rewards.time_limit_s",
    "reward/error_fraction": "share whose scoring raised, or gave something other than named parts",
    "reward/nan_fraction": "share whose reward was NaN or infinite",
    "reward/range_fraction": "share whose reward was outside of the range that the task declares",
    "reward/crash_fraction": "share whose scoring ended its worker process",
    "loss/total": "the loss of this step, over all trainers",
    "loss/grad_norm": "norm of the gradient before clipping",
    "loss/learning_rate": "learning rate of this step",
    "loss/beta": "KL coefficient of this step, reward units per nat",
    "loss/log_z_mean": "mean over prompts of log Z, estimated or learned, nats (flowrl: a token)",
    "loss/residual_rms": "distance from balance, mean over prompts of the rms residual, nats",
    "loss/advantage_rms": "policy gradient: mean over prompts of the rms advantage, reward units",
    "loss/pairs_used": "ctb: share of pairs not pruned; dpo: share of prompts with unequal rewards",
    "policy/log_ratio_mean": "mean of log pi - log pi_ref a response, nats (a KL if on-policy)",
    "policy/clip_fraction": "share of tokens (or responses) whose gradient the ratio's clip cuts",
    "policy/importance_mean": "mean truncated importance weight, by token or by response",
    "policy/entropy_sampled": "mean of -log pi over the drawn tokens, nats",
    "policy/logprob_drift": "mean |log pi now - when sampled| over the drawn tokens, nats",
    "policy/engine_logprob_gap": "mean |engine - trainer| log-prob, same weights and tokens, nats",
    "staleness/mean": "age of the drawn responses, optimizer steps behind the trainer, mean",
    "staleness/p95": "the same, 95th percentile",
    "staleness/max": "the same, largest",
    "staleness/versions_mean": "weights versions that took over amid a drawn response, mean",
    "buffer/num_trajectories": "responses stored",
    "buffer/num_prompts": "prompts with a response stored",
    "buffer/tokens": "tokens stored",
    "buffer/reuse_mean": "mean times the drawn responses had been drawn before",
    "buffer/duplicate_fraction": "share of the responses received that were stored already",
    "buffer/expired": "responses forgotten since the run began as older than buffer.max_staleness",
    "buffer/used_up": "responses forgotten since the run began as drawn trainer.max_reuse times",
    "buffer/short_fraction": "share of prompts drawn by other trainers for one with too few",
    "buffer/recency_prob": "m of this step: share of prompts drawn from the last publication's",
    "buffer/received": "responses received since the run began",
    "buffer/drawn": "responses trained on since the run began, each use counted",
    "time/step_s": "wall-clock of this step, seconds",
    "time/draw_s": "of which drawing from the buffer",
    "time/reference_s": "of which reference log-probs that a drawn response lacked",
    "time/gradient_s": "of which the gradient: the next three, rows and losses",
    "time/forward_s": "of which hidden states, forward",
    "time/logprobs_s": "of which log-probs of hidden states, forward",
    "time/backward_s": "of which backward",
    "time/optimizer_s": "of which adding up the trainers' gradients, clipping, the optimizer",
    "time/publish_s": "of which taking the snapshot that is broadcast in the background",
    "time/checkpoint_s": "of which taking what a checkpoint holds, mean over all steps",
    "time/checkpoint_write_s": "seconds the last checkpoint took to be written, in the background",
    "time/generated_tokens_per_s": "response tokens generated a second, all searchers",
    "time/trained_tokens_per_s": "response tokens trained on a second, all trainers",
    "time/model_tflop_per_s": "needed arithmetic of trainer 0's gradient and optimizer, TFLOP/s",
    "time/mfu": "the same over the rate of a matrix product, measured at the start",
    "time/trainer_idle_fraction": "share of wall-clock the trainers waited",
    "time/searcher_idle_fraction": "share of wall-clock the searchers waited",
    "time/trainer_waiting_<reason>_s": "seconds the trainers waited, by what for",
    "time/searcher_waiting_<reason>_s": "seconds the searchers waited, by what for",
    "faults/skipped_steps": "steps that changed nothing: their loss or gradient was not finite",
    "faults/failed_checkpoints": "checkpoints that could not be written",
    "memory/peak_gb": "most memory of trainer 0 so far, GB: torch's on a GPU, else the process's",
    "weights/version": "weights version last published",
    "weights/broadcast_s": "seconds the last broadcast took, in the background",
    "weights/gather_s": "of which gathering it from the trainers that share a policy",
    "weights/load_s": "seconds an engine took to load it",
    "weights/stall_s": "seconds in which an engine decoded nothing because of it",
    "weights/step_to_token_s": "seconds from an optimizer step to the first token under it",
    "weights/gb_per_s": "GB/s of the last broadcast",
    "faults/engine_restarts": "engines restarted since the run began or was resumed, all searchers",
    "faults/requeued_prompts": "prompts that began anew because their engine had died",
    "eval/accuracy": "share of held-out problems answered correctly",
    "eval/reward": "mean reward of the responses to held-out problems",
    "eval/<measure>": "mean of what else the task measures of those responses",
    "eval/version": "weights version that was evaluated",
    "eval/seconds": "seconds the evaluation took",
}


# Logging ---------------------------------------------------------------------------------------


class _StderrHandler(logging.Handler):
    """Writes to what sys.stderr is now: a live progress line puts itself in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        # What a task, a model or a file says is part of many lines.
        print(escape_control(self.format(record), keep="\n\t"), file=sys.stderr, flush=True)


def setup_logging(name: str) -> logging.Logger:
    """The process's one logger, 'tba', writing `<time> [<name>] <message>` to stderr.

    Args:
        name: the role and its number, as in 'trainer 0'.
    """
    logger = logging.getLogger("tba")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{name}] %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]  # a second call renames
    logger.setLevel(logging.INFO)
    logger.propagate = False  # libraries put handlers on the root, each line would come twice
    return logger


# Metrics ---------------------------------------------------------------------------------------


class Metrics:
    """The run's metrics: a line a step in metrics.jsonl, TensorBoard events, a progress line.

    Owned by one thread of rank 0. A resumed run appends to the file it finds and counts its
    wall-clock on. Call `close()` at the end.

    Args:
        run_dir: the run's folder; created if missing.
        total_steps: optimizer steps of the whole run.
        first_step: those done before a resumed one; TensorBoard hides what a dead one did beyond.
        log_every_s: seconds between progress lines where there is no terminal.
        stream: where progress goes; None for stderr.
        now: clock in seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        total_steps: int,
        first_step: int = 0,
        log_every_s: float = 10.0,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        # Here, as it takes a second and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        run_dir.mkdir(parents=True, exist_ok=True)
        earlier = read_metrics(run_dir)
        self._now = now
        self._start = now() - (earlier[-1]["wall_s"] if earlier else 0.0)
        self._file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8")
        if earlier:
            self._file.write("\n")  # ends a line that a crash may have cut; empty ones are skipped
        purge = first_step + 1 if earlier else None
        self._writer = SummaryWriter(run_dir / "tensorboard", flush_secs=30, purge_step=purge)
        self._total_steps = total_steps
        self._log_every_s = log_every_s
        self._stream = stream if stream is not None else sys.stderr
        self._bar = _Bar(self._stream, total_steps) if self._stream.isatty() else None
        self._latest: dict[str, float] = {}
        self._first: tuple[int, float] | None = None  # step and time of the first progress
        self._last_line_s = self._last_failure_s = -math.inf

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append `{"step", "wall_s", **values}` to metrics.jsonl, and to TensorBoard.

        Several calls may share a step. A value that is not finite is null in the file.

        Args:
            step: optimizer steps done, as the trainer counts them.
            values: by metric name, each documented in METRICS.
        """
        unknown = [name for name in values if not is_documented(name)]
        assert not unknown, f"metrics {unknown} are not documented: add them to metrics.METRICS"
        numbers = {name: float(value) for name, value in values.items()}
        line = {"step": step, "wall_s": round(self._now() - self._start, 3), **numbers}
        with self.disk_may_be_full():
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()
        with self.disk_may_be_full():  # TensorBoard's thread failed, and says so here ever after
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)
        self._latest.update(numbers)

    @contextmanager
    def disk_may_be_full(self) -> Iterator[None]:
        """What can't be written inside is lost, said once a minute; the run goes on."""
        try:
            yield
        except OSError as error:
            now = self._now()
            if now - self._last_failure_s >= 60.0:
                self._last_failure_s = now
                self.note(f"metrics can't be written ({error}); the run goes on without them")

    def progress(self, step: int, values: Mapping[str, float]) -> None:
        """Show where the run stands: in place in a terminal, else a line every `log_every_s`.

        What is shown is the latest known value of each field, '-' before there is one.

        Args:
            step: optimizer steps done, 1 after the first; the one of `total_steps` always shows.
            values: by metric name; names that the line doesn't show are ignored.
        """
        now = self._now()
        self._latest.update((name, float(value)) for name, value in values.items())
        if self._first is None:
            self._first = (step, now)
        # A resumed run says nothing about its speed before its own second step.
        done, elapsed = step - self._first[0], now - self._first[1]
        eta = elapsed / done * (self._total_steps - step) if done > 0 else math.nan
        line = progress_line(
            step, self._total_steps, elapsed_s=now - self._start, eta_s=eta, values=self._latest
        )
        if self._bar is not None:
            self._bar.update(step, line)
        elif step >= self._total_steps or now - self._last_line_s >= self._log_every_s:
            print(f"step {line}", file=self._stream, flush=True)
            self._last_line_s = now

    def note(self, text: str) -> None:
        """Print a text above the progress line; control characters in it are escaped."""
        text = escape_control(text)
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """End the progress line and close the files; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
        for file in (self._writer, self._file):
            with self.disk_may_be_full():
                file.close()


class _Bar:
    """The progress line of a terminal. It redraws when told to and has no thread of its own."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        text = TextColumn(
            "{task.fields[line]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        self._progress = Progress(
            BarColumn(bar_width=10), text, console=Console(file=stream), auto_refresh=False
        )
        self._task = self._progress.add_task("", total=total_steps, line="")
        self._progress.start()

    def update(self, step: int, line: str) -> None:
        self._progress.update(self._task, completed=step, line=line, refresh=True)

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self._progress.stop()


def is_documented(name: str) -> bool:
    """Whether METRICS holds the name, as it is or by one of its `<...>` patterns."""
    return name in METRICS or any(re.fullmatch(pattern, name) for pattern in _PATTERNS)


_PATTERNS = [re.sub("<.*>", "[a-z0-9_]+", name) for name in METRICS if "<" in name]


def progress_line(
    step: int, total_steps: int, *, elapsed_s: float, eta_s: float, values: Mapping[str, float]
) -> str:
    """One line, of usually less than 140 columns; a missing or non-finite value is '-'.

    >>> print(progress_line(3, 20, elapsed_s=65, eta_s=7300, values={"reward/mean": 0.25}))
    3/20  0:01:05 eta 2:01:40  reward 0.250  acc -  tok/s gen - train -  \
stale -  dup -  gap -  idle train - search -
    """

    def show(name: str, form: str) -> str:
        value = values.get(name, math.nan)
        return form.format(value) if math.isfinite(value) else "-"

    def rate(name: str) -> str:
        value = values.get(name, math.nan)
        if value >= 1e6:
            return f"{value / 1e6:.1f}M"
        return f"{value / 1e3:.1f}k" if value >= 1e3 else show(name, "{:.0f}")

    held_out = f"acc {show('eval/accuracy', '{:.3f}')}"
    if "eval/reward" in values and "eval/accuracy" not in values:
        held_out = f"held-out {show('eval/reward', '{:.3f}')}"
    return "  ".join(
        [
            f"{step}/{total_steps}",
            f"{_duration(elapsed_s)} eta {_duration(eta_s)}",
            f"reward {show('reward/mean', '{:.3f}')}",
            held_out,
            f"tok/s gen {rate('time/generated_tokens_per_s')}"
            f" train {rate('time/trained_tokens_per_s')}",
            f"stale {show('staleness/mean', '{:.1f}')}",
            f"dup {show('buffer/duplicate_fraction', '{:.0%}')}",
            f"gap {show('policy/engine_logprob_gap', '{:.2g}')}",
            f"idle train {show('time/trainer_idle_fraction', '{:.0%}')}"
            f" search {show('time/searcher_idle_fraction', '{:.0%}')}",
        ]
    )


def _duration(seconds: float) -> str:
    """Hours, minutes, seconds: 0:01:05."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in order, without those a crash cut; [] if there is no file."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # empty, or cut
            continue
        if isinstance(record, dict) and "step" in record and "wall_s" in record:
            records.append(record)
    return records


# Idle time -------------------------------------------------------------------------------------


class IdleClock:
    """Accounts how long a loop waits, and for what.

    Belongs to the thread that runs the loop: that thread alone opens contexts and reads figures,
    as nothing is locked. Contexts nest, and time is charged to the innermost: a wait inside a
    piece of work is the wait's. Time outside of any context counts as not idle.

    Args:
        now: clock in seconds.
        mark: every context opens one of these by its name, too: a profiler's, say.

    >>> ticks = iter([0.0, 6.0, 9.0, 10.0])
    >>> clock = IdleClock(now=lambda: next(ticks))
    >>> with clock.waiting("weights"):  # from 6 to 9
    ...     pass
    >>> clock.fraction()  # at 10
    0.3
    """

    def __init__(
        self,
        *,
        now: Callable[[], float] = time.perf_counter,
        mark: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._now, self._mark = now, mark
        self._open: list[tuple[bool, str]] = []  # (waiting?, name) of the contexts we are in
        self.start()

    def start(self) -> None:
        """Count from now on; what was counted before is forgotten."""
        self._idle: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._start = self._charged = self._now()  # up to `_charged` time has been accounted for

    def waiting(self, reason: str) -> AbstractContextManager[None]:
        """A context whose time is idle, for this reason."""
        return self._context(True, reason)

    def busy(self, work: str) -> AbstractContextManager[None]:
        """A context whose time, without the waits inside it, is work of this name."""
        return self._context(False, work)

    def count_as_work(self, reason: str, seconds: float) -> None:
        """Takes `seconds` off the wait for `reason`: what was awaited says it was work."""
        self._idle[reason] = max(0.0, self._idle.get(reason, 0.0) - seconds)

    def fraction(self) -> float:
        """Idle share of the wall-clock since `start()`, in [0, 1]; includes a wait under way."""
        self._charge()
        elapsed = self._charged - self._start
        return sum(self._idle.values()) / elapsed if elapsed > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """Idle seconds since `start()`, by reason."""
        self._charge()
        return dict(self._idle)

    def busy_seconds(self) -> dict[str, float]:
        """Seconds of named work since `start()`, by name."""
        self._charge()
        return dict(self._busy)

    @contextmanager
    def _context(self, waits: bool, name: str) -> Iterator[None]:
        self._charge()
        self._open.append((waits, name))
        try:
            with self._mark(name):
                yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Charge the time since the last call to the innermost open context."""
        now = self._now()
        if self._open:
            waits, name = self._open[-1]
            table = self._idle if waits else self._busy
            table[name] = table.get(name, 0.0) + now - self._charged
        self._charged = now


# Rollouts and summary --------------------------------------------------------------------------


def escape_control(text: str, keep: str = "\n") -> str:
    """Make a text safe to print: all that could steer a terminal or hide becomes a `\\x..` escape.

    Those in `keep` stay. Escaped are the other control characters, line and paragraph separators,
    lone surrogates (no file can hold them) and marks that reverse the direction of writing.

    >>> escape_control("a\\tb\\x1b[31mred")
    'a\\\\tb\\\\x1b[31mred'
    """
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in keep
        and (
            unicodedata.category(char) in ("Cc", "Zl", "Zp", "Cs")
            or unicodedata.bidirectional(char) in _DIRECTION_MARKS
        )
        else char
        for char in text
    )


_DIRECTION_MARKS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


def write_rollouts(run_dir: Path, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Append sampled responses to rollouts/rollouts.jsonl (to process) and .md (to read).

    Args:
        run_dir: the run's folder.
        step: optimizer steps done.
        rollouts: each with `prompt` and `response` (str) and what is to be shown with them, in this
            order: usually `reward`, `reward_parts` (a mapping), `version` and `staleness`.
    """
    folder = run_dir / "rollouts"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rollouts.jsonl", "a", encoding="utf-8") as file:
        for rollout in rollouts:
            line = json.dumps(_plain({"step": step, **rollout}), allow_nan=False)
            file.write(line + "\n")  # ASCII: json escapes all the rest
    with open(folder / "rollouts.md", "a", encoding="utf-8") as file:
        for number, rollout in enumerate(rollouts, 1):
            about = [
                f"{name} {_readable(value)}"
                for name, value in rollout.items()
                if name not in ("prompt", "response")
            ]
            title = f"Step {step}, sample {number} of {len(rollouts)}"
            file.write(
                f"## {title}\n\n{escape_control(', '.join(about))}\n\n"
                f"Prompt:\n\n{_fenced(rollout['prompt'])}\n\n"
                f"Response:\n\n{_fenced(rollout['response'])}\n\n"
            )


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, in the order given, beside and then renamed: whole or not at all.

    Numbers that are not finite become null.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    beside = run_dir / "summary.json.partial"
    beside.write_text(json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n", "utf-8")
    os.replace(beside, run_dir / "summary.json")


def _plain(value: Any) -> Any:
    """The value in types that JSON has; what is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return _plain(value.tolist())
    return str(value)


def _readable(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_readable(item)}" for key, item in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _fenced(text: str) -> str:
    """The text as a Markdown code block, whose fence no line of the text can close."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{escape_control(text)}\n{fence}"


# Figure ----------------------------------------------------------------------------------------

_REWARD, _ACCURACY, _TRAINER, _SEARCHER = "#1f5fa8", "#d95f02", "#1f5fa8", "#2a9d58"

_Points = tuple[np.ndarray, np.ndarray, np.ndarray]  # steps, wall_s, values, each float64 [n]
_ToX = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (steps, wall_s) -> positions along x


def draw_figure(run_dir: Path) -> Path:
    """Draw training.png from metrics.jsonl and return its path.

    Above: reward (each step's and smoothed) and held-out accuracy against optimizer steps,
    responses and wall-clock. Below: staleness, idle time and throughput. A panel whose metrics
    were not logged says so. Where a resumed run repeats a step, the later value counts.

    Raises:
        ValueError: metrics.jsonl is missing or empty.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, PercentFormatter

    records = read_metrics(run_dir)
    if not records:
        raise ValueError(f"{run_dir / 'metrics.jsonl'} holds no metrics, so there is no figure yet")
    scale, unit = _time_unit(max(record["wall_s"] for record in records))

    def by_step(steps: np.ndarray, wall_s: np.ndarray) -> np.ndarray:
        return steps

    def by_clock(steps: np.ndarray, wall_s: np.ndarray) -> np.ndarray:
        return wall_s * scale

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
    figure = Figure(figsize=(16, 8.5), dpi=110, layout=layout)
    FigureCanvasAgg(figure)  # not pyplot: no window is opened and no figure kept alive
    (steps, responses, clock), (stale, idle, speed) = figure.subplots(2, 3)

    _draw_learning(steps, records, {"": by_step})
    _draw_learning(
        responses,
        records,
        {
            f", by responses {label}": _by_metric(records, name)
            for label, name in (("trained on", "buffer/drawn"), ("generated", "buffer/received"))
            if len(_points(records, name)[0])
        },
    )
    _draw_learning(clock, records, {"": by_clock})
    steps.set(title="Learning, by optimizer steps", xlabel="optimizer steps")
    responses.set(title="Learning, by responses", xlabel="responses")
    responses.xaxis.set_major_formatter(EngFormatter(sep=""))
    clock.set(title="Learning, by wall-clock", xlabel=f"wall-clock, {unit}")

    ages = {"max": "#8e8e8e", "p95": "#7fa3cf", "mean": _TRAINER}
    _draw_lines(stale, records, by_step, {f"staleness/{k}": (k, c) for k, c in ages.items()})
    stale.set(title="Staleness", xlabel="optimizer steps", ylabel="optimizer steps behind")
    roles = (("trainer", "trained", _TRAINER), ("searcher", "generated", _SEARCHER))
    fractions = {f"time/{role}_idle_fraction": (f"{role}s", color) for role, _, color in roles}
    _draw_lines(idle, records, by_clock, fractions)
    idle.set(title="Idle time", xlabel=f"wall-clock, {unit}", ylabel="share of wall-clock")
    idle.set_ylim(0, max(0.05, idle.get_ylim()[1]))
    idle.yaxis.set_major_formatter(PercentFormatter(1.0))
    rates = {f"time/{done}_tokens_per_s": (done, color) for _, done, color in roles}
    _draw_lines(speed, records, by_clock, rates)
    speed.set(title="Throughput", xlabel=f"wall-clock, {unit}", ylabel="response tokens a second")
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))

    for axes in (steps, responses, clock, stale, idle, speed):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(run_dir.resolve().name, fontsize=14)
    path = run_dir / "training.png"
    beside = run_dir / "training.partial.png"
    figure.savefig(beside)
    os.replace(beside, path)
    return path


def _draw_learning(axes: Axes, records: list[dict[str, Any]], variants: dict[str, _ToX]) -> None:
    """Reward on the left axis and held-out accuracy on the right, once along each variant of x.

    Where a task has no right answers, held-out reward is in the place of accuracy.
    """
    reward, accuracy = _points(records, "reward/mean"), _points(records, "eval/accuracy")
    held_out = "held-out accuracy"
    if not len(accuracy[0]):
        held_out, accuracy = "held-out reward", _points(records, "eval/reward")
    if not variants or not (len(reward[0]) or len(accuracy[0])):
        _say_missing(axes)
        return
    handles = []
    right = axes.twinx() if len(accuracy[0]) else None
    for number, (suffix, to_x) in enumerate(variants.items()):
        dashes, fill = ("-", _ACCURACY) if number == 0 else ("--", "white")
        x = to_x(*reward[:2])
        if number == 0:
            axes.plot(x, reward[2], color=_REWARD, alpha=0.25, linewidth=0.8)
        label = f"reward, smoothed{suffix}" if not suffix else f"reward{suffix}"
        handles += axes.plot(
            x, _smooth(reward[2]), dashes, color=_REWARD, linewidth=1.8, label=label
        )
        if right is not None:
            handles += right.plot(
                to_x(*accuracy[:2]),
                accuracy[2],
                dashes,
                color=_ACCURACY,
                marker="o",
                markersize=4.5,
                markerfacecolor=fill,
                linewidth=1.2,
                label=f"{held_out}{suffix}",
            )
    axes.set_ylabel("reward", color=_REWARD)
    axes.tick_params(axis="y", colors=_REWARD)
    if right is not None:
        right.set_ylabel(held_out, color=_ACCURACY)
        right.tick_params(axis="y", colors=_ACCURACY)
        right.spines[["top", "left"]].set_visible(False)
    # On the upper axes, or its lines would cross the legend.
    (right or axes).legend(handles=handles, fontsize=8.5, loc="best", framealpha=0.9)


def _draw_lines(
    axes: Axes, records: list[dict[str, Any]], to_x: _ToX, lines: dict[str, tuple[str, str]]
) -> None:
    """A smoothed line a metric, from zero up; `lines` maps its name to label and colour."""
    for name, (label, color) in lines.items():
        steps, wall_s, values = _points(records, name)
        if len(values):
            x = to_x(steps, wall_s)
            axes.plot(x, values, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(x, _smooth(values), color=color, linewidth=1.8, label=label)
    if not axes.lines:
        _say_missing(axes)
        return
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8.5, loc="best", framealpha=0.9)


def _say_missing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color="gray")


def _points(records: list[dict[str, Any]], name: str) -> _Points:
    """Where a metric was logged, by ascending step; the last value of a step counts."""
    rows = {r["step"]: (r["wall_s"], r[name]) for r in records if r.get(name) is not None}
    table = np.array([(step, *rows[step]) for step in sorted(rows)], dtype=float).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _by_metric(records: list[dict[str, Any]], name: str) -> _ToX:
    """Position along x by the value that a metric, such as a count, had at a step."""
    known_steps, _, known_values = _points(records, name)
    return lambda steps, wall_s: np.interp(steps, known_steps, known_values)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average over about 1/20 of the run, cut off at both ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    positions = np.arange(len(values))
    first = np.maximum(positions - half, 0)
    last = np.minimum(positions + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _time_unit(longest_s: float) -> tuple[float, str]:
    """Factor from seconds, and the unit to show a duration of this size in."""
    if longest_s < 300:
        return 1.0, "s"
    return (1 / 60, "min") if longest_s < 3 * 3600 else (1 / 3600, "h")
