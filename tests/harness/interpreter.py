"""Makes Triton's interpreter round fp32 to bf16 to the nearest, ties to even, as GPUs do: it cuts the last bits off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, source, to)
        rounded = torch.tensor(source.data).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(rounded, to.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "cast_impl", cast):
        yield
