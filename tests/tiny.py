"""Tiny random models in Hugging Face folders, and prompts for them.

Every parameter is perturbed after the library's own initialisation, norms and biases too, and far
enough that distributions are peaked: a wrong position, scale or bias must change log-probs by much
more than the tolerance of a test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

VOCABULARY = 48
PAD, BOS, EOS = 0, 1, 2
FIRST_TOKEN = 3  # the lowest id that is no special token
MAX_LENGTH = 64  # tokens, prompt and response
_CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz.?"[: VOCABULARY - FIRST_TOKEN]
_SPECIAL = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_ROPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LENGTH,
    **_SPECIAL,
}


def save(config: PretrainedConfig, folder: Path, *, seed: int = 0, spread: float = 0.15) -> str:
    """Saves a random float32 model of `config`, and a tokenizer; returns the folder.

    Args:
        spread: standard deviation of what is added to every parameter.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        perturb(model, spread)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


@torch.no_grad()
def perturb(model: torch.nn.Module, spread: float = 0.02) -> None:
    """Adds normal noise to every parameter, in place."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * spread)


def save_tokenizer(folder: Path) -> None:
    """One token a character; ids 0, 1, 2 are padding, begin and end of text."""
    specials = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {text: i for i, text in enumerate([*specials, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)


def save_llama(
    folder: Path,
    *,
    tied: bool = True,
    max_length: int = MAX_LENGTH,
    heads: tuple[int, int] = (2, 1),
    seed: int = 0,
) -> str:
    """Llama with grouped-query attention: `heads` of queries, and of keys and values."""
    options = {**_ROPE, "max_position_embeddings": max_length, "tie_word_embeddings": tied}
    options["num_attention_heads"], options["num_key_value_heads"] = heads
    return save(LlamaConfig(**options), folder, seed=seed)


def save_gpt2(folder: Path, *, seed: int = 0) -> str:
    """GPT-2: absolute positions, tied embeddings, dropout in its config."""
    config = GPT2Config(n_positions=MAX_LENGTH, n_embd=64, n_layer=2, n_head=2, **_SPECIAL)
    return save(config, folder, seed=seed)


def save_neox(folder: Path, *, seed: int = 0) -> str:
    """GPT-NeoX: partial rotary positions, parallel residuals, biases."""
    options = {k: v for k, v in _ROPE.items() if k != "num_key_value_heads"}
    return save(GPTNeoXConfig(**options, rotary_pct=0.5), folder, seed=seed)


def save_qwen2(folder: Path, *, seed: int = 0) -> str:
    """Qwen2: Llama with biases on queries, keys and values."""
    return save(Qwen2Config(**_ROPE, tie_word_embeddings=True), folder, seed=seed)


def save_cohere(folder: Path, *, seed: int = 0) -> str:
    """Cohere: multiplies its logits by a constant after the head."""
    return save(CohereConfig(**_ROPE, logit_scale=0.5), folder, seed=seed)


def save_granite(folder: Path, *, seed: int = 0) -> str:
    """Granite: divides its logits by a constant after the head."""
    return save(GraniteConfig(**_ROPE, logits_scaling=2.0), folder, seed=seed)


def save_gemma2(folder: Path, *, seed: int = 0) -> str:
    """Gemma 2: caps its logits smoothly after the head."""
    config = Gemma2Config(**_ROPE, head_dim=32, final_logit_softcapping=2.0)
    return save(config, folder, seed=seed)


def save_falcon_h1(folder: Path, *, seed: int = 0) -> str:
    """Falcon-H1: multiplies its logits in the expression that calls the head."""
    config = FalconH1Config(
        **_ROPE,
        lm_head_multiplier=0.5,
        mamba_d_ssm=64,
        mamba_n_heads=2,
        mamba_d_head=32,
        mamba_d_state=8,
        mamba_chunk_size=8,
    )
    return save(config, folder, seed=seed)


SAVERS: dict[str, Callable[[Path], str]] = {
    "llama": save_llama,
    "llama-untied": partial(save_llama, tied=False),
    "gpt2": save_gpt2,
    "neox": save_neox,
    "qwen2": save_qwen2,
    "cohere": save_cohere,
    "granite": save_granite,
    "gemma2": save_gemma2,
    "falcon-h1": save_falcon_h1,
}


def random_tokens(rng: np.random.Generator, lengths: list[int]) -> list[np.ndarray]:
    """Arrays of random ordinary tokens, int32, one of each length."""
    return [rng.integers(FIRST_TOKEN, VOCABULARY, size=n).astype(np.int32) for n in lengths]


def plain_logprobs(
    model: torch.nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of one response, float32 [T], from one unpadded forward pass over all logits."""
    tokens = torch.tensor([*prompt.tolist(), *response.tolist()])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()  # [P + T, V]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    predicted_by = torch.arange(len(prompt) - 1, len(tokens) - 1)
    return logprobs[predicted_by, tokens[len(prompt) :]]
