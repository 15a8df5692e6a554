"""Several trainers: a copy of the policy on each, or one policy sharded over them (FSDP2).

    replicate   each trainer holds parameters, gradients and optimizer states of its own; gradients
                are added up once a step
    shard       torch's `fully_shard`: each trainer holds its share of all three; parameters are
                gathered layer by layer, forward and backward, and gradients reduced to their owner

Gradients are sums over trainers, not means: losses are divided by the counts of the whole step
(`gradient.step_stats`). A forward or backward pass of a sharded policy is a collective, so its
trainers take equally many (`in_lockstep`). With `trainer.precision=bfloat16` a sharded policy
computes with parameters in bfloat16; its shards, gradients and optimizer states are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from shards import rows_of

Item = TypeVar("Item")

_BUCKET_BYTES = 64 << 20  # of gradients in one all-reduce


@dataclass
class ParallelConfig:
    """How several trainers share the policy."""

    kind: str = "auto"  # replicate | shard | auto: shard where there are several trainers
    # Sharded: free a layer's parameters after its forward pass and gather them again for the
    # backward pass (less memory), or keep them (less communication)
    reshard_after_forward: bool = True
    # Sharded: reduce gradients after each micro-batch; else once a step, and until then each
    # trainer holds the gradients of all parameters
    reduce_every_micro_batch: bool = False
    cpu_offload: bool = False  # sharded: parameters, gradients and optimizer states in host memory

    def sharded(self, num_trainers: int) -> bool:
        """Whether the policy is sharded over this many trainers."""
        return self.kind == "shard" or (self.kind == "auto" and num_trainers > 1)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was applied to the model."""
    return isinstance(model, FSDPModule)


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes: its shards may lie in host memory."""
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformers model: its longest list of modules.

    Raises:
        ValueError: it has none.
    """
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers to shard or compile")
    return max(lists, key=len)


