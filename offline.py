"""Saved trajectories: what a run writes for later, and what offline training reads.

`TrajectoryWriter` appends the messages of `trajectory.pack` to a file, as they came over the wire.
`load` reads such files of any number of runs, and JSONL written by anything else, into one list
with prompt ids of its own; `share` picks the prompts of one trainer. A `.traj` file is

    magic, 8 bytes | format version, u32
    then records: bytes of the message, u64 | the message

all little-endian. Every message carries its own CRC32. A process that dies while it writes leaves
at most one cut record, at the end; all before it is read.
"""

import difflib
import glob
import hashlib
import json
import logging
import math
import mmap
import os
import reprlib
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from tasks.task import Problem, check_prompt, encode_prompt
from trajectory import Trajectory, pack, unpack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MAGIC = b"TB-FILE\n"
_FORMAT_VERSION = 1
_HEADER = struct.Struct("<8sI")
_LENGTH = struct.Struct("<Q")

_FIELDS = (
    "prompt",
    "response",
    "reward",
    "truncated",
    "reward_parts",
    "prompt_tokens",
    "response_tokens",
    "behavior_logprobs",
    "old_logprobs",
    "reference_logprobs",
    "version",
)
_IGNORED_FIELDS = ("index", "id", "meta")
_SUM_TOLERANCE = 1e-6  # of reward parts against the reward: decimal text rounds
# Log-probs are at most 0, but rounding may lift one a little above; probabilities and negated
# log-probs, the mistakes to catch, lie far above.
_MAX_LOGPROB = 1e-3


@dataclass(slots=True, kw_only=True)
class OfflineData:
    """Saved trajectories, and what there is to say about them; filled by `load`."""

    trajectories: list[Trajectory]  # in the order of the files
    num_files: int
    num_prompts: int  # distinct sequences of prompt tokens; prompt ids are 0..num_prompts - 1
    num_responses: int
    prompts_with_one_response: int  # nothing to compare with: they can't be trained on
    num_cut: int  # files whose last record is cut
    num_missing_reference: int  # responses with reference_version -1, those reset included
    num_reset_reference: int  # responses whose run had replaced its reference policy by then
    num_missing_behavior: int  # responses whose behavior log-probs are NaN throughout
    mean_reward: float  # over responses

    def summary(self) -> str:
        """One line for the log; what is not there is not mentioned."""
        parts = [
            f"{self.num_responses} responses to {self.num_prompts} prompts from "
            f"{self.num_files} files, mean reward {self.mean_reward:.4g}"
        ]
        for count, what in (
            (self.prompts_with_one_response, "prompts with one response, never trained on"),
            (self.num_cut, "files that end in a cut record"),
            (self.num_missing_reference, "responses without reference log-probs, to be computed"),
            (self.num_reset_reference, "of them from after their run reset its reference policy"),
            (self.num_missing_behavior, "responses without behavior log-probs"),
        ):
            if count:
                parts.append(f"{count} {what}")
        return "; ".join(parts)


# --------------------------------------------------------------------------- .traj files


