"""The sections of the config: keys, types, ranges and defaults, and nothing that computes.

`shardwise.config.resolve` puts them together and is where these names are imported from.

>>> ZeroConfig().stage
2
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_RANKS: Final = 10**6
MAX_LAYERS: Final = 2_000
MAX_MICRO_BATCHES: Final = 10**6
# A pipeline's schedule is built and simulated action by action, about 10,000 of them a second.
MAX_PIPELINE_CELLS: Final = 400_000

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Tier = Literal["device", "host", "nvme"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# Upper bounds are far above what anybody trains, and low enough that no number stalls or breaks the checks.
Positive = Annotated[int, Field(ge=1, le=10**12)]
NotNegative = Annotated[int, Field(ge=0, le=10**12)]
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
MicroBatches = Annotated[int, Field(ge=1, le=MAX_MICRO_BATCHES)]
Layers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Field(ge=1, le=10**7)]
Tokens = Annotated[int, Field(ge=1, le=10**9)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
TimeoutSeconds = Annotated[float, Field(ge=0.1, le=1e7)]
# Strict would refuse lists, but TOML and JSON know no tuples.
Betas = Annotated[tuple[BelowOne, BelowOne], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Cores = Annotated[tuple[NotNegative, ...], Field(strict=False, min_length=1)]
Blocks = Annotated[tuple[Positive, ...], Field(strict=False)]
Indices = Annotated[tuple[NotNegative, ...], Field(strict=False)]


class ModelConfig(Section):
    """The model of `shardwise train`: a preset, and what differs from it. The library API ignores this section."""

    preset: str = "tiny"
    num_layers: Layers | None = None
    hidden_size: Width | None = None
    num_heads: Width | None = None
    num_kv_heads: Width | None = None
    ffn_size: Width | None = None
    vocab_size: Width | None = None
    tie_embeddings: bool | None = None


class DataConfig(Section):
    """The text to train on: a file, a folder or JSONL; without a path, the source of Python's standard library."""

    path: str | None = None
    text_key: str = "text"
    seq_len: Tokens = 256
    val_fraction: Fraction = 0.05
    tokenizer: str | None = None
    cache_dir: str | None = None


class BatchConfig(Section):
    """Samples per optimizer step: global_size = micro_size x accumulation x data-parallel ranks; two give the third."""

    global_size: Positive | None = None
    micro_size: MicroBatches | None = None
    accumulation: MicroBatches | None = None


class MeshConfig(Section):
    """Ranks along each axis of the mesh.

    `dp_shard` is what the other axes leave when it is not given. Given alone, such as the GPUs of a machine, the rest
    are `dp_replicate` replicas of it (hybrid sharding), which exchange gradients once a step.
    """

    pp: Ranks = 1
    dp_replicate: Ranks | None = None
    dp_shard: Ranks | None = None
    cp: Ranks = 1
    tp: Ranks = 1


class PrecisionConfig(Section):
    """Dtypes of the states and of what travels; sums never run in less than fp32.

    `param` is the dtype of the parameters; without it the one that the model given to `initialize` has, and fp32 of one
    in several. `reduce` is the dtype of gradients on the wire, `accumulate` of the gradients at rest ("param" halves
    both under bf16). `buffers`: "keep" never rounds a buffer, "param" casts the floating ones as `Module.to` would.
    """

    param: Dtype | None = None
    reduce: Literal["param", "fp32"] = "param"
    accumulate: Literal["param", "fp32"] = "fp32"
    buffers: Literal["keep", "param"] = "keep"
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    initial_loss_scale: PositiveFloat = 65536.0
    loss_scale_window: Positive = 1000
    min_loss_scale: PositiveFloat = 1.0


class ZeroConfig(Section):
    """What is sharded over the data-parallel ranks; see `shardwise.layout.zero_stages` for the table.

    `lockstep` lets ranks run different blocks: each gathers all of them, in module order. `replicate_frozen` keeps
    frozen parameters whole on every rank in stage 3.
    """

    stage: Annotated[int, Field(ge=0, le=3)] = 2
    blocks: Names | None = None
    overlap: bool = True
    lockstep: bool = False
    replicate_frozen: bool = False


class TiersConfig(Section):
    """The memory in which each state rests.

    `..._on_device`: the share of a state that stays on the device although the rest is elsewhere; whole groups, those
    that run first in the forward. `activations`: the inputs of recomputed blocks. `step_in_backward`: without clipping,
    groups are stepped as soon as their gradients are there. `cores`: that the step on the host keeps to;
    `bind_cores` makes them this rank's share of the machine's.
    """

    params: Tier = "device"
    grads: Tier = "device"
    optimizer: Tier = "device"
    params_on_device: Fraction = 0.0
    grads_on_device: Fraction = 0.0
    optimizer_on_device: Fraction = 0.0
    activations: Literal["device", "host"] = "device"
    nvme_path: str | None = None
    step_in_backward: bool = True
    pin_memory: bool = True
    bind_cores: bool = False
    cores: Cores | None = None


class TensorConfig(Section):
    """Tensor and sequence parallelism over the `tp` axis.

    `overlap_chunks`: a row layer multiplies its tokens in so many parts, and each part's sum over the ranks runs while
    the next is multiplied.
    """

    sequence_parallel: bool = False
    overlap_chunks: Positive = 1


