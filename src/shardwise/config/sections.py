"""Defines the sections of the config: keys, types, ranges, defaults and meanings, and nothing that computes.

The text under a key is its description, which `shardwise config` and the site's page of keys show.

`shardwise.config.resolve` puts them together and is where these names are imported from.

>>> ZeroConfig().stage
2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from shardwise.schedule.pipelines import RECIPES

MAX_RANKS: Final = 10**6
MAX_LAYERS: Final = 2_000
MAX_MICRO_BATCHES: Final = 10**6
# A pipeline's schedule is built and simulated action by action, about 10,000 of them a second.
MAX_PIPELINE_CELLS: Final = 400_000

Dtype = Literal["fp64", "fp32", "bf16", "fp16"]
Tier = Literal["device", "host", "nvme"]
# Codecs of `shardwise.layout.wire_codec`, and dtypes.
Gather = Literal["param", "int8", "fp8"]
Reduce = Literal["param", "fp32", "int8", "int4"]
DeviceName = Literal["cpu", "cuda", "xpu", "npu", "mps"]
AskedDevice = Literal["auto", "cpu", "cuda", "xpu", "npu", "mps"]
SinkName = Literal["jsonl", "tensorboard", "wandb", "mlflow"]
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(RECIPES)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


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
NotBelowZero = Annotated[float, Field(ge=0.0)]
TimeoutSeconds = Annotated[float, Field(ge=0.1, le=1e7)]
# Strict would refuse lists, but TOML and JSON know no tuples.
Betas = Annotated[tuple[BelowOne, BelowOne], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Cores = Annotated[tuple[NotNegative, ...], Field(strict=False, min_length=1)]
SinkNames = Annotated[tuple[SinkName, ...], Field(strict=False)]
Window = Annotated[tuple[Positive, Positive], Field(strict=False)]
Blocks = Annotated[tuple[Positive, ...], Field(strict=False)]
Indices = Annotated[tuple[NotNegative, ...], Field(strict=False)]


class ModelConfig(Section):
    """Chooses the model of `shardwise train`: a Hugging Face folder, or a preset and what differs from it.

    The library API ignores this.
    """

    path: str | None = None
    """A Hugging Face folder (weights, tokenizer) of a causal model, or its name on the Hub. Training goes on
    from its weights; presets and their keys do not count then."""
    trust_remote_code: bool = False
    """Whether Python files of the model's or the tokenizer's folder may run; a folder that needs them is refused
    otherwise, and nothing asks. Read them first."""
    weights: str | None = None
    """A checkpoint of the same model whose weights the run starts from, such as another run has left."""
    preset: str = "tiny"
    """Name of a model of `shardwise presets`; "tiny" trains in two minutes on two cores."""
    num_layers: Layers | None = None
    """Blocks; the preset's where it is not given, as for the keys after it."""
    hidden_size: Width | None = None
    """Width of the residual stream."""
    num_heads: Width | None = None
    """Query heads of each attention; they divide hidden_size."""
    num_kv_heads: Width | None = None
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    ffn_size: Width | None = None
    """Inner width of the feed-forward layer."""
    vocab_size: Width | None = None
    """Rows of the embedding; at least the tokenizer's size."""
    tie_embeddings: bool | None = None
    """Whether the output head shares the embedding's weight."""
    num_experts: NotNegative | None = None
    """Experts of every feed-forward layer; 0 makes it dense."""
    num_chosen: Positive | None = None
    """Experts that a token is sent to."""
    expert_size: Width | None = None
    """Inner width of an expert; ffn_size where neither this nor the preset gives it."""
    num_shared_experts: NotNegative | None = None
    """Further experts that all tokens pass, as one feed-forward layer beside the others."""
    router_bias: bool | None = None
    """Whether each router has a bias that balances its experts; no gradient reaches it."""


# The keys of a model that are no part of its shape.
MODEL_SOURCE_KEYS: Final = frozenset({"preset", "path", "weights", "trust_remote_code"})


