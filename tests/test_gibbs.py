"""The exact check's own pieces: its enumeration, its optimum, who samples, and its output."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import losses
from experiments import gibbs

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = gibbs.Settings(num_seeds=1, num_prompts=2)


def by_walking(token_probs: np.ndarray, vocabulary: int, max_tokens: int) -> dict[bytes, float]:
    """Probability of each response, from one problem's table [S, V], walking token by token.

    Prefixes are rows in order of their length, then lexicographic.
    """
    rows: dict[tuple[int, ...], int] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(max_tokens):
        for prefix in level:
            rows[prefix] = len(rows)
        level = [(*prefix, token) for prefix in level for token in range(1, vocabulary)]
    found: dict[bytes, float] = {}

    def walk(prefix: tuple[int, ...], probability: float) -> None:
        for token in range(vocabulary):
            response, p = (*prefix, token), probability * float(token_probs[rows[prefix], token])
            if token == 0 or len(response) == max_tokens:
                found[np.array(response, np.int32).tobytes()] = p
            else:
                walk(response, p)

    walk((), 1.0)
    return found


def random_policy(seed: int, settings: gibbs.Settings = SETTINGS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = gibbs.make_world(settings).reference.shape
    return torch.randn(shape, generator=generator).log_softmax(-1)


def test_docstring_examples() -> None:
    results = doctest.testmod(gibbs)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize(("vocabulary", "max_tokens", "count"), [(4, 4, 121), (3, 2, 7), (2, 5, 6)])
def test_enumeration_is_all_responses_with_their_probabilities(
    vocabulary: int, max_tokens: int, count: int
) -> None:
    settings = dataclasses.replace(SETTINGS, vocabulary=vocabulary, max_tokens=max_tokens)
    tree = gibbs.enumerate_tree(vocabulary, max_tokens)
    policy = random_policy(0, settings).double()
    probabilities = gibbs.response_logprobs(policy, tree).exp()  # [M, Q]
    assert len(tree.tokens) == count
    assert torch.allclose(probabilities.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-12)
    for problem in range(2):
        expected = by_walking(policy[problem].exp().numpy(), vocabulary, max_tokens)
        assert expected.keys() == tree.number.keys()
        for response, number in tree.number.items():
            assert probabilities[problem, number].item() == pytest.approx(expected[response])
    for tokens, truncated in zip(tree.tokens, tree.truncated, strict=True):
        assert truncated == (tokens[-1] != 0) and not (tokens[:-1] == 0).any()


def test_optimum_is_reference_times_exp_reward_over_beta() -> None:
    world = gibbs.make_world(SETTINGS)
    number = world.tree.number
    for problem in range(2):
        reference = by_walking(world.reference[problem].exp().numpy(), 4, 4)
        weights = {
            y: p * math.exp(world.rewards[problem, number[y]].item() / SETTINGS.beta)
            for y, p in reference.items()
        }
        log_z = math.log(sum(weights.values()))
        kl = 0.0
        for response, weight in weights.items():
            log_optimum = math.log(weight) - log_z
            assert world.optimum[problem, number[response]].item() == pytest.approx(log_optimum)
            p = reference[response]
            kl += p * (math.log(p) - log_optimum)
        measured, variation = gibbs.distances(world.reference, world)
        assert measured[problem].item() == pytest.approx(kl)
        assert kl > 0.1  # the start is far from the optimum
        assert 0.05 < variation[problem].item() < 1


def test_the_table_can_be_the_optimum() -> None:
    """Next-token probabilities of pi*, by summing it over what may follow each prefix."""
    world = gibbs.make_world(SETTINGS)
    mass = torch.zeros(world.reference.shape, dtype=torch.float64)
    for number, tokens in enumerate(world.tree.tokens):
        cells = world.tree.cells[number, : len(tokens)]
        mass.flatten(1)[:, cells] += world.optimum[:, [number]].exp()
    kl, variation = gibbs.distances((mass / mass.sum(-1, keepdim=True)).log(), world)
    assert kl.abs().max() < 1e-12 and variation.max() < 1e-12


def test_samples_have_the_frequencies_of_the_policy() -> None:
    policy, k = random_policy(1), 100_000
    tree = gibbs.enumerate_tree(4, 4)
    drawn = gibbs.sample(policy, tree, k, torch.Generator().manual_seed(2))
    assert drawn.shape == (2, k)
    for problem in range(2):
        walked = by_walking(policy[problem].exp().numpy(), 4, 4)
        expected = np.array([k * walked[tokens.tobytes()] for tokens in tree.tokens])
        counts = np.bincount(drawn[problem].numpy(), minlength=121).astype(float)
        rare = expected < 10  # too few for the test: one cell together
        expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
        counts = np.append(counts[~rare], counts[rare].sum())
        chi_square = ((counts - expected) ** 2 / expected).sum()
        freedom = len(counts) - 1
        # Mean and variance of chi-square are its freedom and twice that; 5 deviations.
        assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("setting", list(gibbs.SETTINGS))
def test_a_setting_draws_from_whom_it_says(setting: str) -> None:
    """A policy that differs at every step shows whose log-probs the responses carry."""
    world = gibbs.make_world(SETTINGS)
    draw = gibbs.SETTINGS[setting](world, SETTINGS, 5)
    steps = range(gibbs.STALE_STEPS + 2) if setting == "stale" else range(25)
    policies = [random_policy(100 + step) for step in steps]
    uniform = torch.full_like(policies[0], -math.log(4))
    sampled_by_old = 0
    for step, policy in enumerate(policies):
        drawn = draw(step, policy)
        assert sorted(drawn.problem.tolist()) == [0, 1]
        assert torch.equal(drawn.reference_logprobs, world.reference.float().flatten()[drawn.cells])
        published = range(0, step + 1, gibbs.PUBLISH_STEPS)
        samplers = {
            "on_policy": [policy],
            "uniform": [uniform],
            "stale": [policies[step - step % gibbs.STALE_STEPS]],
            "replay": [policies[version] for version in published],
        }[setting]
        for i in range(len(drawn.group)):
            mine = drawn.response == i
            cells, problem = drawn.cells[mine], drawn.problem[drawn.group[i]]
            tokens = (cells % 4).numpy().astype(np.int32)
            number = world.tree.number[tokens.tobytes()]  # a whole response, in order
            length = world.tree.lengths[number]
            assert torch.equal(cells, world.tree.cells[number, :length] + problem * 160)
            assert drawn.rewards[i].item() == pytest.approx(world.rewards[problem, number].item())
            same = [
                torch.equal(drawn.behavior_logprobs[mine], p.flatten()[cells]) for p in samplers
            ]
            assert any(same)
            sampled_by_old += not same[-1]
    assert (sampled_by_old > 0) == (setting == "replay")


@pytest.mark.parametrize("setting", ["on_policy", "uniform"])
def test_a_short_run_comes_ten_times_closer(setting: str) -> None:
    settings = dataclasses.replace(SETTINGS, num_steps=250)
    world = gibbs.make_world(settings)
    start, _ = gibbs.distances(world.reference, world)
    result = gibbs.run_one("tb_vargrad", setting, settings)
    assert len(result.kl) == 1
    assert 0 <= result.kl[0] < start.mean().item() / 10
    assert result.variation[0] < 0.1


def test_every_objective_is_checked() -> None:
    public = {
        name
        for name, function in inspect.getmembers(losses, inspect.isfunction)
        if function.__module__ == "losses"
        and not name.startswith("_")
        and "batch" in inspect.signature(function).parameters
    }
    assert public == {name for name, _ in gibbs.OBJECTIVES.values()}
    for label, (name, keywords) in gibbs.OBJECTIVES.items():
        inspect.signature(getattr(losses, name)).bind_partial(None, beta=1.0, **keywords)
        assert label.split("(")[0] == name


def test_verdict_names_what_missed() -> None:
    def result(objective: str, kl: float) -> gibbs.Result:
        return gibbs.Result(
            objective=objective, setting="stale", kl=[kl, 1e-6], variation=[0.0, 0.0], cpu_s=1.0
        )

    assert gibbs.verdict([result("ctb", 1e-4), result("dgpo", 3.0)]).startswith("Every")
    missed = gibbs.verdict([result("ctb(prune)", 3e-3), result("tb_vargrad", 1e-4)])
    assert "NOT" in missed and "ctb(prune) in stale" in missed and "tb_vargrad" not in missed


def test_command_writes_and_ends_with_json(tmp_path: Path) -> None:
    arguments = (
        "--objectives tb_vargrad rloo --settings uniform replay --seeds 1 --steps 3 --processes 1"
    )
    command = [sys.executable, "experiments/gibbs.py", *arguments.split(), "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout.splitlines()[-1])
    assert list(table) == ["tb_vargrad", "rloo"]
    for row in table.values():
        assert list(row) == ["uniform", "replay"]
        assert all(0 < kl < 2 for kl in row.values())
    text = (tmp_path / "gibbs.md").read_text()
    assert text.strip() in done.stdout and arguments in text and "beta = 0.25" in text
    record = json.loads((tmp_path / "gibbs.json").read_text())
    assert record["settings"]["num_steps"] == 3 and len(record["results"]) == 4
    assert (tmp_path / "gibbs.png").read_bytes().startswith(b"\x89PNG")
