"""This module starts an engine: the process group where there is none, the device, the resolved config, the layout.

>>> import torch
>>> from shardwise.config.resolve import Config
>>> model = torch.nn.Linear(4, 1)
>>> config = Config.from_dict({"optimizer": {"name": "sgd", "lr": 0.1}, "run": {"device": "cpu"}})
>>> with initialize(model, config, loss_fn=lambda output, batch: output.square().mean()) as engine:
...     result = engine.train_step([torch.ones(2, 4)])
>>> result.step, result.skipped
(1, False)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.comm.agreement import Agreement, all_or_none
from shardwise.comm.backends import ProcessGroupFactory
from shardwise.comm.consistency import RankFacts, agree_on_setup
from shardwise.comm.loss import LossFn
from shardwise.comm.mesh import Mesh, open_store
from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ResolvedConfig, TiersConfig
from shardwise.construction.opaque import beside_parameters
from shardwise.construction.scan import check_plain, scan_model, with_own_dtype
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.engine.hf_api import Names, check_folder
from shardwise.engine.types import Scheduler
from shardwise.launch.host import (
    check_cores,
    machine_name,
    quota_cores,
    read_places,
    share_of_cores,
    show_list,
    usable_cores,
)
from shardwise.launch.process_group import ensure_process_group, warn_of_few_queues
from shardwise.layout.tensor_plan import TensorPlan
from shardwise.optim.schedules import schedule_of
from shardwise.runtime.device import DeviceKind, choose_kind, current_device, number_dtype
from shardwise.runtime.memory_tracker import MemoryTracker, explain_out_of_memory, keep_host_memory
from shardwise.tensor.plan_layout import proved_layout
from shardwise.zero.optimizer_plan import OptimizerFactory


@checked
def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | None = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | OptimizerFactory | None = None,
    scheduler: Scheduler | None = None,
    plan: TensorPlan | Mapping[str, Any] | None = None,
    weights: str | Path | None = None,
    names: Names | None = None,
) -> Engine:
    """Shard a model's states over the ranks and return the engine that trains it; every rank calls it.

    Args:
        model: any module, also one built inside `shardwise.init()` or on meta; every rank takes rank 0's values. It is
            changed in place: parameters move to the engine's buffers and dtype.
        config: as written by the user; it is resolved for the world size here.
        loss_fn: `loss_fn(output, batch)` returns the loss's sum and the count of what is summed, or a scalar, which
            counts as one, under `mesh.cp` too; without it the model's output has the loss, counted by its targets.
        optimizer: None for the config's; a torch optimizer over the model's parameters, whose groups keep their
            meaning; or a function from parameter groups to an optimizer. Any that steps without a closure.
        scheduler: None for the config's, constant where it names none; or a torch scheduler on the given optimizer.
        plan: how layers are split where `mesh.tp` is more than 1: a table of name patterns and styles, or what
            `propose_plan` or `prove_plan` returned; None for the plan that the model brings, or its family has.
        weights: a Hugging Face folder with all values: none are drawn first, and the model's own are not used. A model
            with adapters uses `engine.import_weights`.
        names: names of tensors in that folder; as in `engine.import_weights`.

    Raises:
        ConfigError: config, model or world size do not fit each other, or the ranks' models or configs differ.
        LaunchError, CommError: not all ranks come, or call it, within `run.timeout_s`; or another rank has failed.
        CheckpointError: the folder of `weights` does not fit the model, or cannot be read.
    """
    config = config if isinstance(config, Config) else Config.from_dict(config or {})
    row = _prepare(model, config, has_scheduler=scheduler is not None)
    world_size = ensure_process_group(row.name, config.run.timeout_s)
    device = current_device(row)
    rank, store = dist.get_rank(), open_store(config.run.timeout_s)
    agreement = Agreement(store, range(world_size), rank, config.run.timeout_s, "start")
    with all_or_none(agreement, "layout"):
        facts = scan_model(model, config)
        resolved = with_own_dtype(facts, config, rank=rank).resolve(world_size)
        check_tiers(resolved.tiers)
        layout = proved_layout(facts, model, resolved, plan, rank=rank)
        if weights is not None:
            check_folder(model, Path(weights), names)
    warn_of_few_queues(row.name, layout.mesh.pp)
    agree_on_setup(agreement, RankFacts.of(layout, resolved, beside_parameters(model)))
    resolved = with_own_cores(resolved, agreement, usable_cores(), quota_cores())
    comm_factory = ProcessGroupFactory(Mesh(layout.mesh, config.run.timeout_s), store)
    if device.type == "cpu" and {config.tiers.params, config.tiers.grads, config.tiers.optimizer} == {"device"}:
        keep_host_memory()  # with states elsewhere memory is what is scarce, not time
    memory, where = MemoryTracker(device), f"on rank {rank} while its engine is made"
    inputs = EngineInputs(
        model, resolved, layout, memory, comm_factory, loss_fn, optimizer, scheduler, has_values=weights is None
    )
    with explain_out_of_memory(memory, resolved, where):
        engine = Engine(inputs)
    return engine if weights is None else _with_weights(engine, weights, names)


def _prepare(model: nn.Module, config: Config, has_scheduler: bool) -> DeviceKind:
    """Refuse before ranks meet what cannot be, and freeze a model that is to be evaluated only; return the device's."""
    row = choose_kind(config.run.device)
    if config.precision.param == "fp64" and number_dtype(current_device(row)).itemsize < 8:
        raise ConfigError(
            "device-without-fp64",
            f"precision.param=fp64 but run.device={row.name} has no fp64; use precision.param=fp32, or run.device=cpu",
        )
    check_plain(model)
    if config.optimizer.name == "none":
        model.requires_grad_(False)
    if not has_scheduler:
        schedule_of(config)
    return row


