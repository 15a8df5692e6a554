"""The gradient of one optimizer step, accumulated over micro-batches of whole groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from buffer import Group
from losses import LossOutput
from model import PADDED, Layout, LogZHead, distinct, prompt_features, response_logprobs, split
from packing import bins, num_tokens
from trajectory import Batch, StepStats


def accumulate_gradient(
    policy: PreTrainedModel,
    groups: Sequence[Group],
    *,
    objective: Callable[..., LossOutput],
    beta: float,
    temperature: float,
    autocast: torch.dtype | None,
    tokens_per_micro_batch: int,
    stats: StepStats,
    log_z_head: LogZHead | None = None,
    layout: Layout = PADDED,
) -> dict[str, float]:
    """Adds the gradient of the step's loss to `.grad`, micro-batch by micro-batch.

    Statistics of a group (log Z, baselines) need all its responses, so micro-batches are made of
    whole groups. A group that does not fit in one is taken in two passes: log-probs of all its
    responses without gradient give d loss / d log-prob, which then weights each response's own
    log-probs. Both ways give the same gradient; the second costs one more forward pass. Equal
    responses to a prompt are computed once; their gradients add up.

    Args:
        tokens_per_micro_batch: of the packed row, or with the padding.
        stats: of the whole step, see `step_stats`.
        log_z_head: for objectives that learn log Z; its gradient is added up like the policy's.

    Returns:
        Sums over the groups at hand: `loss/...` and `policy/...` of the objective (they add up to
        the step's), `tokens`, and per-token sums of -log-prob and |log-prob - old log-prob|.

    Raises:
        ValueError: a response is longer than a packed micro-batch may be.
    """
    sums: dict[str, Tensor] = {}
    options: dict[str, Any] = {"temperature": temperature, "autocast": autocast, "layout": layout}
    for micro in _micro_batches(groups, tokens_per_micro_batch, layout):
        whole = len(micro.pieces) == 1
        if whole:
            logprobs = _forward(policy, micro, range(len(micro.responses)), options)
        else:
            logprobs = _logprobs_without_gradient(policy, micro, options).requires_grad_()
        batch = make_batch(micro.groups, logprobs[_positions(micro, micro.slot_of)], stats)
        batch.log_z = _log_z(policy, micro.groups, log_z_head, autocast)
        output = objective(batch, beta=beta)
        output.loss.backward()  # in pieces: to the log-probs, and to the head that learns log Z
        if not whole:
            assert logprobs.grad is not None
            _weighted_backward(policy, micro, logprobs.grad, options)
        values = {
            "loss/total": output.loss.detach(),
            **output.metrics,
            "tokens": torch.tensor(float(len(batch.policy_logprobs))),
            "policy/entropy_sampled": -batch.policy_logprobs.detach().sum(),
            "policy/logprob_drift": (batch.policy_logprobs.detach() - batch.old_logprobs)
            .abs()
            .sum(),
        }
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + torch.as_tensor(value, dtype=torch.float64).cpu()
    return {name: float(value) for name, value in sums.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """Whole groups, and their distinct pairs of prompt and response."""

    groups: list[Group]
    prompts: list[np.ndarray]  # int32 [P] of each pair
    responses: list[np.ndarray]  # int32 [T] of each pair
    slot_of: list[int]  # pair of each trajectory
    pieces: list[list[int]]  # pairs that fit in one forward pass; several for a large group


def _micro_batches(groups: Sequence[Group], max_tokens: int, layout: Layout) -> list[_MicroBatch]:
    """All of them before the first is computed: a response that is too long ends the step here."""
    micro_batches = []
    for part in whole_group_micro_batches(groups, max_tokens, layout):
        prompts, responses, slot_of = _distinct(part)
        pieces = split(prompts, responses, max_tokens, layout)
        micro_batches.append(
            _MicroBatch(
                groups=part, prompts=prompts, responses=responses, slot_of=slot_of, pieces=pieces
            )
        )
    return micro_batches


def _distinct(
    groups: Sequence[Group],
) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Prompts and responses of the distinct pairs, and each trajectory's place among them."""
    trajectories = [t for group in groups for t in group.trajectories]
    prompts = [t.prompt_tokens for t in trajectories]
    responses = [t.response_tokens for t in trajectories]
    first, slot_of = distinct(prompts, responses)
    return [prompts[i] for i in first], [responses[i] for i in first], slot_of


def _logprobs_without_gradient(
    policy: PreTrainedModel, micro: _MicroBatch, options: Mapping[str, Any]
) -> Tensor:
    """Log-probs of all pairs in order, float32 [N], piece by piece."""
    device = next(policy.parameters()).device
    logprobs = torch.zeros(sum(len(r) for r in micro.responses), device=device)
    with torch.no_grad():
        for piece in micro.pieces:
            logprobs[_positions(micro, piece)] = _forward(policy, micro, piece, options)
    return logprobs


def _weighted_backward(
    policy: PreTrainedModel, micro: _MicroBatch, weights: Tensor, options: Mapping[str, Any]
) -> None:
    """Adds the gradient of the log-probs' sum, weighted by d loss / d log-prob [N], to `.grad`."""
    for piece in micro.pieces:
        logprobs = _forward(policy, micro, piece, options)
        (logprobs * weights[_positions(micro, piece)]).sum().backward()


def _forward(
    policy: PreTrainedModel,
    micro: _MicroBatch,
    piece: Sequence[int],
    options: Mapping[str, Any],
) -> Tensor:
    """Log-probs of the pairs of `piece`, one after another."""
    return response_logprobs(
        policy,
        [micro.prompts[i] for i in piece],
        [micro.responses[i] for i in piece],
        **options,
    )


def _positions(micro: _MicroBatch, pairs: Sequence[int]) -> np.ndarray:
    """Where the tokens of some pairs lie among those of all, int64."""
    ends = np.cumsum([len(r) for r in micro.responses])
    starts = ends - [len(r) for r in micro.responses]
    return np.concatenate([np.arange(starts[i], ends[i]) for i in pairs])


def _log_z(
    policy: PreTrainedModel,
    part: Sequence[Group],
    head: LogZHead | None,
    autocast: torch.dtype | None,
) -> Tensor | None:
    """The learned log Z of each group's prompt, float32 [G]."""
    if head is None:
        return None
    prompts = [group.trajectories[0].prompt_tokens for group in part]
    return head(prompt_features(policy, prompts, autocast=autocast))


def whole_group_micro_batches(
    groups: Sequence[Group], max_tokens: int, layout: Layout = PADDED
) -> list[list[Group]]:
    """Groups in micro-batches of at most `max_tokens`, in the packed row or with the padding.

    A group over the limit comes alone.
    """
    if not layout.packed:
        return list(_padded_micro_batches(groups, max_tokens))
    sizes = []
    for group in groups:
        prompts, responses, _ = _distinct([group])
        sizes.append(num_tokens(prompts, responses, share_prompts=layout.share_prompts))
    fitting = [i for i, size in enumerate(sizes) if size <= max_tokens]
    parts = [[i] for i, size in enumerate(sizes) if size > max_tokens]
    parts += [[fitting[j] for j in part] for part in bins([sizes[i] for i in fitting], max_tokens)]
    return [[groups[i] for i in part] for part in parts]


def _padded_micro_batches(groups: Sequence[Group], max_tokens: int) -> Iterator[list[Group]]:
    """The same for right-padded batches, similar lengths together."""

    def width(group: Group) -> int:
        return max(len(t.prompt_tokens) + len(t.response_tokens) for t in group.trajectories)

    part: list[Group] = []
    size = 0  # responses in `part`
    for group in sorted(groups, key=width):
        if part and width(group) * (size + len(group.trajectories)) > max_tokens:
            yield part
            part, size = [], 0
        part.append(group)
        size += len(group.trajectories)
    if part:
        yield part


def make_batch(groups: Sequence[Group], policy_logprobs: Tensor, stats: StepStats) -> Batch:
    """The record that objectives see, for the responses of `groups` in order."""
    device = policy_logprobs.device
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = np.array([len(t.response_tokens) for t in trajectories])
    sizes = np.array([len(group.trajectories) for group in groups])

    def tensor(values: Any, dtype: Any) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=dtype)).to(device)

    return Batch(
        policy_logprobs=policy_logprobs,
        reference_logprobs=tensor(
            np.concatenate([t.reference_logprobs for t in trajectories]), np.float32
        ),
        behavior_logprobs=tensor(
            np.concatenate([t.behavior_logprobs for t in trajectories]), np.float32
        ),
        old_logprobs=tensor(np.concatenate([t.old_logprobs for t in trajectories]), np.float32),
        response=tensor(np.repeat(np.arange(len(trajectories)), lengths), np.int64),
        group=tensor(np.repeat(np.arange(len(groups)), sizes), np.int64),
        rewards=tensor([t.reward for t in trajectories], np.float32),
        num_groups=len(stats.mean_rewards),
        step=stats,
    )


