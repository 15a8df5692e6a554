"""Reasoning Gym as a task: gold answers and wrong ones, splits, mixtures, settings, and that no
answer is ever evaluated.
"""

import ast
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from config import register, task_node
from rewards import build_task
from tasks import reasoning_gym
from tasks.reasoning_gym import INSTRUCTIONS, ReasoningGym
from tasks.task import Problem, Unparsed, final_answer, gold_answer, is_correct

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None,
    reason="the package reasoning-gym is not installed",
)


def respond(task: ReasoningGym, answer: object) -> str:
    """A response that gives `answer` in the task's format."""
    return {
        "marker": f"Let me think.\n{task.marker} {answer}",
        "tags": f"Let me think. <answer>{answer}</answer>",
        "whole": str(answer),
    }[task.answer_format]


def gold(problem: Problem) -> str:
    return json.loads(problem.answer)["answer"]


def rewards(task: ReasoningGym, problem: Problem, *answers: object) -> list[float]:
    scores = task.score([problem] * len(answers), [respond(task, answer) for answer in answers])
    assert all(set(parts) == {"verifier"} for parts in scores)
    return [parts["verifier"] for parts in scores]


def small(dataset: str, **options) -> ReasoningGym:
    return ReasoningGym(dataset=dataset, **{"num_train": 8, "num_test": 8, **options})


# ------------------------------------------------------------------------- configuration


def node(*overrides: str) -> dict:
    """What the task is built from, as `train.py` and `evaluate.py` take it from the config."""
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "conf")):
        return task_node(compose("config", overrides=overrides))


def test_a_dataset_and_its_settings_from_the_command_line():
    task = instantiate(
        node("task=reasoning_gym", "task.dataset=gcd", "task.settings={max_value: 30}")
    )
    assert type(task) is ReasoningGym and task.name == "reasoning_gym"
    for problem in task.problems("test")[:50]:
        assert max(json.loads(problem.answer)["metadata"]["numbers"]) <= 30


def test_a_mixture_from_the_command_line():
    options = ["task.mixture={gcd: 3, lcm: 1}", "task.settings={lcm: {max_value: 30}}"]
    task = instantiate(node("task=reasoning_gym", *options, "task.num_test=200"))
    metadata = [json.loads(problem.answer)["metadata"] for problem in task.problems("test")]
    most = {m["source_dataset"]: 0 for m in metadata}
    for m in metadata:
        most[m["source_dataset"]] = max(most[m["source_dataset"]], *m["numbers"])
    assert set(most) == {"gcd", "lcm"} and most["lcm"] <= 30 < most["gcd"]


def test_countdown_is_a_named_task():
    task = instantiate(node("task=countdown", "task.num_test=50"))
    assert task.dataset == "countdown"
    for problem in task.problems("test"):
        metadata = json.loads(problem.answer)["metadata"]
        assert 3 <= len(metadata["numbers"]) <= 4 and max(metadata["numbers"]) <= 99
        assert 10 <= metadata["target"] <= 99
        assert str(metadata["target"]) in problem.prompt


def test_yaml_says_the_defaults():
    task = ReasoningGym(dataset="gcd")
    values = node("task=reasoning_gym")
    assert set(values) > {"_target_", "dataset", "settings", "marker"}
    for key in set(values) - {"_target_", "dataset"}:
        assert values[key] == (list(task.allow) if key == "allow" else getattr(task, key)), key


