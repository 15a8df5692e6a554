"""Trajectory balance and its relatives: by hand, their identities, and their minimiser."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import (
    assert_close,
    batch_for,
    case_name,
    close,
    gradient,
    gradients,
    plain_mean_baseline,
    policy_gradient,
    run,
)
from plain_losses import Response, make_batch, random_groups
from torch import Tensor

from losses import alpha_tb, ctb, dpo, kimi, kimi_k2, rloo, tb_vargrad
from trajectory import Batch

# tb_vargrad ------------------------------------------------------------------------------------


def test_tb_by_hand():
    # f = k - r / beta: 1 - 2 = -1 and -1 - 0 = -1 in the first group, 0 and 4 in the second.
    groups = [
        [Response([-1.0], [-2.0], 1.0), Response([-2.0, -1.0], [-1.0, -1.0], 0.0)],
        [Response([-1.0], [-1.0], 0.0), Response([-1.0], [-5.0], 0.0)],
    ]
    output = tb_vargrad(make_batch(groups), beta=0.5, normalize=False)
    assert output.loss.item() == close((0 + 4) / 2)
    assert output.metrics["loss/log_z_mean"].item() == close((1 - 2) / 2)
    assert output.metrics["loss/residual_rms"].item() == close((0 + 2) / 2)
    assert output.metrics["policy/log_ratio_mean"].item() == close((0 + 2) / 2)


def test_tb_with_importance_weights_by_hand():
    # Ratios e^-1 and e, of which the latter is cut to 2; f = 1 and -3.
    groups = [
        [
            Response([-2.0], [-3.0], 0.0, behavior=[-1.0]),
            Response([-1.0], [0.0], 1.0, behavior=[-2.0]),
        ]
    ]
    output = tb_vargrad(
        make_batch(groups), beta=0.5, normalize=False, importance="sequence", importance_cap=2.0
    )
    w = math.exp(-1.0)
    centre = (w - 6) / (w + 2)
    expected = (w * (1 - centre) ** 2 + 2 * (-3 - centre) ** 2) / 2
    assert output.loss.item() == close(expected)


@pytest.mark.parametrize("beta", [0.005, 0.1, 2.0])
def test_tb_gradient_is_mean_baseline_reinforce(beta):
    groups = random_groups(1)
    batch = make_batch(groups)
    expected = policy_gradient(groups, plain_mean_baseline(groups, beta))
    assert gradient(tb_vargrad(batch, beta=beta), batch) == close(expected)
    raw = gradient(tb_vargrad(batch, beta=beta, normalize=False), batch)
    assert raw == close([2 / beta * value for value in expected], abs=1e-3)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-1000, 1000), beta=st.sampled_from([0.005, 1.0]))
def test_tb_ignores_a_shift_of_all_rewards(seed, shift, beta):
    groups = random_groups(seed)
    shifted = [[dataclasses.replace(y, reward=y.reward + shift) for y in group] for group in groups]
    batch, other = make_batch(groups), make_batch(shifted)
    output, moved = tb_vargrad(batch, beta=beta), tb_vargrad(other, beta=beta)
    # Rewards of size 1000 have a float32 spacing of 6e-5, which beta divides.
    tolerance = 1e-4 * (1 + 1 / beta)
    assert moved.loss.item() == close(output.loss.item(), rel=1e-2, abs=tolerance)
    assert gradient(moved, other) == close(gradient(output, batch), rel=1e-2, abs=1e-3)


def test_tb_is_the_same_when_every_response_comes_twice():
    groups = random_groups(5)
    doubled = [group + group for group in groups]
    output = tb_vargrad(make_batch(groups), beta=0.1)
    twice = tb_vargrad(make_batch(doubled), beta=0.1)
    assert twice.loss.item() == close(output.loss.item())
    for name, value in output.metrics.items():
        assert twice.metrics[name].item() == close(value.item()), name


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_equal_rewards_leave_only_the_pull_to_the_reference(loss):
    # Without a reward to tell them apart, a response more likely than under the reference is
    # made less likely: loss falls with its log-prob, so its gradient is positive.
    groups = [[Response([-1.0], [-3.0], 1.0), Response([-3.0], [-1.0], 1.0)]]
    batch = make_batch(groups)
    first, second = gradient(loss(batch, beta=0.1), batch)
    assert first > 0 and first == close(-second)
    same = make_batch([[Response([-1.0], [-1.0], 1.0), Response([-3.0], [-3.0], 1.0)]])
    assert gradient(loss(same, beta=0.1), same) == close([0.0, 0.0])


def test_difficulty_weights_multiply_the_loss_of_each_prompt():
    # Mean rewards 1/2 and 1/4 of the groups that differ; the third's rewards are all 1.
    groups = random_groups(18, sizes=(2, 4, 3))
    for response in itertools.chain(*groups):
        response.reward = 0.0
    groups[0][0].reward = groups[1][3].reward = 1.0
    for response in groups[2]:
        response.reward = 1.0
    batch = make_batch(groups)
    plain = gradient(tb_vargrad(batch, beta=0.1), batch)
    weighted = gradient(tb_vargrad(batch, beta=0.1, difficulty_temperature=0.5), batch)
    easy, hard = math.exp(-0.5 / 0.5), math.exp(-0.25 / 0.5)
    weights = [2 * easy / (easy + hard), 2 * hard / (easy + hard), 1.0]
    tokens = [sum(len(y.policy) for y in group) for group in groups]
    factors = [w for w, count in zip(weights, tokens, strict=True) for _ in range(count)]
    assert_close(weighted, [f * x for f, x in zip(factors, plain, strict=True)])


# Its relatives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_all_pairs_are_the_variance(beta):
    """Sum over pairs of (f_a - f_b)^2 = n sum_j (f_j - mean f)^2."""
    groups = random_groups(19, sizes=(2, 7, 4))
    sizes = [len(group) for group in groups for y in group for _ in y.policy]
    batch = make_batch(groups)
    for normalize, factor in ((False, 2), (True, 1)):
        tb = gradient(tb_vargrad(batch, beta=beta, normalize=normalize), batch)
        expected = [factor * n / (n - 1) * x for n, x in zip(sizes, tb, strict=True)]
        assert_close(gradient(ctb(batch, beta=beta, normalize=normalize), batch), expected)
    for group in groups:
        alone, n = make_batch([group]), len(group)
        for normalize, factor in ((False, 2), (True, 1)):
            pairs = ctb(alone, beta=beta, normalize=normalize).loss.item()
            tb = tb_vargrad(alone, beta=beta, normalize=normalize).loss.item()
            assert pairs == close(factor * n / (n - 1) * tb)


def test_pruned_pairs_count_as_zero():
    # log R = ref + r / beta: -1, -1.5 and 2; f = u - log R: 0, 1 and -3.
    group = [
        Response([-1.0], [-1.0], 0.0),
        Response([-0.5], [-1.5], 0.0),
        Response([-1.0], [0.0], 1.0),
    ]
    batch = make_batch([group])
    for prune, expected, used in ((None, 26 / 3, 1), (1.0, 25 / 3, 2 / 3), (3.2, 16 / 3, 1 / 3)):
        output = ctb(batch, beta=0.5, normalize=False, prune=prune)
        assert output.loss.item() == close(expected), prune
        assert output.metrics["loss/pairs_used"].item() == close(used)
    # At the threshold itself a pair is dropped.
    assert ctb(batch, beta=0.5, normalize=False, prune=3.0).loss.item() == close(16 / 3)
    nothing = ctb(batch, beta=0.5, prune=1e6)
    assert nothing.loss.item() == 0 and gradient(nothing, batch) == [0.0] * 3
    assert nothing.metrics["loss/pairs_used"].item() == 0


@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_alpha_1_is_trajectory_balance_and_its_neighbours_tend_to_it(beta):
    groups = random_groups(20, sizes=(4, 2, 5))
    batch = make_batch(groups)
    expected = tb_vargrad(batch, beta=beta)
    exact = alpha_tb(batch, beta=beta, alpha=1.0)
    assert exact.loss.item() == close(expected.loss.item())
    assert_close(gradient(exact, batch), gradient(expected, batch))
    printed = alpha_tb(batch, beta=beta, alpha=1.0, normalize=False)
    half = tb_vargrad(batch, beta=beta, normalize=False).loss.item() / 2
    assert printed.loss.item() == close(half)

    for distance in (1e-3, 1e-5, 1e-7, 1e-9, 1e-12):
        for alpha in (1 - distance, 1 + distance):
            near = alpha_tb(batch, beta=beta, alpha=alpha)
            assert near.loss.item() == close(expected.loss.item(), rel=1e-3 + 5 * distance)
            found, wanted = gradient(near, batch), gradient(expected, batch)
            assert_close(found, wanted, rel=1e-3 + 20 * distance)


@pytest.mark.parametrize("alpha", [-1.0, 0.0, 0.9, 1.0, 1.1, 2.0])
@pytest.mark.parametrize("normalize", [True, False])
def test_alpha_tb_centres_its_residuals(alpha, normalize):
    """At DevGrad's log Z the derivatives of the group's residuals sum to 0."""
    groups = random_groups(21, sizes=(5, 3))
    for response in itertools.chain(*groups):  # of one token each
        response.policy, response.reference = response.policy[:1], response.reference[:1]
        response.behavior = response.old = response.policy
    batch = make_batch(groups)
    values = gradient(alpha_tb(batch, beta=0.3, alpha=alpha, normalize=normalize), batch)
    assert sum(values[:5]) == close(0.0) and sum(values[5:]) == close(0.0)
    assert max(map(abs, values)) > 1e-3


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_alpha_tb_on_policy_has_the_gradient_of_its_divergence(alpha):
    """KL(pi, pi*) at alpha = 1 and KL(pi*, pi) at alpha = 0, over all outcomes of one token."""
    counts = torch.tensor([8, 4, 2, 1, 1])
    outcomes = torch.repeat_interleave(torch.arange(5), counts)
    logits = counts.log().requires_grad_()
    reference = torch.tensor([0.3, -1.0, 0.5, 0.0, 1.0]).log_softmax(0)
    rewards = torch.tensor([0.0, 1.0, 0.2, 0.5, 1.0])
    policy = torch.log_softmax(logits, 0)
    batch = Batch(
        policy_logprobs=policy[outcomes],
        reference_logprobs=reference[outcomes],
        behavior_logprobs=policy.detach()[outcomes],
        old_logprobs=policy.detach()[outcomes],
        response=torch.arange(16),
        group=torch.zeros(16, dtype=torch.int64),
        rewards=rewards[outcomes],
        num_groups=1,
    )
    loss = alpha_tb(batch, beta=0.5, alpha=alpha, normalize=False).loss
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    optimum = torch.log_softmax(reference + rewards / 0.5, 0)
    reverse = (policy.exp() * (policy - optimum)).sum()
    forward = (optimum.exp() * (optimum - policy)).sum()
    (expected,) = torch.autograd.grad(reverse if alpha == 1 else forward, logits)
    assert found.tolist() == close(expected.tolist())


def test_kimi_by_hand():
    # k = 1 and -1, beta k = 0.5 and -0.5; r - mean r = 0.5 and -0.5.
    groups = [[Response([-1.0], [-2.0], 1.0), Response([-2.0, -1.0], [-1.0, -1.0], 0.0)]]
    output = kimi(make_batch(groups), beta=0.5, normalize=False)
    assert output.loss.item() == close(0.0)
    zeta = 0.5 * math.log((math.exp(2.0) + 1) / 2)
    output = kimi(make_batch(groups), beta=0.5, normalize=False, log_z="log_mean_exp")
    assert output.loss.item() == close(((0.5 - zeta) ** 2 + (0.5 - zeta) ** 2) / 2)
    assert output.metrics["loss/log_z_mean"].item() == close(zeta / 0.5)
    output = kimi_k2(make_batch(groups), beta=0.5)
    assert output.metrics["loss/log_z_mean"].item() == close(1.0)


@pytest.mark.parametrize("beta", [0.05, 1.0])
def test_kimi_is_trajectory_balance_without_the_mean_log_ratio(beta):
    """Its advantage, r - mean r - beta k, differs by beta mean k from trajectory balance's."""
    groups = random_groups(22)
    batch = make_batch(groups)
    advantages = []
    for group in groups:
        k = [sum(y.policy) - sum(y.reference) for y in group]
        mean_reward = sum(y.reward for y in group) / len(group)
        advantages.append(
            [y.reward - mean_reward - beta * x for y, x in zip(group, k, strict=True)]
        )
    assert_close(gradient(kimi(batch, beta=beta), batch), policy_gradient(groups, advantages))
    # Where the reference is the policy that sampled, the second version is the first one.
    same = [[dataclasses.replace(y, old=y.reference) for y in group] for group in groups]
    other = make_batch(same)
    assert_close(gradient(kimi_k2(other, beta=beta), other), policy_gradient(groups, advantages))


