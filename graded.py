"""Graded responses: the record, its JSON lines, and what they say of a model.

A file of them is what `evaluate.py` leaves, and what it reads to grade saved responses anew. Any
other JSONL with the fields `answer` and `response` is read too: further fields are kept.
"""

from __future__ import annotations

import inspect
import json
import os
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from estimates import intervals, pass_at_k, powers_of_two
from rewards import Scored
from tasks.task import (
    Problem,
    Task,
    final_answer,
    gold_answer,
    has_right_answers,
    is_correct,
)

DECODINGS = ("greedy", "sampled", "given")


@dataclass(slots=True, kw_only=True)
class Graded:
    """One response and its grade."""

    prompt_id: int  # which problem it answers
    decoding: str  # greedy | sampled | given (by a file that does not say)
    sample: int  # from 0, of the responses to that problem with that decoding
    prompt: str  # before any chat template
    answer: str  # gold, as the task's `score` reads it
    response: str
    response_tokens: int | None  # with the end-of-text token; None: unknown
    truncated: bool | None  # the length limit came before an end of text; None: unknown
    reward: float
    parts: dict[str, float]  # they sum to the reward
    status: str  # ok | unparsed | timeout | error | nan | crash
    reason: str  # of a status that is not ok, else empty
    measures: dict[str, float]  # what else the task measures of it (`Task.measure`)

    @property
    def graded(self) -> bool:
        """Whether its parts are the task's, not the penalty for scoring that failed."""
        return self.status in ("ok", "unparsed")


@dataclass(slots=True, kw_only=True)
class Batch:
    """Responses that were generated together, or saved; all lists are as long."""

    problems: list[Problem]
    decodings: list[str]
    samples: list[int]  # from 0, of the responses to that problem with that decoding
    texts: list[str]
    facts: dict[str, list[Any]]  # some of `rewards.FACTS`


def grade(task: Task, batch: Batch, scored: Sequence[Scored]) -> list[Graded]:
    """Records of responses that were scored, with what else the task measures of them."""
    unknown = [None] * len(scored)
    return [
        Graded(
            prompt_id=problem.prompt_id,
            decoding=decoding,
            sample=sample,
            prompt=problem.prompt,
            answer=problem.answer,
            response=text,
            response_tokens=num_tokens,
            truncated=truncated,
            reward=score.reward,
            parts=score.parts,
            status=score.status,
            reason=score.reason,
            measures=measures,
        )
        for problem, decoding, sample, text, num_tokens, truncated, score, measures in zip(
            batch.problems,
            batch.decodings,
            batch.samples,
            batch.texts,
            batch.facts.get("num_tokens", unknown),
            batch.facts.get("truncated", unknown),
            scored,
            measure(task, batch),
            strict=True,
        )
    ]


def measure(task: Task, batch: Batch) -> list[dict[str, float]]:
    """What the task measures of each response besides its reward (`tasks.task.Task`)."""
    method = getattr(task, "measure", None)
    if method is None:
        return [{} for _ in batch.texts]
    taken = inspect.signature(method).parameters
    facts = {name: values for name, values in batch.facts.items() if name in taken}
    return method(batch.problems, batch.texts, **facts)


# --------------------------------------------------------------------------- JSON lines


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line; the file appears whole or not at all.

    Raises:
        OSError: it can't be written.
    """
    # ASCII: half a surrogate pair, which a response may hold, comes through too
    write_whole(path, (json.dumps(row) + "\n" for row in rows))


def write_whole(path: Path, pieces: Iterable[str]) -> None:
    """Writes a text file that appears whole or not at all, and its folder.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(pieces)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and fields of every line of saved responses that is not blank.

    `response` must be text; `answer` text or a number, which becomes text. All else is kept as it
    is.

    Raises:
        ValueError: a line that is no such object, or none at all; file and line are named.
    """
    rows = []
    try:
        with path.open("rb") as lines:  # by b'\n' alone: text may hold other line separators
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        rows.append((number, _fields(line)))
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
    if not rows:
        raise ValueError(
            f"{path} is empty: write one JSON object a line with the fields 'answer' and 'response'"
        )
    return rows


def _fields(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): write one object on every line") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"expected an object with the fields 'answer' and 'response', found {reprlib.repr(row)}"
        )
    for name, kinds in (("answer", (str, int, float)), ("response", (str,))):
        value = row.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            what = f"is {reprlib.repr(value)}" if name in row else f"is not among {sorted(row)}"
            raise ValueError(f"the field {name!r} must be text, but it {what}")
    return row


def saved_responses(path: Path, task: Task) -> tuple[list[dict[str, Any]], Batch]:
    """The lines of a file as they are, and what is to be graded of them.

    Lines with the same `prompt_id` answer the same problem, if every line has one; else each is a
    problem of its own. `truncated` and `response_tokens` count where every line has them.

    Raises:
        ValueError: a line that can't be used, with the file and its number.
    """
    lines = read_lines(path)
    rows = [row for _, row in lines]
    problems = []
    for position, (number, row) in enumerate(lines):
        try:
            answer = gold_answer(task, str(row["answer"]))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        prompt = row["prompt"] if isinstance(row.get("prompt"), str) else ""
        problems.append(Problem(prompt_id=position, prompt=prompt, answer=answer))
    if all(type(row.get("prompt_id")) is int for row in rows):
        problems = [
            replace(problem, prompt_id=row["prompt_id"])
            for problem, row in zip(problems, rows, strict=True)
        ]
    decodings = [
        row["decoding"] if row.get("decoding") in ("greedy", "sampled") else "given" for row in rows
    ]
    seen: Counter[tuple[str, int]] = Counter()
    samples = []
    for decoding, problem in zip(decodings, problems, strict=True):
        samples.append(seen[decoding, problem.prompt_id])
        seen[decoding, problem.prompt_id] += 1
    facts = {}
    for fact, name, kind in (
        ("truncated", "truncated", bool),
        ("num_tokens", "response_tokens", int),
    ):
        if all(type(row.get(name)) is kind for row in rows):
            facts[fact] = [row[name] for row in rows]
    return rows, Batch(
        problems=problems,
        decodings=decodings,
        samples=samples,
        texts=[row["response"] for row in rows],
        facts=facts,
    )


def grades(graded: Graded) -> dict[str, Any]:
    """What grading adds to a line: `reward`, `parts` and `status`, and what else there is."""
    added: dict[str, Any] = {name: getattr(graded, name) for name in ("reward", "parts", "status")}
    for name in ("reason", "measures"):
        if getattr(graded, name):
            added[name] = getattr(graded, name)
    return added


# --------------------------------------------------------------------------- what they say


def summarize(
    graded: Sequence[Graded], task: Task, *, resamples: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Figures of the responses of each decoding, with intervals over problems.

    Problems count alike, however many responses they have.

    Args:
        task: reads the final answers that are counted (`tasks.task.final_answer`).
        resamples: bootstrap draws.
        seed: of the draws.

    Returns:
        decoding -> name -> figure. An estimate is {"mean", "low", "high"}; of n responses a
        problem `average@n` is the share that is right and `pass@k` the chance that one of k is
        (`estimates.pass_at_k`); one greedy or given response a problem has an `accuracy`.
    """
    summary = {}
    for decoding in DECODINGS:
        problems: dict[int, list[Graded]] = {}
        for response in graded:
            if response.decoding == decoding:
                problems.setdefault(response.prompt_id, []).append(response)
        if problems:
            summary[decoding] = _summarize(
                list(problems.values()),
                task,
                single="average@1" if decoding == "sampled" else "accuracy",
                resamples=resamples,
                seed=seed,
            )
    return summary


