"""The trainer's own pieces, on a real buffer and a real policy: its reference, m, skipped steps."""

from __future__ import annotations

import gc
import hashlib
import json
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import perturb

import trainer
from buffer import Buffer, Group, uniform
from comm import Kind, Message, Ranks
from losses import LossOutput, tb_vargrad
from model import Layout, load_policy, prepare_for_packing, response_logprobs
from offline import read_trajectories
from parallel import ParallelConfig, full, shard
from schedules import linear_at
from trainer import (
    Arrivals,
    LRConfig,
    TrainerConfig,
    TrainerParts,
    complete_reference,
    draw,
    memory_advice,
    receive,
    reset_reference,
    shares,
    update_policy,
    wait_for_round,
)
from trajectory import Batch, Trajectory, pack

TEMPERATURE = 0.7


def make_parts(path: str, *, recency=lambda step: 0.0, **buffer_options) -> TrainerParts:
    """A trainer without searchers; what the tests don't reach is None."""
    policy, reference = (
        load_policy(path, device=torch.device("cpu"), dtype=torch.float32) for _ in range(2)
    )
    options = dict(max_tokens=10_000, deduplicate=True, recency_prob=0.5, rule=uniform, seed=0)
    return TrainerParts(
        ranks=Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, num_trainers=1),
        control=SimpleNamespace(
            progress=lambda *_: None, alive=lambda: None, startup_timeout_s=1800.0
        ),
        channel=SimpleNamespace(receive=lambda timeout_s: pytest.fail("waited for data")),
        policy=policy,
        optimizer=None,
        objective=None,
        buffer=Buffer(**(options | buffer_options)),
        recency=recency,
        tokenizer=None,
        prompts=[],
        temperature=TEMPERATURE,
        probe_tokens=[],
        group=None,
        publisher=None,
        metrics=None,
        run_dir=Path(),
        started=0.0,
        reference=reference,
        arrivals=Arrivals(completed=np.zeros(8, dtype=np.int64)),
    )


def trajectories(version: int = 0, reference_version: int = 0, seed: int = 0) -> list[Trajectory]:
    """Three responses to each of two prompts, with reference log-probs that no model gives."""
    rng = np.random.default_rng(seed)
    prompts = tiny.random_tokens(np.random.default_rng(1), [3, 5])
    made = []
    for prompt_id, prompt in enumerate(prompts):
        for tokens in tiny.random_tokens(rng, [2, 4, 6]):
            sampled = np.zeros(len(tokens), np.float32)
            made.append(
                Trajectory(
                    prompt_id=prompt_id,
                    prompt_tokens=prompt,
                    response_tokens=tokens,
                    behavior_logprobs=sampled,
                    old_logprobs=sampled,
                    reference_logprobs=np.full(len(tokens), 7.0, np.float32),
                    reference_version=reference_version,
                    reward=float(rng.random()),
                    reward_parts={},
                    version_start=version,
                    version_end=version,
                    truncated=False,
                )
            )
    return made


def expected(model: torch.nn.Module, t: Trajectory) -> np.ndarray:
    with torch.no_grad():
        values = response_logprobs(
            model, [t.prompt_tokens], [t.response_tokens], temperature=TEMPERATURE
        )
    return values.numpy()


def test_log_probs_of_the_present_reference_are_left_alone(tiny_llama):
    parts = make_parts(tiny_llama)
    parts.buffer.add(trajectories())
    groups = parts.buffer.draw(2, 3)
    parts.reference = None  # would be needed to compute anything
    complete_reference(TrainerConfig(), parts, groups)
    assert all((t.reference_logprobs == 7.0).all() for g in groups for t in g.trajectories)


def test_missing_reference_log_probs_are_computed_once(tiny_llama, monkeypatch):
    parts = make_parts(tiny_llama)
    parts.buffer.add(trajectories(reference_version=-1))
    complete_reference(TrainerConfig(), parts, parts.buffer.draw(2, 3))
    monkeypatch.setattr(
        trainer, "unique_response_logprobs", lambda *_, **__: pytest.fail("computed again")
    )
    groups = parts.buffer.draw(2, 3)
    complete_reference(TrainerConfig(), parts, groups)
    for group in groups:
        for t in group.trajectories:
            assert t.reference_version == 0
            np.testing.assert_allclose(
                t.reference_logprobs, expected(parts.reference, t), atol=1e-5
            )


