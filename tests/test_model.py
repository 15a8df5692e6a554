"""Log-probs against plain forward passes, model by model, and what else opening a model gives."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3TextConfig,
    GraniteMoeConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    PretrainedConfig,
)

import model as modeling
from model import (
    PADDED,
    Layout,
    empty_model,
    head_options,
    load_policy,
    load_tokenizer,
    logprobs_and_entropies,
    micro_batches,
    pad,
    prepare_for_packing,
    response_logprobs,
    split,
    stop_token_ids,
    unique_response_logprobs,
)
from packing import num_tokens
from weights import manifest, named_weights

CPU = torch.device("cpu")
PROMPT_LENGTHS = [1, 7, 3, 12, 5]
RESPONSE_LENGTHS = [9, 1, 4, 6, 2]
OWN_LOGITS = ["falcon-h1"]
UNPACKABLE = ["gemma2", "falcon-h1"]  # their attention caps its scores; they carry a state along
PACKED = Layout(packed=True)
# Blocks that divide neither the tokens nor the vocabulary
SMALL_BLOCKS = Layout(packed=True, share_prompts=False, chunk_tokens=5, chunk_vocabulary=7)


def load(path: str, layout: Layout = PADDED) -> torch.nn.Module:
    model = load_policy(path, device=CPU, dtype=torch.float32)
    if layout.packed:
        prepare_for_packing(model, "auto")
    return model


def samples(seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return tiny.random_tokens(rng, PROMPT_LENGTHS), tiny.random_tokens(rng, RESPONSE_LENGTHS)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, id=f"{name}-{kind}")
        for name in tiny.SAVERS
        for kind, layout in {
            "padded": PADDED,
            "packed": PACKED,
            "small-blocks": SMALL_BLOCKS,
        }.items()
        if not (layout.packed and name in UNPACKABLE)
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_and_gradients_equal_one_by_one(
    tiny_models: dict[str, str], name: str, layout: Layout, temperature: float
) -> None:
    model = load(tiny_models[name], layout)
    prompts, responses = samples()
    got = response_logprobs(model, prompts, responses, temperature=temperature, layout=layout)
    want = torch.cat(
        [
            tiny.plain_logprobs(model, p, r, temperature)
            for p, r in zip(prompts, responses, strict=True)
        ]
    )
    assert got.dtype == torch.float32 and got.shape == (sum(RESPONSE_LENGTHS),)
    assert want.std() > 0.2, "the model is too flat to tell mistakes"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)

    coefficients = torch.randn(len(got), generator=torch.Generator().manual_seed(1))
    mine = gradients(model, (coefficients * got).sum())
    plain = gradients(model, (coefficients * want).sum())
    for parameter, grad in plain.items():
        # NeoX's and others' key biases have no gradient but rounding: the unit is the largest one
        unit = max(g.abs().max() for g in plain.values())
        gap = float((mine[parameter] - grad).abs().max() / unit)
        assert gap < 1e-5, f"{parameter}: {gap:.1e} of the largest gradient"


@pytest.mark.parametrize("name", list(tiny.SAVERS))
def test_logits_are_computed_in_blocks_and_at_responses_alone(
    tiny_models: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But for models whose own forward pass must be trusted with them."""
    model = load(tiny_models[name])
    whole: list[int] = []
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: whole.append(output.numel() // output.shape[-1])
    )
    in_blocks: list[tuple[int, int, int]] = []

    def recording(hidden, **options):
        in_blocks.append((len(hidden), options["chunk_tokens"], options["chunk_vocabulary"]))
        return selected_logprobs(hidden, **options)

    selected_logprobs = modeling.selected_logprobs
    monkeypatch.setattr(modeling, "selected_logprobs", recording)
    prompts, responses = samples()
    layout = Layout(chunk_tokens=3, chunk_vocabulary=9)
    response_logprobs(model, prompts, responses, temperature=1.0, layout=layout)
    padded = len(prompts) * max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    if name in OWN_LOGITS:
        assert (whole, in_blocks) == ([padded], [])
    else:
        assert (whole, in_blocks) == ([], [(sum(RESPONSE_LENGTHS), 3, 9)])


