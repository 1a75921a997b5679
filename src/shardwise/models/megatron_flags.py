"""Read a job from Megatron's flags: the model's shape, the strategy as our config's keys, the batch.

>>> source = read_megatron("--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 "
...                        "--tensor-model-parallel-size 2 --sequence-parallel --vocab-size 32000")
>>> source.settings["mesh.tp"], source.settings["tensor.sequence_parallel"], source.shape.ffn_size
(2, True, 16384)
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import yaml

from shardwise.config.errors import ConfigError
from shardwise.config.untrusted_files import as_config_error, read_text
from shardwise.models.shape import ExpertsShape, ModelShape, ModelSource

_SIZES: Final = ("num-layers", "hidden-size", "num-attention-heads", "seq-length")
_COUNTS: Final = (
    "ffn-hidden-size", "num-query-groups", "kv-channels", "max-position-embeddings", "vocab-size", "padded-vocab-size",
    "num-experts", "moe-ffn-hidden-size", "expert-tensor-parallel-size", "micro-batch-size", "global-batch-size",
)  # fmt: skip
# Further counts, and what Megatron takes where they are not given.
_DEFAULTS: Final = MappingProxyType(
    {
        "make-vocab-size-divisible-by": 128,
        "moe-router-topk": 2,
        "tensor-model-parallel-size": 1,
        "pipeline-model-parallel-size": 1,
        "num-virtual-stages-per-pipeline-rank": 1,
        "context-parallel-size": 1,
        "expert-model-parallel-size": 1,
    }
)
_COUNTS_OR_NONE: Final = (
    "num-layers-per-virtual-pipeline-stage", "moe-shared-expert-intermediate-size", "recompute-num-layers",
)  # fmt: skip
_SWITCHES: Final = (
    "group-query-attention", "use-rotary-position-embeddings", "swiglu", "untie-embeddings-and-output-weights",
    "disable-bias-linear", "sequence-parallel", "use-distributed-optimizer", "use-torch-fsdp2", "recompute-activations",
    "bf16", "fp16", "accumulate-allreduce-grads-in-fp32", "optimizer-cpu-offload",
)  # fmt: skip
_TEXTS: Final = ("position-embedding-type", "cp-comm-type", "recompute-method", "fp8-format")
_SHARDING: Final = MappingProxyType({"no-shard": 0, "optim": 1, "optim-grads": 2, "optim-grads-params": 3})
_TRANSPORTS: Final = MappingProxyType({"p2p": "ring", "all-gather": "all-gather", "a2a": "ulysses"})
_ASSIGNMENT: Final = re.compile(
    r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s(;]*)\s*+;?\s*+(?:#.*)?$"
)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?-((?:[^}$]|\$(?!\{))*+))?\}|\$(\w+)")
_COLLECTED: Final = re.compile(r"^\w+=[(\"']*(?=--)")
_MAX_BYTES: Final = 2**18
_MAX_FLAGS: Final = 1000
_MAX_DIGITS, _MAX_VALUE, _MAX_SHOWN = 12, 200, 60
_FLAG_SHARE: Final = 0.93
_FIX: Final = "give our TOML, another tool's JSON, or a script or YAML file of Megatron's flags"


def read_megatron(source: str | Path) -> ModelSource:
    """Return the job that a script, a YAML file or a command line starts.

    Args:
        source: the path of a `.sh`, `.yaml` or text file; or, where it holds `--`, the flags themselves.

    Raises:
        ConfigError: the file cannot be read, a flag is misspelled, a size is missing, or a value cannot be.
    """
    text, name, is_yaml = str(source), "the flags", False
    if "--" not in text:
        path = Path(source)
        name, is_yaml = path.name, path.suffix in (".yaml", ".yml")
        with as_config_error():
            text = read_text(path, _FIX, max_bytes=_MAX_BYTES)
    arguments = yaml_words(text) if is_yaml else script_words(text)
    num_flags = sum(word.startswith("--") for word in arguments)
    if not num_flags:
        raise ConfigError("megatron-no-flags", f"{source} holds no flags of Megatron's; {_FIX}")
    if num_flags > _MAX_FLAGS:
        raise ConfigError("megatron-too-many-flags", f"{name}: {num_flags:,} flags are more than Megatron has; {_FIX}")
    flags = _parsed(arguments, name)
    return ModelSource(
        shape=_shape(flags, name),
        settings=_mesh(flags, name) | _zero(flags) | _precision(flags) | _recompute(flags),
        seq_len=flags.seq_length,
        global_batch=flags.global_batch_size,
        notes=tuple(_notes(flags)),
    )


class _Parser(argparse.ArgumentParser):
    """Parse flags, and raise a ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("megatron-flag-refused", f"{self.prog}: {message}; correct it there")


def _count(text: str, least: int = 1) -> int:
    if "$" in text:
        raise argparse.ArgumentTypeError(f"{text} is a variable that the file does not set")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text[:_MAX_SHOWN]} must be a whole number >= {least}")
    return int(text)


