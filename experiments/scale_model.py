"""A discrete-event model of the job: searchers, trainers, and what runs between them.

    simulate(costs, system) -> Result     one job, event by event
    capacities(costs, system)             what each stage could sustain alone, in closed form
    loads(costs, system, flow)            how much of each stage a flow of responses uses

Every cost is one of these formulas; names are fields of `Costs` and `System`. Seconds and bytes.
B requests run in an engine, with C tokens of context in all; P tokens of a prompt, L of a response,
S responses a prompt, N searchers (engines), T trainers, W = T + N ranks.

    decode step      decode_overhead + max(weights_read + C kv_read, B decode_token)
    n decode steps   n times that, with C + B n / 2 for C: to the next response that ends
    prompt           prefill_token P, once for the S responses of a prompt (prefix cache)
    new weights      load; in the middle of a generation + prefill_token C if KV is computed anew
    reference        reference_token (P + sum of L) a prompt's group, on the engine's device
    reward           reward, in processes of its own: a delay
    sending          G groups scored together have, each, S response_bytes + prompt_token_bytes S P
                     + token_bytes sum of L; that takes these / (T link) + message (min(G / T, 1)
                     + 1) of the trainers' receiving: a group goes to one trainer, the searcher's
                     counters to each of them
    buffer           insert for each response that came and draw for each that is drawn, on the
                     trainer's main thread, over T
    training step    train_step + max(train_token tokens / T, gathers), tokens: P + sum of L a group
    gathers          ceil(tokens / (T tokens_per_pass)) gather_pass + reduce, of a sharded policy
    snapshot         snapshot, every publish_every steps, on the trainer's main thread
    broadcast        to n workers; ring (NCCL): weight_bytes / broadcast_link + n hop
                     tree (gloo): ceil(log2(n + 1)) (weight_bytes / broadcast_link + hop)
    heartbeats       W store_get of rank 0 in every heartbeat_period + W store_get

What a rank does takes its core or device; jobs on one core share it equally (processor sharing),
and with fewer cores than ranks, ranks share cores as `Ranks.cores` deals them. Transport and
broadcast take no core. The trainers are in lock-step and count as one. A draw takes whole groups
(K = S), window and store each in turn without repetition, as `Buffer` does; nothing comes twice.
Searchers are alike: more than `max_engines` are simulated as that many, each standing for several.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

# --------------------------------------------------------------------------- what goes in


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What things take, on the device or core of one rank; the formulas are above."""

    # generation, of one engine
    decode_overhead_s: float = 0.0  # a decode step: scheduler, kernel launches
    weights_read_s: float = 0.0  # a decode step: reading the weights
    kv_read_s: float = 0.0  # a decode step and context token: reading its keys and values
    decode_token_s: float = 0.0  # a token: arithmetic
    prefill_token_s: float = 0.0  # a token of a prompt, or whose KV is computed anew
    # scoring
    reference_token_s: float = 0.0  # a token
    reward_s: float = 0.0  # from a group's end to its rewards
    # transport and buffer
    response_bytes: float = 0.0  # a response, besides its tokens
    token_bytes: float = 0.0  # a response token
    prompt_token_bytes: float = 0.0  # a prompt token, in every response to it
    link_bytes_per_s: float = math.inf  # into one trainer
    message_s: float = 0.0  # a message, of a trainer's receiving thread
    insert_s: float = 0.0  # a response: unpacking and inserting it
    draw_s: float = 0.0  # a response
    # training
    train_step_s: float = 0.0  # a step, however large
    train_token_s: float = 0.0  # a token (prompts once a group), on one trainer
    gather_pass_s: float = 0.0  # a forward and backward pass: gathering a sharded policy
    reduce_s: float = 0.0  # a step: adding up a sharded gradient
    # publishing
    weight_bytes: float = 0.0  # of a version, in the engines' dtype
    snapshot_s: float = 0.0  # a publication
    broadcast: str = "ring"  # ring (NCCL) | tree (gloo)
    broadcast_bytes_per_s: float = math.inf  # of one link
    broadcast_hop_s: float = 0.0  # ring: a worker; tree: a level
    load_s: float = 0.0  # a version, of an engine
    store_get_s: float = 0.0  # a read from the control store


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The job: how many of what, and its settings, named as in the configuration."""

    searchers: int = 1  # N, engines
    trainers: int = 1  # T
    workers_per_searcher: int = 1  # searcher.tp: each receives the weights
    mode: str = "async"  # async | sync
    update: str = "inflight"  # inflight | between: once what is under way has ended
    kv_recompute: bool = True  # inflight: of the requests under way, at every update
    responses_per_prompt: int = 16  # S
    max_num_seqs: int = 256  # requests that run in an engine at once
    prompts_in_flight: int = 16  # groups under way at once in an engine; mode=sync: of a round
    score_every_s: float = 0.25  # that complete groups wait for others, or until
    score_tokens: float = (
        8192.0  # they have so many response tokens, to be scored and sent together
    )
    max_outstanding: int = 8  # messages under way from a searcher before it waits
    prompt_tokens: float = 200.0  # P
    mean_tokens: float = 1000.0  # of a response, before the limit cuts the longest
    cv_tokens: float = 0.0  # standard deviation over mean of the log-normal lengths; 0: all alike
    max_tokens: int = 1 << 20  # limit of a response
    batch_size: int = 1024  # responses a step
    publish_every: int = 1  # k
    recency_prob: float = 1.0  # m
    max_reuse: int | None = None  # draws of one response; None: no bound
    max_staleness: int | None = None  # steps; None: no bound
    buffer_tokens: float = 1e8  # of a trainer
    initial_responses: int = 0  # before the first step
    tokens_per_pass: int = 16384  # trainer.tokens_per_micro_batch
    steps: int = 30  # optimizer steps
    warmup_steps: int = 0  # of these, which the result leaves out
    start_full: bool = False  # engines begin in mid-generation, as if they had run for long
    cores: int | None = None  # that all ranks share; None: each rank has a device of its own
    heartbeat_period_s: float = 0.5
    max_engines: int = 8  # simulated one by one
    max_responses: float = math.inf  # generated, after which the simulation ends before `steps`
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in ("async", "sync") or self.update not in ("inflight", "between"):
            raise ValueError(f"mode={self.mode} update={self.update}: no such mode or update")
        if self.batch_size % self.responses_per_prompt:
            raise ValueError(
                f"batch_size={self.batch_size} is not a multiple of responses_per_prompt="
                f"{self.responses_per_prompt}: a step takes whole groups"
            )
        if min(self.searchers, self.trainers, self.responses_per_prompt, self.max_num_seqs) < 1:
            raise ValueError("searchers, trainers, responses_per_prompt, max_num_seqs: at least 1")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps}: must be below steps={self.steps}")
        if self.cores is not None and self.trainers != 1:
            raise ValueError(f"cores={self.cores}: only one trainer can share cores")

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.responses_per_prompt

    @property
    def ranks(self) -> int:
        """W, one a searcher whatever its tensor parallelism."""
        return self.trainers + self.searchers


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a job did between the end of its warm-up and its last step.

    Counts of responses are since the job began, so that they add up:
    generated = received + in_transit, received = stored + evicted + expired.
    """

    wall_s: float
    steps_per_s: float
    generated_responses_per_s: float
    generated_tokens_per_s: float  # response tokens, when their response ends
    trained_responses_per_s: float  # each use counted
    trained_tokens_per_s: float
    staleness_mean: float  # optimizer steps, of a response's first token
    staleness_p95: float
    staleness_last_mean: float  # of its last token
    reuse_mean: float  # draws that a drawn response had before
    unused_fraction: float  # share of the responses that left the buffer without a draw
    trainer_idle_fraction: float
    searcher_idle_fraction: float
    searcher_update_fraction: float  # share of the engines' time: loading, computing KV anew
    broadcast_fraction: float  # share of wall-clock with a broadcast under way
    receiving_fraction: float  # share of the trainers' receiving that is used
    insert_fraction: float  # share of the trainers' time: inserting and drawing
    heartbeat_fraction: float  # share of rank 0's control thread: asking the store
    versions_published: int
    versions_replaced: int  # by a newer one before their broadcast began
    generated: int  # responses that ended
    received: int
    stored: int
    evicted: int
    expired: int
    in_transit: int  # their group being completed, scored or sent