class TrajectoryWriter:
    """Appends messages of `trajectory.pack` to one file; not to be shared by threads or processes.

    Every message is handed to the operating system before `append` returns, so it survives the
    death of this process. A file that exists is continued: a cut record at its end, left by a
    process that died, is removed first, with a warning.
    """

    def __init__(self, path: Path) -> None:
        """Opens or creates the file, and its folder.

        Raises:
            ValueError: the file is there but not one of trajectories.
            OSError: it can't be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")  # whatever was read, writes go to the end
        try:
            end, self.num_records = _find_end(self._file, path)
            size = _size(self._file)
            if end < size:
                logger.warning("%s: the last record is cut; removing %d bytes", path, size - end)
                self._file.truncate(end)
            if end == 0:
                self._file.write(_HEADER.pack(_MAGIC, _FORMAT_VERSION))
                self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def append(self, message: np.ndarray | bytes) -> None:
        """Writes one message, uint8 [n] or as many bytes, unchanged."""
        if isinstance(message, np.ndarray):
            assert message.dtype == np.uint8 and message.ndim == 1, "not a message of pack()"
            message = message.tobytes()
        self._file.write(_LENGTH.pack(len(message)))
        self._file.write(message)
        self._file.flush()
        self.num_records += 1

    def sync(self) -> None:
        """What was appended is on the disk when this returns."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        self._file.close()


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Read a `.traj` file trajectory by trajectory; as `read_messages` otherwise."""
    for trajectories in read_messages(path):
        yield from trajectories


def read_messages(path: Path) -> Iterator[list[Trajectory]]:
    """Read a `.traj` file record by record.

    A cut last record is skipped with a warning (`ends_cut` tells). The file may still be growing:
    what is whole when it is opened is read.

    Args:
        path: a file of `TrajectoryWriter`.

    Yields:
        The trajectories of each message exactly as packed, with the prompt ids of the run that
        saved them. Those of one message share memory (see `trajectory.unpack`).

    Raises:
        ValueError: no such file format or another version of it, or a damaged record. The file and
            the number of the record, from 1, are named; records before it have been read.
        OSError: the file can't be read.
    """
    with path.open("rb") as file:
        size = _size(file)
        end = _read_header(file, path)
        for number, (start, length) in enumerate(_walk(file, path, end, size), start=1):
            message = np.empty(length, np.uint8)  # the walk has checked it against the file
            file.seek(start)
            if file.readinto(message.data) != length:
                raise ValueError(f"{path}, record {number}: the file shrank while it was read")
            try:
                trajectories = unpack(message)
            except ValueError as error:
                raise ValueError(f"{path}, record {number}: {error}") from error
            yield trajectories
            end = start + length
        if end < size:
            logger.warning(
                "%s: the last record is cut; %d bytes are skipped and all before them is used",
                path, size - end,
            )  # fmt: skip


def ends_cut(path: Path) -> bool:
    """Whether a `.traj` file ends in a cut record; raises like `read_trajectories`."""
    with path.open("rb") as file:
        return _find_end(file, path)[0] < _size(file)


def _find_end(file: BinaryIO, path: Path) -> tuple[int, int]:
    """Offset behind the last whole record, 0 if not even the header is whole; and their number."""
    end, count = _read_header(file, path), 0
    for start, length in _walk(file, path, end, _size(file)):
        end, count = start + length, count + 1
    return end, count


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _read_header(file: BinaryIO, path: Path) -> int:
    """Checks magic and version; returns where records begin, 0 if the header is missing or cut."""
    file.seek(0)
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size and _HEADER.pack(_MAGIC, _FORMAT_VERSION).startswith(head):
        return 0
    if not head.startswith(_MAGIC):
        raise ValueError(
            f"{path}: not a file of saved trajectories (it does not start with {_MAGIC!r})"
        )
    version = int.from_bytes(head[len(_MAGIC) :], "little")
    if version != _FORMAT_VERSION:
        raise ValueError(
            f"{path}: format version {version}, this program reads {_FORMAT_VERSION}: read it with "
            "the version of the program that wrote it"
        )
    return _HEADER.size


def _walk(file: BinaryIO, path: Path, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each whole record's message, of a file whose header ends at `end`.

    Stops at a record that reaches beyond the file: cut, if it is the last one. If its length was
    damaged instead, other messages follow, and to stop in silence would lose them.
    """
    number = 0
    while 0 < end and end + _LENGTH.size <= size:
        number += 1
        file.seek(end)
        [length] = _LENGTH.unpack(file.read(_LENGTH.size))
        start = end + _LENGTH.size
        if length > size - start:
            first_bytes = pack([])[:12].tobytes()  # magic and version, the same in every message
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(first_bytes, start + 1) >= 0:
                    raise ValueError(
                        f"{path}, record {number}: its length of {length} bytes reaches beyond the "
                        "file although others follow; the file is damaged"
                    )
            return
        yield start, length
        end = start + length


# --------------------------------------------------------------------------- JSONL


