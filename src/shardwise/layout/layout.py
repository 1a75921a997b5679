"""The Layout says which slice of each state every rank holds, in which dtype and in which memory.

It is a pure value computed from the model's names and shapes, the resolved config and the mesh shape. It has no process
group and no storage. The engine executes it, the planner prices it, a checkpoint records it.

>>> from shardwise.config.resolve import Config
>>> from shardwise.layout.facts import ParamEntry
>>> from shardwise.layout.resolve import resolve_layout
>>> params = tuple(ParamEntry(f"{unit}.weight", (), unit, (64, 64), requires_grad=True) for unit in ("0", "1"))
>>> config = Config.from_dict({"zero": {"stage": 2}, "precision": {"param": "bf16"}})
>>> layout = resolve_layout(ModelFacts("Model", ("0", "1"), params), config.resolve(world_size=2))
>>> [group.name for group in layout.groups], layout.numel
(['0', '1'], 8192)
>>> at_rest = layout.bytes_at_rest()
>>> at_rest["param"], at_rest["grad"], at_rest["optimizer"]   # 2N, 4N/2, 12N/2
(16384, 16384, 49152)
>>> wire = layout.bytes_on_wire(num_micro_batches=1)          # in bytes a rank: N * 2 * (2 - 1) / 2 each
>>> wire["all_gather"], wire["reduce_scatter"]
(8192, 8192)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from shardwise.config.resolve import OptimizerConfig, Tier, TiersConfig
from shardwise.layout.facts import ModelFacts
from shardwise.layout.grad_sums import GradSum, Moment, StepCollective, SumRanks, sums_of
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.param_groups import ROOT, GroupSpec, GroupTiers
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.precision import (
    DTYPE_BYTES,
    OPAQUE,
    SCALE_BYTES,
    PrecisionPolicy,
    StatesDtype,
    StoredDtype,
    is_encoded,
)
from shardwise.layout.tensor_plan import TensorLayout
from shardwise.layout.zero_stages import Placement, ZeroStage
from shardwise.optim.rules import matrix_state_names, state_names

if TYPE_CHECKING:
    from shardwise.layout.codec import Codec
    from shardwise.layout.wire_codec import WireCodec

Key = TypeVar("Key")

TIERS: Final[tuple[Tier, ...]] = ("device", "host", "nvme")


@dataclass(frozen=True)
class StateSpec:
    """Describe one state of every parameter.

    Attributes:
        name: such as `exp_avg`; its `role` is param, grad or optimizer.
        dtype: of each element, except in wide and opaque groups; see `dtype_in`.
        placement: over the shard group, of all groups but those that keep their parameters whole.
        is_flat: one flat buffer a group, padding included; otherwise, on the device and unless it has a codec, one
            tensor for each parameter piece.
        is_copy_of_param: only groups whose optimizer is stored in another tier than their parameters keep it.
        codec: how it is encoded, in parameters that are large enough; None for as it is. A group of which one is large
            has a code for each element in the state's tier. Scales and the values of small parameters are few: they
            are on the device with the codes, or in host memory, and never move.
        of_matrices: whether only groups of matrices have it, or only the others; None for all groups.
        exact_of: it keeps the exact values of frozen parameters that the device stores decoded: of all groups that are
            encoded, or of those that stage 3 does not release; None for any other state.
    """

    name: str
    role: str
    dtype: StoredDtype
    placement: Placement
    is_flat: bool = True
    is_copy_of_param: bool = False
    codec: Codec | None = None
    of_matrices: bool | None = None
    exact_of: Literal["all", "stored whole"] | None = None

    def tier_in(self, group: GroupSpec) -> Tier:
        """Return the tier in which this state of `group` is stored."""
        tiers = group.tiers
        return {"param": tiers.params, "grad": tiers.grads, "optimizer": tiers.optimizer}[self.role]

    def dtype_in(self, group: GroupSpec) -> StoredDtype:
        """Return the dtype of what is stored for each element of this state of `group`: its value or its code."""
        if self.codec is not None and group.has_large:
            return self.codec.dtype
        return self._value_dtype_in(group)

    def _value_dtype_in(self, group: GroupSpec) -> StoredDtype:
        return OPAQUE.param if group.is_opaque else "fp32" if group.is_wide else self.dtype

    def is_kept_by(self, group: GroupSpec) -> bool:
        """Say whether `group` has this state."""
        if self.of_matrices is not None and self.of_matrices != group.is_matrix:
            return False
        if self.exact_of is not None:
            is_decoded = group.is_stored_whole or self.exact_of == "all"
            return is_decoded and group.is_encodable and not group.trainable
        is_copy_of_param = self.is_copy_of_param or (group.is_wide and self.name == "master")
        is_missing = is_copy_of_param and group.tiers.params == group.tiers.optimizer
        return not is_missing and (group.trainable or self.role == "param")

    def bytes_at_rest(self, group: GroupSpec, shard: int, tier: Tier | None = None) -> int:
        """Return the bytes of this state of `group` in a tier, or in all, on the rank that holds shard `shard`."""
        if not self.is_kept_by(group):
            return 0
        is_whole = self.role == "param" and group.is_replicated
        start, stop = group.held_range(Placement.REPLICATE if is_whole else self.placement, shard)
        own_tier, num_bytes = self.tier_in(group), 0
        if tier in (None, own_tier):
            is_flat = self.is_flat or self.codec is not None or own_tier != "device"
            numel = stop - start if is_flat else sum(slot.stop - slot.start for slot in group.slots(start, stop))
            num_bytes += numel * DTYPE_BYTES[self.dtype_in(group)]
        if self.codec is not None and group.has_large and tier in (None, "device" if own_tier == "device" else "host"):
            slots = [slot for slot in group.slots(start, stop) if not is_encoded(slot.param.global_shape)]
            num_bytes += self.codec.num_scales(stop - start) * SCALE_BYTES
            num_bytes += sum(slot.stop - slot.start for slot in slots) * DTYPE_BYTES[self._value_dtype_in(group)]
        return num_bytes


@dataclass(frozen=True)
class Layout:
    """Hold the mesh, groups, stage, precision and states of a model; see the module's example.

    Attributes:
        units: names of the block modules, in module order; the first guess of the order in which they run.
        groups: the root's first, then those of the units in module order.
        stage: placements over the shard group; see `stage_of` for those of one group.
        precision: dtypes by role; see `precision_of` for those of one group.
        states: every state that is stored between its uses.
        tensor: what is split over the tensor-parallel group; None for one rank.
        pipeline: the stages; None without a pipeline.
        elsewhere: the groups that only other ranks of the pipeline hold; see `of_pipeline_rank`.
        facts: of the model, by which it was resolved.
    """

    mesh: MeshShape
    units: tuple[str, ...]
    groups: tuple[GroupSpec, ...]
    stage: ZeroStage
    precision: PrecisionPolicy
    states: tuple[StateSpec, ...]
    tensor: TensorLayout | None = None
    pipeline: PipelineLayout | None = None
    elsewhere: tuple[GroupSpec, ...] = ()
    facts: ModelFacts = field(default=ModelFacts(), compare=False, repr=False)

    def of_pipeline_rank(self, index: int) -> Layout:
        """Return the layout with the groups of pipeline rank `index`; the layout itself without a pipeline."""
        if self.pipeline is None:
            return self
        held = self.pipeline.stages_on(index)
        groups = tuple(group for group in self.model_groups if not held.isdisjoint(group.stages))
        elsewhere = tuple(group for group in self.model_groups if held.isdisjoint(group.stages))
        return replace(self, groups=groups, elsewhere=elsewhere, pipeline=replace(self.pipeline, index=index))

    @cached_property
    def model_groups(self) -> tuple[GroupSpec, ...]:
        """Return the groups of all stages, on every rank in the same order."""
        order = {unit: index for index, unit in enumerate((ROOT, *self.units))}
        every = (*self.groups, *self.elsewhere)
        return tuple(
            sorted(
                every,
                key=lambda group: (
                    order[group.unit],
                    group.stages,
                    group.is_experts,
                    not group.trainable,
                    group.is_wide,
                    group.is_opaque,
                    group.is_matrix,
                    group.is_replicated,
                    group.is_small,
                ),
            )
        )

    def mesh_of(self, group: GroupSpec) -> MeshShape:
        """Return the mesh on which a group is sharded: with ep in place of tp, where experts have one of their own."""
        return self.mesh.experts if group.is_experts else self.mesh

    @cached_property
    def trained_names(self) -> tuple[str, ...]:
        """Return the names of the trained parameters of all stages, on every rank in the same order."""
        return tuple(place.name for group in self.model_groups if group.trainable for place in group.params)

    @property
    def wide_names(self) -> list[str]:
        """Return the names of the parameters of all stages that stay in fp32 although `precision.param` is narrower."""
        return [place.name for group in self.model_groups if group.is_wide for place in group.params]

    @property
    def held_units(self) -> tuple[str, ...]:
        """Return the names of the blocks of this rank's stages."""
        if self.pipeline is None:
            return self.units
        others = {group.unit for group in self.elsewhere} - {group.unit for group in self.groups}
        return tuple(unit for unit in self.units if unit not in others)

    @property
    def numel(self) -> int:
        """Count the elements of this rank's parameters before they are sharded, tied ones once."""
        return sum(group.numel for group in self.groups)

    @property
    def padding_numel(self) -> int:
        """Count the elements of the flat buffers that belong to no parameter."""
        return sum(group.padded_numel for group in self.groups) - self.numel

    def bytes_at_rest(self, shard: int = 0, tier: Tier | None = None) -> dict[str, int]:
        """Return the bytes stored after the last backward and before the step, by role (param, grad, optimizer).

        For N elements, n ranks and P, G, K bytes an element of the three roles: stage 0 N(P+G+K), 1 N(P+G)+NK/n,
        2 NP+N(G+K)/n, 3 N(P+G+K)/n, up to padding (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1).

        Args:
            shard: the rank's index in the shard group; padding may make the last ranks' optimizer states smaller.
            tier: count only what is stored there; None for all tiers.
        """
        return _summed(self.group_bytes_at_rest(group, shard, tier) for group in self.groups)

    def group_bytes_at_rest(self, group: GroupSpec, shard: int = 0, tier: Tier | None = None) -> dict[str, int]:
        """Return what `group` adds to `bytes_at_rest`; `shard` and `tier` are as there."""
        totals = {"param": 0, "grad": 0, "optimizer": 0}
        if group.is_experts:  # the shard of the rank that is the first along tp
            shard = shard * self.mesh.tp // self.mesh.ep
        for state in self.states:
            totals[state.role] += state.bytes_at_rest(group, shard, tier)
        if tier in (None, "device"):
            totals["param"] += self.secondary_bytes(group)
        if group.trainable and tier in (None, "device"):
            totals["grad"] += sum(each.residual_bytes for each in self.sums_of(group).values())
        return totals

    def secondary_bytes(self, group: GroupSpec) -> int:
        """Return the bytes of the secondary shard of `group` on a rank."""
        near = self.stage_of(group).secondary_shard
        if not near or group.is_stored_whole:
            return 0
        return group.num_shards // near * self.gather_bytes(group)

    def gather_codec(self, group: GroupSpec) -> WireCodec | None:
        """Return the codec by which the parameters of `group` are sent, and with which they are computed in every
        layout; None for as they are.
        """
        name = self.precision_of(group).gather
        if name == "param" or not group.is_encodable:
            return None
        from shardwise.layout.wire_codec import WireCodec

        return WireCodec(name)

    def gather_bytes(self, group: GroupSpec) -> int:
        """Return the bytes of one rank's shard of the parameters of `group` as it is sent."""
        codec, numel = self.gather_codec(group), group.shard_numel
        return numel * DTYPE_BYTES[self.precision_of(group).param] if codec is None else codec.num_bytes(numel)

    def bytes_by_tier(self, shard: int = 0) -> dict[Tier, dict[str, int]]:
        """Return `bytes_at_rest` of each tier that holds anything."""
        by_tier = {tier: self.bytes_at_rest(shard, tier) for tier in TIERS}
        return {tier: totals for tier, totals in by_tier.items() if any(totals.values())}

    def bytes_on_wire(self, num_micro_batches: int) -> dict[str, int]:
        """Return the bytes that a rank sends in one optimizer step, by collective, with ring algorithms.

        Parameters that are stored as shards are gathered for the forward and again for the backward of every
        micro-batch; without a pipeline, those of the root and of the last block stay unsharded in between and are
        gathered once. Replicas sum their shards once, in the last micro-batch. A pipeline that gathers once a batch
        also reduces once. Of the traffic between stages only the sums of tied parameters' gradients are counted:
        activations do not belong to the Layout. With secondary shards, what goes among the ranks that share them is
        apart, as `secondary_all_gather`: trained parameters are gathered from all ranks once a step, frozen ones in the
        first step alone, which is not counted. Neither the scalars of the step are counted, nor what a matrix optimizer
        sends to the owners of matrices and back, which is in bf16 on GPUs: `exchanged_numel`.
        """
        return _summed(self.group_bytes_on_wire(group, num_micro_batches) for group in self.groups)

    def group_bytes_on_wire(self, group: GroupSpec, num_micro_batches: int) -> dict[str, int]:
        """Return what `group` adds to `bytes_on_wire`."""
        wire = {"all_reduce": 0, "reduce_scatter": 0, "all_gather": 0}
        if self.secondary_bytes(group):
            wire["secondary_all_gather"] = 0
        for call in self.step_collectives(group, num_micro_batches):
            wire[call.wire_key] += call.sent_bytes(num_micro_batches)
        return wire

    def step_collectives(self, group: GroupSpec, num_micro_batches: int, times: int = 1) -> Iterator[StepCollective]:
        """Yield a step's collectives over the ranks that share the parameters of `group`, or of `times` such groups."""
        stage, num_shards, near = self.stage_of(group), group.num_shards, self.mesh_of(group).tp
        far = near * num_shards
        uses, param_bytes = self.num_unshards(group, num_micro_batches), num_shards * self.gather_bytes(group)
        is_near = uses > 0 and self.secondary_bytes(group) > 0
        is_once, is_first_far = uses == 1 and num_micro_batches > 1, is_near and group.trainable
        ranks, wire_key = (
            (self.stage.secondary_shard, "secondary_all_gather") if is_near else (num_shards, "all_gather")
        )
        if is_first_far or (group.trainable and stage.unshard_after_step):
            yield StepCollective("all_gather", param_bytes, num_shards, near, "first forward", "all_gather", times)
        elif is_once:
            yield StepCollective("all_gather", param_bytes, ranks, near, "first forward", wire_key, times)
        if uses and not is_once:
            back = uses // num_micro_batches // 2
            forth = uses // num_micro_batches - back
            if num_micro_batches == 1:
                forth, is_first_far = forth - is_first_far, False
            spared = times * is_first_far
            yield StepCollective("all_gather", param_bytes, ranks, near, "forward", wire_key, times * forth, spared)
            yield StepCollective("all_gather", param_bytes, ranks, near, "backward", wire_key, times * back)
        if not group.trainable:
            return
        if len(group.stages) > 1 and (num_holders := len(self.holders(group))) > 1:
            numel = group.padded_numel if stage.optimizer is Placement.REPLICATE else group.shard_numel
            num_bytes = numel * DTYPE_BYTES[self.precision_of(group).master]
            stride = self.mesh.world_size // self.mesh.pp
            yield StepCollective("all_reduce", num_bytes, num_holders, stride, "last backward", "all_reduce", times)
        each_time = self.num_reduces(num_micro_batches) == num_micro_batches > 1
        for over, total in self.sums_of(group).items():
            moment: Moment = "backward" if each_time and over == "shards" else "last backward"
            yield from total.collectives(far if over == "replicas" else near, moment, times)

    def exchanged_numel(self, group: GroupSpec) -> float:
        """Return the elements that a rank sends in a step, on average, so that owners step the matrices of a group."""
        num_parts = 1 if group.is_experts else group.num_parts  # each rank's experts are whole matrices
        num_owners = group.num_shards * num_parts
        if not group.is_matrix or num_owners == 1:
            return 0.0
        if self.stage_of(group).optimizer is Placement.REPLICATE:  # only parts that tp splits go to the owner
            split_numel = group.padded_numel * (num_parts - 1) / num_owners
            return split_numel + group.padded_numel * (num_owners - 1) / num_owners
        return 2.0 * group.shard_numel * (num_owners - 1) / num_owners

    def stage_of(self, group: GroupSpec) -> ZeroStage:
        """Return the placements of a group's states."""
        return group.stage_in(self.stage)

    def precision_of(self, group: GroupSpec) -> PrecisionPolicy:
        """Return the dtypes of a group's states."""
        return OPAQUE if group.is_opaque else self.precision.widened if group.is_wide else self.precision

    def sums_of(self, group: GroupSpec) -> Mapping[SumRanks, GradSum]:
        """Return the sums of a trained group's gradients over ranks, by their ranks."""
        return sums_of(group, self.stage_of(group), self.precision_of(group))

    def holders(self, group: GroupSpec) -> tuple[int, ...]:
        """Return the ranks of the pipeline that hold a group: several where a parameter is tied across a cut."""
        return (0,) if self.pipeline is None else self.pipeline.holders(group.stages)

    @property
    def ties(self) -> frozenset[tuple[int, ...]]:
        """Return each set of pipeline ranks that hold a parameter which is tied across a cut."""
        holders = (self.holders(group) for group in self.model_groups)
        return frozenset(holder for holder in holders if len(holder) > 1)

    def num_unshards(self, group: GroupSpec, num_micro_batches: int) -> int:
        """Return how often a step gathers a group for use; the root and the last block stay between their two uses.

        In a pipeline, other micro-batches come between a forward and its backward, so no group stays.
        """
        if not self.stage.unshard_for_use or group.is_stored_whole:
            return 0
        if self.pipeline is not None:
            num_uses = 2 * num_micro_batches * len(self.pipeline.held.intersection(group.stages))
            return 1 if self.pipeline.gathers_once else num_uses
        once = {ROOT, self.units[-1] if self.units else ROOT}
        return num_micro_batches * (1 if group.unit in once else 2)

    def num_reduces(self, num_micro_batches: int) -> int:
        """Return how often a step reduces the gradients of a group over the shard group."""
        is_scheduled_once = self.pipeline is not None and self.pipeline.gathers_once
        return num_micro_batches if self.stage.reduce_each_backward and not is_scheduled_once else 1

    def bytes_across(self, num_micro_batches: int) -> dict[tuple[Tier, Tier], int]:
        """Return the bytes that one optimizer step moves between tiers on one rank, by (from, to).

        With S elements in this rank's slice of a group, and P, G, K bytes an element of parameter, gradient and all of
        the optimizer's states (Rajbhandari et al. 2021, arXiv 2104.07857, section 4, gives the same terms): a gather
        brings S*P to the device. A reduction takes S*G away; one that is not a step's first reads S*G of a gradient on
        NVMe, to add to it. The step runs on the device or the host: it takes S*G from the gradient's tier, reads and
        writes S*K of an optimizer on NVMe, and writes S*P to the parameters' tier; without a master it reads them
        there too. What goes from device to NVMe or back crosses twice, through the host.
        """
        return _summed(self.group_bytes_across(group, num_micro_batches) for group in self.groups)

    def group_bytes_across(self, group: GroupSpec, num_micro_batches: int) -> dict[tuple[Tier, Tier], int]:
        """Return what `group` adds to `bytes_across`."""
        across: Counter[tuple[Tier, Tier]] = Counter()
        if not group.tiers.are_away:
            return {}
        tiers, numel = group.tiers, group.shard_numel
        precision = self.precision_of(group)
        param_bytes, grad_bytes = (numel * DTYPE_BYTES[dtype] for dtype in (precision.param, precision.accumulate))
        for _ in range(self.num_unshards(group, num_micro_batches)):
            _cross(across, tiers.params, "device", param_bytes)
        if not group.trainable:
            return dict(across)
        for index in range(self.num_reduces(num_micro_batches)):
            _cross(across, "device", tiers.grads, grad_bytes)
            if index > 0 and tiers.grads == "nvme":
                _cross(across, "nvme", "host", grad_bytes)
        steps_on: Tier = "device" if tiers.optimizer == "device" else "host"
        _cross(across, tiers.grads, steps_on, grad_bytes)
        kept = [state for state in self.states if state.role == "optimizer" and state.is_kept_by(group)]
        kept_bytes = numel * sum(DTYPE_BYTES[state.dtype_in(group)] for state in kept)
        _cross(across, tiers.optimizer, steps_on, kept_bytes)
        _cross(across, steps_on, tiers.optimizer, kept_bytes)
        if not any(state.name == "master" for state in kept):  # the step updates the parameters themselves
            _cross(across, tiers.params, steps_on, param_bytes)
        _cross(across, steps_on, tiers.params, param_bytes)
        return dict(across)


