"""Defines the typed config: everything a user may write, and nothing else.

A config is a frozen tree of sections. Unknown keys are refused with a suggestion, values are checked before any process
group starts, and `resolve` turns what the user wrote into the one immutable config that determines a run.

>>> config = Config.from_dict({"zero": {"stage": 3}, "batch": {"global_size": 8, "micro_size": 2}})
>>> resolved = config.resolve(world_size=2)
>>> resolved.batch.accumulation, resolved.mesh.dp_shard
(2, 2)
>>> Config.from_dict({"zero": {"stege": 3}})
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: zero.stege is not a config key; did you mean zero.stage?
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Never, Self, get_args

from pydantic import BaseModel, ValidationError

from shardwise.config.arguments import OWN_RULE, checked
from shardwise.config.errors import ConfigError, steering
from shardwise.config.other_tools import setting_of
from shardwise.config.sections import (
    MAX_MICRO_BATCHES,
    MAX_RANKS,
    AttentionConfig,
    BatchConfig,
    CheckpointConfig,
    CompileConfig,
    ContextConfig,
    DataConfig,
    Dtype,
    ExpertsConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    Reduce,
    RunConfig,
    SchedulerConfig,
    Section,
    TensorConfig,
    Tier,
    TiersConfig,
    ZeroConfig,
)
from shardwise.config.untrusted_files import UntrustedFileError, as_config_error, parse_json, parse_toml, read_json
from shardwise.config.untrusted_files import read_toml as read_foreign_toml
from shardwise.config.validate import (
    wrong_attention,
    wrong_chunks,
    wrong_context,
    wrong_feedback,
    wrong_linears,
    wrong_pipeline,
    wrong_run,
    wrong_schedule_size,
    wrong_tiers,
    wrong_zero,
)

__all__ = [
    "AttentionConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CompileConfig",
    "Config",
    "ContextConfig",
    "DataConfig",
    "Dtype",
    "ExpertsConfig",
    "LoraConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "Reduce",
    "ResolvedConfig",
    "RunConfig",
    "SchedulerConfig",
    "TensorConfig",
    "Tier",
    "TiersConfig",
    "ZeroConfig",
    "all_keys",
    "batch_equation",
    "describe_key",
    "is_config",
    "read_toml",
    "reference_tables",
    "resolve_batch",
    "set_key",
    "shown_value",
]


# The code of a wrong value by what pydantic calls it; of any other, a value has the wrong type.
_KINDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "out-of-range": frozenset(
            {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
        ),
        "wrong-length": frozenset({"too_short", "too_long", "missing"}),
        "unknown-choice": frozenset({"literal_error"}),
    }
)
_OF_JOB: Final = frozenset(("optimizer.lr",))  # `shardwise train` has other defaults for a model that it goes on with
# Keys of what is no more: configs that earlier runs and checkpoints have left still name them.
_WITHOUT_EFFECT: Final = frozenset(("tiers.step_in_backward", "precision.errors_every"))
_MAX_SHOWN = 120
# A path of Linux has at most so many bytes, and no other text is as long.
_MAX_TEXT_BYTES = 4095
_MAX_NAMED = 100


class Config(Section):
    """The whole config has these sections; every field has a default, so `Config()` is valid.

    Raises:
        ConfigError: from every `from_...`, `override` and `resolve`; it names the value, the rule and the fix.
    """

    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    mesh: MeshConfig = MeshConfig()
    precision: PrecisionConfig = PrecisionConfig()
    zero: ZeroConfig = ZeroConfig()
    tiers: TiersConfig = TiersConfig()
    tensor: TensorConfig = TensorConfig()
    pipeline: PipelineConfig = PipelineConfig()
    context: ContextConfig = ContextConfig()
    attention: AttentionConfig = AttentionConfig()
    experts: ExpertsConfig = ExpertsConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    compile: CompileConfig = CompileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    @checked
    def __init__(self, **sections: Any) -> None:
        _refuse_unknown_keys(type(self), sections, prefix="")
        try:
            super().__init__(**sections)
        except ValidationError as error:
            section, leaf = map(str, error.errors()[0]["loc"][:2])
            kinds = {detail["type"] for detail in error.errors() if detail["loc"][:2] == (section, leaf)}
            code = next((code for code, its in _KINDS.items() if not kinds.isdisjoint(its)), "wrong-type")
            raise ConfigError(code, _explain(section, leaf, sections[section][leaf])) from None

    @classmethod
    @checked
    def from_dict(cls, values: Annotated[Mapping[str, Any], OWN_RULE]) -> Self:
        """Build a config from nested mappings, as parsed from TOML or JSON."""
        if not isinstance(values, Mapping):
            raise ConfigError(
                "not-a-config", f"{shown_value(values)} is not a config; give a table of sections, such as zero"
            )
        written = {
            name: {key: value for key, value in section.items() if f"{name}.{key}" not in _WITHOUT_EFFECT}
            if isinstance(section, Mapping)
            else section
            for name, section in values.items()
        }
        _refuse_unknown_keys(cls, written, prefix="")
        return cls(**written)

    @classmethod
    @checked
    def from_toml(cls, path: str | Path) -> Self:
        """Read a TOML file, or the config.json that a run has left."""
        return cls.from_dict(read_toml(path))

    @classmethod
    @checked
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        with as_config_error():
            values = parse_json(text, "the config", "give what to_json wrote")
        return cls.from_dict(values)

    def to_json(self) -> str:
        """Write every field, defaults included, as indented JSON."""
        return self.model_dump_json(indent=2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and dict(self) == dict(other)  # resolved or not

    @checked
    def override(self, assignments: Sequence[str]) -> Config:
        """Apply `section.key=value` assignments; values are read as TOML, and as plain strings where that fails or a
        string is asked for.

        >>> Config().override(["zero.stage=3", "data.path=corpus.txt"]).zero.stage
        3
        """
        values = self.model_dump()
        for assignment in assignments:
            key, separator, text = assignment.partition("=")
            if not separator:
                raise ConfigError(
                    "not-an-assignment", f"{shown_value(assignment)} is not an assignment; write section.key=value"
                )
            set_key(values, key.strip(), _parse_value(key.strip(), text.strip()))
        return Config.from_dict(values)

    @checked
    def resolve(self, world_size: int) -> ResolvedConfig:
        """Fill in what follows from the world size: the mesh, then the batch; refuse what cannot be."""
        if world_size < 1:
            raise ConfigError("world-size-range", f"world size {world_size} holds no rank; start at least 1")
        if world_size > MAX_RANKS:
            raise ConfigError(
                "world-size-range",
                f"world size {world_size:,} is more than a mesh may have; start at most {MAX_RANKS:,}",
            )
        for code, message in (
            *wrong_tiers(self.tiers, self.zero, self.recompute),
            *wrong_zero(self.zero, self.tiers, self.precision),
            *wrong_feedback(self.precision),
            *wrong_linears(self.precision, self.mesh),
            *wrong_pipeline(self.pipeline, self.mesh, self.zero, self.compile),
            *wrong_context(self.context, self.mesh),
            *wrong_attention(self.attention),
            *wrong_chunks(self.context, self.pipeline, self.compile),
            *wrong_run(self.run),
        ):
            raise ConfigError(code, message)
        mesh = _resolve_mesh(self.mesh, world_size)
        num_data_ranks = _known(mesh.dp_replicate) * _known(mesh.dp_shard)
        batch = resolve_batch(self.batch, num_data_ranks)
        for code, message in wrong_schedule_size(_known(batch.accumulation), self.pipeline, mesh):
            raise ConfigError(code, message)
        return ResolvedConfig.model_construct(self.model_fields_set, **{**dict(self), "mesh": mesh, "batch": batch})

    def with_sections(self, sections: Mapping[str, Section]) -> Config:
        """Return a config with other sections, which is to be resolved again."""
        return Config.model_construct(self.model_fields_set, **{**dict(self), **sections})


if TYPE_CHECKING:

    class _Mesh(MeshConfig):
        dp_replicate: int
        dp_shard: int

    class _Batch(BatchConfig):
        global_size: int
        micro_size: int
        accumulation: int


class ResolvedConfig(Config):
    """A config whose mesh and batch are known, as `Config.resolve` returns it; it determines a run."""

    if TYPE_CHECKING:
        mesh: _Mesh
        batch: _Batch

    TAKEN_FROM: ClassVar[type[Config]] = Config  # public functions take what has all that one has, by `of`

    def __init__(self, **sections: Any) -> None:
        super().__init__(**sections)
        for _, size in (*self.mesh, *self.batch):
            _known(size)

    @classmethod
    def of(cls, config: Config) -> ResolvedConfig:
        """Return the config; a ConfigError says that it is not resolved."""
        return config if isinstance(config, cls) else cls(**dict(config))

    if TYPE_CHECKING:

        def resolve(self, world_size: Never) -> Never:  # type: ignore[override]
            """Do not resolve a config twice."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """Parse a TOML file, or a JSON file without its nulls; a ConfigError names a file that cannot be read."""
    fix = "give the path of a TOML file"
    with as_config_error():
        if Path(path).suffix != ".json":
            return read_foreign_toml(path, fix)
        values = read_json(path, fix)
    if not isinstance(values, dict):
        raise ConfigError("not-a-config", f"{path} is not a config; {fix}, or of the config.json of a run")
    return {
        section: {key: value for key, value in keys.items() if value is not None} if isinstance(keys, dict) else keys
        for section, keys in values.items()
    }


def is_config(path: str | Path) -> bool:
    """Return whether a file is a Shardwise config: by its name, or, for JSON, by its sections."""
    if Path(path).suffix != ".json":
        return Path(path).suffix == ".toml"
    try:
        values = read_toml(path)
    except ConfigError:
        return False  # who reads it as another tool's says why it cannot be read
    return bool(values) and values.keys() <= Config.model_fields.keys()


def set_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` to `value` in the nested dicts `values`, in place, and create missing sections."""
    *sections, leaf = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError("unknown-key", f"{_shown(key)} is not a config key; {_shown(section)} takes no subkeys")
    values[leaf] = value


