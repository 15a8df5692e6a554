"""Packed rows against sequences read one by one, layout, kind of attention and model by model."""

from __future__ import annotations

import copy
import doctest
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

import packing
from model import load_policy, response_logprobs
from packing import Packed, bins, check_packing, num_tokens, pack, packed_hidden, set_attention

CPU = torch.device("cpu")
TEMPERATURE = 0.7
WINDOW = 8  # tokens a sliding layer sees; sequences here are up to three times as long
_SPECIAL = {"vocab_size": tiny.VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    **_SPECIAL,
}
_GROUPED = {**_SHAPE, "num_key_value_heads": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "gpt2": GPT2Config(n_positions=128, n_embd=32, n_layer=2, n_head=4, **_SPECIAL),
    "neox": GPTNeoXConfig(**_SHAPE, rotary_pct=0.5),
    "qwen2": Qwen2Config(**_GROUPED, tie_word_embeddings=True),
    "mistral": MistralConfig(**_GROUPED, sliding_window=WINDOW),  # all layers slide
    "qwen2-sliding": Qwen2Config(  # the second layer slides
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gemma3": Gemma3TextConfig(
        **_GROUPED,
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
ONE_GROUP = ([5], [4, 1, 12, 6, 1])  # prompt lengths, response lengths of each
GROUPS = ([5, 1, 9], [[4, 1, 12], [7], [3, 14, 1, 2]])
HUGE_AND_TINY = ([3, 2, 6], [[1, 90, 2, 1], [1] * 9, [2, 1]])


@cache
def make(name: str) -> PreTrainedModel:
    """A random float32 model, in which every parameter matters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
        tiny.perturb(model, 0.2)
    return model.eval()


def samples(
    prompt_lengths: Sequence[int], response_lengths: Sequence[Sequence[int]], seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts and responses; those of the groups take turns, so that none lie side by side."""
    rng = np.random.default_rng(seed)
    prompts = tiny.random_tokens(rng, list(prompt_lengths))
    pairs = [
        (turn, prompt, response)
        for prompt, lengths in zip(prompts, response_lengths, strict=True)
        for turn, response in enumerate(tiny.random_tokens(rng, list(lengths)))
    ]
    pairs.sort(key=lambda pair: pair[0])
    return [prompt.copy() for _, prompt, _ in pairs], [response for *_, response in pairs]


def packed_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    share_prompts: bool,
) -> torch.Tensor:
    """float32 [N] of the response tokens, from one packed row."""
    row = pack(prompts, responses, share_prompts=share_prompts, device=model.device)
    logits = model.get_output_embeddings()(packed_hidden(model, row)).float() / TEMPERATURE
    return torch.log_softmax(logits, dim=-1).gather(1, row.targets[:, None])[:, 0]


def plain_logprobs(
    model: PreTrainedModel, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]
) -> torch.Tensor:
    """The same from one forward pass a sequence, with transformers' own plain attention."""
    model.set_attn_implementation("eager")
    pairs = zip(prompts, responses, strict=True)
    return torch.cat([tiny.plain_logprobs(model, p, r, TEMPERATURE) for p, r in pairs])


