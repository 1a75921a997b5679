"""Proofs of tensor-parallel plans that a rank of the pool makes once, and not once for each engine.

`initialize` proves the plan of a Hugging Face model by a tiny copy of it. Most tests of a file train the same model,
and a proof takes longer than their steps.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.layout.tensor_plan import TensorPlan
from shardwise.tensor import plan_layout


def remember_proofs() -> None:
    """A plan that was proved in this process is proved, for models of the same classes, methods and config."""
    refute = plan_layout.refute
    proved: set[Any] = set()

    def refute_once(
        model: nn.Module, plan: TensorPlan, batch: Any, degree: int, sequence_parallel: bool = False
    ) -> str:
        if not hasattr(model, "config"):
            return refute(model, plan, batch, degree, sequence_parallel)
        modules = list(model.named_modules())
        code = tuple((name, type(each), getattr(each.forward, "__code__", None)) for name, each in modules)
        key = (code, repr(model.config), repr(plan), degree, sequence_parallel)
        if key in proved:
            return ""
        wrong = refute(model, plan, batch, degree, sequence_parallel)
        if not wrong:
            proved.add(key)
        return wrong

    plan_layout.refute = refute_once
