"""Objectives against formulas written independently in plain Python, and their invariances."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import Tensor

from losses import LossOutput, rloo, tb_vargrad
from trajectory import Batch

# One response: (policy log-probs, reference log-probs, reward); a group is a list of them.
Response = tuple[list[float], list[float], float]
Groups = list[list[Response]]


def random_groups(seed: int, sizes: tuple[int, ...] = (3, 2, 5)) -> Groups:
    rng = random.Random(seed)
    groups = []
    for size in sizes:
        group = []
        for _ in range(size):
            length = rng.randint(1, 6)
            policy = [-rng.expovariate(1.0) for _ in range(length)]
            reference = [-rng.expovariate(1.0) for _ in range(length)]
            group.append((policy, reference, rng.choice([0.0, 0.3, 1.0])))
        groups.append(group)
    return groups


def make_batch(
    groups: Groups,
    *,
    num_groups: int | None = None,
    order: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A batch of these groups; `order` permutes the responses, whose group ids go with them."""
    rows = [(g, response) for g, group in enumerate(groups) for response in group]
    rows = [rows[i] for i in order] if order is not None else rows
    policy = [x for _, (p, _, _) in rows for x in p]
    reference = [x for _, (_, q, _) in rows for x in q]
    response = [i for i, (_, (p, _, _)) in enumerate(rows) for _ in p]
    return Batch(
        policy_logprobs=torch.tensor(policy, dtype=dtype).requires_grad_(),
        reference_logprobs=torch.tensor(reference, dtype=dtype),
        behavior_logprobs=torch.tensor(policy, dtype=dtype),
        response=torch.tensor(response),
        group=torch.tensor([g for g, _ in rows]),
        rewards=torch.tensor([r for _, (_, _, r) in rows]),
        num_groups=len(groups) if num_groups is None else num_groups,
    )


def gradient(output: LossOutput, batch: Batch) -> list[float]:
    return torch.autograd.grad(output.loss, batch.policy_logprobs)[0].tolist()


def close(value: float, rel: float = 1e-4, abs: float = 1e-5):
    return pytest.approx(value, rel=rel, abs=abs)


# The formulas, in plain Python -----------------------------------------------------------------


def plain_tb(groups: Groups, beta: float) -> float:
    """arXiv 2503.18929, Eqs. 4 and 5, term by term."""
    total = 0.0
    for group in groups:
        log_z = sum(sum(q) - sum(p) + r / beta for p, q, r in group) / len(group)
        total += sum((log_z + sum(p) - sum(q) - r / beta) ** 2 for p, q, r in group) / len(group)
    return total / len(groups)


def plain_mean_baseline(groups: Groups, beta: float) -> list[list[float]]:
    """REINFORCE's advantages: KL-regularised reward minus its mean over the group."""
    advantages = []
    for group in groups:
        regularised = [r - beta * (sum(p) - sum(q)) for p, q, r in group]
        baseline = sum(regularised) / len(regularised)
        advantages.append([value - baseline for value in regularised])
    return advantages


def plain_leave_one_out(groups: Groups, beta: float) -> list[list[float]]:
    advantages = []
    for group in groups:
        regularised = [r - beta * (sum(p) - sum(q)) for p, q, r in group]
        advantages.append(
            [
                own - sum(regularised[:j] + regularised[j + 1 :]) / (len(group) - 1)
                for j, own in enumerate(regularised)
            ]
        )
    return advantages


def policy_gradient(groups: Groups, advantages: list[list[float]]) -> list[float]:
    """d loss / d log-prob of each token when loss = -mean_groups mean_j A_j log pi(y_j)."""
    return [
        -advantage / len(group) / len(groups)
        for group, values in zip(groups, advantages, strict=True)
        for (tokens, _, _), advantage in zip(group, values, strict=True)
        for _ in tokens
    ]


# tb_vargrad ------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.005, 0.1, 2.0])
def test_tb_is_equation_5(beta):
    groups = random_groups(0)
    expected = plain_tb(groups, beta)
    printed = tb_vargrad(make_batch(groups), beta=beta, normalize=False)
    normalized = tb_vargrad(make_batch(groups), beta=beta)
    assert printed.loss.item() == close(expected)
    assert normalized.loss.item() == close(expected * beta / 2)
    assert printed.loss.dtype == torch.float32 and printed.loss.shape == ()


def test_tb_by_hand():
    # f = k - r / beta: 1 - 2 = -1 and -1 - 0 = -1 in the first group, 0 and 4 in the second.
    groups = [
        [([-1.0], [-2.0], 1.0), ([-2.0, -1.0], [-1.0, -1.0], 0.0)],
        [([-1.0], [-1.0], 0.0), ([-1.0], [-5.0], 0.0)],
    ]
    output = tb_vargrad(make_batch(groups), beta=0.5, normalize=False)
    assert output.loss.item() == close((0 + 4) / 2)
    assert output.metrics["loss/log_z_mean"].item() == close((1 - 2) / 2)
    assert output.metrics["loss/residual_rms"].item() == close((0 + 2) / 2)
    assert output.metrics["policy/log_ratio_mean"].item() == close((0 + 2) / 2)