class LoraConfig(Section):
    """Trains small matrices beside the linear layers of a Hugging Face model in place of its weights (LoRA of PEFT)."""

    rank: NotNegative = 0
    """Rank of the matrices; 0 trains all weights. 16 suits most fine-tuning."""
    alpha: Positive | None = None
    """Their product counts alpha / rank times; twice the rank where it is not given."""
    dropout: BelowOne = 0.0
    """Share of the adapters' inputs that is dropped."""
    targets: Names = ("all-linear",)
    """Names, or ends of names, of the layers; "all-linear" takes all but the head. Experts in stacks have the names of
    their weights, such as experts.gate_up_proj and experts.down_proj."""
    base: Literal["keep", "nf4"] = "keep"
    """The frozen weights of the linear layers: as the folder has them (keep), or packed in 4 bits by bitsandbytes, as
    QLoRA does (nf4)."""


class DataConfig(Section):
    """Names the data to train on: text, or chats for a Hugging Face model."""

    path: str | None = None
    """A text file, JSONL, Parquet, or a folder of these; without it, the source of Python's standard library. Records
    have `text`, `messages` (or `conversations`), or `prompt` and `completion`. Or the path of
    Megatron-LM's `.bin` and `.idx`."""
    text_key: str = "text"
    """The key of a record that holds its text."""
    train_on: Literal["completions", "all"] = "completions"
    """Which tokens of chats count in the loss: the assistant's, or all."""
    seq_len: Tokens = 256
    """Tokens of a sample; 256 is short, so that a first run is quick."""
    val_fraction: Fraction = 0.05
    """Share of the tokens, in whole documents, that is held out for evaluation and not trained on."""
    tokenizer: str | None = None
    """A folder or file of a Hugging Face tokenizer; without it, one is trained on the data."""
    cache_dir: str | None = None
    """Folder of tokenized data; the user's cache folder where it is not given."""


class BatchConfig(Section):
    """Counts samples per optimizer step: global_size = micro_size x accumulation x data ranks; two give the third."""

    global_size: Positive | None = None
    """Samples of an optimizer step over all ranks; two keys of this section give the third."""
    micro_size: MicroBatches | None = None
    """Samples of one forward on a rank."""
    accumulation: MicroBatches | None = None
    """Micro-batches of a step on a rank; a pipeline needs several to keep its stages busy."""


class MeshConfig(Section):
    """Sets the number of ranks along each axis of the mesh."""

    pp: Ranks = 1
    """Pipeline stages, in ranks."""
    dp_replicate: Ranks | None = None
    """Replicas of the shard group (hybrid sharding); they exchange gradients once a step."""
    dp_shard: Ranks | None = None
    """Ranks that ZeRO shards states over; what the other axes leave where it is not given."""
    cp: Ranks = 1
    """Ranks that share the tokens of one sequence."""
    tp: Ranks = 1
    """Ranks that share each layer's matrices; keep them inside one machine."""
    ep: Ranks = 1
    """Ranks among which a model's experts are divided: neighbours among those of dp_shard, cp and tp, whose product it
    divides. ZeRO shards each expert over the ranks that remain."""


