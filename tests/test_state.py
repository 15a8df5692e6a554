"""The whole state of a trainer: what goes on after it was restored is what would have gone on."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_gradient import make_head
from test_trainer import make_parts

import state
from buffer import Buffer, uniform
from checkpoint import ADAPTER_FOLDER, Checkpoint, CheckpointConfig, Checkpointer, read_checkpoint
from comm import Control, Ranks
from lora import LoraConfig, adapter_weights, add_adapters, load_adapter
from losses import tb_learned_z
from model import load_policy, load_tokenizer
from parallel import ParallelConfig, full, is_sharded, shard
from trainer import (
    Arrivals,
    LRConfig,
    TrainerConfig,
    TrainerParts,
    complete_reference,
    draw,
    reset_reference,
    take_trajectories,
    update_policy,
)
from trajectory import Trajectory, pack

CPU = torch.device("cpu")
PROMPTS = 6
CFG = TrainerConfig(
    steps=20,
    batch_size=12,
    responses_per_prompt=3,
    lr=LRConfig(kind="constant", peak=1e-3, warmup_steps=0),
    tokens_per_micro_batch=1000,
    reference_reset_every=2,
)
LORA = LoraConfig(rank=2, alpha=4.0)


def make_trajectories(step: int, rank: int, size: int) -> list[Trajectory]:
    """Two responses to each prompt of a trainer, without reference log-probs."""
    prompts = tiny.random_tokens(np.random.default_rng(1), [3] * PROMPTS)
    made = []
    for prompt_id, prompt in enumerate(prompts):
        rng = np.random.default_rng([step, prompt_id])
        for tokens in tiny.random_tokens(rng, [3, 5]):
            logprobs = -rng.exponential(3, len(tokens)).astype(np.float32)
            trajectory = Trajectory(
                prompt_id=prompt_id,
                prompt_tokens=prompt,
                response_tokens=tokens,
                behavior_logprobs=logprobs,
                old_logprobs=logprobs,
                reference_logprobs=np.full(len(tokens), np.nan, np.float32),
                reference_version=-1,
                reward=float(rng.normal()),
                reward_parts={"all": 1.0},
                version_start=step,
                version_end=step,
                truncated=False,
            )
            if prompt_id % size == rank:
                made.append(trajectory)
    return made


def open_trainer(
    path: str, rank: int = 0, size: int = 1, *, adapters: Path | None = None, lora: bool = False
) -> TrainerParts:
    """As train.py makes one, with a log Z head and a reference of its own; no searcher.

    Args:
        path: of the policy; the reference is the model that it began from (`base_of`).
        size: trainers; with several the policy and the reference are sharded.
        adapters: of a checkpoint, put in with `lora`.
    """
    group = dist.group.WORLD if size > 1 else None
    parts = make_parts(base_of(path))
    parts.policy = load_policy(base_of(path) if lora else path, device=CPU, dtype=torch.float32)
    if lora:
        add_adapters(parts.policy, LORA, seed=0)
        if adapters is not None:
            load_adapter(adapters, parts.policy)
    if group is not None:
        for model in (parts.policy, parts.reference):
            shard(model, group, ParallelConfig(), device=CPU)
    parts.ranks = Ranks(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, num_trainers=size
    )
    parts.group, parts.channel = group, None
    parts.objective = partial(tb_learned_z, normalize=False)
    parts.log_z_head = make_head(parts.policy.config.hidden_size)
    trained = [p for p in parts.policy.parameters() if p.requires_grad]
    parts.optimizer = torch.optim.AdamW(
        [{"params": trained}, {"params": list(parts.log_z_head.parameters()), "lr": 1e-2}],
        lr=1e-3,
        weight_decay=0.1,
        fused=True,
    )
    parts.buffer = Buffer(
        max_tokens=10_000, deduplicate=True, recency_prob=0.5, rule=uniform, seed=rank
    )
    parts.recency = lambda step: 0.5
    parts.arrivals = Arrivals(completed=np.zeros(PROMPTS, np.int64))
    return parts


def base_of(path: str) -> str:
    """The model that a run began from: a checkpoint's manifest knows."""
    manifest = Path(path) / "manifest.json"
    if not manifest.is_file():
        return path
    return json.loads(manifest.read_text())["about"]["base"]


def go_on(parts: TrainerParts, last: int) -> list[Any]:
    """Steps up to `last`: what each draws, its loss, and numbers of the process's generators."""
    seen: list[Any] = []
    for step in range(parts.first_step, last):
        ranks = parts.ranks
        take_trajectories(parts, pack(make_trajectories(step, ranks.rank, ranks.num_trainers)))
        if step and step % CFG.reference_reset_every == 0:
            reset_reference(parts, version=step)
        groups = draw(CFG, parts, 4, step)
        complete_reference(CFG, parts, groups)
        values = update_policy(CFG, parts, groups, step)
        parts.buffer.new_window()
        parts.totals.drawn += sum(len(group.items) for group in groups)
        seen.append(
            [
                [(g.prompt_id, g.items, g.uses) for g in groups],
                values["loss/total"],
                [random.random(), float(np.random.rand()), float(torch.rand(()))],
            ]
        )
    return seen