@pytest.mark.parametrize("beta", [0.005, 0.1, 2.0])
def test_tb_gradient_is_mean_baseline_reinforce(beta):
    groups = random_groups(1)
    batch = make_batch(groups)
    expected = policy_gradient(groups, plain_mean_baseline(groups, beta))
    assert gradient(tb_vargrad(batch, beta=beta), batch) == close(expected)
    raw = gradient(tb_vargrad(batch, beta=beta, normalize=False), batch)
    assert raw == close([2 / beta * value for value in expected], abs=1e-3)


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_gradient_reaches_the_policy_alone_and_inputs_stay(loss):
    batch = make_batch(random_groups(2))
    batch.reference_logprobs.requires_grad_()
    batch.rewards.requires_grad_()
    output = loss(batch, beta=0.1)
    assert all(not metric.requires_grad for metric in output.metrics.values())
    before = [t.detach().clone() for t in (batch.policy_logprobs, batch.rewards)]
    output.loss.backward()
    assert batch.policy_logprobs.grad is not None
    assert batch.reference_logprobs.grad is None and batch.rewards.grad is None
    assert torch.equal(batch.policy_logprobs, before[0]) and torch.equal(batch.rewards, before[1])


def test_tb_is_zero_at_balance():
    """log pi = log pi_ref + r / beta - log Z, with another Z in each group."""
    rng = random.Random(3)
    beta, groups = 0.25, []
    for log_z in (1.5, -2.0, 0.25):
        group = []
        for length in (1, 3, 4):
            reference = [-rng.randint(1, 16) / 8 for _ in range(length)]
            reward = rng.randint(0, 4) / 4
            policy = [reference[0] + reward / beta - log_z] + reference[1:]
            group.append((policy, reference, reward))
        groups.append(group)
    batch = make_batch(groups)
    output = tb_vargrad(batch, beta=beta)
    assert output.loss.item() == close(0.0)
    assert gradient(output, batch) == close([0.0] * len(batch.response))
    assert output.metrics["loss/log_z_mean"].item() == close((1.5 - 2.0 + 0.25) / 3)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), shift=st.floats(-1000, 1000), beta=st.sampled_from([0.005, 1.0]))
