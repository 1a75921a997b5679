"""Run a verification: the reference here, the layout's ranks as processes of this machine, then the comparison.

The engine's gradients are sharded over ranks, and are freed when the step ends. So on the layout's side a probe engine
takes one step of SGD first, with learning rate 1 and without decay and clipping: the change of the parameters is the
gradient.
"""

from __future__ import annotations

import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.experts.routers import ROUTED_EXPERTS, Routers
from shardwise.hf.losses import count_targets, shifts_labels
from shardwise.launch.environment import RankEnv
from shardwise.launch.host import show_list
from shardwise.launch.local import launch_local
from shardwise.launch.process_group import start_process_group
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import AXES, PIPELINE_AXES, Coordinate, MeshShape
from shardwise.optim.muon import FUSED
from shardwise.optim.rules import IS_MATRIX, build_optimizer
from shardwise.optim.schedules import own_scheduler
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.keyed_rng import keyed_generator
from shardwise.runtime.module_hooks import call_model
from shardwise.verify.compare import TrainingDifference, TrainingTrace, first_difference, largest_error
from shardwise.verify.job import VerifyJob, small_layout
from shardwise.verify.model import build_for_engine, build_whole, expert_sizes, loss_of, make_batch, skewed_routing

_JOB_NAME, _TRACE_NAME = "job.json", "trace.safetensors"
_SWAP_NAME: Final = "swap"
_PROBE: Final = (
    ("optimizer", {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}),
    ("scheduler", {"name": "constant", "warmup_steps": 0}),
)
RANK_ARGV: Final = ("-m", "shardwise.cli", "verify", "--be-rank")
_STOPPED: Final = tuple(128 + signum for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
_NOT_PIPELINE: Final = tuple(axis for axis in AXES if axis not in PIPELINE_AXES)


@dataclass(frozen=True)
class VerifyOutcome:
    """Holds the result of a verification.

    Attributes:
        exit_code: 0 if equal, 1 if different; otherwise that of the ranks, which failed or were stopped.
        difference: the first difference; None where there is none, or no result.
        holders: the stages and ranks that hold its first and its last tensor.
        error: the largest error of all values if they are equal, else the first difference's.
        folder: the folder of the ranks' logs; None unless the ranks failed.
    """

    exit_code: int
    difference: TrainingDifference | None = None
    holders: tuple[str, str] = ("", "")
    error: float = 0.0
    elapsed_s: float = 0.0
    folder: Path | None = None


def verify(
    job: VerifyJob,
    environ: Mapping[str, str],
    *,
    announce: Callable[[str], None] = lambda doing: None,
    argv: Sequence[str] = RANK_ARGV,
) -> VerifyOutcome:
    """Train on both sides and compare; call it on the main thread, since it handles signals.

    Args:
        environ: the environment that the processes inherit.
        announce: called with a few words before each side is trained.
        argv: a rank's arguments after the interpreter; the folder is appended.

    Raises:
        ConfigError: the small run has no layout, or one process cannot train it either.
    """
    start_s = time.perf_counter()
    layout = small_layout(job)
    announce("training in one process")
    expected = _train_reference(job)
    folder = Path(tempfile.mkdtemp(prefix="shardwise-verify-"))
    keeps_logs = False
    try:
        (folder / _JOB_NAME).write_text(job.to_json(), encoding="utf-8")
        announce(f"training on {job.world_size} processes")
        exit_code = launch_local(
            [*argv, str(folder)], job.world_size, folder, threads_per_rank=1, environ=environ, grace_s=2.0
        )
        if exit_code != 0:
            keeps_logs = exit_code not in _STOPPED
            return VerifyOutcome(exit_code, folder=folder if keeps_logs else None)
        actual = TrainingTrace.load(folder / _TRACE_NAME)
    finally:
        if not keeps_logs:
            shutil.rmtree(folder, ignore_errors=True)
    return judge(layout, actual, expected, time.perf_counter() - start_s)


def _train_reference(job: VerifyJob) -> TrainingTrace:
    try:
        return train_reference(job)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            "reference-not-trainable",
            f"one plain process cannot train the small copy, so there is nothing to compare with ({reason}); "
            "see in docs/verify.md which models can be scaled down",
        ) from error


def judge(layout: Layout, actual: TrainingTrace, expected: TrainingTrace, elapsed_s: float) -> VerifyOutcome:
    """Compare the two sides."""
    difference = first_difference(actual, expected)
    if difference is None:
        return VerifyOutcome(0, error=largest_error(actual, expected), elapsed_s=elapsed_s)
    names = difference.names or ("", "")
    holders = (_holders(layout, names[0]), _holders(layout, names[-1]))
    return VerifyOutcome(1, difference, holders, difference.error, elapsed_s)


def _holders(layout: Layout, name: str) -> str:
    """Name the stages and ranks that hold a parameter, such as `stage 1, ranks 4-7`; without a pipeline all ranks."""
    pipeline = layout.pipeline
    if pipeline is None or name not in pipeline.stages_of:
        return "all ranks"
    stages = pipeline.stages_of[name]
    ranks = [
        rank
        for index in pipeline.holders(stages)
        for rank in layout.mesh.ranks_along(_NOT_PIPELINE, layout.mesh.rank_of(Coordinate(pp=index)))
    ]
    parts = (("stage", show_list(stages)), ("rank", show_list(ranks)))
    return ", ".join(f"{noun}{'' if text.isdigit() else 's'} {text}" for noun, text in parts)


