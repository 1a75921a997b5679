"""Turn what a user asks (a model, a batch, pins; or a config) into a job and a search space; write a plan's config.

>>> from shardwise.planner.hardware import parse_cluster
>>> model, cluster = read_model("meta-llama/Llama-3.1-70B"), parse_cluster("h100:512")
>>> asked = Question(model, cluster).ask()
>>> asked.job.shape.name, asked.job.seq_len, asked.job.global_batch
('llama-3-70b', 8192, 512)
>>> read_model("lama-7b")
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: lama-7b is not a preset; did you mean llama-7b?
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, Dtype, ModelConfig, ResolvedConfig, is_config, read_toml
from shardwise.models.huggingface_config import cached_config, is_deepspeed, read_huggingface, read_json, source_of
from shardwise.models.megatron_flags import read_megatron
from shardwise.models.presets import PRESETS, DecoderConfig, decoder_config, preset
from shardwise.models.shape import ModelShape, ModelSource
from shardwise.optim.rules import wanted_rule
from shardwise.planner.candidates import PLANNED, SearchSpace, divisors
from shardwise.planner.hardware import Cluster
from shardwise.planner.job import PlanJob, changed
from shardwise.runtime.format import format_count

SPLITS: Final = ("mesh", "batch", "precision", "zero", "tiers", "tensor", "pipeline", "context", "recompute")
"""The sections that say how a job is split and stored."""

ALWAYS_WRITTEN: Final = frozenset(
    {
        "model.preset",
        "data.seq_len",
        "batch.global_size",
        "batch.micro_size",
        "mesh.dp_replicate",
        "mesh.dp_shard",
        "precision.param",
        "zero.stage",
    }
)
"""Keys that a planned config always has, even at their defaults: `shardwise train` has its own defaults for some."""

_SHAPE_KEYS: Final = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")
# The sections that no candidate changes.
_OF_JOB: Final = frozenset({"model", "data", "precision", "attention", "optimizer", "compile", "lora"})
# Names that people know our presets by.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "llama-2-7b": "llama-7b",
        "llama-2-13b": "llama-13b",
        "llama-2-70b": "llama-70b",
        "llama-3-405b": "llama-405b",
        "gpt-3": "gpt-3-175b",
        "gpt3": "gpt-3-175b",
        "tinyllama-1.1b": "1b",
    }
)
# What the hub's names have before and after these.
_OF_HUB: Final = re.compile(r"^meta-|(?<=llama-3)\.\d|(-hf|-instruct|-base|-chat|-v\d\.\d)+$")
_SCRIPTS: Final = frozenset({".sh", ".bash", ".yaml", ".yml", ".txt", ".slurm", ".sbatch"})
_CHUNKS: Final = "context.chunk_tokens"
CHUNK_TOKENS: Final = 1024
TUNING_LENGTH: Final = 2048
TUNING_BATCH: Final = 32
USUAL_LENGTH: Final = 4096
"""Tokens of a sequence where none are given, and the model's longest is too long."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Hold a job, and the space to search for it.

    Attributes:
        plan_only: why `shardwise train` cannot train this model by a config; "" where it can.
    """

    job: PlanJob
    space: SearchSpace
    notes: tuple[str, ...] = ()
    plan_only: str = ""


@dataclass(frozen=True)
class Question:
    """Hold what a user asks.

    Attributes:
        model: as `read_model` or `model_of` returns it.
        cluster: the machine; all its GPUs take part.
        seq_len: tokens of a sequence; None takes the file's, or the model's longest.
        global_batch: sequences of a step; None takes the file's, or `usual_batch`.
        settings: `section.key=value`; what the planner chooses is pinned, anything else goes into the config.
        tunes: whether a trained model is tuned, whose sequences and batches are smaller, as with adapters.
    """

    model: ModelSource
    cluster: Cluster
    seq_len: int | None = None
    global_batch: int | None = None
    settings: tuple[str, ...] = ()
    tunes: bool = False

    def ask(self) -> PlanRequest:
        """Return the job to plan and its search space.

        Raises:
            ConfigError: no length is known, or a setting is none.
        """
        model, cluster = self.model, self.cluster
        if model.shape is None:
            raise ConfigError("model-not-named", "the file names no model; give one after --model")
        pinned = [setting for setting in self.settings if _key(setting) in PLANNED]
        # Refuses a key that is neither with a suggestion.
        base = model.config.override([setting for setting in self.settings if setting not in pinned])
        wanted_rule(base.optimizer.name)
        keys_given = model.given | {_key(setting) for setting in self.settings}
        if "precision.param" not in keys_given:
            base = base.override([f"precision.param={usual_dtype(cluster)}"])
        notes = [*model.notes, *_slow_dtype(base, cluster, is_given="precision.param" in keys_given)]
        tunes = self.tunes or base.lora.rank > 0
        length = _length(model, self.seq_len, notes, tunes=tunes)
        batch = self.global_batch or model.global_batch or _batch(cluster.num_gpus, length, notes, tunes=tunes)
        job = _job(model.shape, _of_job(base, length, batch), cluster, base_of(base))
        space = SearchSpace(pins=pins_of(pinned))
        return PlanRequest(job=job, space=space, notes=tuple(notes), plan_only=_plan_only(job, base))

    def easier(self, asked: PlanRequest) -> Iterator[Question]:
        """Yield questions that need less memory and change nothing that the user has said, the nearest first."""
        is_given = _CHUNKS in self.model.given | {_key(setting) for setting in self.settings}
        # Compiled blocks decide what they keep, so the engine refuses chunks with them.
        chunked = () if is_given or asked.job.base.compile.enabled else (f"{_CHUNKS}={CHUNK_TOKENS}",)
        if chunked:
            yield replace(self, settings=(*self.settings, *chunked))
        if self.seq_len is None and self.model.seq_len is None and asked.job.seq_len > USUAL_LENGTH:
            shorter = replace(self, seq_len=USUAL_LENGTH)
            yield shorter
            if chunked:
                yield replace(shorter, settings=(*self.settings, *chunked))

    def differences(self, easier: Question) -> Iterator[str]:
        """Yield notes on what an easier question, which is answered in the place of this one, has changed."""
        if easier.seq_len != self.seq_len:
            yield (
                f"nothing fits with sequences of {self.model.longest:,} tokens, the model's longest; this is for "
                f"{easier.seq_len:,}; --seq N for another"
            )
        if easier.settings != self.settings:
            yield f"logits fill much of the memory; {easier.settings[-1]} computes the loss and MLPs in chunks"


def read_model(text: str) -> ModelSource:
    """Return the model that a user means.

    Args:
        text: a preset, or the hub's name of its model; the path of our own TOML file, of a Hugging Face `config.json`
            or its folder, or of a script of Megatron's flags.

    Raises:
        ConfigError: there is no such model, or its file is wrong.
    """
    path = Path(text)
    if "--" in text or path.suffix in _SCRIPTS:
        return read_megatron(text)
    if is_config(path):
        return _of_toml(path)
    if path.suffix == ".json":
        return _of_json(path)
    if (path / "config.json").is_file():
        return _of_json(path / "config.json")
    if path.is_dir():
        raise ConfigError(
            "folder-no-config", f"the folder {text} has no config.json; give one of Hugging Face's, or a preset"
        )
    cached = cached_config(text) if "/" in text else None
    if cached is not None:
        return _of_json(cached)
    if path.is_file():
        raise ConfigError(
            "model-kind-unknown",
            f"{text} is no file that describes a model's sizes; give its config.json, our TOML, or Megatron's flags in "
            "a script (.sh)",
        )
    plain = _OF_HUB.sub("", text.rpartition("/")[2].lower())
    name = _ALIASES.get(plain, plain)
    if "/" in text and name not in PRESETS:
        raise ConfigError(
            "model-not-local", f"{text} is no file or folder here, and nothing is downloaded; give its config.json"
        )
    try:
        decoder = preset(name if name in PRESETS else text)
    except ConfigError as error:
        other = "" if str(error).endswith("?") else "; for another model give its config.json"
        raise ConfigError(error.code, f"{error}{other}") from None
    config = Config().override([f"model.preset={name}"])
    notes = (f"{text} is planned as the preset {name}; its config.json has its own sizes",) if "/" in text else ()
    shape = ModelShape.of_decoder(decoder, name)
    return ModelSource(shape=shape, config=config, longest=decoder.max_seq_len, notes=notes)


def model_of(model: object) -> ModelSource:
    """Return the model that an object is, or has as its `config`.

    Args:
        model: text or a path for `read_model`; a shape; a config of our decoder's or of Hugging Face's, or its
            dictionary; or a module with such a config.

    Raises:
        ConfigError: it is none of them, or misses a size.
    """
    if isinstance(model, str | Path):
        return read_model(str(model))
    if isinstance(model, ModelShape):
        return ModelSource(shape=model)
    if isinstance(model, DecoderConfig):
        return ModelSource(shape=ModelShape.of_decoder(model), longest=model.max_seq_len)
    values = model.to_dict() if hasattr(model, "to_dict") else model
    if isinstance(values, Mapping):
        return source_of(values, type(model).__name__)
    if hasattr(model, "config"):
        return model_of(model.config)
    raise ConfigError(
        "not-a-model",
        f"{type(model).__name__} is no model; give a preset's name, a ModelShape, a config, or a module that has one",
    )


def _of_json(path: Path) -> ModelSource:
    if is_deepspeed(read_json(path)):
        raise ConfigError(
            "model-not-named",
            f"{path.name} is a config of DeepSpeed's, which names no model; give it after --explain, and the model "
            "after --model",
        )
    source = read_huggingface(path)
    if any(path.parent.glob("*.safetensors")):  # which shardwise train can fine-tune
        source = replace(source, config=Config().override([f"model.path={json.dumps(str(path.parent))}"]))
    return source


def _of_toml(path: Path) -> ModelSource:
    values, config = read_toml(path), Config.from_toml(path)
    keys_given = frozenset(f"{section}.{key}" for section, keys in values.items() for key in keys)
    longest = None if config.model.path is not None else preset(config.model.preset).max_seq_len
    return ModelSource(
        shape=shape_of(config),
        config=config,
        given=keys_given,
        seq_len=config.data.seq_len if "data.seq_len" in keys_given else None,
        global_batch=config.batch.global_size,
        longest=None if "data.seq_len" in keys_given else longest,
    )


def is_split(source: ModelSource) -> bool:
    """Say whether a model's file also says how the job is split."""
    keys = source.given | set(source.settings)
    return any(key in PLANNED and not key.startswith("batch.") for key in keys)


