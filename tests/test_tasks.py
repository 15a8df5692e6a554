"""Graders verdict by verdict, splits, prompts byte for byte, and every error a user can meet."""

import inspect
import json
import os
import sys
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tokenizers import processors

from sft import tiny_tokenizer
from tasks.arithmetic import Arithmetic
from tasks.gsm8k import GSM8K, NO_ANSWER, last_number, marked_number
from tasks.task import Problem, encode_prompt

ROOT = Path(__file__).resolve().parents[1]
REAL_GSM8K = Path(os.environ.get("GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k"))


def problem(prompt: str = "1+1=", answer: str = "2") -> Problem:
    return Problem(prompt_id=0, prompt=prompt, answer=answer)


def write_gsm8k(folder: Path, train: str, test: str | None = None) -> str:
    (folder / "train.jsonl").write_text(train, encoding="utf-8")
    (folder / "test.jsonl").write_text(test if test is not None else train, encoding="utf-8")
    return str(folder)


def row(question: str = "How many?", answer: str = "It is 1+1.\n#### 2") -> str:
    return json.dumps({"question": question, "answer": answer}) + "\n"


# ------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(("name", "kind"), [("arithmetic", Arithmetic), ("gsm8k", GSM8K)])
def test_yaml_builds_the_task_and_says_its_defaults(name, kind):
    config = OmegaConf.load(ROOT / "conf" / "task" / f"{name}.yaml")["task"]
    task = instantiate(config)
    assert type(task) is kind and task.name == name
    arguments = {key: value for key, value in config.items() if key != "_target_"}
    defaults = {k: p.default for k, p in inspect.signature(kind).parameters.items()}
    assert arguments == defaults


# ------------------------------------------------------------------------- arithmetic


def test_arithmetic_splits_are_disjoint_and_cover_every_sum():
    task = Arithmetic(max_operand=20, num_test=50, seed=3)
    train, test = task.problems("train"), task.problems("test")
    prompts = [p.prompt for p in train + test]
    assert len(test) == 50 and len(train) == 21 * 21 - 50
    assert len(set(prompts)) == 21 * 21
    assert set(prompts) == {f"{a}+{b}=" for a in range(21) for b in range(21)}
    for problems in (train, test):
        assert [p.prompt_id for p in problems] == list(range(len(problems)))
        for p in problems:
            a, b = p.prompt.rstrip("=").split("+")
            assert p.answer == str(int(a) + int(b))


def test_arithmetic_is_a_function_of_the_seed():
    problems = [Arithmetic(seed=seed).problems("test") for seed in (1, 1, 2)]
    assert problems[0] == problems[1]
    assert problems[0] != problems[2]


@pytest.mark.parametrize(
    ("response", "reward"),
    [("107", 1), ("107 ", 0), (" 107", 0), ("0107", 0), ("107.0", 0), ("10", 0), ("1077", 0),
     ("", 0), ("107\n", 0), ("+107", 0), ("١٠٧", 0)],
)  # fmt: skip
def test_arithmetic_rewards_the_exact_digits_only(response, reward):
    [parts] = Arithmetic().score([problem("99+8=", "107")], [response])
    assert parts == {"correct": float(reward)}


def test_arithmetic_default_limits_hold_every_problem():
    task, tokenizer = Arithmetic(), tiny_tokenizer()
    problems = task.problems("train") + task.problems("test")
    prompts = [encode_prompt(tokenizer, p, chat=False) for p in problems]
    # One to spare in each: a beginning-of-text token; an answer that is a digit too long.
    assert max(map(len, prompts)) == task.max_prompt_tokens - 2
    assert max(len(p.answer) for p in problems) + 1 == task.max_response_tokens - 1


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        ("task.max_operand", {"max_operand": 0}),
        ("task.num_test", {"max_operand": 1, "num_test": 4}),
        ("task.num_test", {"num_test": 0}),
        ("task.max_response_tokens", {"max_response_tokens": 3}),
        ("task.max_response_tokens", {"max_operand": 9999}),
    ],
)
def test_arithmetic_refuses_settings_that_cannot_work(key, arguments):
    with pytest.raises(ValueError, match=key):
        Arithmetic(**arguments)