# --------------------------------------------------------------------------- closed forms


def lengths(system: System) -> tuple[int, ...]:
    """Response lengths at evenly spaced quantiles, tokens; at least 1, at most max_tokens.

    Log-normal with the given mean and coefficient of variation. A fractional length is rounded up
    as often as its fraction says.

    >>> table = lengths(System(mean_tokens=2.25))
    >>> sorted(set(table)), sum(table) / len(table)
    ([2, 3], 2.25)
    """
    return _lengths(system.mean_tokens, system.cv_tokens, system.max_tokens)


@cache
def _lengths(mean: float, cv: float, longest: int, count: int = 4096) -> tuple[int, ...]:
    sigma = math.sqrt(math.log1p(cv**2))
    mu = math.log(mean) - sigma**2 / 2
    normal = NormalDist()
    table = []
    for i in range(count):
        # an odd multiplier visits all fractions, in an order unrelated to the length
        dither = ((i * 1597) % count + 0.5) / count
        value = mean
        if sigma:
            value = math.exp(mu + sigma * normal.inv_cdf((i + 0.5) / count))
        table.append(min(max(math.floor(value + dither), 1), longest))
    return tuple(table)


def decode_steps_s(costs: Costs, running: float, context: float, steps: float) -> float:
    """Seconds of `steps` decode steps of `running` requests that begin with `context` tokens."""
    memory_s = costs.weights_read_s + (context + running * steps / 2) * costs.kv_read_s
    return steps * (costs.decode_overhead_s + max(memory_s, running * costs.decode_token_s))


