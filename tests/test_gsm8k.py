"""GSM8K: graders verdict by verdict, gold solutions, prompts byte for byte, every user's error."""

import doctest
import json
import re
import sys
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks import gsm8k
from tasks.gsm8k import GSM8K, last_number, marked_number
from tasks.task import Problem, Unparsed, answer_rule

DATA = Path(__file__).resolve().parents[1] / "../shared/data/gsm8k"
needs_data = pytest.mark.skipif(
    not (DATA / "test.jsonl").is_file(), reason=f"GSM8K's files are not in {DATA}"
)


def problem(answer: str) -> Problem:
    return Problem(prompt_id=0, prompt="How many?", answer=answer)


def write_gsm8k(folder: Path, train: str, test: str | None = None) -> str:
    (folder / "train.jsonl").write_text(train, encoding="utf-8")
    (folder / "test.jsonl").write_text(test if test is not None else train, encoding="utf-8")
    return str(folder)


def row(question: str = "How many?", answer: str = "It is 1+1.\n#### 2") -> str:
    return json.dumps({"question": question, "answer": answer}) + "\n"


# ------------------------------------------------------------------------- graders

# Response, gold, and whether last_number and strict call it right.
VERDICTS = {
    "plain": [
        ("#### 18", "18", 1, 1),
        ("She sells 9 eggs for 2 each.\n#### 18", "18", 1, 1),
        ("####18", "18", 1, 1),
        ("####   18   ", "18", 1, 1),
        ("####\u00a018", "18", 1, 1),
        ("#### 018", "18", 1, 1),
        ("#### 17", "18", 0, 0),
        ("#### 181", "18", 0, 0),
        ("#### 1", "18", 0, 0),
        ("#### 8", "18", 0, 0),
    ],
    "no marker": [
        ("", "18", 0, 0),
        ("no number", "18", 0, 0),
        ("the answer is 18", "18", 1, 0),
        ("the answer is 18.", "18", 1, 0),
        ("18 ####", "18", 1, 0),
        ("### 18", "18", 1, 0),
        ("# # # # 18", "18", 1, 0),
        ("####", "18", 0, 0),
        ("####\n18", "18", 1, 0),  # not on the marker's line
        ("-999999.222222", "18", 0, 0),
    ],
    "several markers": [
        ("#### 17\n#### 18", "18", 1, 0),  # strict takes the first
        ("#### 18\n#### 17", "18", 0, 1),
        ("####\n#### 18", "18", 1, 1),
        ("#### eighteen\n#### 18", "18", 1, 1),
        ("######## 18", "18", 1, 1),
        ("#### #### 18", "18", 1, 1),
    ],
    "thousands": [
        ("#### 1,234", "1,234", 1, 1),
        ("#### 1234", "1,234", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### 1,234,567.", "1234567", 1, 1),
        ("#### 1,8", "18", 1, 1),  # commas are dropped wherever they stand, as GSM8K's grader does
        ("#### 1 234", "1,234", 0, 0),
        ("#### 1 234", "1", 0, 0),
        ("#### 1.234,50", "1,234.5", 0, 0),
        ("#### 1.234,50", "1.234", 0, 0),
        ("#### 1'234", "1", 0, 0),
        ("#### 1_234", "1", 0, 0),
    ],
    "currency": [
        ("#### $18", "18", 1, 1),
        ("#### $ 18", "18", 1, 1),
        ("#### \\$18", "18", 1, 1),
        ("#### €18", "18", 1, 1),
        ("#### £18.00", "18", 1, 1),
        ("#### $1,234.00", "1,234", 1, 1),
        ("#### 18$", "18", 1, 1),
        ("#### $$18", "18", 1, 0),
        ("#### $", "18", 0, 0),
    ],
    "units": [
        ("#### 18 eggs", "18", 1, 1),
        ("#### 18eggs", "18", 1, 1),
        ("#### 18.00 dollars", "18", 1, 1),
        ("#### 18 eggs in 2 days", "18", 0, 1),  # the last number is another one
        ("#### 18 m2", "18", 0, 1),
        ("#### 18-inch pizzas", "18", 1, 1),
        ("#### 18, that is all", "18", 1, 1),
        ("#### x = 18", "18", 1, 0),
        ("#### **18**", "18", 1, 0),
        ("#### \\boxed{18}", "18", 1, 0),
    ],
    "trailing dots": [
        ("#### 18.", "18", 1, 1),
        ("#### 18..", "18", 1, 1),
        ("#### 18.0", "18", 1, 1),
        ("#### 18.00.", "18", 1, 1),
        ("#### 18,", "18", 1, 1),
        ("#### 18!", "18", 1, 1),
    ],
    "decimals": [
        ("#### .5", "0.5", 1, 1),
        ("#### 0.50", "0.5", 1, 1),
        ("#### 5.", "5", 1, 1),
        ("#### 0.49", "0.5", 0, 0),
        ("#### 1.8.1", "18", 0, 0),
        ("#### 1.8.1", "1.8", 0, 0),
        ("#### .", "18", 0, 0),
        ("#### ,", "18", 0, 0),
    ],
    "signs": [
        ("#### +18", "18", 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### - 5", "-5", 0, 1),
        ("#### -$5", "-5", 0, 1),
        ("#### $-5", "-5", 1, 1),
        ("#### −5", "-5", 0, 1),  # a typographic minus sign
        ("#### −5", "5", 1, 0),
        ("#### -$-5", "-5", 1, 0),
        ("#### --5", "-5", 1, 0),
        ("#### 5", "-5", 0, 0),
        ("#### -0", "0", 1, 1),
    ],
    "percent": [
        ("#### 18%", "18", 1, 1),
        ("#### 18 %", "18", 1, 1),
        ("#### 18 percent", "18", 1, 1),
        ("#### 18\\%", "18", 1, 1),
        ("#### 18% of 50", "18", 0, 1),
        ("#### 0.18", "18", 0, 0),
    ],
    "fractions": [
        ("#### 1/2", "0.5", 0, 0),
        ("#### 1/2", "1", 0, 0),
        ("#### 1/2", "2", 1, 0),
        ("#### 18/2", "18", 0, 0),
        ("#### 36/2", "18", 0, 0),
        ("#### 18 / 2", "18", 0, 0),
        ("#### 18./2", "18", 0, 0),
        ("#### 1,8/2", "18", 0, 0),
        ("#### 3 1/2", "3", 0, 0),
        ("#### 18÷2", "18", 0, 0),
    ],
    "sums, powers, ranges, times": [
        ("#### 3-5", "-5", 1, 0),
        ("#### 5-3", "-3", 1, 0),
        ("#### 5-3", "5", 0, 0),
        ("#### 18 - 2", "18", 0, 0),
        ("#### 18-20", "18", 0, 0),
        ("#### 18 + 1", "18", 0, 0),
        ("#### 18*1", "18", 0, 0),
        ("#### 18 × 1", "18", 0, 0),
        ("#### 18^2", "18", 0, 0),
        ("#### 18**2", "18", 0, 0),
        ("#### 5:30", "5", 0, 0),
        ("#### 9*2 = 18", "18", 1, 0),
        ("#### 18 = 9*2", "18", 0, 1),
        ("#### 1.8e1", "18", 0, 0),  # the paper's pattern reads '1.8' and then '1'
        ("#### 18e0", "18", 1, 0),
        ("#### 18e2", "18", 0, 0),
        ("#### 18E2", "18", 0, 0),
    ],
    "calculator annotations": [
        ("She has 9*2 = <<9*2=18>>18.\n#### 18", "18", 1, 1),
        ("It is 9*2 = <<9*2=18>>18", "18", 1, 0),
        ("It is 9*2 = <<9*2=18>>", "18", 1, 0),
        ("#### <<9*2=18>>18", "18", 1, 1),
        ("#### <<9*2=18>> 18", "18", 1, 1),
        ("#### $<<9*2=18>>18", "18", 1, 1),
        ("#### <<9*200=1,800>>1,800 eggs", "1,800", 1, 1),
        ("#### <<9*2=18>>", "18", 1, 1),
        ("#### <<9*2=18>> eggs", "18", 1, 1),
        ("#### <<2-7=-5>>-5", "-5", 1, 1),
        ("#### <<9*2=17>>18", "18", 1, 1),  # the number written out is the answer
        ("#### <<9*2=18>>17", "18", 0, 0),
        ("<<9*2=18>>#### 18", "18", 1, 1),
        ("#### 18 <<9*2=18>>18", "18", 1, 0),  # as '18 18': no plain number
        ("#### <<9*2=18", "18", 1, 0),  # never closed
        ("#### 18 <<9*2=", "18", 0, 1),
    ],
    "no text is evaluated": [
        ("#### __import__('os').getpid()", "18", 0, 0),
        ("#### inf", "18", 0, 0),
        ("#### nan", "18", 0, 0),
        ("#### 1" + "0" * 400, "18", 0, 0),
        ("#### " + "9" * 5000, "18", 0, 0),
        # Floats: integers beyond 2**53 may be taken for a neighbour.
        ("#### 9007199254740993", "9007199254740992", 1, 1),
        ("#### ١٨", "18", 1, 0),  # the paper's \d takes any script's digits
    ],
}
CASES = [(kind, *case) for kind, cases in VERDICTS.items() for case in cases]


@pytest.mark.parametrize(("kind", "response", "gold", "loose", "strict"), CASES)
def test_verdicts_of_both_rules(kind, response, gold, loose, strict):
    problems = [problem(gold)]
    assert GSM8K().score(problems, [response]) == [{"correct": float(loose)}]
    assert GSM8K(answer_rule="strict").score(problems, [response]) == [{"correct": float(strict)}]


def official(response: str, gold: str) -> bool:
    """GSM8K's own grader (openai/grade-school-math): the first match, compared as a text."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", response)
    return match is not None and match.group(1).strip().replace(",", "") == gold.replace(",", "")


def test_strict_is_the_official_rule_but_for_spellings_and_expressions():
    differ = [case for case in CASES if case[4] != official(*case[1:3])]
    # What the official pattern reads there is only the beginning of a number or an expression.
    assert [response[5:] for _, response, _, _, strict in differ if not strict] == [
        "1 234", "1'234", "1_234", "1/2", "18/2", "18 / 2", "1,8/2", "3 1/2", "18÷2", "5-3",
        "18 - 2", "18-20", "18 + 1", "18*1", "18 × 1", "18^2", "18**2", "5:30", "18e0", "18e2",
        "18E2", "18 <<9*2=18>>18",
    ]  # fmt: skip
    # And here it is the gold number in another spelling than the gold solution's.
    assert [response[4:] for _, response, _, _, strict in differ if strict] == [
        "18", "   18   ", "\u00a018", " 018", " 1,234,567.", " $18", " $ 18", " \\$18", " €18",
        " £18.00", " $1,234.00", " 18.00 dollars", " 18.", " 18..", " 18.0", " 18.00.", " .5",
        " 0.50", " 5.", " +18", " - 5", " -$5", " $-5", " −5", " -0", " <<9*2=18>>18",
        " <<9*2=18>> 18", " $<<9*2=18>>18", " <<9*200=1,800>>1,800 eggs", " <<9*2=18>>",
        " <<9*2=18>> eggs", " <<2-7=-5>>-5", " <<9*2=17>>18", " 9007199254740993",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234.5", 1234.5), ("3-5", -5.0), ("12.", 12.0), ("-.5", -0.5), ("2e3", 2000.0),
     ("2.5e3", 3.0), ("1/2", 2.0), ("x", None), ("1 2 3", 3.0), ("9e999", float("inf"))],
)  # fmt: skip
def test_last_number_is_the_reference_rule(text, number):
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("response", "loose", "strict"),
    [("", True, True), ("no idea", True, True), ("it is 5", False, True), ("#### x", True, True),
     ("#### 5", False, False), ("#### 1/2", False, True)],
)  # fmt: skip
def test_a_response_without_a_number_is_unparsed(response, loose, strict):
    for rule, expected in (("last_number", loose), ("strict", strict)):
        [parts] = GSM8K(answer_rule=rule).score([problem("7")], [response])
        assert isinstance(parts, Unparsed) is expected and parts == {"correct": 0.0}


def test_the_rule_is_named_in_results():
    assert answer_rule(GSM8K()) == "last_number"
    assert answer_rule(GSM8K(answer_rule="strict")) == "strict"


def test_gold_answers_in_the_form_of_the_data_set():
    task = GSM8K()
    solution = "He needs <<3*400=1200>>1,200 eggs.\n#### 1,200"
    assert task.gold(solution) == "1,200"
    assert task.gold(task.gold(solution)) == "1,200"
    assert task.score([problem(solution)] * 2, ["#### 1200", "#### 400"]) == [
        {"correct": 1.0},
        {"correct": 0.0},
    ]


@pytest.mark.parametrize("answer", ["", "no number", "It is 5.\n#### ", "It is 5.\n#### five"])
def test_a_gold_answer_without_a_number_is_an_error_not_a_reward(answer):
    with pytest.raises(ValueError, match="gold answer must be a number"):
        GSM8K().gold(answer)
    with pytest.raises(ValueError, match="gold answer must be a number"):
        GSM8K().score([problem(answer)], ["no number either"])


def test_equal_answers_in_other_words_are_one_final_answer():
    for rule in ("last_number", "strict"):
        task = GSM8K(answer_rule=rule)
        spellings = ("#### 1200", "#### 1,200.", "#### $1,200.00", "x #### 1200 eggs")
        assert {task.final_answer(text) for text in spellings} == {"1200.0"}
        assert task.final_answer("#### 0") == task.final_answer("#### -0")
        assert task.final_answer("#### none") is None


def test_score_refuses_unequal_lengths():
    with pytest.raises(ValueError):
        GSM8K().score([problem("1")], ["1", "1"])


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("#0123456789.,+-$e<>= \t\n"))))
@settings(max_examples=300, deadline=None)
def test_graders_never_raise(text):
    for answer in (text, "####" + text, "#### 1" + text, "#### <<" + text):
        assert last_number(answer) is None or isinstance(last_number(answer), float)
        assert marked_number(answer) is None or isinstance(marked_number(answer), float)


def test_last_number_reads_every_decimal_digit_of_unicode():
    digits = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) == "Nd"]
    assert len(digits) > 500
    for digit in digits:
        assert last_number(digit) == unicodedata.decimal(digit)


@pytest.mark.parametrize(
    "text",
    ["1" * 200_000, "####" + " " * 200_000 + "x", "#### " + "1," * 100_000 + "/", "#" * 200_000,
     "#### -" + "\t" * 200_000, "1e" * 100_000, "+-" * 100_000, "#### 1." + "0" * 200_000 + "/",
     "<<" * 100_000, "<<" + "=" * 200_000, "<<" + "1=" * 100_000 + ">>", "<<1=1>>" * 30_000,
     "#### 1" + " " * 200_000 + "/", "<<1=1>>" + " " * 200_000 + "x"],
)  # fmt: skip
def test_graders_take_linear_time(text):
    start = time.process_time()
    last_number(text)
    marked_number(text)
    assert time.process_time() - start < 1.0


def test_examples_in_the_docstrings():
    results = doctest.testmod(gsm8k)
    assert results.attempted >= 5 and results.failed == 0


# ------------------------------------------------------------------------- data


@needs_data
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
@pytest.mark.parametrize("rule", ["last_number", "strict"])
def test_gold_solutions_are_right_by_both_rules(split, count, rule):
    with (DATA / f"{split}.jsonl").open(encoding="utf-8") as lines:
        solutions = [json.loads(line)["answer"] for line in lines]
    assert sum("<<" in solution for solution in solutions) > 0.9 * count
    task = GSM8K(data_dir=str(DATA), answer_rule=rule)
    problems = task.problems(split)
    assert len(problems) == len(solutions) == count
    assert task.score(problems, solutions) == [{"correct": 1.0}] * count
    assert [task.gold(solution) for solution in solutions] == [p.answer for p in problems]
    # A solution shifted to its neighbour is rarely right: the grader does tell them apart.
    shifted = task.score(problems, solutions[1:] + solutions[:1])
    assert sum(parts["correct"] for parts in shifted) < 0.05 * count
    if rule == "strict":
        assert all(official(s, p.answer) for s, p in zip(solutions, problems, strict=True))


def test_prompts_byte_for_byte(tmp_path):
    question = "A {question} with {braces},\n5% & \\n?"
    folder = write_gsm8k(tmp_path, row(question))
    [paper] = GSM8K(data_dir=folder).problems("train")
    [vineppo] = GSM8K(data_dir=folder, prompt_format="vineppo").problems("train")
    assert paper.prompt == "[MATH TASK] Problem:\n" + question + "\n\nSolution:\n"
    assert vineppo.prompt == "[MATH_TASK] Problem:\n" + question + "\n\nSolution:"


def test_lines_are_read_in_order(tmp_path):
    train = row("a", "x\n#### 1") + "\n" + row("b\u2028c", "y #### 9\n#### 1,000")
    task = GSM8K(data_dir=write_gsm8k(tmp_path, train, row("d", "#### -3").rstrip("\n")))
    problems = task.problems("train")
    assert [p.prompt_id for p in problems] == [0, 1]
    assert [p.answer for p in problems] == ["1", "1,000"]
    assert "b\u2028c" in problems[1].prompt
    assert [p.answer for p in task.problems("test")] == ["-3"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{'question': 1}\n", "not valid JSON"),
        ('{"question": "a", "answer": "#### 1"\n', "not valid JSON"),
        ("[" * 100_000 + "\n", "not valid JSON"),
        ("[1, 2]\n", "found list"),
        ('{"problem": "a", "answer": "#### 1"}\n', r"'question' must be text.*'problem'"),
        ('{"question": "a", "solution": "#### 1"}\n', "'answer' must be text.*'solution'"),
        ('{"question": "a", "answer": 1}\n', "'answer' must be text, but it is int"),
        ('{"question": "a", "answer": "1"}\n', "must end in '#### '"),
        ('{"question": "a", "answer": "#### one"}\n', "end in '#### '"),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, says):
    task = GSM8K(data_dir=write_gsm8k(tmp_path, row() + bad + row()))
    with pytest.raises(ValueError, match=says) as caught:
        task.problems("train")
    assert "task.data_dir" in str(caught.value)
    assert f"{tmp_path / 'train.jsonl'}, line 2:" in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    folder = write_gsm8k(tmp_path, row())
    (tmp_path / "train.jsonl").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(ValueError, match=r"task.data_dir.*train.jsonl.*UTF-8"):
        GSM8K(data_dir=folder).problems("train")


def test_an_empty_file_is_refused(tmp_path):
    task = GSM8K(data_dir=write_gsm8k(tmp_path, "\n"))
    with pytest.raises(ValueError, match="task.data_dir.*no problems"):
        task.problems("train")


def test_a_missing_folder_or_file_fails_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"task.data_dir=.*absent.*train.jsonl"):
        GSM8K(data_dir=str(tmp_path / "absent"))
    (tmp_path / "train.jsonl").write_text(row())
    with pytest.raises(ValueError, match=r"no file .*test.jsonl.*Hugging Face"):
        GSM8K(data_dir=str(tmp_path))


@pytest.mark.parametrize("key", ["answer_rule", "prompt_format"])
def test_unknown_choices_are_refused(key):
    with pytest.raises(ValueError, match=f"task.{key}='other'"):
        GSM8K(**{key: "other"})


def test_problems_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"question": "a", "answer": "#### 7"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    [loaded] = GSM8K().problems("test")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert loaded.answer == "7" and "\na\n" in loaded.prompt


def test_hub_errors_name_the_way_out(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="no route to host.*task.data_dir"):
        GSM8K().problems("test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets.*task.data_dir"):
        GSM8K().problems("test")
