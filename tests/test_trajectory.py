"""The wire format: exact round trips, and ValueError for every message that is not one."""

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from trajectory import Batch, Trajectory, check, mean_by_group, pack, sum_by_response, unpack

INT64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 6))
    tokens = npst.arrays(np.int32, st.integers(0, 6))
    logprobs = npst.arrays(np.float32, length, elements=st.floats(width=32))
    behavior = draw(logprobs)
    steps = draw(st.lists(st.integers(0, 3), min_size=length - 1, max_size=length - 1))
    start = draw(st.sampled_from([-(2**63), 0, 2**63 - 16]))
    return Trajectory(
        prompt_id=draw(INT64),
        prompt_tokens=draw(tokens),
        response_tokens=draw(npst.arrays(np.int32, length)),
        behavior_logprobs=behavior,
        old_logprobs=draw(st.just(behavior) | logprobs),
        reference_logprobs=draw(logprobs),
        reference_version=draw(st.integers(-1, 2**63 - 1)),
        reward=draw(FINITE),
        reward_parts=draw(st.dictionaries(st.text(max_size=4), FINITE, max_size=3)),
        version_start=start,
        version_end=start + sum(steps),
        truncated=draw(st.booleans()),
        version_offsets=np.cumsum([0, *steps], dtype=np.int32) if sum(steps) else None,
    )


def make(**changes: object) -> Trajectory:
    behavior = np.array([-0.1, -0.2, -0.3], np.float32)
    fields: dict = {
        "prompt_id": 7,
        "prompt_tokens": np.array([1, 2], np.int32),
        "response_tokens": np.array([3, 4, 5], np.int32),
        "behavior_logprobs": behavior,
        "old_logprobs": behavior,
        "reference_logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
        "reference_version": 0,
        "reward": 1.5,
        "reward_parts": {"correct": 1.0, "format": 0.5},
        "version_start": 3,
        "version_end": 4,
        "truncated": False,
        "version_offsets": np.array([0, 0, 1], np.int32),
    }
    return Trajectory(**(fields | changes))


def bits(t: Trajectory) -> tuple:
    """All of a record as something that compares bit for bit."""
    arrays = (
        *(t.prompt_tokens, t.response_tokens),
        *(t.behavior_logprobs, t.old_logprobs, t.reference_logprobs),
    )
    return (
        *((a.dtype.str, a.shape, a.tobytes()) for a in arrays),
        (t.prompt_id, t.version_start, t.version_end, t.reference_version, t.truncated),
        None if t.version_offsets is None else t.version_offsets.tolist(),
        struct.pack("<d", t.reward),
        {name: struct.pack("<d", value) for name, value in t.reward_parts.items()},
    )


@settings(deadline=None, database=None)
@given(st.lists(trajectories(), max_size=5))
def test_round_trip_is_exact(records: list[Trajectory]) -> None:
    message = pack(records)
    assert message.dtype == np.uint8 and message.ndim == 1
    back = unpack(message)
    assert [bits(t) for t in back] == [bits(t) for t in records]
    for t in back:
        assert type(t.prompt_id) is int and type(t.reward) is float and type(t.truncated) is bool


def test_round_trip_keeps_odd_floats_empty_prompt_and_mixed_parts() -> None:
    odd = np.array([np.nan, -np.inf, -0.0, 1e-45], np.float32)
    records = [
        make(reward_parts={}, prompt_tokens=np.empty(0, np.int32), reward=-0.0),
        make(
            response_tokens=np.arange(4, dtype=np.int32),
            behavior_logprobs=odd,
            old_logprobs=odd[::2].repeat(2),
            reference_logprobs=odd[::-1],
            version_end=3,
            version_offsets=None,
        ),
        make(reward_parts={"längst": -0.0, "": 2.0}),
    ]
    assert [bits(t) for t in unpack(pack(records))] == [bits(t) for t in records]


def test_equal_old_logprobs_are_sent_once() -> None:
    same, explored = make(), make(old_logprobs=np.array([-0.3, -0.2, -0.1], np.float32))
    assert pack([explored]).size == pack([same]).size + 3 * 4
    back = unpack(pack([same]))[0]
    assert back.old_logprobs is back.behavior_logprobs
    both = unpack(pack([same, explored]))
    assert [t.old_logprobs.tolist() for t in both] == [
        t.old_logprobs.tolist() for t in (same, explored)
    ]


def test_unpacked_arrays_do_not_share_the_message() -> None:
    message = pack([make()])
    back = unpack(message)
    message[:] = 0
    assert bits(back[0]) == bits(make())


