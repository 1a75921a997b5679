"""Makes this process one with a GPU, by being imported: the virtual device, with NCCL's functions over host memory.

    PYTHONPATH=tests/device/site:tests:src python PROGRAM

runs any program so, and all processes of Python that it starts. VIRTUAL_ORDER and VIRTUAL_SEED choose the order of
streams, `lazy` by default.
"""

from __future__ import annotations

import os
from typing import cast

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
# torch would turn CUDA's sanitizer on before there is a device.
IS_SANITIZED = os.environ.pop("TORCH_CUDA_SANITIZER", None) is not None

import torch  # noqa: E402

from device.ranks import stand_for_nccl  # noqa: E402
from device.virtual import install  # noqa: E402
from device.virtual.streams import Order  # noqa: E402

torch.set_num_threads(1)
SCHEDULER = install(cast(Order, os.environ.get("VIRTUAL_ORDER", "lazy")), int(os.environ.get("VIRTUAL_SEED", "0")))
stand_for_nccl()
if IS_SANITIZED:
    from torch.cuda import _gpu_trace, _sanitizer

    SCHEDULER.trace = _gpu_trace
    _sanitizer.enable_cuda_sanitizer()