def write(parts: TrainerParts, step: int, folder: Path, base: str) -> Path:
    """A checkpoint by a real `Checkpointer`; all trainers must call it."""
    options = {"timeout_s": 60.0, "heartbeat_timeout_s": 60.0}
    several = parts.ranks.num_trainers > 1
    control = Control.start(parts.ranks, **options) if several else Control(parts.ranks, **options)
    checkpointer = Checkpointer(
        folder,
        CheckpointConfig(),
        model=parts.policy,
        tokenizer=load_tokenizer(base),
        control=control,
        about={"base": base},
    )
    checkpointer.write(state.take(parts, step), {}, due=set())
    checkpointer.wait()
    assert checkpointer.num_failed == 0
    if several:
        dist.barrier()
    control.close()
    return checkpointer.path(step)


def weights(parts: TrainerParts) -> dict[str, np.ndarray]:
    """All that training has changed, gathered: parameters, moments, reference, head."""
    found = {f"policy/{n}": full(p) for n, p in parts.policy.named_parameters()}
    found |= {f"reference/{n}": full(p) for n, p in parts.reference.named_parameters()}
    assert parts.log_z_head is not None
    named = [*parts.policy.named_parameters(), *parts.log_z_head.named_parameters()]
    for name, parameter in named:
        for entry, value in parts.optimizer.state.get(parameter, {}).items():
            found[f"{entry}/{name}"] = full(value)
    found |= {f"head/{n}": p for n, p in parts.log_z_head.named_parameters()}
    return {name: tensor.detach().numpy().copy() for name, tensor in found.items()}


def stored(parts: TrainerParts) -> list[tuple[int, bytes, int, int]]:
    """Every response of a buffer: prompt, tokens, reference version, uses."""
    arrays = parts.buffer.state_dict()["arrays"]
    ends = np.cumsum(arrays["length"])
    return [
        (int(p), arrays["tokens"][end - length : end].tobytes(), int(version), int(uses))
        for p, end, length, version, uses in zip(
            *(arrays["prompt_id"], ends, arrays["length"]),
            *(arrays["reference_version"], arrays["uses"]),
            strict=True,
        )
    ]


def counts(parts: TrainerParts) -> dict[str, Any]:
    return {
        "completed": parts.arrivals.completed.tolist(),
        "received": parts.arrivals.received,
        "generated": parts.arrivals.generated,
        "drawn": parts.totals.drawn,
        "skipped": parts.totals.skipped_steps,
        "reference_version": parts.reference_version,
        "held_out": parts.arrivals.held_out,
        "step": parts.first_step,
    }


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert np.array_equal(got[name], values), name


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# --------------------------------------------------------------------------- as many trainers


def run_straight_and_resumed(rank: int, size: int, path: str, folder: str, lora: bool) -> None:
    """Three steps, a checkpoint, three more; and from the checkpoint, the last three again."""
    seed_all(rank)
    straight = open_trainer(path, rank, size, lora=lora)
    go_on(straight, 3)
    straight.arrivals.generated, straight.totals.skipped_steps = 31, 2
    straight.arrivals.held_out = {0: {"reward": 0.25, "accuracy": float("nan")}}
    saved = write(straight, 3, Path(folder), path)
    straight.first_step = 3
    before = stored(straight), counts(straight)
    want = go_on(straight, 6)
    seed_all(rank + 99)
    adapters = saved / ADAPTER_FOLDER if lora else None
    resumed = open_trainer(str(saved), rank, size, lora=lora, adapters=adapters)
    assert is_sharded(resumed.policy) == (size > 1)
    state.restore(resumed, read_checkpoint(saved))
    assert (stored(resumed), str(counts(resumed))) == (before[0], str(before[1]))
    assert counts(resumed)["reference_version"] == 2
    assert go_on(resumed, 6) == want
    same(weights(resumed), weights(straight))
    assert stored(resumed) == stored(straight)
    for group, other in zip(
        resumed.optimizer.param_groups, straight.optimizer.param_groups, strict=True
    ):
        assert group["lr"] == other["lr"] and len(group["params"]) == len(other["params"])


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
def test_steps_and_draws_after_restoring_are_those_of_going_on(tiny_llama, tmp_path, lora) -> None:
    generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
    run_straight_and_resumed(0, 1, tiny_llama, str(tmp_path), lora)
    random.setstate(generators[0])
    np.random.set_state(generators[1])
    torch.set_rng_state(generators[2])


