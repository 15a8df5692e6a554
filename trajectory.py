"""The record of one sampled response, its wire format, and the batch that objectives see.

``Trajectory`` is what a searcher makes and what the buffer stores. ``pack`` lays many of them out
in one flat byte array for the wire (never pickle), ``unpack`` reads them back and trusts nothing:
every size is checked against the message before anything is allocated. ``Batch`` holds the tensors
of the responses of one micro-batch; ``sum_by_response`` and ``mean_by_group`` reduce over it.

A message is a fixed header, then flat little-endian arrays without gaps, in ``_layout``'s order:
    magic, 8 bytes | format version, u32 | CRC32 of all bytes after this field, u32 | 7 sizes, i64
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MAGIC = b"TB-TRAJ\n"
_FORMAT_VERSION = 3
# count, prompt tokens, response tokens, old log-probs (as many, or 0), version offsets (as many, or
# 0), part names, their bytes
_HEADER = struct.Struct("<8sII7q")
_CRC_START = 16
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """One sampled response with all that training needs to know of it; a searcher fills it.

    Scoring adds the reference's log-probs and version, and the reward with its parts. Compared by
    identity, because the arrays in it have no single truth value.
    """

    prompt_id: int  # position of the prompt in its task's list
    prompt_tokens: np.ndarray  # int32 [P], P >= 0
    response_tokens: np.ndarray  # int32 [T], T >= 1, with the sampled end-of-text token
    # float32 [T], nats, of the distribution that was really sampled: its temperature, its top-p.
    # NaN throughout where nobody knows it (data from elsewhere).
    behavior_logprobs: np.ndarray
    # float32 [T], nats, of the policy that sampled, at the training temperature and without top-p.
    # The same array as behavior_logprobs where the two distributions are one, as they usually are.
    old_logprobs: np.ndarray
    reference_logprobs: np.ndarray  # float32 [T], nats, at the training temperature
    reference_version: int  # weights version of the reference; -1: its log-probs are not computed
    reward: float  # finite
    reward_parts: dict[str, float]  # named parts that sum to the reward, finite
    version_start: int  # weights version that sampled the first token
    version_end: int  # weights version that sampled the last token, >= version_start
    truncated: bool  # cut by the length or time limit, so without an end-of-text token
    # int32 [T], of each token: the weights version that sampled it, less version_start. None where
    # one version sampled all.
    version_offsets: np.ndarray | None = None

    @property
    def versions(self) -> np.ndarray:
        """Weights version that sampled each token, int64 [T]; their log-probs are under it."""
        if self.version_offsets is None:
            return np.full(len(self.response_tokens), self.version_start, np.int64)
        return self.version_start + self.version_offsets.astype(np.int64)


@dataclass(slots=True, kw_only=True)
class StepStats:
    """What is known of all groups of an optimizer step before its first micro-batch.

    S groups: all micro-batches, all trainers, in any order.
    """

    mean_rewards: Tensor  # float32 [S], mean reward of each group
    differs: Tensor  # bool [S], whether the group's rewards are not all equal
    num_tokens: int  # response tokens
    num_differing_tokens: int  # response tokens of the groups whose rewards differ


@dataclass(slots=True, kw_only=True)
class Batch:
    """Tensors of B responses in G groups; their N tokens lie flat, one response after another.

    A group is the responses of one prompt. Filled by the trainer, read by the objectives.
    """

    policy_logprobs: Tensor  # float32 [N], nats, requires grad
    reference_logprobs: Tensor  # float32 [N], nats
    behavior_logprobs: Tensor  # float32 [N], nats, of what was really sampled; NaN: not known
    old_logprobs: Tensor  # float32 [N], nats, of the sampling policy at the training temperature
    response: Tensor  # int64 [N], index in 0..B-1 of the response each token belongs to
    group: Tensor  # int64 [B], index in 0..G-1 of the group each response belongs to
    rewards: Tensor  # float32 [B]
    num_groups: int  # groups of the whole optimizer step, all micro-batches and trainers (>= G)
    log_z: Tensor | None = None  # float32 [G], nats, learned, requires grad; None: no such head
    step: StepStats | None = None  # None: this batch is the whole step


def sum_by_response(values: Tensor, batch: Batch) -> Tensor:
    """Sum one value per token over the tokens of each response.

    Args:
        values: float [N], one value per response token.
        batch: tells which response each token belongs to.

    Returns:
        float [B], the dtype of ``values``, differentiable in ``values``.
    """
    return values.new_zeros(batch.group.shape[0]).index_add(0, batch.response, values)  # [B]


def mean_by_group(values: Tensor, batch: Batch) -> Tensor:
    """Average one value per response over the responses of each group.

    Args:
        values: float [B], one value per response.
        batch: tells which group each response belongs to.

    Returns:
        float [G], the dtype of ``values``, differentiable in ``values``; G is the number of groups
        at hand (the highest index + 1), not ``batch.num_groups``. A group index that no response
        has, which a correct batch does not contain, gives NaN.
    """
    sizes = torch.bincount(batch.group)  # [G]
    sums = values.new_zeros(sizes.shape[0]).index_add(0, batch.group, values)  # [G]
    return sums / sizes


def check(trajectory: Trajectory) -> None:
    """Raise ValueError, naming the prompt and the field, unless the record keeps its own rules.

    The values of tokens and log-probs are not looked at: log-probs may be -inf or NaN here, and it
    is the trainer that decides what to do with them.
    """
    t = trajectory
    for name in ("prompt_id", "reference_version", "version_start", "version_end"):
        value = getattr(t, name)
        if not isinstance(value, int | np.integer) or not _INT64_MIN <= value <= _INT64_MAX:
            raise ValueError(f"trajectory: {name} must be an int of 64 bits, got {value!r}")
    where = f"trajectory of prompt {t.prompt_id}"
    for name, dtype in _ARRAYS:
        array = getattr(t, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{where}: {name} must be a 1-d {dtype} array, got {_describe(array)}")
    length = t.response_tokens.shape[0]
    if length < 1:
        raise ValueError(f"{where}: response_tokens is empty; a response has at least one token")
    for name in ("behavior_logprobs", "old_logprobs", "reference_logprobs"):
        if getattr(t, name).shape[0] != length:
            raise ValueError(
                f"{where}: {name} has {getattr(t, name).shape[0]} items for {length} tokens"
            )
    if t.reference_version < -1:
        raise ValueError(
            f"{where}: reference_version must be -1 or more, got {t.reference_version}"
        )
    if t.version_start > t.version_end:
        raise ValueError(
            f"{where}: version_start {t.version_start} is after version_end {t.version_end}"
        )
    _check_versions(t, where)
    if not isinstance(t.truncated, bool | np.bool_):
        raise ValueError(f"{where}: truncated must be a bool, got {t.truncated!r}")
    if not _is_finite(t.reward):
        raise ValueError(f"{where}: reward must be a finite number, got {t.reward!r}")
    for part, value in t.reward_parts.items():
        # NaN marks an absent part on the wire and in the buffer, so no part may be NaN.
        if not isinstance(part, str) or not _is_finite(value):
            raise ValueError(
                f"{where}: reward part {part!r} must be a finite number, got {value!r}"
            )


def _check_versions(t: Trajectory, where: str) -> None:
    """The part of ``check`` that looks at the versions of single tokens."""
    offsets, span = t.version_offsets, t.version_end - t.version_start
    if (offsets is None) != (span == 0):
        raise ValueError(
            f"{where}: version_offsets must be {'given' if span else 'None'} for versions "
            f"{t.version_start} to {t.version_end}"
        )
    if offsets is None:
        return
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int32 or offsets.ndim != 1:
        raise ValueError(
            f"{where}: version_offsets must be a 1-d int32 array, got {_describe(offsets)}"
        )
    if offsets.shape != t.response_tokens.shape:
        raise ValueError(
            f"{where}: version_offsets has {len(offsets)} items for {len(t.response_tokens)} tokens"
        )
    if offsets[0] != 0 or offsets[-1] != span or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{where}: version_offsets must rise from 0 to {span}")


_ARRAYS = (
    ("prompt_tokens", np.dtype(np.int32)),
    ("response_tokens", np.dtype(np.int32)),
    ("behavior_logprobs", np.dtype(np.float32)),
    ("old_logprobs", np.dtype(np.float32)),
    ("reference_logprobs", np.dtype(np.float32)),
)


def _is_finite(value: object) -> bool:
    return isinstance(value, float | int | np.floating | np.integer) and math.isfinite(value)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} with shape {value.shape}"
    return type(value).__name__


def _layout(
    count: int,
    prompt_tokens: int,
    response_tokens: int,
    old_logprobs: int,
    version_offsets: int,
    parts: int,
    name_bytes: int,
) -> list[tuple[str, str, int]]:
    """Name, dtype and number of items of every array, in wire order: wide items come first."""
    return [
        ("prompt_id", "<i8", count),
        ("version_start", "<i8", count),
        ("version_end", "<i8", count),
        ("reference_version", "<i8", count),
        ("prompt_length", "<i8", count),
        ("response_length", "<i8", count),
        ("reward", "<f8", count),
        ("part_values", "<f8", count * parts),  # [count, parts], NaN: no such part
        ("part_name_length", "<i8", parts),  # bytes
        ("prompt_tokens", "<i4", prompt_tokens),
        ("response_tokens", "<i4", response_tokens),
        ("behavior_logprobs", "<f4", response_tokens),
        ("old_logprobs", "<f4", old_logprobs),  # none where all equal the behavior log-probs
        ("reference_logprobs", "<f4", response_tokens),
        ("version_offsets", "<i4", version_offsets),  # none where each has a single version
        ("truncated", "|u1", count),  # 0 or 1
        ("part_names", "|u1", name_bytes),  # UTF-8, one after another
    ]


def pack(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Lay trajectories out as one message.

    Args:
        trajectories: any number, also none; of any prompts.

    Returns:
        uint8 [n], a new array. ``unpack`` gives the same records back, bit for bit.

    Raises:
        ValueError: a record breaks its own rules (see ``check``).
    """
    for t in trajectories:
        check(t)
    part_index: dict[str, int] = {}
    for t in trajectories:
        for part in t.reward_parts:
            part_index.setdefault(part, len(part_index))
    part_values = np.full((len(trajectories), len(part_index)), np.nan)  # [count, parts]
    for i, t in enumerate(trajectories):
        for part, value in t.reward_parts.items():
            part_values[i, part_index[part]] = value
    try:
        names = [part.encode() for part in part_index]
    except UnicodeEncodeError as error:
        raise ValueError(f"a reward part's name is not valid text: {error}") from error

    columns: dict[str, object] = {
        "prompt_id": [t.prompt_id for t in trajectories],
        "version_start": [t.version_start for t in trajectories],
        "version_end": [t.version_end for t in trajectories],
        "reference_version": [t.reference_version for t in trajectories],
        "prompt_length": [t.prompt_tokens.shape[0] for t in trajectories],
        "response_length": [t.response_tokens.shape[0] for t in trajectories],
        "reward": [t.reward for t in trajectories],
        "part_values": part_values.reshape(-1),
        "part_name_length": [len(name) for name in names],
        "truncated": [t.truncated for t in trajectories],
        "part_names": np.frombuffer(b"".join(names), np.uint8),
    }
    for name, dtype in _ARRAYS:
        arrays = [getattr(t, name) for t in trajectories]
        columns[name] = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    if all(t.old_logprobs is t.behavior_logprobs for t in trajectories):
        columns["old_logprobs"] = np.empty(0, np.float32)
    columns["version_offsets"] = (
        np.empty(0, np.int32)
        if all(t.version_offsets is None for t in trajectories)
        else np.concatenate([offsets_of(t) for t in trajectories])
    )

    sizes = (
        len(trajectories),
        len(columns["prompt_tokens"]),  # type: ignore[arg-type]
        len(columns["response_tokens"]),  # type: ignore[arg-type]
        len(columns["old_logprobs"]),  # type: ignore[arg-type]
        len(columns["version_offsets"]),  # type: ignore[arg-type]
        len(names),
        sum(len(name) for name in names),
    )
    layout = _layout(*sizes)
    message = np.empty(_HEADER.size + _layout_bytes(layout), np.uint8)
    offset = _HEADER.size
    for name, code, items in layout:
        end = offset + items * np.dtype(code).itemsize
        message[offset:end] = np.ascontiguousarray(columns[name], dtype=code).view(np.uint8)
        offset = end
    message[: _HEADER.size] = np.frombuffer(
        _HEADER.pack(_MAGIC, _FORMAT_VERSION, 0, *sizes), np.uint8
    )
    crc = zlib.crc32(message[_CRC_START:].data)
    message[_CRC_START - 4 : _CRC_START] = np.frombuffer(struct.pack("<I", crc), np.uint8)
    return message