def test_workers_build_the_same_task():
    values = node("task=countdown", "task.num_test=5")
    there = build_task(json.loads(json.dumps(OmegaConf.to_container(OmegaConf.create(values)))))
    assert instantiate(values).problems("test") == there.problems("test")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"task.dataset and task.mixture: set one of the two.*gsm_symbolic"),
        ({"dataset": "gcd", "mixture": {"lcm": 1}}, "set one of the two"),
        (
            {"dataset": "gsm_symbolc"},
            "task.dataset: no data set 'gsm_symbolc'; did you mean gsm_sym",
        ),
        ({"dataset": "count down"}, "did you mean countdown"),
        ({"mixture": {"gcd": 1, "lmc": 1}}, "task.mixture: no data set 'lmc'; did you mean lcm"),
        ({"mixture": {}}, "task.mixture"),
        ({"mixture": {"gcd": 0}}, "task.mixture.gcd=0: a weight must be a positive number"),
        ({"mixture": {"gcd": -1}}, "task.mixture.gcd=-1"),
        ({"mixture": {"gcd": float("nan")}}, "task.mixture.gcd=nan"),
        ({"mixture": {"gcd": "much"}}, "task.mixture.gcd='much'"),
        ({"mixture": {"gcd": True}}, "task.mixture.gcd=True"),
        (
            {"dataset": "gcd", "settings": {"max_valu": 5}},
            "'gcd' has no setting 'max_valu'; did you",
        ),
        ({"dataset": "gcd", "settings": {"max_value": 0}}, r"task.settings=.*'gcd' refuses it"),
        ({"dataset": "gcd", "settings": {"max_value": "big"}}, r"task.settings=.*refuses it"),
        ({"dataset": "gcd", "settings": {"seed": 1}}, "task.settings.seed: set task.seed instead"),
        ({"dataset": "gcd", "settings": {"size": 1}}, "task.settings.size: set task.num_train"),
        (
            {"mixture": {"gcd": 1}, "settings": {"max_value": 5}},
            "task.settings.max_value: with a mixture.*'max_value' is none of gcd",
        ),
        (
            {"mixture": {"gcd": 1}, "settings": {"gcd": {"max_valu": 5}}},
            "task.settings.gcd: 'gcd' has no setting 'max_valu'",
        ),
        ({"mixture": {"gcd": 1}, "settings": {"gcd": 5}}, "task.settings.gcd=5: write it as"),
        ({"dataset": "gcd", "answer_format": "boxed"}, "task.answer_format='boxed'"),
        ({"dataset": "gcd", "marker": " "}, "task.marker is blank"),
        ({"dataset": "gcd", "num_train": 0}, "task.num_train=0"),
        ({"dataset": "gcd", "num_test": 0}, "task.num_test=0"),
        ({"dataset": "composite"}, "task.dataset: 'composite' is a mixture itself"),
        ({"dataset": "composite", "allow": ["composite"]}, "is a mixture itself"),
        ({"dataset": "codeio"}, r"'codeio' .*task.allow=\[codeio\]"),
        ({"mixture": {"game_of_life_halting": 1}}, "takes every answer for right"),
    ],
)
def test_refuses_what_cannot_work(options, says):
    with pytest.raises(ValueError, match=says):
        ReasoningGym(**options)


def test_allow_takes_a_refused_dataset():
    task = small("game_of_life_halting", allow=["game_of_life_halting"])
    [problem] = task.problems("test")[:1]
    assert rewards(task, problem, "nonsense") == [1.0]  # why it is refused


def test_settings_that_hold_settings():
    options = {"board_format_opts": {"alphabet": list("abcdefghij")}}
    with_letters = small("rearc", settings=options, num_test=2)
    for problem in with_letters.problems("test"):
        assert set(gold(problem).split()) <= set("abcdefghij")


def test_another_release_of_the_package_is_refused(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "REVIEWED", "0.1.0")
    with pytest.raises(ValueError, match=r"reasoning-gym .* is installed.*==0.1.0"):
        ReasoningGym(dataset="gcd")


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym=="):
        ReasoningGym(dataset="gcd")


# ------------------------------------------------------------------------- splits


def questions(problems: list[Problem]) -> set[str]:
    return {problem.prompt for problem in problems}


@pytest.mark.parametrize("dataset", ["gcd", "syllogism", "family_relationships"])
def test_splits_are_disjoint_and_distinct(dataset):
    task = ReasoningGym(dataset=dataset, num_train=300, num_test=100)
    train, test = task.problems("train"), task.problems("test")
    assert len(questions(train)) == len(train) == 300
    assert len(questions(test)) == len(test) == 100
    assert not questions(train) & questions(test)
    for problems in (train, test):
        assert [problem.prompt_id for problem in problems] == list(range(len(problems)))


