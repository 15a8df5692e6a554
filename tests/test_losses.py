"""Objectives against formulas written independently in plain Python, and their invariances."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
from pathlib import Path
from typing import Any

import plain_losses
import pytest
import torch
from loss_cases import (
    CASES,
    OBJECTIVES,
    WITH_LOG_Z,
    Case,
    assert_close,
    batch_for,
    case_name,
    close,
    gradient,
    gradients,
    needs_behavior,
    needs_reference,
    needs_step,
    penalty_of,
    run,
)
from plain_losses import (
    Groups,
    Response,
    copied,
    finite_differences,
    make_batch,
    mixed_groups,
    random_groups,
    random_log_z,
    step_stats,
)

import losses
from losses import LossOutput


def cases(found: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", found, ids=case_name)


every_case = cases(CASES)

TB_METRICS = {"loss/log_z_mean", "loss/residual_rms", "policy/log_ratio_mean"}
PG_METRICS = {"loss/advantage_rms", "policy/log_ratio_mean"}
METRICS = {
    "tb_vargrad": TB_METRICS,
    "tb_learned_z": TB_METRICS,
    "ctb": {"loss/pairs_used", "policy/log_ratio_mean"},
    "alpha_tb": TB_METRICS,
    "kimi": TB_METRICS,
    "kimi_k2": TB_METRICS,
    "flowrl": TB_METRICS,
    "reinforce": PG_METRICS,
    "rloo": PG_METRICS,
    "proximal_rloo": PG_METRICS | {"policy/clip_fraction"},
    "ppo": PG_METRICS | {"policy/clip_fraction"},
    "grpo": PG_METRICS | {"policy/clip_fraction"},
    "dr_grpo": PG_METRICS | {"policy/clip_fraction"},
    "dgpo": PG_METRICS | {"policy/clip_fraction"},
    "dpo": {"loss/pairs_used", "policy/log_ratio_mean"},
}


EXTREME: Groups = [  # log-ratios of +-3e4, ratios of probabilities beyond any float
    [
        Response([-1e4] * 3, [0.0] * 3, 0.0, behavior=[-0.1] * 3, old=[-0.1] * 3),
        Response([0.0] * 3, [-1e4] * 3, 1.0, behavior=[-1e4] * 3, old=[-1e4] * 3),
        Response([-1e4] * 2, [-1e4] * 2, 1.0, behavior=[0.0, -2e4], old=[-2e4, 0.0]),
    ],
    [
        Response([-1e-30], [-1e-30], 1e3),
        Response([-60.0] * 500, [-0.1] * 500, -1e3, behavior=[-0.1] * 500, old=[-0.1] * 500),
        Response([-0.1] * 500, [-60.0] * 500, 0.0, behavior=[-60.0] * 500, old=[-60.0] * 500),
    ],
]


# Every objective -------------------------------------------------------------------------------


@every_case
def test_value_and_gradient_are_those_of_the_plain_formula(case):
    name, options = case
    for seed, empty, beta in ((0, False, 0.2), (1, True, 1.5)):
        groups = mixed_groups(seed, empty=empty)
        log_z = random_log_z(seed, len(groups)) if name in WITH_LOG_Z else []

        plain = functools.partial(getattr(plain_losses, name), groups, log_z, beta=beta, **options)
        batch = make_batch(groups, log_z=log_z or None)
        output = run(case, batch, beta)
        assert output.loss.dtype == torch.float32 and output.loss.shape == ()
        assert output.loss.item() == close(plain())
        policy, learned = gradients(output, batch)
        expected_policy, expected_learned = finite_differences(plain, groups, log_z)
        assert any(expected_policy) and (any(expected_learned) or not log_z)
        assert_close(policy, expected_policy)
        assert_close(learned, expected_learned)


@every_case
def test_gradient_reaches_the_policy_alone_and_inputs_stay(case):
    batch = batch_for(case, mixed_groups(2))
    fixed = ("reference_logprobs", "behavior_logprobs", "old_logprobs", "rewards")
    for name in fixed:
        getattr(batch, name).requires_grad_()
    names = [*fixed, "policy_logprobs", "response", "group"]
    before = {name: getattr(batch, name).detach().clone() for name in names}
    output = run(case, batch)
    assert all(not torch.as_tensor(m).requires_grad for m in output.metrics.values())
    output.loss.backward()
    assert batch.policy_logprobs.grad is not None
    assert batch.log_z is None or batch.log_z.grad is not None
    for name in fixed:
        assert getattr(batch, name).grad is None, name
    for name in names:
        assert torch.equal(getattr(batch, name), before[name]), name


@every_case
def test_order_does_not_matter(case):
    for seed in range(3):
        groups = mixed_groups(seed, empty=seed == 2)
        lengths = [len(y.policy) for group in groups for y in group]
        batch = batch_for(case, groups)
        output = run(case, batch)
        policy, learned = gradients(output, batch)

        # Responses in any order: groups interleave.
        order = list(range(len(lengths)))
        random.Random(seed).shuffle(order)
        permuted = batch_for(case, groups, order=order)
        other = run(case, permuted)
        per_response = torch.tensor(policy).split(lengths)
        expected = torch.cat([per_response[i] for i in order]).tolist()
        assert other.loss.item() == close(output.loss.item())
        assert_close(gradients(other, permuted)[0], expected)
        assert_close(gradients(other, permuted)[1], learned)

        # Tokens in any order: responses interleave.
        token_order = list(range(len(policy)))
        random.Random(seed).shuffle(token_order)
        shuffled = batch_for(case, groups, token_order=token_order)
        other = run(case, shuffled)
        assert other.loss.item() == close(output.loss.item())
        assert_close(gradient(other, shuffled), [policy[i] for i in token_order])

        # Groups in any order.
        log_z = random_log_z(1, len(groups))[::-1] if case[0] in WITH_LOG_Z else None
        reverse = make_batch(groups[::-1], log_z=log_z)
        other = run(case, reverse)
        sizes = [sum(len(y.policy) for y in group) for group in groups]
        expected = torch.cat(torch.tensor(policy).split(sizes)[::-1]).tolist()
        assert other.loss.item() == close(output.loss.item())
        assert_close(gradients(other, reverse)[0], expected)
        assert_close(gradients(other, reverse)[1], learned[::-1])
        for name, value in output.metrics.items():
            assert float(other.metrics[name]) == close(float(value)), name


@every_case
def test_whole_group_micro_batches_add_up_to_the_step(case):
    groups = mixed_groups(6)
    log_z = random_log_z(1, len(groups))
    whole_batch = batch_for(case, groups, log_z=log_z)
    whole = run(case, whole_batch)

    step, batches = step_stats(groups), []
    for part in (slice(0, 1), slice(1, 3), slice(3, 5)):
        batches.append(make_batch(groups[part], num_groups=5, log_z=log_z[part], step=step))
    parts = [run(case, batch) for batch in batches]
    assert sum(part.loss.item() for part in parts) == close(whole.loss.item())
    policy = [x for p, b in zip(parts, batches, strict=True) for x in gradients(p, b)[0]]
    learned = [x for p, b in zip(parts, batches, strict=True) for x in gradients(p, b)[1]]
    assert_close(policy, gradients(whole, whole_batch)[0])
    assert_close(learned, gradients(whole, whole_batch)[1])
    for name, value in whole.metrics.items():
        assert sum(float(part.metrics[name]) for part in parts) == close(float(value)), name


@every_case
def test_the_step_is_known_from_the_batch_that_is_the_whole_step(case):
    groups = mixed_groups(7, empty=True)
    step = step_stats(groups)
    order = torch.tensor([3, 1, 4, 0, 2])  # the step's groups come in no order
    step = dataclasses.replace(
        step, mean_rewards=step.mean_rewards[order], differs=step.differs[order]
    )
    batch, other = batch_for(case, groups), batch_for(case, groups, step=step)
    output, given_step = run(case, batch), run(case, other)
    assert given_step.loss.item() == close(output.loss.item())
    assert_close(gradient(given_step, other), gradient(output, batch))


@every_case
def test_equal_rewards(case):
    """Finite; and there's nothing to learn from them where the policy is the reference."""
    name, options = case
    groups = copied(mixed_groups(8), reward=0.3)
    batch = batch_for(case, groups)
    output = run(case, batch)
    policy, learned = gradients(output, batch)
    assert all(map(math.isfinite, [output.loss.item(), *policy, *learned]))
    assert all(math.isfinite(float(value)) for value in output.metrics.values())
    if name in ("dgpo", "dpo"):
        assert output.loss.item() == 0 and not any(policy)
    elif name != "kimi_k2" and not needs_reference(name, options):
        assert not any(policy)  # no advantage, no penalty

    # A learned log Z has its own way to go, and k1 as a penalty has a gradient of beta everywhere.
    if name in WITH_LOG_Z or penalty_of(name, options) == ("penalty", "k1"):
        return
    for response in itertools.chain(*groups):
        response.reference = response.old = response.policy
    batch = batch_for(case, groups)
    assert gradient(run(case, batch), batch) == close([0.0] * len(batch.response))