def test_dpo_by_hand():
    # h = k: 1, -1, 2, 0.5; rewards 1, 0, 1, 0.5: pairs (0, 1) and (2, 1).
    group = [
        Response([-1.0], [-2.0], 1.0),
        Response([-2.0], [-1.0], 0.0),
        Response([-1.0], [-3.0], 1.0),
        Response([-1.0], [-1.5], 0.5),
    ]
    equal = [Response([-1.0], [-2.0], 1.0), Response([-1.0], [-1.0], 1.0)]
    batch = make_batch([group, equal])
    output = dpo(batch, beta=0.5, normalize=False)
    first, second = (math.log(1 + math.exp(-0.5 * margin)) for margin in (2.0, 3.0))
    assert output.loss.item() == close((first + second) / 2 / 2)
    assert output.metrics["loss/pairs_used"].item() == close(0.5)
    values = gradient(output, batch)
    assert values[0] < 0 < values[1] and values[2] < 0  # descent raises the better responses
    assert values[3:] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("case", "factor"),  # of the loss as printed, to the mean square of the residual in nats
    [
        (("tb_vargrad", {}), 1.0),
        (("tb_learned_z", {}), 1.0),
        (("ctb", {}), (4 - 1) / (2 * 4)),
        (("alpha_tb", {"alpha": 1.0}), 2.0),
        (("flowrl", {"importance": "none"}), 1.0),
        (("kimi", {}), 1 / 0.3**2),
        (("kimi", {"log_z": "log_mean_exp"}), 1 / 0.3**2),
        (("kimi_k2", {}), 1 / 0.3**2),
    ],
    ids=str,
)
def test_residual_rms_is_that_of_the_loss(case, factor):
    group = random_groups(23, sizes=(4,))[0]
    name, options = case
    batch = batch_for(case, [group])
    output = run((name, options | {"normalize": False}), batch, beta=0.3)
    expected = math.sqrt(factor * output.loss.item())
    assert output.metrics["loss/residual_rms"].item() == close(expected)
    log_ratios = [sum(y.policy) - sum(y.reference) for y in group]
    assert output.metrics["policy/log_ratio_mean"].item() == close(sum(log_ratios) / 4)
    normalized = run(case, batch, beta=0.3)
    for metric, value in output.metrics.items():
        assert normalized.metrics[metric].item() == close(value.item()), metric


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 2.0])
def test_metrics_of_alpha_tb_are_in_nats(alpha):
    """Of one token each, so that the gradient gives -L'(scale D), and D from that."""
    group = [dataclasses.replace(y, policy=y.policy[:1]) for y in random_groups(24, sizes=(5,))[0]]
    for y in group:
        y.reference, y.behavior, y.old = y.reference[:1], y.policy, y.policy
    batch = make_batch([group])
    for normalize, scale in ((True, 0.4), (False, 1.0)):
        output = alpha_tb(batch, beta=0.4, alpha=alpha, normalize=normalize)
        slopes = [5 * x for x in gradient(output, batch)]
        d = [math.log1p((alpha - 1) * x) / (alpha - 1) / scale for x in slopes]
        rms = math.sqrt(sum(x * x for x in d) / 5)
        assert output.metrics["loss/residual_rms"].item() == close(rms, rel=1e-3)
        first = group[0]
        log_z = d[0] - (first.policy[0] - first.reference[0] - first.reward / 0.4)
        assert output.metrics["loss/log_z_mean"].item() == close(log_z, rel=1e-3)


