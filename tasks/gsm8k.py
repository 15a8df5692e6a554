"""GSM8K: grade-school word problems with a numeric answer (arXiv 2110.14168).

Problems come from `<data_dir>/train.jsonl` and `test.jsonl`, one JSON object a line with the text
fields `question` and `answer` (a worked solution that ends '#### 72'), or from the Hugging Face
hub. Prompts and the default grader are those of the TBA paper (arXiv 2503.18929, section 5.1 and
its reference code); the strict grader and the 'vineppo' prompt are there for comparisons with
VinePPO (arXiv 2410.01679), whose starting models were tuned on that wording.

Answers are read with regular expressions and `float` alone: no text is ever evaluated, and none
makes a grader raise.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tasks.task import Problem, Split

PROMPTS = {
    "paper": "[MATH TASK] Problem:\n{question}\n\nSolution:\n",
    # The response then starts with the newline.
    "vineppo": "[MATH_TASK] Problem:\n{question}\n\nSolution:",
}

NO_ANSWER = -999999.222222  # what the reference code takes a text without a number to say

_NUMBER = re.compile(r"[+-]?\d+\.\d*|[+-]?\.\d+|[+-]?\d+e[-+]?\d+|[+-]?\d+")

# Possessive quantifiers (*+): plain ones would try every way to share out a long run of spaces.
_MARKED = re.compile(
    r"####[ \t]*+"
    r"(?P<sign>[-+]?)[ \t]*+\$?[ \t]*+(?P<inner_sign>[-+]?)"  # -5, -$5 and $-5 are all met
    r"(?P<digits>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?![0-9/^*]|[.,][0-9]|[eE][-+]?[0-9])"  # a fraction, power or exponent is no plain number
)


def last_number(text: str) -> float:
    """The last number anywhere in a text, by the reference code's rule.

    Commas are dropped first, and a minus sign belongs to the number it touches, so '3-5' ends in
    -5. Without a number the result is `NO_ANSWER`. Numbers are compared as floats: integers
    beyond 2**53 may be taken for their neighbours and those beyond the range become inf. Gold
    answers are far below both.

    >>> last_number("so 1,234.50 in all."), last_number("3-5"), last_number("12.")
    (1234.5, -5.0, 12.0)
    """
    numbers = _NUMBER.findall(text.replace(",", ""))
    return float(numbers[-1]) if numbers else NO_ANSWER


def marked_number(text: str) -> float | None:
    """The number after the first '####' that one follows on the same line, or None.

    A sign, dollar signs, spaces, thousands commas and a trailing dot are allowed and words may
    follow ('#### $1,200 dollars' is 1200); a fraction, a power or scientific notation is not a
    plain number and does not count. Digits are ASCII. Later '####' are ignored, so listing many
    candidates earns nothing.

    >>> marked_number("#### 1,200."), marked_number("#### -$5"), marked_number("the answer is 5")
    (1200.0, -5.0, None)
    """
    match = _MARKED.search(text)
    if match is None or (match["sign"] and match["inner_sign"]):
        return None
    value = float(match["digits"].replace(",", ""))
    return -value if "-" in (match["sign"], match["inner_sign"]) else value


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
            rows: Iterable[tuple[str, object]] = _read_hub(split)
        else:
            rows = _read_jsonl(Path(self.data_dir) / f"{split}.jsonl")
        problems: list[Problem] = []
        for where, row in rows:
            question, answer = _question_and_answer(where, row)
            prompt = PROMPTS[self.prompt_format].replace("{question}", question)
            problems.append(Problem(prompt_id=len(problems), prompt=prompt, answer=answer))
        if not problems:
            raise ValueError(f"task.data_dir={self.data_dir}: the {split} split has no problems")
        return problems

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        """Part 'correct': 1.0 where `answer_rule` finds the gold number, else 0.0."""
        read = last_number if self.answer_rule == "last_number" else marked_number
        # `Problem.answer` is the bare number, where both rules read the same.
        return [
            {"correct": float(read(response) == last_number(problem.answer))}
            for problem, response in zip(problems, responses, strict=True)
        ]


def _read_jsonl(path: Path) -> Iterable[tuple[str, object]]:
    """Yield ('file, line n', parsed line) for every line that isn't blank."""
    # Read by '\n' alone: str.splitlines would also cut at characters that JSON allows in text.
    with path.open(encoding="utf-8", newline="\n") as lines:
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"task.data_dir: {path}, line {number}", json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"task.data_dir: {path}, line {number}: not valid JSON ({error}); expected one "
                "object a line with the text fields 'question' and 'answer'"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"task.data_dir: {path}, near line {number + 1}: not UTF-8 text ({error}); "
                "expected an uncompressed .jsonl file"
            ) from error


def _read_hub(split: Split) -> Iterable[tuple[str, object]]:
    """Yield ('openai/gsm8k, row n', row) from the Hugging Face hub or its local cache."""
    fix = "set task.data_dir to a folder with GSM8K's train.jsonl and test.jsonl"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "task.data_dir is unset and the package datasets is not installed: pip install "
            f"datasets, or {fix}"
        ) from error
    try:
        rows = load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:  # the library raises many unrelated types when offline
        raise ValueError(
            f"task.data_dir is unset and openai/gsm8k could not be loaded from the Hugging Face "
            f"hub ({error}): {fix}"
        ) from error
    for number, row in enumerate(rows):
        yield f"openai/gsm8k, {split}, row {number}", row


def _question_and_answer(where: str, row: object) -> tuple[str, str]:
    """Check one row; return the question and the text of the final answer."""
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with the fields 'question' and 'answer', "
            f"found {type(row).__name__}"
        )
    for name in ("question", "answer"):
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"{where}: the field {name!r} must be text; found the fields {sorted(row)}"
            )
    _, marker, answer = row["answer"].rpartition("####")
    answer = answer.strip()
    if not marker or last_number(answer) == NO_ANSWER:
        raise ValueError(
            f"{where}: the field 'answer' must end in '#### ' and a number, "
            f"found ...{row['answer'][-40:]!r}"
        )
    return row["question"], answer
