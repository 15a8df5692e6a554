"""Policies: opening one, and the log-probs of given response tokens.

One log-prob contract for policy, reference and engine: token ids end to end; logits are divided by
the sampling temperature; log-softmax in float32; the sampled end-of-text token counts; the token
at position i is predicted by the hidden state at i - 1. Sequences are padded on the right, where
causal attention can't see, so positions start at 0 and no padding mask exists to be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)


@dataclass
class ModelConfig:
    """Which policy to start from; it is the reference policy too."""

    name: str = "custom"
    path: str | None = None  # Hugging Face name or folder; null: `build` makes it on first use
    build: Any = None  # `_target_` of a function (out: Path) -> None, for models made here
    tokenizer: str | None = None  # null: the model's own
    trust_remote_code: bool = False


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_policy(
    path: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model in eval mode (no dropout: engine and trainer must agree).

    Raises:
        ValueError: the folder or name can't be opened (model.path), or an option that it needs.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={path!r} can't be opened: {error}") from error
    return model.to(device).eval()


def disable_dropout(model: PreTrainedModel) -> None:
    """Sets every dropout of the model to 0: engine and trainer must compute the same log-probs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or name; a missing pad token becomes the end of text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the tokenizer of model.path={path!r} can't be opened: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path!r} has no end-of-text token: set model.tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: the tokenizer's and the generation config's."""
    from transformers import GenerationConfig

    stops = {int(tokenizer.eos_token_id)}
    try:
        eos = GenerationConfig.from_pretrained(path).eos_token_id
        stops |= {eos} if isinstance(eos, int) else set(eos or [])
    except OSError:
        pass  # no generation_config.json: the tokenizer's token alone
    return sorted(stops)


def context_length(path: str, *, trust_remote_code: bool = False) -> int | None:
    """Most tokens a sequence may have, prompt and response together; None: not in the config."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={path!r} can't be opened: {error}") from error
    text_config = config.get_text_config()
    return getattr(text_config, "max_position_embeddings", None)


def empty_model(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model's module tree without memory (meta device): names and shapes of its weights."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def resolve_path(cfg: ModelConfig, build: Callable[[Path], Any] | None) -> str:
    """The model's folder or name; builds and caches a model that is made here.

    Raises:
        ValueError: neither a path nor a build is given, or the folder does not exist.
    """
    if cfg.path is not None:
        looks_local = cfg.path.startswith(("/", ".", "~"))
        if looks_local and not (Path(cfg.path).expanduser() / "config.json").is_file():
            raise ValueError(
                f"model.path={cfg.path!r}: no config.json there; give a Hugging Face folder or name"
            )
        return str(Path(cfg.path).expanduser()) if looks_local else cfg.path
    if build is None:
        raise ValueError("model.path is missing: give a Hugging Face folder or name, or model=tiny")
    from pretrained import cached

    return str(cached(_build_name(cfg.name, build), build))


def _build_name(name: str, build: Callable[[Path], Any]) -> str:
    """The cache folder's name tells the options, so that changed options build anew."""
    keywords = build.keywords if isinstance(build, partial) else {}
    words = [name, *(f"{key}-{value}" for key, value in sorted(keywords.items()))]
    return re.sub(r"[^A-Za-z0-9._-]", "_", "-".join(words))


# --------------------------------------------------------------------------- log-probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """B sequences padded on the right, and where their N response tokens are predicted."""

    input_ids: Tensor  # int64 [B, L]
    rows: Tensor  # int64 [N], sequence of each response token
    columns: Tensor  # int64 [N], position that predicts it
    targets: Tensor  # int64 [N], the token


