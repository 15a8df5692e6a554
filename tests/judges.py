"""Tiny random judges in Hugging Face folders, and what they compute on one unpadded text."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
)

SIZE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": tiny.VOCABULARY,
    "pad_token_id": tiny.PAD,
}
ENDS = {"bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS}
CHAT = (
    "{% for m in messages %}{{ m['role'] + '=' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant=' }}{% endif %}"
)


def decoder(**options: Any) -> PretrainedConfig:
    """Pythia's architecture."""
    return GPTNeoXConfig(**{**SIZE, **ENDS, "rotary_pct": 0.5, **options})


def encoder(**options: Any) -> PretrainedConfig:
    """BERT's."""
    return BertConfig(**{**SIZE, **options})


def save(folder: Path, auto: Any, config: PretrainedConfig, *, chat: bool = False, **special: Any):
    """Saves a random model of `config` and a tokenizer of one token a character; its folder.

    Args:
        special: special tokens to set anew, such as pad_token.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = auto.from_config(config)
        tiny.perturb(model, 0.15)
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, token in special.items():
        setattr(tokenizer, name, token)
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_reward_model(folder: Path, **special: Any) -> str:
    """A scalar reward model."""
    config = decoder(num_labels=1)
    return save(folder, AutoModelForSequenceClassification, config, **special)


def save_classifier(folder: Path, labels: Sequence[str], **options: Any) -> str:
    """A text classifier."""
    config = encoder(id2label=dict(enumerate(labels)), **options)
    return save(folder, AutoModelForSequenceClassification, config)


def save_embedder(folder: Path) -> str:
    """A sentence embedder."""
    return save(folder, AutoModel, encoder())


def save_policy(folder: Path, *, chat: bool = False) -> str:
    """A language model."""
    config = LlamaConfig(**{**SIZE, **ENDS, "num_key_value_heads": 1, "tie_word_embeddings": True})
    return save(folder, AutoModelForCausalLM, config, chat=chat)


@torch.no_grad()
def plain_reward(folder: str, text: str, *, ended: bool) -> float:
    """What a reward model of `save_reward_model` gives to a text, from its hidden states."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if ended else [])
    states = model.gpt_neox(input_ids=torch.tensor([ids])).last_hidden_state  # [1, L, H]
    return float(states[0, -1] @ model.score.weight[0])


@torch.no_grad()
def plain_labels(folder: str, text: str) -> torch.Tensor:
    """Raw outputs of a classifier of `save_classifier`, float32 [labels]."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return model(input_ids=torch.tensor([ids])).logits[0]


@torch.no_grad()
def plain_embedding(folder: str, text: str) -> torch.Tensor:
    """The mean last hidden state of an embedder of `save_embedder`, at length 1, float32 [H]."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    mean = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
    return mean / mean.norm()


def need(*packages: str) -> None:
    """Skips the test where a package that ships a model is not installed; imports none."""
    for package in packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            pytest.skip(f"the package {package} is not installed")


class RecordingJudge:
    """Gives each response a number that a table says, and remembers what it was asked."""

    def __init__(self, table: dict[str, float]) -> None:
        self.table = table
        self.calls: list[tuple[list[str], list[str], list[bool] | None]] = []
        self.device: torch.device | None = None

    def place(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, prompts, responses, truncated=None):
        self.calls.append((list(prompts), list(responses), truncated))
        return [self.table[response] for response in responses]