def resolve_batch(batch: BatchConfig, num_data_ranks: int) -> BatchConfig:
    """Derive the missing term of global = micro x accumulation x data-parallel; one alone takes 1 for the others.

    >>> resolve_batch(BatchConfig(global_size=16, micro_size=2), num_data_ranks=4).accumulation
    2
    >>> resolve_batch(BatchConfig(global_size=10, micro_size=4), num_data_ranks=2)
    Traceback (most recent call last):
        ...
    shardwise.config.errors.ConfigError: batch.global_size=10 is not a multiple of 8 = micro_size 4 x 2 ranks; \
nearest: 8, 16
    """
    total, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    if total is None:
        micro, accumulation = micro or 1, accumulation or 1
        total = micro * accumulation * num_data_ranks
    elif micro is None:
        accumulation = accumulation or 1
        micro = _divide_batch(total, f"accumulation {accumulation}", accumulation, num_data_ranks)
    elif accumulation is None:
        accumulation = _divide_batch(total, f"micro_size {micro}", micro, num_data_ranks)
    elif (product := micro * accumulation * num_data_ranks) != total:
        raise ConfigError(
            "batch-equation",
            f"batch.global_size={total} but micro_size {micro} x accumulation {accumulation} x {num_data_ranks} "
            f"data-parallel ranks = {product}; give {product}, or leave one of the three out and it is derived",
        )
    if max(micro, accumulation, total // MAX_MICRO_BATCHES) > MAX_MICRO_BATCHES:
        raise ConfigError(
            "batch-too-large",
            f"batch.global_size={total:,} over {num_data_ranks:,} data-parallel ranks makes micro_size {micro:,} x "
            f"accumulation {accumulation:,}; neither may be more than {MAX_MICRO_BATCHES:,}; use fewer samples",
        )
    return BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation)


