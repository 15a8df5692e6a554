"""Roles, the trajectory channel and the control plane, between real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks

import comm
from comm import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    Channel,
    Control,
    Kind,
    Ranks,
    broadcast_text,
    init_world,
    ranks_from_environment,
)
from metrics import setup_logging

SECONDS = 15.0  # "within seconds", on a machine that does other things too


def make_ranks(rank: int, world_size: int, trainers: int = 1, tp: int = 1) -> Ranks:
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        num_trainers=trainers,
        tp=tp,
    )


# --------------------------------------------------------------------------- roles


def test_roles_and_names():
    ranks = [make_ranks(rank, 5, trainers=2) for rank in range(5)]
    assert [r.is_trainer for r in ranks] == [True, True, False, False, False]
    assert [r.is_searcher for r in ranks] == [False, False, True, True, True]
    assert [r.searcher_index for r in ranks[2:]] == [0, 1, 2]
    assert {r.num_searchers for r in ranks} == {3}
    names = ["trainer 0", "trainer 1", "searcher 0", "searcher 1", "searcher 2"]
    assert [r.name() for r in ranks] == names
    assert [ranks[0].name(rank) for rank in range(5)] == names


def test_a_searcher_of_several_ranks_is_one_searcher():
    ranks = [make_ranks(rank, 6, trainers=2, tp=2) for rank in range(6)]
    assert [r.is_trainer for r in ranks] == [True, True, False, False, False, False]
    assert [r.is_searcher for r in ranks] == [False, False, True, False, True, False]
    assert [r.is_companion for r in ranks] == [False, False, False, True, False, True]
    assert [r.searcher_index for r in ranks[2:]] == [0, 0, 1, 1]
    assert {r.num_searchers for r in ranks} == {2}
    names = ["searcher 0", "searcher 0 (device 1)", "searcher 1", "searcher 1 (device 1)"]
    assert [r.name() for r in ranks[2:]] == names
    assert [ranks[0].name(rank) for rank in range(2, 6)] == names
    assert not any(make_ranks(rank, 3).is_companion for rank in range(3))


@pytest.mark.parametrize(
    ("num_cores", "cores"),
    [(8, [[0, 1], [2, 3, 4, 5], [4, 5], [6, 7]]), (2, [[0], [1, 0], [0], [1]])],
)
def test_a_searcher_has_the_cores_of_all_its_ranks(monkeypatch, num_cores, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)), raising=False)
    ranks = [make_ranks(0, 4), make_ranks(1, 4, tp=2), make_ranks(2, 4, tp=2), make_ranks(3, 4)]
    assert [r.cores() for r in ranks] == cores


def wait_for_the_end(rank: int, world_size: int) -> float:
    """A companion that outwaits the watchdog."""
    ranks = make_ranks(rank, world_size, tp=2)
    control = Control.start(ranks, timeout_s=1.0, heartbeat_timeout_s=10.0, period_s=0.1)
    start = time.monotonic()
    if rank == 2:
        control.wait_for("the end of searcher 0")
    else:
        for _ in range(15):
            control.progress("working")
            time.sleep(0.1)
        if rank == 1:
            control.announce("the end of searcher 0")
    waited = time.monotonic() - start
    dist.barrier()
    control.close()
    return waited


def test_a_companion_waits_as_long_as_it_takes():
    waited = run_ranks(wait_for_the_end, 3)
    assert 1.4 < waited[2] < 10


def test_a_world_of_one_plays_both_roles():
    ranks = make_ranks(0, 1)
    assert ranks.is_trainer and ranks.is_searcher
    assert (ranks.num_searchers, ranks.searcher_index) == (1, 0)
    assert ranks.name() == "trainer+searcher"


def test_ranks_come_from_torchruns_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment(1) == make_ranks(0, 1)
    values = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    ranks = ranks_from_environment(2)
    assert (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size) == (5, 8, 1, 4)
    assert ranks.name() == "searcher 3"


@pytest.mark.parametrize(("num_cores", "num_ranks"), [(8, 2), (8, 3), (2, 2), (5, 5), (64, 8)])
def test_cores_are_disjoint_equal_shares(monkeypatch, num_cores, num_ranks):
    available = set(range(3, 3 + num_cores))  # a job may own any cores of its node
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: available, raising=False)
    shares = [make_ranks(rank, num_ranks).cores() for rank in range(num_ranks)]
    assert {len(share) for share in shares} == {num_cores // num_ranks}
    everything = [core for share in shares for core in share]
    assert len(everything) == len(set(everything)) and set(everything) <= available


def test_cores_are_shared_when_there_are_too_few(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert [make_ranks(rank, 3).cores() for rank in range(3)] == [[0], [1], [0]]


def test_ranks_of_a_second_node_share_its_cores_by_local_rank(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    ranks = Ranks(rank=3, world_size=4, local_rank=1, local_world_size=2, num_trainers=1)
    assert ranks.cores() == [2, 3]


# --------------------------------------------------------------------------- default group

TEXTS = ["", "runs/plain", "Läufe/größe-β=0.02 — 試行 🚀", "x" * 100_000, "two\nlines\0and a zero"]


def say(rank: int, world_size: int) -> list[str]:
    from_first = [broadcast_text(text if rank == 0 else "not me") for text in TEXTS]
    return [*from_first, broadcast_text(f"rank {rank}", src=world_size - 1)]


def test_broadcast_text_is_what_the_source_says():
    assert run_ranks(say, 3) == [[*TEXTS, "rank 2"]] * 3


# --------------------------------------------------------------------------- channel

SIZES = [0, 1, 17, 3_000_000, 0, 1, 65_536, 8_000_001, 5]
KINDS = [Kind.TRAJECTORIES, Kind.REPORT, Kind.EVALUATION]


def payload(searcher: int, trainer: int, index: int) -> np.ndarray:
    rng = np.random.default_rng([searcher, trainer, index])
    return rng.integers(0, 256, SIZES[index], dtype=np.uint8)


def digest(kind: int, data: np.ndarray) -> tuple[int, int, int]:
    return int(kind), data.nbytes, zlib.crc32(data.tobytes())


def receive_until_closed(channel: Channel) -> list[comm.Message]:
    """Everything, until every searcher has said goodbye."""
    channel.close()
    return channel.receive()


def exchange(rank: int, world_size: int, trainers: int) -> dict:
    ranks = make_ranks(rank, world_size, trainers)
    errors: list[str] = []
    channel = Channel(ranks, max_outstanding=2, on_error=errors.append)
    got: dict[int, list] = {}
    if ranks.is_searcher:
        for index in range(len(SIZES)):
            for trainer in range(trainers):
                data = payload(ranks.searcher_index, trainer, index)
                channel.send(trainer, KINDS[index % 3], data)
                data[:] = 0  # the caller may use its memory again
        channel.close()
    else:
        for message in receive_until_closed(channel):
            assert message.payload.dtype == np.uint8
            got.setdefault(message.source, []).append(digest(message.kind, message.payload))
    assert not any(thread.name == "channel" for thread in threading.enumerate())
    assert channel.receive() == [] and errors == []
    return got


@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("searchers", [1, 2, 3])
def test_messages_arrive_whole_and_in_order(searchers, trainers):
    results = run_ranks(exchange, trainers + searchers, trainers)
    for trainer in range(trainers):
        assert set(results[trainer]) == set(range(trainers, trainers + searchers))
        for searcher in range(searchers):
            expected = [
                digest(KINDS[index % 3], payload(searcher, trainer, index))
                for index in range(len(SIZES))
            ]
            assert results[trainer][trainers + searcher] == expected


class SlowQueue:
    """A queue whose reader is slow: each `put` takes a tenth of a second."""

    def __init__(self) -> None:
        self.items: list = []

    def put(self, item) -> None:
        time.sleep(0.1)
        self.items.append(item)

    def get_nowait(self):
        if not self.items:
            raise comm.queue.Empty
        return self.items.pop(0)


def send_to_a_slow_trainer(rank: int, world_size: int, max_outstanding: int) -> list:
    if rank == 0:
        comm.queue.SimpleQueue = SlowQueue  # this process ends with the test
    channel = Channel(make_ranks(rank, world_size), max_outstanding=max_outstanding)
    if rank == 0:
        return [int(m.payload[0]) for m in receive_until_closed(channel)]
    start = time.monotonic()
    for index in range(30):
        channel.send(0, Kind.TRAJECTORIES, np.full(50_000, index, dtype=np.uint8))
    seconds = time.monotonic() - start
    channel.close()
    return [seconds]


def test_a_slow_trainer_bounds_what_is_under_way():
    received, [seconds] = run_ranks(send_to_a_slow_trainer, 2, 3)
    assert received == list(range(30))
    assert seconds > 2.0  # 30 messages, 3 of them under way, each a tenth of a second


def test_a_searcher_does_not_wait_below_the_bound():
    received, [seconds] = run_ranks(send_to_a_slow_trainer, 2, 100)
    assert received == list(range(30))
    assert seconds < 1.5  # 3 s if it waited for each


def one_is_silent(rank: int, world_size: int) -> float:
    channel = Channel(make_ranks(rank, world_size))
    if rank == 1:
        time.sleep(3.0)  # the lower rank is the silent one
        channel.close()
    if rank == 2:
        channel.send(0, Kind.REPORT, {"hello": 1})
        channel.close()
    start = time.monotonic()
    if rank == 0:
        (message,) = channel.receive(timeout_s=10.0)
        assert message.source == 2 and message.json() == {"hello": 1}
    seconds = time.monotonic() - start
    channel.close() if rank == 0 else None
    return seconds


def test_a_searcher_with_nothing_to_say_delays_nobody():
    assert run_ranks(one_is_silent, 3)[0] < 2.0


def wait_for_the_first(rank: int, world_size: int) -> tuple[float, float, int]:
    channel = Channel(make_ranks(rank, world_size))
    if rank == 1:
        time.sleep(1.0)
        channel.send(0, Kind.REPORT, {})
        channel.close()
        return 0.0, 0.0, 0
    start = time.monotonic()
    assert channel.receive() == []
    at_once = time.monotonic() - start
    assert channel.receive(timeout_s=0.1) == []
    timed = time.monotonic() - start
    count = len(channel.receive(timeout_s=20.0))
    channel.close()
    return at_once, timed, count


def test_receive_waits_as_long_as_it_is_told():
    at_once, timed, count = run_ranks(wait_for_the_first, 2)[0]
    assert at_once < 0.1 <= timed < 1.0 and count == 1


HEADERS = {
    "magic": [MAGIC + 1, 0, 1, 10],
    "kind": [MAGIC, 0, 99, 10],
    "negative size": [MAGIC, 0, 1, -1],
    "too large": [MAGIC, 0, 1, MAX_MESSAGE_BYTES + 1],
}


def send_header(rank: int, world_size: int, header: list[int]) -> list[str]:
    errors: list[str] = []
    channel = Channel(make_ranks(rank, world_size), on_error=errors.append)
    if rank == 1:
        dist.send(torch.tensor(header), 0, group=channel._group, tag=comm._TAG_HEADER)
    else:
        channel._thread.join(timeout=SECONDS)
    return errors


@pytest.mark.parametrize("what", HEADERS)
def test_a_malformed_header_is_an_error_with_a_reason(what):
    (reason,), _ = run_ranks(send_header, 2, HEADERS[what])
    assert "rank 1" in reason and "malformed header" in reason and "\n" not in reason


def test_a_message_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(comm, "MAX_MESSAGE_BYTES", 10)
    channel = Channel(make_ranks(0, 1))
    with pytest.raises(ValueError, match=r"searcher\.prompts_in_flight"):
        channel.send(0, Kind.TRAJECTORIES, np.zeros(11, dtype=np.uint8))


def test_a_world_of_one_talks_to_itself():
    channel = Channel(make_ranks(0, 1))
    assert channel.receive() == [] and channel.receive(timeout_s=0.01) == []
    channel.send(0, Kind.TRAJECTORIES, np.arange(5, dtype=np.uint8))
    channel.send(0, Kind.REPORT, {"round": 3, "idle_s": {"weights": 0.5}})
    first, second = channel.receive()
    assert first.source == second.source == 0
    assert first.kind == Kind.TRAJECTORIES and first.payload.tolist() == [0, 1, 2, 3, 4]
    assert second.json() == {"round": 3, "idle_s": {"weights": 0.5}}
    channel.close()
    assert channel.receive() == []


# --------------------------------------------------------------------------- whole jobs


class Job:
    """Processes that run `scenario(ranks, control, channel)` as train.py runs a role."""

    def __init__(
        self,
        folder: Path,
        scenario: Callable[[Ranks, Control, Channel], None],
        world_size: int,
        *,
        trainers: int = 1,
        **options: float,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self.folder = folder
        port = free_port()
        options = {"timeout_s": 60.0, "heartbeat_timeout_s": 30.0, "period_s": 0.1, **options}
        self.processes = [
            context.Process(
                target=_job,
                args=(folder, scenario, rank, world_size, trainers, port, options),
                daemon=True,
            )
            for rank in range(world_size)
        ]

    def __enter__(self) -> Job:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()  # a stopped one too
            process.join()

    def wait_until_ready(self) -> None:
        """All ranks have met and run the scenario."""
        deadline = time.monotonic() + 60
        while not all((self.folder / f"ready-{r}").exists() for r in range(len(self.processes))):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def kill(self, rank: int, signum: int) -> None:
        os.kill(self.processes[rank].pid, signum)

    def ended(self, *, within_s: float, but: int | None = None) -> tuple[list[int], float]:
        """Exit codes of all ranks (without `but`), and how long the last one took."""
        start = time.monotonic()
        others = [p for rank, p in enumerate(self.processes) if rank != but]
        for process in others:
            process.join(timeout=max(0.0, start + within_s - time.monotonic()))
        codes = [process.exitcode for process in others]
        assert None not in codes, f"still alive after {within_s} s: {codes}\n{self.output()}"
        seconds = time.monotonic() - start
        print(f"ended {codes} in {seconds:.2f} s")
        return codes, seconds

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("output-*")))

    def reason(self) -> str:
        """The reason, which must be printed once over all ranks."""
        lines = [line for line in self.output().splitlines() if "the job ends" in line]
        assert len(lines) == 1, self.output()
        return lines[0]


def _job(
    folder: Path,
    scenario: Callable[[Ranks, Control, Channel], None],
    rank: int,
    world_size: int,
    trainers: int,
    port: int,
    options: dict[str, float],
) -> None:
    output = os.open(folder / f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    ranks = ranks_from_environment(trainers)
    setup_logging(ranks.name())
    init_world(ranks, timeout_s=60)
    control = Control.start(ranks, **options)
    channel = Channel(ranks, on_error=control.fail)
    dist.barrier()
    (folder / f"ready-{rank}").touch()
    try:
        scenario(ranks, control, channel)
        dist.barrier()
    except Exception as error:
        control.fail(f"{type(error).__name__}: {error}")
    late = folder / f"late-{rank}"
    if late.exists():
        time.sleep(float(late.read_text()))
    control.close()
    dist.destroy_process_group()
    threads = sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())
    (folder / f"threads-{rank}").write_text(json.dumps(threads))
    sys.exit(0)


def work(ranks: Ranks, control: Control, channel: Channel) -> None:
    """Searchers send without end, trainers receive, until something ends them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        control.progress("working")
        if ranks.is_searcher:
            for trainer in range(ranks.num_trainers):
                channel.send(trainer, Kind.TRAJECTORIES, np.zeros(200_000, dtype=np.uint8))
        else:
            channel.receive(timeout_s=0.1)
        time.sleep(0.02)
    os._exit(77)