def _summarize(
    problems: list[list[Graded]], task: Task, *, single: str, resamples: int, seed: int
) -> dict[str, Any]:
    responses = [response for group in problems for response in group]
    fewest, most = min(map(len, problems)), max(map(len, problems))
    values: dict[str, list[float]] = {}
    if has_right_answers(task):
        right = [sum(r.graded and is_correct(r.parts) for r in group) for group in problems]
        average = single if most == 1 else f"average@{most}" if fewest == most else "average"
        values[average] = [c / len(group) for c, group in zip(right, problems, strict=True)]
        if most > 1 or single != "accuracy":
            for k in powers_of_two(fewest):
                values[f"pass@{k}"] = [
                    pass_at_k(len(group), c, k) for c, group in zip(right, problems, strict=True)
                ]
    shares = list(values)
    values["reward"] = _means(problems, lambda r: r.reward)
    for name in sorted({name for r in responses for name in r.parts}):
        values[f"parts.{name}"] = _means(problems, lambda r, name=name: r.parts.get(name, 0.0))
    for name in responses[0].measures:
        values[name] = _means(problems, lambda r, name=name: r.measures[name])
    if most > 1:
        values["distinct_answers"] = [_distinct(group, task) for group in problems]
    if all(r.response_tokens is not None for r in responses):
        values["response_tokens"] = _means(problems, lambda r: r.response_tokens)
    values["response_characters"] = _means(problems, lambda r: len(r.response))
    if all(r.truncated is not None for r in responses):
        values["truncated"] = _means(problems, lambda r: r.truncated)
        shares.append("truncated")
    figures: dict[str, Any] = {
        "num_problems": len(problems),
        "num_responses": len(responses),
        "status": dict(sorted(Counter(r.status for r in responses).items())),
    }
    columns = {name: np.array(column, dtype=np.float64) for name, column in values.items()}
    figures |= intervals(columns, resamples=resamples, seed=seed, shares=shares)
    figures |= _of_all(responses, task)
    for name, lengths in (
        ("response_tokens", [r.response_tokens for r in responses]),
        ("response_characters", [len(r.response) for r in responses]),
    ):
        if name in figures:
            figures[name] |= _spread(lengths)
    return figures


def _of_all(responses: Sequence[Graded], task: Task) -> dict[str, float]:
    """What the task says of all responses at once."""
    method = getattr(task, "summarize", None)
    if method is None:
        return {}
    problems = [
        Problem(prompt_id=i, prompt=r.prompt, answer=r.answer) for i, r in enumerate(responses)
    ]
    return method(problems, [response.response for response in responses])


def _means(problems: list[list[Graded]], value: Any) -> list[float]:
    return [sum(float(value(r)) for r in group) / len(group) for group in problems]


def _distinct(group: list[Graded], task: Task) -> int:
    """Different answers among the responses to one problem; a response without one adds none."""
    answers = {final_answer(task, response.response) for response in group}
    return len(answers - {None})


def _spread(lengths: Sequence[Any]) -> dict[str, float]:
    median, high = np.quantile(np.array(lengths, dtype=np.float64), [0.5, 0.95]).tolist()
    return {"median": median, "p95": high, "max": float(max(lengths))}
