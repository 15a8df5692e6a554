"""Surroundings of every test: offline, one thread, the checkout importable, tiny models."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported, here and in every child process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parents[1]
for folder in (str(ROOT / "tests"), str(ROOT)):
    if folder not in sys.path:
        sys.path.insert(0, folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, paths)])

import pytest  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Llama with tied embeddings, and a tokenizer."""
    return tiny.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_llama_untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Llama with an output head of its own, and a tokenizer."""
    return tiny.save_llama(tmp_path_factory.mktemp("llama-untied"), tied=False)


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random GPT-2: absolute positions, so that an offset changes its log-probs."""
    return tiny.save_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of all tiny models of `tiny.SAVERS`, by name."""
    return {
        name: save(tmp_path_factory.mktemp(name.replace("/", "-")))
        for name, save in tiny.SAVERS.items()
    }
