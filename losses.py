"""Objectives: pure functions of a batch, differentiable only in the policy's log-probs and log Z.

Each objective is `name(batch, *, beta, ...) -> LossOutput`; its hyper-parameters are keywords,
bound by `conf/loss/*.yaml`. To add one, write a function here and a yaml beside the others.

    trajectory balance  tb_vargrad, tb_learned_z, ctb, alpha_tb; flowrl, with averaged log-probs
    Kimi                kimi, kimi_k2
    policy gradient     reinforce, rloo; with a clipped ratio: proximal_rloo, ppo, grpo, dr_grpo,
                        dgpo
    preference          dpo

Letters: N response tokens, B responses, G groups (the responses of one prompt), n responses of one
group. Log-probs are in nats and, unless an objective says otherwise, are summed over a response's
tokens and never averaged: dividing by the length would change the policy at which a trajectory
balance loss is zero. In formulas `k_j = log pi(y_j) - log pi_ref(y_j)`, `r_j` is the reward, and
SG[...] stops the gradient. "Normalised" means that minus the gradient is the mean over prompts and
over responses of `A_j grad log pi(y_j)`, with `A_j` in units of reward.

Everything returned is a sum over the groups at hand divided by `batch.num_groups`, the count of
groups in the whole optimizer step (or by a count of the step's tokens, where that is said). Losses,
gradients and metrics of micro-batches made of whole groups therefore *add up* to the step's,
however the groups were split and over however many trainers.

Options that several objectives share:

    kl              where the KL penalty goes. "none"; "reward": `R_j = r_j - beta sum_t SG[KL_t]`,
                    before the baseline; "penalty": `+ beta KL_t` beside each token's term,
                    differentiated, averaged and weighted as that term is
    kl_estimator    KL_t of one token from `d = log pi - log pi_ref` (Schulman, "Approximating KL
                    Divergence", 2020): "k1" d, "k2" d^2 / 2, "k3" exp(-d) - 1 + d. As a penalty,
                    on-policy, k1 has a gradient that is zero in expectation, k2 has the gradient of
                    the reverse KL, and k3, an unbiased and positive estimate of the reverse KL, has
                    the gradient of the forward KL. In the reward, k1 is the unbiased one.
    length_norm     how a response's token terms become one number. "none": their sum; "sequence":
                    over its own length (GRPO); "constant": over `length_constant` tokens (Dr. GRPO,
                    arXiv 2503.20783); "token_mean": the sum over all tokens of the step, over their
                    number, in place of both means (DAPO, arXiv 2503.14476)
    importance      truncated importance weights `SG[min(pi / behavior, importance_cap)]`, of each
                    token ("token") or of the whole response ("sequence"), multiply its term; "none"
    clip_low/_high  a ratio is clipped to [1 - clip_low, 1 + clip_high]

Log-ratios are clamped to +-MAX_LOG_RATIO before they are exponentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trajectory import Batch, StepStats, mean_by_group, sum_by_response

MIN_GROUP_SIZE = 2  # log Z and baselines compare the responses of one prompt with each other
# Nats. e^20 = 5e8 is far beyond every clip and cap, and its square is far from float32's overflow.
MAX_LOG_RATIO = 20.0

Metrics = dict[str, Tensor | float]


@dataclass(slots=True, kw_only=True)
class LossOutput:
    """What an objective returns for the groups at hand; filled by the objective alone."""

    loss: Tensor  # float32 scalar, to call backward on
    # Detached float32 scalars (left on the device, so that nothing waits for it). Add them up over
    # micro-batches like the loss: each is a mean over the step's groups of one number a group.
    metrics: Metrics


# Trajectory balance ----------------------------------------------------------------------------


def tb_vargrad(
    batch: Batch,
    *,
    beta: float,
    normalize: bool = True,
    importance: str = "none",
    importance_cap: float = 2.0,
    difficulty_temperature: float | None = None,
) -> LossOutput:
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

    With weights w_j (`importance`), `log Z_hat` is their weighted mean, `sum_i w_i [...] / sum_i
    w_i`, and the loss `mean_j w_j (...)^2`: responses that the policy would hardly draw today count
    less, the minimiser stays. So it does with `difficulty_temperature` T, which multiplies each
    prompt's loss by `lambda` as in `dgpo` (arXiv 2601.20614): harder prompts count more.

    Valid on: responses drawn from any policy, however old.

    Args:
        batch: whole groups of at least 2 responses.
        beta: > 0, reward units per nat.
        normalize: multiply by `beta / 2`; False gives Eq. 5 as printed.
        importance: "none" or "sequence"; the balance is one of whole responses, not of tokens.
        importance_cap: > 0, the largest weight.
        difficulty_temperature: > 0, reward units; None weighs all prompts the same.

    Returns:
        loss: reward units x nats when normalised, else nats^2; divided by `batch.num_groups`.
        metrics: loss/log_z_mean, loss/residual_rms and policy/log_ratio_mean, all in nats;
            policy/importance_mean with `importance`. The rms and the mean count responses alike,
            whatever their weights.

    Raises:
        ValueError: beta is not positive, an option is not one of those above, a group has one
            response, `importance` needs behavior log-probs that the batch lacks, or
            `difficulty_temperature` needs `batch.step`.
    """
    _check_positive("beta", beta, "trajectory balance divides by it")
    _check_group_sizes(batch)
    weights, metrics = _sequence_weights(batch, importance, importance_cap)  # [B]
    residual, log_z, log_ratio = _balance(batch, beta, weights)
    mean_square = mean_by_group(weights * residual.square(), batch)  # [G]
    if difficulty_temperature is not None:
        mean_square = mean_square * _difficulty_weights(batch, difficulty_temperature)
    loss = mean_square.sum() / batch.num_groups
    if normalize:
        loss = loss * (beta / 2)
    return LossOutput(
        loss=loss, metrics=_balance_metrics(batch, log_z, residual, log_ratio) | metrics
    )


