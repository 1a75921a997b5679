"""Makes this process one with a GPU, by being imported: the virtual device, with NCCL's functions over host memory.

    PYTHONPATH=tests/device/site:tests:src python PROGRAM

runs any program so, and all processes of Python that it starts. VIRTUAL_ORDER and VIRTUAL_SEED choose the order of
streams, `lazy` by default.
"""

from __future__ import annotations

import os
from typing import cast

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from device.ranks import stand_for_nccl
from device.virtual import install, interpret_quickly
from device.virtual.streams import Order

torch.set_num_threads(1)
SCHEDULER = install(cast(Order, os.environ.get("VIRTUAL_ORDER", "lazy")), int(os.environ.get("VIRTUAL_SEED", "0")))
interpret_quickly()
stand_for_nccl()