def shard(
    model: nn.Module,
    group: dist.ProcessGroup,
    cfg: ParallelConfig,
    *,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shards `model` in place over the ranks of `group`, block by block; all must call it.

    Each rank must hold the same parameters, in host memory or on its device; afterwards it holds
    its share, on `device` or, with `cfg.cpu_offload`, in host memory.

    Args:
        compute_dtype: of parameters in forward and backward passes; None: as they are stored.
            Gradients are reduced in float32.
    """
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, device.type, mesh_dim_names=("trainers",)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        if compute_dtype is not None
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if cfg.cpu_offload
        else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=cfg.reshard_after_forward, **options)
    fully_shard(model, **options)  # the rest: embedding, head, last norm
    for module in _sharded_modules(model):
        module.set_gradient_divide_factor(1.0)  # sums over trainers
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    # `call` below goes through FSDP's own hooks, as `forward` does.
    model.tba_call = MethodType(_call, model)  # type: ignore[assignment]
    register_fsdp_forward_method(model, "tba_call")


def _call(self: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def call(model: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, a forward pass that uses the model's parts by itself.

    FSDP gathers what lies outside of the blocks when the model is called as a whole: what runs the
    base model and the head apart must say so. What is returned, tensors or tuples of them, may be
    used for a backward pass.
    """
    if not is_sharded(model):
        return function(*args, **kwargs)
    result = model.tba_call(function, *args, **kwargs)  # type: ignore[operator]
    if not torch.is_grad_enabled():  # no backward pass comes that would let go of what was gathered
        reshard(model)
    return result


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass of a sharded model reduces its gradients, or keeps them."""
    if is_sharded(model):
        model.set_requires_gradient_sync(now)  # type: ignore[operator]


@contextmanager
def whole(model: nn.Module, cfg: ParallelConfig) -> Iterator[None]:
    """All parameters of a sharded model on each of its ranks: no forward pass waits for another.

    For generation, where ranks take different numbers of passes; without gradients. All ranks must
    enter it.
    """
    modules = _sharded_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    yield
    for module in modules:
        module.set_reshard_after_forward(
            cfg.reshard_after_forward and module is not model, recurse=False
        )
        module.reshard()


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def full(tensor: Tensor) -> Tensor:
    """The whole of a parameter, without gradient; every rank of a sharded model must call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter, its own memory, without gradient.

    Of a sharded one its rows (`shards.rows_of`).
    """
    parameter = parameter.detach()
    if not isinstance(parameter, DTensor):
        return parameter
    assert parameter.placements == (Shard(0),), parameter.placements
    return parameter.to_local()


def own_rows(parameter: Tensor) -> slice:
    """Which rows `own_part` is; all of a parameter that is not sharded."""
    if not isinstance(parameter, DTensor):
        return slice(None)
    mesh = parameter.device_mesh
    first, count = rows_of(parameter.shape[0], mesh.get_local_rank(), mesh.size())
    return slice(first, first + count)


def reshard(model: nn.Module) -> None:
    """Lets go of what a sharded model has gathered: its parameters are this rank's rows."""
    for module in _sharded_modules(model):
        module.reshard()


def copy_into(parameter: Tensor, values: Tensor) -> None:
    """Sets a parameter, sharded or not, to `values`, which every rank holds whole."""
    with torch.no_grad():
        if not isinstance(parameter, DTensor):
            parameter.copy_(values)
            return
        parameter.to_local().copy_(values[own_rows(parameter)])


def in_lockstep(
    items: Sequence[Item], group: dist.ProcessGroup | None, device: torch.device
) -> Iterator[tuple[Item | None, bool]]:
    """The items, then None until every rank of `group` has had as many; and whether it is the last.

    Args:
        group: ranks whose passes are collectives; None: there are none, so no None comes.
        device: of the group's collectives.
    """
    count = max(of_each_rank(len(items), group, device))
    for i in range(count):
        yield (items[i] if i < len(items) else None), i == count - 1


def of_each_rank(value: int, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The values by rank of `group`, each of which must call it; None: this one's alone."""
    if group is None:
        return [value]
    values = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    values[dist.get_rank(group)] = value
    dist.all_reduce(values, group=group)
    return values.tolist()


def any_rank(value: bool, group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether it is true on some rank of `group`, each of which must call it; None: on this one."""
    return any(of_each_rank(int(value), group, device))


def sum_over_trainers(
    parameters: Sequence[Tensor], sums: dict[str, float], group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Adds up the trainers' gradients (in place) and metrics; every trainer must call it.

    Gradients of sharded parameters are added up already. A metric that a trainer lacks counts as 0.
    """
    if group is None:
        return sums
    whole_ones = [p for p in parameters if not isinstance(p, DTensor)]
    for p in whole_ones:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    for bucket in _buckets([p.grad for p in whole_ones if p.grad is not None]):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            grad.copy_(total.view_as(grad))
    device = parameters[0].device
    names = _names_of_all(sorted(sums), group, device)
    values = torch.tensor([sums.get(n, 0.0) for n in names], dtype=torch.float64, device=device)
    dist.all_reduce(values, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def _names_of_all(names: list[str], group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """The names of what is added up: a rank that had nothing to compute has none of its own."""
    counts = of_each_rank(len(names), group, device)
    if min(counts) == max(counts):
        return names
    source = counts.index(max(counts))
    text = torch.tensor(list("\n".join(names).encode()), dtype=torch.uint8, device=device)
    size = torch.tensor(len(text), device=device)
    dist.broadcast(size, group_src=source, group=group)
    if dist.get_rank(group) != source:
        text = torch.zeros(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(text, group_src=source, group=group)
    return bytes(text.tolist()).decode().split("\n")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype in lists of about `_BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full_bucket = sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET_BYTES
        if bucket and (full_bucket or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def clip_gradients(parameters: Sequence[Tensor], max_norm: float | None) -> float:
    """Scales the gradients to a global 2-norm of at most `max_norm`; returns the norm before.

    Over all parameters and, of sharded ones, all trainers: each of them must call it.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm or float("inf"))
    return float(full(norm))