def test_score_refuses_unequal_lengths():
    with pytest.raises(ValueError):
        Arithmetic().score([problem()], ["2", "2"])


def test_unknown_split_is_refused(tmp_path):
    for task in (Arithmetic(), GSM8K(data_dir=write_gsm8k(tmp_path, row()))):
        with pytest.raises(ValueError, match="split='validation'"):
            task.problems("validation")


# ------------------------------------------------------------------------- GSM8K graders

VERDICTS = [
    # response, gold, last_number, strict
    ("#### 18", "18", 1, 1),
    ("She has 9*2 = <<9*2=18>>18.\n#### 18", "18", 1, 1),
    ("the answer is 18", "18", 1, 0),
    ("the answer is 18.", "18", 1, 0),
    ("#### 18.", "18", 1, 1),
    ("#### 18.0", "18", 1, 1),
    ("#### 18.00 dollars", "18", 1, 1),
    ("#### $18", "18", 1, 1),
    ("####18", "18", 1, 1),
    ("####   18   ", "18", 1, 1),
    ("#### \t $ 18", "18", 1, 1),
    ("#### 18%", "18", 1, 1),
    ("#### 018", "18", 1, 1),
    ("#### +18", "18", 1, 1),
    ("#### 18, that is all", "18", 1, 1),
    ("#### 18 eggs", "18", 1, 1),
    ("#### 18 eggs in 2 days", "18", 0, 1),  # the last number is another one
    ("#### 17\n#### 18", "18", 1, 0),  # strict takes the first
    ("#### 18\n#### 17", "18", 0, 1),
    ("####\n#### 18", "18", 1, 1),
    ("####\n18", "18", 1, 0),  # not on the marker's line
    ("#### eighteen\n#### 18", "18", 1, 1),
    ("18 ####", "18", 1, 0),
    ("### 18", "18", 1, 0),
    ("#### x = 18", "18", 1, 0),
    ("#### **18**", "18", 1, 0),
    ("#### 18/2", "18", 0, 0),
    ("#### 36/2", "18", 0, 0),
    ("#### 2/18", "18", 1, 0),
    ("#### 18^2", "18", 0, 0),
    ("#### 18*1", "18", 0, 0),
    ("#### 1.8e1", "18", 0, 0),  # the reference's pattern reads '1.8' and then '1'
    ("#### 18e0", "18", 1, 0),
    ("#### 18e2", "18", 0, 0),
    ("#### 18E2", "18", 0, 0),
    ("#### 1.8.1", "18", 0, 0),
    ("#### 18.5.1", "18", 0, 0),
    ("#### 181", "18", 0, 0),
    ("#### 1,8", "18", 1, 1),  # commas are dropped wherever they stand
    ("#### 1,234", "1,234", 1, 1),
    ("#### 1234", "1,234", 1, 1),
    ("#### $1,234.00", "1,234", 1, 1),
    ("#### 1 234", "1,234", 0, 0),
    ("#### -5", "-5", 1, 1),
    ("#### - 5", "-5", 0, 1),
    ("#### -$5", "-5", 0, 1),
    ("#### $-5", "-5", 1, 1),
    ("#### -$-5", "-5", 1, 0),
    ("#### --5", "-5", 1, 0),
    ("#### −5", "-5", 0, 0),  # a typographic minus
    ("#### 5", "-5", 0, 0),
    ("#### 3-5", "-5", 1, 0),
    ("#### 5-3", "-3", 1, 0),
    ("#### .5", "0.5", 1, 1),
    ("#### 0.50", "0.5", 1, 1),
    ("#### 5.", "5", 1, 1),
    ("#### ١٨", "18", 1, 0),  # the reference's \d takes any script's digits
    ("", "18", 0, 0),
    ("no number", "18", 0, 0),
    ("#### inf", "18", 0, 0),
    ("#### nan", "18", 0, 0),
    ("####", "18", 0, 0),
    ("#### .", "18", 0, 0),
    ("#### ,", "18", 0, 0),
    ("#### $", "18", 0, 0),
    ("#### __import__('os').getpid()", "18", 0, 0),
    ("-999999.222222", "18", 0, 0),
    # Floats: integers beyond 2**53 may be taken for a neighbour.
    ("#### 9007199254740993", "9007199254740992", 1, 1),
    ("#### " + "9" * 5000, "18", 0, 0),
    ("#### 1" + "0" * 400, "18", 0, 0),
]


