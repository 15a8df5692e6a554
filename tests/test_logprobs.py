"""Log-probs and entropies in blocks against the plain formula over full logits."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import logprobs as module
from logprobs import selected_logprobs

N, V, H = 13, 37, 8
TEMPERATURE = 0.7
BLOCKS: dict[str, Any] = {"temperature": TEMPERATURE, "chunk_tokens": 5, "chunk_vocabulary": 7}
RESCALINGS: list[dict[str, Any]] = [{}, {"scale": 0.6}, {"softcap": 3.0, "scale": 1.5}]


def inputs(
    n: int = N, v: int = V, h: int = H, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Random hidden, weight, bias (all with gradient) and targets, the last word among them."""
    generator = torch.Generator().manual_seed(n * 10_000 + v)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(v, (n,), generator=generator)
    targets[-1:] = v - 1
    return leaf(n, h), leaf(v, h), leaf(v) if bias else None, targets


def plain(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = TEMPERATURE,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, over all logits."""
    logits = F.linear(hidden, weight, bias)  # [N, V]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


def coefficients(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def gradients(outputs: tuple[Tensor, Tensor], *leaves: Tensor | None) -> list[Tensor]:
    """Of a sum in which each token's log-prob and entropy has a weight of its own."""
    n = len(outputs[0])
    loss = (outputs[0] * coefficients(n, 1)).sum() + (outputs[1] * coefficients(n, 2)).sum()
    return list(torch.autograd.grad(loss, [x for x in leaves if x is not None]))


def assert_near(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Equal up to `tolerance` of the largest entry, or of 1."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        unit = max([1.0, *b.detach().abs().flatten().tolist()])
        torch.testing.assert_close(
            a, b, rtol=0, atol=tolerance * unit, check_dtype=False, equal_nan=False
        )


# --------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("rescaling", RESCALINGS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_the_plain_formula(rescaling: dict, bias: bool) -> None:
    hidden, weight, b, targets = inputs(bias=bias)
    got = selected_logprobs(hidden, weight, b, targets, entropy=True, **BLOCKS, **rescaling)
    want = plain(hidden, weight, b, targets, **rescaling)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert want[0].std() > 0.5 and want[1].std() > 0.1, "too flat to tell mistakes"
    assert_near(got, want)
    mine, theirs = gradients(got, hidden, weight, b), gradients(want, hidden, weight, b)
    assert_near(mine, theirs)
    assert all(g.abs().max() > 0.1 for g in theirs)


@pytest.mark.parametrize("rescaling", RESCALINGS, ids=str)
@pytest.mark.parametrize("outputs", ["logprobs", "entropy", "both"])
def test_gradients_pass_gradcheck_in_float64(rescaling: dict, outputs: str) -> None:
    hidden, weight, bias, targets = inputs(5, 7, 3, dtype=torch.float64)
    options = {**BLOCKS, "chunk_tokens": 2, "chunk_vocabulary": 3, **rescaling}

    def function(*leaves: Tensor) -> Any:
        both = selected_logprobs(*leaves, targets, entropy=outputs != "logprobs", **options)
        return {"logprobs": both[0], "entropy": both[1], "both": both}[outputs]

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_logprobs_equal_cross_entropy_at_a_temperature(temperature: float) -> None:
    """As `model.response_logprobs` defines them: logits divided, not log-probs."""
    hidden, weight, bias, targets = inputs()
    options = {**BLOCKS, "temperature": temperature}
    got, entropy = selected_logprobs(hidden, weight, bias, targets, **options)
    logits = F.linear(hidden, weight, bias)
    want = -F.cross_entropy(logits / temperature, targets, reduction="none")
    assert entropy is None
    assert_near([got], [want])
    leaves = [hidden, weight, bias]
    mine = torch.autograd.grad(got, leaves, coefficients(N, 1))
    assert_near(mine, torch.autograd.grad(want, leaves, coefficients(N, 1)))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 20),
    v=st.integers(1, 40),
    chunk_tokens=st.integers(1, 25),
    chunk_vocabulary=st.integers(1, 50),
    bias=st.booleans(),
    rescaling=st.sampled_from(RESCALINGS),
)
def test_any_blocks_give_the_same(
    n: int, v: int, chunk_tokens: int, chunk_vocabulary: int, bias: bool, rescaling: dict
) -> None:
    hidden, weight, b, targets = inputs(n, v, bias=bias)
    got = selected_logprobs(
        hidden,
        weight,
        b,
        targets,
        temperature=TEMPERATURE,
        chunk_tokens=chunk_tokens,
        chunk_vocabulary=chunk_vocabulary,
        entropy=True,
        **rescaling,
    )
    want = plain(hidden, weight, b, targets, **rescaling)
    assert_near(got, want)
    assert_near(gradients(got, hidden, weight, b), gradients(want, hidden, weight, b))


