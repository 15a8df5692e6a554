"""Saving the policy as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_policy(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
) -> Path:
    """Writes weights (safetensors), tokenizer and `trainer.json` beside `folder`, then renames.

    A crash while writing leaves the previous folder as it was. transformers and vLLM open it as it
    is.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    model.save_pretrained(beside, safe_serialization=True)
    tokenizer.save_pretrained(beside)
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
