"""Reasoning Gym: generated problems of a hundred kinds, each with a verifier (arXiv 2505.24760).

`task=reasoning_gym task.dataset=gcd` is one of its data sets, `task.mixture={gcd: 2, lcm: 1}`
several by weight. Problems, difficulty settings and verifiers are the package's; this file makes
the splits, words the prompts and finds the answer in a response.

Some of the package's verifiers evaluate the answer as Python. None does here: they run with other
readers of text in place of `eval` and of sympy's parser (`_readers`). The package can still be slow
over an odd answer, so `score` wants a process with a time limit (`rewards.py`).
"""

import ast
import dataclasses
import difflib
import importlib
import importlib.metadata
import itertools
import json
import operator
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any, Literal, get_args

from tasks.task import Problem, Split, Unparsed

AnswerFormat = Literal["marker", "tags", "whole"]

INSTRUCTIONS = {
    "marker": "End your response with '{marker}' and then the final answer alone.",
    "tags": "Give the final answer between <answer> and </answer>.",
    "whole": "Respond with the final answer alone.",
}

# The release whose verifiers were read for `_readers`, `_REFUSED` and `_UNREADABLE`.
REVIEWED = "0.1.25"

_REFUSED = {
    "composite": "is a mixture itself: set task.mixture",
    "codeio": "makes its problems by running programs that a language model wrote",
    "game_of_life_halting": "has a verifier that takes every answer for right",
    "puzzle24": "has a verifier that takes any four numbers which make 24, whatever the given ones",
}

# Answers that a verifier takes for right though they are not (comparisons with nan are false), or
# whose repeat counts it carries out one by one.
_UNREADABLE = {
    "complex_arithmetic": re.compile("nan", re.IGNORECASE),
    "number_sorting": re.compile("nan", re.IGNORECASE),
    "rubiks_cube": re.compile(r"\d{4}"),
    "rush_hour": re.compile(r"\d{4}"),
}

_CHUNK = 2000  # problems of one seed of the package
# Draws in a row without a new problem before a data set counts as used up; one that fails, which
# can take the package a second, counts for many.
_PATIENCE = 1000
_FAILURE = 50
_MAX_EXPRESSION = 1000  # characters; a longer one is not read