class PrecisionConfig(Section):
    """Sets the dtypes of the states and of what is sent; sums never run in less than fp32."""

    param: Dtype | None = None
    """Dtype of parameters in forward and backward; the model's own where it is not given."""
    reduce: Reduce = "param"
    """How gradients are sent: "param" in the parameters' dtype, "fp32" in twice the bytes of bf16, "int8" and "int4" as
    codes with a scale for each 256 elements. They are summed in fp32."""
    reduce_feedback: bool = False
    """Whether each rank keeps what "int8" or "int4" rounds off, and adds it to its next gradients; it takes as much
    memory as the parameters, whole."""
    accumulate: Literal["param", "fp32"] = "fp32"
    """Dtype in which a rank sums and keeps gradients; "fp32" by default, since bf16 sums lose small terms."""
    states: Literal["master", "bf16", "int8"] = "master"
    """How the optimizer's moments are stored: "master" in the master's dtype, "bf16" rounded, "int8" as codes with a
    scale for each 256 elements. Parameters of fewer than 4,096 elements keep theirs in the master's dtype."""
    gather: Gather = "param"
    """How parameters are sent to where they are used: "param" as they are, "int8" and "fp8" as codes of a byte with a
    scale for each 256 elements. The forward uses the decoded values, the optimizer exact ones."""
    linears: Literal["keep", "fp8", "fp8-emulated"] = "keep"
    """How the large linear layers of blocks multiply: in "param" (keep), in fp8 by torchao's layers (fp8), or with
    fp8's rounding on any device, slowly (fp8-emulated)."""
    buffers: Literal["keep", "param"] = "keep"
    """Whether buffers keep their dtype: "keep" never rounds one (RoPE frequencies need fp32); "param" casts floating
    ones as `Module.to` does."""
    loss_scale: PositiveFloat | Literal["dynamic"] = "dynamic"
    """Factor on the loss of fp16; "dynamic" adapts it. Other dtypes do not use it."""
    initial_loss_scale: PositiveFloat = 65536.0
    """The first dynamic loss scale; 2^16, as DeepSpeed's. One that is too large costs some skipped steps."""
    loss_scale_window: Positive = 1000
    """Steps without overflow after which a dynamic loss scale doubles, one more at the start and after an overflow;
    1000, as DeepSpeed's. Fewer skip more steps."""
    loss_scale_hysteresis: Positive = 1
    """The first overflow that halves a dynamic loss scale: 1 does so at each, 2 leaves it once until it has doubled."""
    consecutive_hysteresis: bool = False
    """Whether `loss_scale_hysteresis` counts overflows in a row only."""
    min_loss_scale: PositiveFloat = 1.0
    """The smallest dynamic loss scale; 1 is no scaling. A run that needs less ends with an error."""


class ZeroConfig(Section):
    """Say what is sharded over the data-parallel ranks; `shardwise.layout.zero_stages` has the table."""

    stage: Annotated[int, Field(ge=0, le=3)] = 2
    """0 shards nothing, 1 the optimizer, 2 gradients too, 3 parameters too. 2 costs no traffic over plain data
    parallelism."""
    blocks: Names | None = None
    """Patterns of module names that are gathered as one unit; found where they are not given."""
    overlap: bool = True
    """Whether collectives run beside computation. On, since off gives the same bits, more slowly; off saves the memory
    of one gathered unit in stage 3."""
    lockstep: bool | Literal["auto"] = False
    """Whether ranks may run different blocks: each then gathers all of them, in module order. "auto" does so in stage 3
    until the model leaves that order; from then on all ranks must run the same blocks."""
    replicate_frozen: bool = False
    """Whether frozen parameters stay whole on every rank in stage 3; off, since that needs memory. It saves gathers."""
    keep_whole_below: NotNegative = 0
    """Elements below which a parameter stays whole in stage 3, on the device, as in stage 2; 0 keeps none. It saves
    small gathers."""
    secondary_shard: NotNegative = 0
    """Ranks of a node that keep, in stage 3, a second copy of what they have gathered, a slice each: later gathers of
    the step stay among them. 0 keeps none, since it takes memory: the parameters' bytes over so many ranks. With
    precision.reduce=int8 or int4, in every stage, gradients are summed within such a node before they leave it."""


class TiersConfig(Section):
    """Chooses where each state is stored. Shares on the device are whole groups, those that run first in a forward."""

    params: Tier = "device"
    """Memory that stores parameters; "host" and "nvme" need stage 3."""
    grads: Tier = "device"
    """Memory that stores gradients between backward and step. All tiers are "device" by default: others are slower."""
    optimizer: Tier = "device"
    """Memory that stores masters and moments; the step runs on the host where it is not the device."""
    params_on_device: Fraction = 0.0
    """Share of the parameters that stays on the device although the rest does not."""
    grads_on_device: Fraction = 0.0
    """Share of the gradients that stays on the device."""
    optimizer_on_device: Fraction = 0.0
    """Share of the optimizer's states that stays on the device."""
    activations: Literal["device", "host"] = "device"
    """Memory of the inputs of recomputed blocks."""
    nvme_path: str | None = None
    """Folder on the disk that stores states; needed for "nvme"."""
    pin_memory: bool = True
    """Whether host memory is pinned, which copies to and from a GPU need to be asynchronous."""
    bind_cores: bool = False
    """Whether each rank's host work keeps to its share of the machine's cores."""
    cores: Cores | None = None
    """Numbers of the cores that the step on the host keeps to."""


