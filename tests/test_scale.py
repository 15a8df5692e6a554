"""The scale model: closed forms, conservation, limits, its costs, its study and its validation."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest

from experiments import scale, scale_costs, scale_model
from experiments.scale_costs import GPUS, MODELS, engine_gpus, fewest_trainers, given, measured
from experiments.scale_model import (
    Costs,
    System,
    broadcast_s,
    capacities,
    decode_steps_s,
    lengths,
    loads,
    receive_s,
    response_s,
    running_requests,
    simulate,
    train_step_s,
)

# One prompt of 4 responses of 10 tokens at a time, each step on just that. All 4 run at once, so a
# generation takes 10 decode steps.
COSTS = Costs(decode_overhead_s=0.1, train_token_s=1 / 40)  # 1 s a generation, 1 s a step
SYSTEM = System(
    responses_per_prompt=4,
    prompts_in_flight=1,
    max_num_seqs=4,
    prompt_tokens=0.0,
    mean_tokens=10.0,
    batch_size=4,
    score_every_s=0.0,
    max_reuse=1,
    steps=60,
    warmup_steps=20,
)


def costs(**changes) -> Costs:
    return replace(COSTS, **changes)


def system(**changes) -> System:
    return replace(SYSTEM, **changes)


def trained_at(seconds: float) -> float:
    """`train_token_s` of a step that lasts so long."""
    return seconds / 40


@pytest.mark.parametrize("module", [scale, scale_costs, scale_model])
def test_the_examples_in_docstrings(module):
    result = doctest.testmod(module)
    assert result.failed == 0 and result.attempted > 0


# --------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("step_s", [0.25, 1.0, 3.0])
def test_asynchronous_throughput_is_the_slower_side_and_synchronous_the_sum(step_s):
    slow = costs(train_token_s=trained_at(step_s))
    run = simulate(slow, system())
    assert run.steps_per_s == pytest.approx(1 / max(1.0, step_s))
    assert run.trainer_idle_fraction == pytest.approx(max(1 - step_s, 0))
    assert run.searcher_idle_fraction == 0
    lockstep = simulate(slow, system(mode="sync"))
    assert lockstep.steps_per_s == pytest.approx(1 / (1.0 + step_s))
    assert lockstep.trainer_idle_fraction == pytest.approx(1.0 / (1.0 + step_s))
    assert lockstep.searcher_idle_fraction == pytest.approx(step_s / (1.0 + step_s))
    assert lockstep.staleness_mean == 0


def test_synchronous_round_adds_up_every_part():
    """Generation, reference, reward, transport, step, snapshot, broadcast, load: in turn."""
    parts = costs(
        reference_token_s=0.01,  # 0.4
        reward_s=0.5,
        token_bytes=1.0,
        link_bytes_per_s=100.0,  # 0.4
        message_s=0.1,  # 0.2: the group, the counters
        insert_s=0.05,  # 0.2
        draw_s=0.025,  # 0.1
        snapshot_s=0.3,
        weight_bytes=10.0,
        broadcast_bytes_per_s=20.0,  # 0.5
        load_s=0.7,
    )
    run = simulate(parts, system(mode="sync"))
    round_s = 1.0 + 0.4 + 0.5 + 0.4 + 0.2 + 0.2 + 0.1 + 1.0 + 0.3 + 0.5 + 0.7
    assert run.steps_per_s == pytest.approx(1 / round_s)
    assert run.broadcast_fraction == pytest.approx(0.5 / round_s)
    assert run.receiving_fraction == pytest.approx(0.6 / round_s)
    assert run.insert_fraction == pytest.approx(0.3 / round_s)
    assert run.searcher_update_fraction == pytest.approx(0.7 / round_s)
    assert run.trainer_idle_fraction == pytest.approx(1 - (0.2 + 0.1 + 1.0 + 0.3) / round_s)


def test_publishing_every_k_steps_trains_k_steps_on_a_round():
    run = simulate(COSTS, system(mode="sync", publish_every=4, max_num_seqs=16))
    assert run.steps_per_s == pytest.approx(4 / (1.0 + 4.0))
    assert run.staleness_mean == pytest.approx(1.5)  # 0, 1, 2, 3


def test_staleness_of_a_pipeline_by_hand():
    """A generation of 1 s, a step of 0.5 s, a broadcast of 0.1 s.

    A step ends at n + 0.5 with version n; it reaches the searcher at n + 0.6, in the middle of the
    generation that began at n (loading is free) and ends at n + 1. So what is trained on at n + 1,
    at version n, began under version n - 1 and ended under version n.
    """
    run = simulate(
        costs(train_token_s=trained_at(0.5), weight_bytes=1.0, broadcast_bytes_per_s=10.0),
        system(),
    )
    assert run.steps_per_s == pytest.approx(1.0)
    assert run.staleness_mean == pytest.approx(1.0)
    assert run.staleness_p95 == 1
    assert run.staleness_last_mean == pytest.approx(0.0)
    between = simulate(
        costs(train_token_s=trained_at(0.5), weight_bytes=1.0, broadcast_bytes_per_s=10.0),
        system(update="between"),
    )
    assert (between.staleness_mean, between.staleness_last_mean) == (1.0, 1.0)


def test_between_takes_weights_when_all_that_is_under_way_has_ended():
    """So that a response has one version; and new prompts wait, or that moment never came."""
    run = simulate(VARIED, replace(BUSY, update="between", max_reuse=1))
    assert run.staleness_mean == run.staleness_last_mean < 10
    mixed = simulate(VARIED, BUSY)
    assert mixed.staleness_mean > mixed.staleness_last_mean


def test_a_broadcast_slower_than_a_step_replaces_waiting_versions_and_ages_the_data():
    fast = costs(weight_bytes=1.0, broadcast_bytes_per_s=10.0)
    slow = costs(weight_bytes=1.0, broadcast_bytes_per_s=0.2)  # 5 s
    quick, late = simulate(fast, system()), simulate(slow, system())
    assert quick.versions_replaced == 0
    # 60 versions in 60 s, one broadcast in 5 s
    assert late.versions_published - late.versions_replaced == pytest.approx(60 / 5, abs=2)
    assert late.steps_per_s == pytest.approx(quick.steps_per_s)
    assert late.staleness_mean > quick.staleness_mean + 3
    assert late.broadcast_fraction == pytest.approx(1.0, abs=0.2)


def test_updates_in_flight_cost_their_loading_and_the_keys_and_values():
    """0.3 s of loading at each of the versions, and half of 40 tokens of context in the mean."""
    loading = costs(train_token_s=trained_at(2.0), load_s=0.3, prefill_token_s=0.0)
    run = simulate(loading, system())
    assert run.steps_per_s == pytest.approx(0.5)
    assert run.searcher_update_fraction == pytest.approx(0.15)
    assert run.generated_tokens_per_s == pytest.approx(40 * (1 - 0.15), rel=0.03)
    anew = replace(loading, prefill_token_s=0.01)
    recomputed = simulate(anew, system())
    assert recomputed.searcher_update_fraction == pytest.approx(0.5 * (0.3 + 0.2), rel=0.1)
    kept = simulate(anew, system(kv_recompute=False))
    assert kept.searcher_update_fraction == pytest.approx(0.15)


def test_decoding_is_bound_by_memory_and_then_by_arithmetic():
    roof = Costs(decode_overhead_s=1.0, weights_read_s=8.0, kv_read_s=0.001, decode_token_s=0.1)
    assert decode_steps_s(roof, 1, 0, 1) == pytest.approx(1 + 8 + 0.0005)
    assert decode_steps_s(roof, 100, 0, 1) == pytest.approx(1 + 10)
    # the context grows by one token a request and step: 4 (0 + 1 + ... + 9), a half step on
    assert decode_steps_s(roof, 4, 100, 10) == pytest.approx(
        sum(1 + 8 + 0.001 * (100 + 4 * (i + 0.5)) for i in range(10))
    )


def test_broadcast_formulas():
    ring = Costs(weight_bytes=16e9, broadcast_bytes_per_s=40e9, broadcast_hop_s=25e-6)
    tree = replace(ring, broadcast="tree")
    assert broadcast_s(ring, 1024) == pytest.approx(0.4 + 1024 * 25e-6)
    assert [round(broadcast_s(tree, n) / (0.4 + 25e-6)) for n in (1, 2, 3, 4, 7, 8, 1023)] == [
        1, 2, 2, 3, 3, 4, 10,
    ]  # fmt: skip


def test_a_sharded_step_is_bound_by_its_gathers_where_there_are_many_trainers():
    shared = Costs(train_step_s=0.1, train_token_s=0.001, gather_pass_s=0.4, reduce_s=0.2)
    job = System(tokens_per_pass=1000)
    assert train_step_s(shared, job, 10_000) == pytest.approx(0.1 + 10)
    assert train_step_s(shared, replace(job, trainers=2), 10_000) == pytest.approx(0.1 + 5)
    assert train_step_s(shared, replace(job, trainers=100), 10_000) == pytest.approx(0.1 + 0.6)
    three = replace(job, trainers=100, tokens_per_pass=40)  # of 100 tokens each
    assert train_step_s(shared, three, 10_000) == pytest.approx(0.1 + 3 * 0.4 + 0.2)


def test_receiving_counts_bytes_messages_and_the_counters_sent_to_every_trainer():
    way = Costs(
        response_bytes=66, token_bytes=12, prompt_token_bytes=4, link_bytes_per_s=1e3, message_s=0.5
    )
    job = System(responses_per_prompt=2, prompt_tokens=10)
    assert receive_s(way, job, 1, 100) == pytest.approx((2 * (66 + 40) + 1200) / 1e3 + 2 * 0.5)
    two = replace(job, trainers=2)
    assert receive_s(way, two, 1, 100) == pytest.approx(1412 / 2e3 + 1.5 * 0.5)
    assert receive_s(way, two, 8, 800) == pytest.approx(8 * 1412 / 2e3 + 2 * 0.5)


def test_the_bytes_of_a_response_are_those_of_the_wire_format():
    from trajectory import Trajectory, pack

    def bytes_of(prompt: int, response: int, count: int) -> int:
        values = np.zeros(response, np.float32)
        record = Trajectory(
            prompt_id=0,
            prompt_tokens=np.zeros(prompt, np.int32),
            response_tokens=np.zeros(response, np.int32),
            behavior_logprobs=values,
            old_logprobs=values,
            reference_logprobs=values.copy(),
            reference_version=0,
            reward=1.0,
            reward_parts={"correct": 1.0},
            version_start=0,
            version_end=0,
            truncated=False,
        )
        return pack([record] * count).size

    assert bytes_of(10, 30, 1) - bytes_of(10, 20, 1) == 10 * scale_costs.TOKEN_BYTES
    assert bytes_of(20, 20, 1) - bytes_of(10, 20, 1) == 10 * scale_costs.PROMPT_TOKEN_BYTES
    each = (bytes_of(10, 20, 101) - bytes_of(10, 20, 1)) / 100
    assert each - 10 * 4 - 20 * 12 == pytest.approx(scale_costs.RESPONSE_BYTES, abs=12)


def test_lengths_have_the_mean_and_deviation_asked_for():
    table = np.array(lengths(system(mean_tokens=500.0, cv_tokens=0.8)))
    assert table.mean() == pytest.approx(500, rel=0.01)
    assert table.std() == pytest.approx(400, rel=0.05)
    assert max(lengths(system(mean_tokens=500.0, cv_tokens=0.8, max_tokens=900))) == 900


# --------------------------------------------------------------------------- simulation as a whole

VARIED = Costs(
    decode_overhead_s=0.01,
    weights_read_s=0.02,
    kv_read_s=1e-6,
    decode_token_s=1e-4,
    prefill_token_s=1e-5,
    reference_token_s=1e-5,
    reward_s=0.1,
    token_bytes=12.0,
    link_bytes_per_s=1e6,
    message_s=1e-4,
    insert_s=1e-5,
    train_token_s=2e-4,
    snapshot_s=0.05,
    weight_bytes=1.0,
    broadcast_bytes_per_s=1.0,
    load_s=0.2,
)
BUSY = System(
    searchers=3,
    responses_per_prompt=8,
    prompts_in_flight=8,
    max_num_seqs=32,
    mean_tokens=100.0,
    cv_tokens=0.7,
    max_tokens=400,
    prompt_tokens=20.0,
    batch_size=128,
    steps=40,
    warmup_steps=10,
    start_full=True,
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"update": "between"},
        {"mode": "sync", "start_full": False},
        {"buffer_tokens": 30_000.0},
        {"max_reuse": 2, "recency_prob": 0.5},
        {"max_staleness": 1},
        {"searchers": 12, "max_engines": 4, "max_reuse": 1},
        {"searchers": 12, "max_engines": 4, "buffer_tokens": 60_000.0},
        {"cores": 2},
    ],
)
def test_no_response_is_lost_or_made_twice(changes):
    run = simulate(VARIED, replace(BUSY, **changes))
    assert run.generated == run.received + run.in_transit
    assert run.received == run.stored + run.evicted + run.expired
    assert min(run.in_transit, run.stored, run.evicted, run.expired) >= 0
    assert run.received > 0
    assert (run.evicted > 0) == ("buffer_tokens" in changes)
    assert (run.expired > 0) == ("max_staleness" in changes)


def test_bounds_on_reuse_and_staleness_hold():
    starved = costs(train_token_s=trained_at(0.1))
    free = simulate(starved, system(max_reuse=None))
    assert free.trainer_idle_fraction == pytest.approx(0.0)
    assert free.steps_per_s == pytest.approx(10.0)
    twice = simulate(starved, system(max_reuse=2))
    assert twice.steps_per_s == pytest.approx(2.0, rel=0.03)  # each second's group, two steps
    assert twice.reuse_mean == pytest.approx(0.5, abs=0.05)
    assert simulate(VARIED, replace(BUSY, max_reuse=1, recency_prob=0.5)).reuse_mean == 0
    old = simulate(VARIED, replace(BUSY, recency_prob=0.0))
    bounded = simulate(VARIED, replace(BUSY, recency_prob=0.0, max_staleness=4))
    assert old.staleness_p95 > 4 >= bounded.staleness_p95


def test_draws_from_the_whole_store_are_older_than_from_the_window():
    ages = [simulate(VARIED, replace(BUSY, recency_prob=m)).staleness_mean for m in (1.0, 0.5, 0.0)]
    assert ages[0] < ages[1] < ages[2]


def test_the_same_seed_gives_the_same_result():
    assert simulate(VARIED, BUSY) == simulate(VARIED, BUSY)
    assert simulate(VARIED, BUSY) != simulate(VARIED, replace(BUSY, seed=1))


def test_a_job_that_can_not_go_on_says_so():
    with pytest.raises(ValueError, match="waits for ever"):
        simulate(COSTS, system(buffer_tokens=30.0))
    with pytest.raises(ValueError, match="whole groups"):
        system(batch_size=6)
    with pytest.raises(ValueError, match="only one trainer"):
        system(cores=2, trainers=2)


def test_messages_under_way_are_bounded():
    """The link takes 3 s a group: the searcher waits for it, and only it sets the pace."""
    narrow = costs(token_bytes=1.0, link_bytes_per_s=40 / 3)
    run = simulate(narrow, system())
    assert run.steps_per_s == pytest.approx(1 / 3, rel=0.02)
    assert run.searcher_idle_fraction == pytest.approx(2 / 3, abs=0.03)
    assert run.receiving_fraction == pytest.approx(1.0, abs=0.03)


def test_queue_of_arrivals_at_the_trainer_keeps_littles_law():
    """Staleness x time a step is how long a response is on its way: generation and waiting."""
    run = simulate(VARIED, replace(BUSY, searchers=1, max_reuse=1, steps=120, warmup_steps=40))
    assert run.trainer_idle_fraction > 0.3  # so that nothing queues before the trainer
    rate = run.generated_responses_per_s
    # Little: requests in the engine = rate x time there, of responses of the mean length
    in_engine_s = running_requests(replace(BUSY, searchers=1)) / rate
    batch_s = BUSY.batch_size / rate
    age_s = run.staleness_mean / run.steps_per_s
    assert in_engine_s < age_s < in_engine_s + 2 * batch_s


@pytest.mark.parametrize("update", ["inflight", "between"])
def test_simulated_and_closed_form_rates_agree(update):
    """Generation where trainers are slow, training where searchers are many."""
    still = replace(VARIED, weight_bytes=0.0, load_s=0.0, prefill_token_s=0.0, snapshot_s=0.0)
    job = replace(BUSY, searchers=4, max_reuse=1, update=update, publish_every=1000)
    run = simulate(replace(still, train_token_s=1e-3), job)
    rates = capacities(replace(still, train_token_s=1e-3), job)
    assert run.trainer_idle_fraction < 0.02
    assert run.generated_responses_per_s == pytest.approx(rates["generation"], rel=0.06)
    assert run.trained_responses_per_s == pytest.approx(rates["training"], rel=0.05)


def test_more_searchers_never_slow_the_job_down_and_costs_never_speed_it_up():
    by_searchers = [simulate(VARIED, replace(BUSY, searchers=n, max_reuse=1)) for n in (1, 2, 4, 8)]
    rates = [run.steps_per_s for run in by_searchers]
    assert all(a <= b * 1.02 for a, b in zip(rates, rates[1:], strict=False))
    made = [run.generated_tokens_per_s for run in by_searchers]
    assert all(a < b for a, b in zip(made, made[1:], strict=False))
    idle = [run.trainer_idle_fraction for run in by_searchers]
    assert all(a >= b - 0.02 for a, b in zip(idle, idle[1:], strict=False))
    base = by_searchers[0].steps_per_s
    for name in ("decode_overhead_s", "prefill_token_s", "reference_token_s", "load_s"):
        dearer = replace(VARIED, **{name: 3 * getattr(VARIED, name)})
        assert simulate(dearer, replace(BUSY, searchers=1, max_reuse=1)).steps_per_s <= base * 1.02


def test_searchers_simulated_as_one_give_what_each_alone_gives():
    job = replace(BUSY, searchers=16, max_reuse=1, steps=60, warmup_steps=20)
    each = simulate(VARIED, replace(job, max_engines=16))
    few = simulate(VARIED, replace(job, max_engines=3))
    assert few.steps_per_s == pytest.approx(each.steps_per_s, rel=0.03)
    assert few.generated_tokens_per_s == pytest.approx(each.generated_tokens_per_s, rel=0.03)
    assert few.staleness_mean == pytest.approx(each.staleness_mean, abs=0.3)
    assert few.searcher_update_fraction == pytest.approx(each.searcher_update_fraction, rel=0.1)


def test_ranks_that_share_a_core_share_its_time():
    """1 trainer and N searchers on 2 cores, always busy: dealt in turn, equal shares of a core."""
    job = system(max_reuse=None, cores=2)
    alone, two, three = (simulate(COSTS, replace(job, searchers=n)) for n in (1, 2, 3))
    assert alone.steps_per_s == pytest.approx(1.0)
    assert alone.generated_tokens_per_s == pytest.approx(40.0, rel=0.03)
    assert two.steps_per_s == pytest.approx(0.5)  # with the second searcher on its core
    assert two.generated_tokens_per_s == pytest.approx(60.0, rel=0.03)
    assert three.steps_per_s == pytest.approx(0.5)
    assert three.generated_tokens_per_s == pytest.approx(60.0, rel=0.03)


def test_a_rank_that_waits_leaves_its_core_to_the_other():
    """One core, lock-step: neither is slowed down by the other, as they never work at once."""
    run = simulate(COSTS, system(mode="sync", cores=1))
    assert run.steps_per_s == pytest.approx(0.5)


# --------------------------------------------------------------------------- costs


def test_engines_have_room_and_trainers_hold_the_policy():
    gpu = GPUS["H100"]
    assert [engine_gpus(gpu, MODELS[size], 1000) for size in ("1B", "14B", "32B", "70B")] == [
        1, 1, 2, 4,
    ]  # fmt: skip
    assert fewest_trainers(GPUS["H200"], MODELS["70B"]) == 16
    for model in MODELS.values():
        job_costs, job = given(gpu, model, System(searchers=4))
        weights = 2 * model.parameters
        assert job.workers_per_searcher * gpu.memory > weights
        assert job_costs.weights_read_s > weights / (job.workers_per_searcher * gpu.hbm)
        # by hand, for 7B: 15.24 GB at 70% of 3.35 TB/s
        if model is MODELS["7B"]:
            assert job_costs.weights_read_s == pytest.approx(6.5e-3, rel=0.01)
            assert job_costs.broadcast_bytes_per_s == 40e9
            assert job_costs.train_token_s == pytest.approx(115.6e-6, rel=0.01)
        assert running_requests(job) == job.max_num_seqs  # the engine is kept full


def write_run(folder, **changes):
    """A finished run of 1 trainer and 1 searcher, as train.py leaves it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "mode: async\ncluster: {trainers: 1}\nengine: {max_num_seqs: 512}\n"
        "task: {max_response_tokens: 5}\n"
        "trainer: {batch_size: 128, responses_per_prompt: 8, publish_every: 1, max_reuse: null}\n"
        "searcher: {responses_per_prompt: 8, prompts_in_flight: 64, update: inflight, "
        "score_every_s: 0.25, max_outstanding: 8, reference_tokens_per_micro_batch: 8192}\n"
        "buffer: {recency_prob: 1.0, max_staleness: null, max_tokens: 100000000, "
        "initial_trajectories: 128}\n"
    )
    (folder / "origin.json").write_text(json.dumps({"world_size": 2}))
    summary = {
        "steps": 100,
        "wall_s": 50.0,
        "trainer_idle_fraction": 0.2,
        "searcher_idle_fraction": 0.1,
        "generated_tokens_per_s": 2000.0,
        "staleness_mean": 2.0,
        **changes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(100):
            record = {
                "step": step + 1,
                "wall_s": (step + 1) / 2,
                "reward/response_tokens_mean": 4.0,
                "weights/load_s": (0.04, 0.06)[step // 2 % 2],  # 50 versions are loaded
                "weights/broadcast_s": 0.02,
                "weights/gb_per_s": 0.2,
            }
            file.write(json.dumps(record) + "\n")
    return folder


def test_costs_of_a_run(tmp_path):
    job_costs, job = measured(write_run(tmp_path / "run"))
    # 50 s, of which 10% idle and 50 x 0.05 s loading, for 100,000 tokens
    assert job_costs.decode_token_s == pytest.approx((45 - 2.5) / 100_000)
    # 0.4 s a step of 128 x 4 tokens
    assert job_costs.train_token_s == pytest.approx(0.4 / 512)
    assert job_costs.load_s == pytest.approx(0.05)
    assert broadcast_s(job_costs, 1) == pytest.approx(0.02)
    assert broadcast_s(job_costs, 3) == pytest.approx(0.04)
    assert (job.searchers, job.steps, job.mean_tokens, job.update) == (1, 100, 4.0, "inflight")
    with pytest.raises(ValueError, match="not the folder of a finished run"):
        measured(tmp_path / "none")


def test_the_model_calibrated_on_a_run_gives_that_run(tmp_path):
    """A saturated job: what was measured comes out again, with a core for each rank."""
    changes = {"steps": 40, "wall_s": 20.0}
    changes |= {"trainer_idle_fraction": 0.0, "searcher_idle_fraction": 0.0}
    folder = write_run(tmp_path / "run", **changes)
    job_costs, job = measured(folder)
    job_costs = scale.calibrate(job_costs, job, scale.measured_figures(folder))
    run = scale.predict(job_costs, job, 1)
    assert run.steps_per_s == pytest.approx(40 / 20, rel=0.02)
    assert run.generated_tokens_per_s == pytest.approx(2000, rel=0.03)
    table = scale.validation_table({1: run}, {1: scale.measured_figures(folder)})
    assert "| 1 | steps_per_s | 2 | 2 | 1.00 | calibrated |" in table
    assert "| 1 | staleness_mean |" in table and table.count("predicted") == 3


# --------------------------------------------------------------------------- study


def test_the_ratio_at_which_the_bottleneck_flips():
    """A step takes what 3 searchers generate in that time; loading is 1/4 of theirs."""
    job_costs = costs(train_token_s=trained_at(1 / 3))
    job = system(mean_tokens=10.0)
    assert response_s(job_costs, job) == pytest.approx(0.25)
    assert scale.balance(job_costs, job) == pytest.approx(3.0)
    assert scale.bottleneck(job_costs, replace(job, searchers=2)) == "generation"
    assert scale.bottleneck(job_costs, replace(job, searchers=4)) == "training"
    before = simulate(job_costs, replace(job, searchers=2, start_full=False))
    after = simulate(job_costs, replace(job, searchers=4))
    assert before.trainer_idle_fraction == pytest.approx(1 / 3, abs=0.03)
    assert after.trainer_idle_fraction < 0.01
    loading = replace(job_costs, load_s=1 / 12)  # at 3 versions a second, a quarter of the time
    assert scale.balance(loading, job) == pytest.approx(4.0)
    assert scale.balance(replace(job_costs, load_s=1.0), job) == math.inf
    full = replace(job_costs, message_s=10.0)
    assert scale.bottleneck(full, replace(job, searchers=4)) == "receiving"


def test_loads_are_shares_of_what_a_stage_can_take():
    job_costs = costs(store_get_s=1e-4, load_s=0.25)
    job = system(searchers=999)
    shares = loads(job_costs, job, 4.0)
    assert shares["training"] == pytest.approx(1.0)
    assert shares["updates"] == pytest.approx(0.25)
    assert shares["heartbeats"] == pytest.approx(1000 * 1e-4 / 0.5)


def test_trainers_in_proportion_meet_the_next_limit():
    """Only heartbeats cost anything: 0.5 s / 1e-3 s = 500 ranks."""
    job_costs = costs(train_token_s=trained_at(1.0), store_get_s=1e-3)

    def make(searchers, trainers):
        return job_costs, system(searchers=searchers, trainers=trainers or 1)

    curve = scale.Curve(name="none", make=make, points={})
    assert scale.limits_in_proportion(curve) == {"heartbeats": (256, 256)}
    assert "at 256 searchers and 256 trainers a round of heartbeats" in scale.in_words(curve)


@pytest.fixture(scope="module")
def small_study(tmp_path_factory):
    out = tmp_path_factory.mktemp("scale")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "MAX_EVENTS", 1000)
        run_small_study(out)
    return out


def run_small_study(out):
    arguments = ["--sizes", "1B", "7B", "--searchers", "1", "8", "1024", "--batch-size", "64"]
    assert scale.main([*arguments, "--steps", "6", "--mean-tokens", "60", "--out", str(out)]) == 0


def test_the_study_writes_its_tables_and_figure(small_study):
    text = (small_study / "scale-H100.md").read_text()
    for size in ("1B", "7B"):
        assert f"**{size}**: " in text
    assert "| model | GPUs a searcher |" in text and "at 1,024" in text
    assert "mode=sync" in text
    content = json.loads((small_study / "scale-H100.json").read_text())
    assert set(content["results"]["1B"]) == {"1", "8", "1024"}
    figure = matplotlib.image.imread(small_study / "scale-H100.png")
    assert figure.shape[0] > 500 and figure[..., :3].std() > 0.01


def test_a_measured_run_can_be_scaled(tmp_path):
    folder = write_run(tmp_path / "run")
    arguments = ["--measured", str(folder), "--searchers", "1", "8", "--steps", "6"]
    assert scale.main([*arguments, "--out", str(tmp_path)]) == 0
    assert "**run**: 1 trainer" in (tmp_path / "measured-run.md").read_text()


def test_mistakes_are_told(capsys, tmp_path):
    assert scale.main(["--batch-size", "10"]) == 2
    assert "whole groups" in capsys.readouterr().err
    assert scale.main(["trainer.steps=3"]) == 2
    assert "--validate" in capsys.readouterr().err
    assert scale.main(["--measured", str(tmp_path / "none")]) == 2


def test_validation_calibrates_on_one_searcher_and_names_a_job_that_failed(
    tmp_path, monkeypatch, capsys
):
    folders = {n: write_run(tmp_path / f"run-{n}", steps=100 + n) for n in (1, 2)}

    def run_job(searchers, overrides, runs, *, timeout_s):
        assert timeout_s > 90
        assert "trainer.steps=7" in overrides and "trainer.lr.peak=1e-5" in overrides
        if searchers == 3:
            raise scale.UserError("the job with 3 searchers did not finish")
        return folders[searchers]

    monkeypatch.setattr(scale, "run_job", run_job)
    monkeypatch.setattr(scale.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    arguments = ["--validate", "--validation-steps", "7", "trainer.lr.peak=1e-5"]
    assert scale.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "did not finish" in capsys.readouterr().err
    text = (tmp_path / "validation.md").read_text()
    assert "| 3 | steps_per_s |" in text and "nan" in text
    assert text.count("calibrated |") == 2


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_job_of_the_validation(tmp_path):
    overrides = scale.validation_overrides(8, [])
    folder = scale.run_job(1, overrides, tmp_path, timeout_s=200)
    assert scale.run_job(1, overrides, tmp_path, timeout_s=0) == folder  # not again
    figures = scale.measured_figures(folder)
    run = scale.predict(*measured(folder), 1)
    assert run.steps_per_s == pytest.approx(figures["steps_per_s"], rel=0.3)
