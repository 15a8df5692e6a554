"""GSM8K: grade-school word problems with a numeric answer (arXiv 2110.14168).

Problems come from `<data_dir>/train.jsonl` and `test.jsonl`, one JSON object a line with the text
fields `question` and `answer` (a worked solution that ends '#### 72'), or from the Hugging Face
hub. Prompts and the default grader are those of the TBA paper (arXiv 2503.18929, section 5.1 and
its reference code); the strict grader and the 'vineppo' prompt are there for comparisons with
VinePPO (arXiv 2410.01679), whose starting models were tuned on that wording.

Answers are read with regular expressions and `float` alone: no text is ever evaluated, and none
makes a grader raise.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tasks.records import read_file, read_hub, text_field
from tasks.task import Problem, Split, Unparsed

PROMPTS = {
    "paper": "[MATH TASK] Problem:\n{question}\n\nSolution:\n",
    # The response then starts with the newline.
    "vineppo": "[MATH_TASK] Problem:\n{question}\n\nSolution:",
}

_NUMBER = re.compile(r"[+-]?\d+\.\d*|[+-]?\.\d+|[+-]?\d+e[-+]?\d+|[+-]?\d+")

# Possessive quantifiers (*+): plain ones would try every way to share out a long run of spaces, and
# would give up digits until what follows fits.
_MARKED = re.compile(
    r"####[^\S\n]*+"
    # -5, -$5, $-5 and \$5 are all met; − is a minus sign that models write
    r"(?P<sign>[-+−]?)[^\S\n]*+(?:\\?[$€£¥₹])?+[^\S\n]*+(?P<inner_sign>[-+−]?)"
    r"(?P<digits>[0-9][0-9,]*+(?:\.[0-9]*+)?+|\.[0-9]++)"
    # No plain number goes on as a power, in other digit groups, or with an exponent ...
    r"(?![/^*]|[.,'’_][0-9]|[eE][-+]?[0-9])"
    # ... nor, with spaces or without, as a fraction, sum, range or time.
    r"(?![^\S\n]*+[-+−–×·/÷^:]?+[^\S\n]*+[0-9])"
)

# A calculator annotation, and the number that repeats its result behind it.
_ANNOTATION = re.compile(
    r"<<[^<>\n]*=(?P<result>[^<>=\n]*)>>(?P<repeated>[^\S\n]*+[-+$]*+[.0-9])?+"
)


def last_number(text: str) -> float | None:
    """The last number anywhere in a text, by the reference code's rule; None without a number.

    Commas are dropped first, and a minus sign belongs to the number it touches, so '3-5' ends in
    -5. What calculator annotations hold are numbers like others. Numbers are compared as floats:
    integers beyond 2**53 may be taken for their neighbours and those beyond the range become inf.
    Gold answers are far below both.

    >>> last_number("so 1,234.50 in all."), last_number("3-5"), last_number("12."), last_number("")
    (1234.5, -5.0, 12.0, None)
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


def marked_number(text: str) -> float | None:
    r"""The number after the first '####' that one follows on the same line, or None.

    The rule of GSM8K's own grader, whose pattern is '#### (\-?[0-9\.\,]+)', with the number read
    as a number: a sign, a currency symbol, spaces, thousands commas and a trailing dot or decimal
    zeros are allowed, and words may follow ('#### $1,200.00 dollars' is 1200). A fraction, a power,
    a range, a sum or scientific notation is not a plain number and does not count, where that
    pattern would take the digits in front. Calculator annotations stand for their results. Digits
    are ASCII. Later '####' are ignored, so listing many candidates earns nothing.

    >>> marked_number("#### 1,200."), marked_number("#### -$5"), marked_number("the answer is 5")
    (1200.0, -5.0, None)
    >>> marked_number("#### 1/2"), marked_number("#### <<48/2=24>>24"), marked_number("#### 20%")
    (None, 24.0, 20.0)
    """
    text = _ANNOTATION.sub(lambda match: match["repeated"] or match["result"], text)
    match = _MARKED.search(text)
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    value = float(match["digits"].replace(",", ""))
    negative = (match["sign"] or match["inner_sign"]) in ("-", "−")
    return -value if negative else value