def states_of(
    stage: ZeroStage, policy: PrecisionPolicy, optimizer: OptimizerConfig, groups: Sequence[GroupSpec]
) -> tuple[StateSpec, ...]:
    """Return the states that groups store between their uses.

    Args:
        optimizer: config section that names the optimizer.
    """
    states = [
        StateSpec("param", "param", policy.param, stage.params),
        StateSpec("grad", "grad", policy.accumulate, stage.grads),
    ]
    # With shares on the device, a group's parameters and optimizer may be in two tiers though both keys name one.
    if policy.keeps_master or any(group.trainable and group.tiers.params != group.tiers.optimizer for group in groups):
        is_copy = not policy.keeps_master
        states.append(StateSpec("master", "optimizer", policy.master, stage.optimizer, is_copy_of_param=is_copy))
    if policy.gather != "param":
        kept_by: Final = "stored whole" if stage.unshard_for_use else "all"
        states.append(StateSpec("exact", "param", policy.param, stage.optimizer, exact_of=kept_by))
    of_matrices = matrix_state_names(optimizer.name)
    kept = [(name, False if of_matrices else None) for name in state_names(optimizer)]
    states += [
        StateSpec(
            name,
            "optimizer",
            policy.master,
            stage.optimizer,
            is_flat=False,
            codec=_codec_of(name, policy.states),
            of_matrices=is_of_matrices,
        )
        for name, is_of_matrices in (*kept, *((name, True) for name in of_matrices))
    ]
    return tuple(states)