def test_the_reference_is_laid_out_as_the_policy(tiny_llama):
    parts = make_parts(tiny_llama)
    parts.layout = Layout(packed=True, chunk_tokens=3)
    prepare_for_packing(parts.reference, "auto")
    rows: list[torch.Size] = []
    parts.reference.base_model.register_forward_pre_hook(
        lambda module, args, options: rows.append(options["input_ids"].shape), with_kwargs=True
    )
    parts.buffer.add(trajectories(reference_version=-1))
    groups = parts.buffer.draw(2, 3)
    complete_reference(TrainerConfig(), parts, groups)
    assert rows == [(1, 3 + 5 + 2 * (1 + 3 + 5))]  # one row; the two prompts once each
    for t in (t for group in groups for t in group.trajectories):
        np.testing.assert_allclose(t.reference_logprobs, expected(parts.policy, t), atol=1e-5)


def test_a_reset_makes_the_policy_the_reference_and_old_log_probs_invalid(tiny_llama):
    parts = make_parts(tiny_llama)
    parts.buffer.add(trajectories(reference_version=-1))
    complete_reference(TrainerConfig(), parts, parts.buffer.draw(2, 3))
    before = expected(parts.policy, trajectories()[0])
    perturb(parts.policy, 0.1)
    reset_reference(parts, version=40)
    parts.buffer.add(trajectories(version=40, reference_version=-1, seed=5))
    groups = parts.buffer.draw(2, 6)
    complete_reference(TrainerConfig(), parts, groups)
    assert abs(expected(parts.policy, trajectories()[0]) - before).max() > 0.01  # it did move
    for group in groups:
        assert {t.version_start for t in group.trajectories} == {0, 40}
        for t in group.trajectories:
            assert t.reference_version == 40
            np.testing.assert_allclose(t.reference_logprobs, expected(parts.policy, t), atol=1e-5)
    perturb(parts.policy, 0.1)  # training goes on: the reference must not move along
    again = parts.buffer.draw(2, 6)
    complete_reference(TrainerConfig(), parts, again)
    for t in (t for group in again for t in group.trajectories):
        np.testing.assert_allclose(t.reference_logprobs, expected(parts.reference, t), atol=1e-5)
        assert abs(t.reference_logprobs - expected(parts.policy, t)).max() > 1e-3


def test_m_follows_its_schedule(tiny_llama):
    def recency(step: int) -> float:
        return linear_at(step, initial=0.0, final=1.0, target_step=10)

    parts = make_parts(tiny_llama, recency=recency, deduplicate=False)
    cfg = TrainerConfig(responses_per_prompt=2)
    parts.buffer.add(trajectories(version=0))
    parts.buffer.new_window()
    parts.buffer.add(trajectories(version=9, seed=3))
    recent = {}
    for step in (0, 10):
        drawn = [
            t.version_start
            for _ in range(200)
            for group in draw(cfg, parts, 1, step)
            for t in group.trajectories
        ]
        recent[step] = np.mean(np.array(drawn) == 9)
    assert 0.35 < recent[0] < 0.65  # uniform over the whole store, half of which is new
    assert recent[10] == 1.0


def test_what_is_too_stale_is_forgotten_before_the_draw(tiny_llama):
    parts = make_parts(tiny_llama, max_staleness=5)
    parts.buffer.add(trajectories(version=0))
    parts.buffer.add(trajectories(version=4, seed=3))
    groups = draw(TrainerConfig(responses_per_prompt=6), parts, 2, 6)
    assert {t.version_start for group in groups for t in group.trajectories} == {4}
    assert parts.buffer.num_expired == 6


class Arriving:
    """A channel on which one message comes each time it is asked with a time to wait."""

    def __init__(self, *batches: list[Trajectory]) -> None:
        self.left = list(batches)

    def receive(self, *, timeout_s: float = 0.0) -> list[Message]:
        assert timeout_s > 0 and self.left, "waited for more than is needed"
        return [Message(1, Kind.TRAJECTORIES, pack(self.left.pop(0)))]


