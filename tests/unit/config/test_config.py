"""The config: what it takes, what it refuses and in which words, and what `resolve` derives."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shardwise.config.resolve import (
    BatchConfig,
    Config,
    ConfigError,
    MeshConfig,
    RunConfig,
    _resolve_mesh,
    all_keys,
    batch_equation,
    read_toml,
    resolve_batch,
    set_key,
)

SMALL = st.integers(1, 12)
TEXT = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]))


def legal_values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a field's JSON schema allows."""
    if "anyOf" in schema:
        return st.one_of(*map(legal_values, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kind, low, high = schema["type"], schema.get("minimum"), schema.get("maximum")
    if kind == "array":
        length = schema.get("maxItems")
        items = legal_values(schema["items"] if length is None else schema["prefixItems"][0])
        return st.lists(items, min_size=length or schema.get("minItems", 0), max_size=length or 3)
    if kind == "number":
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return st.floats(
            low if above is None else above,
            high if below is None else below,
            exclude_min=above is not None,
            exclude_max=below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    if kind == "integer":
        return st.integers(low, high)
    if kind == "object":
        return st.dictionaries(TEXT, legal_values(schema["additionalProperties"]), max_size=2)
    return {"boolean": st.booleans(), "string": TEXT, "null": st.none()}[kind]


def in_toml(value: Any) -> str:
    """A value as TOML writes it, on one line."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {in_toml(each)}" for key, each in value.items())
            + "}"
        )
    return json.dumps(value, ensure_ascii=False)


SECTIONS = {
    name: st.fixed_dictionaries(
        {},
        optional={key: legal_values(each) for key, each in field.annotation.model_json_schema()["properties"].items()},
    )
    for name, field in Config.model_fields.items()
}
WRITTEN = st.fixed_dictionaries({}, optional=SECTIONS)


def as_toml(written: dict[str, dict[str, Any]]) -> str:
    """TOML writes these values as JSON does, and has no null."""
    lines = []
    for section, values in written.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {in_toml(v)}" for key, v in values.items() if v is not None]
    return "\n".join(lines)


def message_of(written: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict(written)
    return str(caught.value)


# What is written comes back


@given(WRITTEN)
def test_json_holds_every_field_and_comes_back(written: dict[str, Any]) -> None:
    config = Config.from_dict(written)
    assert Config.from_json(config.to_json()) == config
    dumped = json.loads(config.to_json())
    assert [f"{section}.{key}" for section, values in dumped.items() for key in values] == all_keys()


@given(WRITTEN)
def test_toml_and_assignments_mean_what_the_dict_means(
    tmp_path_factory: pytest.TempPathFactory, written: dict[str, Any]
) -> None:
    config = Config.from_dict(written)
    assignments = [
        f"{section}.{key}={'none' if value is None else in_toml(value)}"
        for section, values in written.items()
        for key, value in values.items()
    ]
    assert Config().override(assignments) == config
    # None where there is another default cannot be written in TOML; the only such field is clip_norm.
    assume(written.get("optimizer", {}).get("clip_norm", 0) is not None)
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_text(as_toml(written), encoding="utf-8")
    assert Config.from_toml(path) == config


def test_values_are_kept_and_the_rest_is_default() -> None:
    config = Config.from_dict({"optimizer": {"betas": [0.8, 0], "lr": 1}, "zero": {"blocks": ["Block"]}})
    assert (config.optimizer.betas, config.optimizer.lr, config.zero.blocks) == ((0.8, 0.0), 1.0, ("Block",))
    assert (config.optimizer.eps, config.zero.stage) == (1e-8, 2)
    assert Config.from_dict({}) == Config()


def test_any_mapping_is_a_table_and_a_section_stands_for_itself() -> None:
    proxy = MappingProxyType({"zero": MappingProxyType({"stage": 3}), "run": RunConfig(steps=5)})
    config = Config.from_dict(proxy)
    assert (config.zero.stage, config.run.steps) == (3, 5)
    assert message_of(MappingProxyType({"zero": MappingProxyType({"stage": 4})})).startswith("zero.stage=4 must be ")


def test_a_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.zero.stage = 3
    config.override(["zero.stage=3"])
    config.resolve(4)
    assert config == Config()


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("zero.stage=3", 3),
        (" zero.stage = 3 ", 3),
        ("zero.overlap=false", False),
        ("optimizer.lr=1e-3", 1e-3),
        ("optimizer.clip_norm=none", None),
        ("recompute.mode=none", "none"),
        ("optimizer.clip_norm=NULL", None),
        ("optimizer.betas=[0.5, 0.6]", (0.5, 0.6)),
        ('zero.blocks=["Block", "layers.*"]', ("Block", "layers.*")),
        ("precision.loss_scale=1024", 1024.0),
        ("precision.loss_scale=dynamic", "dynamic"),
        ("data.path=my corpus=1.txt", "my corpus=1.txt"),
        ("data.path='quoted'", "quoted"),
        ("data.path=none", None),
        ("run.name=3", "3"),
        ("run.name=2024-01-01", "2024-01-01"),
        ("run.dir=true", "true"),
    ],
)
def test_assignments_are_read_as_toml_else_as_text(assignment: str, expected: Any) -> None:
    section, key = assignment.partition("=")[0].strip().split(".")
    assert getattr(getattr(Config().override([assignment]), section), key) == expected


def test_the_last_assignment_wins_and_others_stay() -> None:
    config = Config.from_dict({"run": {"steps": 7}}).override(["zero.stage=1", "zero.stage=0"])
    assert (config.zero.stage, config.run.steps) == (0, 7)


def test_set_key_makes_its_sections() -> None:
    values: dict[str, Any] = {"zero": {"stage": 2}}
    set_key(values, "zero.overlap", False)
    set_key(values, "run.steps", 3)
    assert values == {"zero": {"stage": 2, "overlap": False}, "run": {"steps": 3}}
    with pytest.raises(ConfigError, match=r"^zero\.stage\.x is not a config key; stage takes no subkeys$"):
        set_key(values, "zero.stage.x", 3)


# What is refused, and how


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"zero": {"stege": 3}}, "zero.stege is not a config key; did you mean zero.stage?"),
        ({"optimiser": {"lr": 1.0}}, "optimiser is not a config key; did you mean optimizer?"),
        ({"stage": 3}, "stage is not a config key; did you mean zero.stage?"),
        ({"schedule": "gpipe"}, "schedule is not a config key; did you mean pipeline.schedule?"),
        ({"zero": {"lr": 1.0}}, "zero.lr is not a config key; did you mean optimizer.lr?"),
        (
            {"zero": {"name": "x"}},
            "zero.name is not a config key; did you mean optimizer.name or scheduler.name or run.name?",
        ),
        (
            {"zero": {"micro_batch_size": 1}},
            "zero.micro_batch_size is not a config key; did you mean batch.micro_size?",
        ),
        ({"zero.stage": 3}, "zero.stage is not a config key; put stage into the section zero"),
        ({"zero": {"qqq": 3}}, f"zero.qqq is not a config key; sections are {', '.join(Config.model_fields)}"),
        ({"a\nb": 3}, f"'a\\nb' is not a config key; sections are {', '.join(Config.model_fields)}"),
        ({3: 4}, f"3 is not a config key; sections are {', '.join(Config.model_fields)}"),
        ({"zero": 3}, "zero=3 is not a section; set one of its keys, such as zero.stage"),
        ({"zero": Config().mesh}, f"zero={Config().mesh!r} is not a section; set one of its keys, such as zero.stage"),
        ([], "[] is not a config; give a table of sections, such as zero"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(written: Any, message: str) -> None:
    assert message_of(written) == message


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("zero", "stage", 4, "zero.stage=4 must be an integer >= 0 and <= 3; leave it out for the default 2"),
        ("batch", "micro_size", 0, "batch.micro_size=0 must be an integer >= 1; leave it out"),
        (
            "optimizer",
            "betas",
            [0.9],
            "optimizer.betas=[0.9] must be a list of 2, each a finite number >= 0 and < 1; "
            "leave it out for the default [0.9, 0.95]",
        ),
        (
            "precision",
            "param",
            "bf17",
            "precision.param='bf17' must be fp64 or fp32 or bf16 or fp16; did you mean bf16?",
        ),
        (
            "scheduler",
            "name",
            "Cosine",
            "scheduler.name='Cosine' must be constant or linear or cosine; did you mean cosine?",
        ),
        (
            "tiers",
            "grads",
            "x",
            """tiers.grads='x' must be device or host or nvme; leave it out for the default "device\"""",
        ),
        (
            "precision",
            "loss_scale",
            "dyn",
            "precision.loss_scale='dyn' must be a finite number > 0 or dynamic; did you mean dynamic?",
        ),
        ("zero", "blocks", "Block", "zero.blocks='Block' must be a list, each a string; leave it out"),
        ("zero", "overlap", "yes", "zero.overlap='yes' must be true or false; leave it out for the default true"),
    ],
)
def test_wrong_values_are_refused_with_value_rule_and_cure(section: str, key: str, value: Any, message: str) -> None:
    assert message_of({section: {key: value}}) == message


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("zero", "stage", "3"),
        ("zero", "stage", True),
        ("zero", "stage", 3.0),
        ("zero", "stage", None),
        ("zero", "overlap", 1),
        ("zero", "blocks", ["Block", 3]),
        ("optimizer", "lr", "1e-3"),
        ("optimizer", "lr", True),
        ("optimizer", "lr", 0.0),
        ("optimizer", "lr", float("inf")),
        ("optimizer", "lr", float("nan")),
        ("optimizer", "weight_decay", -0.1),
        ("optimizer", "betas", [0.9, 1.1]),
        ("data", "path", 3),
        ("data", "val_fraction", 1.5),
        ("precision", "loss_scale", 0),
    ],
)
def test_nothing_is_converted_on_the_quiet(section: str, key: str, value: Any) -> None:
    assert message_of({section: {key: value}}).startswith(f"{section}.{key}={value!r} must be ")


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("fp32"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


KEYS = st.text() | st.sampled_from([key.partition(".")[2] for key in all_keys()])


def try_out(make: Callable[[Any], Config], written: Any) -> Config | str:
    """The config, or the one line in which it is refused."""
    try:
        return make(written)
    except ConfigError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    return message


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from([*SECTIONS, "", "a\n"]), st.dictionaries(KEYS, JSON_LIKE) | JSON_LIKE))
def test_any_table_is_taken_or_refused_on_one_line(written: dict[str, Any]) -> None:
    try_out(Config.from_dict, written)


