"""Publishing a sharded policy: several trainers and receivers in processes of their own."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import test_weights
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_weights import _bits, make_receiver, meet, publisher_error

import weights
from lora import LoraConfig, add_adapters
from model import load_policy
from parallel import ParallelConfig, copy_into, own_rows, shard
from shards import make_gathering_group, own_specs, plan, scratch_bytes
from weights import (
    Publisher,
    Receiver,
    TensorSpec,
    copy_weights,
    flat_bytes,
    manifest,
    named_weights,
    views,
)

CPU = torch.device("cpu")
LAST = 40
PINNED = {0, 3, 4, 17, 18, 19, LAST}
SHAPES = [(7, 5), (1,), (13,), (40, 33), (2, 3, 4)]  # some trainers hold nothing of some


class Model(torch.nn.Module):
    """Two layers of odd shapes, no forward; the values tell the version."""

    def __init__(self, version: int = 0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES) for _ in range(2)
        )
        self.rest = torch.nn.Parameter(torch.zeros(50, 3))
        fill(self, version)


def fill(model: torch.nn.Module, version: int) -> None:
    """Sharded or not; every rank makes the same values."""
    generator = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        copy_into(parameter, torch.randn(parameter.shape, generator=generator))


class Loaded:
    """What a receiver loads."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.delay_s = delay_s

    def __call__(self, tensors: Any) -> None:
        self.tensors = {}
        for name, tensor in tensors:
            self.tensors[name] = tensor.clone()
            time.sleep(self.delay_s / 11)  # the thread receives meanwhile

    def equals(self, version: int, dtype: torch.dtype) -> bool:
        want = {name: _bits(tensor.to(dtype)) for name, tensor in named_weights(Model(version))}
        return want == {name: _bits(tensor) for name, tensor in self.tensors.items()}