def _with_weights(engine: Engine, weights: str | Path, names: Names | None) -> Engine:
    try:
        engine.import_weights(weights, names=names)
    except Exception:
        engine.close()
        raise
    return engine


def check_tiers(tiers: TiersConfig) -> None:
    """Refuse states on NVMe without a folder for them, and cores that this process may not use.

    Raises:
        ConfigError: it names the state, or the cores.
    """
    check_nvme_path(tiers)
    if tiers.cores is not None:
        check_cores(tiers.cores, usable_cores())


def check_nvme_path(tiers: TiersConfig) -> None:
    """Refuse states on NVMe without a folder for them.

    Raises:
        ConfigError: it names the state.
    """
    for state in ("params", "grads", "optimizer"):
        if getattr(tiers, state) == "nvme" and tiers.nvme_path is None:
            raise ConfigError(
                "no-swap-folder", f"tiers.{state}=nvme needs a folder; set tiers.nvme_path to one on a local NVMe disk"
            )


def with_own_cores(
    config: ResolvedConfig, agreement: Agreement, usable: Sequence[int], quota: float | None
) -> ResolvedConfig:
    """Return the config with this rank's `tiers.cores` filled in, if `tiers.bind_cores` is set; every rank calls it.

    Args:
        config: of the run; `tiers.cores` that are given stay.
        usable: cores that this process may run on.
        quota: the cores' time that its cgroup allows, None for no limit; more cores than that would stall each other.

    Raises:
        CommError: not all ranks have come in time.
    """
    tiers = config.tiers
    if not tiers.bind_cores:
        return config
    note = f"{machine_name()}: {show_list(usable)}"
    places = agreement.compare("share cores", note, lambda notes: json.dumps(places_among_sharers(notes)))
    place, num_sharing = json.loads(places)[str(agreement.rank)]
    if tiers.cores is not None:  # after the round, which the other ranks need
        return config
    share = share_of_cores(usable, num_sharing, place, read_places(usable))
    num_allowed = len(share) if quota is None else max(1, int(quota / num_sharing))
    return config.model_copy(update={"tiers": tiers.model_copy(update={"cores": share[:num_allowed]})})


def places_among_sharers(notes: Mapping[int, str]) -> dict[int, tuple[int, int]]:
    """Return by rank its place among the ranks that have given the same note, and the number of these.

    >>> places_among_sharers({0: "node1: 0-7", 1: "node1: 0-7", 2: "node2: 0-7"})
    {0: (0, 2), 1: (1, 2), 2: (0, 1)}
    """
    sharers: dict[str, list[int]] = {}
    for rank in sorted(notes):
        sharers.setdefault(notes[rank], []).append(rank)
    return {rank: (sharers[note].index(rank), len(sharers[note])) for rank, note in sorted(notes.items())}
