"""A model that has priced other configs prices one as a fresh model does: the keys of its caches leave nothing out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args

import pytest

from planner_eval.codes import Code
from planner_eval.models import PublishedPricer
from planner_eval.traits import PublishedTraits, run_by
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.planner.search import Pricer

SHAPE = ModelShape(
    num_layers=4, hidden_size=1024, num_heads=8, num_kv_heads=4, head_dim=128, ffn_size=2816, vocab_size=32000,
    experts=ExpertsShape(num_experts=8, num_chosen=2, ffn_size=512, num_dense_layers=1), is_tied=True, name="mixture",
)  # fmt: skip
JOB = PlanJob(shape=SHAPE, seq_len=512, global_batch=64, cluster=parse_cluster("h100:16"))
BASES: Mapping[str, dict[str, Any]] = {
    "pipeline": {"mesh.pp": 2, "mesh.dp_shard": 2, "mesh.ep": 2, "batch.accumulation": 4, "zero.stage": 1},
    "stages alone": {"mesh.pp": 2, "batch.accumulation": 4, "zero.stage": 1},
    "one rank": {"batch.accumulation": 2, "zero.stage": 0},  # another code's, whose data parallelism costs its host
    "moved": {
        "mesh.dp_shard": 2, "mesh.tp": 2, "zero.stage": 3, "tiers.optimizer": "host", "tiers.activations": "host",
        "recompute.mode": "full", "tensor.sequence_parallel": True,
    },
    "adapters": {"mesh.dp_shard": 2, "mesh.cp": 2, "lora.rank": 8, "zero.stage": 3, "tiers.params": "host"},
}  # fmt: skip
# Sections, and fields of others, that no price reads.
NOT_PRICED = {"model", "data", "scheduler", "checkpoint", "run", "attention"}
NUMERIC = {"lr", "eps", "clip_norm", "weight_decay", "aux_loss", "z_loss", "bias_rate"}


def literals(annotation: Any) -> Iterator[Any]:
    for one in get_args(annotation):
        yield from literals(one) if get_args(one) else [one]


def changes(config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield configs that differ in one field, for each field of the sections that may have a price."""
    for name in sorted(type(config).model_fields.keys() - NOT_PRICED):
        section = getattr(config, name)
        for leaf, field in type(section).model_fields.items():
            if leaf in NUMERIC or "loss_scale" in leaf:
                continue
            for value in (*literals(field.annotation), True, False, 3, 1, 2, 0.5, 1.5, "muon"):
                with suppress(ConfigError, ValueError):
                    typed = getattr(type(section)(**{leaf: value}), leaf)
                    if typed != getattr(section, leaf):
                        yield changed(config, {f"{name}.{leaf}": typed})


def prices(pricer: Pricer, config: ResolvedConfig) -> tuple[Any, ...]:
    quick = pricer.time.estimate(config, is_quick=True)
    return pricer.memory.estimate(config), quick, pricer.time.busy_s(config), pricer.time.stages_s(config)


@pytest.mark.parametrize(
    ("base", "code"),
    [*((base, None) for base in sorted(BASES) if base != "one rank"), ("stages alone", "hf"), ("one rank", "hf")],
)
def test_a_config_has_the_same_price_whatever_was_priced_before(base: str, code: str | None) -> None:
    job = JOB if code is None else run_by(JOB, PublishedTraits(code=Code(name=code)))
    make = Pricer if code is None else PublishedPricer
    config = changed(BASE, BASES[base])
    known, num_priced = make(job), 0
    prices(known, config)
    for other in changes(config):
        try:
            fresh = prices(make(job), other)
        except ConfigError:  # what the engine refuses has no price
            continue
        assert prices(known, other) == fresh, other
        num_priced += 1
    assert num_priced > 50
