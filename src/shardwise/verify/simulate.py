"""Simulate one rank of a world of any size on one CPU: run the engine itself, over tensors without memory.

Nothing is modelled: hooks, collectives, buffers, recomputation and the step are those of a real run, so bytes at rest,
at the peak and on the wire, and the order of collectives and actions, are a real rank's
(`tests/parity/test_simulation.py`). Times and values mean nothing, and a model that decides on values is refused.

>>> from torch import nn
>>> config = Config.from_dict({"zero": {"stage": 3, "blocks": ["Linear"]}, "precision": {"param": "bf16"}})
>>> simulation = simulate(
...     lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)),
...     config,
...     lambda: torch.zeros(8, 512),
...     loss_fn=lambda output, batch: output.square().mean(),
...     rank=17,
...     world_size=4096,
... )
>>> simulation.states_bytes == simulation.layout.bytes_at_rest(shard=17)
True
>>> [(call.op, call.name, call.num_ranks) for call in simulation.calls[:2]]
[('all_gather', 'unshard 0', 4096), ('all_gather', 'unshard 2', 4096)]

Kernels are those of torch on the CPU, so where a GPU has other ones (attention, norms) their saved tensors differ.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.backends import SimulatedFactory
from shardwise.comm.loss import LossFn
from shardwise.comm.records import Collective
from shardwise.config.arguments import check, checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import (
    BatchConfig,
    Config,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    RecomputeConfig,
    ResolvedConfig,
    Tier,
    TiersConfig,
)
from shardwise.config.sections import PositiveFloat
from shardwise.construction.experts import experts_of
from shardwise.construction.scan import scan_model, with_own_dtype
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.engine.runner import RankBatch, run_model
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import check_rank
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.runtime.class_swap import answer_calls
from shardwise.runtime.device import kind_of
from shardwise.runtime.memory_tracker import Category, MemorySnapshot, MemoryTracker, explain_out_of_memory, first_line
from shardwise.runtime.module_calls import watch_calls
from shardwise.runtime.torch_private import NO_VALUE_ERRORS, fake_copy, fake_like, fake_tensors, pytree
from shardwise.schedule.actions import TimedAction
from shardwise.tensor.plan_layout import layout_by, plan_layout
from shardwise.zero.optimizer_plan import OptimizerFactory


@dataclass(frozen=True)
class Simulation:
    """Counts the bytes that one rank holds and sends in its second optimizer step.

    Attributes:
        at_rest: the memory tracker's snapshot after the last backward and before the optimizer's step.
        peak: its snapshot after the step: `peak_bytes` in all, `peak_live_bytes` by category.
        counter_bytes: bytes of the optimizer's step counts, which are in `at_rest` but not in the Layout.
        host_at_rest: the host tier's snapshot when `at_rest` was taken; chunks in transfer may be larger there than a
            real rank's.
        moved_bytes: bytes moved between tiers, by (from, to).
        calls: the step's collectives in their order.
        actions: the step's actions in their order; their times are the simulation's.
    """

    rank: int
    layout: Layout
    at_rest: MemorySnapshot
    peak: MemorySnapshot
    counter_bytes: int
    host_at_rest: MemorySnapshot
    moved_bytes: Mapping[tuple[Tier, Tier], int]
    calls: tuple[Collective, ...]
    actions: tuple[TimedAction, ...]
    elapsed_s: float

    @property
    def states_bytes(self) -> dict[str, int]:
        """Return bytes at rest by role, as `Layout.bytes_at_rest` does, but as the memory tracker counted them."""
        live_bytes = self.at_rest.live_bytes
        return {
            "param": live_bytes[Category.PARAMETERS],
            "grad": live_bytes[Category.GRADIENTS],
            "optimizer": live_bytes[Category.OPTIMIZER] - self.counter_bytes,
        }

    @property
    def wire_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes that this rank sends with ring collectives, by axis and op."""
        totals: dict[tuple[str, str], int] = {}
        for call in self.calls:
            totals[call.axis, call.op] = totals.get((call.axis, call.op), 0) + call.wire_bytes
        return totals


