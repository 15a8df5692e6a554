"""Files of graded responses, odd lines among them, and figures worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graded import Batch, Graded, grade, read_lines, saved_responses, summarize, write_lines
from rewards import Scored
from tasks.gsm8k import GSM8K
from tasks.task import Problem


class Plain:
    """A task with nothing beyond what every task must have."""

    name, chat, max_prompt_tokens, max_response_tokens = "plain", False, 8, 8

    def problems(self, split: str) -> list[Problem]:
        return []

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[dict]:
        return [{"correct": float(r == p.answer)} for p, r in zip(problems, responses, strict=True)]


def graded(prompt_id: int, response: str, correct: float, **fields: Any) -> Graded:
    defaults: dict[str, Any] = {
        "decoding": "sampled",
        "sample": 0,
        "prompt": "",
        "answer": "7",
        "response_tokens": len(response) + 1,
        "truncated": False,
        "reward": correct,
        "parts": {"correct": correct},
        "status": "ok",
        "reason": "",
        "measures": {},
    }
    return Graded(prompt_id=prompt_id, response=response, **{**defaults, **fields})


def figures(responses: Sequence[Graded], task: Any = None) -> dict[str, Any]:
    return summarize(responses, task or Plain(), resamples=50, seed=0)


def mean_of(figure: dict[str, float]) -> float:
    assert figure["low"] <= figure["mean"] <= figure["high"]
    return figure["mean"]


# --------------------------------------------------------------------------- figures


def test_figures_of_samples_by_hand() -> None:
    responses = [
        graded(0, "7", 1.0),
        graded(0, " 7 ", 1.0),
        graded(0, "8", 0.0, truncated=True),
        graded(0, "123456789", 0.0, status="unparsed"),
        graded(1, "7", 1.0),
        graded(1, "9", 0.0),
        graded(1, "9", 0.0),
        graded(1, "9", 0.0),
    ]
    found = figures(responses)
    assert list(found) == ["sampled"]
    found = found["sampled"]
    assert mean_of(found["average@4"]) == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert mean_of(found["pass@1"]) == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert mean_of(found["pass@2"]) == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert mean_of(found["pass@4"]) == 1.0
    assert "pass@8" not in found and "accuracy" not in found
    assert mean_of(found["distinct_answers"]) == (3 + 2) / 2  # ' 7 ' is '7'
    assert mean_of(found["truncated"]) == 1 / 8
    assert mean_of(found["response_tokens"]) == pytest.approx((2 + 4 + 2 + 10 + 4 * 2) / 8)
    assert found["response_tokens"]["median"] == 2.0 and found["response_tokens"]["max"] == 10.0
    assert found["status"] == {"ok": 7, "unparsed": 1}
    assert (found["num_problems"], found["num_responses"]) == (2, 8)
    json.dumps(found, allow_nan=False)


def test_distinct_answers_are_the_tasks() -> None:
    responses = [graded(0, text, 0.0) for text in ("it is 7", "7.0", "so 8", "none", "no")]
    found = figures(responses, GSM8K())["sampled"]
    assert mean_of(found["distinct_answers"]) == 2.0  # 7 and 8; two give no answer


def test_one_greedy_response_a_problem_has_an_accuracy() -> None:
    responses = [graded(i, "7", float(i < 3), decoding="greedy") for i in range(4)]
    found = figures(responses)["greedy"]
    assert mean_of(found["accuracy"]) == 0.75
    assert not [name for name in found if "@" in name or name == "distinct_answers"]


def test_decodings_are_kept_apart() -> None:
    responses = [
        graded(0, "7", 1.0, decoding="greedy"),
        graded(0, "7", 0.0),
        graded(1, "7", 0.0, decoding="greedy"),
        graded(1, "7", 0.0),
    ]
    found = figures(responses)
    assert list(found) == ["greedy", "sampled"]
    assert mean_of(found["greedy"]["accuracy"]) == 0.5
    assert mean_of(found["sampled"]["average@1"]) == mean_of(found["sampled"]["pass@1"]) == 0.0


def test_problems_with_unequal_numbers_of_responses_count_alike() -> None:
    responses = [graded(0, "7", 1.0, decoding="given")]
    responses += [graded(1, str(i), 0.0, decoding="given") for i in range(3)]
    found = figures(responses)["given"]
    assert mean_of(found["average"]) == 0.5
    assert "pass@1" in found and "pass@2" not in found


def test_a_response_that_was_not_graded_is_not_right_whatever_the_penalty() -> None:
    parts = {"penalty": -1.0}
    failed = graded(1, "7", 0.0, reward=-1.0, parts=parts, status="timeout", reason="late")
    found = figures([graded(0, "7", 1.0), failed])["sampled"]
    assert mean_of(found["average@1"]) == 0.5
    assert mean_of(found["reward"]) == 0.0
    assert found["status"] == {"ok": 1, "timeout": 1}
    rewarded = graded(1, "7", 0.0, reward=2.0, parts={"penalty": 2.0}, status="crash")
    assert mean_of(figures([graded(0, "7", 0.0), rewarded])["sampled"]["average@1"]) == 0.0


def test_a_reward_that_is_no_grade_has_no_accuracy() -> None:
    scores = [{"reward_model": 3.5}, {"reward_model": -0.5}]
    responses = [
        graded(i, "7", 0.0, parts=parts, reward=sum(parts.values()))
        for i, parts in enumerate(scores)
    ]
    task = Plain()
    task.right_answers = False
    found = figures(responses, task)["sampled"]
    assert mean_of(found["reward"]) == mean_of(found["parts.reward_model"]) == 1.5
    assert not [name for name in found if "@" in name]


def test_lengths_in_tokens_need_all_of_them() -> None:
    known, unknown = graded(0, "77", 1.0), graded(1, "7", 1.0, response_tokens=None, truncated=None)
    found = figures([known, unknown])["sampled"]
    assert "response_tokens" not in found and "truncated" not in found
    assert mean_of(found["response_characters"]) == 1.5


class Measuring(Plain):
    """Measures each response, and all of them."""

    def measure(
        self, problems: Sequence[Problem], responses: Sequence[str], *, truncated: Sequence[bool]
    ) -> list[dict[str, float]]:
        return [{"length": len(r) + 10.0 * t} for r, t in zip(responses, truncated, strict=True)]

    def summarize(self, problems: Sequence[Problem], responses: Sequence[str]) -> dict[str, float]:
        assert len(problems) == len(responses)
        return {"different": float(len(set(responses)))}


def test_what_a_task_measures_is_reported() -> None:
    problems = [Problem(prompt_id=i, prompt="p", answer="7") for i in range(3)]
    batch = Batch(
        problems=problems,
        decodings=["sampled"] * 3,
        samples=[0] * 3,
        texts=["a", "bb", "a"],
        facts={"truncated": [False, True, False], "num_tokens": [2, 2, 2]},
    )
    records = grade(Measuring(), batch, [Scored(parts={"correct": 0.0})] * 3)
    assert [r.measures for r in records] == [{"length": 1.0}, {"length": 12.0}, {"length": 1.0}]
    found = figures(records, Measuring())["sampled"]
    assert mean_of(found["length"]) == pytest.approx(14 / 3)
    assert found["different"] == 2.0


# --------------------------------------------------------------------------- lines

ODD = [
    '{"answer": "1", "response": "a"}',
    "",
    '{"answer": 27.0, "response": "line\\u2028separator", "extra": [1, {"x": null}]}',
    "   ",
    '{"response": "half a pair \\ud83d", "answer": "x", "truncated": true}\r',
]


def test_odd_lines_are_read_and_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(ODD).encode())  # and no newline at the end
    lines = read_lines(path)
    assert [number for number, _ in lines] == [1, 3, 5]
    rows = [row for _, row in lines]
    assert rows == [json.loads(line) for line in ODD if line.strip()]
    again = tmp_path / "new" / "folder" / "out.jsonl"
    write_lines(again, rows)
    assert [row for _, row in read_lines(again)] == rows
    assert [p.name for p in again.parent.iterdir()] == ["out.jsonl"]


def test_a_line_separator_inside_of_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"answer": "1", "response": "a\u2028b\x85c"}\n', encoding="utf-8")
    assert read_lines(path)[0][1]["response"] == "a\u2028b\x85c"


def test_a_file_that_can_not_be_written_whole_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_lines(path, [{"a": 1}, {"a": object()}])
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


MISTAKES = [
    ("not JSON", "not JSON"),
    ('{"answer": "1", "response": "a"', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('{"answer": ' + "9" * 5000 + ', "response": "a"}', "not JSON"),
    ("[1, 2]", "expected an object"),
    ('"text"', "expected an object"),
    ('{"response": "a"}', "'answer' must be text.*not among"),
    ('{"answer": "1"}', "'response' must be text.*not among"),
    ('{"answer": "1", "response": null}', "'response' must be text.*None"),
    ('{"answer": "1", "response": 3}', "'response' must be text.*3"),
    ('{"answer": "1", "response": ["a"]}', "'response' must be text"),
    ('{"answer": true, "response": "a"}', "'answer' must be text.*True"),
    ('{"answer": {"x": 1}, "response": "a"}', "'answer' must be text"),
    (b'{"answer": "1", "response": "\xff"}', "not UTF-8"),
]


@pytest.mark.parametrize(("bad", "says"), MISTAKES)
def test_a_bad_line_is_named(tmp_path: Path, bad: str | bytes, says: str) -> None:
    path = tmp_path / "in.jsonl"
    bad = bad.encode() if isinstance(bad, str) else bad
    path.write_bytes(b'{"answer": "1", "response": "a"}\n\n' + bad + b"\n")
    with pytest.raises(ValueError, match=says) as caught:
        read_lines(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_without_lines_or_without_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="in.jsonl is empty"):
        read_lines(path)
    with pytest.raises(ValueError, match="absent.jsonl can't be read: No such file"):
        read_lines(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        read_lines(tmp_path)


# --------------------------------------------------------------------------- saved responses


def saved(tmp_path: Path, task: Any, *rows: dict[str, Any]) -> Batch:
    path = tmp_path / "in.jsonl"
    write_lines(path, rows)
    kept, batch = saved_responses(path, task)
    assert kept == list(rows)
    return batch


def row(**fields: Any) -> dict[str, Any]:
    return {"answer": "#### 7", "response": "7", **fields}


def test_gold_answers_come_in_the_data_sets_own_form(tmp_path: Path) -> None:
    solution = "He has 500 * 2 = <<500*2=1000>>1,000 now.\n#### 1,000"
    rows = [row(answer=solution), row(answer="1,000"), row(answer=72)]
    batch = saved(tmp_path, GSM8K(), *rows)
    assert [p.answer for p in batch.problems] == ["1,000", "1,000", "72"]
    assert [p.answer for p in saved(tmp_path, Plain(), *rows).problems] == [solution, "1,000", "72"]


def test_a_gold_answer_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"in.jsonl, line 2: .*gold answer.*#### seven") as caught:
        saved(tmp_path, GSM8K(), row(), row(answer="so\n#### seven"))
    assert "\n" not in str(caught.value)


def test_lines_are_problems_of_their_own_unless_all_say_which(tmp_path: Path) -> None:
    named = [row(prompt_id=i) for i in (4, 4, 9)]
    batch = saved(tmp_path, Plain(), *named)
    assert [p.prompt_id for p in batch.problems] == [4, 4, 9]
    assert batch.samples == [0, 1, 0] and batch.decodings == ["given"] * 3
    for odd in ({}, {"prompt_id": "4"}, {"prompt_id": True}, {"prompt_id": 1.5}):
        batch = saved(tmp_path, Plain(), *named, row(**odd))
        assert [p.prompt_id for p in batch.problems] == [0, 1, 2, 3]
        assert batch.samples == [0] * 4


def test_what_is_known_of_every_line_is_used(tmp_path: Path) -> None:
    rows = [
        row(truncated=True, response_tokens=3, prompt="p", decoding="greedy"),
        row(truncated=False, response_tokens=4.5, prompt=3, decoding="other"),
    ]
    batch = saved(tmp_path, Plain(), *rows)
    assert batch.facts == {"truncated": [True, False]}
    assert [p.prompt for p in batch.problems] == ["p", ""]
    assert batch.decodings == ["greedy", "given"]
    assert saved(tmp_path, Plain(), rows[0]).facts == {"truncated": [True], "num_tokens": [3]}


def test_intervals_are_over_problems_not_responses() -> None:
    """Twenty times the same response to each problem tell no more than one."""
    rng = np.random.default_rng(0)
    right = rng.random(60) < 0.5
    once = [graded(i, "7", float(r), decoding="greedy") for i, r in enumerate(right)]
    often = [graded(i, "7", float(r)) for i, r in enumerate(right) for _ in range(20)]
    assert figures(once)["greedy"]["accuracy"] == figures(often)["sampled"]["average@20"]