def broadcast_s(costs: Costs, workers: int) -> float:
    """Seconds of one broadcast to `workers` engine workers.

    >>> from dataclasses import replace
    >>> ring = Costs(weight_bytes=10.0, broadcast_bytes_per_s=5.0, broadcast_hop_s=0.1)
    >>> broadcast_s(ring, 3), broadcast_s(replace(ring, broadcast="tree"), 3)
    (2.3, 4.2)
    """
    bytes_s = costs.weight_bytes / costs.broadcast_bytes_per_s
    if costs.broadcast == "tree":
        return math.ceil(math.log2(workers + 1)) * (bytes_s + costs.broadcast_hop_s)
    return bytes_s + workers * costs.broadcast_hop_s


def train_step_s(costs: Costs, system: System, tokens: float) -> float:
    """Seconds of a training step on `tokens` tokens, without inserting and drawing."""
    trainers = system.trainers
    gathers_s = 0.0
    if trainers > 1:
        passes = math.ceil(tokens / (trainers * system.tokens_per_pass))
        gathers_s = passes * costs.gather_pass_s + costs.reduce_s
    return costs.train_step_s + max(costs.train_token_s * tokens / trainers, gathers_s)


def receive_s(costs: Costs, system: System, groups: float, tokens: float) -> float:
    """Seconds of the trainers' receiving for one searcher's `groups` with `tokens` of responses."""
    responses = groups * system.responses_per_prompt
    size = responses * (costs.response_bytes + costs.prompt_token_bytes * system.prompt_tokens)
    size += costs.token_bytes * tokens
    messages = min(groups / system.trainers, 1.0) + 1.0
    return size / (system.trainers * costs.link_bytes_per_s) + costs.message_s * messages


def heartbeat_fraction(costs: Costs, system: System) -> float:
    """Share of its time that rank 0's control thread spends asking for heartbeats."""
    round_s = system.ranks * costs.store_get_s
    return round_s / (system.heartbeat_period_s + round_s)


def running_requests(system: System) -> float:
    """Requests that run in an engine on average, B: those of its groups that have not ended.

    A group is under way as long as its longest response, a request as long as its own.

    >>> from dataclasses import replace
    >>> alike = System(prompts_in_flight=4, responses_per_prompt=8, max_num_seqs=100)
    >>> running_requests(alike), running_requests(replace(alike, max_num_seqs=20))
    (32.0, 20.0)
    """
    table = sorted(lengths(system))
    count, size = len(table), system.responses_per_prompt
    longest = sum(
        length * (((i + 1) / count) ** size - (i / count) ** size) for i, length in enumerate(table)
    )
    under_way = system.prompts_in_flight * size * sum(table) / count / longest
    return min(float(system.max_num_seqs), under_way)


def mean_tokens(system: System) -> float:
    """Mean length of a response, cut at the limit."""
    table = lengths(system)
    return sum(table) / len(table)


def mean_context(system: System) -> float:
    """Tokens of context of a request that is met in mid-generation: P + E[L^2] / 2 E[L]."""
    table = lengths(system)
    return system.prompt_tokens + sum(length * length for length in table) / (2 * sum(table))


def response_s(costs: Costs, system: System) -> float:
    """Seconds of one engine for one response, in continuous search, updates left out."""
    mean = mean_tokens(system)
    running = running_requests(system)
    step_s = decode_steps_s(costs, running, running * mean_context(system), 1.0)
    prompt = system.prompt_tokens / system.responses_per_prompt
    return (
        mean * step_s / running
        + prompt * costs.prefill_token_s
        + (mean + prompt) * costs.reference_token_s
    )


def step_tokens(system: System) -> float:
    """Mean tokens of a training step: responses, and prompts once a group."""
    return system.batch_size * mean_tokens(system) + system.groups_per_step * system.prompt_tokens


def update_s(costs: Costs, system: System) -> float:
    """Seconds that taking one version costs an engine, in continuous search."""
    seconds = costs.load_s
    if system.update == "inflight" and system.kv_recompute:
        seconds += costs.prefill_token_s * running_requests(system) * mean_context(system)
    return seconds


def capacities(costs: Costs, system: System) -> dict[str, float]:
    """Responses a second that each stage could sustain if no other held it up.

    `generation` is of continuous search, less what taking versions costs as fast as they come: at
    the rate of training, or of generation where that is slower. `training` is of responses used
    once, inserting and drawing them included. `broadcast` is the flow whose publications would
    follow one another without a pause: beyond it versions are replaced before they are sent.
    """
    per_version = system.batch_size * system.publish_every  # responses
    own_s = system.batch_size * (costs.insert_s + costs.draw_s) / system.trainers
    step_s = train_step_s(costs, system, step_tokens(system)) + own_s
    training = _rate(system.batch_size, step_s + costs.snapshot_s / system.publish_every)
    response_tokens = system.batch_size * mean_tokens(system) / system.groups_per_step
    alone = _rate(system.searchers, response_s(costs, system))
    # flow = alone (1 - update_s flow / per_version), where trainers keep up
    generation = 1 / (1 / alone + update_s(costs, system) / per_version)
    if generation > training:
        generation = alone * (1 - update_s(costs, system) * training / per_version)
    workers = system.searchers * system.workers_per_searcher
    return {
        "generation": generation,
        "training": training,
        "receiving": _rate(
            system.responses_per_prompt, receive_s(costs, system, 1, response_tokens)
        ),
        "inserting": _rate(system.trainers, costs.insert_s),
        "broadcast": _rate(per_version, broadcast_s(costs, workers)),
    }


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf


