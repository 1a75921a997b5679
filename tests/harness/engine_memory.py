"""What a rank of the real engine holds under a candidate of the planner's, simulated; and candidates drawn at random.

>>> sample = drawn(seed=0, num_samples=1)[0]
>>> simulation = sample.simulated(pipeline_rank=0)
>>> simulation.states_bytes == sample.estimated().ranks[0].at_rest
True
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from harness.planner_configs import differences
from shardwise import Simulation, simulate
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.models.presets import preset
from shardwise.models.shape import ModelShape
from shardwise.planner.hardware import Cluster, GpuSpec
from shardwise.planner.job import BASE, PlanJob, changed, world_size
from shardwise.planner.memory import MemoryModel
from shardwise.planner.request import written
from shardwise.planner.results import MemoryEstimate
from shardwise.schedule import RECIPES

_TIERS: Final = (
    *({}, {}, {}, {}),
    {"tiers.optimizer": "host"},
    {"tiers.nvme_path": "nvme", "tiers.optimizer": "nvme"},
    {"tiers.optimizer": "host", "tiers.grads": "host"},
    {"tiers.nvme_path": "nvme", "tiers.optimizer": "nvme", "tiers.grads": "host", "tiers.params": "host"},
    {"tiers.activations": "host"},
)


@dataclass(frozen=True)
class Sample:
    """A candidate of a small decoder."""

    shape: DecoderConfig
    seq_len: int
    config: ResolvedConfig

    def estimated(self) -> MemoryEstimate:
        """What the planner says of a GPU's ranks."""
        return MemoryModel(job_of(self.shape, self.seq_len, "any GPU")).estimate(self.config)

    def simulated(self, pipeline_rank: int) -> Simulation:
        """The first rank at a place of the pipeline."""
        s, tokens = self.config, torch.zeros(self.config.batch.micro_size, self.seq_len, dtype=torch.int64)
        return simulate(
            lambda: Decoder(self.shape),
            engine_config(s),
            lambda: (tokens, tokens),
            rank=pipeline_rank * world_size(s) // s.mesh.pp,
            world_size=world_size(s),
            loss_fn=lambda logits, batch: lm_loss(logits, batch[1]),
        )

    def __str__(self) -> str:
        """The shape, and what of the candidate is not as by default."""
        shape = self.shape
        changes = [f"{key}={value}" for key, value in differences(self.config).items()]
        sizes = f"{shape.num_layers}x{shape.hidden_size}x{shape.ffn_size}, vocab {shape.vocab_size}"
        tied = ", tied" if shape.tie_embeddings else ""
        return f"{sizes}{tied}, seq {self.seq_len}: {', '.join(changes)}"


def job_of(shape: DecoderConfig, seq_len: int, device: str = "cpu") -> PlanJob:
    """A job of eight devices without figures of any real one."""
    gpu = GpuSpec(name=device, memory_bytes=80 * 2**30, memory_bytes_per_s=3e12, peak_flops_per_s={"bf16": 1e15})
    cluster = Cluster(gpu=gpu, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=5e10)
    return PlanJob(shape=ModelShape.of_decoder(shape), seq_len=seq_len, global_batch=8, cluster=cluster)


def engine_config(config: ResolvedConfig) -> Config:
    """The engine's config of a candidate, with a GPU's collectives, for a model that is made elsewhere."""
    any_model = job_of(preset("tiny"), seq_len=8)
    return written(any_model, config).override(["run.device=cuda"])


def drawn(seed: int, num_samples: int) -> list[Sample]:
    """Samples that the engine runs, the same ones for a seed."""
    source, samples = random.Random(seed), list[Sample]()
    while len(samples) < num_samples:
        sample = _draw(source)
        s = sample.config
        if s.context.transport == "ulysses" and sample.shape.num_heads % (s.mesh.tp * s.mesh.cp):
            continue
        try:
            engine_config(s).resolve(world_size(s))
            sample.estimated()
        except ConfigError:
            continue  # such as more stages than the model has units
        samples.append(sample)
    return samples


def _draw(source: random.Random) -> Sample:
    def one_of(values: Sequence[Any]) -> Any:
        return source.choice(values)

    hidden, seq_len, tp, cp = one_of((128, 192, 256)), one_of((64, 128)), one_of((1, 1, 2, 4)), one_of((1, 1, 2))
    heads, pp, zero_stage = one_of((4, 8)), one_of((1, 1, 2, 2, 3)), one_of((0, 1, 2, 3))
    schedule = one_of(tuple(RECIPES)) if pp > 1 else "1f1b"
    recompute = one_of(("none", "none", "selective", "full"))
    tiers = one_of(_TIERS)
    shape = DecoderConfig(
        vocab_size=one_of((64, 1000, 4096)),
        num_layers=one_of((2, 3, 4)),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=one_of((4, heads)),
        head_dim=32,
        ffn_size=one_of((hidden, hidden * 11 // 32 * 8, 4 * hidden)),
        max_seq_len=seq_len,
        tie_embeddings=one_of((True, False)),
    )
    config = changed(
        BASE,
        {
            "mesh.pp": pp,
            "mesh.tp": tp,
            "mesh.cp": cp,
            "mesh.dp_shard": one_of((1, 2, 4)),
            "mesh.dp_replicate": one_of((1, 1, 1, 2)),
            "zero.stage": zero_stage,
            "batch.micro_size": one_of((1, 2, 4)),
            "batch.accumulation": one_of((1, 2, 3, 5)),
            "pipeline.schedule": schedule,
            "pipeline.virtual_stages": one_of((1, 1, 2))
            if schedule == "gpipe"
            else RECIPES[schedule].min_virtual_stages,
            "pipeline.gather": one_of(("batch", "micro-batch")) if pp > 1 and zero_stage == 3 else "batch",
            "tensor.sequence_parallel": tp > 1 and one_of((True, False)),
            "context.transport": one_of(("ring", "all-gather", "ulysses")) if cp > 1 else "ring",
            "context.chunk_tokens": one_of((None, None, None, seq_len // 2, seq_len // 4)),
            "recompute.mode": recompute,
            "recompute.every": one_of((1, 1, 2)) if recompute != "none" else 1,
            "precision.param": one_of(("bf16", "bf16", "fp32")),
            "precision.reduce": one_of(("param", "fp32")),
            "precision.accumulate": one_of(("fp32", "param")),
            **tiers,
        },
    )
    return Sample(shape, seq_len, config)
