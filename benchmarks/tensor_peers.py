"""The systems that `tensor.py` compares: each splits the same decoder over two ranks and makes forward and backward.

No system steps, so the losses of all are the same at every step: the table shows that they compute the same. Embedding
and head, a hundredth of the work, stay whole on both ranks except in Shardwise.

>>> sorted(TENSOR_PEERS)[:2]
['hand', 'hand-sp']
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers import FP32, MASTER, NUM_RANKS, Peer, Step, Workload, language_loss, mean_loss
from shardwise.models import Decoder
from shardwise.models.decoder import DecoderBlock, DecoderLinear, RMSNorm
from shardwise.models.presets import DecoderConfig

SEQUENCE_DIM = 1
CONFIG = DecoderConfig(
    vocab_size=256,
    num_layers=12,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=1408,
    max_seq_len=256,
)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})


@dataclass(frozen=True)
class TensorWorkload(Workload):
    """The decoder above; both ranks get the same tokens."""

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems of this file."""
        return TENSOR_PEERS

    def model(self) -> Decoder:
        """The same weights on every rank and in every system, in the workload's dtype."""
        torch.manual_seed(0)
        return Decoder(CONFIG).to(DTYPES[self.dtype])

    def tokens(self, step: int, rank: int) -> Tensor:
        """A step's tokens, [B, S], whatever the rank."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(CONFIG.vocab_size, (self.micro_size, self.seq_len), generator=generator)


def forward_backward(model: nn.Module, finish: Callable[[], None] | None = None) -> Step:
    """Forward and backward; then what is still missing of the gradients; then these are dropped."""

    def step(tokens: Tensor) -> float:
        loss = mean_loss(model(tokens), tokens)
        loss.backward()
        if finish is not None:
            finish()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.item()

    return step


def build_local(model: Decoder, workload: Workload) -> Step:
    """The whole model on both ranks, without a collective: what splitting it should halve."""
    return forward_backward(model)


class UnfusedRMSNorm(nn.Module):
    """The library's norm op by op, since DTensor would gather what the library's backward flattens."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.eps, self.weight = norm.eps, norm.weight

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)  # [B, S, 1]
        scale = torch.rsqrt(norm.square() / x.shape[-1] + self.eps)
        return (x * scale).to(x.dtype) * self.weight


def build_torch(model: Decoder, workload: Workload, sequence_parallel: bool) -> Step:
    """`parallelize_module` with the plan of torch's own tutorial on tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    split, whole = Shard(SEQUENCE_DIM), Replicate()
    row: Callable[[], Any] = partial(RowwiseParallel, output_layouts=split) if sequence_parallel else RowwiseParallel
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {"attention.out": row(), "ffn.gate": ColwiseParallel(), "ffn.up": ColwiseParallel(), "ffn.down": row()}
    if sequence_parallel:
        plan |= {"attention_norm": SequenceParallel(use_local_output=True)}
        plan |= {"ffn_norm": SequenceParallel(use_local_output=True)}
        plan["attention"] = PrepareModuleInput(
            input_layouts=(split, None), desired_input_layouts=(whole, None), use_local_output=True
        )
        plan["ffn"] = PrepareModuleInput(input_layouts=split, desired_input_layouts=whole, use_local_output=True)
    for block in blocks_of(model):
        if sequence_parallel:
            block.attention_norm, block.ffn_norm = map(UnfusedRMSNorm, (block.attention_norm, block.ffn_norm))
        parallelize_module(block, mesh, plan)
    if sequence_parallel:
        first, last = blocks_of(model)[0], blocks_of(model)[-1]
        enter = PrepareModuleInput(
            input_layouts=(whole, None), desired_input_layouts=(split, None), use_local_output=True
        )
        parallelize_module(first, mesh, enter)
        parallelize_module(last, mesh, PrepareModuleOutput(output_layouts=split, desired_output_layouts=whole))
    return forward_backward(model)


class Conjugate(torch.autograd.Function):
    """One collective forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def same(x: Tensor) -> Tensor:
    """The tensor itself, as a view, since a function may not return its input."""
    return x.view_as(x)


def summed(x: Tensor) -> Tensor:
    """All-reduce."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def gathered(x: Tensor) -> Tensor:
    """All-gather along the sequence, [B, S / n, E] -> [B, S, E]."""
    parts = x.new_empty(NUM_RANKS, *x.shape)  # [n, B, S / n, E]
    dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous())
    return parts.movedim(0, SEQUENCE_DIM).flatten(SEQUENCE_DIM, SEQUENCE_DIM + 1)


def scattered(x: Tensor) -> Tensor:
    """Reduce-scatter along the sequence, [B, S, E] -> [B, S / n, E]."""
    parts = x.unflatten(SEQUENCE_DIM, (NUM_RANKS, -1)).movedim(SEQUENCE_DIM, 0).contiguous()  # [n, B, S / n, E]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out, parts.flatten(0, 1))
    return out


def sliced(x: Tensor) -> Tensor:
    """This rank's part of the sequence, [B, S, E] -> [B, S / n, E]."""
    return x.chunk(NUM_RANKS, SEQUENCE_DIM)[dist.get_rank()].contiguous()