def idle(ranks: Ranks, control: Control, channel: Channel) -> None:
    """Nobody sends; the main threads do something else."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        control.progress("idling")
        time.sleep(0.05)
    os._exit(77)


def rank_fails(number: int, ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.rank == number:
        control.fail("the goat ate the data")
    idle(ranks, control, channel)


def rank_0_fails(*args):
    rank_fails(0, *args)


def rank_2_fails(*args):
    rank_fails(2, *args)


def everyone_fails(ranks: Ranks, control: Control, channel: Channel) -> None:
    control.fail(f"reason of rank {ranks.rank}", detail=f"detail of rank {ranks.rank}")


@pytest.mark.parametrize("scenario", [rank_0_fails, rank_2_fails])
def test_a_failure_ends_every_rank_and_is_printed_once(tmp_path, scenario):
    with Job(tmp_path, scenario, 4) as job:
        job.wait_until_ready()
        codes, _ = job.ended(within_s=SECONDS)
        assert codes == [1] * 4
        name = "trainer 0 (rank 0)" if scenario is rank_0_fails else "searcher 1 (rank 2)"
        assert f"{name}: the goat ate the data" in job.reason()
        assert job.output().count("the goat") == 1


def test_of_several_failures_the_first_is_printed(tmp_path):
    with Job(tmp_path, everyone_fails, 4) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [1] * 4
        assert job.output().count("detail of rank") == 1
        first = job.reason()[-1]
        assert f"detail of rank {first}" in job.output()


def fails_with_code_2(ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.rank == 1:
        control.fail("a mistake in the data", code=2)
    idle(ranks, control, channel)


def test_the_failing_rank_chooses_its_exit_code(tmp_path):
    with Job(tmp_path, fails_with_code_2, 2) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [1, 2]


@pytest.mark.parametrize("scenario", [work, idle])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_ends_the_job(tmp_path, scenario, victim):
    with Job(tmp_path, scenario, 4, trainers=2, heartbeat_timeout_s=2.0) as job:
        job.wait_until_ready()
        time.sleep(0.5)
        job.kill(victim, signal.SIGKILL)
        codes, _ = job.ended(within_s=SECONDS, but=victim)
        assert codes == [1] * 3
        assert job.reason()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_stopped_rank_is_named(tmp_path, victim):
    with Job(tmp_path, idle, 3, heartbeat_timeout_s=1.5) as job:
        job.wait_until_ready()
        time.sleep(0.5)
        job.kill(victim, signal.SIGSTOP)
        codes, seconds = job.ended(within_s=SECONDS + 5, but=victim)
        assert codes == [1] * 2 and seconds > 1.0
        name = make_ranks(victim, 3).name()
        reason = job.reason()
        assert f"{name} (rank {victim}) has been silent for" in reason
        assert "cluster.heartbeat_timeout_s" in reason


def test_a_stop_shorter_than_the_limit_is_forgiven(tmp_path):
    with Job(tmp_path, idle, 3, heartbeat_timeout_s=3.0) as job:
        job.wait_until_ready()
        for rank in (0, 1, 2):
            job.kill(rank, signal.SIGSTOP)
            time.sleep(0.8)
            job.kill(rank, signal.SIGCONT)
        for rank in (0, 1, 2):  # all of them, as by Ctrl-Z, for longer than the limit
            job.kill(rank, signal.SIGSTOP)
        time.sleep(3.5)
        for rank in (2, 1, 0):
            job.kill(rank, signal.SIGCONT)
        time.sleep(1.0)
        assert [p.exitcode for p in job.processes] == [None] * 3, job.output()


def sleeps_in_the_middle(ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.rank == 1:
        control.progress("counting sheep")
        time.sleep(60)
    idle(ranks, control, channel)


def test_the_watchdog_names_what_a_rank_was_doing(tmp_path):
    with Job(tmp_path, sleeps_in_the_middle, 3, timeout_s=1.0) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [1] * 3
        assert "searcher 0 (rank 1): no progress for" in job.reason()
        assert "while counting sheep (cluster.timeout_s)" in job.reason()


def loads_for_ever(ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.rank == 1:
        control.progress("loading", control.startup_timeout_s)
        time.sleep(60)
    idle(ranks, control, channel)


def test_the_watchdog_names_the_limit_that_was_passed(tmp_path):
    with Job(tmp_path, loads_for_ever, 2, timeout_s=1.0, startup_timeout_s=2.0) as job:
        assert job.ended(within_s=60)[0] == [1, 1]
        assert "while loading (cluster.startup_timeout_s)" in job.reason()


def takes_its_time(ranks: Ranks, control: Control, channel: Channel) -> None:
    control.progress("a long one", 30.0)
    time.sleep(2.5)
    channel.close()


def test_a_longer_limit_holds_for_one_activity(tmp_path):
    with Job(tmp_path, takes_its_time, 2, timeout_s=1.0) as job:
        assert job.ended(within_s=60)[0] == [0, 0]


def goes_on(ranks: Ranks, control: Control, channel: Channel) -> None:
    control.progress("evaluating")
    for _ in range(25):
        control.alive()
        time.sleep(0.1)
    channel.close()


def test_signs_of_life_put_the_watchdog_off(tmp_path):
    with Job(tmp_path, goes_on, 2, timeout_s=1.0) as job:
        assert job.ended(within_s=60)[0] == [0, 0]


def sends_a_little(ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.is_searcher:
        for trainer in range(ranks.num_trainers):
            channel.send(trainer, Kind.REPORT, {"rank": ranks.rank})
    channel.close()
    if ranks.is_trainer:
        assert len(channel.receive()) == ranks.num_searchers


def test_a_clean_end_leaves_no_thread_and_no_complaint(tmp_path):
    with Job(tmp_path, sends_a_little, 4, trainers=2) as job:
        assert job.ended(within_s=60)[0] == [0] * 4
        assert job.output() == ""
        for rank in range(4):
            assert json.loads((tmp_path / f"threads-{rank}").read_text()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_closes_late_is_waited_for(tmp_path, rank):
    (tmp_path / f"late-{rank}").write_text("1.5")
    with Job(tmp_path, sends_a_little, 3) as job:
        assert job.ended(within_s=60)[0] == [0] * 3
        assert job.output() == ""


def cleans_up(ranks: Ranks, control: Control, channel: Channel) -> None:
    folder = Path(os.environ["TEST_FOLDER"])

    def broken() -> None:
        raise OSError("the engine is gone already")

    control.cleanups += [broken, (folder / f"clean-{ranks.rank}").touch]
    if ranks.rank == 1:
        control.fail("enough")
    idle(ranks, control, channel)


def hangs_in_cleaning(ranks: Ranks, control: Control, channel: Channel) -> None:
    comm._CLEANUP_S = 1.0
    control.cleanups.append(lambda: time.sleep(60))
    rank_fails(1, ranks, control, channel)


def in_folder(folder: Path, scenario: Callable) -> Callable:
    return _InFolder(str(folder), scenario)


class _InFolder:
    """A scenario that finds the test's folder in its environment."""

    def __init__(self, folder: str, scenario: Callable) -> None:
        self.folder, self.scenario = folder, scenario

    def __call__(self, *args) -> None:
        os.environ["TEST_FOLDER"] = self.folder
        self.scenario(*args)