@dataclass(slots=True, kw_only=True)
class ReasoningGym:
    """Problems of Reasoning Gym; the reward is the verifier's score, 1 for a right answer.

    Most verifiers give a wrong answer something too (0.01 for one that can be read, a share for
    parts that are right), and some read the first number of an answer and no further, so that more
    after it costs nothing: see the package.

    Attributes:
        dataset: name of one data set; or
        mixture: name -> weight of several.
        settings: the data set's own settings, as in its config class ({max_value: 50}); with a
            mixture, name -> settings.
        allow: names to take although this file refuses them (`_REFUSED` says why).
        num_train: training problems, all distinct and none a test problem.
        num_test: test problems, all distinct; they don't depend on `num_train`.
        seed: decides the problems of both splits.
        answer_format: what is the answer in a response: 'marker', all that follows the last
            `marker`; 'tags', between the last <answer> and </answer>; 'whole', all of it. Spaces
            around it are dropped. The prompt ends with the instruction (`INSTRUCTIONS`).
        marker: text before the answer.
        chat: wrap the prompt with the tokenizer's chat template.
        max_prompt_tokens: some data sets have far longer prompts, see `task.long_prompts`.
        max_response_tokens: room for an answer and some words before it.

    Raises:
        ValueError: a name, setting or weight that can't be, or no package.
    """

    dataset: str | None = None
    mixture: Mapping[str, float] | None = None
    settings: Mapping[str, Any] | None = None
    allow: Sequence[str] = ()
    num_train: int = 5000
    num_test: int = 500
    seed: int = 0
    answer_format: AnswerFormat = "marker"
    marker: str = "Answer:"
    chat: bool = False
    max_prompt_tokens: int = 512
    max_response_tokens: int = 512
    name: str = field(default="reasoning_gym", init=False)
    answer_rule: str = field(default="", init=False)
    _weights: dict[str, float] = field(init=False, repr=False)
    _settings: dict[str, dict[str, Any]] = field(init=False, repr=False)
    _verifiers: dict[str, Callable[[str, dict[str, Any]], float]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.answer_format not in get_args(AnswerFormat):
            raise ValueError(
                f"task.answer_format={self.answer_format!r}: must be one of "
                f"{', '.join(get_args(AnswerFormat))}"
            )
        if not self.marker.strip():
            raise ValueError("task.marker is blank: write the text before the answer, as 'Answer:'")
        for key in ("num_train", "num_test"):
            if getattr(self, key) < 1:
                raise ValueError(f"task.{key}={getattr(self, key)}: must be at least 1")
        known = _known_datasets()
        self._weights = self._read_weights(known)
        self._settings = self._read_settings()
        self._verifiers = {
            name: _verifier(name, _create(name, settings, key=self._key(name), seed=0, size=10))
            for name, settings in self._settings.items()
        }
        self.answer_rule = f"reasoning_gym {REVIEWED}, {self.answer_format}"

    def _read_weights(self, known: Sequence[str]) -> dict[str, float]:
        """Name -> weight, by name: the order they are written in must not matter."""
        if (self.dataset is None) == (self.mixture is None):
            raise ValueError(
                "task.dataset and task.mixture: set one of the two, as task.dataset=gcd or "
                f"task.mixture={{gcd: 2, lcm: 1}}; the data sets are {', '.join(known)}"
            )
        weights = _plain(self.mixture) if self.mixture is not None else {self.dataset: 1.0}
        where = "task.dataset" if self.mixture is None else "task.mixture"
        if not isinstance(weights, dict) or not weights:
            raise ValueError(f"{where}={weights!r}: write it as {{gcd: 2, lcm: 1}}")
        for name, weight in weights.items():
            if name in _REFUSED and (name == "composite" or name not in self.allow):
                able = "" if name == "composite" else f"; task.allow=[{name}] takes it all the same"
                raise ValueError(f"{where}: {name!r} {_REFUSED[name]}{able}")
            if name not in known:
                raise ValueError(f"{where}: no data set {name!r}{_nearest(name, known)}")
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not 0 < weight < float("inf"):
                raise ValueError(f"{where}.{name}={weight!r}: a weight must be a positive number")
        return {name: float(weights[name]) for name in sorted(weights)}

    def _read_settings(self) -> dict[str, dict[str, Any]]:
        settings = _plain(self.settings or {})
        if self.mixture is None:
            settings = {self.dataset: settings}
        for name, own in settings.items():
            if name not in self._weights:
                raise ValueError(
                    f"task.settings.{name}: with a mixture, settings are written by data set, and "
                    f"{name!r} is none of {', '.join(self._weights)}"
                )
            if not isinstance(own, dict):
                raise ValueError(f"{self._key(name)}={own!r}: write it as {{key: value}}")
        return {name: settings.get(name, {}) for name in self._weights}

    def _key(self, name: str) -> str:
        return "task.settings" if self.mixture is None else f"task.settings.{name}"

    def problems(self, split: Split) -> list[Problem]:
        """Problems of one split; `answer` is JSON: data set, its gold answer and its metadata.

        Raises:
            ValueError: an unknown split, or settings with fewer distinct problems.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r}: must be 'train' or 'test'")
        taken: set[str] = set()
        # The test split first, whichever is asked for: it stays the same, and train keeps off it.
        drawn = self._draw("test", self.num_test, taken)
        if split == "train":
            drawn = self._draw("train", self.num_train, taken)
        instruction = INSTRUCTIONS[self.answer_format].replace("{marker}", self.marker)
        return [
            Problem(
                prompt_id=prompt_id,
                prompt=f"{entry['question'].rstrip()}\n\n{instruction}\n",
                answer=_write_gold(name, entry),
            )
            for prompt_id, (name, entry) in enumerate(drawn)
        ]

    def _draw(self, split: Split, count: int, taken: set[str]) -> list[tuple[str, dict[str, Any]]]:
        """(data set, entry) of `count` problems whose questions are not in `taken`, to which they
        are added.
        """
        seed = f"{self.seed} {split}"
        rng = random.Random(seed)
        names = rng.choices(list(self._weights), list(self._weights.values()), k=count)
        with _own_randomness(seed):
            streams = {
                name: self._distinct(name, f"{seed} {name}", taken) for name in self._weights
            }
            return [(name, next(streams[name])) for name in names]

    def _distinct(self, name: str, seed: str, taken: set[str]) -> Iterator[dict[str, Any]]:
        """Entries of a data set whose questions are not in `taken`, to which they are added."""
        key, settings = self._key(name), self._settings[name]
        found = fruitless = 0
        failure: Exception | None = None
        for chunk in itertools.count():
            start = random.Random(f"{seed} {chunk}").randrange(2**31)
            dataset = _create(name, settings, key=key, seed=start, size=_CHUNK)
            for index in range(_CHUNK):
                try:
                    entry = dataset[index]
                except Exception as error:  # settings that are only sometimes possible
                    entry, failure = None, error
                if entry is not None and entry["question"] not in taken:
                    taken.add(entry["question"])
                    found, fruitless = found + 1, 0
                    yield entry
                    continue
                fruitless += _FAILURE if entry is None else 1
                if fruitless >= _PATIENCE:
                    why = f" ({failure})" if failure is not None else ""
                    raise ValueError(
                        f"{key}: {name!r} gave {found} distinct problems for this split and then "
                        f"no more{why}: lower task.num_train or task.num_test, or choose settings "
                        "with more problems"
                    )

    def gold(self, answer: str) -> str:
        """`Problem.answer` as `problems` wrote it, checked.

        Raises:
            ValueError: it is none, or of a data set that the task was not given.
        """
        self._read_gold(answer)
        return answer

    def final_answer(self, response: str) -> str | None:
        """The answer that a response gives by `answer_format`; None if it gives none.

        >>> task = ReasoningGym(dataset="gcd", answer_format="tags")
        >>> task.final_answer("3 + 4 is <answer> 7 </answer>."), task.final_answer("It is 7.")
        ('7', None)
        """
        if self.answer_format == "whole":
            answer = response
        elif self.answer_format == "marker":
            _, marker, answer = response.rpartition(self.marker)
            answer = answer if marker else ""
        else:
            before, _, _ = response.rpartition("</answer>")
            _, tag, answer = before.rpartition("<answer>")
            answer = answer if tag else ""
        return answer.strip() or None

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        """Part 'verifier': the data set's score of the answer.

        `Unparsed` and 0 where a response has no answer, or one that the verifier can't read.
        """
        return [
            self._score(problem, response)
            for problem, response in zip(problems, responses, strict=True)
        ]

    def _score(self, problem: Problem, response: str) -> dict[str, float]:
        name, entry = self._read_gold(problem.answer)
        answer = self.final_answer(response)
        if answer is None or (name in _UNREADABLE and _UNREADABLE[name].search(answer)):
            return Unparsed(verifier=0.0)
        try:
            return {"verifier": float(self._verifiers[name](answer, entry))}
        except Exception:  # verifiers raise many types over a text that they did not expect
            return Unparsed(verifier=0.0)

    def _read_gold(self, answer: str) -> tuple[str, dict[str, Any]]:
        try:
            fields = json.loads(answer)
            name, entry = fields["dataset"], {k: _decode(fields[k]) for k in ("answer", "metadata")}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"not a gold answer of reasoning_gym ({answer[:40]!r}...): expected JSON with "
                "'dataset', 'answer' and 'metadata', as task.problems gives it"
            ) from error
        if name not in self._verifiers:
            raise ValueError(
                f"the gold answer is of the data set {name!r}, which is none of the task's "
                f"({', '.join(self._verifiers)})"
            )
        return name, entry


# --------------------------------------------------------------------------- the package


def _known_datasets() -> list[str]:
    """Names of the package's data sets.

    Raises:
        ValueError: the package is missing, or another release than was reviewed.
    """
    fix = f"pip install reasoning-gym=={REVIEWED}"
    try:
        found = importlib.metadata.version("reasoning-gym")
        factory = importlib.import_module("reasoning_gym.factory")
    except (importlib.metadata.PackageNotFoundError, ImportError) as error:
        raise ValueError(
            f"task=reasoning_gym needs the package reasoning-gym ({error}): {fix}"
        ) from error
    if found != REVIEWED:
        raise ValueError(
            f"reasoning-gym {found} is installed; what its verifiers do with an answer was "
            f"reviewed for {REVIEWED} alone: {fix}"
        )
    return sorted(factory.DATASETS)


def _create(name: str, settings: Mapping[str, Any], *, key: str, seed: int, size: int) -> Any:
    """One of the package's data sets.

    Raises:
        ValueError: a setting it does not have, or refuses.
    """
    kind, config_kind = importlib.import_module("reasoning_gym.factory").DATASETS[name]
    defaults = {f.name: f for f in dataclasses.fields(config_kind)}
    for reserved, ours in (("seed", "task.seed"), ("size", "task.num_train and task.num_test")):
        if reserved in settings:
            raise ValueError(f"{key}.{reserved}: set {ours} instead")
    known = [k for k in defaults if k not in ("seed", "size")]
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"{key}: {name!r} has no setting {setting!r}{_nearest(setting, known)}"
            )
    try:
        config = config_kind(seed=seed, size=size)
        for setting, value in settings.items():
            default = getattr(config, setting)
            if dataclasses.is_dataclass(default) and not isinstance(default, type):
                value = dataclasses.replace(default, **value)  # settings of its own
            setattr(config, setting, value)
        if hasattr(config, "validate"):  # one of the package's has none
            config.validate()
        return kind(config)
    except Exception as error:  # the package asserts, and fails where types don't fit
        raise ValueError(
            f"{key}={dict(settings)}: {name!r} refuses it ({error}); it has {', '.join(known)}"
        ) from error


@contextmanager
def _own_randomness(seed: str) -> Iterator[None]:
    """Seeds the global generators, which some data sets draw from, and puts them back."""
    import numpy as np

    python, legacy = random.getstate(), np.random.get_state()
    number = random.Random(seed).randrange(2**32)
    random.seed(number)
    np.random.seed(number)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def _verifier(name: str, dataset: Any) -> Callable[[str, dict[str, Any]], float]:
    """`dataset.score_answer` with the readers of `_readers` in place of those that evaluate."""
    readers = _readers(name)
    if not readers:
        return dataset.score_answer
    method = type(dataset).score_answer
    if name == "bitwise_arithmetic":  # a function that it calls evaluates
        inner = method.__globals__["verify_solution"]
        readers = {"verify_solution": _with_globals(inner, readers)}
    return partial(_with_globals(method, readers), dataset)


def _with_globals(function: Any, replaced: Mapping[str, Any]) -> FunctionType:
    """A copy of a function that finds `replaced` where it looks for those global names."""
    assert set(replaced) <= set(function.__code__.co_names), (function, replaced)
    return FunctionType(
        function.__code__,
        {**function.__globals__, **replaced},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


# --------------------------------------------------------------------------- reading answers


def _readers(name: str) -> dict[str, Any]:
    """What a verifier's global names stand for instead, where it would evaluate an answer."""
    if name in ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"):
        return {"eval": read_literal}
    if name in ("countdown", "puzzle24"):
        return {"parse_expr": read_arithmetic}
    if name == "bitwise_arithmetic":
        return {"eval": read_integer}
    if name == "coin_flip":
        return {"Fraction": read_fraction}
    if name in ("intermediate_integration", "polynomial_multiplication", "simple_integration"):
        import sympy

        alias = "sp" if name == "polynomial_multiplication" else "sympy"
        return {alias: SimpleNamespace(**{**vars(sympy), "parse_expr": read_formula})}
    return {}


def read_literal(text: str) -> Any:
    """A Python list, text or number, without evaluating anything.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is none.
    """
    if len(text) > 10 * _MAX_EXPRESSION:
        raise ValueError("too long")
    return ast.literal_eval(text.strip())


def read_arithmetic(text: str) -> Fraction:
    """The value of whole numbers joined by + - * / and brackets.

    >>> read_arithmetic("(7 + 1) * 3 / 2")
    Fraction(12, 1)

    Raises:
        ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError: there is none.
    """

    def number(value: int | float) -> Fraction:
        if not isinstance(value, int):
            raise ValueError("not a whole number")
        return Fraction(value)

    return _read(text, number=number, operators=_ARITHMETIC)


def read_integer(text: str) -> int:
    """The value of whole numbers joined by + - * << >> and brackets.

    >>> read_integer("((0x10 + 2) << 1)")
    36

    Raises:
        As `read_arithmetic`.
    """

    def number(value: int | float) -> int:
        if not isinstance(value, int):
            raise ValueError("not a whole number")
        return value

    return _read(text, number=number, operators=_INTEGER)


def read_fraction(text: str) -> Fraction:
    """`Fraction(text)` without huge exponents: Fraction('1e999999999') takes hours.

    Raises:
        ValueError, ZeroDivisionError: it is no number.
    """
    if re.search(r"e[-+]?\d{3}", text, re.IGNORECASE):
        raise ValueError("an exponent of more than two digits")
    return Fraction(text)


def read_formula(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """The sympy expression of numbers, variables, + - * / **, brackets and `_FUNCTIONS`.

    Args:
        local_dict: name -> what it stands for; other names are variables, but E, I and pi.

    Raises:
        As `read_arithmetic`.
    """
    import sympy

    names = {"E": sympy.E, "I": sympy.I, "pi": sympy.pi, **(local_dict or {})}

    def number(value: int | float) -> Any:
        return sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)

    def name(text: str) -> Any:
        return names[text] if text in names else sympy.Symbol(text)

    def power(base: Any, exponent: Any) -> Any:
        if base.is_number and exponent.is_number:
            size = sum(int(part).bit_length() for part in base.as_numer_denom() if part.is_Integer)
            if not exponent.is_Rational or abs(exponent) * max(size, 1) > 10_000:
                raise ValueError("a power too large to write out")
        elif exponent.is_number and not abs(exponent) <= 100:
            raise ValueError("a power too large to work with")
        return base**exponent

    return _read(
        text,
        number=number,
        operators={**_ARITHMETIC, ast.Pow: power},
        name=name,
        functions={function: getattr(sympy, function) for function in _FUNCTIONS},
    )


_FUNCTIONS = (
    *("sqrt", "exp", "log", "ln", "Abs", "sin", "cos", "tan", "sec", "csc", "cot"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
)  # fmt: skip


def _shift_left(value: int, by: int) -> int:
    if by > 10_000:
        raise ValueError("a shift too far")
    return value << by


_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_INTEGER: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: _shift_left,
    ast.RShift: operator.rshift,
}


def _read(
    text: str,
    *,
    number: Callable[[int | float], Any],
    operators: Mapping[type, Callable[[Any, Any], Any]],
    name: Callable[[str], Any] | None = None,
    functions: Mapping[str, Callable[[Any], Any]] | None = None,
) -> Any:
    """The value of an expression made of what is given and of nothing else.

    Python's own parser reads it and this function walks the tree: nothing is evaluated.
    """
    if len(text) > _MAX_EXPRESSION:
        raise ValueError("too long")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parser's, on a text like '1if'
        tree = ast.parse(text.strip(), mode="eval")

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float() as constant):
                return number(constant)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return value(operand)
            case ast.BinOp(op=op, left=left, right=right) if type(op) in operators:
                return operators[type(op)](value(left), value(right))
            case ast.Name(id=text) if name is not None:
                return name(text)
            case ast.Call(func=ast.Name(id=text), args=[argument], keywords=[]):
                if functions is not None and text in functions:
                    return functions[text](value(argument))
        raise ValueError(f"{type(node).__name__} is not part of such an expression")

    return value(tree.body)