@checked
def simulate(
    model: nn.Module | Callable[[], nn.Module],
    config: Config | Mapping[str, Any] | None,
    make_batch: Callable[[], Any],
    *,
    rank: int,
    world_size: int,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerFactory | None = None,
    device_gib: PositiveFloat | None = None,
) -> Simulation:
    """Take two optimizer steps of one rank of a simulated world, and return what the second one held and sent.

    Args:
        model: a module on any device, of which only shapes are read; or a function that makes one, without memory.
        config: as for `initialize`. `run.device=cuda` needs no GPU and simulates native collectives and side streams;
            otherwise slices are received and summed on the host, as with gloo.
        make_batch: makes one micro-batch, as for `Engine.train_step`, without memory; its values do not matter.
        world_size: the number of ranks in its world.
        optimizer: as for `initialize`, but not one over the model's own parameters.
        device_gib: GiB of memory within which the rank must stay; None sets no limit.

    Raises:
        torch.OutOfMemoryError: the rank needs more than `device_gib`; the message has a table of what holds it.
        ConfigError: config, model, rank or world size do not fit each other, or model, loss or optimizer decide on
            values.
    """
    start_s = time.perf_counter()
    with torch.device("meta"):
        made = model if isinstance(model, nn.Module) else model()
    check("simulate", "what model() returned", made, nn.Module)
    resolved = (config if isinstance(config, Config) else Config.from_dict(config or {})).resolve(world_size)
    check_rank(rank, world_size)
    job = RankJob(made, resolved, make_batch, rank, loss_fn, optimizer, device_gib)
    with fake_tensors(), values_refused():
        engine, make_step = build_rank(job)
        num_micro_batches = resolved.batch.accumulation or 1
        # The first step makes the optimizer's states and learns the order of the blocks.
        with nullcontext() if device_gib is None else engine.memory.meter():
            engine.train_step(make_step(num_micro_batches))
        return meter_step(engine, make_step(num_micro_batches), start_s)


@dataclass(frozen=True)
class RankJob:
    """Holds what one simulated rank trains; fields as the arguments of `simulate`, the config resolved."""

    model: nn.Module
    config: ResolvedConfig
    make_batch: Callable[[], Any]
    rank: int
    loss_fn: LossFn | None = None
    optimizer: OptimizerFactory | None = None
    device_gib: float | None = None


def build_rank(job: RankJob) -> tuple[Engine, Callable[[int], list[Any]]]:
    """Make the engine of a simulated rank, and a function that makes so many micro-batches; call it on fake tensors."""
    memory = MemoryTracker("cpu", limit_bytes=None if job.device_gib is None else int(job.device_gib * 2**30))
    model = _without_memory(job.model)
    facts = scan_model(model, job.config)
    config = with_own_dtype(facts, job.config)
    layout = layout_by(facts, model, config, rank=job.rank)

    def make_step(num_micro_batches: int) -> list[Any]:
        batches = [job.make_batch() for _ in range(num_micro_batches)]
        return pytree.tree_map(lambda leaf: fake_copy(leaf) if isinstance(leaf, Tensor) else leaf, batches)

    examples = None
    if layout.pipeline is not None:
        steps = [make_step(config.batch.accumulation or 1) for _ in range(2)]
        examples = _what_stages_receive(model, config, layout.pipeline, steps)
    comm_factory = SimulatedFactory(layout.mesh, job.rank, kind_of(config.run.device).backend, examples)
    with explain_out_of_memory(memory, config, f"on rank {job.rank} while its engine is made"):
        engine = Engine(
            EngineInputs(model, config, layout, memory, comm_factory, loss_fn=job.loss_fn, optimizer=job.optimizer)
        )
    return engine, make_step


def meter_step(engine: Engine, batches: Sequence[Any], start_s: float) -> Simulation:
    """Take a step of a simulated rank's engine, and return what it holds and sends.

    Args:
        batches: the step's micro-batches; `batch.accumulation` may say another number.
        start_s: when the simulation began, on `time.perf_counter`.
    """
    before_update: list[tuple[MemorySnapshot, MemorySnapshot]] = []
    engine.parts.state.before_update = lambda: before_update.append(
        (engine.memory.snapshot(), engine.tiers.memory.snapshot())
    )
    engine.comm.comm_log.recent = deque()  # without a bound
    engine.memory.reset_peak()
    engine.tiers.traffic.reset()
    with engine.memory.meter(), engine.parts.failures_explained():
        engine.runner.accumulate(batches)
        engine.runner.step()
    at_rest, host_at_rest = before_update[0]
    return Simulation(
        rank=engine.comm.rank,
        layout=engine.layout,
        at_rest=at_rest,
        peak=engine.memory.snapshot(),
        counter_bytes=_counter_bytes(engine),
        host_at_rest=host_at_rest,
        moved_bytes=engine.tiers.traffic.moved_bytes,
        calls=tuple(engine.comm.comm_log.recent),
        actions=engine.timeline,
        elapsed_s=time.perf_counter() - start_s,
    )


