"""Policy-gradient objectives: their identities, ratios, clipping, weights and KL estimators."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from loss_cases import (
    assert_close,
    close,
    gradient,
    plain_leave_one_out,
    plain_mean_baseline,
    policy_gradient,
    run,
)
from plain_losses import (
    Groups,
    Response,
    copied,
    dgpo_advantages,
    difficulty,
    leave_one_out,
    make_batch,
    mean_baseline,
    mixed_groups,
    random_groups,
    rewards_differ,
    standardised,
    step_stats,
)
from torch import Tensor

from losses import dgpo, grpo, ppo, proximal_rloo, reinforce, rloo, tb_vargrad
from trajectory import Batch

# rloo and reinforce ----------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.05, 1.0])
def test_rloo_is_the_leave_one_out_formula(beta):
    groups = random_groups(9, sizes=(2, 5, 3))
    advantages = plain_leave_one_out(groups, beta)
    expected = -sum(
        sum(a * sum(y.policy) for a, y in zip(values, group, strict=True)) / len(group)
        for values, group in zip(advantages, groups, strict=True)
    ) / len(groups)
    batch = make_batch(groups)
    output = rloo(batch, beta=beta)
    assert output.loss.item() == close(expected)
    assert gradient(output, batch) == close(policy_gradient(groups, advantages))
    rms = [math.sqrt(sum(a * a for a in values) / len(values)) for values in advantages]
    assert output.metrics["loss/advantage_rms"].item() == close(sum(rms) / len(rms))


@pytest.mark.parametrize("size", [2, 4, 10])
def test_rloo_is_the_mean_baseline_times_k_over_k_minus_1(size):
    groups = random_groups(10, sizes=(size, size))
    batch = make_batch(groups)
    mean_baseline = gradient(tb_vargrad(batch, beta=0.1), batch)
    expected = [size / (size - 1) * value for value in mean_baseline]
    assert gradient(rloo(batch, beta=0.1), batch) == close(expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl": "none"},
        {"kl": "reward", "kl_estimator": "k3"},
        {"length_norm": "sequence"},
        {"length_norm": "token_mean", "importance": "token"},
        {"importance": "sequence"},
    ],
    ids=str,
)
def test_rloo_is_reinforce_times_k_over_k_minus_1(options):
    groups = random_groups(11, sizes=(2, 6, 3))
    batch = make_batch(groups)
    factors = [len(group) / (len(group) - 1) for group in groups for y in group for _ in y.policy]
    expected = gradient(reinforce(batch, beta=0.1, **options), batch)
    found = gradient(rloo(batch, beta=0.1, **options), batch)
    assert_close(found, [f * x for f, x in zip(factors, expected, strict=True)])


@pytest.mark.parametrize("beta", [0.005, 0.5])
def test_reinforce_has_the_gradient_of_trajectory_balance(beta):
    groups = random_groups(12)
    batch = make_batch(groups)
    expected = gradient(tb_vargrad(batch, beta=beta), batch)
    assert_close(gradient(reinforce(batch, beta=beta), batch), expected)
    assert_close(expected, policy_gradient(groups, plain_mean_baseline(groups, beta)))


def test_rloo_ignores_a_shift_of_all_rewards():
    groups = random_groups(11)
    shifted = [[dataclasses.replace(y, reward=y.reward + 7.0) for y in group] for group in groups]
    batch, other = make_batch(groups), make_batch(shifted)
    expected = gradient(rloo(batch, beta=0.1), batch)
    assert gradient(rloo(other, beta=0.1), other) == close(expected)


# On-policy, every ratio is 1 --------------------------------------------------------------------

# name, options, advantages of a group's rewards, what a token is divided by
ON_POLICY = [
    ("proximal_rloo", {"kl": "none"}, leave_one_out, "none"),
    ("ppo", {"kl": "none"}, mean_baseline, "none"),
    ("ppo", {"kl": "none", "length_norm": "sequence"}, mean_baseline, "sequence"),
    ("ppo", {"kl": "none", "length_norm": "token_mean"}, mean_baseline, "token_mean"),
    ("grpo", {"kl": "none"}, lambda r: standardised(r, 1e-4), "sequence"),
    ("grpo", {"kl": "none", "length_norm": "none"}, lambda r: standardised(r, 1e-4), "none"),
    ("dr_grpo", {"length_constant": 20}, mean_baseline, "constant"),
    ("dgpo", {}, lambda r: dgpo_advantages(r, 1e-4), "differing tokens"),
    ("reinforce", {"kl": "none", "importance": "token"}, mean_baseline, "none"),
    ("reinforce", {"kl": "none", "importance": "sequence"}, mean_baseline, "none"),
    ("rloo", {"kl": "none", "importance": "token"}, leave_one_out, "none"),
    ("rloo", {"kl": "none", "importance": "sequence"}, leave_one_out, "none"),
]


@pytest.mark.parametrize(
    ("name", "options", "advantages", "divisor"),
    ON_POLICY,
    ids=[f"{name}-{options}" for name, options, *_ in ON_POLICY],
)
def test_on_policy_gradient_is_that_of_reinforce(name, options, advantages, divisor):
    """-A_j / (its length rule) on every token: A_j with the objective's own baseline."""
    groups = mixed_groups(13, on_policy=True)
    batch = make_batch(groups)
    tokens = sum(len(y.policy) for group in groups for y in group)
    differing = sum(len(y.policy) for group in groups if rewards_differ(group) for y in group)
    expected, rms = [], []
    for group, weight in zip(groups, difficulty(groups, 2.0), strict=True):
        values = advantages([y.reward for y in group])
        rms.append(math.sqrt(sum(x * x for x in values) / len(values)))
        for y, advantage in zip(group, values, strict=True):
            scale = {
                "none": 1 / (len(groups) * len(group)),
                "sequence": 1 / (len(groups) * len(group) * len(y.policy)),
                "constant": 1 / (len(groups) * len(group) * 20),
                "token_mean": 1 / tokens,
                "differing tokens": weight / differing,
            }[divisor]
            expected += [-advantage * scale] * len(y.policy)
    output = run((name, options), batch)
    assert_close(gradient(output, batch), expected)
    assert output.metrics["loss/advantage_rms"].item() == close(sum(rms) / len(rms))
    if "importance" in options:
        assert output.metrics["policy/importance_mean"].item() == close(1.0)
    else:
        assert output.metrics["policy/clip_fraction"].item() == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("tb_vargrad", {}), ("tb_learned_z", {}), ("flowrl", {}), ("rloo", {"kl": "penalty"})],
)
def test_on_policy_importance_weights_are_1(name, options):
    groups = mixed_groups(14, on_policy=True)
    batch = make_batch(groups, log_z=[0.5] * len(groups))
    unweighted = run((name, options | {"importance": "none"}), batch)
    weighted = run((name, options | {"importance": "sequence"}), batch)
    assert weighted.loss.item() == close(unweighted.loss.item())
    assert_close(gradient(weighted, batch), gradient(unweighted, batch))
    assert weighted.metrics["policy/importance_mean"].item() == close(1.0)