@pytest.mark.parametrize("beta", [0.005, 1.0])
@every_case
def test_extreme_logprobs_stay_finite(case, beta):
    for log_z in ([3e4, -3e4], [-3e4, 3e4]):
        batch = make_batch(EXTREME, log_z=log_z if case[0] in WITH_LOG_Z else None)
        output = run(case, batch, beta)
        policy, learned = gradients(output, batch)
        assert math.isfinite(output.loss.item())
        assert all(map(math.isfinite, policy + learned))
        for name, value in output.metrics.items():
            assert math.isfinite(float(value)), name


@every_case
def test_a_group_of_empty_responses_stays_finite(case):
    groups = mixed_groups(9)
    for response in groups[-1]:
        response.policy = response.live = response.reference = response.behavior = []
        response.old = []
    batch = batch_for(case, groups)
    output = run(case, batch)
    policy, learned = gradients(output, batch)
    assert all(map(math.isfinite, [output.loss.item(), *policy, *learned]))
    assert all(math.isfinite(float(value)) for value in output.metrics.values())


@every_case
def test_bfloat16_inputs_are_summed_in_float32(case):
    # These numbers are exact in bfloat16, but their sums over 1001 tokens (-500.5, -1001) are not.
    groups = [
        [
            Response([-0.5] * 1001, [-1.0] * 1001, 1.0, [-0.5] * 1000 + [-0.75]),
            Response([-0.5] * 3, [-1.0] * 3, 0.0, [-0.5625, -0.375, -0.5], [-0.5] * 2 + [-1.0]),
            Response([-0.25] * 4, [-0.5] * 4, 0.25, [-0.375] * 4, [-0.125] * 4),
        ]
    ]
    exact, rounded = batch_for(case, groups), batch_for(case, groups, dtype=torch.bfloat16)
    output, other = run(case, exact), run(case, rounded)
    assert other.loss.dtype == torch.float32
    assert other.loss.item() == close(output.loss.item(), rel=1e-6)
    assert_close(gradient(other, rounded), gradient(output, exact), rel=1e-2)
    assert rounded.policy_logprobs.dtype == torch.bfloat16


