"""The trainer's loop: receive -> draw -> forward -> objective -> backward -> step -> publish.

Runs on every trainer rank, in the main thread; trainer 0 also publishes weights, logs and ends the
run. Consumes: trajectories from its channel (a background thread receives them), or in
`mode=offline` those it was given; requests to stop. Produces: weights, snapshot by snapshot, and
checkpoints (background threads send and write them). Waits for: data, when the buffer can't serve a
draw, and in `mode=sync` for the whole round; the other trainers, where gradients are added up and
in each pass of a sharded policy. Ends: after `steps` steps and the evaluation of the final version;
or, told to stop, after a checkpoint. arXiv 2503.18929, sections 3 and 4.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import state
from accounting import Accounting
from buffer import Buffer, Group
from checkpoint import Checkpointer
from comm import Channel, Control, Kind, Message, Ranks, gather_texts
from engine import HFEngine
from evaluate import EvalConfig, held_out_sums
from events import EventLog
from gradient import accumulate_gradient, step_stats
from lora import LoraConfig
from losses import LossOutput
from metrics import IdleClock, Metrics, draw_figure, write_rollouts, write_summary
from model import (
    PADDED,
    Layout,
    LogprobsConfig,
    LogZHead,
    response_logprobs,
    uncompiled,
    unique_response_logprobs,
)
from offline import TrajectoryWriter
from packing import PackingConfig
from parallel import (
    ParallelConfig,
    any_rank,
    clip_gradients,
    copy_into,
    device_of,
    is_sharded,
    of_each_rank,
    sum_over_trainers,
    whole,
)
from rewards import FAILURES, Scorer, equal_rewards_warning
from schedules import beta_at, lr_at
from tasks.task import Problem, Task
from trajectory import Trajectory, pack, unpack
from weights import Publisher, named_weights

logger = logging.getLogger("tba")

_WARN_PERIOD_S = 60.0  # between two complaints of a trainer that has nothing to draw
_SAME_REWARD_BATCHES = 4  # batches' worth of responses with one reward, after which it is said


@dataclass
class BetaConfig:
    """KL coefficient, in reward units per nat; linear from `initial` to `final`."""

    initial: float = 0.02
    final: float | None = None  # null: constant
    target_step: int | None = None  # where the line would reach `final`; null: the last step
    stop_step: int | None = None  # where the line is cut and beta jumps to `final`; null: no cut


@dataclass
class LRConfig:
    """Learning rate over optimizer steps."""

    kind: str = "wsd"  # wsd (warm-up, stable, decay) | linear | constant
    peak: float = 1e-5
    warmup_steps: int = 20
    decay_steps: int = 0  # wsd: the last steps, in which it falls to `min_ratio` of the peak
    min_ratio: float = 0.0


@dataclass
class TrainerConfig:
    """How the policy is updated."""

    steps: int = 300
    batch_size: int = 140  # responses per optimizer step, over all trainers
    responses_per_prompt: int = 20  # K, drawn per prompt
    lr: LRConfig = field(default_factory=LRConfig)
    beta: BetaConfig = field(default_factory=BetaConfig)
    weight_decay: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float | None = 1.0
    precision: str = "float32"  # float32 | bfloat16 (forward pass; weights stay float32)
    # Most tokens in one forward and backward pass: those of a packed row, which must hold the
    # longest prompt and its response; with trainer.packing.attention=off, padding included
    tokens_per_micro_batch: int = 16384
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    logprobs: LogprobsConfig = field(default_factory=LogprobsConfig)
    gradient_checkpointing: bool = False
    compile: bool = False  # torch.compile of the policy's layers; needs a C++ compiler
    lora: LoraConfig = field(default_factory=LoraConfig)
    publish_every: int = 1  # k: steps between two publications of the weights
    # Draws after which a response is forgotten; the trainers then wait for new ones. null: none
    max_reuse: int | None = None
    # Steps after which the reference becomes the current policy (the paper's TBA', rho); 0: never.
    # The trainers then hold the reference and compute its log-probs when they draw.
    reference_reset_every: int = 0
    log_z_lr: float | None = None  # learning rate of a log Z head; null: there is none
    # Steps in a row whose loss or gradient is not finite, and which change nothing, before the job
    # ends; the groups of the last one are then in the run folder's bad_batch/
    max_skipped_steps: int = 5
    profile: bool = False  # a trace of a few steps, in the run folder's profile/


@dataclass(slots=True, kw_only=True)
class TrainerParts:
    """What a trainer works with; `train.py` puts it together."""

    ranks: Ranks
    control: Control
    channel: Channel | None  # None in mode=offline
    policy: PreTrainedModel
    optimizer: torch.optim.Optimizer  # its second group, if any, is the log Z head's
    objective: Callable[..., LossOutput]
    buffer: Buffer
    recency: Callable[[int], float]  # m of a step
    tokenizer: PreTrainedTokenizerBase
    prompts: Sequence[str]  # text of each training problem, for rollouts
    temperature: float  # of the policy and the reference
    probe_tokens: Sequence[np.ndarray]
    group: dist.ProcessGroup | None  # all trainers; None when there is one
    # trainer 0's, or every trainer's of a sharded policy; None in mode=offline
    publisher: Publisher | None
    metrics: Metrics | None  # trainer 0
    run_dir: Path
    started: float  # time.monotonic() when the process began
    first_step: int = 0  # steps done before, of a run that was resumed
    checkpointer: Checkpointer | None = None  # None: nothing is saved
    stop_file: Path | None = None  # trainer 0: its existence is a request to stop
    events: EventLog | None = None  # of what decides the losses, for `mode=replay`
    reference: PreTrainedModel | None = None  # where trainers compute its log-probs themselves
    reference_version: int = 0  # weights version that the reference is
    log_z_head: LogZHead | None = None
    layout: Layout = PADDED  # of the policy's and the reference's forward passes
    autocast: torch.dtype | None = None  # of the same; None: the dtype of the parameters
    writer: TrajectoryWriter | None = None  # keeps every trajectory that arrives
    evaluator: Evaluator | None = None  # mode=offline
    clock: IdleClock = field(default_factory=IdleClock)
    accounting: Accounting = field(default_factory=Accounting)
    arrivals: Arrivals = field(default_factory=lambda: Arrivals())
    totals: Totals = field(default_factory=lambda: Totals())


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """What a trainer needs to evaluate the policy itself, where no searcher does."""

    engine: HFEngine  # on the policy's own weights
    parallel: ParallelConfig  # how they are shared
    task: Task
    scorer: Scorer  # of the task's rewards
    measures: bool  # whether what the task measures besides the reward is evaluated
    problems: Sequence[Problem]  # this trainer's share of the held-out problems
    prompt_tokens: Sequence[np.ndarray]  # int32 [P] of each
    max_response_tokens: int


@dataclass(slots=True, kw_only=True)
class Totals:
    """What this trainer has trained on since the run's first step."""

    training_started: float = 0.0  # time.monotonic() at the first step, less `trained_before_s`
    trained_before_s: float = 0.0  # of training, before the run was resumed
    tokens_before: int = 0  # generated before the first step
    drawn: int = 0
    tokens: float = 0.0  # response tokens, over all trainers
    staleness_sum: float = 0.0
    staleness_max: int = 0
    uses_sum: int = 0  # of drawn responses, the times that each had been drawn before
    skipped_steps: int = 0  # because the loss or the gradient was not finite
    skipped_in_a_row: int = 0
    evaluations_due: set[int] = field(default_factory=set)  # versions whose evaluation is under way
    short_fraction: float = 0.0  # of the last draw, see `note_shortage`
    stop_looked: float = 0.0  # time.monotonic() of the last look for the file
    shortage_noted: float = -60.0  # time.monotonic() of the last warning
    rewards_checked: bool = False  # whether the first ones all being equal was looked for


