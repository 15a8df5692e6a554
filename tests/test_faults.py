"""Every fault of bench/faults.py ends as promised, and loses no trajectory."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults import FAULTS, can_have, make_model, make_place
from experiments import warm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def server() -> warm.Server:
    return warm.Server()


def marks(name: str) -> list[pytest.MarkDecorator]:
    fault = FAULTS[name]
    wanted = [pytest.mark.slow] if fault.slow else []
    wanted += [pytest.mark.vllm] if fault.needs == "vllm" else []
    reason = f"this machine lacks {fault.needs}"
    return [*wanted, pytest.mark.skipif(not can_have(fault.needs), reason=reason)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in FAULTS])
def test_it_ends_as_promised(name: str, tmp_path: Path, model: str, server: warm.Server) -> None:
    assert FAULTS[name].inject(make_place(tmp_path / "fault", model, server)) == 0
