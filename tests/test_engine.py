"""The transformers engine against plain forward passes; what surrounds vLLM without starting it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist

from engine import (
    Completion,
    EngineConfig,
    EngineOptions,
    HFEngine,
    Sampling,
    _clean_environment,
    check_engine,
    engine_port,
)
from model import load_policy, response_logprobs
from weights import Publisher

CPU = torch.device("cpu")
PROMPT_LENGTHS = [2, 9, 5, 1]


def make(path: str, *, seed: int = 1, batch_size: int = 64) -> HFEngine:
    options = EngineOptions(
        path=path,
        stop_token_ids=[tiny.EOS],
        pad_token_id=tiny.PAD,
        max_model_len=tiny.MAX_LENGTH,
        dtype=torch.float32,
        device=CPU,
        seed=seed,
    )
    return HFEngine(EngineConfig(name="hf", max_num_seqs=batch_size), options)


def load(path: str) -> torch.nn.Module:
    return load_policy(path, device=CPU, dtype=torch.float32)


def make_prompts(seed: int = 0) -> list[np.ndarray]:
    return tiny.random_tokens(np.random.default_rng(seed), PROMPT_LENGTHS)


def pairs(
    prompts: list[np.ndarray], groups: list[list[Completion]]
) -> list[tuple[np.ndarray, Completion]]:
    return [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]


@pytest.mark.parametrize("name", ["llama", "llama-untied", "gpt2", "neox", "gemma2"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_recorded_logprobs_are_the_policys(
    tiny_models: dict[str, str], name: str, temperature: float
) -> None:
    """Left padding at the engine, right padding at the trainer, the same log-probs."""
    path = tiny_models[name]
    prompts = make_prompts()
    groups = make(path, batch_size=7).generate(
        prompts, Sampling(n=4, temperature=temperature, max_tokens=12)
    )
    assert [len(group) for group in groups] == [4] * len(prompts)
    flat = pairs(prompts, groups)
    got = np.concatenate([c.logprobs for _, c in flat])
    want = response_logprobs(
        load(path), [p for p, _ in flat], [c.tokens for _, c in flat], temperature=temperature
    )
    assert got.dtype == np.float32 and all(c.tokens.dtype == np.int32 for _, c in flat)
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=0, atol=2e-5)


def renormalised(logits: torch.Tensor, temperature: float, top_p: float) -> np.ndarray:
    """Probabilities of nucleus sampling at one position, in plain numpy, float64 [V]."""
    scaled = logits.double().numpy() / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    kept = np.zeros_like(probs)
    for token in np.argsort(-probs):  # the smallest set that reaches top_p
        kept[token] = probs[token]
        if kept.sum() >= top_p:
            break
    return kept / kept.sum()


def test_with_top_p_logprobs_are_those_of_the_nucleus(tiny_llama: str) -> None:
    prompts = make_prompts()
    model = load(tiny_llama)
    groups = make(tiny_llama).generate(
        prompts, Sampling(n=4, temperature=1.3, top_p=0.8, max_tokens=8)
    )
    higher = 0
    for prompt, completion in pairs(prompts, groups):
        sequence = torch.tensor([*prompt, *completion.tokens])
        with torch.no_grad():
            logits = model(input_ids=sequence[None]).logits[0]
        for i, token in enumerate(completion.tokens):
            want = np.log(renormalised(logits[len(prompt) - 1 + i], 1.3, 0.8)[token])
            assert completion.logprobs[i] == pytest.approx(want, abs=1e-4)
        plain = tiny.plain_logprobs(model, prompt, completion.tokens, 1.3).detach().numpy()
        higher += int((completion.logprobs > plain + 0.01).sum())
    assert higher > 10  # renormalising raised them


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_takes_the_most_probable_token(tiny_models: dict[str, str], name: str) -> None:
    prompts = make_prompts()
    model = load(tiny_models[name])
    groups = make(tiny_models[name]).generate(
        prompts, Sampling(n=1, temperature=0.0, max_tokens=10)
    )
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        tokens = torch.tensor(prompt.astype(np.int64))
        want: list[int] = []
        while len(want) < 10 and tiny.EOS not in want:
            with torch.no_grad():
                want.append(int(model(input_ids=tokens[None]).logits[0, -1].argmax()))
            tokens = torch.cat([tokens, torch.tensor(want[-1:])])
        assert completion.tokens.tolist() == want


def test_the_stop_token_ends_a_response_and_counts(tiny_llama: str) -> None:
    limit = 12
    prompts = make_prompts() * 20
    groups = make(tiny_llama, batch_size=256).generate(
        prompts, Sampling(n=4, temperature=2.0, max_tokens=limit)
    )
    completions = [c for group in groups for c in group]
    for completion in completions:
        stops = np.flatnonzero(completion.tokens == tiny.EOS)
        assert len(completion.logprobs) == len(completion.tokens)
        assert stops.tolist() == ([] if completion.truncated else [len(completion.tokens) - 1])
        if completion.truncated:
            assert len(completion.tokens) == limit
    truncated = sum(c.truncated for c in completions)
    assert 10 < truncated < len(completions) - 10, "both ends must be seen"


def test_a_stop_token_at_the_limit_is_not_truncated(tiny_llama: str) -> None:
    groups = make(tiny_llama, batch_size=512).generate(
        make_prompts() * 100, Sampling(n=1, temperature=2.0, max_tokens=1)
    )
    completions = [c for group in groups for c in group]
    assert {(c.truncated, int(c.tokens[-1]) == tiny.EOS) for c in completions} == {
        (True, False),
        (False, True),
    }


def test_padding_does_not_shift_absolute_positions(tiny_gpt2: str) -> None:
    """A short prompt beside long ones gives the tokens and log-probs it gives alone."""
    engine = make(tiny_gpt2)
    prompts = make_prompts()
    sampling = Sampling(n=1, temperature=0.0, max_tokens=8)
    together = engine.generate(prompts, sampling)
    for prompt, (completion,) in zip(prompts, together, strict=True):
        ((alone,),) = engine.generate([prompt], sampling)
        assert completion.tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, alone.logprobs, rtol=0, atol=2e-5)


def test_seeds_decide_the_samples(tiny_llama: str) -> None:
    prompts = make_prompts()
    sampling = Sampling(n=4, temperature=1.0, max_tokens=8)

    def texts(engine: HFEngine) -> list[list[int]]:
        return [c.tokens.tolist() for group in engine.generate(prompts, sampling) for c in group]

    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    one, again, other = (make(tiny_llama, seed=seed) for seed in (1, 1, 2))
    first = texts(one)
    assert torch.equal(torch.random.get_rng_state(), state), "the process's generator was moved"
    torch.manual_seed(5)
    assert texts(again) == first
    assert texts(other) != first
    assert texts(one) != first  # the next call goes on
    assert len({tuple(tokens) for tokens in first}) > len(prompts)  # n samples differ


def test_with_a_seed_a_prompts_samples_are_its_own(tiny_llama: str) -> None:
    """Whatever is beside it, came before, or the engine's own seed is."""
    prompts = make_prompts()
    seeds = [7, 2**62 - 1, 8, 0]
    sampling = Sampling(n=4, temperature=1.0, top_p=0.95, max_tokens=8)

    def texts(groups: list[list[Completion]]) -> list[list[tuple[int, ...]]]:
        return [[tuple(c.tokens.tolist()) for c in group] for group in groups]

    together = make(tiny_llama, seed=1).generate(prompts, sampling, seeds)
    engine = make(tiny_llama, seed=2, batch_size=3)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    for prompt, seed, group in reversed(list(zip(prompts, seeds, together, strict=True))):
        alone = engine.generate([prompt], sampling, [seed])
        assert texts(alone) == texts([group])
        np.testing.assert_allclose(alone[0][0].logprobs, group[0].logprobs, rtol=0, atol=2e-5)
    assert torch.equal(torch.random.get_rng_state(), state), "the process's generator was moved"
    assert texts(engine.generate(prompts, sampling, [6, 5, 4, 3])) != texts(together)
    # samples of one prompt differ, and so do those of two seeds to the same prompt
    assert min(len(set(group)) for group in texts(together)) > 1
    twins = texts(engine.generate([prompts[0]] * 2, sampling, [1, 2]))
    assert twins[0] != twins[1]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_seeded_samples_have_the_logprobs_they_were_drawn_with(
    tiny_llama: str, top_p: float
) -> None:
    prompts = make_prompts()
    sampling = Sampling(n=8, temperature=1.3, top_p=top_p, max_tokens=8)
    groups = make(tiny_llama).generate(prompts, sampling, [1, 2, 3, 4])
    model = load(tiny_llama)
    for prompt, completion in pairs(prompts, groups):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([*prompt, *completion.tokens])[None]).logits[0]
        for i, token in enumerate(completion.tokens):
            want = np.log(renormalised(logits[len(prompt) - 1 + i], 1.3, top_p)[token])
            assert completion.logprobs[i] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("seeds", [None, [3]], ids=["engine", "seeded"])
