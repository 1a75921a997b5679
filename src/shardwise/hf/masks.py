"""Read the masks of Hugging Face models: what they say beyond causal or bidirectional, padding and documents.

Some models tell their attention of a sliding window (`sliding_window`), others build it into their mask only. A window
in the mask is lost where the library's attention takes the place of the model's own, so it must be found:

- On one rank `padding_mask` makes the model's masks. It marks a mask whose window hides some of the keys, and the
  attention refuses what is marked. Layers that do not use this mask are served.
- Where sequences are spread over ranks, models are given a mask and make none. So a run of a copy finds out the
  shortest window (`find_mask_window`), and sequences that are longer are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.config.errors import ConfigError
from shardwise.runtime.class_swap import set_attribute
from shardwise.runtime.torch_private import is_fake

OWN_ATTENTION: Final = "leave the model its own attention (mesh.cp=1, attention.kind=dense)"
_PROBE: Final = "shardwise_mask_reach"
_REACH: Final = "_shardwise_mask_reach"
_MOST_TOKENS: Final = 1 << 20  # a longer window is none

MaskFunction = Callable[..., Tensor]  # of transformers: whether a query sees a key, by sample, head and two positions


def window_error(module: str, window: str, num_keys: int) -> ConfigError:
    """Return the error for an attention with a window of the model's own."""
    return ConfigError(
        "sliding-window",
        f"{module} has a window of {window}, less than the {num_keys} keys; set config.sliding_window=None and "
        "use_sliding_window=False, or layer_types of full attention, and give LocalSlidingWindowSparsityConfig; or "
        f"{OWN_ATTENTION}",
    )


def is_module_causal(module: nn.Module, options: Mapping[str, Any]) -> bool:
    """Say whether an attention module is causal, by what it is given or else by its attributes."""
    requested = options.get("is_causal")
    of_module = getattr(module, "is_causal", True) and getattr(getattr(module, "config", None), "is_causal", True)
    return bool(of_module if requested is None else requested)