def gradients(model: PreTrainedModel, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the log-probs' sum with random weights."""
    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    (weights.to(logprobs) * logprobs).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    # Key biases may have no gradient but rounding: the unit is the largest gradient of all.
    unit = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        gap = float((got[name] - grad).abs().max()) / unit
        assert gap < tolerance, f"{name}: {gap:.1e} of the largest gradient"


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("attention", ["segments", "sdpa"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_packed_equals_padded_equals_one_by_one(
    name: str, attention: str, share_prompts: bool
) -> None:
    model = make(name)
    prompts, responses = samples(*GROUPS)
    plain = plain_logprobs(model, prompts, responses)
    plain_gradients = gradients(model, plain)
    padded = response_logprobs(model, prompts, responses, temperature=TEMPERATURE)
    padded_gradients = gradients(model, padded)
    set_attention(model, attention)
    packed = packed_logprobs(model, prompts, responses, share_prompts)
    packed_gradients = gradients(model, packed)
    assert plain.std() > 0.2, "the model is too flat to tell mistakes"
    torch.testing.assert_close(padded, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-5)
    assert_same_gradients(padded_gradients, plain_gradients)
    assert_same_gradients(packed_gradients, plain_gradients)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("attention", ["segments", "sdpa"])
def test_one_huge_and_many_tiny_responses(attention: str, share_prompts: bool) -> None:
    model = make("llama")
    prompts, responses = samples(*HUGE_AND_TINY)
    plain = plain_logprobs(model, prompts, responses)
    want = gradients(model, plain)
    set_attention(model, attention)
    packed = packed_logprobs(model, prompts, responses, share_prompts)
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, packed), want)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_flex_values(name: str, share_prompts: bool) -> None:
    """Without gradient, which CPU lacks, and uncompiled: the mask is what this is about."""
    model = make(name)
    prompts, responses = samples(*GROUPS)
    with torch.no_grad():
        plain = plain_logprobs(model, prompts, responses)
        set_attention(model, "flex")
        packed = packed_logprobs(model, prompts, responses, share_prompts)
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-5)


