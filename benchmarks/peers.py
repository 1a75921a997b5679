"""The systems that `step_time.py` compares: each makes a step of a model, and knows no clock and no other system.

An entry of `PEERS` names its recipe for each dtype, since "bf16" means different things: what is kept in which
dtype differs by system, and so do the bytes at rest and on the wire.

>>> sorted(PEERS["ddp-pure"].recipes)
['bf16']
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.models import Decoder, lm_loss, preset
from shardwise.models.decoder import IGNORED_TARGET
from shardwise.models.presets import DecoderConfig

NUM_RANKS = 2
LR = 3e-4
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1

FP32 = "fp32"
AUTOCAST = "fp32 params, bf16 autocast"
PURE = "bf16 params and Adam states"
MASTER = "bf16 params, fp32 master"
FSDP2 = "fp32 shards, bf16 compute, {} reduce"

Step = Callable[[Tensor], float]
"""One optimizer step on this rank's tokens, int64 [B, S]; returns the loss of this rank or of all of them."""


@dataclass(frozen=True)
class Workload:
    """What every system trains on: the same weights, tokens, loss and hyper-parameters."""

    preset: str
    dtype: str
    seq_len: int
    micro_size: int
    clip_norm: float | None = None

    def __str__(self) -> str:
        return f"{self.preset} {self.dtype} seq {self.seq_len}"

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems that can be run under it."""
        return PEERS

    def model(self) -> Decoder:
        """The decoder in fp32, with the same weights on every rank and in every system."""
        torch.manual_seed(0)
        return Decoder(preset(self.preset))

    def tokens(self, step: int, rank: int) -> Tensor:
        """A rank's tokens of a step, [B, S]: unevenly likely, so that losses fall and their digits tell."""
        generator = torch.Generator().manual_seed(step * NUM_RANKS + rank)
        draws = torch.rand(self.micro_size, self.seq_len, generator=generator)  # [B, S]
        return (draws**3 * preset(self.preset).vocab_size).long()

    def optimizer(self, params: Iterable[Tensor]) -> torch.optim.AdamW:
        """Torch's fused AdamW, which every peer steps with."""
        return torch.optim.AdamW(params, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def costless_shape(num_layers: int) -> DecoderConfig:
    """A decoder whose kernels cost next to nothing, so that a step takes what its host takes."""
    return DecoderConfig(
        vocab_size=32,
        num_layers=num_layers,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        ffn_size=8,
        max_seq_len=16,
    )


Wrap = Callable[[nn.Module], nn.Module]


class Builder(Protocol):
    """Turn a model into a step; called once on each rank, in a process group of `NUM_RANKS` ranks on gloo."""

    def __call__(self, model: Decoder, workload: Workload) -> Step: ...


@dataclass(frozen=True)
class Peer:
    """One system: its recipe by dtype (one it lacks is not run), how it is built, the package it needs."""

    recipes: Mapping[str, str]
    build: Builder
    package: str = "torch"


class MasterAdamW:
    """Fused AdamW on fp32 copies of low-precision parameters: what a loop without any library would write."""

    def __init__(self, params: Iterable[Tensor], workload: Workload) -> None:
        self.params = list(params)
        self.masters = [param.detach().float() for param in self.params]
        self.grads = [torch.empty_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.inner = workload.optimizer(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        """Widen the gradients, step the masters, round them into the parameters."""
        for param, grad in zip(self.params, self.grads, strict=True):
            grad.copy_(cast(Tensor, param.grad))
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self) -> None:
        """Drop the gradients of the low-precision parameters."""
        for param in self.params:
            param.grad = None


Optimizer = torch.optim.Optimizer | MasterAdamW


def language_loss(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The next token's cross entropy, summed, and how many there were; logits [B, S, V], tokens [B, S]."""
    targets = F.pad(tokens[:, 1:], (0, 1), value=IGNORED_TARGET)  # [B, S]
    return lm_loss(logits, targets)


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """The same, averaged over the tokens."""
    total, count = language_loss(logits, tokens)
    return total / count


def torch_step(model: nn.Module, optimizer: Optimizer, workload: Workload, *, autocast: bool = False) -> Step:
    """The plain training loop's body, for every system that leaves it to the user."""

    def step(tokens: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens)  # [B, S, V]
        loss = mean_loss(logits, tokens)
        loss.backward()
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), workload.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def build_replica(model: Decoder, workload: Workload, recipes: Mapping[str, str], wrap: Wrap) -> Step:
    """The whole model on every rank, by `wrap` left as it is or kept equal by averaged gradients."""
    recipe = recipes[workload.dtype]
    wrapped = wrap(model.bfloat16() if recipe in (PURE, MASTER) else model)
    params = wrapped.parameters()
    optimizer = MasterAdamW(params, workload) if recipe == MASTER else workload.optimizer(params)
    return torch_step(wrapped, optimizer, workload, autocast=recipe == AUTOCAST)


def no_wrap(model: nn.Module) -> nn.Module:
    """No collectives."""
    return model


def ddp_wrap(model: nn.Module) -> nn.Module:
    """DDP with its gradients as views of its buckets, which spares a copy."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def shard_fsdp2(model: Decoder, workload: Workload, reshard: bool, reduce_dtype: torch.dtype) -> None:
    """A unit for each block and one for the rest; fp32 shards, gathered in bf16 under a bf16 workload."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    is_bf16 = workload.dtype == "bf16"
    # The rotary tables stay fp32 as in every other system, so the inputs of blocks are not cast.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if is_bf16 else None,
        reduce_dtype=reduce_dtype if is_bf16 else None,
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy)  # the root never reshards after forward, which is its default


def build_fsdp2(model: Decoder, workload: Workload, reshard: bool, reduce_dtype: torch.dtype) -> Step:
    """Torch's own sharding, as `shard_fsdp2` has it."""
    shard_fsdp2(model, workload, reshard, reduce_dtype)
    return torch_step(model, workload.optimizer(model.parameters()), workload)


def build_deepspeed(model: Decoder, workload: Workload, stage: int, package: str = "deepspeed") -> Step:
    """DeepSpeed's defaults but for clipping (to 1.0) and persistence (small parameters are not sharded)."""
    deepspeed = importlib.import_module(package)
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_size,
        "gradient_clipping": workload.clip_norm or 0.0,
        "bf16": {"enabled": workload.dtype == "bf16"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = workload.optimizer(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor) -> float:
        loss = mean_loss(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def optimizer_section(workload: Workload) -> dict[str, Any]:
    """The engine's config of the optimizer that all systems use."""
    return {
        "name": "adamw",
        "lr": LR,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "decay_1d": True,
        "clip_norm": workload.clip_norm,
    }


def shardwise_engine(model: Decoder, workload: Workload, stage: int, **zero: Any) -> Any:
    """Shardwise with its defaults: the wire in the parameters' dtype, sums and accumulator in fp32."""
    import shardwise

    config = {
        "batch": {"micro_size": workload.micro_size},
        "precision": {"param": workload.dtype},
        "zero": {"stage": stage, **zero},
        "optimizer": optimizer_section(workload),
        "scheduler": {"name": "constant"},
        "run": {"device": "cpu"},
    }
    return shardwise.initialize(model, config, loss_fn=language_loss)


def build_shardwise(model: Decoder, workload: Workload, stage: int, **zero: Any) -> Step:
    """Whole steps of the engine."""
    engine = shardwise_engine(model, workload, stage, **zero)
    return lambda tokens: float(engine.train_step([tokens]).loss)


def _replica(wrap: Wrap, **recipes: str) -> Peer:
    return Peer(recipes, partial(build_replica, recipes=recipes, wrap=wrap))


def _fsdp2(reshard: bool, reduce_dtype: torch.dtype, **recipes: str) -> Peer:
    build = partial(build_fsdp2, reshard=reshard, reduce_dtype=reduce_dtype)
    return Peer(recipes, build, "torch.distributed.fsdp")


def _deepspeed(stage: int, package: str = "deepspeed") -> Peer:
    recipes = {"fp32": FP32, "bf16": f"{MASTER}, {'bf16' if package == 'deepspeed' else 'fp32'} grads"}
    return Peer(recipes, partial(build_deepspeed, stage=stage, package=package), package)


def _shardwise(stage: int, **zero: Any) -> Peer:
    recipes = {"fp32": FP32, "bf16": f"{MASTER}, fp32 grads"}
    return Peer(recipes, partial(build_shardwise, stage=stage, **zero), "shardwise.engine.engine")


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "local": _replica(no_wrap, fp32=FP32, bf16=MASTER),
        "ddp": _replica(ddp_wrap, fp32=FP32, bf16=AUTOCAST),
        "ddp-pure": _replica(ddp_wrap, bf16=PURE),
        "ddp-master": _replica(ddp_wrap, bf16=MASTER),
        "fsdp2": _fsdp2(True, torch.bfloat16, fp32=FP32, bf16=FSDP2.format("bf16")),
        "fsdp2-fp32-reduce": _fsdp2(True, torch.float32, bf16=FSDP2.format("fp32")),
        "fsdp2-no-reshard": _fsdp2(False, torch.bfloat16, fp32=FP32, bf16=FSDP2.format("bf16")),
        **{f"deepspeed-{stage}": _deepspeed(stage) for stage in range(4)},
        **{f"shardwise-{stage}": _shardwise(stage) for stage in range(4)},
        **{f"drop-in-{stage}": _deepspeed(stage, "shardwise.compat.deepspeed") for stage in range(4)},
        "shardwise-3-lockstep": _shardwise(3, lockstep=True),
    }
)
