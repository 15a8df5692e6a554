"""Speed and memory of the replay buffer at a million trajectories, against lists of dicts.

    python bench/buffer.py [number of trajectories]

Each trajectory has 128 response tokens; a prompt keeps 100 of them. They come in messages of 640,
20 for each of 32 prompts, the prompts in a new random order each time around, as searchers bring
them. The buffer is filled, then the same number of prompts goes around once more, so that each
arrival evicts another. Then three designs do the same work in turns, several rounds, of which the
median counts: insert messages, and draw 7 prompts x 20 responses, half of the slots from the
recency window and half by softmax of reward.

    ours       ``buffer.Buffer``; a draw gives views, and copies of the reference's log-probs
    objects    one list of dicts, searched for the prompt's items at each insertion and draw
    by_prompt  a dict of lists of dicts by prompt, as in the code of arXiv 2503.18929; a draw gives
               references, without a copy

All keep one record per response of a prompt, and let the oldest version go when a prompt is full.
Times are of one core's use, so that other processes on the machine count little. ``insert_per_s``
is the mean over the second time around, with all evictions and the closing up that they cause.
Memory is the growth of the resident set (Linux), with the index, garbage and all; beside it the sum
over all arrays as allocated and the sizes of the Python objects. The last line is one JSON object.
"""

import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from buffer import Buffer, softmax_of_reward
from trajectory import Trajectory

CAPACITY = 100  # responses kept of a prompt
TOKENS = 128  # of a response
PROMPT_TOKENS = 32
PER_PROMPT = 20  # responses to a prompt in a message
PROMPTS_PER_MESSAGE = 32
MESSAGES_PER_VERSION = 16
GROUPS, K, RECENCY_PROB = 7, 20, 0.5
ROUNDS = 5


