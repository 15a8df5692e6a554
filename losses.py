"""Objectives: pure functions of a batch, differentiable only in the policy's log-probs.

Each objective is `name(batch, *, beta, ...) -> LossOutput`; its hyper-parameters are keywords,
bound by `conf/loss/*.yaml`. To add one, write a function here and a yaml beside the others.

Letters: N response tokens, B responses, G groups (the responses of one prompt). Log-probs are in
nats, are summed over a response's tokens and never averaged: dividing by the length would change
the policy at which the loss is zero.

Everything returned is a sum over the groups at hand divided by `batch.num_groups`, the count of
groups in the whole optimizer step. Losses, gradients and metrics of micro-batches made of whole
groups therefore *add up* to the step's, however the groups were split and over however many
trainers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trajectory import Batch, mean_by_group, sum_by_response

MIN_GROUP_SIZE = 2  # log Z and baselines compare the responses of one prompt with each other


@dataclass(slots=True, kw_only=True)
class LossOutput:
    """What an objective returns for the groups at hand; filled by the objective alone."""

    loss: Tensor  # float32 scalar, to call backward on
    # Detached float32 scalars (left on the device, so that nothing waits for it). Add them up over
    # micro-batches like the loss: each is a mean over the step's groups of one number a group.
    metrics: dict[str, Tensor | float]


def tb_vargrad(batch: Batch, *, beta: float, normalize: bool = True) -> LossOutput:
    """Trajectory balance with the VarGrad estimate of log Z (arXiv 2503.18929, Eqs. 3-5).

    For response j of a prompt, with `k_j = log pi(y_j) - log pi_ref(y_j)`:

        log Z_hat = mean_i [ r_i / beta - k_i ]                  (Eq. 4, gradient stopped)
        loss      = mean_prompts mean_j (log Z_hat + k_j - r_j / beta)^2         (Eq. 5)

    It is zero exactly when pi is proportional to pi_ref exp(r / beta) on the responses drawn, so
    the responses may come from any policy: no importance ratio, no bound on staleness. Only on
    responses drawn from pi itself is `mean_j k_j` an estimate of KL(pi, pi_ref) and the update
    REINFORCE with a mean baseline on the KL-regularised reward.

    `normalize` multiplies the loss by `beta / 2`. The gradient of Eq. 5 is

        -(2 / beta) mean_prompts mean_j A_j grad log pi(y_j),
        A_j = (r_j - mean r) - beta (k_j - mean k)               (Eq. 7)

    which grows as 1 / beta: at beta = 0.005 it is 400 times A_j. A fixed clipping threshold would
    then mean something else at every beta, and while beta anneals, Adam's second moment would
    remember gradients of another scale. Normalised, minus the gradient is the mean of
    `A_j grad log pi(y_j)` whatever beta is, in units of reward. The minimiser is the same.

    Args:
        batch: whole groups of at least 2 responses, drawn from any policy.
        beta: > 0, reward units per nat.
        normalize: multiply by `beta / 2`; False gives Eq. 5 as printed.

    Returns:
        loss: reward units x nats when normalised, else nats^2; divided by `batch.num_groups`.
        metrics: loss/log_z_mean, loss/residual_rms and policy/log_ratio_mean, all in nats.

    Raises:
        ValueError: beta is not positive, or a group has one response.
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}: trajectory balance divides by it")
    _check_group_sizes(batch)

    log_ratio = sum_by_response(  # [B]
        batch.policy_logprobs.float() - batch.reference_logprobs.detach().float(), batch
    )
    rewards = batch.rewards.detach().float()
    # Stopping the gradient of log Z changes no gradient, as residuals sum to zero in their group.
    mean_log_ratio = mean_by_group(log_ratio.detach(), batch)  # [G]
    mean_reward = mean_by_group(rewards, batch)
    log_z = mean_reward / beta - mean_log_ratio

    # log Z + k - r / beta, with each term centred before they meet: r / beta may be so large that
    # float32 would leave nothing of k.
    residual = (log_ratio - mean_log_ratio[batch.group]) - (
        rewards - mean_reward[batch.group]
    ) / beta
    mean_square = mean_by_group(residual.square(), batch)  # [G]
    loss = mean_square.sum() / batch.num_groups
    if normalize:
        loss = loss * (beta / 2)

    metrics: dict[str, Tensor | float] = {
        "loss/log_z_mean": log_z.sum() / batch.num_groups,
        "loss/residual_rms": mean_square.detach().sqrt().sum() / batch.num_groups,
        "policy/log_ratio_mean": mean_log_ratio.sum() / batch.num_groups,
    }
    return LossOutput(loss=loss, metrics=metrics)


