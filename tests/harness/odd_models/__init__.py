"""Odd but legal models in plain torch, each a case for parity with one plain process.

Nothing here is imported from the library. All take the same batches, `{"x": [B, D], "step": int, "rank": int}`, so that
what a forward does may depend on them in one process as in several; the loss is a sum and a count.

>>> case = CASES["TiedBlocks"]
>>> model = case.build()
>>> batch = make_batches(num_steps=1, world_size=1)[0][0][0]
>>> case.make_loss(model)(model(**batch), batch)[1]
12
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.odd_models.base import Block, LossFn, OddCase, Stack, make_batches, regression_loss
from harness.odd_models.flow import FLOW_CASES
from harness.odd_models.outputs import OUTPUT_CASES
from harness.odd_models.parameters import PARAMETER_CASES, Buffers

__all__ = ["CASES", "Block", "Buffers", "LossFn", "OddCase", "Stack", "make_batches", "regression_loss"]

CASES: Mapping[str, OddCase] = {case.name: case for case in (*PARAMETER_CASES, *FLOW_CASES, *OUTPUT_CASES)}