def tb_learned_z(
    batch: Batch,
    *,
    beta: float,
    normalize: bool = True,
    importance: str = "none",
    importance_cap: float = 2.0,
) -> LossOutput:
    """Trajectory balance with a learned log Z of each prompt (arXiv 2503.18929, Eq. 3; 2201.13259).

        loss = mean_prompts mean_j w_j (log Z + k_j - r_j / beta)^2

    The gradient goes into log Z too; where log Z is the group's own estimate, the policy's gradient
    is that of `tb_vargrad`. `normalize` multiplies by `beta / 2`.

    Valid on: responses drawn from any policy, however old.

    Args:
        batch: whole groups of at least 2 responses, with `log_z`.
        beta: > 0, reward units per nat.
        normalize: multiply by `beta / 2`.
        importance: "none" (w_j = 1) or "sequence".
        importance_cap: > 0, the largest weight.

    Returns:
        loss: reward units x nats when normalised, else nats^2; divided by `batch.num_groups`.
        metrics: loss/log_z_mean (of the learned one), loss/residual_rms, policy/log_ratio_mean;
            policy/importance_mean with `importance`.

    Raises:
        ValueError: beta is not positive, an option is not one of those above, `batch.log_z` is
            None, a group has one response, or behavior log-probs are needed and unknown.
    """
    _check_positive("beta", beta, "trajectory balance divides by it")
    _check_group_sizes(batch)
    log_z = _learned_log_z(batch, "tb_learned_z")  # [G]
    weights, metrics = _sequence_weights(batch, importance, importance_cap)  # [B]
    log_ratio = _log_ratio(batch)  # [B]
    residual = log_z[batch.group] + log_ratio - _rewards(batch) / beta
    loss = mean_by_group(weights * residual.square(), batch).sum() / batch.num_groups
    if normalize:
        loss = loss * (beta / 2)
    return LossOutput(
        loss=loss, metrics=_balance_metrics(batch, log_z, residual, log_ratio) | metrics
    )


def ctb(
    batch: Batch, *, beta: float, normalize: bool = True, prune: float | None = None
) -> LossOutput:
    """Contrastive trajectory balance: pairs of a group, in which log Z cancels (arXiv 2605.00553).

    With `f_j = k_j - r_j / beta`, over the n (n - 1) / 2 pairs of a prompt's responses:

        loss = mean_prompts mean_{a < b} (f_a - f_b)^2

    Over all pairs that is `2 n / (n - 1)` times the loss of `tb_vargrad`. `prune` = sigma leaves
    out (counts as zero) the pairs with `|log R_a - log R_b| <= sigma`, `log R = log pi_ref + r /
    beta`, whose order noise in the reward could turn round (noisy gradient pruning, section 4).
    `normalize` multiplies by `beta / 4`, which gives `n / (n - 1)` times the normalised
    `tb_vargrad`, the factor of `rloo`.

    Valid on: responses drawn from any policy, however old.

    Args:
        batch: whole groups of at least 2 responses; groups may differ in size.
        beta: > 0, reward units per nat.
        normalize: multiply by `beta / 4`.
        prune: >= 0, nats; None keeps all pairs.

    Returns:
        loss: reward units x nats when normalised, else nats^2; divided by `batch.num_groups`.
        metrics: loss/log_z_mean, loss/residual_rms and policy/log_ratio_mean as in `tb_vargrad`;
            loss/pairs_used, the share of pairs kept.

    Raises:
        ValueError: beta is not positive, prune is negative, or a group has one response.
    """
    _check_positive("beta", beta, "trajectory balance divides by it")
    if prune is not None and not prune >= 0:
        raise ValueError(f"prune must not be negative, got {prune}: it is a distance in nats")
    sizes = _check_group_sizes(batch)
    residual, log_z, log_ratio = _balance(batch, beta)
    squares = _differences(residual, batch).square()  # [G, n, n], each pair twice
    ones = _rows(torch.ones_like(log_z)[batch.group], batch)  # [G, n], 0 where there is none
    kept = ones[:, :, None] * ones[:, None, :] * (1 - torch.eye(ones.shape[1], device=ones.device))
    if prune is not None:
        reference = sum_by_response(batch.reference_logprobs.detach().float(), batch)  # [B]
        gap = _differences(reference, batch) + _differences(_rewards(batch), batch) / beta
        kept = kept * (gap.abs() > prune)
    num_pairs = sizes * (sizes - 1)  # [G], each pair twice
    loss = ((kept * squares).sum((1, 2)) / num_pairs).sum() / batch.num_groups
    if normalize:
        loss = loss * (beta / 4)
    metrics = _balance_metrics(batch, log_z, residual, log_ratio)
    metrics["loss/pairs_used"] = (kept.sum((1, 2)) / num_pairs).sum() / batch.num_groups
    return LossOutput(loss=loss, metrics=metrics)


def alpha_tb(batch: Batch, *, beta: float, alpha: float, normalize: bool = True) -> LossOutput:
    """Trajectory balance of an alpha divergence (f-TB, arXiv 2605.15417).

    With `D_j = log Z_hat + k_j - r_j / beta`, which is `log pi(y_j) - log pi*(y_j)` up to log Z:

        loss     = mean_prompts mean_j L(D_j),
        L(x)     = (exp((alpha - 1) x) - 1) / (alpha - 1)^2 - x / (alpha - 1),
        L'(x)    = (exp((alpha - 1) x) - 1) / (alpha - 1),
        log Z_hat = argmin_C mean_j L(C + k_j - r_j / beta)      (DevGrad, gradient stopped)
                  = -log mean_j exp((alpha - 1) (k_j - r_j / beta)) / (alpha - 1)

    On-policy it has the gradient of the divergence: reverse KL at alpha = 1, where `L(x) = x^2 / 2`
    and `log Z_hat` is VarGrad's, forward KL at alpha = 0. Smaller alpha pulls harder on responses
    that pi gives too little probability. Whatever alpha is, the minimiser is pi*.

    `normalize` takes the tempered form `L(beta D) / beta` (with the log Z_hat that minimises it),
    without which `exp` saturates at small beta. Minus its gradient is the mean of `A_j grad log
    pi(y_j)` with `A_j = -L'(beta D_j)`; at alpha = 1 it is `tb_vargrad(normalize=True)`.

    Valid on: responses drawn from any policy, however old.

    Args:
        batch: whole groups of at least 2 responses.
        beta: > 0, reward units per nat.
        alpha: finite; 1 is trajectory balance.
        normalize: the tempered form; False gives `L(D)`, at alpha = 1 half of `tb_vargrad`'s Eq. 5.

    Returns:
        loss: reward units x nats when normalised, else in the unit of L; over `batch.num_groups`.
        metrics: loss/log_z_mean, loss/residual_rms (of D) and policy/log_ratio_mean, in nats.

    Raises:
        ValueError: beta is not positive, alpha is not finite, or a group has one response.
    """
    _check_positive("beta", beta, "trajectory balance divides by it")
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be a finite number, got {alpha}: 1 is trajectory balance")
    _check_group_sizes(batch)
    residual, log_z, log_ratio = _balance(batch, beta)  # of VarGrad, DevGrad's at alpha = 1
    scale = beta if normalize else 1.0
    # float64, as near alpha = 1 both L and its log Z are small differences of large numbers.
    x = scale * residual.double()  # [B]
    shift = _dev_grad(x.detach(), alpha, batch)  # [G]
    x = x + shift[batch.group]
    value, slope = _alpha_loss(x.detach(), alpha)
    # L with its slope as the gradient: differentiating the two branches of L would be less exact.
    value = value + slope * (x - x.detach())
    loss = (mean_by_group(value, batch).sum() / (batch.num_groups * scale)).float()
    metrics = _balance_metrics(
        batch, log_z + (shift / scale).float(), (x / scale).float(), log_ratio
    )
    return LossOutput(loss=loss, metrics=metrics)


