"""Block-sparse attention in unchanged Hugging Face models, through the registries of transformers.

A model's attention modules get a structure as an attribute, and its config names an attention that reads it there. So
models with different structures can exist at once, and copies and pickles keep the structure; `save_pretrained` writes
a plain model. The mask function is registered under the same name: without it transformers ignores padding silently.

    with use_sparse_attention(model, LocalSlidingWindowSparsityConfig(num_heads=12, block=64)):
        model(**batch).loss.backward()

What is computed is the structure, and within it what the model itself lets a token see:
- In causal models every structure becomes token-causal. One that is token-causal is refused in bidirectional models.
- Padding (2-D masks) and sequences packed by `position_ids` or `cu_seq_lens_q`, where each document has a layout of its
  own, cost nothing extra. Position biases (T5) are added; they are of size N x N.
- With cached keys, queries have the last rows of the layout for all tokens so far. It equals a run without cache where
  the structure does not change with the length (windows, global blocks at the start).
- Where a sequence is spread over ranks, a mask shows it (`shardwise.attention.cp_hook`), and `spread` computes.
- Cross attention stays dense. Windows of the model's own, soft caps, sinks, 4-D masks and weights to be returned
  (`output_attentions`) are refused.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout, keep_last, require_structure
from shardwise.attention.cp_hook import ContextHook, is_sequence_mask, read_sequence_mask
from shardwise.config.errors import ConfigError
from shardwise.hf.masks import (
    OWN_ATTENTION,
    is_module_causal,
    is_window_mark,
    padding_mask,
    window_error,
)
from shardwise.runtime.class_swap import set_attribute
from shardwise.runtime.host_reads import HostReads
from shardwise.runtime.torch_private import constant_in_graphs

NAME: Final = "shardwise_block_sparse"
_GIVEN: Final = "_shardwise_structure"
_MOST_LAYOUTS: Final = 32
_MOST_WITH_CACHE: Final = 4  # generation comes with every length once
_CROSS: Final = re.compile(r"cross_?att|enc_?dec_?att|encoder_att", re.IGNORECASE)


class LayoutFactory(Protocol):
    """Makes layouts of any length, as a `FixedSparsityConfig` does."""

    def layout(self, seq_len: int) -> BlockLayout:
        """Return the layout of one sequence."""

    def layout_of_documents(self, lengths: Sequence[int]) -> BlockLayout:
        """Return the layout of documents packed one after another."""


class _LayoutKey(NamedTuple):
    """Identifies a kept layout.

    Attributes:
        rank: the tensor-parallel rank; None where the model's heads are not split.
        num_queries: the last ones of a sequence.
        lengths: tokens of packed documents; None for one sequence.
    """

    num_heads: int
    rank: int | None
    num_queries: int
    num_keys: int
    lengths: tuple[int, ...] | None
    is_causal: bool


class _Layouts:
    """Keeps the layouts made last: for whole sequences, and, fewer of them, for queries after cached keys."""

    def __init__(self) -> None:
        self._whole: dict[_LayoutKey, BlockLayout] = {}
        self._with_cache: dict[_LayoutKey, BlockLayout] = {}

    def at(self, place: _LayoutKey) -> dict[_LayoutKey, BlockLayout]:
        """Return the dict that keeps the layout of a key."""
        return self._whole if place.num_queries == place.num_keys else self._with_cache

    def keep(self, place: _LayoutKey, make: Callable[[], BlockLayout]) -> None:
        """Make and keep the layout of a key unless it is kept already."""
        is_square = place.num_queries == place.num_keys
        keep_last(self.at(place), place, make, _MOST_LAYOUTS if is_square else _MOST_WITH_CACHE)


@dataclass(frozen=True, eq=False)
class _ModuleAttention:
    """The attribute that an attention module gets; copies share it, and unpickling registers the attention again.

    Attributes:
        is_cross: whether the module attends to another sequence.
        name: of the attention in transformers' registries.
        spread: computes attention where a sequence is spread over ranks; not pickled. None without context parallelism.
        shared: layouts that the modules of a model share, so that all layers have one plan.
        reads: what the host has read of masks, for all modules of a model.
        own: layouts that this module has used.
    """

    structure: LayoutFactory | BlockLayout
    is_cross: bool
    name: str
    spread: ContextHook | None = None
    shared: _Layouts = field(default_factory=_Layouts)
    reads: HostReads = field(default_factory=HostReads)
    own: _Layouts = field(default_factory=_Layouts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _given, (self.structure, self.is_cross, self.name)

    @constant_in_graphs
    def lay_out(self, *place: Any) -> None:
        """Keep the layout of a key; compiled code does so while it is compiled, and cannot pass a layout itself.

        Raises:
            ConfigError: the structure does not fit the model.
        """
        at = _LayoutKey(*place)
        self.own.keep(at, lambda: self._shared(at))

    def _shared(self, place: _LayoutKey) -> BlockLayout:
        self.shared.keep(place, lambda: self._new(place))
        return self.shared.at(place)[place]

    def _new(self, place: _LayoutKey) -> BlockLayout:
        if place.num_queries != place.num_keys:
            layout = self._new(place._replace(num_queries=place.num_keys))
            return layout.queries_from(place.num_keys - place.num_queries)
        return _of_rank(self.whole(place.num_keys, place.lengths, place.is_causal), place)

    def whole(self, num_tokens: int, lengths: tuple[int, ...] | None, is_causal: bool) -> BlockLayout:
        """Make the layout of all heads of the model.

        Args:
            lengths: tokens of packed documents; None for one sequence.

        Raises:
            ConfigError: the structure does not fit the model.
        """
        if isinstance(self.structure, BlockLayout):
            layout = _cropped(self.structure, num_tokens, lengths)
        elif lengths is None:
            layout = self.structure.layout(num_tokens)
        else:
            layout = self.structure.layout_of_documents(lengths)
        if is_causal:
            layout = layout.token_causal()
        elif any(pattern.causal for pattern in layout.patterns):
            raise ConfigError(
                "structure-looks-back",
                "a token-causal structure in a bidirectional model would hide half of each sequence; give "
                'attention="bidirectional"',
            )
        return layout


def _given(structure: LayoutFactory | BlockLayout, is_cross: bool, name: str) -> _ModuleAttention:
    register(name)
    return _ModuleAttention(structure, is_cross, name)


class SparseAttention(AbstractContextManager["SparseAttention"]):
    """Represents a model's sparse attention, which `undo` or the end of a `with` removes."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def undo(self) -> None:
        """Restore the model's own attention; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __exit__(self, *_: object) -> None:
        self.undo()


def register(name: str = NAME) -> None:
    """Register attention and mask under one name in transformers; the functions read the structure from the module."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, sparse_attention_forward)
    AttentionMaskInterface.register(name, padding_mask)


