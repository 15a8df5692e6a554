"""The real vLLM engine, the transformers engine and the trainer agree on log-probs.

Engines take tens of seconds to start, so tests share them; each test publishes what it needs.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import needs
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
    VLLMEngine,
    engine_port,
)
from model import load_policy, response_logprobs
from weights import Publisher, WeightUpdate, process_is_alive

pytestmark = [pytest.mark.vllm, needs.VLLM]

TOLERANCE = 1e-3  # nats a token, float32
SCORE_TOLERANCE = 1e-4  # where the policy is scored on the very sequences
MAX_LENGTH = 512
# vLLM caches whole blocks of a prompt's keys and values, of 128 tokens on CPU: shorter prompts
# would never be cached, and a stale cache never be seen.
PROMPT_LENGTHS = [3, 140, 300, 17]
CPU = torch.device("cpu")
_engine_count = itertools.count()
SAMPLING = Sampling(n=4, temperature=0.7, max_tokens=12)


def make_prompts() -> list[np.ndarray]:
    return tiny.random_tokens(np.random.default_rng(0), PROMPT_LENGTHS)


def start_engine(
    path: str,
    kind: type[VLLMEngine] | type[HFEngine],
    *,
    seed: int,
    dtype: torch.dtype,
    policy_temperature: float | None = None,
) -> VLLMEngine | HFEngine:
    cores = sorted(os.sched_getaffinity(0))
    options = EngineOptions(
        path=path,
        stop_token_ids=[tiny.EOS],
        pad_token_id=tiny.PAD,
        max_model_len=MAX_LENGTH,
        dtype=dtype,
        device=CPU,
        seed=seed,
        cores=[cores[seed % len(cores)]],
        port=engine_port(next(_engine_count), str(os.getpid())),
        policy_temperature=policy_temperature,
    )
    return kind(EngineConfig(max_num_seqs=32, kv_cache_gb=0.25), options)


@dataclass
class Rig:
    """A float32 policy, engines that hold its weights, and the publisher between them."""

    path: str
    dtype: torch.dtype  # of the engines
    kinds: tuple[type, ...] = (VLLMEngine, HFEngine)
    policy_temperature: float | None = None
    version: int = -1
    engines: list[VLLMEngine | HFEngine] = field(default_factory=list)

    def start(self) -> None:
        self.policy = load_policy(self.path, device=CPU, dtype=torch.float32)
        self.engines = [
            start_engine(
                self.path,
                kind,
                seed=1,
                dtype=self.dtype,
                policy_temperature=self.policy_temperature,
            )
            for kind in self.kinds
        ]
        self.first = samples(self.engines[0])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        wire = {
            "host": "127.0.0.1",
            "port": self.store.port,
            "backend": "gloo",
            "bucket_bytes": 1 << 14,
        }
        size = 1 + len(self.engines)
        self.publisher = Publisher(
            self.policy,
            num_workers=len(self.engines),
            dtype=self.dtype,
            timeout_s=60,
            meeting_timeout_s=60,
            **wire,
        )
        for rank, engine in enumerate(self.engines, start=1):
            engine.join_weights(rank=rank, size=size, timeout_s=60, **wire)

    def publish(self) -> None:
        self.version += 1
        assert self.publisher.publish(self.policy, self.version, meta={"version": self.version})

    def update(self) -> list[WeightUpdate]:
        """Publishes the policy as it is and loads it everywhere."""
        self.publish()
        updates = [engine.update(wait_for=self.version, timeout_s=60) for engine in self.engines]
        assert [u.version for u in updates] == [self.version] * len(updates)
        assert all(u.meta["version"] == self.version for u in updates)
        return updates

    def move(self, spread: float = 0.05) -> None:
        """Another policy: every parameter changes."""
        torch.manual_seed(100 + self.version)
        tiny.perturb(self.policy, spread)

    def gaps(self, groups: list[list[Completion]], temperature: float) -> np.ndarray:
        """|engine - trainer| of the recorded log-prob of every token."""
        flat = [(p, c) for p, group in zip(make_prompts(), groups, strict=True) for c in group]
        with torch.no_grad():
            want = response_logprobs(
                self.policy,
                [p for p, _ in flat],
                [c.tokens for _, c in flat],
                temperature=temperature,
            )
        return np.abs(np.concatenate([c.logprobs for _, c in flat]) - want.numpy())

    def close(self) -> None:
        self.publisher.close()
        for engine in self.engines:
            engine.leave_weights()
            engine.close()


def samples(engine: VLLMEngine | HFEngine) -> list[list[int]]:
    groups = engine.generate(make_prompts(), SAMPLING)
    return [c.tokens.tolist() for group in groups for c in group]


def run_rig(rig: Rig) -> Iterator[Rig]:
    try:
        rig.start()
        yield rig
        rig.close()
    finally:
        for engine in rig.engines:
            engine.kill()


class Owner:
    """A process that owns an engine: what it said, once its engine runs."""

    def __init__(self, path: str) -> None:
        with open(Path(path) / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, __file__, path], stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._said: dict | None = None

    def said(self) -> dict:
        while self._said is None:
            line = self.process.stdout.readline()
            assert line, f"the owner ended with code {self.process.wait()}"
            if line.startswith("{"):
                self._said = json.loads(line)
        return self._said

    def end(self) -> None:
        for pid in [self.process.pid, *(self._said or {}).get("pids", [])]:
            if process_is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    """Its engine starts while the first of the shared ones does."""
    owner = Owner(tiny.save_llama(tmp_path_factory.mktemp("owned"), max_length=MAX_LENGTH))
    yield owner
    owner.end()


@pytest.fixture(scope="module", params=["tied", "untied"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    path = tiny.save_llama(
        tmp_path_factory.mktemp(request.param),
        tied=request.param == "tied",
        max_length=MAX_LENGTH,
    )
    temperature = {"tied": 0.7, "untied": 1.0}[request.param]
    yield from run_rig(Rig(path, torch.float32, policy_temperature=temperature))


def check(rig: Rig, when: str) -> None:
    """Both engines agree with the trainer on tokens they sample, and on given ones."""
    for engine in rig.engines:
        sampled = rig.gaps(engine.generate(make_prompts(), SAMPLING), SAMPLING.temperature)
        scores = np.concatenate(engine.score(make_prompts()))
        with torch.no_grad():
            want = np.concatenate(
                [tiny.plain_logprobs(rig.policy, p[:1], p[1:]).numpy() for p in make_prompts()]
            )
        scored = np.abs(scores - want)
        print(
            f"{type(engine).__name__} {when}: largest gap {sampled.max():.1e} sampled, "
            f"{scored.max():.1e} scored"
        )
        assert sampled.max() < TOLERANCE and scored.max() < TOLERANCE


def test_logprobs_agree_before_and_after_updates(rig: Rig) -> None:
    """The same prompts each time, with prefix caching: keys of old weights must not survive."""
    check(rig, "at the start")
    for _ in range(3):
        before = np.concatenate(rig.engines[0].score(make_prompts()))
        rig.move()
        updates = rig.update()
        check(rig, f"after update {rig.version}, loaded in {updates[0].load_s * 1e3:.0f} ms")
        after = np.concatenate(rig.engines[0].score(make_prompts()))
        assert np.abs(after - before).mean() > 0.1, "the update is too small to tell"


def test_greedy_tokens_are_the_same(rig: Rig) -> None:
    sampling = Sampling(n=1, temperature=0.0, max_tokens=20)
    vllm, hf = (
        [group[0].tokens.tolist() for group in engine.generate(make_prompts(), sampling)]
        for engine in rig.engines
    )
    assert vllm == hf


def test_ends_of_responses(rig: Rig) -> None:
    """The sampled end-of-text token is there and counts; the limit is told apart from it."""
    for engine in rig.engines:
        groups = engine.generate(make_prompts(), Sampling(n=64, temperature=2.0, max_tokens=16))
        assert [len(group) for group in groups] == [64] * len(PROMPT_LENGTHS)
        completions = [c for group in groups for c in group]
        for c in completions:
            stops = np.flatnonzero(c.tokens == tiny.EOS).tolist()
            assert stops == ([] if c.truncated else [len(c.tokens) - 1])
            assert len(c.tokens) == len(c.logprobs) and (not c.truncated or len(c.tokens) == 16)
        assert {c.truncated for c in completions} == {True, False}
        assert rig.gaps(groups, 2.0).max() < TOLERANCE


def nucleus(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Log-probs of all tokens after temperature and top-p, float64 [V]; -inf: cut."""
    probs, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
    kept = int((probs.cumsum(0) < top_p).sum()) + 1
    logprobs = torch.full_like(probs, -torch.inf)
    logprobs[order[:kept]] = (probs[:kept] / probs[:kept].sum()).log()
    return logprobs