def test_no_tokens_give_no_logprobs_and_zero_gradients() -> None:
    hidden, weight, bias, targets = inputs(0)
    got = selected_logprobs(hidden, weight, bias, targets, entropy=True, **BLOCKS)
    assert got[0].shape == got[1].shape == (0,)
    grads = gradients(got, hidden, weight, bias)
    assert [g.shape for g in grads] == [(0, H), (V, H), (V,)]
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("needed", ["hidden", "weight", "bias"])
def test_one_input_alone_may_need_a_gradient(needed: str) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    want = gradients(plain(hidden, weight, bias, targets), leaves[needed])
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == needed)
    got = selected_logprobs(hidden, weight, bias, targets, entropy=True, **BLOCKS)
    assert_near(gradients(got, leaves[needed]), want)
    assert all(leaf.grad is None for leaf in leaves.values())


def test_nothing_needs_a_gradient_in_inference_mode() -> None:
    hidden, weight, bias, targets = inputs()
    want = plain(hidden, weight, bias, targets)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            got = selected_logprobs(hidden * 1, weight, bias, targets, entropy=True, **BLOCKS)
        assert not got[0].requires_grad
        assert_near(got, want)


def test_a_head_tied_to_the_embedding_gets_both_gradients() -> None:
    _, weight, bias, targets = inputs()

    def loss(function: Callable[..., Any], **options: Any) -> Tensor:
        hidden = F.embedding(targets.roll(1), weight).tanh()
        both = function(hidden, weight, bias, targets, **options)
        return (both[0] * coefficients(N, 1)).sum() + both[1].sum()

    (got,) = torch.autograd.grad(loss(selected_logprobs, entropy=True, **BLOCKS), weight)
    (want,) = torch.autograd.grad(loss(plain), weight)
    assert_near([got], [want])


def test_inputs_may_be_views_with_strides() -> None:
    hidden, weight, bias, targets = inputs(2 * N)
    got = selected_logprobs(hidden[::2], weight.t().clone().t(), bias, targets[::2], **BLOCKS)[0]
    want = plain(hidden[::2], weight, bias, targets[::2])[0]
    assert_near([got], [want])
    mine = torch.autograd.grad(got.sum(), [hidden, weight])
    assert_near(mine, torch.autograd.grad(want.sum(), [hidden, weight]))


# --------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("chunk_vocabulary", [1, 7, 100])
@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_extreme_logits_neither_overflow_nor_vanish(chunk_vocabulary: int, offset: float) -> None:
    """Logits up to 1e4 apart, and all near 1e4 or -1e4: exact in float32, so no loss is excused."""
    logits = torch.tensor([[1e4, -1e4, 1e4, 0.0], [-1e4, -1e4, -1e4, -1e4], [1.0, 2.0, 3.0, 4.0]])
    logits = (logits + offset).requires_grad_()
    targets = torch.tensor([2, 0, 3])
    options = {**BLOCKS, "temperature": 1.0, "chunk_vocabulary": chunk_vocabulary}
    # An identity head: hidden states are the logits.
    got = selected_logprobs(logits, torch.eye(4), None, targets, entropy=True, **options)
    want = plain(logits.double(), torch.eye(4).double(), None, targets, temperature=1.0)
    assert all(x.isfinite().all() for x in got)
    assert_near(got, want)
    mine, theirs = gradients(got, logits), gradients(want, logits)
    assert_near(mine, theirs, 2e-3)  # the log-sum-exp near 1e4 is rounded to 1e-3