def _length(model: ModelSource, seq_len: int | None, notes: list[str], *, tunes: bool) -> int:
    """Return the tokens of a sequence; note how they were chosen."""
    length = seq_len or model.seq_len
    if length is not None:
        if model.longest is not None and length > model.longest:
            notes.append(f"sequences of {length:,} tokens, though the model is made for {model.longest:,} at most")
        return length
    if tunes:
        length = min(model.longest or TUNING_LENGTH, TUNING_LENGTH)
        notes.append(f"sequences of {length:,} tokens, as fine-tuning often takes; --seq N for another")
        return length
    if model.longest is None:
        raise ConfigError(
            "seq-len-missing", "no length is given; say how many tokens a sequence has, such as --seq 8192"
        )
    notes.append(f"sequences of {model.longest:,} tokens, the longest that the model is made for; --seq N for another")
    return model.longest


def _batch(num_gpus: int, length: int, notes: list[str], *, tunes: bool) -> int:
    """Return the sequences of a step; note how they were chosen."""
    if tunes:
        batch = max(TUNING_BATCH // num_gpus, 1) * num_gpus
        notes.append(f"a batch of {batch:,} sequences, as fine-tuning often takes; --global-batch N for another")
        return batch
    batch = usual_batch(num_gpus, length)
    text = f"{format_count(batch * length)} tokens, as many as runs of this size take"
    notes.append(f"a batch of {batch:,} sequences, {text}; --global-batch N for another")
    return batch


def _plan_only(job: PlanJob, base: Config) -> str:
    if base.model.path is not None:
        return ""
    if base.lora.rank:
        return f"adapters train beside a model's weights, and {job.shape.name} is a shape without any; plan only"
    try:
        model_section(job.shape, base.model)
    except ConfigError as error:
        return str(error)
    return ""


def usual_batch(num_gpus: int, seq_len: int) -> int:
    """Return the sequences of a step where none are given, the same number for each GPU where they suffice.

    >>> usual_batch(8, 4096), usual_batch(512, 4096), usual_batch(512, 131_072), usual_batch(16_384, 8192)
    (128, 1024, 32, 2048)
    """
    most = max(2**22, num_gpus * 2**10)  # tokens: what large runs take, and with thousands of GPUs enough for each
    batch = max(1, min(most, num_gpus * 2**16) // seq_len)
    return batch // num_gpus * num_gpus or max(divisor for divisor in divisors(num_gpus) if divisor <= batch)


def _key(assignment: str) -> str:
    return assignment.partition("=")[0].strip()


def usual_dtype(cluster: Cluster) -> Dtype:
    """Return bf16, or else fp16, where the device multiplies faster in it than in fp32; else fp32."""
    peaks = cluster.gpu.peak_flops_per_s
    slow = peaks.get("fp32", 0.0)
    halves: tuple[Dtype, ...] = ("bf16", "fp16")
    return next((dtype for dtype in halves if peaks.get(dtype, 0.0) > slow), "fp32")


def _slow_dtype(base: Config, cluster: Cluster, *, is_given: bool) -> Iterator[str]:
    """Say that a device has no bf16, or, as a CPU without AVX-512, is far slower in the dtype than in fp32."""
    dtype, peaks = base.precision.param, cluster.gpu.peak_flops_per_s
    if peaks.get("fp16") and not peaks.get("bf16"):
        if dtype == "bf16":
            yield f"precision.param=bf16 is emulated by {cluster.gpu.name}, slowly; precision.param=fp16 is faster"
        elif dtype == "fp16" and not is_given:
            yield f"precision.param=fp16, since {cluster.gpu.name} multiplies no bf16"
    if dtype in ("bf16", "fp16") and 0 < 2 * peaks.get(dtype, 0.0) < peaks.get("fp32", 0.0):
        times = peaks["fp32"] / peaks[dtype]
        slow = f"precision.param={dtype}, {times:,.0f} times as slow as fp32 on this {cluster.gpu.name}"
        yield f"{slow}; precision.param=fp32 is faster"


def _of_job(base: Config, seq_len: int, global_batch: int) -> ResolvedConfig:
    """Return the parts of a config that no candidate changes; refuse those that contradict each other."""
    sections: dict[str, Any] = {key: value for key, value in base.model_dump().items() if key in _OF_JOB}
    sections["batch"] = {"global_size": global_batch}
    sections["data"]["seq_len"] = seq_len
    return Config.from_dict(sections).resolve(world_size=1)


def base_of(config: Config) -> ResolvedConfig:
    """Return what candidates have of a user's config: nothing that the planner chooses, and no cut of the stages."""
    usual = Config().resolve(world_size=1)
    chosen = {key: getattr(getattr(usual, section), leaf) for key in PLANNED for section, leaf in [key.split(".")]}
    whole = ResolvedConfig.model_construct(config.model_fields_set, **{**dict(config), "batch": usual.batch})
    return changed(whole, {**chosen, "zero.stage": 0, "pipeline.cut": None})


def split_as(base: ResolvedConfig, config: ResolvedConfig) -> ResolvedConfig:
    """Return `base`, split and stored as another config says."""
    return base.model_copy(update={name: getattr(config, name) for name in SPLITS})


def job_of(config: Config, cluster: Cluster) -> PlanJob:
    """Return the job that the model, data and batch of a config, resolved or not, describe on all GPUs of a cluster.

    Raises:
        ConfigError: the model or the batch is none.
    """
    resolved = config.resolve(cluster.num_gpus)
    return _job(shape_of(resolved), resolved, cluster, base_of(resolved))


def _job(shape: ModelShape, config: ResolvedConfig, cluster: Cluster, base: ResolvedConfig) -> PlanJob:
    """Return the job of a shape, under the sliding window that a config may have; others are priced as dense."""
    attention, seq_len = config.attention, config.data.seq_len
    if attention.kind == "sliding-window":
        blocks = attention.num_sliding_window_blocks or 3
        shape = replace(shape, window=min(seq_len, (blocks // 2 + 1) * attention.block))
    return PlanJob(shape=shape, seq_len=seq_len, global_batch=config.batch.global_size, cluster=cluster, base=base)


def shape_of(config: Config) -> ModelShape:
    """Return the shape of a config's model.

    Raises:
        ConfigError: there is none, or its folder has no config.json that gives the sizes.
    """
    if config.model.path is not None:
        path = Path(config.model.path).expanduser() / "config.json"
        source_shape = read_huggingface(path if path.is_file() else cached_config(config.model.path) or path).shape
        if source_shape is None:
            raise ConfigError("model-not-named", f"model.path={config.model.path} names no model; give its folder")
        return source_shape
    decoder = decoder_config(config.model, max_seq_len=config.data.seq_len, attention=config.attention)
    return ModelShape.of_decoder(decoder, name=config.model.preset)


def written(job: PlanJob, config: ResolvedConfig) -> Config:
    """Return the config by which `shardwise train` runs a candidate of a job, without what follows from the rest.

    Raises:
        ConfigError: our decoder cannot have the job's shape.
    """
    values = config.model_dump()
    if config.model.path is None:
        values["model"] = model_section(job.shape, config.model).model_dump()
    values["data"]["seq_len"] = job.seq_len
    values["batch"]["accumulation"] = None
    return Config.from_dict(values)


def model_section(shape: ModelShape, base: ModelConfig) -> ModelConfig:
    """Return the `model` section of a shape: `base` where that is already it, else the preset with the fewest changes.

    Raises:
        ConfigError: our decoder cannot have that shape.
    """
    foreign = {
        "dense layers before its experts": bool(shape.experts and shape.experts.num_dense_layers),
        "a feed-forward of two matrices": shape.ffn != "gated",
        "biases": shape.has_biases,
        "learned positions": shape.num_positions > 0,
    }
    used_keys = [what for what, is_there in foreign.items() if is_there]
    wanted, sections = replace(shape, name="", window=None), [base]
    for name, decoder in PRESETS.items():
        values = _section_values(ModelShape.of_decoder(decoder))
        changes = {key: value for key, value in _section_values(wanted).items() if value != values.get(key)}
        if not used_keys and shape.hidden_size % shape.num_heads == 0:
            sections.append(ModelConfig(preset=name, **changes))
    same = [section for section in sections if ModelShape.of_decoder(decoder_config(section), name="") == wanted]
    if not same:
        what = " and ".join(used_keys) or f"head_dim={shape.head_dim}, not hidden_size / num_heads"
        raise ConfigError(
            "model-plan-only", f"model {shape.name} has {what}, and the decoder of shardwise train has not; plan only"
        )
    if same[0] is base:
        return base
    return min(same, key=lambda each: (len(each.model_dump(exclude_none=True)), each.preset != shape.name))


def _section_values(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of a `model` section that describe a shape."""
    values = {key: getattr(shape, key) for key in _SHAPE_KEYS} | {"tie_embeddings": shape.is_tied, "num_experts": 0}
    experts = shape.experts
    if experts is not None:
        values |= {"num_experts": experts.num_experts, "num_chosen": experts.num_chosen}
        values |= {"expert_size": experts.ffn_size, "num_shared_experts": experts.num_shared}
    return values


def pins_of(assignments: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the pins of `section.key=value` assignments, by key; commas separate several values.

    >>> pins_of(["mesh.tp=4,8", "zero.stage=3"])
    {'mesh.tp': (4, 8), 'zero.stage': (3,)}

    Raises:
        ConfigError: the config has no such value, or the key may not be pinned.
    """
    pins: dict[str, tuple[Any, ...]] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        if key.endswith("_on_device"):
            raise ConfigError(
                "key-chosen-last", f"{key} is chosen last, as large as fits; leave it out, or price yours by --explain"
            )
        section, _, leaf = key.partition(".")
        configs = [Config().override([f"{key}={value.strip()}"]) for value in text.split(",")]
        pins[key] = tuple(getattr(getattr(config, section), leaf) for config in configs)
    return pins
