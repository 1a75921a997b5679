"""Check which values of different sections do not fit together. Each check yields error codes and messages,
which `shardwise.config.resolve` raises.

>>> from shardwise.config.sections import RecomputeConfig, TiersConfig, ZeroConfig
>>> list(wrong_tiers(TiersConfig(optimizer="host"), ZeroConfig(stage=2), RecomputeConfig()))
[]
>>> for code, message in wrong_tiers(TiersConfig(params="host"), ZeroConfig(stage=2), RecomputeConfig()):
...     print(code, message, sep="\\n")
tier-needs-stage-3
tiers.params=host needs zero.stage=3, which gathers parameters for their use, not 2; set zero.stage=3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from shardwise.config.sections import (
    MAX_PIPELINE_CELLS,
    AttentionConfig,
    CompileConfig,
    ContextConfig,
    MeshConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    RunConfig,
    TiersConfig,
    ZeroConfig,
)
from shardwise.schedule.pipelines import RECIPES


def wrong_tiers(tiers: TiersConfig, zero: ZeroConfig, recompute: RecomputeConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message (value, rule and fix on one line) for each tier that cannot be or would do nothing.

    Args:
        zero: its stage decides which states can be moved.
        recompute: offloaded activations are the inputs of recomputed blocks.
    """
    states = {"params": tiers.params, "grads": tiers.grads, "optimizer": tiers.optimizer}
    shares = {
        "params": tiers.params_on_device,
        "grads": tiers.grads_on_device,
        "optimizer": tiers.optimizer_on_device,
    }
    away = {state: tier for state, tier in states.items() if tier != "device"}
    for state, tier in away.items():
        if zero.stage == 0:
            rule = "needs zero.stage=1 or more, in which each rank has a slice to move, not 0"
            yield "tier-needs-shards", f"tiers.{state}={tier} {rule}; set zero.stage={3 if 'params' in away else 2}"
    if "params" in away and zero.stage in (1, 2):
        rule = f"needs zero.stage=3, which gathers parameters for their use, not {zero.stage}"
        yield "tier-needs-stage-3", f"tiers.params={tiers.params} {rule}; set zero.stage=3"
    for state, share in shares.items():
        if share > 0 and state not in away:
            rule = f"is a share of what another tier stores, and the device stores all {state}"
            yield (
                "share-without-tier",
                f"tiers.{state}_on_device={share} {rule}; set tiers.{state}=host or leave the share out",
            )
    on_nvme = [state for state, tier in away.items() if tier == "nvme"]
    if on_nvme and not tiers.nvme_path:
        fix = "set tiers.nvme_path to one on a local disk"
        yield "no-swap-folder", f"tiers.{on_nvme[0]}=nvme needs a folder for the files of the states; {fix}"
    if tiers.nvme_path is not None and not on_nvme:
        fix = "set tiers.optimizer=nvme or leave the path out"
        yield (
            "path-without-nvme",
            f"tiers.nvme_path={tiers.nvme_path} is the folder of states on NVMe, and none is stored there; {fix}",
        )
    if tiers.activations != "device" and recompute.mode == "none":
        rule = "moves the inputs of recomputed blocks, and recompute.mode=none recomputes none"
        yield "activations-need-recompute", f"tiers.activations={tiers.activations} {rule}; set recompute.mode=full"


