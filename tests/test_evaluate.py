"""The evaluation command as a user calls it, on one rank and on three, and without a model."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import config
import evaluate
from engine import Completion, Sampling
from evaluate import EvalConfig, held_out_sums, plan_calls, problem_seed
from graded import write_lines
from rewards import LocalScorer
from sft import tiny_model, tiny_tokenizer
from tasks.task import Problem
from tests.digits import Digits

ROOT = Path(config.__file__).parent
REAL_GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "random"
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def command(num_ranks: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """evaluate.py under torchrun on `num_ranks` ranks; plain python for 0."""
    launcher = []
    if num_ranks:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}"]
        launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return subprocess.run(
        [sys.executable, *launcher, "evaluate.py", "--config-dir", "tests/conf", *overrides],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def result_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def composed(*overrides: str, engine: str = "hf") -> DictConfig:
    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        return compose("config", overrides=[f"engine={engine}", *overrides])


def task_of_tests(target: str) -> list[str]:
    """Overrides for a task that takes its limits alone."""
    drop = [f"~task.{key}" for key in ("max_operand", "num_test", "seed", "chat")]
    return ["task=arithmetic", f"task._target_={target}", *drop]


def test_examples() -> None:
    results = doctest.testmod(evaluate)
    assert results.attempted > 0 and results.failed == 0


# --------------------------------------------------------------------------- parts


@pytest.mark.parametrize(("num_problems", "samples", "per_call"), [(7, 3, 4), (1, 9, 4), (5, 1, 1)])
def test_calls_hold_every_problem_once(num_problems: int, samples: int, per_call: int) -> None:
    counts = {"greedy": 1, "sampled": samples}
    calls = plan_calls(num_problems, counts, per_call)
    held = Counter((call.decoding, i) for call in calls for i in call.problems)
    assert held == {(name, i): 1 for name in counts for i in range(num_problems)}
    for call in calls:
        assert len(call.problems) == 1 or len(call.problems) * counts[call.decoding] <= per_call


def test_problem_seeds_are_far_apart() -> None:
    """vLLM adds a response's number to its problem's seed."""
    seeds = np.array([problem_seed(s, i) for s in range(4) for i in range(500)])
    assert seeds.min() >= 0 and seeds.max() < 2**62
    assert np.diff(np.sort(seeds)).min() > 2**20


class Engine:
    """Answers every prompt with its length, and remembers how it was asked."""

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]:
        self.sampling, self.seeds = sampling, seeds
        eos, zero = 2, tiny_tokenizer().convert_tokens_to_ids("0")
        return [
            [
                Completion(
                    tokens=np.array([zero + len(p)] + [eos] * (len(p) < 3), dtype=np.int32),
                    logprobs=np.zeros(1, dtype=np.float32),
                    truncated=len(p) >= 3,
                )
            ]
            for p in prompts
        ]


class Ending:
    """Reward 1 for an end of text, and 0.25 for the digit of the answer."""

    name = "ending"

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str], *, truncated: Sequence[bool]
    ) -> list[dict[str, float]]:
        return [
            {"ended": float(not cut), "digit": 0.25 * (response == problem.answer)}
            for problem, response, cut in zip(problems, responses, truncated, strict=True)
        ]


class Counted(Ending):
    """No response is right or wrong, and tokens are measured."""

    right_answers = False

    def measure(
        self, problems: Sequence[Problem], responses: Sequence[str], *, num_tokens: Sequence[int]
    ) -> list[dict[str, float]]:
        return [{"tokens": n} for n in num_tokens]


def test_sums_over_held_out_problems_come_from_the_scorer_with_what_is_known() -> None:
    problems = [Problem(prompt_id=i, prompt="", answer="2") for i in range(3)]
    prompts = [np.zeros(n, dtype=np.int32) for n in (2, 3, 1)]
    engine, task = Engine(), Ending()
    options = {"max_response_tokens": 5, "scorer": LocalScorer(task, penalty=0.0)}
    args = (engine, task, tiny_tokenizer(), problems, prompts)
    # Rewards of 1.25, 0 and 1: two of three are right.
    assert held_out_sums(*args, **options) == {"count": 3.0, "reward": 2.25, "accuracy": 2.0}
    assert engine.sampling == Sampling(n=1, temperature=0.0, max_tokens=5)
    assert held_out_sums(*args[:3], [], [], **options) == {"count": 0.0}


def test_a_task_without_right_answers_has_no_accuracy_but_its_measures() -> None:
    problems = [Problem(prompt_id=i, prompt="", answer="2") for i in range(3)]
    prompts = [np.zeros(n, dtype=np.int32) for n in (2, 3, 1)]
    engine, task = Engine(), Counted()
    options = {"max_response_tokens": 5, "scorer": LocalScorer(task, penalty=0.0)}
    args = (engine, task, tiny_tokenizer(), problems, prompts)
    tokens = sum(
        len(c.tokens)
        for [c] in Engine().generate(prompts, Sampling(n=1, temperature=0.0, max_tokens=5))
    )
    sums = held_out_sums(*args, **options)
    assert sums == {"count": 3.0, "reward": 2.25, "tokens": float(tokens)}
    assert "tokens" not in held_out_sums(*args, measures=False, **options)


def test_a_task_may_ask_for_samples_in_place_of_greedy_responses() -> None:
    problems = [Problem(prompt_id=i, prompt="", answer="") for i in range(2)]
    engine, task = Engine(), Ending()
    task.eval_temperature = 0.5
    prompts = [np.zeros(1, dtype=np.int32)] * 2
    scorer = LocalScorer(task, penalty=0.0)
    limit = {"max_response_tokens": 5}
    held_out_sums(engine, task, tiny_tokenizer(), problems, prompts, scorer=scorer, **limit)
    assert engine.sampling.temperature == 0.5
    assert engine.seeds == [problem_seed(0, 0), problem_seed(0, 1)]
    cfg = composed("eval.samples=0")
    assert [(k, s.n, s.temperature) for k, s in evaluate.samplings(cfg, task).items()] == [
        ("sampled", 1, 0.5)
    ]
    cfg = composed("eval.samples=4", "eval.temperature=0.9", "eval.top_p=0.8")
    (sampling,) = evaluate.samplings(cfg, task).values()
    assert (sampling.n, sampling.temperature, sampling.top_p) == (4, 0.9, 0.8)


def test_samples_are_drawn_at_the_searchers_temperature_unless_told() -> None:
    cfg = composed("task=gsm8k", "eval.samples=4")
    found = evaluate.samplings(cfg, Digits())
    assert {name: (s.n, s.temperature) for name, s in found.items()} == {
        "greedy": (1, 0.0),
        "sampled": (4, 0.7),
    }
    assert list(evaluate.samplings(composed(), Digits())) == ["greedy"]


# --------------------------------------------------------------------------- a model

EVALUATION = [
    "task=digits",
    "engine=hf",
    "model=custom",
    "eval.limit=20",
    "eval.samples=3",
    "eval.responses_per_call=8",
    "eval.resamples=200",
    "seed=3",
]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory, random_model: str) -> Path:
    """What one process leaves: out.jsonl and out.json."""
    folder = tmp_path_factory.mktemp("evaluated")
    options = [*EVALUATION, f"model.path={random_model}", f"eval.out={folder / 'out.jsonl'}"]
    done = command(0, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "greedy" in done.stdout and str(folder / "out.json") in done.stdout
    return folder


def test_results_of_one_and_three_ranks_are_the_same(
    tmp_path: Path, random_model: str, evaluated: Path
) -> None:
    out = tmp_path / "three.jsonl"
    done = command(3, *EVALUATION, f"model.path={random_model}", f"eval.out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert out.read_bytes() == (evaluated / "out.jsonl").read_bytes()
    one, three = result_of(evaluated / "out.json"), result_of(tmp_path / "three.json")
    assert (one.pop("run")["num_ranks"], three.pop("run")["num_ranks"]) == (1, 3)
    assert one == three


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_has_the_same_results_on_any_number_of_ranks(
    tmp_path: Path, random_model: str
) -> None:
    pytest.importorskip("vllm")
    for num_ranks in (0, 2):
        options = (f"model.path={random_model}", f"eval.out={tmp_path / f'{num_ranks}.jsonl'}")
        done = command(num_ranks, *EVALUATION, *options, "engine=vllm")
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()
    one, two = result_of(tmp_path / "0.json"), result_of(tmp_path / "2.json")
    assert one["figures"] == two["figures"]


def test_responses_and_figures_agree(evaluated: Path, random_model: str) -> None:
    lines = lines_of(evaluated / "out.jsonl")
    result = result_of(evaluated / "out.json")
    expected = [(i, "greedy", 0) for i in range(20)]
    expected += [(i, "sampled", s) for i in range(20) for s in range(3)]
    found = [(line["prompt_id"], line["decoding"], line["sample"]) for line in lines]
    assert found == sorted(expected)
    for line in lines:
        assert line["prompt"] == f"{500 + line['prompt_id']}:" and line["status"] == "ok"
        digits = sum(c.isdigit() for c in line["response"])
        assert line["parts"] == {"digits": digits / 3} and line["reward"] == digits / 3
        assert len(line["response"]) <= line["response_tokens"] <= 3 or line["truncated"]
    for decoding in ("greedy", "sampled"):
        rewards = [line["reward"] for line in lines if line["decoding"] == decoding]
        figure = result["figures"][decoding]["reward"]
        assert figure["mean"] == pytest.approx(np.mean(rewards))
        assert figure["low"] < figure["mean"] < figure["high"]
    solved = [line["reward"] >= 1 for line in lines if line["decoding"] == "sampled"]
    assert result["figures"]["sampled"]["average@3"]["mean"] == pytest.approx(np.mean(solved))
    by_problem = np.reshape(solved, (20, 3))
    pass_at_2 = [1 - (1 - c / 3) * (1 - c / 2) if c < 2 else 1.0 for c in by_problem.sum(axis=1)]
    assert result["figures"]["sampled"]["pass@2"]["mean"] == pytest.approx(np.mean(pass_at_2))
    responses = {(line["prompt_id"], line["response"]) for line in lines if line["sample"]}
    assert len(responses) > 20  # samples differ
    assert result["task"] == "digits" and result["answer_rule"] == "Digits"
    assert result["model"] == {"name": "custom", "path": random_model}
    assert result["seed"] == result["interval"]["seed"] == 3
    assert (result["num_problems"], result["num_in_split"], result["split"]) == (20, 24, "test")
    assert result["decoding"]["sampled"]["n"] == 3


def test_what_was_evaluated_can_be_graded_again(tmp_path: Path, evaluated: Path) -> None:
    out = tmp_path / "again.jsonl"
    cfg = composed(
        *task_of_tests("tests.digits.Digits"),
        f"eval.responses={evaluated / 'out.jsonl'}",
        f"eval.out={out}",
        "eval.resamples=200",
        "rewards.num_workers=1",
        "seed=3",
    )
    evaluate.run(cfg)
    assert lines_of(out) == lines_of(evaluated / "out.jsonl")
    first, again = result_of(evaluated / "out.json"), result_of(tmp_path / "again.json")
    assert first["figures"] == again["figures"]


class Measured(Digits):
    """Digits without greedy responses, which are measured one by one and together."""

    eval_temperature = 1.5
    splits = ("extra",)

    def problems(self, split: str) -> list[Problem]:
        return super().problems("test" if split == "extra" else split)

    def measure(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[dict]:
        return [{"length": float(len(response))} for response in responses]

    def summarize(self, problems: Sequence[Problem], responses: Sequence[str]) -> dict[str, float]:
        return {"different": float(len(set(responses)))}


@pytest.mark.slow
def test_a_task_can_measure_more_on_a_split_of_its_own(tmp_path: Path, random_model: str) -> None:
    done = command(
        2,
        *EVALUATION,
        f"model.path={random_model}",
        f"run.root={tmp_path}",
        "task._target_=tests.test_evaluate.Measured",
        "eval.split=extra",
        "eval.samples=0",
        "rewards.num_workers=0",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()
    assert "-eval-measured-custom" in folder.name
    result = result_of(folder / "evaluation.json")
    lines = lines_of(folder / "evaluation.jsonl")
    assert list(result["figures"]) == ["sampled"]
    lengths = [line["measures"]["length"] for line in lines]
    assert lengths == [len(line["response"]) for line in lines] and len(lines) == 20
    assert result["figures"]["sampled"]["length"]["mean"] == pytest.approx(np.mean(lengths))
    different = len({line["response"] for line in lines})
    assert result["figures"]["sampled"]["different"] == different > 1
    assert result["decoding"]["sampled"]["temperature"] == 1.5


def test_a_mistake_that_ranks_find_is_said_once(tmp_path: Path, random_model: str) -> None:
    out = tmp_path / "out.jsonl"
    done = command(
        2, *EVALUATION, f"model.path={random_model}", "eval.split=validation", f"eval.out={out}"
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "eval.split='validation'" in line]
    assert len(said) == 1 and "train, test" in said[0], done.stderr
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------- without a model


def regraded(tmp_path: Path, rows: Sequence[dict[str, Any]], *overrides: str) -> dict[str, Any]:
    """Grades `rows` in this process; lines in out.jsonl, the figures returned."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, rows)
    paths = (f"eval.responses={source}", f"eval.out={out}")
    evaluate.run(composed("eval.resamples=100", *paths, *overrides, engine="vllm"))
    return result_of(tmp_path / "out.json")


