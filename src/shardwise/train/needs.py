"""Compares what a run needs with what there is, before its first step: positions, memory, and space for its saves.

`run.on_shortage = "warn"` lets a run go on where too little is found, since a prediction may be wrong.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from shardwise.checkpoint.commit import step_folders
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.launch.host import usable_bytes
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.optim.rules import named_rule
from shardwise.planner.hardware import CPU, Cluster, GpuSpec
from shardwise.planner.job import PlanJob
from shardwise.planner.memory import MemoryModel
from shardwise.planner.request import job_of
from shardwise.planner.results import MemoryEstimate, RankMemory
from shardwise.runtime.device import kind_of, total_bytes
from shardwise.runtime.format import format_bytes

# A prediction that is so much too high is rare; one that is too low refuses nothing.
_MARGIN: Final = 1.1
_STATES: Final = ("params", "grads", "optimizer")
_GO_ON: Final = "run.on_shortage=warn runs all the same"


def shortages(
    config: ResolvedConfig, vocab_size: int, num_params: int, layout: Layout, root: Path, num_local_ranks: int
) -> Iterator[ConfigError]:
    """Yield what a run lacks on this machine.

    Args:
        num_local_ranks: the ranks that share this machine.
    """
    yield from _of_memory(config, vocab_size, num_local_ranks)
    yield from _of_disk(config, checkpoint_bytes(config, layout, num_params), root)


def check_positions(config: Config, name: str, text_config: Any) -> None:
    """Refuse sequences that are longer than a model of transformers has positions.

    Raises:
        ConfigError: they are longer, and `run.on_shortage` lets no run go on.
    """
    positions, seq_len = positions_of(text_config), config.data.seq_len
    if positions is not None and seq_len > positions and config.run.on_shortage == "refuse":
        raise ConfigError(
            "seq-len-exceeds-positions",
            f"data.seq_len={seq_len:,} is more than the {positions:,} positions of {name}; use "
            f"data.seq_len={positions} or less, or a model that is made for more; {_GO_ON}",
        )


def positions_of(text_config: Any) -> int | None:
    """Return how many positions a model of transformers has, scaled ones included; None where it does not say.

    >>> from types import SimpleNamespace as Config
    >>> positions_of(Config(max_position_embeddings=512))
    512
    >>> scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> positions_of(Config(max_position_embeddings=32768, rope_scaling=scaled))
    131072
    """
    longest = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    scalings = [getattr(text_config, name, None) for name in ("rope_scaling", "rope_parameters")]
    tables = [scaling for scaling in scalings if isinstance(scaling, Mapping)]
    # One a kind of layer.
    tables += [inner for table in tables for inner in table.values() if isinstance(inner, Mapping)]
    for table in tables:
        factor, original = table.get("factor"), table.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and 1 < factor < math.inf:
            longest = max(longest, round(factor * (original if isinstance(original, int) else longest)))
    return longest


def sizes_cluster(num_ranks: int, memory_bytes: float) -> Cluster:
    """Return a cluster whose speeds are 1: it gives sizes, which depend on none."""
    gpu = GpuSpec(
        name=CPU,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1.0,
        peak_flops_per_s=dict.fromkeys(("fp64", "fp32", "tf32", "fp16", "bf16"), 1.0),
        link_bytes_per_s=1.0,
        host_bytes_per_s=1.0,
        nic_bytes_per_s=1.0,
        num_cores=1,
    )
    return Cluster(gpu=gpu, num_gpus=num_ranks, gpus_per_node=num_ranks, nic_bytes_per_s=1.0)


def planned_job(config: ResolvedConfig, cluster: Cluster, vocab_size: int) -> PlanJob:
    """Return a run as the planner knows it.

    Args:
        vocab_size: the tokenizer's, which a preset's model follows.
    """
    job = job_of(config, cluster)
    return job if config.model.path is not None else replace(job, shape=replace(job.shape, vocab_size=vocab_size))


def checkpoint_bytes(config: ResolvedConfig, layout: Layout, num_params: int) -> int:
    """Return the bytes of a checkpoint; 0 for an optimizer whose states are known only when it runs."""
    if named_rule(config.optimizer.name) is None:
        return 0
    # A master stands for its parameter.
    weights = "master" if any(state.name == "master" for state in layout.states) else "param"
    saved = [state for state in layout.states if state.role == "optimizer" or state.name == weights]
    of_matrices = sum(
        math.prod(param.global_shape) for group in layout.model_groups if group.is_matrix for param in group.params
    )
    numels = {None: num_params, True: of_matrices, False: num_params - of_matrices}
    return sum(numels[state.of_matrices] * DTYPE_BYTES[state.dtype] for state in saved)


def _of_memory(config: ResolvedConfig, vocab_size: int, num_local_ranks: int) -> Iterator[ConfigError]:
    """Yield that a rank's predicted peak is more than its device, or its share of the host, holds."""
    is_gpu = not kind_of(config.run.device).is_cpu
    share_bytes = usable_bytes() // num_local_ranks
    held_bytes = total_bytes(torch.device(config.run.device, 0)) if is_gpu else share_bytes
    predicted = predicted_memory(config, vocab_size, held_bytes)
    if predicted is None:
        return
    memory = predicted.worst
    host_bytes = memory.elsewhere.get("host", 0.0)
    peak_bytes = memory.peak_bytes if is_gpu else memory.peak_bytes + host_bytes
    what = "a GPU" if is_gpu else "this machine" if num_local_ranks == 1 else "a rank's share of this machine"
    rows = [(peak_bytes, held_bytes, what)]
    rows += [(host_bytes, share_bytes, "a rank's share of the host")] if is_gpu else []
    for needed_bytes, there_bytes, memory_name in rows:
        if needed_bytes > _MARGIN * there_bytes:
            step = f"a step of {config.batch.micro_size or 1} x {config.data.seq_len:,} tokens"
            needed, available = format_bytes(round(needed_bytes)), format_bytes(round(there_bytes))
            yield ConfigError(
                "memory-too-small",
                f"{step} is predicted to take {needed} on a rank, and {memory_name} has {available}; "
                f"{_relief(config, memory)}; {_GO_ON}",
            )