def wrong_zero(zero: ZeroConfig, tiers: TiersConfig, precision: PrecisionConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message where secondary shards would do nothing.

    Args:
        precision: encoded sums of gradients run within the ranks that share secondary shards first, in every stage.
    """
    key = f"zero.secondary_shard={zero.secondary_shard}"
    if zero.secondary_shard and zero.stage < 3 and precision.reduce in ("param", "fp32"):
        rule = f"keeps what stage 3 gathers, and zero.stage={zero.stage} gathers nothing for use"
        yield "secondary-shard-stage", f"{key} {rule}; set zero.stage=3 or leave the key out"
    elif zero.secondary_shard and tiers.params != "device":
        rule = f"keeps parameters on the device, and tiers.params={tiers.params} moves them away"
        yield "secondary-shard-tier", f"{key} {rule}; set tiers.params=device or leave the key out"


def wrong_feedback(precision: PrecisionConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message where feedback has no encoding whose rounding it could keep."""
    if precision.reduce_feedback and precision.reduce in ("param", "fp32"):
        yield (
            "feedback-without-codes",
            f"precision.reduce_feedback keeps what codes round off, and precision.reduce={precision.reduce} sends "
            "values; set precision.reduce=int4 or leave it out",
        )


def wrong_linears(precision: PrecisionConfig, mesh: MeshConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message where the scales of fp8 would depend on how a layer is split."""
    if precision.linears != "keep" and mesh.tp > 1:
        yield (
            "fp8-split",
            f"precision.linears={precision.linears} scales whole rows of a layer, and mesh.tp={mesh.tp} splits them; "
            "set mesh.tp=1 and zero.stage=3, or precision.linears=keep",
        )


def wrong_pipeline(
    pipeline: PipelineConfig, mesh: MeshConfig, zero: ZeroConfig, compile_config: CompileConfig
) -> Iterator[tuple[str, str]]:
    """Yield a code and a message for each pipeline setting that cannot be or would do nothing.

    >>> from shardwise.config.sections import CompileConfig, MeshConfig, PipelineConfig
    >>> zb, compiled = PipelineConfig(schedule="zb-h1"), CompileConfig(enabled=True)
    >>> next(wrong_pipeline(zb, MeshConfig(pp=2), ZeroConfig(), compiled))[1].partition(";")[2]
    ' set compile.enabled=false, or pipeline.schedule=1f1b'

    Args:
        mesh: only `pp` of it matters, and of `zero` only the stage and `lockstep`.
    """
    if mesh.pp == 1:
        defaults = PipelineConfig()
        for key, value in pipeline:
            if value != getattr(defaults, key):
                rule = "says how stages are laid over the ranks of a pipeline, and mesh.pp=1 has none"
                yield (
                    "pipeline-needs-stages",
                    f"pipeline.{key}={value} {rule}; set mesh.pp to 2 or more, or leave the key out",
                )
        return
    if zero.lockstep is True:
        rule = "gathers every block once a forward, and in a pipeline each rank has some of them"
        yield "lockstep-in-pipeline", f"zero.lockstep=true {rule}; set zero.lockstep=false"
    if compile_config.enabled and RECIPES[pipeline.schedule].splits_backward:
        rule = f"compiles backwards whole, and pipeline.schedule={pipeline.schedule} splits them"
        yield (
            "compile-with-zero-bubble",
            f"compile.enabled=true {rule}; set compile.enabled=false, or pipeline.schedule=1f1b",
        )
    if pipeline.gather == "micro-batch" and zero.stage < 3:
        rule = (
            f"is how parameters that are stored as shards are gathered, and in zero.stage={zero.stage} they are whole"
        )
        yield "gather-needs-stage-3", f"pipeline.gather=micro-batch {rule}; set zero.stage=3, or leave the key out"


def wrong_schedule_size(
    num_micro_batches: int, pipeline: PipelineConfig, mesh: MeshConfig, max_cells: int = MAX_PIPELINE_CELLS
) -> Iterator[tuple[str, str]]:
    """Yield a code and a message where a schedule has more forwards than `max_cells`: it would take minutes to build.

    >>> from shardwise.config.sections import MeshConfig, PipelineConfig
    >>> next(wrong_schedule_size(10**6, PipelineConfig(), MeshConfig(pp=2)))[1].partition(";")[2]
    ' use batch.accumulation=200,000 or less'

    Args:
        num_micro_batches: of a step (the resolved `batch.accumulation`).
        pipeline: for the number of virtual stages.
        max_cells: the most forwards of a schedule, over all stages and micro-batches.
    """
    num_cells = mesh.pp * pipeline.virtual_stages * num_micro_batches
    if mesh.pp > 1 and num_cells > max_cells:
        most = max_cells // mesh.pp // pipeline.virtual_stages
        fix = f"use batch.accumulation={most:,} or less" if most else f"use mesh.pp={max_cells:,} or less"
        rule = f"make a schedule of {num_cells:,} forwards, more than {max_cells:,}"
        yield "schedule-too-large", f"mesh.pp={mesh.pp} and {num_micro_batches:,} micro-batches {rule}; {fix}"


def wrong_chunks(
    context: ContextConfig, pipeline: PipelineConfig, compile_config: CompileConfig
) -> Iterator[tuple[str, str]]:
    """Yield a code and a message for each setting that would undo what `context.chunk_tokens` does.

    >>> from shardwise.config.sections import CompileConfig, ContextConfig, PipelineConfig
    >>> chunks, compiled = ContextConfig(chunk_tokens=8), CompileConfig(enabled=True)
    >>> next(wrong_chunks(chunks, PipelineConfig(), compiled))[1].partition(";")[2]
    ' set compile.enabled=false or leave context.chunk_tokens out'

    Args:
        context: for `chunk_tokens`; None needs no check.
        compile_config: compiled blocks decide themselves what they keep.
    """
    if context.chunk_tokens is None:
        return
    key = f"context.chunk_tokens={context.chunk_tokens}"
    if compile_config.enabled:
        rule = "recomputes parts of a block, and compiled blocks decide what they keep"
        yield "chunks-with-compile", f"{key} {rule}; set compile.enabled=false or leave context.chunk_tokens out"
    if RECIPES[pipeline.schedule].splits_backward:
        rule = f"keeps no inner states, and pipeline.schedule={pipeline.schedule} holds them for gradients of weights"
        yield "chunks-with-zero-bubble", f"{key} {rule}; set pipeline.schedule=1f1b or leave context.chunk_tokens out"


# Keys of `context` that also apply on one rank.
_OF_LONG_SEQUENCES: Final = frozenset({"chunk_tokens"})


def wrong_context(context: ContextConfig, mesh: MeshConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message for each setting of how sequences are split that cannot be or would do nothing.

    >>> from shardwise.config.sections import ContextConfig, MeshConfig
    >>> next(wrong_context(ContextConfig(heads_over=4), MeshConfig(cp=6)))
    ('heads-over-divides-cp', 'context.heads_over=4 does not divide mesh.cp=6; nearest legal: 3, 6')
    """
    if mesh.cp == 1:
        defaults = ContextConfig()
        for key, value in context:
            if value != getattr(defaults, key) and key not in _OF_LONG_SEQUENCES:
                rule = "says how sequences are split over ranks, and mesh.cp=1 splits none"
                yield (
                    "context-needs-cp",
                    f"context.{key}={value} {rule}; set mesh.cp to 2 or more, or leave the key out",
                )
        return
    if context.heads_over is None:
        return
    if mesh.cp % context.heads_over:
        divisors = [degree for degree in range(1, mesh.cp + 1) if mesh.cp % degree == 0]
        below = [degree for degree in divisors if degree < context.heads_over][-1:]
        above = [degree for degree in divisors if degree > context.heads_over][:1]
        legal = ", ".join(map(str, below + above))
        yield (
            "heads-over-divides-cp",
            f"context.heads_over={context.heads_over} does not divide mesh.cp={mesh.cp}; nearest legal: {legal}",
        )
    elif context.transport == "ulysses" and context.heads_over != mesh.cp:
        rule = f"is less than mesh.cp={mesh.cp}, and context.transport=ulysses exchanges heads over all ranks"
        yield (
            "heads-over-in-ulysses",
            f"context.heads_over={context.heads_over} {rule}; leave it out, or set context.transport=ring",
        )
    elif context.transport != "ulysses" and context.heads_over == mesh.cp:
        rule = f"leaves context.transport={context.transport} nothing to carry, as mesh.cp={mesh.cp}"
        yield (
            "heads-over-all-ranks",
            f"context.heads_over={context.heads_over} {rule}; set context.transport=ulysses, or fewer ranks",
        )


_OF_HEADS: Final = ("block", "different_layout_per_head")
ATTENTION_KEYS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "dense": (),
        "fixed": (
            *_OF_HEADS,
            "num_local_blocks",
            "num_global_blocks",
            "horizontal_global_attention",
            "num_different_global_patterns",
        ),
        "variable": (
            *_OF_HEADS,
            "num_random_blocks",
            "local_window_blocks",
            "global_block_indices",
            "global_block_end_indices",
            "horizontal_global_attention",
            "seed",
        ),
        "bigbird": (*_OF_HEADS, "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks", "seed"),
        "bslongformer": (
            *_OF_HEADS,
            "num_sliding_window_blocks",
            "global_block_indices",
            "global_block_end_indices",
        ),
        "sliding-window": ("block", "num_sliding_window_blocks"),
    }
)
"""The keys of `attention` that each of its kinds has."""


def wrong_attention(attention: AttentionConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message for each key that this kind of attention does not have.

    >>> from shardwise.config.sections import AttentionConfig
    >>> next(wrong_attention(AttentionConfig(seed=2)))[1].partition(";")[0]
    'attention.seed=2 is a key of variable, bigbird, and attention.kind=dense has none'
    """
    keys, defaults = ATTENTION_KEYS[attention.kind], AttentionConfig()
    for key, value in attention:
        if key == "kind" or key in keys or value == getattr(defaults, key):
            continue
        kinds = [attention_kind for attention_kind, its in ATTENTION_KEYS.items() if key in its]
        rule = f"is a key of {', '.join(kinds)}, and attention.kind={attention.kind} has {', '.join(keys) or 'none'}"
        yield (
            "attention-key-of-kind",
            f"attention.{key}={value} {rule}; set attention.kind={kinds[0]} or leave the key out",
        )


def wrong_run(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield a code and a message for each setting of a run that cannot be."""
    first, last = run.profile_steps or (1, 1)
    if first > last:
        yield (
            "profile-window-empty",
            f"run.profile_steps=[{first}, {last}] ends before it begins; give the first and the last step, such as "
            f"[{last}, {first}]",
        )