class Source:
    """Messages without end, all different, made the same way for the same seed."""

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.num_messages = 0
        self._rng = np.random.default_rng(seed)
        self._num_prompts = num_prompts
        self._prompts = [np.full(PROMPT_TOKENS, p, np.int32) for p in range(num_prompts)]
        self._order: list[int] = []

    def message(self) -> list[Trajectory]:
        """Trajectories whose arrays are slices of the message's, as ``unpack`` gives them."""
        rng = self._rng
        if len(self._order) < PROMPTS_PER_MESSAGE:
            self._order += rng.permutation(self._num_prompts).tolist()
        prompts, self._order = (
            self._order[:PROMPTS_PER_MESSAGE],
            self._order[PROMPTS_PER_MESSAGE:],
        )
        count = len(prompts) * PER_PROMPT
        tokens = rng.integers(0, 50_000, count * TOKENS, dtype=np.int32)
        behavior = -rng.random(count * TOKENS, dtype=np.float32)
        reference = behavior - np.float32(0.1)
        rewards = rng.integers(0, 2, count).astype(np.float64).tolist()
        version = self.num_messages // MESSAGES_PER_VERSION
        self.num_messages += 1
        message = []
        for i, reward in enumerate(rewards):
            piece = slice(i * TOKENS, (i + 1) * TOKENS)
            sampled = behavior[piece]
            message.append(
                Trajectory(
                    prompt_id=prompts[i // PER_PROMPT],
                    prompt_tokens=self._prompts[prompts[i // PER_PROMPT]],
                    response_tokens=tokens[piece],
                    behavior_logprobs=sampled,
                    old_logprobs=sampled,
                    reference_logprobs=reference[piece],
                    reference_version=0,
                    reward=reward,
                    reward_parts={"correct": reward},
                    version_start=version,
                    version_end=version,
                    truncated=False,
                )
            )
        return message


def as_dict(t: Trajectory, arrival: int) -> dict[str, Any]:
    """What a user would keep of a trajectory; copies, so that its message can be freed."""
    return {
        "prompt_id": t.prompt_id,
        "prompt_tokens": t.prompt_tokens,
        "tokens": t.response_tokens.copy(),
        "behavior": t.behavior_logprobs.copy(),
        "reference": t.reference_logprobs.copy(),
        "reward": t.reward,
        "reward_parts": t.reward_parts,
        "version_start": t.version_start,
        "version_end": t.version_end,
        "reference_version": t.reference_version,
        "truncated": t.truncated,
        "arrival": arrival,
        "uses": 0,
    }


class Turns:
    """Prompts without replacement until all have come; a prompt once in a draw."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.known: set[int] = set()
        self._rng = rng
        self._left: list[int] = []

    def next(self, taken: list[int]) -> int | None:
        if self.known <= set(taken):
            return None
        while True:
            if not self._left:
                self._left = self._rng.permutation(sorted(self.known)).tolist()
            prompt_id = self._left.pop()
            if prompt_id not in taken:
                return prompt_id


class Objects:
    """The rules of the buffer on dicts: what both baselines share."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.arrival = 0
        self.window_start = 0
        self.turns, self.recent_turns = Turns(self.rng), Turns(self.rng)

    def new_window(self) -> None:
        self.window_start = self.arrival
        self.recent_turns = Turns(self.rng)

    def insert(self, message: list[Trajectory]) -> None:
        for t in message:
            self.insert_one(as_dict(t, self.arrival))
            self.arrival += 1
            self.turns.known.add(t.prompt_id)
            self.recent_turns.known.add(t.prompt_id)

    def draw(self) -> list[list[dict]]:
        taken: list[int] = []
        recent = []
        for _ in range(GROUPS):
            prompt_id = None
            if self.rng.random() < RECENCY_PROB:
                prompt_id = self.recent_turns.next(taken)
            recent.append(prompt_id is not None)
            taken.append(self.turns.next(taken) if prompt_id is None else prompt_id)
        groups = []
        for items, is_recent in zip(self.items_of(taken), recent, strict=True):
            if is_recent:
                items = [item for item in items if item["arrival"] >= self.window_start]
                probabilities = None
            else:
                rewards = np.array([item["reward"] for item in items])
                weights = np.exp(rewards - rewards.max())
                probabilities = weights / weights.sum()
            chosen = self.rng.choice(len(items), min(K, len(items)), False, probabilities)
            group = [items[i] for i in chosen]
            for item in group:
                item["uses"] += 1
            groups.append(group)
        return groups

    def insert_one(self, new: dict) -> None:
        raise NotImplementedError

    def items_of(self, prompt_ids: list[int]) -> list[list[dict]]:
        raise NotImplementedError


class OneList(Objects):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[dict] = []

    def insert_one(self, new: dict) -> None:
        prompt_id = new["prompt_id"]
        mine = [i for i, item in enumerate(self.items) if item["prompt_id"] == prompt_id]
        for i in mine:
            if np.array_equal(self.items[i]["tokens"], new["tokens"]):
                del self.items[i]
                break
        else:
            if len(mine) == CAPACITY:
                oldest = min(mine, key=lambda i: self.items[i]["version_start"])
                if new["version_start"] < self.items[oldest]["version_start"]:
                    return
                del self.items[oldest]
        self.items.append(new)

    def items_of(self, prompt_ids: list[int]) -> list[list[dict]]:
        found: dict[int, list[dict]] = {prompt_id: [] for prompt_id in prompt_ids}
        for item in self.items:
            if item["prompt_id"] in found:
                found[item["prompt_id"]].append(item)
        return list(found.values())


class ByPrompt(Objects):
    def __init__(self) -> None:
        super().__init__()
        self.items: dict[int, list[dict]] = {}

    def insert_one(self, new: dict) -> None:
        mine = self.items.setdefault(new["prompt_id"], [])
        new["key"] = new["tokens"].tobytes()  # equal bytes are found faster than equal arrays
        for i, item in enumerate(mine):
            if item["key"] == new["key"]:
                del mine[i]
                break
        else:
            if len(mine) == CAPACITY:
                oldest = min(range(CAPACITY), key=lambda i: mine[i]["version_start"])
                if new["version_start"] < mine[oldest]["version_start"]:
                    return
                del mine[oldest]
        mine.append(new)

    def items_of(self, prompt_ids: list[int]) -> list[list[dict]]:
        return [self.items[prompt_id] for prompt_id in prompt_ids]


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def allocated_bytes(buffer: Buffer) -> int:
    """Arrays as allocated, and the Python objects of the index."""
    store = buffer._store
    total = sum(a.nbytes for a in (*store.columns.values(), *store.parts.values()))
    total += sum(a.nbytes for s in store.segments.all() for a in s.arenas.values())
    total += sys.getsizeof(buffer._prompts)
    for prompt in buffer._prompts.values():
        parts = (prompt, prompt.tokens, prompt.keys, prompt.rows, prompt.item_of)
        total += sum(map(sys.getsizeof, parts))
        total += sum(sys.getsizeof(h) + sys.getsizeof(i) for h, i in prompt.item_of.items())
    return total


def timed(function: Callable[..., Any], *args: Any) -> float:
    """Seconds of a core that a call takes, in which other processes' time doesn't count."""
    start = time.process_time()
    function(*args)
    return time.process_time() - start


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:5.1f} s] {text}", flush=True)


START = time.perf_counter()


def main(num_trajectories: int) -> dict[str, Any]:
    num_prompts = num_trajectories // CAPACITY
    source = Source(num_prompts, seed=0)
    buffer = Buffer(
        max_tokens=2 * num_trajectories * (TOKENS + PROMPT_TOKENS),  # the prompts' bound counts
        deduplicate=True,
        recency_prob=RECENCY_PROB,
        rule=functools.partial(softmax_of_reward, inverse_temperature=1.0),
        seed=0,
        capacity_per_prompt=CAPACITY,
    )

    def messages(count: int) -> Iterator[list[Trajectory]]:
        for _ in range(count):
            if source.num_messages % MESSAGES_PER_VERSION == 0:
                buffer.new_window()
            yield source.message()

    per_message = PROMPTS_PER_MESSAGE * PER_PROMPT
    around = num_prompts * PER_PROMPT // per_message
    empty = resident_bytes()
    filling = [timed(buffer.add, m) for m in messages(around * CAPACITY // PER_PROMPT + 1)]
    filled = num_tokens = buffer.num_tokens
    most = (resident_bytes() - empty) / num_tokens
    insert_filling = per_message * len(filling) / sum(filling)
    say(
        f"filled with {buffer.num_trajectories} trajectories, {filled} tokens: "
        f"{insert_filling:,.0f} inserts/s, {most:.2f} B/token resident"
    )
    turning = [timed(buffer.add, m) for m in messages(around)]
    allocated = allocated_bytes(buffer) / buffer.num_tokens
    bytes_per_token = max(most, (resident_bytes() - empty) / buffer.num_tokens)
    insert_per_s = per_message * len(turning) / sum(turning)
    say(
        f"{buffer.num_evicted} evicted: {insert_per_s:,.0f} inserts/s, {bytes_per_token:.2f} "
        f"B/token resident, {allocated:.2f} B/token as allocated"
    )
    result = {
        "trajectories": buffer.num_trajectories,
        "bytes_per_token": round(bytes_per_token, 2),
        "bytes_per_token_allocated": round(allocated, 2),
        "insert_per_s": round(insert_per_s),
        "insert_per_s_filling": round(insert_filling),
    }

    before = resident_bytes()
    one_list, by_prompt = OneList(), ByPrompt()
    again = Source(num_prompts, seed=1)
    for _ in range(num_trajectories // per_message):
        message = again.message()
        by_prompt.insert(message)
    # Both hold the same dicts at first.
    one_list.items = [item for items in by_prompt.items.values() for item in items]
    one_list.items.sort(key=lambda item: item["arrival"])
    one_list.arrival = by_prompt.arrival
    one_list.turns.known = set(by_prompt.items)
    del message
    tokens = len(one_list.items) * TOKENS
    result["bytes_per_token_objects"] = round((resident_bytes() - before) / tokens, 2)
    say(f"{len(one_list.items)} dicts made: {result['bytes_per_token_objects']} B/token resident")

    gc.collect()
    gc.freeze()  # else each design pays for the collector's walks through the others' objects

    times: dict[str, list[float]] = {}

    def record(name: str, seconds: float, count: int) -> None:
        times.setdefault(name, []).append(seconds / count)

    for number in range(ROUNDS):
        for design in (one_list, by_prompt):
            design.new_window()
        buffer.new_window()
        batch = [source.message() for _ in range(10)]
        record("insert ours", sum(timed(buffer.add, m) for m in batch), 10 * per_message)
        seconds = sum(timed(by_prompt.insert, m) for m in batch[:2])
        record("insert by_prompt", seconds, 2 * per_message)
        # One insertion looks at a million dicts: 2 for each of 8 prompts, so that the window serves
        # a draw.
        few = [t for p in range(8) for t in batch[0][p * PER_PROMPT :][:2]]
        record("insert objects", timed(one_list.insert, few), len(few))
        record("draw ours", sum(timed(buffer.draw, GROUPS, K) for _ in range(200)), 200)
        record("draw by_prompt", sum(timed(by_prompt.draw) for _ in range(100)), 100)
        record("draw objects", sum(timed(one_list.draw) for _ in range(3)), 3)
        say(
            f"round {number}: "
            + ", ".join(f"{name} {1e6 * values[-1]:,.1f} us" for name, values in times.items())
        )
    medians = {name: median(values) for name, values in times.items()}
    result["draw_ms"] = round(1e3 * medians["draw ours"], 3)
    for name, key in (
        ("objects", "speedup_vs_objects"),
        ("by_prompt", "speedup_vs_objects_by_prompt"),
    ):
        result[key] = {
            what: float(f"{medians[f'{what} {name}'] / medians[f'{what} ours']:.3g}")
            for what in ("insert", "draw")
        }
    return result


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)))