class TensorConfig(Section):
    """Sets tensor and sequence parallelism over the `tp` axis."""

    sequence_parallel: bool = False
    """Whether activations between split layers are split along the sequence over tp (less memory, same traffic); tp
    must then divide the length."""
    overlap_chunks: Positive = 1
    """Parts in which a row layer multiplies its tokens; the sum of one part runs beside the product of the next. 1 is
    off."""


class PipelineConfig(Section):
    """Sets the stages over the `pp` axis and their schedule, which runs `batch.accumulation` micro-batches a step."""

    schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards; 1f1b needs less memory than gpipe, the zero-bubble ones (zb-...) idle less than
    1f1b and need more memory."""
    virtual_stages: Layers = 1
    """Stages of each rank; more idle less and send more."""
    balance: Literal["both", "time", "memory"] = "both"
    """What the partition into stages makes even: time, memory, or both."""
    cut: Names | None = None
    """Names of the modules with which stages 1, 2, ... begin; by default they are partitioned by cost."""
    units: Names | None = None
    """Patterns of the modules between which a cut is allowed."""
    replicate: Names | None = None
    """Patterns of modules that every stage holds and runs."""
    unit_seconds: dict[str, PositiveFloat] | None = None
    """Measured seconds of modules by name pattern, for the partition."""
    gather: Literal["batch", "micro-batch"] = "batch"
    """In stage 3: gather a stage once a batch, which sends least, or each block for each micro-batch (less memory)."""


class ContextConfig(Section):
    """Splits one sequence over the `cp` axis, and long sequences on one rank."""

    transport: Literal["ring", "all-gather", "ulysses"] = "ring"
    """How keys and values move: ring (step by step, beside attention), all-gather (at once), or ulysses (heads for
    tokens)."""
    heads_over: Positive | None = None
    """Neighbouring ranks that exchange heads for tokens; the transport runs between such groups."""
    token_layout: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto"
    """Which tokens a rank computes; "auto" takes the split with the most even work."""
    chunk_tokens: Positive | None = None
    """Tokens that MLPs, and the head with its loss, take at a time; smaller needs less memory."""


class AttentionConfig(Section):
    """Choose which keys each query sees, in the decoder and in models of transformers: all, or those of a structure.

    The keys are the structures' parameters, by DeepSpeed's names; `shardwise.attention.structures` says what each is
    where it is left out.
    """

    kind: Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "sliding-window"] = "dense"
    """Which keys a query sees: all (dense), or a block-sparse structure with DeepSpeed's name."""
    block: Positive = 64
    """Tokens of a block; 64 suits GPUs and CPUs."""
    different_layout_per_head: bool | None = None
    """Whether heads have layouts of their own."""
    num_local_blocks: Positive | None = None
    """Blocks of a local window."""
    num_global_blocks: NotNegative | None = None
    """Blocks that represent a window, or that all see."""
    num_different_global_patterns: Positive | None = None
    """Different choices of global blocks over the heads."""
    horizontal_global_attention: bool | None = None
    """Whether global blocks see all keys, too."""
    num_random_blocks: NotNegative | None = None
    """Random blocks that each row of blocks sees."""
    num_sliding_window_blocks: Positive | None = None
    """Blocks of the sliding window."""
    local_window_blocks: Blocks | None = None
    """Blocks of each local window, in order."""
    global_block_indices: Indices | None = None
    """Indices of the global blocks."""
    global_block_end_indices: Indices | None = None
    """Ends of the ranges of global blocks, beside their indices."""
    seed: NotNegative | None = None
    """Seed of the random blocks."""