def test_top_p_logprobs_are_those_of_the_nucleus(rig: Rig) -> None:
    top_p, temperature = 0.8, 1.3
    (prompt,) = tiny.random_tokens(np.random.default_rng(5), [6])
    with torch.no_grad():
        logits = rig.policy(input_ids=torch.tensor(prompt.astype(np.int64))[None]).logits[0, -1]
    want = nucleus(logits, temperature, top_p)
    for engine in rig.engines:
        ((*completions,),) = engine.generate(
            [prompt], Sampling(n=200, temperature=temperature, top_p=top_p, max_tokens=1)
        )
        for c in completions:
            assert c.logprobs[0] == pytest.approx(float(want[int(c.tokens[0])]), abs=TOLERANCE)


def test_explored_tokens_have_both_logprobs(rig: Rig) -> None:
    """Of what was sampled, and of the policy at the training temperature without top-p."""
    training_temperature = rig.policy_temperature
    sampling = Sampling(n=4, temperature=0.8, top_p=0.9, max_tokens=12)
    plain = Sampling(n=4, temperature=training_temperature, max_tokens=12)
    for engine in rig.engines:
        groups = engine.generate(make_prompts(), sampling)
        flat = [(p, c) for p, group in zip(make_prompts(), groups, strict=True) for c in group]
        gaps_sampled, gaps_old, apart = [], [], []
        for prompt, completion in flat:
            values = completion.old_logprobs
            tokens = torch.tensor([*prompt.tolist(), *completion.tokens.tolist()])
            with torch.no_grad():
                logits = rig.policy(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1]
                trainers = response_logprobs(
                    rig.policy, [prompt], [completion.tokens], temperature=training_temperature
                ).numpy()
            sampled = [
                float(nucleus(row, 0.8, 0.9)[token])
                for row, token in zip(logits, completion.tokens.tolist(), strict=True)
            ]
            assert values.shape == trainers.shape and values.dtype == np.float32
            gaps_sampled.append(np.abs(completion.logprobs - sampled).max())
            gaps_old.append(np.abs(values - trainers).max())
            apart.append(np.abs(values - completion.logprobs).max())
        print(
            f"{type(engine).__name__} at {training_temperature}: largest gap "
            f"{max(gaps_sampled):.1e} sampled, {max(gaps_old):.1e} old"
        )
        assert max(gaps_sampled) < SCORE_TOLERANCE and max(gaps_old) < SCORE_TOLERANCE
        assert max(apart) > 0.05, "the two distributions are too near to tell"
        for group in engine.generate(make_prompts(), plain):
            assert all(c.old_logprobs is None for c in group)  # one distribution
        # nothing of it stays in the engine
        check(rig, "after exploring")