def make_groups(
    num_trainers: int, timeout_s: float = 20.0
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The trainers' group and that of their publishers' threads, as train.py makes them."""
    trainers = dist.new_group(list(range(num_trainers)), timeout=timedelta(seconds=timeout_s))
    return trainers, make_gathering_group(num_trainers, "gloo")


class CountingPublisher(Publisher):
    """Knows how much memory it has taken."""

    taken = 0

    def _memory(self, num_bytes: int) -> torch.Tensor:
        self.taken += num_bytes
        return super()._memory(num_bytes)


def make_publisher(
    model: torch.nn.Module, groups: tuple[Any, Any], port: int, num_workers: int, **options: Any
) -> CountingPublisher:
    options = {"bucket_bytes": 1000, "trainers": groups[0], "gathering": groups[1], **options}
    publisher = test_weights.make_publisher(
        model, port, num_workers, kind=CountingPublisher, **options
    )
    assert isinstance(publisher, CountingPublisher)
    return publisher


def sharded(model: torch.nn.Module, group: Any) -> torch.nn.Module:
    shard(model, group, ParallelConfig(), device=CPU)
    return model


# --------------------------------------------------------------------------- who holds what


@given(
    shapes=st.lists(
        st.lists(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=6
    ).filter(lambda shapes: any(np.prod(shape) for shape in shapes)),
    size=st.integers(1, 5),
    bucket_words=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None)
def test_pieces_of_all_trainers_make_the_flat_buffer(
    shapes: list[list[int]], size: int, bucket_words: int, dtype: torch.dtype
) -> None:
    bucket_bytes = 4 * bucket_words
    whole = [torch.randn(shape).to(dtype) for shape in shapes]
    specs = manifest(torch.nn.ParameterList(whole), dtype)
    flat = torch.zeros(flat_bytes(specs), dtype=torch.uint8)
    for (_, view), tensor in zip(views(flat, specs), whole, strict=True):
        view.copy_(tensor)
    pieces = plan(specs, size, bucket_bytes, len(flat))
    built = torch.zeros_like(flat)
    for rank in range(size):
        layout = own_specs(specs, rank, size)
        own = torch.full((flat_bytes(layout),), 77, dtype=torch.uint8)
        for (_, view), tensor in zip(views(own, layout), whole, strict=True):
            parts = tensor.chunk(size)
            view.copy_(parts[rank] if rank < len(parts) else tensor[:0])
        for number, bucket in enumerate(pieces):
            piece = bucket[rank]
            assert piece.stop - piece.start <= bucket_bytes + 16 * len(specs)
            sent = own[piece.start : piece.stop]
            for source, target, count in piece.copies:
                assert target + count <= bucket_bytes
                target += number * bucket_bytes
                built[target : target + count] = sent[source : source + count]
    assert torch.equal(built, flat)
    assert scratch_bytes(pieces) <= bucket_bytes + 16 * size * len(specs)


# --------------------------------------------------------------------------- what arrives


def rank_many_versions(rank: int, size: int, num_trainers: int, dtype_name: str) -> Any:
    """Publications much faster than broadcasts, trainers and receivers out of step."""
    dtype = getattr(torch, dtype_name)
    groups = make_groups(num_trainers)
    _store, port = meet(rank)
    rng = np.random.default_rng(rank)
    if rank < num_trainers:
        model = sharded(Model(), groups[0])
        publisher = make_publisher(model, groups, port, size - num_trainers, dtype=dtype)
        accepted = []
        for version in range(LAST + 1):
            fill(model, version)
            time.sleep(float(rng.choice([0.0, 0.0, 0.0, 0.005])))
            if publisher.publish(model, version, evaluate=version in PINNED, final=version == LAST):
                accepted.append(version)
        publisher.close()
        return accepted, publisher._thread.is_alive(), publisher.taken, publisher.num_bytes
    slow = rank == num_trainers
    loaded = Loaded(delay_s=0.05 if slow else 0.0)
    receiver = make_receiver(
        manifest(Model(), dtype), loaded, port, 1 + rank - num_trainers, 1 + size - num_trainers,
        bucket_bytes=1000,
    )  # fmt: skip
    seen: list[tuple[int, bool, bool]] = []
    final = False
    while not final:
        staged = receiver.staged_version
        update = receiver.take()
        if update is None:
            assert staged == -1
            time.sleep(0.001)
            continue
        assert update.version >= staged
        seen.append((update.version, update.evaluate, loaded.equals(update.version, dtype)))
        final = update.final
        if slow:
            time.sleep(float(rng.uniform(0, 0.1)))
    receiver.close(timeout_s=20)
    return seen, receiver._thread.is_alive(), receiver.staged_version


@pytest.mark.parametrize(
    ("num_trainers", "num_receivers", "dtype"),
    [(2, 1, "float32"), (3, 2, "float32"), (3, 2, "bfloat16"), (1, 1, "float32")],
)
def test_each_version_arrives_whole_and_in_order(
    num_trainers: int, num_receivers: int, dtype: str
) -> None:
    """Bit for bit that version's parameters on all trainers; pinned ones at every receiver."""
    size = num_trainers + num_receivers
    results = run_ranks(rank_many_versions, size, num_trainers, dtype)
    trainers, receivers = results[:num_trainers], results[num_trainers:]
    accepted = trainers[0][0]
    assert accepted[-1] == LAST and set(accepted) >= PINNED
    for got, alive, taken, num_bytes in trainers:
        assert got == accepted and not alive
        if num_trainers > 1:  # two snapshots of its rows; 3 buckets at the first trainer
            assert taken < 2 * 1.1 * num_bytes / num_trainers + 2 * 1000 + 1500
    for seen, alive, staged in receivers:
        versions = [version for version, _, _ in seen]
        assert versions == sorted(set(versions)) and set(versions) <= set(accepted)
        assert {version for version, evaluate, _ in seen if evaluate} == PINNED
        assert all(right for _, _, right in seen), seen
        assert not alive and staged == -1
        assert len(versions) < len(accepted), "nothing was replaced"


def rank_adapters(rank: int, size: int, path: str) -> dict[str, Any] | None:
    """A policy with adapters, sharded over all ranks but the last, and what arrives of it."""
    num_trainers = size - 1
    groups = make_groups(num_trainers)
    _store, port = meet(rank)
    policy = load_policy(path, device=CPU, dtype=torch.float32)
    plain = manifest(policy, torch.float32)
    add_adapters(policy, LoraConfig(rank=4, alpha=6.0), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    want = {name: weight.numpy().copy() for name, weight in named_weights(policy)}
    if rank < num_trainers:
        sharded(policy, groups[0])
        publisher = make_publisher(policy, groups, port, 1, bucket_bytes=1 << 14)
        publisher.publish(policy, 0)
        publisher.close()
        return None
    loaded = Loaded()
    receiver = make_receiver(plain, loaded, port, 1, 2, bucket_bytes=1 << 14)
    receiver.take(wait_for=0, timeout_s=20)
    receiver.close()
    got = {name: tensor.numpy() for name, tensor in loaded.tensors.items()}
    assert got.keys() == want.keys()
    return {name: float(np.abs(got[name] - want[name]).max()) for name in want}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])  # GPT-2 keeps its weights transposed