def read_jsonl(
    path: Path, tokenizer: "PreTrainedTokenizerBase", *, chat: bool, vocab_size: int
) -> Iterator[Trajectory]:
    r"""Read responses from anywhere: one JSON object a line, in UTF-8; blank lines are skipped.

    ==================== ====================================================================
    prompt               text, as `Problem.prompt`: before any chat template
    response             text, without the end-of-text token
    reward               finite number
    truncated            true if the text was cut before its end; default false
    reward_parts         object of named numbers that sum to the reward; default {"reward": reward}
    prompt_tokens        token ids, used in place of `prompt`, with all special tokens
    response_tokens      token ids, used in place of `response`, with the end-of-text token
    behavior_logprobs    numbers, one a response token (end of text included), nats, under the
                         distribution really sampled from, temperature and top-p included
    old_logprobs         the same of the sampling policy at the training temperature without
                         top-p; default: behavior_logprobs
    reference_logprobs   the same of the starting model at the training temperature
    version              optimizer steps behind the weights that sampled, >= 0; default 0
    ==================== ====================================================================

    `prompt` or `prompt_tokens`, `response` or `response_tokens`, and `reward` are needed; null in
    an optional field is as good as none. `index`, `id`, `meta` and names that start with `_` are
    ignored, other names are errors. Text is encoded as in training: prompts by
    `tasks.task.encode_prompt`, responses without special tokens, and unless truncated with the
    end-of-text token behind, where the text does not end with it already.

    >>> import tempfile
    >>> from sft import tiny_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "sums.jsonl")
    ...     _ = path.write_text('{"prompt": "1+2=", "response": "3", "reward": 1}\n')
    ...     [t] = read_jsonl(path, tiny_tokenizer(), chat=False, vocab_size=100)
    >>> t.prompt_tokens.tolist(), t.response_tokens.tolist(), t.reward_parts
    ([22, 16, 23, 34], [24, 2], {'reward': 1.0})

    Args:
        path: the file, not compressed.
        tokenizer: the policy's tokenizer.
        chat: whether prompts are wrapped with the tokenizer's chat template (`task.chat`).
        vocab_size: tokens that the policy knows.

    Yields:
        Trajectories whose prompt ids count the file's distinct prompt token sequences from 0, in
        order of first appearance. Without behavior log-probs the array is NaN; without reference
        log-probs too, and reference_version is -1, else 0.

    Raises:
        ValueError: a line breaks a rule above, or there is none; the file, the line and the fix
            are named, and lines before it have been read.
        OSError: the file can't be read.
    """
    prompt_ids: dict[bytes, int] = {}
    encoded: dict[str, np.ndarray] = {}  # many responses share a prompt
    number = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _parse_line(line)
                prompt = _read_prompt(row, tokenizer, chat, vocab_size, encoded)
                prompt_id = prompt_ids.setdefault(prompt.tobytes(), len(prompt_ids))
                trajectory = _read_response(row, tokenizer, vocab_size, prompt_id, prompt)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield trajectory
    if not prompt_ids:
        raise ValueError(
            f"{path}: the file is empty; write one JSON object a line with the fields 'prompt', "
            "'response' and 'reward'"
        )


def _parse_line(line: bytes) -> dict[str, Any]:
    """The fields of one line, without those to ignore and without nulls."""
    try:
        text = line.decode("utf-8-sig")  # some editors put a byte order mark before the text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 text ({error.reason} at byte {error.start}): save the file as UTF-8, "
            "uncompressed"
        ) from error
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): write one object on every line") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"expected an object with the fields 'prompt', 'response' and 'reward', found "
            f"{reprlib.repr(row)}"
        )
    for name in row:
        if name not in _FIELDS and name not in _IGNORED_FIELDS and not name.startswith("_"):
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_FIELDS)}."
            raise ValueError(
                f"unknown field {name!r}; {known} Names that start with '_' are ignored"
            )
    return {name: value for name, value in row.items() if name in _FIELDS and value is not None}


def _read_prompt(
    row: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    chat: bool,
    vocab_size: int,
    encoded: dict[str, np.ndarray],
) -> np.ndarray:
    """Prompt tokens, int32 [P], P >= 1; encoded text is kept in `encoded`."""
    if "prompt_tokens" in row:
        tokens = _token_list(row, "prompt_tokens", vocab_size)
        if not tokens.size:
            raise ValueError(
                "the field 'prompt_tokens' is empty: a policy needs at least one token to "
                "continue from"
            )
        return tokens
    text = _text(row, "prompt")
    if text not in encoded:
        problem = Problem(prompt_id=len(encoded), prompt=text, answer="")
        tokens = np.array(encode_prompt(tokenizer, problem, chat=chat), np.int64)
        check_prompt(tokenizer, problem, tokens.tolist(), chat=chat)
        encoded[text] = _check_vocabulary(tokens, "prompt", vocab_size)
    return encoded[text]


