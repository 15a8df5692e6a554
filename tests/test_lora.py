"""Low-rank adapters: the base at first, alone trained, merged wherever the policy goes."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from test_end_to_end import FAST, run, summary_of
from test_end_to_end import random_model as random_model  # a fixture
from test_trainer import expected, make_parts, trajectories
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoint import save_policy, whole_state
from lora import LoraConfig, adapted_layers, add_adapters, check_lora
from model import (
    PADDED,
    Layout,
    disable_dropout,
    empty_model,
    load_policy,
    load_tokenizer,
    prepare_for_packing,
    response_logprobs,
)
from parallel import ParallelConfig, shard
from trainer import reset_reference
from weights import manifest, named_weights

NAMES = ("llama", "llama-untied", "qwen2", "gpt2", "neox")
PACKED = Layout(packed=True)
CPU = torch.device("cpu")


def load(path: str, layout: Layout = PADDED) -> PreTrainedModel:
    model = load_policy(path, device=CPU, dtype=torch.float32)
    if layout.packed:
        prepare_for_packing(model, "auto")
    return model


def adapted(path: str, layout: Layout = PADDED, *, seed: int = 0, **options) -> PreTrainedModel:
    model = load(path, layout)
    add_adapters(model, LoraConfig(**{"rank": 4, "alpha": 6.0, **options}), seed=seed)
    return model


def samples() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(0)
    shared, own = tiny.random_tokens(rng, [5, 3])
    return [shared, shared, own], tiny.random_tokens(rng, [7, 1, 9])


def logprobs(model: PreTrainedModel, layout: Layout = PADDED) -> torch.Tensor:
    return response_logprobs(model, *samples(), temperature=0.7, layout=layout)


def train(
    model: PreTrainedModel, layout: Layout = PADDED, steps: int = 3, share: float = 1.0
) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        (logprobs(model, layout) * torch.linspace(-share, share, 17)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMES)
def test_adapters_start_as_the_base_and_are_all_that_moves(
    tiny_models: dict[str, str], name: str
) -> None:
    base, model = load(tiny_models[name]), adapted(tiny_models[name])
    assert torch.equal(logprobs(model), logprobs(base))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model)
    assert (logprobs(model) - logprobs(base)).abs().max() > 0.05
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    # query, key, value, output and the two or three of the feed-forward part, in two layers
    assert len(adapted_layers(model)) == 2 * {"gpt2": 4, "neox": 4}.get(name, 7)
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, before[n]) != (".lora_" in n), n


@pytest.mark.parametrize("name", NAMES)
def test_merged_weights_are_the_policy(tiny_models: dict[str, str], name: str) -> None:
    model = adapted(tiny_models[name])
    train(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    want = logprobs(model)
    plain = load(tiny_models[name])
    mine = dict(plain.named_parameters())
    with torch.no_grad():
        for tensor_name, tensor in named_weights(model):
            mine.pop(tensor_name).copy_(tensor)
    assert not mine, "not published"
    torch.testing.assert_close(logprobs(plain), want, atol=1e-5, rtol=0)
    # what an engine expects from the config alone is what is sent
    assert manifest(model, torch.bfloat16) == manifest(
        empty_model(tiny_models[name]), torch.bfloat16
    )
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, before[n]), "publishing changed the model"


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_an_ordinary_folder(
    tmp_path: Path, tiny_models: dict[str, str], name: str
) -> None:
    peft = pytest.importorskip("peft")
    path = tiny_models[name]
    model = adapted(path)
    train(model)
    want = logprobs(model)
    folder = save_policy(tmp_path / "policy", model, load_tokenizer(path), {"step": 3})
    torch.testing.assert_close(logprobs(load(str(folder))), want, atol=1e-5, rtol=0)
    stored, original = (set(load_file(Path(f) / "model.safetensors")) for f in (folder, path))
    assert stored == original
    assert not list(folder.glob("adapter*.*"))
    assert not any("peft" in key or "quantization" in key for key in saved_config(folder))
    assert saved_config(folder) == saved_config(Path(path))
    with_adapter = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), folder / "adapter"
    ).base_model.model
    torch.testing.assert_close(logprobs(with_adapter.eval()), want, atol=1e-5, rtol=0)
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["r"] == 4


def saved_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_policy_without_adapters_is_saved_as_before(tmp_path: Path, tiny_models) -> None:
    for name, path in tiny_models.items():
        model = load(path)
        folder = save_policy(tmp_path / name, model, load_tokenizer(path), {})
        model.save_pretrained(tmp_path / f"{name}-plain")
        stored, plain = (
            load_file(f / "model.safetensors") for f in (folder, tmp_path / f"{name}-plain")
        )
        assert stored.keys() == plain.keys()
        assert all(torch.equal(stored[key], plain[key]) for key in plain)
        assert not (folder / "adapter").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_rows_and_gradient_checkpointing_change_nothing(
    tiny_models: dict[str, str], name: str
) -> None:
    results = []
    for layout, checkpointing in ((PADDED, False), (PACKED, False), (PADDED, True), (PACKED, True)):
        model = adapted(tiny_models[name], layout)
        train(adapted(tiny_models[name]), steps=1)
        with torch.no_grad():
            for n, parameter in sorted(model.named_parameters()):
                if ".lora_B" in n:  # zero at first: A would have no gradient
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            disable_dropout(model)
            model.train()
        values = logprobs(model, layout)
        values.square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert all(g is not None and g.abs().max() > 0 for g in grads.values())
        results.append((values.detach(), grads))
    (want, want_grads), *others = results
    for values, grads in others:
        torch.testing.assert_close(values, want, atol=1e-5, rtol=0)
        for n, grad in grads.items():
            gap = (grad - want_grads[n]).abs().max() / want_grads[n].abs().max()
            assert gap < 1e-5, n


def test_all_trainers_start_from_the_same_adapters(tiny_llama: str) -> None:
    torch.manual_seed(1)
    models = []
    for seed in (3, 3, 4):
        models.append(dict(adapted(tiny_llama, seed=seed).named_parameters()))
        torch.randn(5)
    names = [n for n in models[0] if ".lora_A" in n]
    assert all(torch.equal(models[0][n], models[1][n]) for n in names)
    assert not any(torch.equal(models[0][n], models[2][n]) for n in names)


def test_a_reset_copies_merged_weights_into_the_reference(tiny_llama: str) -> None:
    parts = make_parts(tiny_llama)
    torch.manual_seed(0)
    parts.policy = adapted(tiny_llama)
    train(parts.policy)
    want = expected(parts.policy, trajectories()[0])
    assert abs(expected(parts.reference, trajectories()[0]) - want).max() > 0.01
    reset_reference(parts, version=5)
    np.testing.assert_allclose(expected(parts.reference, trajectories()[0]), want, atol=1e-5)
    train(parts.policy)  # the reference must not move along
    np.testing.assert_allclose(expected(parts.reference, trajectories()[0]), want, atol=1e-5)


def rank_sharded(rank: int, world_size: int, path: str) -> dict[str, np.ndarray] | None:
    """Three steps of a policy sharded over all ranks; what rank 0 would save."""
    model = adapted(path)
    shard(model, dist.group.WORLD, ParallelConfig(), device=CPU)
    train(model, share=1 / world_size)
    state = whole_state(model, keep=rank == 0)
    return None if state is None else {n: w.numpy() for n, w in state.policy.items()}


@pytest.mark.slow
def test_a_sharded_policy_trains_the_same_adapters(tiny_llama: str) -> None:
    model = adapted(tiny_llama)
    train(model)
    want = whole_state(model, keep=True)
    results = run_ranks(rank_sharded, 2, tiny_llama, timeout_s=250)
    assert want is not None and results[1] is None and results[0].keys() == want.policy.keys()
    for name, weight in want.policy.items():
        np.testing.assert_allclose(results[0][name], weight.numpy(), atol=1e-4, err_msg=name)


def test_targets_choose_layers(tiny_llama: str, tiny_gpt2: str) -> None:
    for targets in (["q_proj", "mlp.down_proj"], "v_proj"):
        layers = adapted_layers(adapted(tiny_llama, targets=targets))
        names = [targets] if isinstance(targets, str) else targets
        assert len(layers) == 2 * len(names)
        assert all(any(layer.endswith(f".{name}") for name in names) for layer in layers)
    for targets in (["q_proj", "qq_proj"], ["roj"], ["lm_head"], "norm"):
        with pytest.raises(ValueError, match=r"trainer\.lora\.targets.*q_proj, k_proj"):
            adapted(tiny_llama, targets=targets)
    with pytest.raises(ValueError, match=r"trainer\.lora\.targets.*no layer q_proj.*c_attn"):
        adapted(tiny_gpt2, targets=["q_proj"])


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"rank": -1}, "rank"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"targets": []}, "targets"),
        ({"targets": [3]}, "targets"),
        ({"targets": None}, "targets"),
    ],
)
def test_mistakes_name_the_key(options: dict, key: str) -> None:
    check_lora(LoraConfig(rank=4))
    with pytest.raises(ValueError, match=rf"trainer\.lora\.{key}"):
        check_lora(LoraConfig(**options))


def test_without_peft_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def no_peft(name, *args, **kwargs):
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_peft)
    check_lora(LoraConfig())  # who doesn't use it needs no package
    with pytest.raises(ValueError, match="pip install"):
        check_lora(LoraConfig(rank=1))


def test_a_run_with_adapters_publishes_and_saves_the_merged_policy(tmp_path, random_model):
    done = run(
        0,
        *FAST,
        "mode=sync",
        "engine=hf",
        "trainer.lora.rank=4",
        "trainer.steps=4",
        "trainer.reference_reset_every=2",
        "weights.probe_every=1",
        "eval.num_problems=4",
        f"model.path={random_model}",
        f"run.root={tmp_path}",
        "run.name=run",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["engine_logprob_gap"] < 1e-3
    folder = tmp_path / "run" / "checkpoints" / "step-4"
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    saved = load_file(folder / "model.safetensors")
    start = load_file(Path(random_model) / "model.safetensors")
    moved = {name for name in start if not torch.equal(saved[name], start[name])}
    assert moved == {name for name in start if "_proj." in name}