GRADES = [
    # answer, response, last_number, strict, status by either
    ("He eats <<3*24=72>>72.\n#### 72", "so it is 72", 1, 0, "ok", "unparsed"),
    ("x\n#### 72", "#### 72 eggs in 2 days", 0, 1, "ok", "ok"),
    ("x\n#### 1,000", "#### $1,000.00", 1, 1, "ok", "ok"),
    ("x\n#### 5", "no number \ud83d", 0, 0, "unparsed", "unparsed"),
    ("x\n#### 5", "", 0, 0, "unparsed", "unparsed"),
]


@pytest.mark.parametrize("rule", ["last_number", "strict"])
def test_saved_responses_are_graded_in_order_by_the_chosen_rule(tmp_path: Path, rule: str) -> None:
    rows = [{"response": r, "id": i, "answer": a} for i, (a, r, *_) in enumerate(GRADES)]
    result = regraded(tmp_path, rows, "task=gsm8k", f"task.answer_rule={rule}")
    which = 2 if rule == "last_number" else 3
    lines = lines_of(tmp_path / "out.jsonl")
    for line, row, case in zip(lines, rows, GRADES, strict=True):
        assert {name: line[name] for name in row} == row
        assert line["reward"] == float(case[which])
        assert line["parts"] == {"correct": float(case[which])}
        assert line["status"] == case[which + 2]
    assert (result["task"], result["answer_rule"]) == ("gsm8k", rule)
    right = sum(case[which] for case in GRADES)
    assert result["figures"]["given"]["accuracy"]["mean"] == pytest.approx(right / len(GRADES))
    assert result["figures"]["given"]["status"] == Counter(case[which + 2] for case in GRADES)


