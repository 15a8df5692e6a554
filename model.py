"""Policies: opening one, and the log-probs of given response tokens.

One log-prob contract for policy, reference and engine: token ids end to end; logits are divided by
the sampling temperature; log-softmax in float32; the sampled end-of-text token counts; the token
at position i is predicted by the hidden state at i - 1. Sequences lie in one packed row (`packing`)
or are padded on the right, where causal attention can't see: positions start at 0 and no padding
mask exists to be wrong. Log-probs come from hidden states in blocks (`logprobs`), so that the
logits of a micro-batch never exist at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from logprobs import CHUNK_TOKENS, CHUNK_VOCABULARY, selected_logprobs
from packing import bins, check_packing, pack, packed_hidden, set_attention
from parallel import call, decoder_layers, device_of, in_lockstep, is_sharded

logger = logging.getLogger("tba")


@dataclass
class ModelConfig:
    """Which policy to start from; it is the reference policy too."""

    name: str = "custom"
    path: str | None = None  # Hugging Face name or folder; null: `build` makes it on first use
    build: Any = None  # `_target_` of a function (out: Path) -> None, for models made here
    tokenizer: str | None = None  # null: the model's own
    trust_remote_code: bool = False


_OTHER_TOKENS = 0.05  # share of token ids that may have other text than in the model's tokenizer
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_policy(
    path: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> PreTrainedModel:
    """A causal language model in eval mode (no dropout: engine and trainer must agree).

    Raises:
        ValueError: the folder or name can't be opened (model.path), or an option that it needs; or
            its weights are not all there, or not finite.
    """
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except Exception as error:  # of any kind: it is code of the model's, on files of the user's
        raise _can_not_be_opened(path, error) from error
    lacking, surplus = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if lacking:  # transformers has made them up
        raise ValueError(
            f"model.path={path!r}: its files lack {len(lacking)} of the model's weights, such as "
            f"{lacking[0]}: they and its config.json do not belong together"
        )
    if surplus:
        logger.warning(
            "model.path=%r: %d weights in its files are not of this model, such as %s",
            *(path, len(surplus), surplus[0]),
        )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ValueError(f"model.path={path!r}: {name} holds NaN or infinity")
    return model.to(device).eval()


def _can_not_be_opened(path: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError)):
        reason = f"{type(error).__name__}: {reason}"
    return ValueError(f"model.path={path!r} can't be opened: {reason}")


def disable_dropout(model: PreTrainedModel) -> None:
    """Sets every dropout of the model to 0: engine and trainer must compute the same log-probs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def compile_layers(model: torch.nn.Module, *, backend: str = "inductor") -> None:
    """torch.compile of each decoder layer, in place; the first forward passes compile.

    Layer by layer, because layers share their compiled code and the attention of packed rows may
    be a function that is not compiled. The first length is compiled for, then, once, any length.
    Use `uncompiled` for generation, whose growing cache would compile again and again.

    Args:
        backend: of torch.compile.

    Raises:
        ValueError: nothing compiles on this machine, or the model's layers are not known.
    """
    try:
        layers = decoder_layers(model)
    except ValueError as error:
        raise ValueError(f"trainer.compile=true: {error}; set it to false") from error
    device = device_of(model)
    try:
        torch.compile(torch.sin, backend=backend)(torch.ones(8, device=device))
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # without torch's words around it
        reason = str(cause).strip().partition("\n")[0]
        raise ValueError(
            "trainer.compile=true needs a C++ compiler and Python's headers (apt install g++ "
            f"python3-dev); else set trainer.compile=false. torch.compile says: {reason}"
        ) from error
    for layer in layers:
        layer.compile(backend=backend)


def uncompiled() -> AbstractContextManager[Any]:
    """Within it compiled layers run as they were written."""
    return torch.compiler.set_stance("force_eager")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or name; a missing pad token becomes the end of text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the tokenizer of {path!r} can't be opened: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path!r} has no end-of-text token: set model.tokenizer")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_causal(path: str, *, trust_remote_code: bool = False) -> None:
    """Raises ValueError unless the model's config says that it is a causal language model."""
    config = _config(path, trust_remote_code)
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return
    known = {name for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _flat(names)}
    named = list(getattr(config, "architectures", None) or [])
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and (not named or known.intersection(named)):
        return
    what = ", ".join(named) or config.model_type
    raise ValueError(
        f"model.path={path!r} is no causal language model but {what}: give one that continues "
        "text (...ForCausalLM in its config.json)"
    )


