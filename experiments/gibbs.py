"""Exact check of every objective: how far from the optimum of KL-regularised RL does it end?

    python experiments/gibbs.py [--objectives tb_vargrad rloo] [--settings stale] [--steps 2000]

A world small enough to enumerate: vocabulary 4 (end of text and 3 symbols), responses of at most 4
tokens, 121 in all, a random reference policy and random rewards. Its optimum is known exactly,

    pi*(y | x) = pi_ref(y | x) exp(r(x, y) / beta) / Z(x)            (arXiv 2503.18929, section 3)

and so is KL(pi, pi*) of the trained policy, a table of logits of every prompt and prefix: the
table can represent any distribution over the responses, pi* too. What is left at the end is what
the objective and its data leave, not what a model could not express. Each objective is trained
in four settings that differ in who samples the responses (`SETTINGS`), through the same functions
and records as a real run: `losses.py`, `Batch`, and in `replay` also `Trajectory` and `Buffer`.

Letters: M problems (seeds x prompts), S prefixes, V vocabulary, Q responses, T longest response;
G groups, B drawn responses, N their tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import losses  # noqa: E402
from buffer import Buffer  # noqa: E402
from buffer import uniform as uniform_rule  # noqa: E402
from trajectory import Batch, Trajectory  # noqa: E402

THRESHOLD = 1e-3  # nats: below it the policy counts as the optimum
STALE_STEPS = 200  # steps between two copies of the policy in the setting `stale`
PUBLISH_STEPS = 10  # steps between two publications in the setting `replay`
PUBLISHED_RESPONSES = 128  # of every problem that arrive with a publication
CAPACITY = 200  # stored responses of a problem: room for all 121
SAMPLING_SEED = 10_000  # the same for all objectives, and of no world


@dataclass(slots=True, kw_only=True, frozen=True)
class Settings:
    """Everything that the figures depend on, besides the objective and who samples."""

    num_seeds: int = 3  # independent worlds
    num_prompts: int = 4  # of each world
    vocabulary: int = 4  # token 0 ends the text
    max_tokens: int = 4
    beta: float = 0.25  # reward units per nat; rewards are uniform in 0..1
    responses_per_prompt: int = 16  # K
    num_steps: int = 2000
    lr: float = 0.05  # Adam's, of the logits; falls linearly to 0
    log_z_lr: float = 0.2  # the same for the learned log Z of the objectives that have one


# Label -> function of losses.py and its keywords. Where an objective of the policy-gradient kind
# has a KL term it is on and, where there is a choice, the one whose on-policy optimum is pi*.
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "tb_vargrad": ("tb_vargrad", {}),
    "tb_vargrad(difficulty)": ("tb_vargrad", {"difficulty_temperature": 0.25}),
    "tb_vargrad(importance)": ("tb_vargrad", {"importance": "sequence"}),
    "tb_learned_z": ("tb_learned_z", {}),
    "ctb": ("ctb", {}),
    "ctb(prune)": ("ctb", {"prune": 0.5}),
    "alpha_tb": ("alpha_tb", {"alpha": 0.5}),
    "alpha_tb(2)": ("alpha_tb", {"alpha": 2.0}),
    "kimi": ("kimi", {}),
    "kimi_k2": ("kimi_k2", {}),
    "flowrl": ("flowrl", {}),
    "reinforce": ("reinforce", {"kl": "reward", "kl_estimator": "k1"}),
    "rloo": ("rloo", {"kl": "reward", "kl_estimator": "k1"}),
    "proximal_rloo": ("proximal_rloo", {"kl": "reward", "kl_estimator": "k1"}),
    "ppo": ("ppo", {"kl": "reward", "kl_estimator": "k1"}),
    "grpo": ("grpo", {"kl": "penalty", "kl_estimator": "k3"}),
    "dr_grpo": ("dr_grpo", {"kl": "reward", "kl_estimator": "k1", "length_constant": 4}),
    "dgpo": ("dgpo", {}),
    "dpo": ("dpo", {}),
}
# These have pi* as their only minimiser whatever the data, so they must come below THRESHOLD.
TRAJECTORY_BALANCE = ("tb_vargrad", "tb_learned_z", "ctb", "alpha_tb")  # functions of losses.py


# The world: its responses, its optimum, and distances from it.


@dataclass(slots=True, kw_only=True)
class Tree:
    """Every response, as the cells that it visits of one problem's table [S, V]; `enumerate_tree`.

    A cell is a prefix and the token that follows it: index `prefix * V + token`.
    """

    num_prefixes: int
    cells: Tensor  # int64 [Q, T], 0 after the end
    mask: Tensor  # bool [Q, T], whether the response has a token there
    lengths: Tensor  # int64 [Q]
    tokens: list[np.ndarray]  # Q of int32 [length], with the end of text where it was sampled
    truncated: list[bool]  # Q, cut at T tokens before an end of text
    number: dict[bytes, int]  # bytes of a response's tokens -> its index in 0..Q-1


def enumerate_tree(vocabulary: int, max_tokens: int) -> Tree:
    """All responses of at most `max_tokens` tokens: ended by token 0, or cut without it.

    >>> tree = enumerate_tree(vocabulary=3, max_tokens=2)
    >>> [tokens.tolist() for tokens in tree.tokens]
    [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    """
    symbols = range(1, vocabulary)
    prefixes = [p for depth in range(max_tokens) for p in product(symbols, repeat=depth)]
    row = {prefix: i for i, prefix in enumerate(prefixes)}
    responses = [(*prefix, 0) for prefix in prefixes]
    responses += product(symbols, repeat=max_tokens)
    responses.sort()
    cells = torch.zeros(len(responses), max_tokens, dtype=torch.int64)
    lengths = torch.tensor([len(response) for response in responses])
    for i, response in enumerate(responses):
        for j, token in enumerate(response):
            cells[i, j] = row[response[:j]] * vocabulary + token
    tokens = [np.array(response, np.int32) for response in responses]
    return Tree(
        num_prefixes=len(prefixes),
        cells=cells,
        mask=torch.arange(max_tokens) < lengths[:, None],
        lengths=lengths,
        tokens=tokens,
        truncated=[response[-1] != 0 for response in responses],
        number={array.tobytes(): i for i, array in enumerate(tokens)},
    )


def response_logprobs(token_logprobs: Tensor, tree: Tree) -> Tensor:
    """Log-probability of every response.

    Args:
        token_logprobs: float [M, S, V], nats, of the next token after every prefix.
        tree: the responses.

    Returns:
        float [M, Q], nats, the dtype of `token_logprobs`; its exp sums to 1 along Q.
    """
    visited = token_logprobs.flatten(1)[:, tree.cells]  # [M, Q, T]
    return torch.where(tree.mask, visited, 0.0).sum(-1)


@dataclass(slots=True, kw_only=True)
class World:
    """M problems: reference policy, rewards, and the optimum that follows; `make_world`."""

    tree: Tree
    beta: float
    reference: Tensor  # float64 [M, S, V], nats, log-probs of the next token
    rewards: Tensor  # float64 [M, Q]
    optimum: Tensor  # float64 [M, Q], nats, log pi*


def make_world(settings: Settings) -> World:
    """Random problems: normal reference logits of deviation 0.7, rewards uniform in 0..1."""
    tree = enumerate_tree(settings.vocabulary, settings.max_tokens)
    references, rewards = [], []
    for seed in range(settings.num_seeds):
        generator = torch.Generator().manual_seed(seed)
        shape = (settings.num_prompts, tree.num_prefixes, settings.vocabulary)
        logits = 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)
        references.append(logits.log_softmax(-1))
        shape = (settings.num_prompts, len(tree.tokens))
        rewards.append(torch.rand(shape, generator=generator, dtype=torch.float64))
    reference, reward = torch.cat(references), torch.cat(rewards)
    unnormalised = response_logprobs(reference, tree) + reward / settings.beta
    return World(
        tree=tree,
        beta=settings.beta,
        reference=reference,
        rewards=reward,
        optimum=unnormalised.log_softmax(-1),  # subtracts log Z
    )


def distances(token_logprobs: Tensor, world: World) -> tuple[Tensor, Tensor]:
    """KL(pi, pi*) in nats and total variation of pi from pi*, by enumeration, each float64 [M]."""
    policy = response_logprobs(token_logprobs.double(), world.tree)  # [M, Q]
    kl = (policy.exp() * (policy - world.optimum)).sum(-1)
    variation = (policy.exp() - world.optimum.exp()).abs().sum(-1) / 2
    return kl, variation


# The settings: who samples the responses.


@dataclass(slots=True, kw_only=True)
class Drawn:
    """Groups of responses to train on, made by a setting; G = M, a group of every problem."""

    problem: Tensor  # int64 [G], index in 0..M-1
    cells: Tensor  # int64 [N], index in the flat table [M * S * V]
    response: Tensor  # int64 [N], index in 0..B-1
    group: Tensor  # int64 [B], index in 0..G-1
    rewards: Tensor  # float32 [B]
    reference_logprobs: Tensor  # float32 [N], nats
    behavior_logprobs: Tensor  # float32 [N], nats, exact


# (step, log-probs of the policy's next tokens [M, S, V], without gradient) -> what to train on
Draw = Callable[[int, Tensor], Drawn]


def sample(token_logprobs: Tensor, tree: Tree, k: int, generator: torch.Generator) -> Tensor:
    """Draw `k` responses of every problem, independently, from a policy.

    A draw from the probabilities of all responses is a draw token by token, at once.

    Returns:
        int64 [M, k], indices of responses in 0..Q-1.
    """
    probabilities = response_logprobs(token_logprobs, tree).exp()  # [M, Q]
    return torch.multinomial(probabilities, k, replacement=True, generator=generator)


def flat_cells(tree: Tree, vocabulary: int, problem: Tensor, number: Tensor) -> tuple[Tensor, ...]:
    """Cells of responses in the flat table, one response after another.

    Args:
        problem: int64 [B], the problem each response belongs to.
        number: int64 [B], which response it is, in 0..Q-1.

    Returns:
        cells int64 [N], and response int64 [N], the index in 0..B-1 that each belongs to.
    """
    start = problem * (tree.num_prefixes * vocabulary)  # [B]
    mask = tree.mask[number]  # [B, T]
    cells = (tree.cells[number] + start[:, None])[mask]  # [N], row by row
    response = torch.repeat_interleave(torch.arange(len(number)), tree.lengths[number])
    return cells, response


def sampled(
    world: World, settings: Settings, seed: int, sampler_at: Callable[[int, Tensor], Tensor]
) -> Draw:
    """A setting in which a policy samples all that is trained on, and is then forgotten.

    `sampler_at(step, policy)` gives its log-probs, float32 [M, S, V].
    """
    tree, k = world.tree, settings.responses_per_prompt
    generator = torch.Generator().manual_seed(seed)
    problems = torch.arange(world.rewards.shape[0])
    group = problems.repeat_interleave(k)  # [B]
    reference = world.reference.float().flatten()
    rewards = world.rewards.float()

    def draw(step: int, policy: Tensor) -> Drawn:
        sampler = sampler_at(step, policy)
        number = sample(sampler, tree, k, generator)  # [M, K]
        cells, response = flat_cells(tree, settings.vocabulary, group, number.flatten())
        return Drawn(
            problem=problems,
            cells=cells,
            response=response,
            group=group,
            rewards=rewards.gather(1, number).flatten(),
            reference_logprobs=reference[cells],
            behavior_logprobs=sampler.flatten()[cells],
        )

    return draw


def on_policy(world: World, settings: Settings, seed: int) -> Draw:
    """The policy being trained samples every step's responses."""
    return sampled(world, settings, seed, lambda step, policy: policy)


def uniform(world: World, settings: Settings, seed: int) -> Draw:
    """Every next token is equally likely, whatever the policy has learned."""
    equal = torch.full(world.reference.shape, -math.log(settings.vocabulary))
    return sampled(world, settings, seed, lambda step, policy: equal)


def stale(world: World, settings: Settings, seed: int) -> Draw:
    """A copy of the policy samples, renewed every STALE_STEPS steps."""
    copy = world.reference.float()

    def sampler_at(step: int, policy: Tensor) -> Tensor:
        nonlocal copy
        if step % STALE_STEPS == 0:
            copy = policy.clone()
        return copy

    return sampled(world, settings, seed, sampler_at)


def replay(world: World, settings: Settings, seed: int) -> Draw:
    """The replay buffer: every PUBLISH_STEPS steps PUBLISHED_RESPONSES of each problem arrive.

    They are the policy's of that step. The buffer's settings are those a run has unless told
    otherwise, but for its capacity: half of the groups are drawn from what the last publication
    brought and half from all that is stored, uniformly; equal responses are stored once.

    How close it ends depends on how many responses arrive: until a rare one has come up, nothing
    holds its probability down. After 2000 steps `tb_vargrad` was at KL = 1.1e-2 with 16 arrivals
    a publication, 8e-4 with 64 and 2e-4 with 128. Capacity, here enough for all 121 responses,
    hardly matters: with a run's default of 100 it was 1.1e-2, 1.3e-3 and 2e-4.
    """
    tree, vocabulary, k = world.tree, settings.vocabulary, settings.responses_per_prompt
    generator = torch.Generator().manual_seed(seed)
    num_problems = world.rewards.shape[0]
    table = world.reference[0].numel()
    reference = world.reference.float().flatten().numpy()
    cells_of = [row[mask].numpy() for row, mask in zip(tree.cells, tree.mask, strict=True)]
    buffer = Buffer(
        max_tokens=10**6,
        capacity_per_prompt=CAPACITY,
        deduplicate=True,
        recency_prob=0.5,
        rule=uniform_rule,
        seed=seed,
    )

    def arrivals(step: int, policy: Tensor) -> Iterator[Trajectory]:
        flat = policy.flatten().numpy()
        numbers = sample(policy, tree, PUBLISHED_RESPONSES, generator).tolist()
        for problem in range(num_problems):
            for number in numbers[problem]:
                cells = cells_of[number] + problem * table
                behavior = flat[cells]
                reward = float(world.rewards[problem, number])
                yield Trajectory(
                    prompt_id=problem,
                    prompt_tokens=np.array([problem], np.int32),
                    response_tokens=tree.tokens[number],
                    behavior_logprobs=behavior,
                    old_logprobs=behavior,
                    reference_logprobs=reference[cells],
                    reference_version=0,
                    reward=reward,
                    reward_parts={},
                    version_start=step,
                    version_end=step,
                    truncated=tree.truncated[number],
                )

    def draw(step: int, policy: Tensor) -> Drawn:
        if step % PUBLISH_STEPS == 0:
            buffer.new_window()
            buffer.add(arrivals(step, policy))
        groups = buffer.draw(num_problems, k)
        rows = [t for group in groups for t in group.trajectories]
        problem = torch.tensor([group.prompt_id for group in groups])  # [G]
        sizes = torch.tensor([len(group.trajectories) for group in groups])
        number = torch.tensor([tree.number[t.response_tokens.tobytes()] for t in rows])  # [B]
        group = torch.arange(len(groups)).repeat_interleave(sizes)
        cells, response = flat_cells(tree, vocabulary, problem[group], number)
        return Drawn(
            problem=problem,
            cells=cells,
            response=response,
            group=group,
            rewards=torch.tensor([t.reward for t in rows]),
            reference_logprobs=torch.from_numpy(
                np.concatenate([t.reference_logprobs for t in rows])
            ),
            behavior_logprobs=torch.from_numpy(np.concatenate([t.behavior_logprobs for t in rows])),
        )

    return draw


SETTINGS: dict[str, Callable[[World, Settings, int], Draw]] = {
    "on_policy": on_policy,
    "uniform": uniform,
    "stale": stale,
    "replay": replay,
}


# Training, which is the same for all.


Objective = Callable[..., losses.LossOutput]


def train(world: World, objective: Objective, draw: Draw, settings: Settings) -> Tensor:
    """Train a table of logits from the reference policy on; every seed and prompt at once.

    Adam treats each number of the table for itself, so the problems are independent runs of one
    objective, but for objectives that weigh the groups of a step against each other.

    Returns:
        float64 [M, S, V], nats, log-probs of the trained policy.
    """
    logits = world.reference.float().requires_grad_()
    log_z = torch.zeros(logits.shape[0], requires_grad=True)  # no gradient unless it is learned
    optimizer = torch.optim.Adam(
        [{"params": [logits], "lr": settings.lr}, {"params": [log_z], "lr": settings.log_z_lr}],
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 - s / settings.num_steps)
    for step in range(settings.num_steps):
        policy = logits.log_softmax(-1)  # [M, S, V]
        drawn = draw(step, policy.detach())
        batch = Batch(
            policy_logprobs=policy.flatten()[drawn.cells],
            reference_logprobs=drawn.reference_logprobs,
            behavior_logprobs=drawn.behavior_logprobs,
            old_logprobs=drawn.behavior_logprobs,
            response=drawn.response,
            group=drawn.group,
            rewards=drawn.rewards,
            num_groups=drawn.problem.shape[0],
            log_z=log_z[drawn.problem],
        )
        optimizer.zero_grad(set_to_none=True)
        objective(batch, beta=settings.beta).loss.backward()
        optimizer.step()
        schedule.step()
    return logits.detach().double().log_softmax(-1)  # in float32 a KL of 1e-8 would be rounding


@dataclass(slots=True, kw_only=True)
class Result:
    """One objective in one setting; each list has a number a seed, the mean over its prompts."""

    objective: str
    setting: str
    kl: list[float]  # KL(pi, pi*), nats
    variation: list[float]  # total variation, 0..1
    cpu_s: float  # of this run


def run_one(label: str, setting: str, settings: Settings) -> Result:
    """Train one objective in one setting and measure what it has become."""
    start = time.process_time()
    world = make_world(settings)
    draw = SETTINGS[setting](world, settings, SAMPLING_SEED)
    policy = train(world, objective_named(label), draw, settings)
    kl, variation = (d.view(settings.num_seeds, -1).mean(1) for d in distances(policy, world))
    return Result(
        objective=label,
        setting=setting,
        kl=kl.tolist(),
        variation=variation.tolist(),
        cpu_s=time.process_time() - start,
    )


def objective_named(label: str) -> Objective:
    """The function of losses.py that a label of OBJECTIVES stands for, its keywords bound."""
    name, keywords = OBJECTIVES[label]
    return partial(getattr(losses, name), **keywords)


def run_all(
    objectives: Sequence[str], names: Sequence[str], settings: Settings, num_processes: int
) -> list[Result]:
    """Every objective in every setting, over some processes; progress goes to stderr."""
    # The slow setting first, so that no process is left alone with it at the end.
    jobs = [(o, s) for s in sorted(names, key=lambda s: s != "replay") for o in objectives]
    results: list[Result] = []
    with ProcessPoolExecutor(
        max_workers=min(num_processes, len(jobs)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        futures = [pool.submit(run_one, o, s, settings) for o, s in jobs]
        try:
            for future in as_completed(futures):
                result = future.result()
                results.append(result)
                print(
                    f"[{len(results)}/{len(jobs)}] {result.objective}, {result.setting}: "
                    f"KL {np.mean(result.kl):.1e} nats, {result.cpu_s:.1f} s of CPU",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    order = {job: i for i, job in enumerate(product(objectives, names))}
    return sorted(results, key=lambda r: order[r.objective, r.setting])


# What it writes.


def mean_kl(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """objective -> setting -> KL(pi, pi*) in nats, mean over prompts and seeds."""
    table: dict[str, dict[str, float]] = {}
    for result in results:
        table.setdefault(result.objective, {})[result.setting] = float(np.mean(result.kl))
    return table


def verdict(results: Sequence[Result]) -> str:
    """One line: whether every trajectory balance objective ended at the optimum."""
    balance = [r for r in results if OBJECTIVES[r.objective][0] in TRAJECTORY_BALANCE]
    missed = [r for r in balance if not np.mean(r.kl) < THRESHOLD]
    if not balance:
        return "No trajectory balance objective was run."
    if not missed:
        return f"Every trajectory balance objective run: KL < {THRESHOLD:g} in every setting run."
    names = ", ".join(f"{r.objective} in {r.setting} ({np.mean(r.kl):.1e})" for r in missed)
    return f"Trajectory balance objectives that did NOT come below KL = {THRESHOLD:g}: {names}."


def report(
    results: Sequence[Result], settings: Settings, *, command: str, wall_s: float, processes: int
) -> str:
    """The figures with all that is needed to make them again, in markdown."""
    world = make_world(settings)
    start_kl, start_variation = (float(d.mean()) for d in distances(world.reference, world))
    names = list(dict.fromkeys(r.setting for r in results))
    labels = list(dict.fromkeys(r.objective for r in results))
    by_job = {(r.objective, r.setting): r for r in results}

    def table(cell: Callable[[Result], str]) -> list[str]:
        rows = [["objective", *names]]
        rows += [[label, *(cell(by_job[label, name]) for name in names)] for label in labels]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        rows.insert(1, ["-" * width for width in widths])
        return [
            "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
            for row in rows
        ]

    def keywords(label: str) -> str:
        name, bound = OBJECTIVES[label]
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in bound.items())})"

    s = settings
    return "\n".join(
        [
            "# Distance from the exact optimum",
            "",
            f"`{command}`: {wall_s:.0f} s on {processes} processes of one thread, "
            f"{sum(r.cpu_s for r in results):.0f} s of CPU in all.",
            "",
            f"KL(pi, pi*) in nats after {s.num_steps} steps, by enumeration: the mean over "
            f"{s.num_prompts} prompts,",
            f"then the mean over {s.num_seeds} seeds (the largest seed). Bold: below "
            f"{THRESHOLD:g}. The reference policy, where every",
            f"run starts: {start_kl:.2f}.",
            "",
            *table(_kl_cell),
            "",
            verdict(results),
            "",
            "![KL](gibbs.png)",
            "",
            "## Total variation",
            "",
            f"Half the sum of |pi - pi*|, mean (largest seed); the reference: "
            f"{start_variation:.2f}.",
            "",
            *table(lambda r: f"{np.mean(r.variation):.1e} ({np.max(r.variation):.1e})"),
            "",
            "## How it was made",
            "",
            f"- World: vocabulary {s.vocabulary} with the end of text, responses of at most "
            f"{s.max_tokens} tokens ({len(world.tree.tokens)} in all, those cut",
            f"  without an end included), {s.num_prompts} prompts, seeds 0..{s.num_seeds - 1}. "
            "Reference: normal logits of deviation 0.7 a",
            f"  prefix; rewards uniform in 0..1; beta = {s.beta:g}. The policy is a table of "
            "logits and starts as the reference.",
            f"- Training, the same for all and tuned for none: {s.num_steps} steps, each with "
            f"{s.responses_per_prompt} responses of every prompt; Adam",
            f"  (0.9, 0.999), learning rate {s.lr:g} falling linearly to 0, no clipping of the "
            f"gradient. A learned log Z: from 0, rate {s.log_z_lr:g}.",
            "- All seeds and prompts form one step. They don't touch each other, but for "
            "objectives that weigh groups of a step",
            "  against each other (difficulty weights, dgpo).",
            "- on_policy: the policy samples each step's responses.",
            "- uniform: every next token is equally likely. stale: a copy of the policy samples, "
            f"renewed every {STALE_STEPS} steps.",
            "- replay: `Buffer(recency_prob=0.5)`, deduplicated, uniform rule, at most "
            f"{CAPACITY} responses of a prompt;",
            f"  every {PUBLISH_STEPS} steps a new window and {PUBLISHED_RESPONSES} responses of "
            "every prompt from the current policy.",
            "- Behavior log-probs are exact, those of the policy that sampled.",
            "",
            "Calls: " + "; ".join(f"`{keywords(label)}`" for label in labels) + ".",
            "",
        ]
    )


def _kl_cell(result: Result) -> str:
    mean = float(np.mean(result.kl))
    text = f"{mean:.1e}"
    if mean < THRESHOLD:
        text = f"**{text}**"
    return f"{text} ({np.max(result.kl):.1e})"


def draw_figure(results: Sequence[Result], path: Path) -> None:
    """Heat map of log10 KL, objectives down and settings across; white is the threshold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    table = mean_kl(results)
    labels, names = list(table), list(next(iter(table.values())))
    # Below 1e-8 is the rounding of float32 parameters; the colours needn't tell it apart.
    values = np.clip([[table[o][s] for s in names] for o in labels], 1e-8, 10)
    middle = math.log10(THRESHOLD)

    figure = Figure(
        figsize=(2.4 + 1.5 * len(names), 1.7 + 0.36 * len(labels)),
        dpi=130,
        layout=ConstrainedLayoutEngine(),
    )
    FigureCanvasAgg(figure)  # not pyplot: no window is opened and no figure kept alive
    axes = figure.subplots()
    image = axes.imshow(
        np.log10(values), cmap="RdBu_r", norm=TwoSlopeNorm(middle, -8, 1), aspect="auto"
    )
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(labels)), labels)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for i, label in enumerate(labels):
        for j, name in enumerate(names):
            # Dark cells lie at both ends of the colour scale.
            dark = abs(image.norm(math.log10(values[i, j])) - 0.5) > 0.35
            color = "white" if dark else "black"
            text = f"{table[label][name]:.0e}"
            axes.text(j, i, text, ha="center", va="center", fontsize=9, color=color)
    bar = figure.colorbar(image, ax=axes, ticks=[-8, -6, -4, middle, -2, -1, 0, 1])
    bar.set_label("log10 KL(pi, pi*), nats")
    bar.ax.axhline(middle, color="black", linewidth=1.5)
    bar.ax.text(-0.15, middle, f"{THRESHOLD:g} ", ha="right", va="center", fontsize=8)
    figure.suptitle("Distance from the exact optimum, by who samples")
    figure.savefig(path)


def write(
    results: Sequence[Result], settings: Settings, folder: Path, text: str, *, command: str
) -> None:
    """Leave gibbs.md, gibbs.json and gibbs.png in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gibbs.md").write_text(text)
    record = {
        "command": command,
        "settings": asdict(settings),
        "stale_steps": STALE_STEPS,
        "publish_steps": PUBLISH_STEPS,
        "published_responses": PUBLISHED_RESPONSES,
        "capacity": CAPACITY,
        "threshold": THRESHOLD,
        "calls": {r.objective: OBJECTIVES[r.objective] for r in results},
        "results": [asdict(r) for r in results],
    }
    (folder / "gibbs.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_figure(results, folder / "gibbs.png")


def main() -> None:
    """Run the check, write it to --out, and print the table and, last, one line of JSON."""
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Train every objective in a world small enough to enumerate, and measure "
        "how far it ends from the exact optimum."
    )
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=default.num_seeds, help="number of worlds")
    parser.add_argument("--steps", type=int, default=default.num_steps)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    args = parser.parse_args()
    for name in ("seeds", "steps", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")

    settings = Settings(num_seeds=args.seeds, num_steps=args.steps)
    objectives, names = list(dict.fromkeys(args.objectives)), list(dict.fromkeys(args.settings))
    command = shlex.join(["python", "experiments/gibbs.py", *sys.argv[1:]])
    start = time.perf_counter()
    results = run_all(objectives, names, settings, args.processes)
    text = report(
        results,
        settings,
        command=command,
        wall_s=time.perf_counter() - start,
        processes=args.processes,
    )
    write(results, settings, args.out, text, command=command)
    print(text)
    print(json.dumps(mean_kl(results)))


if __name__ == "__main__":
    main()
