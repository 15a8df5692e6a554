"""Do searcher and trainer overlap? Wall-clock over its bound, with stand-ins for searchers' GPUs.

    python bench/overlap.py             four regimes, and two in which asynchrony gains little
    python bench/overlap.py --quick     one round of few steps, a minute or two
    torchrun --nproc_per_node=2 bench/overlap.py --worker '{...}' key=value ...     one job (`Stub`)

Every run is a job of `train.run` with 1 trainer and 1 searcher: the trainer computes on its own
core, and channel, rewards, reference log-probs, buffer and broadcast are the real ones. Only the
engine is a stand-in for GPUs of its own (`StubEngine`): it sleeps instead of decoding. It has a
fixed number of slots, as many as a step has responses; a response takes one for its length times
`seconds_per_token`, then the next in the queue takes it. Tokens and lengths are from a file: worked
answers to word problems made from templates, one token a character (bench/data/word_problems); for
the heavy tail they are cut and joined to lengths with p99 / p50 = 8. Their behavior log-probs are
unknown (NaN): the objective, trajectory balance, reads none. Weights are received, checked, loaded
and probed as in `engine.HFEngine`, at once, in the middle of the responses under way.

Arms: `sync` generates, trains and publishes in lock-step; `async` never waits, and is held to what
lock-step does: each response is trained on once (trainer.max_reuse=1, K = S), so that equal trained
samples are equal generated samples. A trainer that reuses samples would beat any bound on
generation. Both publish every step. The clock runs from the end of step 2 to the end of the last.

    bound = max(T_gen, T_train + T_sync)
    T_gen     that the slots need for the response tokens trained on, were they always full; what
              had been in stock before the clock began, and was used up, is taken off
    T_train   the trainer's own time, without waits, for as many tokens; of the round's two runs
              that counts in which a token took it less, so that no slow moment loosens the bound
    T_sync    its time in publications, in the same run

`seconds_per_token` gives T_gen : T_train its ratio, by a run at the start in which generation takes
no time. Arms take turns; the median of the rounds counts. `fraction_of_bound` = bound / async
wall-clock. Where generation is negligible there is nothing to overlap; where an engine stops for
long at each of many publications, it generates less than the bound allows it. Both cores must be
free: `disturbed_rounds` counts rounds in which they evidently were not (a fraction above 1.05).
The last line is one JSON object; a table and a figure go to --out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # before this folder, which has a buffer.py of its own

from bench.measure import say  # noqa: E402
from engine import Completion, EngineConfig, EngineOptions, HFEngine, Sampling, Tokens  # noqa: E402
from experiments.staleness import markdown  # noqa: E402
from experiments.warm import NUM_RANKS, Server, run_rank  # noqa: E402
from metrics import read_metrics  # noqa: E402
from weights import WeightUpdate  # noqa: E402

DATA = HERE / "data" / "word_problems"
WARM_UP = 2  # steps before the clock begins
_STEP_S = 0.01  # most seconds that a step of the engine sleeps
RUN_TIMEOUT_S = 300.0
# A fraction of the bound beyond which a round says little: other processes held the searcher up
# before the clock began, and what its slots had generated meanwhile came in afterwards.
DISTURBED = 1.05

TAIL = 8.0  # p99 / p50
MEDIAN_TOKENS = 48  # of the heavy tail
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 300, 512


# --------------------------------------------------------------------------- the stand-in


@dataclass(frozen=True, slots=True, kw_only=True)
class Stub:
    """What the engine stands in for. On the command line: a JSON object of these."""

    responses: str  # file of `save_responses`
    seconds_per_token: float  # in its slot, whatever the other slots do
    load_s: float = 0.0  # seconds that loading weights takes longer than it really does


@dataclass(order=True, slots=True)
class _Response:
    """In a slot, or waiting for one. Times are of the engine's clock, which stops with it."""

    ends: float
    number: int
    begins: float = field(compare=False)
    key: int = field(compare=False)
    place: int = field(compare=False)  # among the responses of its prompt
    tokens: np.ndarray = field(compare=False)  # int32 [T]
    truncated: bool = field(compare=False)
    versions: list[tuple[int, int]] = field(compare=False, default_factory=list)