class PipelineConfig(Section):
    """The stages over the `pp` axis, and their schedule; `batch.accumulation` micro-batches go through it each step.

    `virtual_stages`: stages a rank. Stages are cut by cost: `balance` says which, `cut` names the modules with which
    stages 1, 2, ... begin instead, `units` those between which cuts are allowed, and `replicate` those that every stage
    holds and runs. `unit_seconds`: measured costs of modules, by name pattern. `gather`: in ZeRO 3 a stage is gathered
    once a batch, or block by block for each micro-batch, in less memory for more traffic.
    """

    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"] = "1f1b"
    virtual_stages: Layers = 1
    balance: Literal["both", "time", "memory"] = "both"
    cut: Names | None = None
    units: Names | None = None
    replicate: Names | None = None
    unit_seconds: dict[str, PositiveFloat] | None = None
    gather: Literal["batch", "micro-batch"] = "batch"


class ContextConfig(Section):
    """One sequence over the `cp` axis, and long sequences on one rank.

    `transport`: keys come step by step and are computed meanwhile (ring), all at once (all-gather), or the ranks
    exchange heads for tokens (ulysses). `heads_over`: that many neighbouring ranks exchange heads, and the transport
    runs over such teams; all ranks for ulysses. `token_layout`: which tokens a rank computes; auto balances the work.
    `chunk_tokens`: MLPs, and the head with its loss, take so many tokens at a time, so neither inner states nor logits
    of a sequence exist whole; for any mesh.
    """

    transport: Literal["ring", "all-gather", "ulysses"] = "ring"
    heads_over: Positive | None = None
    token_layout: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto"
    chunk_tokens: Positive | None = None


class AttentionConfig(Section):
    """Which keys each query sees, in `shardwise train`'s decoder and models of transformers: all, or a structure's.

    The other keys are the structures' parameters, by DeepSpeed's names; `shardwise.attention.structures` says what each
    means, and what it is where it is left out. `block`: tokens of a block. `seed`: of random blocks.
    """

    kind: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "sliding-window"] = "dense"
    block: Positive = 64
    different_layout_per_head: bool | None = None
    num_local_blocks: Positive | None = None
    num_global_blocks: NotNegative | None = None
    num_different_global_patterns: Positive | None = None
    horizontal_global_attention: bool | None = None
    num_random_blocks: NotNegative | None = None
    num_sliding_window_blocks: Positive | None = None
    local_window_blocks: Blocks | None = None
    global_block_indices: Indices | None = None
    global_block_end_indices: Indices | None = None
    seed: NotNegative | None = None


class RecomputeConfig(Section):
    """Activation checkpointing: recompute every n-th block in full, or all but its matrix products and attention."""

    mode: Literal["none", "full", "selective"] = "none"
    every: Positive = 1


class OptimizerConfig(Section):
    """An element-wise optimizer by name; parameters of less than two dims are decayed only with `decay_1d`."""

    name: str = "adamw"
    lr: PositiveFloat = 3e-4
    betas: Betas = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Fraction = 0.9
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    decay_1d: bool = False
    clip_norm: PositiveFloat | None = 1.0


class SchedulerConfig(Section):
    """The learning rate over steps: linear warm-up, then the named decay to `final_ratio` of the peak.

    A decay is over `total_steps`, or `run.steps` if that is given. Without a name it is cosine in `shardwise train` and
    where `total_steps` is given; in other scripts the rate stays constant.
    """

    name: Literal["constant", "linear", "cosine"] | None = None
    warmup_steps: NotNegative = 0
    total_steps: Positive | None = None
    final_ratio: Fraction = 0.1


class CompileConfig(Section):
    """torch.compile of each block's forward, as one graph; `mode` is inductor's."""

    enabled: bool = False
    backend: str = "inductor"
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    dynamic: bool | None = None


class CheckpointConfig(Section):
    """How `shardwise train` saves: every so many steps, and by default at its end, also where a signal ends it.

    `path` is a folder that all ranks share; left out, `checkpoints` in the run's folder. Of the checkpoints there the
    newest `keep_last` stay (0: all of them), and those whose step is a multiple of `keep_every`. With `background`
    training goes on while files are written.
    """

    path: str | None = None
    every: Positive | None = None
    at_end: bool = True
    keep_last: NotNegative = 3
    keep_every: Positive | None = None
    background: bool = True


class RunConfig(Section):
    """The run itself: length, seed, devices, folders, patience.

    A collective that takes longer than `watchdog_s`, or half of `timeout_s`, is reported with what every rank does; 0
    turns that off. `check_collectives` compares each collective over the ranks before it starts: slow, for debugging.
    `record_timeline`: the step whose timeline, of all ranks of a pipeline, is written into the run's folder.
    """

    steps: Positive = 200
    seed: NotNegative = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_procs: Ranks | None = None
    num_threads: Threads | None = None
    dir: str = "runs"
    name: str | None = None
    eval_every: Positive | None = None
    eval_batches: Positive = 8
    sample_tokens: NotNegative = 64
    timeout_s: TimeoutSeconds = 300.0
    watchdog_s: Annotated[float, Field(ge=0.0, le=1e7)] = 60.0
    check_collectives: bool = False
    record_timeline: Positive | None = None
