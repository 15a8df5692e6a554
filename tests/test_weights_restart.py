"""Engine workers that die and are replaced: trainer 0 and all others meet again, nothing is lost.

Publishers and receivers in processes of their own, over gloo, without an engine.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import test_shards
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_shards import Loaded, Model, fill, make_groups, sharded
from test_weights import CPU, meet, wait_until_dead

import weights
from meeting import Meeting, count_restart
from weights import Receiver, manifest

PINNED = 3
KEPT: list[dist.Store | None] = []
PATIENCE = timedelta(seconds=30)


def open_store(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


class Dying(weights.Checksum):
    """Ends its process in the middle of a version."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def add(self, bucket: torch.Tensor) -> None:
        self._count += 1
        if self._count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().add(bucket)


def rank_replaced(
    rank: int, size: int, num_trainers: int, victims: list[int], busy: bool
) -> list[tuple[int, bool, bool]] | None:
    """Trainers, receivers, and last as many processes that take the victims' places.

    Args:
        victims: members of the weights' group: 0 is trainer 0.
        busy: they die in the middle of a version while others are published, not between two.
    """
    groups = make_groups(num_trainers) if num_trainers > 1 else (None, None)
    server, port = meet(rank)
    KEPT.append(server)  # it outlives this function: others end later
    store = open_store(port)
    num_receivers = size - num_trainers - len(victims)
    if rank < num_trainers:
        publish_all(store, port, groups, num_receivers, victims, busy)
        return None
    member = 1 + rank - num_trainers
    if member <= num_receivers:
        receiver, loaded = start(port, member, num_receivers)
        if member in victims:
            receiver.take(wait_for=0, timeout_s=20)
            store.set(f"dies/{member}", str(os.getpid()))
            if busy:
                weights.Checksum = Dying
            store.set(f"taken/{member}", "1")
            if busy:
                time.sleep(30)
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        member = victims[member - num_receivers - 1]
        wait_until_dead(int(store.get(f"dies/{member}")))
        time.sleep(0.2 * victims.index(member))  # the others are meeting without this one
        count_restart("127.0.0.1", port, timeout_s=20)
        receiver, loaded = start(port, member, num_receivers)
    return take_all(store, receiver, loaded, member)


def start(port: int, member: int, num_receivers: int) -> tuple[Receiver, Loaded]:
    loaded = Loaded()
    receiver = Receiver(
        manifest(Model(), torch.float32),
        loaded,
        host="127.0.0.1",
        port=port,
        rank=member,
        size=1 + num_receivers,
        backend="gloo",
        bucket_bytes=1000,
        timeout_s=20.0,
        device=CPU,
        restart_timeout_s=20.0,
    )
    return receiver, loaded


def publish_all(
    store: dist.TCPStore,
    port: int,
    groups: tuple[Any, Any],
    num_receivers: int,
    victims: list[int],
    busy: bool,
) -> None:
    model = Model() if groups[0] is None else sharded(Model(), groups[0])
    publisher = test_shards.make_publisher(
        model, groups, port, num_receivers, restart_timeout_s=20.0
    )
    publisher.publish(model, 0, evaluate=True)
    store.wait([f"taken/{member}" for member in range(1, 1 + num_receivers)], PATIENCE)
    replaced = [f"replaced/{member}" for member in victims]
    version = 0
    while busy and not together(store.check(replaced), groups[0]):
        version += 1
        fill(model, version)
        publisher.publish(model, version, evaluate=version == PINNED)
        time.sleep(0.02)
    store.wait(replaced, PATIENCE)
    fill(model, version + 1)
    publisher.publish(model, version + 1, final=True)
    publisher.close()
    assert not publisher._thread.is_alive()


def together(value: bool, group: Any) -> bool:
    """What trainer 0 says."""
    answer = torch.tensor(int(value))
    if group is not None:
        dist.broadcast(answer, group=group, group_src=0)
    return bool(answer)


def take_all(
    store: dist.TCPStore, receiver: Receiver, loaded: Loaded, member: int
) -> list[tuple[int, bool, bool]]:
    seen: list[tuple[int, bool, bool]] = []
    final = False
    while not final:
        update = receiver.take()
        if update is None:
            time.sleep(0.002)
            continue
        right = loaded.equals(update.version, torch.float32)
        seen.append((update.version, update.evaluate, right))
        final = update.final
        store.set(f"taken/{member}", "1")
        store.set(f"replaced/{member}", "1")
    assert receiver.close(timeout_s=20)
    return seen


CASES = [
    pytest.param(1, 1, [1], id="alone"),
    pytest.param(1, 3, [1], id="tree-1"),
    pytest.param(1, 3, [2], id="tree-2"),
    pytest.param(1, 3, [3], id="tree-3"),
    pytest.param(1, 3, [1, 3], id="two"),
    pytest.param(2, 2, [2], id="sharded"),
]