@given(st.sampled_from(all_keys()), JSON_LIKE)
def test_any_value_is_taken_as_it_is_or_refused(path: str, value: Any) -> None:
    section, key = path.split(".")
    outcome = try_out(Config.from_dict, {section: {key: value}})
    if isinstance(outcome, str):
        assert outcome.startswith(f"{path}=")
    else:
        taken = getattr(getattr(outcome, section), key)
        assert (list(taken) if isinstance(taken, tuple) else taken) == value


@given(st.text() | st.builds("{}={}".format, st.sampled_from([*all_keys(), *SECTIONS]), st.text()))
def test_any_assignment_is_taken_or_refused_on_one_line(assignment: str) -> None:
    try_out(Config().override, [assignment])


def test_what_is_no_assignment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^'zero\.stage' is not an assignment; write section\.key=value$"):
        Config().override(["zero.stage"])
    with pytest.raises(ConfigError, match=r"^'' is not a config key; sections are "):
        Config().override(["=3"])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    missing, broken, binary = tmp_path / "missing.toml", tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("[zero]\nstage = ", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe")
    for path, rule in (
        (missing, f"cannot read {missing}: No such file or directory; give the path of a TOML file"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory; give"),
        (broken, f"{broken} is not valid TOML: Invalid value (at "),
        (binary, f"{binary} is not UTF-8 text; give the path of a TOML file"),
    ):
        for read in (read_toml, Config.from_toml):
            with pytest.raises(ConfigError) as caught:
                read(path)
            assert str(caught.value).startswith(rule)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"zero": {"stage": 4}}', '{"optimizer": {"lr": NaN}}'])
def test_json_of_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Config.from_json(text)


# Batch arithmetic


@given(SMALL, SMALL, SMALL)
def test_two_of_the_batch_terms_give_the_third(micro: int, accumulation: int, num_ranks: int) -> None:
    total = micro * accumulation * num_ranks
    whole = BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation)
    assert resolve_batch(whole, num_ranks) == whole
    for left_out in ("global_size", "micro_size", "accumulation"):
        assert resolve_batch(whole.model_copy(update={left_out: None}), num_ranks) == whole
    terms = [int(word) for word in batch_equation(whole, num_ranks).split() if word.isdigit()]
    assert terms == [total, micro, accumulation, num_ranks]


