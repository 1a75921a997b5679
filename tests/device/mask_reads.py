"""Where the host waits in a step of models of transformers, of two sizes: layers share what is read of a batch's masks.

TRITON_INTERPRET=1 python -m device.mask_reads WORD         # a JSON line a case whose name has the word, or is it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from device.budgets import on_device
from device.orders import DEVICE
from device.virtual import install
from device.virtual.streams import Scheduler
from harness.echo import EchoFactory
from harness.huggingface import VOCAB_SIZE, build_model
from harness.training import make_config
from shardwise.attention import custom_op
from shardwise.attention.backends import AttentionGrads, BackendPlan, SavedForBackward
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.sdpa_patch import sparse_sdpa_module
from shardwise.attention.structures import LocalSlidingWindowSparsityConfig
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.tensor.plan_layout import plan_layout

LENGTH: Final = 16
SPARSE: Final[Mapping[str, Any]] = {"attention": {"kind": "sliding-window", "block": 16}}
SPREAD: Final[Mapping[str, Any]] = {"mesh": {"cp": 2}}
FULL: Final[Mapping[str, Any]] = {"recompute": {"mode": "full"}}
REPLACED: Final = "torch's attention replaced, padded"
CASES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "plain": ("plain", {}),
    "padded": ("padded", {}),
    REPLACED: ("padded", {}),
    "sparse, padded": ("padded", SPARSE),
    "sparse, packed": ("packed", SPARSE),
    "sparse, packed by ends": ("ends", SPARSE),
    "sparse, packed, recomputed": ("packed", {**SPARSE, **FULL}),
    "cp, padded": ("padded", SPREAD),
    "cp, packed": ("packed", SPREAD),
    "cp, packed, recomputed": ("packed", {**SPREAD, **FULL}),
}


class NoKernels:
    """A back end of attention whose results are zeros."""

    def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        return BackendPlan((), ())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(self, grad_out: Tensor, grad_lse: Tensor | None, saved: SavedForBackward, *_: Any) -> AttentionGrads:
        return AttentionGrads(*map(torch.zeros_like, (saved.q, saved.k, saved.v)), None)


def batch_of(kind: str) -> dict[str, Any]:
    """Two rows of 16 tokens, on the host: plain, padded, or packed by their positions, or by ends too."""
    tokens = torch.randint(4, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    if kind == "padded":
        batch["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])).long()
    if kind in ("packed", "ends"):
        batch |= {"position_ids": torch.cat([torch.arange(5), torch.arange(11)])[None], "use_cache": False}
    if kind == "ends":
        ends = torch.tensor([0, 5, 16, 21, 32], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    return batch


def waits_of(name: str, num_layers: int, scheduler: Scheduler) -> dict[str, list[str]]:
    """Where the host waits in a step of two micro-batches, by where these are."""
    kind, sections = CASES[name]
    config = make_config(2, {"run": {"device": "cuda"}, "precision": {"param": "fp32"}, **sections}).resolve(2)
    torch.manual_seed(0)
    model = build_model("llama", num_hidden_layers=num_layers)
    if name == REPLACED:
        sparse_sdpa_module(model, LocalSlidingWindowSparsityConfig(4, block=16))
    layout = plan_layout(model, config, rank=0)
    engine = Engine(EngineInputs(model, config, layout, MemoryTracker(DEVICE), EchoFactory(layout.mesh, 0)))
    found: dict[str, list[str]] = {}
    waits: list[str] = []
    with mock.patch.object(scheduler, "on_wait", lambda why, _: waits.append(why)):
        for place in ("warm-up", "device", "host"):
            batches = [batch_of(kind) if place == "host" else on_device(batch_of(kind)) for _ in range(2)]
            scheduler.finish_all()
            waits.clear()
            engine.train_step(batches)
            found[place] = list(waits)
    engine.close()
    return found


def main() -> int:
    scheduler = install()
    given = sys.argv[1:]
    names = [name for name in CASES if name in given or all(word in name for word in given)]
    with mock.patch.object(custom_op, "backend_named", return_value=NoKernels()):
        for name in names:
            one, two = (waits_of(name, num_layers, scheduler) for num_layers in (1, 2))
            print(json.dumps({"name": name, "one layer": one, "two layers": two}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