def test_splits_are_disjoint_where_there_are_hardly_enough_problems():
    # 100 questions '{a} * {b}' of two digits, each drawn again and again
    options = {"dataset": "products", "settings": {"max_digits": 1}}
    train = ReasoningGym(**options, num_train=40, num_test=20).problems("train")
    test = ReasoningGym(**options, num_train=40, num_test=20).problems("test")
    assert len(questions(train) | questions(test)) == 60
    with pytest.raises(ValueError, match=r"task.settings: 'products' gave \d+ distinct problems"):
        ReasoningGym(**options, num_train=400, num_test=20).problems("train")


def test_the_test_split_does_not_depend_on_the_train_split():
    few, many = (ReasoningGym(dataset="lcm", num_train=n, num_test=30) for n in (10, 200))
    assert few.problems("test") == many.problems("test")
    assert few.problems("train") == many.problems("train")[:10]


def test_problems_are_a_function_of_the_seed():
    first, again, other = (ReasoningGym(dataset="gcd", num_test=100, seed=s) for s in (1, 1, 2))
    assert first.problems("test") == again.problems("test")
    # Not the same problems shifted by one, as the package's seeds 1 and 2 would give.
    assert len(questions(first.problems("test")) & questions(other.problems("test"))) < 10


def test_global_random_numbers_are_left_as_they_were():
    random.seed(5), np.random.seed(5)
    expected = random.random(), np.random.random()
    random.seed(5), np.random.seed(5)
    small("pool_matrix").problems("train")  # it seeds numpy's global generator
    assert (random.random(), np.random.random()) == expected


def test_settings_that_are_impossible_now_and_then_are_drawn_again():
    # Three numbers of one digit rarely make 60 to 99: the package gives up on some of its draws.
    options = {"min_numbers": 3, "max_numbers": 3, "max_value": 9, "min_target": 60}
    task = small("countdown", settings={**options, "max_target": 99})
    for problem in task.problems("train"):
        assert rewards(task, problem, gold(problem)) == [1.0]


def test_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split='validation'"):
        small("gcd").problems("validation")


def test_mixture_shares_are_the_weights():
    weights = {"gcd": 5.0, "lcm": 3.0, "spell_backward": 2.0}
    task = ReasoningGym(mixture=weights, num_train=2000, num_test=50)
    counts = Counter(json.loads(p.answer)["dataset"] for p in task.problems("train"))
    expected = {name: 2000 * weight / 10 for name, weight in weights.items()}
    chi_square = sum((counts[name] - e) ** 2 / e for name, e in expected.items())
    assert chi_square < 13.8  # the 0.999 quantile at two degrees of freedom
    # and they are mixed: each has its share of either half
    half = Counter(json.loads(p.answer)["dataset"] for p in task.problems("train")[:1000])
    assert all(0.8 < 2 * half[name] / counts[name] < 1.2 for name in weights)


def test_the_order_in_which_a_mixture_is_written_does_not_matter():
    names = ["gcd", "lcm"]
    one, other = (
        ReasoningGym(mixture=dict.fromkeys(order, 1), num_test=20).problems("test")
        for order in (names, names[::-1])
    )
    assert one == other


# ------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("answer_format", "instruction"),
    [
        ("marker", "End your response with 'Answer:' and then the final answer alone."),
        ("tags", "Give the final answer between <answer> and </answer>."),
        ("whole", "Respond with the final answer alone."),
    ],
)
def test_prompts_are_question_and_instruction(answer_format, instruction):
    task = small("chain_sum", answer_format=answer_format, settings={"max_terms": 2})
    for problem in task.problems("test"):
        question, rest = problem.prompt.split("\n\n")
        assert question.startswith("State the final answer to the following arithmetic problem:")
        assert rest == f"{instruction}\n"


