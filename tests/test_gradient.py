"""The gradient of a step, however it is split, against Eq. 5 computed plainly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import tiny
import torch
from ranks import run_ranks

import gradient
from buffer import Group
from gradient import accumulate_gradient, step_stats, whole_group_micro_batches
from losses import LossOutput, dgpo, rloo, tb_learned_z, tb_vargrad
from model import (
    PADDED,
    Layout,
    LogZHead,
    load_policy,
    prepare_for_packing,
    prompt_features,
    response_logprobs,
)
from packing import num_tokens
from parallel import sum_over_trainers
from trajectory import StepStats, Trajectory

TEMPERATURE = 0.7
BETA = 0.5
GROUP_SIZES = [3, 2, 6, 4, 2]
EVERYTHING = 100_000  # tokens a micro-batch: one micro-batch
SOME_GROUPS = 120  # padded tokens: whole groups, several micro-batches
LESS_THAN_A_GROUP = 30  # larger groups in two passes, packed or padded
LONGEST = (
    17  # as many packed tokens as the longest prompt and response have: no shorter is possible
)
SHARED = Layout(packed=True)
UNSHARED = Layout(packed=True, share_prompts=False, chunk_tokens=20, chunk_vocabulary=9)
LAYOUTS = {"padded": PADDED, "shared": SHARED, "unshared": UNSHARED}

OBJECTIVES: dict[str, Callable[..., LossOutput]] = {
    "tb_vargrad": tb_vargrad,
    "tb_vargrad as printed": partial(tb_vargrad, normalize=False),
    "rloo": rloo,
    "dgpo": dgpo,  # weighs a prompt by the difficulty of all the step's prompts
}


def load(path: str) -> torch.nn.Module:
    """A policy that reads packed rows too."""
    policy = load_policy(path, device=torch.device("cpu"), dtype=torch.float32)
    prepare_for_packing(policy, "auto")
    return policy


def make_groups(seed: int = 0, response_lengths: list[list[int]] | None = None) -> list[Group]:
    rng = np.random.default_rng(seed)
    groups = []
    for prompt_id, given in enumerate(response_lengths or [None] * len(GROUP_SIZES)):
        (prompt,) = tiny.random_tokens(rng, [int(rng.integers(1, 8))])
        size = GROUP_SIZES[prompt_id] if given is None else len(given)
        lengths = rng.integers(1, 12, size=size).tolist() if given is None else given
        trajectories = [
            Trajectory(
                prompt_id=prompt_id,
                prompt_tokens=prompt,
                response_tokens=tokens,
                behavior_logprobs=(sampled := -rng.exponential(3, len(tokens)).astype(np.float32)),
                old_logprobs=0.9 * sampled,
                reference_logprobs=-rng.exponential(3, len(tokens)).astype(np.float32),
                reference_version=0,
                reward=(reward := float(rng.normal())),
                reward_parts={"all": reward},
                version_start=0,
                version_end=0,
                truncated=False,
            )
            for tokens in tiny.random_tokens(rng, lengths)
        ]
        groups.append(
            Group(
                prompt_id=prompt_id,
                trajectories=trajectories,
                uses=[0] * size,
                items=list(range(size)),
            )
        )
    return groups


def step(
    policy: torch.nn.Module,
    groups: list[Group],
    objective: Callable[..., LossOutput],
    tokens_per_micro_batch: int,
    stats: StepStats | None = None,
    log_z_head: LogZHead | None = None,
    layout: Layout = SHARED,
) -> tuple[torch.Tensor, dict[str, float]]:
    policy.zero_grad()
    sums = accumulate_gradient(
        policy,
        groups,
        objective=objective,
        beta=BETA,
        temperature=TEMPERATURE,
        autocast=None,
        tokens_per_micro_batch=tokens_per_micro_batch,
        stats=step_stats(make_groups(), None, torch.device("cpu")) if stats is None else stats,
        log_z_head=log_z_head,
        layout=layout,
    )
    return flat_gradient(policy), sums


def flat_gradient(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def assert_same(
    got: tuple[torch.Tensor, dict[str, float]], want: tuple[torch.Tensor, dict[str, float]]
) -> None:
    gap = float((got[0] - want[0]).abs().max() / want[0].abs().max())
    assert gap < 1e-5, f"gradients differ by {gap:.1e} of the largest entry"
    assert got[1].keys() == want[1].keys()
    for name, value in want[1].items():
        assert got[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def plain_loss(policy: torch.nn.Module, groups: list[Group], objective: str) -> torch.Tensor:
    """The step's loss from its formula: response by response, whole forward passes, Python sums."""
    losses = []
    for group in groups:
        logprobs = [
            tiny.plain_logprobs(policy, t.prompt_tokens, t.response_tokens, TEMPERATURE).sum()
            for t in group.trajectories
        ]
        ratios = [
            logprob - float(t.reference_logprobs.sum())
            for logprob, t in zip(logprobs, group.trajectories, strict=True)
        ]
        rewards = [t.reward for t in group.trajectories]
        n = len(rewards)
        if objective.startswith("tb_vargrad"):
            log_z = sum(r / BETA - k for r, k in zip(rewards, ratios, strict=True)) / n
            squares = [
                (log_z.detach() + k - r / BETA) ** 2 for r, k in zip(rewards, ratios, strict=True)
            ]
            scale = 1.0 if objective.endswith("printed") else BETA / 2
            losses.append(scale * sum(squares) / n)
        else:
            returns = [r - BETA * float(k.detach()) for r, k in zip(rewards, ratios, strict=True)]
            advantages = [r - (sum(returns) - r) / (n - 1) for r in returns]
            losses.append(-sum(a * lp for a, lp in zip(advantages, logprobs, strict=True)) / n)
    return sum(losses) / len(groups)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("name", ["tb_vargrad", "tb_vargrad as printed", "rloo"])
