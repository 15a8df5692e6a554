"""What the README tells users to write works."""

import re
from pathlib import Path

import config
from bench.faults import FAULTS
from tasks.task import Problem

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_template_of_a_task_is_short_and_works():
    [code] = re.findall(r"\*\*A task\*\*.*?```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 30
    namespace: dict = {}
    exec(compile(code, "README.md", "exec"), namespace)
    task = namespace["Parity"]()
    train, test = task.problems("train"), task.problems("test")
    assert [p.prompt_id for p in train] == list(range(len(train)))
    assert train[0] == Problem(prompt_id=0, prompt="0 is ", answer="even")
    scores = task.score([train[0], test[0]], ["even", "even"])
    assert scores == [{"correct": 1.0}, {"correct": 0.0}]


def test_every_experiment_and_task_is_named():
    for group in ("experiment", "task"):
        for path in (Path(config.conf_dir()) / group).glob("*.yaml"):
            assert f"{path.stem}" in README, f"conf/{group}/{path.name} is not in the README"


def test_what_it_survives_is_what_is_tested():
    for name, fault in FAULTS.items():
        row = f"| {name.replace('_', ' ')} | {fault.promise} | `[{name}]` |"
        assert row in README, row
    _, _, section = README.partition("## What it survives")
    tests = Path(__file__).parent
    for file in re.findall(r"`(test_\w+\.py)", section.partition("\n## ")[0]):
        assert (tests / file).is_file(), file