@pytest.mark.parametrize(
    "lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all weights", "adapters"]
)
def test_two_sharded_trainers_go_on_exactly(tiny_llama, tmp_path, lora) -> None:
    run_ranks(run_straight_and_resumed, 2, tiny_llama, str(tmp_path), lora)


# --------------------------------------------------------------------------- another number


def train_and_save(rank: int, size: int, path: str, folder: str) -> dict[str, Any]:
    parts = open_trainer(path, rank, size)
    go_on(parts, 3)
    parts.arrivals.generated = 31
    write(parts, 3, Path(folder), path)
    parts.first_step = 3
    return {"weights": weights(parts), "stored": stored(parts), "counts": counts(parts)}


def restore_and_step(rank: int, size: int, folder: str) -> dict[str, Any]:
    parts = open_trainer(folder, rank, size)
    state.restore(parts, read_checkpoint(Path(folder)))
    found = {"weights": weights(parts), "stored": stored(parts), "counts": counts(parts)}
    found["recent"] = recent(parts)
    loss = go_on(parts, 4)[0][1]
    return found | {"loss": loss}


def recent(parts: TrainerParts) -> set[int]:
    """Versions that can be drawn from the recency window."""
    copy = Buffer(max_tokens=10_000, deduplicate=True, recency_prob=1.0, rule=uniform, seed=0)
    copy.load_state_dict(parts.buffer.state_dict())
    groups = copy.draw(PROMPTS, 10)
    return {t.version_start for group in groups for t in group.trajectories}


@pytest.fixture(scope="module")
def saved_by(tiny_llama, tmp_path_factory):
    """Checkpoints of one and of two trainers, and what they held."""
    found = {}
    for size in (1, 2):
        folder = tmp_path_factory.mktemp(f"of-{size}")
        if size == 1:
            held = [train_and_save(0, 1, tiny_llama, str(folder))]
        else:
            held = run_ranks(train_and_save, 2, tiny_llama, str(folder))
        found[size] = folder / "step-3", held
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_any_number_of_trainers_goes_on(saved_by, before: int, after: int) -> None:
    folder, held = saved_by[before]
    if after == 1:
        results = [restore_and_step(0, 1, str(folder))]
    else:
        results = run_ranks(restore_and_step, after, str(folder))
    everything = Counter(item for source in held for item in source["stored"])
    assert sum(uses > 0 for _, _, _, uses in everything) > 0
    assert Counter(item for got in results for item in got["stored"]) == everything
    completed = np.sum([source["counts"]["completed"] for source in held], axis=0)
    assert completed.tolist() == [6] * PROMPTS
    for rank, got in enumerate(results):
        same(got["weights"], held[0]["weights"])
        assert got["stored"] and all(item[0] % after == rank for item in got["stored"])
        mine = [6 if p % after == rank else 0 for p in range(PROMPTS)]
        assert got["counts"]["completed"] == mine
        for counter in ("received", "drawn"):
            assert got["counts"][counter] == (
                sum(source["counts"][counter] for source in held) // after
            )
        assert got["counts"]["generated"] == 31 and got["counts"]["reference_version"] == 2
        assert got["counts"]["step"] == 3
        assert got["recent"] == {2}  # what came after the last publication
        assert np.isfinite(got["loss"]) and got["loss"] == results[0]["loss"]


# --------------------------------------------------------------------------- what does not fit


def change_tensors(change) -> Any:
    def apply(folder: Path) -> None:
        path = folder / "state" / "trainer-0.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def change_info(change) -> Any:
    def apply(folder: Path) -> None:
        path = folder / "state" / "trainer-0.json"
        info = json.loads(path.read_text())
        change(info)
        path.write_text(json.dumps(info))

    return apply


