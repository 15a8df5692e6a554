"""The searcher's loop: keep the engine full, score what is complete, ship it, take weights.

Runs on every searcher rank, in the main thread (in a thread of its own when the world is one rank).
Consumes: weights (the newest version, the moment it has come). Produces: trajectories, to trainer
p mod T for prompt p; counters; evaluation results. Waits for: nothing in `mode=async`, the weights
of the next round in `mode=sync`. Ends: after the final version, which it evaluates first.
arXiv 2503.18929, section 4.

A prompt enters the engine as soon as another's group has left it, so that nothing waits for the
longest response. Complete groups are scored in batches while the engine decodes on: rewards in
worker processes, reference log-probs here. When the engine dies, another takes its place: it waits
for weights, and prompts whose responses were under way begin anew.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comm import Channel, Control, Kind, Ranks
from engine import Completion, EngineDied, HFEngine, Sampling, VLLMEngine
from evaluate import completion_facts, held_out_sums, response_texts
from metrics import IdleClock
from model import PADDED, Layout, unique_response_logprobs
from rewards import Scored, Scorer
from tasks.task import Problem, Task
from trajectory import Trajectory, pack
from weights import WeightUpdate

logger = logging.getLogger("tba")

_MAX_SCORING = 16  # batches whose rewards are awaited before the searcher waits for the first


@dataclass
class ExploreConfig:
    """Now and then a prompt's responses are sampled from another distribution than usual.

    Off by default. arXiv 2503.18929's reference code draws both with probability 0.3: top-p from
    0.7 to 1, and the temperature from 0.7 to 1.1 (TL;DR) or from T to 1.1 / 0.7 T (GSM8K).
    """

    temperature_prob: float = 0.0  # of a prompt with a drawn temperature
    temperature_low: float | None = None  # null: searcher.temperature
    temperature_high: float | None = None  # null: searcher.temperature * 1.1 / 0.7
    top_p_prob: float = 0.0  # of a prompt with a drawn top-p, whatever its temperature
    top_p_low: float = 0.7
    top_p_high: float = 1.0


@dataclass
class SearcherConfig:
    """What is generated, and by how many devices."""

    # Ranks of a searcher: its engine is spread over their devices (tensor parallelism); vllm only
    tp: int = 1
    responses_per_prompt: int = 20  # S, at least trainer.responses_per_prompt
    prompts_in_flight: int = 32  # prompts under way at once; mode=sync derives its own
    # When new weights are loaded: inflight, in the middle of generations | between, when what is
    # under way has ended, and nothing new has begun meanwhile
    update: str = "inflight"
    max_response_seconds: float | None = None  # a longer response is cut there; null: never
    temperature: float = (
        1.0  # of sampling, of the policy and of the reference: TB holds at this one
    )
    top_p: float = 1.0
    max_outstanding: int = 8  # messages under way to trainers before a searcher waits
    reference_tokens_per_micro_batch: int = 8192  # as the trainer's, in the reference's passes
    # Complete groups wait for others, to be scored together: for this long (seconds), or until
    # they fill a micro-batch of the reference
    score_every_s: float = 0.25
    explore: ExploreConfig = field(default_factory=ExploreConfig)


@dataclass(slots=True, kw_only=True)
class SearcherParts:
    """What a searcher works with; `train.py` puts it together."""

    ranks: Ranks
    control: Control
    channel: Channel
    engine: VLLMEngine | HFEngine
    reference: PreTrainedModel | None  # None: reference log-probs are left to the trainers
    autocast: torch.dtype | None  # of the reference's forward pass
    tokenizer: PreTrainedTokenizerBase
    task: Task
    scorer: Scorer  # of the task's rewards
    problems: Sequence[Problem]  # training problems, all of them
    prompt_tokens: Sequence[np.ndarray]  # int32 [P], of each training problem
    held_out: Sequence[Problem]  # this searcher's share
    held_out_tokens: Sequence[np.ndarray]
    probe_tokens: Sequence[np.ndarray]  # sequences on which trainer and engine compare log-probs
    max_logprob_gap: float  # nats a token
    eval_measures: bool  # whether evaluation computes what the task measures besides the reward
    max_response_tokens: int
    seed: int
    completed: np.ndarray  # int64 [problems]: groups of each that were shipped before a resumption
    deterministic: bool = False  # every response's random numbers are its own
    layout: Layout = PADDED  # of the reference's forward passes
    clock: IdleClock = field(default_factory=IdleClock)
    # time.time() at which weights were published of which no token has been sampled yet
    first_token_of: float | None = None
    # Given the number of restarts, ends the engine's processes and starts another, which waits for
    # weights
    restart_engine: Callable[[int], VLLMEngine | HFEngine] | None = None
    max_engine_restarts: int = 0  # one more ends the job
    engine_restarts: int = 0
    requeued: int = 0  # prompts that were given to a restarted engine again


@dataclass(slots=True, kw_only=True)
class Group:
    """The responses to one prompt, from its entry into the engine on."""

    key: int  # ascending in the order in which groups were begun
    prompt_id: int
    sampling: Sampling
    seed: int | None = None  # of its responses' random numbers; None: the engine's
    completions: list[Completion] = field(default_factory=list)  # none while any is under way


@dataclass(slots=True, kw_only=True)
class Scoring:
    """Complete groups whose rewards are being computed."""

    groups: list[Group]
    reference: list[np.ndarray]  # log-probs, float32 [T] of each response (nats)
    scores: Future[list[Scored]]


@dataclass(slots=True)
class Groups:
    """All groups of a searcher that are not shipped, by how far they are."""

    open: dict[int, Group] = field(default_factory=dict)  # key -> group in the engine
    complete: list[Group] = field(default_factory=list)
    complete_since: float = 0.0  # time.monotonic() when the first of them was
    scoring: list[Scoring] = field(default_factory=list)
    started: int = 0  # groups since the run began, which gives keys and random numbers
    scored: bool = False  # whether any was
    round: int = -1  # lock-step: version of the last round that was shipped


def search(
    cfg: SearcherConfig,
    parts: SearcherParts,
    *,
    prompts_in_flight: int,
    lockstep: bool = False,
    between: bool = False,
) -> None:
    """Generates and ships until the final version of the weights has been evaluated.

    Args:
        prompts_in_flight: prompts under way at once; in lock-step those of one round.
        lockstep: generate one round under every version (`mode=sync`).
        between: load weights only when nothing is under way (`searcher.update=between`).
    """
    stream = prompt_stream(parts)
    groups = Groups(started=int(parts.completed[own_prompts(parts)].sum()))
    death: EngineDied | None = None
    update: WeightUpdate | None = None  # of the version that the engine holds, begun
    while update is None or not update.final:
        try:
            if death is not None:
                restart(parts, death)
                death = None
            if update is None:
                update = resume(cfg, parts, groups, lockstep=lockstep)
                continue
            draining = groups.open and (lockstep or (between and parts.engine.has_update()))
            if not draining:
                start(cfg, parts, groups, prompts_in_flight - len(groups.open), stream)
            generate(parts, groups)
            if lockstep and groups.open:
                continue
            score(cfg, parts, groups, everything=lockstep)
            ship(parts, groups, update.version, everything=lockstep)
            if between and groups.open:
                continue
            groups.round = update.version
            wait_for = update.version + 1 if lockstep else None
            update = take(cfg, parts, groups, wait_for=wait_for) or update
        except EngineDied as error:
            death, update = error, None
    parts.channel.close()


def restart(parts: SearcherParts, death: EngineDied) -> None:
    """Puts another engine in the place of one that died; it holds no weights yet.

    Raises:
        RuntimeError: it was restarted too often.
    """
    if parts.engine_restarts >= parts.max_engine_restarts:
        raise RuntimeError(
            f"{death}; it has been restarted {parts.engine_restarts} times (engine.max_restarts)"
        ) from death
    assert parts.restart_engine is not None
    parts.engine_restarts += 1
    logger.warning("%s: restarting it (restart %d)", death, parts.engine_restarts)
    with parts.clock.waiting("restart"):
        parts.engine = parts.restart_engine(parts.engine_restarts)


def resume(
    cfg: SearcherConfig, parts: SearcherParts, groups: Groups, *, lockstep: bool
) -> WeightUpdate:
    """What an engine that holds no weights begins with: weights, then the prompts under way."""
    # In lock-step a round that was shipped is not generated again.
    update = take(cfg, parts, groups, wait_for=groups.round + 1 if lockstep else 0)
    assert update is not None
    if parts.engine_restarts == 0:
        parts.clock.start()
    add(parts, list(groups.open.values()))
    parts.requeued += len(groups.open)
    if parts.engine_restarts:
        logger.info(
            "the engine is back with version %d, %d prompts begin anew",
            *(update.version, len(groups.open)),
        )
    return update


def take(
    cfg: SearcherConfig, parts: SearcherParts, groups: Groups, *, wait_for: int | None
) -> WeightUpdate | None:
    """Takes the newest weights, and does what is due under them; None if none have come."""
    update = take_weights(parts, wait_for=wait_for)
    while update is not None and wait_for is not None and update.version < wait_for:
        # pinned, so that it came first, and sent again: all was done before the engine died
        update = take_weights(parts, wait_for=wait_for)
    if update is None:
        return None
    if update.final:  # what has been finished is not lost; the rest would come too late
        parts.engine.drop()
        groups.open.clear()
        score(cfg, parts, groups, everything=True)
        ship(parts, groups, update.version, everything=True)
    begin(parts, update)
    return update


def start(
    cfg: SearcherConfig,
    parts: SearcherParts,
    groups: Groups,
    count: int,
    stream: Iterator[int],
) -> None:
    """Adds `count` prompts to what the engine is working on."""
    first = groups.started
    for key in range(first, first + count):
        prompt_id = next(stream)
        # of its own, so that a resumed run draws what it would have drawn
        rng = np.random.default_rng([parts.seed, 2, parts.ranks.searcher_index, key])
        sampling = explored(cfg, rng, max_tokens=parts.max_response_tokens)
        seed = int(rng.integers(2**62)) if parts.deterministic else None
        groups.open[key] = Group(key=key, prompt_id=prompt_id, sampling=sampling, seed=seed)
        groups.started += 1
    add(parts, [groups.open[key] for key in range(first, groups.started)])


def add(parts: SearcherParts, groups: Sequence[Group]) -> None:
    """Gives groups that are open to the engine, which may die meanwhile."""
    with parts.engine.together() if parts.deterministic else nullcontext():
        for group in groups:
            tokens = parts.prompt_tokens[group.prompt_id]
            parts.engine.add(group.key, tokens, group.sampling, seed=group.seed)


def generate(parts: SearcherParts, groups: Groups) -> None:
    """One step of the engine; groups whose responses have all ended are complete."""
    parts.control.progress("generating")
    for key, completions in parts.engine.step():
        group = groups.open.pop(key)
        group.completions = completions
        if not groups.complete:
            groups.complete_since = time.monotonic()
        groups.complete.append(group)
    if parts.first_token_of is not None:
        # Between clocks of two nodes, where trainer 0 is on another: as good as they agree.
        seconds = time.time() - parts.first_token_of
        parts.first_token_of = None
        for trainer in range(parts.ranks.num_trainers):
            parts.channel.send(trainer, Kind.REPORT, {"step_to_token_s": seconds})


def own_prompts(parts: SearcherParts) -> np.ndarray:
    """Ids of this searcher's prompts (id mod S == its index), int64."""
    return np.arange(parts.ranks.searcher_index, len(parts.problems), parts.ranks.num_searchers)