def run_case(num_trainers: int, num_receivers: int, victims: list[int], busy: bool) -> Any:
    begun = time.monotonic()
    size = num_trainers + num_receivers + len(victims)
    dead = [num_trainers + member - 1 for member in victims]
    results = run_ranks(
        rank_replaced, size, num_trainers, victims, busy, may_die=dead, timeout_s=90.0
    )
    assert time.monotonic() - begun < 15, "somebody has waited for what does not come"
    first = num_trainers + num_receivers
    survivors = [results[rank] for rank in range(num_trainers, first) if rank not in dead]
    return survivors, results[first:]


@pytest.mark.parametrize(("num_trainers", "num_receivers", "victims"), CASES)
def test_between_two_versions(num_trainers: int, num_receivers: int, victims: list[int]) -> None:
    """The last version comes again, flags and all, to new ones alone."""
    survivors, replacements = run_case(num_trainers, num_receivers, victims, busy=False)
    for seen in [*survivors, *replacements]:
        assert seen == [(0, True, True), (1, False, True)]


@pytest.mark.parametrize(("num_trainers", "num_receivers", "victims"), CASES)
def test_in_the_middle_of_a_version(
    num_trainers: int, num_receivers: int, victims: list[int]
) -> None:
    """Others get every version once, in order and whole, and none that is pinned is lost."""
    survivors, replacements = run_case(num_trainers, num_receivers, victims, busy=True)
    for seen in [*survivors, *replacements]:
        versions = [version for version, _, _ in seen]
        assert versions == sorted(set(versions)) and all(right for _, _, right in seen)
    for seen in survivors:
        assert {version for version, evaluate, _ in seen if evaluate} == {0, PINNED}


def rank_published_meanwhile(rank: int, size: int) -> list[tuple[int, bool, bool]] | None:
    server, port = meet(rank)
    KEPT.append(server)
    store = open_store(port)
    if rank == 0:
        model = Model()
        publisher = test_shards.make_publisher(model, (None, None), port, 1, restart_timeout_s=20.0)
        for version, key in ((0, "taken/0"), (1, "dies/1")):
            fill(model, version)
            publisher.publish(model, version, evaluate=version == 1)
            store.wait([key], PATIENCE)
        wait_until_dead(int(store.get("dies/1")))
        for version in (2, 3):
            fill(model, version)
            assert publisher.publish(model, version, final=version == 3)
            time.sleep(0.3)  # the thread begins to send it
        store.set("published", "1")
        publisher.close()
        return None
    if rank == 1:
        receiver, _ = start(port, 1, 1)
        receiver.take(wait_for=0, timeout_s=20)
        store.set("taken/0", "1")
        receiver.take(wait_for=1, timeout_s=20)
        store.set("dies/1", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["published"], PATIENCE)
    count_restart("127.0.0.1", port, timeout_s=20)
    receiver, loaded = start(port, 1, 1)
    return take_all(store, receiver, loaded, 1)


def test_what_is_published_meanwhile_leaves_the_pinned_version_alone() -> None:
    """A version that is to be evaluated comes again, however many newer ones have failed."""
    seen = run_ranks(rank_published_meanwhile, 3, may_die=[1])[2]
    assert seen == [(1, True, True), (3, False, True)]


def rank_nobody_comes(rank: int, size: int) -> tuple[str, float] | None:
    _store, port = meet(rank)
    if rank == 2:
        start(port, rank, 2)
        open_store(port).set("dies/2", str(os.getpid()))
        open_store(port).get("met")
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    meeting = Meeting(
        "127.0.0.1", port, rank, size, backend="gloo", timeout_s=5.0, restart_timeout_s=1.0
    )
    group = meeting.join()
    if rank == 0:
        open_store(port).set("met", "1")
    wait_until_dead(int(open_store(port).get("dies/2")))
    del group
    assert not meeting.wait_for_restart()
    waited_s = time.monotonic() - begun
    open_store(port).set(f"waited/{rank}", "1")
    open_store(port).wait(["waited/0", "waited/1"], PATIENCE)
    if rank == 0:
        count_restart("127.0.0.1", port, timeout_s=5)
    assert meeting.wait_for_restart()
    with pytest.raises(TimeoutError) as error:
        meeting.join()
    return str(error.value), waited_s


def test_a_member_that_does_not_come_back_is_named_in_time() -> None:
    for result in run_ranks(rank_nobody_comes, 3, may_die=[2])[:2]:
        error, waited_s = result
        assert "ranks [2] of the weights' group" in error
        assert 1.0 <= waited_s < 30
