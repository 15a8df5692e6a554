"""The gradient of one optimizer step, accumulated over micro-batches of whole groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from buffer import Group
from losses import LossOutput
from model import (
    NOTHING,
    PADDED,
    Layout,
    LogZHead,
    distinct,
    micro_batches,
    prompt_features,
    response_logprobs,
    split,
)
from packing import bins, num_tokens
from parallel import device_of, in_lockstep, of_each_rank, reduce_gradients
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
    group: dist.ProcessGroup | None = None,
    reduce_every_micro_batch: bool = False,
    phases: Callable[[str], AbstractContextManager[Any]] = nullcontext,
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
        group: trainers over which the policy is sharded, each of which must call it: they take
            equally many passes. None: it is not sharded.
        reduce_every_micro_batch: of a sharded policy, see `ParallelConfig`.
        phases: `forward`, `logprobs` and `backward` are its contexts, see `accounting.Phases`.

    Returns:
        Sums over the groups at hand: `loss/...` and `policy/...` of the objective (they add up to
        the step's), `tokens`, and per-token sums of -log-prob and |log-prob - old log-prob|.

    Raises:
        ValueError: a response is longer than a packed micro-batch may be.
    """
    forward = partial(
        response_logprobs,
        policy,
        temperature=temperature,
        autocast=autocast,
        layout=layout,
        phases=phases,
    )
    device = device_of(policy)
    lockstep = partial(in_lockstep, group=group, device=device)
    micros = _micro_batches(groups, tokens_per_micro_batch, layout)
    features: dict[bytes, Tensor] = {}
    if log_z_head is not None:
        features = _features(policy, groups, tokens_per_micro_batch, autocast, group)
    sums: dict[str, Tensor] = {}

    def loss(micro: _MicroBatch, logprobs: Tensor) -> Tensor:
        """The objective on the log-probs [N] of the micro-batch's pairs."""
        batch = make_batch(micro.groups, logprobs[_positions(micro, micro.slot_of)], stats)
        if log_z_head is not None:
            prompts = [g.trajectories[0].prompt_tokens for g in micro.groups]
            batch.log_z = log_z_head(torch.stack([features[p.tobytes()] for p in prompts]))
        output = objective(batch, beta=beta)
        _add(sums, batch, output)
        return output.loss

    large = [i for i, micro in enumerate(micros) if len(micro.pieces) > 1]
    known = {i: torch.zeros(sum(map(len, micros[i].responses)), device=device) for i in large}
    with torch.no_grad():
        for item, _ in lockstep([(i, piece) for i in large for piece in micros[i].pieces]):
            if item is None:
                forward(NOTHING, NOTHING)
                continue
            i, piece = item
            known[i][_positions(micros[i], piece)] = forward(*micros[i].pairs(piece))
    weights: dict[int, Tensor] = {}  # d loss / d log-prob [N]
    for i, logprobs in known.items():
        loss(micros[i], logprobs.requires_grad_()).backward()  # to the log-probs, and the head
        assert logprobs.grad is not None
        weights[i] = logprobs.grad

    passes = [(i, piece) for i, micro in enumerate(micros) for piece in micro.pieces]
    for item, last in lockstep(passes):
        reduce_gradients(policy, last or reduce_every_micro_batch)
        if item is None:
            value = (forward(NOTHING, NOTHING) * 0.0).sum()
        else:
            i, piece = item
            logprobs = forward(*micros[i].pairs(piece))
            if i in weights:
                value = (logprobs * weights[i][_positions(micros[i], piece)]).sum()
            else:
                value = loss(micros[i], logprobs)
        with phases("backward"):
            value.backward()
    return {name: float(value) for name, value in sums.items()}


def _add(sums: dict[str, Tensor], batch: Batch, output: LossOutput) -> None:
    """Adds what is reported of a micro-batch."""
    logprobs = batch.policy_logprobs.detach()
    values = {
        "loss/total": output.loss.detach(),
        **output.metrics,
        "tokens": torch.tensor(float(len(logprobs))),
        "policy/entropy_sampled": -logprobs.sum(),
        "policy/logprob_drift": (logprobs - batch.old_logprobs).abs().sum(),
    }
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + torch.as_tensor(value, dtype=torch.float64).cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicroBatch:
    """Whole groups, and their distinct pairs of prompt and response."""

    groups: list[Group]
    prompts: list[np.ndarray]  # int32 [P] of each pair
    responses: list[np.ndarray]  # int32 [T] of each pair
    slot_of: list[int]  # pair of each trajectory
    pieces: list[list[int]]  # pairs that fit in one forward pass, in order; several: a large group

    def pairs(self, piece: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Prompts and responses of `piece`."""
        return [self.prompts[i] for i in piece], [self.responses[i] for i in piece]


def _micro_batches(groups: Sequence[Group], max_tokens: int, layout: Layout) -> list[_MicroBatch]:
    """All of them before the first is computed: a response that is too long ends the step here."""
    micros = []
    for part in whole_group_micro_batches(groups, max_tokens, layout):
        prompts, responses, slot_of = _distinct(part)
        pieces = [sorted(piece) for piece in split(prompts, responses, max_tokens, layout)]
        micros.append(
            _MicroBatch(
                groups=part, prompts=prompts, responses=responses, slot_of=slot_of, pieces=pieces
            )
        )
    return micros


def _distinct(
    groups: Sequence[Group],
) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """Prompts and responses of the distinct pairs, and each trajectory's place among them."""
    trajectories = [t for group in groups for t in group.trajectories]
    prompts = [t.prompt_tokens for t in trajectories]
    responses = [t.response_tokens for t in trajectories]
    first, slot_of = distinct(prompts, responses)
    return [prompts[i] for i in first], [responses[i] for i in first], slot_of


def _positions(micro: _MicroBatch, pairs: Sequence[int]) -> np.ndarray:
    """Where the tokens of some pairs lie among those of all, int64."""
    ends = np.cumsum([len(r) for r in micro.responses])
    starts = ends - [len(r) for r in micro.responses]
    return np.concatenate([np.arange(starts[i], ends[i]) for i in pairs])


def _features(
    policy: PreTrainedModel,
    groups: Sequence[Group],
    max_tokens: int,
    autocast: torch.dtype | None,
    group: dist.ProcessGroup | None,
) -> dict[bytes, Tensor]:
    """Prompt tokens -> float32 [H], of which a learned log Z is a function."""
    prompts = [g.trajectories[0].prompt_tokens for g in groups]
    found: dict[bytes, Tensor] = {}
    device = device_of(policy)
    chunks = list(micro_batches([len(p) for p in prompts], max_tokens))
    for chunk, _ in in_lockstep(chunks, group, device):
        chosen = NOTHING if chunk is None else [prompts[i] for i in chunk]
        rows = prompt_features(policy, chosen, autocast=autocast)
        if chunk is not None:
            found |= {p.tobytes(): row for p, row in zip(chosen, rows, strict=True)}
    return found


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
        counts = of_each_rank(len(groups), group, device)
        padded = torch.zeros(max(counts), 3, dtype=torch.float64, device=device)
        padded[: len(groups)] = rows
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=group)
        rows = torch.cat([x[:n] for x, n in zip(gathered, counts, strict=True)])
    differs = rows[:, 1] > 0
    return StepStats(
        mean_rewards=rows[:, 0].float(),
        differs=differs,
        num_tokens=int(rows[:, 2].sum()),
        num_differing_tokens=int(rows[differs, 2].sum()),
    )
