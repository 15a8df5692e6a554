"""The task of sums, what every task has in common, and how prompts become tokens."""

import inspect
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import processors

from sft import tiny_tokenizer
from tasks.arithmetic import Arithmetic
from tasks.gsm8k import GSM8K
from tasks.task import Problem, encode_prompt

ROOT = Path(__file__).resolve().parents[1]


def problem(prompt: str = "1+1=", answer: str = "2") -> Problem:
    return Problem(prompt_id=0, prompt=prompt, answer=answer)


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


def test_unknown_split_is_refused():
    for task in (Arithmetic(), GSM8K()):
        with pytest.raises(ValueError, match="split='validation'"):
            task.problems("validation")


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