def prompt_stream(parts: SearcherParts) -> Iterator[int]:
    """This searcher's prompts, for ever, in a new order every epoch.

    A resumed run begins with the prompts of the oldest epoch that were not shipped.
    """
    ids = own_prompts(parts)
    done = parts.completed[ids]
    epoch = int(done.min())
    while True:
        rng = np.random.default_rng([parts.seed, 1, parts.ranks.searcher_index, epoch])
        order = rng.permutation(len(ids))
        yield from ids[order[done[order] <= epoch]].tolist()
        epoch += 1


def explored(cfg: SearcherConfig, rng: np.random.Generator, *, max_tokens: int) -> Sampling:
    """How the next prompt's responses are sampled: as configured, or explored (`ExploreConfig`).

    Temperature and top-p are explored independently. Every call draws four numbers, whatever the
    settings, so that one setting does not move the draws of the other.

    >>> cfg = SearcherConfig(temperature=0.7, explore=ExploreConfig(temperature_prob=1.0))
    >>> sampling = explored(cfg, np.random.default_rng(0), max_tokens=8)
    >>> 0.7 <= sampling.temperature <= 1.1, sampling.top_p
    (True, 1.0)
    """
    explore = cfg.explore
    temperature_draw, top_p_draw, temperature_place, top_p_place = rng.random(4).tolist()
    temperature, top_p = cfg.temperature, cfg.top_p
    if temperature_draw < explore.temperature_prob:
        low, high = temperature_range(cfg)
        temperature = low + (high - low) * temperature_place
    if top_p_draw < explore.top_p_prob:
        top_p = explore.top_p_low + (explore.top_p_high - explore.top_p_low) * top_p_place
    return Sampling(
        n=cfg.responses_per_prompt,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        max_seconds=cfg.max_response_seconds,
    )