def offsets_of(t: Trajectory) -> np.ndarray:
    """``version_offsets``, int32 [T], zeros where one version sampled all."""
    if t.version_offsets is None:
        return np.zeros(len(t.response_tokens), np.int32)
    return t.version_offsets


def unpack(message: np.ndarray) -> list[Trajectory]:
    """Read the trajectories of a message, checking every size before anything is allocated.

    Args:
        message: uint8 [n], as ``pack`` made it. It is not kept: the caller may reuse its memory.

    Returns:
        The records. Their arrays are slices of one array per field, so that keeping a single record
        keeps its whole message in memory: copy what is to live longer.

    Raises:
        ValueError: the message is cut, damaged, of another format version, or describes a record
            that breaks its own rules. Nothing else is ever raised.
    """
    columns, sizes = _read_columns(message)
    count, prompt_tokens, response_tokens, old_logprobs, offsets, num_parts, name_bytes = sizes
    for what, size in (("old log-probs", old_logprobs), ("version offsets", offsets)):
        if size not in (0, response_tokens):
            raise ValueError(f"trajectory message: {size} {what} for {response_tokens} tokens")
    prompt_ends = _check_lengths(columns["prompt_length"], prompt_tokens, "prompt lengths")
    response_ends = _check_lengths(columns["response_length"], response_tokens, "response lengths")
    names = _read_names(columns["part_name_length"], columns["part_names"], name_bytes)
    if count and columns["truncated"].max() > 1:
        raise ValueError("trajectory message: a truncated flag is neither 0 nor 1")

    # One copy a field: aligned, in this machine's byte order, and independent of the message.
    prompts = columns["prompt_tokens"].astype(np.int32)
    responses = columns["response_tokens"].astype(np.int32)
    behavior = columns["behavior_logprobs"].astype(np.float32)
    old = columns["old_logprobs"].astype(np.float32)
    reference = columns["reference_logprobs"].astype(np.float32)
    version_offsets = columns["version_offsets"].astype(np.int32)
    part_values = columns["part_values"].reshape(count, num_parts).tolist()
    scalars = zip(
        columns["prompt_id"].tolist(),
        columns["reward"].tolist(),
        columns["version_start"].tolist(),
        columns["version_end"].tolist(),
        columns["reference_version"].tolist(),
        columns["truncated"].tolist(),
        part_values,
        strict=True,
    )
    ends = zip(prompt_ends, response_ends, strict=True)
    trajectories = []
    prompt_start = response_start = 0
    for (
        (prompt_id, reward, start, end, reference_version, truncated, values),
        (prompt_end, response_end),
    ) in zip(scalars, ends, strict=True):
        sampled = behavior[response_start:response_end]
        trajectory = Trajectory(
            prompt_id=prompt_id,
            prompt_tokens=prompts[prompt_start:prompt_end],
            response_tokens=responses[response_start:response_end],
            behavior_logprobs=sampled,
            old_logprobs=old[response_start:response_end] if old_logprobs else sampled,
            reference_logprobs=reference[response_start:response_end],
            reference_version=reference_version,
            reward=reward,
            reward_parts={n: v for n, v in zip(names, values, strict=True) if not math.isnan(v)},
            version_start=start,
            version_end=end,
            truncated=bool(truncated),
            version_offsets=(
                version_offsets[response_start:response_end] if offsets and start != end else None
            ),
        )
        check(trajectory)
        trajectories.append(trajectory)
        prompt_start, response_start = prompt_end, response_end
    return trajectories


