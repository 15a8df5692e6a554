"""Several trainers, in real processes: their steps are those of one trainer on the same groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_gradient import LESS_THAN_A_GROUP, LONGEST, SHARED, TEMPERATURE, make_groups, make_head
from test_trainer import make_parts, trajectories

from checkpoint import save_policy, whole_state
from comm import Kind, Message, Ranks
from gradient import accumulate_gradient, step_stats
from losses import rloo, tb_learned_z, tb_vargrad
from model import (
    PADDED,
    compile_layers,
    load_policy,
    load_tokenizer,
    prepare_for_packing,
    response_logprobs,
    unique_response_logprobs,
)
from parallel import (
    ParallelConfig,
    call,
    clip_gradients,
    copy_into,
    decoder_layers,
    full,
    in_lockstep,
    is_sharded,
    shard,
    sum_over_trainers,
    whole,
)
from trainer import LRConfig, TrainerConfig, draw, update_policy
from trajectory import Trajectory, pack

CPU = torch.device("cpu")
STEPS = 4
OBJECTIVES = {"tb_vargrad": tb_vargrad, "rloo": rloo, "learned_z": tb_learned_z}

# Prompts that each rank is dealt of the five of a step.
SHARES = {
    1: [[0, 1, 2, 3, 4]],
    2: [[2], [0, 1, 3, 4]],
    3: [[0, 4], [1], [2, 3]],
    4: [[2], [1], [0], [3, 4]],
}


def open_policy(
    path: str,
    group: dist.ProcessGroup | None = None,
    parallel: ParallelConfig | None = None,
    *,
    packed: bool = True,
    checkpointing: bool = False,
    compiled: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> torch.nn.Module:
    """As train.py opens it."""
    policy = load_policy(path, device=CPU, dtype=torch.float32)
    if parallel is not None and group is not None:
        shard(policy, group, parallel, device=CPU, compute_dtype=compute_dtype)
    if packed:
        prepare_for_packing(policy, "auto", compute_dtype=compute_dtype)
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()
    if compiled:
        compile_layers(policy, backend="aot_eager")
    return policy


def run_steps(
    rank: int,
    world_size: int,
    path: str,
    kind: str,
    *,
    steps: int = STEPS,
    limit: int = LESS_THAN_A_GROUP,
    objective: str = "tb_vargrad",
    packed: bool = True,
    checkpointing: bool = False,
    compiled: bool = False,
    shares: list[list[int]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Optimizer steps of this rank's share of fixed groups: what they report, and the weights."""
    group = dist.group.WORLD if world_size > 1 or kind == "shard" else None
    parallel = ParallelConfig(kind=kind, **options)
    policy = open_policy(
        path,
        group,
        parallel if kind == "shard" else None,
        packed=packed,
        checkpointing=checkpointing,
        compiled=compiled,
    )
    assert is_sharded(policy) == (kind == "shard")
    parts = make_parts(path)
    parts.policy, parts.group, parts.objective = policy, group, OBJECTIVES[objective]
    parts.layout = SHARED if packed else PADDED
    trained: list[dict[str, Any]] = [{"params": list(policy.parameters())}]
    if objective == "learned_z":
        parts.log_z_head = make_head(policy.config.hidden_size)
        trained.append({"params": list(parts.log_z_head.parameters()), "lr": 1e-2})
    # A key's bias has no gradient but what rounding makes of it, which Adam would scale to 1.
    parts.optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)
    cfg = TrainerConfig(
        steps=steps,
        lr=LRConfig(kind="constant", peak=1e-3, warmup_steps=0),
        tokens_per_micro_batch=limit,
        parallel=parallel,
        max_grad_norm=1.0,
    )
    reported = []
    for step in range(steps):
        groups = make_groups(seed=step)
        mine = [groups[i] for i in (shares or SHARES[world_size])[rank]]
        reported.append(update_policy(cfg, parts, mine, step))
    weights = [full(p).flatten() for p in policy.parameters()]
    return {
        "curve": [[values["loss/total"], values["loss/grad_norm"]] for values in reported],
        "tokens": [values["tokens"] for values in reported],
        "weights": torch.cat(weights).numpy(),
        "log_z": None
        if parts.log_z_head is None
        else parts.log_z_head.linear.weight.detach().numpy(),
    }