class ExpertsConfig(Section):
    """Sets how the routers of a mixture of experts are trained, and how uneven their choices are taken to be."""

    aux_loss: NotBelowZero = 0.0
    """Weight of the auxiliary loss that makes routers choose all experts as often; 0 adds none. It is the mean over
    the layers of E x sum of f x p, over E experts: f is an expert's share of the tokens, p its mean probability."""
    aux_scope: Literal["micro-batch", "sequence", "global"] = "micro-batch"
    """Over which tokens f and p are taken: those of a rank's micro-batch, of each sequence, or of the micro-batches of
    all data ranks together, which lets experts differ most between kinds of text."""
    z_loss: NotBelowZero = 0.0
    """Weight of the mean square of the log of the sum of the exponentials of a router's logits, which keeps them small;
    0 adds none."""
    bias_rate: NotBelowZero = 0.0
    """What a step adds to a router's bias for an expert that has got fewer tokens than the mean, or takes away from one
    that has got more, for routers with a bias that only chooses; 0 leaves the biases as they are."""
    replay: bool = False
    """Whether tokens go to the experts that a batch names in `routed_experts`, where it does."""
    skew: Annotated[float, Field(ge=1.0)] = 1.0
    """Tokens of the fullest expert over the mean of all, in `shardwise verify` and in simulated ranks; a run measures
    its own."""


class RecomputeConfig(Section):
    """Sets activation checkpointing: recompute every n-th block in full, or all but its products and attention."""

    mode: Literal["none", "full", "selective"] = "none"
    """Activations: kept (none, which computes nothing twice), recomputed from each block's input (full), or all but
    products and attention (selective)."""
    every: Positive = 1
    """Recompute every n-th block; 1 is every block, which saves most memory."""


class OptimizerConfig(Section):
    """Chooses an optimizer and sets its options."""

    name: str = "adamw"
    """An element-wise optimizer of torch.optim or of Shardwise, such as lion, or muon (docs/optimizers.md); "none"
    freezes all parameters and only evaluates."""
    lr: PositiveFloat = 3e-4
    """Peak learning rate: factor on a step's update, without a unit. 3e-4 suits small models; large ones take less."""
    betas: Betas = (0.9, 0.95)
    """Adam's decay rates of the two moments; 0.95, as usual for language models."""
    eps: PositiveFloat = 1e-8
    """Adam's term against division by zero; 1e-8, as torch's."""
    momentum: Fraction | None = None
    """Momentum of SGD, RMSprop and muon: the share of the last update that is kept. 0.95 in muon and 0.9 in the others,
    where it is not given, as usual."""
    weight_decay: NotBelowZero = 0.1
    """Share of each weight that a step subtracts, times the learning rate; 0.1 is usual for language models, torch's
    AdamW has 0.01."""
    decay_1d: bool = False
    """Whether parameters of less than two dims (norms, biases) are decayed, too; usually they are not."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest L2 norm of all gradients together; larger ones are scaled down to it. 1.0, as in the Trainer, Megatron
    and newer DeepSpeed; "none" turns it off."""

    @property
    def kept_momentum(self) -> float:
        """Return the momentum, or the usual one of the optimizer."""
        usual = 0.95 if self.name.lower() == "muon" else 0.9
        return usual if self.momentum is None else self.momentum


class SchedulerConfig(Section):
    """Sets the learning rate over steps: linear warm-up, then a decay to `final_ratio` of the peak."""

    name: Literal["constant", "linear", "cosine"] | None = None
    """Decay after the warm-up; cosine in `shardwise train` and where total_steps is given, else constant."""
    warmup_steps: NotNegative = 0
    """Steps in which the learning rate rises from 0; 0 in the library, a twentieth of the run in `shardwise train`."""
    total_steps: Positive | None = None
    """Steps until the decay ends; run.steps where it is not given."""
    final_ratio: Fraction = 0.1
    """Learning rate at the end, as a share of the peak; a tenth is usual for language models."""


class CompileConfig(Section):
    """Sets whether and how torch.compile compiles each block."""

    enabled: bool = False
    """Whether each block's forward is compiled by torch.compile, as one graph; compiling makes the first steps
    slow."""
    backend: str = "inductor"
    """torch.compile's back end."""
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Inductor's mode."""
    dynamic: bool | None = None
    """torch.compile's `dynamic`: whether shapes are symbolic."""