def flowrl(
    batch: Batch,
    *,
    beta: float,
    normalize: bool = True,
    reward_std_eps: float = 1e-6,
    importance: str = "sequence",
    importance_cap: float = 2.0,
) -> LossOutput:
    """FlowRL: trajectory balance on log-probs averaged over the tokens (arXiv 2509.15207).

        loss = mean_prompts mean_j w_j (log Z + k_j / len_j - rhat_j / beta)^2,
        rhat_j = (r_j - mean r) / (std r + reward_std_eps)       (std of the group as it is)

    with a learned log Z; `beta` here divides, the paper's multiplies rhat. Long responses don't
    outweigh short ones, but for the same reason the minimiser is not pi*: it is the policy with
    `(pi / pi_ref)^(1 / len)` proportional to `exp(rhat / beta)`. `normalize` multiplies by
    `beta / 2`.

    Valid on: responses drawn from any policy; the weights w_j, the paper's, favour those that the
    policy would still draw.

    Args:
        batch: whole groups of at least 2 responses, with `log_z`.
        beta: > 0, standard deviations of reward per nat a token.
        normalize: multiply by `beta / 2`.
        reward_std_eps: > 0, reward units.
        importance: "sequence" or "none" (w_j = 1).
        importance_cap: > 0, the largest weight.

    Returns:
        loss: divided by `batch.num_groups`.
        metrics: loss/log_z_mean and loss/residual_rms (nats a token), policy/log_ratio_mean (nats a
            response); policy/importance_mean with `importance`.

    Raises:
        ValueError: beta or reward_std_eps is not positive, an option is not one of those above,
            `batch.log_z` is None, a group has one response, or behavior log-probs are needed and
            unknown.
    """
    _check_positive("beta", beta, "trajectory balance divides by it")
    _check_positive("reward_std_eps", reward_std_eps, "groups of equal rewards have no deviation")
    _check_group_sizes(batch)
    log_z = _learned_log_z(batch, "flowrl")  # [G]
    weights, metrics = _sequence_weights(batch, importance, importance_cap)  # [B]
    log_ratio = _log_ratio(batch)  # [B]
    reward = _over_std(_centre(_rewards(batch), batch)[0], reward_std_eps, batch)
    residual = log_z[batch.group] + log_ratio / _lengths(batch) - reward / beta
    loss = mean_by_group(weights * residual.square(), batch).sum() / batch.num_groups
    if normalize:
        loss = loss * (beta / 2)
    return LossOutput(
        loss=loss, metrics=_balance_metrics(batch, log_z, residual, log_ratio) | metrics
    )


# Kimi ------------------------------------------------------------------------------------------


def kimi(
    batch: Batch, *, beta: float, normalize: bool = True, log_z: str = "mean_reward"
) -> LossOutput:
    """Kimi k1.5: the squared balance with log Z from the rewards alone (arXiv 2501.12599).

        c_j  = (r_j - zeta) - beta k_j,
        zeta = mean r                                            (log_z="mean_reward")
             = beta log mean_i exp(r_i / beta)                   (log_z="log_mean_exp")
        loss = mean_prompts mean_j c_j^2

    `normalize` divides by `2 beta`, so that minus the gradient is the mean of `c_j grad log
    pi(y_j)`. Beside `tb_vargrad` the baseline lacks the mean log-ratio `beta mean k`.

    Valid on: responses drawn from nearly the current policy, and a reference near it (the paper
    replaces it by the policy of every iteration). With log_mean_exp zeta is `beta log Z` for
    responses drawn from the reference; on those of the policy itself any constant will do, as
    `grad log pi` averages to zero under pi; on any others the fixed point is not pi*.

    Args:
        batch: whole groups of at least 2 responses.
        beta: > 0, reward units per nat.
        normalize: divide by `2 beta`; False gives the mean of c^2.
        log_z: "mean_reward" or "log_mean_exp".

    Returns:
        loss: reward units x nats when normalised, else reward units^2; over `batch.num_groups`.
        metrics: loss/log_z_mean (zeta / beta), loss/residual_rms (of c / beta) and
            policy/log_ratio_mean, all in nats.

    Raises:
        ValueError: beta is not positive, log_z is not one of those above, or a group has one
            response.
    """
    _check_positive("beta", beta, "the loss is a square of beta times a log-ratio")
    _check_one_of("log_z", log_z, ("mean_reward", "log_mean_exp"))
    _check_group_sizes(batch)
    reward, zeta = _centre(_rewards(batch), batch)  # [B], [G]
    if log_z == "log_mean_exp":
        above = beta * _log_mean_exp(reward / beta, batch)  # [G], of zeta over the mean reward
        reward, zeta = reward - above[batch.group], zeta + above
    log_ratio = _log_ratio(batch)
    return _kimi_output(batch, beta, normalize, zeta, reward - beta * log_ratio)


def kimi_k2(batch: Batch, *, beta: float, normalize: bool = True) -> LossOutput:
    """Kimi K2: like k1.5, with the policy that sampled in place of the reference (2507.20534).

        c_j  = (r_j - mean r) - beta (log pi(y_j) - log pi_old(y_j)),
        loss = mean_prompts mean_j c_j^2

    `log pi_old` is the sampling policy's at the training temperature (`batch.old_logprobs`).
    `normalize` divides by `2 beta`: minus the gradient is the mean of `c_j grad log pi(y_j)`.
    Nothing holds the policy near the reference, which is not used.

    Valid on: responses drawn from nearly the current policy.

    Args:
        batch: whole groups of at least 2 responses, with `old_logprobs`.
        beta: > 0, reward units per nat.
        normalize: divide by `2 beta`; False gives the mean of c^2.

    Returns:
        loss: reward units x nats when normalised, else reward units^2; over `batch.num_groups`.
        metrics: loss/log_z_mean (mean r / beta), loss/residual_rms (of c / beta) and
            policy/log_ratio_mean (to the reference), all in nats.

    Raises:
        ValueError: beta is not positive, a group has one response, or the old log-probs are
            unknown.
    """
    _check_positive("beta", beta, "the loss is a square of beta times a log-ratio")
    _check_group_sizes(batch)
    _check_known(batch.old_logprobs, "old log-probs (old_logprobs)", "tb_vargrad")
    change = _log_ratio(batch, batch.old_logprobs)  # [B]
    reward, zeta = _centre(_rewards(batch), batch)
    return _kimi_output(batch, beta, normalize, zeta, reward - beta * change)