def step_stats(
    groups: Sequence[Group], group: dist.ProcessGroup | None, device: torch.device
) -> StepStats:
    """What objectives may know of the whole step, gathered from all trainers' groups.

    Args:
        groups: this trainer's share of the step's groups.
        group: all trainers, each of which must call it; None when there is one.
    """
    rewards = [np.array([t.reward for t in g.trajectories]) for g in groups]
    tokens = [sum(len(t.response_tokens) for t in g.trajectories) for g in groups]
    rows = torch.tensor(  # [G, 3]: mean reward, whether they differ, tokens
        [[r.mean(), r.max() > r.min(), n] for r, n in zip(rewards, tokens, strict=True)],
        dtype=torch.float64,
        device=device,
    ).reshape(-1, 3)
    if group is not None:
        counts = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
        counts[dist.get_rank(group)] = len(groups)
        dist.all_reduce(counts, group=group)
        padded = torch.zeros(int(counts.max()), 3, dtype=torch.float64, device=device)
        padded[: len(groups)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=group)
        rows = torch.cat([x[:n] for x, n in zip(gathered, counts.tolist(), strict=True)])
    differs = rows[:, 1] > 0
    return StepStats(
        mean_rewards=rows[:, 0].float(),
        differs=differs,
        num_tokens=int(rows[:, 2].sum()),
        num_differing_tokens=int(rows[differs, 2].sum()),
    )


def sum_over_trainers(
    parameters: Sequence[Tensor], sums: dict[str, float], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Adds up the trainers' gradients (in place) and metrics; every trainer must call it."""
    if group is None:
        return sums
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for parameter, grad in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.grad = grad.view_as(parameter)
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=flat.device)
    dist.all_reduce(values, group=group)
    return dict(zip(names, values.tolist(), strict=True))