def test_flex_says_that_it_has_no_gradient_on_cpu() -> None:
    model = make("llama")
    set_attention(model, "flex")
    with pytest.raises(ValueError, match="trainer.packing.attention=segments"):
        packed_logprobs(model, *samples(*GROUPS), share_prompts=False)


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=5)),
        min_size=1,
        max_size=5,
    ),
    share_prompts=st.booleans(),
    attention=st.sampled_from(["segments", "sdpa"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=20, deadline=None)
def test_any_lengths_and_groups(
    lengths: list[tuple[int, list[int]]], share_prompts: bool, attention: str, seed: int
) -> None:
    model = make("qwen2-sliding")
    prompts, responses = samples([p for p, _ in lengths], [r for _, r in lengths], seed)
    with torch.no_grad():
        plain = plain_logprobs(model, prompts, responses)
        set_attention(model, attention)
        packed = packed_logprobs(model, prompts, responses, share_prompts)
    torch.testing.assert_close(packed, plain, rtol=0, atol=1e-5)


def test_a_sliding_window_matters_here() -> None:
    """Otherwise the comparisons above could not tell a forgotten window."""
    for name in ("mistral", "qwen2-sliding", "gemma3"):
        prompts, responses = samples(*GROUPS)
        model = make(name)
        wide = copy.deepcopy(model)
        wide.config.sliding_window = 128
        for layer in wide.base_model.layers:
            if getattr(layer.self_attn, "sliding_window", None) is not None:
                layer.self_attn.sliding_window = 128
        gap = plain_logprobs(model, prompts, responses) - plain_logprobs(wide, prompts, responses)
        assert gap.abs().max() > 0.1, name


# --------------------------------------------------------------------------- no leakage


@pytest.mark.parametrize("attention", ["segments", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_responses_see_nothing_of_each_other(name: str, attention: str) -> None:
    """Other tokens in one response change the others' log-probs in no bit; likewise in a prompt."""
    model = make(name)
    set_attention(model, attention)
    prompts, responses = samples(*GROUPS)
    whose = np.repeat(np.arange(len(responses)), [len(r) for r in responses])
    _, groups = np.unique([p.tobytes() for p in prompts], return_inverse=True)
    with torch.no_grad():
        for share_prompts in (False, True):
            before = packed_logprobs(model, prompts, responses, share_prompts).numpy()
            for i in range(len(responses)):
                others = list(responses)
                others[i] = tiny.FIRST_TOKEN + (responses[i] - tiny.FIRST_TOKEN + 1) % 40
                after = packed_logprobs(model, prompts, others, share_prompts).numpy()
                assert np.array_equal(after[whose != i], before[whose != i])
                assert np.abs(after[whose == i] - before[whose == i]).max() > 1e-3
            for group in range(groups.max() + 1):
                others = [
                    (p + 1) % 40 if g == group else p for p, g in zip(prompts, groups, strict=True)
                ]
                after = packed_logprobs(model, others, responses, share_prompts).numpy()
                mine = groups[whose] == group
                assert np.array_equal(after[~mine], before[~mine])
                assert (np.abs(after[mine] - before[mine]) > 1e-6).all()


@pytest.mark.parametrize("attention", ["segments", "sdpa"])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_gradients_reach_the_own_sequence_alone(attention: str, share_prompts: bool) -> None:
    model = make("llama")
    set_attention(model, attention)
    prompts, responses = samples(*GROUPS)
    row = pack(prompts, responses, share_prompts=share_prompts, device=CPU)
    embeddings: list[torch.Tensor] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: embeddings.append(output)
    )
    hidden = packed_hidden(model, row)
    hook.remove()
    ends = np.cumsum([len(r) for r in responses])
    for i, (start, end) in enumerate(zip(ends - [len(r) for r in responses], ends, strict=True)):
        (grad,) = torch.autograd.grad(hidden[start:end].sum(), embeddings[0], retain_graph=True)
        reached = grad[0].abs().sum(dim=1).nonzero()[:, 0]
        tokens = np.concatenate([prompts[i], responses[i][:-1]])
        assert row.input_ids[0, reached].tolist() == tokens.tolist()


# --------------------------------------------------------------------------- layout


def visible(row: Packed) -> torch.Tensor:
    """bool [L, L], what each token of the row sees."""
    return packing._plan_sdpa(row, None)[0, 0]


@given(
    groups=st.lists(
        st.tuples(
            st.lists(st.integers(3, 5), min_size=1, max_size=4),
            st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=6), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=4,
    ),
    share_prompts=st.booleans(),
    shuffled=st.randoms(use_true_random=False),
)
def test_every_target_is_predicted_from_its_own_history(
    groups: list[tuple[list[int], list[list[int]]]], share_prompts: bool, shuffled: object
) -> None:
    pairs = [(prompt, response) for prompt, responses in groups for response in responses]
    shuffled.shuffle(pairs)
    prompts = [np.array(prompt, np.int32) for prompt, _ in pairs]
    responses = [np.array(response, np.int32) for _, response in pairs]
    row = pack(prompts, responses, share_prompts=share_prompts, device=CPU)
    seen = visible(row)
    wanted = [
        (prompt + response[:t], response[t])
        for prompt, response in pairs
        for t in range(len(response))
    ]
    assert len(wanted) == len(row.index) == len(row.targets)
    for (history, target), place, got in zip(wanted, row.index, row.targets, strict=True):
        tokens = seen[place].nonzero()[:, 0]
        assert row.input_ids[0, tokens].tolist() == history
        assert row.position_ids[0, tokens].tolist() == list(range(len(history)))
        assert got == target
    size = num_tokens(prompts, responses, share_prompts=share_prompts)
    assert row.input_ids.shape == row.position_ids.shape == (1, size)
    assert sum(row.lengths) == size and min(row.lengths) > 0
    assert torch.bincount(row.segment_ids).tolist() == list(row.lengths)
    distinct = {tuple(p) for p, _ in pairs} if share_prompts else [p for p, _ in pairs]
    assert size == sum(map(len, distinct)) + sum(len(r) - 1 for _, r in pairs)


def test_responses_of_one_token_need_their_prompt_alone() -> None:
    prompts, responses = samples([4, 3], [[1, 1, 1], [1]])
    row = pack(prompts, responses, share_prompts=True, device=CPU)
    assert row.input_ids.tolist() == [[*prompts[0], *prompts[1]]]
    assert row.index.tolist() == [3, 6, 3, 3]
    assert row.targets.tolist() == [r[0] for r in responses]


def test_equal_prompts_are_shared_whatever_their_type() -> None:
    prompts = [np.array([5, 6], dtype) for dtype in (np.int32, np.int64)]
    responses = [np.array([7, 8]), np.array([9, 3])]
    assert num_tokens(prompts, responses, share_prompts=True) == 4
    assert pack(prompts, responses, share_prompts=True, device=CPU).lengths == (2, 1, 1)


def test_what_can_not_be_packed() -> None:
    empty, token = np.zeros(0, np.int32), np.array([3], np.int32)
    for share in (False, True):
        with pytest.raises(ValueError, match="prompt without tokens"):
            pack([token, empty], [token, token], share_prompts=share, device=CPU)
        with pytest.raises(ValueError, match="response without tokens"):
            pack([token, token], [token, empty], share_prompts=share, device=CPU)
        with pytest.raises(ValueError, match="nothing to pack"):
            pack([], [], share_prompts=share, device=CPU)


# --------------------------------------------------------------------------- kinds of attention


def varlen_by_its_documentation(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What the GPU kernel computes, [T, H, D]: a sequence's last query meets its last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert window_size[1] == 0
    outputs = []
    for q, k, v in zip(
        query.float().split(cu_seq_q.diff().tolist()),
        key.float().split(cu_seq_k.diff().tolist()),
        value.float().split(cu_seq_k.diff().tolist()),
        strict=True,
    ):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or q.shape[-1] ** -0.5)
        back = (torch.arange(len(q)) + len(k) - len(q))[:, None] - torch.arange(len(k))
        hidden = back < 0
        if window_size[0] >= 0:
            hidden |= back > window_size[0]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, v))
    return torch.cat(outputs).to(query.dtype)


