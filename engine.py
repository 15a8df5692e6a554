"""Engines: prompt tokens in, sampled tokens and their log-probs out.

Two engines with the same methods and results: `VLLMEngine` (vLLM in child processes) and `HFEngine`
(transformers in this process, where vLLM can't run). Tokens in and tokens out: nothing is
re-tokenised. Log-probs of what is generated are those of the distribution really sampled: float32
log-softmax after temperature and top-p. Given responses are scored at any temperature, without
top-p (`score_responses`).

A searcher keeps an engine busy with `add` and `step`: prompts join and responses leave one by one.
An engine takes weights only when asked (`update`). vLLM takes them in the middle of generations:
its requests freeze, the weights are loaded, and the requests go on from the token where they were.
`engine.kv_after_update` says with which keys and values: `recompute` (the default) computes those
of the prompt and of the tokens so far again, so that every token's log-prob is exactly that of the
version it is recorded under; `keep` goes on with those of the old weights, which is faster and a
mixture of two policies. New requests never see what older weights have cached.

vLLM's processes may die or hang. Whatever was asked of them then raises `EngineDied`, and a
searcher starts another engine.

vLLM must not see torchrun's variables (it would join the job's process group and hang), needs ports
that no other rank probes, a seed and cores or devices of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import model as modeling
import weights_vllm
from weights import Receiver, TensorSpec, WeightUpdate, manifest, process_is_alive

logger = logging.getLogger("tba")

Tokens: TypeAlias = Sequence[int] | np.ndarray  # token ids of one sequence

_TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_SCORED_TOKENS = 8192  # padded tokens of one forward pass that scores responses (transformers)
_PORTS_PER_RANK, _RANKS_PER_JOB, _JOB_SLOTS, _FIRST_PORT = 32, 8, 40, 20000


@dataclass
class EngineConfig:
    """How responses are generated."""

    name: str = "vllm"  # vllm | hf
    dtype: str = "auto"  # auto: float32 on CPU, bfloat16 on GPU
    max_num_seqs: int = 512  # sequences decoded at once (hf: batch size)
    kv_cache_gb: float = 1.0  # CPU only; on GPU see gpu_memory_utilization
    gpu_memory_utilization: float = 0.85
    enforce_eager: bool = True  # vllm: no compilation, no CUDA graphs
    prefix_caching: bool = True  # vllm: never across an update of the weights
    # vllm, of responses under way when new weights come: recompute (exact) | keep (faster)
    kv_after_update: str = "recompute"
    log_level: str = "ERROR"  # vllm's own logger
    # vllm: seconds without an answer after which an engine hangs, and is killed; less than
    # cluster.timeout_s; null: 0.4 of that
    hang_timeout_s: float | None = None
    max_restarts: int = 3  # vllm: of one searcher's engine in a run; one more ends the job


class EngineDied(RuntimeError):
    """A process of an engine has ended or hung; the engine can't be used any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; temperature 0 is greedy."""

    n: int  # responses per prompt
    temperature: float
    top_p: float = 1.0
    max_tokens: int
    max_seconds: float | None = None  # from its first token on; then it is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response."""

    tokens: np.ndarray  # int32 [T], with the sampled end-of-text token
    logprobs: np.ndarray  # float32 [T], nats, under the distribution sampled from
    # float32 [T], nats, at the policy's temperature (`EngineOptions.policy_temperature`) without
    # top-p. None: the same as `logprobs`, or not computed, as of greedy responses.
    old_logprobs: np.ndarray | None = None
    # (version of the weights, index of the first token that they sampled), ascending
    versions: Sequence[tuple[int, int]] = ((-1, 0),)
    truncated: bool  # the length or time limit came before an end-of-text token
    timed_out: bool = False  # it was the time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine needs to know of its model and its place."""

    path: str
    stop_token_ids: Sequence[int]
    pad_token_id: int
    max_model_len: int  # tokens, prompt and response
    dtype: torch.dtype
    device: torch.device
    seed: int
    tp: int = 1  # devices that share the model: this one and those that follow it
    vllm_transfer: bool = False  # weights come by vLLM's own transfer engine (weights_vllm.py)
    cores: Sequence[int] = ()  # CPU cores of all its ranks, in their order; empty: unpinned
    port: int = _FIRST_PORT
    trust_remote_code: bool = False
    # Where responses are sampled from other distributions, too: the temperature of the policy,
    # under which their `old_logprobs` are.
    policy_temperature: float | None = None
    hang_timeout_s: float = 120.0  # see `EngineConfig`

    @property
    def worker_cores(self) -> list[list[int]]:
        """Each device's share of the cores."""
        share = len(self.cores) // self.tp
        return [list(self.cores[i * share : (i + 1) * share]) for i in range(self.tp)]

    def explores(self, sampling: Sampling) -> bool:
        """Whether its responses need `old_logprobs` of their own."""
        plain = sampling.temperature == self.policy_temperature and sampling.top_p == 1.0
        return self.policy_temperature is not None and sampling.temperature > 0 and not plain