def loads(costs: Costs, system: System, flow: float) -> dict[str, float]:
    """Share of each stage that a flow of responses, each trained on once, would use; above 1 it
    can't keep up.

    `updates` is the share of the engines' time that taking its versions would cost, `heartbeats`
    the time of one round of them over its period.
    """
    shares = {stage: flow / rate for stage, rate in capacities(costs, system).items()}
    versions_per_s = flow / (system.batch_size * system.publish_every)
    shares["updates"] = versions_per_s * update_s(costs, system)
    shares["heartbeats"] = system.ranks * costs.store_get_s / system.heartbeat_period_s
    return shares


# --------------------------------------------------------------------------- simulation


def simulate(costs: Costs, system: System) -> Result:
    """Runs the job to its last step.

    Raises:
        ValueError: the job can't go on: a draw needs more than the buffer can hold.
    """
    return _Job(costs, system).run()


_STUCK = (
    "the job waits for ever: buffer_tokens, max_reuse, max_staleness or max_outstanding never let "
    "the groups of a step come together"
)


class _Loop:
    """Events in order of time; among equals, in order of making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._made = 0

    def at(self, time: float, call: Callable[..., None], *args: object) -> None:
        self._made += 1
        heapq.heappush(self._heap, (time, self._made, call, args))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            if not self._heap:
                raise ValueError(_STUCK)
            self.now, _, call, args = heapq.heappop(self._heap)
            call(*args)


@dataclass(slots=True, eq=False)
class _Work:
    end: float  # in service received since the core began
    done: Callable[[], None]


class _Core:
    """A core or device, whose jobs each get an equal share of it."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._jobs: list[_Work] = []
        self._served, self._since = 0.0, 0.0  # service that every job has had, and when
        self._plan_number = 0

    def run(self, work_s: float, done: Callable[[], None]) -> _Work:
        """`done` is called when `work_s` seconds of a whole core have been spent on it."""
        self._serve()
        work = _Work(self._served + work_s, done)
        self._jobs.append(work)
        self._plan()
        return work

    def stop(self, work: _Work) -> float:
        """Ends it early; returns the seconds of a whole core that it still lacked."""
        self._serve()
        self._jobs.remove(work)
        self._plan()
        return max(work.end - self._served, 0.0)

    def _serve(self) -> None:
        now = self._loop.now
        if self._jobs:
            self._served += (now - self._since) / len(self._jobs)
        self._since = now

    def _plan(self) -> None:
        self._plan_number += 1
        if not self._jobs:
            return
        first = min(self._jobs, key=lambda work: work.end)
        wait_s = max(first.end - self._served, 0.0) * len(self._jobs)
        self._loop.at(self._loop.now + wait_s, self._end, self._plan_number, first)

    def _end(self, plan_number: int, work: _Work) -> None:
        if plan_number != self._plan_number:
            return
        self._serve()
        self._jobs.remove(work)
        self._plan()
        work.done()


class _Waits:
    """Seconds that a rank has nothing to do."""

    def __init__(self, loop: _Loop) -> None:
        self._loop, self._since, self._total = loop, 0.0, 0.0
        self._waiting = False

    def set(self, waiting: bool) -> None:
        if self._waiting:
            self._total += self._loop.now - self._since
        self._waiting, self._since = waiting, self._loop.now

    def total(self) -> float:
        self.set(self._waiting)
        return self._total


@dataclass(slots=True, eq=False)
class _Group:
    """The S responses to one prompt, in one engine."""

    left: int  # responses that have not ended
    tokens: int = 0  # of those that have
    first: Counter = field(default_factory=Counter)  # version of a first token -> responses
    last_sum: int = 0  # of the versions of the last tokens


@dataclass(slots=True, eq=False)
class _Entry:
    """A group in the buffer, with its like of the engines that are simulated as one."""

    group: _Group
    copies: int
    alive: bool = True
    uses: int = 0  # of all copies
    drawn_at: int = -1  # the draw that took it last