def test_tb_ignores_a_shift_of_all_rewards(seed, shift, beta):
    groups = random_groups(seed)
    shifted = [[(p, q, r + shift) for p, q, r in group] for group in groups]
    batch, other = make_batch(groups), make_batch(shifted)
    output, moved = tb_vargrad(batch, beta=beta), tb_vargrad(other, beta=beta)
    # Rewards of size 1000 have a float32 spacing of 6e-5, which beta divides.
    tolerance = 1e-4 * (1 + 1 / beta)
    assert moved.loss.item() == close(output.loss.item(), rel=1e-2, abs=tolerance)
    assert gradient(moved, other) == close(gradient(output, batch), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
@pytest.mark.parametrize("seed", range(5))
def test_order_does_not_matter(loss, seed):
    groups = random_groups(seed)
    order = list(range(sum(map(len, groups))))
    random.Random(seed).shuffle(order)
    lengths = [len(p) for group in groups for p, _, _ in group]
    batch, permuted = make_batch(groups), make_batch(groups, order=order)
    output, other = loss(batch, beta=0.1), loss(permuted, beta=0.1)
    assert other.loss.item() == close(output.loss.item())

    per_response = torch.tensor(gradient(output, batch)).split(lengths)
    expected = torch.cat([per_response[i] for i in order]).tolist()
    assert gradient(other, permuted) == close(expected)
    swapped = loss(make_batch(groups[::-1]), beta=0.1)
    assert swapped.loss.item() == close(output.loss.item())


def test_tb_is_the_same_when_every_response_comes_twice():
    groups = random_groups(5)
    doubled = [group + group for group in groups]
    output = tb_vargrad(make_batch(groups), beta=0.1)
    twice = tb_vargrad(make_batch(doubled), beta=0.1)
    assert twice.loss.item() == close(output.loss.item())
    for name, value in output.metrics.items():
        assert twice.metrics[name].item() == close(value.item()), name


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_whole_group_micro_batches_add_up_to_the_step(loss):
    groups = random_groups(6, sizes=(2, 4, 3, 6))
    whole_batch = make_batch(groups)
    whole = loss(whole_batch, beta=0.1)
    batches = [make_batch(part, num_groups=4) for part in (groups[:1], groups[1:3], groups[3:])]
    parts = [loss(batch, beta=0.1) for batch in batches]
    assert sum(part.loss.item() for part in parts) == close(whole.loss.item())
    gradients = [x for p, b in zip(parts, batches, strict=True) for x in gradient(p, b)]
    assert gradients == close(gradient(whole, whole_batch))
    for name, value in whole.metrics.items():
        assert sum(part.metrics[name].item() for part in parts) == close(value.item()), name


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_equal_rewards_leave_only_the_pull_to_the_reference(loss):
    # Without a reward to tell them apart, a response more likely than under the reference is
    # made less likely: loss falls with its log-prob, so its gradient is positive.
    groups = [[([-1.0], [-3.0], 1.0), ([-3.0], [-1.0], 1.0)]]
    batch = make_batch(groups)
    first, second = gradient(loss(batch, beta=0.1), batch)
    assert first > 0 and first == close(-second)
    same = make_batch([[([-1.0], [-1.0], 1.0), ([-3.0], [-3.0], 1.0)]])
    assert gradient(loss(same, beta=0.1), same) == close([0.0, 0.0])


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_extreme_logprobs_stay_finite(loss):
    groups = [
        [([-1e4] * 3, [0.0] * 3, 0.0), ([0.0] * 3, [-1e4] * 3, 1.0)],
        [([-1e-30], [-1e-30], 1e3), ([-60.0] * 500, [-0.1] * 500, -1e3)],
    ]
    batch = make_batch(groups)
    output = loss(batch, beta=0.005)
    assert math.isfinite(output.loss.item())
    assert all(math.isfinite(x) for x in gradient(output, batch))
    assert all(math.isfinite(value.item()) for value in output.metrics.values())


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_bfloat16_inputs_are_summed_in_float32(loss):
    # -0.5 and -1 are exact in bfloat16, but their sums over 1001 tokens (-500.5, -1001) are not.
    groups = [[([-0.5] * 1001, [-1.0] * 1001, 1.0), ([-0.5] * 3, [-1.0] * 3, 0.0)]]
    exact, rounded = make_batch(groups), make_batch(groups, dtype=torch.bfloat16)
    output = loss(rounded, beta=0.1)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == close(loss(exact, beta=0.1).loss.item(), rel=1e-6)


@pytest.mark.parametrize("loss", [tb_vargrad, rloo])
def test_a_group_of_one_is_refused(loss):
    groups = random_groups(7, sizes=(3, 1, 2))
    with pytest.raises(ValueError, match="minimum of 2.*group 1"):
        loss(make_batch(groups), beta=0.1)


def test_impossible_betas_are_refused():
    batch = make_batch(random_groups(8))
    for beta in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="beta"):
            tb_vargrad(batch, beta=beta)
    for beta in (-0.1, math.nan):
        with pytest.raises(ValueError, match="beta"):
            rloo(batch, beta=beta)


# The minimiser ---------------------------------------------------------------------------------


@pytest.mark.parametrize("off_policy", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_descent_reaches_the_optimal_policy(off_policy, normalize):
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
    optimizer = torch.optim.LBFGS([logits], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        batch = Batch(
            policy_logprobs=torch.log_softmax(logits, 0)[outcomes],
            reference_logprobs=reference[outcomes],
            behavior_logprobs=behavior.log()[outcomes],
            response=torch.arange(len(outcomes)),
            group=group,
            rewards=rewards[outcomes],
            num_groups=len(groups),
        )
        loss = tb_vargrad(batch, beta=beta, normalize=normalize).loss
        loss.backward()
        return loss

    start = torch.softmax(logits.detach(), 0)
    assert (start * (start.log() - optimum)).sum().item() > 0.1  # there is something to learn
    optimizer.step(closure)
    policy = torch.log_softmax(logits.detach(), 0)
    assert (policy.exp() * (policy - optimum)).sum().item() < 1e-4


# rloo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.05, 1.0])
def test_rloo_is_the_leave_one_out_formula(beta):
    groups = random_groups(9, sizes=(2, 5, 3))
    advantages = plain_leave_one_out(groups, beta)
    expected = -sum(
        sum(a * sum(p) for a, (p, _, _) in zip(values, group, strict=True)) / len(group)
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


def test_rloo_ignores_a_shift_of_all_rewards():
    groups = random_groups(11)
    shifted = [[(p, q, r + 7.0) for p, q, r in group] for group in groups]
    batch, other = make_batch(groups), make_batch(shifted)
    expected = gradient(rloo(batch, beta=0.1), batch)
    assert gradient(rloo(other, beta=0.1), other) == close(expected)


# conf/loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tb_vargrad", "rloo"])
def test_conf_binds_the_function(name):
    from hydra.utils import instantiate

    path = Path(__file__).parents[1] / "conf" / "loss" / f"{name}.yaml"
    loss = instantiate(OmegaConf.load(path))
    output = loss(make_batch(random_groups(12)), beta=0.1)
    assert isinstance(output, LossOutput)
