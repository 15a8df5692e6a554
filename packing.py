"""Packed rows: many prompts and responses in one row without padding, and models that read them.

`bins` chooses what goes in a row, `pack` lays it out, `packed_hidden` runs a model over it. Where
responses share a prompt, the row may hold it once; each response then sees the prompt and itself.
A row is made of segments: a prompt with its only response, a shared prompt, or a response to one.
What keeps segments apart is an attention function of our own, which transformers' models call as
they call theirs (its AttentionInterface); `trainer.packing.attention` says which:

    segments  torch's scaled_dot_product_attention segment by segment, without masks where it can;
              work grows linearly with the row. For CPU; on GPU it launches many small kernels
    sdpa      one call with a dense mask of the row: memory and work grow with the row's square
    flex      FlexAttention with a block mask; compiled, GPU only (CPU has no backward pass)
    varlen    torch's variable-length FlashAttention kernel; GPU only, float16 or bfloat16
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from parallel import device_of


@dataclass
class PackingConfig:
    """How responses are laid out for the trainer's forward and backward passes."""

    attention: str = "auto"  # auto | segments | sdpa | flex | varlen | off (padded batches)
    share_prompts: bool = True  # a prompt's tokens once for all its responses in a row


# --------------------------------------------------------------------------- layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """One row of S segments and L tokens, and where its N response tokens are predicted.

    The last token of a response predicts nothing and is seen by nothing: the row leaves it out.
    """

    input_ids: Tensor  # int64 [1, L]
    position_ids: Tensor  # int64 [1, L], within the sequence: a response's go on from its prompt's
    segment_ids: Tensor  # int64 [L], segment 0..S-1 of each token
    index: Tensor  # int64 [N], place in the row that predicts each response token
    targets: Tensor  # int64 [N], the token
    lengths: tuple[int, ...]  # tokens of each segment, in the row's order
    prompts: tuple[int, ...]  # segment of the shared prompt that each segment goes on from, or -1


def pack(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    share_prompts: bool,
    device: torch.device,
) -> Packed:
    """Lays out prompts and responses; response tokens stay in order, one response after another.

    Args:
        share_prompts: hold equal prompts once, wherever they are in the list.

    Raises:
        ValueError: a prompt or a response has no tokens, or there is no response at all.

    >>> a, b = np.array([5, 6]), np.array([7])
    >>> p = pack([a, a, b], [np.array([8, 9]), np.array([4]), np.array([3, 2])],
    ...          share_prompts=True, device=torch.device("cpu"))
    >>> p.input_ids.tolist(), p.position_ids.tolist()
    ([[5, 6, 8, 7, 3]], [[0, 1, 2, 0, 1]])
    >>> p.index.tolist(), p.targets.tolist(), p.prompts
    ([1, 2, 1, 3, 4], [8, 9, 4, 3, 2], (-1, 0, -1))
    """
    tokens: list[np.ndarray] = []
    offsets: list[int] = []  # position of each segment's first token
    parents: list[int] = []
    size = 0
    index: list[np.ndarray] = [np.zeros(0, np.int64)] * len(responses)

    def append(segment: np.ndarray, offset: int, parent: int) -> int:
        nonlocal size
        tokens.append(segment)
        offsets.append(offset)
        parents.append(parent)
        size += len(segment)
        return size - len(segment)

    for members in _groups(prompts, responses, share_prompts):
        prompt = prompts[members[0]]
        length = len(prompt)
        if len(members) == 1:
            (i,) = members
            start = append(np.concatenate([prompt, responses[i][:-1]]), 0, -1)
            index[i] = np.arange(start + length - 1, size)
            continue
        shared = len(tokens)
        last = append(prompt, 0, -1) + length - 1
        for i in members:
            body = responses[i][:-1]
            start = append(body, length, shared) if len(body) else size
            index[i] = np.concatenate([[last], np.arange(start, size)])
    lengths = np.array([len(segment) for segment in tokens])
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(size) - np.repeat(starts - np.array(offsets), lengths)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return Packed(
        input_ids=tensor(np.concatenate(tokens))[None],
        position_ids=tensor(positions)[None],
        segment_ids=tensor(np.repeat(np.arange(len(lengths)), lengths)),
        index=tensor(np.concatenate(index)),
        targets=tensor(np.concatenate(responses)),
        lengths=tuple(lengths.tolist()),
        prompts=tuple(parents),
    )


def _groups(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], share_prompts: bool
) -> list[list[int]]:
    """Indices of the sequences that hold one prompt between them."""
    if not len(prompts):
        raise ValueError("nothing to pack: there is no response")
    groups: dict[Any, list[int]] = {}
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0:
            raise ValueError("a prompt without tokens has nothing to predict its response from")
        if len(response) == 0:
            raise ValueError("a response without tokens has nothing to train on")
        key = np.asarray(prompt, np.int64).tobytes() if share_prompts else i
        groups.setdefault(key, []).append(i)
    return list(groups.values())


# --------------------------------------------------------------------------- attention


def set_attention(
    model: PreTrainedModel, attention: str, *, compute_dtype: torch.dtype | None = None
) -> str:
    """Makes `model` read packed rows with this kind of attention; its other uses stay as they were.

    Args:
        attention: a name in `ATTENTIONS`, or `auto`: segments on CPU; on GPU varlen in half
            precision, else flex.
        compute_dtype: that forward passes run in; None: the model's own.

    Returns:
        The kind chosen.

    Raises:
        ValueError: no such kind (trainer.packing.attention), or this kind of model can't read
            packed rows.
    """
    if attention == "auto":
        half = (compute_dtype or model.dtype) in (torch.float16, torch.bfloat16)
        attention = "segments" if device_of(model).type == "cpu" else "varlen" if half else "flex"
    if attention not in ATTENTIONS:
        known = ", ".join(["auto", *ATTENTIONS])
        raise ValueError(
            f"trainer.packing.attention={attention!r} is unknown; choose one of {known}"
        )
    config = model.config.get_text_config()
    known_types = {"full_attention", "sliding_attention"}
    others = set(getattr(config, "layer_types", None) or ()) - known_types
    if others:
        raise _refusal(config, f"it has layers of type {', '.join(sorted(others))}")
    name = _PREFIX + attention
    AttentionInterface.register(name, partial(_attention_forward, ATTENTIONS[attention].attend))
    AttentionMaskInterface.register(name, sdpa_mask)  # for batches that are not packed
    model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise _refusal(config, "it does not use transformers' AttentionInterface")
    return attention


def packed_hidden(model: PreTrainedModel, packed: Packed) -> Tensor:
    """The last hidden states that predict the response tokens, [N, H], differentiable.

    Raises:
        ValueError: `set_attention` was not called, or a layer does what packed rows can't have.
    """
    config = model.config.get_text_config()
    name = config._attn_implementation
    if not name.startswith(_PREFIX):
        raise ValueError("packed rows need a model that set_attention has prepared")
    plan = ATTENTIONS[name.removeprefix(_PREFIX)].plan
    hidden = model.base_model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        # A mask of four dimensions is handed to the layers as it is, so none is built of [L, L].
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device),
        use_cache=False,
        packed_plan={window: plan(packed, window) for window in set(layer_windows(config))},
    ).last_hidden_state  # [1, L, H]
    return hidden[0].index_select(0, packed.index)


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Compares packed hidden states with those of sequences read one by one, on a few tokens.

    Architectures are many, and one that carries state from token to token, or ignores positions or
    arguments, would train on wrong log-probs without a word. All ranks that hold a part of the
    model must call it.

    Raises:
        ValueError: they differ, so this kind of model can't read packed rows.
    """
    device = device_of(model)
    rng = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    shared, own, *responses = (rng.integers(0, vocabulary, n) for n in (5, 3, 6, 4, 7))
    prompts = [shared, shared, own]
    want = torch.cat(
        [
            model.base_model(
                input_ids=torch.from_numpy(np.concatenate([p, r]))[None].to(device), use_cache=False
            ).last_hidden_state[0, len(p) - 1 : -1]
            for p, r in zip(prompts, responses, strict=True)
        ]
    ).float()
    for share in (False, True):
        packed = pack(prompts, responses, share_prompts=share, device=device)
        got = packed_hidden(model, packed).float()
        gap = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
        # Rounding in bfloat16 makes about 0.01, tokens that see their neighbours 0.1 and more.
        if not gap < 0.05:
            raise _refusal(
                model.config.get_text_config(),
                f"its hidden states differ from those of single sequences by {gap:.2f}",
            )


