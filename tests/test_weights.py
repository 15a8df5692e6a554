"""Weights on the wire: one publisher and several receivers in processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

import weights
from engine import expected_manifest
from model import load_policy, response_logprobs
from weights import (
    Publisher,
    Receiver,
    TensorSpec,
    check_manifest,
    checksum,
    flat_bytes,
    manifest,
    named_weights,
    views,
)

CPU = torch.device("cpu")
SHAPES = {"odd": (7, 5), "scalar": (), "one": (1,), "vector": (13,), "matrix": (40, 33)}
SMALL_BUCKETS = 100  # bytes: many buckets, none a whole number of aligned tensors


class Weights(torch.nn.Module):
    """Parameters of odd shapes, no forward; the values tell the version."""

    def __init__(self, version: int = 0) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.fill(version)

    @torch.no_grad()
    def fill(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.vector[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
        self.matrix[0, 0] = version


class Loaded:
    """What a receiver loads: copies by name, compared bit for bit with those of a version."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def __call__(self, weights) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in weights}

    def equals(self, version: int) -> bool:
        return self.tensors.keys() == SHAPES.keys() and all(
            _bits(self.tensors[name]) == _bits(parameter.to(self.tensors[name].dtype))
            for name, parameter in named_weights(Weights(version))
        )


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def meet(rank: int) -> tuple[dist.Store | None, int]:
    """Rank 0 hosts a store on a free port and tells the others."""
    store = None
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast(port, 0)
    return store, int(port)


def make_publisher(
    model: torch.nn.Module,
    port: int,
    num_workers: int,
    *,
    kind: type[Publisher] | None = None,
    dtype: torch.dtype = torch.float32,
    bucket_bytes: int = 1 << 20,
    timeout_s: float = 20.0,
    meeting_timeout_s: float = 20.0,
    **options: Any,
) -> Publisher:
    return (kind or weights.Publisher)(
        model,
        host="127.0.0.1",
        port=port,
        num_workers=num_workers,
        dtype=dtype,
        backend="gloo",
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        meeting_timeout_s=meeting_timeout_s,
        **options,
    )


def make_receiver(
    expected: list[TensorSpec],
    load: Callable,
    port: int,
    rank: int,
    size: int,
    *,
    bucket_bytes: int = 1 << 20,
) -> Receiver:
    return Receiver(
        expected,
        load,
        host="127.0.0.1",
        port=port,
        rank=rank,
        size=size,
        backend="gloo",
        bucket_bytes=bucket_bytes,
        timeout_s=20.0,
        device=CPU,
    )


def start_receiver(rank: int, size: int, port: int) -> tuple[Receiver, Loaded]:
    loaded = Loaded()
    return make_receiver(manifest(Weights(), torch.float32), loaded, port, rank, size), loaded


# --------------------------------------------------------------------------- what arrives


def rank_bit_for_bit(
    rank: int, size: int, dtype_name: str, bucket_bytes: int
) -> list[tuple[int, bool, dict]] | None:
    dtype = getattr(torch, dtype_name)
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1, dtype=dtype, bucket_bytes=bucket_bytes)
        for version in range(4):
            model.fill(version)
            publisher.publish(model, version, meta={"step": version, "text": "é"})
            dist.barrier()  # all have taken it
        publisher.close()
        return None
    loaded = Loaded()
    expected = manifest(Weights(), dtype)[::-1]  # another order: names decide
    receiver = make_receiver(expected, loaded, port, rank, size, bucket_bytes=bucket_bytes)
    seen = []
    for version in range(4):
        update = receiver.take(wait_for=version, timeout_s=20)
        right_dtype = all(tensor.dtype == dtype for tensor in loaded.tensors.values())
        recent = time.time() - 20 < update.meta.pop("published_at") < time.time()
        right = loaded.equals(version) and right_dtype and recent
        seen.append((update.version, right, update.meta))
        dist.barrier()
    receiver.close()
    return seen


@pytest.mark.parametrize("num_receivers", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [SMALL_BUCKETS, 1 << 20])
def test_tensors_arrive_bit_for_bit(num_receivers: int, dtype: str, bucket_bytes: int) -> None:
    results = run_ranks(rank_bit_for_bit, 1 + num_receivers, dtype, bucket_bytes)
    for seen in results[1:]:
        assert seen == [(v, True, {"step": v, "text": "é"}) for v in range(4)]