def rloo(batch: Batch, *, beta: float) -> LossOutput:
    """REINFORCE with a leave-one-out baseline, the KL penalty inside the reward.

    For response j of a group of n (groups may differ in size), gradient stopped in all but the
    last factor:

        R_j  = r_j - beta (log pi(y_j) - log pi_ref(y_j))
        A_j  = R_j - (1 / (n - 1)) sum_{i != j} R_i
        loss = -mean_prompts mean_j A_j log pi(y_j)

    Valid on responses drawn from the policy being trained (on-policy): there is no importance
    ratio, and off-policy neither is the penalty a KL nor the update a policy gradient. On one
    group of n, `A_j` is `n / (n - 1)` times the advantage of `tb_vargrad(normalize=True)`.
    (Ahmadian et al., arXiv 2402.14740; Kool et al. 2019.)

    Args:
        batch: whole groups of at least 2 responses, drawn from the current policy.
        beta: >= 0, reward units per nat; 0 leaves the penalty out.

    Returns:
        loss: reward units x nats, divided by `batch.num_groups`. Its gradient is the point: its
            value says little about progress.
        metrics: loss/advantage_rms (reward units) and policy/log_ratio_mean (nats).

    Raises:
        ValueError: beta is negative, or a group has one response.
    """
    if not beta >= 0:
        raise ValueError(f"beta must not be negative, got {beta}: it would reward divergence")
    sizes = _check_group_sizes(batch)

    policy_logprob = sum_by_response(batch.policy_logprobs.float(), batch)  # [B]
    log_ratio = sum_by_response(  # [B]
        batch.policy_logprobs.detach().float() - batch.reference_logprobs.detach().float(), batch
    )
    rewards = batch.rewards.detach().float()
    mean_log_ratio = mean_by_group(log_ratio, batch)  # [G]
    mean_reward = mean_by_group(rewards, batch)
    centred = (rewards - mean_reward[batch.group]) - beta * (
        log_ratio - mean_log_ratio[batch.group]
    )
    # R_j minus the mean of the others is n / (n - 1) times R_j minus the mean of all.
    advantage = centred * (sizes / (sizes - 1))[batch.group]  # [B]
    loss = -mean_by_group(advantage * policy_logprob, batch).sum() / batch.num_groups

    advantage_rms = mean_by_group(advantage.square(), batch).sqrt()  # [G]
    metrics: dict[str, Tensor | float] = {
        "loss/advantage_rms": advantage_rms.sum() / batch.num_groups,
        "policy/log_ratio_mean": mean_log_ratio.sum() / batch.num_groups,
    }
    return LossOutput(loss=loss, metrics=metrics)


def _check_group_sizes(batch: Batch) -> Tensor:
    """Responses in each group, float32 [G]; ValueError for a group of fewer than 2."""
    sizes = torch.bincount(batch.group)
    if int(sizes.min()) < MIN_GROUP_SIZE:
        raise ValueError(
            f"a group needs a minimum of {MIN_GROUP_SIZE} responses to compare, group "
            f"{int(sizes.argmin())} of the batch has {int(sizes.min())}: draw at least "
            f"{MIN_GROUP_SIZE} responses per prompt, and keep a group in one micro-batch"
        )
    return sizes.float()
