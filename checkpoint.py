"""Saving the policy as an ordinary Hugging Face folder, its log Z head (if any) with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lora import adapter_weights, save_adapter
from model import LogZHead
from parallel import full
from weights import named_weights

LOG_Z_FILE = "log_z_head.safetensors"
ADAPTER_FOLDER = "adapter"  # of low-rank adapters alone, in peft's format


def save_policy(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    *,
    log_z_head: LogZHead | None = None,
    weights: PolicyState | None = None,
) -> Path:
    """Writes weights (safetensors), tokenizer and `trainer.json` beside `folder`, then renames.

    A crash while writing leaves the previous folder as it was. transformers and vLLM open it as it
    is, however many trainers there were: adapters are merged into the weights, and saved besides in
    a folder of their own.

    Args:
        weights: from `whole_state`; None: those of `model`, which is not sharded.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    weights = weights or whole_state(model, keep=True)
    assert weights is not None
    model.save_pretrained(beside, state_dict=weights.policy)
    if weights.adapter:
        save_adapter(beside / ADAPTER_FOLDER, model, weights.adapter)
    tokenizer.save_pretrained(beside)
    if log_z_head is not None:
        save_file(log_z_head.state_dict(), beside / LOG_Z_FILE)
    (beside / "trainer.json").write_text(json.dumps(dict(state), indent=2) + "\n")
    if folder.exists():
        previous = folder.with_name(f".{folder.name}.previous")
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
        beside.rename(folder)
        shutil.rmtree(previous)
    else:
        beside.rename(folder)
    return folder


@dataclass(slots=True, kw_only=True)
class PolicyState:
    """All that is saved of a policy, in host memory."""

    policy: dict[str, Tensor]  # parameters, adapters merged into them, and buffers
    adapter: dict[str, Tensor]  # adapters alone, in peft's names; empty without


def whole_state(model: PreTrainedModel, *, keep: bool) -> PolicyState | None:
    """Gathers what is saved of a policy; every rank of a sharded model must call it.

    Args:
        keep: on this rank; the others only take part.

    Returns:
        None where it is not kept.
    """
    buffers = {name for name, _ in model.named_buffers()}
    stored = ((n, full(x)) for n, x in model.state_dict().items() if n in buffers)
    state: PolicyState = PolicyState(policy={}, adapter={})
    for name, weight in chain(named_weights(model), stored):
        if keep:  # a merged weight is float32
            dtype = model.dtype if weight.is_floating_point() else weight.dtype
            state.policy[name] = weight.to("cpu", dtype)
    for name, matrix in adapter_weights(model, full):
        if keep:
            state.adapter[name] = matrix.cpu()
    return state if keep else None


def load_log_z_head(folder: Path) -> LogZHead:
    """The log Z head that was saved with a policy.

    Raises:
        ValueError: there is none in the folder.
    """
    path = folder / LOG_Z_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the policy was not trained with a log Z head")
    state = load_file(path)
    head = LogZHead(state["linear.weight"].shape[1])
    head.load_state_dict(state)
    return head