def test_sums_over_blocks_of_a_bfloat16_head_are_of_full_precision() -> None:
    """256 equal blocks: added up in bfloat16, the sum would stop growing at 256 times its unit."""
    tokens = 1024
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    options = {"temperature": 1.0, "chunk_tokens": 2, "chunk_vocabulary": 1}
    got, _ = selected_logprobs(hidden, weight, None, targets, **options)
    got.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.flatten().tolist() == [tokens / 2, -tokens / 2]


@pytest.mark.parametrize("rescaling", RESCALINGS, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_autocast_equals_plain_autocast(
    rescaling: dict, weight_dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = inputs(64, 300, 32)
    with torch.no_grad():
        weight *= 0.2
    weight = weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = selected_logprobs(
            hidden,
            weight,
            bias,
            targets,
            temperature=TEMPERATURE,
            chunk_tokens=20,
            chunk_vocabulary=70,
            entropy=True,
            **rescaling,
        )
        want = plain(hidden, weight, bias, targets, **rescaling)
        mine = gradients(got, hidden, weight, bias)  # autocast must not reach the backward pass
    exact = plain(hidden, weight.float(), bias, targets, **rescaling)
    assert got[0].dtype == got[1].dtype == torch.float32
    # The same rounding of the same product, then float32.
    assert_near(got, want, 1e-4)
    assert (got[0] - exact[0]).abs().max() > 1e-3, "the product was not in bfloat16"
    theirs = gradients(want, hidden, weight, bias)
    true = gradients(exact, hidden, weight, bias)
    for a, b, c in zip(mine, theirs, true, strict=True):
        assert a.dtype == b.dtype
        unit = float(c.abs().max())
        plain_error = float((b.float() - c).abs().max()) / unit
        assert float((a.float() - c).abs().max()) / unit < max(2 * plain_error, 2**-7)
        assert plain_error < 0.1


def test_gradients_are_the_same_every_time() -> None:
    hidden, weight, bias, targets = inputs(200, 90)
    targets = targets % 3  # many tokens share a row of the head
    options = {**BLOCKS, "chunk_tokens": 64}

    def run() -> list[Tensor]:
        got = selected_logprobs(hidden, weight, bias, targets, entropy=True, **options)
        return gradients(got, hidden, weight, bias)

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


# --------------------------------------------------------------------------- memory


class _Sizes(TorchDispatchMode):
    """Elements of the largest tensor that an operation returned, forward or backward."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def run(function: Callable[..., Any], leaves: tuple[Any, ...], **options: Any) -> None:
    """Forward and backward, of log-probs and entropies."""
    hidden, weight, bias, _ = leaves
    gradients(function(*leaves, **options), hidden, weight, bias)


def peak_bytes(function: Callable[..., Any], leaves: tuple[Any, ...], **options: Any) -> int:
    """Most bytes alive at once among those that a forward and backward pass allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(function, leaves, **options)
    alive = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("rescaling", RESCALINGS, ids=str)
def test_no_tensor_has_all_tokens_and_all_words(rescaling: dict) -> None:
    n, v, h = 96, 1000, 16
    leaves = inputs(n, v, h)
    options = {"temperature": TEMPERATURE, "chunk_tokens": 24, "chunk_vocabulary": 100}
    with _Sizes() as mine:
        run(selected_logprobs, leaves, entropy=True, **options, **rescaling)
    with _Sizes() as theirs:
        run(plain, leaves, **rescaling)
    assert theirs.largest == n * v, "the watch sees nothing"
    assert mine.largest == v * h  # the weight and its gradient: a block is 24 x 100


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rescaling", RESCALINGS, ids=str)
def test_peak_memory_is_set_by_the_block(rescaling: dict, autocast: bool) -> None:
    n, v, h = 512, 4096, 8
    leaves = inputs(n, v, h)
    options = {"temperature": TEMPERATURE, "entropy": True, **rescaling}
    peaks = {}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        run(selected_logprobs, leaves, **options)  # what is allocated but once
        for shape in ((64, 256), (128, 512)):
            chunk_tokens, chunk_vocabulary = shape
            peaks[shape] = peak_bytes(
                selected_logprobs,
                leaves,
                chunk_tokens=chunk_tokens,
                chunk_vocabulary=chunk_vocabulary,
                **options,
            )
    for (chunk_tokens, chunk_vocabulary), peak in peaks.items():
        block = 4 * chunk_tokens * chunk_vocabulary
        results = 4 * (n * h + v * h + v)
        # Logits, probabilities and slope of the soft-cap, and copies for the products; a few
        # copies of the hidden states and a few numbers for each token.
        assert peak < 5 * block + results + 4 * n * (4 * h + 40), (chunk_tokens, peak)
        assert peak > block
    assert peak_bytes(plain, leaves, **rescaling) > 12 * n * v


def test_only_inputs_and_a_few_numbers_a_token_are_saved() -> None:
    leaves = inputs(96, 1000, 16)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        selected_logprobs(*leaves, entropy=True, **BLOCKS)
    own = [x for x in saved if all(x.data_ptr() != leaf.data_ptr() for leaf in leaves)]
    assert [tuple(x.shape) for x in own] == [(96,), (96,)]  # log-sum-exp and entropy


# --------------------------------------------------------------------------- with the rest of torch


def test_activation_checkpointing_changes_nothing() -> None:
    hidden, weight, bias, targets = inputs()
    options = {"entropy": True, **BLOCKS}
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            want = selected_logprobs(hidden, weight, bias, targets, **options)
            got = checkpoint(
                selected_logprobs, hidden, weight, bias, targets, use_reentrant=False, **options
            )
        mine, theirs = gradients(got, hidden, weight, bias), gradients(want, hidden, weight, bias)
        assert all(torch.equal(a, b) for a, b in zip((*got, *mine), (*want, *theirs), strict=True))


def test_a_compiled_function_may_call_it() -> None:
    hidden, weight, bias, targets = inputs()

    def around(hidden: Tensor) -> tuple[Tensor, Tensor]:
        a, b = selected_logprobs(hidden * 2, weight, bias, targets, entropy=True, **BLOCKS)
        return a * 3, b - 1

    got, want = torch.compile(around, backend="eager")(hidden), around(hidden)
    assert_near(got, want, 1e-6)
    mine, theirs = gradients(got, hidden, weight, bias), gradients(want, hidden, weight, bias)
    assert_near(mine, theirs, 1e-6)


def test_a_second_derivative_is_refused() -> None:
    hidden, weight, bias, targets = inputs()
    logprobs, _ = selected_logprobs(hidden, weight, bias, targets, **BLOCKS)
    (grad,) = torch.autograd.grad(logprobs.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# --------------------------------------------------------------------------- errors and examples


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("scale", -1.0),
        ("softcap", 0.0),
        ("chunk_tokens", 0),
        ("chunk_vocabulary", -1),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=option):
        selected_logprobs(*inputs(), **{**BLOCKS, option: value})


@pytest.mark.parametrize("target", [-100, -1, V])
def test_a_target_outside_the_vocabulary_is_refused(target: int) -> None:
    hidden, weight, bias, targets = inputs()
    targets[3] = target
    with pytest.raises(ValueError, match=f"the head has {V}"):
        selected_logprobs(hidden, weight, bias, targets, **BLOCKS)


def test_dtypes_must_agree_without_autocast() -> None:
    hidden, weight, bias, targets = inputs()
    with pytest.raises(ValueError, match="use autocast"):
        selected_logprobs(hidden.bfloat16(), weight, bias, targets, **BLOCKS)


def test_examples_in_docstrings_hold() -> None:
    results = doctest.testmod(module)
    assert results.attempted == 3 and results.failed == 0