def engine_port(rank_on_node: int, job: str) -> int:
    """First port of this rank's own range: ranks of a node never probe the same port.

    Two jobs on one node start from different places for most job ids; vLLM probes upwards.
    """
    slot = zlib.crc32(job.encode()) % _JOB_SLOTS
    return _FIRST_PORT + (slot * _RANKS_PER_JOB + rank_on_node % _RANKS_PER_JOB) * _PORTS_PER_RANK


def _nothing() -> None:
    pass


def check_engine(name: str) -> None:
    """Raises ValueError if the engine can't be used here."""
    if name not in ("vllm", "hf"):
        raise ValueError(f"engine.name={name!r}: choose vllm or hf")
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError("engine=vllm, but vLLM is not installed: run `make setup`, or engine=hf")


def check_heads(path: str, tp: int, *, trust_remote_code: bool = False) -> None:
    """Raises ValueError if the model's attention heads can't be shared out over `tp` devices."""
    heads = modeling.attention_heads(path, trust_remote_code=trust_remote_code)
    if heads is None:
        return
    queries, keys = heads
    # where there are fewer heads of keys than devices, vLLM copies them
    fit = [n for n in range(1, queries + 1) if queries % n == 0 and 0 in (keys % n, n % keys)]
    if tp not in fit:
        raise ValueError(
            f"searcher.tp={tp} does not fit the model's {queries} attention heads ({keys} of keys "
            f"and values): choose one of {', '.join(map(str, fit))}"
        )


def make_engine(cfg: EngineConfig, options: EngineOptions) -> VLLMEngine | HFEngine:
    """The configured engine, started."""
    return VLLMEngine(cfg, options) if cfg.name == "vllm" else HFEngine(cfg, options)


def _split_first(sequences: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """The first token of each sequence as its prompt, the others as the response."""
    return [sequence[:1] for sequence in sequences], [sequence[1:] for sequence in sequences]


# --------------------------------------------------------------------------- vLLM


_STRAGGLER_PERIOD_S = 0.5  # between looks at how long responses have taken
_POLL_PERIOD_S = 0.02  # between questions to the core whether new weights have come
_WATCH_PERIOD_S = 0.2  # between looks whether the engine lives
_END_S = 20.0  # for killed processes to end
_INTERNAL = -1  # key of what `step` does not give


@dataclass(slots=True)
class _Request:
    """A prompt whose responses vLLM is working on."""

    key: int
    max_seconds: float | None  # of each response
    # vLLM's name of a response -> time.monotonic() when its first token was seen
    begun: dict[str, float] = field(default_factory=dict)


class _Watch:
    """Sees to it that every call to vLLM's core ends.

    vLLM's client waits for an answer without limit, in `step` and in every call by name, even when
    it has noticed that the core is dead. A thread looks whether the processes live and how long the
    call under way has taken; it kills an engine that hangs, and ends the call of a dead one.
    Consumes: the state of the processes. Produces: `reason`, and the end of a call.
    Ends: `stop()`, or when the engine is dead and no call is under way.
    """

    def __init__(
        self, llm: Any, pids: dict[int, str], kill: Callable[[], None], timeout_s: float
    ) -> None:
        """Begins to watch.

        Args:
            pids: processes without which the engine can't go on, with their names.
            kill: ends all of the engine's processes.
            timeout_s: of one call.
        """
        core = llm.llm_engine.engine_core
        self.reason: str | None = None  # why the engine is dead
        self._resources, self._outputs = core.resources, core.outputs_queue
        self._futures: dict[int, Any] = core.utility_results
        self._pids, self._kill, self._timeout_s = pids, kill, timeout_s
        self._calls = 0  # so far, with the one under way
        self._is_asking = False
        self._limit_s = timeout_s  # of the call under way
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="engine watch", daemon=True).start()

    @contextmanager
    def asking(self, limit_s: float | None = None) -> Iterator[None]:
        """A call to the core is under way.

        Args:
            limit_s: what it may take; None: the usual time.

        Raises:
            EngineDied: it was dead, or has died.
        """
        self._limit_s = self._timeout_s if limit_s is None else limit_s
        self._calls += 1
        self._is_asking = True
        try:
            if self.reason is not None:
                raise EngineDied(self.reason)
            yield
        except EngineDied:
            raise
        except Exception as error:
            reason = self._look() or self._told(error)
            if reason is None:
                raise
            raise EngineDied(reason) from error
        finally:
            self._is_asking = False

    def stop(self) -> None:
        """Watches no longer."""
        self._stopped.set()

    def _look(self) -> str | None:
        """Why the engine is dead, if it is."""
        if self.reason is None:
            for pid, name in self._pids.items():
                if not process_is_alive(pid):
                    self.reason = f"the engine's {name} (process {pid}) has ended"
        return self.reason

    def _told(self, error: Exception) -> str | None:
        """The same, by what vLLM says."""
        if not self._resources.engine_dead:
            return None
        self.reason = f"vLLM gave its engine up: {error}"
        return self.reason

    def _run(self) -> None:
        # Time is counted in wake-ups of this thread, so that a searcher that was stopped or starved
        # itself accuses nobody.
        calls, seconds = 0, 0.0
        while not self._stopped.wait(_WATCH_PERIOD_S):
            same = self._is_asking and self._calls == calls
            calls, seconds = self._calls, seconds + _WATCH_PERIOD_S if same else 0.0
            if self._look() is not None:
                self._end_call()
                if not self._is_asking:
                    return
            elif seconds > self._limit_s:
                self.reason = (
                    f"the engine has not answered for {seconds:.0f} s (engine.hang_timeout_s)"
                )
                self._kill()

    def _end_call(self) -> None:
        self._resources.engine_dead = True  # vLLM begins no other call
        error = EngineDied(self.reason or "")
        self._outputs.put_nowait(error)
        for future in list(self._futures.values()):
            with suppress(InvalidStateError):  # answered meanwhile
                future.set_exception(error)