def test_message_of_any_stride_is_read() -> None:
    message = np.repeat(pack([make()]), 2)[::2]
    assert bits(unpack(message)[0]) == bits(make())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"response_tokens": np.empty(0, np.int32)}, "response_tokens"),
        ({"response_tokens": np.array([3, 4, 5])}, "response_tokens"),
        ({"response_tokens": [3, 4, 5]}, "response_tokens"),
        ({"prompt_tokens": np.zeros((1, 2), np.int32)}, "prompt_tokens"),
        ({"behavior_logprobs": np.zeros(2, np.float32)}, "behavior_logprobs"),
        ({"behavior_logprobs": np.zeros(3)}, "behavior_logprobs"),
        ({"old_logprobs": np.zeros(4, np.float32)}, "old_logprobs"),
        ({"old_logprobs": np.zeros(3)}, "old_logprobs"),
        ({"reference_logprobs": np.zeros(4, np.float32)}, "reference_logprobs"),
        ({"reference_version": -2}, "reference_version"),
        ({"reference_version": 0.0}, "reference_version"),
        ({"reward": float("nan")}, "reward"),
        ({"reward": None}, "reward"),
        ({"reward_parts": {"correct": float("nan")}}, "correct"),
        ({"reward_parts": {1: 1.0}}, "part"),
        ({"version_start": 5}, "version_start"),
        ({"prompt_id": 2**63}, "prompt_id"),
        ({"prompt_id": 1.0}, "prompt_id"),
        ({"truncated": 2}, "truncated"),
        ({"reward_parts": {"\ud800": 1.0}}, "part"),
    ],
)
def test_pack_refuses_records_that_break_their_rules(changes: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        pack([make(), make(**changes)])


@pytest.mark.parametrize(
    "message", [b"bytes", None, np.zeros(200), np.zeros((2, 99), np.uint8), np.empty(0, np.uint8)]
)
def test_unpack_refuses_what_is_no_byte_array(message: object) -> None:
    with pytest.raises(ValueError, match="trajectory message"):
        unpack(message)  # type: ignore[arg-type]


@settings(deadline=None, database=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for message in (data, pack([])[:16].tobytes() + data):
        with pytest.raises(ValueError):
            unpack(np.frombuffer(message, np.uint8))


def test_every_truncation_and_every_extension_is_refused() -> None:
    message = pack([make(), make(reward_parts={})])
    for size in range(message.size):
        with pytest.raises(ValueError):
            unpack(message[:size])
    with pytest.raises(ValueError, match="describes"):
        unpack(np.append(message, np.uint8(0)))


def test_every_flipped_bit_is_refused() -> None:
    message = pack([make()])
    for position in range(message.size):
        for bit in range(8):
            damaged = message.copy()
            damaged[position] ^= 1 << bit
            with pytest.raises(ValueError):
                unpack(damaged)


def with_crc(message: np.ndarray) -> np.ndarray:
    message = message.copy()
    crc = struct.pack("<I", zlib.crc32(message[16:].tobytes()))
    message[12:16] = np.frombuffer(crc, np.uint8)
    return message


EXTREME = st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1]) | INT64


