"""Saving the policy as an ordinary Hugging Face folder, its log Z head (if any) with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from model import LogZHead
from parallel import full

LOG_Z_FILE = "log_z_head.safetensors"


def save_policy(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    *,
    log_z_head: LogZHead | None = None,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Writes weights (safetensors), tokenizer and `trainer.json` beside `folder`, then renames.

    A crash while writing leaves the previous folder as it was. transformers and vLLM open it as it
    is, however many trainers there were.

    Args:
        weights: from `whole_state`; None: those of `model`, which is not sharded.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    model.save_pretrained(beside, state_dict=weights)
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


def whole_state(model: PreTrainedModel, *, keep: bool) -> dict[str, Tensor] | None:
    """Parameters and buffers in host memory; every rank of a sharded model must call it.

    Args:
        keep: on this rank; the others only take part.

    Returns:
        None where it is not kept.
    """
    state = {}
    for name, tensor in model.state_dict().items():
        gathered = full(tensor)
        if keep:
            state[name] = gathered.cpu()
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