def _refusal(config: Any, why: str) -> ValueError:
    return ValueError(
        f"{config.model_type} can't read packed rows: {why}; set trainer.packing.attention=off"
    )


def layer_windows(config: Any) -> list[int | None]:
    """The sliding window of each of a model's layers, in tokens; None: it sees everything."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if not types:
        return [window] * config.num_hidden_layers
    return [_window(window, kind) for kind in types]


def _window(window: int | None, layer_type: str) -> int | None:
    return window if layer_type == "sliding_attention" else None


def _attention_forward(
    attend: Callable[..., Tensor],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_plan: dict[int | None, Any] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: query [1, H, L, D], key and value [1, H', L, D] -> [1, L, H, D]."""
    config: Any = module.config
    if packed_plan is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise _refusal(config, "it keeps arguments from its attention function")
        kwargs |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise _refusal(config, f"its attention needs `{name}`")
    if dropout:
        raise ValueError("packed rows have no dropout in attention: call model.disable_dropout")
    # Not every architecture tells its window: those leave it to the mask, which is not built here.
    # `check_packing` has looked; in a compiled layer the index would compile every layer anew.
    window = sliding_window
    if not torch.compiler.is_compiling():
        types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if types:
            window = _window(window, types[module.layer_idx])
        if window != sliding_window:
            raise _refusal(
                config, f"its attention function is not told its window of {window} tokens"
            )
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out = attend(query, key, value, packed_plan[window], scaling, window)
    return out.transpose(1, 2), None