def _dashed(text: str) -> str:
    return text.replace("_", "-")


def _parsed(words: Sequence[str], source: str) -> Any:
    """Return the flags that are read here, by their names with underscores; others are left out."""
    parser = _Parser(prog=source, add_help=False, allow_abbrev=False)
    for name in (*_SIZES, *_COUNTS, *_DEFAULTS):
        parser.add_argument(f"--{name}", type=_count, default=_DEFAULTS.get(name))
    for name in _COUNTS_OR_NONE:
        parser.add_argument(f"--{name}", type=lambda text: _count(text, least=0))
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name in _TEXTS:
        parser.add_argument(f"--{name}", type=_dashed)
    parser.add_argument("--data-parallel-sharding-strategy", type=_dashed, choices=tuple(_SHARDING))
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    flags, unknown = parser.parse_known_args(words)
    names_given = {word.partition("=")[0] for word in words if word.startswith("--")}
    names_known = [f"--{name.replace('_', '-')}" for name in vars(flags)]
    for word in unknown:
        close = difflib.get_close_matches(word.partition("=")[0], names_known, n=1, cutoff=_FLAG_SHARE)
        if word.startswith("--") and close and close[0] not in names_given:
            raise ConfigError(
                "megatron-unknown-flag", f"{source}: {word} is not a flag of Megatron's; did you mean {close[0]}?"
            )
    for name in _SIZES:
        if getattr(flags, name.replace("-", "_")) is None:
            raise ConfigError("megatron-flag-missing", f"{source} misses --{name}; add --{name} N")
    return flags


