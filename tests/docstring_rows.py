"""Rows of TL;DR's fields made of docstrings: the first line summarises what follows it.

Real English with real one-sentence summaries, on a machine without the data set:

    python tests/docstring_rows.py FOLDER
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path

MODULES = (
    "argparse asyncio bisect calendar collections configparser contextlib copy csv datetime "
    "decimal difflib email fractions functools gzip heapq html http inspect ipaddress itertools "
    "json logging mailbox math os pathlib pickle random re sched shutil smtplib socket sqlite3 ssl "
    "statistics string subprocess tarfile tempfile textwrap threading time tkinter tokenize "
    "traceback typing unittest urllib.parse urllib.request uuid warnings weakref xml.sax zipfile "
    "numpy numpy.linalg numpy.fft numpy.random torch torch.nn torch.optim torch.linalg"
).split()


def rows() -> list[dict[str, str]]:
    """All rows, in the same order on every call."""
    found: dict[str, dict[str, str]] = {}
    for module in MODULES:
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        for name, thing in sorted(vars(loaded).items()):
            if name.startswith("_") or not callable(thing):
                continue
            summary, _, post = (inspect.getdoc(thing) or "").partition("\n\n")
            summary = " ".join(summary.split())
            if 20 <= len(summary) <= 160 and 100 <= len(post) <= 1200 and "(" not in summary:
                row = {"subreddit": "python", "title": f"{module}.{name}", "post": post.strip()}
                found.setdefault(post, {"id": str(len(found)), **row, "summary": summary})
    return list(found.values())


def write(folder: Path) -> dict[str, int]:
    """Writes train.jsonl, validation.jsonl and test.jsonl; returns their numbers of rows."""
    shares: dict[str, list[dict[str, str]]] = {"train": [], "validation": [], "test": []}
    for number, row in enumerate(rows()):
        shares[{0: "validation", 1: "test"}.get(number % 6, "train")].append(row)
    folder.mkdir(parents=True, exist_ok=True)
    for split, share in shares.items():
        lines = "".join(json.dumps(row) + "\n" for row in share)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return {split: len(share) for split, share in shares.items()}


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
