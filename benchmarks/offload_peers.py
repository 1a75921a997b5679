"""The systems that `offload.py` compares: each trains a decoder with states off the device, and knows no clock.

>>> OFFLOAD_PEERS["shardwise-2 nvme"].recipes[BF16]
'2 optimizer=nvme grads=host'
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pairs import Ready, Turn, forget_peak, peak_rss_bytes
from peers import BETAS, LR, WEIGHT_DECAY, Peer, Workload, language_loss, mean_loss, optimizer_section
from shardwise.config.resolve import Config, TiersConfig
from shardwise.construction.scan import build_layout
from shardwise.layout.layout import Layout
from shardwise.models import Decoder, preset
from shardwise.offload.nvme_storage import NvmeStorage
from shardwise.offload.step_pipeline import CHUNK_NUMEL, ChunkInput, StepChunk
from shardwise.offload.tiers import Tiers
from shardwise.runtime.device import Event, Streams
from shardwise.runtime.memory_tracker import Category, MemoryTracker

BF16 = "bf16"
Settle = Callable[[], None]


@dataclass(frozen=True)
class OffloadWorkload(Workload):
    """What every system trains on, over how many ranks, and the folder for what rests on NVMe."""

    num_ranks: int = 1
    folder: str = ""

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems that can be run under it."""
        return OFFLOAD_PEERS


class Training:
    """A system under way: a step, and the end of what it does after that."""

    def __init__(self, step: Callable[[Tensor], float], settle: Settle) -> None:
        self.step = step
        self.settle = settle

    def __call__(self, tokens: Tensor) -> float:
        """One step on tokens [B, S]; the loss."""
        return self.step(tokens)


def serve_turns(connection: Connection, system: str, workload: OffloadWorkload, rank: int) -> None:
    """As `pairs.serve_steps`, but the first step of a turn is not counted.

    What a step leaves to the background, the next one waits for: the first of a turn finds nothing to wait for. What
    the last one has left ends before another system's turn.
    """
    model = workload.model()
    start_s = time.perf_counter()
    step = workload.peers[system].build(model, workload)
    connection.send(Ready(time.perf_counter() - start_s, peak_rss_bytes()))
    del model
    forget_peak()
    number = 0
    while num_steps := connection.recv():
        first, step_s, losses = number, [], []
        dist.barrier()
        for number in range(first, first + num_steps + 1):
            tokens = workload.tokens(number, rank)
            start_s = time.perf_counter()
            losses.append(step(tokens))
            step_s.append(time.perf_counter() - start_s)
        number += 1
        if isinstance(step, Training):
            step.settle()
        connection.send(Turn(first, step_s[1:], losses, peak_rss_bytes()))


def shardwise_config(workload: OffloadWorkload, stage: int, tiers: Mapping[str, str]) -> dict[str, Any]:
    """The engine's config: its defaults but for stage, tiers and the peers' optimizer."""
    return {
        "batch": {"micro_size": workload.micro_size},
        "precision": {"param": workload.dtype},
        "zero": {"stage": stage},
        "tiers": {**tiers, "nvme_path": workload.folder} if "nvme" in tiers.values() else dict(tiers),
        "optimizer": optimizer_section(workload),
        "scheduler": {"name": "constant"},
        "run": {"device": "cpu"},
    }


def layout_of(workload: OffloadWorkload, system: str) -> Layout:
    """What the system's ranks hold, and where."""
    stage, tiers = SHARDWISE[system]
    with torch.device("meta"):
        model = Decoder(preset(workload.preset))
    return build_layout(
        model, Config.from_dict(shardwise_config(workload, stage, tiers)).resolve(world_size=workload.num_ranks)
    )


def build_shardwise(model: Decoder, workload: OffloadWorkload, stage: int, tiers: Mapping[str, str]) -> Training:
    """Whole steps of the engine."""
    import shardwise

    engine = shardwise.initialize(model, shardwise_config(workload, stage, tiers), loss_fn=language_loss)
    return Training(lambda tokens: float(engine.train_step([tokens]).loss), engine.tiers.wait_idle)


