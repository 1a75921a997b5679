"""Offer the classes by which scripts ask what an optimizer of DeepSpeed is, and those that its checkpoints contain.

There is one optimizer here, and it is an instance of DeepSpeed's class for the stage and dtype that it has.

>>> isinstance(object(), ZeROOptimizer), ZeroStageEnum.weights == 3
(False, True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, ClassVar, Final

import torch.distributed as dist

from shardwise.compat.deepspeed.config import given_sums, read_config, translate
from shardwise.compat.deepspeed.finder import MissingNameError
from shardwise.compat.deepspeed.runtime.engine import DeepSpeedEngine, DeepSpeedOptimizer
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, resolve_batch

_MADE: Final = "is made by deepspeed.initialize alone; call it, and give it the optimizer that this would wrap"


class _Kind(type):
    """Is the class of the classes below: each takes engines' optimizers by a rule, and none is called."""

    takes: Callable[[DeepSpeedEngine], bool]

    def __instancecheck__(cls, instance: Any) -> bool:
        engine = getattr(instance, "_engine", None) if isinstance(instance, DeepSpeedOptimizer) else None
        return isinstance(engine, DeepSpeedEngine) and cls.takes(engine)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        raise MissingNameError("deepspeed-optimizer-made", f"{cls.__name__} {_MADE}")


def _stage(engine: DeepSpeedEngine) -> int:
    return engine.zero_optimization_stage()


def _is_bf16_of_stage_1(engine: DeepSpeedEngine) -> bool:
    """Say whether DeepSpeed has BF16_Optimizer: bf16 in stage 1 with gradients summed in fp32, or a bf16 pipeline."""
    dtype = str(engine._given.get("data_types.grad_accum_dtype", ""))
    is_fp32 = dtype.removeprefix("torch.") in ("fp32", "float32", "float")
    return engine.bfloat16_enabled() and _stage(engine) == 1 and is_fp32


def _is_16_bit_without_zero(engine: DeepSpeedEngine) -> bool:
    return _stage(engine) == 0 and (engine.fp16_enabled() or engine.bfloat16_enabled())


def _is_fused(engine: DeepSpeedEngine) -> bool:
    return engine.inner.optimizer.defaults.get("fused") is True


class ZeROOptimizer(metaclass=_Kind):
    """Takes the optimizer of any stage above 0."""

    takes: ClassVar = lambda engine: _stage(engine) > 0


class DeepSpeedZeroOptimizer(metaclass=_Kind):
    """Takes the optimizer of stages 1 and 2."""

    takes: ClassVar = lambda engine: _stage(engine) in (1, 2) and not _is_bf16_of_stage_1(engine)


class DeepSpeedZeroOptimizer_Stage3(metaclass=_Kind):  # noqa: N801  DeepSpeed's name
    """Takes the optimizer of stage 3."""

    takes: ClassVar = lambda engine: _stage(engine) == 3


class BF16_Optimizer(metaclass=_Kind):  # noqa: N801  DeepSpeed's name
    """Takes the optimizer of stage 1 where bf16's gradients are summed in fp32."""

    takes: ClassVar = _is_bf16_of_stage_1


class FP16_Optimizer(metaclass=_Kind):  # noqa: N801  DeepSpeed's name
    """Takes the optimizer of 16-bit parameters without ZeRO, where torch's is fused."""

    takes: ClassVar = lambda engine: _is_16_bit_without_zero(engine) and _is_fused(engine)


class FP16_UnfusedOptimizer(metaclass=_Kind):  # noqa: N801  DeepSpeed's name
    """Takes the optimizer of 16-bit parameters without ZeRO, where torch's is not fused."""

    takes: ClassVar = lambda engine: _is_16_bit_without_zero(engine) and not _is_fused(engine)


class ZeroStageEnum(IntEnum):
    """Names the stages by what they shard last."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class ZeRORuntimeException(Exception):  # noqa: N818  DeepSpeed's name
    """Is raised by DeepSpeed where a checkpoint does not fit; here any layout fits, so nothing raises it."""


DeepSpeedConfigError = ConfigError


class DeepSpeedConfig:
    """Reads the JSON, as a path, a mapping or base64: keys are attributes, and each absent one is the default.

    The arguments are those of DeepSpeed; `mpu` says how many ranks share a sequence or a layer.

    Raises:
        ConfigError: a key is refused, or the batch's terms do not agree.
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        self._param_dict: Mapping[str, Any] = read_config(config)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        sharing = getattr(mpu, "get_model_parallel_world_size", lambda: 1)()
        self._translation = translate(self._param_dict, self.world_size // max(1, sharing))
        sections = self._translation.given
        batch = resolve_batch(Config.from_dict(self._translation.config).batch, self.world_size // max(1, sharing))
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.global_size, batch.micro_size
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_optimization_stage = self._translation.config["zero"]["stage"]
        self.zero_enabled = self.zero_optimization_stage > 0
        self.gradient_allreduce_op = "sum" if given_sums(sections) else "mean"
        self.gradient_clipping = sections.get("gradient_clipping", 1.0)
        self.optimizer_name = str(sections["optimizer.type"]).lower() if "optimizer.type" in sections else None
        self.optimizer_params = self._translation.section("optimizer").get("params")
        self.scheduler_name = sections.get("scheduler.type")
        self.scheduler_params = self._translation.section("scheduler").get("params")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        section = self._translation.section(name) or self._translation.given.get(name)
        if section is None:
            raise AttributeError(f"the JSON has no {name}; DeepSpeedConfig has the keys that it says")
        return section


class DeepSpeedZeroConfig:
    """Holds the keys of `zero_optimization` as attributes."""

    def __init__(self, **keys: Any) -> None:
        translate({"zero_optimization": keys})
        self.__dict__.update({"stage": 0, **keys})


def is_zero_param(parameter: Any) -> bool:
    """Say whether a parameter is of a stage-3 engine, or a shard of `zero.Init`."""
    return hasattr(parameter, "ds_id")