def test_first_tokens_come_as_often_as_the_policy_says(
    tiny_llama: str, seeds: list[int] | None
) -> None:
    count, temperature = 6000, 0.7
    (prompt,) = tiny.random_tokens(np.random.default_rng(1), [6])
    ((*samples,),) = make(tiny_llama, batch_size=2000).generate(
        [prompt], Sampling(n=count, temperature=temperature, max_tokens=1), seeds
    )
    observed = np.bincount([int(c.tokens[0]) for c in samples], minlength=tiny.VOCABULARY)
    with torch.no_grad():
        logits = load(tiny_llama)(input_ids=torch.tensor(prompt.astype(np.int64))[None]).logits
    expected = count * (logits[0, -1].double() / temperature).softmax(-1).numpy()
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], max(expected[~common].sum(), 1e-9))
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(expected) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert freedom > 8
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)  # five standard deviations


def test_sampling_options_of_the_model_folder_do_not_count(tiny_llama: str, tmp_path: Path) -> None:
    """Chat models ship repetition penalties, top-k and the like: another distribution."""
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        json.dumps(
            {
                "do_sample": True,
                "repetition_penalty": 5.0,
                "temperature": 0.1,
                "top_k": 2,
                "top_p": 0.5,
                "min_p": 0.3,
                "min_new_tokens": 8,
                "no_repeat_ngram_size": 1,
                "eos_token_id": 2,
            }
        )
    )
    prompts = make_prompts()
    for temperature in (1.0, 0.0):
        sampling = Sampling(n=4, temperature=temperature, max_tokens=12)
        plain, optioned = (
            [c for group in make(path).generate(prompts, sampling) for c in group]
            for path in (tiny_llama, str(tmp_path))
        )
        for a, b in zip(plain, optioned, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_score_gives_every_token_but_the_first(tiny_llama: str) -> None:
    sequences = make_prompts()
    scores = make(tiny_llama).score(sequences)
    model = load(tiny_llama)
    for sequence, score in zip(sequences, scores, strict=True):
        want = tiny.plain_logprobs(model, sequence[:1], sequence[1:]).detach().numpy()
        assert score.shape == (len(sequence) - 1,) and score.dtype == np.float32
        np.testing.assert_allclose(score, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_responses_are_scored_at_any_temperature(
    tiny_models: dict[str, str], name: str, temperature: float
) -> None:
    path = tiny_models[name]
    prompts = make_prompts()
    responses = tiny.random_tokens(np.random.default_rng(1), [4, 1, 20, 7])
    prompts, responses = [*prompts, prompts[0]], [*responses, responses[0]]  # one of them twice
    engine, model = make(path), load(path)
    scores = engine.score_responses(prompts, responses, temperature=temperature)
    assert len(scores) == 5
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        want = tiny.plain_logprobs(model, prompt, response, temperature).detach().numpy()
        assert score.shape == response.shape and score.dtype == np.float32
        np.testing.assert_allclose(score, want, rtol=0, atol=2e-5)


def test_an_update_changes_the_samplers_weights(tiny_llama: str) -> None:
    engine, policy = make(tiny_llama), load(tiny_llama)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wire = {"host": "127.0.0.1", "port": store.port, "backend": "gloo", "bucket_bytes": 1 << 16}
    publisher = Publisher(
        policy, num_workers=1, dtype=torch.float32, timeout_s=20, meeting_timeout_s=20, **wire
    )
    engine.join_weights(rank=1, size=2, timeout_s=20, **wire)
    assert engine.update() is None
    torch.manual_seed(0)
    tiny.perturb(policy, 0.05)
    publisher.publish(policy, 0)
    update = engine.update(wait_for=0, timeout_s=20)
    assert update is not None and update.version == 0
    sequences = make_prompts()[:3]
    for sequence, score in zip(sequences, engine.score(sequences), strict=True):
        want = tiny.plain_logprobs(policy, sequence[:1], sequence[1:]).detach().numpy()
        np.testing.assert_allclose(score, want, rtol=0, atol=1e-5)
    publisher.close()
    engine.leave_weights()


# --------------------------------------------------------------------------- around vLLM


def test_port_ranges_of_a_node_are_disjoint() -> None:
    starts = [engine_port(rank, "job 17") for rank in range(8)]
    assert all(b - a >= 32 for a, b in zip(starts, starts[1:], strict=False))
    for job in map(str, range(200)):
        ports = {engine_port(rank, job) for rank in range(8)}
        assert len(ports) == 8
        # below Linux's ephemeral ports, from which any program may be given one
        assert min(ports) >= 1024 and max(ports) + 32 < 32768
    assert len({engine_port(0, str(job)) for job in range(50)}) > 10


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def options_on(device: torch.device, *, cores: tuple[int, ...] = ()) -> EngineOptions:
    return EngineOptions(
        path="",
        stop_token_ids=[],
        pad_token_id=0,
        max_model_len=1,
        dtype=torch.float32,
        device=device,
        seed=0,
        cores=cores,
        port=21000,
    )


def test_vllm_does_not_see_torchrun_and_nothing_stays_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_PORT", "1")
    monkeypatch.setenv("KEPT", "yes")
    before = dict(os.environ)
    with _clean_environment(EngineConfig(), options_on(CPU, cores=(2, 3))):
        assert not TORCHRUN.keys() & os.environ.keys()
        assert os.environ["KEPT"] == "yes"
        assert os.environ["VLLM_PORT"] == "21000"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
        os.environ["LEFT_BY_THE_ENGINE"] = "1"
        del os.environ["KEPT"]
    assert dict(os.environ) == before
    with (
        pytest.raises(RuntimeError, match="start failed"),
        _clean_environment(EngineConfig(), options_on(CPU)),
    ):
        raise RuntimeError("start failed")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("visible", "index", "tp", "want"),
    [
        (None, 2, 1, "2"),
        ("4,6", 1, 1, "6"),
        ("GPU-a,GPU-b", 0, 1, "GPU-a"),
        (None, 1, 3, "1,2,3"),
        ("7,5,4,6", 2, 2, "4,6"),
    ],
)
def test_vllm_sees_the_ranks_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, tp: int, want: str
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    options = replace(options_on(torch.device("cuda", index)), tp=tp)
    with _clean_environment(EngineConfig(), options):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == want


@pytest.mark.parametrize(
    ("cores", "want"), [((4, 5, 6, 7), "4,5|6,7"), ((1, 0), "1|0"), ((0, 0), "0|0")]
)
def test_each_worker_of_an_engine_has_its_share_of_the_cores(
    cores: tuple[int, ...], want: str
) -> None:
    with _clean_environment(EngineConfig(), replace(options_on(CPU, cores=cores), tp=2)):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == want


def test_check_engine_names_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    check_engine("hf")
    with pytest.raises(ValueError, match=r"engine.name='sglang': choose vllm or hf"):
        check_engine("sglang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vLLM is not installed"):
        check_engine("vllm")