def explores(cfg: SearcherConfig) -> bool:
    """Whether some responses are sampled otherwise than the policy at its temperature would."""
    explore = cfg.explore
    return cfg.top_p < 1.0 or explore.temperature_prob > 0 or explore.top_p_prob > 0


def temperature_range(cfg: SearcherConfig) -> tuple[float, float]:
    """Lowest and highest explored temperature, with the defaults filled in."""
    low, high = cfg.explore.temperature_low, cfg.explore.temperature_high
    return (
        cfg.temperature if low is None else low,
        cfg.temperature * 1.1 / 0.7 if high is None else high,
    )


def take_weights(parts: SearcherParts, *, wait_for: int | None) -> WeightUpdate | None:
    """The newest weights, loaded; None if none have come."""
    limit = parts.control.startup_timeout_s
    if wait_for is None:
        parts.control.progress("taking weights")
    else:
        parts.control.progress("waiting for weights", limit)
    begun = time.monotonic()
    with parts.clock.waiting("weights"):
        update = parts.engine.update(wait_for=wait_for, timeout_s=limit)
    # Loading is work. Without `wait_for` so is all but the time in which the engine stood still
    # for another reason: it decodes while it is asked, and until it is paused.
    work = 0.0 if update is None else update.load_s
    if wait_for is None:
        idle = 0.0 if update is None else max(0.0, update.stall_s - update.load_s)
        work = time.monotonic() - begun - idle
    parts.clock.count_as_work("weights", work)
    return update