def test_the_marker_can_be_chosen():
    task = small("gcd", marker="####")
    assert "End your response with '####' and then" in task.problems("test")[0].prompt
    assert task.final_answer("Answer: 1\n#### 2") == "2"


@pytest.mark.parametrize(
    ("answer_format", "response", "answer"),
    [
        ("marker", "Answer: 7", "7"),
        ("marker", "7 or 8?\nAnswer:\n 7 \n", "7"),
        ("marker", "Answer: 6. No, Answer: 7", "7"),
        ("marker", "Answer: 1 2\n3 4", "1 2\n3 4"),
        ("marker", "answer: 7", None),
        ("marker", "7", None),
        ("marker", "Answer: 7 Answer:", None),
        ("marker", "", None),
        ("tags", "<answer>7</answer>", "7"),
        ("tags", "so <answer>\n7\n</answer>, I think", "7"),
        ("tags", "<answer>6</answer><answer>7</answer>", "7"),
        ("tags", "<answer>6<answer>7</answer>", "7"),
        ("tags", "<answer>6</answer> <answer>7", "6"),
        ("tags", "<answer>7", None),
        ("tags", "7</answer>", None),
        ("tags", "</answer>7<answer>", None),
        ("tags", "<answer> </answer>", None),
        ("tags", "Answer: 7", None),
        ("whole", " 7\n", "7"),
        ("whole", "Answer: 7", "Answer: 7"),
        ("whole", " \n", None),
    ],
)
def test_what_the_answer_is(answer_format, response, answer):
    task = small("gcd", answer_format=answer_format)
    assert final_answer(task, response) == answer
    [problem] = [
        Problem(prompt_id=0, prompt="", answer=p.answer) for p in task.problems("test")[:1]
    ]
    [parts] = task.score([problem], [response])
    assert isinstance(parts, Unparsed) == (answer is None)


def test_extraction_takes_linear_time():
    text = "<answer>" * 100_000 + "</answer>" * 100_000 + "Answer:" * 100_000
    start = time.process_time()
    for answer_format in INSTRUCTIONS:
        small("gcd", answer_format=answer_format).final_answer(text)
    assert time.process_time() - start < 2.0


def test_gold_answers_of_saved_responses_are_checked():
    task = small("gcd")
    [problem] = task.problems("test")[:1]
    assert gold_answer(task, problem.answer) == problem.answer
    other = small("lcm").problems("test")[0].answer
    for bad, says in (
        ("12", "not a gold answer of reasoning_gym"),
        ("[" * 100_000, "not a gold answer"),
        ('{"dataset": "gcd", "answer": "3"}', "not a gold answer"),
        (other, "of the data set 'lcm', which is none of the task's"),
    ):
        with pytest.raises(ValueError, match=says):
            gold_answer(task, bad)
        with pytest.raises(ValueError, match=says):
            task.score([Problem(prompt_id=0, prompt="", answer=bad)], ["Answer: 3"])


def test_score_refuses_unequal_lengths():
    task = small("gcd")
    with pytest.raises(ValueError):
        task.score(task.problems("test")[:1], ["Answer: 1", "Answer: 2"])


# ------------------------------------------------------------------------- verifiers

# Data sets whose entries have a gold answer and take milliseconds to make.
GOLD = """
    ab acre advanced_geometry aiw base_conversion basic_arithmetic binary_alternation binary_matrix
    bitwise_arithmetic caesar_cipher calendar_arithmetic chain_sum circuit_logic coin_flip
    color_cube_rotation complex_arithmetic count_bits count_primes countdown course_schedule
    cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships
    fraction_simplification game_of_life gcd group_anagrams gsm_symbolic
    isomorphic_strings jugs knights_knaves lcm leg_counting
    letter_counting letter_jumble list_functions manipulate_matrix mini_sudoku n_queens
    number_filtering number_format number_sequence number_sorting palindrome_generation
    palindrome_partitioning path_star polynomial_equations polynomial_multiplication pool_matrix
    power_function prime_factorization products quantum_lock ransom_note rearc
    rotate_matrix shortest_path simple_equations simple_geometry simple_integration spell_backward
    spiral_matrix string_insertion string_manipulation syllogism time_intervals tower_of_hanoi
    word_ladder word_sequence_reversal word_sorting
""".split()