def _codec_of(state: str, dtype: StatesDtype) -> Codec | None:
    if dtype == "master":
        return None
    from shardwise.layout.codec import codec_of

    return codec_of(state, dtype)


def _summed(each: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    totals: dict[Key, int] = {}
    for part in each:
        for key, num_bytes in part.items():
            totals[key] = totals.get(key, 0) + num_bytes
    return totals


def _cross(across: Counter[tuple[Tier, Tier]], source: Tier, target: Tier, num_bytes: int) -> None:
    """Add the bytes of one move from tier to tier; between device and NVMe it goes through the host."""
    way = TIERS[min(map(TIERS.index, (source, target))) : max(map(TIERS.index, (source, target))) + 1]
    if source != way[0]:
        way = way[::-1]
    across.update(dict.fromkeys(pairwise(way), num_bytes))


def assign_tiers(groups: Sequence[GroupSpec], config: TiersConfig) -> tuple[GroupSpec, ...]:
    """Return the groups, which are in forward order, each with the tiers of its states.

    Args:
        config: a tier for each state, and the largest share of it, by elements, that stays on the device.
    """
    sharded = [group for group in groups if not group.is_replicated]  # what stays whole is small, or frozen
    trainable = [group for group in sharded if group.trainable]
    params = _chosen(sharded, config.params, config.params_on_device)
    grads = _chosen(trainable, config.grads, config.grads_on_device)
    optimizer = _chosen(trainable, config.optimizer, config.optimizer_on_device)
    every = [(group, GroupTiers(params(group), grads(group), optimizer(group))) for group in groups]
    return tuple(group if group.tiers == tiers else replace(group, tiers=tiers) for group, tiers in every)


def assign_tiers_by_rank(
    groups: Sequence[GroupSpec], config: TiersConfig, rank_of: Callable[[GroupSpec], int]
) -> tuple[GroupSpec, ...]:
    """Apply `assign_tiers` to the groups of each pipeline rank: the shares are those of its own states.

    Args:
        groups: groups of all ranks, in forward order.
        rank_of: returns the pipeline rank that holds a group, the first of several.
    """
    by_rank = defaultdict[int, list[GroupSpec]](list)
    for group in groups:
        by_rank[rank_of(group)].append(group)
    assigned = {group.name: group for held in by_rank.values() for group in assign_tiers(held, config)}
    return tuple(assigned[group.name] for group in groups)


def _chosen(groups: Sequence[GroupSpec], tier: Tier, share: float) -> Callable[[GroupSpec], Tier]:
    away: set[str] = set()
    budget = round(share * sum(group.padded_numel for group in groups))
    for group in groups:
        if group.padded_numel <= budget:
            budget -= group.padded_numel
        else:
            away.add(group.name)
    return lambda group: tier if group.name in away else "device"