class VLLMEngine:
    """vLLM, its core and workers in child processes of their own.

    The core decodes on by itself whatever this process does; `step` only picks up what it has done.
    Used by one thread. Everything that asks the core raises `EngineDied` when a process of the
    engine has ended, or has not answered for `EngineOptions.hang_timeout_s` and was killed for it.
    """

    def __init__(self, cfg: EngineConfig, options: EngineOptions) -> None:
        self.on_step: Callable[[], None] = _nothing
        self._options = options
        self._recompute = cfg.kv_after_update == "recompute"
        self._version = -1
        self._under_way: dict[str, _Request] = {}  # by the name that vLLM knows it by
        self._finished: list[tuple[int, list[Completion]]] = []  # not yet given by `step`
        self._count = 0  # of all requests, for names
        self._looked_at = 0.0  # time.monotonic() of the last look at stragglers, and at weights
        self._polled_at = 0.0
        self._has_update = False
        self._transfer: weights_vllm.TransferEnd | None = None  # in place of the workers' receivers
        on_gpu = options.device.type == "cuda"
        resource_tracker.ensure_running()  # Python's own child, not to be ended with the engine
        before = _child_pids()
        with _clean_environment(cfg, options):
            import vllm
            from vllm.sampling_params import RequestOutputKind
            from vllm.v1.engine import FinishReason

            self._abort = FinishReason.ABORT
            self._sampling_params = partial(
                vllm.SamplingParams,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # a deep copy takes longer than a short response
            )
            self._llm = vllm.LLM(
                model=options.path,
                skip_tokenizer_init=True,
                trust_remote_code=options.trust_remote_code,
                dtype=str(options.dtype).removeprefix("torch."),
                # vLLM scores a sequence only where a token more would fit; it is never computed on
                max_model_len=options.max_model_len + 1,
                max_num_seqs=cfg.max_num_seqs,
                tensor_parallel_size=options.tp,
                distributed_executor_backend="mp" if options.tp > 1 else None,
                seed=options.seed,
                enforce_eager=cfg.enforce_eager,
                enable_prefix_caching=cfg.prefix_caching,
                # Responses of one prompt share what is cached of it, in whole blocks: the default
                # on CPU, 128 tokens, is longer than most prompts. 32 is the least it takes.
                block_size=None if on_gpu else 32,
                gpu_memory_utilization=cfg.gpu_memory_utilization,
                kv_cache_memory_bytes=None if on_gpu else int(cfg.kv_cache_gb * 2**30),
                logprobs_mode="processed_logprobs",
                worker_extension_cls="weights.EngineWeights",
                weight_transfer_config=weights_vllm.engine_config()
                if options.vllm_transfer
                else None,
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        self._pids = _with_descendants(_child_pids() - before)
        self._llm.llm_engine.set_weight_version(str(self._version))
        self._worker_pids: list[int] = self._llm.collective_rpc(
            "tba_start", args=(os.getpid(), options.policy_temperature)
        )
        # a vLLM-native transfer waits for the trainer and all other engines inside of its calls
        limit_s = math.inf if options.vllm_transfer else options.hang_timeout_s
        self._watch = _Watch(self._llm, self._vital_pids(), self._kill_all, limit_s)
        if options.policy_temperature is not None:
            try:
                self._check_old_logprobs(options.policy_temperature)
            except BaseException:
                self.kill()
                raise

    # Streaming

    def add(self, key: int, prompt: Tokens, sampling: Sampling, *, seed: int | None = None) -> None:
        """Queues a prompt; `step` gives its `sampling.n` responses with `key`, from 0 up.

        Args:
            seed: as in `generate`.
        """
        self._request(key, prompt, self._params(sampling, seed), sampling.max_seconds)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is added inside is decoded in one batch from the first step on."""
        self._ask_core("pause_scheduler", "keep", False)
        try:
            yield
        finally:
            self._ask_core("resume_scheduler")

    def _vital_pids(self) -> dict[int, str]:
        """The core and its workers: one process, or with several workers one each."""
        import psutil

        names = {pid: f"worker {i}" for i, pid in enumerate(self._worker_pids)}
        parent = psutil.Process(self._worker_pids[0]).ppid()
        core = self._worker_pids[0] if parent == os.getpid() else parent
        return names | {core: "core"}

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Waits for one decoding step; the prompts all of whose responses have ended since.

        With their keys, and the responses in the order of their numbers.
        """
        if not self._finished and self._llm.llm_engine.has_unfinished_requests():
            self._take_outputs()
        self._cut_stragglers()
        finished, self._finished = self._finished, []
        return finished

    def drop(self) -> None:
        """Forgets all that is under way."""
        with self._watch.asking():
            self._llm.llm_engine.abort_request(list(self._under_way))
        self._under_way.clear()
        self._finished.clear()

    def _params(self, sampling: Sampling, seed: int | None) -> Any:
        return self._sampling_params(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(self._options.stop_token_ids),
            logprobs=1 if self._options.explores(sampling) else 0,
            seed=seed,  # vLLM adds a response's number to it
        )

    def _request(
        self, key: int, prompt: Tokens, params: Any, max_seconds: float | None = None
    ) -> str:
        self._count += 1
        name = str(self._count)
        tokens: dict[str, Any] = {"prompt_token_ids": [int(t) for t in prompt]}
        if not self._recompute:  # what requests under way hold outlives an update
            tokens["cache_salt"] = f"version {self._version}"
        with self._watch.asking():
            self._llm.llm_engine.add_request(name, tokens, params)
        self._under_way[name] = _Request(key, max_seconds)
        return name

    def _take_outputs(self) -> list[tuple[str, Any]]:
        """One step's results: those of `add` are kept for `step`, others returned by name."""
        with self._watch.asking():
            outputs = self._llm.llm_engine.step()
        others = [
            (output.request_id, output)
            for output in outputs
            if output.finished and not self._finish(output)
        ]
        self.on_step()
        return others

    def _finish(self, output: Any) -> bool:
        """Whether `step` is to give it; keeps it then."""
        key = self._under_way.pop(output.request_id).key
        if key != _INTERNAL:
            self._finished.append((key, self._completions(output)))
        return key != _INTERNAL

    def _completions(self, output: Any) -> list[Completion]:
        return [self._completion(completion) for completion in output.outputs]

    def _completion(self, output: Any) -> Completion:
        tokens = np.asarray(output.token_ids, dtype=np.int32)
        values = np.asarray(output.logprobs.logprobs, dtype=np.float32)
        per_token = len(values) // len(tokens)  # one, or two with old log-probs
        return Completion(
            tokens=tokens,
            logprobs=values[::per_token].copy() if per_token > 1 else values,
            old_logprobs=values[1::per_token].copy() if per_token > 1 else None,
            versions=[(int(span.version), span.start) for span in output.weight_versions],
            truncated=output.finish_reason != "stop",
            timed_out=output.finish_reason == "abort",
        )

    def _cut_stragglers(self) -> None:
        """Ends responses that have taken over their `max_seconds`, at what they have."""
        now = time.monotonic()
        if now - self._looked_at < _STRAGGLER_PERIOD_S:
            return
        self._looked_at = now
        processor = self._llm.llm_engine.output_processor
        cut = []
        for name, request in self._under_way.items():
            if request.max_seconds is None:
                continue
            for internal in processor.external_req_ids[name]:
                tokens = processor.request_states[internal].detokenizer.num_output_tokens()
                begun = request.begun.setdefault(internal, now) if tokens else now
                if now - begun > request.max_seconds:
                    cut.append(internal)
        for internal in cut:
            state = processor.request_states[internal]
            output = state.make_request_output([], None, self._abort, None)
            if output is not None:  # the last of its prompt
                if state.parent_req is not None:
                    processor.parent_requests.pop(state.parent_req.request_id, None)
                self._finish(output)
        if cut:
            with self._watch.asking():
                self._llm.llm_engine.abort_request(cut, internal=True)

    # Whole batches

    def generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """`sampling.n` completions of each prompt, in order; what is under way goes on beside it.

        Args:
            seeds: one a prompt, in 0..2**62. Response s to it then draws from random numbers of
                its own, which the seed and s decide, whatever else the engine generates.
        """
        each = [None] * len(prompts) if seeds is None else seeds
        names = [
            self._request(_INTERNAL, prompt, self._params(sampling, seed))
            for prompt, seed in zip(prompts, each, strict=True)
        ]
        outputs = self._wait_for(names)
        return [self._completions(outputs[name]) for name in names]

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Log-prob of every token but the first at temperature 1, float32 [len - 1] each."""
        return self.score_responses(*_split_first(sequences), temperature=1.0)

    def score_responses(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], *, temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses at `temperature`, without top-p, float32 [T] each (nats).

        Each sequence is computed from its first token: a prompt's cached keys would save its
        hidden states, but vLLM reads no cache where it is asked for a prompt's log-probs. At
        another temperature than 1 nothing else may be under way.
        """
        params = self._sampling_params(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        with self._logits_divided_by(temperature):
            names = [
                self._request(_INTERNAL, [*prompt, *response], params)
                for prompt, response in zip(prompts, responses, strict=True)
            ]
            outputs = self._wait_for(names)
        return [
            # the first token has none
            np.asarray(outputs[name].prompt_logprobs.logprobs[len(prompt) - 1 :], dtype=np.float32)
            for name, prompt in zip(names, prompts, strict=True)
        ]

    @contextmanager
    def _logits_divided_by(self, temperature: float) -> Iterator[None]:
        """vLLM takes no temperature for the tokens of a prompt: the model's logits get it."""
        if temperature == 1.0:
            yield
            return
        assert not self._under_way, "the logits of what is under way would be divided too"
        self._ask_workers("tba_divide_logits", temperature)
        try:
            yield
        finally:
            self._ask_workers("tba_divide_logits", None)

    def _ask_workers(self, method: str, *args: Any) -> list[Any]:
        """What a method of `EngineWeights` gives, on every worker."""
        with self._watch.asking():
            return self._llm.collective_rpc(method, args=args)

    def _ask_core(self, method: str, *args: Any) -> Any:
        with self._watch.asking():
            return self._llm.llm_engine.engine_core.call_utility(method, *args)

    def _wait_for(self, names: Sequence[str]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        while len(outputs) < len(names):
            outputs.update(self._take_outputs())
        return outputs

    def _check_old_logprobs(self, temperature: float) -> None:
        """A few tokens' old log-probs computed both ways, before anything relies on them.

        Raises:
            RuntimeError: they differ: this vLLM samples in another way than the one known here.
        """
        prompt = [self._options.pad_token_id] * 2
        sampling = Sampling(n=4, temperature=2 * temperature, top_p=0.9, max_tokens=4)
        group = self.generate([prompt], sampling)[0]
        want = self.score_responses(
            [prompt] * len(group), [c.tokens for c in group], temperature=temperature
        )
        # in bfloat16 the two ways round differently
        tolerance = 1e-2 if self._options.dtype == torch.float32 else 0.3
        for completion, values in zip(group, want, strict=True):
            old = completion.old_logprobs
            if old is None or not np.allclose(old, values, rtol=0.0, atol=tolerance):
                raise RuntimeError(
                    "vLLM does not give the log-probs of explored responses at the policy's "
                    f"temperature ({old} for {values}): set searcher.explore.temperature_prob=0, "
                    "searcher.explore.top_p_prob=0 and searcher.top_p=1"
                )

    def join_weights(self, **options: Any) -> None:
        """Starts receiving weights; `options` are the keywords of `weights.Receiver`."""
        if self._options.vllm_transfer:
            options.pop("restart_timeout_s", None)  # engines are not restarted
            with self._watch.asking():
                self._transfer = weights_vllm.TransferEnd(self._llm, tp=self._options.tp, **options)
            return
        expected = [
            asdict(spec)
            for spec in expected_manifest(
                self._options.path, self._options.dtype, self._options.trust_remote_code
            )
        ]
        self._ask_workers("tba_join", expected, options)

    def update(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Loads the newest weights that have come, if any (see `weights.Receiver.take`)."""
        if wait_for is None and not self.has_update():
            return None
        # A wait inside of the workers would look like an engine that hangs.
        if (self._options.tp > 1 or wait_for is not None) and self._transfer is None:
            wait_for = self._agree(wait_for, timeout_s)
        frozen = bool(self._under_way)
        if frozen:  # returns when the step under way has ended, and its tokens are on their way
            self._ask_core("pause_scheduler", "keep", False)
        paused = time.monotonic()
        try:
            found = self._take(wait_for, timeout_s)
            self._has_update = False
            if found is None:
                return None
            if self._recompute or not frozen:
                # Frozen requests lose their keys and values, and compute them anew.
                self._ask_core("reset_prefix_cache", True, False)
            self._version = found["version"]
            self._llm.llm_engine.set_weight_version(str(self._version))
        finally:
            if frozen:
                self._ask_core("resume_scheduler")
        return WeightUpdate(**found, stall_s=time.monotonic() - paused)

    def _take(self, wait_for: int | None, timeout_s: float) -> dict[str, Any] | None:
        """Loads the weights on every worker; the fields of `WeightUpdate`, but `stall_s`."""
        if self._transfer is not None:
            with self._watch.asking():
                return self._transfer.take(wait_for=wait_for, timeout_s=timeout_s)
        loaded = self._ask_workers("tba_take", wait_for, timeout_s)
        found = loaded[0]
        if found is not None:
            assert {update["version"] for update in loaded} == {found["version"]}
            found["load_s"] = max(update["load_s"] for update in loaded)
        return found

    def _agree(self, wait_for: int | None, timeout_s: float) -> int:
        """A version that every worker of the engine holds, complete, until it is taken.

        Each worker receives by itself, so that one may hold version 5 when another has 6 already,
        or has given up 5 for a 6 that is still coming. Each keeps what it has, or is to have next,
        and says which; those behind the newest of these are then asked for that one. Every version
        comes to every worker, in order: none misses it, and none goes beyond. The engine decodes
        on meanwhile.

        Args:
            wait_for: the oldest version that will do, if no pinned one comes before it.
            timeout_s: what `wait_for` may take to come.

        Raises:
            RuntimeError: receiving failed, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        wanted = wait_for or 0
        while True:
            versions, complete = zip(*self._ask_workers("tba_hold", wanted), strict=True)
            newest = max(versions)
            if all(complete) and min(versions) == newest:
                return newest
            wanted = max(wanted, newest)
            if wait_for is not None and time.monotonic() > deadline:
                raise RuntimeError(f"version {wait_for} has not come within {timeout_s:.0f} s")
            time.sleep(_POLL_PERIOD_S)

    def has_update(self) -> bool:
        """Whether weights have come that are not loaded; a yes may come a moment late."""
        now = time.monotonic()
        if not self._has_update and now - self._polled_at >= _POLL_PERIOD_S:
            self._polled_at = now
            if self._transfer is not None:
                self._has_update = self._transfer.offered()
            else:
                self._has_update = min(self._ask_workers("tba_staged")) >= 0
        return self._has_update

    def leave_weights(self, timeout_s: float = 30.0) -> None:
        """Waits for the publisher's closing message, `timeout_s` at most."""
        if self._transfer is not None:
            with self._watch.asking():
                self._transfer.leave()
            return
        deadline = time.monotonic() + timeout_s
        while not all(self._ask_workers("tba_leave", 0.5)) and time.monotonic() < deadline:
            pass

    def pin(self, cores: Sequence[int]) -> None:
        """Keeps the engine's processes on `cores`, of several workers each on its share (CPU)."""
        shares = dict(zip(self._worker_pids, self._options.worker_cores, strict=True))
        for pid in self._pids:
            pin_process(pid, shares.get(pid) or cores)

    def close(self) -> None:
        """Ends the engine's processes."""
        self._watch.stop()
        self._llm.llm_engine.engine_core.shutdown()
        self.kill()

    def kill(self) -> None:
        """Ends the engine's processes at once, whatever state they are in; waits for their end."""
        self._watch.stop()
        self._kill_all()
        deadline = time.monotonic() + _END_S
        while any(map(process_is_alive, self._pids)) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _kill_all(self) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@contextmanager
def _clean_environment(cfg: EngineConfig, options: EngineOptions) -> Iterator[None]:
    """What vLLM's child processes inherit; this process gets its own variables back."""
    saved = dict(os.environ)
    for name in list(os.environ):
        if name in _TORCHRUN_VARIABLES or name.startswith("TORCHELASTIC_"):
            del os.environ[name]
    os.environ.update(
        VLLM_PORT=str(options.port),
        VLLM_LOGGING_LEVEL=cfg.log_level,
        VLLM_NO_USAGE_STATS="1",
        VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",  # see max_model_len above
        PYTHONWARNINGS="ignore::FutureWarning",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    if options.device.type == "cuda":
        visible = [d for d in saved.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        first = options.device.index or 0
        devices = [visible[i] if visible else str(i) for i in range(first, first + options.tp)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    else:
        if options.cores:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
                ",".join(map(str, cores)) for cores in options.worker_cores
            )
        if cfg.enforce_eager:
            # vLLM compiles small pieces even in eager mode, with a C++ compiler: half a minute at
            # the first generation, and no faster afterwards
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if options.policy_temperature is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # see EngineWeights.tba_start
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _child_pids() -> set[int]:
    import psutil

    return {child.pid for child in psutil.Process().children()}


def _with_descendants(pids: set[int]) -> set[int]:
    """Not all descendants of this process: other children of it may start some meanwhile."""
    import psutil

    found = set(pids)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def pin_process(pid: int, cores: Sequence[int]) -> None:
    """Restricts every thread of a process to `cores`; a thread that has just ended is no error."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except FileNotFoundError:
        return
    for thread in threads:
        try:
            os.sched_setaffinity(int(thread), cores)
        except OSError:
            continue


# --------------------------------------------------------------------------- transformers


@dataclass(frozen=True, slots=True)
class _Queued:
    """A prompt that transformers has not begun."""

    key: int
    prompt: Tokens
    sampling: Sampling
    seed: int | None


class HFEngine:
    """transformers' `generate`, in this process.

    With a `model` it generates from that model as it is at every call, and takes no weights. A
    batch that has begun can't be joined, nor given new weights, before it ends.
    """

    def __init__(
        self, cfg: EngineConfig, options: EngineOptions, model: PreTrainedModel | None = None
    ) -> None:
        self.on_step: Callable[[], None] = _nothing
        self._options = options
        self._batch_size = cfg.max_num_seqs
        self._model = model or modeling.load_policy(
            options.path,
            device=options.device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
        # The folder's may hold a repetition penalty and the like: not the policy's distribution.
        self._model.generation_config = GenerationConfig()
        self._generator_seed = options.seed
        self._calls = 0
        self._queue: list[_Queued] = []
        self._receiver: Receiver | None = None

    def add(self, key: int, prompt: Tokens, sampling: Sampling, *, seed: int | None = None) -> None:
        """Queues a prompt; `step` gives its `sampling.n` responses with `key`, from 0 up.

        Args:
            seed: as in `generate`.
        """
        self._queue.append(_Queued(key, prompt, sampling, seed))

    def together(self) -> AbstractContextManager[None]:
        """Nothing to do: nothing begins before `step`."""
        return nullcontext()

    def step(self) -> list[tuple[int, list[Completion]]]:
        """Generates for the first prompts in the queue that are sampled alike and fill a batch."""
        batch: list[_Queued] = []
        for queued in self._queue:
            first = (batch or [queued])[0]
            alike = queued.sampling == first.sampling
            alike &= (queued.seed is None) == (first.seed is None)
            size = (len(batch) + 1) * first.sampling.n
            if batch and (not alike or size > self._batch_size):
                break
            batch.append(queued)
        if not batch:
            return []
        self._queue = self._queue[len(batch) :]
        prompts = [queued.prompt for queued in batch]
        seeds = [queued.seed for queued in batch if queued.seed is not None]
        groups = self.generate(prompts, batch[0].sampling, seeds or None)
        return [(queued.key, group) for queued, group in zip(batch, groups, strict=True)]

    def drop(self) -> None:
        """Forgets all that is under way."""
        self._queue.clear()

    def generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """`sampling.n` completions of each prompt, in order.

        Args:
            seeds: one a prompt, in 0..2**62. Response s to it then draws from random numbers of
                its own, which the seed and s decide, whatever else the engine generates.
        """
        flat = [prompt for prompt in prompts for _ in range(sampling.n)]
        streams = (
            None
            if seeds is None
            else [(seed, number) for seed in seeds for number in range(sampling.n)]
        )
        completions: list[Completion] = []
        for start in range(0, len(flat), self._batch_size):
            batch = slice(start, start + self._batch_size)
            completions += self._generate(flat[batch], sampling, streams and streams[batch])
        return [completions[i : i + sampling.n] for i in range(0, len(completions), sampling.n)]

    def _generate(
        self,
        prompts: Sequence[Tokens],
        sampling: Sampling,
        streams: Sequence[tuple[int, int]] | None,
    ) -> list[Completion]:
        width = max(len(prompt) for prompt in prompts)
        device = self._options.device
        input_ids = torch.full((len(prompts), width), self._options.pad_token_id)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.as_tensor([int(t) for t in prompt])
            mask[row, width - len(prompt) :] = 1
        recorder = _LogprobRecorder(width, self.on_step)
        processors = _processors(sampling, recorder)
        old_recorder = None
        if self._options.explores(sampling):
            old_recorder = _LogprobRecorder(width, temperature=self._options.policy_temperature)
            processors.insert(0, old_recorder)  # before temperature and top-p
        choose = sampling.temperature > 0.0
        if choose and streams is not None:
            processors.append(_SeededChoice(width, streams, sampling.max_tokens, device))
            choose = False
        self._calls += 1
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self._generator_seed * 1_000_003 + self._calls)
            sequences = self._model.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(self._options.stop_token_ids),
                pad_token_id=self._options.pad_token_id,
                # given here: `generate` would apply its own options after the recorder
                logits_processor=processors,
                max_time=sampling.max_seconds,
                **({"do_sample": True, "top_k": 0} if choose else {"do_sample": False}),
            )
        logprobs = recorder.finish(sequences)  # [B, T]
        old = old_recorder.finish(sequences) if old_recorder else [None] * len(prompts)
        return [
            self._completion(*row, sampling.max_tokens)
            for row in zip(sequences[:, width:].cpu(), logprobs.cpu(), old, strict=True)
        ]

    def _completion(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, old: torch.Tensor | None, limit: int
    ) -> Completion:
        stops = np.flatnonzero(np.isin(tokens.numpy(), self._options.stop_token_ids))
        length = int(stops[0]) + 1 if len(stops) else min(len(tokens), limit)
        return Completion(
            tokens=tokens[:length].numpy().astype(np.int32),
            logprobs=logprobs[:length].numpy().astype(np.float32),
            old_logprobs=None if old is None else old[:length].cpu().numpy().astype(np.float32),
            versions=((-1 if self._receiver is None else self._receiver.version, 0),),
            truncated=len(stops) == 0,
            timed_out=len(stops) == 0 and length < limit,
        )

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Log-prob of every token but the first at temperature 1, float32 [len - 1] each."""
        return self.score_responses(*_split_first(sequences), temperature=1.0)

    def score_responses(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], *, temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses at `temperature`, without top-p, float32 [T] each (nats)."""
        return modeling.unique_response_logprobs(
            self._model,
            [np.asarray(prompt, dtype=np.int32) for prompt in prompts],
            [np.asarray(response, dtype=np.int32) for response in responses],
            temperature=temperature,
            tokens_per_micro_batch=_SCORED_TOKENS,
        )

    def join_weights(self, **options: Any) -> None:
        """Starts receiving weights; `options` are the keywords of `weights.Receiver`."""
        self._receiver = Receiver(
            expected_manifest(
                self._options.path, self._options.dtype, self._options.trust_remote_code
            ),
            self._load,
            device=self._options.device,
            **options,
        )

    @torch.no_grad()
    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    def update(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Loads the newest weights that have come, if any (see `weights.Receiver.take`)."""
        assert self._receiver is not None, "join_weights comes first"
        return self._receiver.take(wait_for=wait_for, timeout_s=timeout_s)

    def has_update(self) -> bool:
        """Whether weights have come that are not loaded."""
        return self._receiver is not None and self._receiver.staged_version >= 0

    def leave_weights(self, timeout_s: float = 30.0) -> None:
        """Waits for the publisher's closing message, `timeout_s` at most."""
        if self._receiver is not None:
            self._receiver.close(timeout_s)

    def pin(self, cores: Sequence[int]) -> None:
        """Nothing to pin beyond this process."""

    def close(self) -> None:
        """Nothing outlives this process."""

    def kill(self) -> None:
        """Nothing outlives this process."""


def _processors(sampling: Sampling, recorder: _LogprobRecorder) -> LogitsProcessorList:
    processors: list[Any] = []
    if sampling.temperature > 0.0:
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(float(sampling.top_p)))
    return LogitsProcessorList([*processors, recorder])


class _LogprobRecorder:
    """A logits processor of `generate`: keeps each token's log-prob under the scores it is given.

    As the last of them it gets what is sampled from, as the first what the model says.

    Called with the tokens so far and the processed scores of the next one, so the scores of step t
    are kept until the token that was drawn from them is seen: never more than [B, V].
    """

    def __init__(
        self,
        prompt_width: int,
        on_step: Callable[[], None] = _nothing,
        temperature: float | None = None,
    ) -> None:
        self._width = prompt_width
        self._on_step = on_step
        self._temperature = temperature or 1.0  # that the scores are still to be divided by
        self._scores: torch.Tensor | None = None
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._on_step()
        self._take(input_ids)
        self._scores = (scores.float() / self._temperature).log_softmax(-1)
        return scores

    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """Log-probs of all generated tokens, float32 [B, T]."""
        self._take(sequences)
        return torch.stack(self._logprobs, dim=1)

    def _take(self, input_ids: torch.Tensor) -> None:
        if self._scores is not None:
            token = input_ids[:, self._width + len(self._logprobs)]
            self._logprobs.append(self._scores.gather(1, token[:, None]).squeeze(1))


class _SeededChoice:
    """Draws each row's token with that row's own random numbers, and leaves `generate` no other.

    One uniform number a token, turned into a token by the inverse of the distribution function.
    """

    def __init__(
        self,
        prompt_width: int,
        streams: Sequence[tuple[int, int]],
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._width = prompt_width
        draws = np.stack([np.random.default_rng(stream).random(max_tokens) for stream in streams])
        self._draws = torch.from_numpy(draws).to(device)  # float64 [B, T]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        cumulative = scores.double().softmax(-1).cumsum(-1)  # [B, V]
        draw = self._draws[:, input_ids.shape[1] - self._width, None]
        # the first token whose share of the line reaches beyond the draw: never one of chance 0
        token = torch.searchsorted(cumulative, draw * cumulative[:, -1:], right=True)
        token.clamp_(max=scores.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def expected_manifest(
    path: str, dtype: torch.dtype, trust_remote_code: bool = False
) -> list[TensorSpec]:
    """The tensors an engine with this model must be sent: read from its config, not its trainer."""
    return manifest(modeling.empty_model(path, trust_remote_code=trust_remote_code), dtype)
