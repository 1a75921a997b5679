"""What goes in and out of an engine besides tensors, such as results of a step; and its names in other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

Folder = str | Path | None


class Scheduler(Protocol):
    """Names what a learning-rate schedule has in common with torch's."""

    def step(self) -> None:
        """Advance by one optimizer step."""


@dataclass(frozen=True)
class StepResult:
    """Holds the result of one optimizer step, over all ranks.

    Attributes:
        step: its number; the first step of a run is 1.
        loss: the mean over everything that counts, over ranks and micro-batches.
        count: how much counted, such as target tokens.
        grad_norm: of the mean gradient, before clipping.
        lr: of the first parameter group, as used in this step.
        skipped: parameters and optimizer are as they were, since nothing counted on any rank (`count` is 0), an fp16
            gradient overflowed, or a value was not finite under `run.on_nonfinite="skip"`.
        expert_skew: of each layer of experts, the tokens of the fullest one over their mean; empty where not counted.
    """

    step: int
    loss: float
    count: float
    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float
    expert_skew: tuple[float, ...] = ()


@dataclass(frozen=True)
class EvalResult:
    """Holds the mean loss over everything that counts, over ranks and batches, and the count; both are 0 where nothing
    does.
    """

    loss: float
    count: float


def _set_mode(engine: Any, mode: bool) -> Any:
    engine.model.train(mode)
    return engine


# Names by which users of DeepSpeed, Accelerate and torch's wrappers look for what an engine has. Some work; a method of
# another name would do something else without a word, so its error says what to call.
_ALIASES: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {
        "module": lambda engine: engine.model,
        "train": lambda engine: lambda mode=True: _set_mode(engine, mode),
        "eval": lambda engine: lambda: _set_mode(engine, False),
        "get_lr": lambda engine: lambda: [group["lr"] for group in engine.optimizer.param_groups],
    }
)
_HINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "save_checkpoint": "engine.save(path, tag=..., extra=client_state)",
        "load_checkpoint": "engine.load(path, tag=...), whose report has .extra",
        "save_16bit_model": 'engine.export_weights(folder, dtype="bf16")',
        "save_pretrained": "engine.export_weights(folder, tokenizer=...)",
        "train_batch": "engine.train_step(batches), with a list of batch.accumulation micro-batches",
        "eval_batch": "engine.eval_step(batches)",
        "accumulate": "engine.train_step(batches), or engine.backward for each micro-batch and engine.step() once",
        "is_gradient_accumulation_boundary": "engine.step() once after batch.accumulation backwards",
        "set_gradient_accumulation_boundary": "engine.backward(loss, is_boundary=...)",
        "gradient_accumulation_steps": "engine.config.batch.accumulation",
        "train_micro_batch_size_per_gpu": "engine.config.batch.micro_size",
        "train_batch_size": "engine.config.batch.global_size",
        "get_global_grad_norm": ".grad_norm of what engine.step() or engine.train_step() returns",
        "gradient_clipping": "engine.config.optimizer.clip_norm",
        "clip_grad_norm_": "optimizer.clip_norm in the config: the engine clips, before each step",
        "loss_scale": ".loss_scale of what engine.step() returns",
        "cur_scale": ".loss_scale of what engine.step() returns",
        "was_step_applied": "not .skipped of what engine.step() returns",
        "zero_optimization_stage": "engine.config.zero.stage",
        "global_steps": "engine.num_steps",
        "lr_scheduler": "engine.scheduler",
        "set_lr": 'group["lr"] = ... for each of engine.optimizer.param_groups',
        "parameters": "engine.model.parameters(), or engine.read(name) for whole values",
        "named_parameters": "engine.model.named_parameters(), or engine.read(name) for whole values",
        "state_dict": "with engine.gathered() as model: model.state_dict()",
        "load_state_dict": "with engine.gathered(write=True) as model: model.load_state_dict(...)",
        "unwrap_model": "engine.model",
        "generate": "with engine.gathered() as model: model.generate(...)",
        "allreduce_gradients": "nothing: backwards and engine.step() reduce",
        "deepspeed_io": "shardwise.data_loader(engine, dataset, ...)",
        "training_dataloader": "shardwise.data_loader(engine, dataset, ...)",
        "world_size": "engine.comm.world_size",
        "dp_world_size": "engine.layout.mesh.num_data_ranks",
        "mp_world_size": "engine.layout.mesh.tp",
        "global_rank": "engine.comm.rank",
        "local_rank": "engine.device, on which it computes",
        "destroy": "engine.close()",
    }
)


def attribute_of(engine: Any, name: str) -> Any:
    """Return what another library's name stands for.

    Args:
        engine: that has no attribute of this name.

    Raises:
        AttributeError: it stands for nothing; the error names what to use where that is known.
    """
    if name in _ALIASES:
        return _ALIASES[name](engine)
    hint = f"; use {_HINTS[name]}" if name in _HINTS else ""
    raise AttributeError(f"'Engine' object has no attribute {name!r}{hint}", name=name, obj=engine)