def _kimi_output(
    batch: Batch, beta: float, normalize: bool, zeta: Tensor, coefficient: Tensor
) -> LossOutput:
    """The squared coefficients [B], in reward units, and their metrics; zeta [G]."""
    loss = mean_by_group(coefficient.square(), batch).sum() / batch.num_groups
    if normalize:
        loss = loss / (2 * beta)
    metrics = _balance_metrics(batch, zeta / beta, coefficient / beta, _log_ratio(batch))
    return LossOutput(loss=loss, metrics=metrics)


# Policy gradient -------------------------------------------------------------------------------


def reinforce(
    batch: Batch,
    *,
    beta: float,
    kl: str = "reward",
    kl_estimator: str = "k1",
    length_norm: str = "none",
    length_constant: float | None = None,
    importance: str = "none",
    importance_cap: float = 2.0,
) -> LossOutput:
    """REINFORCE with the group's mean as baseline (Williams 1992).

    With `R_j` the reward, less the KL penalty where `kl="reward"`, gradient stopped in `A_j`:

        A_j  = R_j - mean_i R_i
        loss = -mean_prompts mean_j A_j log pi(y_j)

    Its gradient with the defaults is that of `tb_vargrad(normalize=True)`.

    Valid on: responses drawn from the policy being trained (on-policy). `importance` corrects for
    responses a little older, up to the bias of the cap.

    Args:
        batch: whole groups of at least 2 responses.
        beta: >= 0, reward units per nat; 0 leaves the KL penalty out.
        kl, kl_estimator, length_norm, length_constant, importance, importance_cap: see the module.

    Returns:
        loss: reward units x nats with length_norm="none", divided by `batch.num_groups`;
            length_norm="token_mean" divides by the step's tokens instead. Its gradient is the
            point: its value says little about progress.
        metrics: loss/advantage_rms (reward units) and policy/log_ratio_mean (nats);
            policy/importance_mean with `importance`.

    Raises:
        ValueError: beta is negative, an option is not one of those in the module's list, a group
            has one response, behavior log-probs are needed and unknown, or "token_mean" needs
            `batch.step`.
    """
    _check_policy_gradient(beta, kl, kl_estimator, length_norm, length_constant)
    _check_group_sizes(batch)
    advantage = _centred_return(batch, beta, kl, kl_estimator)  # [B]
    weights, metrics = _token_weights(batch, importance, importance_cap)  # [N]
    cost = -advantage[batch.response] * batch.policy_logprobs.float()  # [N]
    cost = weights * (cost + _kl_penalty(batch, beta, kl, kl_estimator))
    loss = _aggregate(cost, batch, length_norm, length_constant)
    return LossOutput(loss=loss, metrics=_advantage_metrics(batch, advantage) | metrics)