@pytest.mark.parametrize(("response", "gold", "loose", "strict"), VERDICTS)
def test_gsm8k_verdicts(response, gold, loose, strict):
    problems = [problem(answer=gold)]
    assert GSM8K().score(problems, [response]) == [{"correct": float(loose)}]
    assert GSM8K(answer_rule="strict").score(problems, [response]) == [{"correct": float(strict)}]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,234.5", 1234.5), ("3-5", -5.0), ("12.", 12.0), ("-.5", -0.5), ("2e3", 2000.0),
     ("2.5e3", 3.0), ("1/2", 2.0), ("x", NO_ANSWER), ("1 2 3", 3.0), ("9e999", float("inf"))],
)  # fmt: skip
def test_last_number_is_the_reference_rule(text, number):
    assert last_number(text) == number


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("#0123456789.,+-$e \t\n"))))
@settings(max_examples=300, deadline=None)
def test_graders_never_raise(text):
    for answer in (text, "####" + text, "#### 1" + text):
        assert isinstance(last_number(answer), float)
        assert marked_number(answer) is None or isinstance(marked_number(answer), float)


def test_last_number_reads_every_decimal_digit_of_unicode():
    digits = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) == "Nd"]
    assert len(digits) > 500
    for digit in digits:
        assert last_number(digit) == unicodedata.decimal(digit)


@pytest.mark.parametrize(
    "text",
    ["1" * 200_000, "####" + " " * 200_000 + "x", "#### " + "1," * 100_000 + "/", "#" * 200_000,
     "#### -" + "\t" * 200_000, "1e" * 100_000, "+-" * 100_000, "#### 1." + "0" * 200_000 + "/"],
)  # fmt: skip
def test_graders_take_linear_time(text):
    start = time.process_time()
    last_number(text)
    marked_number(text)
    assert time.process_time() - start < 1.0


# ------------------------------------------------------------------------- GSM8K data


def test_gsm8k_prompts_byte_for_byte(tmp_path):
    question = "A {question} with {braces},\n5% & \\n?"
    folder = write_gsm8k(tmp_path, row(question))
    [paper] = GSM8K(data_dir=folder).problems("train")
    [vineppo] = GSM8K(data_dir=folder, prompt_format="vineppo").problems("train")
    assert paper.prompt == "[MATH TASK] Problem:\n" + question + "\n\nSolution:\n"
    assert vineppo.prompt == "[MATH_TASK] Problem:\n" + question + "\n\nSolution:"


def test_gsm8k_reads_lines_in_order(tmp_path):
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
        ('{"question": "a", "solution": "#### 1"}\n', "'answer' must be text"),
        ('{"question": "a", "answer": 1}\n', "'answer' must be text"),
        ('{"question": "a", "answer": "1"}\n', "must end in '#### '"),
        ('{"question": "a", "answer": "#### one"}\n', "must end in '#### '"),
    ],
)
def test_gsm8k_names_the_bad_line(tmp_path, bad, says):
    task = GSM8K(data_dir=write_gsm8k(tmp_path, row() + bad + row()))
    with pytest.raises(ValueError, match=says) as caught:
        task.problems("train")
    assert "task.data_dir" in str(caught.value)
    assert f"{tmp_path / 'train.jsonl'}, line 2:" in str(caught.value)


