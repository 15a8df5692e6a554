"""What decides the losses of a trainer, written as it happens: its event log.

Arrivals, draws, publications and checkpoints; the trajectories themselves are in the run's `.traj`
files. `replay.py` does the same again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PUBLISHED, EXPIRED = "published", "expired"
# What a line must say besides its kind: integers, but `items` a list of them
_FIELDS: dict[str, tuple[str, ...]] = {
    "start": ("step", "trainers", "threads", "record"),
    "arrived": (),
    "drawn": ("step", "items"),
    "expired": ("step",),
    "published": ("version",),
    "saved": ("step",),
}


class EventLog:
    """One JSON object a line in `events/trainer-T.jsonl`; what is there is continued.

    ========== ==============================================================================
    start      `step` that training goes on from, `trainers`, `threads` of torch, `record`:
               messages in the `.traj` file so far
    arrived    the next message of that file was stored
    drawn      `step`, `items`: arrival numbers in the buffer
    expired    `step`: what is too stale for it was forgotten
    published  `version`
    saved      `step` of a checkpoint, with all that came before in it
    ========== ==============================================================================
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._last: dict[str, Any] = {}
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # ends a line that was cut; empty ones are skipped

    def started(self, step: int, *, trainers: int, record: int) -> None:
        """The trainer is about to go on from `step`."""
        event = {"event": "start", "step": step, "trainers": trainers, "record": record}
        self._write({**event, "threads": torch.get_num_threads()})

    def arrived(self) -> None:
        """A message of trajectories was stored."""
        self._write({"event": "arrived"})

    def drawn(self, step: int, items: Sequence[int]) -> None:
        """The groups of a step were drawn, items in their order."""
        self._write({"event": "drawn", "step": step, "items": list(items)})

    def expired(self, step: int) -> None:
        """Stale trajectories were forgotten; twice without anything between is once."""
        event = {"event": "expired", "step": step}
        if event != self._last:
            self._write(event)

    def published(self, version: int) -> None:
        """The recency window begins anew."""
        self._write({"event": "published", "version": version})

    def saved(self, step: int) -> None:
        """A checkpoint was taken; all that came before is on the disk when this returns."""
        self._write({"event": "saved", "step": step})
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """A second time does nothing."""
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        self._last = event
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


@dataclass(slots=True, kw_only=True)
class Step:
    """What a trainer was given before an optimizer step, and what it then drew."""

    step: int
    # Numbers of messages in the `.traj` file, in order of arrival; PUBLISHED: the recency window
    # began anew; EXPIRED: what is too stale for this step was forgotten
    before: list[int | str] = field(default_factory=list)
    items: list[int] = field(default_factory=list)  # arrival numbers


def read_events(path: Path, trainers: int) -> tuple[list[Step], int]:
    """The steps that led to the policy of the run's end, and the number of torch's threads.

    What happened after a checkpoint from which the run was resumed, until it was, is left out.

    Raises:
        ValueError: the file can't be read, does not begin where the run began, or is of another
            number of trainers, at some time.
    """
    steps: list[Step] = []
    saved: dict[int, tuple[int, list[int | str]]] = {}  # step -> steps done, `before` since
    before: list[int | str] = []
    record, threads = 0, 1
    for event in _read(path):
        kind = event["event"]
        if kind == "start":
            record, threads, first = event["record"], event["threads"], event["step"]
            if event["trainers"] != trainers:
                raise ValueError(
                    f"{path}: the run had {event['trainers']} trainers at step {first} and "
                    f"{trainers} in the end: it can't be replayed"
                )
            if first and first not in saved:
                raise ValueError(
                    f"{path}: the run began from a checkpoint of another run at step {first}: only "
                    "one that began from the model itself can be replayed"
                )
            done, since = saved[first] if first else (0, [])
            steps, before = steps[:done], list(since)
            saved = {step: there for step, there in saved.items() if step <= first}
        elif kind == "arrived":
            before.append(record)
            record += 1
        elif kind in (PUBLISHED, EXPIRED):
            before.append(kind)
        elif kind == "drawn":
            steps.append(Step(step=event["step"], before=before, items=event["items"]))
            before = []
        else:
            saved[event["step"]] = len(steps), list(before)
    return steps, threads


def _read(path: Path) -> list[dict[str, Any]]:
    """The events; a line that a dying process has cut is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise ValueError(
            f"{path} can't be read ({error.strerror}): only a run with "
            "run.save_trajectories=true can be replayed"
        ) from error
    events: list[dict[str, Any]] = []
    cut = 0
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        event = _parse(line)
        if cut and (event is None or event["event"] != "start"):
            raise ValueError(f"{path}, line {cut}: not an event, although others follow")
        if event is None:
            cut = number
        else:
            cut = 0
            events.append(event)
    return events


def _parse(line: str) -> dict[str, Any] | None:
    """The event of a line; None if it is not one."""
    try:
        event = json.loads(line)
        numbers = [event[name] for name in _FIELDS[event["event"]] if name != "items"]
        if event["event"] == "drawn":
            numbers += event["items"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return event if all(type(n) is int and n >= 0 for n in numbers) else None
