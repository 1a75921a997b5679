"""The systems that `pipeline.py` compares: each cuts the same decoder between the same units over two ranks.

Where it is cut, Shardwise decides by what the units cost; all others are given stages of the same units. A stage of
theirs makes its rotary tables for each micro-batch, as the decoder does.

>>> workload = PipelineWorkload("tiny", "fp32", seq_len=8, micro_size=1, num_micro_batches=4)
>>> [units[0] for units in cut_of(workload, "1f1b")]
['embed', 'blocks.3']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peers import FP32, NUM_RANKS, Peer, Step, Workload, language_loss, mean_loss, optimizer_section
from shardwise.config.resolve import Config
from shardwise.models import Decoder, preset
from shardwise.models.decoder import DecoderBlock, rope_tables
from shardwise.models.presets import DecoderConfig
from shardwise.tensor.plan_layout import plan_layout

CPU = torch.device("cpu")
VIRTUAL_STAGES: Mapping[str, int] = MappingProxyType({"interleaved": 2, "zb-v": 2})


@dataclass(frozen=True)
class PipelineWorkload(Workload):
    """Both ranks get all tokens of a step, micro-batch after micro-batch."""

    num_micro_batches: int = 4

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.num_micro_batches} micro-batches"

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems of this file."""
        return PIPELINE_PEERS

    @property
    def shape(self) -> DecoderConfig:
        """The preset's, but that head and embedding are apart, since torch's pipelines do not keep tied ones equal."""
        return replace(preset(self.preset), tie_embeddings=False)

    def model(self) -> Decoder:
        """The decoder in fp32, with the same weights on every rank and in every system."""
        torch.manual_seed(0)
        return Decoder(self.shape)

    def tokens(self, step: int, rank: int) -> Tensor:
        """A step's tokens, [M * B, S], whatever the rank."""
        generator = torch.Generator().manual_seed(step)
        draws = torch.rand(self.num_micro_batches * self.micro_size, self.seq_len, generator=generator)  # [M * B, S]
        return (draws**3 * self.shape.vocab_size).long()


def pipeline_config(workload: PipelineWorkload, schedule: str) -> dict[str, Any]:
    """Of Shardwise: its defaults but for the schedule, and a cut by time alone."""
    return {
        "mesh": {"pp": NUM_RANKS},
        "batch": {"micro_size": workload.micro_size, "accumulation": workload.num_micro_batches},
        "precision": {"param": workload.dtype},
        "pipeline": {"schedule": schedule, "balance": "time", "virtual_stages": VIRTUAL_STAGES.get(schedule, 1)},
        "optimizer": optimizer_section(workload),
        "scheduler": {"name": "constant"},
        "run": {"device": "cpu"},
    }


def cut_of(workload: PipelineWorkload, schedule: str) -> tuple[tuple[str, ...], ...]:
    """Names of the units of each stage, as Shardwise cuts by cost."""
    config = Config.from_dict(pipeline_config(workload, schedule)).resolve(world_size=NUM_RANKS)
    pipeline = plan_layout(Decoder(workload.shape, device="meta"), config).pipeline
    return () if pipeline is None else pipeline.units


class Stage(nn.Module):
    """What one writes to give a stage of a decoder to a pipeline of modules."""

    def __init__(self, model: Decoder, names: Sequence[str]) -> None:
        super().__init__()
        self.config = model.config
        self.units = nn.ModuleList(model.get_submodule(name) for name in names)

    def forward(self, x: Tensor) -> Tensor:  # [B, S] or [B, S, E]
        rope = None
        for unit in self.units:
            if not isinstance(unit, DecoderBlock):
                x = unit(x)
                continue
            if rope is None:
                rope = rope_tables(x.shape[1], self.config.head_dim, self.config.rope_theta, x)
            x = unit(x, rope)
        return x


def build_torch(model: Decoder, workload: Workload, schedule: str) -> Step:
    """`torch.distributed.pipelining` with stages made by hand."""
    from torch.distributed.pipelining import PipelineStage, schedules

    assert isinstance(workload, PipelineWorkload), "of this benchmark"
    cut, rank = cut_of(workload, schedule), dist.get_rank()
    held = (rank, 2 * NUM_RANKS - 1 - rank) if schedule == "zb-v" else range(rank, len(cut), NUM_RANKS)
    stages = [PipelineStage(Stage(model, cut[index]), index, len(cut), CPU) for index in held]
    params = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = workload.optimizer(params)
    has_first, has_last = 0 in held, len(cut) - 1 in held
    made = getattr(schedules, _TORCH_SCHEDULES[schedule])
    multiple = issubclass(made, schedules.PipelineScheduleMulti)
    runner = made(stages if multiple else stages[0], workload.num_micro_batches, loss_fn=mean_loss)

    def step(tokens: Tensor) -> float:
        losses: list[Tensor] = []
        inputs = (tokens,) if has_first else ()
        # Outputs are logits of all micro-batches, which are not needed.
        runner.step(*inputs, target=tokens if has_last else None, losses=losses, return_outputs=False)
        if workload.clip_norm is not None:
            square = nn.utils.get_total_norm([param.grad for param in params if param.grad is not None]).square()
            dist.all_reduce(square)
            nn.utils.clip_grads_with_norm_(params, workload.clip_norm, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        # Of the last rank alone: the mean over the ranks, which the table shows, is the loss.
        return NUM_RANKS * torch.stack(losses).mean().item() if has_last else 0.0

    return step


def build_deepspeed(model: Decoder, workload: Workload) -> Step:
    """DeepSpeed's pipeline, which is 1F1B, of one layer a stage; without clipping."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    assert isinstance(workload, PipelineWorkload), "of this benchmark"
    deepspeed.init_distributed("gloo")
    stages = [Stage(model, names) for names in cut_of(workload, "1f1b")]
    module = PipelineModule(stages, num_stages=NUM_RANKS, loss_fn=mean_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_size,
        "gradient_accumulation_steps": workload.num_micro_batches,
        "gradient_clipping": workload.clip_norm or 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = workload.optimizer(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(tokens: Tensor) -> float:
        batches = ((part, part) for part in tokens.split(workload.micro_size))
        return float(engine.train_batch(batches))

    return step


def build_shardwise(model: Decoder, workload: Workload, schedule: str) -> Step:
    """Whole steps of the engine, to which the decoder is given as it is."""
    import shardwise

    assert isinstance(workload, PipelineWorkload), "of this benchmark"
    engine = shardwise.initialize(model, pipeline_config(workload, schedule), loss_fn=language_loss)
    return lambda tokens: float(engine.train_step([*tokens.split(workload.micro_size)]).loss)


_TORCH_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "zb-v": "ScheduleZBVZeroBubble",
    }
)
SHARDWISE_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
_RECIPES: Mapping[str, str] = MappingProxyType({"fp32": FP32})

PIPELINE_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        **{
            f"torch-{name}": Peer(_RECIPES, partial(build_torch, schedule=name), "torch.distributed.pipelining")
            for name in _TORCH_SCHEDULES
        },
        "deepspeed-1f1b": Peer(_RECIPES, build_deepspeed, "deepspeed"),
        **{
            f"shardwise-{name}": Peer(_RECIPES, partial(build_shardwise, schedule=name), "shardwise.engine.engine")
            for name in SHARDWISE_SCHEDULES
        },
    }
)
