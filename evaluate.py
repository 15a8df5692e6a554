"""Evaluation: of any model on any task, of a policy while it trains, of saved responses.

    python evaluate.py task=gsm8k model=smollm2 task.data_dir=... eval.limit=200
    torchrun --nproc_per_node=8 evaluate.py task=gsm8k model=rho1b eval.samples=16
    python evaluate.py task=gsm8k eval.responses=in.jsonl eval.out=out.jsonl      # no model

Every rank is an engine. The engines' calls, the problems that share one and the random numbers
that each response draws are the same on any number of ranks; whole calls are dealt out in turn. So
results are the same too: exactly with the transformers engine and equal threads a rank, and with
vLLM where it computes equal calls equally; else but for what rounding does to near ties.
Leaves the graded responses (JSONL) and, beside them, the figures with their intervals (JSON).
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.distributed as dist
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedTokenizerBase

import model as modeling
from comm import (
    FOREVER,
    Control,
    Ranks,
    gather_texts,
    init_world,
    ranks_from_environment,
)
from engine import (
    Completion,
    EngineOptions,
    HFEngine,
    Sampling,
    VLLMEngine,
    engine_port,
    make_engine,
    pin_process,
)
from estimates import LEVEL
from graded import (
    Batch,
    Graded,
    grade,
    grades,
    measure,
    saved_responses,
    summarize,
    write_lines,
    write_whole,
)
from metrics import setup_logging
from rewards import Scorer, make_scorer
from tasks.task import (
    Problem,
    Task,
    answer_rule,
    check_problems,
    check_task,
    has_right_answers,
    is_correct,
    splits,
)

# config.py and train.py import this file by way of the searcher: `run` and what it calls import
# them when the command runs.

logger = logging.getLogger("tba")


@dataclass
class EvalConfig:
    """When training evaluates (the first four keys), and what `evaluate.py` does (the others).

    Training evaluates greedily, on the searchers' engines (`mode=offline`: by the trainers).
    """

    every: int = 50  # steps; 0: only before and after training
    before: bool = True
    num_problems: int = 256
    measures: bool = True  # while training, also what the task measures besides the reward
    split: str = "test"
    limit: int | None = None  # the first problems of the split; null: all
    samples: int = 0  # n: responses sampled a problem, beside the greedy one
    temperature: float | None = None  # of the samples; null: searcher.temperature
    top_p: float = 1.0  # of the samples
    responses_per_call: int = 64  # generated at once; more keep a large GPU busier
    resamples: int = 10_000  # bootstrap draws of the intervals
    responses: str | None = None  # saved responses (JSONL) to grade, without a model
    out: str | None = None  # graded responses (JSONL); null: in a new folder under run.root


# --------------------------------------------------------------------------- during training


def response_texts(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion]
) -> list[str]:
    """Text of each completion without the token that ended it.

    Other special tokens stay: a response that holds them is not the one without them.
    """
    tokens = [c.tokens if c.truncated else c.tokens[:-1] for c in completions]
    return tokenizer.batch_decode(tokens, skip_special_tokens=False)


def held_out_sums(
    engine: VLLMEngine | HFEngine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    prompt_tokens: Sequence[np.ndarray],
    *,
    max_response_tokens: int,
    scorer: Scorer,
    measures: bool = True,
    on_progress: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """What the greedy responses to some problems add up to.

    A task with an `eval_temperature` gets a response sampled at it, the same draws every time.

    Args:
        prompt_tokens: int32 [P] of each problem.
        scorer: computes the rewards.
        measures: whether what the task measures besides the reward is part of it (`Task.measure`).
        on_progress: called while the scorer is at work.

    Returns:
        'count' of the problems, and sums over them: 'reward', for a task with right answers
        'accuracy', and the measures by their names.
    """
    if not problems:
        return {"count": 0.0}
    temperature = getattr(task, "eval_temperature", 0.0)
    sampling = Sampling(n=1, temperature=temperature, max_tokens=max_response_tokens)
    seeds = [problem_seed(0, p.prompt_id) for p in problems] if temperature else None
    groups = engine.generate(prompt_tokens, sampling, seeds)
    completions = [group[0] for group in groups]
    batch = Batch(
        problems=list(problems),
        decodings=["sampled" if temperature else "greedy"] * len(problems),
        samples=[0] * len(problems),
        texts=response_texts(tokenizer, completions),
        facts=completion_facts(completions),
    )
    scores = scorer.submit(batch.problems, batch.texts, **batch.facts)
    scored = scorer.collect(scores, on_progress=on_progress)
    sums = {"count": float(len(problems)), "reward": sum(s.reward for s in scored)}
    if has_right_answers(task):
        sums["accuracy"] = float(sum(s.graded and is_correct(s.parts) for s in scored))
    if measures:
        for values in measure(task, batch):
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def completion_facts(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    """What a task's `score` or `measure` may want to know of each response (`rewards.FACTS`)."""
    return {
        "truncated": [completion.truncated for completion in completions],
        "num_tokens": [len(completion.tokens) for completion in completions],
    }


