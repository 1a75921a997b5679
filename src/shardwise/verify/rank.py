"""Trains the layout's side of a verification, on one of the ranks that use the engine.

The engine's gradients are sharded over ranks, and are freed when the step ends. So a probe engine takes one step of SGD
before the run, with learning rate 1 and without decay and clipping: the change of the parameters is the gradient.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.config.resolve import Config
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.launch.environment import RankEnv
from shardwise.launch.process_group import start_process_group
from shardwise.runtime.float64 import float64_throughout
from shardwise.verify.compare import TrainingTrace
from shardwise.verify.job import VerifyJob
from shardwise.verify.model import build_for_engine, build_whole, loss_of, make_batch

JOB_NAME: Final = "job.json"
TRACE_NAME: Final = "trace.safetensors"
_SWAP_NAME: Final = "swap"
_PROBE: Final = (
    ("optimizer", {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}),
    ("scheduler", {"name": "constant", "warmup_steps": 0}),
)


def be_rank(env: RankEnv, folder: Path) -> None:
    """Run as one of the ranks: train the job in the folder; rank 0 writes the trace there.

    Raises:
        ConfigError: the small run has no layout.
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    torch.set_num_threads(1)
    job = VerifyJob.from_json((folder / JOB_NAME).read_text(encoding="utf-8"))
    start_process_group(env, "cpu", job.config.run.timeout_s)
    trace = train_layout(job, env.rank, folder)
    if env.rank == 0:
        trace.save(folder / TRACE_NAME)


def train_layout(job: VerifyJob, rank: int, folder: Path) -> TrainingTrace:
    """Train the job on this rank of the process group.

    Args:
        job: the job, for as many processes as the group has.
        rank: this process's rank.
        folder: the folder for states on NVMe.

    Returns:
        The trace; only rank 0's has tensors.
    """
    config = job.config
    if config.tiers.nvme_path is not None:
        swap = folder / _SWAP_NAME
        swap.mkdir(exist_ok=True)
        config = _with(config, "tiers", {"nvme_path": str(swap)})
    probe = config
    for section, update in _PROBE:
        probe = _with(probe, section, update)
    trace = TrainingTrace()
    with float64_throughout():
        trace.gradients.update(_first_gradients(replace(job, config=probe), rank))
        with _engine(job, config) as engine:
            for step in range(job.num_steps):
                result = engine.train_step(_batches(job, engine, step))
                trace.losses.append(result.loss)
                trace.grad_norms.append(result.grad_norm)
                trace.parameters.append(_read(engine))
    return trace


def _first_gradients(job: VerifyJob, rank: int) -> dict[str, Tensor]:
    with _engine(job, job.config) as engine:
        engine.train_step(_batches(job, engine, 0))
        after = _read(engine)
    # If the engine started from other weights than these, the gradients differ, which is to be found too.
    before = dict(build_whole(job.model, job.config.run.seed).named_parameters()) if rank == 0 else {}
    return {name: before[name].detach() - tensor for name, tensor in after.items()}


def _engine(job: VerifyJob, config: Config) -> Engine:
    model = build_for_engine(job.model, config.run.seed)
    return initialize(model, config, loss_fn=loss_of(job.model))


def _batches(job: VerifyJob, engine: Engine, step: int) -> list[Any]:
    """Return this data rank's micro-batches; all ranks' first micro-batches have the lowest numbers."""
    mesh, batch = engine.layout.mesh, engine.config.batch
    first, num = mesh.data_index(engine.comm.rank), mesh.num_data_ranks
    numbers = range(first, (batch.accumulation or 1) * num, num)
    shape = (batch.micro_size or 1, job.seq_len)
    return [make_batch(job.model, engine.config.run.seed, step, number, shape) for number in numbers]


def _read(engine: Engine) -> dict[str, Tensor]:
    """Return the whole parameters on rank 0, and nothing on the others."""
    names = [name for name, _ in engine.model.named_parameters()]
    read = {name: engine.read(name, to_rank=0) for name in names}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def _with(config: Config, section: str, update: dict[str, Any]) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=update)})