def test_adapters_of_a_sharded_policy_arrive_merged(tiny_models: dict[str, str], kind: str) -> None:
    gaps = run_ranks(rank_adapters, 4, tiny_models[kind])[-1]
    assert max(gaps.values()) < 1e-6
    assert all(gap == 0 for name, gap in gaps.items() if "norm" in name or "embed" in name)


def rank_rows(rank: int, size: int) -> bool:
    model = sharded(Model(5), make_groups(size)[0])
    layout = own_specs(manifest(model, torch.float32), rank, size)
    own = torch.zeros(flat_bytes(layout), dtype=torch.uint8)
    copy_weights(model, views(own, layout))
    return all(
        torch.equal(view, whole[own_rows(parameter)])
        for (_, view), parameter, whole in zip(
            views(own, layout), model.parameters(), Model(5).parameters(), strict=True
        )
    )


def test_a_snapshot_is_this_ranks_rows_without_communication() -> None:
    assert run_ranks(rank_rows, 3) == [True] * 3


# --------------------------------------------------------------------------- what goes wrong


def rank_victim(
    rank: int, size: int, num_trainers: int, victim: int, sending: bool
) -> tuple[str, float]:
    groups = make_groups(num_trainers, timeout_s=3.0)
    _store, port = meet(rank)
    if rank < num_trainers:
        model = sharded(Model(), groups[0])
        publisher = make_publisher(model, groups, port, size - num_trainers, timeout_s=3.0)
        publisher.publish(model, 0)
    else:
        receiver = make_receiver(
            manifest(Model(), torch.float32), Loaded(), port, 1 + rank - num_trainers,
            1 + size - num_trainers, bucket_bytes=1000,
        )  # fmt: skip
        receiver.take(wait_for=0, timeout_s=20)
    dist.barrier()
    if rank == victim and sending:
        weights.send_pieces = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    elif rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if rank < num_trainers:
        error = publisher_error(publisher, model)
    else:
        error = receiver_error(receiver) if sending or victim == rank else "not asked"
    return error, time.monotonic() - start


def receiver_error(receiver: Receiver) -> str:
    deadline = time.monotonic() + 15
    try:
        while time.monotonic() < deadline:
            if receiver.staged_version >= 0:
                receiver.take()
            time.sleep(0.02)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("victim", "sending"), [(1, False), (1, True), (2, True), (3, False)])
def test_a_dead_rank_is_an_error_at_every_other(victim: int, sending: bool) -> None:
    """Of trainers 0 to 2 and a receiver; of a trainer between broadcasts, only trainers know."""
    results = run_ranks(rank_victim, 4, 3, victim, sending, may_die=[victim])
    for rank, result in enumerate(results):
        if rank != victim:
            error, seconds = result
            assert error, f"rank {rank} noticed nothing"
            assert seconds < 10


def rank_unequal_snapshots(rank: int, size: int) -> list[bool] | None:
    """Trainer 1 copies slowly: its thread must wait for the copy that trainer 0 has named."""
    groups = make_groups(2)
    _store, port = meet(rank)
    if rank < 2:
        model = sharded(Model(), groups[0])
        publisher = make_publisher(model, groups, port, 1)
        if rank == 1:

            def slowly(*args: Any, copy: Any = weights.copy_weights) -> None:
                time.sleep(0.1)
                copy(*args)

            weights.copy_weights = slowly
        for version in range(6):
            fill(model, version)
            publisher.publish(model, version, evaluate=True)
        publisher.close()
        return None
    loaded = Loaded()
    receiver = make_receiver(
        manifest(Model(), torch.float32), loaded, port, 1, 2, bucket_bytes=1000
    )
    right = []
    for version in range(6):
        assert receiver.take(wait_for=version, timeout_s=20).version == version
        right.append(loaded.equals(version, torch.float32))
    receiver.close()
    return right


def test_a_trainer_that_copies_slowly_sends_the_named_version() -> None:
    assert run_ranks(rank_unequal_snapshots, 3)[-1] == [True] * 6


def test_layout_of_own_rows() -> None:
    specs = [
        TensorSpec("a", (5, 3), "torch.float32", 0),
        TensorSpec("b", (2,), "torch.float32", 64),
    ]
    assert [(s.shape, s.offset) for s in own_specs(specs, 0, 3)] == [((2, 3), 0), ((1,), 32)]
    assert [(s.shape, s.offset) for s in own_specs(specs, 2, 3)] == [((1, 3), 0), ((0,), 16)]