def _read_response(
    row: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    prompt_id: int,
    prompt: np.ndarray,
) -> Trajectory:
    truncated = row.get("truncated", False)
    if not isinstance(truncated, bool):
        raise ValueError(
            f"the field 'truncated' must be true or false, found {reprlib.repr(truncated)}"
        )
    tokens = _response_tokens(row, tokenizer, vocab_size, truncated)
    reward, parts = _rewards(row)
    version = row.get("version", 0)
    if type(version) is not int or not 0 <= version < 2**63:
        raise ValueError(
            f"the field 'version' must be a whole number of 0 or more, found "
            f"{reprlib.repr(version)}"
        )
    unknown = np.full(tokens.size, np.nan, np.float32)  # [T]
    behavior = _logprobs(row, "behavior_logprobs", tokens.size)
    old = _logprobs(row, "old_logprobs", tokens.size)
    reference = _logprobs(row, "reference_logprobs", tokens.size)
    behavior = unknown if behavior is None else behavior
    return Trajectory(
        prompt_id=prompt_id,
        prompt_tokens=prompt,
        response_tokens=tokens,
        behavior_logprobs=behavior,
        old_logprobs=behavior if old is None else old,
        reference_logprobs=unknown.copy() if reference is None else reference,
        reference_version=-1 if reference is None else 0,
        reward=reward,
        reward_parts=parts,
        version_start=version,
        version_end=version,
        truncated=truncated,
    )


def _response_tokens(
    row: dict[str, Any], tokenizer: "PreTrainedTokenizerBase", vocab_size: int, truncated: bool
) -> np.ndarray:
    """Response tokens, int32 [T], T >= 1."""
    if "response_tokens" in row:
        tokens = _token_list(row, "response_tokens", vocab_size)
        if not tokens.size:
            raise ValueError(
                "the field 'response_tokens' is empty: a response has at least one token, if only "
                "the end of text"
            )
        return tokens
    ids = list(tokenizer(_text(row, "response"), add_special_tokens=False)["input_ids"])
    if not truncated and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            "the field 'response' is empty and 'truncated' is true, so that there is no token to "
            "learn: leave the line out, or set 'truncated' to false"
        )
    return _check_vocabulary(np.array(ids, np.int64), "response", vocab_size)