def is_window_mark(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Say whether `padding_mask` has marked a mask for its window."""
    return mask is not None and mask.ndim == 3


def padding_mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor | None:
    """Make the mask that `sparse_attention_forward` reads, of size B x N, with the signature that transformers calls.

    Args:
        kv_length: slots for keys; in a static cache that is not full, more than there are keys.
        options: `q_offset`, `kv_offset`, `mask_function`, `attention_mask` [B, Nk] and others, which transformers
            passes.

    Returns:
        None; or bool [B, Nk], True for a real token; or, where documents are packed, their numbers as int64 [B, Nk];
        or, where the model's mask has a window that hides keys, a mark of its size, bool [B, 1, window].

    Raises:
        ConfigError: the model masks more than padding, documents and a window.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    mask, function = options.get("attention_mask"), options.get("mask_function", causal_mask_function)
    is_own = options.get("use_vmap", False)
    if is_own or options.get("kv_offset", 0) or (mask is not None and mask.ndim != 2):
        what = "a mask function of its own" if is_own else "a sliding cache" if mask is None else "a mask not [B, N]"
        raise ConfigError(
            "mask-kind", f"block-sparse attention got {what}; it takes padding masks [B, N] and packed documents"
        )
    num_keys = kv_length
    if function is not bidirectional_mask_function:
        num_keys = min(kv_length, int(options.get("q_offset", 0)) + q_length)
    device = torch.device(options.get("device", "cpu"))
    if function not in (causal_mask_function, bidirectional_mask_function):
        tokens = torch.arange(q_length, device=device)[None] + int(options.get("q_offset", 0))  # [1, Nq]
        is_packed = mask is None and q_length == kv_length
        numbers = _documents(function, batch_size, q_length, device) if is_packed else None
        window = _window(function, tokens, numbers)
        if window is not None:
            return torch.zeros(batch_size, 1, window, dtype=torch.bool, device=device)
        if is_packed:
            return numbers
    if mask is None:
        missing = torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
        return missing if num_keys < kv_length else None
    return F.pad(mask[:, :num_keys], (0, max(num_keys - mask.shape[1], 0)))  # [B, Nk]


def _documents(function: MaskFunction, batch_size: int, length: int, device: torch.device) -> Tensor | None:
    """Number the documents of each token, int64 [B, N]; None where each row has one.

    A document begins where a token does not see the one before it.
    """
    rows = torch.arange(batch_size, device=device)[:, None]
    tokens = torch.arange(1, length, device=device)[None]
    begins = ~function(rows, 0, tokens, tokens - 1)  # [B, N - 1]
    ahead = function(rows, 0, tokens - 1, tokens)  # [B, N - 1]
    if is_fake(begins):
        return None  # simulated tokens have no values; they count as one document
    numbers = F.pad(begins.expand(batch_size, -1).cumsum(-1), (1, 0))  # [B, N]
    looks_ahead, is_packed = torch.stack((ahead.any(), numbers.any())).tolist()  # the host waits once
    if looks_ahead:
        raise _looks_ahead("the model's mask")
    return numbers if is_packed else None


def _looks_ahead(what: str) -> ConfigError:
    return ConfigError(
        "mask-looks-ahead",
        f"{what} lets tokens see some after them, beyond padding and documents; such models need their own attention",
    )


def _window(function: MaskFunction, tokens: Tensor, numbers: Tensor | None) -> int | None:
    """Return a mask's window, in tokens, for int64 queries [1, Nq]; None where each sees its document's first token.

    Args:
        function: says which keys a query sees, without padding.
        numbers: of the tokens' documents, int64 [B, N]; None for one document.
    """
    first = torch.zeros_like(tokens)
    if numbers is not None:
        begins = F.pad(numbers.diff(dim=1) != 0, (1, 0))  # [B, N]
        first = torch.where(begins, tokens, 0).cummax(1).values  # [B, N]
    rows = torch.arange(len(first), device=tokens.device)[:, None]
    is_seen = function(rows, 0, tokens, first)  # [B, Nq]
    if is_fake(is_seen) or bool(is_seen.all()):
        return None
    return int(torch.where(is_seen, _MOST_TOKENS, tokens - first).min())


@dataclass(frozen=True)
class MaskWindow:
    """Names the shortest window, in tokens that a query sees, that a model has in its masks only.

    Attributes:
        module: the class of the attention that is given the mask.
    """

    module: str
    num_tokens: int

    def check(self, num_keys: int) -> None:
        """Check that the window hides no key of a sequence.

        Raises:
            ConfigError: it does.
        """
        if self.num_tokens < num_keys:
            raise window_error(self.module, f"{self.num_tokens} tokens in its mask", num_keys)


def find_mask_window(model: nn.Module, inputs: Mapping[str, Any]) -> MaskWindow | None:
    """Return the shortest window that a model of transformers has in the masks that it makes, and does not tell its
    attention of; None without one.

    Args:
        model: a copy on the CPU, to be thrown away.
        inputs: of its forward, without a mask.

    Raises:
        ConfigError: a mask lets tokens see others than causal or bidirectional attention does.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(_PROBE, _note_reach)
    AttentionMaskInterface.register(_PROBE, _reach_mask)
    for submodule in model.modules():
        if isinstance(submodule, PreTrainedModel):
            submodule.set_attn_implementation(_PROBE)
    model(**inputs)
    reaches = [(getattr(submodule, _REACH, _MOST_TOKENS), type(submodule).__name__) for submodule in model.modules()]
    shortest, module = min(reaches)
    return MaskWindow(module, shortest) if shortest < _MOST_TOKENS else None


def _reach_mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor:
    """Return, in place of a mask, how many of the first tokens see the first one, and it sees, int64 [B, 1, 2]."""
    function = options["mask_function"]
    first, others = torch.zeros(1, dtype=torch.int64), torch.arange(1, _MOST_TOKENS)
    back, ahead = (_num_leading(function(first, 0, *pair)) for pair in ((others, first), (first, others)))
    return torch.tensor([back, ahead]).expand(batch_size, 1, 2)


def _num_leading(is_seen: Tensor) -> int:
    """Return which token, counted from 1, is the last of those that are seen without a gap."""
    return _MOST_TOKENS if bool(is_seen.all()) else 1 + int(is_seen.int().argmin())


def _note_reach(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Take the place of attention, and keep with its module what the mask of `_reach_mask` says.

    Raises:
        ConfigError: the mask lets tokens see others than the module's attention does.
    """
    if attention_mask is not None and attention_mask.ndim == 3 and options.get("sliding_window") is None:
        back, ahead = attention_mask[0, 0].tolist()
        causal = is_module_causal(module, options)
        if causal and ahead > 1:
            raise _looks_ahead(f"the mask of {type(module).__name__}")
        if not causal and ahead == 1:
            raise ConfigError(
                "mask-hides-ahead",
                f"the mask of {type(module).__name__} hides all tokens after one, and the module's is_causal is False; "
                "such models need their own attention",
            )
        set_attribute(module, _REACH, back if causal else min(back, ahead))
    out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)  # [B, H, N, D]
    return out.transpose(1, 2), None
