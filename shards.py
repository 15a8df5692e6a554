"""From the shards of a policy to its published weights: which trainer holds which bytes, and the
way of those bytes to trainer 0.

FSDP2 splits a tensor along its first axis, so that in the flat buffer of all weights (row-major,
see `weights.manifest`) each trainer's rows are one range of the tensor's bytes. A trainer keeps its
rows of all tensors in a buffer of its own, in the same order: what it holds of any bucket of the
flat buffer is then one range of that buffer, which it sends as it lies. Trainer 0 puts the ranges
of all trainers in their places. It never holds more than its own rows and a few buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from weights import TensorSpec

ALIGN = 16  # bytes; every tensor starts at a multiple, so that views of any dtype are aligned
_FOREVER = timedelta(days=3650)


@dataclass(slots=True)
class Piece:
    """What one trainer holds of one bucket."""

    start: int = 0  # bytes, in the trainer's own buffer
    stop: int = 0  # start == stop: nothing
    # (bytes from `start`, bytes from the bucket's start, number of bytes)
    copies: list[tuple[int, int, int]] = field(default_factory=list)


def make_gathering_group(num_trainers: int, backend: str) -> dist.ProcessGroup | None:
    """A group of the trainers for publishing alone; every rank of the job must call it.

    Collectives of two threads in one group would meet in any order, so the publisher's thread has
    a group of its own. Its messages may be hours apart: it has no time limit.

    Args:
        backend: that of the weights; with nccl, small messages between trainers still go by gloo:
            waiting for one must not occupy a GPU.
    """
    return dist.new_group(
        list(range(num_trainers)),
        backend="cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
        timeout=_FOREVER,
    )


def rows_of(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """First row and number of rows of a rank, as `fully_shard` (and `torch.chunk`) splits them.

    >>> [rows_of(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-num_rows // size)
    first = min(rank * step, num_rows)
    return first, min(step, num_rows - first)


def own_specs(specs: Sequence[TensorSpec], rank: int, size: int) -> list[TensorSpec]:
    """The layout of a trainer's own buffer: its rows of every tensor, in the order of `specs`."""
    own, offset = [], 0
    for spec in specs:
        assert spec.shape, f"{spec.name} has no axis to shard"
        _, count = rows_of(spec.shape[0], rank, size)
        own.append(replace(spec, shape=(count, *spec.shape[1:]), offset=offset))
        offset += -(-own[-1].num_bytes // ALIGN) * ALIGN
    return own


def plan(
    specs: Sequence[TensorSpec], size: int, bucket_bytes: int, num_bytes: int
) -> list[list[Piece]]:
    """The pieces of every bucket of the flat buffer, [buckets][ranks].

    Args:
        num_bytes: of the flat buffer, whose layout `specs` is.
    """
    buckets = [[Piece() for _ in range(size)] for _ in range(0, num_bytes, bucket_bytes)]
    for rank in range(size):
        for spec, own in zip(specs, own_specs(specs, rank, size), strict=True):
            if own.num_bytes == 0:
                continue
            row_bytes = own.num_bytes // own.shape[0]
            first, _ = rows_of(spec.shape[0], rank, size)
            flat, source = spec.offset + first * row_bytes, own.offset
            stop = flat + own.num_bytes
            while flat < stop:
                number, inside = divmod(flat, bucket_bytes)
                count = min(stop - flat, bucket_bytes - inside)
                piece = buckets[number][rank]
                if not piece.copies:
                    piece.start = source
                piece.copies.append((source - piece.start, inside, count))
                piece.stop = source + count
                flat, source = flat + count, source + count
    return buckets


def make_buckets(
    own: Tensor,
    pieces: Sequence[Sequence[Piece]],
    bucket_bytes: int,
    num_bytes: int,
    group: dist.ProcessGroup,
    buffers: Sequence[Tensor],
    scratch: Tensor,
) -> Iterator[Tensor]:
    """Trainer 0's end: the buckets of the flat buffer, one after another, each in one of `buffers`.

    A bucket stays as it is until `len(buffers)` others have been asked for.

    Args:
        own: trainer 0's buffer, uint8.
        buffers: uint8 [bucket_bytes] each; what lies between tensors is not touched.
        scratch: uint8 [`scratch_bytes(pieces)`].
    """
    for number, bucket in enumerate(pieces):
        target = buffers[number % len(buffers)]
        sources, receives, used = [own[bucket[0].start : bucket[0].stop]], [], 0
        for rank, piece in enumerate(bucket[1:], start=1):
            part = scratch[used : used + piece.stop - piece.start]
            used += len(part)
            sources.append(part)
            if len(part):
                receives.append(dist.P2POp(dist.irecv, part, group=group, group_peer=rank))
        works = dist.batch_isend_irecv(receives) if receives else []
        _copy(sources[0], target, bucket[0])
        for work in works:
            work.wait()
        for source, piece in zip(sources[1:], bucket[1:], strict=True):
            _copy(source, target, piece)
        yield target[: min(bucket_bytes, num_bytes - number * bucket_bytes)]


def send_pieces(
    own: Tensor, pieces: Sequence[Sequence[Piece]], rank: int, group: dist.ProcessGroup
) -> None:
    """The other trainers' end: what this one holds of every bucket, from its buffer `own`."""
    pending: list[list[dist.Work]] = []
    for bucket in pieces:
        part = own[bucket[rank].start : bucket[rank].stop]
        if len(part):
            send = dist.P2POp(dist.isend, part, group=group, group_peer=0)
            pending.append(dist.batch_isend_irecv([send]))
        if len(pending) > 1:
            _wait(pending.pop(0))
    for works in pending:
        _wait(works)


def scratch_bytes(pieces: Sequence[Sequence[Piece]]) -> int:
    """Most bytes that the other trainers hold of one bucket, with what lies between tensors."""
    return max(sum(piece.stop - piece.start for piece in bucket[1:]) for bucket in pieces)


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _copy(source: Tensor, target: Tensor, piece: Piece) -> None:
    if piece.copies:
        torch._foreach_copy_(
            [target[to : to + count] for _, to, count in piece.copies],
            [source[start : start + count] for start, _, count in piece.copies],
        )
