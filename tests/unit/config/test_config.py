"""The config: what it takes, what it refuses and by which rule, and what `resolve` derives."""

import json
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.refusals import refused
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import (
    BatchConfig,
    Config,
    MeshConfig,
    RunConfig,
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


def check_refused(written: Any, code: str, *values: str) -> None:
    with refused(code, *values):
        Config.from_dict(written)


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
    check_refused(MappingProxyType({"zero": MappingProxyType({"stage": 4})}), "out-of-range", "zero.stage=4")


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
    with refused("unknown-key", "zero.stage.x"):
        set_key(values, "zero.stage.x", 3)


# What is refused, and how


@pytest.mark.parametrize(
    ("written", "refusal"),
    [
        ({"zero": {"stege": 3}}, ("unknown-key", "zero.stege", "zero.stage?")),
        ({"optimiser": {"lr": 1.0}}, ("unknown-key", "optimiser", "optimizer?")),
        ({"stage": 3}, ("unknown-key", "zero.stage?")),
        ({"schedule": "gpipe"}, ("unknown-key", "pipeline.schedule?")),
        ({"zero": {"lr": 1.0}}, ("unknown-key", "zero.lr", "optimizer.lr?")),
        (
            {"zero": {"name": "x"}},
            ("unknown-key", "zero.name", "optimizer.name or scheduler.name or run.name?"),
        ),
        (
            {"zero": {"micro_batch_size": 1}},
            ("unknown-key", "zero.micro_batch_size", "batch.micro_size=...?"),
        ),
        ({"zero.stage": 3}, ("unknown-key", "zero.stage", "put stage into the section zero")),
        ({"zero": {"qqq": 3}}, ("unknown-key", "zero.qqq", ", ".join(Config.model_fields))),
        ({"a\nb": 3}, ("unknown-key", r"'a\nb'")),
        ({3: 4}, ("unknown-key", "3")),
        ({"zero": 3}, ("not-a-section", "zero=3", "zero.stage")),
        ({"zero": Config().mesh}, ("not-a-section", f"zero={Config().mesh!r}")),
        ([], ("not-a-config", "[]")),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(written: Any, refusal: tuple[str, ...]) -> None:
    check_refused(written, *refusal)


@pytest.mark.parametrize(
    ("section", "key", "value", "refusal"),
    [
        ("zero", "stage", 4, ("out-of-range", "zero.stage=4", ">= 0 and <= 3", "default 2")),
        ("batch", "micro_size", 0, ("out-of-range", "batch.micro_size=0", ">= 1")),
        (
            "optimizer",
            "betas",
            [0.9],
            ("wrong-length", "optimizer.betas=[0.9]", "a list of 2", ">= 0 and < 1", "default [0.9, 0.95]"),
        ),
        (
            "precision",
            "param",
            "bf17",
            ("unknown-choice", "precision.param='bf17'", "fp64 or fp32 or bf16 or fp16", "bf16?"),
        ),
        (
            "scheduler",
            "name",
            "Cosine",
            ("unknown-choice", "scheduler.name='Cosine'", "constant or linear or cosine", "cosine?"),
        ),
        (
            "tiers",
            "grads",
            "x",
            ("unknown-choice", "tiers.grads='x'", "device or host or nvme", 'default "device"'),
        ),
        (
            "precision",
            "loss_scale",
            "dyn",
            ("unknown-choice", "precision.loss_scale='dyn'", "> 0 or dynamic", "dynamic?"),
        ),
        ("zero", "blocks", "Block", ("wrong-type", "zero.blocks='Block'", "a list, each a string")),
        ("zero", "overlap", "yes", ("wrong-type", "zero.overlap='yes'", "true or false", "default true")),
    ],
)
def test_wrong_values_are_refused_with_value_rule_and_fix(
    section: str, key: str, value: Any, refusal: tuple[str, ...]
) -> None:
    check_refused({section: {key: value}}, *refusal)


@pytest.mark.parametrize(
    ("section", "key", "value", "code"),
    [
        ("zero", "stage", "3", "wrong-type"),
        ("zero", "stage", True, "wrong-type"),
        ("zero", "stage", 3.0, "wrong-type"),
        ("zero", "stage", None, "wrong-type"),
        ("zero", "overlap", 1, "wrong-type"),
        ("zero", "blocks", ["Block", 3], "wrong-type"),
        ("optimizer", "lr", "1e-3", "wrong-type"),
        ("optimizer", "lr", True, "wrong-type"),
        ("optimizer", "lr", 0.0, "out-of-range"),
        ("optimizer", "lr", float("inf"), "out-of-range"),
        ("optimizer", "lr", float("nan"), "out-of-range"),
        ("optimizer", "weight_decay", -0.1, "out-of-range"),
        ("optimizer", "betas", [0.9, 1.1], "out-of-range"),
        ("data", "path", 3, "wrong-type"),
        ("data", "val_fraction", 1.5, "out-of-range"),
        ("precision", "loss_scale", 0, "out-of-range"),
    ],
)
def test_nothing_is_converted_on_the_quiet(section: str, key: str, value: Any, code: str) -> None:
    check_refused({section: {key: value}}, code, f"{section}.{key}={value!r}")


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
    with refused("not-an-assignment", "zero.stage", "section.key=value"):
        Config().override(["zero.stage"])
    with refused("unknown-key", "''"):
        Config().override(["=3"])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    missing, broken, binary = tmp_path / "missing.toml", tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("[zero]\nstage = ", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe")
    for path, code, reason in (
        (missing, "file-unreadable", "No such file"),
        (tmp_path, "file-unreadable", "Is a directory"),
        (broken, "not-toml", "at end of document"),
        (binary, "not-utf8", ""),
    ):
        for read in (read_toml, Config.from_toml):
            with refused(code, str(path), reason) as caught:
                read(path)
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
    with refused("batch-multiple", f"batch.global_size={total}", f"{factor * num_ranks} = {name} {factor}") as caught:
        resolve_batch(BatchConfig(**{"global_size": total, name: factor}), num_ranks)
    nearest = [int(word) for word in str(caught.value).partition("nearest: ")[2].split(", ")]
    legal = [size for size in range(1, 600) if size % (factor * num_ranks) == 0]
    assert nearest == [*[size for size in legal if size < total][-1:], *[size for size in legal if size > total][:1]]


@given(SMALL, SMALL, SMALL, st.integers(1, 200))
def test_three_batch_terms_that_disagree_are_refused(micro: int, accumulation: int, num_ranks: int, total: int) -> None:
    product = micro * accumulation * num_ranks
    assume(total != product)
    with refused("batch-equation", f"batch.global_size={total}", f"= {product}"):
        resolve_batch(BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation), num_ranks)


# The mesh, and the whole


@given(SMALL, SMALL, SMALL, SMALL, SMALL)
def test_dp_shard_is_what_the_other_axes_leave(pp: int, dp_replicate: int, dp_shard: int, cp: int, tp: int) -> None:
    whole = MeshConfig(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)
    world_size = pp * dp_replicate * dp_shard * cp * tp
    for left_out in (None, "dp_shard", "dp_replicate"):
        written = {axis: size for axis, size in whole if axis != left_out}
        assert Config.from_dict({"mesh": written}).resolve(world_size).mesh == whole


def test_world_sizes_that_do_not_fit_the_mesh_are_refused() -> None:
    with refused("mesh-size", "world size 12", "pp 2 x dp_replicate 1 x cp 1 x tp 4 = 8"):
        Config.from_dict({"mesh": {"pp": 2, "tp": 4}}).resolve(12)
    with refused("mesh-size", "world size 3", "pp 1 x dp_shard 2 x cp 1 x tp 1 = 2"):
        Config.from_dict({"mesh": {"dp_shard": 2}}).resolve(3)
    with refused("mesh-size", "world size 3", "pp 1 x dp_replicate 1 x dp_shard 2 x cp 1 x tp 1 = 2"):
        Config.from_dict({"mesh": {"dp_shard": 2, "dp_replicate": 1}}).resolve(3)
    for world_size in (0, -1):
        with refused("world-size-range", f"world size {world_size}"):
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
    "context.transport=ulysses": ("context-needs-cp", "context.transport=ulysses", "mesh.cp=1"),
    "mesh.cp=4 context.heads_over=3": ("heads-over-divides-cp", "context.heads_over=3", "nearest legal: 2, 4"),
    "mesh.cp=4 context.heads_over=2 context.transport=ulysses": ("heads-over-in-ulysses", "context.heads_over=2"),
    "mesh.cp=4 context.heads_over=4": ("heads-over-all-ranks", "context.heads_over=4", "context.transport=ring"),
}


@pytest.mark.parametrize(("assignments", "refusal"), CONTEXTS.items())
def test_a_context_that_cannot_be_is_refused(assignments: str, refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        Config().override(assignments.split()).resolve(4)


@pytest.mark.parametrize(
    "assignments", ["mesh.cp=4 context.heads_over=2", "mesh.cp=4 context.heads_over=1", "context.chunk_tokens=512"]
)
def test_a_context_that_can_be_is_taken(assignments: str) -> None:
    assert Config().override(assignments.split()).resolve(4).context != Config().context


ATTENTIONS = {
    "attention.num_local_blocks=8": ("attention.num_local_blocks=8", "attention.kind=fixed"),
    "attention.kind=bslongformer attention.seed=2": (
        "attention.seed=2",
        "variable, bigbird",
        "attention.kind=variable",
    ),
}


@pytest.mark.parametrize(("assignments", "values"), ATTENTIONS.items())
def test_keys_of_another_kind_of_attention_are_refused(assignments: str, values: tuple[str, ...]) -> None:
    with refused("attention-key-of-kind", *values):
        Config().override(assignments.split()).resolve(1)


def test_a_structure_of_attention_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[attention]\nkind = "variable"\nlocal_window_blocks = [2, 4]\nglobal_block_indices = [0, 9]\n')
    config = Config.from_toml(path).resolve(1)
    assert config.attention.local_window_blocks == (2, 4)
    assert Config.from_json(config.to_json()) == config
    with refused("wrong-type", "attention.local_window_blocks='2'", ">= 1"):
        Config().override(["attention.local_window_blocks='2'"])


PIPELINES = {
    "mesh.pp=1 pipeline.virtual_stages=2": ("pipeline-needs-stages", "pipeline.virtual_stages=2", "set mesh.pp"),
    "mesh.pp=2 zero.lockstep=true": ("lockstep-in-pipeline", "set zero.lockstep=false"),
    "mesh.pp=2 pipeline.schedule=zb-h1 compile.enabled=true": ("compile-with-zero-bubble", "set compile.enabled=false"),
    "mesh.pp=2 pipeline.gather=micro-batch": ("gather-needs-stage-3", "pipeline.gather", "set zero.stage=3"),
}


@pytest.mark.parametrize(("assignments", "refusal"), PIPELINES.items())
def test_pipelines_that_cannot_be_are_refused(assignments: str, refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        Config().override(assignments.split()).resolve(2)


def test_a_profile_begins_before_it_ends():
    assert Config.from_dict({"run": {"profile_steps": [3, 3]}}).resolve(1).run.profile_steps == (3, 3)
    with refused("profile-window-empty", "run.profile_steps=[13, 10]", "[10, 13]"):
        Config.from_dict({"run": {"profile_steps": [13, 10]}}).resolve(1)
    with pytest.raises(ConfigError):
        Config.from_dict({"run": {"sinks": ["comet"]}})


def test_what_earlier_runs_have_written_is_read() -> None:
    """A key of a mechanism that is no more has no effect; elsewhere it is as unknown as any other."""
    config = Config.from_dict(
        {"tiers": {"step_in_backward": True, "optimizer": "host"}, "precision": {"errors_every": 0}}
    )
    assert config == Config.from_dict({"tiers": {"optimizer": "host"}})
    with refused("unknown-key", "zero.step_in_backward"):
        Config.from_dict({"zero": {"step_in_backward": True}})