def test_loss_and_gradient_equal_the_formula(tiny_llama: str, name: str, layout: str) -> None:
    policy, groups = load(tiny_llama), make_groups()
    got = step(policy, groups, OBJECTIVES[name], EVERYTHING, layout=LAYOUTS[layout])
    policy.zero_grad()
    loss = plain_loss(policy, groups, name)
    loss.backward()
    assert_same(
        (got[0], {"loss": got[1]["loss/total"]}), (flat_gradient(policy), {"loss": loss.item()})
    )


@pytest.mark.parametrize("name", list(OBJECTIVES))
@pytest.mark.parametrize(
    ("tokens_per_micro_batch", "layout"),
    [
        *((limit, "padded") for limit in (SOME_GROUPS, LESS_THAN_A_GROUP, 1)),
        *((limit, "shared") for limit in (SOME_GROUPS, LESS_THAN_A_GROUP, LONGEST)),
        *((limit, "unshared") for limit in (SOME_GROUPS, LESS_THAN_A_GROUP, LONGEST)),
    ],
)
def test_any_split_gives_the_same_step(
    tiny_llama: str, name: str, tokens_per_micro_batch: int, layout: str
) -> None:
    policy, groups = load(tiny_llama), make_groups()
    whole = step(policy, groups, OBJECTIVES[name], EVERYTHING, layout=PADDED)
    split = step(policy, groups, OBJECTIVES[name], tokens_per_micro_batch, layout=LAYOUTS[layout])
    assert_same(split, whole)


@pytest.mark.parametrize("layout", ["shared", "unshared"])
@pytest.mark.parametrize("limit", [EVERYTHING, LESS_THAN_A_GROUP])
@pytest.mark.parametrize("model", ["llama", "gpt2", "neox", "qwen2"])
def test_a_packed_step_equals_a_padded_one(
    tiny_models: dict[str, str], model: str, limit: int, layout: str
) -> None:
    policy, groups = load(tiny_models[model]), make_groups()
    padded = step(policy, groups, tb_vargrad, EVERYTHING, layout=PADDED)
    assert_same(step(policy, groups, tb_vargrad, limit, layout=LAYOUTS[layout]), padded)