def _read_columns(
    message: np.ndarray,
) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    """Views of a message's arrays by name, and its seven sizes; checked against its length."""
    if not isinstance(message, np.ndarray) or message.dtype != np.uint8 or message.ndim != 1:
        raise ValueError(f"trajectory message: must be a 1-d uint8 array, got {_describe(message)}")
    message = np.ascontiguousarray(message)
    if message.size < _HEADER.size:
        raise ValueError(
            f"trajectory message: {message.size} bytes, shorter than its {_HEADER.size} byte header"
        )
    magic, version, crc, *numbers = _HEADER.unpack(message[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        raise ValueError("trajectory message: does not start with the format's magic bytes")
    if version != _FORMAT_VERSION:
        raise ValueError(
            f"trajectory message: format version {version}, this program reads {_FORMAT_VERSION}; "
            "run the same program on every rank"
        )
    if min(numbers) < 0:
        raise ValueError(f"trajectory message: negative size in the header: {numbers}")
    # Python's ints do not overflow, so that a size near 2**63 can't wrap around to a small sum.
    layout = _layout(*numbers)
    expected = _HEADER.size + _layout_bytes(layout)
    if message.size != expected:
        raise ValueError(
            f"trajectory message: {message.size} bytes, but its header describes {expected}"
        )
    if zlib.crc32(message[_CRC_START:].data) != crc:
        raise ValueError("trajectory message: CRC32 does not match, the bytes were damaged")
    columns = {}
    offset = _HEADER.size
    for name, code, items in layout:
        columns[name] = np.frombuffer(message, code, items, offset)
        offset += items * np.dtype(code).itemsize
    return columns, tuple(numbers)


def _layout_bytes(layout: list[tuple[str, str, int]]) -> int:
    return sum(items * np.dtype(code).itemsize for _, code, items in layout)


def _check_lengths(lengths: np.ndarray, total: int, what: str) -> list[int]:
    """Ends of consecutive pieces; ValueError unless the lengths are >= 0 and sum to ``total``."""
    ends = []
    end = 0
    for length in lengths.tolist():
        if length < 0 or end + length > total:
            raise ValueError(
                f"trajectory message: {what} are negative or exceed the {total} items there are"
            )
        end += length
        ends.append(end)
    if end != total:
        raise ValueError(f"trajectory message: {what} sum to {end}, there are {total} items")
    return ends


def _read_names(lengths: np.ndarray, text: np.ndarray, total: int) -> list[str]:
    """The names of the reward parts; ValueError unless they are distinct and valid UTF-8."""
    data = text.tobytes()
    names = []
    start = 0
    for end in _check_lengths(lengths, total, "lengths of part names"):
        try:
            names.append(data[start:end].decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"trajectory message: a part's name is not UTF-8: {error}") from error
        start = end
    if len(set(names)) != len(names):
        raise ValueError(f"trajectory message: part names occur twice: {names}")
    return names