def rloo(
    batch: Batch,
    *,
    beta: float,
    kl: str = "reward",
    kl_estimator: str = "k1",
    length_norm: str = "none",
    length_constant: float | None = None,
    importance: str = "none",
    importance_cap: float = 2.0,
) -> LossOutput:
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740; Kool et al. 2019).

    For response j of a group of n (groups may differ in size), gradient stopped in `A_j`:

        R_j  = r_j - beta (log pi(y_j) - log pi_ref(y_j))        (kl="reward")
        A_j  = R_j - (1 / (n - 1)) sum_{i != j} R_i
        loss = -mean_prompts mean_j A_j log pi(y_j)

    On one group of n, `A_j` is `n / (n - 1)` times the advantage of `tb_vargrad(normalize=True)`.

    Valid on: responses drawn from the policy being trained (on-policy): off-policy neither is the
    penalty a KL nor the update a policy gradient. `importance` corrects for responses a little
    older, up to the bias of the cap.

    Args:
        batch: whole groups of at least 2 responses.
        beta: >= 0, reward units per nat; 0 leaves the KL penalty out.
        kl, kl_estimator, length_norm, length_constant, importance, importance_cap: see the module.

    Returns:
        loss, metrics: as `reinforce`.

    Raises:
        ValueError: as `reinforce`.
    """
    _check_policy_gradient(beta, kl, kl_estimator, length_norm, length_constant)
    sizes = _check_group_sizes(batch)
    advantage = _leave_one_out(_centred_return(batch, beta, kl, kl_estimator), sizes, batch)
    weights, metrics = _token_weights(batch, importance, importance_cap)  # [N]
    cost = -advantage[batch.response] * batch.policy_logprobs.float()  # [N]
    cost = weights * (cost + _kl_penalty(batch, beta, kl, kl_estimator))
    loss = _aggregate(cost, batch, length_norm, length_constant)
    return LossOutput(loss=loss, metrics=_advantage_metrics(batch, advantage) | metrics)


def proximal_rloo(
    batch: Batch,
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: str = "reward",
    kl_estimator: str = "k1",
) -> LossOutput:
    """RLOO with one clipped ratio a response (arXiv 2410.18252).

        rho_j = pi(y_j) / behavior(y_j)
        loss  = -mean_prompts mean_j min(A_j rho_j, A_j clip(rho_j, 1 - clip_low, 1 + clip_high))

    with `A_j` of `rloo`.

    Valid on: responses drawn from nearly the current policy. The ratio is a product over all
    tokens: on older ones most are clipped and few give a gradient.

    Args:
        batch: whole groups of at least 2 responses, with behavior log-probs.
        beta: >= 0, reward units per nat; 0 leaves the KL penalty out.
        clip_low, clip_high, kl, kl_estimator: see the module; a penalty is summed over a
            response's tokens.

    Returns:
        loss: reward units, divided by `batch.num_groups`.
        metrics: loss/advantage_rms (reward units), policy/log_ratio_mean (nats) and
            policy/clip_fraction (of responses).

    Raises:
        ValueError: beta is negative, an option is not one of those in the module's list, a group
            has one response, or behavior log-probs are unknown.
    """
    _check_policy_gradient(beta, kl, kl_estimator)
    _check_clip(clip_low, clip_high)
    sizes = _check_group_sizes(batch)
    _check_behavior(batch)
    advantage = _leave_one_out(_centred_return(batch, beta, kl, kl_estimator), sizes, batch)
    ratio = _exp(_log_ratio(batch, batch.behavior_logprobs))  # [B]
    cost, clipped = _clipped_cost(ratio, advantage, clip_low, clip_high)
    cost = cost + sum_by_response(_kl_penalty(batch, beta, kl, kl_estimator), batch)
    metrics = _advantage_metrics(batch, advantage)
    metrics["policy/clip_fraction"] = mean_by_group(clipped, batch).sum() / batch.num_groups
    return LossOutput(loss=mean_by_group(cost, batch).sum() / batch.num_groups, metrics=metrics)


def ppo(
    batch: Batch,
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: str = "reward",
    kl_estimator: str = "k1",
    length_norm: str = "none",
    length_constant: float | None = None,
) -> LossOutput:
    """PPO's clipped objective on token ratios, the group's mean in place of a critic (1707.06347).

        rho_t = pi(y_t) / behavior(y_t)
        loss  = -mean_prompts mean_j sum_t min(A_j rho_t, A_j clip(rho_t, 1 - clip_low,
                                                                   1 + clip_high))

    with `A_j` of `reinforce`, the same for all tokens of a response.

    Valid on: responses drawn from nearly the current policy.

    Args:
        batch: whole groups of at least 2 responses, with behavior log-probs.
        beta: >= 0, reward units per nat; 0 leaves the KL penalty out.
        clip_low, clip_high, kl, kl_estimator, length_norm, length_constant: see the module.

    Returns:
        loss: reward units, divided by `batch.num_groups`; length_norm="token_mean" divides by the
            step's tokens instead.
        metrics: loss/advantage_rms (reward units), policy/log_ratio_mean (nats) and
            policy/clip_fraction (of tokens).

    Raises:
        ValueError: beta is negative, an option is not one of those in the module's list, a group
            has one response, behavior log-probs are unknown, or "token_mean" needs `batch.step`.
    """
    _check_policy_gradient(beta, kl, kl_estimator, length_norm, length_constant)
    _check_group_sizes(batch)
    advantage = _centred_return(batch, beta, kl, kl_estimator)
    cost, metrics = _clipped_tokens(batch, advantage, clip_low, clip_high)
    cost = cost + _kl_penalty(batch, beta, kl, kl_estimator)
    loss = _aggregate(cost, batch, length_norm, length_constant)
    return LossOutput(loss=loss, metrics=_advantage_metrics(batch, advantage) | metrics)


def grpo(
    batch: Batch,
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    std_eps: float = 1e-4,
    kl: str = "penalty",
    kl_estimator: str = "k3",
    length_norm: str = "sequence",
    length_constant: float | None = None,
) -> LossOutput:
    """GRPO: `ppo` with advantages over their standard deviation (arXiv 2402.03300).

        A_j  = (R_j - mean R) / (std R + std_eps)                (std of the group as it is)
        loss = mean_prompts mean_j (1 / len_j) sum_t [ -min(A_j rho_t, A_j clip(rho_t))
                                                       + beta KL_t ]

    Valid on: responses drawn from nearly the current policy.

    Args:
        batch: whole groups of at least 2 responses, with behavior log-probs.
        beta: >= 0, standard deviations of reward per nat (reward units with kl="reward"); 0 leaves
            the KL penalty out.
        std_eps: > 0, reward units.
        clip_low, clip_high, kl, kl_estimator, length_norm, length_constant: see the module.

    Returns:
        loss: without unit, divided by `batch.num_groups`; length_norm="token_mean" divides by the
            step's tokens instead.
        metrics: loss/advantage_rms (without unit), policy/log_ratio_mean (nats) and
            policy/clip_fraction (of tokens).

    Raises:
        ValueError: as `ppo`, or std_eps is not positive.
    """
    _check_policy_gradient(beta, kl, kl_estimator, length_norm, length_constant)
    _check_positive("std_eps", std_eps, "groups of equal rewards have no deviation")
    _check_group_sizes(batch)
    advantage = _over_std(_centred_return(batch, beta, kl, kl_estimator), std_eps, batch)
    cost, metrics = _clipped_tokens(batch, advantage, clip_low, clip_high)
    cost = cost + _kl_penalty(batch, beta, kl, kl_estimator)
    loss = _aggregate(cost, batch, length_norm, length_constant)
    return LossOutput(loss=loss, metrics=_advantage_metrics(batch, advantage) | metrics)


def dr_grpo(
    batch: Batch,
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: str = "none",
    kl_estimator: str = "k3",
    length_norm: str = "constant",
    length_constant: float | None = None,
) -> LossOutput:
    """Dr. GRPO: GRPO without its two biases (arXiv 2503.20783).

        A_j  = R_j - mean R
        loss = -mean_prompts mean_j (1 / length_constant) sum_t min(A_j rho_t, A_j clip(rho_t))

    Neither are easy and hard prompts weighed up by a small deviation, nor long wrong responses
    spared by their length.

    Valid on: responses drawn from nearly the current policy.

    Args:
        batch: whole groups of at least 2 responses, with behavior log-probs.
        beta: >= 0, reward units per nat; without use while kl="none".
        length_constant: > 0, tokens; usually the task's max_response_tokens.
        clip_low, clip_high, kl, kl_estimator, length_norm: see the module.

    Returns:
        loss: reward units, divided by `batch.num_groups`; length_norm="token_mean" divides by the
            step's tokens instead.
        metrics: as `ppo`.

    Raises:
        ValueError: as `ppo`, or length_constant is missing.
    """
    _check_policy_gradient(beta, kl, kl_estimator, length_norm, length_constant)
    _check_group_sizes(batch)
    advantage = _centred_return(batch, beta, kl, kl_estimator)
    cost, metrics = _clipped_tokens(batch, advantage, clip_low, clip_high)
    cost = cost + _kl_penalty(batch, beta, kl, kl_estimator)
    loss = _aggregate(cost, batch, length_norm, length_constant)
    return LossOutput(loss=loss, metrics=_advantage_metrics(batch, advantage) | metrics)


def dgpo(
    batch: Batch,
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    difficulty_temperature: float = 2.0,
    mad_eps: float = 1e-4,
) -> LossOutput:
    """DGPO: every prompt moves the policy alike, and harder prompts more (arXiv 2601.20614).

        A_j      = n (r_j - mean r) / (sum_i |r_i - mean r| + mad_eps)
        lambda_g = V softmax over the step's V groups g of (-mean r / T)
        loss     = -(1 / tokens) sum_g lambda_g sum_j sum_t min(A_j rho_t, A_j clip(rho_t))

    Only groups whose rewards differ are summed over, counted in V and in `tokens`: it is their
    tokens in the whole optimizer step that the loss is divided by, neither groups nor responses.
    T is `difficulty_temperature`. There is no KL penalty. If no rewards differ the loss is 0.

    Valid on: responses drawn from nearly the current policy.

    Args:
        batch: whole groups of at least 2 responses, with behavior log-probs; and with `step` unless
            it is the whole step.
        beta: without use.
        clip_low, clip_high: see the module.
        difficulty_temperature: > 0, reward units.
        mad_eps: > 0, reward units.

    Returns:
        loss: without unit, divided by `batch.step.num_differing_tokens`.
        metrics: loss/advantage_rms (without unit), policy/log_ratio_mean (nats) and
            policy/clip_fraction (of tokens); these are means over all groups.

    Raises:
        ValueError: an option is out of range, a group has one response, behavior log-probs are
            unknown, or `batch.step` is None and groups are missing.
    """
    _check_policy_gradient(beta)
    _check_positive("mad_eps", mad_eps, "groups of equal rewards have no deviation")
    sizes = _check_group_sizes(batch)
    centred = _centre(_rewards(batch), batch)[0]  # [B]
    deviation = mean_by_group(centred.abs(), batch) + mad_eps / sizes  # [G]
    advantage = centred / deviation[batch.group]
    cost, metrics = _clipped_tokens(batch, advantage, clip_low, clip_high)
    weights = _difficulty_weights(batch, difficulty_temperature) * _differs(batch)  # [G]
    loss = (weights[batch.group[batch.response]] * cost).sum()
    loss = loss / max(_step(batch).num_differing_tokens, 1)
    return LossOutput(loss=loss, metrics=_advantage_metrics(batch, advantage) | metrics)


# Preference ------------------------------------------------------------------------------------


def dpo(batch: Batch, *, beta: float, normalize: bool = True) -> LossOutput:
    """Online DPO: the best of a group preferred to the worst (arXiv 2305.18290, 2402.04792).

        loss = mean_prompts mean_{b, w} -log sigmoid(beta (k_b - k_w))

    over the pairs of a response b with the group's highest reward and w with its lowest; all of
    them where several share it. A group of equal rewards has no pair and counts as 0. `normalize`
    divides by beta, so that the gradient's size doesn't follow beta.

    Valid on: any responses, but only their order counts, not how far the rewards are apart, and
    those between best and worst are not used: the minimiser is not pi*. The younger the responses,
    the better (arXiv 2410.18252).

    Args:
        batch: whole groups of at least 2 responses.
        beta: > 0, per nat.
        normalize: divide by beta.

    Returns:
        loss: nats when normalised, else without unit; divided by `batch.num_groups`.
        metrics: policy/log_ratio_mean (nats) and loss/pairs_used, the share of groups with a pair.

    Raises:
        ValueError: beta is not positive, or a group has one response.
    """
    _check_positive("beta", beta, "a preference is beta times a log-ratio")
    _check_group_sizes(batch)
    rewards, log_ratio = _rewards(batch), _log_ratio(batch)  # [B]
    best = _rows((rewards == _extreme(rewards, batch, "amax")[batch.group]).float(), batch)
    worst = _rows((rewards == _extreme(rewards, batch, "amin")[batch.group]).float(), batch)
    pairs = best[:, :, None] * worst[:, None, :]  # [G, n, n]
    cost = -F.logsigmoid(beta * _differences(log_ratio, batch))  # [G, n, n]
    mean_cost = (pairs * cost).sum((1, 2)) / pairs.sum((1, 2))  # [G]
    used = _differs(batch)  # [G]
    loss = (used * mean_cost).sum() / batch.num_groups
    if normalize:
        loss = loss / beta
    metrics: Metrics = {
        "loss/pairs_used": used.sum() / batch.num_groups,
        "policy/log_ratio_mean": mean_by_group(log_ratio.detach(), batch).sum() / batch.num_groups,
    }
    return LossOutput(loss=loss, metrics=metrics)


# Shared: log-probs and rewards -----------------------------------------------------------------


def _rewards(batch: Batch) -> Tensor:
    return batch.rewards.detach().float()  # [B]


def _token_log_ratio(batch: Batch, other: Tensor | None = None) -> Tensor:
    """log pi - log other of each token, float32 [N]; `other` is the reference unless given."""
    other = batch.reference_logprobs if other is None else other
    return batch.policy_logprobs.float() - other.detach().float()


def _log_ratio(batch: Batch, other: Tensor | None = None) -> Tensor:
    """log pi - log other of each response, float32 [B], differentiable in pi."""
    return sum_by_response(_token_log_ratio(batch, other), batch)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _lengths(batch: Batch) -> Tensor:
    """Tokens of each response, at least 1 (to divide by), float32 [B]."""
    counts = torch.bincount(batch.response, minlength=batch.group.shape[0])
    return counts.clamp(min=1).float()


def _extreme(values: Tensor, batch: Batch, reduce: str) -> Tensor:
    """The largest ("amax") or smallest ("amin") value [B] of each group, [G]."""
    num_groups = int(torch.bincount(batch.group).shape[0])
    return values.new_zeros(num_groups).scatter_reduce(
        0, batch.group, values, reduce, include_self=False
    )


def _differs(batch: Batch) -> Tensor:
    """1 for a group whose rewards are not all equal, else 0, float32 [G]."""
    rewards = _rewards(batch)
    return (_extreme(rewards, batch, "amax") > _extreme(rewards, batch, "amin")).float()


def _centre(values: Tensor, batch: Batch, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values [B] minus their (weighted) mean over the group, and that mean [G], gradient stopped.

    Exact zeros where all values of a group are equal: the mean is taken of what they exceed the
    smallest by. Else a rounded mean, divided by a deviation of zero, would look like an advantage.
    """
    smallest = _extreme(values.detach(), batch, "amin")  # [G]
    excess = values - smallest[batch.group]
    if weights is None:
        mean = mean_by_group(excess.detach(), batch)
    else:
        mean = mean_by_group(weights * excess.detach(), batch) / mean_by_group(weights, batch)
    return excess - mean[batch.group], smallest + mean