# Off-policy -------------------------------------------------------------------------------------


def test_importance_weights_are_truncated_from_above():
    # Token ratios 1/2, 4; 3, 1/3. Sequence ratios 2 and 1. Advantages 1/2 and -1/2.
    behavior = [[-1 + math.log(2.0), -1 - math.log(4.0)], [-1 - math.log(3.0), -1 + math.log(3.0)]]
    groups = [
        [
            Response([-1.0, -1.0], [-1.0, -1.0], 1.0, behavior=behavior[0]),
            Response([-1.0, -1.0], [-1.0, -1.0], 0.0, behavior=behavior[1]),
        ]
    ]
    batch = make_batch(groups)

    def weights(**options: Any) -> tuple[list[float], float]:
        output = reinforce(batch, beta=0.1, kl="none", **options)
        scaled = zip(gradient(output, batch), (-0.25, -0.25, 0.25, 0.25), strict=True)
        return [x / y for x, y in scaled], output.metrics["policy/importance_mean"].item()

    found, mean = weights(importance="token")
    assert found == close([0.5, 2.0, 2.0, 1 / 3]) and mean == close((0.5 + 2 + 2 + 1 / 3) / 4)
    found, mean = weights(importance="token", importance_cap=3.5)
    assert found == close([0.5, 3.5, 3.0, 1 / 3])
    found, mean = weights(importance="sequence", importance_cap=1.5)
    assert found == close([1.5, 1.5, 1.0, 1.0]) and mean == close(1.25)