@given(SMALL, SMALL)
def test_one_batch_term_alone_takes_one_for_another(term: int, num_ranks: int) -> None:
    one = BatchConfig(global_size=num_ranks, micro_size=1, accumulation=1)
    assert resolve_batch(BatchConfig(), num_ranks) == one
    for given_term in ("micro_size", "accumulation"):
        expected = one.model_copy(update={given_term: term, "global_size": term * num_ranks})
        assert resolve_batch(BatchConfig(**{given_term: term}), num_ranks) == expected
    total = BatchConfig(global_size=term * num_ranks)
    assert resolve_batch(total, num_ranks) == BatchConfig(global_size=term * num_ranks, micro_size=term, accumulation=1)


@given(st.integers(1, 200), SMALL, SMALL, st.sampled_from(["micro_size", "accumulation"]))
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(
    total: int, factor: int, num_ranks: int, name: str
) -> None:
    assume(total % (factor * num_ranks))
    with pytest.raises(ConfigError) as caught:
        resolve_batch(BatchConfig(**{"global_size": total, name: factor}), num_ranks)
    message = str(caught.value)
    start = f"batch.global_size={total} is not a multiple of {factor * num_ranks} = {name} {factor} x {num_ranks} ranks"
    assert message.startswith(start)
    nearest = [int(word) for word in message.partition("nearest: ")[2].split(", ")]
    legal = [size for size in range(1, 600) if size % (factor * num_ranks) == 0]
    assert nearest == [*[size for size in legal if size < total][-1:], *[size for size in legal if size > total][:1]]