class _InTurn:
    """Groups in random order, none again before the others have come."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._fresh: list[tuple[_Entry, int]] = []  # with the copies whose turn has not been
        self._seen: list[tuple[_Entry, int]] = []

    def add(self, entry: _Entry) -> None:
        self._fresh.append((entry, entry.copies))

    def take(self, usable: Callable[[_Entry], bool], draw: int) -> _Entry | None:
        """The next usable group that this draw has not taken; what is not usable is forgotten."""
        aside = []
        found = None
        refilled = False
        while found is None:
            if not self._fresh:
                if refilled or not self._seen:
                    break
                self._fresh, self._seen, refilled = self._seen, [], True
            place = int(self._rng.random() * len(self._fresh))
            self._fresh[place], self._fresh[-1] = self._fresh[-1], self._fresh[place]
            entry, left = self._fresh.pop()
            if not usable(entry):
                continue
            if entry.drawn_at == draw and entry.copies == 1:
                aside.append((entry, 1))
                continue
            found = entry
            if left > 1:
                self._fresh.append((entry, left - 1))
            else:
                self._seen.append((entry, entry.copies))
        self._seen += aside
        return found


class _Buffer:
    """All trainers' buffers, as one. Counts are of groups."""

    def __init__(self, system: System, rng: random.Random) -> None:
        self._system, self._rng = system, rng
        self._order: deque[_Entry] = deque()
        self._window, self._store = _InTurn(rng), _InTurn(rng)
        self._window_pending = False
        self._draws = 0
        self._limit = system.buffer_tokens * system.trainers
        self._tokens = 0.0
        self._available = 0  # that a draw can take
        self.received = self.stored = self.evicted = self.expired = 0
        self.unused = 0  # that left without a draw

    def add(self, group: _Group, copies: int) -> None:
        if self._window_pending:
            self._window, self._window_pending = _InTurn(self._rng), False
        entry = _Entry(group, copies)
        self._order.append(entry)
        self._window.add(entry)
        self._store.add(entry)
        self.received += copies
        self.stored += copies
        self._available += copies
        self._tokens += self._size(entry)
        while self._tokens > self._limit:
            self.evicted += self._remove()

    def new_window(self) -> None:
        self._window_pending = True

    def expire(self, step: int) -> None:
        """Forgets what is too old; what came first is as good as oldest."""
        if (bound := self._system.max_staleness) is None:
            return
        while self._order and min(self._order[0].group.first) < step - bound:
            self.expired += self._remove()

    def draw(self, count: int, step: int) -> list[_Entry]:
        """`count` groups, or none if there are not so many."""
        if self._available < count:
            return []
        reuse, bound = self._system.max_reuse, self._system.max_staleness
        self._draws += 1

        def usable(entry: _Entry) -> bool:
            if not entry.alive or (reuse is not None and entry.uses >= reuse * entry.copies):
                return False
            return bound is None or min(entry.group.first) >= step - bound

        drawn: list[_Entry] = []
        for _ in range(count):
            entry = None
            if self._rng.random() < self._system.recency_prob:
                entry = self._window.take(usable, self._draws)
            if entry is None:
                entry = self._store.take(usable, self._draws)
            if entry is None:  # some of those available are too old, if only just
                for other in drawn:
                    other.uses -= 1
                return []
            entry.drawn_at = self._draws
            entry.uses += 1
            drawn.append(entry)
        if reuse is not None:
            for entry in set(drawn):
                times = sum(other is entry for other in drawn) if entry.copies > 1 else 1
                self._available -= self._usable(entry, entry.uses - times) - self._usable(
                    entry, entry.uses
                )
        return drawn

    def newest(self, count: int) -> list[_Entry]:
        """The `count` groups that came last, in order of arrival."""
        return [self._order[place] for place in range(-count, 0)]

    def _usable(self, entry: _Entry, uses: int) -> int:
        """Copies that can be drawn after `uses` draws."""
        if self._system.max_reuse is None:
            return entry.copies
        return min(entry.copies, self._system.max_reuse * entry.copies - uses)

    def _size(self, entry: _Entry) -> float:
        return entry.copies * (entry.group.tokens + self._system.prompt_tokens)

    def _remove(self) -> int:
        entry = self._order.popleft()
        entry.alive = False
        self.stored -= entry.copies
        self.unused += max(entry.copies - entry.uses, 0)
        self._available -= self._usable(entry, entry.uses)
        self._tokens -= self._size(entry)
        return entry.copies