def test_a_score_that_fails_leaves_the_engine_as_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = rig.engines[0]

    def fail(*args: object) -> None:
        raise RuntimeError("interrupted")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="interrupted"):
        patch.setattr(vllm, "_wait_for", fail)
        vllm.score_responses(make_prompts(), [make_prompts()[0]] * 4, temperature=0.5)
    vllm.drop()
    check(rig, "after a score that failed")


def test_the_longest_sequence_can_be_scored(rig: Rig) -> None:
    """Prompt and response together may fill the model's context, which vLLM alone refuses."""
    prompt, response = tiny.random_tokens(np.random.default_rng(3), [MAX_LENGTH - 100, 100])
    with torch.no_grad():
        want = tiny.plain_logprobs(rig.policy, prompt, response, 0.7).numpy()
    for engine in rig.engines:
        (score,) = engine.score_responses([prompt], [response], temperature=0.7)
        gap = np.abs(score - want).max()
        print(f"{type(engine).__name__}, {MAX_LENGTH} tokens: largest gap {gap:.1e}")
        assert score.shape == want.shape and gap < SCORE_TOLERANCE


def test_without_the_reset_the_prefix_cache_would_be_stale(rig: Rig) -> None:
    """A control for the tests above: it is the reset in `update` that keeps log-probs right."""
    vllm = rig.engines[0]
    assert isinstance(vllm, VLLMEngine)
    sampling = Sampling(n=1, temperature=0.7, max_tokens=8)
    vllm.generate(make_prompts(), sampling)
    rig.move()
    rig.publish()
    vllm._llm.collective_rpc("tba_take", args=(rig.version, 60.0))  # `update` but for the reset
    stale = rig.gaps(vllm.generate(make_prompts(), sampling), 0.7)
    print(f"stale cache: largest gap {stale.max():.2f}")
    assert stale.max() > 100 * TOLERANCE
    rig.update()
    assert rig.gaps(vllm.generate(make_prompts(), sampling), 0.7).max() < TOLERANCE


def test_update_without_news_is_none(rig: Rig) -> None:
    rig.update()
    assert [engine.update() for engine in rig.engines] == [None, None]


