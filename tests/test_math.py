"""MATH: boxes, equality verdict by verdict, gold answers of all four sets, prompts, errors."""

import doctest
import inspect
import json
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm import make_ranks

import config
from rewards import RewardConfig, RewardWorkers
from tasks import math as math_task
from tasks.math import Math, last_boxed, same_answer
from tasks.task import Problem, Unparsed, answer_rule, splits

DATA = Path(__file__).resolve().parents[1] / "../shared/data/math"
COUNTS = {"train": 7470, "math500": 500, "amc23": 40, "aime24": 30}
needs_data = pytest.mark.skipif(
    not (DATA / "train.json").is_file(), reason=f"MATH's files are not in {DATA}"
)


def problem(answer: str) -> Problem:
    return Problem(prompt_id=0, prompt="What is x?", answer=answer)


def write_math(folder: Path, **rows: list[object]) -> str:
    """Files of the four sets; a set that isn't given has one problem."""
    for split in COUNTS:
        given = rows.get(split, [{"problem": f"{split}?", "answer": "1"}])
        if split == "train":
            (folder / "train.json").write_text(json.dumps(given))
        else:
            text = "".join(json.dumps(row) + "\n" for row in given)
            (folder / f"{split}.jsonl").write_text(text)
    return str(folder)


# ------------------------------------------------------------------------- configuration


def composed(*overrides: str):
    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        return compose("config", overrides=["engine=hf", *overrides])


def test_yaml_builds_the_task_and_says_its_defaults():
    node = config.task_node(composed("task=math"))
    task = instantiate(node)
    assert type(task) is Math and task.name == "math" and answer_rule(task) == "math_verify"
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    defaults = {k: p.default for k, p in inspect.signature(Math).parameters.items()}
    assert arguments == defaults


def test_experiment_has_the_hyper_parameters_of_table_4():
    cfg = composed("experiment=math_tba_prime")
    config.validate(cfg, make_ranks(0, 16, cfg.cluster.trainers))
    trainer, task = cfg.trainer, cfg.task
    assert cfg.model.path == "Qwen/Qwen2.5-7B"
    assert (trainer.batch_size, trainer.responses_per_prompt) == (512, 16)
    assert (trainer.steps, trainer.lr.peak, trainer.reference_reset_every) == (400, 1e-6, 50)
    assert (trainer.beta.initial, trainer.beta.final) == (0.005, None)
    assert cfg.searcher.temperature == 1.0
    assert task.max_prompt_tokens == 1024 and task.prompt_format == "qwen_boxed"
    assert task.max_prompt_tokens + task.max_response_tokens == 3072


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("task.test_set='test'", {"test_set": "test"}),
        ("task.prompt_format='other'", {"prompt_format": "other"}),
        ("task.chat=true", {"chat": True, "prompt_format": "qwen_boxed"}),
    ],
)
def test_settings_that_cannot_work_are_refused(key, arguments):
    with pytest.raises(ValueError, match=key):
        Math(**arguments)


def test_a_missing_package_is_named_with_the_extra_that_hydra_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    math_task._math_verify.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"pip install 'math-verify\[antlr4_9_3\]'"):
            Math()
    finally:
        math_task._math_verify.cache_clear()


# ------------------------------------------------------------------------- boxes


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"So $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\fbox{5}", "5"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\boxed 5", "5"),
        (r"$\boxed 25$ eggs", "25"),
        (r"\boxed{}", ""),
        # several: the last
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \fbox{2}", "2"),
        (r"\fbox{1} and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{}", ""),
        (r"\boxed{\boxed{5}}", "5"),
        # unbalanced braces
        (r"} \boxed{5}", "5"),
        (r"{ \boxed{5}", "5"),
        (r"\boxed{5}}", "5"),
        (r"\boxed{5} {", "5"),
        (r"\boxed{\left\{1, 2\right.}", r"\left\{1, 2\right."),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1 \\}", r"1 \\"),
        (r"\boxed{\}", None),
        (r"\boxed{\frac{1}{2}", None),
        # cut by the length limit
        (r"\boxed{1} so \boxed{5", None),
        (r"\boxed{1} so \boxed{", None),
        (r"\boxed{1} so \boxed", None),
        # none
        ("", None),
        ("5", None),
        ("boxed{5}", None),
        (r"\box{5}", None),
        (r"\boxed x", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@given(st.text(alphabet=st.sampled_from("\\boxed{} 5\n")) | st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_box_or_none(text):
    for response in (text, "\\boxed{" + text, "\\boxed" + text + "}"):
        content = last_boxed(response)
        assert content is None or content in response
        assert Math().final_answer(response) is None or content is not None


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 30_000, "\\boxed{" + "{" * 200_000, "\\boxed{" + "\\" * 200_000]
)
def test_boxes_are_found_in_linear_time(text):
    start = time.process_time()
    assert last_boxed(text) is None
    assert time.process_time() - start < 1.0