def assert_same_run(results: list[dict[str, Any]], want: dict[str, Any], tolerance: float) -> None:
    for got in results:
        np.testing.assert_allclose(got["curve"], want["curve"], rtol=tolerance, atol=tolerance)
        assert got["tokens"] == want["tokens"]
        np.testing.assert_allclose(got["weights"], want["weights"], rtol=0, atol=tolerance)
        assert np.array_equal(got["weights"], results[0]["weights"]), "trainers drift apart"
        if want["log_z"] is not None:
            np.testing.assert_allclose(got["log_z"], want["log_z"], rtol=0, atol=tolerance)


def one_rank(path: str, **options: Any) -> dict[str, Any]:
    """The same steps of one trainer that holds all groups."""
    return run_steps(0, 1, path, "replicate", **options)


TOLERANCE = 1e-5


@pytest.mark.parametrize("kind", ["replicate", "shard"])
@pytest.mark.parametrize("model", ["llama", "gpt2", "neox", "qwen2", "llama-untied"])
def test_two_trainers_take_the_steps_of_one(
    tiny_models: dict[str, str], model: str, kind: str
) -> None:
    """A group of one rank is over the limit and its micro-batches are more: uneven passes."""
    path = tiny_models[model]
    results = run_ranks(run_steps_on_ranks, 2, path, kind, {})
    assert_same_run(results, one_rank(path), TOLERANCE)


@pytest.mark.parametrize("kind", ["replicate", "shard"])
def test_a_trainer_without_any_group_takes_part(tiny_llama: str, kind: str) -> None:
    """As when nothing has arrived for one trainer: the others draw in its place."""
    options = {"shares": [[], [0, 1, 2, 3, 4]]}
    results = run_ranks(run_steps_on_ranks, 2, tiny_llama, kind, options)
    assert_same_run(results, one_rank(tiny_llama), TOLERANCE)


def draw_on_ranks(rank: int, world_size: int, path: str) -> list[Any]:
    """Rank 0 has one prompt to draw from, rank 1 six; then a bound, and rank 1 gets its late."""
    cfg = TrainerConfig(responses_per_prompt=3)
    drawn: list[Any] = []
    for bound in (None, 1):
        parts = make_parts(path, max_uses=bound)
        parts.group, parts.metrics = dist.group.WORLD, None
        parts.ranks = Ranks(
            rank=rank, world_size=3, local_rank=rank, local_world_size=3, num_trainers=2
        )
        late = [[t for t in make_trajectories(range(4 + rank))]]
        parts.channel = SimpleNamespace(
            receive=lambda timeout_s, late=late: (
                [Message(2, Kind.TRAJECTORIES, pack(late.pop()))] if late else []
            )
        )
        parts.buffer.add(make_trajectories(range(1 + (5 * rank if bound is None else 0))))
        groups = draw(cfg, parts, 8, 0)
        drawn.append((len(groups), parts.totals.short_fraction, "data" in parts.clock.seconds()))
    return drawn


def make_trajectories(prompt_ids: range) -> list[Trajectory]:
    made = []
    for prompt_id in prompt_ids:
        for t in trajectories(seed=prompt_id)[:3]:
            t.prompt_id = prompt_id
            made.append(t)
    return made


def test_uneven_arrival_balances_the_draw_and_bounds_wait_together(tiny_llama: str) -> None:
    first, second = run_ranks(draw_on_ranks, 2, tiny_llama)
    # 7 of 8 prompts: no waiting without a bound, and trainer 0 is reported short of 3 of 4
    assert [rank[0] for rank in (first, second)] == [(1, 3 / 8, False), (6, 3 / 8, False)]
    # 2 of 8 at first: both wait, till there are 4 and 5
    assert [rank[1] for rank in (first, second)] == [(4, 0.0, True), (4, 0.0, True)]