def train_reference(job: VerifyJob) -> TrainingTrace:
    """Train the job in this process, without its layout."""
    config, seed = job.config, job.config.run.seed
    model = build_whole(job.model, seed)
    draws = KeyedDraws(seed)
    key_dropouts(model, draws, {})
    optimizer = build_optimizer(config.optimizer, _param_groups(model, config, small_layout(job)))
    scheduler = own_scheduler(config, optimizer)
    trace = TrainingTrace()
    for step in range(job.num_steps):
        optimizer.zero_grad()
        with float64_throughout():
            trace.losses.append(_accumulate(job, model, draws, step))
        draws.forget()
        if step == 0:
            trace.gradients.update({name: _gradient(parameter) for name, parameter in model.named_parameters()})
        limit = config.optimizer.clip_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)
        trace.grad_norms.append(norm.item())
        optimizer.step()
        scheduler.step()
        trace.parameters.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return trace


def _accumulate(job: VerifyJob, model: nn.Module, draws: KeyedDraws, step: int) -> float:
    """Put the gradient of sum / count over all micro-batches of all data ranks into `.grad`; return sum / count."""
    num_data_ranks = MeshShape.from_config(job.config.mesh).num_data_ranks
    micro_size, accumulation = job.config.batch.micro_size or 1, job.config.batch.accumulation or 1
    loss_fn = loss_of(job.model)
    total, total_count = 0.0, 0.0
    for number in range(accumulation * num_data_ranks):
        batch = _batch(job, model, step, number)
        at = draws.at(step, number // num_data_ranks, number * micro_size, micro_size)
        inputs = batch if loss_fn is None else batch[0]
        routing = inputs.pop(ROUTED_EXPERTS) if job.config.experts.replay else None
        with closing(Routers(model)) as routers, at, nullcontext() if routing is None else routers.following(routing):
            output = call_model(model, inputs)
        loss_sum, count = _own_loss(model, output.loss, batch) if loss_fn is None else loss_fn(output, batch)
        loss_sum.backward()
        total += loss_sum.item()
        total_count += float(count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= total_count
    return total / total_count


def _own_loss(model: nn.Module, mean: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int]:
    """Return the sum and the count of a model's own mean over its targets; a mean over something else counts as one."""
    num_targets = count_targets(batch, shifts_labels(model))
    return (mean, 1) if num_targets is None else (mean * num_targets, num_targets)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _param_groups(model: nn.Module, config: Config, layout: Layout) -> list[dict[str, object]]:
    """Return the optimizer's groups; biases and norms are not decayed, unless the config says so.

    Args:
        layout: says what is stepped as a whole matrix.
    """
    section = config.optimizer
    places = {param.name: param for group in layout.model_groups if group.is_matrix for param in group.params}
    matrices: list[dict[str, object]] = [
        {"params": [parameter], "weight_decay": section.weight_decay, IS_MATRIX: True, FUSED: places[name].fused}
        for name, parameter in model.named_parameters()
        if name in places
    ]
    parameters = [
        parameter for name, parameter in model.named_parameters() if parameter.requires_grad and name not in places
    ]
    decayed = [parameter for parameter in parameters if parameter.dim() >= 2 or section.decay_1d]
    others = [parameter for parameter in parameters if parameter.dim() < 2 and not section.decay_1d]
    groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [*groups, *matrices]


def be_rank(env: RankEnv, folder: Path) -> None:
    """Run as one of the ranks: train the job in the folder; rank 0 writes the trace there.

    Raises:
        ConfigError: the small run has no layout.
        LaunchError: the ranks did not meet.
        CommError: a collective failed or hung.
    """
    torch.set_num_threads(1)
    job = VerifyJob.from_json((folder / _JOB_NAME).read_text(encoding="utf-8"))
    start_process_group(env, "cpu", job.config.run.timeout_s)
    trace = train_layout(job, env.rank, folder)
    if env.rank == 0:
        trace.save(folder / _TRACE_NAME)


def train_layout(job: VerifyJob, rank: int, folder: Path) -> TrainingTrace:
    """Train the job on this rank of the process group.

    Args:
        job: the job, for as many processes as the group has.
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
    return [_batch(job, engine.model, step, number) for number in numbers]


def _batch(job: VerifyJob, model: nn.Module, step: int, number: int) -> Any:
    """Return one micro-batch, with the experts of its tokens where these are replayed; `number` as in `make_batch`."""
    section, seed, shape = job.config.experts, job.config.run.seed, (job.config.batch.micro_size or 1, job.seq_len)
    batch = make_batch(job.model, seed, step, number, shape)
    if section.replay and (sizes := expert_sizes(model)) is not None:
        generator = keyed_generator(seed, "verify", "experts", step, number)
        routed = {ROUTED_EXPERTS: skewed_routing(sizes, shape, section.skew, generator)}
        batch = {**batch, **routed} if isinstance(batch, Mapping) else ({"tokens": batch[0], **routed}, batch[1])
    return batch


def _read(engine: Engine) -> dict[str, Tensor]:
    """Return the whole parameters on rank 0, and nothing on the others."""
    names = [name for name, _ in engine.model.named_parameters()]
    read = {name: engine.read(name, to_rank=0) for name in names}
    return {name: tensor for name, tensor in read.items() if tensor is not None}


def _with(config: Config, section: str, update: dict[str, Any]) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=update)})