class _Engine:
    """One searcher, standing for `copies` of them."""

    def __init__(self, job: _Job, rank: int, copies: int) -> None:
        self.job, self.copies = job, copies
        self.core = job.core_of(rank)
        self.waits = _Waits(job.loop)
        self.update_s = 0.0
        self._version = 0
        self._offered = 0  # newest version that was broadcast
        self._open = 0  # groups under way
        self._queue: deque[tuple[_Group, int]] = deque()  # requests without a place: group, tokens
        self._running: list[tuple[int, int, int, _Group]] = []  # last step, number, tokens, group
        self._made = 0
        self._step = 0  # decode steps so far
        self._context = 0.0
        self._prefill = 0.0  # prompt tokens to read before the next decode step
        self._decoding: tuple[_Work, int, float] | None = None  # the work, its steps, its seconds
        self._loading = False
        self._complete: list[_Group] = []  # to be scored together
        self._complete_tokens = 0
        self._batch = 0  # number of that batch
        self._sending = 0  # messages under way
        self._round = -1  # mode=sync: the version that was last generated under
        self._lockstep = job.system.mode == "sync"
        self._inflight = not self._lockstep and job.system.update == "inflight"
        self._recompute = self._inflight and job.system.kv_recompute

    def start(self) -> None:
        if self.job.system.start_full and not self._lockstep:
            self._fill()
        self.go()

    def offer(self, version: int) -> None:
        """A broadcast has ended."""
        self._offered = version
        if self._inflight:
            self._interrupt()
        self.go()

    def go(self) -> None:
        """Goes on with whatever is next."""
        if self._loading or self._decoding:
            return
        system = self.job.system
        newer = self._offered > self._version
        if newer and (self._inflight or not self._open):
            self._load()
            return
        if self._sending > system.max_outstanding:
            self.waits.set(True)
            return
        if self._lockstep:
            if self._round < self._version and not self._open:
                self._round = self._version
                self._begin(self.job.round_size(self))
        elif not newer:  # else update=between: nothing new begins
            self._begin(system.prompts_in_flight - self._open)
        self._admit()
        self.waits.set(not self._running)
        if self._running:
            self._decode()

    # generating

    def _begin(self, groups: int) -> None:
        system = self.job.system
        for _ in range(groups):
            group = _Group(left=system.responses_per_prompt)
            self._open += 1
            self._prefill += system.prompt_tokens
            for _ in range(group.left):
                self._queue.append((group, self.job.length()))

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.job.system.max_num_seqs:
            self._push(*self._queue.popleft(), 0)

    def _push(self, group: _Group, length: int, done: int) -> None:
        self._made += 1
        group.first[self._version] += 1
        heapq.heappush(self._running, (self._step + length - done, self._made, length, group))
        self._context += self.job.system.prompt_tokens + done

    def _fill(self) -> None:
        """Groups as they are met in mid-generation: the longer the likelier, anywhere in them."""
        job = self.job
        size, longest = job.system.responses_per_prompt, job.longest
        while self._open < job.system.prompts_in_flight:
            lasting = [job.length() for _ in range(size)]
            age = int(job.rng.random() * longest)
            if age >= max(lasting):
                continue
            self._open += 1
            group = _Group(left=size)
            for length in lasting:
                if length <= age:
                    group.first[0] += 1
                    self._ended(group, length)
                elif len(self._running) < job.system.max_num_seqs:
                    self._push(group, length, age)
                else:
                    self._queue.append((group, length))

    def _decode(self) -> None:
        costs, running = self.job.costs, len(self._running)
        steps = self._running[0][0] - self._step
        seconds = decode_steps_s(costs, running, self._context, steps)
        work_s = seconds + self._prefill * costs.prefill_token_s
        self._prefill = 0.0
        self._decoding = self.core.run(work_s, self._decoded), steps, seconds

    def _advance(self, steps: int) -> None:
        self._step += steps
        self._context += steps * len(self._running)

    def _interrupt(self) -> None:
        """Decoding pauses after the step that is under way."""
        if self._decoding is None:
            return
        work, steps, seconds = self._decoding
        if steps == 1 or seconds == 0:
            return
        left_s = self.core.stop(work)
        prompts_s = max(left_s - seconds, 0.0)  # that are still to be read, before any step
        left_s -= prompts_s
        done = min(max(math.ceil(steps * (1 - left_s / seconds) - 1e-9), 1), steps)
        left_s = max(left_s - seconds * (1 - done / steps), 0.0)
        shorter = self.core.run(prompts_s + left_s, self._decoded)
        self._decoding = shorter, done, seconds * done / steps

    def _decoded(self) -> None:
        assert self._decoding is not None
        self._advance(self._decoding[1])
        self._decoding = None
        while self._running and self._running[0][0] <= self._step:
            _, _, length, group = heapq.heappop(self._running)
            self._context -= self.job.system.prompt_tokens + length
            self._ended(group, length)
            if not group.left:
                self._open -= 1
                self._completed(group)
        self.go()

    def _ended(self, group: _Group, length: int) -> None:
        group.tokens += length
        group.last_sum += self._version
        group.left -= 1
        self.job.count_generated(length, self.copies)

    # scoring, sending, loading

    def _completed(self, group: _Group) -> None:
        system = self.job.system
        self._complete.append(group)
        self._complete_tokens += group.tokens
        if self._lockstep:
            due = not self._open
        else:
            due = self._complete_tokens >= system.score_tokens or system.score_every_s == 0
        if due:
            self._score(self._batch)
        elif len(self._complete) == 1 and not self._lockstep:
            now = self.job.loop.now
            self.job.loop.at(now + system.score_every_s, self._score, self._batch)

    def _score(self, batch: int) -> None:
        if batch != self._batch:
            return
        job, groups = self.job, self._complete
        tokens = self._complete_tokens + len(groups) * job.system.prompt_tokens
        self._complete, self._complete_tokens, self._batch = [], 0, batch + 1
        work_s = tokens * job.costs.reference_token_s
        if work_s == 0:
            self._scored(groups)
        else:
            self.core.run(work_s, lambda: self._scored(groups))

    def _scored(self, groups: list[_Group]) -> None:
        loop, reward_s = self.job.loop, self.job.costs.reward_s
        if reward_s:
            loop.at(loop.now + reward_s, self._ship, groups)
        else:
            self._ship(groups)

    def _ship(self, groups: list[_Group]) -> None:
        self._sending += 1
        self.job.send(self, groups)

    def arrived(self) -> None:
        """A message has been received."""
        self._sending -= 1
        if self._sending == self.job.system.max_outstanding:
            self.go()

    def _load(self) -> None:
        costs = self.job.costs
        self._loading = True
        self.waits.set(False)
        work_s = costs.load_s
        if self._recompute:
            work_s += costs.prefill_token_s * self._context
        version = self._offered
        self.update_s += work_s
        self.core.run(work_s, lambda: self._loaded(version))

    def _loaded(self, version: int) -> None:
        self._loading = False
        self._version = version
        self.go()


