"""The searcher's loop: prompts -> generate -> score -> ship -> take weights, forever.

Runs on every searcher rank, in the main thread (in a thread of its own when the world is one rank).
Consumes: weights (newest version, taken between two generations). Produces: trajectories, to
trainer p mod T for prompt p; counters; evaluation results. Waits for: nothing in `mode=async`, the
weights of the next round in `mode=sync`. Ends: after the final version, which it evaluates first.
arXiv 2503.18929, section 4.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comm import Channel, Control, Kind, Ranks
from engine import Completion, HFEngine, Sampling, VLLMEngine
from evaluate import completion_facts, held_out_sums, response_texts
from metrics import IdleClock
from model import PADDED, Layout, distinct, unique_response_logprobs
from rewards import Scorer
from tasks.task import Problem, Task
from trajectory import Trajectory, pack
from weights import WeightUpdate

logger = logging.getLogger("tba")


@dataclass
class ExploreConfig:
    """Now and then one generation samples from another distribution than the training one.

    Off by default. arXiv 2503.18929's reference code draws both with probability 0.3: top-p from
    0.7 to 1, and the temperature from 0.7 to 1.1 (TL;DR) or from T to 1.1 / 0.7 T (GSM8K).
    """

    temperature_prob: float = 0.0  # of a generation with a drawn temperature
    temperature_low: float | None = None  # null: searcher.temperature
    temperature_high: float | None = None  # null: searcher.temperature * 1.1 / 0.7
    top_p_prob: float = 0.0  # of a generation with a drawn top-p, whatever its temperature
    top_p_low: float = 0.7
    top_p_high: float = 1.0


@dataclass
class SearcherConfig:
    """What is generated."""

    responses_per_prompt: int = 20  # S, at least trainer.responses_per_prompt
    prompts_per_call: int = 32  # prompts in one generation; mode=sync derives its own
    temperature: float = (
        1.0  # of sampling, of the policy and of the reference: TB holds at this one
    )
    top_p: float = 1.0
    max_outstanding: int = 8  # messages under way to trainers before a searcher waits
    reference_tokens_per_micro_batch: int = 8192  # as the trainer's, in the reference's passes
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
    layout: Layout = PADDED  # of the reference's forward passes
    clock: IdleClock = field(default_factory=IdleClock)


def search(
    cfg: SearcherConfig, parts: SearcherParts, *, prompts_per_call: int, lockstep: bool
) -> None:
    """Generates and ships until the final version of the weights has been evaluated.

    Args:
        prompts_per_call: prompts in one generation.
        lockstep: generate exactly once under every version (`mode=sync`).
    """
    stream = prompt_stream(parts)
    rng = np.random.default_rng([parts.seed, 2, parts.ranks.searcher_index])
    update = take_weights(parts, wait_for=0)
    assert update is not None
    parts.clock.start()
    while not update.final:
        ids = [next(stream) for _ in range(prompts_per_call)]
        sampling = explored(cfg, rng, max_tokens=parts.max_response_tokens)
        parts.control.progress("generating")
        groups = parts.engine.generate([parts.prompt_tokens[i] for i in ids], sampling)
        trajectories, outcomes = score(cfg, parts, ids, groups, sampling, version=update.version)
        ship(parts, trajectories, outcomes, version=update.version)
        update = take_weights(parts, wait_for=update.version + 1 if lockstep else None) or update
    parts.channel.close()


def prompt_stream(parts: SearcherParts) -> Iterator[int]:
    """This searcher's prompts (id mod S == its index), for ever, in a new order every epoch."""
    ids = np.arange(parts.ranks.searcher_index, len(parts.problems), parts.ranks.num_searchers)
    rng = np.random.default_rng([parts.seed, 1, parts.ranks.searcher_index])
    while True:
        yield from rng.permutation(ids).tolist()


