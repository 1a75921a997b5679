"""Modules in the place of verl's, with the parts of its interface that an engine of another library meets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.optim.lr_scheduler import LambdaLR


class Batch(dict[str, Any]):
    """Stands for a TensorDict: tensors and others by name."""

    def to(self, device: torch.device) -> Batch:
        return Batch({name: value.to(device) if hasattr(value, "to") else value for name, value in self.items()})


@dataclass
class EngineConfig:
    param_offload: bool = False
    optimizer_offload: bool = False
    forward_only: bool = False
    strategy: str = ""
    dtype: str = "bfloat16"
    seed: int = 42


@dataclass
class ActorConfig:
    strategy: str = ""

    def __post_init__(self) -> None:
        self.engine: Any = None


class BaseEngine:
    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        assert model or not grad

    def train_batch(self: Any, data: Batch, loss_function: Any) -> Any:
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        return {**outputs, "grad_norm": self.optimizer_step()}

    def infer_batch(self: Any, data: Batch, loss_function: Any = None) -> Any:
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


class BaseEngineCtx:
    def __init__(self, engine: Any, mode: str, **options: Any) -> None:
        self.engine, self.mode = engine, mode
        self.zero_grad_on_exit = options.get("zero_grad_on_exit", True)

    def __enter__(self) -> None:
        self.engine.mode = self.mode

    def __exit__(self, *error: Any) -> None:
        self.engine.mode = None


class EngineRegistry:
    engines: dict[tuple[str, str, str], type[BaseEngine]] = {}  # noqa: RUF012  as verl's

    @classmethod
    def register(cls, model_type: str, backend: str, device: list[str]) -> Any:
        def add(engine: type[BaseEngine]) -> type[BaseEngine]:
            assert issubclass(engine, BaseEngine)
            cls.engines.update({(model_type, backend, name): engine for name in device})
            return engine

        return add


def split(data: Batch, dp_group: Any, same_micro_num_in_dp: bool) -> tuple[list[Batch], None]:
    """Two sequences a micro-batch."""
    sequences = data["input_ids"].unbind()
    masks = data["loss_mask"].unbind()
    others = {name: value for name, value in data.items() if name not in ("input_ids", "loss_mask")}
    pairs = [slice(first, first + 2) for first in range(0, len(sequences), 2)]
    return [
        Batch(others | {"input_ids": jagged(sequences[pair]), "loss_mask": jagged(masks[pair])}) for pair in pairs
    ], None


def join(output_lst: list[Mapping[str, Any]], indices: None, data: Batch) -> dict[str, Any]:
    names = output_lst[0]["model_output"] if output_lst else ()
    parts = {name: [each for output in output_lst for each in output["model_output"][name].unbind()] for name in names}
    return {"model_output": parts, "loss": [output["loss"] for output in output_lst], "metrics": {}}


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def auto_class(hf_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def warm_up(optimizer: Any, num_warmup_steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, step / max(1, num_warmup_steps)) if num_warmup_steps else 1.0)


def cosine(optimizer: Any, num_warmup_steps: int, total: int, least: float, num_cycles: float) -> LambdaLR:
    return warm_up(optimizer, num_warmup_steps)


CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.utils": {},
    "verl.utils.tensordict_utils": {
        "assign_non_tensor": lambda data, **values: data.update(values),
        "get_non_tensor_data": lambda data, key, default: data.get(key, default),
    },
    "verl.utils.model": {"get_hf_auto_model_class": auto_class},
    "verl.utils.torch_functional": {
        "get_constant_schedule_with_warmup": warm_up,
        "get_cosine_schedule_with_warmup": cosine,
    },
    "verl.workers": {},
    "verl.workers.config": {"ActorConfig": ActorConfig, "EngineConfig": EngineConfig},
    "verl.workers.engine": {},
    "verl.workers.engine.base": {
        "BaseEngine": BaseEngine,
        "BaseEngineCtx": BaseEngineCtx,
        "EngineRegistry": EngineRegistry,
    },
    "verl.workers.engine.utils": {"prepare_micro_batches": split, "postprocess_batch_func": join},
}


@contextmanager
def instead_of_verl() -> Iterator[ModuleType]:
    """Let imports inside find these modules; yield Shardwise's engine for verl."""
    modules = {name: ModuleType(name) for name in CONTENTS}
    for name, module in modules.items():
        vars(module).update(CONTENTS[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    with patch.dict(sys.modules, modules):
        sys.modules.pop("shardwise.compat.verl", None)
        import shardwise.compat.verl as engine

        yield engine