def predicted_memory(config: ResolvedConfig, vocab_size: int, held_bytes: float = 0.0) -> MemoryEstimate | None:
    """Return the predicted memory of the ranks, whose devices have `held_bytes`; None where the model is not known."""
    num_ranks = MeshShape.from_config(config.mesh).world_size
    try:
        job = planned_job(config, sizes_cluster(num_ranks, held_bytes), vocab_size)
        return MemoryModel(job).estimate(config)
    except Exception:  # of whatever kind: what the planner does not know refuses no run
        return None


def _relief(config: ResolvedConfig, memory: RankMemory) -> str:
    """Name what would make the largest part of the memory smaller."""
    if memory.bytes_of(*_STATES) > memory.peak_bytes / 2:
        return "use zero.stage=3, more ranks, another tier for states, or a smaller model"
    smaller = ["data.seq_len"] + ["batch.micro_size"] * ((config.batch.micro_size or 1) > 1)
    more = ["recompute.mode=full"] * (config.recompute.mode != "full")
    more += ["context.chunk_tokens=1024"] * (config.context.chunk_tokens is None)
    return f"lower {' or '.join(smaller)}" + (f", or set {' and '.join(more)}" if more else "")


def _of_disk(config: ResolvedConfig, checkpoint_bytes: int, root: Path) -> Iterator[ConfigError]:
    """Yield that the disk has no space for the checkpoints that the run keeps."""
    num_new = _most_new(config, root)
    needed_bytes = num_new * checkpoint_bytes
    if not needed_bytes:
        return
    try:
        system = os.statvfs(next(parent for parent in (root.absolute(), *root.absolute().parents) if parent.exists()))
    except OSError:
        return  # the save itself will say why
    free_bytes = system.f_bavail * system.f_frsize
    # A file system that counts no blocks does not know its free space.
    if system.f_blocks and needed_bytes > free_bytes:
        many = "a checkpoint needs" if num_new == 1 else f"its {num_new:,} checkpoints need"
        fix = "set checkpoint.path to a folder with more" if num_new == 1 else "lower checkpoint.keep_last"
        yield ConfigError(
            "too-little-space",
            f"{root} has {format_bytes(free_bytes)} free and {many} {format_bytes(needed_bytes)}; free some, or {fix}; "
            f"{_GO_ON}",
        )


def _most_new(config: ResolvedConfig, root: Path) -> int:
    """Return how many more checkpoints than now there are at most at once; each is whole before an old one goes."""
    chosen, steps = config.checkpoint, config.run.steps
    saved = set() if chosen.every is None else set(range(chosen.every, steps + 1, chosen.every))
    saved |= {steps} if chosen.at_end else set()
    if not saved:
        return 0
    num_kept = len(saved)
    if chosen.keep_last:
        milestones = sum(step % chosen.keep_every == 0 for step in saved) if chosen.keep_every else 0
        num_kept = min(num_kept, chosen.keep_last + milestones + 1)
    try:
        num_there = len(step_folders(root))
    except CheckpointError:
        num_there = 0
    return max(1, num_kept - num_there)
