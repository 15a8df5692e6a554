r"""MATH: competition problems whose final answer is boxed (arXiv 2103.03874), and its relatives.

Trains on MATH; tests on MATH-500 (arXiv 2305.20050), AMC 2023 or AIME 2024. Problems come from
`<data_dir>/train.json` and `math500.jsonl`, `amc23.jsonl`, `aime24.jsonl`, objects with the fields
`problem` and `answer`, or from the Hugging Face hub.

The answer of a response is what its last \boxed{...} holds, read with math-verify, a grammar and
sympy: no text is ever evaluated as Python. Comparing two answers can take for ever, or all memory
(9^{9^{9^9}}): `score` has no limit of its own, and math-verify's is off, because it works by
SIGALRM, which only a process's main thread can take. Score in processes that can be killed
(`rewards.py`).
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from tasks.records import not_among, read_file, read_hub, text_field
from tasks.task import Problem, Unparsed

TestSet = Literal["math500", "amc23", "aime24"]

PROMPTS = {
    # A user's message, or a text for a base model to continue.
    "plain": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    # Qwen2.5-Math's own chat template written out, as Dr. GRPO (arXiv 2503.20783) trains with.
    "qwen_boxed": (
        "<|im_start|>system\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    ),
}

_FILES = {
    "train": "train.json",
    "math500": "math500.jsonl",
    "amc23": "amc23.jsonl",
    "aime24": "aime24.jsonl",
}
# Name, split and the fields of problem and answer on the hub.
_HUB = {
    "train": ("DigitalLearningGmbH/MATH-lighteval", "train", "problem", "solution"),
    "math500": ("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    "amc23": ("math-ai/amc23", "test", "question", "answer"),
    "aime24": ("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
}

# Characters; the longest gold answer of the four sets has 159. What is longer isn't read: parsing
# takes seconds for a thousand.
_MAX_ANSWER = 500

logger = logging.getLogger("tba")


@dataclass(slots=True, kw_only=True)
class Math:
    r"""MATH with a reward of 1 for a final answer equal to the gold one, else 0.

    Attributes:
        data_dir: folder with the files named above; None loads them from the hub with the datasets
            library.
        test_set: what the split 'test' is: 'math500', 'amc23' or 'aime24'. Each is a split of its
            own too.
        prompt_format: 'plain', or 'qwen_boxed' for Qwen2.5 base models (`PROMPTS`).
        chat: wrap the prompt with the tokenizer's chat template; not with 'qwen_boxed', which holds
            one.
        max_prompt_tokens: as in arXiv 2503.18929, Table 4; a few problems of MATH with long
            drawings are longer.
        max_response_tokens: with the prompt, Table 4's model length of 3072.

    Raises:
        ValueError: an unknown set or format, chat with 'qwen_boxed', a data_dir without the files
            that training needs, or no math-verify.
    """

    data_dir: str | None = None
    test_set: TestSet = "math500"
    prompt_format: Literal["plain", "qwen_boxed"] = "plain"
    chat: bool = False
    max_prompt_tokens: int = 1024
    max_response_tokens: int = 2048
    name: str = field(default="math", init=False)
    splits: tuple[str, ...] = field(default=get_args(TestSet), init=False)
    answer_rule: str = field(default="math_verify", init=False)
    reward_range: tuple[float, float] = field(default=(0.0, 1.0), init=False)

    def __post_init__(self) -> None:
        if self.test_set not in get_args(TestSet):
            raise ValueError(
                f"task.test_set={self.test_set!r}: must be one of {', '.join(get_args(TestSet))}"
            )
        if self.prompt_format not in PROMPTS:
            raise ValueError(
                f"task.prompt_format={self.prompt_format!r}: must be one of {sorted(PROMPTS)}"
            )
        if self.chat and self.prompt_format == "qwen_boxed":
            raise ValueError(
                "task.chat=true would put a chat template around task.prompt_format=qwen_boxed, "
                "which is one: set task.chat=false, or task.prompt_format=plain"
            )
        # Imports and parsing tables take seconds: not those of the first response's time limit.
        _value("1")
        # A wrong folder should fail before a model loads.
        if self.data_dir is not None:
            for split in ("train", self.test_set):
                self._file(split)

    def problems(self, split: str) -> list[Problem]:
        """Problems of 'train', 'test' (which is `test_set`), 'math500', 'amc23' or 'aime24'.

        In the files' order. Problems without a gold answer, which no response could solve, are left
        out, and the log says how many: four of the 7,474 in the train file.

        Raises:
            ValueError: an unknown split, a file or row that can't be read (it is named), or a hub
                that can't be reached.
        """
        if split not in ("train", "test", *self.splits):
            raise ValueError(
                f"split={split!r}: must be one of train, test, {', '.join(self.splits)}"
            )
        split = self.test_set if split == "test" else split
        problems: list[Problem] = []
        dropped = 0
        for where, text, answer in self._rows(split):
            if answer is None or not answer.strip():
                dropped += 1
                continue
            try:
                gold = self.gold(answer)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            prompt = PROMPTS[self.prompt_format].replace("{problem}", text)
            problems.append(Problem(prompt_id=len(problems), prompt=prompt, answer=gold))
        if not problems:
            raise ValueError(
                f"task.data_dir={self.data_dir}: {split} has no problem with an answer"
            )
        if dropped:
            logger.info("math, %s: left out %d problems that have no gold answer", split, dropped)
        return problems

    def gold(self, answer: str) -> str:
        r"""The bare final answer of a worked solution, or of what already is one.

        Raises:
            ValueError: it is empty: no response could be right.

        >>> Math().gold("We see that $x = \\boxed{\\frac12}$."), Math().gold(" 025 ")
        ('\\frac12', '025')
        """
        boxed = last_boxed(answer)
        final = (answer if boxed is None else boxed).strip()
        if not final:
            raise ValueError("a gold answer must not be empty")
        return final

    def final_answer(self, response: str) -> str | None:
        r"""What the last box holds, without spaces and other layout; None without a box.

        >>> Math().final_answer("so \\boxed{\\left( 3,\\, 4 \\right)}."), Math().final_answer("4")
        ('(3,4)', None)
        """
        boxed = last_boxed(response)
        return None if not boxed or len(boxed) > _MAX_ANSWER else _letters(_clean(boxed))

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        r"""Part 'correct': 1.0 where the last box holds the gold answer, else 0.0.

        `Unparsed`: a response without a box, with a last box that is empty or never closed (cut by
        the length limit), or with one that can't be read. May take for ever: see the module.

        Raises:
            ValueError: a problem without a gold answer.
            Exception: whatever sympy raises at a comparison that it can't do.
        """
        scores: list[dict[str, float]] = []
        for problem, response in zip(problems, responses, strict=True):
            gold, boxed = self.gold(problem.answer), last_boxed(response)
            equal = None if boxed is None else same_answer(gold, boxed)
            scores.append(Unparsed(correct=0.0) if equal is None else {"correct": float(equal)})
        return scores

    def _rows(self, split: str) -> Iterator[tuple[str, str, str | None]]:
        """Yield (where, problem, answer as text, or None where it is null)."""
        if self.data_dir is None:
            name, hub_split, problem, answer = _HUB[split]
            fix = f"set task.data_dir to a folder with {_FILES['train']} and {_FILES[split]}"
            rows = read_hub(name, None, hub_split, fix=fix)
        else:
            problem, answer = "problem", "answer"
            rows = read_file(self._file(split))
        for where, row in rows:
            text = text_field(where, row, problem)
            assert isinstance(row, dict)
            value = row.get(answer, "")
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # AMC 2023 has 27.0 for 27
            if type(value) in (int, float):
                value = str(value)
            if answer not in row or not isinstance(value, str | None):
                found = (
                    not_among(answer, row) if answer not in row else f"is {type(value).__name__}"
                )
                raise ValueError(
                    f"{where}: the field {answer!r} must be text, a number or null, but it {found}"
                )
            if answer == "solution":
                value = last_boxed(value or "")
            yield where, text, value

    def _file(self, split: str) -> Path:
        path = Path(self.data_dir or "") / _FILES[split]
        if not path.is_file():
            raise ValueError(
                f"task.data_dir={self.data_dir}: no file {path}; point task.data_dir to a folder "
                f"with {', '.join(_FILES.values())}, or leave it unset to load the sets from the "
                "Hugging Face hub"
            )
        return path


# --------------------------------------------------------------------------- boxes

_BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?:\{|(?P<number>-?[0-9][0-9.,]*+))")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} or \fbox{...} holds; None without one that is closed.

    Braces are matched as TeX does: \{ and \} are characters. Without braces a box holds the number
    behind it. Only the last box counts, even where it is never closed: a response that was cut
    there has no answer.

    >>> last_boxed(r"first \boxed{1}, then \boxed{\frac{1}{2}} and so on}")
    '\\frac{1}{2}'
    >>> last_boxed(r"\boxed{\left\{1, 2\right.}"), last_boxed(r"\boxed{5} \boxed{6")
    ('\\left\\{1, 2\\right.', None)
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    match = _BOX.match(text, start) if start >= 0 else None
    if match is None:
        return None
    if match["number"]:
        return match["number"]
    depth = 1
    for brace in _BRACE.finditer(text, match.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[match.end() : brace.start()]
    return None


# --------------------------------------------------------------------------- equality

_TEXT = r"\\(?:text|mbox|textnormal|textrm|textbf|textit|mathrm|mathbf|rm)\s*+"
_WRAPPED = re.compile(_TEXT + r"\{([^{}]*+)\}")
_COMMAND = re.compile(_TEXT + r"\{[^{}]*+\}|\\[A-Za-z]++")
_AND = re.compile(r"(?:,\s*+)?" + _TEXT + r"\{[\s,]*+(?:and|or)[\s,]*+\}")
_LETTER = re.compile(r"[A-Za-z]")
# A unit in text mode, unless it is all there is, the imaginary unit, or half of a day.
_UNIT = re.compile(
    r"(?<=[^\s,;])\s*+" + _TEXT + r"\{(?!\s*+(?:i|[ap]\.?m\.?)\s*+\})[^{}]*+\}(?:\^\{?[0-9]\}?)?+$"
)
_UNIT_WORDS = re.compile(
    r"(?<=[0-9}])\s++(?:[A-Za-z]{2,}+|[mgshL])(?:[\s.]++[A-Za-z]++)*+(?:\^[0-9])?+$"
)
_BASE = re.compile(r"[0-9]_\{?(?P<base>[0-9]+)\}?$")
_THOUSANDS = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\!|\\,)(?=[0-9]{3}(?![0-9]))")
_SPACE = re.compile(r"(?<!\\)\\[!,;: ]|~|\s+")  # not the space behind a row's end, \\
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\s+")
_NAMES = re.compile(r"[A-Z]{3,}")
_CHOICES = re.compile(r"[a-z](?:,[a-z])+")
_TRANSLATED = str.maketrans({"−": "-", "π": "\\pi ", "∞": "\\infty ", "°": "^\\circ "})


def same_answer(gold: str, answer: str) -> bool | None:
    r"""Whether two answers are equal as texts, or by math-verify; None: `answer` can't be read.

    Layout, a unit behind a number, a currency and a percent sign don't matter; a fraction, a
    decimal and an expression of the same value are equal, sets in any order too. Numbers in
    different bases are not (52_8, 52_9). A gold answer that math-verify can't read (`_gold_value`)
    is compared as a text only.

    >>> same_answer(r"\frac{1}{2}", "0.5"), same_answer(r"18\text{ cm}", "18"), same_answer("1", "")
    (True, True, None)
    """
    if len(answer) > _MAX_ANSWER:
        return None
    gold, answer = _clean(gold), _clean(answer)
    if not answer:
        return None
    bare = answer
    if not _LETTER.search(_COMMAND.sub("", gold)):  # a number: letters behind one are its unit
        bare = _UNIT_WORDS.sub("", answer)
    if _letters(gold) in (_letters(answer), _letters(bare)):
        return True
    value = _gold_value(gold)
    if value is None:
        return False
    bases = {match["base"] for match in map(_BASE.search, (gold, answer)) if match is not None}
    if len(bases) > 1:
        return False
    found = _value(bare)
    return None if found is None else _verify(value, found)


def _clean(latex: str) -> str:
    """An answer without its layout, currency, percent sign, unit and final punctuation."""
    latex = latex.translate(_TRANSLATED).strip()
    latex = re.sub(r"\\?[$€£¥]|\\?%", "", latex)
    latex = _SPACE.sub(" ", _AND.sub(", ", _THOUSANDS.sub("", latex))).strip()
    latex = re.sub(r"\\frac\s*(\\[A-Za-z]+)\s*([0-9])", r"\\frac{\1}{\2}", latex)
    latex = re.sub(r"^(?:\\approx(?![A-Za-z])|=)\s*", "", latex)
    latex = latex.rstrip("., ;")
    return _UNIT.sub("", latex).rstrip("., ;")


def _letters(clean: str) -> str:
    """Its letters, for a comparison as texts: no spaces, no wrappers, small letters."""
    clean = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", _WRAPPED.sub(r"\1", clean))
    text = _LAYOUT.sub("", clean).rstrip(".,;").lower()
    # A list of letters names choices, in any order.
    return ",".join(sorted(text.split(","))) if _CHOICES.fullmatch(text) else text


@lru_cache(maxsize=32_768)  # more than all four sets; a gold answer is compared many times
def _gold_value(clean: str) -> Any | None:
    """The sympy value of a gold answer; None where math-verify can't read or compare it."""
    if _NAMES.fullmatch(clean):
        return None  # points or choices in order, not a product
    value = _value(clean)
    try:
        return value if value is not None and _verify(value, value) else None
    except Exception:  # e.g. 05:00, a time, read as a division by zero
        return None


def _value(clean: str) -> Any | None:
    """The sympy value of an answer, or None."""
    parse, _, extraction = _math_verify()
    found = parse(
        f"${clean}$",
        extraction_config=[extraction],
        fallback_mode="no_fallback",  # not the text itself
        extraction_mode="first_match",  # not a part of it
        parsing_timeout=None,
        raise_on_error=True,
    )
    return found[0] if found else None


def _verify(gold: Any, found: Any) -> bool:
    _, verify, _ = _math_verify()
    return verify(gold, found, timeout_seconds=None, raise_on_error=True)


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any, Any]:
    """math-verify's `parse` and `verify` and how to parse; imported at the first use."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        # The extra names the ANTLR that Hydra needs: another one breaks its command line.
        raise ValueError(
            f"task=math compares answers with the package math-verify ({error}): pip install "
            "'math-verify[antlr4_9_3]'"
        ) from error
    # It warns that its time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    normalization = NormalizationConfig(
        basic_latex=True,
        units=False,  # takes the t of 'a + b + t' for a unit
        malformed_operators=True,
        nits=True,
        boxed="none",
        equations=False,
    )
    extraction = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
    return parse, verify, extraction