def use_sparse_attention(
    model: nn.Module,
    structure_or_layout: LayoutFactory | BlockLayout,
    *,
    name: str = NAME,
    spread: ContextHook | None = None,
) -> SparseAttention:
    """Give a Hugging Face model's self-attention a block-sparse structure, without changing the model's code.

    Args:
        model: a `PreTrainedModel`, or a module that holds some.
        structure_or_layout: a structure makes a layout for each length; a layout serves sequences of its length, and
            shorter ones by its first blocks. With different heads it serves tp ranks too, each with its own heads.
        name: of the attention in transformers' registries.
        spread: computes attention where the mask describes a sequence that is spread over ranks; None for an error.

    Returns:
        a handle, also a context manager, that removes it. The registered functions stay, since copies of the model use
        them.

    Raises:
        ConfigError: there is no model of transformers, or one that does not look its attention up, or no structure.
    """
    from transformers import PreTrainedModel

    require_structure(structure_or_layout)
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not inner:
        raise ConfigError(
            "not-transformers",
            f"{type(model).__name__} holds no model of transformers; for others use "
            "sparse_sdpa_module, where they call torch's attention, or SparseSelfAttention",
        )
    modules = [(path, module) for path, module in model.named_modules() if _attends(module) and module not in inner]
    register(name)
    undo: list[Callable[[], None]] = []
    for config in _configs(inner):
        undo.append(_restoring(config))
    for submodel in inner:
        submodel.set_attn_implementation(name)
    shared, reads = _Layouts(), HostReads()
    for path, module in modules:
        attention = _ModuleAttention(structure_or_layout, _crosses(path, module), name, spread, shared, reads)
        undo.append(set_attribute(module, _GIVEN, attention))
    used = SparseAttention(undo)
    deaf = [type(submodel).__name__ for submodel in inner if submodel.config._attn_implementation != name]
    if deaf or not modules:
        used.undo()
        # Torch's attention, which `sparse_sdpa_module` replaces, sees one rank's tokens only.
        other = "" if spread is not None else ", or sparse_sdpa_module, where it calls torch's attention"
        raise ConfigError(
            "attention-interface",
            f"{(deaf or [type(model).__name__])[0]} does not look its attention up in transformers' "
            f"AttentionInterface; use a model that does{other}",
        )
    return used