def _rewards(row: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """The reward and its named parts."""
    reward = _number(_required(row, "reward"))
    if reward is None:
        raise ValueError(
            f"the field 'reward' must be a finite number, found {reprlib.repr(row['reward'])}"
        )
    given = row.get("reward_parts", {"reward": reward})
    if not isinstance(given, dict):
        raise ValueError(
            f"the field 'reward_parts' must be an object of numbers, found {reprlib.repr(given)}"
        )
    parts = {}
    for name, value in given.items():
        _check_text(name, "reward_parts")
        number = _number(value)
        if number is None:
            raise ValueError(
                f"part {name!r} of the field 'reward_parts' must be a finite number, found "
                f"{reprlib.repr(value)}"
            )
        parts[name] = number
    total = sum(parts.values())
    if not math.isclose(total, reward, rel_tol=_SUM_TOLERANCE, abs_tol=_SUM_TOLERANCE):
        raise ValueError(
            f"the field 'reward_parts' sums to {total:g} but 'reward' is {reward:g}: give parts "
            "that sum to the reward, or leave them out"
        )
    return reward, parts


def _required(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        instead = f" (or '{name}_tokens')" if f"{name}_tokens" in _FIELDS else ""
        raise ValueError(
            f"the field {name!r}{instead} is missing: every line needs a prompt, a response and "
            "a reward"
        )
    return row[name]


def _text(row: dict[str, Any], name: str) -> str:
    value = _required(row, name)
    if not isinstance(value, str):
        raise ValueError(f"the field {name!r} must be text, found {reprlib.repr(value)}")
    _check_text(value, name)
    return value


def _check_text(text: str, name: str) -> None:
    # JSON can escape half of a character ("\ud83d"), which no tokenizer and no file takes.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the field {name!r} holds half of a character ({error.object[error.start]!r}): "
            "repair the text, or leave the line out"
        ) from error


def _number(value: object) -> float | None:
    """A JSON number as a finite float; None for anything else, true and NaN among it."""
    if type(value) is not int and type(value) is not float:
        return None
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def _number_array(value: object) -> np.ndarray | None:
    """A list of JSON numbers as finite float64 [n]; None for anything else."""
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
        return None
    try:
        numbers = np.array(value, np.float64)
    except OverflowError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def _token_list(row: dict[str, Any], name: str, vocab_size: int) -> np.ndarray:
    """A list of token ids, int32 [n]."""
    value = row[name]
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise ValueError(
            f"the field {name!r} must be a list of whole numbers, found {reprlib.repr(value)}"
        )
    return _check_vocabulary(np.array(value, object), name, vocab_size)


def _check_vocabulary(tokens: np.ndarray, what: str, vocab_size: int) -> np.ndarray:
    """The tokens as int32; ValueError unless all lie in 0..vocab_size - 1."""
    if tokens.size and not (0 <= tokens.min() and tokens.max() < vocab_size):
        outside = next(int(token) for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(
            f"{what}: token id {outside} is outside the model's vocabulary of {vocab_size}: "
            "the tokens must come from the tokenizer of this model"
        )
    return tokens.astype(np.int32, copy=False)


def _logprobs(row: dict[str, Any], name: str, length: int) -> np.ndarray | None:
    """float32 [T], or None if the field is not there."""
    if name not in row:
        return None
    value = row[name]
    numbers = _number_array(value)  # [n]
    if numbers is None:
        raise ValueError(
            f"the field {name!r} must be a list of finite numbers, found {reprlib.repr(value)}"
        )
    if numbers.size != length:
        fix = (
            "give one for each token"
            if "response_tokens" in row
            else "give 'response_tokens' too, since text may be encoded otherwise than it was "
            "sampled"
        )
        raise ValueError(
            f"the field {name!r} has {numbers.size} numbers for {length} response tokens: {fix}"
        )
    with np.errstate(over="ignore"):
        logprobs = numbers.astype(np.float32)  # [T]
    if not (np.isfinite(logprobs).all() and logprobs.max() <= _MAX_LOGPROB):
        raise ValueError(
            f"the field {name!r} must hold log-probabilities in nats, which are at most 0, found "
            f"{reprlib.repr(value)}"
        )
    return logprobs


# --------------------------------------------------------------------------- all files


def load(
    paths: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    chat: bool,
    max_prompt_tokens: int,
    max_response_tokens: int,
    vocab_size: int,
) -> OfflineData:
    """Read all saved trajectories into one list, with prompt ids of their own.

    Distinct sequences of prompt tokens are numbered from 0 in order of first appearance, whatever
    ids they had: two runs may use one id for different prompts.

    Reference log-probs of a `.traj` file are trusted to be those of the model that training starts
    from, at its temperature: nothing in a file tells which model a run started from. Where a run
    had replaced its reference policy (reference_version > 0) they are dropped, to be computed anew.

    Args:
        paths: `.traj` and `.jsonl` files, glob patterns (`**` for any depth), and folders: of a
            run, whose `trajectories/*.traj` are read, or such a folder itself. A file is read once
            however often it is named.
        tokenizer, chat, vocab_size: as for `read_jsonl`.
        max_prompt_tokens, max_response_tokens: the task's limits (`task.max_prompt_tokens`, ...).

    Raises:
        ValueError: no file is found, one is damaged or breaks a rule of `read_jsonl`, or
            trajectories are over a limit; names `data` with the file, or the limit to raise.
    """
    files = _find_files([paths] if isinstance(paths, str) else paths)
    trajectories: list[Trajectory] = []
    prompt_ids: dict[bytes, int] = {}
    num_cut = num_reset = 0
    for path in files:
        try:
            if path.suffix == ".traj":
                read = list(read_trajectories(path))
                _check_run(path, read, vocab_size)
                num_reset += _drop_reset_references(read)
                num_cut += ends_cut(path)
            else:
                read = list(read_jsonl(path, tokenizer, chat=chat, vocab_size=vocab_size))
        except OSError as error:
            raise ValueError(f"data: {path} can't be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"data: {error}") from error
        for t in read:
            t.prompt_id = prompt_ids.setdefault(t.prompt_tokens.tobytes(), len(prompt_ids))
        trajectories += read
    if not trajectories:
        raise ValueError(f"data: no trajectory in {_names(files)}: name files that hold some")
    _check_limits(trajectories, max_prompt_tokens, max_response_tokens)
    responses = Counter(t.prompt_id for t in trajectories)
    return OfflineData(
        trajectories=trajectories,
        num_files=len(files),
        num_prompts=len(prompt_ids),
        num_responses=len(trajectories),
        prompts_with_one_response=sum(count == 1 for count in responses.values()),
        num_cut=num_cut,
        num_missing_reference=sum(t.reference_version < 0 for t in trajectories),
        num_reset_reference=num_reset,
        num_missing_behavior=sum(bool(np.isnan(t.behavior_logprobs).all()) for t in trajectories),
        # Divided first: rewards are finite, their sum may not be.
        mean_reward=sum(t.reward / len(trajectories) for t in trajectories),
    )


def digest(paths: Sequence[str]) -> str:
    """Of the contents of all files that `load` would read, in its order.

    Raises:
        ValueError: there is none, or one can't be read.
    """
    total = hashlib.blake2b(digest_size=8)
    for path in _find_files(paths):
        try:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise ValueError(f"data: {path} can't be read: {error.strerror or error}") from error
    return total.hexdigest()


def share(trajectories: Sequence[Trajectory], index: int, count: int) -> list[Trajectory]:
    """The trajectories of one trainer: those of the prompts p with p mod `count` == `index`."""
    assert 0 <= index < count, f"share {index} of {count}"
    return [t for t in trajectories if t.prompt_id % count == index]


def _find_files(paths: Sequence[str]) -> list[Path]:
    """The files that paths, patterns and folders stand for, each once, in a fixed order."""
    if not paths:
        raise ValueError(
            "data is empty: name the files to train on, as in data=runs/<name>, or a .jsonl file"
        )
    found: dict[Path, Path] = {}
    for text in paths:
        pattern = os.path.expanduser(text)
        # A name that exists is meant literally, even with a [ in it.
        exact = os.path.exists(pattern)
        matches = [pattern] if exact else sorted(glob.glob(pattern, recursive=True))
        files = [file for match in matches for file in _files_of(Path(match))]
        if not files:
            what = (
                "the folder has neither trajectories/*.traj nor *.traj; a run leaves them only if "
                "it was told to save its trajectories, and .jsonl files are named one by one or by "
                "a pattern (data='folder/*.jsonl')"
                if exact
                else "there is no such file, folder or match; relative paths start from "
                f"{os.getcwd()}"
            )
            raise ValueError(f"data: nothing to read at {text!r}: {what}")
        for file in files:
            if file.suffix not in (".traj", ".jsonl"):
                raise ValueError(f"data: {file} must end in .traj or .jsonl, to tell its format")
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(path.glob("trajectories/*.traj")) or sorted(path.glob("*.traj"))


def _check_run(path: Path, trajectories: Sequence[Trajectory], vocab_size: int) -> None:
    """ValueError unless a run's tokens can be this model's."""
    for number, t in enumerate(trajectories, start=1):
        where = f"{path}, trajectory {number}"
        if not t.prompt_tokens.size:
            raise ValueError(
                f"{where}: the prompt has no tokens: a policy needs at least one to continue from"
            )
        _check_vocabulary(t.prompt_tokens, f"{where}, prompt", vocab_size)
        _check_vocabulary(t.response_tokens, f"{where}, response", vocab_size)


def _drop_reset_references(trajectories: Sequence[Trajectory]) -> int:
    """Marks reference log-probs of later references as not computed; returns how many.

    Writes into the records, which nobody else has seen yet.
    """
    reset = [t for t in trajectories if t.reference_version > 0]
    for t in reset:
        t.reference_logprobs = np.full_like(t.reference_logprobs, np.nan)
        t.reference_version = -1
    return len(reset)


def _check_limits(
    trajectories: Sequence[Trajectory], max_prompt_tokens: int, max_response_tokens: int
) -> None:
    """One ValueError for all trajectories over a limit."""
    complaints = []
    for what, limit, lengths in (
        ("prompt", max_prompt_tokens, [t.prompt_tokens.size for t in trajectories]),
        ("response", max_response_tokens, [t.response_tokens.size for t in trajectories]),
    ):
        over = sum(length > limit for length in lengths)
        if over:
            complaints.append(
                f"{over} of {len(trajectories)} trajectories have a {what} longer than "
                f"task.max_{what}_tokens={limit}: raise it to {max(lengths)}, or leave them out"
            )
    if complaints:
        raise ValueError(f"data: {'; '.join(complaints)}")


def _names(files: Sequence[Path]) -> str:
    shown = ", ".join(str(file) for file in files[:3])
    return shown if len(files) <= 3 else f"{shown} and {len(files) - 3} more files"