def _over_std(centred: Tensor, eps: float, batch: Batch) -> Tensor:
    """Centred values [B] over the population's standard deviation of their group + eps."""
    return centred / (mean_by_group(centred.square(), batch).sqrt() + eps)[batch.group]


def _log_mean_exp(values: Tensor, batch: Batch) -> Tensor:
    """log mean exp of values [B] over each group, [G]; keeps its digits where values are tiny."""
    largest = _extreme(values, batch, "amax")  # [G]
    return largest + mean_by_group((values - largest[batch.group]).expm1(), batch).log1p()


def _rows(values: Tensor, batch: Batch) -> Tensor:
    """Values [B] as one row a group, [G, n] with n the largest group, zero where there is none."""
    sizes = torch.bincount(batch.group)  # [G]
    starts = sizes.cumsum(0) - sizes
    order = batch.group.argsort(stable=True)  # [B], group after group
    column = torch.empty_like(order)
    column[order] = torch.arange(len(order), device=order.device) - starts[batch.group[order]]
    rows = values.new_zeros(len(sizes), int(sizes.max()))
    return rows.index_put((batch.group, column), values)


def _differences(values: Tensor, batch: Batch) -> Tensor:
    """value_a - value_b for all pairs of a group, [G, n, n]; without meaning beyond its size."""
    rows = _rows(values, batch)
    return rows[:, :, None] - rows[:, None, :]


