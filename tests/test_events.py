"""The event log of a trainer, whole, cut or damaged; and the replay that follows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_state import CFG, make_trajectories, open_trainer, weights

from buffer import Buffer, uniform
from comm import Channel, Control, Kind
from events import EXPIRED, PUBLISHED, EventLog, read_events
from metrics import Metrics
from offline import TrajectoryWriter
from replay import replay
from trainer import (
    TrainerParts,
    complete_reference,
    draw,
    publish,
    receive,
    reset_reference,
    update_policy,
)
from trajectory import pack

# --------------------------------------------------------------------------- reading


def begin(path: Path, step: int = 0, record: int = 0, trainers: int = 1) -> EventLog:
    log = EventLog(path)
    log.started(step, trainers=trainers, record=record)
    return log


def write_steps(log: EventLog, *steps: int) -> None:
    """Each: a publication, two arrivals, a draw; then a checkpoint."""
    for step in steps:
        log.published(step)
        log.arrived()
        log.arrived()
        log.drawn(step, [step, step + 1])
        log.arrived()
        log.saved(step + 1)


def steps_of(path: Path, trainers: int = 1) -> list[tuple[int, list[Any], list[int]]]:
    return [(s.step, s.before, s.items) for s in read_events(path, trainers)[0]]


FIRST = (0, [PUBLISHED, 0, 1], [0, 1])
SECOND = (1, [2, PUBLISHED, 3, 4], [1, 2])


def test_a_log_gives_what_came_before_each_draw(tmp_path) -> None:
    path = tmp_path / "events" / "trainer-0.jsonl"
    log = begin(path)
    write_steps(log, 0, 1)
    log.close()
    log.close()
    assert steps_of(path) == [FIRST, SECOND]
    assert read_events(path, 1)[1] == 1  # threads, as conftest sets them


def test_what_was_lost_by_resuming_is_left_out(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(begin(path), 0, 1, 2)
    log = begin(path, step=1, record=9)  # from the checkpoint after step 0
    write_steps(log, 1)
    third = (2, [11, PUBLISHED, 12, 13], [2, 3])
    write_steps(log, 2)
    assert steps_of(path) == [FIRST, (1, [2, PUBLISHED, 9, 10], [1, 2]), third]
    log = begin(path, step=3, record=20)  # and again, from the end
    write_steps(log, 3)
    assert steps_of(path)[-1] == (3, [14, PUBLISHED, 20, 21], [3, 4])
    begin(path, record=30)  # all over again
    assert steps_of(path) == []


def test_a_checkpoint_of_what_was_left_out_is_not_gone_on_from(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(begin(path), 0, 1, 2)
    write_steps(begin(path, step=1, record=9), 1)
    begin(path, step=3, record=12)
    with pytest.raises(ValueError, match="another run at step 3"):
        read_events(path, 1)


def test_stale_ones_are_forgotten_once(tmp_path) -> None:
    log = begin(tmp_path / "log.jsonl")
    for arrives in (False, False, True, False):
        log.expired(0)
        if arrives:
            log.arrived()
    log.drawn(0, [4])
    log.expired(1)
    log.drawn(1, [5])
    assert steps_of(tmp_path / "log.jsonl") == [
        (0, [EXPIRED, 0, EXPIRED], [4]),
        (1, [EXPIRED], [5]),
    ]


def test_a_cut_line_is_left_out_where_a_process_has_died(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(begin(path), 0, 1)
    whole = path.read_bytes()
    for cut in range(1, len(b'{"event": "saved", "step": 2}\n')):
        path.write_bytes(whole[:-cut])
        assert steps_of(path) == [FIRST, SECOND]
        assert read_events(path, 1)[0] == read_events(path, 1)[0]
        log = begin(path, step=1, record=9)
        log.drawn(1, [7])
        assert steps_of(path) == [FIRST, (1, [2], [7])]


@pytest.mark.parametrize(
    "line",
    [
        b'{"event": "draw',
        b"\xff\xfe",
        b"null",
        b"[]",
        b"3",
        b'{"event": "unknown"}',
        b'{"event": ["start"]}',
        b'{"event": "drawn", "step": 0}',
        b'{"event": "drawn", "step": 0, "items": 3}',
        b'{"event": "drawn", "step": 0, "items": ["3"]}',
        b'{"event": "drawn", "step": [0], "items": [3]}',
        b'{"event": "saved", "step": true}',
        b'{"event": "start", "step": -1, "trainers": 1, "threads": 1, "record": 0}',
        b'{"event": "start", "step": 0}',
        b"[" * 100_000,
    ],
)
def test_damage_in_the_middle_is_named(tmp_path, line: bytes) -> None:
    path = tmp_path / "log.jsonl"
    write_steps(begin(path), 0)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:3], line, *lines[3:]]))
    with pytest.raises(ValueError, match=f"{path}, line 4: not an event"):
        read_events(path, 1)
    path.write_bytes(b"\n".join([*lines[:-1], line]))  # at the end it is what a death leaves
    assert steps_of(path) == [FIRST]


def test_other_trainers_and_other_runs_are_refused(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    with pytest.raises(ValueError, match="save_trajectories=true"):
        read_events(path, 1)
    write_steps(begin(path, trainers=2), 0, 1)
    with pytest.raises(ValueError, match="had 2 trainers at step 0 and 1 in the end"):
        read_events(path, 1)
    assert len(steps_of(path, trainers=2)) == 2
    begin(path, step=2, trainers=3, record=4)
    with pytest.raises(ValueError, match="had 3 trainers at step 2 and 2 in the end"):
        read_events(path, 2)
    begin(tmp_path / "other.jsonl", step=40)
    with pytest.raises(ValueError, match="checkpoint of another run at step 40"):
        read_events(tmp_path / "other.jsonl", 1)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.floats(0, 1), st.integers(0, 40), st.binary(max_size=8))
def test_any_change_of_a_log_is_an_error_of_one_kind(tmp_path, place, cut, put_in) -> None:
    path = tmp_path / "log.jsonl"
    path.unlink(missing_ok=True)
    write_steps(begin(path), 0, 1)
    write_steps(begin(path, step=1, record=9), 1)
    data = path.read_bytes()
    start = int(place * len(data))
    path.write_bytes(data[:start] + put_in + data[start + cut :])
    try:
        read_events(path, 1)
    except ValueError as error:
        assert str(path) in str(error)


# --------------------------------------------------------------------------- replay


def bounded(parts: TrainerParts, seed: int = 0) -> None:
    """A buffer that keeps nothing of an older version than the step's."""
    parts.buffer = Buffer(
        max_tokens=10_000,
        deduplicate=True,
        recency_prob=0.5,
        rule=uniform,
        seed=seed,
        max_staleness=0,
    )


