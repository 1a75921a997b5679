"""Offer `deepspeed.accelerator`: the device of this machine by DeepSpeed's names."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


class Accelerator:
    """Answers what the device is; all else is asked of `torch.cuda`, or of `torch.cpu`."""

    def __init__(self) -> None:
        self._name = "cuda" if torch.cuda.is_available() else "cpu"

    def device_name(self, device_index: int | str | None = None) -> str:
        """Return the name of the device, with its index where one is given and there are several."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        """Return the index of the device in use."""
        return torch.cuda.current_device() if self._name == "cuda" else 0

    def current_device_name(self) -> str:
        """Return the name of the device in use, with its index."""
        return self.device_name(self.current_device())

    def communication_backend_name(self) -> str:
        """Return the back end of collectives."""
        return "nccl" if self._name == "cuda" else "gloo"

    def is_available(self) -> bool:
        """Say that there is a device."""
        return True

    def is_synchronized_device(self) -> bool:
        """Say whether the device computes in step with Python."""
        return self._name == "cpu"

    def is_bf16_supported(self) -> bool:
        """Say whether the device computes in bf16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Say that the device computes in fp16."""
        return True

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes of live tensors on the GPU; 0 on the CPU."""
        return torch.cuda.memory_allocated(device_index) if self._name == "cuda" else 0

    def empty_cache(self) -> None:
        """Give cached memory back to the GPU."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators."""
        torch.manual_seed(seed)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return a tensor in pinned memory, on GPUs."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda if self._name == "cuda" else torch.cpu, name)


@cache
def get_accelerator() -> Accelerator:
    """Return the device of this machine."""
    return Accelerator()
