"""Engines: prompt tokens in, sampled tokens and their log-probs out.

Two engines with the same methods and results: `VLLMEngine` (vLLM in child processes) and `HFEngine`
(transformers in this process, where vLLM can't run). Tokens in and tokens out: nothing is
re-tokenised. Log-probs of what is generated are those of the distribution really sampled: float32
log-softmax after temperature and top-p. Given responses are scored at any temperature, without
top-p (`score_responses`). An engine takes weights only when asked (`update`), between two
generations, and forgets its prefix cache with the old weights.

vLLM must not see torchrun's variables (it would join the job's process group and hang), needs ports
that no other rank probes, a seed and cores or devices of its own.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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
from weights import Receiver, TensorSpec, WeightUpdate, manifest

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
    prefix_caching: bool = True  # vllm: the cache is emptied with every update of the weights
    log_level: str = "ERROR"  # vllm's own logger


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; temperature 0 is greedy."""

    n: int  # responses per prompt
    temperature: float
    top_p: float = 1.0
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response."""

    tokens: np.ndarray  # int32 [T], with the sampled end-of-text token
    logprobs: np.ndarray  # float32 [T], nats, under the distribution sampled from
    truncated: bool  # the length limit came before an end-of-text token


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
    cores: Sequence[int] = ()  # CPU cores of this rank; empty: unpinned
    port: int = _FIRST_PORT
    trust_remote_code: bool = False


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


def make_engine(cfg: EngineConfig, options: EngineOptions) -> VLLMEngine | HFEngine:
    """The configured engine, started."""
    return VLLMEngine(cfg, options) if cfg.name == "vllm" else HFEngine(cfg, options)


def _split_first(sequences: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """The first token of each sequence as its prompt, the others as the response."""
    return [sequence[:1] for sequence in sequences], [sequence[1:] for sequence in sequences]


# --------------------------------------------------------------------------- vLLM


class VLLMEngine:
    """vLLM, its core and workers in child processes of their own."""

    def __init__(self, cfg: EngineConfig, options: EngineOptions) -> None:
        self.on_step: Callable[[], None] = _nothing
        self._options = options
        on_gpu = options.device.type == "cuda"
        resource_tracker.ensure_running()  # Python's own child, not to be ended with the engine
        before = _child_pids()
        with _clean_environment(cfg, options):
            import vllm

            self._sampling_params = vllm.SamplingParams
            self._llm = vllm.LLM(
                model=options.path,
                skip_tokenizer_init=True,
                trust_remote_code=options.trust_remote_code,
                dtype=str(options.dtype).removeprefix("torch."),
                # vLLM scores a sequence only where a token more would fit; it is never computed on
                max_model_len=options.max_model_len + 1,
                max_num_seqs=cfg.max_num_seqs,
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
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        self._pids = _with_descendants(_child_pids() - before)
        self._llm.collective_rpc("tba_start", args=(os.getpid(),))

    def generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        """`sampling.n` completions of each prompt, in order.

        Args:
            seeds: one a prompt, in 0..2**62. Response s to it then draws from random numbers of
                its own, which the seed and s decide, whatever else the engine generates.
        """
        params = [
            self._sampling_params(
                n=sampling.n,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(self._options.stop_token_ids),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                seed=seed,  # vLLM adds s to it
            )
            for seed in ([None] if seeds is None else seeds)
        ]
        outputs = self._run(prompts, params[0] if seeds is None else params)
        return [
            [
                Completion(
                    tokens=np.asarray(completion.token_ids, dtype=np.int32),
                    logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
                    truncated=completion.finish_reason == "length",
                )
                for completion in output.outputs
            ]
            for output in outputs
        ]

    def score(self, sequences: Sequence[Tokens]) -> list[np.ndarray]:
        """Log-prob of every token but the first at temperature 1, float32 [len - 1] each."""
        return self.score_responses(*_split_first(sequences), temperature=1.0)

    def score_responses(
        self, prompts: Sequence[Tokens], responses: Sequence[Tokens], *, temperature: float
    ) -> list[np.ndarray]:
        """Log-probs of given responses at `temperature`, without top-p, float32 [T] each (nats).

        Each sequence is computed from its first token: a prompt's cached keys would save its
        hidden states, but vLLM reads no cache where it is asked for a prompt's log-probs.
        """
        starts = [len(prompt) for prompt in prompts]
        sequences = [
            [*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)
        ]
        params = self._sampling_params(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True, detokenize=False
        )
        with self._logits_divided_by(temperature):
            outputs = self._run(sequences, params)
        return [
            # the first token has none
            np.asarray(output.prompt_logprobs.logprobs[start - 1 :], dtype=np.float32)
            for start, output in zip(starts, outputs, strict=True)
        ]

    @contextmanager
    def _logits_divided_by(self, temperature: float) -> Iterator[None]:
        """vLLM takes no temperature for the tokens of a prompt: the model's logits get it."""
        if temperature == 1.0:
            yield
            return
        self._llm.collective_rpc("tba_divide_logits", args=(temperature,))
        try:
            yield
        finally:
            self._llm.collective_rpc("tba_divide_logits", args=(None,))

    def _run(self, prompts: Sequence[Tokens], params: Any) -> list[Any]:
        """`LLM.generate`, telling `on_step` after every decoding step that the engine is alive."""
        tokens = [{"prompt_token_ids": [int(t) for t in prompt]} for prompt in prompts]
        self._llm.enqueue(tokens, params, use_tqdm=False)
        outputs = []
        while self._llm.llm_engine.has_unfinished_requests():
            outputs += [o for o in self._llm.llm_engine.step() if o.finished]
            self.on_step()
        return sorted(outputs, key=lambda output: int(output.request_id))

    def join_weights(self, **options: Any) -> None:
        """Starts receiving weights; `options` are the keywords of `weights.Receiver`."""
        expected = [
            asdict(spec)
            for spec in expected_manifest(
                self._options.path, self._options.dtype, self._options.trust_remote_code
            )
        ]
        self._llm.collective_rpc("tba_join", args=(expected, options))

    def update(self, *, wait_for: int | None = None, timeout_s: float = 0.0) -> WeightUpdate | None:
        """Loads the newest weights that have come, if any (see `weights.Receiver.take`)."""
        updates = self._llm.collective_rpc("tba_take", args=(wait_for, timeout_s))
        if updates[0] is None:
            return None
        self._llm.reset_prefix_cache()
        return WeightUpdate(**updates[0])

    def leave_weights(self) -> None:
        """Waits for the publisher's closing message."""
        self._llm.collective_rpc("tba_leave")

    def pin(self, cores: Sequence[int]) -> None:
        """Keeps the engine's processes on this rank's cores (CPU)."""
        for pid in self._pids:
            pin_process(pid, cores)

    def close(self) -> None:
        """Ends the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()
        self.kill()

    def kill(self) -> None:
        """Ends the engine's processes at once, whatever state they are in."""
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
        index = options.device.index or 0
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)
    else:
        if options.cores:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, options.cores))
        if cfg.enforce_eager:
            # vLLM compiles small pieces even in eager mode, with a C++ compiler: half a minute at
            # the first generation, and no faster afterwards
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
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