@dataclass(slots=True, kw_only=True)
class Arrivals:
    """What has come from the searchers since the start (totals) and since the last step (lists)."""

    # int64 [problems]: responses to each training problem that this trainer has received
    completed: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    received: int = 0  # by this trainer
    generated: int = 0  # by all searchers, for all trainers
    generated_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)  # `Scored.status`, of all searchers
    num_cut: int = 0  # responses that searcher.max_response_seconds has ended, of all searchers
    rounds: dict[int, int] = field(
        default_factory=dict
    )  # searcher rank -> version it last finished
    idle: dict[int, float] = field(default_factory=dict)  # searcher rank -> idle fraction
    idle_s: dict[int, dict[str, float]] = field(default_factory=dict)
    logprob_gap: dict[int, float] = field(default_factory=dict)
    # searcher rank -> seconds of its last update of the weights, see metrics.py
    load_s: dict[int, float] = field(default_factory=dict)
    stall_s: dict[int, float] = field(default_factory=dict)
    step_to_token_s: dict[int, float] = field(default_factory=dict)
    # searcher rank -> since the start: restarts of its engine, prompts that began anew with it
    engine_restarts: dict[int, int] = field(default_factory=dict)
    requeued_prompts: dict[int, int] = field(default_factory=dict)
    evaluations: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    # version -> name -> mean over the held-out problems
    held_out: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: list[Trajectory] = field(default_factory=list)
    reward_bounds: tuple[float, float] = (np.inf, -np.inf)  # of all that this trainer has received


def train(
    cfg: TrainerConfig,
    parts: TrainerParts,
    *,
    evaluation: EvalConfig,
    initial_trajectories: int,
    lockstep: bool,
    probe_every: int,
    rollouts_every: int,
    checkpoint_every: int,
) -> None:
    """Runs optimizer steps on what the searchers send, until there are `cfg.steps`.

    Args:
        initial_trajectories: responses that all trainers together wait for before the first step.
        lockstep: train only on the round that was generated under the current weights.
        probe_every: every n-th publication carries log-probs for the engines to compare with.
        rollouts_every: steps between two samples written for reading; 0: none.
        checkpoint_every: steps between two checkpoints; 0: only at the end or when told to stop.
    """
    prompts_per_draw = cfg.batch_size // cfg.responses_per_prompt  # over all trainers
    first = parts.first_step
    due = evaluation.every > 0 and first % evaluation.every == 0 if first else evaluation.before
    due = due and first not in parts.arrivals.held_out
    # a resumed lock-step run goes on as if it had not ended, so without a probe of its own
    probe = first == 0 or not lockstep or due or first // cfg.publish_every % probe_every == 0
    publish(parts, first, evaluate=due or first == cfg.steps, probe=probe, final=first == cfg.steps)
    if first < cfg.steps:  # else only the last evaluation is left, and nothing more comes
        fill(parts, prompts_per_draw, initial_trajectories, lockstep=lockstep)
    parts.clock.start()
    parts.accounting.start()
    parts.totals.training_started = time.monotonic() - parts.totals.trained_before_s
    if first == 0:
        parts.totals.tokens_before = parts.arrivals.generated_tokens
    parts.control.stoppable = True
    for step in range(first, cfg.steps):
        step_started = time.monotonic()
        if not lockstep:
            receive(parts)
        elif step % cfg.publish_every == 0:
            wait_for_round(parts, version=step)
        note_equal_rewards(parts, _SAME_REWARD_BATCHES * cfg.batch_size)
        if cfg.reference_reset_every and step and step % cfg.reference_reset_every == 0:
            reset_reference(parts, version=step)
        groups = draw(cfg, parts, prompts_per_draw, step)
        complete_reference(cfg, parts, groups)
        values = update_policy(cfg, parts, groups, step)
        version = step + 1
        final = version == cfg.steps
        if final or version % cfg.publish_every == 0:
            due = final or (evaluation.every > 0 and version % evaluation.every == 0)
            probe = due or version // cfg.publish_every % probe_every == 0
            publish(parts, version, evaluate=due, probe=probe, final=final)
        report(parts, step, groups, values, time.monotonic() - step_started, rollouts_every)
        if not final and (not lockstep or version % cfg.publish_every == 0):  # nothing half used
            reason = stop_reason(parts)
            if reason is not None or (checkpoint_every and version % checkpoint_every == 0):
                # in lock-step what has come belongs to the next round, which is taken in whole
                save(parts, version, wait=reason is not None, arrived=not lockstep)
            if reason is not None:
                stop(parts, version, reason)
    finish(cfg, parts)