NORM = "optimizer/exp_avg/model.norm.weight"
EMBEDDING = "optimizer/exp_avg/model.embed_tokens.weight"
MISFITS = {
    "more rows": change_tensors(lambda t: t.update({EMBEDDING: torch.zeros(50, 64)})),
    "fewer rows": change_tensors(lambda t: t.update({NORM: torch.zeros(3)})),
    "other columns": change_tensors(lambda t: t.update({EMBEDDING: torch.zeros(48, 65)})),
    "no reference": change_tensors(lambda t: t.pop("reference/model.norm.weight")),
    "no counts": change_tensors(lambda t: t.pop("completed")),
    "more problems": change_tensors(lambda t: t.update(completed=torch.zeros(7, dtype=int))),
    "no buffer": change_tensors(lambda t: t.pop("buffer/tokens")),
    "no generator": change_tensors(lambda t: t.pop("generator/torch")),
    "no totals": change_info(lambda info: info["own"].pop("totals")),
    "no random": change_info(lambda info: info["random"].pop("python")),
    "no head": lambda folder: (folder / "log_z_head.safetensors").unlink(),
    "other head": lambda folder: save_file(
        {"linear.weight": torch.zeros(1, 3), "linear.bias": torch.zeros(1)},
        folder / "log_z_head.safetensors",
    ),
    "not tensors": lambda folder: (folder / "state" / "trainer-0.safetensors").write_bytes(b"x"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_an_error_that_names_the_folder(saved_by, tmp_path, name) -> None:
    """A whole checkpoint, but of a program that writes something else."""
    source = read_checkpoint(saved_by[1][0])
    folder = shutil.copytree(source.folder, tmp_path / "copy")
    MISFITS[name](folder)
    copy = Checkpoint(folder=folder, step=3, num_trainers=1, about={})
    parts = open_trainer(str(source.folder))
    with pytest.raises(ValueError, match=str(folder)):
        state.restore(parts, copy)


def test_a_reset_reference_needs_a_trainer_that_holds_it(saved_by) -> None:
    saved = read_checkpoint(saved_by[1][0])
    parts = open_trainer(str(saved.folder))
    parts.reference = None
    with pytest.raises(ValueError, match="reference_reset_every"):
        state.restore(parts, saved)


def test_responses_without_the_reference_need_a_trainer_that_holds_it(saved_by, tmp_path) -> None:
    source = read_checkpoint(saved_by[1][0])
    folder = shutil.copytree(source.folder, tmp_path / "copy")
    change_tensors(lambda t: t["buffer/reference_version"].fill_(-1))(folder)
    change_info(lambda info: info.update(reference_version=0))(folder)
    parts = open_trainer(str(source.folder))
    parts.reference = None
    with pytest.raises(ValueError, match="came without log-probs.*reference_reset_every"):
        state.restore(parts, Checkpoint(folder=folder, step=3, num_trainers=1, about={}))


def test_evaluations_under_way_are_remembered(tiny_llama, tmp_path) -> None:
    parts = open_trainer(tiny_llama)
    parts.totals.evaluations_due = {2, 3}
    assert state.take(parts, 3).info["evaluations_due"] == [2, 3]


def test_a_snapshot_is_a_copy(tiny_llama) -> None:
    parts = open_trainer(tiny_llama)
    go_on(parts, 3)
    snapshot = state.take(parts, 3)
    assert snapshot.policy is not None and snapshot.log_z_head is not None
    held = snapshot.tensors | snapshot.policy.policy | snapshot.log_z_head
    assert any(n.startswith("reference/") for n in held) and "buffer/tokens" in held
    before = {name: tensor.numpy().tobytes() for name, tensor in held.items()}
    info = json.dumps(snapshot.info)
    go_on(parts, 5)  # from step 0 on again: everything moves
    for name, tensor in held.items():
        assert tensor.numpy().tobytes() == before[name], name  # NaN too
    assert json.dumps(snapshot.info) == info
    moved = parts.policy.state_dict()
    assert not any(
        torch.equal(moved[name], values)
        for name, values in snapshot.policy.policy.items()
        if name.endswith("proj.weight")
    )


# --------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    "options",
    [{"rank": 3}, {"alpha": 5.0}, {"targets": ["q_proj"]}],
    ids=["rank", "alpha", "targets"],
)
def test_adapters_of_other_settings_are_refused(tiny_llama, tmp_path, options) -> None:
    from checkpoint import save_policy

    policy = load_policy(tiny_llama, device=CPU, dtype=torch.float32)
    add_adapters(policy, LORA, seed=0)
    tiny.perturb(policy, 0.1)
    folder = save_policy(tmp_path / "saved", policy, load_tokenizer(tiny_llama), {})
    other = load_policy(tiny_llama, device=CPU, dtype=torch.float32)
    settings = {"rank": LORA.rank, "alpha": LORA.alpha} | options
    add_adapters(other, LoraConfig(**settings), seed=1)
    with pytest.raises(ValueError, match="adapter_model.safetensors.*trainer.lora"):
        load_adapter(folder / ADAPTER_FOLDER, other)
    with pytest.raises(ValueError, match="without adapters"):
        load_adapter(folder, other)
    same_settings = load_policy(tiny_llama, device=CPU, dtype=torch.float32)
    add_adapters(same_settings, LORA, seed=1)
    load_adapter(folder / ADAPTER_FOLDER, same_settings)
    mine, theirs = dict(adapter_weights(same_settings)), dict(adapter_weights(policy))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_groups_count_where_searchers_sample_more_responses_than_before(saved_by) -> None:
    saved = read_checkpoint(saved_by[1][0])
    saved = dataclasses.replace(saved, about={**saved.about, "responses_per_prompt": 2})
    parts = open_trainer(str(saved.folder))
    state.restore(parts, saved, responses_per_prompt=5)
    assert saved.completed().max() >= 2  # or nothing is tried
    assert (parts.arrivals.completed == saved.completed() // 2 * 5).all()