@pytest.mark.parametrize("layout", ["shared", "unshared"])
@pytest.mark.parametrize("limit", [62, 70, EVERYTHING])
def test_one_huge_and_many_tiny_responses(tiny_llama: str, limit: int, layout: str) -> None:
    """The huge one fills a micro-batch, so that its group is taken in two passes."""
    policy = load(tiny_llama)
    groups = make_groups(response_lengths=[[1, 55, 2, 1, 3, 1], [1] * 9, [2, 1], [30, 1, 28]])
    stats = step_stats(groups, None, torch.device("cpu"))
    padded = step(policy, groups, tb_vargrad, EVERYTHING, stats, layout=PADDED)
    packed = step(policy, groups, tb_vargrad, limit, stats, layout=LAYOUTS[layout])
    assert_same(packed, padded)


def test_a_response_over_the_limit_is_refused_before_any_gradient(tiny_llama: str) -> None:
    policy = load(tiny_llama)
    groups = make_groups(response_lengths=[[1, 2, 1], [1, 40]])
    needed = len(groups[1].trajectories[0].prompt_tokens) + 39
    with pytest.raises(ValueError, match=f"set trainer.tokens_per_micro_batch={needed} or more"):
        step(policy, groups, tb_vargrad, needed - 1)
    assert all(p.grad is None for p in policy.parameters())
    step(policy, groups, tb_vargrad, needed, step_stats(groups, None, torch.device("cpu")))