def _shape(flags: Any, source: str) -> ModelShape:
    hidden, num_heads = flags.hidden_size, flags.num_attention_heads
    if flags.kv_channels is None and hidden % num_heads:
        raise ConfigError(
            "heads-divide-hidden",
            f"{source}: {num_heads} heads do not divide the hidden size {hidden}; add --kv-channels N",
        )
    # What Megatron itself takes where a size is not given: the feed-forward's, and the vocabulary's, padded.
    ffn_size = flags.ffn_hidden_size or (int(4 * hidden * 2 / 3) // 64 * 64 if flags.swiglu else 4 * hidden)
    step = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    vocab_size = flags.padded_vocab_size or -(-(flags.vocab_size or 50_257) // step) * step
    is_rotary = flags.position_embedding_type in ("rope", "none") or flags.use_rotary_position_embeddings
    experts = None
    if flags.num_experts is not None:
        of_expert = flags.moe_ffn_hidden_size or ffn_size
        experts = ExpertsShape(
            num_experts=flags.num_experts,
            num_chosen=flags.moe_router_topk,
            ffn_size=of_expert,
            num_shared=round((flags.moe_shared_expert_intermediate_size or 0) / of_expert),
        )
    return ModelShape(
        num_layers=flags.num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=(flags.num_query_groups if flags.group_query_attention else None) or num_heads,
        head_dim=flags.kv_channels or hidden // num_heads,
        ffn_size=ffn_size,
        vocab_size=vocab_size,
        ffn="gated" if flags.swiglu else "plain",
        is_tied=not flags.untie_embeddings_and_output_weights,
        has_biases=not flags.disable_bias_linear,
        num_positions=0 if is_rotary else flags.max_position_embeddings or flags.seq_length,
        experts=experts,
        name=source.partition(".")[0],
    )


def _mesh(flags: Any, source: str) -> dict[str, object]:
    tp, pp, cp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size, flags.context_parallel_size
    sizes = (("tp", tp), ("pp", pp), ("cp", cp), ("ep", flags.expert_model_parallel_size))
    settings: dict[str, object] = {f"mesh.{axis}": size for axis, size in sizes if size > 1}
    if cp > 1:
        settings["context.transport"] = _TRANSPORTS.get(flags.cp_comm_type or "p2p", "ring")
    if tp > 1 and flags.sequence_parallel:
        settings["tensor.sequence_parallel"] = True
    if flags.micro_batch_size is not None:
        settings["batch.micro_size"] = flags.micro_batch_size
    stages, per_stage = flags.num_virtual_stages_per_pipeline_rank, flags.num_layers_per_virtual_pipeline_stage
    if per_stage and pp > 1:
        stages, left = divmod(flags.num_layers, pp * per_stage)
        if left:
            raise ConfigError(
                "megatron-virtual-layers",
                f"{source}: --num-layers-per-virtual-pipeline-stage {per_stage} x {pp} pipeline ranks do not divide "
                f"{flags.num_layers} layers; give a divisor of {flags.num_layers // pp}",
            )
    if pp > 1 and stages > 1:
        settings |= {"pipeline.schedule": "interleaved", "pipeline.virtual_stages": stages}
    return settings


def _zero(flags: Any) -> dict[str, object]:
    stage = 3 if flags.use_torch_fsdp2 else int(flags.use_distributed_optimizer)
    stage = _SHARDING.get(flags.data_parallel_sharding_strategy, stage)
    away: dict[str, object] = {"tiers.optimizer": "host"} if flags.optimizer_cpu_offload and stage else {}
    return {"zero.stage": stage, **away}


def _precision(flags: Any) -> dict[str, object]:
    if flags.bf16:  # Megatron accumulates and reduces in fp32 under bf16
        return {"precision.param": "bf16", "precision.reduce": "fp32"}
    if flags.fp16:
        reduce = "fp32" if flags.accumulate_allreduce_grads_in_fp32 else "param"
        return {"precision.param": "fp16", "precision.reduce": reduce}
    return {"precision.param": "fp32"}


def _recompute(flags: Any) -> dict[str, object]:
    mode = flags.recompute_granularity or ("selective" if flags.recompute_activations else None)
    if mode is None:
        return {}
    per_rank = flags.num_layers // flags.pipeline_model_parallel_size
    count = flags.recompute_num_layers or 0
    is_block = mode == "full" and flags.recompute_method == "block" and 0 < count < per_rank
    every: dict[str, object] = {"recompute.every": max(1, round(per_rank / count))} if is_block else {}
    return {"recompute.mode": mode, **every}


def _notes(flags: Any) -> Iterator[str]:
    if flags.vocab_size is None and flags.padded_vocab_size is None:
        yield "the flags name no vocabulary; GPT-2's 50,257 tokens are taken"
    if flags.recompute_granularity == "selective" or flags.recompute_activations:
        yield "selective recomputation here repeats all but matrix products and attention, which saves more"
    if flags.recompute_method == "uniform" and flags.recompute_num_layers not in (None, 1):
        yield "every block's input is kept, not one of each group's"
    of_expert = flags.expert_tensor_parallel_size or flags.tensor_model_parallel_size
    if flags.num_experts is not None and of_expert > 1:
        yield f"each expert is whole on its rank here, where --expert-tensor-parallel-size is {of_expert}"
    if flags.fp8_format is not None:
        yield "fp8 products are precision.linears=fp8 here; bf16 ones are priced"


def script_words(text: str) -> list[str]:
    """Return the words of a script or a command line, with the values of the variables that it sets itself.

    >>> script_words("TP=2\\nrun --tensor_model_parallel_size ${TP} --bf16")[-3:]
    ['--tensor-model-parallel-size', '2', '--bf16']
    """
    script = _with_values(re.sub(r"\\\r?\n", " ", text))
    try:
        tokens = shlex.split(script, comments=True)
    except ValueError:  # a quote that is not closed, as in a message
        tokens = re.sub(r"(^|\s)#.*", "", script).translate(str.maketrans("\"'", "  ")).split()
    # A script may collect its flags in one string or list, the first of them beside its name.
    bare = (_COLLECTED.sub("", word) for word in tokens)
    parts = (token.strip("()\"'") for word in bare for token in (word.split() if "--" in word else [word]))
    return [_named(token) for token in parts if token != "--"]


def yaml_words(text: str) -> list[str]:
    """Return the arguments in a YAML file of keys and values as words; nested sections are read too.

    >>> yaml_words("model_parallel:\\n  tensor_model_parallel_size: 8\\n  sequence_parallel: true\\n  bf16: null")
    ['--tensor-model-parallel-size', '8', '--sequence-parallel']

    Raises:
        ConfigError: it is no YAML.
    """
    try:
        pending = [yaml.safe_load(text)]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError("not-yaml", f"the file is no YAML: {' '.join(str(error).split())}; {_FIX}") from None
    arguments, seen = [], set()
    while pending:
        value = pending.pop()
        if id(value) in seen:  # an alias
            continue
        seen.add(id(value))
        if isinstance(value, list):
            pending += reversed(value)
        elif isinstance(value, dict):
            pending += [item for item in reversed(value.values()) if isinstance(item, list | dict)]
            for key, item in value.items():
                if not isinstance(item, list | dict) and item not in (None, False):
                    arguments += [_named(f"--{str(key).lstrip('-')}"), *([] if item is True else [str(item)])]
    return arguments


def _named(word: str) -> str:
    """Write a flag's name as Megatron does, with dashes."""
    name, has_value, value = word.partition("=")
    return name.replace("_", "-") + has_value + value if word.startswith("--") else word


def _with_values(script: str) -> str:
    """Return the script with the short values that it gives to its variables; long ones are flags, and read there."""
    values: dict[str, str] = {}
    lines = []
    for line in script.splitlines():
        line = _VARIABLE.sub(lambda found: values.get(found[1] or found[3], found[2] or found[0]), line)
        if (match := _ASSIGNMENT.match(line)) is not None and len(match[2]) <= _MAX_VALUE:
            values[match[1]] = match[2].strip("\"'")
        lines.append(line)
    return "\n".join(lines)