def _flat(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def check_tokenizer(
    path: str, tokenizer: PreTrainedTokenizerBase, *, given: str | None, trust_remote_code: bool
) -> None:
    """Raises ValueError if the tokenizer's ids are not the model's.

    Args:
        given: `model.tokenizer`; None: the model's own.
    """
    size = _config(path, trust_remote_code).get_text_config().vocab_size
    vocabulary = tokenizer.get_vocab()  # text -> id
    fix = "set model.tokenizer to the model's own" if given is None else "leave model.tokenizer out"
    # Libraries add special tokens of their own that no text has and no model knows.
    added = tokenizer.added_tokens_decoder
    ids = [number for number in vocabulary.values() if number not in added]
    largest = max([*ids, tokenizer.eos_token_id, tokenizer.pad_token_id])
    if largest >= size:
        raise ValueError(
            f"the tokenizer of {given or path!r} has token ids up to {largest}, and the model of "
            f"model.path={path!r} knows {size} tokens: {fix}"
        )
    if given is None:
        return
    try:
        own = load_tokenizer(path, trust_remote_code=trust_remote_code)
    except ValueError:
        return  # a model without one: there is nothing to compare with
    texts = {number: text for text, number in own.get_vocab().items()}
    wrong = sum(texts.get(number, text) != text for text, number in vocabulary.items())
    # Fine-tuned models give a few reserved ids another text.
    if wrong > _OTHER_TOKENS * len(vocabulary):
        raise ValueError(
            f"model.tokenizer={given!r} is not the tokenizer of model.path={path!r}: {wrong} of "
            f"its {len(vocabulary)} token ids stand for other text there; {fix}"
        )


def check_prompt_ids(
    path: str, prompt_tokens: Sequence[np.ndarray], *, trust_remote_code: bool
) -> None:
    """Raises ValueError if the model does not know a token of a prompt, int32 [P] each."""
    size = _config(path, trust_remote_code).get_text_config().vocab_size
    largest = max((int(tokens.max()) for tokens in prompt_tokens), default=0)
    if largest >= size:
        raise ValueError(
            f"a prompt has the token id {largest}, and the model of model.path={path!r} knows "
            f"{size} tokens: set model.tokenizer to the model's own"
        )


def _config(path: str, trust_remote_code: bool) -> Any:
    """The model's config.

    Raises:
        ValueError: it can't be opened.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _can_not_be_opened(path, error) from error


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
    text_config = _config(path, trust_remote_code).get_text_config()
    return getattr(text_config, "max_position_embeddings", None)


def architecture(path: str, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """What decides the shapes of a model's weights, from its config; plain JSON."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    text_config = config.get_text_config()
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "tie_word_embeddings",
    )
    return {"type": config.model_type} | {n: getattr(text_config, n, None) for n in sizes}


def attention_heads(path: str, *, trust_remote_code: bool = False) -> tuple[int, int] | None:
    """Heads of queries, and of keys and values, in a layer; None: not in the config."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    text_config = config.get_text_config()
    heads = getattr(text_config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return None
    return heads, getattr(text_config, "num_key_value_heads", None) or heads


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


@dataclass
class LogprobsConfig:
    """Blocks in which log-probs are computed; a float32 block is what they need of memory."""

    chunk_tokens: int = CHUNK_TOKENS  # response tokens of a block
    chunk_vocabulary: int = CHUNK_VOCABULARY  # words of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How sequences lie in a forward pass, and the blocks of their log-probs."""

    packed: bool = False  # one row without padding; `prepare_for_packing` comes first
    share_prompts: bool = True  # of packed rows: a prompt's tokens once for all its responses
    chunk_tokens: int = CHUNK_TOKENS  # see LogprobsConfig
    chunk_vocabulary: int = CHUNK_VOCABULARY