def test_the_command_needs_no_model_and_no_data(tmp_path: Path) -> None:
    write_lines(tmp_path / "in.jsonl", [{"answer": "x\n#### 7", "response": "7"}])
    done = command(
        0, "task=gsm8k", f"eval.responses={tmp_path}/in.jsonl", f"eval.out={tmp_path}/out.jsonl"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = lines_of(tmp_path / "out.jsonl")
    assert line == {
        "answer": "x\n#### 7",
        "response": "7",
        "reward": 1.0,
        "parts": {"correct": 1.0},
        "status": "ok",
    }


class Fickle(Digits):
    """Fails at some responses."""

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[dict]:
        if "raise" in responses:
            raise RuntimeError("not this one")
        return [{"correct": float("nan") if r == "nan" else 1.0} for r in responses]


def test_a_response_whose_scoring_fails_is_counted_and_explained(tmp_path: Path) -> None:
    rows = [{"answer": "", "response": r} for r in ("a", "raise", "nan", "b")]
    result = regraded(
        tmp_path,
        rows,
        *task_of_tests("test_evaluate.Fickle"),
        "rewards.num_workers=0",
        "rewards.penalty=-0.5",
    )
    lines = lines_of(tmp_path / "out.jsonl")
    assert [line["status"] for line in lines] == ["ok", "error", "nan", "ok"]
    assert [line["reward"] for line in lines] == [1.0, -0.5, -0.5, 1.0]
    assert lines[1]["parts"] == {"penalty": -0.5}
    assert "RuntimeError" in lines[1]["reason"] and "not this one" in lines[1]["reason"]
    assert "reason" not in lines[0]
    assert result["figures"]["given"]["status"] == {"error": 1, "nan": 1, "ok": 2}
    assert result["figures"]["given"]["accuracy"]["mean"] == 0.5


@pytest.mark.skipif(
    not (REAL_GSM8K / "test.jsonl").is_file(),
    reason=f"GSM8K's files are not in {REAL_GSM8K}: set GSM8K_DIR to their folder",
)
@pytest.mark.parametrize("rule", ["last_number", "strict"])
def test_gold_solutions_of_gsm8k_are_right(tmp_path: Path, rule: str) -> None:
    solutions = [row["answer"] for row in lines_of(REAL_GSM8K / "test.jsonl")]
    rows = [{"answer": solution, "response": solution} for solution in solutions]
    result = regraded(tmp_path, rows, "task=gsm8k", f"task.answer_rule={rule}")
    accuracy = result["figures"]["given"]["accuracy"]
    assert accuracy["mean"] == 1.0 and result["figures"]["given"]["status"] == {"ok": 1319}
    assert 0.997 < accuracy["low"] < 1.0 == accuracy["high"]


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["eval.responses=IN"], "eval.responses needs eval.out"),
        (["eval.responses=IN", "eval.out=IN"], "eval.out=.* overwrite"),
        (["eval.responses=IN", "eval.out=out.json"], "eval.out=out.json"),
        (["eval.responses=/nowhere.jsonl", "eval.out=OUT"], "/nowhere.jsonl can't be read"),
        (["eval.responses=IN", "eval.out=FOLDER"], "eval.out: .* is a folder"),
        (["eval.responses=IN", "eval.out=/proc/x/out.jsonl"], "eval.out: .*can't be written"),
        (["eval.responses=BAD", "eval.out=OUT"], "bad.jsonl, line 2: not JSON"),
        (["eval.responses=NOGOLD", "eval.out=OUT"], "nogold.jsonl, line 1: .*gold answer"),
        (["eval.limit=0"], "eval.limit=0 must be positive"),
        (["eval.samples=-1"], "eval.samples=-1"),
        (["eval.temperature=0"], "eval.temperature=0.* positive"),
        (["eval.top_p=1.5"], "eval.top_p=1.5"),
        (["eval.resamples=0"], "eval.resamples=0"),
        (["engine.name=other"], "engine.name='other'"),
        (["engine.dtype=int8"], "engine.dtype='int8'"),
        (["task.max_response_tokens=0"], "task.max_response_tokens=0"),
        (["+task.data_folder=x"], "unknown key task.data_folder; did you mean task.data_dir"),
        (["+eval.sample=3"], "unknown key eval.sample; did you mean eval.samples"),
        (["rewards.time_limit_s=0"], "rewards.time_limit_s=0"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, overrides: list[str], says: str) -> None:
    good = '{"answer": "#### 1", "response": "1"}\n'
    (tmp_path / "in.jsonl").write_text(good)
    (tmp_path / "bad.jsonl").write_text(good + "{\n")
    (tmp_path / "nogold.jsonl").write_text('{"answer": "#### one", "response": "1"}\n')
    places = {
        "NOGOLD": tmp_path / "nogold.jsonl",
        "BAD": tmp_path / "bad.jsonl",
        "IN": tmp_path / "in.jsonl",
        "OUT": tmp_path / "out.jsonl",
        "FOLDER": tmp_path,
    }
    for name, path in places.items():
        overrides = [o.replace(f"={name}", f"={path}") for o in overrides]
    with pytest.raises(ValueError, match=says) as caught:
        evaluate.run(composed("task=gsm8k", *overrides))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()


def test_the_command_says_a_mistake_in_one_line() -> None:
    done = command(0, "task=gsm8k", "eval.responses=/nowhere", "eval.out=x")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and "/nowhere" in line


def test_training_keeps_its_keys() -> None:
    defaults = EvalConfig()
    assert (defaults.every, defaults.before, defaults.num_problems) == (50, True, 256)