# --------------------------------------------------------------------------- gold answers


def _write_gold(name: str, entry: Mapping[str, Any]) -> str:
    fields = {key: _encode(entry[key]) for key in ("answer", "metadata")}
    return json.dumps({"dataset": name, **fields}, ensure_ascii=False)


def _encode(value: Any) -> Any:
    """What JSON can hold, from which `_decode` makes the same again: verifiers compare tuples, and
    look up keys that are numbers. Types beyond these, which no verifier reads, become text.

    >>> _encode({"moves": (1, 2), "pegs": {1: [3]}})
    {'moves': {'!tuple': [1, 2]}, 'pegs': {'!dict': [[1, [3]]]}}
    """
    if isinstance(value, Enum):
        return _encode(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {key: _encode(item) for key, item in value.items()}
        return {"!dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, tuple):
        return {"!tuple": [_encode(item) for item in value]}
    if isinstance(value, set | frozenset):  # in an order that is the same in every process
        return {"!set": sorted((_encode(item) for item in value), key=repr)}
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return _encode(value.tolist())
    return str(value)


def _decode(value: Any) -> Any:
    """The inverse of `_encode`.

    >>> _decode(_encode([{"moves": (1, 2), "pegs": {1: [3]}}]))
    [{'moves': (1, 2), 'pegs': {1: [3]}}]
    """
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "!tuple" in value:
        return tuple(_decode(item) for item in value["!tuple"])
    if "!set" in value:
        return {_decode(item) for item in value["!set"]}
    if "!dict" in value:
        return {_decode(key): _decode(item) for key, item in value["!dict"]}
    return {key: _decode(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    """Dicts and lists in place of other mappings and sequences, such as OmegaConf's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