@settings(deadline=None, database=None, max_examples=400)
@given(st.data())
def test_crafted_messages_with_a_right_crc_raise_only_value_error(data: st.DataObject) -> None:
    message = pack([make(), make(reward_parts={"a": 1.0, "bb": 2.0})])
    for _ in range(data.draw(st.integers(1, 3))):
        # Every 8 byte word of the message in turn plays a size, a length, a float or a token.
        word = data.draw(st.integers(2, message.size // 8 - 1))
        message[8 * word : 8 * word + 8] = np.frombuffer(
            struct.pack("<q", data.draw(EXTREME)), np.uint8
        )
    try:
        records = unpack(with_crc(message))
    except ValueError:
        return
    for t in records:  # the change was one of a token or a number: a valid record still
        check(t)


def header_changed(index: int, value: int) -> np.ndarray:
    message = pack([make()])
    message[16 + 8 * index : 24 + 8 * index] = np.frombuffer(struct.pack("<q", value), np.uint8)
    return with_crc(message)


@pytest.mark.parametrize("index", range(7))
@pytest.mark.parametrize("value", [-1, 2**40, 2**60, 2**63 - 1])
def test_sizes_are_checked_before_memory_is_allocated(index: int, value: int) -> None:
    with pytest.raises(ValueError, match="negative size|describes"):
        unpack(header_changed(index, value))


def test_negative_sizes_that_add_up_are_refused() -> None:
    message = pack([])
    for index, value in ((1, 2), (6, -8)):  # 2 prompt tokens of 4 bytes, -8 bytes of names
        start = 16 + 8 * index
        message[start : start + 8] = np.frombuffer(struct.pack("<q", value), np.uint8)
    with pytest.raises(ValueError, match="negative size"):
        unpack(with_crc(message))


def test_errors_say_what_is_wrong() -> None:
    message = pack([make()])
    other = message.copy()
    other[8] = 9
    with pytest.raises(ValueError, match="format version 9"):
        unpack(other)
    other = message.copy()
    other[-1] ^= 1
    with pytest.raises(ValueError, match="CRC32"):
        unpack(other)
    offset = 72 + 8 * 5  # response_length follows five columns of one item each
    other = message.copy()
    other[offset] = 2
    with pytest.raises(ValueError, match="response lengths sum to 2, there are 3"):
        unpack(with_crc(other))
    other[offset : offset + 8] = 255
    with pytest.raises(ValueError, match="response lengths are negative"):
        unpack(with_crc(other))
    other = message.copy()
    other[-1] = 255
    with pytest.raises(ValueError, match="UTF-8"):
        unpack(with_crc(other))
    explored = pack([make(), make(old_logprobs=np.zeros(3, np.float32))])
    explored[16 + 8 * 3] = 5  # of 6 log-probs; the fourth's bytes become a part's name
    explored[16 + 8 * 6] += 4
    with pytest.raises(ValueError, match="5 old log-probs for 6 tokens"):
        unpack(with_crc(explored))
    twice = pack([make(reward_parts={"a": 1.0, "b": 0.5})])
    twice[-1] = ord("a")
    with pytest.raises(ValueError, match="twice"):
        unpack(with_crc(twice))
    flag = pack([make(reward_parts={})])
    flag[-1] = 2
    with pytest.raises(ValueError, match="truncated"):
        unpack(with_crc(flag))


def make_batch(rng: np.random.Generator) -> Batch:
    response = torch.tensor([0, 0, 0, 1, 2, 2, 3])  # 4 responses of 3, 1, 2 and 1 tokens
    logprobs = torch.tensor(rng.normal(size=7), dtype=torch.float32)
    return Batch(
        policy_logprobs=logprobs.clone().requires_grad_(),
        reference_logprobs=logprobs,
        behavior_logprobs=logprobs,
        old_logprobs=logprobs,
        response=response,
        group=torch.tensor([0, 1, 1, 0]),
        rewards=torch.arange(4.0),
        num_groups=5,
    )


def test_sum_by_response_adds_the_tokens_of_each_response() -> None:
    batch = make_batch(np.random.default_rng(0))
    sums = sum_by_response(batch.policy_logprobs, batch)
    x = batch.policy_logprobs.detach().numpy()
    np.testing.assert_allclose(
        sums.detach(), [x[:3].sum(), x[3], x[4:6].sum(), x[6]], rtol=1e-6, atol=1e-6
    )
    (sums * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert batch.policy_logprobs.grad is not None
    assert batch.policy_logprobs.grad.tolist() == [1, 1, 1, 2, 3, 3, 4]


def test_mean_by_group_averages_by_id_not_by_position() -> None:
    batch = make_batch(np.random.default_rng(0))
    values = torch.tensor([1.0, 10.0, 20.0, 5.0], requires_grad=True)
    means = mean_by_group(values, batch)
    assert means.tolist() == [3.0, 15.0]  # 2 groups at hand, though the step has 5
    means.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.5] * 4


def test_each_token_has_its_version() -> None:
    assert make().versions.tolist() == [3, 3, 4]
    plain = make(version_end=3, version_offsets=None)
    assert plain.versions.tolist() == [3, 3, 3]
    two, one = unpack(pack([make(), plain]))
    assert two.versions.tolist() == [3, 3, 4] and one.version_offsets is None
    # a single version costs nothing on the wire
    assert len(pack([make()])) - len(pack([plain])) == 3 * 4


@pytest.mark.parametrize(
    "offsets",
    [
        None,
        np.array([0, 1], np.int32),  # too few
        np.array([0, 0, 1], np.int64),
        np.array([0, 0, 2], np.int32),  # not version_end
        np.array([1, 1, 1], np.int32),  # not from version_start
        np.array([0, 2, 1], np.int32),  # an older version after a newer one
        [0, 0, 1],
    ],
)
def test_versions_of_tokens_must_rise_from_first_to_last(offsets: object) -> None:
    with pytest.raises(ValueError, match="prompt 7: version_offsets"):
        check(make(version_offsets=offsets))
    with pytest.raises(ValueError, match="must be None"):
        check(make(version_end=3))