@contextmanager
def values_refused() -> Iterator[None]:
    """Refuse, inside, a model that reads the values of fake tensors.

    Raises:
        ConfigError: it does.
    """
    try:
        yield
    except NO_VALUE_ERRORS as error:
        raise ConfigError(
            "simulated-values-read",
            f"model, loss or optimizer reads the values of a tensor ({first_line(error)}), and a simulated one has "
            "none; simulate what does not decide on values, and an optimizer such as adamw",
        ) from error


def _what_stages_receive(
    model: nn.Module, config: ResolvedConfig, pipeline: PipelineLayout, steps: Sequence[Sequence[Any]]
) -> dict[int, Any]:
    """Return what each stage gets from the one before it, by stage, from a forward of the whole model on one rank.

    Layers are split over `tp` and `cp` as in the pipeline, so what they return is split in the same way.
    """
    sizes = {tuple(map(_size, pytree.tree_leaves(batch))) for step in steps for batch in step}
    if len(sizes) > 1:
        raise ConfigError(
            "simulated-batch-shapes",
            "make_batch made micro-batches of several shapes, which a simulated pipeline does not know in advance; "
            "give all one shape, padded to one length",
        )
    plain_config = _without_pipeline(config)
    copied = _copy_without_memory(model)
    layout = plan_layout(copied, plain_config)
    comm_factory = SimulatedFactory(layout.mesh, 0, kind_of(config.run.device).backend)
    engine = Engine(
        EngineInputs(
            copied, plain_config, layout, MemoryTracker("cpu"), comm_factory, loss_fn=lambda *_: torch.zeros(())
        )
    )
    for experts in experts_of(copied) if config.mesh.ep > 1 else ():  # they return rows as they get, and read no values
        answer_calls(experts.module, lambda module, own, args, kwargs: [*args, *kwargs.values()][0].clone())
    last_of = {units[-1]: stage + 1 for stage, units in enumerate(pipeline.units[:-1])}
    examples: dict[int, Any] = {}
    running: list[str] = []

    def leave(output: Any) -> None:
        stage = last_of.get(running.pop())
        if stage is not None:
            examples[stage] = pytree.tree_map(_received, output)

    with watch_calls(copied, lambda name, *_: running.append(name), leave):
        context = engine.parts
        run_model(context, RankBatch.of(context, steps[0][0], first_sample=0, number=0), lambda output: None)
    engine.close(keep_values=False)
    return examples


def _without_pipeline(config: ResolvedConfig) -> ResolvedConfig:
    """Return a config for the ranks that compute one sample together, without a pipeline, with the same activations."""
    # What a stage passes on does not depend on where the experts are.
    mesh = MeshConfig(dp_shard=1, cp=config.mesh.cp, tp=config.mesh.tp)
    changed = {
        "mesh": mesh,
        "zero": config.zero.model_copy(update={"stage": 0}),
        "batch": BatchConfig(),
        "tiers": TiersConfig(),
        "pipeline": PipelineConfig(),
        "recompute": RecomputeConfig(),
        "optimizer": OptimizerConfig(name="sgd"),
    }
    return config.with_sections(changed).resolve(mesh.cp * mesh.tp)


def _received(leaf: Any) -> Any:
    """Return a leaf of a value as the next rank gets it: detached from what it was computed from."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _size(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None


def _without_memory(model: nn.Module) -> nn.Module:
    """Return the module itself if all its tensors are fake and on the CPU, otherwise a copy with such tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    fakes = {id(tensor): fake_copy(tensor) for tensor in tensors}
    is_without = all(fakes[id(tensor)] is tensor for tensor in tensors)
    return model if is_without else _copy_without_memory(model)


def _copy_without_memory(model: nn.Module) -> nn.Module:
    fakes = {id(tensor): fake_like(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, fakes)  # what is in the memo counts as copied: ties stay, and no data is copied


def _counter_bytes(engine: Engine) -> int:
    tensors = engine.parts.sharded.kept_tensors()
    return sum(value.element_size() for value in tensors if value.dim() == 0)