def ratio_groups(*ratios: tuple[float, ...]) -> Groups:
    """One group: responses of these token ratios, the rewards 1, 0, 1, 0, ..."""
    group = []
    for j, values in enumerate(ratios):
        policy = [-2.0] * len(values)
        behavior = [-2.0 - math.log(ratio) for ratio in values]
        group.append(Response(policy, policy, float(1 - j % 2), behavior=behavior))
    return [group]


def test_ppo_clips_only_where_the_ratio_has_moved_as_the_advantage_asks():
    # Advantages 1/2 and -1/2; of ratios 1.5, 0.5, 1.1 those above 1.2 are cut where A > 0, and
    # those below 0.8 where A < 0.
    batch = make_batch(ratio_groups((1.5, 0.5, 1.1), (1.5, 0.5, 1.1)))
    output = ppo(batch, beta=0.1, kl="none")
    gains = [1.2 / 2, 0.5 / 2, 1.1 / 2, -1.5 / 2, -0.8 / 2, -1.1 / 2]
    assert output.loss.item() == close(-sum(gains) / 2)
    expected = [0.0, -0.25 * 0.5, -0.25 * 1.1, 0.25 * 1.5, 0.0, 0.25 * 1.1]
    assert gradient(output, batch) == close(expected)
    assert output.metrics["policy/clip_fraction"].item() == close(2 / 6)

    wide = ppo(batch, beta=0.1, kl="none", clip_low=0.6, clip_high=0.05)
    expected = [0.0, -0.25 * 0.5, 0.0, 0.25 * 1.5, 0.25 * 0.5, 0.25 * 1.1]
    assert gradient(wide, batch) == close(expected)
    assert wide.metrics["policy/clip_fraction"].item() == close(2 / 6)


def test_proximal_rloo_clips_whole_responses():
    # Sequence ratios 1.5 x 0.5 = 0.75, 0.5, 1.5 and 1.1; advantages +-2/3.
    batch = make_batch(ratio_groups((1.5, 0.5), (0.5, 1.0), (1.5, 1.0), (1.1, 1.0)))
    output = proximal_rloo(batch, beta=0.1, kl="none")
    assert output.loss.item() == close(-(2 / 3) * (0.75 - 0.8 + 1.2 - 1.1) / 4)
    expected = [-0.75, -0.75, 0.0, 0.0, 0.0, 0.0, 1.1, 1.1]
    assert gradient(output, batch) == close([2 / 3 / 4 * x for x in expected])
    assert output.metrics["policy/clip_fraction"].item() == close(2 / 4)


def test_clip_fraction_is_the_mean_over_groups():
    one = ratio_groups((1.5, 1.0), (1.0,))[0]  # a third of 3 tokens
    other = ratio_groups((1.5,), (0.5,))[0]  # all of 2
    output = ppo(make_batch([one, other]), beta=0.1, kl="none")
    assert output.metrics["policy/clip_fraction"].item() == close((1 / 3 + 1) / 2)


def test_log_ratios_are_clamped_before_they_are_exponentiated():
    far = Response([-1.0], [-1.0], 0.0, behavior=[-31.0])  # its ratio would be e^30
    batch = make_batch([[far, Response([-1.0], [-1.0], 1.0)]])
    output = ppo(batch, beta=0.1, kl="none")
    assert output.loss.item() == close((math.exp(20.0) - 1) / 4)
    rare = Response([-31.0], [-31.0], 0.0, behavior=[-1.0])
    batch = make_batch([[rare, Response([-1.0], [-1.0], 1.0)]])
    weighted = gradient(reinforce(batch, beta=0.1, kl="none", importance="token"), batch)
    assert weighted == pytest.approx([0.25 * math.exp(-20.0), -0.25], rel=1e-4)

    # k3 grows no further, but still pulls the policy up to its reference.
    low = Response([-31.0], [-1.0], 0.0)
    batch = make_batch([[low, Response([-1.0], [-1.0], 0.0)]])
    output = reinforce(batch, beta=1.0, kl="penalty", kl_estimator="k3")
    assert output.loss.item() == close((math.exp(20.0) - 31) / 2)
    assert gradient(output, batch) == close([(1 - math.exp(20.0)) / 2, 0.0])