def begin(parts: SearcherParts, update: WeightUpdate) -> None:
    """What is due under a version that has just been loaded: a probe, an evaluation, a report."""
    report: dict[str, Any] = {
        "version": update.version,
        "load_s": update.load_s,
        "stall_s": update.stall_s,
        "engine_restarts": parts.engine_restarts,
        "requeued_prompts": parts.requeued,
    }
    if "probe" in update.meta:
        report["logprob_gap"] = probe(parts, update)
    for trainer in range(parts.ranks.num_trainers):
        parts.channel.send(trainer, Kind.REPORT, report)
    parts.first_token_of = update.meta.get("published_at")
    if update.evaluate:
        evaluate(parts, update)
        parts.first_token_of = None


def probe(parts: SearcherParts, update: WeightUpdate) -> float:
    """Mean |engine - trainer| log-prob of fixed tokens under the same version (nats a token).

    Raises:
        RuntimeError: the gap is beyond `weights.max_logprob_gap`: the engine does not hold the
            weights that were published.
    """
    engine = np.concatenate(parts.engine.score(parts.probe_tokens))
    trainer = np.asarray(update.meta["probe"], dtype=np.float32)
    gap = float(np.abs(engine - trainer).mean())
    if not gap <= parts.max_logprob_gap:
        raise RuntimeError(
            f"version {update.version}: log-probs of engine and trainer differ by {gap:.3f} nats "
            f"a token (weights.max_logprob_gap={parts.max_logprob_gap}); the engine does not hold "
            "the published weights, or computes something else with them"
        )
    return gap