# The minimiser ---------------------------------------------------------------------------------

TB_FAMILY = [
    ("tb_vargrad", {}),
    ("tb_vargrad", {"normalize": False}),
    ("tb_vargrad", {"importance": "sequence"}),
    ("tb_vargrad", {"difficulty_temperature": 0.3}),
    ("tb_learned_z", {}),
    ("tb_learned_z", {"importance": "sequence", "normalize": False}),
    ("ctb", {}),
    ("ctb", {"prune": 0.5}),
    ("alpha_tb", {"alpha": 0.0}),
    ("alpha_tb", {"alpha": 0.5}),
    ("alpha_tb", {"alpha": 1.0}),
    ("alpha_tb", {"alpha": 2.0}),
    ("alpha_tb", {"alpha": 2.0, "normalize": False}),
]


@pytest.mark.parametrize("case", TB_FAMILY, ids=case_name)
def test_loss_and_gradient_are_zero_at_balance(case):
    """log pi = log pi_ref + r / beta - log Z, with another Z in each group."""
    rng = random.Random(3)
    beta, groups, log_z = 0.25, [], [1.5, -2.0, 0.25]
    for z in log_z:
        group = []
        for length in (1, 3, 4):
            reference = [-rng.randint(1, 16) / 8 for _ in range(length)]
            reward = rng.randint(0, 4) / 4
            policy = [reference[0] + reward / beta - z] + reference[1:]
            behavior = [x + rng.choice([-0.5, 0.25]) for x in policy]
            group.append(Response(policy, reference, reward, behavior=behavior))
        groups.append(group)
    batch = batch_for(case, groups, log_z=log_z)
    output = run(case, batch, beta)
    assert output.loss.item() == close(0.0)
    policy, learned = gradients(output, batch)
    assert policy + learned == close([0.0] * len(policy + learned))
    assert output.metrics["loss/log_z_mean"].item() == close((1.5 - 2.0 + 0.25) / 3)
    assert output.metrics["loss/residual_rms"].item() == close(0.0)

    batch.policy_logprobs.data[0] += 0.5
    assert run(case, batch, beta).loss.item() > 1e-4


