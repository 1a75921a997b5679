"""Triton kernels of any package: where they run, and their launches as values, which tests compile for absent GPUs.

Modules that need Triton are imported where a kernel is first launched, so a machine without Triton has all the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.runtime.device import kind_of


@dataclass(frozen=True, eq=False)
class KernelLaunch:
    """Describes a kernel, its grid, its arguments, and the warps, stages and registers that it is compiled for.

    Attributes:
        fuses: a product and a sum may be rounded once; False where other code must give the same bits.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    num_warps: int
    num_stages: int
    most_registers: int | None = None
    fuses: bool = True

    @property
    def options(self) -> dict[str, Any]:
        limit = {} if self.most_registers is None else {"maxnreg": self.most_registers}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": self.fuses, **limit}

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](*self.arguments, **self.options)


def has_kernels(device: torch.device) -> bool:
    """Say whether Triton kernels of this library may run on a device here."""
    return kind_of(device).has_kernels and find_spec("triton") is not None