def evaluate(parts: SearcherParts, update: WeightUpdate) -> None:
    """Sums over this searcher's share of the held-out problems, sent to trainer 0."""
    start = time.monotonic()
    limit = parts.control.startup_timeout_s if update.version == 0 else None
    parts.control.progress("evaluating held-out problems", limit)
    sums = held_out_sums(
        parts.engine,
        parts.task,
        parts.tokenizer,
        parts.held_out,
        parts.held_out_tokens,
        max_response_tokens=parts.max_response_tokens,
        scorer=parts.scorer,
        measures=parts.eval_measures,
        on_progress=parts.control.alive,
    )
    seconds = time.monotonic() - start
    values = {"version": update.version, "sums": sums, "seconds": seconds}
    parts.channel.send(0, Kind.EVALUATION, values)


def score(cfg: SearcherConfig, parts: SearcherParts, groups: Groups, *, everything: bool) -> None:
    """Hands complete groups over to the scorer, and computes their reference log-probs meanwhile.

    Args:
        everything: at once; else when there is enough of them, or the first has waited enough.
    """
    if not groups.complete:
        return
    tokens = sum(
        len(completion.tokens) for group in groups.complete for completion in group.completions
    )
    due = (
        tokens >= cfg.reference_tokens_per_micro_batch
        or time.monotonic() - groups.complete_since >= cfg.score_every_s
    )
    if not (everything or due):
        return
    # Models that score are opened at the first use.
    limit = None if groups.scored else parts.control.startup_timeout_s
    parts.control.progress("scoring", limit)
    batch, groups.complete, groups.scored = groups.complete, [], True
    if everything:  # which ended first may be chance
        batch.sort(key=lambda group: group.key)
    completions = [completion for group in batch for completion in group.completions]
    ids = [group.prompt_id for group in batch for _ in group.completions]
    prompts = [parts.prompt_tokens[i] for i in ids]
    problems = [parts.problems[i] for i in ids]
    texts = response_texts(parts.tokenizer, completions)
    facts = completion_facts(completions)
    early = "reference_logprob" not in parts.scorer.facts
    if early:
        scores = parts.scorer.submit(problems, texts, **facts)
    reference = reference_logprobs(cfg, parts, prompts, completions)
    if not early:
        facts["reference_logprob"] = [float(values.sum()) for values in reference]
        scores = parts.scorer.submit(problems, texts, **facts)
    groups.scoring.append(Scoring(groups=batch, reference=reference, scores=scores))


def reference_logprobs(
    cfg: SearcherConfig,
    parts: SearcherParts,
    prompts: Sequence[np.ndarray],
    completions: Sequence[Completion],
) -> list[np.ndarray]:
    """Log-probs under the reference, float32 [T] each (nats); NaN where there is none."""
    responses = [completion.tokens for completion in completions]
    if parts.reference is None:
        return [np.full(len(tokens), np.nan, dtype=np.float32) for tokens in responses]
    return unique_response_logprobs(
        parts.reference,
        prompts,
        responses,
        temperature=cfg.temperature,
        autocast=parts.autocast,
        tokens_per_micro_batch=cfg.reference_tokens_per_micro_batch,
        layout=parts.layout,
    )


