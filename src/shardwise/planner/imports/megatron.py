"""Read a job from Megatron's flags: the model's shape, the strategy as our config's keys, the batch.

>>> imported = job_of_flags({
...     "num-layers": "32", "hidden-size": "4096", "num-attention-heads": "32", "seq-length": "4096",
...     "tensor-model-parallel-size": "2", "sequence-parallel": True, "bf16": True, "vocab-size": "32000",
... }, "train.sh")
>>> imported.settings["mesh.tp"], imported.settings["tensor.sequence_parallel"], imported.shape.ffn_size
(2, True, 16384)
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardwise.config.resolve import ConfigError
from shardwise.config.untrusted_files import UntrustedFileError, read_text
from shardwise.planner.imports.imported import ImportedJob
from shardwise.planner.shape import Experts, ModelShape

Flags = Mapping[str, "str | bool"]

_ASSIGNMENT: Final = re.compile(
    r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s(;]*)\s*+;?\s*+(?:#.*)?$"
)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?-((?:[^}$]|\$(?!\{))*+))?\}|\$(\w+)")
# A script of flags: what its variables come to in all, and its flags.
_MAX_EXPANDED: Final = 2**18
_MAX_FLAGS: Final = 1000
_YAML_LINE: Final = re.compile(r"^\s*(?:-\s*)?['\"]?(?:--)?([A-Za-z][\w-]*)['\"]?\s*:([^#]*+)(?:#.*)?$")

_READ: Final = (
    "num-layers",
    "hidden-size",
    "ffn-hidden-size",
    "num-attention-heads",
    "group-query-attention",
    "num-query-groups",
    "kv-channels",
    "seq-length",
    "max-position-embeddings",
    "position-embedding-type",
    "use-rotary-position-embeddings",
    "swiglu",
    "untie-embeddings-and-output-weights",
    "disable-bias-linear",
    "vocab-size",
    "padded-vocab-size",
    "make-vocab-size-divisible-by",
    "micro-batch-size",
    "global-batch-size",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "context-parallel-size",
    "cp-comm-type",
    "expert-model-parallel-size",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-shared-expert-intermediate-size",
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-torch-fsdp2",
    "use-megatron-fsdp",
    "use-custom-fsdp",
    "data-parallel-sharding-strategy",
    "recompute-granularity",
    "recompute-activations",
    "recompute-method",
    "recompute-num-layers",
    "bf16",
    "fp16",
    "fp8-format",
    "accumulate-allreduce-grads-in-fp32",
    "optimizer-cpu-offload",
    "cpu-offloading-num-layers",
    "clip-grad",
    "lr",
    "num-gpus",
    "world-size",
    "nproc-per-node",
    "nnodes",
)
_MAY_BE_NONE: Final = frozenset(
    {"num-layers-per-virtual-pipeline-stage", "moe-shared-expert-intermediate-size", "recompute-num-layers"}
)
_SHARDING: Final = MappingProxyType({"no-shard": 0, "optim": 1, "optim-grads": 2, "optim-grads-params": 3})
_TRANSPORTS: Final = MappingProxyType({"p2p": "ring", "all-gather": "all-gather", "a2a": "ulysses"})
_PADDED: Final = 128
_MAX_BYTES: Final = 2**18
_MAX_DIGITS: Final = 12
_FIX: Final = "give our TOML, another tool's JSON, or a script or YAML file of Megatron's flags"
_FLAG_SHARE: Final = 0.93


def read_megatron(source: str | Path) -> ImportedJob:
    """Return the job that a script, a YAML file or a command line starts.

    Args:
        source: the path of a `.sh`, `.yaml` or text file; or, where it holds `--`, the flags themselves.

    Raises:
        ConfigError: the file cannot be read, a flag is misspelled, or a size is missing.
    """
    text = str(source)
    if "--" in text:
        return job_of_flags(flags_in(text), "the flags")
    path = Path(source)
    try:
        text = read_text(path, _FIX, max_bytes=_MAX_BYTES)
    except UntrustedFileError as error:
        raise ConfigError(error.code, str(error)) from None
    flags = yaml_flags(text) if path.suffix in (".yaml", ".yml") else flags_in(text)
    if not flags:
        raise ConfigError("megatron-no-flags", f"{path} holds no flags of Megatron's; {_FIX}")
    return job_of_flags(flags, path.name)


def job_of_flags(flags: Flags, source: str) -> ImportedJob:
    """Return the job that flags describe.

    Args:
        flags: by name, without dashes in front; True for one that has no value.
        source: the file's name, for messages.

    Raises:
        ConfigError: a flag is misspelled, a size is missing, or a value cannot be.
    """
    _refuse_typos(flags, source)
    settings: dict[str, object] = {}
    settings |= _mesh(flags, source) | _pipeline(flags, source) | _zero(flags, source)
    settings |= _precision(flags) | _recompute(flags, source)
    if "micro-batch-size" in flags:
        settings["batch.micro_size"] = _number(flags, "micro-batch-size", source)
    ranks_per_node, num_nodes = _number(flags, "nproc-per-node", source, 0), _number(flags, "nnodes", source, 1)
    return ImportedJob(
        shape=_shape(flags, source),
        settings=settings,
        seq_len=_number(flags, "seq-length", source),
        global_batch=_number(flags, "global-batch-size", source, 0) or None,
        num_gpus=_number(flags, "world-size", source, ranks_per_node * num_nodes) or None,
        ep=_number(flags, "expert-model-parallel-size", source, 1),
        notes=_notes(flags),
    )


def _number(flags: Flags, name: str, source: str, default: int | None = None) -> int:
    """Return a flag's count, which must be 1 or more, except where 0 means that there is none of it."""
    value = flags.get(name)
    if value is None:
        if default is not None:
            return default
        close = difflib.get_close_matches(name, list(flags), n=1, cutoff=0.7)
        fix = f"did you mean it by --{close[0]}?" if close else f"add --{name} N"
        raise ConfigError("megatron-flag-missing", f"{source} misses --{name}; {fix}")
    refuse_unset(name, value)
    least = 0 if name in _MAY_BE_NONE else 1
    if isinstance(value, bool) or not value.isascii() or not value.isdigit() or not _is_count(value, least):
        written = f"--{name}" if isinstance(value, bool) else f"--{name} {value}"
        raise ConfigError(
            "megatron-flag-whole", f"{source}: {written} must be a whole number >= {least}; write --{name} N"
        )
    return int(value)


