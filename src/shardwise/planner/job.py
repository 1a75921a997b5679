"""Describe what is to be priced, a job; a `ResolvedConfig` says how it is split and how the engine runs it.

PlanJob  the model's shape, tokens of a sequence, samples of a step, the cluster
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from shardwise.config.resolve import Config, Dtype, ResolvedConfig
from shardwise.config.sections import Section
from shardwise.models.shape import ModelShape
from shardwise.planner.hardware import Cluster

MatmulDtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


def changed(config: ResolvedConfig, values: Mapping[str, Any]) -> ResolvedConfig:
    """Return a resolved config with other values of some dotted keys; the samples of a step follow.

    Values are taken as they are: nothing is checked. Equal changes of equal sections give one object.

    >>> changed(Config().resolve(world_size=4), {"mesh.dp_shard": 2, "mesh.tp": 2}).batch.global_size
    2
    """
    by_section = _by_section(tuple(values.items()))
    made: dict[str, Any] = {name: _section(getattr(config, name), *leaves) for name, leaves in by_section}
    if "mesh" in made or "batch" in made:
        mesh, batch = made.get("mesh", config.mesh), made.get("batch", config.batch)
        samples = mesh.dp_replicate * mesh.dp_shard * batch.micro_size * batch.accumulation
        made["batch"] = _section(batch, ("global_size", samples))
    return config.model_copy(update=made)


@lru_cache(maxsize=2**12)
def _by_section(values: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    sections: dict[str, list[tuple[str, Any]]] = {}
    for key, value in values:
        section, _, leaf = key.partition(".")
        sections.setdefault(section, []).append((leaf, value))
    return tuple((section, tuple(leaves)) for section, leaves in sections.items())


@lru_cache(maxsize=2**14)
def _section(section: Section, *leaves: tuple[str, Any]) -> Section:
    if unknown := {leaf for leaf, _ in leaves} - type(section).model_fields.keys():
        raise KeyError(f"{type(section).__name__} has no {', '.join(unknown)}")
    return section.model_copy(update=dict(leaves))


class SectionNumbers:
    """Number sections, equal ones by the same number: parts of a cache's key that are hashed sooner than a section."""

    def __init__(self) -> None:
        self._numbers: dict[Section, int] = {}
        self._known: dict[int, tuple[Section, int]] = {}  # by id, which stays that of a section that is kept here

    def of(self, section: Section) -> int:
        """Return the number of a section."""
        known = self._known.get(id(section))
        if known is None:
            number = self._numbers.setdefault(section, len(self._numbers))
            known = self._known[id(section)] = section, number
        return known[1]


def num_data_ranks(config: ResolvedConfig) -> int:
    """Return the number of ranks that take different samples."""
    return config.mesh.dp_replicate * config.mesh.dp_shard


def world_size(config: ResolvedConfig) -> int:
    """Return the number of ranks of the whole job."""
    return num_data_ranks(config) * config.mesh.pp * config.mesh.cp * config.mesh.tp


def trains_all(config: ResolvedConfig) -> bool:
    """Say whether all weights have gradients and optimizer states, not adapters alone."""
    return config.lora.rank == 0


def param_of(config: ResolvedConfig) -> Dtype:
    """Return the dtype of the parameters as the model computes with them."""
    return config.precision.param or "fp32"


def expert_skew(job: PlanJob, config: ResolvedConfig) -> float:
    """Return the tokens of the fullest rank of experts over the mean, where `mesh.ep` divides them."""
    if config.mesh.ep == 1:
        return 1.0
    return config.experts.skew if config.experts.skew > 1 else job.usual_skew


def product_dtype(config: ResolvedConfig) -> MatmulDtype:
    """Return the dtype of the blocks' matrix products: that of the parameters, or a narrower one."""
    linears = config.precision.linears
    return param_of(config) if linears == "keep" or linears == "fp8-emulated" else linears


BASE: Final = Config.from_dict({"zero": {"stage": 0}, "precision": {"param": "bf16"}}).resolve(world_size=1)
"""A config that splits nothing, for half precision."""


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """Describe a training job: a model, its batch and its cluster.

    Attributes:
        global_batch: sequences of `seq_len` tokens in an optimizer step.
        base: the config that every candidate has, but for the keys that say how it is split; one rank runs it.
        usual_skew: in the place of `experts.skew` where that says nothing. The fullest expert has 1.04 to 1.72 times
            the mean (Wang et al. 2024, arXiv 2408.15664, table 2); a rank's several even out.
    """

    shape: ModelShape
    seq_len: int
    global_batch: int
    cluster: Cluster
    base: ResolvedConfig = BASE
    usual_skew: float = 1.2

    @property
    def is_of_transformers(self) -> bool:
        """Say whether the model is Hugging Face's code, with its norms and its loss, and not our decoder."""
        return self.base.model.path is not None

    @property
    def tokens(self) -> int:
        """Return the tokens of an optimizer step, all ranks together."""
        return self.global_batch * self.seq_len