_SHAPE = {
    "vocab_size": tiny.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("config", "known"),
    [
        (Cohere2Config(**_SHAPE, logit_scale=0.5), True),
        (GraniteMoeConfig(**_SHAPE, num_local_experts=2, logits_scaling=2.0), True),
        (Gemma3TextConfig(**_SHAPE, head_dim=16, final_logit_softcapping=1.5), True),
        (HyperCLOVAXConfig(**_SHAPE, logits_scaling=2.0), False),  # Granite's name, but multiplies
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_other_models_that_rescale_their_logits(config: PretrainedConfig, known: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        tiny.perturb(model, 0.2)
    assert (head_options(model) is not None) is known
    prompts, responses = samples()
    got = response_logprobs(model, prompts, responses, temperature=0.7)
    pairs = list(zip(prompts, responses, strict=True))
    want = torch.cat([tiny.plain_logprobs(model, p, r, 0.7) for p, r in pairs])
    assert want.std() > 0.2, "the model is too flat to tell mistakes"
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_a_model_with_logits_of_its_own_is_not_packed(tiny_llama: str) -> None:
    model = load(tiny_llama)
    model.config.logit_scale = 0.5
    with pytest.raises(ValueError, match="its logits.*trainer.packing.attention=off"):
        prepare_for_packing(model, "auto")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", PACKED), ("cohere", PACKED), ("gemma2", PADDED), ("falcon-h1", PADDED)],
)
def test_entropies_equal_the_formula(
    tiny_models: dict[str, str], name: str, layout: Layout
) -> None:
    model = load(tiny_models[name], layout)
    prompts, responses = samples()
    options = {"temperature": 0.7, "layout": layout}
    logprobs, entropies = logprobs_and_entropies(model, prompts, responses, **options)
    want = []
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = torch.tensor([*prompt.tolist(), *response.tolist()])
        logits = model(input_ids=tokens[None]).logits[0, len(prompt) - 1 : -1].double()
        p = torch.softmax(logits / 0.7, dim=-1)
        want.append(-(p * p.log()).sum(-1))
    assert torch.cat(want).std() > 0.05
    torch.testing.assert_close(entropies.double(), torch.cat(want), rtol=0, atol=1e-5)
    mine = gradients(model, entropies.sum())
    plain = gradients(model, torch.cat(want).sum())
    unit = max(g.abs().max() for g in plain.values())
    assert all(float((mine[n] - g).abs().max() / unit) < 1e-5 for n, g in plain.items())
    assert torch.equal(logprobs, response_logprobs(model, prompts, responses, **options))
    assert logprobs_and_entropies(model, prompts, responses, **options, entropy=False)[1] is None


def test_temperature_divides_logits_before_the_softmax(tiny_llama: str) -> None:
    model = load(tiny_llama)
    prompts, responses = samples()
    one = response_logprobs(model, prompts, responses, temperature=1.0)
    hot = response_logprobs(model, prompts, responses, temperature=1e6)
    torch.testing.assert_close(
        hot, torch.full_like(hot, -np.log(tiny.VOCABULARY)), rtol=0, atol=1e-4
    )
    half = response_logprobs(model, prompts, responses, temperature=2.0)
    assert (half - one / 2).abs().max() > 0.1  # dividing log-probs is another thing


def test_padding_tokens_are_never_seen(tiny_gpt2: str) -> None:
    """A response's log-probs don't depend on its neighbours in the batch, to the last bit or so."""
    model = load(tiny_gpt2)
    prompts, responses = samples()
    alone = response_logprobs(model, prompts[1:2], responses[1:2], temperature=1.0)
    for width in (3, 40):
        rng = np.random.default_rng(width)
        others = tiny.random_tokens(rng, [width])
        both = response_logprobs(
            model, [others[0], prompts[1]], [others[0][:2], responses[1]], temperature=1.0
        )
        torch.testing.assert_close(both[2:], alone, rtol=0, atol=1e-5)


def test_bfloat16_autocast_is_near_float32_and_returns_float32(tiny_llama: str) -> None:
    model = load(tiny_llama)
    prompts, responses = samples()
    exact = response_logprobs(model, prompts, responses, temperature=0.7)
    rough = response_logprobs(model, prompts, responses, temperature=0.7, autocast=torch.bfloat16)
    assert rough.dtype == torch.float32
    gap = (rough - exact).abs()
    assert 0 < gap.mean() < 0.03 and gap.max() < 0.15
    # Gradients reach the float32 weights through the cast.
    mine = gradients(model, rough.sum())
    want = gradients(model, response_logprobs(model, prompts, responses, temperature=0.7).sum())
    a = torch.cat([g.flatten() for g in mine.values()])
    b = torch.cat([g.flatten() for g in want.values()])
    assert a.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.999


def test_pad_says_where_each_token_is_predicted() -> None:
    padded = pad([np.array([5, 6]), np.array([9])], [np.array([7]), np.array([8, 4, 3])], CPU)
    assert padded.input_ids.tolist() == [[5, 6, 7, 0], [9, 8, 4, 3]]
    assert padded.rows.tolist() == [0, 1, 1, 1]
    assert padded.columns.tolist() == [1, 0, 1, 2]
    assert padded.targets.tolist() == [7, 8, 4, 3]


def test_a_prompt_without_tokens_is_refused() -> None:
    empty = np.zeros(0, dtype=np.int32)
    with pytest.raises(ValueError, match="prompt without tokens"):
        pad([np.array([3]), empty], [np.array([4]), np.array([5])], CPU)


# --------------------------------------------------------------------------- unique responses


@pytest.mark.parametrize(
    ("tokens_per_micro_batch", "layout"),
    [(1, PADDED), (40, PADDED), (10_000, PADDED), (17, PACKED), (40, PACKED), (10_000, PACKED)],
)
def test_unique_logprobs_equal_plain_ones(
    tiny_llama: str, tokens_per_micro_batch: int, layout: Layout
) -> None:
    model = load(tiny_llama, layout)
    prompts, responses = samples()
    order = np.random.default_rng(3).integers(0, len(prompts), size=40)
    got = unique_response_logprobs(
        model,
        [prompts[i] for i in order],
        [responses[i] for i in order],
        temperature=0.7,
        tokens_per_micro_batch=tokens_per_micro_batch,
        layout=layout,
    )
    for i, logprobs in zip(order, got, strict=True):
        want = tiny.plain_logprobs(model, prompts[i], responses[i], 0.7).detach().numpy()
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, want, rtol=0, atol=1e-5)


def test_equal_responses_are_computed_once(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_llama)
    prompts, responses = samples()
    seen: list[int] = []

    def counting(model, prompts, responses, **options):
        seen.append(len(prompts))
        return response_logprobs(model, prompts, responses, **options)

    monkeypatch.setattr(modeling, "response_logprobs", counting)
    unique_response_logprobs(
        model, prompts * 6, responses * 6, temperature=1.0, tokens_per_micro_batch=10_000
    )
    assert sum(seen) == len(prompts)


def test_the_same_tokens_split_otherwise_are_another_response(tiny_llama: str) -> None:
    """[3, 4] + [5] and [3] + [4, 5] are the same sequence, but not the same response."""
    model = load(tiny_llama)
    a = [np.array([3, 4], np.int32), np.array([3], np.int32)]
    b = [np.array([5], np.int32), np.array([4, 5], np.int32)]
    one, two = unique_response_logprobs(model, a, b, temperature=1.0, tokens_per_micro_batch=100)
    assert len(one) == 1 and len(two) == 2
    np.testing.assert_allclose(one, two[1:], atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    max_tokens=st.integers(1, 200),
)
def test_micro_batches_are_a_partition_within_the_limit(
    lengths: list[int], max_tokens: int
) -> None:
    batches = list(micro_batches(lengths, max_tokens))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) == 1 or width * len(batch) <= max_tokens
    for left, right in zip(batches, batches[1:], strict=False):
        assert max(lengths[i] for i in left) <= min(lengths[i] for i in right)
        assert lengths[right[0]] * (len(left) + 1) > max_tokens, "a batch was closed too early"


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=6)),
        max_size=6,
    ),
    slack=st.integers(0, 60),
    share_prompts=st.booleans(),
)
def test_packed_micro_batches_are_a_partition_within_the_limit(
    groups: list[tuple[int, list[int]]], slack: int, share_prompts: bool
) -> None:
    layout = Layout(packed=True, share_prompts=share_prompts)
    pairs = [
        (np.full(width, number), np.full(length, 7))
        for number, (width, lengths) in enumerate(groups)
        for length in lengths
    ]
    pairs = pairs[::2] + pairs[1::2]  # responses to one prompt need not lie side by side
    prompts, responses = [p for p, _ in pairs], [r for _, r in pairs]

    def size(chosen: list[int]) -> int:
        p, r = [prompts[i] for i in chosen], [responses[i] for i in chosen]
        return num_tokens(p, r, share_prompts=share_prompts)

    limit = max((len(p) + len(r) - 1 for p, r in pairs), default=1) + slack
    batches = split(prompts, responses, limit, layout)
    assert sorted(i for batch in batches for i in batch) == list(range(len(pairs)))
    assert all(size(batch) <= limit for batch in batches)
    whole = list(range(len(pairs)))
    if pairs and size(whole) <= limit:
        assert batches == [whole]
    if share_prompts:
        for number in range(len(groups)):
            group = [i for i in whole if prompts[i][0] == number and groups[number][0]]
            if group and size(group) <= limit:
                assert any(set(group) <= set(batch) for batch in batches)