# --------------------------------------------------------------------------- data


def receive(parts: TrainerParts, *, timeout_s: float = 0.0) -> None:
    """Takes in every message that has arrived; waits up to `timeout_s` seconds for the first."""
    if parts.channel is None:
        return
    for message in parts.channel.receive(timeout_s=timeout_s):
        take_in(parts, message)


def take_in(parts: TrainerParts, message: Message) -> None:
    """Trajectories into the buffer, evaluations and reports into `parts.arrivals`."""
    if message.kind == Kind.TRAJECTORIES:
        take_trajectories(parts, message.payload)
    elif message.kind == Kind.EVALUATION:
        take_evaluation(parts, message.source, message.json())
    else:
        take_report(parts.arrivals, message.source, message.json())


def take_trajectories(parts: TrainerParts, payload: np.ndarray) -> None:
    """A message of `trajectory.pack`, uint8 [n]."""
    trajectories = unpack(payload)
    if parts.writer is not None:
        try:
            parts.writer.append(payload)
        except OSError as error:
            raise RuntimeError(
                f"the trajectories of {parts.run_dir} can't be written ({error}): make room, or go "
                "on from the last checkpoint (resume=auto) with run.save_trajectories=false"
            ) from error
    if parts.events is not None:
        parts.events.arrived()
    parts.buffer.add(trajectories)
    arrivals = parts.arrivals
    np.add.at(arrivals.completed, [t.prompt_id for t in trajectories], 1)
    arrivals.received += len(trajectories)
    rewards = [t.reward for t in trajectories]
    low, high = arrivals.reward_bounds
    arrivals.rewards += rewards
    arrivals.reward_bounds = min([low, *rewards]), max([high, *rewards])
    arrivals.parts += [t.reward_parts for t in trajectories]
    arrivals.lengths += [len(t.response_tokens) for t in trajectories]
    arrivals.truncated += [t.truncated for t in trajectories]
    arrivals.samples = trajectories[:2]


def take_report(arrivals: Arrivals, source: int, values: Mapping[str, Any]) -> None:
    """A searcher's counters."""
    if "round" in values:
        arrivals.rounds[source] = values["round"]
        arrivals.generated += values["generated"]
        arrivals.generated_tokens += values["generated_tokens"]
        arrivals.outcomes.update(values["outcomes"])
        arrivals.num_cut += values["cut"]
        arrivals.idle[source] = values["idle_fraction"]
        arrivals.idle_s[source] = values["idle_s"]
    for name in ("load_s", "stall_s", "step_to_token_s"):
        if name in values:
            getattr(arrivals, name)[source] = values[name]
    for name in ("engine_restarts", "requeued_prompts"):
        if name in values:
            getattr(arrivals, name)[source] = values[name]
    if "logprob_gap" in values:
        arrivals.logprob_gap[source] = values["logprob_gap"]


def take_evaluation(parts: TrainerParts, source: int, values: Mapping[str, Any]) -> None:
    """One searcher's share of an evaluation; the last share completes and logs it."""
    version = int(values["version"])
    if version in parts.arrivals.held_out:
        return  # a restarted engine evaluates what is complete once more
    shares = parts.arrivals.evaluations.setdefault(version, {})
    shares[source] = dict(values)
    if len(shares) < parts.ranks.num_searchers:
        return
    log_evaluation(
        parts,
        version,
        sums=[share["sums"] for share in shares.values()],
        seconds=max(share["seconds"] for share in shares.values()),
    )


def log_evaluation(
    parts: TrainerParts, version: int, *, sums: Sequence[Mapping[str, float]], seconds: float
) -> None:
    """An evaluation that is complete: the shares of all who took part (`held_out_sums`)."""
    total: Counter[str] = Counter()
    for share in sums:
        total.update(share)
    count = int(total.pop("count"))
    figures = {name: value / max(count, 1) for name, value in total.items()}
    parts.arrivals.held_out[version] = figures
    # one that an engine took to its grave is not waited for
    parts.totals.evaluations_due = {v for v in parts.totals.evaluations_due if v > version}
    if parts.metrics is not None:
        result = {f"eval/{name}": value for name, value in figures.items()}
        result |= {"eval/version": version, "eval/seconds": seconds}
        parts.metrics.log(version, result)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in sorted(figures.items()))
        parts.metrics.note(f"held-out at step {version}: {shown} ({count} problems)")