def run_steps_on_ranks(
    rank: int, world_size: int, path: str, kind: str, options: dict[str, Any]
) -> dict[str, Any]:
    return run_steps(rank, world_size, path, kind, **options)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {}),
        (3, {"limit": LONGEST}),  # shards of unequal size; every group in two passes
        (2, {"reduce_every_micro_batch": True}),
        (2, {"reshard_after_forward": False}),
        (2, {"cpu_offload": True}),
        (2, {"packed": False}),
        (2, {"checkpointing": True}),
        pytest.param(2, {"compiled": True}, marks=pytest.mark.slow),
        pytest.param(2, {"compiled": True, "checkpointing": True}, marks=pytest.mark.slow),
        (2, {"objective": "rloo"}),
        (2, {"objective": "learned_z"}),
        (1, {}),
    ],
    ids=str,
)
def test_a_sharded_policy_takes_the_steps_of_one_trainer(
    tiny_llama: str, world_size: int, options: dict[str, Any]
) -> None:
    results = run_ranks(run_steps_on_ranks, world_size, tiny_llama, "shard", options)
    alone = {k: v for k, v in options.items() if k in ("packed", "objective")}
    assert_same_run(results, one_rank(tiny_llama, **alone), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "shard"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_curves_of_20_steps(tiny_llama: str, world_size: int, kind: str) -> None:
    results = run_ranks(run_steps_on_ranks, world_size, tiny_llama, kind, {"steps": 20})
    want = one_rank(tiny_llama, steps=20)
    for got in results:
        np.testing.assert_allclose(got["curve"], want["curve"], rtol=1e-4, atol=1e-4)


# --------------------------------------------------------------------------- what moves, when


def count_reductions(
    rank: int, world_size: int, path: str, reduce_every_micro_batch: bool
) -> tuple[int, int, int]:
    """Reductions of one step, sharded modules, and forward passes with gradient."""
    parallel = ParallelConfig(reduce_every_micro_batch=reduce_every_micro_batch)
    policy = open_policy(path, dist.group.WORLD, parallel)
    counts = {"passes": 0, "reductions": 0}
    reduce_scatter = dist.reduce_scatter_single

    def counting(*args: Any, **options: Any) -> Any:
        counts["reductions"] += 1
        return reduce_scatter(*args, **options)

    def count(*_: Any) -> None:
        counts["passes"] += torch.is_grad_enabled()

    dist.reduce_scatter_single = counting
    policy.base_model.register_forward_pre_hook(count)
    groups = [make_groups()[i] for i in SHARES[world_size][rank]]
    accumulate_gradient(
        policy,
        groups,
        objective=tb_vargrad,
        beta=0.1,
        temperature=TEMPERATURE,
        autocast=None,
        tokens_per_micro_batch=LESS_THAN_A_GROUP,
        stats=step_stats(groups, dist.group.WORLD, CPU),
        layout=SHARED,
        group=dist.group.WORLD,
        reduce_every_micro_batch=reduce_every_micro_batch,
    )
    return counts["reductions"], len(decoder_layers(policy)) + 1, counts["passes"]


@pytest.mark.parametrize("every", [False, True])
def test_gradients_are_reduced_once_a_step_unless_asked(tiny_llama: str, every: bool) -> None:
    results = run_ranks(count_reductions, 2, tiny_llama, every)
    for reductions, modules, passes in results:
        assert passes == results[0][2] > 2, "ranks take equally many passes"
        assert reductions == modules * (passes if every else 1)


def lockstep(rank: int, world_size: int) -> list[tuple[Any, bool]]:
    return list(in_lockstep(["a", "b", "c"][: 1 + 2 * rank], dist.group.WORLD, CPU))


def test_lockstep() -> None:
    short, long = run_ranks(lockstep, 2)
    assert short == [("a", False), (None, False), (None, True)]
    assert long == [("a", False), ("b", False), ("c", True)]
    assert list(in_lockstep(["a", "b"], None, CPU)) == [("a", False), ("b", True)]
    assert list(in_lockstep([], None, CPU)) == []


def what_a_rank_holds(rank: int, world_size: int, path: str) -> dict[str, Any]:
    policy = open_policy(path, dist.group.WORLD, ParallelConfig())
    own = sum(p.to_local().numel() for p in policy.parameters())
    everything = sum(p.numel() for p in policy.parameters())
    return {"own": own, "all": everything, "name": type(policy).__name__}


def test_each_trainer_holds_its_share(tiny_llama: str) -> None:
    held = run_ranks(what_a_rank_holds, 3, tiny_llama)
    assert sum(h["own"] for h in held) == held[0]["all"]
    assert max(h["own"] for h in held) < 0.4 * held[0]["all"]


# --------------------------------------------------------------------------- mixed precision


def bfloat16_steps(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Steps so small that parameters in bfloat16 would not move."""
    policy = open_policy(path, dist.group.WORLD, ParallelConfig(), compute_dtype=torch.bfloat16)
    seen = []
    policy.base_model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: seen.append((args[0].dtype, module.up_proj.weight.dtype))
    )
    before = [full(p).clone() for p in policy.parameters()]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0)
    group = make_groups()[rank]
    logprobs = response_logprobs(
        policy,
        [t.prompt_tokens for t in group.trajectories],
        [t.response_tokens for t in group.trajectories],
        temperature=TEMPERATURE,
        layout=SHARED,
    )
    logprobs.sum().backward()
    gradient = torch.cat([full(p.grad).flatten() for p in policy.parameters()])
    optimizer.step()
    after = [full(p) for p in policy.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "logprobs": str(logprobs.dtype),
        "computed in": {str(dtype) for pair in seen for dtype in pair},
        "parameters": {str(p.dtype) for p in policy.parameters()},
        "states": {str(s.dtype) for s in states},
        "gradient": gradient.numpy(),
        "moved": float(
            np.mean([float((a != b).float().mean()) for a, b in zip(after, before, strict=True)])
        ),
    }


def test_bfloat16_parameters_have_float32_shards_and_optimizer_states(tiny_llama: str) -> None:
    results = run_ranks(bfloat16_steps, 2, tiny_llama)
    policy = open_policy(tiny_llama)
    total = 0.0
    for group in make_groups()[:2]:
        total += response_logprobs(
            policy,
            [t.prompt_tokens for t in group.trajectories],
            [t.response_tokens for t in group.trajectories],
            temperature=TEMPERATURE,
            layout=SHARED,
        ).sum()
    total.backward()
    want = torch.cat([p.grad.flatten() for p in policy.parameters()]).numpy()
    for got in results:
        assert got["logprobs"] == "torch.float32"
        assert got["computed in"] == {"torch.bfloat16"}
        assert got["parameters"] == got["states"] == {"torch.float32"}
        assert got["moved"] > 0.9
        gap = np.linalg.norm(got["gradient"] - want) / np.linalg.norm(want)
        assert 1e-5 < gap < 0.05  # rounded to bfloat16, and no more than that


# --------------------------------------------------------------------------- other uses


def other_uses(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Log-probs of unequal shares, generation of unequal lengths, then a step."""
    group = dist.group.WORLD
    parallel = ParallelConfig()
    policy = open_policy(path, group, parallel)
    trajectories = [t for i in SHARES[world_size][rank] for t in make_groups()[i].trajectories]
    if rank == 0:
        trajectories = []
    logprobs = unique_response_logprobs(
        policy,
        [t.prompt_tokens for t in trajectories],
        [t.response_tokens for t in trajectories],
        temperature=TEMPERATURE,
        tokens_per_micro_batch=LESS_THAN_A_GROUP,
        layout=SHARED,
        group=group,
    )
    with whole(policy, parallel), torch.no_grad():
        tokens = policy.generate(
            input_ids=torch.tensor([[5, 6, 7]]),
            max_new_tokens=3 + 4 * rank,
            min_new_tokens=3 + 4 * rank,
            do_sample=False,
        )
    (t,) = make_groups()[0].trajectories[:1]
    pair = [t.prompt_tokens], [t.response_tokens]
    response_logprobs(policy, *pair, temperature=1.0, layout=SHARED).sum().backward()
    norm = clip_gradients(list(policy.parameters()), None)
    with torch.no_grad():
        for p in policy.parameters():
            copy_into(p, torch.full(p.shape, 0.5))
    copied = [full(p) for p in policy.parameters()]
    with torch.no_grad():
        after = call(policy, lambda: policy.get_output_embeddings().weight.sum())
    return {
        "logprobs": [values for values in logprobs],
        "tokens": tokens[0].tolist(),
        "norm": norm,
        "copied": all(bool((c == 0.5).all()) for c in copied),
        "head": float(after),
    }


def test_other_uses_of_a_sharded_policy(tiny_llama: str) -> None:
    """Log-probs where one rank has none to compute, generation that nobody waits for."""
    results = run_ranks(other_uses, 3, tiny_llama)
    policy = open_policy(tiny_llama)
    for rank, got in enumerate(results):
        groups = [make_groups()[i] for i in SHARES[3][rank]] if rank else []
        for values, t in zip(
            got["logprobs"], [t for group in groups for t in group.trajectories], strict=True
        ):
            with torch.no_grad():
                want = response_logprobs(
                    policy, [t.prompt_tokens], [t.response_tokens], temperature=TEMPERATURE
                )
            np.testing.assert_allclose(values, want.numpy(), atol=1e-5)
        want = policy.generate(
            input_ids=torch.tensor([[5, 6, 7]]),
            max_new_tokens=3 + 4 * rank,
            min_new_tokens=3 + 4 * rank,
            do_sample=False,
        )
        assert got["tokens"] == want[0].tolist()
        assert got["copied"]
        weight = policy.get_output_embeddings().weight
        assert got["head"] == pytest.approx(0.5 * weight.numel()), "stale parameters"
    (t,) = make_groups()[0].trajectories[:1]
    pair = [t.prompt_tokens], [t.response_tokens]
    response_logprobs(policy, *pair, temperature=1.0).sum().backward()
    norm = clip_gradients(list(policy.parameters()), None)
    assert results[0]["norm"] == pytest.approx(3 * norm, rel=1e-5)  # a sum over ranks


def save_sharded(rank: int, world_size: int, path: str, folder: str) -> None:
    policy = open_policy(path, dist.group.WORLD, ParallelConfig())
    weights = whole_state(policy, keep=rank == 0)
    assert (weights is None) == (rank != 0)
    if rank == 0:
        from pathlib import Path

        save_policy(Path(folder), policy, load_tokenizer(path), {"step": 1}, weights=weights)


def logprobs_when_sharded(rank: int, world_size: int, path: str) -> np.ndarray:
    policy = open_policy(path, dist.group.WORLD, ParallelConfig())
    group = make_groups()[0]
    with torch.no_grad():
        return response_logprobs(
            policy,
            [t.prompt_tokens for t in group.trajectories],
            [t.response_tokens for t in group.trajectories],
            temperature=1.0,
            layout=SHARED,
        ).numpy()


@pytest.mark.parametrize("model", ["llama", "llama-untied"])
def test_a_checkpoint_of_two_trainers_opens_on_one_and_on_three(
    tiny_models: dict[str, str], tmp_path, model: str
) -> None:
    path, folder = tiny_models[model], str(tmp_path / "saved")
    run_ranks(save_sharded, 2, path, folder)
    before, after = (load_policy(p, device=CPU, dtype=torch.float32) for p in (path, folder))
    assert type(after) is type(before) and after.config.architectures == ["LlamaForCausalLM"]
    for (name, want), (other, got) in zip(
        before.named_parameters(), after.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(want, got)
    (alone,) = run_ranks(logprobs_when_sharded, 1, folder)
    for got in run_ranks(logprobs_when_sharded, 3, folder):
        np.testing.assert_allclose(got, alone, atol=1e-5)


# --------------------------------------------------------------------------- replicated gradients


def rank_missing_gradient(rank: int, world_size: int) -> tuple[list, dict]:
    policy = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)])
    policy[1].bias.requires_grad_(False)
    if rank == 1:
        policy[0](torch.ones(2)).backward()  # nothing of policy[1]; rank 0 has no gradient at all
    trained = [p for p in policy.parameters() if p.requires_grad]
    sums = sum_over_trainers(trained, {"b": float(rank), "a": 1.0}, dist.group.WORLD)
    return [None if p.grad is None else p.grad.tolist() for p in policy.parameters()], sums


