"""Compiled layers: the same values and gradients, and no compilation for new lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from test_end_to_end import FAST, run
from test_end_to_end import random_model as random_model  # a fixture
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from lora import LoraConfig, add_adapters
from model import (
    PADDED,
    Layout,
    compile_layers,
    disable_dropout,
    load_policy,
    prepare_for_packing,
    response_logprobs,
    uncompiled,
)

PACKED = Layout(packed=True)
# Prompt lengths of each batch, two responses a prompt; tokens and sequences differ in all.
BATCHES = [[5, 3], [4, 8, 2], [6, 3, 5, 9], [7], [2, 2, 3, 9, 4], [8, 8, 7], [3, 4]]


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    options = {**tiny._ROPE, "num_hidden_layers": 4}
    folder = tmp_path_factory.mktemp("four")
    return {
        # Qwen2 tells each layer its type by its number
        "qwen2": tiny.save(Qwen2Config(**options), folder / "qwen2"),
        "llama": tiny.save(LlamaConfig(**options), folder / "llama"),
    }


def load(
    path: str, layout: Layout, *, lora: bool = False, checkpointing: bool = False
) -> PreTrainedModel:
    model = load_policy(path, device=torch.device("cpu"), dtype=torch.float32)
    if layout.packed:
        prepare_for_packing(model, "auto")
    if lora:
        add_adapters(model, LoraConfig(rank=4), seed=0)
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:  # zero at first: A would have no gradient
                torch.nn.init.constant_(parameter, 0.1)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        disable_dropout(model)
        model.train()
    return model


def batch(index: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(index)
    prompts = [p for p in tiny.random_tokens(rng, BATCHES[index]) for _ in range(2)]
    return prompts, tiny.random_tokens(rng, rng.integers(4, 12, len(prompts)).tolist())


def values_and_gradients(
    model: PreTrainedModel, index: int, layout: Layout
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    logprobs = response_logprobs(model, *batch(index), temperature=0.7, layout=layout)
    logprobs.square().mean().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def assert_same(model: PreTrainedModel, plain: PreTrainedModel, index: int, layout: Layout) -> None:
    got, grads = values_and_gradients(model, index, layout)
    want, want_grads = values_and_gradients(plain, index, layout)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        gap = (grad - want_grads[name]).abs().max() / want_grads[name].abs().max()
        assert gap < 1e-5, name


@pytest.mark.parametrize(
    ("name", "layout", "lora", "checkpointing"),
    [
        pytest.param("qwen2", PACKED, False, False, id="packed"),
        pytest.param("qwen2", PADDED, False, False, id="padded", marks=pytest.mark.slow),
        pytest.param("llama", PACKED, True, True, id="lora", marks=pytest.mark.slow),
    ],
)
def test_lengths_and_layers_compile_nothing_anew(
    four_layers: dict[str, str], name: str, layout: Layout, lora: bool, checkpointing: bool
) -> None:
    options = {"lora": lora, "checkpointing": checkpointing}
    model, plain = (load(four_layers[name], layout, **options) for _ in range(2))
    compile_layers(model, backend="eager")
    # A function is compiled for the first length, then for any. With frozen embeddings, again for
    # the first layer, whose input has no gradient; with checkpointing, no more.
    limit = 4 if lora else 2
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        assert_same(model, plain, 0, layout)
        assert_same(model, plain, 1, layout)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for index in range(2, len(BATCHES)):
            assert_same(model, plain, index, layout)
        model.eval()
        with uncompiled():
            tokens = torch.arange(4, 9)[None]
            new = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(
            new, plain.eval().generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
        )


def test_the_layers_are_found_and_keep_their_names(tiny_models: dict[str, str]) -> None:
    for name in ("llama", "gpt2", "neox", "qwen2"):
        model = load(tiny_models[name], PADDED)
        names = [n for n, _ in model.named_parameters()]
        compile_layers(model, backend="eager")
        assert [n for n, _ in model.named_parameters()] == names  # as published and saved
        compiled = [type(m).__name__ for m in model.modules() if m._compiled_call_impl is not None]
        assert len(compiled) == 2 and all(kind.endswith(("Layer", "Block")) for kind in compiled)


def test_what_cannot_compile_names_the_key(tiny_llama: str) -> None:
    model = load(tiny_llama, PADDED)

    def backend(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    with pytest.raises(ValueError, match=r"trainer\.compile.*g\+\+.*No working C\+\+"):
        compile_layers(model, backend=backend)
    with pytest.raises(ValueError, match=r"trainer\.compile.*no list of layers"):
        compile_layers(torch.nn.Linear(2, 2), backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
def test_compiled_code_gives_the_same_values_and_gradients(
    tiny_models: dict[str, str], name: str, layout: Layout, checkpointing: bool
) -> None:
    model, plain = (load(tiny_models[name], layout, checkpointing=checkpointing) for _ in range(2))
    compile_layers(model)
    for index in range(4):
        assert_same(model, plain, index, layout)


@pytest.mark.slow
def test_a_run_with_compiled_layers_is_the_same_run(tmp_path: Path, random_model: str) -> None:
    losses = {}
    for compiled in ("false", "true"):
        done = run(
            0,
            *FAST,
            "engine=hf",
            "mode=sync",
            "trainer.steps=4",
            "trainer.lora.rank=4",
            "trainer.gradient_checkpointing=true",
            f"trainer.compile={compiled}",
            "eval.num_problems=4",
            "cluster.timeout_s=600",
            f"model.path={random_model}",
            f"run.root={tmp_path}",
            f"run.name={compiled}",
            timeout_s=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / compiled / "metrics.jsonl").read_text().splitlines()
        losses[compiled] = [r["loss/total"] for r in map(json.loads, lines) if "loss/total" in r]
    assert len(set(losses["true"])) == 4
    assert losses["true"] == pytest.approx(losses["false"], rel=0, abs=1e-4)