def batch_equation(batch: BatchConfig, num_data_ranks: int, is_pipelined: bool = False) -> str:
    """Return the batch arithmetic of a resolved config as one line.

    >>> batch_equation(resolve_batch(BatchConfig(micro_size=4), 2), 2)
    'global batch 8 = 4 samples a micro-batch x 1 accumulation x 2 data-parallel ranks'

    Args:
        batch: resolved, so that none of its terms is None.
        is_pipelined: whether mesh.pp > 1, where accumulation is called micro-batches (chunks).
    """
    micro_batches = "micro-batch" if batch.accumulation == 1 else "micro-batches"
    chunks = f"{micro_batches} (chunks)" if is_pipelined else "accumulation"
    return (
        f"global batch {batch.global_size} = {batch.micro_size} samples a micro-batch x "
        f"{batch.accumulation} {chunks} x {num_data_ranks} data-parallel ranks"
    )


def _divide_batch(total: int, factor_text: str, factor: int, num_data_ranks: int) -> int:
    unit = factor * num_data_ranks
    if total % unit:
        legal = sorted({max(unit, total // unit * unit), (total // unit + 1) * unit})
        raise ConfigError(
            "batch-multiple",
            f"batch.global_size={total} is not a multiple of {unit} = {factor_text} x {num_data_ranks} ranks; "
            f"nearest: {', '.join(map(str, legal))}",
        )
    return total // unit


def _resolve_mesh(mesh: MeshConfig, world_size: int) -> MeshConfig:
    """Fill in the data-parallel axes: what is left over is sharded, or replicates shard groups of a given size."""
    if mesh.dp_shard is None and mesh.dp_replicate is None:
        mesh = mesh.model_copy(update={"dp_replicate": 1})
    # Experts divide ranks that other axes have already.
    axes = {axis: size for axis, size in mesh if size is not None and axis != "ep"}
    fixed = math.prod(axes.values())
    equation = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    if None not in (mesh.dp_shard, mesh.dp_replicate):
        if fixed != world_size:
            raise ConfigError(
                "mesh-size",
                f"world size {world_size} is not {equation} = {fixed}; start {fixed} ranks or leave mesh.dp_shard out",
            )
        return mesh
    if world_size % fixed:
        raise ConfigError(
            "mesh-size",
            f"world size {world_size} is not a multiple of {equation} = {fixed}; start a multiple of {fixed} ranks",
        )
    missing = "dp_shard" if mesh.dp_shard is None else "dp_replicate"
    return mesh.model_copy(update={missing: world_size // fixed})


def _refuse_unknown_keys(section: type[BaseModel], values: Mapping[str, Any], prefix: str) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        field = section.model_fields.get(key)
        if field is None:
            raise ConfigError("unknown-key", f"{_shown(path)} is not a config key; {_suggestion(path)}")
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            if not isinstance(value, Mapping | nested):
                example = f"{path}.{next(iter(nested.model_fields))}"
                raise ConfigError(
                    "not-a-section",
                    f"{path}={shown_value(value)} is not a section; set one of its keys, such as {example}",
                )
            if isinstance(value, Mapping):
                _refuse_unknown_keys(nested, value, prefix=f"{path}.")
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and (wrong := steering(text)):
                raise ConfigError(
                    "control-character",
                    f"{path}={shown_value(text)} holds the control character {wrong!r}; leave it out",
                )
            if isinstance(text, str) and len(text.encode()) > _MAX_TEXT_BYTES:
                raise ConfigError(
                    "text-too-long",
                    f"{path}={shown_value(text)} is longer than any path; give at most {_MAX_TEXT_BYTES:,} bytes",
                )


def _shown(path: str) -> str:
    """Return a key as the user wrote it, but on one line, not endless and never nothing."""
    return path if 0 < len(path) <= _MAX_SHOWN and path.isprintable() else shown_value(path)


def shown_value(value: Any) -> str:
    """Return `repr(value)`, cut where it is long: it may be a file, or have more digits than Python writes."""
    try:
        text = repr(value)
    except ValueError:
        return "an integer of more than 4,300 digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text):,} characters)"


def _suggestion(path: str) -> str:
    keys = [*all_keys(), *Config.model_fields]
    section, _, leaf = path.rpartition(".")
    if path in keys:
        return f"put {leaf} into the section {section}"
    close = [name for name in keys if name.rpartition(".")[2] == leaf]
    if not close and (setting := setting_of(leaf)):
        return f"did you mean {setting}?"
    close = close or difflib.get_close_matches(path, keys, n=1, cutoff=0.75)
    close = close or [name for name in keys if difflib.get_close_matches(leaf, [name.rpartition(".")[2]], cutoff=0.75)]
    if close:
        return f"did you mean {' or '.join(close[:3])}?"
    return f"sections are {', '.join(Config.model_fields)}"


def all_keys() -> list[str]:
    """Return every dotted key that a config may have, in order."""
    return [f"{name}.{leaf}" for name, section in _sections().items() for leaf in section.model_fields]


def _sections() -> dict[str, Any]:
    return {name: field.annotation for name, field in Config.model_fields.items()}


def describe_key(key: str) -> str:
    """Return what `section.key` means, in one or two sentences."""
    return str(_schema(*key.split("."))["description"]).replace("\n", " ")


def reference_tables() -> str:
    """Return all keys as Markdown: a table for each section."""
    lines = []
    for name, section in _sections().items():
        lines += [f"## {name}", "", str(inspect.getdoc(section)), ""]
        lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
        for leaf in section.model_fields:
            schema, meaning = _schema(name, leaf), describe_key(f"{name}.{leaf}").replace("|", "\\|")
            default = "" if schema["default"] is None else f"`{json.dumps(schema['default'])}`"
            lines.append(f"| `{leaf}` | {_rule(schema)} | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines[:-1])


def _schema(section: str, leaf: str) -> dict[str, Any]:
    schema: dict[str, Any] = _sections()[section].model_json_schema()["properties"][leaf]
    return schema


def _explain(section: str, leaf: str, value: Any) -> str:
    """Say why a field cannot have `value` and what it can have, from its own schema: pydantic's words name no fix."""
    schema = _schema(section, leaf)
    word = value.lower() if isinstance(value, str) and len(value) <= _MAX_SHOWN else ""
    close = difflib.get_close_matches(word, _words(schema), n=1, cutoff=0.5)
    shown = "" if f"{section}.{leaf}" in _OF_JOB else f" {json.dumps(schema['default'])}"
    default = "" if schema["default"] is None else f" for the default{shown}"
    fix = f"did you mean {close[0]}?" if close else f"leave it out{default}"
    return f"{section}.{leaf}={shown_value(value)} must be {_rule(schema, value)}; {fix}"


def _rule(schema: Mapping[str, Any], value: Any = None) -> str:
    """Say what a value must be; a bound that only guards against absurd numbers is named where the value exceeds it."""
    if "anyOf" in schema:
        return " or ".join(_rule(option, value) for option in schema["anyOf"] if option["type"] != "null")
    if choices := _words(schema):
        return " or ".join(choices)
    if schema["type"] == "array":
        item = schema["items"] if "items" in schema else schema["prefixItems"][0]
        size = f" of {schema['maxItems']}" if "maxItems" in schema else " of 1 or more" if "minItems" in schema else ""
        return f"a list{size}, each {_rule(item)}"
    if schema["type"] == "object":
        return f"a table of names, each {_rule(schema['additionalProperties'])}"
    kinds = {"integer": "an integer", "number": "a finite number", "boolean": "true or false", "string": "a string"}
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    named = {bound: sign for bound, sign in signs.items() if bound in schema}
    if schema.get("maximum", 0) > _MAX_NAMED and not (isinstance(value, int | float) and value > schema["maximum"]):
        del named["maximum"]
    bounds = " and ".join(f"{sign} {_number(schema[bound])}" for bound, sign in named.items())
    return f"{kinds[schema['type']]} {bounds}".rstrip()


def _number(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _words(schema: Mapping[str, Any]) -> list[str]:
    """Return the words that a field may be, where it is a choice."""
    return [
        word for option in schema.get("anyOf", [schema]) for word in option.get("enum", [option.get("const")]) if word
    ]


def _parse_value(key: str, text: str) -> Any:
    section, _, leaf = key.partition(".")
    field = _sections()[section].model_fields.get(leaf) if section in _sections() else None
    if field is not None and text in get_args(field.annotation):
        return text  # "none" may be a word of the field's own
    if text.lower() in ("none", "null"):
        return None
    try:
        value = parse_toml(f"value = {text}", key, "write it as TOML does")["value"]
    except UntrustedFileError:
        return text
    asks_for_text = field is not None and field.annotation in (str, str | None)
    return text if asks_for_text and not isinstance(value, str) else value


def _known(value: int | None) -> int:
    if value is None:
        raise ConfigError("config-not-resolved", "the config is not resolved; call config.resolve(world_size) first")
    return value