def rank_tied_model(rank: int, size: int, path: str) -> list[float]:
    """Log-probs of a receiver's copy after an update, and the publisher's own."""
    _store, port = meet(rank)
    model = load_policy(path, device=CPU, dtype=torch.float32)
    if rank == 0:
        torch.manual_seed(3)
        tiny.perturb(model)
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0)
        publisher.close()
    else:

        def load(tensors) -> None:
            mine = dict(named_weights(model))
            with torch.no_grad():
                for name, tensor in tensors:
                    mine[name].copy_(tensor)

        receiver = make_receiver(expected_manifest(path, torch.float32), load, port, rank, size)
        receiver.take(wait_for=0, timeout_s=20)
        receiver.close()
    rng = np.random.default_rng(0)
    tokens = tiny.random_tokens(rng, [5]), tiny.random_tokens(rng, [8])
    return response_logprobs(model, *tokens, temperature=1.0).tolist()


def test_a_tied_model_stays_tied(tiny_llama: str) -> None:
    published, received = run_ranks(rank_tied_model, 2, tiny_llama)
    assert received == published


# --------------------------------------------------------------------------- which version arrives


def rank_newest_wins(rank: int, size: int) -> tuple:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0)
        dist.barrier()
        seconds = []
        for version in range(1, 31):
            model.fill(version)
            start = time.monotonic()
            assert publisher.publish(model, version)
            seconds.append(time.monotonic() - start)
            time.sleep(0.01)
        dist.barrier()
        publisher.close()
        return (max(seconds),)
    receiver, loaded = start_receiver(rank, size, port)
    receiver.take(wait_for=0, timeout_s=20)
    dist.barrier()
    if rank == 1:  # slow: does not take while 30 versions go by
        dist.barrier()
        time.sleep(0.5)
        update = receiver.take()
        seen = [(update.version, loaded.equals(update.version))]
    else:  # quick: takes as they come
        seen = []
        while receiver.version < 30:
            if (update := receiver.take()) is not None:
                seen.append((update.version, loaded.equals(update.version)))
        dist.barrier()
    nothing_more = receiver.take() is None
    receiver.close()
    return seen, nothing_more


def test_a_slow_receiver_skips_to_the_newest_version() -> None:
    (slowest,), (slow, slow_done), (quick, quick_done) = run_ranks(rank_newest_wins, 3)
    assert slowest < 0.5
    assert slow == [(30, True)] and slow_done
    versions = [version for version, _ in quick]
    assert versions == sorted(set(versions)) and versions[-1] == 30 and len(versions) > 3
    assert all(right for _, right in quick) and quick_done


def rank_publisher_does_not_wait(rank: int, size: int) -> tuple:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0, evaluate=True)
        dist.barrier()
        start = time.monotonic()
        for version in range(1, 6):
            model.fill(version)
            publisher.publish(model, version)
            time.sleep(0.02)
        seconds = time.monotonic() - start
        publisher.close()
        return (seconds,)
    receiver, loaded = start_receiver(rank, size, port)
    dist.barrier()
    time.sleep(1.5)  # version 0 is pinned and not taken: the thread receives nothing new
    first = receiver.take(wait_for=0, timeout_s=20)
    right = loaded.equals(0)
    second = receiver.take(wait_for=5, timeout_s=20)
    receiver.close()
    return first.version, first.evaluate, right, second.version, loaded.equals(5)


def test_publish_returns_while_a_receiver_sleeps_on_a_pinned_version() -> None:
    (seconds,), taken = run_ranks(rank_publisher_does_not_wait, 2)
    assert seconds < 1.0
    assert taken == (0, True, True, 5, True)


class HeldBackPublisher(Publisher):
    """Sends the last bucket of a version from 2 on when it is told to."""

    begun, go_on = threading.Event(), threading.Event()

    def _buckets_of(self, snapshot):
        buckets = list(super()._buckets_of(snapshot))
        for bucket in buckets:
            if bucket is buckets[-1] and snapshot.version > 1:
                self.begun.set()
                assert self.go_on.wait(20)
            yield bucket


