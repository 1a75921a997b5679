"""Offer `deepspeed.accelerator`: the device of this machine by DeepSpeed's names."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


class Accelerator:
    """Answers what the device is, as DeepSpeed's does; all else is asked of `torch.cuda`, or of `torch.cpu`."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def device_name(self, device_index: int | str | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def is_bf16_supported(self) -> bool:
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def empty_cache(self) -> None:
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self._name == "cuda" else torch.cpu, name)


@cache
def get_accelerator() -> Accelerator:
    """Return the device of this machine."""
    return Accelerator()