def test_parameters_without_gradient_count_as_zero() -> None:
    for grads, sums in run_ranks(rank_missing_gradient, 2):
        assert grads == [[[1.0, 1.0]], [1.0], [[0.0, 0.0, 0.0]], None]
        assert sums == {"a": 2.0, "b": 1.0}


def many_buckets(rank: int, world_size: int) -> list[float]:
    import parallel

    parallel._BUCKET_BYTES = 40  # bytes: ten float32 numbers
    shapes = [(3, 3), (2,), (30,), (1,), (4, 2)]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for i, p in enumerate(parameters):
        p.grad = torch.arange(float(p.numel())).view(p.shape) * (i + 1) * (rank + 1)
    sum_over_trainers(parameters, {"a": 1.0}, dist.group.WORLD)
    return [float(p.grad.sum()) for p in parameters]


def test_gradients_are_added_up_bucket_by_bucket() -> None:
    sizes = [9, 2, 30, 1, 8]
    want = [3 * (i + 1) * n * (n - 1) / 2 for i, n in enumerate(sizes)]
    for got in run_ranks(many_buckets, 2):
        assert got == want


def test_one_trainer_needs_no_group() -> None:
    policy = torch.nn.Linear(2, 1)
    assert sum_over_trainers(list(policy.parameters()), {"a": 1.0}, None) == {"a": 1.0}
    assert policy.weight.grad is None


def test_auto_shards_where_there_are_several() -> None:
    kinds = {kind: ParallelConfig(kind=kind) for kind in ("auto", "replicate", "shard")}
    assert [kinds["auto"].sharded(n) for n in (1, 2)] == [False, True]
    assert not kinds["replicate"].sharded(8) and kinds["shard"].sharded(1)