def test_gsm8k_refuses_bytes_that_are_no_text(tmp_path):
    folder = write_gsm8k(tmp_path, row())
    (tmp_path / "train.jsonl").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(ValueError, match=r"task.data_dir.*train.jsonl.*UTF-8"):
        GSM8K(data_dir=folder).problems("train")


def test_gsm8k_refuses_an_empty_file(tmp_path):
    task = GSM8K(data_dir=write_gsm8k(tmp_path, "\n"))
    with pytest.raises(ValueError, match="task.data_dir.*no problems"):
        task.problems("train")


def test_gsm8k_missing_folder_or_file_fails_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"task.data_dir=.*absent.*train.jsonl"):
        GSM8K(data_dir=str(tmp_path / "absent"))
    (tmp_path / "train.jsonl").write_text(row())
    with pytest.raises(ValueError, match=r"no file .*test.jsonl.*Hugging Face"):
        GSM8K(data_dir=str(tmp_path))


@pytest.mark.parametrize("key", ["answer_rule", "prompt_format"])
def test_gsm8k_refuses_unknown_choices(key):
    with pytest.raises(ValueError, match=f"task.{key}='other'"):
        GSM8K(**{key: "other"})


def test_gsm8k_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return [{"question": "a", "answer": "#### 7"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    [loaded] = GSM8K().problems("test")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert loaded.answer == "7" and "\na\n" in loaded.prompt


def test_gsm8k_hub_errors_name_the_way_out(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="no route to host.*task.data_dir"):
        GSM8K().problems("test")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="pip install datasets.*task.data_dir"):
        GSM8K().problems("test")


@pytest.mark.skipif(
    not (REAL_GSM8K / "test.jsonl").is_file(),
    reason=f"GSM8K's files are not in {REAL_GSM8K}: set GSM8K_DIR to their folder",
)
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k_gold_solutions_are_right_by_both_rules(split, count):
    with (REAL_GSM8K / f"{split}.jsonl").open(encoding="utf-8") as lines:
        solutions = [json.loads(line)["answer"] for line in lines]
    for rule in ("last_number", "strict"):
        task = GSM8K(data_dir=str(REAL_GSM8K), answer_rule=rule)
        problems = task.problems(split)
        assert len(problems) == count
        assert all(parts == {"correct": 1.0} for parts in task.score(problems, solutions))
        # A solution shifted to its neighbour is rarely right: the grader does tell them apart.
        shifted = task.score(problems, solutions[1:] + solutions[:1])
        assert sum(parts["correct"] for parts in shifted) < 0.05 * count


# ------------------------------------------------------------------------- encode_prompt


def with_special_tokens(template: str):
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return tokenizer


def test_plain_prompt_has_the_special_tokens_of_the_tokenizer_but_no_end_of_text():
    bare = tiny_tokenizer().convert_tokens_to_ids(list("1+1="))
    assert encode_prompt(tiny_tokenizer(), problem(), chat=False) == bare
    for template, start in (("<bos> $A", [1]), ("<bos> $A <eos>", [1]), ("$A <eos>", [])):
        tokens = encode_prompt(with_special_tokens(template), problem(), chat=False)
        assert tokens == start + bare
    # An end-of-text token that the prompt itself asks for stays.
    tokens = encode_prompt(tiny_tokenizer(), problem("1<eos>"), chat=False)
    assert tokens == [bare[0], 2]


def test_chat_prompt_is_one_user_message_and_an_open_assistant_turn():
    tokenizer = with_special_tokens("<bos> $A")
    tokenizer.chat_template = (
        "<bos>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokens = encode_prompt(tokenizer, problem(), chat=True)
    assert all(type(token) is int for token in tokens)
    assert tokens == [1, *tokenizer.convert_tokens_to_ids(list("[user]1+1=[assistant]"))]


def test_encode_prompt_errors():
    with pytest.raises(ValueError, match="task.chat.*no chat template"):
        encode_prompt(tiny_tokenizer(), problem(), chat=True)
    with pytest.raises(ValueError, match="encodes to no tokens"):
        encode_prompt(tiny_tokenizer(), problem(""), chat=False)