@given(SMALL, SMALL, SMALL, st.integers(1, 200))
def test_three_batch_terms_that_disagree_are_refused(micro: int, accumulation: int, num_ranks: int, total: int) -> None:
    product = micro * accumulation * num_ranks
    assume(total != product)
    with pytest.raises(ConfigError) as caught:
        resolve_batch(BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation), num_ranks)
    assert str(caught.value) == (
        f"batch.global_size={total} but micro_size {micro} x accumulation {accumulation} x {num_ranks} data-parallel "
        f"ranks = {product}; give {product}, or leave one of the three out and it is derived"
    )


# The mesh, and the whole


@given(SMALL, SMALL, SMALL, SMALL, SMALL)
def test_dp_shard_is_what_the_other_axes_leave(pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int) -> None:
    whole = MeshConfig(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    world_size = pp * dp_replicate * dp_shard * cp * tp
    assert _resolve_mesh(whole, world_size) == whole
    for left_out in ("dp_shard", "dp_replicate"):
        assert _resolve_mesh(whole.model_copy(update={left_out: None}), world_size) == whole


def test_world_sizes_that_do_not_fit_the_mesh_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve_mesh(MeshConfig(pp=2, tp=4), 12)
    assert str(caught.value) == (
        "world size 12 is not a multiple of pp 2 x dp_replicate 1 x cp 1 x tp 4 = 8; start a multiple of 8 ranks"
    )
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"mesh": {"dp_shard": 2}}).resolve(3)
    assert str(caught.value) == (
        "world size 3 is not a multiple of pp 1 x dp_shard 2 x cp 1 x tp 1 = 2; start a multiple of 2 ranks"
    )
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"mesh": {"dp_shard": 2, "dp_replicate": 1}}).resolve(3)
    assert str(caught.value) == (
        "world size 3 is not pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1 = 2; "
        "start 2 ranks or leave mesh.dp_shard out"
    )
    for world_size in (0, -1):
        with pytest.raises(ConfigError, match=rf"^world size {world_size} holds no rank; start at least 1$"):
            Config().resolve(world_size)