@dataclass(slots=True, kw_only=True)
class GSM8K:
    """GSM8K with a reward of 1 for a numerically right final answer, else 0.

    Attributes:
        data_dir: folder with train.jsonl and test.jsonl; None loads openai/gsm8k ('main') with
            the datasets library.
        answer_rule: 'last_number', the paper's (`last_number`), or 'strict' (`marked_number`).
            Accuracies under the two are not comparable.
        prompt_format: 'paper' or 'vineppo' (`PROMPTS`).
        chat: wrap the prompt with the tokenizer's chat template.
        max_prompt_tokens: the reference code asserts 256 for the training prompts.
        max_response_tokens: as in the paper, Table 2.

    Raises:
        ValueError: an unknown rule or format, or a data_dir without the two files.
    """

    data_dir: str | None = None
    answer_rule: Literal["last_number", "strict"] = "last_number"
    prompt_format: Literal["paper", "vineppo"] = "paper"
    chat: bool = False
    max_prompt_tokens: int = 256
    max_response_tokens: int = 512
    name: str = field(default="gsm8k", init=False)
    reward_range: tuple[float, float] = field(default=(0.0, 1.0), init=False)

    def __post_init__(self) -> None:
        if self.answer_rule not in ("last_number", "strict"):
            raise ValueError(
                f"task.answer_rule={self.answer_rule!r}: must be 'last_number' or 'strict'"
            )
        if self.prompt_format not in PROMPTS:
            raise ValueError(
                f"task.prompt_format={self.prompt_format!r}: must be one of {sorted(PROMPTS)}"
            )
        # Both files are looked for at once: a wrong folder should fail before a model loads.
        if self.data_dir is not None:
            for split in ("train", "test"):
                path = Path(self.data_dir) / f"{split}.jsonl"
                if not path.is_file():
                    raise ValueError(
                        f"task.data_dir={self.data_dir}: no file {path}; point task.data_dir to "
                        "a folder with GSM8K's train.jsonl and test.jsonl, or leave it unset to "
                        "load openai/gsm8k from the Hugging Face hub"
                    )

    def problems(self, split: Split) -> list[Problem]:
        """Problems of one split in the files' order; `answer` is the text after '####'.

        Raises:
            ValueError: a line that is not JSON, lacks a field or has no final answer (the file
                and line are named), or a hub that can't be reached.
        """
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r}: must be 'train' or 'test'")
        if self.data_dir is None:
            fix = "set task.data_dir to a folder with GSM8K's train.jsonl and test.jsonl"
            rows = read_hub("openai/gsm8k", "main", split, fix=fix)
        else:
            rows = read_file(Path(self.data_dir) / f"{split}.jsonl")
        problems: list[Problem] = []
        for where, row in rows:
            question = text_field(where, row, "question")
            solution = text_field(where, row, "answer")
            if "####" not in solution:
                raise ValueError(
                    f"{where}: the field 'answer' must end in '#### ' and a number, "
                    f"found ...{solution[-40:]!r}"
                )
            try:
                answer = self.gold(solution)
            except ValueError as error:
                raise ValueError(f"{where}: the field 'answer': {error}") from error
            prompt = PROMPTS[self.prompt_format].replace("{question}", question)
            problems.append(Problem(prompt_id=len(problems), prompt=prompt, answer=answer))
        if not problems:
            raise ValueError(f"task.data_dir={self.data_dir}: the {split} split has no problems")
        return problems

    def gold(self, answer: str) -> str:
        """The bare final answer of a worked solution, or of what already is one.

        Raises:
            ValueError: there is no number in it: no response could be right.

        >>> GSM8K().gold("He has <<2*500=1000>>1,000.\\n#### 1,000"), GSM8K().gold("1,000")
        ('1,000', '1,000')
        """
        final = answer.rpartition("####")[2].strip()
        if last_number(final) is None:
            raise ValueError(
                "a gold answer must be a number or end in '#### ' and one, found "
                f"...{answer[-40:]!r}"
            )
        return final

    def final_answer(self, response: str) -> str | None:
        """The number that `answer_rule` reads in a response, in one spelling; None without one.

        >>> GSM8K().final_answer("so it is $1,200.00"), GSM8K().final_answer("no idea")
        ('1200.0', None)
        """
        number = self._read(response)
        return None if number is None else repr(number + 0.0)  # -0.0 is 0.0

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        """Part 'correct': 1.0 where `answer_rule` finds the gold number, else 0.0.

        A response in which it finds no number is `Unparsed`.

        Raises:
            ValueError: a problem whose gold answer is no number.
        """
        scores: list[dict[str, float]] = []
        for problem, response in zip(problems, responses, strict=True):
            gold, number = last_number(self.gold(problem.answer)), self._read(response)
            if number is None:
                scores.append(Unparsed(correct=0.0))
            else:
                scores.append({"correct": float(number == gold)})
        return scores

    def _read(self, response: str) -> float | None:
        return (last_number if self.answer_rule == "last_number" else marked_number)(response)