# ------------------------------------------------------------------------- equality

# Gold, answer, verdict: True, False, or None where the answer can't be read.
VERDICTS = {
    "numbers": [
        ("18", "18", True),
        ("18", "18.", True),
        ("18", "18.0", True),
        ("18", "17", False),
        ("18", "181", False),
        ("025", "25", True),  # AIME pads its answers
        ("27.0", "27", True),
        ("-5", "-5", True),
        ("-5", "−5", True),
        ("-5", "5", False),
        ("0", "0.001", False),
        ("1000", "10^3", True),
        ("6", "3!", True),
        ("3", "3!", False),
        ("10", r"\binom{5}{2}", True),
        ("2", "|-2|", True),
    ],
    "thousands": [
        ("1,234", "1234", True),
        ("1234", "1,234", True),
        ("1234", r"1{,}234", True),
        ("1234", r"1\,234", True),
        ("1234", r"1,\!234", True),
        ("1234", "1,235", False),
        (r"\dfrac{1}{29,\!322,\!216}", r"\frac{1}{29322216}", True),
    ],
    "currency, percent, units, degrees": [
        ("18", r"\$18", True),
        ("18", "$18$", True),
        (r"\$1.50", "1.5", True),
        ("18", r"18\%", True),
        (r"10\%", "10", True),
        (r"10\%", "10%", True),
        (r"10\%", "11", False),
        (r"18\text{ cm}", "18", True),
        ("18", r"18\text{ cm}", True),
        ("18", r"18 \mathrm{cm}^2", True),
        ("18", "18 cm", True),
        ("18", "18 square feet", True),
        ("18", "18 dollars", True),
        (r"18\text{ cm}", r"17\text{ cm}", False),
        (r"90^\circ", "90", True),
        ("90", r"90^{\circ}", True),
        ("90", "90°", True),
        (r"90^\circ", r"90\text{ degrees}", True),
        (r"90^\circ", "90 degrees", True),
        (r"\approx 8.24 \text{ mph}", "8.24", True),
        (r"8\!:\!34 \text{ p.m.}", "8:34 p.m.", True),
        (r"8\!:\!34 \text{ p.m.}", r"8:34 \text{ a.m.}", False),
        ("18", "18x", False),
        ("3t", "3", False),  # t is no unit here
        ("3t", "t*3", True),
    ],
    "fractions, roots, constants": [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", "1/2", True),
        (r"\frac{1}{2}", r"\dfrac12", True),
        (r"\frac{1}{2}", r"\frac{2}{4}", True),
        (r"\frac{1}{2}", "0.49", False),
        (r"\frac{1}{3}", "0.33", False),
        (r"\frac{1}{3}", "0.3333333", True),
        (r"\frac{7}{2}", r"3\frac{1}{2}", True),
        (r"3\frac{1}{2}", "3.5", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"2\sqrt{3}", "3.46", False),
        (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True),
        (r"\pi", "3.14", False),
        (r"8\pi", "8π", True),
        (r"2007 + \frac\pi 2", r"2007+\frac{\pi}{2}", True),
    ],
    "expressions and equations": [
        ("2x+1", "1+2x", True),
        ("2x+1", "2x", False),
        ("(x+1)^2", "x^2+2x+1", True),
        ("a + b + c", "c+b+a", True),
        ("a + b + c", "a + b", False),
        ("xy", "yx", True),
        (r"\sin^2 t", r"\sin^2(t)", True),
        ("6-5i", "-5i+6", True),
        ("6-5i", "6+5i", False),
        ("3+4i", r"3+4\text{i}", True),
        ("x=5", "5", True),
        ("5", "x = 5", True),
        ("x=5", "x=6", False),
        ("y=2x+1", "2x+1", True),
        ("x^2+y^2=1", "x^2+y^2-1=0", True),
    ],
    "bases": [
        ("52_8", "52_{8}", True),
        ("52_8", "52", True),
        ("52_8", "52_9", False),
        ("52_8", "53_8", False),
    ],
    "sets, tuples, intervals, matrices": [
        ("1,-2", "-2, 1", True),
        ("1,-2", r"\{1,-2\}", True),
        ("1,-2", r"1 \text{ and } -2", True),
        (r"-2 \text{ or } -12", "-12, -2", True),
        (r"6, 8\text{, and }10", "6,8,10", True),
        ("1,-2", "1", False),
        (r"(3,\frac{\pi}{2})", r"\left(3,\, \frac{\pi}{2}\right)", True),
        ("(1,2)", "(2,1)", False),
        ("(5,-2)", "(-2,5)", False),
        ("(5,-2)", "(3,1)", False),
        ("[1,2]", "(1,2)", False),
        ("(1,2)", r"x\in(1,2)", True),
        (r"(-\infty,0)\cup(0,\infty)", r"(0,\infty)\cup(-\infty,0)", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", False),
    ],
    "words and choices": [
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{Evelyn}", r"\textbf{evelyn}", True),
        (r"\text{Evelyn}", "Angela", False),
        (r"\text{Evelyn}", "nylevE", False),  # not a product of letters
        ("LQSX", "XSQL", False),
        ("LQSX", r"\text{LQSX}", True),
        (r"\text{October 30}", "October 30", True),
        (r"\text{even}", "odd", False),
        (r"\mbox{four}", "four", True),
        (r"\text{(A)}", "A", True),
        (r"\text{(A)}", "(A)", True),
        (r"\text{(A)}", r"\textbf{(A)}", True),
        (r"\text{(E)},", "E", True),
        (r"\text{(A)}", "B", False),
        (r"\text{A,B}", r"\text{B}, \text{A}", True),
        (r"\text{A,B}", "A", False),
    ],
    "not comparable by value": [
        (r"05\!:\!00", "05:00", True),
        (r"05\!:\!00", "06:00", False),
    ],
    "not readable": [
        ("5", "", None),
        ("5", "  . ", None),
        ("5", "?", None),
        ("5", r"\frac{", None),
        ("5", "5" * 501, None),
    ],
}


@pytest.mark.parametrize(
    ("kind", "gold", "answer", "verdict"),
    [(kind, *case) for kind, cases in VERDICTS.items() for case in cases],
)
def test_verdicts(kind, gold, answer, verdict):
    assert same_answer(gold, answer) is verdict
    [parts] = Math().score([problem(gold)], [f"Hence $\\boxed{{{answer}}}$."])
    if answer != r"\frac{":  # its box is never closed, which is the same
        assert parts == {"correct": float(bool(verdict))}
    assert isinstance(parts, Unparsed) is (verdict is None)


@pytest.mark.parametrize(
    ("response", "correct", "unparsed"),
    [
        (r"Thus \boxed{5}.", 1.0, False),
        (r"Thus \boxed{4}.", 0.0, False),
        (r"\boxed{4}? No, \boxed{5}.", 1.0, False),
        (r"\boxed{5}? No, \boxed{4}.", 0.0, False),
        ("The answer is 5.", 0.0, True),
        ("", 0.0, True),
        (r"\boxed{}", 0.0, True),
        (r"\boxed{5}, or to be exact \boxed{5", 0.0, True),  # cut by the length limit
        (r"Thus \boxed{5}.<|im_end|>", 1.0, False),
    ],
)
def test_score(response, correct, unparsed):
    [parts] = Math().score([problem("5")], [response])
    assert parts == {"correct": correct} and isinstance(parts, Unparsed) is unparsed


def test_a_missing_gold_answer_is_an_error_not_a_reward():
    with pytest.raises(ValueError, match="must not be empty"):
        Math().score([problem(" ")], [r"\boxed{}"])
    with pytest.raises(ValueError):
        Math().score([problem("1")], [])


def test_gold_answers_in_the_form_of_the_data_set():
    task = Math()
    solution = r"It is $\boxed{3}$ times larger: $\boxed{\frac{1}{2}}$."
    assert task.gold(solution) == task.gold(task.gold(solution)) == r"\frac{1}{2}"
    assert task.score([problem(solution)], [r"\boxed{0.5}"]) == [{"correct": 1.0}]


def test_equal_answers_in_other_layouts_are_one_final_answer():
    task = Math()
    spellings = (r"\boxed{\left( 3, 4 \right)}", r"\boxed{(3,\,4).}", r"\boxed{1} \boxed{ (3,4)}")
    assert {task.final_answer(text) for text in spellings} == {"(3,4)"}
    assert task.final_answer(r"\boxed{}") is None


def test_neither_a_thread_nor_the_grader_needs_signals(monkeypatch):
    def refuse(*args):
        raise AssertionError("the grader must leave signals alone")

    monkeypatch.setattr(signal, "signal", refuse)
    monkeypatch.setattr(signal, "alarm", refuse)
    scores: list[object] = []

    def score() -> None:
        responses = [r"\boxed{0.5}", r"\boxed{0.6}", r"\boxed{\sqrt{x^2}}"]
        scores.extend(Math().score([problem(r"\frac{1}{2}")] * 3, responses))

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert scores == [{"correct": 1.0}, {"correct": 0.0}, {"correct": 0.0}]


def test_workers_end_a_comparison_that_takes_for_ever():
    node = {"_target_": "tasks.math.Math"}
    workers = RewardWorkers(node, RewardConfig(num_workers=1, time_limit_s=8.0, penalty=-1.0))
    try:
        scored = workers.score(
            [problem("2x+1")] * 3, [r"\boxed{2x+1}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{1 + 2x}"]
        )
    finally:
        workers.close()
    assert [s.status for s in scored][::2] == ["ok", "ok"]
    assert [s.reward for s in scored] == [1.0, -1.0, 1.0]
    assert scored[1].status in ("timeout", "crash", "error")  # by time, or by memory before


def test_examples_in_the_docstrings():
    results = doctest.testmod(math_task)
    assert results.attempted >= 5 and results.failed == 0


# ------------------------------------------------------------------------- data


@needs_data
@pytest.mark.parametrize("split", COUNTS)
def test_gold_answers_are_right(split):
    """All that there are: 4 of MATH's 7,474 training problems have none (2 null, 2 empty)."""
    task = Math(data_dir=str(DATA))
    problems = task.problems(split)
    assert len(problems) == COUNTS[split]
    assert [p.prompt_id for p in problems] == list(range(len(problems)))
    responses = [f"Hence $\\boxed{{{p.answer}}}$." for p in problems]
    assert task.score(problems, responses) == [{"correct": 1.0}] * len(problems)


@needs_data
def test_problems_without_a_gold_answer_are_counted(caplog):
    rows = json.loads((DATA / "train.json").read_text())
    missing = [row["answer"] for row in rows if not row["answer"]]
    assert len(rows) == 7474 and missing == [None, None, "", ""]
    with caplog.at_level("INFO", logger="tba"):
        Math(data_dir=str(DATA)).problems("train")
    assert "left out 4 problems" in caplog.text


@needs_data
def test_reference_solutions_of_math500_are_right_and_others_are_not():
    rows = [json.loads(line) for line in (DATA / "math500.jsonl").read_text().splitlines()]
    task = Math(data_dir=str(DATA))
    problems = task.problems("test")
    solutions = [row["solution"] for row in rows]
    assert task.score(problems, solutions) == [{"correct": 1.0}] * 500
    sample = slice(0, 60)  # comparing unequal answers is what takes time
    shifted = task.score(problems[sample], [*solutions[1:61]])
    assert sum(parts["correct"] for parts in shifted) <= 2


@needs_data
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_math_verify_can_compare_all_gold_answers_but_three():
    task = Math(data_dir=str(DATA))
    answers = {math_task._clean(p.answer) for split in COUNTS for p in task.problems(split)}
    assert len(answers) > 2900
    assert {answer for answer in answers if math_task._gold_value(answer) is None} == {
        "05 : 00",  # a time: a division by zero
        "LQSX",  # names, not a product
        r"\begin{pmatrix} 1 & -1 \\ 1 & \phantom -1 \end{pmatrix}",  # \phantom isn't known
    }


def test_prompts_byte_for_byte(tmp_path):
    text = "Find $\\{x\\}$ for {problem},\n5\\% & \\n?"
    folder = write_math(tmp_path, train=[{"problem": text, "answer": "1"}])
    [plain] = Math(data_dir=folder).problems("train")
    [qwen] = Math(data_dir=folder, prompt_format="qwen_boxed").problems("train")
    instruction = "Please reason step by step, and put your final answer within \\boxed{}."
    assert plain.prompt == text + "\n" + instruction
    assert qwen.prompt == (
        "<|im_start|>system\n" + instruction + "<|im_end|>\n<|im_start|>user\n" + text
        + "<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip


def test_splits(tmp_path):
    rows = {
        "math500": [{"problem": "a", "answer": r"\frac12"}],
        "amc23": [{"problem": "b", "answer": 27.0}, {"problem": "c", "answer": -1.5}],
        "aime24": [{"problem": "d", "answer": "025"}],
    }
    folder = write_math(tmp_path, **rows)
    task = Math(data_dir=folder)
    assert splits(task) == ("train", "test", "math500", "amc23", "aime24")
    assert task.problems("test") == task.problems("math500")
    assert [p.answer for p in task.problems("math500")] == [r"\frac12"]
    assert [p.answer for p in task.problems("amc23")] == ["27", "-1.5"]
    assert [p.answer for p in task.problems("aime24")] == ["025"]
    for name in ("math500", "amc23", "aime24"):
        assert Math(data_dir=folder, test_set=name).problems("test") == task.problems(name)
    with pytest.raises(ValueError, match="split='validation'.*aime24"):
        task.problems("validation")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([1, 2], "found list"),
        ({"question": "a", "answer": "1"}, "'problem' must be text.*'question'"),
        ({"problem": 1, "answer": "1"}, "'problem' must be text, but it is int"),
        ({"problem": "a", "solution": "1"}, "'answer' must be text, a number or null"),
        ({"problem": "a", "answer": ["1"]}, "'answer' must be text, a number or null"),
        ({"problem": "a", "answer": True}, "'answer' must be text, a number or null"),
        ({"problem": "a", "answer": r"\boxed{}"}, "gold answer must not be empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, says):
    good = {"problem": "a", "answer": "1"}
    task = Math(data_dir=write_math(tmp_path, train=[good, bad], amc23=[good, bad]))
    for split, where in (("train", "train.json, row 1:"), ("amc23", "amc23.jsonl, line 2:")):
        with pytest.raises(ValueError, match=says) as caught:
            task.problems(split)
        assert f"task.data_dir: {tmp_path / where}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"[1,", "not valid JSON"), (b"{}", "one list of objects, found dict"), (b"\xff\xfe", "JSON"),
     (b"[" * 100_000, "not valid JSON"), (b"[]", "train has no problem with an answer"),
     (b'[{"problem": "a", "answer": ""}]', "train has no problem with an answer")],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path, content, says):
    task = Math(data_dir=write_math(tmp_path))
    (tmp_path / "train.json").write_bytes(content)
    with pytest.raises(ValueError, match=says) as caught:
        task.problems("train")
    assert "task.data_dir" in str(caught.value)


def test_missing_files_fail_when_they_are_needed(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*absent.*train.json"):
        Math(data_dir=str(tmp_path / "absent"))
    folder = write_math(tmp_path)
    (tmp_path / "aime24.jsonl").unlink()
    task = Math(data_dir=folder)
    with pytest.raises(ValueError, match=r"no file .*aime24.jsonl.*Hugging Face"):
        task.problems("aime24")
    with pytest.raises(ValueError, match=r"no file .*aime24.jsonl"):
        Math(data_dir=folder, test_set="aime24")


def test_problems_from_the_hub(monkeypatch):
    hub = {
        ("DigitalLearningGmbH/MATH-lighteval", "train"): [
            {"problem": "a", "solution": r"It is \boxed{7}."},
            {"problem": "b", "solution": "no box"},
        ],
        ("HuggingFaceH4/MATH-500", "test"): [{"problem": "c", "answer": "8"}],
        ("math-ai/amc23", "test"): [{"question": "d", "answer": "9"}],
        ("HuggingFaceH4/aime_2024", "train"): [{"problem": "e", "answer": "010"}],
    }

    def load_dataset(name, config, *, split):
        assert config is None
        return hub[name, split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = Math()
    found = {split: [p.answer for p in task.problems(split)] for split in COUNTS}
    assert found == {"train": ["7"], "math500": ["8"], "amc23": ["9"], "aime24": ["010"]}
    assert task.problems("amc23")[0].prompt.startswith("d\n")


def test_hub_errors_name_the_way_out(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="no route to host.*task.data_dir.*math500.jsonl"):
        Math().problems("test")
