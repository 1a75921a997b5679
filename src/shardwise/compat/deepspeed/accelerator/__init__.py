"""Offer `deepspeed.accelerator`: the device of this machine by DeepSpeed's names."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import psutil
import torch
from torch import Tensor

from shardwise.compat.deepspeed.finder import answers
from shardwise.runtime.device import choose_kind


class Accelerator:
    """Answers what the device is, as DeepSpeed's does; all else is asked of torch's module of the device.

    A CPU has no memory of its own: figures are those of this process, and peaks are what it had at most.
    """

    def __init__(self) -> None:
        self._kind = choose_kind("auto")
        self._name = self._kind.name
        self._module: Any = torch.get_device_module(self._name)
        self._communication_backend_name = self.communication_backend_name()
        self._peak = 0

    @property
    def _is_gpu(self) -> bool:
        return not self._kind.is_cpu

    # The device.

    def device_name(self, device_index: int | str | None = None) -> str:
        return self._name if device_index is None or not self._is_gpu else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """Return a context in which that device is the current one."""
        return self._module.device(device_index) if self._is_gpu else contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        if self._is_gpu:
            self._module.set_device(device_index)

    def current_device(self) -> int:
        return self._module.current_device() if self._is_gpu else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def device_count(self) -> int:
        return self._module.device_count() if self._is_gpu else 1

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._is_gpu:
            self._module.synchronize(device_index)

    def communication_backend_name(self) -> str:
        return self._kind.backend

    def communication_backend_version(self) -> Any:
        return getattr(self._module, self._kind.backend).version() if self._is_gpu else None

    def is_synchronized_device(self) -> bool:
        return not self._is_gpu

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def visible_devices_envs(self) -> list[str]:
        """Return the variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[Any]) -> None:
        """Write those variables into an environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        """Return how the variables begin that a launcher passes on."""
        return ["NCCL"] if self._is_gpu else []

    # Dtypes.

    def is_bf16_supported(self) -> bool:
        return not self._is_gpu or self._module.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    is_fp64_supported = is_fp16_supported

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that parameters may have."""
        return [torch.float32, torch.float16] + ([torch.bfloat16] if self.is_bf16_supported() else [])

    # Random numbers.

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        if self._is_gpu:
            return self._module.get_rng_state(self.current_device() if device_index is None else device_index)
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._is_gpu:
            self._module.set_rng_state(new_state, self.current_device() if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def default_generator(self, device_index: int) -> torch.Generator:
        return self._module.default_generators[device_index] if self._is_gpu else torch.default_generator

    # Memory.

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._module.memory_allocated(device_index) if self._is_gpu else self._resident()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        if self._is_gpu:
            return self._module.max_memory_allocated(device_index)
        self._resident()
        return self._peak

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._module.memory_reserved(device_index) if self._is_gpu else self._resident()

    memory_cached = memory_reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        if self._is_gpu:
            return self._module.max_memory_reserved(device_index)
        return self.max_memory_allocated()

    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._peak = 0
        if self._is_gpu:
            self._module.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        if self._is_gpu:
            return self._module.memory_stats(device_index)
        return {"allocated_bytes.all.current": self._resident(), "allocated_bytes.all.peak": self._peak}

    def total_memory(self, device_index: int | None = None) -> int:
        if self._is_gpu:
            return self._module.get_device_properties(device_index or self.current_device()).total_memory
        return psutil.virtual_memory().total

    def available_memory(self, device_index: int | None = None) -> int:
        if self._is_gpu:
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        return psutil.virtual_memory().available

    def empty_cache(self) -> None:
        if self._is_gpu:
            self._module.empty_cache()

    def pin_memory(self, tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the tensor in pinned memory where there is a GPU; the arguments are those of DeepSpeed."""
        return tensor.pin_memory() if self._kind.pins else tensor

    def pin_empty(self, *size: Any, dtype: torch.dtype, device: Any = "cpu") -> Tensor:
        """Return an empty tensor in pinned memory where there is a GPU; the arguments are those of DeepSpeed."""
        return torch.empty(*size, dtype=dtype, pin_memory=self._kind.pins)

    def pin_empty_like(self, tensor: Tensor, device: Any = "cpu", dtype: torch.dtype | None = None) -> Tensor:
        """Return an empty tensor like another in pinned memory; the arguments are those of DeepSpeed."""
        return self.pin_empty(*tensor.shape, dtype=dtype or tensor.dtype)

    def unpin_memory(self, tensor: Tensor) -> None:
        """Do nothing: torch unpins memory that nothing uses."""

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned() if self._is_gpu else False

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def _resident(self) -> int:
        rss = psutil.Process().memory_info().rss
        self._peak = max(self._peak, rss)
        return rss

    # Streams, which a CPU has none of.

    @property
    def Stream(self) -> Any:  # noqa: N802  DeepSpeed's name
        return self._module.Stream if self._is_gpu else None

    @property
    def Event(self) -> Any:  # noqa: N802  DeepSpeed's name
        return self._module.Event if self._is_gpu else None

    def stream(self, stream: Any) -> Any:
        return self._module.stream(stream) if self._is_gpu else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._module.current_stream(device_index) if self._is_gpu else None

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._module.default_stream(device_index) if self._is_gpu else None

    def is_current_stream_capturing(self) -> bool:
        return self._is_gpu and self._module.is_current_stream_capturing()

    # What is built and compiled.

    def range_push(self, msg: str, *args: Any, **options: Any) -> Any:
        """Begin a range of NVIDIA's profiler; the arguments are those of DeepSpeed."""
        nvtx = getattr(self._module, "nvtx", None)
        return None if nvtx is None else nvtx.range_push(msg)

    def range_pop(self, *args: Any) -> Any:
        nvtx = getattr(self._module, "nvtx", None)
        return None if nvtx is None else nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call a function now: the device is ready when it is first asked."""
        return callback()

    def is_triton_supported(self) -> bool:
        return self._kind.has_kernels and self._module.get_device_capability()[0] >= 7

    def create_op_builder(self, class_name: str) -> Any:
        """Return the builder of an operator, which may say that it is not compatible."""
        return self.get_op_builder(class_name)()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the class of a builder."""
        return getattr(importlib.import_module("shardwise.compat.deepspeed.ops.op_builder"), class_name)

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def get_compile_backend(self) -> str:
        return "inductor"

    def set_compile_backend(self, backend: str) -> None:
        """Do nothing: the JSON's section `shardwise` says how blocks are compiled."""

    def __getattr__(self, name: str) -> Any:
        of_torch = torch.get_device_module(self._name)
        if name.startswith("_") or not hasattr(of_torch, name):
            what = f"{self._name}: it is neither DeepSpeed's nor of torch.{self._name}"
            raise AttributeError(f"get_accelerator() has no {name} on {what}")
        return getattr(of_torch, name)


@dataclass
class _Chosen:
    accelerator: Any = None


_CHOSEN: Final = _Chosen()
__getattr__ = answers(__name__)


def get_accelerator() -> Any:
    """Return the device of this machine, or the one that `set_accelerator` was given."""
    if _CHOSEN.accelerator is None:
        _CHOSEN.accelerator = Accelerator()
    return _CHOSEN.accelerator


def set_accelerator(accel_obj: Any) -> Any:
    """Let `get_accelerator` return another object, to scripts: the engine computes where torch does."""
    _CHOSEN.accelerator = accel_obj
    return accel_obj


def is_current_accelerator_supported() -> bool:
    """Return True: the device is one that torch has."""
    return True
