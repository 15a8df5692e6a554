"""The objectives once more in plain Python, as the papers print them: floats, lists and loops.

The tests compare `losses.py` with this file. Each function gives the value of one objective; what
it may be differentiated in is written `live`, what the gradient is stopped in is written `policy`,
and `finite_differences` moves only the former. Numbers are Python's floats, of 64 bits.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trajectory import Batch, StepStats


@dataclass
class Response:
    """One response; lists hold one log-prob a token, and those not given equal the policy's."""

    policy: list[float]
    reference: list[float]
    reward: float
    behavior: list[float] | None = None
    old: list[float] | None = None
    live: list[float] | None = None  # the policy's, wherever the gradient passes

    def __post_init__(self) -> None:
        self.behavior = list(self.policy) if self.behavior is None else self.behavior
        self.old = list(self.policy) if self.old is None else self.old
        self.live = list(self.policy)

    @property
    def length(self) -> int:
        return max(len(self.policy), 1)  # an empty response has nothing to average


Group = list[Response]
Groups = list[Group]


def random_groups(
    seed: int, sizes: tuple[int, ...] = (3, 2, 5), *, empty: bool = False, on_policy: bool = False
) -> Groups:
    """Groups of random responses of 1 to 6 tokens.

    Args:
        seed: of everything random here.
        sizes: responses of each group.
        empty: the last response of every group has no token.
        on_policy: the behavior's and the old policy's log-probs equal the policy's.
    """
    rng = random.Random(seed)
    groups = []
    for size in sizes:
        group = []
        for j in range(size):
            length = 0 if empty and j == size - 1 else rng.randint(1, 6)
            policy, reference = ([-rng.expovariate(1.0) for _ in range(length)] for _ in range(2))
            behavior, old = (
                [min(x + rng.gauss(0.0, 0.4), -1e-3) for x in policy] for _ in range(2)
            )
            reward = rng.choice([0.0, 0.3, 1.0])
            response = Response(policy, reward=reward, reference=reference)
            if not on_policy:
                response.behavior, response.old = behavior, old
            group.append(response)
        groups.append(group)
    return groups


def mixed_groups(seed: int, *, empty: bool = False, on_policy: bool = False) -> Groups:
    """Groups of which some have one reward for all, and some, whatever the seed, have several."""
    groups = random_groups(seed, sizes=(3, 2, 5, 4, 2), empty=empty, on_policy=on_policy)
    for response in groups[2]:
        response.reward = 0.3
    groups[0][0].reward, groups[0][1].reward = 1.0, 0.0
    groups[3][0].reward, groups[3][1].reward = 0.3, 0.0
    return groups


def random_log_z(seed: int, count: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(0.0, 1.0) for _ in range(count)]


def make_batch(
    groups: Groups,
    *,
    num_groups: int | None = None,
    order: list[int] | None = None,
    token_order: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    log_z: list[float] | None = None,
    step: StepStats | None = None,
) -> Batch:
    """A batch of these groups.

    Args:
        groups: its responses.
        num_groups: of the whole step; by default that is this batch.
        order: permutation of the responses, whose group ids go with them.
        token_order: permutation of the tokens, after that of the responses.
        dtype: of all log-probs.
        log_z: of every group.
        step: given to the batch.
    """
    rows = [(g, response) for g, group in enumerate(groups) for response in group]
    rows = [rows[i] for i in order] if order is not None else rows
    tokens = [(i, t) for i, (_, y) in enumerate(rows) for t in range(len(y.policy))]
    tokens = [tokens[i] for i in token_order] if token_order is not None else tokens

    def flat(name: str) -> torch.Tensor:
        return torch.tensor([getattr(rows[i][1], name)[t] for i, t in tokens], dtype=dtype)

    return Batch(
        policy_logprobs=flat("policy").requires_grad_(),
        reference_logprobs=flat("reference"),
        behavior_logprobs=flat("behavior"),
        old_logprobs=flat("old"),
        response=torch.tensor([i for i, _ in tokens], dtype=torch.int64),
        group=torch.tensor([g for g, _ in rows]),
        rewards=torch.tensor([y.reward for _, y in rows]),
        num_groups=len(groups) if num_groups is None else num_groups,
        log_z=None if log_z is None else torch.tensor(log_z).requires_grad_(),
        step=step,
    )