# Each kind below: `_plan_...(packed, window)` makes what all layers with that window share, and
# `_attend_...(query, key, value, plan, scale, window)` is [1, H, L, D] -> [1, H, L, D].

# The CPU kernel of torch is slower in bfloat16 than in float32 up to about this many keys.
_FLOAT32_KEYS = 384


@dataclass(slots=True, kw_only=True)
class _SegmentsPlan:
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    causal: list[slice]  # place of each segment in the row
    whole: list[tuple[slice, slice]]  # of the responses to a shared prompt, and of the prompt
    windowed: bool  # some segment reaches further than the window
    window: int | None
    masks: list[Tensor | None] | None = None  # made on first use, see `_masks`


def _plan_segments(packed: Packed, window: int | None) -> _SegmentsPlan:
    ends = np.cumsum(packed.lengths).tolist()
    causal = [slice(end - n, end) for end, n in zip(ends, packed.lengths, strict=True)]
    whole = []
    for prompt in sorted(set(packed.prompts) - {-1}):  # their responses lie side by side
        places = [causal[i] for i, p in enumerate(packed.prompts) if p == prompt]
        whole.append((slice(places[0].start, places[-1].stop), causal[prompt]))
    reach = [
        n + (packed.lengths[p] if p >= 0 else 0)
        for n, p in zip(packed.lengths, packed.prompts, strict=True)
    ]
    return _SegmentsPlan(
        lengths=packed.lengths,
        prompts=packed.prompts,
        causal=causal,
        whole=whole,
        windowed=window is not None and max(reach) > window,
        window=window,
    )


@torch.compiler.disable  # the loop over segments would be compiled anew for every row
def _attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: _SegmentsPlan,
    scale: float | None,
    window: int | None,
) -> Tensor:
    if query.device.type == "cpu" and not plan.windowed and query.shape[-1] == value.shape[-1]:
        return _SegmentsOnCpu.apply(query, key, value, plan, scale)
    if plan.masks is None:
        plan.masks = _masks(plan, query.device)
    # split, not slices: the gradient of every slice would be as long as the row
    queries, keys, values = (x.split(plan.lengths, dim=2) for x in (query, key, value))
    outputs = []
    for i, prompt in enumerate(plan.prompts):
        k, v = keys[i], values[i]
        if prompt >= 0:
            k = torch.cat([keys[prompt], k], dim=2)  # [1, H', P + T, D]
            v = torch.cat([values[prompt], v], dim=2)
        outputs.append(_sdpa(queries[i], k, v, plan.masks[i], scale))
    return torch.cat(outputs, dim=2)


def _masks(plan: _SegmentsPlan, device: torch.device) -> list[Tensor | None]:
    """bool [T, P + T] of each segment; None: causal."""
    masks: list[Tensor | None] = []
    for length, prompt in zip(plan.lengths, plan.prompts, strict=True):
        before = plan.lengths[prompt] if prompt >= 0 else 0
        mask = None
        if before or (plan.window is not None and length > plan.window):
            mask = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
            if plan.window is not None:
                mask = mask.triu(before - plan.window + 1)
        masks.append(mask)
    return masks