@every_case
def test_metric_names_are_the_same_whatever_the_data(case):
    name, _ = case
    step = step_stats(mixed_groups(3))
    data = {
        "mixed": batch_for(case, mixed_groups(0)),
        "on-policy, empty responses": batch_for(case, mixed_groups(1, empty=True, on_policy=True)),
        "equal rewards": batch_for(case, copied(mixed_groups(2), reward=1.0)),
        "part of a step": batch_for(case, mixed_groups(3)[2:3], num_groups=5, step=step),
        "extreme": batch_for(case, EXTREME),
    }
    names = {what: set(run(case, batch).metrics) for what, batch in data.items()}
    assert names["mixed"] >= METRICS[name]
    for what, found in names.items():
        assert found == names["mixed"], what


# A learned log Z would have to move with the rewards.
@cases([case for case in CASES if case[0] != "tb_learned_z"])
def test_a_shift_of_all_rewards_changes_nothing(case):
    groups = mixed_groups(11)
    shifted = copied(groups)
    for response in itertools.chain(*shifted):
        response.reward += 2.0
    batch, other = batch_for(case, groups), batch_for(case, shifted)
    expected = gradient(run(case, batch), batch)
    assert_close(gradient(run(case, other), other), expected, rel=2e-3)


SCALES = {  # name: normalised gradient / the paper's, as a function of beta
    "tb_vargrad": lambda beta: beta / 2,
    "tb_learned_z": lambda beta: beta / 2,
    "ctb": lambda beta: beta / 4,
    "kimi": lambda beta: 1 / (2 * beta),
    "kimi_k2": lambda beta: 1 / (2 * beta),
    "flowrl": lambda beta: beta / 2,
    "dpo": lambda beta: 1 / beta,
}