class CheckpointConfig(Section):
    """Say when and where `shardwise train` saves."""

    path: str | None = None
    """Folder that all ranks share; `checkpoints` in the run's folder where it is not given."""
    every: Positive | None = None
    """Steps between two saves; without it there is one at the end."""
    at_end: bool = True
    """Whether the run saves when it ends, by a signal, too."""
    keep_last: NotNegative = 3
    """Newest checkpoints that stay, 0 for all; `load` falls back to an older one where the newest is damaged."""
    keep_every: Positive | None = None
    """Checkpoints whose step is a multiple of this stay, too."""
    export: bool = True
    """Whether a run of model.path ends with a Hugging Face folder, `model` in the run's folder; with LoRA it has the
    adapter alone."""
    background: bool = True
    """Whether training goes on while files are written; on, since a save then holds it up only for a copy in memory."""
    on_failure: Literal["continue", "stop"] = "continue"
    """What follows a save that fails while the run goes on, as on a full disk: "continue" says so, trains on, and
    saves at the next step that is due; "stop" ends the run. A run whose last save fails always ends with an error."""


class RunConfig(Section):
    """Sets up the run itself: length, seed, devices, folders, time-outs."""

    steps: Positive = 200
    """Optimizer steps."""
    epochs: PositiveFloat | None = None
    """Passes over the training data; where it is given, the steps follow from it."""
    seed: NotNegative = 0
    """Seed of initial weights, data order and dropout."""
    device: AskedDevice = "auto"
    """Kind of the devices, by torch's name: "cuda" is NVIDIA's and AMD's, "xpu" Intel's, "npu" Huawei's (with
    torch_npu), "mps" Apple's, for one rank. "auto" takes the GPUs where there are some, but no "mps", else the CPU."""
    num_procs: Ranks | None = None
    """Local ranks to start; where it is not given, one for each GPU, or on the CPU two (one on a single core)."""
    num_threads: Threads | None = None
    """Threads of each rank; the machine's cores shared out where it is not given."""
    dir: str = "runs"
    """Folder of the runs' folders."""
    name: str | None = None
    """Name of the run's folder; the preset and a time where it is not given."""
    eval_every: Positive | None = None
    """Steps between two evaluations on held-out data; without it there is one at the end."""
    eval_batches: Positive = 8
    """Global batches of an evaluation; more take longer and scatter less."""
    sample_tokens: NotNegative = 64
    """Tokens of text to generate at the end; 0 generates none."""
    timeout_s: TimeoutSeconds = 300.0
    """Seconds after which a collective fails: a little more than a rank may be alone with its work, as when it reads
    data. A hang costs so long."""
    watchdog_s: Annotated[float, Field(ge=0.0, le=1e7)] = 60.0
    """Seconds after which a waiting collective is reported with what every rank does, at most half of timeout_s, so
    that the report comes before the error; 0 turns it off."""
    on_nonfinite: Literal["raise", "skip", "ignore"] = "raise"
    """What a step does where its loss or gradients are not finite: "raise" names the module, "skip" leaves parameters
    as they are and goes on, "ignore" takes the step all the same. An overflow that a smaller loss scale can mend is
    always skipped."""
    on_shortage: Literal["refuse", "warn"] = "refuse"
    """What follows where a run is predicted to need more than there is: memory, space for its saves, positions of the
    model. "warn" says so and goes on."""
    check_collectives: bool = False
    """Whether each collective is compared over the ranks before it starts; slow, for debugging."""
    record_timeline: Positive | None = None
    """The step whose pipeline timeline is written into the run's folder; None takes the last."""
    sinks: SinkNames = ("jsonl", "tensorboard")
    """Where the numbers of each step go: "jsonl" and "tensorboard" into the run's folder, "wandb" and "mlflow" where
    their own environment says. One that fails is named at the end, and the run goes on."""
    profile_steps: Window | None = None
    """First and last step that torch.profiler records, such as [10, 13]: a trace for each rank in the run's folder."""