class _SegmentsOnCpu(torch.autograd.Function):
    """Attention without masks, whose memory grows with the row and not with a response's square.

    Every segment attends to itself, causally; then all responses to a prompt attend to the whole
    of it in one call. The two halves of a softmax are joined by their log-sum-exps, as blocks are
    in Ring Attention (arXiv 2310.01889); the kernel's backward pass takes the joint log-sum-exp
    and output, and gives each half's part of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: _SegmentsPlan,
        scale: float | None,
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query.transpose(1, 2), dtype=dtype).transpose(1, 2)
        sums = query.new_empty(query.shape[:3], dtype=dtype)  # log-sum-exps [1, H, L]
        for place in plan.causal:
            pieces = _for_kernel((query, place), (key, place), (value, place))
            out[:, :, place], sums[:, :, place] = attend(*pieces, 0.0, True, scale=scale)
        for responses, prompt in plan.whole:
            pieces = _for_kernel((query, responses), (key, prompt), (value, prompt))
            before, before_sums = attend(*pieces, 0.0, False, scale=scale)
            own_sums = sums[:, :, responses]
            share = torch.sigmoid(before_sums - own_sums)[..., None]  # of the prompt
            out[:, :, responses].lerp_(before.to(dtype), share.to(dtype))
            torch.logaddexp(own_sums, before_sums.to(dtype), out=own_sums)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        gradient = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value)]

        def parts(queries: slice, keys: slice, *, causal: bool) -> Any:
            q, k, v, o, g = _for_kernel(
                (query, queries), (key, keys), (value, keys), (out, queries), (grad, queries)
            )
            return gradient(g, q, k, v, o, sums[:, :, queries], 0.0, causal, scale=ctx.scale)

        for place in ctx.plan.causal:
            for total, part in zip(grads, parts(place, place, causal=True), strict=True):
                total[:, :, place] = part
        for responses, prompt in ctx.plan.whole:
            places = responses, prompt, prompt
            for total, place, part in zip(
                grads, places, parts(responses, prompt, causal=False), strict=True
            ):
                total[:, :, place] += part
        return *grads, None, None


def _for_kernel(*pieces: tuple[Tensor, slice]) -> list[Tensor]:
    """Pieces of rows in the dtype in which the kernel is faster; the second holds the keys."""
    cut = [x[:, :, place] for x, place in pieces]
    if cut[1].shape[2] <= _FLOAT32_KEYS and cut[0].dtype in (torch.bfloat16, torch.float16):
        cut = [x.float() for x in cut]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in cut]


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """torch's attention with a mask, or causal without one."""
    dtype = query.dtype
    if query.device.type == "cpu" and key.shape[2] <= _FLOAT32_KEYS:
        query, key, value = query.float(), key.float(), value.float()
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.is_cuda:
        # The fast GPU kernels take either a mask or grouped heads.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        groups = 1
    options: dict[str, Any] = {"is_causal": mask is None, "scale": scale, "enable_gqa": groups > 1}
    return F.scaled_dot_product_attention(query, key, value, mask, **options).to(dtype)


def _sees(packed: Packed, window: int | None) -> Callable[..., Tensor]:
    """Whether query token i of the row sees token j, in the form FlexAttention asks for."""
    segments, positions = packed.segment_ids, packed.position_ids[0]
    prompts = torch.tensor(packed.prompts, device=segments.device)[segments]  # [L]

    def sees(batch: Any, head: Any, i: Tensor, j: Tensor) -> Tensor:
        together = (segments[j] == segments[i]) | (segments[j] == prompts[i])
        back = positions[i] - positions[j]
        seen = together & (back >= 0)
        return seen if window is None else seen & (back < window)

    return sees


def _plan_sdpa(packed: Packed, window: int | None) -> Tensor:
    row = torch.arange(packed.input_ids.shape[1], device=packed.index.device)
    return _sees(packed, window)(None, None, row[:, None], row)[None, None]  # bool [1, 1, L, L]


def _attend_sdpa(
    query: Tensor, key: Tensor, value: Tensor, plan: Tensor, scale: float | None, window: int | None
) -> Tensor:
    return _sdpa(query, key, value, plan, scale)


def _plan_flex(packed: Packed, window: int | None) -> BlockMask:
    size = packed.input_ids.shape[1]
    device = packed.index.device
    return create_block_mask(_sees(packed, window), None, None, size, size, device=str(device))


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: BlockMask,
    scale: float | None,
    window: int | None,
) -> Tensor:
    on_cpu = query.device.type == "cpu"
    if on_cpu and query.requires_grad:
        raise ValueError(
            "trainer.packing.attention=flex has no backward pass on CPU: set "
            "trainer.packing.attention=segments"
        )
    # Inside a compiled model it is compiled with it; on CPU the plain form serves as a check.
    plain = on_cpu or torch.compiler.is_compiling()
    attend: Any = flex_attention if plain else _compiled_flex()
    grouped = query.shape[1] != key.shape[1]
    return attend(query, key, value, block_mask=plan, scale=scale, enable_gqa=grouped)