def evaluate_policy(parts: TrainerParts, evaluator: Evaluator, version: int) -> None:
    """Every trainer evaluates its share of the held-out problems; all must call it."""
    started = time.monotonic()
    parts.control.progress("evaluating held-out problems", parts.control.startup_timeout_s)
    training = parts.policy.training
    parts.policy.eval()  # with gradient checkpointing, generation in train mode has no cache
    with uncompiled(), whole(parts.policy, evaluator.parallel):
        share = held_out_sums(
            evaluator.engine,
            evaluator.task,
            parts.tokenizer,
            evaluator.problems,
            evaluator.prompt_tokens,
            max_response_tokens=evaluator.max_response_tokens,
            scorer=evaluator.scorer,
            measures=evaluator.measures,
            on_progress=parts.control.alive,
        )
    parts.policy.train(training)
    shares = [json.dumps(share)]
    if parts.group is not None:
        device = device_of(parts.policy)
        shares = gather_texts(shares[0], parts.group, device)
    if parts.ranks.rank != 0:
        return
    log_evaluation(
        parts, version, sums=[json.loads(s) for s in shares], seconds=time.monotonic() - started
    )


def fill(parts: TrainerParts, num_prompts: int, initial: int, *, lockstep: bool) -> None:
    """Waits until the buffers can serve the first draw; engines are starting meanwhile.

    Args:
        num_prompts: of a draw, over all trainers.
        initial: responses in all trainers' buffers, at least.
    """
    if parts.channel is None:
        return
    if lockstep:
        wait_for_round(parts, version=0)
        return
    parts.control.progress(
        "waiting for the first trajectories (engines start)", parts.control.startup_timeout_s
    )
    # A resumed run has data, but searchers that are not there yet: it would train on that alone.
    searchers = parts.ranks.num_searchers if parts.first_step else 0
    told_at = time.monotonic()
    while True:
        received = sum(of_all_trainers(parts, parts.arrivals.received))
        drawable = sum(of_all_trainers(parts, parts.buffer.num_drawable))
        there = min(of_all_trainers(parts, len(parts.arrivals.load_s)))
        if received >= initial and drawable >= num_prompts and there >= searchers:
            return
        if parts.ranks.rank == 0 and time.monotonic() - told_at > _WARN_PERIOD_S:
            told_at = time.monotonic()
            logger.info(
                "training begins with %d responses (buffer.initial_trajectories) and %d prompts to "
                "draw; so far %d and %d, from searchers of which %d of %d are there",
                *(initial, num_prompts, received, drawable, there, parts.ranks.num_searchers),
            )
        receive(parts, timeout_s=0.5)


def of_all_trainers(parts: TrainerParts, value: int) -> list[int]:
    """The value of each trainer, by rank; all must call it."""
    return of_each_rank(value, parts.group, device_of(parts.policy))


def wait_for_round(parts: TrainerParts, *, version: int) -> None:
    """Waits until every searcher has shipped what it generated under `version`.

    The trajectories are then taken in by searcher, not in the order in which they came.
    """
    assert parts.channel is not None
    limit = parts.control.startup_timeout_s
    parts.control.progress("waiting for the round's trajectories", limit)
    held: list[Message] = []
    with parts.clock.waiting("round"):
        while (
            len(parts.arrivals.rounds) < parts.ranks.num_searchers
            or min(parts.arrivals.rounds.values()) < version
        ):
            for message in parts.channel.receive(timeout_s=0.5):
                if message.kind == Kind.TRAJECTORIES:
                    held.append(message)
                else:
                    take_in(parts, message)
    for message in sorted(held, key=lambda m: m.source):
        take_in(parts, message)


def draw(cfg: TrainerConfig, parts: TrainerParts, num_prompts: int, step: int) -> list[Group]:
    """This trainer's groups of the step: an even share of `num_prompts`, as far as they are there.

    A trainer whose buffer has too few leaves the rest to the others (`shares`). Waits only while no
    trainer has any group; with a bound on staleness or reuse, while all together have fewer than
    `num_prompts`.
    """
    limit = parts.control.startup_timeout_s
    parts.control.progress("waiting for trajectories: the buffers have too few to draw", limit)
    warned_at = time.monotonic()
    bounded = parts.buffer.max_staleness is not None or parts.buffer.max_uses is not None
    while True:
        if parts.channel is not None:  # saved trajectories do not grow older
            parts.buffer.expire(step)
            if parts.events is not None and parts.buffer.max_staleness is not None:
                parts.events.expired(step)
        available = of_all_trainers(parts, parts.buffer.num_drawable)
        wanted = num_prompts if bounded else 1
        if sum(available) >= wanted:
            break
        if parts.channel is None:
            raise RuntimeError(f"step {step}: the saved trajectories have no group to draw")
        if parts.ranks.rank == 0 and time.monotonic() - warned_at > _WARN_PERIOD_S:
            warned_at = time.monotonic()
            logger.warning(
                "step %d waits for trajectories: %d of %d prompts can be drawn; searchers are "
                "slow, or bounds drop what comes (buffer.max_staleness, trainer.max_reuse)",
                *(step, sum(available), wanted),
            )
        with parts.clock.waiting("data"):
            receive(parts, timeout_s=0.5)
    counts = shares(num_prompts, available)
    note_shortage(parts, counts, num_prompts)
    count = counts[parts.ranks.rank]
    groups: list[Group] = []
    with parts.clock.busy("draw"):
        if count:
            recency = parts.recency(step)
            groups = parts.buffer.draw(count, cfg.responses_per_prompt, recency_prob=recency)
    if parts.events is not None:
        parts.events.drawn(step, [item for group in groups for item in group.items])
    return groups