class HFEngine:
    """transformers' `generate`, in this process.

    With a `model` it generates from that model as it is at every call, and takes no weights.
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
        self._receiver: Receiver | None = None

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
                **({"do_sample": True, "top_k": 0} if choose else {"do_sample": False}),
            )
        logprobs = recorder.finish(sequences)  # [B, T]
        return [
            self._completion(tokens, values, sampling.max_tokens)
            for tokens, values in zip(
                sequences[:, width:].cpu().numpy(), logprobs.cpu().numpy(), strict=True
            )
        ]

    def _completion(self, tokens: np.ndarray, logprobs: np.ndarray, limit: int) -> Completion:
        stops = np.flatnonzero(np.isin(tokens, self._options.stop_token_ids))
        length = int(stops[0]) + 1 if len(stops) else min(len(tokens), limit)
        return Completion(
            tokens=tokens[:length].astype(np.int32),
            logprobs=logprobs[:length].astype(np.float32),
            truncated=len(stops) == 0,
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

    def leave_weights(self) -> None:
        """Waits for the publisher's closing message."""
        if self._receiver is not None:
            self._receiver.close()

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
    """The last logits processor of `generate`: keeps the log-prob of each token as it was sampled.

    Called with the tokens so far and the processed scores of the next one, so the scores of step t
    are kept until the token that was drawn from them is seen: never more than [B, V].
    """

    def __init__(self, prompt_width: int, on_step: Callable[[], None]) -> None:
        self._width = prompt_width
        self._on_step = on_step
        self._scores: torch.Tensor | None = None
        self._logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._on_step()
        self._take(input_ids)
        self._scores = scores.float().log_softmax(-1)
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