PADDED = Layout()

# Prompt or response of a pass that a rank takes for the sake of the others (`in_lockstep`).
NOTHING = [np.zeros(1, np.int32)]


def prepare_for_packing(
    model: PreTrainedModel, attention: str, *, compute_dtype: torch.dtype | None = None
) -> None:
    """Makes a model read packed rows, and checks on a few tokens that it reads them right.

    Its other uses (padded batches, generation) stay as they were.

    Args:
        attention: see `packing.set_attention`.
        compute_dtype: that its forward passes will run in; None: its parameters'. Of a sharded
            model, all ranks of which must call this, the one it was sharded with.

    Raises:
        ValueError: this kind of model, or of attention, can't do it.
    """
    set_attention(model, attention, compute_dtype=compute_dtype)
    if head_options(model) is None:
        raise ValueError(
            f"{model.config.model_type} can't read packed rows: it does something of its own to "
            "its logits; set trainer.packing.attention=off"
        )
    dtype = None if is_sharded(model) else compute_dtype
    with torch.no_grad(), _autocast(device_of(model), dtype):
        call(model, check_packing, model)


def response_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
    layout: Layout = PADDED,
    phases: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Log-probs of the response tokens under `model` at `temperature`, float32 [N] (nats).

    With `autocast` the forward pass runs in that dtype; the log-softmax is always float32.
    """
    logprobs, _ = logprobs_and_entropies(
        model,
        prompts,
        responses,
        temperature=temperature,
        autocast=autocast,
        layout=layout,
        entropy=False,
        phases=phases,
    )
    return logprobs


def logprobs_and_entropies(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    temperature: float,
    autocast: torch.dtype | None = None,
    layout: Layout = PADDED,
    entropy: bool = True,
    phases: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> tuple[Tensor, Tensor | None]:
    """`response_logprobs`, and the entropy of the policy at each of those tokens (nats).

    Args:
        phases: `forward` and `logprobs` are entered as its contexts, see `accounting.Phases`.

    Returns:
        float32 [N] twice, both differentiable; the second is None without `entropy`.

    Raises:
        ValueError: packed rows, and a model that `prepare_for_packing` has not seen.
    """
    device = device_of(model)
    with _autocast(device, autocast):
        return call(
            model, _forward, model, prompts, responses, temperature, layout, entropy, phases
        )


def _forward(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    temperature: float,
    layout: Layout,
    entropy: bool,
    phases: Callable[[str], AbstractContextManager[Any]],
) -> tuple[Tensor, Tensor | None]:
    device = device_of(model)
    head = head_options(model)
    with phases("forward"):
        if layout.packed:
            assert head is not None, "prepare_for_packing refuses such a model"
            row = pack(prompts, responses, share_prompts=layout.share_prompts, device=device)
            hidden, targets = packed_hidden(model, row), row.targets  # [N, H], [N]
        else:
            batch = pad(prompts, responses, device)
            targets = batch.targets
            whole = model if head is None else model.base_model
            output = whole(input_ids=batch.input_ids, use_cache=False)
            states = output.logits if head is None else output.last_hidden_state
            hidden = states[batch.rows, batch.columns]  # [N, H], or logits [N, V]
    with phases("logprobs"):
        if head is None:
            return _from_logits(hidden, targets, temperature, entropy)
        return selected_logprobs(
            hidden,
            targets=targets,
            temperature=temperature,
            chunk_tokens=layout.chunk_tokens,
            chunk_vocabulary=layout.chunk_vocabulary,
            entropy=entropy,
            **head,
        )


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def _from_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """The same from the logits [N, V] of a model whose head is not known."""
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)  # [N, V]
    entropies = -(logprobs.exp() * logprobs).sum(-1) if entropy else None
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropies


@torch.no_grad()
def prompt_features(
    model: PreTrainedModel, prompts: Sequence[np.ndarray], *, autocast: torch.dtype | None = None
) -> Tensor:
    """Mean over a prompt's tokens of the last hidden states, float32 [G, H], without gradient."""
    device = device_of(model)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    input_ids = np.zeros((len(prompts), int(lengths.max())), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        input_ids[row, : len(prompt)] = prompt
    with _autocast(device, autocast):
        states = call(
            model,
            model.base_model,
            input_ids=torch.from_numpy(input_ids).to(device),
            use_cache=False,
        )
    hidden = states.last_hidden_state  # [G, L, H]
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


def head_options(model: PreTrainedModel) -> dict[str, Any] | None:
    """What makes the model's logits of its hidden states, as keywords of `selected_logprobs`.

    None: more than a linear head and a scale or cap known here. Such a model must go through its
    own forward pass, with all its logits.
    """
    head = model.get_output_embeddings()
    config = model.config
    scale, softcap = 1.0, None
    if _rescales_logits(config):
        # By type: some multiply by what others, under the same name, divide by.
        if config.model_type in ("cohere", "cohere2"):
            scale = config.logit_scale
        elif config.model_type in ("granite", "granitemoe"):
            scale = 1 / config.logits_scaling
        elif config.model_type in ("gemma2", "gemma3_text"):
            softcap = config.final_logit_softcapping
        else:
            return None
    if not isinstance(head, torch.nn.Linear):
        return None
    return {"weight": head.weight, "bias": head.bias, "scale": scale, "softcap": softcap}


def _rescales_logits(config: Any) -> bool:
    """Whether a model scales or caps its logits after the head."""
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
    configs = (config, config.get_text_config())  # the second of models that read images too
    return any(getattr(c, name, None) not in (None, 1, 1.0) for c in configs for name in names)


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
    layout: Layout = PADDED,
    group: dist.ProcessGroup | None = None,
) -> list[np.ndarray]:
    """Per-response log-probs without gradient, float32 [T] each; equal ones computed once.

    Args:
        group: ranks over which the model is sharded, each of which must call it.
    """
    first, slot_of = distinct(prompts, responses)
    prompts, responses = [prompts[i] for i in first], [responses[i] for i in first]
    values: dict[int, np.ndarray] = {}
    device = device_of(model)
    parts = split(prompts, responses, tokens_per_micro_batch, layout)
    # FSDP keeps gathered parameters, which inference mode would spoil for training.
    with torch.no_grad() if is_sharded(model) else torch.inference_mode():
        for part, _ in in_lockstep(parts, group, device):
            logprobs = response_logprobs(
                model,
                NOTHING if part is None else [prompts[i] for i in part],
                NOTHING if part is None else [responses[i] for i in part],
                temperature=temperature,
                autocast=autocast,
                layout=layout,
            )
            if part is None:
                continue
            ends = np.cumsum([len(responses[i]) for i in part])
            values.update(zip(part, np.split(logprobs.cpu().numpy(), ends[:-1]), strict=True))
    return [values[slot] for slot in slot_of]