def shares(total: int, available: Sequence[int]) -> list[int]:
    """How many of `total` prompts each trainer draws: as evenly as what they have allows.

    >>> shares(8, [10, 10]), shares(8, [1, 10]), shares(8, [3, 1]), shares(8, [0, 5, 9])
    ([4, 4], [1, 7], [3, 1], [0, 4, 4])
    """
    counts = [0] * len(available)
    left = min(total, sum(available))
    while left:
        open_ranks = [rank for rank, count in enumerate(counts) if count < available[rank]]
        even = max(left // len(open_ranks), 1)
        for rank in open_ranks:
            more = min(even, available[rank] - counts[rank], left)
            counts[rank] += more
            left -= more
    return counts


def note_shortage(parts: TrainerParts, counts: Sequence[int], num_prompts: int) -> None:
    """Keeps for the metrics how uneven a draw is; trainer 0 says so, once a minute at most."""
    short = {r: n for r, n in enumerate(counts) if n < num_prompts // len(counts)}
    parts.totals.short_fraction = sum(num_prompts // len(counts) - n for n in short.values()) / (
        num_prompts
    )
    now = time.monotonic()
    if short and parts.ranks.rank == 0 and now - parts.totals.shortage_noted >= 60.0:
        parts.totals.shortage_noted = now
        logger.warning(
            "too few trajectories for an even draw: of %d prompts %s",
            num_prompts,
            ", ".join(f"{parts.ranks.name(rank)} has {count}" for rank, count in short.items()),
        )


def note_equal_rewards(parts: TrainerParts, enough: int) -> None:
    """Trainer 0 says once if the first `enough` responses of all trainers have one reward."""
    low, high = parts.arrivals.reward_bounds
    count = parts.arrivals.received
    if (
        parts.ranks.rank != 0
        or parts.totals.rewards_checked
        or count * parts.ranks.num_trainers < enough
    ):
        return
    parts.totals.rewards_checked = True
    if low == high:
        logger.warning("%s", equal_rewards_warning(low, count))


def reset_reference(parts: TrainerParts, *, version: int) -> None:
    """The current policy becomes the reference (TBA', arXiv 2503.18929, Sec. 6 and App. C).

    Every stored reference log-prob is invalid from now on; each is computed anew when it is drawn.
    """
    assert parts.reference is not None
    mine = dict(parts.reference.named_parameters())
    for name, new in named_weights(parts.policy):
        copy_into(mine[name], new)
    parts.reference_version = version


def complete_reference(cfg: TrainerConfig, parts: TrainerParts, groups: Sequence[Group]) -> None:
    """Computes the reference's log-probs of drawn responses that lack the present reference's.

    They are written back to the buffer: no response is computed twice under one reference.
    """
    lacking = [
        (item, t)
        for group in groups
        for item, t in zip(group.items, group.trajectories, strict=True)
        if t.reference_version != parts.reference_version
    ]
    if not lacking and (parts.reference is None or not is_sharded(parts.reference)):
        return
    assert parts.reference is not None, "a response came without reference log-probs"
    with parts.clock.busy("reference"):
        logprobs = unique_response_logprobs(
            parts.reference,
            [t.prompt_tokens for _, t in lacking],
            [t.response_tokens for _, t in lacking],
            temperature=parts.temperature,
            autocast=parts.autocast,
            tokens_per_micro_batch=cfg.tokens_per_micro_batch,
            layout=parts.layout,
            group=lockstep_group(parts, parts.reference),
        )
        for (_, t), values in zip(lacking, logprobs, strict=True):
            t.reference_logprobs = values
            t.reference_version = parts.reference_version
        parts.buffer.set_reference([i for i, _ in lacking], logprobs, parts.reference_version)


def lockstep_group(parts: TrainerParts, model: PreTrainedModel) -> dist.ProcessGroup | None:
    """The trainers, if a forward pass of `model` needs all of them."""
    return parts.group if is_sharded(model) else None


# --------------------------------------------------------------------------- update


def update_policy(
    cfg: TrainerConfig, parts: TrainerParts, groups: Sequence[Group], step: int
) -> dict[str, float]:
    """One optimizer step on `groups` (this trainer's share); returns metrics of all trainers.

    A step whose loss or gradient is not finite leaves the policy and the optimizer as they were.

    Raises:
        FloatingPointError: of too many such steps in a row, the last.
        MemoryError: a micro-batch did not fit.
    """
    parts.control.progress(f"training step {step}")
    stats = step_stats(groups, parts.group, device_of(parts.policy))
    beta = beta_at(step, **beta_schedule(cfg))
    rate = lr_at(step, **lr_schedule(cfg))

    def phases(name: str) -> AbstractContextManager[Any]:
        parts.control.alive()  # every pass is progress
        return parts.accounting.phases(name)

    with phases("gradient"), memory_advice(cfg):
        sums = accumulate_gradient(
            parts.policy,
            groups,
            objective=parts.objective,
            beta=beta,
            temperature=parts.temperature,
            autocast=parts.autocast,
            tokens_per_micro_batch=cfg.tokens_per_micro_batch,
            stats=stats,
            log_z_head=parts.log_z_head,
            layout=parts.layout,
            group=lockstep_group(parts, parts.policy),
            reduce_every_micro_batch=cfg.parallel.reduce_every_micro_batch,
            phases=phases,
        )
    with phases("optimizer"):
        trained = [p for settings in parts.optimizer.param_groups for p in settings["params"]]
        sums = sum_over_trainers(trained, sums, parts.group)
        grad_norm = clip_gradients(list(parts.policy.parameters()), cfg.max_grad_norm)
        finite = bool(np.isfinite(grad_norm) and np.isfinite(sums["loss/total"]))
        if finite:
            parts.optimizer.param_groups[0]["lr"] = rate  # the log Z head's own is constant
            parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
    count_skipped(cfg, parts, groups, step, finite, f"loss {sums['loss/total']}, norm {grad_norm}")
    tokens = sums.pop("tokens")
    per_token = ("policy/entropy_sampled", "policy/logprob_drift")
    means = {name: sums.pop(name) / tokens for name in per_token}
    return {
        **sums,
        **means,
        "tokens": tokens,
        "loss/grad_norm": grad_norm,
        "loss/learning_rate": rate,
        "loss/beta": beta,
        "buffer/recency_prob": parts.recency(step),
    }


def count_skipped(
    cfg: TrainerConfig,
    parts: TrainerParts,
    groups: Sequence[Group],
    step: int,
    finite: bool,
    what: str,
) -> None:
    """Counts a step whose loss or gradient was not finite; too many in a row end the job."""
    totals = parts.totals
    if finite:
        totals.skipped_in_a_row = 0
        return
    totals.skipped_steps += 1
    totals.skipped_in_a_row += 1
    if parts.ranks.rank == 0:
        logger.warning("step %d changes nothing: its gradient is not finite (%s)", step, what)
    if totals.skipped_in_a_row <= cfg.max_skipped_steps:
        return
    path = parts.run_dir / "bad_batch" / f"step-{step}-trainer-{parts.ranks.rank}.traj"
    writer = TrajectoryWriter(path)
    writer.append(pack([t for group in groups for t in group.trajectories]))
    writer.close()
    raise FloatingPointError(
        f"the gradients of {totals.skipped_in_a_row} steps in a row were not finite "
        f"(trainer.max_skipped_steps; the last: {what}): lower trainer.lr.peak, set "
        f"trainer.max_grad_norm, or train in float32; the responses of step {step} are in "
        f"{path.parent} (mode=offline reads them)"
    )


@contextmanager
def memory_advice(cfg: TrainerConfig) -> Iterator[None]:
    """Says what to change where a micro-batch does not fit in memory."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        text = str(error)
        is_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_memory and "can't allocate memory" not in text:  # torch's words on CPU
            raise
        raise MemoryError(
            "a micro-batch did not fit in memory: lower trainer.tokens_per_micro_batch="
            f"{cfg.tokens_per_micro_batch}, set trainer.gradient_checkpointing=true, or spread the "
            f"policy over more trainers (cluster.trainers); {text.partition(chr(10))[0]}"
        ) from error


def beta_schedule(cfg: TrainerConfig) -> dict[str, Any]:
    """The keywords of `beta_at`."""
    target = cfg.beta.target_step or cfg.steps
    final = cfg.beta.initial if cfg.beta.final is None else cfg.beta.final
    stop = cfg.beta.stop_step or target
    return {"initial": cfg.beta.initial, "final": final, "target_step": target, "stop_step": stop}


def lr_schedule(cfg: TrainerConfig) -> dict[str, Any]:
    """The keywords of `lr_at`."""
    stable = max(cfg.steps - cfg.lr.warmup_steps - cfg.lr.decay_steps, 0)
    return {
        "kind": cfg.lr.kind,
        "peak": cfg.lr.peak,
        "warmup_steps": cfg.lr.warmup_steps,
        "stable_steps": stable,
        "decay_steps": cfg.lr.decay_steps,
        "total_steps": cfg.steps,
        "min_ratio": cfg.lr.min_ratio,
    }


# --------------------------------------------------------------------------- publish, report, end


def publish(
    parts: TrainerParts,
    version: int,
    *,
    evaluate: bool,
    probe: bool,
    final: bool = False,
) -> None:
    """A snapshot of the weights for the engines; every trainer's recency window starts anew."""
    parts.buffer.new_window()
    if parts.events is not None:
        parts.events.published(version)
    if evaluate and parts.metrics is not None:
        parts.totals.evaluations_due.add(version)
    if parts.evaluator is not None and evaluate:
        evaluate_policy(parts, parts.evaluator, version)
    if parts.publisher is None:
        return
    with parts.clock.busy("publish"):
        meta: dict[str, Any] = {}
        if probe:
            with torch.no_grad(), uncompiled():
                values = response_logprobs(
                    parts.policy,
                    [tokens[:1] for tokens in parts.probe_tokens],
                    [tokens[1:] for tokens in parts.probe_tokens],
                    temperature=1.0,
                )
            meta["probe"] = values.tolist()
        parts.publisher.publish(parts.policy, version, evaluate=evaluate, final=final, meta=meta)


def report(
    parts: TrainerParts,
    step: int,
    groups: Sequence[Group],
    values: Mapping[str, float],
    step_s: float,
    rollouts_every: int,
) -> None:
    """Metrics, the progress line and, at intervals, rollouts to read (trainer 0)."""
    drawn = [t for group in groups for t in group.trajectories]
    costs = parts.accounting.end_step(
        [t.prompt_tokens for t in drawn],
        [t.response_tokens for t in drawn],
        share_prompts=parts.layout.packed and parts.layout.share_prompts,
    )
    totals = parts.totals
    totals.drawn += len(drawn)
    totals.tokens += values["tokens"]
    reuse = [uses for group in groups for uses in group.uses]
    totals.uses_sum += sum(reuse)
    of_drawn: dict[str, float] = {}
    if drawn:
        of_drawn["reward/drawn_mean"] = float(np.mean([t.reward for t in drawn]))
        of_drawn["buffer/reuse_mean"] = float(np.mean(reuse))
    if parts.channel is not None and drawn:  # saved trajectories have another run's versions
        staleness = np.array([step - t.version_start for t in drawn])
        totals.staleness_sum += float(staleness.sum())
        totals.staleness_max = max(totals.staleness_max, int(staleness.max()))
        spans = [t.version_end - t.version_start for t in drawn]
        of_drawn |= {
            "staleness/mean": float(staleness.mean()),
            "staleness/p95": float(np.percentile(staleness, 95)),
            "staleness/max": float(staleness.max()),
            "staleness/versions_mean": float(np.mean(spans)),
        }
    if parts.metrics is not None:
        metrics = {
            **{name: value for name, value in values.items() if name != "tokens"},
            **of_drawn,
            "time/step_s": step_s,
            **costs,
            **arrival_metrics(parts.arrivals),
            **state_metrics(parts, version=step + 1),
        }
        parts.metrics.log(step + 1, metrics)
        parts.metrics.progress(step + 1, metrics)
        if rollouts_every and step % rollouts_every == 0 and parts.arrivals.samples:
            samples = [readable(parts, t, step) for t in parts.arrivals.samples]
            with parts.metrics.disk_may_be_full():
                write_rollouts(parts.run_dir, step, samples)
    for recent in (
        parts.arrivals.rewards,
        parts.arrivals.parts,
        parts.arrivals.lengths,
        parts.arrivals.truncated,
        parts.arrivals.outcomes,
    ):
        recent.clear()
    parts.arrivals.num_cut = 0


def arrival_metrics(arrivals: Arrivals) -> dict[str, float]:
    """Means over what has arrived since the last step, and the searchers' last reports."""
    metrics: dict[str, float] = {}
    if arrivals.rewards:
        metrics["reward/mean"] = float(np.mean(arrivals.rewards))
        metrics["reward/response_tokens_mean"] = float(np.mean(arrivals.lengths))
        metrics["reward/truncated_fraction"] = float(np.mean(arrivals.truncated))
        for name in sorted({name for named in arrivals.parts for name in named}):
            values = [named[name] for named in arrivals.parts if name in named]
            metrics[f"reward/{name}"] = float(np.mean(values))
    if arrivals.outcomes:
        for status in FAILURES:
            share = arrivals.outcomes[status] / arrivals.outcomes.total()
            metrics[f"reward/{status}_fraction"] = share
        metrics["reward/cut_fraction"] = arrivals.num_cut / arrivals.outcomes.total()
    if arrivals.idle:
        metrics["time/searcher_idle_fraction"] = float(np.mean(list(arrivals.idle.values())))
        for reason in sorted({r for seconds in arrivals.idle_s.values() for r in seconds}):
            waits = [seconds.get(reason, 0.0) for seconds in arrivals.idle_s.values()]
            metrics[f"time/searcher_waiting_{reason}_s"] = float(np.mean(waits))
    if arrivals.logprob_gap:
        metrics["policy/engine_logprob_gap"] = max(arrivals.logprob_gap.values())
    for name in ("load_s", "stall_s", "step_to_token_s"):
        if seconds := getattr(arrivals, name):
            metrics[f"weights/{name}"] = max(seconds.values())
    metrics["faults/engine_restarts"] = sum(arrivals.engine_restarts.values())
    metrics["faults/requeued_prompts"] = sum(arrivals.requeued_prompts.values())
    return metrics


def state_metrics(parts: TrainerParts, *, version: int) -> dict[str, float]:
    """Totals, rates and times of this trainer."""
    buffer, arrivals, totals = parts.buffer, parts.arrivals, parts.totals
    elapsed = time.monotonic() - totals.training_started
    metrics = {
        "buffer/num_trajectories": buffer.num_trajectories,
        "buffer/num_prompts": buffer.num_prompts,
        "buffer/tokens": buffer.num_tokens,
        "buffer/duplicate_fraction": buffer.num_duplicates / max(buffer.num_received, 1),
        "buffer/expired": buffer.num_expired,
        "buffer/used_up": buffer.num_used_up,
        "buffer/short_fraction": totals.short_fraction,
        "buffer/received": arrivals.received,
        "buffer/drawn": totals.drawn,
        "time/trained_tokens_per_s": totals.tokens / elapsed,
        "time/generated_tokens_per_s": (arrivals.generated_tokens - totals.tokens_before) / elapsed,
        "time/trainer_idle_fraction": parts.clock.fraction(),
        "weights/version": version,
        "faults/skipped_steps": totals.skipped_steps,
    }
    if parts.checkpointer is not None:
        metrics["faults/failed_checkpoints"] = parts.checkpointer.num_failed
        metrics["time/checkpoint_write_s"] = parts.checkpointer.last_s
    for reason, seconds in parts.clock.seconds().items():
        metrics[f"time/trainer_waiting_{reason}_s"] = seconds
    for work, seconds in parts.clock.busy_seconds().items():
        metrics[f"time/{work}_s"] = seconds / max(version - parts.first_step, 1)  # mean per step
    if parts.publisher is not None and parts.publisher.last_broadcast_s > 0:
        metrics["weights/broadcast_s"] = parts.publisher.last_broadcast_s
        metrics["weights/gb_per_s"] = (
            parts.publisher.num_bytes / parts.publisher.last_broadcast_s / 1e9
        )
        if is_sharded(parts.policy):
            metrics["weights/gather_s"] = parts.publisher.last_gather_s
    return metrics


def readable(parts: TrainerParts, trajectory: Trajectory, step: int) -> dict[str, Any]:
    """A trajectory as text, for people."""
    return {
        "prompt": parts.prompts[trajectory.prompt_id],
        "response": parts.tokenizer.decode(trajectory.response_tokens, skip_special_tokens=False),
        "reward": trajectory.reward,
        "parts": trajectory.reward_parts,
        "truncated": trajectory.truncated,
        "version": trajectory.version_start,
        "staleness": step - trajectory.version_start,
    }


def save(parts: TrainerParts, version: int, *, wait: bool, arrived: bool = True) -> None:
    """Begins a checkpoint of everything, to be written while training goes on; all must call it.

    Left out if the last one is still being written.

    Args:
        wait: for that one first, and for this one to be written.
        arrived: take in what has come, first.

    Raises:
        RuntimeError: too many in a row could not be written.
    """
    checkpointer = parts.checkpointer
    if checkpointer is None:
        return
    alive = parts.control.alive
    parts.control.progress("saving a checkpoint", parts.control.startup_timeout_s)
    with parts.clock.busy("checkpoint"):
        if wait:
            checkpointer.wait(on_wait=alive)
        elif any_rank(checkpointer.busy, parts.group, device_of(parts.policy)):
            if parts.ranks.rank == 0:
                logger.warning("no checkpoint at step %d: the last is still being written", version)
            return
        if checkpointer.failed_too_often:
            raise RuntimeError(
                f"{checkpointer.failures} checkpoints in a row could not be written "
                "(checkpoint.max_failures; the log says why)"
            )
        if arrived:
            receive(parts)
        if parts.writer is not None:
            parts.writer.sync()
        if parts.events is not None:
            parts.events.saved(version)
        snapshot = state.take(parts, version)
        checkpointer.write(snapshot, parts.arrivals.held_out, due=parts.totals.evaluations_due)
        if wait:
            checkpointer.wait(on_wait=alive)


def stop_reason(parts: TrainerParts) -> str | None:
    """Why the job is to stop now, the same on all trainers; None: it is not."""
    reason = parts.control.stop_reason
    now = time.monotonic()
    if reason is None and parts.stop_file is not None and now - parts.totals.stop_looked >= 1.0:
        parts.totals.stop_looked = now
        if parts.stop_file.exists():
            reason = f"{parts.stop_file} is there"
    if not any_rank(reason is not None, parts.group, device_of(parts.policy)):
        return None
    return reason or "another trainer was told to"


def stop(parts: TrainerParts, version: int, reason: str) -> None:
    """Ends the job after a checkpoint; trainer 0 speaks for all."""
    if parts.writer is not None:
        parts.writer.close()
    if parts.metrics is None:
        parts.control.progress("waiting for trainer 0 to stop", parts.control.startup_timeout_s)
        while True:  # the control plane ends this process
            time.sleep(1.0)
    parts.metrics.close()
    parts.control.stop(reason + what_was_saved(parts, version))


def what_was_saved(parts: TrainerParts, version: int) -> str:
    """What trainer 0 adds to the reason why the job stops: whether `version` was saved."""
    done = parts.checkpointer is not None and parts.checkpointer.last_step == version
    return f": saved at step {version}, resume=auto goes on" if done else ": not saved"


def finish(cfg: TrainerConfig, parts: TrainerParts) -> None:
    """Waits for the last evaluation and the searchers' goodbye; writes what the run leaves."""
    totals, arrivals = parts.totals, parts.arrivals
    online = parts.channel is not None
    wall_s = time.monotonic() - totals.training_started
    idle = parts.clock.fraction()
    rates = state_metrics(parts, version=cfg.steps)
    if online:
        if parts.first_step < cfg.steps:  # the evaluation may be long, or not end
            save(parts, cfg.steps, wait=True)
        parts.control.stop_suffix = what_was_saved(parts, cfg.steps)
        parts.control.stoppable = False
    parts.control.progress("waiting for the last evaluation", math.inf)  # searchers have limits
    while any_rank(
        parts.metrics is not None and cfg.steps not in arrivals.held_out,
        parts.group,
        device_of(parts.policy),
    ):
        receive(parts, timeout_s=0.5)
    save(parts, cfg.steps, wait=True)
    parts.control.stop_suffix = what_was_saved(parts, cfg.steps)
    parts.control.stoppable = False
    if parts.metrics is None:
        if parts.channel is not None:
            parts.channel.close()  # when the searchers have left
        parts.control.progress("waiting for trainer 0", parts.control.startup_timeout_s)
        close(parts)
        return
    by_step = dict(sorted(arrivals.held_out.items()))
    accuracy = {step: v["accuracy"] for step, v in by_step.items() if "accuracy" in v}
    summary: dict[str, Any] = {
        "accuracy_before": accuracy.get(0),
        "accuracy_after": accuracy.get(cfg.steps),
        "steps": cfg.steps,
        "trajectories": arrivals.generated if online else parts.buffer.num_received,
        "trained_trajectories": totals.drawn * parts.ranks.num_trainers,
        "wall_s": wall_s,
        "total_s": time.monotonic() - parts.started,
        "trainer_idle_fraction": idle,
        "searcher_idle_fraction": float(np.mean(list(arrivals.idle.values()) or [0.0])),
        "staleness_mean": totals.staleness_sum / max(totals.drawn, 1) if online else None,
        "staleness_max": totals.staleness_max if online else None,
        "reuse_mean": totals.uses_sum / max(totals.drawn, 1),
        "generated_tokens_per_s": rates["time/generated_tokens_per_s"],
        "trained_tokens_per_s": rates["time/trained_tokens_per_s"],
        **parts.accounting.summary(),
        "duplicate_fraction": rates["buffer/duplicate_fraction"],
        "skipped_steps": totals.skipped_steps,
        "failed_checkpoints": parts.checkpointer.num_failed if parts.checkpointer else 0,
        "engine_logprob_gap": max(arrivals.logprob_gap.values(), default=None),
        "engine_restarts": sum(arrivals.engine_restarts.values()),
        "requeued_prompts": sum(arrivals.requeued_prompts.values()),
        "accuracy_by_step": {str(step): value for step, value in accuracy.items()},
        "held_out_by_step": {str(step): values for step, values in by_step.items()},
    }
    assert parts.checkpointer is not None
    if parts.checkpointer.last_step != cfg.steps:
        raise RuntimeError("the policy could not be saved; the log says why")
    summary["checkpoint"] = str(parts.checkpointer.path(cfg.steps))
    write_summary(parts.run_dir, summary)
    parts.metrics.close()
    draw_figure(parts.run_dir)
    close(parts)


def close(parts: TrainerParts) -> None:
    """Ends what this trainer shares with searchers, and the file of trajectories."""
    if parts.publisher is not None:
        parts.publisher.close()
    if parts.channel is not None:
        parts.channel.close()
    if parts.writer is not None:
        parts.writer.close()
    if parts.evaluator is not None:
        parts.evaluator.scorer.close()