class StubEngine(HFEngine):
    """A stand-in for GPUs of the searcher's own: sleeps, and gives responses from a file.

    Receives and loads weights, and scores given tokens, as `HFEngine` does. `add` and `step` take
    time, `generate` takes none (evaluation is not timed). Decodes on by itself whatever its caller
    does, as vLLM's core does; `max_seconds` is not kept.

    Args:
        now: clock in seconds.
    """

    def __init__(
        self,
        cfg: EngineConfig,
        options: EngineOptions,
        stub: Stub,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(cfg, options)
        self._stub, self._slots = stub, cfg.max_num_seqs
        self._now, self._sleep = now, sleep
        self._responses = load_responses(stub.responses)
        self._rng = np.random.default_rng([options.seed, 4])
        self._order: list[int] = []
        self._stopped_s = 0.0
        self._version = -1
        self._number = 0
        self._waiting: deque[_Response] = deque()
        self._in_slots: list[_Response] = []  # a heap: the next to end first
        self._groups: dict[int, dict[int, Completion]] = {}  # key -> place -> response
        self._sizes: dict[int, int] = {}  # key -> responses of the prompt
        self._done: list[tuple[int, list[Completion]]] = []

    def add(self, key: int, prompt: Tokens, sampling: Sampling, *, seed: int | None = None) -> None:
        """Queues a prompt; `step` gives its `sampling.n` responses with `key`."""
        self._advance()
        self._groups[key], self._sizes[key] = {}, sampling.n
        for place in range(sampling.n):
            tokens, truncated = self._draw(sampling.max_tokens)
            self._number += 1
            self._waiting.append(_Response(0.0, self._number, 0.0, key, place, tokens, truncated))
        while self._waiting and len(self._in_slots) < self._slots:
            self._begin(self._clock())

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Sleeps until the next response ends, 10 ms at most; prompts with all of theirs ended."""
        self._advance()
        if self._in_slots and not self._done:
            self._sleep(min(max(self._in_slots[0].ends - self._clock(), 0.0), _STEP_S))
            self._advance()
        self.on_step()
        done, self._done = self._done, []
        return done

    def drop(self) -> None:
        """Forgets all that is under way."""
        for held in (self._waiting, self._in_slots, self._groups, self._sizes, self._done):
            held.clear()

    def generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """`sampling.n` responses for each prompt, at once."""
        return [
            [
                self._completion_of(*self._draw(sampling.max_tokens), [(self._version, 0)])
                for _ in range(sampling.n)
            ]
            for _ in prompts
        ]

    def update(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Loads the newest weights that have come; what is under way stands still meanwhile."""
        if wait_for is None and not self.has_update():
            return None
        self._advance()
        stopped = self._now()
        found = super().update(wait_for=wait_for, timeout_s=timeout_s)
        if found is not None:
            self._sleep(self._stub.load_s)
            now = self._clock_at(stopped)
            for response in self._in_slots:
                note_version(response, found.version, self._tokens_at(response, now))
            self._version = found.version
        stall_s = self._now() - stopped if self._in_slots else 0.0
        self._stopped_s += stall_s
        return found and replace(found, load_s=found.load_s + self._stub.load_s, stall_s=stall_s)

    def _clock(self) -> float:
        return self._clock_at(self._now())

    def _clock_at(self, now: float) -> float:
        return now - self._stopped_s

    def _tokens_at(self, response: _Response, clock: float) -> int:
        count = int((clock - response.begins) / self._stub.seconds_per_token)
        return min(count, len(response.tokens) - 1)  # rounding; the last one ends it

    def _begin(self, clock: float) -> None:
        """The first in the queue takes a free slot."""
        response = self._waiting.popleft()
        response.begins = clock
        response.ends = clock + len(response.tokens) * self._stub.seconds_per_token
        response.versions = [(self._version, 0)]
        heappush(self._in_slots, response)

    def _advance(self) -> None:
        """All that has happened up to now: slots that were left, and taken at that moment."""
        clock = self._clock()
        while self._in_slots and self._in_slots[0].ends <= clock:
            ended = heappop(self._in_slots)
            group = self._groups[ended.key]
            group[ended.place] = self._completion_of(ended.tokens, ended.truncated, ended.versions)
            if len(group) == self._sizes[ended.key]:
                self._done.append((ended.key, [group[place] for place in sorted(group)]))
                del self._groups[ended.key], self._sizes[ended.key]
            if self._waiting:
                self._begin(ended.ends)

    def _draw(self, max_tokens: int) -> tuple[np.ndarray, bool]:
        """The next response of the file, in an order that is new each time it has been through."""
        if not self._order:
            self._order = self._rng.permutation(len(self._responses)).tolist()
        tokens = self._responses[self._order.pop()]
        return tokens[:max_tokens], len(tokens) > max_tokens

    def _completion_of(
        self, tokens: np.ndarray, truncated: bool, versions: Sequence[tuple[int, int]]
    ) -> Completion:
        unknown = np.full(len(tokens), np.nan, dtype=np.float32)
        return Completion(tokens=tokens, logprobs=unknown, versions=versions, truncated=truncated)


def note_version(response: _Response, version: int, num_tokens: int) -> None:
    """From its token `num_tokens` on the response is sampled by `version`."""
    while response.versions and response.versions[-1][1] >= num_tokens:
        response.versions.pop()  # it sampled no token
    response.versions.append((version, num_tokens))


def make_stub(stub: Stub, cfg: EngineConfig, options: EngineOptions) -> StubEngine:
    """In place of `engine.make_engine`."""
    return StubEngine(cfg, options, stub)


def install(stub: Stub) -> None:
    """From now on this process's searchers have the stand-in for an engine."""
    import train

    vars(train)["make_engine"] = partial(make_stub, stub)


def worker(arguments: Sequence[str]) -> None:
    """One rank of a job, in a process that torchrun started."""
    started = time.monotonic()
    install(Stub(**json.loads(arguments[0])))
    run_rank(list(arguments[1:]), started=started)


# --------------------------------------------------------------------------- responses


def heavy_tail_lengths(count: int) -> np.ndarray:
    """Evenly spaced quantiles of a log-normal whose sample p99 / p50 is 8, tokens, int64 [count].

    >>> lengths = heavy_tail_lengths(128)
    >>> int(np.median(lengths)), round(float(np.percentile(lengths, 99) / np.median(lengths)), 1)
    (48, 8.0)
    """
    normal = NormalDist()
    places = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    low, high = 0.0, 2.0
    for _ in range(30):  # the ratio grows with sigma
        sigma = (low + high) / 2
        lengths = np.clip(np.rint(MEDIAN_TOKENS * np.exp(sigma * places)), 2, MAX_RESPONSE_TOKENS)
        short = np.percentile(lengths, 99) < TAIL * np.median(lengths)
        low, high = (sigma, high) if short else (low, sigma)
    return lengths.astype(np.int64)


def make_responses(tokenizer: Any, *, heavy_tail: bool) -> list[np.ndarray]:
    """Responses with their end-of-text tokens, int32 [T] each: gold answers, or of other lengths.

    The heavy tail's are cut from the answers one after another.
    """
    lines = (DATA / "train.jsonl").read_text("utf-8").splitlines()
    answers = [tokenizer(json.loads(line)["answer"])["input_ids"] for line in lines]
    if heavy_tail:
        lengths = heavy_tail_lengths(len(answers)) - 1  # and the end-of-text token
        text = np.resize(np.concatenate(answers), int(lengths.sum()))
        answers = np.split(text, np.cumsum(lengths)[:-1])
    end = tokenizer.eos_token_id
    return [np.array([*tokens, end], dtype=np.int32) for tokens in answers]


def save_responses(path: Path, responses: Sequence[np.ndarray]) -> None:
    """Tokens, int32 [N], and lengths, int32 [responses], in one npz file."""
    lengths = np.array([len(tokens) for tokens in responses], dtype=np.int32)
    np.savez(path, tokens=np.concatenate(responses).astype(np.int32), lengths=lengths)


def load_responses(path: str) -> list[np.ndarray]:
    """What `save_responses` saved, int32 [T] each."""
    with np.load(path) as file:
        return np.split(file["tokens"], np.cumsum(file["lengths"])[:-1])


def save_model(folder: Path, *, layers: int) -> Any:
    """A small random Llama that reads as long a sequence as the data has; its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from sft import tiny_model, tiny_tokenizer

    disable_progress_bar()
    tokenizer = tiny_tokenizer()
    config: LlamaConfig = tiny_model(tokenizer, seed=0).config
    config.num_hidden_layers = layers
    config.max_position_embeddings = 1024
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


# --------------------------------------------------------------------------- regimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """How long generation takes."""

    name: str
    ratio: float  # T_gen / T_train
    heavy_tail: bool = False
    load: float = 0.0  # seconds that an engine stops at a publication, over T_train of a step
    gains: bool = True  # False: shown because asynchrony gains little or nothing; one round

    @property
    def responses(self) -> str:
        return "heavy_tail" if self.heavy_tail else "word_problems"


REGIMES = (
    Regime(name="1:1", ratio=1.0),
    Regime(name="2:1", ratio=2.0),
    Regime(name="1:2", ratio=0.5),
    Regime(name="heavy_tail", ratio=1.0, heavy_tail=True),
    Regime(name="generation_negligible", ratio=0.02, gains=False),
    Regime(name="publication_dominates", ratio=1.0, load=2.0, gains=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of a run."""

    steps: int = 16  # without those of the warm-up
    batch_size: int = 16  # responses a step
    responses: int = 4  # to a prompt, K and S
    layers: int = 2  # of the policy
    rounds: int = 3

    @property
    def slots(self) -> int:
        return self.batch_size


def overrides(size: Size, folder: Path, name: str, mode: str, seed: int) -> list[str]:
    """The command line of train.py for a run."""
    return [
        "task=gsm8k",
        f"task.data_dir={json.dumps(str(DATA))}",
        f"task.max_prompt_tokens={MAX_PROMPT_TOKENS}",
        f"task.max_response_tokens={MAX_RESPONSE_TOKENS}",
        "model=custom",
        f"model.path={json.dumps(str(folder / 'model'))}",
        "engine=hf",
        f"engine.max_num_seqs={size.slots}",
        f"mode={mode}",
        f"seed={seed}",
        f"trainer.steps={WARM_UP + size.steps}",
        f"trainer.batch_size={size.batch_size}",
        f"trainer.responses_per_prompt={size.responses}",
        "trainer.max_reuse=1",
        "trainer.publish_every=1",
        "searcher.temperature=1",
        f"searcher.responses_per_prompt={size.responses}",
        # A prompt stays until its longest response ends: this many keep every slot taken
        f"searcher.prompts_in_flight={4 * size.slots // size.responses}",
        "searcher.score_every_s=0.05",
        "buffer.deduplicate=false",
        "buffer.recency_prob=1",
        f"buffer.initial_trajectories={size.batch_size}",
        "rewards.num_workers=1",
        "eval.every=0",
        "eval.before=false",
        "eval.num_problems=4",
        "run.rollouts_every=0",
        f"run.root={json.dumps(str(folder / 'runs'))}",
        f"run.name={name}",
    ]


# --------------------------------------------------------------------------- one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a run did between the end of the warm-up and its last step."""

    wall_s: float
    tokens: float  # response tokens trained on
    responses: int  # trained on
    generated_tokens: float
    waiting_s: float  # of the trainer
    publish_s: float
    stock_fall: int  # responses by which the buffer's stock fell; negative: it rose
    searcher_idle: float  # fraction of the whole run in which the searcher's loop waited
    staleness: float  # mean over the whole run, steps

    @property
    def busy_s(self) -> float:
        return self.wall_s - self.waiting_s

    def gen_s(self, seconds_per_token: float, slots: int) -> float:
        """T_gen of the docstring above."""
        from_stock = max(self.stock_fall, 0) * self.tokens / max(self.responses, 1)
        return max(self.tokens - from_stock, 0.0) * seconds_per_token / slots

    def slots_idle(self, seconds_per_token: float, slots: int) -> float:
        """Fraction of the slots' time in which they were free, or stood still."""
        return max(0.0, 1.0 - self.generated_tokens * seconds_per_token / slots / self.wall_s)


def read_window(folder: Path, warm_up: int = WARM_UP) -> Window:
    """From the metrics and the summary of a run's folder."""
    steps = {int(r["step"]): r for r in read_metrics(folder) if r.get("time/step_s") is not None}
    first, last = steps[warm_up], steps[max(steps)]
    begun = steps[1]["wall_s"] - steps[1]["time/step_s"]
    summary = json.loads((folder / "summary.json").read_text())

    def waited(record: dict[str, Any]) -> float:
        return sum(
            value for name, value in record.items() if name.startswith("time/trainer_waiting_")
        )

    def amount(name: str) -> float:
        """What a rate since the first step comes to, in the window."""
        return sum(sign * r[name] * (r["wall_s"] - begun) for sign, r in ((1, last), (-1, first)))

    return Window(
        wall_s=last["wall_s"] - first["wall_s"],
        tokens=amount("time/trained_tokens_per_s"),
        responses=int(last["buffer/drawn"] - first["buffer/drawn"]),
        generated_tokens=amount("time/generated_tokens_per_s"),
        waiting_s=waited(last) - waited(first),
        publish_s=sum(
            sign * r.get("time/publish_s", 0.0) * r["step"] for sign, r in ((1, last), (-1, first))
        ),
        stock_fall=int(first["buffer/num_trajectories"] - last["buffer/num_trajectories"]),
        searcher_idle=summary["searcher_idle_fraction"],
        staleness=summary["staleness_mean"],
    )


def perform(
    server: Server, size: Size, folder: Path, name: str, mode: str, stub: Stub, seed: int
) -> Window:
    """One job.

    Raises:
        RuntimeError: it failed.
    """
    run = folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    logs = [folder / "runs" / f"{name}.rank{rank}.log" for rank in range(NUM_RANKS)]
    reason = server.execute(
        overrides(size, folder, name, mode, seed),
        logs,
        timeout_s=RUN_TIMEOUT_S,
        before=partial(install, stub),
    )
    if reason:
        tails = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())
        raise RuntimeError(f"{name}: {reason}\n{tails}")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return read_window(run)


