"""The gradient of one optimizer step, accumulated over micro-batches of whole groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from buffer import Group
from losses import LossOutput
from model import LogZHead, distinct, micro_batches, prompt_features, response_logprobs
from trajectory import Batch, StepStats, Trajectory


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
) -> dict[str, float]:
    """Adds the gradient of the step's loss to `.grad`, micro-batch by micro-batch.

    Statistics of a group (log Z, baselines) need all its responses, so micro-batches are made of
    whole groups. A group that does not fit in one is taken in two passes: log-probs of all its
    responses without gradient give d loss / d log-prob, which then weights each response's own
    log-probs. Both ways give the same gradient; the second costs one more forward pass.

    Args:
        stats: of the whole step, see `step_stats`.
        log_z_head: for objectives that learn log Z; its gradient is added up like the policy's.

    Returns:
        Sums over the groups at hand: `loss/...` and `policy/...` of the objective (they add up to
        the step's), `tokens`, and per-token sums of -log-prob and |log-prob - old log-prob|.
    """
    sums: dict[str, Tensor] = {}
    options: dict[str, Any] = {"temperature": temperature, "autocast": autocast}
    for part in whole_group_micro_batches(groups, tokens_per_micro_batch):
        trajectories = [t for group in part for t in group.trajectories]
        prompts = [t.prompt_tokens for t in trajectories]
        responses = [t.response_tokens for t in trajectories]
        pieces = list(micro_batches([_length(t) for t in trajectories], tokens_per_micro_batch))
        if len(pieces) == 1:
            logprobs = _logprobs(policy, prompts, responses, options)
            batch = make_batch(part, logprobs, stats)
            batch.log_z = _log_z(policy, part, log_z_head, autocast)
            output = objective(batch, beta=beta)
            output.loss.backward()
        else:
            logprobs = _logprobs_without_gradient(policy, trajectories, pieces, options)
            batch = make_batch(part, logprobs.requires_grad_(), stats)
            batch.log_z = _log_z(policy, part, log_z_head, autocast)
            output = objective(batch, beta=beta)
            output.loss.backward()  # to the log-probs, and to the head that learns log Z
            assert logprobs.grad is not None
            _weighted_backward(policy, trajectories, pieces, logprobs.grad, options)
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


def _logprobs(
    policy: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    options: Mapping[str, Any],
) -> Tensor:
    """`response_logprobs`, computed once for equal responses; their gradients add up."""
    first, slot_of = distinct(prompts, responses)
    logprobs = response_logprobs(
        policy, [prompts[i] for i in first], [responses[i] for i in first], **options
    )
    if len(first) == len(responses):
        return logprobs
    lengths = [len(responses[i]) for i in first]
    starts = np.cumsum(lengths) - lengths
    index = np.concatenate([np.arange(starts[s], starts[s] + lengths[s]) for s in slot_of])
    return logprobs[torch.from_numpy(index).to(logprobs.device)]


def _logprobs_without_gradient(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    pieces: Sequence[Sequence[int]],
    options: Mapping[str, Any],
) -> Tensor:
    """Log-probs of all responses in order, float32 [N], piece by piece."""
    device = next(policy.parameters()).device
    logprobs = torch.zeros(sum(len(t.response_tokens) for t in trajectories), device=device)
    with torch.no_grad():
        for piece in pieces:
            logprobs[_positions(trajectories, piece)] = _forward(
                policy, trajectories, piece, options
            )
    return logprobs


def _weighted_backward(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    pieces: Sequence[Sequence[int]],
    weights: Tensor,
    options: Mapping[str, Any],
) -> None:
    """Adds the gradient of the log-probs' sum, weighted by d loss / d log-prob [N], to `.grad`."""
    for piece in pieces:
        logprobs = _forward(policy, trajectories, piece, options)
        (logprobs * weights[_positions(trajectories, piece)]).sum().backward()


def _forward(
    policy: PreTrainedModel,
    trajectories: Sequence[Trajectory],
    piece: Sequence[int],
    options: Mapping[str, Any],
) -> Tensor:
    return response_logprobs(
        policy,
        [trajectories[i].prompt_tokens for i in piece],
        [trajectories[i].response_tokens for i in piece],
        **options,
    )


def _positions(trajectories: Sequence[Trajectory], piece: Sequence[int]) -> np.ndarray:
    """Where the tokens of some responses lie among those of all, int64."""
    ends = np.cumsum([len(t.response_tokens) for t in trajectories])
    starts = ends - [len(t.response_tokens) for t in trajectories]
    return np.concatenate([np.arange(starts[i], ends[i]) for i in piece])


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


def _length(trajectory: Trajectory) -> int:
    return len(trajectory.prompt_tokens) + len(trajectory.response_tokens)


def whole_group_micro_batches(groups: Sequence[Group], max_tokens: int) -> Iterator[list[Group]]:
    """Groups in micro-batches of at most `max_tokens` padded tokens, similar lengths together.

    A group over the limit comes alone.
    """
    part: list[Group] = []
    size = 0  # responses in `part`
    for group in sorted(groups, key=lambda g: max(_length(t) for t in g.trajectories)):
        width = max(_length(t) for t in group.trajectories)
        if part and width * (size + len(group.trajectories)) > max_tokens:
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