def test_a_response_is_drawn_as_often_as_max_reuse_and_then_waited_for(tiny_llama):
    parts = make_parts(tiny_llama, max_uses=2)
    cfg = TrainerConfig(responses_per_prompt=3)
    first, second = trajectories(), trajectories(seed=3)
    parts.buffer.add(first)
    for uses in (0, 1):
        groups = draw(cfg, parts, 2, uses)
        assert [group.uses for group in groups] == [[uses] * 3] * 2
    assert parts.buffer.num_trajectories == 0 and parts.buffer.num_used_up == 6
    # one prompt is not enough: bounds want whole draws, and the wait for them is accounted for
    parts.channel = Arriving(second[:3], second[3:])
    groups = draw(cfg, parts, 2, 2)
    assert sorted(group.prompt_id for group in groups) == [0, 1]
    assert not parts.channel.left and "data" in parts.clock.seconds()
    assert parts.buffer.num_received == 12


def test_who_waits_for_data_says_so_and_has_more_time_than_for_a_step(
    tiny_llama, monkeypatch, caplog
):
    parts = make_parts(tiny_llama, max_uses=2)
    made, limits = trajectories(), []
    parts.control.progress = lambda what, limit_s=None: limits.append(limit_s)
    parts.channel = Arriving(made[:3], made[3:])
    monkeypatch.setattr(trainer, "_WARN_PERIOD_S", -1.0)
    draw(TrainerConfig(responses_per_prompt=3), parts, 2, 5)
    assert limits == [1800.0]
    waits = [r.getMessage() for r in caplog.records if "waits for trajectories" in r.getMessage()]
    assert [text.partition(";")[0] for text in waits] == [
        "step 5 waits for trajectories: 0 of 2 prompts can be drawn",
        "step 5 waits for trajectories: 1 of 2 prompts can be drawn",
    ]


def test_without_bounds_a_draw_takes_what_there_is(tiny_llama):
    parts = make_parts(tiny_llama)
    parts.buffer.add(trajectories()[:3])
    (group,) = draw(TrainerConfig(responses_per_prompt=3), parts, 2, 0)
    assert group.prompt_id == 0 and "data" not in parts.clock.seconds()


def test_a_group_that_comes_in_several_messages_is_drawn_whole(tiny_llama):
    parts = make_parts(tiny_llama)
    parts.channel = Arriving(*([t] for t in trajectories()))
    for _ in range(6):
        receive(parts, timeout_s=1.0)
    groups = draw(TrainerConfig(responses_per_prompt=3), parts, 2, 0)
    assert sorted(len(group.trajectories) for group in groups) == [3, 3]


@pytest.mark.parametrize("total", [1, 2, 7, 12])
@pytest.mark.parametrize("available", [[5], [9, 9], [0, 0], [0, 3], [1, 20], [2, 0, 7, 1], [1] * 9])
def test_shares_are_as_even_as_the_buffers_allow(total, available):
    counts = shares(total, available)
    assert sum(counts) == min(total, sum(available))
    assert all(0 <= count <= limit for count, limit in zip(counts, available, strict=True))
    # nobody who could take more has two less than another
    for count, limit in zip(counts, available, strict=True):
        assert count == limit or count >= max(counts) - 1


# --------------------------------------------------------------------------- rounds


class Round:
    """A channel on which messages come in the order in which they are given, few at a time."""

    def __init__(self, *batches: list[Message]) -> None:
        self.left = list(batches)

    def receive(self, *, timeout_s: float = 0.0) -> list[Message]:
        assert timeout_s > 0 and self.left, "waited for more than is needed"
        return self.left.pop(0)


def report(source: int, version: int) -> Message:
    values = {"round": version, "generated": 6, "generated_tokens": 24, "outcomes": {}, "cut": 0}
    text = json.dumps(values | {"idle_fraction": 0.0, "idle_s": {}})
    return Message(source, Kind.REPORT, np.frombuffer(text.encode(), np.uint8))