@pytest.mark.parametrize("window", [None, 1, WINDOW])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_kinds_of_attention_agree(
    monkeypatch: pytest.MonkeyPatch, share_prompts: bool, window: int | None
) -> None:
    """On the same queries, keys and values; the variable-length kernel as it is documented."""
    monkeypatch.setattr(packing, "varlen_attn", varlen_by_its_documentation)
    row = pack(*samples(*GROUPS), share_prompts=share_prompts, device=CPU)
    size = row.input_ids.shape[1]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, size, 16, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    outputs = {}
    for name, kind in packing.ATTENTIONS.items():
        exact = name != "varlen"  # it refuses float32
        q, k, v = (x.float() if exact else x for x in (query, key, value))
        plan = kind.plan(row, window)
        outputs[name] = kind.attend(q, k, v, plan, 0.5, window).float()
    for name, output in outputs.items():
        atol = 2e-2 if name == "varlen" else 1e-5
        torch.testing.assert_close(output, outputs["sdpa"], rtol=0, atol=atol, msg=name)


def test_varlen_refuses_float32() -> None:
    model = make("llama")
    set_attention(model, "varlen")
    with pytest.raises(ValueError, match="trainer.precision=bfloat16"):
        packed_logprobs(model, *samples(*GROUPS), share_prompts=False)


def test_choosing_the_kind_of_attention() -> None:
    model = make("llama")
    assert set_attention(model, "auto") == "segments"
    with pytest.raises(ValueError, match=r"packing.attention='paged' .* auto, segments, sdpa"):
        set_attention(model, "paged")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="set_attention"):
        packed_logprobs(model, *samples(*GROUPS), share_prompts=False)


def test_other_uses_of_a_model_stay_as_they_were() -> None:
    """Batches padded on either side, and generation."""
    model = make("mistral")
    tokens = torch.randint(3, 40, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    mask[1, 15:] = 0
    results = []
    for choose in (
        lambda: model.set_attn_implementation("sdpa"),
        lambda: set_attention(model, "segments"),
    ):
        choose()
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask).logits
            new = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        results.append((logits[mask.bool()], new))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("attention", ["segments", "sdpa"])