# Verifiers that read the first number, fraction or names of an answer, or its first letters.
LENIENT = """
    fraction_simplification gsm_symbolic knights_knaves letter_jumble polynomial_equations
    spell_backward time_intervals
""".split()


SLOW = pytest.param("intermediate_integration", marks=pytest.mark.slow)  # sympy integrates


@pytest.mark.parametrize("dataset", [*GOLD, SLOW])
def test_gold_answers_are_right_and_others_wrong(dataset):
    task = small(dataset, num_test=6)
    problems = task.problems("test")
    for problem in problems:
        if "Integral" in gold(problem):
            continue  # what the package could not solve it gives back as it is
        assert rewards(task, problem, gold(problem)) == [1.0], problem
        assert is_correct({"verifier": 1.0})
        others = {gold(other) for other in problems} - {gold(problem)}
        wrong = [*sorted(others)[:1], "I do not know"]
        if dataset not in LENIENT:
            wrong.append(f"{gold(problem)} or not {gold(problem)}")
        for answer, reward in zip(wrong, rewards(task, problem, *wrong), strict=True):
            assert reward < 1.0 or answer in others, (problem, answer)


def test_metadata_comes_back_as_it_was():
    values = {
        "grid": ((1, 2), (3, 4)),
        "pegs": {1: [3, (2,)], 2: []},
        "names": {"b", "a"},
        "!odd": {"!tuple": 1},
        "none": [None, True, 1.5, "x"],
    }
    carried = json.loads(json.dumps(reasoning_gym._encode(values)))
    assert reasoning_gym._decode(carried) == values
    assert reasoning_gym._encode({"a": np.int64(3), "b": Fraction(1, 3)}) == {"a": 3, "b": "1/3"}


@pytest.mark.parametrize(
    ("dataset", "answer"), [("complex_arithmetic", "nan"), ("number_sorting", "[NaN, NaN, NaN]")]
)
def test_nan_is_no_right_answer(dataset, answer):
    task = small(dataset, num_test=20)
    for problem in task.problems("test"):
        length = len(ast.literal_eval(gold(problem))) if dataset == "number_sorting" else 1
        [parts] = task.score(
            [problem],
            [respond(task, "[" + ", ".join(["NaN"] * length) + "]" if length > 1 else answer)],
        )
        assert parts == {"verifier": 0.0} and isinstance(parts, Unparsed)


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("rubiks_cube", "R99999999999"),
        ("rush_hour", "A+99999999999"),
        ("coin_flip", "1e999999999"),
        ("countdown", "9**9**9**9"),
        ("polynomial_multiplication", "9**9**9**9"),
        ("polynomial_multiplication", "(x**99)**99**99"),
        ("simple_integration", "9**(9**9)"),
        ("binary_matrix", "[" * 5000),
        ("n_queens", "9**9**9**9"),
    ],
)
def test_answers_that_would_take_for_ever_do_not(dataset, answer):
    task = small(dataset, num_test=1)
    [problem] = task.problems("test")
    start = time.process_time()
    [reward] = rewards(task, problem, answer)
    assert reward < 0.1 and time.process_time() - start < 2.0


RAISING = [
    "prime_factorization",
    "boxnet",
    "rubiks_cube",
    "knights_knaves",
    "tower_of_hanoi",
    "gcd",
]


@pytest.fixture(scope="module")
def raising() -> list[tuple[ReasoningGym, Problem]]:
    tasks = [small(dataset, num_test=1, answer_format="whole") for dataset in RAISING]
    return [(task, task.problems("test")[0]) for task in tasks]


@given(st.text(max_size=60) | st.text(alphabet='[]{}()"+-*/ ,:0123456789eEx', max_size=60))
@settings(max_examples=60, deadline=None)
def test_score_never_raises(raising, text):
    for task, problem in raising:
        [parts] = task.score([problem], [text])
        assert 0.0 <= parts["verifier"] <= 1.0


