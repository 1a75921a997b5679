"""Block-sparse attention in unchanged models that call torch's own attention, `F.scaled_dot_product_attention`.

A query sees a key if the structure, the call's mask and its `is_causal` all allow it: a causal call stays causal under
a structure that is not causal. Calls are treated as follows:

| call | |
|---|---|
| queries and keys of different numbers: cross attention, cached keys | dense |
| no mask, `is_causal` | block-sparse |
| bool mask that is one of keys, or that and causal (as Hugging Face writes them out) | block-sparse, the mask unread |
| any other bool mask, masks of floats | block-sparse, the mask added as a bias |
| other than 4 dims, nested, values of another head size, other heads or length than a fixed layout's | `otherwise` |

>>> import torch
>>> from torch.nn import functional as F
>>> from shardwise.attention import BlockLayout
>>> q, k, v = torch.randn(3, 2, 4, 32, 8)
>>> with sparse_sdpa(BlockLayout.from_blocks(torch.eye(2), block=16)):
...     sparse = F.scaled_dot_product_attention(q, k, v)
>>> own = slice(16, 32)
>>> dense = F.scaled_dot_product_attention(q[:, :, own], k[:, :, own], v[:, :, own])
>>> torch.allclose(sparse[:, :, own], dense, atol=1e-6)
True
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from operator import index
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout, keep_last, require_structure
from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.dropout.apply import DropoutSite, KeyedFunctions, keyed_attention
from shardwise.runtime.class_swap import set_attribute, subclass_module
from shardwise.runtime.host_reads import HostReads
from shardwise.runtime.torch_private import constant_in_graphs, is_fake

Otherwise = Literal["raise", "dense"]
_MOST_LAYOUTS: Final = 32


class LayoutSource(Protocol):
    """Gives a layout for each length."""

    def layout(self, seq_len: int) -> BlockLayout:
        """Return the layout of a sequence of this many tokens."""


@checked
@contextmanager
def sparse_sdpa(structure: BlockLayout | LayoutSource, *, otherwise: Otherwise = "raise") -> Iterator[None]:
    """Make torch's attention block-sparse inside the context, for the calls that allow it.

    A recomputation runs during the backward, so the context must contain the backward too, on its thread; for a model
    that recomputes, and on GPUs, use `sparse_sdpa_module`.

    Args:
        structure: a layout, or an object that has one for each length.
        otherwise: "raise" an error for a call that cannot be block-sparse, or leave it "dense".

    Raises:
        ConfigError: a call cannot be block-sparse, and `otherwise` is "raise".
    """
    with _Interception(structure, otherwise):
        yield


@checked
def sparse_sdpa_module(
    module: nn.Module, structure: BlockLayout | LayoutSource, *, otherwise: Otherwise = "raise"
) -> Callable[[], None]:
    """Apply `sparse_sdpa` in all forwards of a module and of the modules inside it, and in their recomputations.

    Call it before `initialize`. Recomputed parts must be modules, or functions that call modules. Compiled code is not
    supported; call `block_sparse_attention` there.

    Args:
        structure: a layout, or an object that has one for each length.

    Returns:
        a function that restores the module.
    """
    mode = _Interception(structure, otherwise)
    undo: list[Callable[[], Any]] = []
    for submodule in module.modules():
        is_torchs = type(submodule).__module__.startswith("torch.")
        if (is_torchs and not any(submodule.children())) or isinstance(submodule, nn.ModuleList | nn.ModuleDict):
            continue  # it calls no attention
        undo.append(set_attribute(submodule, _MODE, mode))
        undo.append(subclass_module(submodule, _PatchedModule))

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back


_MODE: Final = "_shardwise_sparse_sdpa"


class _PatchedModule(nn.Module):
    """Enters the interception in its own forward, so that recomputations of it run inside too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mode: _Interception = self.__dict__[_MODE]
        if torch.compiler.is_compiling():
            raise ConfigError(
                "sdpa-compiled", "attention inside sparse_sdpa_module cannot be compiled; set compile.enabled=false"
            )
        with mode.once():
            return super().forward(*args, **kwargs)