def test_cleanups_run_before_a_forced_end(tmp_path):
    with Job(tmp_path, in_folder(tmp_path, cleans_up), 3) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [1] * 3
        assert all((tmp_path / f"clean-{rank}").exists() for rank in range(3))


def test_a_cleanup_that_hangs_is_not_waited_for(tmp_path):
    with Job(tmp_path, hangs_in_cleaning, 3) as job:
        job.wait_until_ready()
        codes, _ = job.ended(within_s=SECONDS)
        assert codes == [1] * 3


def fails_in_two_threads(ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.rank == 1:
        control.cleanups.append(lambda: time.sleep(2))
        threading.Thread(target=control.fail, args=("the thread's",), daemon=True).start()
        time.sleep(0.5)
        raise RuntimeError("the main thread's")
    idle(ranks, control, channel)


def test_the_main_thread_can_not_leave_while_another_ends_the_job(tmp_path):
    with Job(tmp_path, fails_in_two_threads, 2) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [1, 1]
        assert "the thread's" in job.reason()


def terminated(ranks: Ranks, control: Control, channel: Channel) -> None:
    signal.signal(signal.SIGTERM, lambda *_: control.leave("SIGTERM"))
    idle(ranks, control, channel)


def test_sigterm_to_all_ends_all_quietly(tmp_path):
    with Job(tmp_path, terminated, 3) as job:
        job.wait_until_ready()
        time.sleep(0.3)
        for rank in (2, 1, 0):
            job.kill(rank, signal.SIGTERM)
        codes, _ = job.ended(within_s=SECONDS)
        assert codes == [1] * 3
        assert "Traceback" not in job.output()


# --------------------------------------------------------------------------- stopping


def stops(ranks: Ranks, control: Control, channel: Channel) -> None:
    """Rank 2 is told to stop; trainer 0 saves, then ends the job."""
    control.stoppable = True
    time.sleep(0.3)
    assert control.stop_reason is None
    if ranks.rank == 2:
        control.request_stop("SIGUSR1")
        control.request_stop("SIGTERM")  # of several requests the first counts
    deadline = time.monotonic() + 30
    while control.stop_reason is None:
        assert time.monotonic() < deadline, "the request did not come"
        time.sleep(0.02)
    if ranks.rank == 0:
        time.sleep(0.5)  # saving takes a while
        control.stop(f"{control.stop_reason}: saved at step 3")
    idle(ranks, control, channel)


def test_a_request_of_any_rank_stops_the_job_when_all_is_saved(tmp_path):
    with Job(tmp_path, stops, 3) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [comm.STOP_CODE] * 3
        lines = job.output().splitlines()
        assert len(lines) == 1 and "the job stops: SIGUSR1: saved at step 3" in lines[0], lines


def is_told_too_early(ranks: Ranks, control: Control, channel: Channel) -> None:
    """Training has not begun on any rank when rank 0 is told to stop."""
    if ranks.rank == 0:
        control.request_stop("SIGTERM")
    idle(ranks, control, channel)


def takes_too_long(ranks: Ranks, control: Control, channel: Channel) -> None:
    """The trainers look for requests, but one of their steps takes very long."""
    comm.STOP_GRACE_S = 0.3
    control.stoppable = True
    if ranks.rank == 0:
        control.request_stop("SIGTERM")
    idle(ranks, control, channel)


@pytest.mark.parametrize(
    "scenario", [is_told_too_early, pytest.param(takes_too_long, marks=pytest.mark.slow)]
)
def test_where_nothing_can_be_saved_the_job_stops_nevertheless(tmp_path, scenario):
    with Job(tmp_path, scenario, 2) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [comm.STOP_CODE] * 2
        lines = job.output().splitlines()
        assert len(lines) == 1, lines
        assert "the job stops: SIGTERM, before anything could be saved" in lines[0]


def a_searcher_is_told_too_early(ranks: Ranks, control: Control, channel: Channel) -> None:
    if ranks.rank == 1:
        control.request_stop("SIGTERM")
    idle(ranks, control, channel)


def test_a_rank_that_can_not_stop_the_job_leaves(tmp_path):
    with Job(tmp_path, a_searcher_is_told_too_early, 3) as job:
        job.wait_until_ready()
        job.processes[1].join(timeout=SECONDS)
        assert job.processes[1].exitcode == comm.STOP_CODE, job.output()


def asks(ranks: Ranks, control: Control, channel: Channel) -> None:
    folder = Path(os.environ["TEST_FOLDER"])
    if ranks.rank == 1:
        time.sleep(0.2)
        control.tell("size/1", json.dumps({"bytes": "3 \u20ac"}))
        assert control.ask("answer", 20.0) == ""
        return
    answer = json.loads(control.ask("size/1", 20.0))
    begun = time.monotonic()
    try:
        control.ask("size/1", 0.3)  # what is told is told once
    except TimeoutError as error:
        answer["error"] = str(error)
    answer["seconds"] = time.monotonic() - begun
    (folder / "answer").write_text(json.dumps(answer))
    control.tell("answer", "")


def test_what_a_rank_tells_is_heard_once_by_who_asks(tmp_path):
    with Job(tmp_path, in_folder(tmp_path, asks), 2) as job:
        codes, _ = job.ended(within_s=60)
        assert codes == [0, 0], job.output()
    answer = json.loads((tmp_path / "answer").read_text())
    assert answer["bytes"] == "3 \u20ac" and "size/1" in answer["error"]
    assert 0.3 <= answer["seconds"] < SECONDS


def test_an_answer_that_does_not_come_takes_the_time_limit():
    control = Control(make_ranks(0, 1), timeout_s=0.5, heartbeat_timeout_s=60.0)
    begun = time.monotonic()
    control.progress("asking", 60.0)
    with pytest.raises(TimeoutError):
        control.ask("nothing")
    assert 0.5 <= time.monotonic() - begun < SECONDS
    control.close()