@pytest.mark.parametrize("limit", [EVERYTHING, LESS_THAN_A_GROUP])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_equal_responses_are_computed_once(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, layout: str, limit: int
) -> None:
    policy, groups = load(tiny_llama), make_groups()
    for group in groups:  # every second response repeats the one before it, reward aside
        for one, other in zip(group.trajectories[::2], group.trajectories[1::2], strict=False):
            other.response_tokens = one.response_tokens
            other.reference_logprobs = one.reference_logprobs
            other.old_logprobs = one.old_logprobs
            other.behavior_logprobs = one.behavior_logprobs
    seen: list[tuple[bytes, bytes]] = []

    def recording(model, prompts, responses, **options):
        if torch.is_grad_enabled():
            pairs = zip(prompts, responses, strict=True)
            seen.extend((p.tobytes(), r.tobytes()) for p, r in pairs)
        return response_logprobs(model, prompts, responses, **options)

    monkeypatch.setattr(gradient, "response_logprobs", recording)
    got = step(policy, groups, tb_vargrad, limit, layout=LAYOUTS[layout])
    assert len(seen) == len(set(seen)) == sum(-(-size // 2) for size in GROUP_SIZES)
    policy.zero_grad()
    loss = plain_loss(policy, groups, "tb_vargrad")
    loss.backward()
    assert_same(
        (got[0], {"loss": got[1]["loss/total"]}), (flat_gradient(policy), {"loss": loss.item()})
    )


@pytest.mark.parametrize(
    ("layout", "tokens_per_micro_batch", "with_gradient", "without"),
    [
        ("padded", EVERYTHING, 1, False),
        ("padded", SOME_GROUPS, 3, False),
        ("padded", LESS_THAN_A_GROUP, 13, True),
        ("padded", 1, 17, True),
        ("shared", EVERYTHING, 1, False),
        ("shared", SOME_GROUPS, 2, False),
        ("shared", LESS_THAN_A_GROUP, 6, True),
        ("shared", LONGEST, 11, True),
        ("unshared", EVERYTHING, 1, False),
        ("unshared", SOME_GROUPS, 2, False),
        ("unshared", LESS_THAN_A_GROUP, 9, True),
        ("unshared", LONGEST, 15, True),
    ],
)
def test_the_splits_are_what_their_names_say(
    tiny_llama: str,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    tokens_per_micro_batch: int,
    with_gradient: int,
    without: bool,
) -> None:
    """Forward passes with gradient, and whether some ran without; limits hold for each."""
    policy, groups = load(tiny_llama), make_groups()
    passes: list[bool] = []

    def counting(model, prompts, responses, **options):
        passes.append(torch.is_grad_enabled())
        if layout == "padded":
            longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
            assert len(prompts) == 1 or longest * len(prompts) <= tokens_per_micro_batch
        else:
            tokens = num_tokens(prompts, responses, share_prompts=layout == "shared")
            assert tokens <= tokens_per_micro_batch
        assert options["layout"] == LAYOUTS[layout]
        return response_logprobs(model, prompts, responses, **options)

    monkeypatch.setattr(gradient, "response_logprobs", counting)
    step(policy, groups, tb_vargrad, tokens_per_micro_batch, layout=LAYOUTS[layout])
    assert (passes.count(True), False in passes) == (with_gradient, without)


def test_gradients_add_to_what_is_there(tiny_llama: str) -> None:
    policy, groups = load(tiny_llama), make_groups()
    whole = step(policy, groups, tb_vargrad, EVERYTHING)
    parts = [step(policy, part, tb_vargrad, SOME_GROUPS) for part in (groups[:2], groups[2:])]
    assert_same(
        (
            sum(grad for grad, _ in parts),
            {name: sum(sums[name] for _, sums in parts) for name in whole[1]},
        ),
        whole,
    )


def test_sums_over_tokens(tiny_llama: str) -> None:
    policy, groups = load(tiny_llama), make_groups()
    _, sums = step(policy, groups, tb_vargrad, SOME_GROUPS)
    trajectories = [t for group in groups for t in group.trajectories]
    logprobs = np.concatenate(
        [
            tiny.plain_logprobs(policy, t.prompt_tokens, t.response_tokens, TEMPERATURE)
            .detach()
            .numpy()
            for t in trajectories
        ]
    )
    old = np.concatenate([t.old_logprobs for t in trajectories])
    assert sums["tokens"] == len(old)
    assert sums["policy/entropy_sampled"] == pytest.approx(-logprobs.sum(), rel=1e-5)
    assert sums["policy/logprob_drift"] == pytest.approx(abs(logprobs - old).sum(), rel=1e-5)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_micro_batches_keep_groups_whole(layout: str) -> None:
    groups = make_groups()
    for limit in (1, LESS_THAN_A_GROUP, 50, SOME_GROUPS, 200, EVERYTHING):
        parts = whole_group_micro_batches(groups, limit, LAYOUTS[layout])
        flat = [group.prompt_id for part in parts for group in part]
        assert sorted(flat) == list(range(len(groups)))
        if layout != "padded":
            for part in parts:
                trajectories = [t for group in part for t in group.trajectories]
                tokens = num_tokens(
                    [t.prompt_tokens for t in trajectories],
                    [t.response_tokens for t in trajectories],
                    share_prompts=layout == "shared",
                )
                assert len(part) == 1 or tokens <= limit
            continue
        for part in parts:
            sequences = [
                len(t.prompt_tokens) + len(t.response_tokens)
                for group in part
                for t in group.trajectories
            ]
            assert len(part) == 1 or max(sequences) * len(sequences) <= limit


def make_head(hidden_size: int) -> LogZHead:
    torch.manual_seed(0)
    head = LogZHead(hidden_size)
    torch.nn.init.normal_(head.linear.weight, std=0.1)
    return head


def test_prompt_features_average_the_prompt_alone(tiny_llama: str) -> None:
    policy = load(tiny_llama)
    prompts = [group.trajectories[0].prompt_tokens for group in make_groups()]
    features = prompt_features(policy, prompts)
    for prompt, row in zip(prompts, features, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        hidden = policy.base_model(input_ids=ids).last_hidden_state[0]
        assert torch.allclose(row, hidden.mean(0), atol=1e-5)


@pytest.mark.parametrize("limit", [LESS_THAN_A_GROUP, SOME_GROUPS, EVERYTHING])
def test_learned_log_z_gets_its_gradient_however_the_step_is_split(
    tiny_llama: str, limit: int
) -> None:
    policy, groups = load(tiny_llama), make_groups()
    prompts = [group.trajectories[0].prompt_tokens for group in groups]
    features = prompt_features(policy, prompts)
    head = make_head(features.shape[1])
    got = step(policy, groups, partial(tb_learned_z, normalize=False), limit, log_z_head=head)

    plain = make_head(features.shape[1])
    policy.zero_grad()
    losses = []
    for group, log_z in zip(groups, plain(features), strict=True):
        for t in group.trajectories:
            logprobs = tiny.plain_logprobs(policy, t.prompt_tokens, t.response_tokens, TEMPERATURE)
            residual = log_z + logprobs.sum() - float(t.reference_logprobs.sum()) - t.reward / BETA
            losses.append(residual**2 / len(group.trajectories) / len(groups))
    torch.stack(losses).sum().backward()
    want = flat_gradient(policy)
    assert float((got[0] - want).abs().max() / want.abs().max()) < 1e-5
    assert got[1]["loss/total"] == pytest.approx(float(sum(losses)), rel=1e-5)
    for mine, theirs in zip(head.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_step_stats() -> None:
    groups = make_groups()
    for t in groups[1].trajectories:
        t.reward = 0.5
    stats = step_stats(groups, None, torch.device("cpu"))
    rewards = [[t.reward for t in group.trajectories] for group in groups]
    assert stats.mean_rewards.tolist() == pytest.approx([sum(r) / len(r) for r in rewards])
    assert stats.differs.tolist() == [True, False, True, True, True]
    tokens = [sum(len(t.response_tokens) for t in group.trajectories) for group in groups]
    assert stats.num_tokens == sum(tokens)
    assert stats.num_differing_tokens == sum(tokens) - tokens[1]


# --------------------------------------------------------------------------- several trainers


def rank_stats(rank: int, world_size: int, shares: list[list[int]]) -> StepStats:
    import torch.distributed as dist

    groups = make_groups()
    return step_stats([groups[i] for i in shares[rank]], dist.group.WORLD, torch.device("cpu"))


@pytest.mark.parametrize("shares", [[[0, 1], [2, 3, 4]], [[], [4, 3, 2, 1, 0]]])
def test_step_stats_are_of_all_trainers(shares: list[list[int]]) -> None:
    groups = make_groups()
    want = step_stats([groups[i] for share in shares for i in share], None, torch.device("cpu"))
    for got in run_ranks(rank_stats, 2, shares):
        assert torch.equal(got.mean_rewards, want.mean_rewards)
        assert torch.equal(got.differs, want.differs)
        assert got.num_tokens == want.num_tokens
        assert got.num_differing_tokens == want.num_differing_tokens


def rank_step(rank: int, world_size: int, path: str, name: str) -> tuple[np.ndarray, dict]:
    import torch.distributed as dist

    policy = load(path)
    groups = make_groups()[rank::world_size]  # 3 and 2 groups: unequal shares
    stats = step_stats(groups, dist.group.WORLD, torch.device("cpu"))
    _, sums = step(policy, groups, OBJECTIVES[name], SOME_GROUPS, stats)
    sums = sum_over_trainers(list(policy.parameters()), sums, dist.group.WORLD)
    return flat_gradient(policy).numpy(), sums


@pytest.mark.parametrize("name", ["tb_vargrad", "rloo", "dgpo"])
def test_two_trainers_make_the_step_of_one(tiny_llama: str, name: str) -> None:
    whole = step(load(tiny_llama), make_groups(), OBJECTIVES[name], EVERYTHING)
    results = run_ranks(rank_step, 2, tiny_llama, name)
    for grad, sums in results:
        assert_same((torch.from_numpy(grad), sums), whole)
    assert np.array_equal(results[0][0], results[1][0]), "the trainers would drift apart"