# ------------------------------------------------------------------------- nothing is evaluated

EVALUATING = [
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens"),
    *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
]


def package_dataset(name: str):
    import reasoning_gym as package

    return package.create_dataset(name, seed=0, size=5)


@pytest.mark.parametrize("dataset", EVALUATING)
def test_an_answer_is_never_evaluated(dataset, tmp_path):
    mark = tmp_path / "mark"
    attack = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    task = small(dataset, num_test=1, answer_format="whole")
    [problem] = task.problems("test")
    task.score([problem], [attack])
    assert not mark.exists()
    # The package's own verifier does evaluate it: else this test would show nothing.
    original = package_dataset(dataset)
    original.score_answer(attack, original[0])
    assert mark.exists()


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        ("bitwise_arithmetic", ("metadata", "problem")),
        ("number_sorting", ("answer",)),
        ("intermediate_integration", ("metadata", "integrand")),
        ("simple_integration", ("metadata", "integrand")),
        ("polynomial_multiplication", ("answer",)),
    ],
)
def test_a_gold_answer_from_a_file_is_never_evaluated(dataset, where, tmp_path):
    mark = tmp_path / "mark"
    attack = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    task = small(dataset, num_test=1, answer_format="whole")
    fields = json.loads(task.problems("test")[0].answer)
    inner = fields
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = attack
    task.score([Problem(prompt_id=0, prompt="", answer=json.dumps(fields))], ["[1, 2]", "x"][:1])
    assert not mark.exists()
    package_dataset(dataset).score_answer("[1, 2]" if dataset == "number_sorting" else "1", fields)
    assert mark.exists()


def test_the_package_evaluates_where_it_did_when_it_was_reviewed():
    import reasoning_gym as package

    names = {"eval", "exec", "parse_expr", "sympify", "__import__", "import_module", "system"}
    found = set()
    root = Path(package.__file__).parent
    for path in root.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call):
                        called = getattr(call.func, "id", getattr(call.func, "attr", None))
                        if called in names:
                            found.add(f"{path.relative_to(root)} {function.name}")
    assert found == {
        # verifiers, which `_readers` names
        "algebra/intermediate_integration.py score_answer",
        "algebra/polynomial_multiplication.py score_answer",
        "algebra/simple_integration.py score_answer",
        "algorithmic/binary_matrix.py score_answer",
        "algorithmic/number_sorting.py score_answer",
        "algorithmic/spiral_matrix.py score_answer",
        "algorithmic/string_insertion.py score_answer",
        "arithmetic/bitwise_arithmetic.py verify_solution",
        "games/countdown.py score_answer",
        "games/n_queens.py score_answer",
        "games/puzzle24.py score_answer",
        # generators, of text that they wrote themselves
        "arithmetic/basic_arithmetic.py eval_floordiv",
        "arithmetic/bitwise_arithmetic.py generate_problem",
        "arithmetic/gsm_symbolic/generators_00_49.py generate_32",
        "arithmetic/gsm_symbolic/generators_00_49.py generate_example",
        "arithmetic/gsm_symbolic/generators_50_99.py generate_69",
        "arithmetic/gsm_symbolic/generators_50_99.py generate_from_variables",
        # runs the programs of its data file: refused
        "code/codeio.py _generate_io_pair",
        # a grammar of its own, of that name
        "logic/propositional_logic.py from_string",
        "logic/propositional_logic.py parse_expr",
    }