def step_stats(groups: Groups) -> StepStats:
    tokens = [sum(len(y.policy) for y in group) for group in groups]
    differs = [rewards_differ(group) for group in groups]
    return StepStats(
        mean_rewards=torch.tensor([mean([y.reward for y in group]) for group in groups]),
        differs=torch.tensor(differs),
        num_tokens=sum(tokens),
        num_differing_tokens=sum(n for n, d in zip(tokens, differs, strict=True) if d),
    )


def finite_differences(
    value: Callable[[], float], groups: Groups, log_z: list[float], step: float = 1e-5
) -> tuple[list[float], list[float]]:
    """Central differences of a value in each token's `live` log-prob, and in each log Z."""

    def along(numbers: list[float], i: int) -> float:
        kept = numbers[i]
        numbers[i] = kept + step
        above = value()
        numbers[i] = kept - step
        below = value()
        numbers[i] = kept
        return (above - below) / (2 * step)

    policy = [along(y.live, t) for group in groups for y in group for t in range(len(y.live))]
    return policy, [along(log_z, g) for g in range(len(log_z))]


def copied(groups: Groups, **changes: Any) -> Groups:
    return [[dataclasses.replace(y, **changes) for y in group] for group in groups]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def rewards_differ(group: Group) -> bool:
    return len({y.reward for y in group}) > 1


# What several objectives share -------------------------------------------------------------------


def log_ratios(group: Group, *, live: bool) -> list[float]:
    """k_j = log pi(y_j) - log pi_ref(y_j)."""
    return [sum(y.live if live else y.policy) - sum(y.reference) for y in group]


def residuals(group: Group, beta: float, *, live: bool) -> list[float]:
    """f_j = k_j - r_j / beta, so that trajectory balance is f_j + log Z = 0."""
    return [k - y.reward / beta for k, y in zip(log_ratios(group, live=live), group, strict=True)]


def difficulty(groups: Groups, temperature: float | None) -> list[float]:
    """DGPO's weight of each prompt (arXiv 2601.20614): the softmax of minus its mean reward."""
    if temperature is None:
        return [1.0] * len(groups)
    hardness = {
        g: math.exp(-mean([y.reward for y in group]) / temperature)
        for g, group in enumerate(groups)
        if rewards_differ(group)
    }
    total = sum(hardness.values())
    return [
        len(hardness) * hardness[g] / total if g in hardness else 1.0 for g in range(len(groups))
    ]


def sequence_weights(group: Group, importance: str, cap: float) -> list[float]:
    """Truncated ratios of the probabilities of whole responses, without gradient."""
    if importance == "none":
        return [1.0] * len(group)
    assert importance == "sequence"
    return [min(math.exp(sum(y.policy) - sum(y.behavior)), cap) for y in group]


def kl_estimate(logprob: float, reference: float, estimator: str) -> float:
    """Schulman's k1, k2 and k3 of one token."""
    d = logprob - reference
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]


def regularised_rewards(group: Group, beta: float, kl: str, estimator: str) -> list[float]:
    """R_j: with kl="reward", less beta times the estimate summed over the response's tokens."""
    if kl != "reward":
        return [y.reward for y in group]
    return [
        y.reward
        - beta
        * sum(kl_estimate(p, q, estimator) for p, q in zip(y.policy, y.reference, strict=True))
        for y in group
    ]


def mean_baseline(values: list[float]) -> list[float]:
    return [value - mean(values) for value in values]


def leave_one_out(values: list[float]) -> list[float]:
    return [own - mean(values[:j] + values[j + 1 :]) for j, own in enumerate(values)]


def standardised(values: list[float], eps: float) -> list[float]:
    deviation = math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))
    return [(value - mean(values)) / (deviation + eps) for value in values]