class Between(nn.Module):
    """A module between two conjugate pairs of collectives, each (forward, backward)."""

    def __init__(self, inner: nn.Module, enter: tuple[Any, Any], leave: tuple[Any, Any]) -> None:
        super().__init__()
        self.inner, self.enter, self.leave = inner, enter, leave

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return Conjugate.apply(self.inner(Conjugate.apply(x, *self.enter), *rest), *self.leave)


def build_hand(model: Decoder, workload: Workload, sequence_parallel: bool) -> Step:
    """What one writes who knows the model: slices of the weights, and a pair of collectives a region."""
    enter = (gathered, scattered) if sequence_parallel else (same, summed)
    leave = (scattered, gathered) if sequence_parallel else (summed, same)
    for block in blocks_of(model):
        attention, ffn = block.attention, block.ffn
        for layer in (attention.query, attention.key, attention.value, ffn.gate, ffn.up):
            _keep_slice(layer, dim=0)
        for layer in (attention.out, ffn.down):
            _keep_slice(layer, dim=1)
        for name in ("attention", "ffn"):
            block.set_submodule(name, Between(block.get_submodule(name), enter, leave))
    if not sequence_parallel:
        return forward_backward(model)
    blocks = list(model.blocks)
    whole = (same, same)
    blocks[0] = Between(blocks[0], (sliced, gathered), whole)
    blocks[-1] = Between(blocks[-1], whole, (gathered, sliced))
    partial_parameters = [p for name, p in model.blocks.named_parameters() if "norm" in name]
    model.blocks = nn.ModuleList(blocks)

    def sum_partial() -> None:
        flat = torch.cat([parameter.grad for parameter in partial_parameters])
        dist.all_reduce(flat)
        for parameter, grad in zip(partial_parameters, flat.split(CONFIG.hidden_size), strict=True):
            parameter.grad = grad

    return forward_backward(model, sum_partial)


def _keep_slice(layer: DecoderLinear, dim: int) -> None:
    own = layer.weight.detach().chunk(NUM_RANKS, dim)[dist.get_rank()]
    layer.weight = nn.Parameter(own.clone(memory_format=torch.contiguous_format))


def build_shardwise(model: Decoder, workload: Workload, sequence_parallel: bool) -> Step:
    """Shardwise by its decoder's own plan; no optimizer step is taken."""
    import shardwise

    config = {
        "mesh": {"tp": NUM_RANKS},
        "tensor": {"sequence_parallel": sequence_parallel},
        "zero": {"stage": 0},
        "batch": {"micro_size": workload.micro_size},
        "precision": {"param": workload.dtype},
        "run": {"device": "cpu"},
    }
    engine = shardwise.initialize(model, config, loss_fn=language_loss)

    def step(tokens: Tensor) -> float:
        loss = engine(tokens)
        engine.backward(loss)
        engine.zero_grad()
        return loss.item()

    return step


def blocks_of(model: Decoder) -> list[DecoderBlock]:
    """The decoder's blocks, by their type."""
    return [block for block in model.blocks if isinstance(block, DecoderBlock)]


_RECIPES: Mapping[str, str] = MappingProxyType({"fp32": FP32, "bf16": "bf16"})

TENSOR_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "local": Peer(_RECIPES, build_local),
        "torch": Peer(_RECIPES, partial(build_torch, sequence_parallel=False), "torch.distributed.tensor.parallel"),
        "torch-sp": Peer(_RECIPES, partial(build_torch, sequence_parallel=True), "torch.distributed.tensor.parallel"),
        "hand": Peer(_RECIPES, partial(build_hand, sequence_parallel=False)),
        "hand-sp": Peer(_RECIPES, partial(build_hand, sequence_parallel=True)),
        "shardwise": Peer(
            {"fp32": FP32, "bf16": f"{MASTER}, fp32 grads"},
            partial(build_shardwise, sequence_parallel=False),
            "shardwise.engine.engine",
        ),
        "shardwise-sp": Peer(
            {"fp32": FP32, "bf16": f"{MASTER}, fp32 grads"},
            partial(build_shardwise, sequence_parallel=True),
            "shardwise.engine.engine",
        ),
    }
)
