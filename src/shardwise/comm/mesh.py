"""A mesh makes the process groups of its named axes when they are first asked for; `close` destroys them.

`connect` makes the communicators of an engine over them.

The pure shape of the mesh is `shardwise.layout.mesh_shape`; this module only turns it into groups. Hybrid sharding on
two machines of two GPUs, dp_replicate=2 x dp_shard=2: rank 1 shards over (0, 1), inside its machine, averages its shard
with rank 3 over (1, 3), and sums scalars over all four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Comm, CommFactory, CommResources
from shardwise.comm.consistency import CallCheck
from shardwise.comm.records import CommLog
from shardwise.comm.store import PatientStore
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import (
    CONTEXT_AXES,
    GRADIENT_AXES,
    PIPELINE_AXES,
    REPLICA_AXES,
    SHARD_AXES,
    TENSOR_AXES,
    MeshShape,
)
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.device import Streams, kind_of

# Uses of groups: for tensors on the host, also where the other groups are of NCCL; for messages to higher ranks of a
# pipeline; and to lower ones.
HOST: Final = "host"
DOWN: Final = "down"
UP: Final = "up"
# The axis, in counts and messages, of the ranks that share secondary shards.
SECONDARY: Final = "secondary"
_CPU: Final = torch.device("cpu")
Groups = dict[tuple[tuple[int, ...], str], dist.ProcessGroup]  # by their ranks, and by use


class Mesh:
    """Holds a mesh shape with its process groups.

    Args:
        groups: those of another shape of the same ranks, which both then share; None for none yet.

    Raises:
        ConfigError: the shape does not hold as many ranks as the world.
    """

    def __init__(self, shape: MeshShape, timeout_s: float, groups: Groups | None = None) -> None:
        if shape.world_size != dist.get_world_size():
            raise ConfigError(
                "mesh-world-size",
                f"the mesh holds {shape.world_size} ranks but the world {dist.get_world_size()}; "
                f"start {shape.world_size}",
            )
        self.shape = shape
        self.rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_s)
        self._groups = {} if groups is None else groups

    # [Note: A communicator for each use]
    # A communicator matches collectives by their order, and NCCL runs those of one communicator one after the other. So
    # what may start in another order, or is to run beside the rest, has its own: exchanges of context parallelism amid
    # a unit's computation, reductions beside gathers on CUDA, messages up and down a pipeline. On gloo gathers and
    # reductions share one, since hooks start both in one order on all ranks.
    def group(self, axes: tuple[str, ...], use: str = "gather") -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along `axes` only; all of them call it
        together.

        Args:
            use: collectives of different uses run at the same time, so each use has its group; that of `HOST` is
                gloo's.
        """
        ranks = self.shape.ranks_along(axes, self.rank)
        if self.shape.world_size == 1 and dist.group.WORLD is not None:
            return dist.group.WORLD  # otherwise another engine's: what one that was dropped left would reach this one
        if (ranks, use) not in self._groups:
            # All ranks make all groups of the axes: torch names them by a count, and no name may come twice.
            for members in self.shape.groups_along(axes):
                backend = "gloo" if use == HOST else None
                group = dist.new_group(list(members), self._timeout, backend, group_desc=f"shardwise {use}")
                if members == ranks:
                    self._groups[ranks, use] = group
        return self._groups[ranks, use]

    def group_among(self, axes: tuple[str, ...], indices: tuple[int, ...], use: str) -> dist.ProcessGroup | None:
        """Return the process group of some of the ranks along `axes`, by their indices there; None if this is none of
        them.

        All ranks of the world call it together, in the same order, and once for the same `indices` and `use`: each call
        makes its groups. It takes the same indices along each line of ranks.

        Args:
            use: what the group is for; it is a part of torch's description of it.
        """
        own = None
        for along in self.shape.groups_along(axes):
            members = tuple(along[index] for index in indices)
            group = dist.new_group(list(members), timeout=self._timeout, group_desc=f"shardwise {use}")
            if self.rank in members:
                own = self._groups[members, use] = group
        return own

    def reshaped(self, shape: MeshShape) -> Mesh:
        """Return the mesh of the same ranks in another shape; groups of the same ranks and use are the same."""
        return Mesh(shape, self._timeout.total_seconds(), self._groups)

    def close(self) -> None:
        """Destroy the groups, except that of the world, which is not the mesh's."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


@dataclass(frozen=True)
class CommGroups:
    """Holds an engine's groups of ranks; groups of the same ranks are one object, unless they need two communicators.

    On a 2x2 mesh, dp_replicate=2 x dp_shard=2, rank 1's `data` are all four ranks, its `shards` (0, 1) and its
    `replicas` (1, 3). With dp_shard=2 x cp=2, its `shards` are all four and its `context` is (0, 1).

    Attributes:
        data: `shards` and `replicas` together: the ranks that average gradients.
        shards: the ranks that share the sharded states.
        reductions: the same ranks as `shards`; on CUDA over a communicator of its own.
        replicas: the ranks that hold the same shard.
        tensor: the ranks that share a layer's matrices.
        context: the ranks that share each sample's tokens; over a communicator of its own.
        matrices: `shards` and `tensor` together: the ranks that share the elements of each matrix once. None where the
            optimizer needs no whole matrices.
        model: `data` and `tensor` together: all that hold parts of the same stages of the model.
        hosts: the same ranks as `model`; under `zero.lockstep` over their hosts, which then wait for no device.
        pipeline: the ranks with the other stages, at the same place of their meshes.
        all: `model` and `pipeline` together: all that take the same optimizer step.
        tied: the ranks of `pipeline` that hold a parameter which is tied across a cut, by their ranks there.
        secondary: the part of `shards`, ranks next to each other, that share secondary shards; None without any.
        experts: the groups on the mesh of experts, where `tensor` are the ranks of ep; None where nothing is on it.
        tokens: the ranks of ep again, over a communicator of its own.
    """

    data: Comm
    shards: Comm
    reductions: Comm
    replicas: Comm
    tensor: Comm
    context: Comm
    matrices: Comm | None
    model: Comm
    hosts: Comm
    pipeline: Comm
    all: Comm
    tied: Mapping[tuple[int, ...], Comm]
    secondary: Comm | None = None
    experts: CommGroups | None = None
    tokens: Comm | None = None

    def drain(self) -> None:
        """Wait for every collective that is under way; see `Comm.drain`."""
        among = {self.data, self.shards, self.reductions, self.replicas, self.matrices, self.model, self.all}
        for comm in among | {self.hosts, self.secondary}:
            if comm is not None:
                comm.drain()
        if self.experts is not None:
            self.experts.drain()


def connect(
    comm_factory: CommFactory,
    shape: MeshShape,
    config: ResolvedConfig,
    device: torch.device,
    streams: Streams,
    pool: BufferPool,
    layout: Layout | None = None,
    has_owners: bool = False,
) -> CommGroups:
    """Make an engine's groups of ranks, with a common comm log; all ranks do so together.

    Args:
        layout: says which ranks of the pipeline hold a parameter together, and which share a secondary shard.
        has_owners: whether parameters are stepped whole by owners.
    """
    comm_log = CommLog(comm_factory.rank)
    if config.run.check_collectives and comm_factory.store is not None:
        comm_log.check = CallCheck(comm_factory.store, comm_factory.rank, config.run.timeout_s)
    resources = CommResources(device, config.run.timeout_s, streams, pool, comm_log)
    is_in_stream_order = kind_of(device).is_in_stream_order
    # On NCCL one communicator would run gathers and reductions one after the other.
    reduce: Final = "reduce" if is_in_stream_order else "gather"
    over, cell = _MeshComms(comm_factory, shape, resources, {}), (*GRADIENT_AXES, *TENSOR_AXES)
    comms = CommGroups(
        data=over(GRADIENT_AXES),
        shards=over(SHARD_AXES),
        reductions=over(SHARD_AXES, reduce),
        replicas=over(REPLICA_AXES),
        tensor=over(TENSOR_AXES),
        context=over(CONTEXT_AXES, "context" if shape.cp > 1 else "gather"),
        matrices=over((*SHARD_AXES, *TENSOR_AXES)) if has_owners else None,
        model=over(cell),
        hosts=over(cell, HOST if config.zero.lockstep and is_in_stream_order else "gather"),
        pipeline=over(PIPELINE_AXES),
        all=over((*PIPELINE_AXES, *cell)),
        tied={} if layout is None else _connect_holders(over, layout),
        secondary=_connect_neighbours(comm_factory, shape, resources, layout.stage.secondary_shard if layout else 0),
    )
    if layout is None or not any(group.is_experts for group in layout.model_groups):
        return comms
    over = _MeshComms(comm_factory.on_mesh(shape.experts), shape.experts, resources, {"dp_shard": "edp", "tp": "ep"})
    experts = replace(
        comms,
        data=over(GRADIENT_AXES),
        shards=over(SHARD_AXES),
        reductions=over(SHARD_AXES, reduce),
        tensor=over(TENSOR_AXES),
        context=over(CONTEXT_AXES),
        matrices=over(SHARD_AXES) if has_owners else None,  # no rank has a part of another's experts
        secondary=None,
    )
    return replace(comms, experts=experts, tokens=over(TENSOR_AXES, "tokens"))


class _MeshComms:
    """Makes the communicators of a mesh, each once.

    Args:
        names: of axes in counts and messages, where they are not their own.
    """

    def __init__(
        self, comm_factory: CommFactory, shape: MeshShape, resources: CommResources, names: Mapping[str, str]
    ) -> None:
        self.comm_factory = comm_factory
        self.shape = shape
        self.resources = resources
        self._names = names
        self._made: dict[tuple[tuple[str, ...], str], Comm] = {}

    def __call__(self, axes: tuple[str, ...], use: str = "gather") -> Comm:
        """Return the communicator of the ranks along `axes`."""
        live = tuple(axis for axis in axes if self.shape.size_along((axis,)) > 1)
        if (live, use) not in self._made:
            resources = self.resources
            if use == HOST:
                resources = replace(resources, device=_CPU, pool=BufferPool(_CPU))
            name = "+".join(self._names.get(axis, axis) for axis in live or axes[:1])
            self._made[live, use] = self.comm_factory.comm(axes, use, resources, name)
        return self._made[live, use]


def _connect_holders(over: _MeshComms, layout: Layout) -> dict[tuple[int, ...], Comm]:
    """Connect the ranks of the pipeline that hold a parameter together; all ranks make these groups, in one order."""
    tied: dict[tuple[int, ...], Comm] = {}
    for holders in sorted(layout.ties):
        if len(holders) == over.shape.pp:
            tied[holders] = over(PIPELINE_AXES)
        else:
            name = "+".join(PIPELINE_AXES)
            comm = over.comm_factory.comm_among(PIPELINE_AXES, holders, "tied", over.resources, name)
            if comm is not None:
                tied[holders] = comm
    return tied


def _connect_neighbours(
    comm_factory: CommFactory, shape: MeshShape, resources: CommResources, num_ranks: int
) -> Comm | None:
    """Connect `num_ranks` of the shard group next to each other; all ranks make all such groups, in one order."""
    if not num_ranks:
        return None
    starts = range(0, shape.size_along(SHARD_AXES), num_ranks)
    members = [tuple(range(start, start + num_ranks)) for start in starts]
    made = [comm_factory.comm_among(SHARD_AXES, member, SECONDARY, resources, SECONDARY) for member in members]
    return next(comm for comm in made if comm is not None)


def open_store(timeout_s: float = 300.0) -> dist.Store | None:
    """Open a part of the default group's store for one more engine; None for one rank.

    Every rank opens equally many, in the same order. It shares torch's connection: one of its own would be free while
    torch itself waits in the store, as when it makes a communicator, but to open it holds the interpreter's lock, and
    takes seconds where a name server does not answer.

    Args:
        timeout_s: seconds for the store's answer to one request.
    """
    group = dist.group.WORLD
    if group is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    store = PatientStore(group.get_group_store(), timeout_s)
    number = store.add(f"shardwise/{dist.get_rank()}/num_engines", 1)
    return PatientStore(store, timeout_s, f"shardwise/engine{number}")