def structure_given(model: nn.Module) -> LayoutFactory | BlockLayout | None:
    """Return the structure that `use_sparse_attention` has set on a model; None without one."""
    return next((attention.structure for _, attention in _all_given(model)), None)


def whole_layout(model: nn.Module, lengths: tuple[int, ...]) -> BlockLayout:
    """Return the layout of documents for all heads of a model with a structure, however many heads this rank has.

    Raises:
        ConfigError: the model has no structure.
    """
    for module, attention in _all_given(model):
        return attention.whole(sum(lengths), lengths if len(lengths) > 1 else None, is_module_causal(module, {}))
    raise _no_structure(model)


def _no_structure(module: nn.Module) -> ConfigError:
    return ConfigError(
        "no-structure", f"{type(module).__name__} has no structure; call use_sparse_attention on the whole model"
    )


def _all_given(model: nn.Module) -> Iterator[tuple[nn.Module, _ModuleAttention]]:
    """Yield the modules that attend to their own sequence, and the attribute of each."""
    for module in model.modules():
        attention: _ModuleAttention | None = getattr(module, _GIVEN, None)
        if attention is not None and not attention.is_cross:
            yield module, attention


def attends_causally(model: nn.Module) -> bool:
    """Say whether all self-attention of a model is causal; that of an encoder-decoder is not."""
    modules = [(path, module) for path, module in model.named_modules() if _attends(module)]
    self_attentions = [attention for path, attention in modules if not _crosses(path, attention)]
    return bool(self_attentions) and all(is_module_causal(module, {}) for module in self_attentions)


def _crosses(path: str, module: nn.Module) -> bool:
    return _CROSS.search(f"{path} {type(module).__name__}") is not None