def test_gradient_checkpointing_changes_nothing(attention: str) -> None:
    model = copy.deepcopy(make("qwen2-sliding"))
    set_attention(model, attention)
    want = gradients(model, packed_logprobs(model, *samples(*GROUPS), share_prompts=True))
    model.gradient_checkpointing_enable()
    model.train()
    passes: list[int] = []
    model.base_model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    got = gradients(model, packed_logprobs(model, *samples(*GROUPS), share_prompts=True))
    assert len(passes) == 2, "nothing was computed again"
    assert_same_gradients(got, want, tolerance=1e-7)


def test_attention_dropout_is_refused() -> None:
    model = copy.deepcopy(make("llama"))
    set_attention(model, "segments")
    for layer in model.base_model.layers:
        layer.self_attn.attention_dropout = 0.1
    packed_logprobs(model, *samples(*GROUPS), share_prompts=True)  # in eval mode there is none
    model.train()
    with pytest.raises(ValueError, match="disable_dropout"):
        packed_logprobs(model, *samples(*GROUPS), share_prompts=True)


@pytest.mark.parametrize("attention", ["segments", "sdpa"])
def test_bfloat16_autocast_is_near_float32(attention: str) -> None:
    model = make("llama")
    set_attention(model, attention)
    exact = packed_logprobs(model, *samples(*GROUPS), share_prompts=True)
    want = gradients(model, exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = packed_logprobs(model, *samples(*GROUPS), share_prompts=True)
    gap = (rough - exact).abs()
    assert 0 < gap.mean() < 0.05 and gap.max() < 0.3
    a, b = (
        torch.cat([g.flatten() for g in grads.values()])
        for grads in (gradients(model, rough), want)
    )
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999


# --------------------------------------------------------------------------- which models can


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_check_passes_models_that_can(name: str) -> None:
    for attention in ("segments", "sdpa"):
        set_attention(make(name), attention)
        check_packing(make(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-untied", "cohere", "granite"])
def test_the_check_passes_in_lower_precision(
    tiny_models: dict[str, str], name: str, dtype: torch.dtype
) -> None:
    model = load_policy(tiny_models[name], device=CPU, dtype=dtype)
    set_attention(model, "auto")
    check_packing(model)


def refuse(model: PreTrainedModel, why: str) -> None:
    with pytest.raises(ValueError, match=why + ".*trainer.packing.attention=off"):
        set_attention(model, "segments")
        check_packing(model)


@pytest.mark.parametrize(
    ("name", "why"),
    [("gemma2", "softcap"), ("falcon-h1", "layers of type hybrid")],
)
def test_models_that_need_more_are_refused(
    tiny_models: dict[str, str], name: str, why: str
) -> None:
    refuse(load_policy(tiny_models[name], device=CPU, dtype=torch.float32), why)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            GPTNeoConfig(
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                **_SPECIAL,
            ),
            "AttentionInterface",
        ),
        (Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention"]), "layers of type conv"),
        (
            PhimoeConfig(**_GROUPED, num_local_experts=2, sliding_window=WINDOW),
            f"its window of {WINDOW} tokens",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_architectures_that_need_more_are_refused(config: PretrainedConfig, why: str) -> None:
    refuse(AutoModelForCausalLM.from_config(config).eval(), why)


def without(forward: Callable[..., object], name: str) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        kwargs.pop(name, None)
        return forward(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("argument", "why"),
    [("position_ids", "hidden states differ"), ("packed_plan", "keeps arguments")],
)
def test_models_that_ignore_an_argument_are_refused(argument: str, why: str) -> None:
    model = copy.deepcopy(make("llama"))
    model.base_model.forward = without(model.base_model.forward, argument)
    refuse(model, why)


# --------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("attention", list(packing.ATTENTIONS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_on_gpu_packed_equals_one_by_one(name: str, attention: str, share_prompts: bool) -> None:
    """In float32; the variable-length kernel, which has none, roughly in bfloat16."""
    model = copy.deepcopy(make(name)).cuda()
    prompts, responses = samples(*GROUPS)
    half = attention == "varlen"
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
        model.set_attn_implementation("eager")
        plain = torch.cat(
            [
                response_logprobs(model, [p], [r], temperature=TEMPERATURE)
                for p, r in zip(prompts, responses, strict=True)
            ]
        )
        want = gradients(model, plain)
        set_attention(model, attention)
        check_packing(model)
        packed = packed_logprobs(model, prompts, responses, share_prompts)
        got = gradients(model, packed)
    torch.testing.assert_close(packed, plain, rtol=0, atol=0.3 if half else 1e-4)
    assert_same_gradients(got, want, tolerance=0.1 if half else 1e-4)


# --------------------------------------------------------------------------- bins


def fewest_bins(lengths: Sequence[int], size: int) -> int:
    """The optimum, by trying everything: bins used and room taken in the last, for every subset."""
    best = [(0, size)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)
    for subset in range(1, len(best)):
        for i, length in enumerate(lengths):
            if subset >> i & 1:
                count, used = best[subset & ~(1 << i)]
                fits = used + length <= size
                found = (count, used + length) if fits else (count + 1, length)
                best[subset] = min(best[subset], found)
    return best[-1][0]


@given(
    lengths=st.lists(st.integers(1, 30), max_size=9),
    slack=st.integers(0, 40),
    overhead=st.integers(0, 9),
)
def test_bins_hold_everything_within_the_limit(
    lengths: list[int], slack: int, overhead: int
) -> None:
    limit = max(lengths, default=1) + slack + overhead
    found = bins(lengths, limit, overhead=overhead)
    assert sorted(i for members in found for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) + overhead <= limit for members in found)
    assert 9 * len(found) <= 11 * fewest_bins(lengths, limit - overhead) + 6
    assert found == bins(list(lengths), limit, overhead=overhead)


def test_bins_are_filled() -> None:
    """Lengths like those of grade-school mathematics leave a tenth of a row empty at most."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 400, size=500).tolist()
    found = bins(lengths, 4096)
    assert sum(lengths) / (4096 * len(found)) > 0.9


def test_a_response_longer_than_a_micro_batch_names_the_number_to_set() -> None:
    with pytest.raises(ValueError, match="trainer.tokens_per_micro_batch=70 or more"):
        bins([10, 60, 20], 64, overhead=10)
    assert bins([10, 60, 20], 70, overhead=10) == [[1], [0, 2]]
    assert bins([], 64) == []


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(packing)
    assert results.failed == 0 and results.attempted >= 3


# --------------------------------------------------------------------------- segments on CPU


def attended(
    prompt: int, responses: Sequence[int], attention: str, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Output of attention with grouped heads over one row, and the gradients of its inputs."""
    prompts = [np.arange(prompt)] * len(responses)
    row = pack(prompts, [np.arange(n) for n in responses], share_prompts=True, device=CPU)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, row.input_ids.shape[1], heads, 16, generator=generator).transpose(1, 2)
        for heads in (4, 2, 2, 4)
    )
    leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    kind = packing.ATTENTIONS[attention]
    out = kind.attend(*leaves, kind.plan(row, None), 0.3, None)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))


@pytest.mark.parametrize(("dtype", "rough"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("lengths", [(3, [2, 9, 1, 5]), (420, [30, 500]), (5, [450, 3])])
def test_segments_join_prompt_and_response(
    lengths: tuple[int, list[int]], dtype: torch.dtype, rough: float
) -> None:
    """On both sides of the length up to which the CPU kernel runs in float32."""
    got = attended(*lengths, "segments", dtype)
    want = attended(*lengths, "sdpa", torch.float64)
    for x, exact in zip(got, want, strict=True):
        assert x.dtype == dtype
        assert float((x - exact).norm() / exact.norm()) < rough


def test_segments_keep_nothing_that_grows_with_a_response_squared() -> None:
    def saved(length: int) -> int:
        total = 0

        def count(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            attended(64, [length] * 2, "segments", torch.bfloat16)
        return total

    assert saved(1024) < 2 * saved(512)