def clipped(advantage: float, ratio: float, low: float, high: float) -> float:
    """PPO's surrogate, to be maximised (arXiv 1707.06347, Eq. 7)."""
    return min(advantage * ratio, advantage * min(max(ratio, 1 - low), 1 + high))


# Trajectory balance ------------------------------------------------------------------------------


def tb_vargrad(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    normalize: bool = True,
    importance: str = "none",
    importance_cap: float = 2.0,
    difficulty_temperature: float | None = None,
) -> float:
    """arXiv 2503.18929, Eqs. 4 and 5, term by term."""
    losses = []
    for group, weight in zip(groups, difficulty(groups, difficulty_temperature), strict=True):
        w = sequence_weights(group, importance, importance_cap)
        frozen = residuals(group, beta, live=False)
        z = -sum(a * f for a, f in zip(w, frozen, strict=True)) / sum(w)
        squares = [
            a * (f + z) ** 2 for a, f in zip(w, residuals(group, beta, live=True), strict=True)
        ]
        losses.append(weight * mean(squares))
    return mean(losses) * (beta / 2 if normalize else 1.0)


def tb_learned_z(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    normalize: bool = True,
    importance: str = "none",
    importance_cap: float = 2.0,
) -> float:
    losses = []
    for group, z in zip(groups, learned_z, strict=True):
        w = sequence_weights(group, importance, importance_cap)
        f = residuals(group, beta, live=True)
        losses.append(mean([a * (z + b) ** 2 for a, b in zip(w, f, strict=True)]))
    return mean(losses) * (beta / 2 if normalize else 1.0)


def ctb(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    normalize: bool = True,
    prune: float | None = None,
) -> float:
    """arXiv 2605.00553, section 4: over pairs of one prompt; a pair left out counts as 0."""
    losses = []
    for group in groups:
        f = residuals(group, beta, live=True)
        target = [sum(y.reference) + y.reward / beta for y in group]
        pairs = []
        for a in range(len(group)):
            for b in range(a + 1, len(group)):
                kept = prune is None or abs(target[a] - target[b]) > prune
                pairs.append((f[a] - f[b]) ** 2 if kept else 0.0)
        losses.append(mean(pairs))
    return mean(losses) * (beta / 4 if normalize else 1.0)


def alpha_tb(
    groups: Groups, learned_z: list[float], *, beta: float, alpha: float, normalize: bool = True
) -> float:
    """arXiv 2605.15417: L_alpha of the residual, log Z at the minimum of the group's mean loss."""

    def divergence(x: float) -> float:
        if alpha == 1:
            return x * x / 2
        return (math.exp((alpha - 1) * x) - 1) / (alpha - 1) ** 2 - x / (alpha - 1)

    scale = beta if normalize else 1.0
    losses = []
    for group in groups:
        frozen = [scale * f for f in residuals(group, beta, live=False)]
        if alpha == 1:
            z = -mean(frozen)
        else:
            # The largest term is taken out, lest exp overflow.
            top = max((alpha - 1) * f for f in frozen)
            log_mean = top + math.log(mean([math.exp((alpha - 1) * f - top) for f in frozen]))
            z = -log_mean / (alpha - 1)
        live = [scale * f for f in residuals(group, beta, live=True)]
        losses.append(mean([divergence(f + z) for f in live]))
    return mean(losses) / scale


def flowrl(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    normalize: bool = True,
    reward_std_eps: float = 1e-6,
    importance: str = "sequence",
    importance_cap: float = 2.0,
) -> float:
    """arXiv 2509.15207: log-ratios by length, rewards standardised in their group."""
    losses = []
    for group, z in zip(groups, learned_z, strict=True):
        w = sequence_weights(group, importance, importance_cap)
        rewards = standardised([y.reward for y in group], reward_std_eps)
        k = log_ratios(group, live=True)
        losses.append(
            mean(
                [
                    w[j] * (z + k[j] / group[j].length - rewards[j] / beta) ** 2
                    for j in range(len(group))
                ]
            )
        )
    return mean(losses) * (beta / 2 if normalize else 1.0)


