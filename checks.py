"""What is tried before anything starts: the objective, and the buffer's rule of drawing.

A setting that only they understand, and refuse, should not be found out at the first step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from buffer import Buffer, Group
from gradient import make_batch, step_stats
from schedules import beta_at
from trainer import beta_schedule
from trajectory import Trajectory


def check_loss(cfg: DictConfig) -> None:
    """Tries the objective on two made-up groups of two responses.

    Raises:
        ValueError: it refuses its own settings, or can't be called.
    """
    objective = instantiate(cfg.loss)
    logprobs = np.full(2, -1.0, np.float32)
    groups = [
        Group(
            prompt_id=prompt,
            trajectories=[made_up_response(prompt, float(i), logprobs) for i in range(2)],
            uses=[0, 0],
            items=[0, 1],
        )
        for prompt in range(2)
    ]
    try:
        try_objective(cfg, objective, groups, learned=cfg.trainer.log_z_lr is not None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"loss: {error}") from error
    except RuntimeError:  # of memory, say: a step has better advice on that
        pass


def check_rule(cfg: DictConfig) -> None:
    """Tries the buffer's rule of drawing.

    Raises:
        ValueError: it refuses its own settings, or can't be called.
    """
    logprobs = np.full(2, -1.0, np.float32)
    rule = instantiate(cfg.buffer.rule)
    try:
        buffer = Buffer(max_tokens=100, deduplicate=False, recency_prob=0.0, rule=rule, seed=0)
        buffer.add(made_up_response(0, float(i), logprobs) for i in range(4))
        buffer.draw(1, 2)
    except (ValueError, TypeError) as error:
        raise ValueError(f"buffer.rule: {error}") from error


def made_up_response(prompt_id: int, reward: float, logprobs: np.ndarray) -> Trajectory:
    """A response with these log-probs, float32 [T], under policy and reference."""
    return Trajectory(
        prompt_id=prompt_id,
        prompt_tokens=np.array([prompt_id], np.int32),
        response_tokens=np.arange(len(logprobs), dtype=np.int32),
        behavior_logprobs=logprobs,
        old_logprobs=logprobs,
        reference_logprobs=logprobs,
        reference_version=0,
        reward=reward,
        reward_parts={},
        version_start=0,
        version_end=0,
        truncated=False,
    )


def try_objective(
    cfg: DictConfig, objective: Callable[..., Any], groups: Sequence[Group], *, learned: bool
) -> None:
    """Computes the objective where every log-prob of the policy is 0.

    Args:
        learned: with a log Z for each group.
    """
    tokens = sum(len(t.response_tokens) for group in groups for t in group.trajectories)
    stats = step_stats(groups, None, torch.device("cpu"))
    batch = make_batch(groups, torch.zeros(tokens, requires_grad=True), stats)
    if learned:
        batch.log_z = torch.zeros(len(groups), requires_grad=True)
    objective(batch, beta=beta_at(0, **beta_schedule(cfg.trainer)))


def check_objective(
    cfg: DictConfig,
    objective: Callable[..., Any],
    trajectories: Sequence[Trajectory],
    *,
    learned: bool,
) -> None:
    """Raises ValueError if the objective can't be computed on the data: before any training.

    It is tried on two responses, of which one has no behavior log-probs if any lacks them.

    Args:
        learned: with a log Z for each group.
    """
    worst = max(trajectories, key=lambda t: bool(np.isnan(t.behavior_logprobs).any()))
    pair = [
        dataclasses.replace(t, reference_logprobs=np.zeros_like(t.reference_logprobs))
        for t in (worst, worst)
    ]
    group = Group(prompt_id=0, trajectories=pair, uses=[0, 0], items=[0, 1])
    try:
        try_objective(cfg, objective, [group], learned=learned)
    except ValueError as error:
        raise ValueError(f"loss on the trajectories of data={cfg.data}: {error}") from error