def test_a_response_longer_than_a_packed_micro_batch_names_the_number_to_set() -> None:
    prompts, responses = [np.arange(5), np.arange(5)], [np.arange(3), np.arange(40)]
    for share_prompts in (False, True):
        layout = Layout(packed=True, share_prompts=share_prompts)
        with pytest.raises(ValueError, match="trainer.tokens_per_micro_batch=44 or more"):
            split(prompts, responses, 43, layout)
        assert split(prompts, responses, 44, layout) == [[1], [0]]


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(modeling)
    assert results.failed == 0 and results.attempted >= 7


# --------------------------------------------------------------------------- opening a model


@pytest.mark.parametrize("name", list(tiny.SAVERS))
def test_manifest_needs_no_weights(tiny_models: dict[str, str], name: str) -> None:
    """An engine works out what it must be sent from the config alone."""
    model = load(tiny_models[name])
    empty = empty_model(tiny_models[name])
    assert all(p.is_meta for p in empty.parameters())
    assert manifest(empty, torch.bfloat16) == manifest(model, torch.bfloat16)
    # What is published is the whole model: as many numbers as its file has.
    files = Path(tiny_models[name]).glob("*.safetensors")
    stored = sum(tensor.size for file in files for tensor in load_file(file).values())
    assert sum(parameter.numel() for _, parameter in named_weights(model)) == stored