# Kimi --------------------------------------------------------------------------------------------


def kimi(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    normalize: bool = True,
    log_z: str = "mean_reward",
) -> float:
    losses = []
    for group in groups:
        rewards = [y.reward for y in group]
        zeta = mean(rewards)
        if log_z == "log_mean_exp":
            zeta = beta * math.log(mean([math.exp(r / beta) for r in rewards]))
        k = log_ratios(group, live=True)
        losses.append(mean([(r - zeta - beta * x) ** 2 for r, x in zip(rewards, k, strict=True)]))
    return mean(losses) / (2 * beta if normalize else 1.0)


def kimi_k2(
    groups: Groups, learned_z: list[float], *, beta: float, normalize: bool = True
) -> float:
    losses = []
    for group in groups:
        baseline = mean([y.reward for y in group])
        losses.append(
            mean([(y.reward - baseline - beta * (sum(y.live) - sum(y.old))) ** 2 for y in group])
        )
    return mean(losses) / (2 * beta if normalize else 1.0)


# Policy gradient ---------------------------------------------------------------------------------


def by_length(
    terms: list[list[list[float]]], length_norm: str, length_constant: float | None
) -> float:
    """One number from one a token: `terms` of groups of responses of tokens."""
    if length_norm == "token_mean":
        flat = [x for group in terms for response in group for x in response]
        return math.fsum(flat) / max(len(flat), 1)
    divisor = {
        "none": lambda response: 1.0,
        "sequence": lambda response: max(len(response), 1),
        "constant": lambda response: length_constant,
    }[length_norm]
    return mean([mean([sum(x) / divisor(x) for x in group]) for group in terms])


def token_terms(
    groups: Groups,
    advantages: Callable[[list[float]], list[float]],
    surrogate: Callable[[Response, int, float], float],
    *,
    beta: float,
    kl: str,
    kl_estimator: str,
    weight: Callable[[Response, int], float] = lambda y, t: 1.0,
) -> Iterator[list[list[float]]]:
    """Per group, the loss of each token of each response; `weight` is that of its KL penalty."""
    for group in groups:
        values = advantages(regularised_rewards(group, beta, kl, kl_estimator))
        yield [
            [
                weight(y, t)
                * (
                    beta * kl_estimate(y.live[t], y.reference[t], kl_estimator)
                    if kl == "penalty"
                    else 0.0
                )
                - surrogate(y, t, advantage)
                for t in range(len(y.policy))
            ]
            for y, advantage in zip(group, values, strict=True)
        ]


def _with_baseline(
    groups: Groups,
    baseline: Callable[[list[float]], list[float]],
    *,
    beta: float,
    kl: str = "reward",
    kl_estimator: str = "k1",
    length_norm: str = "none",
    length_constant: float | None = None,
    importance: str = "none",
    importance_cap: float = 2.0,
) -> float:
    def weight(y: Response, t: int) -> float:
        ratio = {
            "none": 1.0,
            "token": math.exp(y.policy[t] - y.behavior[t]),
            "sequence": math.exp(sum(y.policy) - sum(y.behavior)),
        }[importance]
        return ratio if importance == "none" else min(ratio, importance_cap)

    def surrogate(y: Response, t: int, advantage: float) -> float:
        return weight(y, t) * advantage * y.live[t]

    terms = token_terms(
        groups, baseline, surrogate, beta=beta, kl=kl, kl_estimator=kl_estimator, weight=weight
    )
    return by_length(list(terms), length_norm, length_constant)


def reinforce(groups: Groups, learned_z: list[float], **options: Any) -> float:
    return _with_baseline(groups, mean_baseline, **options)


def rloo(groups: Groups, learned_z: list[float], **options: Any) -> float:
    return _with_baseline(groups, leave_one_out, **options)