def rank_under_way(rank: int, size: int) -> tuple | None:
    _store, port = meet(rank)
    if rank == 0:
        weights.Publisher = HeldBackPublisher
        model = Weights()
        publisher = make_publisher(model, port, 1, bucket_bytes=SMALL_BUCKETS)
        for version in range(3):
            model.fill(version)
            publisher.publish(model, version)
            if version < 2:
                dist.barrier()  # it has arrived
        assert publisher.begun.wait(20)
        dist.barrier()  # version 2 is under way
        dist.barrier()  # all have looked
        publisher.go_on.set()
        publisher.close()
        return None
    loaded = Loaded()
    expected = manifest(Weights(), torch.float32)
    receiver = make_receiver(expected, loaded, port, rank, size, bucket_bytes=SMALL_BUCKETS)
    for version in range(2):
        while receiver.staged_version < version:
            time.sleep(0.01)
        dist.barrier()
    dist.barrier()
    start = time.monotonic()
    staged = [receiver.staged_version]
    first = receiver.take()
    right = loaded.equals(1)
    staged.append(receiver.staged_version)
    second = receiver.take()
    seconds = time.monotonic() - start
    dist.barrier()
    third = receiver.take(wait_for=2, timeout_s=20)
    receiver.close()
    return staged, first.version, right, second, seconds, third.version, loaded.equals(2)


def test_take_does_not_wait_for_a_broadcast_under_way() -> None:
    """The complete version is loaded while the next one fills the other buffer."""
    staged, first, right, second, seconds, third, right_again = run_ranks(rank_under_way, 2)[1]
    assert staged == [1, -1]
    assert (first, right, second, third, right_again) == (1, True, None, 2, True)
    assert seconds < 1


PINNED = {3, 4, 9, 15}
LAST = 20


def rank_pinned(rank: int, size: int) -> list:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        accepted = []
        for version in range(LAST + 1):
            model.fill(version)
            if publisher.publish(model, version, evaluate=version in PINNED, final=version == LAST):
                accepted.append(version)
            time.sleep(0.01)
        publisher.close()
        return accepted
    receiver, loaded = start_receiver(rank, size, port)
    rng = np.random.default_rng(rank)
    seen: list[tuple[int, bool, bool]] = []
    final = False
    while not final:
        time.sleep(float(rng.uniform(0, 0.08)))  # a generation
        if (update := receiver.take()) is not None:
            seen.append((update.version, update.evaluate, loaded.equals(update.version)))
            final = update.final
    receiver.close()
    return seen


def test_pinned_versions_are_never_skipped_and_order_is_kept() -> None:
    accepted, *receivers = run_ranks(rank_pinned, 4)
    assert {*PINNED, LAST} <= set(accepted)
    for seen in receivers:
        versions = [version for version, _, _ in seen]
        assert versions == sorted(set(versions)) and set(versions) <= set(accepted)
        assert {version for version, evaluate, _ in seen if evaluate} == PINNED
        assert versions[-1] == LAST
        assert all(right for _, _, right in seen)


def rank_pinned_then_wait_for_newer(rank: int, size: int) -> list[int] | None:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0, evaluate=True)
        while not publisher.publish(model, 1):
            time.sleep(0.01)  # version 0 has not left yet
        publisher.close()
        return None
    receiver, _ = start_receiver(rank, size, port)
    time.sleep(0.5)
    versions = [receiver.take(wait_for=1, timeout_s=3).version]
    if versions[0] == 0:
        versions.append(receiver.take(wait_for=1, timeout_s=3).version)
    receiver.close()
    return versions


def test_waiting_for_a_newer_version_first_gives_the_pinned_one() -> None:
    """It must not wait for what the pinned version itself holds back."""
    assert run_ranks(rank_pinned_then_wait_for_newer, 2)[1] == [0, 1]


def rank_wait_in_vain(rank: int, size: int) -> tuple | None:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0)
        dist.barrier()
        publisher.close()
        return None
    receiver, _ = start_receiver(rank, size, port)
    receiver.take(wait_for=0, timeout_s=20)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="version 7 has not come within 1 s"):
        receiver.take(wait_for=7, timeout_s=1)
    seconds = time.monotonic() - start
    dist.barrier()
    receiver.close()
    return seconds, receiver.take()


def test_waiting_for_a_version_has_a_limit() -> None:
    seconds, after = run_ranks(rank_wait_in_vain, 2)[1]
    assert 1.0 <= seconds < 2.0
    assert after is None


# --------------------------------------------------------------------------- what goes wrong


def rank_mismatch(rank: int, size: int, kind: str) -> str:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        return publisher_error(publisher, model)
    expected = manifest(Weights(), torch.float32)
    first = expected[0]
    shape, dtype, name = first.shape, first.dtype, first.name
    if kind == "shape":
        shape = shape[::-1]
    elif kind == "dtype":
        dtype = "torch.bfloat16"
    else:
        name = "lm_head.weight"
    expected[0] = TensorSpec(name, shape, dtype, first.offset)
    receiver = make_receiver(expected, Loaded(), port, rank, size)
    try:
        receiver.take(wait_for=0, timeout_s=10)
    except RuntimeError as error:
        return str(error)
    return ""


