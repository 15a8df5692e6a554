"""What comes over a wire or from a file, damaged at random: ValueError, and no memory for lies."""

from __future__ import annotations

import dataclasses
import json
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_trajectory import EXTREME, make, with_crc

from comm import MAGIC, MAX_MESSAGE_BYTES, Kind, read_header
from offline import TrajectoryWriter, read_trajectories
from trajectory import check, pack, unpack
from weights import manifest, read_manifest

FUZZ = settings(deadline=None, database=None, max_examples=40)
MESSAGE = pack([make(), make(reward_parts={"a": 1.0, "bb": 2.0}, prompt_id=3)])
SLACK_BYTES = 1 << 20  # of interpreter and libraries; a lie about a size is far above


@contextmanager
def little_memory(num_bytes: int) -> Iterator[None]:
    """Fails if more than some multiple of the input is allocated at any time."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * num_bytes + SLACK_BYTES, f"{peak} bytes for a message of {num_bytes}"


def refused_or_whole(message: np.ndarray) -> None:
    try:
        with little_memory(message.size):
            records = unpack(message)
    except ValueError:
        return
    for record in records:
        check(record)


def damaged(data: st.DataObject, original: bytes) -> bytes:
    """Bits flipped, words replaced, and the end cut or lengthened."""
    content = bytearray(original)
    for _ in range(data.draw(st.integers(0, 4), label="bits")):
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << place % 8
    for _ in range(data.draw(st.integers(0, 2), label="words")):
        start = data.draw(st.integers(0, len(content) - 8))
        content[start : start + 8] = struct.pack("<q", data.draw(EXTREME))
    end = data.draw(st.integers(0, len(content)) | st.none(), label="end")
    return bytes(content[:end]) + data.draw(st.binary(max_size=9), label="more")


@FUZZ
@given(st.binary(max_size=300))
def test_random_bytes_are_no_trajectories(content: bytes) -> None:
    with pytest.raises(ValueError):
        unpack(np.frombuffer(content, np.uint8))
    with pytest.raises(ValueError):  # behind a header that begins well
        unpack(np.frombuffer(MESSAGE[:12].tobytes() + content, np.uint8))


@FUZZ
@given(st.data(), st.booleans())
def test_damaged_trajectories_are_refused_or_whole(data: st.DataObject, repaired: bool) -> None:
    message = np.frombuffer(damaged(data, MESSAGE.tobytes()), np.uint8)
    if repaired and message.size >= 16:
        message = with_crc(message)
    refused_or_whole(message)


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("size", [2**31, 2**44, 2**61, 2**63 - 1])
def test_huge_sizes_take_no_memory(index: int, size: int) -> None:
    message = MESSAGE.copy()
    message[16 + 8 * index : 24 + 8 * index] = np.frombuffer(struct.pack("<q", size), np.uint8)
    with little_memory(message.size), pytest.raises(ValueError):
        unpack(with_crc(message))


@FUZZ
@given(st.lists(EXTREME | st.sampled_from([MAGIC, 7, *map(int, Kind)]), max_size=6))
@example([MAGIC, 7, 1, MAX_MESSAGE_BYTES + 1])
@example([MAGIC, 7, 1, MAX_MESSAGE_BYTES])
@example([MAGIC, 8, 1, 10])
def test_a_header_of_the_channel_is_within_its_bounds_or_refused(numbers: list[int]) -> None:
    try:
        kind, num_bytes = read_header(numbers, key=7)
    except ValueError:
        return
    assert numbers == [MAGIC, 7, int(kind), num_bytes] and 0 <= num_bytes <= MAX_MESSAGE_BYTES


@FUZZ
@given(st.data())
def test_damaged_files_of_trajectories_are_refused_or_read_in_part(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.traj")
        writer = TrajectoryWriter(path)
        for _ in range(3):
            writer.append(MESSAGE)
        writer.close()
        path.write_bytes(damaged(data, path.read_bytes()))
        size, records = path.stat().st_size, []
        try:
            with little_memory(size):
                for record in read_trajectories(path):
                    records.append(record)
        except ValueError as error:
            assert str(path) in str(error)
        for record in records:  # what came before the damage
            check(record)


SPECS = manifest(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 5)), torch.bfloat16)
MANIFEST = json.dumps([dataclasses.asdict(spec) for spec in SPECS])


def test_a_manifest_survives_the_wire() -> None:
    assert read_manifest(MANIFEST) == SPECS and read_manifest("[]") == []


def change(index: int, **values: object) -> str:
    rows = json.loads(MANIFEST)
    rows[index] |= values
    return json.dumps(rows)


@pytest.mark.parametrize(
    "text",
    [
        change(1, offset=8),  # over the tensor before it
        change(1, offset=64),  # a gap
        change(1, offset=-16),
        change(1, offset=16.0),
        change(0, shape=[3, 3]),  # reaches into the next
        change(3, shape=[-5]),
        change(3, shape=[True]),
        change(3, shape="5"),
        change(3, dtype="torch.load"),
        change(3, dtype=None),
        change(3, name="0.weight"),
        change(3, name=7),
        "[{}]",
        "[1]",
        "{}x",
        "null",
        "[" * 100_000,
    ],
)
def test_a_manifest_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_manifest(text)


JSON = st.recursive(
    st.none() | st.booleans() | EXTREME | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELD = st.sampled_from(["name", "shape", "dtype", "offset"])


@FUZZ
@given(st.integers(0, len(SPECS) - 1), st.dictionaries(FIELD, JSON | st.lists(EXTREME)))
def test_a_changed_manifest_is_refused_or_a_layout(index: int, values: dict) -> None:
    _layout_or_refused(lambda: read_manifest(change(index, **values)))


@FUZZ
@given(st.data())
def test_a_damaged_manifest_is_refused_or_a_layout(data: st.DataObject) -> None:
    text = damaged(data, MANIFEST.encode()).decode(errors="replace")
    _layout_or_refused(lambda: read_manifest(text))


def _layout_or_refused(read: Callable[[], list]) -> None:
    try:
        with little_memory(len(MANIFEST)):
            specs = read()
    except ValueError:
        return
    end = 0
    for spec in specs:
        assert spec.offset == end and all(dim >= 0 for dim in spec.shape)
        end += -(-spec.num_bytes // 16) * 16