@pytest.mark.parametrize("beta", [0.05, 2.0])
@pytest.mark.parametrize("name", SCALES)
def test_normalising_multiplies_by_a_constant(name, beta):
    case = (name, {})
    batch = batch_for(case, mixed_groups(12))
    output, printed = run(case, batch, beta), run((name, {"normalize": False}), batch, beta)
    scale = SCALES[name](beta)
    assert output.loss.item() == close(scale * printed.loss.item())
    for found, expected in zip(gradients(output, batch), gradients(printed, batch), strict=True):
        assert_close(found, [scale * value for value in expected])


# What is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_group_of_one_is_refused(name):
    case = next(case for case in CASES if case[0] == name)
    batch = batch_for(case, random_groups(7, sizes=(3, 1, 2)))
    with pytest.raises(ValueError, match="minimum of 2.*group 1"):
        run(case, batch)


DIVIDES_BY_BETA = {"tb_vargrad", "tb_learned_z", "ctb", "alpha_tb", "kimi", "kimi_k2", "flowrl"}
DIVIDES_BY_BETA |= {"dpo"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_impossible_betas_are_refused(name):
    case = next(case for case in CASES if case[0] == name)
    batch = batch_for(case, random_groups(8))
    if name not in DIVIDES_BY_BETA:
        run(case, batch, beta=0.0)
    for beta in (-0.1, math.nan, 0.0)[: 3 if name in DIVIDES_BY_BETA else 2]:
        with pytest.raises(ValueError, match="beta"):
            run(case, batch, beta=beta)


@every_case
def test_unknown_behavior_logprobs_are_refused_where_a_ratio_needs_them(case):
    groups = mixed_groups(13)
    batch, unknown = batch_for(case, groups), batch_for(case, groups)
    unknown.behavior_logprobs = torch.full_like(unknown.behavior_logprobs, math.nan)
    if needs_behavior(*case):
        with pytest.raises(ValueError, match="behavio.*log-probs"):
            run(case, unknown)
        partly = batch_for(case, groups)
        partly.behavior_logprobs[-1] = math.nan
        with pytest.raises(ValueError, match="behavio.*log-probs"):
            run(case, partly)
    else:
        output, other = run(case, batch), run(case, unknown)
        assert other.loss.item() == output.loss.item()
        assert gradients(other, unknown) == gradients(output, batch)
        assert all(math.isfinite(float(value)) for value in other.metrics.values())


@every_case
def test_unknown_old_logprobs_are_refused_by_kimi_k2_alone(case):
    batch = batch_for(case, mixed_groups(13))
    batch.old_logprobs = torch.full_like(batch.old_logprobs, math.nan)
    if case[0] == "kimi_k2":
        with pytest.raises(ValueError, match="old"):
            run(case, batch)
    else:
        assert math.isfinite(run(case, batch).loss.item())


@cases([case for case in CASES if not needs_reference(*case)])
def test_the_reference_is_not_looked_at_where_there_is_no_penalty(case):
    batch, other = batch_for(case, mixed_groups(14)), batch_for(case, mixed_groups(14))
    other.reference_logprobs = torch.full_like(other.reference_logprobs, math.nan)
    expected, output = run(case, batch), run(case, other)
    assert output.loss.item() == expected.loss.item()
    assert gradient(output, other) == gradient(expected, batch)


@pytest.mark.parametrize("name", WITH_LOG_Z)
def test_a_missing_log_z_is_refused(name):
    with pytest.raises(ValueError, match="trainer.log_z_lr"):
        run((name, {}), make_batch(random_groups(15)))


@every_case
def test_a_part_of_a_step_without_its_statistics_is_refused_where_they_matter(case):
    batch = batch_for(case, mixed_groups(16), num_groups=6)
    if needs_step(*case):
        with pytest.raises(ValueError, match="step"):
            run(case, batch)
    else:
        assert math.isfinite(run(case, batch).loss.item())


BAD_OPTIONS = [
    ("tb_vargrad", "importance", "token"),
    ("tb_vargrad", "importance", "sequences"),
    ("tb_vargrad", "importance_cap", 0.0),
    ("tb_vargrad", "difficulty_temperature", 0.0),
    ("tb_learned_z", "importance", "token"),
    ("flowrl", "importance", "token"),
    ("flowrl", "importance", "truncated"),
    ("ctb", "prune", -1.0),
    ("alpha_tb", "alpha", math.nan),
    ("kimi", "log_z", "learned"),
    *[
        (name, option, value)
        for name in ("reinforce", "rloo")
        for option, value in (
            ("kl", "both"),
            ("kl_estimator", "k4"),
            ("length_norm", "mean"),
            ("importance", "tokens"),
            ("importance_cap", -1.0),
        )
    ],
    ("reinforce", "length_norm", "constant"),  # without its constant
    ("proximal_rloo", "kl", "penalize"),
    ("proximal_rloo", "clip_low", -0.1),
    ("ppo", "kl_estimator", "k0"),
    ("ppo", "length_norm", "constant"),
    ("ppo", "clip_high", -0.1),
    ("ppo", "clip_low", 1.5),
    ("flowrl", "reward_std_eps", 0.0),
    ("grpo", "std_eps", 0.0),
    ("dgpo", "mad_eps", 0.0),
    ("grpo", "kl", "token"),
    ("grpo", "length_norm", "tokens"),
    ("dr_grpo", "length_constant", None),
    ("dr_grpo", "length_constant", 0),
    ("dgpo", "difficulty_temperature", 0.0),
]


@pytest.mark.parametrize(("name", "option", "value"), BAD_OPTIONS)
def test_a_bad_option_is_named(name, option, value):
    required = {"alpha_tb": {"alpha": 0.5}, "dr_grpo": {"length_constant": 16}}.get(name, {})
    case = (name, required | {option: value})
    with pytest.raises(ValueError, match=option if value != "constant" else "length_constant"):
        run(case, batch_for(case, mixed_groups(17)))


def test_no_objective_takes_just_any_keyword():
    for name in OBJECTIVES:
        parameters = inspect.signature(getattr(losses, name)).parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        assert kinds[0] is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert set(kinds[1:]) == {inspect.Parameter.KEYWORD_ONLY}, name


# conf/loss -------------------------------------------------------------------------------------

CONF = sorted(path.stem for path in (Path(losses.__file__).parent / "conf" / "loss").glob("*.yaml"))


def chosen_loss(name: str) -> Any:
    """`loss=name` of the whole config, as train.py makes it."""
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    import config

    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        cfg = compose("config", overrides=["engine=hf", f"loss={name}"])
    return instantiate(cfg.loss)


@pytest.mark.parametrize("name", CONF)
def test_conf_binds_the_function(name):
    loss = chosen_loss(name)
    assert loss.func is getattr(losses, name)
    groups = mixed_groups(12)
    batch = make_batch(groups, log_z=random_log_z(0, len(groups)), step=step_stats(groups))
    output = loss(batch, beta=0.1)
    assert isinstance(output, LossOutput) and math.isfinite(output.loss.item())


def test_every_objective_has_its_yaml():
    assert CONF == OBJECTIVES
    found = [
        name
        for name, function in inspect.getmembers(losses, inspect.isfunction)
        if function.__module__ == "losses" and not name.startswith("_")
        if inspect.signature(function).return_annotation in ("LossOutput", LossOutput)
    ]
    assert sorted(found) == OBJECTIVES