@dataclass(slots=True, kw_only=True)
class _VarlenPlan:
    query_ends: Tensor  # int32 [S + 1], cumulative lengths of the segments
    key_ends: Tensor  # int32 [S + 1], the same with their prompts
    longest_query: int
    longest_key: int
    keys: Tensor | None  # int64, place in the row of every segment's keys; None: the row as it is


def _plan_varlen(packed: Packed, window: int | None) -> _VarlenPlan:
    lengths = np.array(packed.lengths)
    starts = np.cumsum(lengths) - lengths
    prompts = np.array(packed.prompts)
    before = np.where(prompts >= 0, lengths[prompts], 0)
    keys = None
    if before.any():
        places = [
            np.concatenate([np.arange(starts[p], starts[p] + m), np.arange(s, s + n)])
            for p, m, s, n in zip(prompts, before, starts, lengths, strict=True)
        ]
        keys = torch.from_numpy(np.concatenate(places)).to(packed.index.device)

    def ends(counts: np.ndarray) -> Tensor:
        values = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return torch.from_numpy(values).to(packed.index.device)

    return _VarlenPlan(
        query_ends=ends(lengths),
        key_ends=ends(before + lengths),
        longest_query=int(lengths.max()),
        longest_key=int((before + lengths).max()),
        keys=keys,
    )


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: _VarlenPlan,
    scale: float | None,
    window: int | None,
) -> Tensor:
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"trainer.packing.attention=varlen computes in bfloat16, not in {query.dtype}: set "
            "trainer.precision=bfloat16 or trainer.packing.attention=flex"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, H, D]
    if plan.keys is not None:
        k, v = k.index_select(0, plan.keys), v.index_select(0, plan.keys)
    out = varlen_attn(
        q,
        k,
        v,
        plan.query_ends,
        plan.key_ends,
        plan.longest_query,
        plan.longest_key,
        scale=scale,
        # Where a segment has more keys than queries, its last query and its last key meet.
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, Tensor)  # and not with the normalisers, which were not asked for
    return out.transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class _Attention:
    plan: Callable[[Packed, int | None], Any]
    attend: Callable[..., Tensor]


_PREFIX = "packed_"  # of the names under which transformers knows them

ATTENTIONS = {
    "segments": _Attention(_plan_segments, _attend_segments),
    "sdpa": _Attention(_plan_sdpa, _attend_sdpa),
    "flex": _Attention(_plan_flex, _attend_flex),
    "varlen": _Attention(_plan_varlen, _attend_varlen),
}


# --------------------------------------------------------------------------- what goes in a row


def num_tokens(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], *, share_prompts: bool
) -> int:
    """Tokens of the row that `pack` makes of them.

    >>> prompt = np.array([5, 6, 7])
    >>> [num_tokens([prompt] * 2, [prompt] * 2, share_prompts=share) for share in (False, True)]
    [10, 7]
    """
    groups = _groups(prompts, responses, share_prompts)
    return sum(len(prompts[g[0]]) for g in groups) + sum(len(r) - 1 for r in responses)


def bins(lengths: Sequence[int], max_tokens: int, *, overhead: int = 0) -> list[list[int]]:
    """Indices of items in as few bins of `max_tokens` as first-fit decreasing finds.

    It takes at most 11/9 of the fewest possible bins, and 2/3 of one (Dósa, 2007). Items that must
    stay together are given as one.

    Args:
        lengths: tokens of each item, see `num_tokens`.
        overhead: tokens that every bin holds besides, such as a prompt shared by its items.

    Raises:
        ValueError: an item is larger than a bin.

    >>> bins([3, 9, 3, 4], 10)
    [[1], [0, 2, 3]]
    """
    longest = max(lengths, default=0) + overhead
    if longest > max_tokens:
        raise ValueError(
            f"trainer.tokens_per_micro_batch={max_tokens} is too little for a piece of {longest} "
            f"tokens that can't be split: set trainer.tokens_per_micro_batch={longest} or more"
        )
    found: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for j, left in enumerate(room):
            if lengths[i] <= left:
                found[j].append(i)
                room[j] -= lengths[i]
                break
        else:
            found.append([i])
            room.append(max_tokens - overhead - lengths[i])
    return [sorted(members) for members in found]
