"""The whole state of a trainer: taken at a step, put back on any number of trainers.

`take` copies everything that later steps depend on into host memory; `restore` puts it back.
Tensors in the shape of a parameter (moments of the optimizer, a reference that was reset) are laid
out by rows: each trainer of a sharded policy writes its own, and reads back the rows it needs from
the files of all. A replay buffer belongs to one trainer; where their number has changed, prompts
are dealt out anew. What searchers need, how many responses to each prompt have arrived, is a sum
over trainers.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from checkpoint import COMPLETED, Checkpoint, PolicyState, load_log_z_head, whole_state
from parallel import own_part, own_rows
from shards import rows_of

if TYPE_CHECKING:
    from trainer import TrainerParts

_OWN = {"arrivals": ("received",), "totals": ("drawn", "staleness_sum", "uses_sum")}
_SHARED = {
    "arrivals": ("generated", "generated_tokens"),
    "totals": ("tokens_before", "tokens", "staleness_max", "skipped_steps", "skipped_in_a_row"),
}


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """Copies in host memory, which training does not change."""

    step: int  # optimizer steps done
    policy: PolicyState | None  # trainer 0
    log_z_head: dict[str, Tensor] | None  # trainer 0, if there is one
    tensors: dict[str, Tensor]  # of this trainer, for a file of its own
    info: dict[str, Any]  # the same, plain JSON


def take(parts: TrainerParts, step: int) -> Snapshot:
    """Everything after `step` optimizer steps; all trainers of a sharded policy must call it."""
    lead, head = parts.ranks.rank == 0, parts.log_z_head
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, float]] = {}
    for name, parameter in _trained(parts):
        if not (lead or _is_part(parameter)):  # all trainers hold the same
            continue
        for entry, value in parts.optimizer.state.get(parameter, {}).items():
            if _by_rows(value, parameter):
                tensors[f"optimizer/{entry}/{name}"] = _copy(own_part(value))
            else:
                scalars.setdefault(entry, {})[name] = float(value)
    if parts.reference is not None and parts.reference_version:
        for name, parameter in parts.reference.named_parameters():
            if lead or _is_part(parameter):
                tensors[f"reference/{name}"] = _copy(own_part(parameter))
    buffer = parts.buffer.state_dict()
    tensors |= {f"buffer/{k}": torch.from_numpy(v) for k, v in buffer["arrays"].items()}
    tensors[COMPLETED] = torch.from_numpy(parts.arrivals.completed.copy())
    generators, random_state = _generators()
    return Snapshot(
        step=step,
        policy=whole_state(parts.policy, keep=lead, copy=True),
        log_z_head={k: _copy(v) for k, v in head.state_dict().items()} if lead and head else None,
        tensors=tensors | generators,
        info={
            "step": step,
            "optimizer": scalars,
            "buffer": buffer["meta"],
            "reference_version": parts.reference_version,
            "own": _counts(parts, _OWN),
            "shared": _counts(parts, _SHARED),
            "trained_s": time.monotonic() - parts.totals.training_started,
            "evaluations_due": sorted(parts.totals.evaluations_due),
            "held_out": {str(version): v for version, v in parts.arrivals.held_out.items()},
            "logprob_gap": {str(rank): gap for rank, gap in parts.arrivals.logprob_gap.items()},
            "random": random_state,
        },
    )


def restore(
    parts: TrainerParts, saved: Checkpoint, *, responses_per_prompt: int | None = None
) -> None:
    """Puts back all but the policy's weights, which were opened from the checkpoint's folder.

    Args:
        responses_per_prompt: that searchers sample from now on (S); None: as many as before.

    Raises:
        ValueError: the checkpoint does not fit these trainers; its folder is named.
    """
    try:
        _restore(parts, saved)
        if responses_per_prompt is not None:  # groups are what counts
            groups = parts.arrivals.completed // saved.about["responses_per_prompt"]
            parts.arrivals.completed = groups * responses_per_prompt
    except (ValueError, LookupError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        raise ValueError(f"{saved.folder} does not fit this run: {error}") from error


def _restore(parts: TrainerParts, saved: Checkpoint) -> None:
    """`restore`; whatever does not fit is raised."""
    rank, size = parts.ranks.rank, parts.ranks.num_trainers
    infos = [json.loads(path.read_text()) for path in saved.infos]
    if parts.log_z_head is not None:  # making one draws from torch's generator, so it comes first
        parts.log_z_head.load_state_dict(load_log_z_head(saved.folder).state_dict())
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in saved.tensors]
        _restore_rows(parts, files, infos[0])
        states = [
            {"arrays": _arrays(file, "buffer/"), "meta": info["buffer"]}
            for file, info in zip(files, infos, strict=True)
        ]
        if len(files) == size:
            parts.buffer.load_state_dict(states[rank])
            _set_generators(_arrays(files[rank], "generator/"), infos[rank]["random"])
        else:
            parts.buffer.load_shares(states, lambda prompt_id: prompt_id % size == rank)
    lacking = any((state["arrays"]["reference_version"] < 0).any() for state in states)
    if lacking and parts.reference is None:
        raise ValueError(
            "its responses came without log-probs of the reference: set "
            "trainer.reference_reset_every as it was"
        )
    for name, counters in _OWN.items():
        for counter in counters:
            values = [info["own"][name][counter] for info in infos]
            # rounded down: a count of one of several trainers whose number has changed
            value = values[rank] if len(values) == size else sum(values) // size
            _set(parts, name, counter, value)
    for name, values in infos[0]["shared"].items():
        for counter, value in values.items():
            _set(parts, name, counter, value)
    completed = saved.completed()
    if completed.shape != parts.arrivals.completed.shape:
        raise ValueError(f"{completed.shape} problems instead of {parts.arrivals.completed.shape}")
    completed[np.arange(len(completed)) % size != rank] = 0
    parts.arrivals.completed = completed
    parts.arrivals.held_out = {int(v): means for v, means in infos[0]["held_out"].items()}
    parts.arrivals.logprob_gap = {int(r): gap for r, gap in infos[0]["logprob_gap"].items()}
    parts.totals.evaluations_due = set(infos[0].get("evaluations_due", []))
    parts.reference_version = infos[0]["reference_version"]
    parts.totals.trained_before_s = infos[0]["trained_s"]
    parts.first_step = saved.step


def _trained(parts: TrainerParts) -> Iterator[tuple[str, Tensor]]:
    """Names and parameters that the optimizer changes."""
    for name, parameter in parts.policy.named_parameters():
        if parameter.requires_grad:
            yield name, parameter
    if parts.log_z_head is not None:
        for name, parameter in parts.log_z_head.named_parameters():
            yield f"log_z_head.{name}", parameter


def _is_part(parameter: Tensor) -> bool:
    """Whether other trainers hold other rows of it."""
    return own_rows(parameter) != slice(None)


def _by_rows(value: Any, parameter: Tensor) -> bool:
    return torch.is_tensor(value) and value.ndim > 0 and value.shape == parameter.shape


def _restore_rows(parts: TrainerParts, files: list[Any], info: dict[str, Any]) -> None:
    """Optimizer states, and a reference that is not the starting model's."""
    names = [set(file.keys()) for file in files]

    def read(name: str, parameter: Tensor) -> Tensor:
        """This trainer's rows of a tensor, from the files of those that have some of them."""
        owners = [file for file, known in zip(files, names, strict=True) if name in known]
        if not owners:
            raise ValueError(f"it has no {name}")
        wanted = own_rows(parameter)
        first, stop, _ = wanted.indices(parameter.shape[0])
        pieces = []
        for place, file in enumerate(owners):
            start, count = rows_of(parameter.shape[0], place, len(owners))
            held = file.get_slice(name)
            if held.get_shape() != [count, *parameter.shape[1:]]:
                raise ValueError(f"{name} has another shape than the model's")
            low, high = max(first, start), min(stop, start + count)
            if low < high:
                pieces.append(held[low - start : high - start])
        return torch.cat(pieces) if pieces else own_part(parameter)[:0].cpu()

    entries = {name.split("/")[1] for name in names[0] if name.startswith("optimizer/")}
    for name, parameter in _trained(parts):
        state: dict[str, Any] = {}
        for entry in sorted(entries):
            if f"optimizer/{entry}/{name}" in names[0]:
                state[entry] = torch.zeros_like(parameter.detach())
                own_part(state[entry]).copy_(read(f"optimizer/{entry}/{name}", parameter))
        for entry, values in info["optimizer"].items():
            if name in values:
                # as the optimizer makes it: a fused one keeps it where the parameter is
                device = own_part(parameter).device
                state[entry] = torch.tensor(values[name], dtype=torch.float32, device=device)
        if state:
            parts.optimizer.state[parameter] = state
    if info["reference_version"]:
        if parts.reference is None:
            raise ValueError("its reference was reset: set trainer.reference_reset_every as it was")
        for name, parameter in parts.reference.named_parameters():
            own_part(parameter).copy_(read(f"reference/{name}", parameter))


