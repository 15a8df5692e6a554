"""Saved trajectories: exact round trips, damage of every kind, and each mistake in a JSONL file."""

import doctest
import json
import logging
import math
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tokenizers import processors

import offline
from offline import TrajectoryWriter, ends_cut, load, read_jsonl, read_trajectories, share
from sft import tiny_tokenizer
from tasks.task import Problem, encode_prompt
from trajectory import Trajectory, pack

TOKENIZER = tiny_tokenizer()
VOCABULARY = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
HEADER_BYTES = 12
LIMITS = {"max_prompt_tokens": 16, "max_response_tokens": 16}


def make(**changes: object) -> Trajectory:
    length = len(changes.get("response_tokens", (3, 4, 5)))  # type: ignore[arg-type]
    behavior = np.linspace(-0.1, -0.3, length, dtype=np.float32)
    fields: dict = {
        "prompt_id": 7,
        "prompt_tokens": np.array([10, 11], np.int32),
        "response_tokens": np.array([3, 4, 5], np.int32),
        "behavior_logprobs": behavior,
        "old_logprobs": behavior,
        "reference_logprobs": np.linspace(-1, -3, length, dtype=np.float32),
        "reference_version": 0,
        "reward": 1.5,
        "reward_parts": {"correct": 1.0, "format": 0.5},
        "version_start": 3,
        "version_end": 3,
        "truncated": False,
    }
    return Trajectory(**(fields | changes))


def bits(t: Trajectory, *, prompt_id: bool = True) -> tuple:
    """All of a record as something that compares bit for bit."""
    arrays = (
        t.prompt_tokens,
        t.response_tokens,
        t.behavior_logprobs,
        t.old_logprobs,
        t.reference_logprobs,
    )
    return (
        *((a.dtype.str, a.shape, a.tobytes()) for a in arrays),
        t.old_logprobs is t.behavior_logprobs,
        (t.versions.tolist(), t.reference_version, t.truncated),
        t.prompt_id if prompt_id else None,
        struct.pack("<d", t.reward),
        {name: struct.pack("<d", value) for name, value in t.reward_parts.items()},
    )


def write(path: Path, *records: list[Trajectory]) -> Path:
    writer = TrajectoryWriter(path)
    for record in records:
        writer.append(pack(record))
    writer.close()
    return path


def write_lines(path: Path, *rows: object) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def line(**changes: object) -> dict:
    return {"prompt": "1+2=", "response": "3", "reward": 1.0} | changes


def read_lines(path: Path, *rows: object, chat: bool = False) -> list[Trajectory]:
    write_lines(path, *rows)
    return list(read_jsonl(path, TOKENIZER, chat=chat, vocab_size=VOCABULARY))


def load_all(*paths: Path | str, **changes: object) -> offline.OfflineData:
    options: dict = {"chat": False, "vocab_size": VOCABULARY, **LIMITS} | changes
    return load([str(path) for path in paths], TOKENIZER, **options)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------- .traj files


