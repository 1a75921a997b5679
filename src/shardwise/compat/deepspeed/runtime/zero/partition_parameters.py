"""Offer the names of DeepSpeed's module that Hugging Face's libraries use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from shardwise.compat.deepspeed.accelerator import get_accelerator as get_accelerator
from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.zero import GatheredParameters as GatheredParameters
from shardwise.compat.deepspeed.runtime.zero import Init as Init
from shardwise.compat.deepspeed.runtime.zero import ZeroParamStatus as ZeroParamStatus
from shardwise.compat.deepspeed.runtime.zero import register_external_parameter as register_external_parameter
from shardwise.compat.deepspeed.runtime.zero.attributes import ZeroParamType as ZeroParamType

__getattr__ = answers(__name__)

_orig_torch_arange: Final = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
    """Return a constructor of tensors as it is; transformers replaces this function for a while."""
    return fn