class _Job:
    """The job: its engines, the way to the trainers, the trainers, the way back."""

    def __init__(self, costs: Costs, system: System) -> None:
        self.costs, self.system = costs, system
        self.loop = _Loop()
        self.rng = random.Random(system.seed)
        self._cores = [_Core(self.loop) for _ in range(system.cores or 0)]
        self._table = lengths(system)
        self.longest = max(self._table)
        self.buffer = _Buffer(system, self.rng)
        self.core = self.core_of(0)
        self.waits = _Waits(self.loop)
        few = system.searchers
        if system.cores is None and system.mode == "async":  # in a round each has its own share
            few = min(few, system.max_engines)
        more = system.searchers % few
        self.engines = [
            _Engine(self, system.trainers + i, system.searchers // few + (i < more))
            for i in range(few)
        ]
        # trainer
        self.version = 0
        self._training = False
        self._started = False
        self._backlog = 0  # responses received and not inserted yet
        self._round: deque[_Entry] = deque()  # mode=sync: what is left to train on
        # publishing
        self._waiting: int | None = None
        self._broadcasting = False
        self._broadcast_s = broadcast_s(costs, system.searchers * system.workers_per_searcher)
        # counters since the job began
        self.received_until = 0.0
        self.generated = self.generated_tokens = 0
        under_way = system.searchers * system.prompts_in_flight * system.responses_per_prompt
        self._patience = 100 * (system.batch_size + system.initial_responses + under_way)
        self._generated_before = 0
        self.trained = self.trained_tokens = 0
        self.published = self.replaced = 0
        self.busy = Counter[str]()  # seconds of broadcast, receiving, inserting
        self.in_transit = 0  # responses
        # of the steps that count
        self._ages = Counter[int]()
        self._last_age_sum = self._reuse_sum = 0
        self._before: dict[str, float] | None = None

    def core_of(self, rank: int) -> _Core:
        """As `Ranks.cores`: in turn, where there are fewer cores than ranks."""
        if self.system.cores is None or self.system.cores >= self.system.ranks:
            return _Core(self.loop)
        return self._cores[rank % len(self._cores)]

    def run(self) -> Result:
        for engine in self.engines:
            engine.start()
        self.waits.set(True)
        self._wake()
        system = self.system
        self.loop.run(
            lambda: self.version == system.steps or self.generated >= system.max_responses
        )
        return self._result()

    def length(self) -> int:
        return self._table[int(self.rng.random() * len(self._table))]

    def round_size(self, engine: _Engine) -> int:
        """mode=sync: prompts of one engine in a round."""
        total = self.system.groups_per_step * self.system.publish_every
        place = self.engines.index(engine)
        return total // len(self.engines) + (place < total % len(self.engines))

    # searchers to trainers

    def count_generated(self, length: int, copies: int) -> None:
        self.generated += copies
        self.generated_tokens += copies * length
        self.in_transit += copies

    def send(self, engine: _Engine, groups: list[_Group]) -> None:
        tokens = sum(group.tokens for group in groups)
        service_s = engine.copies * receive_s(self.costs, self.system, len(groups), tokens)
        self.busy["receiving"] += service_s
        self.received_until = max(self.received_until, self.loop.now) + service_s
        self.loop.at(self.received_until, self._arrive, engine, groups)

    def _arrive(self, engine: _Engine, groups: list[_Group]) -> None:
        responses = engine.copies * len(groups) * self.system.responses_per_prompt
        self.in_transit -= responses
        self._backlog += responses
        for group in groups:
            self.buffer.add(group, engine.copies)
        engine.arrived()
        self._wake()

    # trainers

    def _wake(self) -> None:
        """Takes the next step, if the trainer is free and can draw."""
        if self._training or self.version == self.system.steps:
            return
        system = self.system
        if not self._started:
            if self.buffer.received * system.responses_per_prompt < system.initial_responses:
                return
        self.buffer.expire(self.version)
        entries = self._draw()
        if not entries:
            if self.generated - self._generated_before > self._patience:
                raise ValueError(_STUCK)
            return
        self._generated_before = self.generated
        if not self._started:
            self._started = True
            self._mark()
        self._training = True
        self.waits.set(False)
        self._count_draw(entries)
        tokens = sum(entry.group.tokens for entry in entries)
        self.trained += system.batch_size
        self.trained_tokens += tokens
        own_s = self._backlog * self.costs.insert_s + system.batch_size * self.costs.draw_s
        own_s /= system.trainers
        self._backlog = 0
        self.busy["inserting"] += own_s
        tokens += round(len(entries) * system.prompt_tokens)
        self.core.run(own_s + train_step_s(self.costs, system, tokens), self._stepped)

    def _draw(self) -> list[_Entry]:
        system = self.system
        if system.mode == "async":
            return self.buffer.draw(system.groups_per_step, self.version)
        if self.version % system.publish_every == 0:  # the whole round must have come
            wanted = system.groups_per_step * (self.version + system.publish_every)
            if self.buffer.received < wanted:
                return []
            count = system.groups_per_step * system.publish_every
            self._round = deque(self.buffer.newest(count))
        entries = [self._round.popleft() for _ in range(system.groups_per_step)]
        for entry in entries:
            entry.uses += 1
        return entries

    def _count_draw(self, entries: list[_Entry]) -> None:
        if self.version < self.system.warmup_steps:
            return
        for entry in entries:
            group = entry.group
            for version, count in group.first.items():
                self._ages[self.version - version] += count
            self._last_age_sum += self.version * self.system.responses_per_prompt - group.last_sum
            self._reuse_sum += (entry.uses - 1) // entry.copies

    def _stepped(self) -> None:
        self.version += 1
        if self.version == self.system.warmup_steps:
            self._mark()
        if self.version % self.system.publish_every == 0:
            self.core.run(self.costs.snapshot_s, self._publish)
        else:
            self._next()

    def _next(self) -> None:
        self._training = False
        self.waits.set(True)
        self._wake()

    def _publish(self) -> None:
        self.buffer.new_window()
        self.published += 1
        self.replaced += self._waiting is not None
        self._waiting = self.version
        if not self._broadcasting:
            self._broadcast()
        self._next()

    def _broadcast(self) -> None:
        assert self._waiting is not None
        version, self._waiting = self._waiting, None
        self._broadcasting = True
        self.loop.at(self.loop.now + self._broadcast_s, self._broadcast_ended, version)

    def _broadcast_ended(self, version: int) -> None:
        self._broadcasting = False
        self.busy["broadcast"] += self._broadcast_s
        if self._waiting is not None:
            self._broadcast()
        for engine in self.engines:
            engine.offer(version)

    # figures

    def _counters(self) -> dict[str, float]:
        searchers = self.system.searchers
        return {
            "now": self.loop.now,
            "step": self.version,
            "generated": self.generated,
            "generated_tokens": self.generated_tokens,
            "trained": self.trained,
            "trained_tokens": self.trained_tokens,
            "trainer_idle": self.waits.total(),
            "searcher_idle": sum(e.waits.total() * e.copies for e in self.engines) / searchers,
            "update": sum(e.update_s * e.copies for e in self.engines) / searchers,
            "gone": self.buffer.evicted + self.buffer.expired,
            "unused": self.buffer.unused,
            "broadcast": self.busy["broadcast"],
            "receiving": self.busy["receiving"],
            "inserting": self.busy["inserting"],
        }

    def _mark(self) -> None:
        """What came before does not count."""
        self._before = self._counters()

    def _result(self) -> Result:
        after = self._counters()
        before = self._before or dict.fromkeys(after, 0.0)
        done = {name: after[name] - before[name] for name in after}
        wall_s = max(done["now"], 1e-12)
        size = self.system.responses_per_prompt
        drawn = self._ages.total() or math.nan  # none, if it ended early
        return Result(
            wall_s=wall_s,
            steps_per_s=done["step"] / wall_s,
            generated_responses_per_s=done["generated"] / wall_s,
            generated_tokens_per_s=done["generated_tokens"] / wall_s,
            trained_responses_per_s=done["trained"] / wall_s,
            trained_tokens_per_s=done["trained_tokens"] / wall_s,
            staleness_mean=sum(age * count for age, count in self._ages.items()) / drawn,
            staleness_p95=_percentile(self._ages, 0.95),
            staleness_last_mean=self._last_age_sum / drawn,
            reuse_mean=self._reuse_sum * size / drawn,
            unused_fraction=done["unused"] / done["gone"] if done["gone"] else 0.0,
            trainer_idle_fraction=done["trainer_idle"] / wall_s,
            searcher_idle_fraction=done["searcher_idle"] / wall_s,
            searcher_update_fraction=done["update"] / wall_s,
            broadcast_fraction=done["broadcast"] / wall_s,
            receiving_fraction=done["receiving"] / wall_s,
            insert_fraction=done["inserting"] / wall_s,
            heartbeat_fraction=heartbeat_fraction(self.costs, self.system),
            versions_published=self.published,
            versions_replaced=self.replaced,
            generated=self.generated,
            received=self.buffer.received * size,
            stored=self.buffer.stored * size,
            evicted=self.buffer.evicted * size,
            expired=self.buffer.expired * size,
            in_transit=self.in_transit,
        )


def _percentile(counts: Counter[int], share: float) -> float:
    """The smallest value that is not exceeded by `share` of the counts."""
    left = share * counts.total()
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return float(value)
    return math.nan