def problem_seed(seed: int, prompt_id: int) -> int:
    """Seed of the responses sampled to a problem, in 0..2**62, far from every other problem's.

    >>> problem_seed(0, 1) == problem_seed(0, 1), problem_seed(0, 1) == problem_seed(0, 2)
    (True, False)
    """
    return int(np.random.SeedSequence([seed, 3, prompt_id]).generate_state(1, np.uint64)[0] >> 2)


# --------------------------------------------------------------------------- a model


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an engine."""

    decoding: str  # greedy | sampled
    problems: range  # positions among those evaluated


def plan_calls(
    num_problems: int, responses: Mapping[str, int], responses_per_call: int
) -> list[Call]:
    """The calls of a whole evaluation.

    Which problems share a call depends on nothing else, least of all on the number of ranks.

    Args:
        responses: decoding -> responses to a problem.

    >>> calls = plan_calls(3, {"greedy": 1, "sampled": 2}, responses_per_call=4)
    >>> [(call.decoding, list(call.problems)) for call in calls]
    [('greedy', [0, 1, 2]), ('sampled', [0, 1]), ('sampled', [2])]
    """
    calls = []
    for decoding, count in responses.items():
        size = max(1, responses_per_call // count)
        for start in range(0, num_problems, size):
            calls.append(Call(decoding, range(start, min(start + size, num_problems))))
    return calls


def samplings(cfg: DictConfig, task: Task) -> dict[str, Sampling]:
    """How the responses of each decoding are drawn: a greedy one, and `eval.samples` others.

    A task with an `eval_temperature` has at least one of the others, and no greedy one.
    """
    own = getattr(task, "eval_temperature", None)
    limit = cfg.task.max_response_tokens
    default = cfg.searcher.temperature if own is None else own
    greedy = Sampling(n=1, temperature=0.0, max_tokens=limit)
    sampled = Sampling(
        n=max(cfg.eval.samples, 1),
        temperature=default if cfg.eval.temperature is None else cfg.eval.temperature,
        top_p=cfg.eval.top_p,
        max_tokens=limit,
    )
    if own is not None:
        return {"sampled": sampled}
    return {"greedy": greedy, "sampled": sampled} if cfg.eval.samples else {"greedy": greedy}


@dataclass(slots=True, kw_only=True)
class Work:
    """What a rank works out before it starts its engine."""

    cfg: DictConfig
    ranks: Ranks
    task: Task
    problems: list[Problem]  # all that are evaluated, over all ranks
    num_in_split: int
    num_dropped: int  # for a prompt that is too long, see task.long_prompts
    prompt_tokens: list[np.ndarray]  # int32 [P] of each problem
    samplings: dict[str, Sampling]  # by decoding
    tokenizer: PreTrainedTokenizerBase
    options: EngineOptions


class EvaluatorRanks(Ranks):
    """Every rank is an engine; none trains."""

    __slots__ = ()

    def name(self, rank: int | None = None) -> str:
        """`evaluator 0`."""
        return f"evaluator {self.rank if rank is None else rank}"


def evaluate_model(cfg: DictConfig) -> None:
    """One rank's part in the evaluation of a model; rank 0 writes what comes of it."""
    import config
    from train import end_on_signals

    started = time.monotonic()
    ranks = EvaluatorRanks(**asdict(ranks_from_environment(0)))
    setup_logging(ranks.name())
    init_world(ranks, timeout_s=cfg.cluster.startup_timeout_s)
    control = Control.start(
        ranks,
        timeout_s=cfg.cluster.timeout_s,
        heartbeat_timeout_s=cfg.cluster.heartbeat_timeout_s,
        startup_timeout_s=cfg.cluster.startup_timeout_s,
    )
    end_on_signals(control)
    try:
        group = dist.new_group(backend="gloo", timeout=FOREVER)  # `control` sees who is lost
        control.progress("preparing model and data", cfg.cluster.startup_timeout_s)
        work = prepare(cfg, ranks)
        out = make_out(cfg) if ranks.rank == 0 else Path()
        graded, seconds = run_calls(work, control)
        control.progress("waiting for the other ranks", math.inf)
        shares = gather_texts(json.dumps([seconds, [asdict(g) for g in graded]]), group)
        if ranks.rank == 0:
            control.progress("writing results", cfg.cluster.startup_timeout_s)
            finish_model(work, out, shares, started)
        dist.barrier(group=group)
    except config.UserError as error:
        control.fail(str(error), code=2)
    except SystemExit as error:
        control.fail(f"something called sys.exit({error.code})", detail=traceback.format_exc())
    except BaseException as error:
        control.fail(f"{type(error).__name__}: {error}", detail=traceback.format_exc())
    control.close()
    dist.destroy_process_group()