def _attends(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ or "is_causal" in module.__dict__


def _configs(models: Sequence[Any]) -> Iterator[Any]:
    """Yield each config once, outer ones first, since setting one also sets its sub-configs."""
    seen: set[int] = set()
    waiting = [model.config for model in models]
    while waiting:
        config = waiting.pop(0)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield config
            waiting = [getattr(config, attribute, None) for attribute in config.sub_configs] + waiting


def _restoring(config: Any) -> Callable[[], None]:
    before = config._attn_implementation

    def put_back() -> None:
        config._attn_implementation = before

    return put_back


def sparse_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention with the signature that transformers calls.

    Args:
        query: [B, H, Nq, D]; key and value are [B, K, Nk, D], and their heads are not repeated.
        attention_mask: of `padding_mask` or `cp_hook.sequence_mask`; None where all tokens are real.
        options: `scaling`, `dropout`, `is_causal`, `position_bias`, `cu_seq_lens_q` and others.

    Returns:
        output [B, Nq, H, D], and no weights.

    Raises:
        ConfigError: the module has no structure, or asks for what block-sparse attention does not compute.
    """
    attention: _ModuleAttention | None = getattr(module, _GIVEN, None)
    if attention is None:
        raise _no_structure(module)
    size, value_size = query.shape[-1], value.shape[-1]
    if size != value_size:  # latent attention: padding with zeros changes neither scores nor results
        widest, options["scaling"] = max(size, value_size), options.get("scaling") or size**-0.5
        query, key, value = (F.pad(tensor, (0, widest - tensor.shape[-1])) for tensor in (query, key, value))
        out, _ = sparse_attention_forward(module, query, key, value, attention_mask, **options)
        return out[..., :value_size], None
    if attention.spread is not None and is_sequence_mask(attention_mask):
        return _spread(attention.spread, attention, module, (query, key, value), attention_mask, options), None
    _refuse(module, attention_mask, key.shape[2], options)
    is_causal = is_module_causal(module, options)
    if attention.is_cross or (not is_causal and query.shape[2] != key.shape[2]):
        return _dense(query, key, value, attention_mask, options), None
    if attention_mask is not None and attention_mask.shape[1] < key.shape[2]:  # a static cache, not full yet
        key, value = (tensor[:, :, : attention_mask.shape[1]] for tensor in (key, value))  # [B, K, Nk, D]
    lengths = _lengths(attention.reads, attention_mask, options)
    padding = attention_mask if attention_mask is not None and attention_mask.dtype == torch.bool else None
    flat = lengths is not None and sum(lengths) != query.shape[2]
    batch_size = query.shape[0]
    if flat:  # rows of a batch packed in different ways are one long row
        query, key, value = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
    num_heads, num_queries, num_keys = map(
        operator.index, (*query.shape[1:3], key.shape[2])
    )  # compiled code fixes them
    layout_key = _LayoutKey(num_heads, _rank_of(module), num_queries, num_keys, lengths, is_causal)
    attention.lay_out(*layout_key)
    layout = attention.own.at(layout_key)[layout_key]
    out = block_sparse_attention(
        query,
        key,
        value,
        layout,
        key_padding=padding,
        bias=options.get("position_bias"),
        dropout=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )  # [B, H, Nq, D]
    out = out.transpose(1, 2)  # [B, Nq, H, D]
    return (out.reshape(batch_size, -1, *out.shape[2:]) if flat else out), None


def _spread(
    spread: ContextHook,
    given: _ModuleAttention,
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Compute the attention of a rank's tokens of sequences that are spread over ranks, [B, n, H, D]."""
    query, key, value = qkv
    # All but packed masks are read without a wait, by compiled code too.
    lengths, real = given.reads.of(mask, read_sequence_mask) if mask.dtype == torch.int64 else read_sequence_mask(mask)
    num_heads, num_tokens = map(operator.index, (query.shape[1], sum(lengths)))  # compiled code fixes them
    _refuse(module, None, num_tokens, options)
    if given.is_cross or options.get("position_bias") is not None or query.shape[2] != key.shape[2]:
        raise ConfigError(
            "cp-plain-attention",
            f"{type(module).__name__} attends to another sequence, adds position biases or has cached keys, which "
            "context parallelism does not compute; set mesh.cp=1",
        )
    packed = lengths if len(lengths) > 1 else None
    layout_key = _LayoutKey(
        num_heads, _rank_of(module), num_tokens, num_tokens, packed, is_module_causal(module, options)
    )
    given.lay_out(*layout_key)
    out = spread(
        query,
        key,
        value,
        given.own.at(layout_key)[layout_key],
        lengths=lengths,
        key_padding=None if real is None else real.to(query.device),
        dropout=options.get("dropout", 0.0),
        scale=options.get("scaling"),
    )  # [B, H, n, D]
    return out.transpose(1, 2)


def _refuse(module: nn.Module, mask: Tensor | None, num_keys: int, options: dict[str, Any]) -> None:
    window = options.get("sliding_window")
    if window is not None and window < num_keys:
        raise window_error(type(module).__name__, f"sliding_window={window} tokens", num_keys)
    if is_window_mark(mask):
        raise window_error(type(module).__name__, f"{mask.shape[2]} tokens in its mask", num_keys)
    refused = [option for option in ("softcap", "s_aux", "output_attentions") if _is_asked(options.get(option))]
    if refused:
        fix = "" if refused[0] == "s_aux" else "take it out of the model's config, or "  # code has sinks, not configs
        raise ConfigError(
            "attention-option",
            f"{refused[0]} of {type(module).__name__} is not computed by the library's attention; {fix}{OWN_ATTENTION}",
        )
    if mask is not None and mask.ndim != 2:
        raise ConfigError(
            "mask-dims",
            f"attention_mask of shape {tuple(mask.shape)} is not [B, N]; give that of the padding, and the rest as a "
            "structure",
        )


def _is_asked(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    """Compute dense attention, for cross attention, [B, Nq, H, D]."""
    seen = None if mask is None else mask[:, None, None, :]  # [B, 1, 1, Nk]
    bias = options.get("position_bias")
    if bias is not None:
        seen = bias if seen is None else bias.masked_fill(~seen, torch.finfo(bias.dtype).min)  # [B, H, Nq, Nk]
    rate, scale = options.get("dropout", 0.0), options.get("scaling")
    out = F.scaled_dot_product_attention(q, k, v, seen, rate, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _lengths(reads: HostReads, mask: Tensor | None, options: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the lengths of a row's packed documents, or of all rows' where rows differ; None where none are packed."""
    ends: Tensor | None = options.get("cu_seq_lens_q")
    if ends is not None:  # on the CPU there is no wait, and NumPy may write them
        return _lengths_of_ends(ends) if ends.is_cpu else reads.of(ends, _lengths_of_ends)
    return None if mask is None or mask.dtype == torch.bool else reads.of(mask, _lengths_of_documents)


def _lengths_of_ends(ends: Tensor) -> tuple[int, ...]:
    return tuple(ends.diff().tolist())


def _lengths_of_documents(numbers: Tensor) -> tuple[int, ...]:
    rows = [tuple(row.bincount().tolist()) for row in numbers.cpu()]
    return rows[0] if len(set(rows)) == 1 else tuple(length for row in rows for length in row)


def _cropped(layout: BlockLayout, num_keys: int, lengths: tuple[int, ...] | None) -> BlockLayout:
    """Return the user's layout, or its first blocks for a shorter sequence."""
    have = tuple(pattern.num_tokens for pattern in layout.patterns)
    if have == (lengths or (num_keys,)) or (lengths is None and sum(have) == num_keys):
        return layout
    if lengths is not None or len(have) > 1 or num_keys > have[0]:
        raise ConfigError(
            "layout-length",
            f"the layout is for documents of {have} tokens, and the model got {lengths or num_keys}; give a structure, "
            "which makes layouts of all lengths",
        )
    num_blocks = -(-num_keys // layout.block)
    (pattern,) = layout.patterns
    cropped = replace(pattern, blocks=pattern.blocks[:, :num_blocks, :num_blocks], num_tokens=num_keys)
    return BlockLayout((cropped,))


def _rank_of(module: nn.Module) -> int | None:
    """Return the tensor-parallel rank of a module, which a split layer inside it knows; None where there is none."""
    for submodule in module.modules():
        state = getattr(submodule, "_shardwise_linear", None)
        if state is not None:
            rank: int = state.ops.comm.rank
            return rank
    return None


def _of_rank(layout: BlockLayout, place: _LayoutKey) -> BlockLayout:
    """Return the heads of a layout that a tensor-parallel rank's module computes."""
    if layout.num_heads in (1, place.num_heads):
        return layout
    if place.rank is None or layout.num_heads % place.num_heads:
        raise ConfigError(
            "layout-heads",
            f"the layout has {layout.num_heads} heads, and the model's attention has {place.num_heads}; give as many, "
            "or one for all heads",
        )
    return layout.of_heads(place.rank * place.num_heads, place.num_heads)