class _Interception(TorchFunctionMode):
    """Replaces torch's attention, and `keyed_attention`, which has dropout in an engine's forward.

    Args:
        structure: a layout, or an object that has one for each length.
    """

    def __init__(self, structure: BlockLayout | LayoutSource, otherwise: Otherwise) -> None:
        super().__init__()
        require_structure(structure)
        self._structure, self._otherwise = structure, otherwise
        self._layouts: dict[tuple[int, bool], BlockLayout] = {}
        self._reads = HostReads()
        self._on_thread = threading.local()

    def __reduce__(self) -> Any:
        return _Interception, (self._structure, self._otherwise)

    @contextmanager
    def once(self) -> Iterator[None]:
        """Enter the mode unless this thread is inside already; entered twice, it doubles the cost of torch's calls."""
        if getattr(self._on_thread, "is_inside", False):
            yield
            return
        self._on_thread.is_inside = True
        try:
            with self:
                yield
        finally:
            self._on_thread.is_inside = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if func is F.scaled_dot_product_attention:
            call = _SdpaCall(*args, **keywords)
        elif func is keyed_attention:
            call = replace(_SdpaCall(*args[1:], **keywords), site=args[0])
        else:
            return func(*args, **keywords)
        if call.is_cross:
            return func(*args, **keywords)
        reason = call.obstacle() or self._misfit(call)
        if reason is None:
            return self._attend(call)
        if self._otherwise == "dense":
            return func(*args, **keywords)
        raise ConfigError(
            "sdpa-not-sparse",
            f'{reason}, so it cannot be block-sparse; give otherwise="dense" to leave such calls dense',
        )

    def _misfit(self, call: _SdpaCall) -> str | None:
        """Return why the layout does not fit a call; None where it fits."""
        layout, (_, num_heads, length, _) = self._structure, call.query.shape
        if isinstance(layout, BlockLayout) and (layout.num_queries, layout.num_keys) != (length, length):
            return f"attention over {length} tokens is given a layout of {layout.num_keys}"
        if self._layout(length).num_heads not in (1, num_heads):
            return f"attention of {num_heads} heads is given a layout of {self._layout(length).num_heads}"
        return None

    def _layout(self, length: int, is_causal: bool = False) -> BlockLayout:
        if isinstance(self._structure, BlockLayout) and not is_causal:
            return self._structure
        layout_key = (index(length), is_causal)  # compiled code fixes it
        self._lay_out(*layout_key)
        return self._layouts[layout_key]

    @constant_in_graphs
    def _lay_out(self, length: int, is_causal: bool) -> None:
        """Keep the layout; compiled code does so while it is compiled, and cannot pass a layout itself."""
        keep_last(self._layouts, (length, is_causal), lambda: self._new_layout(length, is_causal), _MOST_LAYOUTS)

    def _new_layout(self, length: int, is_causal: bool) -> BlockLayout:
        structure = self._structure
        layout = structure if isinstance(structure, BlockLayout) else structure.layout(length)
        if not is_causal or layout.is_token_causal:
            return layout
        # Kept with the layout too, since each step enters a new context.
        return layout.cached("token-causal", BlockLayout.token_causal)

    def _attend(self, call: _SdpaCall) -> Tensor:
        query, mask = call.query, call.attn_mask
        key_padding, bias, is_causal = None, None, call.is_causal
        if mask is not None:
            mask = mask.view((1,) * (4 - mask.ndim) + mask.shape)  # [1 or B, 1 or H, 1 or N, 1 or N]
            square = (query.shape[2], query.shape[2])
            mask_kind = self._kind(mask)
            is_causal = is_causal or mask_kind == "causal"
            if mask_kind == "bias":
                bias = mask if mask.dtype != torch.bool else query.new_zeros(mask.shape).masked_fill_(~mask, -torch.inf)
                bias = bias.expand(*bias.shape[:2], *square)
            else:
                key_padding = mask[:, 0, -1].expand(query.shape[0], query.shape[2])
        with KeyedFunctions(call.site) if call.site is not None else nullcontext():
            return block_sparse_attention(
                query,
                call.key,
                call.value,
                self._layout(query.shape[2], is_causal),
                key_padding=key_padding,
                bias=bias,
                dropout=call.dropout_p,
                scale=call.scale,
            )

    def _kind(self, mask: Tensor) -> str:
        """Classify a mask of 4 dims: "padding", "causal" (with padding), or "bias"; kept, since layers share masks."""
        if mask.dtype != torch.bool or mask.shape[1] > 1:
            return "bias"
        if mask.shape[2] == 1 or is_fake(mask):  # a fake has no values; most masks are of keys
            return "padding"
        return self._reads.of(mask, _kind_of_values)


def _kind_of_values(mask: Tensor) -> str:
    keys = mask[:, :, -1:]  # [1 or B, 1, 1, N]: what the last query sees
    if torch.equal(mask, keys.expand(mask.shape)):
        return "padding"
    return "causal" if torch.equal(mask, keys.expand(mask.shape).tril()) else "bias"


@dataclass(frozen=True, eq=False)
class _SdpaCall:
    """Holds the arguments of `F.scaled_dot_product_attention`, and the site of its dropout, if any."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    site: DropoutSite | None = None

    @property
    def is_cross(self) -> bool:
        tensors = (self.query, self.key)
        return not any(tensor.is_nested for tensor in tensors) and self.query.shape[-2] != self.key.shape[-2]

    def obstacle(self) -> str | None:
        """Return why no layout would fit the call; None where one may."""
        query, key, value = self.query, self.key, self.value
        if query.is_nested or key.is_nested or value.is_nested:
            return "attention is of nested tensors"
        if query.ndim != 4:
            return f"attention of shape {tuple(query.shape)} has {query.ndim} dims, not 4"
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            return f"attention has heads of {query.shape[-1]} for queries and {value.shape[-1]} for values"
        if query.shape[1] != key.shape[1] and not self.enable_gqa:
            return f"attention has {query.shape[1]} heads and {key.shape[1]} KV heads without enable_gqa=True"
        return None