def test_a_round_is_taken_in_by_searcher_however_it_came(tiny_llama):
    orders, made = [], trajectories()
    a, b, c, d = (
        Message(source, Kind.TRAJECTORIES, pack([made[i]]))
        for source, i in ((2, 0), (1, 1), (2, 2), (1, 3))
    )
    for batches in (
        [[a, b, c], [report(2, 0)], [d, report(1, 0)]],
        [[b, d, report(1, 0), a], [c], [report(2, 0)]],
        [[a], [b], [report(1, -1), report(1, 0), c, report(2, -1)], [d, report(2, 0)]],
    ):
        parts = make_parts(tiny_llama)
        parts.ranks = Ranks(rank=0, world_size=3, local_rank=0, local_world_size=3, num_trainers=1)
        parts.channel = Round(*batches)
        wait_for_round(parts, version=0)
        assert not parts.channel.left and parts.arrivals.rounds == {1: 0, 2: 0}
        assert parts.arrivals.completed.tolist() == [3, 1, 0, 0, 0, 0, 0, 0]
        orders.append(parts.arrivals.rewards)
    assert orders == [[made[i].reward for i in (1, 3, 0, 2)]] * 3


# --------------------------------------------------------------------------- skipped steps


def infinite_loss(batch: Batch, *, beta: float) -> LossOutput:
    output = tb_vargrad(batch, beta=beta)
    return LossOutput(loss=output.loss * float("inf"), metrics=output.metrics)


def nan_loss(batch: Batch, *, beta: float) -> LossOutput:
    output = tb_vargrad(batch, beta=beta)
    return LossOutput(loss=output.loss + float("nan"), metrics=output.metrics)


def nan_gradient(batch: Batch, *, beta: float) -> LossOutput:
    """The root of 0 has no finite slope: the loss is finite, its gradient is not."""
    output = tb_vargrad(batch, beta=beta)
    loss = output.loss + torch.sqrt(output.loss - output.loss.detach())
    return LossOutput(loss=loss, metrics=output.metrics)


CFG = TrainerConfig(
    steps=20,
    lr=LRConfig(kind="constant", peak=1e-3, warmup_steps=0),
    tokens_per_micro_batch=1000,
    max_skipped_steps=2,
)


def trained_parts(path: str, folder: Path) -> TrainerParts:
    """A trainer with an optimizer, alone in its world."""
    parts = make_parts(path)
    parts.objective = partial(tb_vargrad)
    parts.optimizer = torch.optim.AdamW(parts.policy.parameters(), lr=1e-3, fused=True)
    parts.run_dir = folder
    parts.buffer.add(trajectories())
    return parts