def ship(parts: SearcherParts, groups: Groups, version: int, *, everything: bool) -> None:
    """Sends what has its rewards, in the order in which they come.

    Args:
        version: of the weights that the engine holds.
        everything: waits for all rewards; else for the oldest ones only where very many are open.
    """
    waiting = groups.scoring
    due = [
        scoring
        for i, scoring in enumerate(waiting)
        if everything or scoring.scores.done() or (i == 0 and len(waiting) > _MAX_SCORING)
    ]
    for scoring in due:
        with parts.clock.waiting("rewards"):
            scored = parts.scorer.collect(scoring.scores, on_progress=parts.control.alive)
        waiting.remove(scoring)
        cut = sum(c.timed_out for group in scoring.groups for c in group.completions)
        send(parts, trajectories(parts, scoring, scored), scored, version, num_cut=cut)


def trajectories(
    parts: SearcherParts, scoring: Scoring, scored: Sequence[Scored]
) -> list[Trajectory]:
    """The records of scored responses."""
    flat = [(group, completion) for group in scoring.groups for completion in group.completions]
    return [
        Trajectory(
            prompt_id=group.prompt_id,
            prompt_tokens=parts.prompt_tokens[group.prompt_id],
            response_tokens=completion.tokens,
            behavior_logprobs=completion.logprobs,
            old_logprobs=(
                completion.logprobs if completion.old_logprobs is None else completion.old_logprobs
            ),
            reference_logprobs=reference,
            reference_version=-1 if parts.reference is None else 0,
            reward=result.reward,
            reward_parts=result.parts,
            version_start=completion.versions[0][0],
            version_end=completion.versions[-1][0],
            truncated=completion.truncated,
            version_offsets=version_offsets(completion),
        )
        for (group, completion), result, reference in zip(
            flat, scored, scoring.reference, strict=True
        )
    ]


def version_offsets(completion: Completion) -> np.ndarray | None:
    """As in `Trajectory`, int32 [T]; None where one version sampled the whole response.

    >>> tokens, logprobs = np.zeros(4, np.int32), np.zeros(4, np.float32)
    >>> response = Completion(
    ...     tokens=tokens, logprobs=logprobs, versions=[(7, 0), (9, 3)], truncated=False
    ... )
    >>> version_offsets(response)
    array([0, 0, 0, 2], dtype=int32)
    """
    versions, starts = np.array(completion.versions, np.int64).T
    if versions[0] == versions[-1]:
        return None
    ends = np.append(starts[1:], len(completion.tokens))
    return np.repeat(versions - versions[0], ends - starts).astype(np.int32)


def send(
    parts: SearcherParts,
    made: Sequence[Trajectory],
    scored: Sequence[Scored],
    version: int,
    *,
    num_cut: int,
) -> None:
    """Sends each trajectory to the trainer of its prompt, then this searcher's counters to all.

    Args:
        version: of the weights that the engine holds.
        num_cut: responses among them that the time limit has ended.
    """
    num_trainers = parts.ranks.num_trainers
    report = {
        "round": version,
        "generated": len(made),
        "generated_tokens": sum(len(t.response_tokens) for t in made),
        "outcomes": dict(Counter(result.status for result in scored)),
        "cut": num_cut,
        "idle_fraction": parts.clock.fraction(),
        "idle_s": parts.clock.seconds(),
    }
    parts.control.progress("sending trajectories")
    begun, waited_s = time.monotonic(), parts.channel.waited_s
    with parts.clock.waiting("channel"):
        for trainer in range(num_trainers):
            part = [t for t in made if t.prompt_id % num_trainers == trainer]
            if part:
                parts.channel.send(trainer, Kind.TRAJECTORIES, pack(part))
            parts.channel.send(trainer, Kind.REPORT, report)
    waited_s = parts.channel.waited_s - waited_s
    parts.clock.count_as_work("channel", time.monotonic() - begun - waited_s)