def test_countdown_is_scored_as_the_package_does():
    task = small("countdown", num_test=4, answer_format="whole")
    original = package_dataset("countdown")
    rng = random.Random(0)

    def expression(numbers: list[int]) -> str:
        if len(numbers) == 1:
            return str(numbers[0])
        cut = rng.randrange(1, len(numbers))
        left, right = expression(numbers[:cut]), expression(numbers[cut:])
        text = f"{left}{rng.choice([' ', ''])}{rng.choice('+-*/')} {right}"
        return rng.choice([f"({text})", text, f"-({text})"])

    seen = Counter()
    for problem in task.problems("test"):
        _, entry = task._read_gold(problem.answer)
        numbers = entry["metadata"]["numbers"]
        answers = [expression(rng.sample(numbers, k=len(numbers))) for _ in range(20)]
        answers += [
            expression(numbers[:-1]),
            f"{gold(problem)} = 3",
            "1/0",
            "(",
            "1 2",
            gold(problem),
        ]
        for answer in answers:
            [reward] = rewards(task, problem, answer)
            assert reward == original.score_answer(answer, entry), answer
            seen[reward] += 1
    assert set(seen) == {0.01, 0.05, 1.0}


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        ("read_arithmetic", " (7 + 1) * 3 / 2", Fraction(12)),
        ("read_arithmetic", "-7/2", Fraction(-7, 2)),
        ("read_arithmetic", "2**3", None),
        ("read_arithmetic", "7.5", None),
        ("read_arithmetic", "True", None),
        ("read_arithmetic", "'a'", None),
        ("read_arithmetic", "x", None),
        ("read_arithmetic", "abs(1)", None),
        ("read_arithmetic", "1;2", None),
        ("read_arithmetic", "1 if 1 else 2", None),
        ("read_arithmetic", "1\x00", None),
        ("read_arithmetic", "1+" * 400 + "1", Fraction(401)),
        ("read_arithmetic", "1+" * 600 + "1", None),
        ("read_arithmetic", "", None),
        ("read_integer", "((0x10 + 2) << 1) >> 2", 9),
        ("read_integer", "1 << 99999999999", None),
        ("read_integer", "1 / 2", None),
        ("read_fraction", "3/8", Fraction(3, 8)),
        ("read_fraction", "1.5e-2", Fraction(3, 200)),
        ("read_fraction", "1e999", None),
        ("read_literal", "[1, 'a']", [1, "a"]),
        ("read_literal", "[1 + a]", None),
        ("read_literal", "f()", None),
        ("read_formula", "x.y", None),
        ("read_formula", "[x]", None),
        ("read_formula", "lambda x: x", None),
        ("read_formula", "open(x)", None),
        ("read_formula", "sin(x, x)", None),
        ("read_formula", "sin(x=x)", None),
        ("read_formula", "9**9**9", None),
        ("read_formula", "2.5**1e9", None),
        ("read_formula", "(x + 1)**1000", None),
    ],
)
def test_readers(reader, text, value):
    read = getattr(reasoning_gym, reader)
    if value is None:
        with pytest.raises((ValueError, SyntaxError)):
            read(text)
    else:
        assert read(text) == value


@pytest.mark.parametrize(
    "text",
    ["2*x**2 - 3*x/4 + C", "x**(3/2)*sqrt(x)", "exp(2*x)*sin(3*x + 1)/7", "log(x)**2", "-x*y**3",
     "E**x + pi", "0.5*x", "(x + 1)*(x - 1)", "asin(2*x)/2", "2**(1/2)", "--x"],
)  # fmt: skip
def test_formulas_are_read_as_sympy_does(text):
    import sympy

    local = {"x": sympy.Symbol("x"), "C": sympy.Symbol("C")}
    read = reasoning_gym.read_formula(text, local_dict=local)
    assert read == sympy.parse_expr(text, local_dict=local)


# ------------------------------------------------------------------------- every process alike


def test_problems_are_the_same_in_every_process():
    # Python orders sets of texts by a number that each process draws.
    code = (
        "import hashlib, json, sys\n"
        "from tasks.reasoning_gym import ReasoningGym\n"
        "names = ['gsm_symbolic', 'letter_counting', 'list_functions', 'countdown']\n"
        "task = ReasoningGym(mixture=dict.fromkeys(names, 1), num_test=30)\n"
        "text = json.dumps([p.prompt + p.answer for p in task.problems('test')])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and digests != {""}