def test_advantages_of_grpo_by_hand():
    # Rewards 1, 0, 0, 0: mean 1/4, standard deviation of the population sqrt(3) / 4.
    lengths = (1, 2, 3, 1)
    group = [Response([-1.0] * n, [-1.0] * n, float(j == 0)) for j, n in enumerate(lengths)]
    batch = make_batch([group])
    output = grpo(batch, beta=0.1, kl="none", std_eps=1e-6)
    first, others = math.sqrt(3.0), -1 / math.sqrt(3.0)
    expected = [first] + [others / 2] * 2 + [others / 3] * 3 + [others]
    assert_close(gradient(output, batch), [-x / 4 for x in expected])
    assert output.metrics["loss/advantage_rms"].item() == close(1.0)


# dgpo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 2.0, 10.0])
def test_dgpo_weighs_prompts_by_difficulty_and_all_alike_in_size(temperature):
    """sum_j |A_j| = n; sum_g lambda_g = the groups that differ; max / min <= exp(1 / T)."""
    groups = random_groups(15, sizes=(2, 5, 8, 4, 3, 2), on_policy=True)
    correct = (1, 4, 1, 2, 3, 0)  # the last two groups' rewards are all equal
    for group, count in zip(groups, correct, strict=True):
        for j, response in enumerate(group):
            response.reward = float(j < count)
    batch = make_batch(groups)
    values = gradient(dgpo(batch, beta=0.1, difficulty_temperature=temperature), batch)

    sizes = [len(y.policy) for group in groups for y in group]
    per_response = [part[0].item() for part in torch.tensor(values).split(sizes)]
    tokens = step_stats(groups).num_differing_tokens
    weights, start = [], 0
    for group in groups:
        advantages = [-tokens * x for x in per_response[start : start + len(group)]]
        start += len(group)
        # A constant size whatever the share of correct responses: what is left is the weight.
        weights.append(sum(map(abs, advantages)) / len(group))
        assert sum(advantages) == close(0.0)
    assert weights[4:] == [0.0, 0.0]
    assert sum(weights) == close(4.0, rel=1e-3)
    assert max(weights[:4]) / min(weights[:4]) <= math.exp(1 / temperature) * (1 + 1e-3)
    means = [sum(y.reward for y in group) / len(group) for group in groups[:4]]
    for a, b in itertools.pairwise(range(4)):
        expected = math.exp((means[b] - means[a]) / temperature)
        assert weights[a] / weights[b] == close(expected, rel=1e-3)


def test_dgpo_learns_nothing_from_groups_whose_rewards_are_equal():
    groups = mixed_groups(16)
    batch = make_batch([*groups, *copied(groups, reward=1.0)])
    more, alone = dgpo(batch, beta=0.1), dgpo(make_batch(groups), beta=0.1)
    assert more.loss.item() == close(alone.loss.item())
    equal = make_batch(copied(groups, reward=1.0))
    output = dgpo(equal, beta=0.1)
    assert output.loss.item() == 0 and not any(gradient(output, equal))


# The estimates of the KL divergence -------------------------------------------------------------


def enumerated(policy: Tensor, reference: Tensor, counts: list[int]) -> Batch:
    """One group of responses of one token, equal rewards: outcome i comes counts[i] times.

    Where the counts are in proportion to the policy's probabilities, means over the group are
    expectations under the policy.
    """
    outcomes = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    logprobs = torch.log_softmax(policy, 0)[outcomes]
    return Batch(
        policy_logprobs=logprobs,
        reference_logprobs=torch.log_softmax(reference, 0)[outcomes],
        behavior_logprobs=logprobs.detach(),
        old_logprobs=logprobs.detach(),
        response=torch.arange(len(outcomes)),
        group=torch.zeros(len(outcomes), dtype=torch.int64),
        rewards=torch.zeros(len(outcomes)),
        num_groups=1,
    )