def pad(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], device: torch.device
) -> Padded:
    """Lays out prompts and responses; response tokens stay in order, one response after another.

    >>> p = pad([np.array([5, 6])], [np.array([7, 8])], torch.device("cpu"))
    >>> p.input_ids.tolist(), p.columns.tolist(), p.targets.tolist()
    ([[5, 6, 7, 8]], [1, 2], [7, 8])
    """
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    input_ids = np.zeros((len(prompts), max(lengths)), dtype=np.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0:
            raise ValueError("a prompt without tokens has nothing to predict its response from")
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : lengths[row]] = response
    counts = np.array([len(r) for r in responses])
    starts = np.array([len(p) - 1 for p in prompts])
    rows = np.repeat(np.arange(len(prompts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.arange(counts.sum()) - first + np.repeat(starts, counts)
    return Padded(
        input_ids=torch.from_numpy(input_ids).to(device),
        rows=torch.from_numpy(rows).to(device),
        columns=torch.from_numpy(columns).to(device),
        targets=torch.from_numpy(np.concatenate(responses).astype(np.int64)).to(device),
    )


def response_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Log-probs of the response tokens under `model` at `temperature`, float32 [N] (nats).

    Logits exist for response positions alone. With `autocast` the forward pass runs in that dtype;
    the log-softmax is always float32.
    """
    device = next(model.parameters()).device
    padded = pad(prompts, responses, device)
    context = nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
    with context:
        logits = _logits_at(model, padded)  # [N, V]
    return -F.cross_entropy(logits.float() / temperature, padded.targets, reduction="none")


@torch.no_grad()
def prompt_features(
    model: PreTrainedModel, prompts: Sequence[np.ndarray], *, autocast: torch.dtype | None = None
) -> Tensor:
    """Mean over a prompt's tokens of the last hidden states, float32 [G, H], without gradient."""
    device = next(model.parameters()).device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    input_ids = np.zeros((len(prompts), int(lengths.max())), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = prompt
    context = nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
    with context:
        hidden = model.base_model(
            input_ids=torch.from_numpy(input_ids).to(device), use_cache=False
        ).last_hidden_state  # [G, L, H]
    mask = torch.arange(input_ids.shape[1], device=device) < lengths[:, None]  # [G, L]
    return (hidden.float() * mask[:, :, None]).sum(1) / lengths[:, None]


class LogZHead(torch.nn.Module):
    """A learned log Z(x): linear on the mean hidden state of the prompt, in nats.

    As in the trajectory-balance trainers for language models that learn log Z (Lee et al., arXiv
    2405.18540), but its gradient stops at the hidden states: the policy's own learning rate need
    not suit it. It starts at log Z = 0, which is right for a reward of 0.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, features: Tensor) -> Tensor:
        """float32 [G, H] -> float32 [G]."""
        return self.linear(features).squeeze(-1)


def _logits_at(model: PreTrainedModel, padded: Padded) -> Tensor:
    head = model.get_output_embeddings()
    if head is None or _rescales_logits(model.config):
        return model(input_ids=padded.input_ids, use_cache=False).logits[
            padded.rows, padded.columns
        ]
    hidden = model.base_model(input_ids=padded.input_ids, use_cache=False).last_hidden_state
    return head(hidden[padded.rows, padded.columns])


def _rescales_logits(config: Any) -> bool:
    """Models that scale or cap their logits after the head must go through their own forward."""
    names = (
        "final_logit_softcapping",  # Gemma
        "logits_soft_cap",  # RecurrentGemma
        "output_logit_soft_cap",  # xLSTM
        "logit_scale",  # Cohere
        "logits_scaling",  # Granite, MiniCPM
        "lm_head_multiplier",  # Falcon-H1
        "mup_width_multiplier",
        "logits_mup_width_multiplier",
    )
    return any(getattr(config, name, None) not in (None, 1, 1.0) for name in names)


def distinct(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
) -> tuple[list[int], list[int]]:
    """Equal (prompt, response) pairs have equal log-probs: compute them once.

    Returns:
        The index of each distinct pair's first occurrence, and each pair's position in that list.

    >>> a, b = np.array([1]), np.array([2])
    >>> distinct([a, a, a], [a, b, a])
    ([0, 1], [0, 1, 0])
    """
    slots: dict[tuple[bytes, bytes], int] = {}
    first: list[int] = []
    slot_of: list[int] = []
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        slot = slots.setdefault((prompt.tobytes(), response.tobytes()), len(first))
        if slot == len(first):
            first.append(i)
        slot_of.append(slot)
    return first, slot_of


def unique_response_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
    tokens_per_micro_batch: int,
) -> list[np.ndarray]:
    """Per-response log-probs without gradient, float32 [T] each; equal ones computed once."""
    first, slot_of = distinct(prompts, responses)
    values: dict[int, np.ndarray] = {}
    lengths = [len(prompts[i]) + len(responses[i]) for i in first]
    with torch.inference_mode():
        for part in micro_batches(lengths, tokens_per_micro_batch):
            items = [first[slot] for slot in part]
            logprobs = response_logprobs(
                model,
                [prompts[i] for i in items],
                [responses[i] for i in items],
                temperature=temperature,
                autocast=autocast,
            )
            ends = np.cumsum([len(responses[i]) for i in items])
            values.update(zip(part, np.split(logprobs.cpu().numpy(), ends[:-1]), strict=True))
    return [values[slot] for slot in slot_of]


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in micro-batches of at most `max_tokens` padded tokens, similar lengths together.

    >>> list(micro_batches([3, 9, 3, 4], 9))
    [[0, 2], [3], [1]]
    """
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
