"""Low-rank adapters (LoRA, arXiv 2106.09685) on a policy, through peft.

`add_adapters` freezes the model and puts two small matrices A and B beside the weight W of each
chosen layer, which then computes with W + scaling B A; only they are trained. The model stays the
transformers model that it was. Engines and checkpoints get ordinary weights: `merged_weight` makes
one layer's from the two, and leaves the model as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import ListConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_ADAPTER = "default"  # peft's name of the only adapter


@dataclass
class LoraConfig:
    """Adapters instead of all weights. No dropout: engine and trainer must compute the same."""

    rank: int = 0  # rows of A and columns of B; 0: no adapters, all weights are trained
    alpha: float = 32.0  # B A is multiplied by alpha / rank
    # all-linear: every linear layer but the output head; or names of layers: [q_proj, v_proj]
    targets: Any = "all-linear"


def check_lora(cfg: LoraConfig) -> None:
    """Checks that need no model.

    Raises:
        ValueError: an option out of range, or peft is not installed.
    """
    if cfg.rank < 0:
        raise ValueError(f"trainer.lora.rank={cfg.rank} must be 0 (no adapters) or more")
    if not 0 < cfg.alpha < float("inf"):
        raise ValueError(f"trainer.lora.alpha={cfg.alpha} must be positive")
    targets = _target_names(cfg)
    if not targets or not all(isinstance(name, str) and name for name in targets):
        raise ValueError(
            f"trainer.lora.targets={cfg.targets}: give all-linear, or names of layers such as "
            "[q_proj,v_proj]"
        )
    if cfg.rank:
        _peft()


def add_adapters(model: PreTrainedModel, cfg: LoraConfig, *, seed: int) -> None:
    """Freezes `model` and adds adapters, float32, in place; it computes the same as before.

    A is random, from `seed` alone: all trainers must start from the same adapters. B is zero.

    Raises:
        ValueError: trainer.lora.targets names no layer that can have an adapter, or peft refuses.
    """
    peft = _peft()
    layers = _choose(model, cfg)
    options = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        target_modules=layers,
        lora_dropout=0.0,
        bias="none",
        fan_in_fan_out=isinstance(model.get_submodule(layers[0]), Conv1D),
        task_type="CAUSAL_LM",
    )
    on_gpu = model.device.type == "cuda"
    with torch.random.fork_rng([model.device] if on_gpu else []):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(options, model, adapter_name=_ADAPTER)
        except ValueError as error:
            raise ValueError(f"trainer.lora.targets={cfg.targets}: {error}") from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # peft made them in the layer's dtype
    assert set(adapted_layers(model)) == set(layers)


def adapted_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers with an adapter by their names in the model without adapters; none: an empty dict."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "lora_A")
    }


def merged_weight(
    layer: Any,
    full: Callable[[Tensor], Tensor] = Tensor.detach,
    own: Callable[[Tensor], Tensor] | None = None,
    rows: slice = slice(None),
) -> Tensor:
    """W + scaling B A of an adapted layer, or rows of it, a new float32 tensor.

    Args:
        full: makes the whole tensor, without gradient, of a parameter.
        own: makes the rows of W; None: `full`, all of them.
        rows: which ones they are.
    """
    weight = (own or full)(layer.base_layer.weight).float()  # [out, in]; [in, out] in GPT-2's
    left = full(layer.lora_B[_ADAPTER].weight).float()  # [out, rank]
    right = full(layer.lora_A[_ADAPTER].weight).float()  # [rank, in]
    if layer.fan_in_fan_out:
        left, right = right.t(), left.t()
    return torch.addmm(weight, left[rows], right, alpha=layer.scaling[_ADAPTER])


def adapter_weights(
    model: torch.nn.Module, full: Callable[[Tensor], Tensor] = Tensor.detach
) -> Iterator[tuple[str, Tensor]]:
    """(name in peft's format, A or B) of all adapters; none: nothing. `full` as above."""
    for name, layer in adapted_layers(model).items():
        for part in ("lora_A", "lora_B"):
            matrix: Any = getattr(layer, part)
            yield f"base_model.model.{name}.{part}.weight", full(matrix[_ADAPTER].weight)


def load_adapter(folder: Path, model: torch.nn.Module) -> None:
    """Puts the adapters of `save_adapter` into a model that has such adapters, not yet sharded.

    Raises:
        ValueError: they are those of other layers, of another rank, or scaled otherwise.
    """
    path = folder / "adapter_model.safetensors"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the policy was trained without adapters")
    saved, mine = load_file(path), dict(adapter_weights(model))
    if saved.keys() != mine.keys():
        name = min(saved.keys() ^ mine.keys())
        raise ValueError(f"{path}: {name} is only in one of it and trainer.lora.targets")
    options: Any = model.peft_config  # peft's own attribute of a model
    alpha = json.loads((folder / "adapter_config.json").read_text())["lora_alpha"]
    if alpha != options[_ADAPTER].lora_alpha:
        raise ValueError(f"{path} was trained with trainer.lora.alpha={alpha}")
    for name, matrix in mine.items():
        if saved[name].shape != matrix.shape:
            raise ValueError(f"{path}: {name} has another shape than trainer.lora.rank's")
        matrix.copy_(saved[name])


def save_adapter(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Writes the adapters alone in peft's format: `PeftModel.from_pretrained(base, folder)`.

    Args:
        weights: the `adapter_weights` of `model`.
    """
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    options = model.peft_config[_ADAPTER]
    options.base_model_name_or_path = model.config._name_or_path
    options.inference_mode = True
    options.save_pretrained(folder)


def _choose(model: PreTrainedModel, cfg: LoraConfig) -> list[str]:
    """Names of the layers that get an adapter, in the model's order."""
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }
    if cfg.targets == "all-linear":
        chosen = list(layers)
        wanted: list[str] = []
    else:
        wanted = _target_names(cfg)
        chosen = [
            name for name in layers if any(f".{name}".endswith(f".{target}") for target in wanted)
        ]
    unmatched = [
        target for target in wanted if not any(f".{name}".endswith(f".{target}") for name in chosen)
    ]
    if unmatched or not chosen:
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
        raise ValueError(
            f"trainer.lora.targets={cfg.targets}: {model.config.model_type} has no layer "
            f"{unmatched[0] if unmatched else 'for it'}; those that can have an adapter: {known}"
        )
    if len({isinstance(layers[name], Conv1D) for name in chosen}) > 1:
        raise ValueError(
            f"trainer.lora.targets={cfg.targets}: some of these layers of "
            f"{model.config.model_type} keep their weights transposed, some don't; name one kind"
        )
    return chosen


def _target_names(cfg: LoraConfig) -> list[str]:
    if isinstance(cfg.targets, (list, tuple, ListConfig)):
        return list(cfg.targets)
    return [cfg.targets]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(
            "trainer.lora.rank needs peft: pip install -r requirements.txt "
            f"(or trainer.lora.rank=0) ({error})"
        ) from error
    return peft