COUNTS = [8, 4, 2, 1, 1]
REFERENCE = torch.tensor([0.3, -1.0, 0.5, 0.0, 1.0])


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q) of two log-probs."""
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("objective", [reinforce, rloo, ppo, proximal_rloo, grpo])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_value_and_gradient_of_a_kl_penalty(objective, estimator):
    """All rewards are equal, so that beta times the estimate is all there is."""
    policy = torch.tensor(COUNTS, dtype=torch.float32).log().requires_grad_()
    batch = enumerated(policy, REFERENCE, COUNTS)
    loss = objective(batch, beta=0.5, kl="penalty", kl_estimator=estimator).loss
    p, q = torch.log_softmax(policy, 0), torch.log_softmax(REFERENCE, 0)
    reverse = 0.5 * kl(p, q)
    if estimator == "k2":
        square = 0.5 * (p.exp() * (p - q).square() / 2).sum()
        assert loss.item() == close(square.item())
        assert abs(loss.item() - reverse.item()) > 0.01  # a biased estimate
    else:
        assert loss.item() == close(reverse.item())

    (found,) = torch.autograd.grad(loss, policy, retain_graph=True)
    (of_reverse,) = torch.autograd.grad(reverse, policy, retain_graph=True)
    (of_forward,) = torch.autograd.grad(0.5 * kl(q, p), policy)
    assert (of_reverse - of_forward).abs().max() > 0.01
    expected = {"k1": torch.zeros(5), "k2": of_reverse, "k3": of_forward}[estimator]
    assert found.tolist() == close(expected.tolist())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_estimates_summed_over_tokens_are_that_of_the_response(estimator):
    """Of two tokens, the second distributed according to the first: the chain rule."""
    counts = torch.tensor([[4, 2, 1, 1], [1, 1, 2, 4], [2, 2, 2, 2], [1, 4, 1, 2]])
    first = (torch.tensor([4.0, 2.0, 1.0, 1.0]) / 8).log()
    second = (counts / 8).log()
    generator = torch.Generator().manual_seed(0)
    reference_first = torch.randn(4, generator=generator).log_softmax(0)
    reference_second = torch.randn(4, 4, generator=generator).log_softmax(1)
    group = []
    for a, b in itertools.product(range(4), range(4)):
        number = int(first[a].exp() * 8 + 0.5) * int(counts[a, b])  # of 64
        policy = [first[a].item(), second[a, b].item()]
        reference = [reference_first[a].item(), reference_second[a, b].item()]
        group += [Response(policy, reference, 0.0) for _ in range(number)]
    assert len(group) == 64
    joint = (first[:, None] + second).flatten()
    expected = kl(joint, (reference_first[:, None] + reference_second).flatten()).item()
    batch = make_batch([group])
    output = reinforce(batch, beta=0.5, kl="penalty", kl_estimator=estimator)
    assert output.loss.item() == close(0.5 * expected)
    assert output.metrics["policy/log_ratio_mean"].item() == close(expected)


def test_a_kl_penalty_in_the_reward_has_the_gradient_of_the_reverse_kl():
    """k1 in the reward, unlike k1 as a penalty, is worth having."""
    policy = torch.tensor(COUNTS, dtype=torch.float32).log().requires_grad_()
    batch = enumerated(policy, REFERENCE, COUNTS)
    loss = reinforce(batch, beta=0.5, kl="reward", kl_estimator="k1").loss
    (found,) = torch.autograd.grad(loss, policy, retain_graph=True)
    divergence = 0.5 * kl(torch.log_softmax(policy, 0), torch.log_softmax(REFERENCE, 0))
    (expected,) = torch.autograd.grad(divergence, policy)
    assert found.tolist() == close(expected.tolist())