def train_and_record(path: str, folder: Path) -> dict[str, Any]:
    """A trainer whose responses come while a draw waits, some of them too late already."""
    parts = open_trainer(path)
    bounded(parts)
    parts.channel = Channel(parts.ranks)
    parts.writer = TrajectoryWriter(folder / "trajectories" / "trainer-0.traj")
    parts.events = EventLog(folder / "events" / "trainer-0.jsonl")
    parts.events.started(0, trainers=1, record=0)
    publish(parts, 0, evaluate=False, probe=False)
    lines = []
    for step in range(4):
        for lag in (1, 0):
            arriving = make_trajectories(10 * step + lag, 0, 1)
            version = max(step - lag, 0)
            marked = [replace(t, version_start=version, version_end=version) for t in arriving]
            parts.channel.send(0, Kind.TRAJECTORIES, pack(marked))
        if step % 2:
            receive(parts)
        if step and step % CFG.reference_reset_every == 0:
            reset_reference(parts, version=step)
        groups = draw(CFG, parts, 4, step)
        complete_reference(CFG, parts, groups)
        loss = update_policy(CFG, parts, groups, step)["loss/total"]
        lines.append(json.dumps({"step": step + 1, "wall_s": 1.0, "loss/total": loss}))
        publish(parts, step + 1, evaluate=False, probe=False)
    parts.writer.close()
    parts.events.close()
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert parts.buffer.num_expired > 0
    return weights(parts)


def test_a_replay_takes_the_recorded_steps(tiny_llama, tmp_path) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    want = train_and_record(tiny_llama, recorded)

    def replayed(seed: int = 0) -> TrainerParts:
        parts = open_trainer(tiny_llama)
        bounded(parts, seed)
        parts.run_dir = tmp_path / f"replay-{seed}"
        parts.run_dir.mkdir(exist_ok=True)
        parts.control = Control(parts.ranks, timeout_s=60.0, heartbeat_timeout_s=60.0)
        parts.metrics = Metrics(parts.run_dir, total_steps=4, first_step=0, log_every_s=60)
        try:
            replay(CFG, parts, recorded)
        finally:
            parts.metrics.close()
            parts.control.close()
        return parts

    got = weights(replayed())
    assert all((got[name] == want[name]).all() for name in want)
    summary = json.loads((tmp_path / "replay-0" / "summary.json").read_text())
    assert summary["steps"] == summary["compared_losses"] == 4
    assert summary["largest_loss_difference"] == 0 < summary["largest_loss"]
    with pytest.raises(RuntimeError, match="step 0 draws other responses"):
        replayed(seed=1)
    record = recorded / "trajectories" / "trainer-0.traj"
    record.write_bytes(record.read_bytes()[:-10])
    with pytest.raises(ValueError, match="message 7 is missing from its .traj file"):
        replayed()