def _is_count(digits: str, least: int) -> bool:
    return len(digits) <= _MAX_DIGITS and int(digits) >= least


def _refuse_typos(flags: Flags, source: str) -> None:
    for name in flags:
        close = difflib.get_close_matches(name, _READ, n=1, cutoff=_FLAG_SHARE)
        if close and close[0] not in flags:
            raise ConfigError(
                "megatron-unknown-flag", f"{source}: --{name} is not a flag of Megatron's; did you mean --{close[0]}?"
            )


def _shape(flags: Flags, source: str) -> ModelShape:
    hidden = _number(flags, "hidden-size", source)
    num_heads = _number(flags, "num-attention-heads", source)
    if "kv-channels" not in flags and hidden % num_heads:
        raise ConfigError(
            "heads-divide-hidden",
            f"{source}: {num_heads} heads do not divide the hidden size {hidden}; add --kv-channels N",
        )
    is_gated = "swiglu" in flags
    # What Megatron itself takes where the size is not given.
    usual_ffn = int(4 * hidden * 2 / 3) // 64 * 64 if is_gated else 4 * hidden
    is_rotary = flags.get("position-embedding-type") in ("rope", "none") or "use-rotary-position-embeddings" in flags
    seq_len = _number(flags, "seq-length", source)
    return ModelShape(
        num_layers=_number(flags, "num-layers", source),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_number(flags, "num-query-groups", source, num_heads)
        if "group-query-attention" in flags
        else num_heads,
        head_dim=_number(flags, "kv-channels", source, hidden // num_heads),
        ffn_size=_number(flags, "ffn-hidden-size", source, usual_ffn),
        vocab_size=_vocab_size(flags, source),
        ffn="gated" if is_gated else "plain",
        is_tied="untie-embeddings-and-output-weights" not in flags,
        has_biases="disable-bias-linear" not in flags,
        num_positions=0 if is_rotary else _number(flags, "max-position-embeddings", source, seq_len),
        experts=_experts(flags, source, usual_ffn),
        name=source.partition(".")[0],
    )


def _vocab_size(flags: Flags, source: str) -> int:
    """Return the vocabulary's size, padded as Megatron pads it; GPT-2's where only a tokenizer's file gives it."""
    if "padded-vocab-size" in flags:
        return _number(flags, "padded-vocab-size", source)
    vocab_size = _number(flags, "vocab-size", source, 50_257)
    step = _number(flags, "make-vocab-size-divisible-by", source, _PADDED)
    step *= _number(flags, "tensor-model-parallel-size", source, 1)
    return -(-vocab_size // step) * step


def _experts(flags: Flags, source: str, usual_ffn: int) -> Experts | None:
    if "num-experts" not in flags:
        return None
    dense_ffn = _number(flags, "ffn-hidden-size", source, usual_ffn)
    ffn_size = _number(flags, "moe-ffn-hidden-size", source, dense_ffn)
    shared = _number(flags, "moe-shared-expert-intermediate-size", source, 0)
    return Experts(
        num_experts=_number(flags, "num-experts", source),
        num_chosen=_number(flags, "moe-router-topk", source, 2),
        ffn_size=ffn_size,
        num_shared=round(shared / ffn_size),
    )


def _mesh(flags: Flags, source: str) -> dict[str, object]:
    settings: dict[str, object] = {}
    for axis, name in (("tp", "tensor"), ("pp", "pipeline")):
        size = _number(flags, f"{name}-model-parallel-size", source, 1)
        if size > 1:
            settings[f"mesh.{axis}"] = size
    cp = _number(flags, "context-parallel-size", source, 1)
    if cp > 1:
        settings["mesh.cp"] = cp
        settings["context.transport"] = _TRANSPORTS.get(str(flags.get("cp-comm-type", "p2p")).replace("_", "-"), "ring")
    if "sequence-parallel" in flags and "mesh.tp" in settings:
        settings["tensor.sequence_parallel"] = True
    return settings


def _pipeline(flags: Flags, source: str) -> dict[str, object]:
    pp = _number(flags, "pipeline-model-parallel-size", source, 1)
    per_stage = _number(flags, "num-layers-per-virtual-pipeline-stage", source, 0)
    stages = _number(flags, "num-virtual-stages-per-pipeline-rank", source, 1)
    if per_stage and pp > 1:
        num_layers = _number(flags, "num-layers", source)
        if num_layers % (pp * per_stage):
            raise ConfigError(
                "megatron-virtual-layers",
                f"{source}: --num-layers-per-virtual-pipeline-stage {per_stage} x {pp} pipeline ranks do not divide "
                f"{num_layers} layers; give a divisor of {num_layers // pp if num_layers % pp == 0 else num_layers}",
            )
        stages = num_layers // (pp * per_stage)
    if pp == 1 or stages == 1:
        return {}
    return {"pipeline.schedule": "interleaved", "pipeline.virtual_stages": stages}


def _zero(flags: Flags, source: str) -> dict[str, object]:
    stage = 1 if "use-distributed-optimizer" in flags else 0
    if "use-torch-fsdp2" in flags:
        stage = 3
    strategy = str(flags.get("data-parallel-sharding-strategy", "")).replace("_", "-")
    if strategy:
        if strategy not in _SHARDING:
            known = ", ".join(_SHARDING)
            raise ConfigError(
                "megatron-sharding", f"{source}: --data-parallel-sharding-strategy {strategy} must be one of {known}"
            )
        stage = _SHARDING[strategy]
    settings: dict[str, object] = {"zero.stage": stage}
    if "optimizer-cpu-offload" in flags and stage:
        settings["tiers.optimizer"] = "host"
    return settings


def _precision(flags: Flags) -> dict[str, object]:
    if "bf16" in flags:
        # Megatron accumulates and reduces in fp32 under bf16.
        return {"precision.param": "bf16", "precision.reduce": "fp32"}
    if "fp16" in flags:
        is_wide = "accumulate-allreduce-grads-in-fp32" in flags
        return {"precision.param": "fp16", "precision.reduce": "fp32" if is_wide else "param"}
    return {"precision.param": "fp32"}


def _recompute(flags: Flags, source: str) -> dict[str, object]:
    granularity = str(flags.get("recompute-granularity", "selective" if "recompute-activations" in flags else "none"))
    if granularity == "none":
        return {}
    if granularity not in ("full", "selective"):
        raise ConfigError(
            "megatron-recompute",
            f"{source}: --recompute-granularity {granularity} must be full or selective; correct it there",
        )
    settings: dict[str, object] = {"recompute.mode": granularity}
    num_layers = _number(flags, "num-layers", source)
    per_rank = num_layers // _number(flags, "pipeline-model-parallel-size", source, 1)
    count = _number(flags, "recompute-num-layers", source, per_rank)
    if granularity == "full" and flags.get("recompute-method") == "block" and 0 < count < per_rank:
        settings["recompute.every"] = max(1, round(per_rank / count))
    return settings


def _notes(flags: Flags) -> tuple[str, ...]:
    notes = []
    if "vocab-size" not in flags and "padded-vocab-size" not in flags:
        notes.append("the flags name no vocabulary; GPT-2's 50,257 tokens are taken")
    if flags.get("recompute-granularity") == "selective" or "recompute-activations" in flags:
        notes.append("selective recomputation here repeats all but matrix products and attention, which saves more")
    if flags.get("recompute-method") == "uniform" and flags.get("recompute-num-layers", "1") != "1":
        notes.append("every block's input is kept, not one of each group's")
    if "fp8-format" in flags:
        notes.append("fp8 products have no counterpart; bf16 ones are priced")
    return tuple(notes)


def flags_in(text: str) -> dict[str, str | bool]:
    """Read the flags in a script or a command line; of a flag given twice, the last counts.

    Variables are replaced where the script itself says what they are.

    Raises:
        ConfigError: there is too much of it.
    """
    script = _substituted(re.sub(r"\\\r?\n", " ", text))
    flags: dict[str, str | bool] = {}
    for line in script.splitlines():
        words = [word.strip("()\"'") for word in _words(line)]
        for word, after in pairwise([*words, ""]):
            if not word.startswith("--") or len(word) == 2:
                continue
            name, has_value, value = word[2:].partition("=")
            if has_value:
                flags[_name(name)] = value
            elif after and not after.startswith("--"):
                flags[_name(name)] = after
            else:
                flags[_name(name)] = True
    return _bounded(flags)


def yaml_flags(text: str) -> dict[str, str | bool]:
    """Read the arguments in a YAML file of keys and values; nested sections are read too.

    >>> yaml_flags("model_parallel:\\n  tensor_model_parallel_size: 8\\n  sequence_parallel: true\\n  bf16: null")
    {'tensor-model-parallel-size': '8', 'sequence-parallel': True}
    """
    flags: dict[str, str | bool] = {}
    for line in text.splitlines():
        if (found := _YAML_LINE.match(line)) is None:
            continue
        name, value = found[1], found[2].strip().strip("'\"")
        if value.lower() == "true":
            flags[_name(name)] = True
        elif value and value.lower() not in ("null", "none", "false", "~"):
            flags[_name(name)] = value
    return _bounded(flags)


def _bounded(flags: dict[str, str | bool]) -> dict[str, str | bool]:
    if len(flags) > _MAX_FLAGS:
        raise ConfigError(
            "megatron-too-many-flags", f"{len(flags):,} flags are more than Megatron has; give those of the job"
        )
    return flags


def _name(flag: str) -> str:
    return flag.replace("_", "-")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        # A quote that spans lines, as where a script collects its flags in one string.
        return re.sub(r"(^|\s)#.*", "", line).replace('"', " ").replace("'", " ").split()


def _substituted(script: str) -> str:
    values: dict[str, str] = {}
    lines = []
    num_expanded = 0

    def value(found: re.Match[str]) -> str:
        nonlocal num_expanded
        text = _value(found, values)
        num_expanded += len(text)
        if num_expanded > _MAX_EXPANDED:
            raise ConfigError(
                "megatron-script-expands",
                f"the script's variables come to over {_MAX_EXPANDED:,} signs; give the flags themselves",
            )
        return text

    for line in script.splitlines():
        line = _VARIABLE.sub(value, line)
        if (found := _ASSIGNMENT.match(line)) is not None:
            values[found[1]] = found[2].strip("\"'")
        lines.append(line)
    return "\n".join(lines)


def _value(found: re.Match[str], values: Mapping[str, str]) -> str:
    name = found[1] or found[3]
    return values.get(name, found[2] if found[2] is not None else found[0])


def refuse_unset(flag: str, value: str | bool) -> None:
    """Refuse a value that is still a variable.

    Raises:
        ConfigError: it is.
    """
    if isinstance(value, str) and "$" in value:
        raise ConfigError(
            "megatron-variable-unset",
            f"--{flag} {value} is a variable that the file does not set; write its value there",
        )
