"""Every objective under several options, and what the tests of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from plain_losses import (
    Groups,
    leave_one_out,
    make_batch,
    mean_baseline,
    random_log_z,
    regularised_rewards,
)

import losses
from losses import LossOutput
from trajectory import Batch

Case = tuple[str, dict[str, Any]]  # the objective's name, its options

CASES: list[Case] = [
    ("tb_vargrad", {}),
    ("tb_vargrad", {"normalize": False}),
    ("tb_vargrad", {"importance": "sequence"}),
    ("tb_vargrad", {"importance": "sequence", "importance_cap": 1.1, "normalize": False}),
    ("tb_vargrad", {"difficulty_temperature": 2.0}),
    ("tb_vargrad", {"difficulty_temperature": 0.5, "importance": "sequence"}),
    ("tb_learned_z", {}),
    ("tb_learned_z", {"normalize": False}),
    ("tb_learned_z", {"importance": "sequence", "importance_cap": 1.2}),
    ("ctb", {}),
    ("ctb", {"normalize": False}),
    ("ctb", {"prune": 2.0}),
    ("ctb", {"prune": 5.0, "normalize": False}),
    *[
        ("alpha_tb", {"alpha": alpha, "normalize": normalize})
        for alpha in (-0.5, 0.0, 0.5, 1.0, 2.0)
        for normalize in (True, False)
    ],
    ("kimi", {}),
    ("kimi", {"normalize": False}),
    ("kimi", {"log_z": "log_mean_exp"}),
    ("kimi", {"log_z": "log_mean_exp", "normalize": False}),
    ("kimi_k2", {}),
    ("kimi_k2", {"normalize": False}),
    ("flowrl", {}),
    ("flowrl", {"normalize": False, "importance_cap": 1.1}),
    ("flowrl", {"importance": "none", "reward_std_eps": 0.1}),
    *[
        ("reinforce", {"kl": kl, "kl_estimator": estimator})
        for kl in ("reward", "penalty")
        for estimator in ("k1", "k2", "k3")
    ],
    ("reinforce", {"kl": "none"}),
    ("reinforce", {"length_norm": "sequence"}),
    ("reinforce", {"length_norm": "token_mean", "kl": "penalty", "kl_estimator": "k3"}),
    ("reinforce", {"importance": "token"}),
    ("reinforce", {"importance": "sequence", "length_norm": "token_mean"}),
    ("reinforce", {"importance": "sequence", "kl": "penalty", "kl_estimator": "k2"}),
    ("rloo", {}),
    ("rloo", {"kl": "none"}),
    ("rloo", {"kl": "penalty", "kl_estimator": "k2", "length_norm": "sequence"}),
    ("rloo", {"kl": "reward", "kl_estimator": "k3"}),
    ("rloo", {"length_norm": "constant", "length_constant": 32}),
    ("rloo", {"length_norm": "token_mean", "importance": "token", "importance_cap": 1.1}),
    ("rloo", {"importance": "sequence", "importance_cap": 1.5}),
    ("rloo", {"importance": "token", "kl": "penalty", "length_norm": "sequence"}),
    ("proximal_rloo", {}),
    ("proximal_rloo", {"kl": "none", "clip_low": 0.05, "clip_high": 0.5}),
    ("proximal_rloo", {"kl": "penalty", "kl_estimator": "k3"}),
    ("proximal_rloo", {"kl": "reward", "kl_estimator": "k2"}),
    ("ppo", {}),
    ("ppo", {"kl": "none", "length_norm": "sequence", "clip_high": 0.1}),
    ("ppo", {"kl": "penalty", "length_norm": "constant", "length_constant": 7}),
    ("ppo", {"kl_estimator": "k3", "length_norm": "token_mean"}),
    ("grpo", {}),
    ("grpo", {"kl": "none", "clip_high": 0.28, "length_norm": "token_mean"}),
    ("grpo", {"kl": "reward", "kl_estimator": "k2", "std_eps": 0.5}),
    ("grpo", {"kl_estimator": "k1", "length_norm": "none"}),
    ("dr_grpo", {"length_constant": 16}),
    ("dr_grpo", {"length_constant": 16, "kl": "penalty"}),
    ("dr_grpo", {"length_norm": "token_mean", "clip_low": 0.05}),
    ("dgpo", {}),
    ("dgpo", {"difficulty_temperature": 0.5, "clip_high": 0.05}),
    ("dgpo", {"mad_eps": 0.3, "clip_low": 0.05}),
    ("dpo", {}),
    ("dpo", {"normalize": False}),
]

OBJECTIVES = sorted({name for name, _ in CASES})
CLIPPED = ("proximal_rloo", "ppo", "grpo", "dr_grpo", "dgpo")
DEFAULT_PENALTY = {
    "reinforce": ("reward", "k1"),
    "rloo": ("reward", "k1"),
    "proximal_rloo": ("reward", "k1"),
    "ppo": ("reward", "k1"),
    "grpo": ("penalty", "k3"),
    "dr_grpo": ("none", "k3"),
}
WITH_LOG_Z = ("tb_learned_z", "flowrl")


def case_name(case: Case) -> str:
    name, options = case
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


def needs_behavior(name: str, options: dict[str, Any]) -> bool:
    default = "sequence" if name == "flowrl" else "none"
    return name in CLIPPED or options.get("importance", default) != "none"


def needs_step(name: str, options: dict[str, Any]) -> bool:
    return (
        name == "dgpo"
        or options.get("difficulty_temperature") is not None
        or options.get("length_norm") == "token_mean"
    )


def penalty_of(name: str, options: dict[str, Any]) -> tuple[str, str]:
    """Where the KL penalty goes ("none", "reward", "penalty") and its estimator."""
    kl, estimator = DEFAULT_PENALTY.get(name, ("none", "k1"))
    return options.get("kl", kl), options.get("kl_estimator", estimator)


def needs_reference(name: str, options: dict[str, Any]) -> bool:
    if name in DEFAULT_PENALTY:
        return penalty_of(name, options)[0] != "none"
    return name not in ("kimi_k2", "dgpo")


def run(case: Case, batch: Batch, beta: float = 0.1) -> LossOutput:
    name, options = case
    return getattr(losses, name)(batch, beta=beta, **options)


def batch_for(case: Case, groups: Groups, **keywords: Any) -> Batch:
    """A batch with a learned log Z where the objective needs one."""
    if case[0] in WITH_LOG_Z:
        keywords.setdefault("log_z", random_log_z(1, len(groups)))
    return make_batch(groups, **keywords)


def gradients(output: LossOutput, batch: Batch) -> tuple[list[float], list[float]]:
    """d loss / d policy_logprobs and d loss / d log_z (empty where the batch has none)."""
    inputs = [batch.policy_logprobs] + ([] if batch.log_z is None else [batch.log_z])
    values = torch.autograd.grad(output.loss, inputs, retain_graph=True, allow_unused=True)
    policy, learned = (*values, None)[:2]
    return policy.tolist(), [] if learned is None else learned.tolist()


def gradient(output: LossOutput, batch: Batch) -> list[float]:
    return gradients(output, batch)[0]


def close(value: float, rel: float = 1e-4, abs: float = 1e-5):
    return pytest.approx(value, rel=rel, abs=abs)


def assert_close(actual: Sequence[float], expected: Sequence[float], rel: float = 2e-4) -> None:
    """Element by element; what float32 loses is measured by the largest of them."""
    found, wanted = torch.tensor(actual), torch.tensor(expected)
    scale = wanted.abs().max().item() if len(expected) else 0.0
    torch.testing.assert_close(found, wanted, rtol=rel, atol=rel / 10 * scale + 1e-7)


def policy_gradient(groups: Groups, advantages: list[list[float]]) -> list[float]:
    """d loss / d log-prob of each token when loss = -mean_groups mean_j A_j log pi(y_j)."""
    return [
        -advantage / len(group) / len(groups)
        for group, values in zip(groups, advantages, strict=True)
        for response, advantage in zip(group, values, strict=True)
        for _ in response.policy
    ]


def plain_mean_baseline(groups: Groups, beta: float) -> list[list[float]]:
    """REINFORCE's advantages: KL-regularised reward minus its mean over the group."""
    return [mean_baseline(regularised_rewards(group, beta, "reward", "k1")) for group in groups]


def plain_leave_one_out(groups: Groups, beta: float) -> list[list[float]]:
    return [leave_one_out(regularised_rewards(group, beta, "reward", "k1")) for group in groups]