def test_messages_are_stored_as_they_came(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "searcher-1.traj"
    first, second = pack([make(), make(reward=-0.0)]), pack([make(prompt_id=1)])
    writer = TrajectoryWriter(path)
    writer.append(first)
    writer.append(second.tobytes())
    # Nothing waits in a buffer of the process: another one sees both messages already.
    content = path.read_bytes()
    assert content[HEADER_BYTES:] == b"".join(
        struct.pack("<Q", message.size) + message.tobytes() for message in (first, second)
    )
    writer.close()
    writer.close()
    assert path.read_bytes() == content


@st.composite
def versions(draw: st.DrawFn, length: int) -> dict:
    start = draw(st.integers(-5, 4))
    steps = draw(st.lists(st.integers(0, 2), min_size=length - 1, max_size=length - 1))
    offsets = np.cumsum([0, *steps], dtype=np.int32)
    return {
        "version_start": start,
        "version_end": start + sum(steps),
        "version_offsets": offsets if sum(steps) else None,
    }


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    length = draw(st.integers(1, 5))
    tokens = st.integers(0, VOCABULARY - 1)
    logprobs = npst.arrays(np.float32, length, elements=st.floats(width=32))
    finite = st.floats(allow_nan=False, allow_infinity=False)
    behavior = draw(logprobs)
    return make(
        prompt_id=draw(st.integers(0, 5)),
        prompt_tokens=draw(npst.arrays(np.int32, st.integers(1, 3), elements=tokens)),
        response_tokens=draw(npst.arrays(np.int32, length, elements=tokens)),
        behavior_logprobs=behavior,
        old_logprobs=draw(st.sampled_from([behavior, draw(logprobs)])),
        reference_logprobs=draw(logprobs),
        reference_version=draw(st.integers(-1, 3)),
        reward=draw(finite),
        reward_parts=draw(st.dictionaries(st.text(max_size=3), finite, max_size=2)),
        **draw(versions(length)),
        truncated=draw(st.booleans()),
    )


@settings(deadline=None, database=None, max_examples=40)
@given(st.lists(trajectories(), max_size=6))
def test_round_trip_is_exact(records: list[Trajectory]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # One a message, so that a response whose old log-probs differ doesn't part the others'.
        path = write(Path(folder, "a.traj"), *([t] for t in records))
        assert [bits(t) for t in read_trajectories(path)] == [bits(t) for t in records]
        assert not ends_cut(path)


def test_messages_of_many_and_of_no_trajectories_are_read_in_order(tmp_path: Path) -> None:
    records = [[make(prompt_id=0), make(prompt_id=1)], [], [make(prompt_id=2)]]
    path = write(tmp_path / "a.traj", *records)
    assert [t.prompt_id for t in read_trajectories(path)] == [0, 1, 2]


def test_a_file_cut_anywhere_gives_all_whole_records(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [[make(prompt_id=0)], [make(prompt_id=1), make(prompt_id=1)], [make(prompt_id=2)]]
    content = write(tmp_path / "whole.traj", *records).read_bytes()
    ends = [HEADER_BYTES]
    for record in records:
        ends.append(ends[-1] + 8 + pack(record).size)
    assert ends[-1] == len(content)
    path = tmp_path / "cut.traj"
    for size in range(len(content)):
        path.write_bytes(content[:size])
        whole = [t for end, r in zip(ends[1:], records, strict=True) if end <= size for t in r]
        caplog.clear()
        assert [bits(t) for t in read_trajectories(path)] == [bits(t) for t in whole]
        is_cut = size not in (0, *ends)
        assert ends_cut(path) == is_cut
        assert [r.levelno for r in caplog.records] == [logging.WARNING] * is_cut
        assert all(str(path) in r.getMessage() for r in caplog.records)


def test_the_writer_continues_a_cut_file_after_its_last_whole_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = [[make(prompt_id=0)], [make(prompt_id=1)]]
    whole = write(tmp_path / "whole.traj", *records)
    content = whole.read_bytes()
    path = tmp_path / "cut.traj"
    for size in (0, 5, HEADER_BYTES, HEADER_BYTES + 3, len(content) - 1, len(content)):
        path.write_bytes(content[:size])
        before = [t.prompt_id for t in read_trajectories(path)]
        caplog.clear()
        write(path, [make(prompt_id=9)])
        assert [t.prompt_id for t in read_trajectories(path)] == [*before, 9]
        assert not ends_cut(path)
        warned = size in (5, HEADER_BYTES + 3, len(content) - 1)
        assert len(caplog.records) == warned


def test_no_flipped_bit_changes_what_is_read(tmp_path: Path) -> None:
    records = [[make(prompt_id=0)], [make(prompt_id=1)]]
    path = write(tmp_path / "a.traj", *records)
    content = path.read_bytes()
    last = HEADER_BYTES + 8 + pack(records[0]).size  # where the last record's length begins
    num_cut = 0
    for position in range(len(content)):
        for bit in (0, 7):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            read = []
            try:
                for t in read_trajectories(path):
                    read.append(bits(t))
            except ValueError as error:
                assert str(path) in str(error)
                if position >= HEADER_BYTES:
                    number = 1 if position < last else 2
                    assert f"record {number}:" in str(error)
            else:  # the last record seems longer than the file, as if cut
                num_cut += 1
                assert last <= position < last + 8 and ends_cut(path)
            assert read == [bits(t) for r in records for t in r][: len(read)] and len(read) < 2
    assert num_cut > 0


def test_a_flipped_byte_of_a_message_is_told_by_its_crc(tmp_path: Path) -> None:
    path = write(tmp_path / "a.traj", [make()], [make()])
    content = bytearray(path.read_bytes())
    content[-3] ^= 16
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.traj, record 2: .*CRC32"):
        list(read_trajectories(path))
    with pytest.raises(ValueError, match=r"^data: .*a\.traj, record 2: .*CRC32"):
        load_all(path)


@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
def test_a_length_beyond_the_file_is_no_cut_record_where_others_follow(
    tmp_path: Path, length: int
) -> None:
    path = write(tmp_path / "a.traj", [make()], [make()], [make()])
    content = bytearray(path.read_bytes())
    start = HEADER_BYTES + 8 + pack([make()]).size
    content[start : start + 8] = struct.pack("<Q", length)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.traj, record 2: .*beyond the file"):
        list(read_trajectories(path))
    with pytest.raises(ValueError, match="beyond the file"):
        TrajectoryWriter(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x95 a pickle of something",
        b"{",
        b'{"prompt": "a"}\n',
        pack([make()]).tobytes(),  # a bare message
        b"TB-FILX\n\x01\x00\x00\x00",
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.traj"
    path.write_bytes(content)
    for use in (lambda: list(read_trajectories(path)), lambda: TrajectoryWriter(path)):
        with pytest.raises(ValueError, match=r"a\.traj: not a file of saved trajectories"):
            use()
    assert path.read_bytes() == content


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.traj", [make()])
    content = bytearray(path.read_bytes())
    content[8] = 2
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.traj: format version 2, this program reads 1"):
        list(read_trajectories(path))


# ------------------------------------------------------------------------- JSONL


def test_text_is_encoded_as_in_training(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    [t] = read_lines(path, line(response="34", version=6, reward=2))
    assert t.prompt_tokens.tolist() == ids("1+2=")
    assert t.response_tokens.tolist() == [*ids("34"), EOS]
    assert t.prompt_tokens.dtype == t.response_tokens.dtype == np.int32
    assert (t.reward, t.reward_parts, t.truncated) == (2.0, {"reward": 2.0}, False)
    assert (t.version_start, t.version_end, t.reference_version) == (6, 6, -1)
    assert np.isnan(t.behavior_logprobs).all() and np.isnan(t.reference_logprobs).all()
    assert t.old_logprobs is t.behavior_logprobs
    assert not np.shares_memory(t.reference_logprobs, t.behavior_logprobs)  # one may be filled in
    assert t.behavior_logprobs.dtype == t.reference_logprobs.dtype == np.float32
    assert len(t.behavior_logprobs) == len(t.reference_logprobs) == 3
    pack([t])  # a record that keeps its rules


def test_the_end_token_belongs_to_whole_text_only(tmp_path: Path) -> None:
    read = read_lines(
        tmp_path / "a.jsonl",
        line(response="34", truncated=True),
        line(response=""),
        line(response="34<eos>"),
        line(response_tokens=[5, 6]),
    )
    tokens = [t.response_tokens.tolist() for t in read]
    assert tokens == [ids("34"), [EOS], [*ids("34"), EOS], [5, 6]]
    assert [t.truncated for t in read] == [True, False, False, False]


def test_responses_get_no_beginning_of_text_and_prompts_as_the_tokenizer_adds_it(
    tmp_path: Path,
) -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", EOS)]
    )
    path = write_lines(tmp_path / "a.jsonl", line(), line(truncated=True))
    whole, cut = read_jsonl(path, tokenizer, chat=False, vocab_size=VOCABULARY)
    assert whole.prompt_tokens.tolist() == [bos, *ids("1+2=")]
    assert whole.response_tokens.tolist() == [*ids("3"), EOS]
    assert cut.response_tokens.tolist() == ids("3")


def test_chat_prompts_go_through_the_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [assistant]"
    )
    path = write_lines(tmp_path / "a.jsonl", line())
    [t] = read_jsonl(path, tokenizer, chat=True, vocab_size=VOCABULARY)
    problem = Problem(prompt_id=0, prompt="1+2=", answer="")
    assert t.prompt_tokens.tolist() == encode_prompt(tokenizer, problem, chat=True)
    assert t.prompt_tokens.tolist() == ids("[user] 1+2= [assistant]")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: task\.chat is true"):
        list(read_jsonl(path, TOKENIZER, chat=True, vocab_size=VOCABULARY))


def test_tokens_and_logprobs_are_taken_as_given(tmp_path: Path) -> None:
    given = {
        "prompt_tokens": [9, 8],
        "response_tokens": [7, EOS],
        "behavior_logprobs": [-0.25, -1],
        "old_logprobs": [-0.5, -2.0],
        "reference_logprobs": [-0.75, 0.0],
        "reward": 1,
        "reward_parts": {"a": 1.5, "b": -0.5},
    }
    full, both, no_old, only_old = read_lines(
        tmp_path / "a.jsonl",
        given,  # text is not needed then
        line(**given),  # tokens win over text
        {**given, "old_logprobs": None},
        {**given, "behavior_logprobs": None},
    )
    for t in (full, both):
        assert t.prompt_tokens.tolist() == [9, 8] and t.response_tokens.tolist() == [7, EOS]
        assert t.behavior_logprobs.tolist() == [-0.25, -1.0]
        assert t.old_logprobs.tolist() == [-0.5, -2.0]
        assert t.reference_logprobs.tolist() == [-0.75, 0.0] and t.reference_version == 0
        assert t.reward_parts == {"a": 1.5, "b": -0.5}
        assert t.behavior_logprobs.dtype == t.reference_logprobs.dtype == np.float32
    assert no_old.old_logprobs is no_old.behavior_logprobs
    assert np.isnan(only_old.behavior_logprobs).all()
    assert only_old.old_logprobs.tolist() == [-0.5, -2.0]


def test_log_probs_may_go_with_text_that_encodes_to_as_many_tokens(tmp_path: Path) -> None:
    [t] = read_lines(tmp_path / "a.jsonl", line(behavior_logprobs=[-1, -2]))
    assert t.behavior_logprobs.tolist() == [-1, -2]


def test_prompts_are_numbered_by_their_tokens(tmp_path: Path) -> None:
    read = read_lines(
        tmp_path / "a.jsonl",
        line(prompt="b"),
        line(prompt="a"),
        line(prompt_tokens=ids("b")),
        line(prompt="c"),
        line(prompt="a"),
    )
    assert [t.prompt_id for t in read] == [0, 1, 0, 2, 1]


def test_ignored_fields_nulls_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    extra = {"index": 1, "id": "x", "meta": {}, "_note": [], "reward_parts": None, "version": None}
    text = "\ufeff" + json.dumps(line(**extra)) + "\r\n\n  \n" + json.dumps(line(response="4"))
    path.write_text(text, encoding="utf-8", newline="")
    first, second = read_jsonl(path, TOKENIZER, chat=False, vocab_size=VOCABULARY)
    assert first.response_tokens.tolist() == [*ids("3"), EOS]
    assert (first.reward_parts, first.version_start) == ({"reward": 1.0}, 0)
    assert second.response_tokens.tolist() == [*ids("4"), EOS]


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    text = json.dumps(line(response="a\u2028b\x85"), ensure_ascii=False)
    [t] = read_lines(tmp_path / "a.jsonl", text)
    assert len(t.response_tokens) == 5


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "not JSON"),
        ('{"prompt": "a",', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"reward": 1' + "0" * 5000 + "}", "not JSON"),
        ("[1]", "expected an object"),
        ('"text"', "expected an object"),
        ({"prompt": "a", "reward": 1}, "'response' .*'response_tokens'.* missing"),
        ({"response": "a", "reward": 1}, "'prompt' .*'prompt_tokens'.* missing"),
        ({"prompt": "a", "response": "b"}, "'reward' is missing"),
        (line(reward=None), "'reward' is missing"),
        (line(rewards=1), "unknown field 'rewards'; did you mean 'reward'?"),
        (line(behaviour_logprob=[-1]), "did you mean 'behavior_logprobs'?"),
        (line(zzz=1), "unknown field 'zzz'; known are prompt, response, reward"),
        (line(prompt=5), "'prompt' must be text, found 5"),
        (line(response=["3"]), "'response' must be text"),
        (line(response='"\ud800"'), "'response' holds half of a character"),
        (line(prompt="\udfff"), "'prompt' holds half of a character"),
        (line(reward_parts={"\ud800": 1.0}), "'reward_parts' holds half"),
        (line(prompt=""), "encodes to no tokens"),
        (line(reward=math.nan), "'reward' must be a finite number, found nan"),
        (line(reward=math.inf), "'reward' must be a finite number"),
        (line(reward=10**400), "'reward' must be a finite number"),
        (line(reward=True), "'reward' must be a finite number, found True"),
        (line(reward="1"), "'reward' must be a finite number, found '1'"),
        (line(reward_parts=[1]), "'reward_parts' must be an object"),
        (line(reward_parts={"a": "1"}), "part 'a' .*finite number"),
        (line(reward_parts={"a": math.nan}), "part 'a' .*finite number"),
        (line(reward_parts={"a": 0.5, "b": 0.4}), "sums to 0.9 but 'reward' is 1"),
        (line(reward_parts={}), "sums to 0 but 'reward' is 1"),
        (line(truncated=1), "'truncated' must be true or false"),
        (line(response="", truncated=True), "'response' is empty and 'truncated' is true"),
        (line(response_tokens=[]), "'response_tokens' is empty"),
        (line(prompt_tokens=[]), "'prompt_tokens' is empty"),
        (line(response_tokens="34"), "'response_tokens' must be a list of whole numbers"),
        (line(response_tokens=[1.0]), "'response_tokens' must be a list of whole numbers"),
        (line(prompt_tokens=[True]), "'prompt_tokens' must be a list of whole numbers"),
        (line(response_tokens=[5, VOCABULARY]), f"token id {VOCABULARY} is outside"),
        (line(prompt_tokens=[-1]), "token id -1 is outside"),
        (line(prompt_tokens=[2**70]), "token id 1180591620717411303424 is outside"),
        (line(behavior_logprobs=[-1]), "has 1 numbers for 2 response tokens: give 'response_tok"),
        (line(response_tokens=[5], old_logprobs=[-1, -2]), "2 numbers for 1 response tokens: give"),
        (line(reference_logprobs=[]), "'reference_logprobs' has 0 numbers"),
        (line(reference_logprobs=-1), "'reference_logprobs' must be a list"),
        (line(behavior_logprobs=[-1, math.nan]), "'behavior_logprobs' must be a list of finite"),
        (line(behavior_logprobs=[-1, None]), "'behavior_logprobs' must be a list of finite"),
        (line(old_logprobs=[-1, True]), "'old_logprobs' must be a list of finite"),
        (line(old_logprobs=[-1, -(10**400)]), "'old_logprobs' must be a list of finite"),
        (line(old_logprobs=[-1, 0.5]), "'old_logprobs' must hold log-prob.* at most 0"),
        (line(old_logprobs=[-1, -1e300]), "'old_logprobs' must hold log-prob"),
        (line(version=1.5), "'version' must be a whole number"),
        (line(version=-1), "'version' must be a whole number"),
        (line(version=2**63), "'version' must be a whole number"),
    ],
)
def test_a_mistake_names_file_line_and_fix(tmp_path: Path, bad: object, words: str) -> None:
    path = write_lines(tmp_path / "mistakes.jsonl", line(), "", bad)
    lines = read_jsonl(path, TOKENIZER, chat=False, vocab_size=VOCABULARY)
    next(lines)  # lines before it are fine
    with pytest.raises(ValueError, match=rf"mistakes\.jsonl, line 3: .*{words}") as caught:
        next(lines)
    assert len(str(caught.value)) < 600
    with pytest.raises(ValueError, match=r"^data: .*mistakes\.jsonl, line 3: "):
        load_all(path)


def test_text_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", line(prompt="1", response="~"))
    with pytest.raises(ValueError, match="line 1: response: token id 99 is outside.* of 50"):
        list(read_jsonl(path, TOKENIZER, chat=False, vocab_size=50))


def test_the_mean_of_huge_rewards_is_finite(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", line(reward=1.6e308), line(reward=1.2e308))
    assert load_all(path).mean_reward == pytest.approx(1.4e308)


def test_parts_may_miss_the_reward_by_rounding(tmp_path: Path) -> None:
    parts = {"a": 0.1, "b": 0.2}
    [t] = read_lines(tmp_path / "a.jsonl", line(reward=0.3, reward_parts=parts))
    assert t.reward == 0.3 and t.reward_parts == parts


@pytest.mark.parametrize("bad", [b'{"prompt": "\xff"}', b"\x1f\x8b\x08\x00", b"\xff\xfe{\x00"])
def test_what_is_not_utf8_is_told_by_line(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(line()).encode() + b"\n" + bad)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not UTF-8"):
        list(read_jsonl(path, TOKENIZER, chat=False, vocab_size=VOCABULARY))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"a\.jsonl: the file is empty"):
        list(read_jsonl(path, TOKENIZER, chat=False, vocab_size=VOCABULARY))


LOGPROB = st.floats(max_value=0, min_value=-(2.0**100), width=32)


@st.composite
def rows(draw: st.DrawFn) -> dict:
    token = st.integers(0, VOCABULARY - 1)
    length = draw(st.integers(1, 5))
    logprobs = st.none() | st.lists(LOGPROB, min_size=length, max_size=length)
    return {
        "prompt_tokens": draw(st.lists(token, min_size=1, max_size=2)),
        "response_tokens": draw(st.lists(token, min_size=length, max_size=length)),
        "reward": draw(st.floats(allow_nan=False, allow_infinity=False)),
        "truncated": draw(st.booleans()),
        "behavior_logprobs": draw(logprobs),
        "old_logprobs": draw(logprobs),
        "reference_logprobs": draw(logprobs),
        "version": draw(st.integers(0, 2**63 - 1)),
    }


@settings(deadline=None, database=None, max_examples=60)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_jsonl_with_tokens_survives_a_traj_file_and_both_are_exact(written: list[dict]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        read = read_lines(path, *written)
        for t, row in zip(read, written, strict=True):
            assert t.prompt_tokens.tolist() == row["prompt_tokens"]
            assert t.response_tokens.tolist() == row["response_tokens"]
            assert t.reward == row["reward"] and t.reward_parts == {"reward": row["reward"]}
            assert t.truncated == row["truncated"]
            assert t.version_start == t.version_end == row["version"]
            given_old = row["old_logprobs"] or row["behavior_logprobs"]
            for array, expected in (
                (t.behavior_logprobs, row["behavior_logprobs"]),
                (t.old_logprobs, given_old),
                (t.reference_logprobs, row["reference_logprobs"]),
            ):
                unknown = [math.nan] * len(row["response_tokens"])
                np.testing.assert_array_equal(array, np.array(expected or unknown, np.float32))
            assert t.reference_version == (0 if row["reference_logprobs"] else -1)
        again = write(Path(folder, "a.traj"), *([t] for t in read))
        assert [bits(t) for t in read_trajectories(again)] == [bits(t) for t in read]
        assert [bits(t) for t in load_all(path).trajectories] == [bits(t) for t in read]


# ------------------------------------------------------------------------- all files


def run_folder(folder: Path, *records: list[Trajectory]) -> Path:
    """A run folder with one file a record, and what else lies in one."""
    for i, record in enumerate(records):
        write(folder / "trajectories" / f"searcher-{i}.traj", record)
    write_lines(folder / "metrics.jsonl", {"step": 1})
    return folder


def prompt(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_prompts_of_runs_with_clashing_ids_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    first = run_folder(
        tmp_path / "first",
        [make(prompt_id=0, prompt_tokens=prompt(10), reward=1.0)],
        [make(prompt_id=1, prompt_tokens=prompt(11), reward=2.0)],
    )
    second = run_folder(
        tmp_path / "second",
        [
            make(prompt_id=0, prompt_tokens=prompt(11), reward=3.0),
            make(prompt_id=1, prompt_tokens=prompt(12), reward=4.0),
            make(prompt_id=2, prompt_tokens=prompt(10), reward=5.0),
        ],
    )
    lines = write_lines(
        tmp_path / "a.jsonl",
        {"prompt_tokens": [13], "response": "1", "reward": 6},
        {"prompt_tokens": [12], "response": "1", "reward": 7},
    )
    data = load_all(first, second, lines)
    assert [(t.prompt_id, t.reward) for t in data.trajectories] == [
        (0, 1.0), (1, 2.0), (1, 3.0), (2, 4.0), (0, 5.0), (3, 6.0), (2, 7.0)
    ]  # fmt: skip
    assert (data.num_files, data.num_prompts, data.num_responses) == (4, 4, 7)
    assert data.prompts_with_one_response == 1
    assert data.mean_reward == pytest.approx(4.0)
    # Token ids 1, 2 and 258 have bytes in common, and [1, 2] and [1], [2] together too.
    tokens = [(1,), (2,), (1, 2), (1,), (258,)]
    path = write(tmp_path / "b.traj", [make(prompt_tokens=prompt(*t)) for t in tokens])
    read = load_all(path, vocab_size=1000).trajectories
    assert [t.prompt_id for t in read] == [0, 1, 2, 0, 3]


def test_everything_but_the_prompt_id_is_kept(tmp_path: Path) -> None:
    records = [make(prompt_id=50), make(reference_version=-1, truncated=True)]
    path = write(tmp_path / "a.traj", records)
    read = load_all(path).trajectories
    assert [bits(t, prompt_id=False) for t in read] == [bits(t, prompt_id=False) for t in records]


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    run_folder(tmp_path / "runs" / "b", [make(reward=3.0)])
    run_folder(tmp_path / "runs" / "a", [make(reward=1.0)], [make(reward=2.0)])
    (tmp_path / "runs" / "c").mkdir()  # a run that saved nothing
    write_lines(tmp_path / "more[1].jsonl", line(reward=4))

    def rewards(*paths: str) -> list[float]:
        return [t.reward for t in load_all(*(str(tmp_path / p) for p in paths)).trajectories]

    assert rewards("runs/b") == [3]
    assert rewards("runs/a/trajectories") == [1, 2]
    assert rewards("runs/a/trajectories/searcher-1.traj") == [2]
    assert rewards("runs/b", "runs/a") == [3, 1, 2]
    assert rewards("runs/*") == [1, 2, 3]
    assert rewards("runs/**/*.traj") == [1, 2, 3]
    assert rewards("more[1].jsonl") == [4]  # a name that exists, not a pattern
    assert rewards("*.jsonl", "runs/b") == [4, 3]
    assert rewards("runs/b", "runs/*", "runs/b/trajectories/../trajectories") == [3, 1, 2]
    one = load(str(tmp_path / "runs/b"), TOKENIZER, chat=False, vocab_size=VOCABULARY, **LIMITS)
    assert one.num_responses == 1


def test_nothing_to_read_names_data_and_the_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    write_lines(tmp_path / "run" / "metrics.jsonl", {"step": 1})
    run_folder(tmp_path / "full", [make()])
    for missing, words in (
        ("missing.traj", "no such file"),
        ("nothing/*.traj", "no such file"),
        ("run", "neither trajectories"),
        ("ru*", "no such file, folder or match"),
    ):
        with pytest.raises(ValueError, match=rf"^data: nothing to read at .*{words}") as caught:
            load_all(tmp_path / "full", tmp_path / missing)
        assert repr(str(tmp_path / missing)) in str(caught.value)
    with pytest.raises(ValueError, match="^data is empty"):
        load_all()
    with pytest.raises(ValueError, match=r"^data: .*config\.yaml must end in \.traj or \.jsonl"):
        (tmp_path / "config.yaml").touch()
        load_all(tmp_path / "config.yaml")
    write(tmp_path / "empty.traj")
    with pytest.raises(ValueError, match=r"^data: no trajectory in .*empty\.traj"):
        load_all(tmp_path / "empty.traj")
    (tmp_path / "a.traj").mkdir()
    (tmp_path / "a.traj" / "b.traj").mkdir()
    with pytest.raises(ValueError, match=r"^data: .*b\.traj can't be read"):
        load_all(tmp_path / "a.traj")


def test_all_trajectories_over_a_limit_are_counted_in_one_error(tmp_path: Path) -> None:
    long = np.arange(9, dtype=np.int32)
    path = write(
        tmp_path / "a.traj",
        [make(), make(prompt_tokens=long), make(response_tokens=long), make(response_tokens=long)],
    )
    lines = write_lines(tmp_path / "a.jsonl", line(response="1" * 10))
    assert load_all(path, lines, max_prompt_tokens=9, max_response_tokens=11).num_responses == 5
    with pytest.raises(ValueError) as caught:
        load_all(path, lines, max_prompt_tokens=8, max_response_tokens=8)
    message = str(caught.value)
    assert "1 of 5" in message and "task.max_prompt_tokens=8: raise it to 9" in message
    assert "3 of 5" in message and "task.max_response_tokens=8: raise it to 11" in message
    with pytest.raises(ValueError) as caught:
        load_all(path, lines, max_prompt_tokens=9, max_response_tokens=10)
    assert "prompt" not in str(caught.value)


def test_a_run_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    for name in ("prompt_tokens", "response_tokens"):
        for token in (VOCABULARY, -1):
            path = tmp_path / f"{name}.traj"
            path.unlink(missing_ok=True)
            write(path, [make(), make(**{name: np.array([5, token, 5], np.int32)})])
            with pytest.raises(ValueError, match=rf"{name}\.traj, trajectory 2, .*id {token} is"):
                load_all(path)
    path = write(tmp_path / "none.traj", [make(prompt_tokens=prompt())])
    with pytest.raises(ValueError, match=r"none\.traj, trajectory 1: the prompt has no tokens"):
        load_all(path)


def test_what_is_missing_is_counted_and_reset_references_are_dropped(tmp_path: Path) -> None:
    nan = np.full(3, np.nan, np.float32)
    partly = np.array([np.nan, -1, -1], np.float32)
    records = [
        make(reference_version=0),
        make(reference_version=2),
        make(reference_version=5, prompt_tokens=prompt(1)),
        make(reference_version=-1, reference_logprobs=nan),
        make(behavior_logprobs=nan, old_logprobs=nan),
        make(behavior_logprobs=partly),
    ]
    path = write(tmp_path / "a.traj", records, [make()])
    path.write_bytes(path.read_bytes()[:-1])
    lines = write_lines(tmp_path / "a.jsonl", line(), line(response="4"))
    data = load_all(path, lines)
    versions = [t.reference_version for t in data.trajectories]
    assert versions == [0, -1, -1, -1, 0, 0, -1, -1]
    known = [not np.isnan(t.reference_logprobs).any() for t in data.trajectories]
    assert known == [True, False, False, False, True, True, False, False]
    assert np.isnan(data.trajectories[1].reference_logprobs).all()
    assert (data.num_reset_reference, data.num_missing_reference) == (2, 5)
    assert (data.num_missing_behavior, data.num_cut) == (3, 1)
    assert (data.num_prompts, data.prompts_with_one_response) == (3, 1)
    pack(data.trajectories)
    summary = data.summary()
    for words in (
        "8 responses to 3 prompts from 2 files",
        "1 prompts with one",
        "1 files that end",
        "5 responses without reference",
        "2 of them from after",
        "3 responses without b",
    ):
        assert words in summary  # fmt: skip
    complete = load_all(write(tmp_path / "b.traj", [make(), make()])).summary()
    assert complete == "2 responses to 1 prompts from 1 files, mean reward 1.5"


def test_shares_split_the_prompts(tmp_path: Path) -> None:
    rows = [line(prompt=text) for text in "abcadbe"]
    data = load_all(write_lines(tmp_path / "a.jsonl", *rows))
    shares = [share(data.trajectories, index, 3) for index in range(3)]
    assert [[t.prompt_id for t in part] for part in shares] == [[0, 0, 3], [1, 1, 4], [2]]
    assert share(data.trajectories, 0, 1) == data.trajectories


def test_docstring_examples_run() -> None:
    results = doctest.testmod(offline)
    assert results.attempted > 0 and results.failed == 0