def build_deepspeed(model: Decoder, workload: OffloadWorkload, stage: int, tiers: Mapping[str, str]) -> Training:
    """DeepSpeed's CPUAdam on what is offloaded; with NVMe, reads and writes in a pipeline, which is off by default.

    Else its defaults but for clipping (to 1.0) and persistence (small parameters are not sharded). So 1e9 parameters
    stay in host memory although they are stored on NVMe: with less it stops for want of buffers ("Not enough buffers").
    """
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def offload(device: str) -> dict[str, Any]:
        return {"device": device, "nvme_path": workload.folder} if device == "nvme" else {"device": device}

    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero["offload_optimizer"] = offload(tiers["optimizer"])
    if tiers["optimizer"] == "nvme":
        zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
    if "params" in tiers:
        zero["offload_param"] = offload(tiers["params"])
    config = {
        "train_micro_batch_size_per_gpu": workload.micro_size,
        "gradient_clipping": workload.clip_norm or 0.0,
        "bf16": {"enabled": workload.dtype == BF16},
        "zero_optimization": zero,
    }
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor) -> float:
        loss = mean_loss(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return Training(step, lambda: None)


def _peer(build: Callable[..., Training], package: str, stage: int, tiers: Mapping[str, str]) -> Peer:
    recipe = " ".join([str(stage), *(f"{state}={tier}" for state, tier in tiers.items())])
    return Peer({BF16: recipe, "fp32": recipe}, partial(build, stage=stage, tiers=tiers), package)


ALL = ("optimizer", "grads", "params")
# The device is the baseline: what offload costs a step, where the device's memory is no faster.
SHARDWISE: Mapping[str, tuple[int, Mapping[str, str]]] = MappingProxyType(
    {
        "shardwise-2 device": (2, {}),
        "shardwise-2 host": (2, {"optimizer": "host", "grads": "host"}),
        "shardwise-2 nvme": (2, {"optimizer": "nvme", "grads": "host"}),
        "shardwise-3 device": (3, {}),
        "shardwise-3 host": (3, dict.fromkeys(ALL, "host")),
        "shardwise-3 nvme": (3, {"optimizer": "nvme", "grads": "host", "params": "host"}),
        "shardwise-3 all nvme": (3, dict.fromkeys(ALL, "nvme")),
    }
)
DEEPSPEED: Mapping[str, tuple[int, Mapping[str, str]]] = MappingProxyType(
    {
        "deepspeed-2 cpu": (2, {"optimizer": "cpu"}),
        "deepspeed-3 cpu": (3, {"optimizer": "cpu", "params": "cpu"}),
        "deepspeed-3 nvme": (3, {"optimizer": "nvme", "params": "nvme"}),
    }
)
OFFLOAD_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        **{name: _peer(build_shardwise, "shardwise.engine.engine", *each) for name, each in SHARDWISE.items()},
        **{name: _peer(build_deepspeed, "deepspeed", *each) for name, each in DEEPSPEED.items()},
    }
)


class TierDisk:
    """Swap files read and written as a step does it, but alone: Adam's states on NVMe, chunk by chunk.

    Args:
        folder: on the disk.
        num_bytes: of the three states together.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        numel = num_bytes // 12
        config = {"tiers": {"optimizer": "nvme", "grads": "host", "nvme_path": str(folder)}}
        with torch.device("meta"):
            layout = build_layout(nn.Linear(numel, 1, bias=False), Config.from_dict(config).resolve(world_size=1))
        section = TiersConfig(**config["tiers"])
        self._tiers = Tiers(section, layout, Streams(torch.device("cpu")), MemoryTracker("cpu"), 0, is_simulated=False)
        self._states = {
            name: self._tiers.place("nvme", name, numel, torch.float32, Category.OPTIMIZER)
            for name in ("master", "exp_avg", "exp_avg_sq")
        }
        self._numel = numel
        self.bandwidth(is_read=False, is_written=True)  # a disk is slower where nothing was written yet

    def bandwidth(self, *, is_read: bool, is_written: bool) -> float:
        """Bytes a second of one pass, those that were moved; what is still in memory is not read again."""
        traffic = self._tiers.traffic
        traffic.reset()
        parts = {name: ChunkInput(storage, is_read, is_written) for name, storage in self._states.items()}
        start_s = time.perf_counter()
        for start in range(0, self._numel, CHUNK_NUMEL):
            stop = min(start + CHUNK_NUMEL, self._numel)
            self._tiers.step_pipeline.submit(StepChunk(parts, start, stop, lambda tensors: None, Event(None)))
        self._tiers.wait_idle()
        for storage in self._states.values():
            if isinstance(storage, NvmeStorage):
                storage.flush()
        seconds = time.perf_counter() - start_s
        return sum(traffic.moved_bytes.values()) / seconds

    def close(self) -> None:
        """Remove the files."""
        self._tiers.close()
