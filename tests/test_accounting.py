"""Arithmetic against torch's own counter and closed forms; phases, memory, the trace of a step."""

from __future__ import annotations

import doctest
import gzip
import json
import logging
import math
import time

import numpy as np
import pytest
import tiny
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, MistralConfig, MixtralConfig, PreTrainedModel

import accounting
from accounting import (
    Accounting,
    ModelFlops,
    Phases,
    Profiler,
    make_accounting,
    model_flops,
    operator_table,
    peak_memory_gb,
    product_peak,
)
from model import load_policy, logprobs_and_entropies
from packing import pack

CPU = torch.device("cpu")


def load(path: str) -> PreTrainedModel:
    return load_policy(path, device=CPU, dtype=torch.float32)


def test_documented_examples_hold():
    results = doctest.testmod(accounting)
    assert results.attempted >= 8 and results.failed == 0


# --------------------------------------------------------------------------- arithmetic


def counted(model: PreTrainedModel, num_rows: int, length: int) -> int:
    """Of forward and backward over all logits of dense rows, by torch's counter.

    With plain attention, whose two products it sees: they are over all pairs of tokens.
    """
    model.set_attn_implementation("eager")
    tokens = torch.randint(tiny.FIRST_TOKEN, tiny.VOCABULARY, (num_rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["llama", "llama-untied", "gpt2", "neox", "qwen2", "gemma2"])
def test_a_model_costs_what_torch_counts(tiny_models: dict[str, str], name: str) -> None:
    policy = load(tiny_models[name])
    flops = model_flops(policy)
    rows, length = 3, 7
    want = rows * (
        length * (flops.token + flops.response_token) + length**2 * sum(flops.pair.values())
    )
    assert counted(policy, rows, length) == want


def test_frozen_weights_have_no_gradient_of_their_own(tiny_llama: str) -> None:
    """Adapters on frozen weights, against torch's counter but for what it sees is not needed."""
    peft = pytest.importorskip("peft")
    policy = load(tiny_llama)
    trained = model_flops(policy)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], bias="none")
    adapted = peft.get_peft_model(policy, config)
    flops = model_flops(adapted)
    adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert adapters == 2 * 4 * ((64 + 64) + (96 + 64))
    assert flops.token == trained.token * 2 / 3 + 6 * adapters
    assert flops.response_token == trained.response_token * 2 / 3
    assert flops.pair == trained.pair
    rows, length = 2, 6
    want = rows * (
        length * (flops.token + flops.response_token) + length**2 * sum(flops.pair.values())
    )
    # Below the first adapters nothing is trained: no gradient of the first layer's inputs (of
    # queries, keys, values and an adapter), and none of its keys and values.
    unneeded = 2 * (64 * 64 + 2 * 64 * 32 + 4 * 64) * rows * length + 2 * 2 * 64 * rows * length**2
    assert counted(adapted, rows, length) == want - unneeded


def test_a_models_arithmetic_in_numbers(tiny_llama: str, tiny_gpt2: str) -> None:
    # hidden 64, two heads of 32 and one of keys and values, intermediate 96, two layers
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    flops = model_flops(load(tiny_llama))
    assert flops.token == 6 * 2 * layer
    assert flops.response_token == 6 * 64 * tiny.VOCABULARY
    assert flops.pair == {None: 12 * 2 * 2 * 32}
    # as many heads of keys, two matrices of 64 x 256; its weights are transposed (Conv1D)
    assert model_flops(load(tiny_gpt2)).token == 6 * 2 * (4 * 64 * 64 + 2 * 64 * 256)