# --------------------------------------------------------------------------- figures


def bound_s(gen_s: float, train_s: float, sync_s: float) -> float:
    """Least wall-clock where generation and training overlap wholly.

    >>> bound_s(2.0, 1.0, 0.1), bound_s(0.5, 1.0, 0.1)
    (2.0, 1.1)
    """
    return max(gen_s, train_s + sync_s)


def compare(sync: Window, asynchronous: Window, stub: Stub, slots: int) -> dict[str, float]:
    """Figures of one round of a regime: seconds of the window, and ratios."""
    per_token = stub.seconds_per_token
    scale = asynchronous.tokens / sync.tokens
    quick = min(sync, asynchronous, key=lambda window: window.busy_s / window.tokens)
    train_s = (quick.busy_s - quick.publish_s) * asynchronous.tokens / quick.tokens
    sync_s = quick.publish_s
    gen_s = asynchronous.gen_s(per_token, slots)
    bound = bound_s(gen_s, train_s, sync_s)
    sync_bound = bound_s(sync.gen_s(per_token, slots), train_s / scale, sync_s)
    return {
        "gen_s": gen_s,
        "train_s": train_s,
        "sync_s": sync_s,
        "bound_s": bound,
        "async_s": asynchronous.wall_s,
        "lockstep_s": sync.wall_s,
        "fraction_of_bound": bound / asynchronous.wall_s,
        "async_over_bound": asynchronous.wall_s / bound,
        "sync_over_bound": sync.wall_s / sync_bound,
        # of equally many tokens
        "sync_over_async": sync.wall_s * scale / asynchronous.wall_s,
        "async_trainer_idle": asynchronous.waiting_s / asynchronous.wall_s,
        "sync_trainer_idle": sync.waiting_s / sync.wall_s,
        "async_slots_idle": asynchronous.slots_idle(per_token, slots),
        "sync_slots_idle": sync.slots_idle(per_token, slots),
        "async_searcher_idle": asynchronous.searcher_idle,
        "sync_searcher_idle": sync.searcher_idle,
        "async_staleness": asynchronous.staleness,
    }


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of every figure."""
    return {name: median(figures[name] for figures in rounds) for name in rounds[0]}


def table(results: dict[str, dict[str, float]]) -> str:
    """Markdown: a line a regime; seconds of the window."""
    header = [
        "generation : training",
        "T_gen",
        "T_train",
        "T_sync",
        "async",
        "over bound",
        "bound / async",
        "sync",
        "over bound",
        "sync / async",
        "trainer idle, async / sync",
        "slots idle, async / sync",
        "staleness",
    ]
    rows = []
    for name, f in results.items():
        rows.append(
            [
                name.replace("_", " "),
                f"{f['gen_s']:.2f}",
                f"{f['train_s']:.2f}",
                f"{f['sync_s']:.3f}",
                f"{f['async_s']:.2f}",
                f"{f['async_over_bound']:.2f}",
                f"{f['fraction_of_bound']:.3f}",
                f"{f['lockstep_s']:.2f}",
                f"{f['sync_over_bound']:.2f}",
                f"{f['sync_over_async']:.2f}",
                f"{f['async_trainer_idle']:.0%} / {f['sync_trainer_idle']:.0%}",
                f"{f['async_slots_idle']:.0%} / {f['sync_slots_idle']:.0%}",
                f"{f['async_staleness']:.1f}",
            ]
        )
    return markdown(header, rows)


def draw(results: dict[str, dict[str, float]], path: Path) -> None:
    """Wall-clock over the bound, by regime and arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = np.arange(len(results))
    for shift, arm, color in ((-0.2, "sync", "#b0b7c3"), (0.2, "async", "#2a6fdb")):
        heights = [figures[f"{arm}_over_bound"] for figures in results.values()]
        bars = axes.bar(places + shift, heights, 0.38, label=arm, color=color)
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(places, [name.replace("_", "\n") for name in results], fontsize=8)
    axes.set_ylabel("wall-clock / max(T_gen, T_train + T_sync)", fontsize=8)
    axes.set_title("searchers: latency stand-ins for GPUs of their own", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


# --------------------------------------------------------------------------- entry


def calibrate(
    server: Server, size: Size, folder: Path, regimes: Sequence[Regime]
) -> dict[str, float]:
    """Seconds that the trainer takes for a response token, by the file of responses."""
    seconds = {}
    for responses in dict.fromkeys(regime.responses for regime in regimes):
        stub = Stub(responses=str(folder / f"{responses}.npz"), seconds_per_token=1e-7)
        window = perform(server, size, folder, f"calibrate-{responses}", "sync", stub, 0)
        seconds[responses] = window.busy_s / window.tokens
        say(
            f"{responses}: a step takes the trainer {window.busy_s / size.steps:.3f} s, "
            f"{window.tokens / size.steps:.0f} response tokens"
        )
    return seconds


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [regime.name for regime in REGIMES]
    add = parser.add_argument
    add("--quick", action="store_true", help="one round of few steps with a smaller policy")
    add("--rounds", type=int, help="of each regime; the median counts")
    add("--steps", type=int, help="timed optimizer steps a run")
    add("--regimes", nargs="+", choices=names, default=names)
    add("--folder", type=Path, default=Path("runs/overlap"), help="model, responses, run folders")
    add("--out", type=Path, default=HERE / "results", help="table and figure")
    return parser.parse_args(list(arguments))


def main(arguments: Sequence[str]) -> dict[str, Any]:
    options = parse(arguments)
    size = Size(steps=6, batch_size=8, layers=1, rounds=1) if options.quick else Size()
    size = replace(size, rounds=options.rounds or size.rounds, steps=options.steps or size.steps)
    regimes = [regime for regime in REGIMES if regime.name in options.regimes]
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = save_model(folder / "model", layers=size.layers)
    for name in dict.fromkeys(regime.responses for regime in regimes):
        made = make_responses(tokenizer, heavy_tail=name == "heavy_tail")
        save_responses(folder / f"{name}.npz", made)
        lengths = [len(tokens) for tokens in made]
        middle, high = np.percentile(lengths, [50, 99])
        say(f"{name}: {np.mean(lengths):.0f} tokens a response, p99 / p50 = {high / middle:.1f}")
    server = Server()
    train_s = calibrate(server, size, folder, regimes)  # a token
    rounds: dict[str, list[dict[str, float]]] = {regime.name: [] for regime in regimes}
    for number in range(size.rounds):
        for regime in regimes:
            if number and not regime.gains:
                continue
            token_s = train_s[regime.responses]
            made = load_responses(str(folder / f"{regime.responses}.npz"))
            step_s = token_s * size.batch_size * float(np.mean([len(tokens) for tokens in made]))
            stub = Stub(
                responses=str(folder / f"{regime.responses}.npz"),
                seconds_per_token=regime.ratio * token_s * size.slots,
                load_s=regime.load * step_s,
            )
            windows = {}
            for mode in ("sync", "async") if number % 2 == 0 else ("async", "sync"):
                name = f"{regime.name.replace(':', '-')}-{mode}-{number}"
                windows[mode] = perform(server, size, folder, name, mode, stub, number)
            figures = compare(windows["sync"], windows["async"], stub, size.slots)
            rounds[regime.name].append(figures)
            say(
                f"round {number + 1}, {regime.name}: async {figures['async_s']:.2f} s, "
                f"{figures['fraction_of_bound']:.3f} of the bound; sync / async "
                f"{figures['sync_over_async']:.2f}"
                + (" (disturbed)" if figures["fraction_of_bound"] > DISTURBED else "")
            )
    results = {name: medians(figures) for name, figures in rounds.items()}
    text = table(results)
    print(text, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "overlap.md").write_text(text + "\n", "utf-8")
    draw(results, options.out / "overlap.png")
    goal = {regime.name for regime in regimes if regime.gains}

    def pick(figure: str, names: set[str]) -> dict[str, float]:
        return {name: round(f[figure], 4) for name, f in results.items() if name in names}

    every = set(results)
    return {
        "fraction_of_bound": pick("fraction_of_bound", goal),
        "fraction_of_bound_elsewhere": pick("fraction_of_bound", every - goal),
        "sync_over_async": pick("sync_over_async", every),
        "sync_over_bound": pick("sync_over_bound", every),
        "async_trainer_idle": pick("async_trainer_idle", every),
        "sync_trainer_idle": pick("sync_trainer_idle", every),
        "async_slots_idle": pick("async_slots_idle", every),
        "sync_slots_idle": pick("sync_slots_idle", every),
        "disturbed_rounds": sum(
            f["fraction_of_bound"] > DISTURBED for each in rounds.values() for f in each
        ),
        "rounds": size.rounds,
        "size": asdict(size),
        "searchers": "latency stand-ins for GPUs of their own",
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    else:
        print(json.dumps(main(sys.argv[1:])))