def all_of(parts: TrainerParts) -> str:
    """A digest of every bit of the policy and of the optimizer."""
    tensors = [*parts.policy.parameters()]
    for p in parts.policy.parameters():
        tensors += parts.optimizer.state.get(p, {}).values()
    digest = hashlib.blake2b()
    for t in tensors:
        digest.update(full(t).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("objective", [infinite_loss, nan_loss, nan_gradient])
def test_a_step_that_is_not_finite_changes_nothing(
    tiny_llama, tmp_path, caplog, objective: Callable[..., LossOutput]
):
    parts = trained_parts(tiny_llama, tmp_path)
    groups = parts.buffer.draw(2, 3)
    update_policy(CFG, parts, groups, 0)
    before = all_of(parts)
    good, parts.objective = parts.objective, objective
    for count in (1, 2):
        update_policy(CFG, parts, groups, count)
        assert all_of(parts) == before
        assert all(p.grad is None for p in parts.policy.parameters())
        assert parts.totals.skipped_steps == parts.totals.skipped_in_a_row == count
    assert caplog.text.count("changes nothing: its gradient is not finite") == 2
    parts.objective = good
    update_policy(CFG, parts, groups, 3)  # and training goes on
    assert all_of(parts) != before
    assert all(torch.isfinite(p).all() for p in parts.policy.parameters())
    assert (parts.totals.skipped_steps, parts.totals.skipped_in_a_row) == (2, 0)
    parts.objective = objective
    update_policy(CFG, parts, groups, 4)
    update_policy(CFG, parts, groups, 5)
    assert not (tmp_path / "bad_batch").exists()
    with pytest.raises(FloatingPointError, match="3 steps in a row.*trainer.max_skipped_steps"):
        update_policy(CFG, parts, groups, 6)
    dumped = list(read_trajectories(tmp_path / "bad_batch" / "step-6-trainer-0.traj"))
    drawn = [t for group in groups for t in group.trajectories]
    assert pack(dumped).tobytes() == pack(drawn).tobytes()


def test_every_micro_batch_of_a_step_is_progress(tiny_llama, tmp_path):
    parts = trained_parts(tiny_llama, tmp_path)
    groups = parts.buffer.draw(2, 3)
    signs: list[int] = []
    for tokens in (1000, 16):
        alive: list[None] = []
        parts.control.alive = lambda alive=alive: alive.append(None)
        update_policy(replace(CFG, tokens_per_micro_batch=tokens), parts, groups, 0)
        signs.append(len(alive))
    assert 0 < signs[0] < signs[1]


def skip_on_two(rank: int, world_size: int, path: str, folder: str) -> list[Any]:
    """A step whose loss is not finite on one of two sharded trainers; the other has no group."""
    parts = trained_parts(path, Path(folder))
    shard(parts.policy, dist.group.WORLD, ParallelConfig(), device=torch.device("cpu"))
    parts.group = dist.group.WORLD
    parts.ranks = Ranks(
        rank=rank, world_size=2, local_rank=rank, local_world_size=2, num_trainers=2
    )
    parts.optimizer = torch.optim.AdamW(parts.policy.parameters(), lr=1e-3, fused=True)
    groups = parts.buffer.draw(2, 3)
    update_policy(CFG, parts, groups, 0)
    before = all_of(parts)
    mine: list[Group] = groups if rank == 0 else []
    if rank == 0:
        parts.objective = nan_loss
    found: list[Any] = []
    for step in (1, 2):
        update_policy(CFG, parts, mine, step)
        found.append(all_of(parts) == before)
    found.append(parts.totals.skipped_in_a_row)
    try:
        update_policy(CFG, parts, mine, 3)
    except FloatingPointError as error:
        found.append(str(error))
    return found


def test_all_trainers_skip_together(tiny_llama, tmp_path):
    for found in run_ranks(skip_on_two, 2, tiny_llama, str(tmp_path)):
        assert found[:3] == [True, True, 2] and "3 steps in a row" in found[3]
    counts = [
        len(list(read_trajectories(tmp_path / "bad_batch" / f"step-3-trainer-{rank}.traj")))
        for rank in (0, 1)
    ]
    assert counts == [6, 0]


# --------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: np.empty(1 << 60, np.uint8),
    ],
    ids=["torch", "numpy"],
)
def test_memory_that_is_not_there_says_what_to_change(allocate):
    with (
        pytest.raises(MemoryError, match="lower trainer.tokens_per_micro_batch=1000") as caught,
        memory_advice(CFG),
    ):
        allocate()
    assert caught.value.__cause__ is not None and "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), ValueError("memory")])
def test_other_errors_are_as_they_were(error):
    with pytest.raises(type(error)) as caught, memory_advice(CFG):
        raise error
    assert caught.value is error


def greedy(batch: Batch, *, beta: float) -> LossOutput:
    """As a micro-batch that is too large: more memory than the process may have."""
    held = [torch.zeros(1 << 26, dtype=torch.uint8) for _ in range(64)]  # 4 GiB
    return LossOutput(loss=held[0].sum() * beta, metrics={})


def train_in_little_memory(rank: int, world_size: int, path: str, folder: str) -> str:
    parts = trained_parts(path, Path(folder))
    groups = parts.buffer.draw(2, 3)
    update_policy(CFG, parts, groups, 0)
    parts.objective = greedy
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), limits[1]))
    try:
        update_policy(CFG, parts, groups, 1)
    except MemoryError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        gc.collect()
    return "it fitted"


def test_a_micro_batch_that_does_not_fit_says_what_to_change(tiny_llama, tmp_path):
    (message,) = run_ranks(train_in_little_memory, 1, tiny_llama, str(tmp_path))
    assert message.startswith("a micro-batch did not fit in memory")
    assert "trainer.tokens_per_micro_batch=1000" in message
    assert "allocate" in message.rpartition(";")[2]