def prepare(cfg: DictConfig, ranks: Ranks) -> Work:
    """Task, problems, tokenizer and the engine's options.

    Raises:
        UserError: a model, file or limit that does not fit, with the key to change.
    """
    import config
    from train import engine_dtype, fit, pick_device

    device = pick_device(cfg, ranks)
    cores = ranks.cores() if cfg.cluster.pin_cores and device.type == "cpu" else []
    trust = cfg.model.trust_remote_code
    try:
        task = make_task(cfg)
        if cfg.eval.split not in splits(task):
            raise ValueError(
                f"eval.split={cfg.eval.split!r}: {task.name} has {', '.join(splits(task))}"
            )
        check_task(task)
        problems = task.problems(cfg.eval.split)
        check_problems(problems, cfg.eval.split)
        num_in_split, problems = len(problems), problems[: cfg.eval.limit]
        num_asked = len(problems)
        build = instantiate(cfg.model.build) if cfg.model.build is not None else None
        path = modeling.resolve_path(cfg.model, build)
        modeling.check_causal(path, trust_remote_code=trust)
        tokenizer = modeling.load_tokenizer(cfg.model.tokenizer or path, trust_remote_code=trust)
        modeling.check_tokenizer(
            path, tokenizer, given=cfg.model.tokenizer, trust_remote_code=trust
        )
        problems, prompt_tokens = fit(cfg, tokenizer, task, problems, cfg.eval.split)
        modeling.check_prompt_ids(path, prompt_tokens, trust_remote_code=trust)
        context_length = modeling.context_length(path, trust_remote_code=trust)
        max_model_len = config.check_lengths(cfg, prompt_tokens, context_length)
    except ValueError as error:
        raise config.UserError(str(error)) from error
    if cores:
        torch.set_num_threads(len(cores))
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("MASTER_PORT", "")
    return Work(
        cfg=cfg,
        ranks=ranks,
        task=task,
        problems=problems,
        num_in_split=num_in_split,
        num_dropped=num_asked - len(problems),
        prompt_tokens=prompt_tokens,
        samplings=samplings(cfg, task),
        tokenizer=tokenizer,
        options=EngineOptions(
            path=path,
            stop_token_ids=modeling.stop_token_ids(path, tokenizer),
            pad_token_id=int(tokenizer.pad_token_id),
            max_model_len=max_model_len,
            dtype=engine_dtype(cfg, device),
            device=device,
            seed=cfg.seed,
            cores=cores,
            port=engine_port(ranks.local_rank, job),
            trust_remote_code=trust,
        ),
    )


def make_task(cfg: DictConfig) -> Task:
    """The configured task; ValueError with what its constructor said."""
    import config

    try:
        return instantiate(config.task_node(cfg))
    except InstantiationException as error:
        raise ValueError(str(error.__cause__ or error)) from error


def task_values(cfg: DictConfig) -> Any:
    """What the task is built from, as plain values."""
    import config

    return OmegaConf.to_container(config.task_node(cfg), resolve=True)


