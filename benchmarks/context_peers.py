"""The systems that `context.py` compares: each makes forward and backward of the same decoder on the same sequences.

Two ranks split every sequence, or one process has it whole. No system steps, so the losses of all are the same.

>>> sorted(CONTEXT_PEERS)[:2]
['all-gather', 'each']
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from peers import FP32, NUM_RANKS, Peer, Step, Workload
from shardwise.config.resolve import AttentionConfig
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from tensor_peers import Conjugate, blocks_of, gathered, scattered

SEQUENCE_DIM = 1
STRUCTURES: Mapping[str, AttentionConfig] = MappingProxyType(
    {
        "dense": AttentionConfig(),
        "window": AttentionConfig(kind="sliding-window", block=64, num_sliding_window_blocks=17),
        "bslongformer": AttentionConfig(kind="bslongformer", block=64, num_sliding_window_blocks=9),
    }
)


def shape_of(attention: str, seq_len: int) -> DecoderConfig:
    """A decoder of which attention is most of the work from some thousand tokens on."""
    return DecoderConfig(
        vocab_size=256,
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=4,
        head_dim=64,
        ffn_size=704,
        max_seq_len=seq_len,
        attention=STRUCTURES[attention],
    )


@dataclass(frozen=True)
class ContextWorkload(Workload):
    """The decoder above; both ranks get the same tokens, one more than the model is given."""

    attention: str = "dense"

    def __str__(self) -> str:
        return f"{self.attention}, {self.seq_len} tokens"

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems of this file."""
        return CONTEXT_PEERS

    def model(self) -> Decoder:
        """The same weights on every rank and in every system."""
        torch.manual_seed(0)
        return Decoder(shape_of(self.attention, self.seq_len))

    def tokens(self, step: int, rank: int) -> Tensor:
        """A step's tokens, [B, S + 1], whatever the rank."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(256, (self.micro_size, self.seq_len + 1), generator=generator)


def forward_backward(model: nn.Module, tokens: Tensor) -> float:
    """The mean loss of [B, S + 1] tokens, after its backward; gradients are dropped."""
    total, count = lm_loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss = total / count
    loss.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return loss.item()


def build_each(model: Decoder, workload: Workload) -> Step:
    """The whole sequence on both ranks, one thread each: what splitting it should halve."""
    return partial(forward_backward, model)


def build_one(model: Decoder, workload: Workload) -> Step:
    """One process with all the threads; the other rank waits."""
    if dist.get_rank() == 0:
        torch.set_num_threads(NUM_RANKS)

    def step(tokens: Tensor) -> float:
        loss = torch.zeros(())
        if dist.get_rank() == 0:
            loss.fill_(forward_backward(model, tokens))
        dist.broadcast(loss, src=0)
        return loss.item()

    return step


def build_torch(model: Decoder, workload: Workload) -> Step:
    """`torch.distributed.tensor.experimental.context_parallel`, whose attention has no kernel for the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (NUM_RANKS,))

    def step(tokens: Tensor) -> float:
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        positions = torch.arange(inputs.shape[SEQUENCE_DIM])
        dims = [SEQUENCE_DIM, SEQUENCE_DIM, 0]
        with context_parallel(mesh, buffers=[inputs, targets, positions], buffer_seq_dims=dims):
            total, count = lm_loss(model(inputs, positions), targets)
            loss = total / count
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None
        return loss.item()

    return step


class GatheredAttention(nn.Module):
    """What one writes by hand: keys and values of all ranks, and torch's attention with a mask of true positions."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.mask = positions[dist.get_rank(), :, None] >= positions.flatten()  # [S / n, S]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, first_head: int, positions: Tensor | None) -> Tensor:
        k, v = (Conjugate.apply(each.transpose(1, 2), gathered, scattered).transpose(1, 2) for each in (k, v))
        return F.scaled_dot_product_attention(q, k, v, self.mask, enable_gqa=True)


def build_hand(model: Decoder, workload: Workload) -> Step:
    """Zigzag tokens, all-gathered keys and values, all-reduced gradients."""
    chunks = torch.arange(workload.seq_len).chunk(2 * NUM_RANKS)
    positions = torch.stack([torch.cat([chunks[i], chunks[-1 - i]]) for i in range(NUM_RANKS)])  # [n, S / n]
    attend = GatheredAttention(positions)
    for block in blocks_of(model):
        block.attention.attend = attend
    own = positions[dist.get_rank()]

    def step(tokens: Tensor) -> float:
        total, count = lm_loss(model(tokens[:, own], own), tokens[:, own + 1])
        loss = total / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad = None
        return loss.item()

    return step


def context_config(context: Mapping[str, Any], micro_size: int, num_ranks: int = NUM_RANKS) -> dict[str, Any]:
    """A config that splits sequences over all ranks."""
    return {
        "mesh": {"cp": num_ranks},
        "context": dict(context),
        "zero": {"stage": 0},
        "batch": {"micro_size": micro_size},
        "run": {"device": "cpu"},
    }


def build_shardwise(model: Decoder, workload: ContextWorkload, context: Mapping[str, Any]) -> Step:
    """Shardwise; no optimizer step is taken."""
    import shardwise

    config = context_config(context, workload.micro_size)
    config["attention"] = STRUCTURES[workload.attention].model_dump(exclude_none=True)
    engine = shardwise.initialize(model, config, loss_fn=lambda logits, batch: lm_loss(logits, batch[1]))

    def step(tokens: Tensor) -> float:
        loss = engine((tokens[:, :-1], tokens[:, 1:]))
        engine.backward(loss)
        engine.zero_grad()
        return loss.item()

    return step


def _shardwise(**context: Any) -> Peer:
    return Peer({"fp32": FP32}, partial(build_shardwise, context=context), "shardwise.engine.engine")


CONTEXT_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "each": Peer({"fp32": FP32}, build_each),
        "one": Peer({"fp32": FP32}, build_one),
        "hand": Peer({"fp32": FP32}, build_hand),
        "torch": Peer({"fp32": FP32}, build_torch, "torch.distributed.tensor.experimental"),
        "ring": _shardwise(transport="ring"),
        "ring-contiguous": _shardwise(transport="ring", token_layout="contiguous"),
        "all-gather": _shardwise(transport="all-gather"),
        "ulysses": _shardwise(transport="ulysses"),
    }
)
