"""Makes the job of a verification: a run's config, checked as it is, then scaled down for local processes to train.

>>> config = Config.from_dict({"model": {"preset": "llama-3-70b"}, "mesh": {"pp": 8, "dp_shard": 8, "tp": 8},
...                            "batch": {"micro_size": 1, "accumulation": 32}})
>>> job = make_job(config, None)
>>> job.world_size, job.config.batch.accumulation
(16, 12)
>>> job.folded
('pp 8 -> 4', 'dp_shard 8 -> 2', 'tp 8 -> 2', 'micro-batches 32 -> 12')
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Self

from torch import nn

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, ContextConfig, PrecisionConfig, ResolvedConfig
from shardwise.construction.scan import find_units
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import AXES, MeshShape
from shardwise.models import DecoderConfig, decoder_config
from shardwise.models.shrink import (
    SMALL_NUM_EXPERTS,
    ModelSizes,
    Scale,
    read_huggingface,
    shrink_decoder,
    shrink_huggingface,
    shrink_seq_len,
)
from shardwise.schedule.pipelines import placement_of
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train.setup import check_job, job_layout
from shardwise.verify.model import ModelSpec, build_skeleton, expert_sizes

MOST_PROCESSES: Final = 16
_MOST_VIRTUAL_STAGES: Final = 2
# With four ranks a pipeline has a first, a last, and two whose neighbours are both inner ones or ends.
_MOST_PP: Final = 4
# Where the product is still too large, these axes shrink in this order: axis, from, to. A mesh in which all five axes
# are in use fits only without its replicas.
_SHRINKS: Final = (("tp", 4, 2), ("pp", 4, 3), ("pp", 3, 2), ("dp_replicate", 2, 1))

# What rounds. Of codecs all parameters of the copy are too small to see more than that `precision.gather` stores such
# parameters whole: the proof would then be one of no sharding.
_ROUNDS: Final = ("linears", "states", "gather", "reduce", "reduce_feedback")


def fold_mesh(mesh: MeshShape, num_kv_heads: int | None = None, most: int = MOST_PROCESSES) -> MeshShape:
    """Return the smallest mesh in which every axis of several ranks still has several.

    Such an axis gets 2 ranks, but `pp` up to 4, so that its schedule has inner ranks. `tp` gets 4 where its ranks share
    several KV heads, so that some ranks share a head and some do not. Experts stay divided, over more than the ranks
    of `dp_shard` where they are.

    Args:
        num_kv_heads: the model's KV heads; None where they do not matter.
        most: the most ranks of the folded mesh.

    Raises:
        ConfigError: the folded mesh does not fit into `most`.
    """
    shares_some = num_kv_heads is not None and 1 < num_kv_heads < mesh.tp
    limits = {**dict.fromkeys(AXES, 2), "pp": _MOST_PP, "tp": 4 if shares_some else 2}
    sizes = {axis: min(size, limits[axis]) for axis, size in zip(AXES, mesh.sizes, strict=True)}
    for axis, size, smaller in _SHRINKS:
        # Replicas go only where nothing else can, and never for a limit that the user has set.
        may_shrink = smaller > 1 or most == MOST_PROCESSES
        if may_shrink and sizes[axis] == size and MeshShape(**sizes).world_size > most:
            sizes[axis] = smaller
    folded = MeshShape(**sizes)
    if folded.world_size > most:
        used = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigError(
            "too-few-processes",
            f"{most} processes do not hold {used} = {folded.world_size}, which the layout's axes need at least; "
            f"allow {folded.world_size}",
        )
    is_over_others = mesh.ep > mesh.dp_shard
    ep = 1 if mesh.ep == 1 else math.gcd(folded.num_model_ranks, SMALL_NUM_EXPERTS if is_over_others else 2)
    return replace(folded, ep=ep)


def fold_micro_batches(num_micro_batches: int, num_ranks: int, num_folded_ranks: int) -> int:
    """Return enough micro-batches a step to bring a folded pipeline into its steady state: 2 p + 1 or a few more.

    Even numbers stay even and odd ones odd; multiples of the pipeline's ranks stay multiples where both are possible.

    Args:
        num_micro_batches: the run's; it is never exceeded.
        num_folded_ranks: ranks of the folded pipeline, p.
    """
    enough = 2 * num_folded_ranks + 1
    if num_micro_batches <= enough:
        return num_micro_batches
    fits = range(enough, enough + 2 * num_folded_ranks)
    same_parity = [number for number in fits if number % 2 == num_micro_batches % 2]
    is_multiple = num_micro_batches % num_ranks == 0
    same_kind = [number for number in same_parity if (number % num_folded_ranks == 0) == is_multiple]
    return min(num_micro_batches, (same_kind or same_parity)[0])


DEFAULT_STEPS = 3
_MOST_MICRO_SIZE = 2
_MOST_CHUNKS = 3
_MOST_CHUNK_TOKENS = 5
# What changes in these is part of where and how the ranks run, or is said as the mesh's and the model's changes.
_OWN_SECTIONS: Final = frozenset({"mesh", "run", "tiers"})
_SAID_ELSEWHERE: Final = frozenset({"batch.accumulation", "batch.global_size", "pipeline.virtual_stages"})
# When a rank fails, the others end within this time.
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class VerifyJob:
    """Holds a small run, and what makes it small.

    Attributes:
        folded: the changes to the mesh, one an entry.
        replaced: all other changes to the run.
    """

    config: Config
    world_size: int
    model: ModelSpec
    seq_len: int
    num_steps: int
    folded: tuple[str, ...] = ()
    shrunk: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write the job as JSON, which the ranks read."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values | {"config": json.loads(self.config.to_json()), "model": asdict(self.model)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        notes = {name: tuple(values[name]) for name in ("folded", "shrunk", "replaced")}
        config, model = Config.from_dict(values["config"]), ModelSpec(**values["model"])
        return cls(**{**values, **notes, "config": config, "model": model})


def make_job(
    config: Config,
    world_size: int | None,
    *,
    huggingface: Mapping[str, Any] | None = None,
    num_steps: int = DEFAULT_STEPS,
    most_processes: int = MOST_PROCESSES,
) -> VerifyJob:
    """Check a run's layout at its own size, and scale it down.

    Args:
        config: the config as the user wrote it.
        world_size: the run's ranks; None takes them from the mesh, where an unknown `dp_shard` counts as 2.
        huggingface: the values of a `config.json`, whose model replaces the config's; None keeps the config's.
        most_processes: the most processes that may be started.

    Raises:
        ConfigError: the run's own config is wrong, with the message that the run would give; or its mesh does not fold
            into so many processes, or its model has sizes of unknown names.
    """
    if num_steps < 1:
        raise ConfigError("steps-below-one", f"--steps {num_steps} trains nothing; give at least 1")
    config, world_size, assumed = _assume_world(config, world_size)
    spec = ModelSpec("huggingface", dict(huggingface)) if huggingface is not None else _decoder_spec(config)
    resolved = _check_run(config, world_size, spec)
    mesh = MeshShape.from_config(resolved.mesh)
    sizes = _sizes(spec)
    folded = fold_mesh(mesh, sizes.num_kv_heads, most_processes)
    virtual_stages = min(config.pipeline.virtual_stages, _MOST_VIRTUAL_STAGES)
    recipe, pipeline = config.pipeline.schedule, config.pipeline
    scale = Scale(
        mesh,
        folded,
        placement_of(recipe, mesh.pp, pipeline.virtual_stages).num_stages if mesh.pp > 1 else 1,
        placement_of(recipe, folded.pp, virtual_stages).num_stages if mesh.pp > 1 else 1,
        config.recompute.every,
    )
    small = _shrink_model(spec, scale, config.data.seq_len)
    small_config, replaced = _small_config(resolved, folded, virtual_stages, num_steps, small)
    seq_len = shrink_seq_len(config.data.seq_len, scale)
    changes = [
        *((axis, size, folded_size) for axis, size, folded_size in zip(AXES, mesh.sizes, folded.sizes, strict=True)),
        ("ep", mesh.ep, folded.ep),
        ("virtual stages", pipeline.virtual_stages, virtual_stages),
        ("micro-batches", resolved.batch.accumulation, small_config.batch.accumulation),
    ]
    sizes_before, sizes_after = (list(asdict(model_sizes).values()) for model_sizes in (sizes, _sizes(small)))
    names = ("layers", "hidden", "heads", "KV heads", "head", "feed-forward", "vocabulary")
    shrunk = [*zip(names, sizes_before, sizes_after, strict=False), ("sequence", config.data.seq_len, seq_len)]
    return VerifyJob(
        small_config,
        folded.world_size,
        small,
        seq_len,
        num_steps,
        (*_changed(changes), *assumed),
        _changed(shrunk),
        tuple(replaced),
    )


def small_layout(job: VerifyJob) -> Layout:
    """Return the layout of the small run.

    Raises:
        ConfigError: the small run has no layout although the run has one.
    """
    try:
        return plan_layout(build_skeleton(job.model), job.config.resolve(job.world_size))
    except ConfigError as error:
        raise ConfigError(error.code, f"the run has a layout but its small copy has none: {error}") from error


def _assume_world(config: Config, world_size: int | None) -> tuple[Config, int, tuple[str, ...]]:
    """Return a config whose every axis has a size, the world size, and what had to be assumed."""
    if world_size is None:
        world_size = config.run.num_procs
    if world_size is not None:
        return config, world_size, ()
    mesh = config.mesh.model_copy(update={"dp_replicate": config.mesh.dp_replicate or 1})
    assumed: tuple[str, ...] = ()
    batch = config.batch
    if mesh.dp_shard is None:
        mesh = mesh.model_copy(update={"dp_shard": 2})
        assumed = ("dp_shard taken as 2: neither mesh.dp_shard nor --world-size says it",)
        if batch.global_size is not None and batch.micro_size is not None:
            batch = batch.model_copy(update={"global_size": None})
    config = config.model_copy(update={"mesh": mesh, "batch": batch})
    return config, MeshShape.from_config(mesh).world_size, assumed


def _check_run(config: Config, world_size: int, model: ModelSpec) -> ResolvedConfig:
    """Resolve the run's config, and plan its model's layout at its own size, on meta."""
    if model.kind == "decoder":
        return check_job(config, world_size)[0]
    resolved = config.resolve(world_size)
    job_layout(build_skeleton(model), resolved)
    return resolved


def _decoder_spec(config: Config) -> ModelSpec:
    shape = decoder_config(config.model, max_seq_len=config.data.seq_len, attention=config.attention)
    return ModelSpec("decoder", shape.values())


def _sizes(model: ModelSpec) -> ModelSizes:
    if model.kind == "huggingface":
        return read_huggingface(model.values)
    return ModelSizes(**{field.name: model.values[field.name] for field in fields(ModelSizes)})


def _shrink_model(model: ModelSpec, scale: Scale, seq_len: int) -> ModelSpec:
    if model.kind == "huggingface":
        return ModelSpec(model.kind, shrink_huggingface(model.values, scale, seq_len))
    return ModelSpec(model.kind, shrink_decoder(DecoderConfig.from_values(model.values), scale).values())


def _small_config(
    resolved: ResolvedConfig, folded: MeshShape, virtual_stages: int, num_steps: int, model: ModelSpec
) -> tuple[Config, list[str]]:
    """Return the small run's config, and the changes from the run's besides mesh and model."""
    skeleton = build_skeleton(model)
    sizes, experts = expert_sizes(skeleton), resolved.experts
    skew = min(experts.skew, sizes.num_experts / sizes.num_chosen) if sizes is not None else 1.0
    accumulation = fold_micro_batches(resolved.batch.accumulation or 1, resolved.mesh.pp, folded.pp)
    attention = DecoderConfig.from_values(model.values).attention if model.kind == "decoder" else resolved.attention
    updates: dict[str, dict[str, Any]] = {
        "batch": {
            "micro_size": min(resolved.batch.micro_size or 1, _MOST_MICRO_SIZE),
            "accumulation": accumulation,
            "global_size": None,
        },
        "mesh": {**dict(zip(AXES, folded.sizes, strict=True)), "ep": folded.ep},
        "precision": {"param": "fp64", **{key: getattr(PrecisionConfig(), key) for key in _ROUNDS}},
        "zero": {
            "blocks": _matching(skeleton, resolved.zero.blocks),
            "secondary_shard": min(resolved.zero.secondary_shard, 1),  # more are no fewer than the folded ranks
        },
        "tiers": {"bind_cores": False, "cores": None, "pin_memory": False},
        "experts": {"replay": sizes is not None and (experts.replay or skew > 1), "skew": skew},
        "attention": {"block": attention.block},
        "tensor": {"overlap_chunks": min(resolved.tensor.overlap_chunks, _MOST_CHUNKS)},
        "context": _small_context(resolved.context),
        "pipeline": {
            "virtual_stages": virtual_stages,
            "cut": None,
            "units": _matching(skeleton, resolved.pipeline.units),
            "unit_seconds": None,
        },
        "scheduler": {"warmup_steps": min(resolved.scheduler.warmup_steps, 1), "total_steps": None},
        "compile": {"enabled": False},
        "run": {
            "steps": num_steps,
            "device": "cpu",
            "num_procs": None,
            "num_threads": 1,
            "timeout_s": min(resolved.run.timeout_s, _TIMEOUT_S),
        },
    }
    sections = {name: getattr(resolved, name).model_copy(update=update) for name, update in updates.items()}
    small = resolved.with_sections(sections)
    return small, list(_replaced(resolved, small))


def _small_context(context: ContextConfig) -> dict[str, Any]:
    """Return the changes for a `cp` axis of two ranks, which has no teams, and for a short sequence's chunks."""
    chunk_tokens = context.chunk_tokens and min(context.chunk_tokens, _MOST_CHUNK_TOKENS)
    return {"heads_over": None, "chunk_tokens": chunk_tokens}


def _replaced(run: Config, small: Config) -> Iterator[str]:
    for section in (section_name for section_name in Config.model_fields if section_name not in _OWN_SECTIONS):
        before = getattr(run, section)
        for leaf, after in getattr(small, section):
            if getattr(before, leaf) != after and f"{section}.{leaf}" not in _SAID_ELSEWHERE:
                change = "left out" if after is None else f"{_shown(getattr(before, leaf))} -> {_shown(after)}"
                yield f"{section}.{leaf} {change}"
    if run.tiers.nvme_path is not None:
        yield "tiers.nvme_path -> a temporary folder"


def _matching(model: nn.Module, patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return those of some patterns that a small model has modules for; None where it has none."""
    matching, modules = [], dict(model.named_modules())
    for pattern in patterns or ():
        with suppress(ConfigError):
            find_units(modules, [pattern])
            matching.append(pattern)
    return tuple(matching) or None


def _changed(changes: Sequence[tuple[str, Any, Any]]) -> tuple[str, ...]:
    return tuple(f"{name} {_shown(before)} -> {_shown(after)}" for name, before, after in changes if before != after)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