def explored(cfg: SearcherConfig, rng: np.random.Generator, *, max_tokens: int) -> Sampling:
    """How the next generation samples: as configured, or explored (`ExploreConfig`).

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
        n=cfg.responses_per_prompt, temperature=temperature, top_p=top_p, max_tokens=max_tokens
    )


def temperature_range(cfg: SearcherConfig) -> tuple[float, float]:
    """Lowest and highest explored temperature, with the defaults filled in."""
    low, high = cfg.explore.temperature_low, cfg.explore.temperature_high
    return (
        cfg.temperature if low is None else low,
        cfg.temperature * 1.1 / 0.7 if high is None else high,
    )


def take_weights(parts: SearcherParts, *, wait_for: int | None) -> WeightUpdate | None:
    """The newest weights, loaded, probed and, if they say so, evaluated; None if none have come."""
    parts.control.progress("waiting for weights" if wait_for is not None else "taking weights")
    with parts.clock.waiting("weights"):
        update = parts.engine.update(wait_for=wait_for, timeout_s=parts.control.timeout_s)
    if update is None:
        return None
    parts.clock.count_as_work("weights", update.load_s)  # loading is work, waiting for it is not
    report: dict[str, Any] = {"version": update.version, "load_s": update.load_s}
    if "probe" in update.meta:
        report["logprob_gap"] = probe(parts, update)
    for trainer in range(parts.ranks.num_trainers):
        parts.channel.send(trainer, Kind.REPORT, report)
    if update.evaluate:
        evaluate(parts, update)
    return update


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


def score(
    cfg: SearcherConfig,
    parts: SearcherParts,
    ids: Sequence[int],
    groups: Sequence[Sequence[Completion]],
    sampling: Sampling,
    *,
    version: int,
) -> tuple[list[Trajectory], Counter[str]]:
    """Rewards, log-probs at the training temperature and reference log-probs of every completion.

    The engine must still hold the weights that sampled them. Workers score while the device
    computes log-probs.

    Args:
        sampling: what the completions were sampled with.
        version: of the weights that sampled them.

    Returns:
        The trajectories, and how many were scored how (`Scored.status`).
    """
    # Models that score are opened at the first use.
    limit = parts.control.startup_timeout_s if version == 0 else None
    parts.control.progress("scoring", limit)
    flat = [(i, completion) for i, group in zip(ids, groups, strict=True) for completion in group]
    prompts = [parts.prompt_tokens[i] for i, _ in flat]
    completions = [completion for _, completion in flat]
    problems = [parts.problems[i] for i, _ in flat]
    texts = response_texts(parts.tokenizer, completions)
    facts = completion_facts(completions)
    early = "reference_logprob" not in parts.scorer.facts
    if early:
        scores = parts.scorer.submit(problems, texts, **facts)
    old = old_logprobs(cfg, parts.engine, prompts, completions, sampling)
    reference = reference_logprobs(cfg, parts, prompts, completions)
    if not early:
        facts["reference_logprob"] = [float(values.sum()) for values in reference]
        scores = parts.scorer.submit(problems, texts, **facts)
    scored = parts.scorer.collect(scores, on_progress=parts.control.alive)
    trajectories = [
        Trajectory(
            prompt_id=i,
            prompt_tokens=prompt,
            response_tokens=completion.tokens,
            behavior_logprobs=completion.logprobs,
            old_logprobs=old_values,
            reference_logprobs=reference_values,
            reference_version=-1 if parts.reference is None else 0,
            reward=result.reward,
            reward_parts=result.parts,
            version_start=version,
            version_end=version,
            truncated=completion.truncated,
        )
        for (i, completion), prompt, result, old_values, reference_values in zip(
            flat, prompts, scored, old, reference, strict=True
        )
    ]
    return trajectories, Counter(result.status for result in scored)


def old_logprobs(
    cfg: SearcherConfig,
    engine: VLLMEngine | HFEngine,
    prompts: Sequence[np.ndarray],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> list[np.ndarray]:
    """Log-probs at the training temperature without top-p, float32 [T] each (nats).

    The very arrays of `completions` where that is what they were sampled with; else the engine
    computes each distinct response once more.
    """
    if sampling.temperature == cfg.temperature and sampling.top_p == 1.0:
        return [completion.logprobs for completion in completions]
    responses = [completion.tokens for completion in completions]
    first, slot_of = distinct(prompts, responses)
    values = engine.score_responses(
        [prompts[i] for i in first], [responses[i] for i in first], temperature=cfg.temperature
    )
    return [values[slot] for slot in slot_of]


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


def ship(
    parts: SearcherParts,
    trajectories: Sequence[Trajectory],
    outcomes: Counter[str],
    *,
    version: int,
) -> None:
    """Sends each trajectory to the trainer of its prompt, then this searcher's counters to all."""
    num_trainers = parts.ranks.num_trainers
    report = {
        "round": version,
        "generated": len(trajectories),
        "generated_tokens": sum(len(t.response_tokens) for t in trajectories),
        "outcomes": dict(outcomes),
        "idle_fraction": parts.clock.fraction(),
        "idle_s": parts.clock.seconds(),
    }
    parts.control.progress("sending trajectories")
    with parts.clock.waiting("channel"):
        for trainer in range(num_trainers):
            part = [t for t in trajectories if t.prompt_id % num_trainers == trainer]
            if part:
                parts.channel.send(trainer, Kind.TRAJECTORIES, pack(part))
            parts.channel.send(trainer, Kind.REPORT, report)