def publisher_error(publisher: Publisher, model: torch.nn.Module) -> str:
    """Publishes until it is told that nobody receives."""
    try:
        for version in range(100):
            publisher.publish(model, version)
            time.sleep(0.1)
        publisher.close()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["name", "shape", "dtype"])
def test_a_tensor_that_does_not_fit_is_named_at_the_engine(kind: str) -> None:
    at_publisher, at_receiver = run_ranks(rank_mismatch, 2, kind)
    assert ("lm_head.weight" if kind == "name" else "odd") in at_receiver
    assert "publishing weights failed" in at_publisher


def test_check_manifest_names_the_tensor() -> None:
    specs = manifest(Weights(), torch.float32)
    check_manifest(specs, specs)
    check_manifest(specs[::-1], specs)
    with pytest.raises(ValueError, match=r"does not publish 'matrix' \(1 missing\)"):
        check_manifest([s for s in specs if s.name != "matrix"], specs)
    with pytest.raises(ValueError, match=r"has no 'matrix' \(1 too many\)"):
        check_manifest(specs, [s for s in specs if s.name != "matrix"])
    with pytest.raises(ValueError, match=r"'odd' is torch.float32\[7, 5\] at the trainer"):
        check_manifest(
            specs, [TensorSpec("odd", (5, 7), s.dtype, 0) if s.name == "odd" else s for s in specs]
        )
    with pytest.raises(ValueError, match=r"torch.bfloat16\[7, 5\] at the engine"):
        check_manifest(specs[:1], manifest(Weights(), torch.bfloat16)[:1])


def rank_corrupted(rank: int, size: int) -> tuple[int, str] | None:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0)
        dist.barrier()
        publisher.publish(model, 1)
        dist.barrier()
        return None
    receiver, _ = start_receiver(rank, size, port)
    loaded = receiver.take(wait_for=0, timeout_s=20).version

    class AfterAFlippedBit(weights.Checksum):
        def add(self, bucket):
            bucket[1234] ^= 16
            super().add(bucket)

    weights.Checksum = AfterAFlippedBit
    dist.barrier()
    try:
        receiver.take(wait_for=1, timeout_s=10)
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    dist.barrier()
    return loaded, error


def test_a_flipped_bit_is_found_by_the_checksum() -> None:
    loaded, error = run_ranks(rank_corrupted, 2)[1]
    assert loaded == 0
    assert "checksum of version 1 is" in error


def rank_killed(rank: int, size: int, victim: int, closing: bool) -> tuple[str, float] | str:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1, timeout_s=5.0)
        publisher.publish(model, 0)
        wait_until_dead(int(_store.get("victim")))
        start = time.monotonic()
        if closing:
            try:
                publisher.close()
                error = ""
            except RuntimeError as raised:
                error = str(raised)
        else:
            error = publisher_error(publisher, model)
        return error, time.monotonic() - start
    receiver, _ = start_receiver(rank, size, port)
    receiver.take(wait_for=0, timeout_s=20)
    if rank == victim:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store.set("victim", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + (0.5 if closing else 10.0)
    while time.monotonic() < deadline:
        try:
            receiver.take()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.05)
    return ""


def wait_until_dead(pid: int) -> None:
    while weights.process_is_alive(pid):
        time.sleep(0.02)