def run_calls(work: Work, control: Control) -> tuple[list[Graded], float]:
    """This rank's share of the calls: its graded responses, and seconds spent in the engine."""
    import config

    cfg, ranks = work.cfg, work.ranks
    counts = {decoding: sampling.n for decoding, sampling in work.samplings.items()}
    calls = plan_calls(len(work.problems), counts, cfg.eval.responses_per_call)
    calls = calls[ranks.rank :: ranks.world_size]
    control.progress("starting the engine", cfg.cluster.startup_timeout_s)
    try:
        engine = make_engine(cfg.engine, work.options)
    except ValueError as error:
        raise config.UserError(str(error)) from error
    control.cleanups.append(engine.kill)
    engine.on_step = control.alive
    if work.options.cores and ranks.world_size > 1:
        pin_process(os.getpid(), work.options.cores)
        engine.pin(work.options.cores)
    # After the engine, which takes processes that start meanwhile for its own.
    scorer = make_scorer(work.task, task_values(cfg), cfg.rewards, device=work.options.device)
    control.cleanups.append(scorer.kill)
    answered, seconds = [], 0.0
    for number, call in enumerate(calls, start=1):
        control.progress("generating")
        started = time.monotonic()
        batch = respond(work, engine, call)
        seconds += time.monotonic() - started
        control.progress("scoring")
        scores = scorer.submit(batch.problems, batch.texts, **batch.facts)
        answered.append((batch, scores))  # scored while the engine goes on
        logger.info("%d of %d calls: %.0f s of generation", number, len(calls), seconds)
    engine.close()
    graded = []
    for batch, scores in answered:
        control.progress("scoring")
        scored = scorer.collect(scores, on_progress=control.alive)
        control.progress("measuring", cfg.cluster.startup_timeout_s)
        graded += grade(work.task, batch, scored)
    scorer.close()
    return graded, seconds


def respond(work: Work, engine: VLLMEngine | HFEngine, call: Call) -> Batch:
    """The responses of one call, by problem, then by sample."""
    sampling = work.samplings[call.decoding]
    problems = [work.problems[i] for i in call.problems]
    seeds = [problem_seed(work.cfg.seed, problem.prompt_id) for problem in problems]
    groups = engine.generate(
        [work.prompt_tokens[i] for i in call.problems],
        sampling,
        seeds if sampling.temperature else None,
    )
    completions = [completion for group in groups for completion in group]
    return Batch(
        problems=[problem for problem in problems for _ in range(sampling.n)],
        decodings=[call.decoding] * len(completions),
        samples=[sample for _ in problems for sample in range(sampling.n)],
        texts=response_texts(work.tokenizer, completions),
        facts=completion_facts(completions),
    )


def finish_model(work: Work, out: Path, shares: Sequence[str], started: float) -> None:
    """Puts the ranks' shares together; writes and shows the results."""
    cfg = work.cfg
    graded, seconds = [], []
    for share in shares:
        generating, rows = json.loads(share)
        seconds.append(generating)
        graded += [Graded(**row) for row in rows]
    graded.sort(key=lambda g: (g.prompt_id, g.decoding, g.sample))
    tokens = sum(g.response_tokens or 0 for g in graded)
    result = {
        **about_task(cfg, work.task),
        "split": cfg.eval.split,
        "num_problems": len(work.problems),
        "num_in_split": work.num_in_split,
        "num_dropped": work.num_dropped,
        "model": {"name": cfg.model.name, "path": work.options.path},
        "engine": {
            "name": cfg.engine.name,
            "dtype": str(work.options.dtype).removeprefix("torch."),
            "responses_per_call": cfg.eval.responses_per_call,
        },
        "decoding": {name: asdict(sampling) for name, sampling in work.samplings.items()},
        "seed": cfg.seed,
        **figures(cfg, work.task, graded),
        "run": {
            **about_run(),
            "num_ranks": work.ranks.world_size,
            "seconds": round(time.monotonic() - started, 1),
            "generating_seconds": [round(s, 1) for s in seconds],
            "generated_tokens_per_s": round(tokens / max(*seconds, 1e-9), 1),
        },
    }
    write_lines(out, (asdict(g) for g in graded))
    finish(result, out)


# --------------------------------------------------------------------------- saved responses