@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("case", TB_FAMILY, ids=case_name)
def test_descent_reaches_the_optimal_policy(case, off_policy):
    """pi* = pi_ref exp(r / beta) / Z, from all outcomes or from groups a fixed policy drew."""
    generator = torch.Generator().manual_seed(0)
    beta = 0.5
    reference = torch.log_softmax(torch.randn(6, generator=generator), 0)
    rewards = torch.tensor([0.0, 1.0, 0.2, 1.0, 0.5, 0.0])
    optimum = torch.log_softmax(reference + rewards / beta, 0)
    behavior = torch.softmax(torch.tensor([1.0, -0.5, 0.5, 0.0, 0.0, 1.0]), 0)
    if off_policy:
        groups = [torch.multinomial(behavior, 8, True, generator=generator) for _ in range(8)]
    else:
        groups = [torch.arange(6)]
    outcomes = torch.cat(groups)  # [B]
    group = torch.cat([torch.full((len(g),), i) for i, g in enumerate(groups)])
    assert len(outcomes.unique()) == 6

    logits = torch.zeros(6, requires_grad=True)
    log_z = torch.zeros(1, requires_grad=True)  # free, the same for all groups of the one prompt
    optimizer = torch.optim.LBFGS([logits, log_z], max_iter=150, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        batch = Batch(
            policy_logprobs=torch.log_softmax(logits, 0)[outcomes],
            reference_logprobs=reference[outcomes],
            behavior_logprobs=behavior.log()[outcomes],
            old_logprobs=behavior.log()[outcomes],
            response=torch.arange(len(outcomes)),
            group=group,
            rewards=rewards[outcomes],
            num_groups=len(groups),
            log_z=log_z.expand(len(groups)),
        )
        loss = run(case, batch, beta).loss
        loss.backward()
        return loss

    start = torch.softmax(logits.detach(), 0)
    assert (start * (start.log() - optimum)).sum().item() > 0.1  # there is something to learn
    for _ in range(1 if case[1].get("importance") is None else 5):  # its weights move: start anew
        optimizer.step(closure)
    policy = torch.log_softmax(logits.detach(), 0)
    assert (policy.exp() * (policy - optimum)).sum().item() < 1e-4
    if case[0] == "tb_learned_z":
        expected = torch.logsumexp(reference + rewards / beta, 0).item()
        assert log_z.item() == close(expected, rel=1e-2, abs=1e-2)


def gradient_at_the_optimum(name: str, counts: list[int], **options: Any) -> Tensor:
    """Gradient [3] in the logits at pi*, over a group with these counts of its 3 outcomes.

    The counts stand for an expectation: they are in proportion to the behavior's probabilities.
    The reference is uniform, beta is 1 and pi* has the probabilities 1/8, 2/8 and 5/8.
    """
    optimum = torch.tensor([1.0, 2.0, 5.0]) / 8
    reference = torch.full((3,), -math.log(3.0))
    rewards = optimum.log() - reference
    logits = optimum.log().requires_grad_()
    outcomes = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    behavior = (torch.tensor(counts) / sum(counts)).log()
    batch = Batch(
        policy_logprobs=torch.log_softmax(logits, 0)[outcomes],
        reference_logprobs=reference[outcomes],
        behavior_logprobs=behavior[outcomes],
        old_logprobs=behavior[outcomes],
        response=torch.arange(len(outcomes)),
        group=torch.zeros(len(outcomes), dtype=torch.int64),
        rewards=rewards[outcomes],
        num_groups=1,
    )
    return torch.autograd.grad(run((name, options), batch, beta=1.0).loss, logits)[0]


def test_kimi_has_the_optimal_policy_as_fixed_point_on_policy_alone():
    """At pi* its advantage is a constant, mean r - beta log Z, which only pi* averages to zero."""
    on_policy, off_policy = [1, 2, 5], [4, 2, 2]
    assert gradient_at_the_optimum("kimi", on_policy).tolist() == close([0.0] * 3)
    assert gradient_at_the_optimum("kimi", off_policy).abs().max() > 0.05
    for counts in (on_policy, off_policy):
        assert gradient_at_the_optimum("tb_vargrad", counts).tolist() == close([0.0] * 3)
    # The other log Z is exact where the reference has sampled, and there only.
    uniform = {"counts": [3, 3, 3], "log_z": "log_mean_exp"}
    assert gradient_at_the_optimum("kimi", **uniform).tolist() == close([0.0] * 3)
    assert gradient_at_the_optimum("kimi", off_policy, log_z="log_mean_exp").abs().max() > 0.05