# --------------------------------------------------------------------------- in flight

LONG = Sampling(n=4, temperature=1.5, max_tokens=60)


def frozen(policy: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(policy).requires_grad_(False)


def logprobs_of(policy: torch.nn.Module, prompt: np.ndarray, c: Completion) -> np.ndarray:
    """Under one version of the policy, float32 [T]."""
    with torch.no_grad():
        return response_logprobs(policy, [prompt], [c.tokens], temperature=1.5).numpy()


def generate_across_updates(rig: Rig, updates: int) -> tuple[list, dict[int, torch.nn.Module]]:
    """(prompt, completion) pairs during whose generation the weights changed, and all policies."""
    engine = rig.engines[0]
    rig.update()
    policies = {rig.version: frozen(rig.policy)}
    for key, prompt in enumerate(make_prompts()):
        engine.add(key, prompt, LONG)
    finished = {}
    for _ in range(updates):
        for _ in range(8):
            finished.update(engine.step())
        rig.move()
        rig.publish()
        policies[rig.version] = frozen(rig.policy)
        deadline = time.monotonic() + 30
        while (update := engine.update()) is None:  # generation goes on meanwhile
            finished.update(engine.step())
            assert time.monotonic() < deadline
        assert update.version == rig.version and update.stall_s >= update.load_s > 0
    while len(finished) < len(PROMPT_LENGTHS):
        finished.update(engine.step())
    rig.engines[1].update(wait_for=rig.version, timeout_s=60)
    pairs = [(p, c) for key, p in enumerate(make_prompts()) for c in finished[key]]
    assert [len(finished[key]) for key in range(len(PROMPT_LENGTHS))] == [LONG.n] * 4
    return pairs, policies


def test_every_tokens_logprob_is_that_of_its_version(rig: Rig) -> None:
    """Across three updates in the middle of the responses: old and new keys never mix."""
    pairs, policies = generate_across_updates(rig, updates=3)
    spans, gap, wrong = 0, 0.0, 0.0
    for prompt, c in pairs:
        want = {version: logprobs_of(policies[version], prompt, c) for version, _ in c.versions}
        ends = [start for _, start in c.versions[1:]] + [len(c.tokens)]
        assert c.versions[0][1] == 0 and sorted(c.versions) == list(c.versions)
        spans = max(spans, len(c.versions))
        for (version, start), end in zip(c.versions, ends, strict=True):
            assert start < end
            gap = max(gap, np.abs(c.logprobs[start:end] - want[version][start:end]).max())
            if version != c.versions[0][0]:  # the control: another version's would be seen
                first = want[c.versions[0][0]][start:end]
                wrong = max(wrong, np.abs(c.logprobs[start:end] - first).max())
    print(f"up to {spans} versions in one response: largest gap {gap:.1e}, to another {wrong:.2f}")
    assert spans >= 3 and gap < TOLERANCE < 100 * TOLERANCE < wrong
    check(rig, "after updates in flight")


def test_kept_keys_are_a_mixture_but_new_prompts_see_none(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`engine.kv_after_update=keep`: what is under way goes on with old keys, nothing else does."""
    engine = rig.engines[0]
    monkeypatch.setattr(engine, "_recompute", False)
    engine.generate(make_prompts(), SAMPLING)  # prompts are cached, under this version's salt
    pairs, policies = generate_across_updates(rig, updates=1)
    (first, second) = sorted(policies)
    before = after = 0.0
    for prompt, c in pairs:
        start = dict(c.versions).get(second, len(c.tokens))
        gaps = np.abs(c.logprobs - logprobs_of(policies[first], prompt, c))[:start]
        before = max(before, gaps.max(initial=0.0))
        gaps = np.abs(c.logprobs - logprobs_of(policies[second], prompt, c))[start:]
        after = max(after, gaps.max(initial=0.0))
    print(f"kept keys: largest gap {before:.1e} before the update, {after:.2f} after")
    assert before < TOLERANCE and after > 100 * TOLERANCE
    check(rig, "after kept keys")  # the same prompts: what is cached of them is the old weights'


def test_evaluation_and_a_score_go_on_beside_generation(rig: Rig) -> None:
    engine = rig.engines[0]
    for key, prompt in enumerate(make_prompts()):
        engine.add(key, prompt, LONG)
    engine.step()
    check(rig, "beside others")
    left = {0, 1, 2, 3}
    while left:
        for key, group in engine.step():
            left.remove(key)
            assert len(group) == LONG.n
    assert engine.step() == []


def test_what_is_dropped_is_gone(rig: Rig) -> None:
    engine = rig.engines[0]
    for key, prompt in enumerate(make_prompts()):
        engine.add(key, prompt, LONG)
    engine.step()
    engine.drop()
    assert engine.step() == []
    check(rig, "after dropping")


def test_a_straggler_is_cut_at_what_it_has(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM by the clock of `step`, transformers within its batch; the tokens so far count."""
    monkeypatch.setattr("engine._STRAGGLER_PERIOD_S", 0.0)
    (prompt,) = tiny.random_tokens(np.random.default_rng(5), [6])
    for engine in rig.engines:
        engine.add(0, prompt, dataclasses.replace(LONG, n=16, max_tokens=450, max_seconds=0.02))
        engine.add(1, prompt, dataclasses.replace(LONG, max_tokens=5))
        finished: dict[int, list[Completion]] = {}
        start = time.monotonic()
        while len(finished) < 2:
            finished.update(engine.step())
        assert time.monotonic() - start < 20
        assert not any(c.timed_out for c in finished[1])
        cut = [c for c in finished[0] if c.timed_out]
        assert cut and all(c.truncated and 0 < len(c.tokens) < 450 for c in cut)
        for c in cut:
            assert len(c.logprobs) == len(c.tokens)
            gap = np.abs(c.logprobs - logprobs_of(frozen(rig.policy), prompt, c)).max()
            assert gap < TOLERANCE
        assert engine.step() == []


# --------------------------------------------------------------------------- other engines


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory):
    path = tiny.save_llama(tmp_path_factory.mktemp("bf16"), max_length=MAX_LENGTH)
    yield from run_rig(Rig(path, torch.bfloat16))


@pytest.mark.slow
def test_a_bfloat16_engine_is_near_a_float32_trainer(bf16: Rig) -> None:
    for _ in range(2):
        for engine in bf16.engines:
            gaps = bf16.gaps(engine.generate(make_prompts(), SAMPLING), SAMPLING.temperature)
            print(
                f"{type(engine).__name__} bfloat16, version {bf16.version}: mean gap "
                f"{gaps.mean():.4f}, largest {gaps.max():.3f}"
            )
            assert 0 < gaps.mean() < 0.03 and gaps.max() < 0.3
        bf16.move()
        bf16.update()


@pytest.mark.parametrize("rig", ["tied"], indirect=True)
def test_other_seeds_give_other_samples(rig: Rig, owner: Owner) -> None:
    """The owner's engine has the same weights and another seed."""
    assert len(owner.said()["samples"]) == len(rig.first)
    assert owner.said()["samples"] != rig.first


@pytest.mark.parametrize("rig", ["tied"], indirect=True)
def test_with_a_seed_a_prompts_samples_are_its_own(rig: Rig) -> None:
    """On either engine: whatever else the call holds, or came before."""
    prompts, seeds = make_prompts(), [7, 2**62 - 1, 8, 0]
    for engine in rig.engines:
        together = engine.generate(prompts, SAMPLING, seeds)
        for prompt, seed, group in reversed(list(zip(prompts, seeds, together, strict=True))):
            (alone,) = engine.generate([prompt], SAMPLING, [seed])
            assert [c.tokens.tolist() for c in alone] == [c.tokens.tolist() for c in group]
            assert len({tuple(c.tokens.tolist()) for c in group}) > 1
        gaps = rig.gaps(together, SAMPLING.temperature)
        assert gaps.max() < TOLERANCE
        (other,) = engine.generate(prompts[:1], SAMPLING, [9])
        assert [c.tokens.tolist() for c in other] != [c.tokens.tolist() for c in together[0]]


def test_an_engine_ends_with_its_owner(owner: Owner) -> None:
    """SIGKILL leaves the owner no time to end its engine."""
    pids = owner.said()["pids"]
    assert pids and all(process_is_alive(pid) for pid in pids)
    os.kill(owner.process.pid, signal.SIGKILL)
    start = time.monotonic()
    while any(process_is_alive(pid) for pid in pids) and time.monotonic() - start < 20:
        time.sleep(0.1)
    seconds = time.monotonic() - start
    print(f"engine processes gone {seconds:.1f} s after their owner")
    assert seconds < 10


def own(path: str) -> None:
    """Starts an engine, tells its processes and first samples, and waits."""
    engine = start_engine(path, VLLMEngine, seed=2, dtype=torch.float32)
    assert isinstance(engine, VLLMEngine)
    first = samples(engine)
    print(json.dumps({"pids": sorted(engine._pids), "samples": first}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    own(sys.argv[1])