def split(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    max_tokens: int,
    layout: Layout,
) -> list[list[int]]:
    """Indices in micro-batches of at most `max_tokens`, in the packed row or with the padding.

    Responses that share their prompt stay together where they fit. Padded, a sequence over the
    limit comes alone.

    Raises:
        ValueError: a sequence is longer than a packed row may be.

    >>> a, b, y = np.array([1, 2]), np.array([3]), np.array([4, 5, 6])
    >>> split([a, b, a], [y, y, y], 6, Layout(packed=True)), split([a, b, a], [y, y, y], 6, PADDED)
    ([[0, 2], [1]], [[1], [0], [2]])
    """
    if not layout.packed:
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        return list(micro_batches(lengths, max_tokens))
    sharing: dict[Any, list[int]] = {}
    for i, prompt in enumerate(prompts):
        sharing.setdefault(prompt.tobytes() if layout.share_prompts else i, []).append(i)
    pieces: list[list[int]] = []
    sizes: list[int] = []
    for members in sharing.values():
        lengths = [len(responses[i]) - 1 for i in members]  # see packing.Packed
        shared = len(prompts[members[0]])
        for chosen in bins(lengths, max_tokens, overhead=shared):
            pieces.append([members[j] for j in chosen])
            sizes.append(shared + sum(lengths[j] for j in chosen))
    return [sorted(i for j in chosen for i in pieces[j]) for chosen in bins(sizes, max_tokens)]


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