def proximal_rloo(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: str = "reward",
    kl_estimator: str = "k1",
) -> float:
    losses = []
    for group in groups:
        advantages = leave_one_out(regularised_rewards(group, beta, kl, kl_estimator))
        terms = []
        for y, advantage in zip(group, advantages, strict=True):
            ratio = math.exp(sum(y.live) - sum(y.behavior))
            term = -clipped(advantage, ratio, clip_low, clip_high)
            if kl == "penalty":
                term += beta * sum(
                    kl_estimate(p, q, kl_estimator)
                    for p, q in zip(y.live, y.reference, strict=True)
                )
            terms.append(term)
        losses.append(mean(terms))
    return mean(losses)


def _clipped_tokens(
    groups: Groups,
    baseline: Callable[[list[float]], list[float]],
    *,
    beta: float,
    kl: str,
    kl_estimator: str,
    length_norm: str,
    length_constant: float | None,
    clip_low: float,
    clip_high: float,
) -> float:
    def surrogate(y: Response, t: int, advantage: float) -> float:
        return clipped(advantage, math.exp(y.live[t] - y.behavior[t]), clip_low, clip_high)

    terms = token_terms(groups, baseline, surrogate, beta=beta, kl=kl, kl_estimator=kl_estimator)
    return by_length(list(terms), length_norm, length_constant)


def ppo(groups: Groups, learned_z: list[float], **options: Any) -> float:
    defaults = {"kl": "reward", "kl_estimator": "k1", "length_norm": "none"}
    defaults |= {"length_constant": None, "clip_low": 0.2, "clip_high": 0.2}
    return _clipped_tokens(groups, mean_baseline, **(defaults | options))


def grpo(groups: Groups, learned_z: list[float], std_eps: float = 1e-4, **options: Any) -> float:
    defaults = {"kl": "penalty", "kl_estimator": "k3", "length_norm": "sequence"}
    defaults |= {"length_constant": None, "clip_low": 0.2, "clip_high": 0.2}
    return _clipped_tokens(
        groups, lambda values: standardised(values, std_eps), **(defaults | options)
    )


def dr_grpo(groups: Groups, learned_z: list[float], **options: Any) -> float:
    defaults = {"kl": "none", "kl_estimator": "k3", "length_norm": "constant"}
    defaults |= {"length_constant": None, "clip_low": 0.2, "clip_high": 0.2}
    return _clipped_tokens(groups, mean_baseline, **(defaults | options))


def dgpo_advantages(rewards: list[float], eps: float) -> list[float]:
    deviations = mean_baseline(rewards)
    return [len(rewards) * x / (sum(abs(y) for y in deviations) + eps) for x in deviations]


def dgpo(
    groups: Groups,
    learned_z: list[float],
    *,
    beta: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    difficulty_temperature: float = 2.0,
    mad_eps: float = 1e-4,
) -> float:
    """arXiv 2601.20614: only groups whose rewards differ, over the tokens of those."""
    total, tokens = 0.0, 0
    for group, weight in zip(groups, difficulty(groups, difficulty_temperature), strict=True):
        if not rewards_differ(group):
            continue
        advantages = dgpo_advantages([y.reward for y in group], mad_eps)
        for y, advantage in zip(group, advantages, strict=True):
            tokens += len(y.policy)
            for live, behavior in zip(y.live, y.behavior, strict=True):
                ratio = math.exp(live - behavior)
                total += weight * clipped(advantage, ratio, clip_low, clip_high)
    return -total / tokens if tokens else 0.0


# Preference --------------------------------------------------------------------------------------


def dpo(groups: Groups, learned_z: list[float], *, beta: float, normalize: bool = True) -> float:
    """arXiv 2305.18290, Eq. 7, on the best and the worst of a group."""
    losses = []
    for group in groups:
        if not rewards_differ(group):
            losses.append(0.0)
            continue
        k = log_ratios(group, live=True)
        best = max(y.reward for y in group)
        worst = min(y.reward for y in group)
        pairs = [
            math.log(1 + math.exp(-beta * (k[a] - k[b])))
            for a, chosen in enumerate(group)
            for b, rejected in enumerate(group)
            if chosen.reward == best and rejected.reward == worst
        ]
        losses.append(mean(pairs))
    return mean(losses) / (beta if normalize else 1.0)