def test_a_tied_head_is_left_out(tiny_llama: str, tiny_llama_untied: str) -> None:
    tied = {name for name, _ in named_weights(load(tiny_llama))}
    untied = {name for name, _ in named_weights(load(tiny_llama_untied))}
    assert untied - tied == {"lm_head.weight"}


def test_models_open_without_dropout(tiny_gpt2: str) -> None:
    model = load(tiny_gpt2)
    assert model.config.attn_pdrop > 0 and not model.training
    prompts, responses = samples()
    first, second = (
        response_logprobs(model, prompts, responses, temperature=1.0) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_stop_tokens_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    tiny.save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert stop_token_ids(str(tmp_path), tokenizer) == [tiny.EOS]  # no generation_config.json
    for eos, want in ([7, [2, 7]], [[9, 7, 2], [2, 7, 9]], [None, [2]]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert stop_token_ids(str(tmp_path), tokenizer) == want


def test_context_length_comes_from_the_config(tiny_gpt2: str, tiny_llama: str) -> None:
    assert modeling.context_length(tiny_llama) == tiny.MAX_LENGTH
    assert modeling.context_length(tiny_gpt2) == tiny.MAX_LENGTH


def test_a_folder_that_is_no_model_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.path"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match="model.path"):
        modeling.context_length(str(tmp_path))
    with pytest.raises(ValueError, match="no config.json"):
        modeling.resolve_path(modeling.ModelConfig(path=str(tmp_path)), None)
    with pytest.raises(ValueError, match="model.path is missing"):
        modeling.resolve_path(modeling.ModelConfig(), None)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    options = json.loads(file.read_text())
    del options["eos_token"]
    file.write_text(json.dumps(options))
    with pytest.raises(ValueError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("layout", [PADDED, PACKED], ids=["padded", "packed"])
def test_without_dropout_train_mode_and_checkpointing_change_nothing(
    tiny_gpt2: str, layout: Layout
) -> None:
    model = load(tiny_gpt2, layout)
    prompts, responses = [np.array([5, 6, 7], np.int32)], [np.array([8, 9, 4], np.int32)]
    options = {"temperature": 0.7, "layout": layout}
    want = modeling.response_logprobs(model, prompts, responses, **options)
    model.train()
    if not layout.packed:
        dropped = modeling.response_logprobs(model, prompts, responses, **options)
        assert not torch.equal(dropped, want)  # this model has dropout
    modeling.disable_dropout(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = modeling.response_logprobs(model, prompts, responses, **options)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