# Shared: trajectory balance --------------------------------------------------------------------


def _balance(
    batch: Batch, beta: float, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Residuals [B] with VarGrad's (weighted) log Z, that log Z [G], and the log-ratios [B].

    Stopping the gradient of log Z changes no gradient, as (weighted) residuals sum to zero in their
    group.
    """
    log_ratio = _log_ratio(batch)
    # Each term is centred before they meet: r / beta may be so large that float32 would leave
    # nothing of k.
    centred, mean_log_ratio = _centre(log_ratio, batch, weights)
    reward, mean_reward = _centre(_rewards(batch), batch, weights)
    return centred - reward / beta, mean_reward / beta - mean_log_ratio, log_ratio


def _balance_metrics(batch: Batch, log_z: Tensor, residual: Tensor, log_ratio: Tensor) -> Metrics:
    """From log Z [G], residuals [B] and log-ratios to the reference [B], all in nats."""
    rms = mean_by_group(residual.detach().square(), batch).sqrt()  # [G]
    return {
        "loss/log_z_mean": log_z.detach().sum() / batch.num_groups,
        "loss/residual_rms": rms.sum() / batch.num_groups,
        "policy/log_ratio_mean": mean_by_group(log_ratio.detach(), batch).sum() / batch.num_groups,
    }


def _learned_log_z(batch: Batch, objective: str) -> Tensor:
    """The learned log Z, float32 [G]; ValueError without one."""
    if batch.log_z is None:
        raise ValueError(
            f"{objective} needs a learned log Z, which this run lacks: set trainer.log_z_lr to its "
            "learning rate, e.g. 1e-2 (or use tb_vargrad, which estimates log Z)"
        )
    return batch.log_z.float()


def _dev_grad(x: Tensor, alpha: float, batch: Batch) -> Tensor:
    """What to add to x [B] so that alpha_tb's L has its smallest mean in each group, [G]."""
    power = alpha - 1
    if power == 0:
        return -mean_by_group(x, batch)
    return -_log_mean_exp(power * x, batch) / power


def _alpha_loss(x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """L(x) and L'(x) of alpha_tb, each the shape of x (float64)."""
    power = alpha - 1
    if power == 0:
        return x.square() / 2, x
    s = power * x
    # The first terms of (e^s - 1 - s) / s^2, whose direct form cancels near 0.
    series = x.square() * (1 / 2 + s / 6 + s.square() / 24 + s**3 / 120)
    direct = (s.expm1() - s) / power / power
    return torch.where(s.abs() < 1e-3, series, direct), s.expm1() / power


# Shared: ratios to the behavior policy ---------------------------------------------------------


def _sequence_weights(batch: Batch, importance: str, cap: float) -> tuple[Tensor, Metrics]:
    """Truncated importance weight of each response, float32 [B] (1 without), and its metric."""
    if importance == "token":
        raise ValueError(
            'importance="token" weighs tokens, but this loss is one of whole responses: use '
            'importance="sequence" or "none"'
        )
    _check_one_of("importance", importance, ("none", "sequence"))
    _check_positive("importance_cap", cap, "it is the largest importance weight")
    if importance == "none":
        return torch.ones_like(_rewards(batch)), {}
    _check_behavior(batch)
    weights = _exp(_log_ratio(batch, batch.behavior_logprobs).detach()).clamp(max=cap)
    return weights, {
        "policy/importance_mean": mean_by_group(weights, batch).sum() / batch.num_groups
    }


def _token_weights(batch: Batch, importance: str, cap: float) -> tuple[Tensor, Metrics]:
    """Truncated importance weight of each token, or of its response, [N], and its metric."""
    if importance != "token":
        _check_one_of("importance", importance, ("none", "token", "sequence"))
        weights, metrics = _sequence_weights(batch, importance, cap)
        return weights[batch.response], metrics
    _check_positive("importance_cap", cap, "it is the largest importance weight")
    _check_behavior(batch)
    weights = _exp(_token_log_ratio(batch, batch.behavior_logprobs).detach()).clamp(max=cap)
    return weights, {"policy/importance_mean": _mean_over_tokens(weights, batch)}


def _clipped_cost(
    ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-min(A rho, A clip(rho)) and whether its gradient is cut (1 or 0), each of ratio's shape."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    cost = -torch.minimum(advantage * ratio, advantage * clipped)
    ratio = ratio.detach()
    above = (advantage > 0) & (ratio > 1 + clip_high)
    below = (advantage < 0) & (ratio < 1 - clip_low)
    return cost, (above | below).float()


def _clipped_tokens(
    batch: Batch, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """PPO's cost of each token [N], for advantages [B], and its metric."""
    _check_clip(clip_low, clip_high)
    _check_behavior(batch)
    ratio = _exp(_token_log_ratio(batch, batch.behavior_logprobs))  # [N]
    cost, clipped = _clipped_cost(ratio, advantage[batch.response], clip_low, clip_high)
    return cost, {"policy/clip_fraction": _mean_over_tokens(clipped, batch)}


# Shared: policy gradient -----------------------------------------------------------------------


def _kl_tokens(batch: Batch, estimator: str) -> Tensor:
    """Estimate of KL(pi, pi_ref) of each token, float32 [N], nats, differentiable."""
    d = _token_log_ratio(batch)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    # Where clamped, exp(-d) still has a slope: without it the gradient would change its sign there.
    inverse = _exp(-d.detach()) * (1 - (d - d.detach()))
    return inverse - 1 + d


def _centred_return(batch: Batch, beta: float, kl: str, kl_estimator: str) -> Tensor:
    """R_j - mean R, float32 [B]: the reward, less the KL penalty if it belongs there."""
    # Reward and penalty are centred before they meet, as either may dwarf the other.
    centred = _centre(_rewards(batch), batch)[0]
    if kl == "reward" and beta > 0:
        penalty = sum_by_response(_kl_tokens(batch, kl_estimator).detach(), batch)  # [B]
        centred = centred - beta * _centre(penalty, batch)[0]
    return centred


def _leave_one_out(centred: Tensor, sizes: Tensor, batch: Batch) -> Tensor:
    """R_j minus the mean of the others is n / (n - 1) times R_j minus the mean of all, [B]."""
    return centred * (sizes / (sizes - 1))[batch.group]


def _kl_penalty(batch: Batch, beta: float, kl: str, kl_estimator: str) -> Tensor:
    """What each token's cost has added to it, float32 [N]; zeros unless kl="penalty"."""
    if kl == "penalty" and beta > 0:
        return beta * _kl_tokens(batch, kl_estimator)
    return torch.zeros_like(batch.policy_logprobs, dtype=torch.float32)


def _aggregate(
    cost: Tensor, batch: Batch, length_norm: str, length_constant: float | None
) -> Tensor:
    """The loss from the cost of each token [N]; see length_norm in the module's docstring."""
    if length_norm == "token_mean":
        return cost.sum() / max(_step(batch).num_tokens, 1)
    by_response = sum_by_response(cost, batch)  # [B]
    if length_norm == "sequence":
        by_response = by_response / _lengths(batch)
    elif length_norm == "constant":
        assert length_constant is not None
        by_response = by_response / length_constant
    return mean_by_group(by_response, batch).sum() / batch.num_groups


def _advantage_metrics(batch: Batch, advantage: Tensor) -> Metrics:
    rms = mean_by_group(advantage.square(), batch).sqrt()  # [G]
    log_ratio = _log_ratio(batch).detach()  # [B]; NaN where the reference is not computed
    return {
        "loss/advantage_rms": rms.sum() / batch.num_groups,
        "policy/log_ratio_mean": mean_by_group(log_ratio, batch).sum() / batch.num_groups,
    }


def _mean_over_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Mean over the step's groups of the mean over a group's tokens, of values [N]; a scalar."""
    group = batch.group[batch.response]  # [N]
    num_groups = int(torch.bincount(batch.group).shape[0])
    sums = values.new_zeros(num_groups).index_add(0, group, values)  # [G]
    counts = torch.bincount(group, minlength=num_groups).clamp(min=1)
    return (sums / counts).sum() / batch.num_groups


# Shared: the whole step ------------------------------------------------------------------------


def _step(batch: Batch) -> StepStats:
    """What is known of the whole optimizer step; ValueError where that isn't known."""
    if batch.step is not None:
        return batch.step
    sizes = torch.bincount(batch.group)
    if len(sizes) != batch.num_groups:
        raise ValueError(
            f"this objective needs to know all {batch.num_groups} groups of the optimizer step "
            f"(dgpo, difficulty_temperature, length_norm=token_mean), but batch.step is None and "
            f"the batch holds {len(sizes)} of them: give batch.step its StepStats"
        )
    differs = _differs(batch) > 0  # [G]
    return StepStats(
        mean_rewards=_centre(_rewards(batch), batch)[1],
        differs=differs,
        num_tokens=len(batch.response),
        num_differing_tokens=int(differs[batch.group[batch.response]].sum()),
    )


def _difficulty_weights(batch: Batch, temperature: float) -> Tensor:
    """Weight of each group at hand by its difficulty (arXiv 2601.20614, DQW), float32 [G].

    V softmax(-mean reward / temperature) over the V groups of the step whose rewards differ, with a
    mean of 1; the others' weight is 1.
    """
    _check_positive("difficulty_temperature", temperature, "mean rewards are divided by it")
    step = _step(batch)
    mean_reward = _centre(_rewards(batch), batch)[1]  # [G]
    differs = step.differs.to(mean_reward.device)  # [S]
    logits = -step.mean_rewards.to(mean_reward.device, torch.float32) / temperature  # [S]
    log_sum = logits.masked_fill(~differs, -math.inf).logsumexp(0)
    weights = differs.sum() * (-mean_reward / temperature - log_sum).exp()  # [G]
    return torch.where(_differs(batch) > 0, weights, 1.0)


# Shared: checks --------------------------------------------------------------------------------


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


def _check_positive(name: str, value: float, why: str) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}: {why}")


def _check_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _check_policy_gradient(
    beta: float,
    kl: str = "none",
    kl_estimator: str = "k1",
    length_norm: str = "none",
    length_constant: float | None = None,
) -> None:
    if not beta >= 0:
        raise ValueError(f"beta must not be negative, got {beta}: it would reward divergence")
    _check_one_of("kl", kl, ("none", "reward", "penalty"))
    _check_one_of("kl_estimator", kl_estimator, ("k1", "k2", "k3"))
    _check_one_of("length_norm", length_norm, ("none", "sequence", "constant", "token_mean"))
    if length_norm == "constant" and (length_constant is None or not length_constant > 0):
        raise ValueError(
            f"length_norm=constant divides by length_constant, got {length_constant}: set "
            "loss.length_constant to a number of tokens, usually task.max_response_tokens"
        )


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low must lie in [0, 1], got {clip_low}: 0.2 is usual")
    if not clip_high >= 0:
        raise ValueError(f"clip_high must not be negative, got {clip_high}: 0.2 is usual")


def _check_behavior(batch: Batch) -> None:
    what = "behavior log-probs (behavior_logprobs)"
    _check_known(batch.behavior_logprobs, what, "tb_vargrad, or importance=none")


def _check_known(logprobs: Tensor, what: str, instead: str) -> None:
    """ValueError for log-probs [N] of which any is NaN, which stands for unknown."""
    if bool(logprobs.isnan().any()):
        raise ValueError(
            f"this objective needs the {what} of all tokens, which this data lacks: use an "
            f"objective without a ratio, e.g. {instead}"
        )