def test_windows_are_of_each_layer() -> None:
    options = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    options |= {"intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 16}
    mistral = AutoModelForCausalLM.from_config(MistralConfig(**options, sliding_window=4))
    assert model_flops(mistral).pair == {4: 12 * 3 * 32}
    flops = ModelFlops(token=0, response_token=0, pair={4: 1, None: 100})
    prompt, response = np.arange(3), np.arange(5)  # seen: 1, 2, 3, 4, 4, 4, 4 and 1, ..., 7
    assert flops.of([prompt], [response], share_prompts=True) == 22 + 100 * 28


def test_unknown_weights_are_refused() -> None:
    options = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    options |= {"intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
    experts = AutoModelForCausalLM.from_config(MixtralConfig(**options, num_local_experts=2))
    with pytest.raises(ValueError, match="mixtral is not known: model.layers.0.mlp.*"):
        model_flops(experts)


@pytest.mark.parametrize("share", [True, False])
def test_a_row_costs_what_its_tokens_see(share: bool) -> None:
    rng = np.random.default_rng(0)
    flops = ModelFlops(token=1e8, response_token=1e4, pair={None: 1})
    a, b = tiny.random_tokens(rng, [5, 3])
    responses = tiny.random_tokens(rng, [4, 1, 7, 2])
    prompts = [a, a, b, a]
    row = pack(prompts, responses, share_prompts=share, device=CPU)
    seen = int((row.position_ids + 1).sum())
    want = 1e8 * row.input_ids.shape[1] + 1e4 * len(row.targets) + seen
    assert flops.of(prompts, responses, share_prompts=share) == want
    twice = flops.of(prompts * 2, responses * 2, share_prompts=share)
    assert twice == want  # equal pairs are computed once
    assert flops.of([], [], share_prompts=share) == 0


def test_product_peak_is_a_rate_this_machine_reaches() -> None:
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    rates = []
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(left, right)
        rates.append(2 * 512**3 / (time.perf_counter() - started))
    state = torch.get_rng_state()
    started = time.process_time()
    peak = product_peak(CPU, torch.float32)
    assert time.process_time() - started < 5
    assert 0.5 < peak / max(rates) < 3
    assert torch.equal(torch.get_rng_state(), state)  # no seed of the run gives other numbers


# --------------------------------------------------------------------------- time and memory


def test_phases_add_up_and_nest() -> None:
    ticks = iter([0.0, 1.0, 3.0, 7.0, 10.0, 15.0, 20.0, 21.0])
    phases = Phases(CPU, now=lambda: next(ticks))
    with phases("gradient"):
        with phases("forward"):
            pass
        with phases("forward"):
            pass
    assert phases.take() == {"forward": 2.0 + 3.0, "gradient": 15.0}
    with pytest.raises(KeyError), phases("forward"):
        raise KeyError
    assert phases.take() == {"forward": 1.0}
    assert phases.take() == {}


def test_on_a_gpu_phases_are_read_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds between events, after waiting for the last one alone."""
    waited: list[float] = []
    clock = iter([10.0, 20.0, 50.0, 90.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time_ms = next(clock)

        def synchronize(self) -> None:
            waited.append(self.time_ms)

        def elapsed_time(self, end: Event) -> float:
            assert waited, "the GPU may not have got there"
            return end.time_ms - self.time_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = Phases(torch.device("cuda"))
    with phases("gradient"), phases("forward"):
        pass
    assert phases.take() == {"gradient": 0.08, "forward": 0.03}
    assert waited == [90.0]
    assert phases.take() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_phases_on_a_real_gpu() -> None:
    device = torch.device("cuda")
    phases = Phases(device)
    with phases("long"):
        torch.cuda._sleep(200_000_000)  # cycles, of less than 3 GHz
    with phases("short"):
        torch.cuda._sleep(20_000_000)
    seconds = phases.take()
    assert seconds["long"] > 0.06
    assert seconds["long"] / seconds["short"] == pytest.approx(10, rel=0.2)
    assert product_peak(device, torch.bfloat16) > 1e13


def test_log_probs_enter_their_phases(tiny_llama: str, tiny_models: dict[str, str]) -> None:
    prompts, responses = (tiny.random_tokens(np.random.default_rng(0), [3, 4]) for _ in range(2))
    for path in (tiny_llama, tiny_models["falcon-h1"]):  # the second through its own head
        phases = Phases(CPU)
        logprobs_and_entropies(load(path), prompts, responses, temperature=1.0, phases=phases)
        assert list(phases.take()) == ["forward", "logprobs"]


def test_peak_memory_is_of_this_process() -> None:
    before = peak_memory_gb(CPU)
    ballast = np.ones(150_000_000, np.uint8)
    after = peak_memory_gb(CPU)
    status = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    assert after == pytest.approx(int(status["VmHWM"].split()[0]) * 1024 / 1e9, rel=0.02)
    assert after >= max(before, ballast.nbytes / 1e9)


# --------------------------------------------------------------------------- a trainer's


def test_metrics_of_steps_and_their_summary() -> None:
    rng = np.random.default_rng(0)
    flops = ModelFlops(token=1e9, response_token=0, pair={})
    costs = Accounting(flops=flops, peak=50e9)
    ticks = iter([0, 4, 4, 5, 10, 18, 18, 20])  # 4 + 1 s, then 8 + 2 s
    costs.phases = Phases(CPU, now=lambda: float(next(ticks)))
    metrics = []
    for length in (46, 41):  # and 5 of the prompt, without the last token: 50 and 45
        for name in ("gradient", "optimizer"):
            with costs.phases(name):
                pass
        tokens = tiny.random_tokens(rng, [5, length])
        metrics.append(costs.end_step(tokens[:1], tokens[1:], share_prompts=True))
    assert metrics[0]["time/model_tflop_per_s"] == pytest.approx(50 / 5 / 1e3)
    assert metrics[0]["time/mfu"] == pytest.approx(0.2)
    assert metrics[1]["time/mfu"] == pytest.approx(4.5 / 50)  # this step's alone
    assert metrics[1]["time/gradient_s"] == 6.0 and metrics[1]["time/optimizer_s"] == 1.5  # means
    assert metrics[1]["memory/peak_gb"] > 0.05
    summary = costs.summary()
    assert summary["model_tflop_per_s"] == pytest.approx(95 / 15 / 1e3)
    assert summary["mfu"] == pytest.approx(95 / 15 / 50)
    assert summary["product_tflop_per_s"] == 0.05


def test_without_known_arithmetic_there_is_no_utilisation(caplog: pytest.LogCaptureFixture) -> None:
    costs = Accounting()
    with costs.phases("gradient"):
        pass
    assert set(costs.end_step([], [], share_prompts=True)) == {"time/gradient_s", "memory/peak_gb"}
    assert costs.summary()["mfu"] is None


def test_making_it_says_what_was_measured(
    tiny_llama: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tba"), "propagate", True)
    monkeypatch.setattr(accounting, "product_peak", lambda device, dtype: 2.5e12)
    options = dict(profile_folder=None, name="trainer-0", total_steps=3)
    with caplog.at_level(logging.INFO, "tba"):
        costs = make_accounting(load(tiny_llama), dtype=torch.bfloat16, **options)
    assert "matrix products: 2.5 TFLOP/s in bfloat16" in caplog.text
    assert costs.peak == 2.5e12 and not math.isnan(costs.peak)


@pytest.mark.parametrize(("total_steps", "traced"), [(1, [0]), (3, [0, 1, 2]), (8, [2, 3, 4])])
def test_the_trace_is_of_a_few_steps(tmp_path, total_steps: int, traced: list[int]) -> None:
    profiler = Profiler(tmp_path / "profile", "trainer-3", device=CPU, total_steps=total_steps)
    costs = Accounting(profiler=profiler)
    costs.start()
    for step in range(total_steps):
        with costs.phases("forward"), costs.mark(f"step {step}"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        costs.end_step([], [], share_prompts=True)
    with gzip.open(tmp_path / "profile" / "trainer-3.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert sorted({n for n in names if str(n).startswith("step ")}) == [f"step {i}" for i in traced]
    assert names.count("forward") == len(traced)
    assert "aten::mm" in (tmp_path / "profile" / "trainer-3.txt").read_text()


def test_operators_of_gpu_and_host_are_told_apart() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1) -> dict:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    table = operator_table(
        [
            event("user_annotation", "forward", 0, 10_000),
            event("cpu_op", "aten::mm", 1_000, 2_000),
            event("cpu_op", "aten::mm", 3_000, 2_000),  # begins where the last one ends
            event("cpu_op", "aten::mm", 0, 1_000, tid=2),  # beside, in another thread
            event("kernel", "gemm", 0, 50_000, tid=7),
            event("gpu_user_annotation", "forward", 0, 50_000, tid=7),
            {"ph": "i", "name": "an instant", "ts": 0},
        ]
    )
    rows = [line.split() for line in table.splitlines()]
    assert rows[0] == ["GPU:", "50", "ms"] and rows[2] == ["50.000", "100.0%", "1", "gemm"]
    assert rows[3] == ["host:", "11", "ms"]
    assert rows[5:] == [["6.000", "54.5%", "1", "forward"], ["5.000", "45.5%", "3", "aten::mm"]]


def test_without_a_trace_nothing_is_named() -> None:
    costs = Accounting()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        with costs.phases("forward"), costs.mark("draw"):
            torch.ones(2)
    assert not {"forward", "draw"} & {event.name for event in seen.events()}