def regrade(cfg: DictConfig) -> None:
    """Grades the responses of `eval.responses` and writes the lines, with their grades, in order.

    Raises:
        ValueError: a line that can't be read, with its file and number, or a file that can't be
            written.
    """
    from train import pick_device

    started = time.monotonic()
    task = make_task(cfg)
    rows, batch = saved_responses(Path(cfg.eval.responses), task)
    out = make_out(cfg)
    in_workers = getattr(task, "in_workers", True)
    device = None if in_workers else pick_device(cfg, ranks_from_environment(0))
    scorer = make_scorer(task, task_values(cfg), cfg.rewards, device=device)
    try:
        graded = grade(task, batch, scorer.score(batch.problems, batch.texts, **batch.facts))
    finally:
        scorer.close()
    write_lines(out, (row | grades(g) for row, g in zip(rows, graded, strict=True)))
    result = {
        **about_task(cfg, task),
        "responses": cfg.eval.responses,
        **figures(cfg, task, graded),
        "run": {**about_run(), "seconds": round(time.monotonic() - started, 1)},
    }
    finish(result, out)


# --------------------------------------------------------------------------- results


def make_out(cfg: DictConfig) -> Path:
    """Where the graded responses go; the folder is made, and tried, before anything takes long.

    Raises:
        UserError: it can't be written.
    """
    import config

    if cfg.eval.out is not None:
        out = Path(cfg.eval.out)
    else:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        task = str(cfg.task._target_).rpartition(".")[2].lower()
        out = Path(cfg.run.root) / f"{stamp}-eval-{task}-{cfg.model.name}" / "evaluation.jsonl"
    key = "run.root" if cfg.eval.out is None else "eval.out"
    if out.is_dir():
        raise config.UserError(f"{key}: {out} is a folder: name a file")
    try:
        trial = out.with_name(f"{out.name}.trial")
        write_whole(trial, [])
        trial.unlink()
    except OSError as error:
        raise config.UserError(f"{key}: {out} can't be written: {error.strerror}") from error
    return out


def about_task(cfg: DictConfig, task: Task) -> dict[str, Any]:
    """What was asked and how it was graded: figures under two rules are not comparable."""
    import config

    return {
        "task": task.name,
        "answer_rule": answer_rule(task),
        "task_settings": config.hide_secrets(OmegaConf.to_container(cfg.task, resolve=True)),
    }


def about_run() -> dict[str, Any]:
    """What may differ between two runs with the same results."""
    import config
    from run_folder import git_commit

    date = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"date": date, "command": config.hide_in_command(sys.argv), "commit": git_commit()}


def figures(cfg: DictConfig, task: Task, graded: Sequence[Graded]) -> dict[str, Any]:
    """The figures, and what their intervals are."""
    resamples, seed = cfg.eval.resamples, cfg.seed
    return {
        "interval": {
            "level": LEVEL,
            "method": "percentile bootstrap over problems",
            "resamples": resamples,
            "seed": seed,
        },
        "figures": summarize(graded, task, resamples=resamples, seed=seed),
    }


def finish(result: dict[str, Any], out: Path) -> None:
    """Writes the figures beside the responses and prints the main ones."""
    beside = out.with_suffix(".json")
    write_whole(beside, [json.dumps(result, indent=2, allow_nan=False), "\n"])
    print(f"{result['task']} (answer rule: {result['answer_rule']})")
    for decoding, values in result["figures"].items():
        for name, value in values.items():
            if isinstance(value, dict) and "low" in value:
                shown = f"{value['mean']:10.4f}  [{value['low']:.4f}, {value['high']:.4f}]"
                print(f"  {decoding:8} {name:20} {shown}")
        counts = ", ".join(f"{count} {status}" for status, count in values["status"].items())
        print(f"  {decoding:8} {values['num_problems']} problems, responses: {counts}")
    print(f"{result['run']['seconds']} s; graded responses: {out}; figures: {beside}")


# --------------------------------------------------------------------------- entry


def run(cfg: DictConfig) -> None:
    """Evaluates as configured.

    Raises:
        ValueError: one line that names the key or the file, and the fix.
    """
    import config

    config.validate_evaluation(cfg)
    if cfg.eval.responses is None:
        evaluate_model(cfg)
    elif int(os.environ.get("RANK", 0)) == 0:  # no work for more
        regrade(cfg)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    from train import say_once

    OmegaConf.set_readonly(cfg, True)
    try:
        run(cfg)
    except ValueError as error:
        say_once(str(error))
        sys.exit(2)


if __name__ == "__main__":
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to us instead of printing a traceback a rank
    from config import explain, register
    from train import say_once

    register()
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        say_once(explain(error, [arg for arg in sys.argv[1:] if not arg.startswith("-")]))
        sys.exit(2)
