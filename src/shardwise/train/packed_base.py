"""Packs the linear layers of a frozen model in 4 bits, by bitsandbytes; on meta stand-ins with as many bytes do.

A folder whose linear layers are packed already, by `shardwise checkpoint export --weights` for example, is unpacked.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.resolve import Config, ConfigError
from shardwise.layout.precision import TORCH_DTYPES

_BLOCK_NUMEL: Final = 64  # elements that share a scale of 8 bits


def check_packing(config: Config) -> None:
    """Refuse `lora.base = "nf4"` without adapters, or without bitsandbytes.

    Raises:
        ConfigError: one of these.
    """
    if config.lora.base == "keep":
        return
    if not config.lora.rank:
        raise ConfigError("packed-base-trains", "lora.base=nf4 freezes the weights; set lora.rank=16 (--lora) to train")
    if find_spec("bitsandbytes") is None:
        raise ConfigError("extra-missing", "lora.base=nf4 needs bitsandbytes; pip install 'shardwise[hf,qlora]'")


def packing(config: Config) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` packs a model on this rank's device; none to keep it."""
    if config.lora.base == "keep":
        return {}
    from transformers import BitsAndBytesConfig

    compute = TORCH_DTYPES[config.precision.param or "fp32"]
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    is_on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    return {"quantization_config": how, "device_map": {"": "cpu" if is_on_cpu else torch.cuda.current_device()}}


def unpacking(theirs: Any) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` unpacks a folder, by its config; none for one that is plain.

    Raises:
        ConfigError: compressed-tensors is missing.
    """
    packed = getattr(theirs, "quantization_config", None)
    if not isinstance(packed, dict) or packed.get("quant_method") != "compressed-tensors":
        return {}
    if find_spec("compressed_tensors") is None:
        raise ConfigError(
            "extra-missing",
            "model.path has packed weights, which compressed-tensors unpacks; pip install 'shardwise[hf,packed]'",
        )
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def pack_on_meta(model: nn.Module) -> nn.Module:
    """Replace the linear layers of a model on meta by stand-ins, but for the head, which stays as it is."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            model.set_submodule(name, PackedOnMeta(module))
    return model


class PackedOnMeta(nn.Linear):
    """Has the shapes and bytes of a layer that is packed, and no values."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, dtype=whole.weight.dtype)
        numel = whole.weight.numel()
        self.weight = nn.Parameter(torch.empty((numel + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.empty(-(-numel // _BLOCK_NUMEL), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """Compute with a weight as it would be unpacked."""
        product = _Product.apply(x, self.out_features)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """Unpacks a weight in the forward and again in the backward, so that none is kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_features: int) -> Tensor:
        ctx.shape = num_features, x.shape[-1]
        return nn.functional.linear(x, x.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ grads[0].new_empty(ctx.shape), None