@given(SMALL, SMALL, SMALL)
def test_resolve_fills_mesh_and_batch_once(world_size: int, micro: int, accumulation: int) -> None:
    config = Config.from_dict({"batch": {"micro_size": micro, "accumulation": accumulation}, "zero": {"stage": 3}})
    resolved = config.resolve(world_size)
    assert resolved.mesh.dp_shard == world_size
    assert resolved.batch.global_size == world_size * micro * accumulation
    assert resolved == config.model_copy(update={"mesh": resolved.mesh, "batch": resolved.batch})
    assert resolved.resolve(world_size) == resolved
    assert Config.from_json(resolved.to_json()) == resolved


CONTEXTS = {
    "context.transport=ulysses": "context.transport=ulysses says how sequences are split over ranks, and mesh.cp=1 "
    "splits none; set mesh.cp to 2 or more, or leave the key out",
    "mesh.cp=4 context.heads_over=3": "context.heads_over=3 does not divide mesh.cp=4; nearest legal: 2, 4",
    "mesh.cp=4 context.heads_over=2 context.transport=ulysses": "context.heads_over=2 is less than mesh.cp=4, and "
    "context.transport=ulysses exchanges heads over all ranks; leave it out, or set context.transport=ring",
    "mesh.cp=4 context.heads_over=4": "context.heads_over=4 leaves context.transport=ring nothing to carry, as "
    "mesh.cp=4; set context.transport=ulysses, or fewer ranks",
}


@pytest.mark.parametrize(("assignments", "message"), CONTEXTS.items())
def test_a_context_that_cannot_be_is_refused(assignments: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().override(assignments.split()).resolve(4)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "assignments", ["mesh.cp=4 context.heads_over=2", "mesh.cp=4 context.heads_over=1", "context.chunk_tokens=512"]
)
def test_a_context_that_can_be_is_taken(assignments: str) -> None:
    Config().override(assignments.split()).resolve(4)


ATTENTIONS = {
    "attention.num_local_blocks=8": "attention.num_local_blocks=8 is a key of fixed, and attention.kind=dense has "
    "none; set attention.kind=fixed or leave the key out",
    "attention.kind=bslongformer attention.seed=2": "attention.seed=2 is a key of variable, bigbird, and "
    "attention.kind=bslongformer has block, different_layout_per_head, num_sliding_window_blocks, "
    "global_block_indices, global_block_end_indices; set attention.kind=variable or leave the key out",
}


@pytest.mark.parametrize(("assignments", "message"), ATTENTIONS.items())
def test_keys_of_another_kind_of_attention_are_refused(assignments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Config().override(assignments.split()).resolve(1)


def test_a_structure_of_attention_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[attention]\nkind = "variable"\nlocal_window_blocks = [2, 4]\nglobal_block_indices = [0, 9]\n')
    config = Config.from_toml(path).resolve(1)
    assert config.attention.local_window_blocks == (2, 4)
    assert Config.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match=r"^attention.local_window_blocks='2' must be a list, each an integer >= 1;"):
        Config().override(["attention.local_window_blocks='2'"])


PIPELINES = {
    "mesh.pp=1 pipeline.virtual_stages=2": "pipeline.virtual_stages=2 says how stages lie on the ranks of a pipeline",
    "mesh.pp=2 zero.lockstep=true": "zero.lockstep=true gathers every block once a forward",
    "mesh.pp=2 pipeline.schedule=zb-h1 compile.enabled=true": "compile.enabled=true compiles backwards whole",
    "mesh.pp=2 pipeline.gather=micro-batch": "pipeline.gather=micro-batch is how parameters that rest as shards",
}


@pytest.mark.parametrize(("assignments", "message"), PIPELINES.items())
def test_pipelines_that_cannot_be_are_refused(assignments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}.*; set "):
        Config().override(assignments.split()).resolve(2)