def _counts(parts: TrainerParts, names: dict[str, tuple[str, ...]]) -> dict[str, dict[str, Any]]:
    return {
        name: {counter: getattr(getattr(parts, name), counter) for counter in counters}
        for name, counters in names.items()
    }


def _set(parts: TrainerParts, name: str, counter: str, value: Any) -> None:
    setattr(getattr(parts, name), counter, value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _arrays(file: Any, prefix: str) -> dict[str, np.ndarray]:
    """Tensors of a file whose names begin so, without the prefix."""
    return {
        name.removeprefix(prefix): file.get_tensor(name).numpy()
        for name in file.keys()
        if name.startswith(prefix)
    }


# Nothing in this code draws from the process's global generators; what a fork adds may.


def _generators() -> tuple[dict[str, Tensor], Any]:
    """States of torch's and numpy's generators as tensors, of Python's as JSON."""
    states = {"generator/torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["generator/cuda"] = torch.cuda.get_rng_state()
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states["generator/numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    rest = {"kind": kind, "position": position, "has_gauss": has_gauss, "gauss": gauss}
    return states, {"numpy": rest, "python": random.getstate()}


def _set_generators(arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    torch.set_rng_state(torch.from_numpy(arrays["torch"].copy()))
    if "cuda" in arrays and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(arrays["cuda"].copy()))
    numpy = rest["numpy"]
    keys = arrays["numpy"].astype(np.uint32)
    state = (numpy["kind"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"])
    np.random.set_state(state)
    version, numbers, gauss = rest["python"]
    random.setstate((version, tuple(numbers), gauss))