@pytest.mark.parametrize(("num_receivers", "victim"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_a_killed_receiver_makes_publish_raise_within_seconds(
    num_receivers: int, victim: int
) -> None:
    """And no other receiver waits for ever for what the dead one should have passed on."""
    results = run_ranks(rank_killed, 1 + num_receivers, victim, False, may_die=[victim])
    error, seconds = results[0]
    assert "publishing weights failed" in error
    assert seconds < 4
    survivors = [results[rank] for rank in range(1, 1 + num_receivers) if rank != victim]
    assert all("receiving weights failed" in error for error in survivors), survivors


@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_killed_receiver_does_not_hang_close(victim: int) -> None:
    results = run_ranks(rank_killed, 4, victim, True, may_die=[victim])
    error, seconds = results[0]
    assert not error or "publishing weights failed" in error  # the last header may still leave
    assert seconds < 4


def rank_never_comes(rank: int, size: int) -> tuple[bool, str, float] | None:
    _store, port = meet(rank)
    if rank:
        return None
    model = Weights()
    start = time.monotonic()
    publisher = make_publisher(model, port, 1, meeting_timeout_s=1.0)
    published = publisher.publish(model, 0)
    error = publisher_error(publisher, model)
    return published, error, time.monotonic() - start


def test_a_receiver_that_never_comes_is_an_error_after_the_meeting_time() -> None:
    published, error, seconds = run_ranks(rank_never_comes, 2)[0]
    assert published and "publishing weights failed" in error
    assert seconds < 5


def rank_clean_close(rank: int, size: int) -> tuple[bool, list[int]]:
    _store, port = meet(rank)
    if rank == 0:
        model = Weights()
        publisher = make_publisher(model, port, size - 1)
        publisher.publish(model, 0)
        publisher.publish(model, 1, final=True)
        publisher.close()  # sends what waits, then ends
        return publisher._thread.is_alive(), []
    receiver, _ = start_receiver(rank, size, port)
    time.sleep(0.3 * rank)
    versions = [receiver.take(wait_for=1, timeout_s=20).version]
    receiver.close(timeout_s=20)
    return receiver._thread.is_alive(), versions


def test_close_delivers_what_waits_and_ends_every_thread() -> None:
    results = run_ranks(rank_clean_close, 3)
    assert results[0] == (False, [])
    assert results[1:] == [(False, [1])] * 2


# --------------------------------------------------------------------------- layout and checksum


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_tensors_are_aligned_and_never_overlap(shapes: list[list[int]], dtype: torch.dtype) -> None:
    model = torch.nn.ParameterList([torch.zeros(shape) for shape in shapes])
    specs = manifest(model, dtype)
    flat = torch.zeros(flat_bytes(specs), dtype=torch.uint8)
    assert len(flat) % 16 == 0
    for i, (_, view) in enumerate(views(flat, specs)):
        assert view.dtype == dtype and list(view.shape) == shapes[i]
        view.fill_(i + 1)
    for i, (_, view) in enumerate(views(flat, specs)):
        assert bool((view == i + 1).all())


LONG = 3 * weights._SUM_WORDS + 5  # words: whole rows of the checksum, and a part of one


def random_words(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (LONG,), dtype=torch.int32, generator=generator)


def sum_of(words: torch.Tensor, bucket_bytes: int = 1 << 24) -> int:
    return checksum(words.view(torch.uint8), bucket_bytes)


places = st.integers(0, LONG - 1)


@given(place=places, bit=st.integers(0, 31), bucket_bytes=st.sampled_from([20000, 1 << 24]))
def test_checksum_notices_every_single_bit(place: int, bit: int, bucket_bytes: int) -> None:
    words = random_words()
    before = sum_of(words, bucket_bytes)
    words.view(torch.uint8)[4 * place + bit // 8] ^= 1 << bit % 8
    assert sum_of(words, bucket_bytes) != before
    assert 0 <= before < 1 << 63


@given(i=places, j=places, a=st.integers(-(2**31), 2**31 - 1), b=st.integers(-(2**31), 2**31 - 1))
def test_checksum_notices_swapped_words(i: int, j: int, a: int, b: int) -> None:
    words = random_words()
    words[i], words[j] = a, b
    swapped = words.clone()
    swapped[i], swapped[j] = words[j], words[i]
    assert (sum_of(words) == sum_of(swapped)) == torch.equal(words, swapped)


@pytest.mark.parametrize("size", [64, weights._SUM_WORDS, weights._SUM_ROWS * weights._SUM_WORDS])
def test_checksum_notices_swapped_tensors(size: int) -> None:
    """Of any size: parts of a row, whole rows, whole parts of a bucket and whole buckets."""
    a, b = torch.randn(size), torch.randn(size)
    one, two = (torch.cat(pair).view(torch.uint8) for pair in ((a, b), (b, a)))
    for bucket_bytes in (4 * size, 1 << 24):
        assert checksum(one, bucket_bytes) != checksum(two, bucket_bytes)


def test_meeting_over_a_store_takes_any_timeout() -> None:
    """A store's client only needs the host's port; a wrong one is an error in time."""
    start = time.monotonic()
    with pytest.raises((RuntimeError, dist.DistError)):
        weights.Meeting("127.0.0.1", 1, 1, 2, backend="gloo", timeout_s=1.0)
    assert time.monotonic() - start < 10
    assert weights.FOREVER > timedelta(days=365)
