"""Rows of a data set, from a file or the Hugging Face hub, each with the place it came from."""

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path


def read_file(path: Path) -> Iterator[tuple[str, object]]:
    """Yield ('task.data_dir: file, line n', row) of a .jsonl file, or '..., row n' of a .json one.

    A .jsonl file has one JSON value a line, blank lines aside; a .json file is one list.

    Raises:
        ValueError: what can't be read, with the file and, where there is one, the line.
    """
    if path.suffix == ".json":
        yield from _read_list(path)
        return
    try:
        # By b'\n' alone: str.splitlines would also cut at characters that JSON allows in text.
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"task.data_dir: {path}, line {number}", _read_line(path, number, line)
    except OSError as error:
        raise ValueError(f"task.data_dir: {path} can't be read: {error.strerror}") from error


def _read_line(path: Path, number: int, line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8-sig"))  # some editors put a byte order mark first
    except UnicodeDecodeError as error:
        raise ValueError(
            f"task.data_dir: {path}, line {number}: not UTF-8 text ({error.reason} at byte "
            f"{error.start}); expected an uncompressed .jsonl file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"task.data_dir: {path}, line {number}: not valid JSON ({error}); expected one "
            "object a line"
        ) from error


def _read_list(path: Path) -> Iterator[tuple[str, object]]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"task.data_dir: {path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise ValueError(
            f"task.data_dir: {path}: not valid JSON ({error}); expected one list of objects"
        ) from error
    if not isinstance(rows, list):
        raise ValueError(
            f"task.data_dir: {path}: expected one list of objects, found {type(rows).__name__}"
        )
    for number, row in enumerate(rows):
        yield f"task.data_dir: {path}, row {number}", row


def read_hub(
    name: str, config: str | None, split: str, *, fix: str
) -> Iterator[tuple[str, object]]:
    """Yield ('name, split, row n', row) from the Hugging Face hub or its local cache.

    Args:
        name, config, split: as `datasets.load_dataset` takes them.
        fix: how to do without the hub, for error messages.

    Raises:
        ValueError: the package datasets is missing, or the data can't be loaded.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            "task.data_dir is unset and the package datasets is not installed: pip install "
            f"datasets, or {fix}"
        ) from error
    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # the library raises many unrelated types when offline
        raise ValueError(
            f"task.data_dir is unset and {name} could not be loaded from the Hugging Face hub "
            f"({error}): {fix}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name}, {split}, row {number}", row


def text_field(where: str, row: object, name: str) -> str:
    """The text field `name` of a row.

    Raises:
        ValueError: the row is no object, or its field no text that a tokenizer takes; `where` says
            which row it is.
    """
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: expected an object with the text field {name!r}, found {type(row).__name__}"
        )
    value = row.get(name)
    if not isinstance(value, str):
        found = f"is {type(value).__name__}" if name in row else not_among(name, row)
        raise ValueError(f"{where}: the field {name!r} must be text, but it {found}")
    try:
        value.encode()  # JSON can escape half of a character ("\\ud83d")
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where}: the field {name!r} holds half of a character ({half!r}): repair the text, "
            "or leave the row out"
        ) from error
    return value


def not_among(name: str, row: Mapping[str, object]) -> str:
    """What to say of a field that a row lacks: its names, and the nearest.

    >>> not_among("question", {"questoin": "1+1?", "answer": "2"})
    "is not among ['answer', 'questoin']; is it 'questoin'?"
    """
    near = difflib.get_close_matches(name, map(str, row), n=1)
    return f"is not among {sorted(map(str, row))}" + (f"; is it {near[0]!r}?" if near else "")
