"""Log-probs of given tokens, and entropies, from hidden states; the full logits never exist.

The head's matrix product, the temperature, the soft-cap and the log-softmax run block by block over
vocabulary and tokens; the backward pass computes each block anew from the log-sum-exp. One custom
autograd function, so that autograd keeps no block alive and nothing is joined over the vocabulary.

The vocabulary is the outer loop: a block's weight gradient is then complete before the next begins,
and with all tokens in one block it is written but once.

Torch code on GPUs too: of the kernels with one gradient per token and an entropy, Liger's (0.8.2)
takes no bias and no soft-cap, rounds the entropy to bfloat16 and is native on Hopper alone; torch's
`linear_cross_entropy` has neither entropy nor soft-cap.

Letters: N response tokens, V vocabulary, H hidden size; n and v are the sizes of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# From `python bench/logprobs.py --blocks` on CPUs: as many tokens as there are, for large products;
# the vocabulary's share matters little between 512 and 4096 words. 32 MB in float32.
CHUNK_TOKENS = 4096
CHUNK_VOCABULARY = 2048


@torch.compiler.disable  # a loop over hundreds of blocks: traced, it would be unrolled
def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int = CHUNK_TOKENS,
    chunk_vocabulary: int = CHUNK_VOCABULARY,
    entropy: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` and entropies of the policy at `temperature`, in nats.

    With logits `u = scale (hidden weight^T + bias)`, or `softcap tanh(u / softcap)`, it is
    `log_softmax(logits / temperature)`, in float32, at the targets. Under autocast, or with weights
    in bfloat16, the matrix products run in that dtype; everything after them is float32. Memory
    beyond inputs and gradients: one block of chunk_tokens x chunk_vocabulary (three with a soft-cap
    or an entropy's gradient; more in a smaller dtype), and a few copies of `hidden`. Gradients are
    sums in a fixed order.

    Args:
        hidden: [N, H], any float dtype; the states that predict the targets.
        weight: [V, H], the output head; tied to the input embedding or not.
        bias: [V] or None.
        targets: int64 [N].
        temperature: divides the logits.
        chunk_tokens: n, tokens of a block.
        chunk_vocabulary: v, words of a block.
        entropy: whether to compute the entropy too.
        scale: multiplies the head's output (Cohere's logit_scale, 1 / Granite's logits_scaling).
        softcap: bound of the logits (Gemma's final_logit_softcapping); None: none.

    Returns:
        log-probs [N] and entropies [N] or None; float32, or float64 for inputs in float64. Both
        are differentiable once.

    Raises:
        ValueError: an option out of range, dtypes that differ outside autocast, or a target that
            is not in the vocabulary (on a GPU, where looking would wait, its log-prob is NaN).

    >>> head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> logprobs, entropies = selected_logprobs(
    ...     torch.zeros(1, 2), head, None, torch.tensor([2]), temperature=1.0, entropy=True
    ... )
    >>> (-logprobs).exp().tolist(), entropies.exp().tolist()
    ([3.0], [3.0])
    """
    for name, value in (("temperature", temperature), ("scale", scale), ("softcap", softcap)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: give a number over 0")
    for name, size in (("chunk_tokens", chunk_tokens), ("chunk_vocabulary", chunk_vocabulary)):
        if size < 1:
            raise ValueError(f"{name}={size}: give 1 or more")
    if targets.device.type == "cpu" and targets.numel():
        low, high = torch.aminmax(targets)
        if low < 0 or high >= len(weight):
            raise ValueError(f"targets {int(low)}..{int(high)}: the head has {len(weight)} words")
    dtype, device = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:  # autocast's own exception
        dtype = torch.get_autocast_dtype(device)
    elif weight.dtype != dtype:
        raise ValueError(f"hidden is {dtype}, weight {weight.dtype}: convert one, or use autocast")
    options = _Options(dtype, temperature, chunk_tokens, chunk_vocabulary, scale, softcap)
    return _SelectedLogprobs.apply(hidden, weight, bias, targets, options, entropy)


@dataclass(frozen=True, slots=True)
class _Options:
    product_dtype: torch.dtype  # of the matrix products
    temperature: float
    chunk_tokens: int
    chunk_vocabulary: int
    scale: float
    softcap: float | None

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is not a matrix product."""
        return torch.float64 if self.product_dtype == torch.float64 else torch.float32

    @property
    def slope(self) -> float:
        """What the logits of `_Blocks` must still be multiplied by."""
        return (1.0 if self.softcap else self.scale) / self.temperature


class _Blocks:
    """The logits block by block, in one buffer that each block overwrites.

    The products' dtype is chosen here, not by autocast, which leaves calls with `out=` alone.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options
    ) -> None:
        self.options = options
        self.hidden = hidden.to(options.product_dtype)
        self.weight, self.bias = weight, bias
        n = min(options.chunk_tokens, len(hidden))
        size = n * min(options.chunk_vocabulary, len(weight))
        self._logits = hidden.new_empty(size, dtype=options.dtype)
        self._product = self._logits
        if options.product_dtype != options.dtype:
            self._product = hidden.new_empty(size, dtype=options.product_dtype)

    def vocabulary(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Words of each block, and their rows of the head in the products' dtype."""
        dtype = self.options.product_dtype
        for words in _slices(len(self.weight), self.options.chunk_vocabulary):
            bias = None if self.bias is None else self.bias[words].to(dtype)
            yield words, self.weight[words].to(dtype), bias

    def tokens(self) -> Iterator[slice]:
        """Tokens of each block."""
        return _slices(len(self.hidden), self.options.chunk_tokens)

    def logits(self, tokens: slice, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[n, v], to be multiplied by `options.slope` yet; valid until the next call."""
        hidden = self.hidden[tokens]
        shape = len(hidden), len(weight)
        product = self._product[: shape[0] * shape[1]].view(shape)
        logits = self._logits[: shape[0] * shape[1]].view(shape)
        if bias is None:
            torch.mm(hidden, weight.t(), out=product)
        else:
            torch.addmm(bias, hidden, weight.t(), out=product)
        if product is not logits:
            logits.copy_(product)
        softcap = self.options.softcap
        if softcap is not None:
            logits.mul_(self.options.scale / softcap).tanh_().mul_(softcap)
        return logits

    def for_product(self, block: Tensor) -> Tensor:
        """[n, v] in the products' dtype, without a new buffer."""
        if block.dtype == self._product.dtype:
            return block
        return self._product[: block.numel()].view(block.shape).copy_(block)


class _SelectedLogprobs(torch.autograd.Function):
    """Saves its inputs and the log-sum-exp [N]; with entropies, them too."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: _Options,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        blocks = _Blocks(hidden, weight, bias, options)
        slope = options.slope
        state = hidden.new_zeros(4, len(hidden), dtype=options.dtype)
        # Over the words so far: the largest logit, sum e^d and sum d e^d, where d is a logit minus
        # the largest. The smallest number rather than -inf, for which -inf x 0 would be NaN.
        top, total, weighted = state[0].fill_(torch.finfo(options.dtype).min), state[1], state[2]
        chosen = state[3].fill_(torch.nan)  # the target's logit
        for words, weight_block, bias_block in blocks.vocabulary():
            for tokens in blocks.tokens():
                d = blocks.logits(tokens, weight_block, bias_block)
                here, column = _find(targets[tokens], words)
                chosen[tokens] = torch.where(here, d.gather(1, column).squeeze(1), chosen[tokens])
                new_top = torch.maximum(top[tokens], d.amax(1) * slope)
                torch.add(-new_top[:, None], d, alpha=slope, out=d)
                shift = top[tokens] - new_top
                shrink = shift.exp()
                if with_entropy:
                    exp = d.exp()
                    weighted[tokens].add_(shift * total[tokens]).mul_(shrink)
                    weighted[tokens].add_(d.mul_(exp).sum(1))
                else:
                    exp = d.exp_()
                total[tokens].mul_(shrink).add_(exp.sum(1))
                top[tokens] = new_top
        log_total = total.log()
        logprobs = chosen * slope - top - log_total
        entropy = log_total - weighted / total if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, top + log_total, entropy)
        ctx.options = options
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, bias, targets, log_sum_exp, entropy = ctx.saved_tensors
        grads = _gradients(
            _Blocks(hidden, weight, bias, ctx.options),
            targets,
            log_sum_exp,
            grad_logprobs,
            grad_entropy,
            entropy,
            ctx.needs_input_grad[:3],
        )
        inputs = (hidden, weight, bias)
        return (
            *(None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)),
            None,
            None,
            None,
        )


def _gradients(
    blocks: _Blocks,
    targets: Tensor,
    log_sum_exp: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight and bias.

    With p the policy's probabilities, l their logs, g and e the gradients of a token's log-prob and
    entropy, and y its target, the gradient of its logit i is

        g [i = y] - p_i (g + e (l_i + entropy))

    Without e, it is -g (p_i - [i = y]): g is then left out of the blocks, and multiplies a token's
    row of the products instead, which are smaller.
    """
    options, hidden, weight, bias = blocks.options, blocks.hidden, blocks.weight, blocks.bias
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(log_sum_exp)
    factor = -options.scale / options.temperature
    if grad_entropy is None:
        rows = grad_logprobs * factor  # [N]
    else:
        rows = torch.full_like(grad_logprobs, factor)
    grad_hidden = grad_weight = grad_bias = None
    if needed[0]:
        grad_hidden = torch.zeros_like(hidden, dtype=options.dtype)
    if needed[1]:
        grad_weight = torch.zeros_like(weight) if len(hidden) == 0 else torch.empty_like(weight)
        weighted_hidden = (hidden * rows[:, None]).to(options.product_dtype)
    if bias is not None and needed[2]:
        grad_bias = torch.zeros_like(bias, dtype=options.dtype)

    for words, weight_block, bias_block in blocks.vocabulary():
        if grad_weight is not None:
            sums = grad_weight[words]
            several = len(hidden) > options.chunk_tokens
            if several and sums.dtype != options.dtype:  # they are added up in full precision
                sums = torch.empty_like(sums, dtype=options.dtype)
        for tokens in blocks.tokens():
            block = blocks.logits(tokens, weight_block, bias_block)
            bend = None
            if options.softcap is not None:
                bend = (block / options.softcap).square_().neg_().add_(1)
            torch.add(-log_sum_exp[tokens, None], block, alpha=options.slope, out=block)
            here, column = _find(targets[tokens], words)
            at_target = here.to(block.dtype)
            if grad_entropy is None:
                block.exp_()
            else:
                assert entropy is not None
                p = block.exp()
                block.add_(entropy[tokens, None]).mul_(grad_entropy[tokens, None])
                block.add_(grad_logprobs[tokens, None]).mul_(p)
                at_target *= grad_logprobs[tokens]
            # One column a row, so that no two meet: an addition in place, in a fixed order.
            block.scatter_(1, column, block.gather(1, column) - at_target[:, None])
            if bend is not None:
                block.mul_(bend)
            factors = blocks.for_product(block)
            if grad_hidden is not None:
                _add_product(grad_hidden[tokens], factors, weight_block, first=words.start == 0)
            if grad_weight is not None:
                first = tokens.start == 0
                _add_product(sums, factors.t(), weighted_hidden[tokens], first=first)
            if grad_bias is not None:
                grad_bias[words].addmv_(block.t(), rows[tokens])
        if grad_weight is not None and sums.dtype != grad_weight.dtype:
            grad_weight[words] = sums
    if grad_hidden is not None:
        grad_hidden.mul_(rows[:, None])
    return grad_hidden, grad_weight, grad_bias


def _add_product(sums: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """sums += left @ right, in the dtype of `sums`; the first product overwrites it."""
    if sums.dtype == left.dtype:
        torch.addmm(sums, left, right, beta=0 if first else 1, out=sums)
    elif first:
        sums.copy_(left @ right)
    else:
        sums.add_(left @ right)


def _find(targets: Tensor, words: slice) -> tuple[Tensor, Tensor]:
    """Whether each target is among `words`, [n], and in which column, [n, 1] (else in any)."""
    column = targets - words.start
    size = words.stop - words.start
    return (column >= 0) & (column < size), column.clamp(0, size - 1)[:, None]


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
