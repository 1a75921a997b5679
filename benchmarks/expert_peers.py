"""The systems that `experts.py` compares: each trains the same Mixtral of transformers on two ranks, with AdamW.

Experts are whole on both ranks (`shardwise-2`), gathered for their use (`shardwise-3`), or divided: by Shardwise
(`shardwise-ep`), and by transformers' own expert parallelism (`transformers-ep`).

>>> sorted(EXPERT_PEERS)[0]
'shardwise-2'
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from peers import FP32, NUM_RANKS, Peer, Step, Workload, optimizer_section

NUM_CHOSEN = 2
SIZES: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 256,
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "num_experts_per_tok": NUM_CHOSEN,
    }
)


@dataclass(frozen=True)
class ExpertWorkload(Workload):
    """Mixtral with these sizes; each rank gets tokens of its own."""

    num_experts: int = 8

    def __str__(self) -> str:
        return f"{self.num_experts} experts, {super().__str__()}"

    @property
    def peers(self) -> Mapping[str, Peer]:
        """The systems of this file."""
        return EXPERT_PEERS

    def model(self) -> Any:
        """The same weights on every rank and in every system."""
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(0)
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=self.num_experts))

    def tokens(self, step: int, rank: int) -> Tensor:
        """A rank's tokens of a step, [B, S], unevenly likely."""
        generator = torch.Generator().manual_seed(step * NUM_RANKS + rank)
        draws = torch.rand(self.micro_size, self.seq_len, generator=generator)
        return (draws**3 * SIZES["vocab_size"]).long()


def build_shardwise(model: Any, workload: Workload, stage: int, ep: int = 1) -> Step:
    """Whole steps of the engine."""
    import shardwise

    config = {
        "mesh": {"ep": ep},
        "batch": {"micro_size": workload.micro_size},
        "precision": {"param": workload.dtype},
        "zero": {"stage": stage},
        "optimizer": optimizer_section(workload),
        "scheduler": {"name": "constant"},
        "run": {"device": "cpu"},
    }
    engine = shardwise.initialize(model, config)
    return lambda tokens: float(engine.train_step([{"input_ids": tokens, "labels": tokens}]).loss)


def build_transformers(model: Any, workload: Workload) -> Step:
    """Dense parameters by FSDP2, experts by transformers' exchange of tokens."""
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)  # its save writes on the first rank alone
        model.save_pretrained(folders[0])
        dist.barrier()
        parallel = DistributedConfig(fsdp_size=NUM_RANKS, ep_size=NUM_RANKS)
        divided = MixtralForCausalLM.from_pretrained(folders[0], distributed_config=parallel, dtype=torch.float32)
        dist.barrier()
    divided.train()
    optimizer = workload.optimizer(divided.parameters())

    def step(tokens: Tensor) -> float:
        loss = divided(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


EXPERT_PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "shardwise-2": Peer({"fp32": FP32}, partial(build_shardwise, stage=2)),
        "shardwise-3": Peer({"fp32": FP32}, partial(build_shardwise, stage=3)),
        "shardwise-ep": Peer({"fp32": FP32}, partial(build_shardwise, stage=2, ep=NUM_RANKS)),
        "transformers-ep": Peer({"fp32": FP32}, build_transformers, "transformers.distributed"),
    }
)

Times = Mapping[str, list[float]]
"""Seconds of each call of a step, by part; and rows that the rank's experts get, by layer."""


def serve_parts(connection: Connection, system: str, workload: Workload, rank: int) -> None:
    """Answer each number with the times of so many steps of Shardwise; to be used in the place of `serve_steps`."""
    from shardwise.experts import dispatch
    from shardwise.models import grouped_experts

    times: dict[str, list[float]] = defaultdict(list)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            found = function(*arguments)
            times[part].append(time.perf_counter() - start)
            if part == "counts":
                times["rows"].append(sum(found.received))
            return found

        return call

    parts = {
        "_Take": SimpleNamespace(apply=timed("order", dispatch._Take.apply)),
        "exchange_counts": timed("counts", dispatch.exchange_counts),
        "exchange_tokens": timed("rows on the wire", dispatch.exchange_tokens),
    }
    with ExitStack() as patches:
        for name, part in parts.items():
            patches.enter_context(mock.patch.object(dispatch, name, part))
        product = timed("products", grouped_experts.grouped_product)
        patches.enter_context(mock.patch.object(grouped_experts, "grouped_product", product))
        route = timed("route", dispatch.ExpertDispatch._route)
        patches.enter_context(mock.patch.object(dispatch.ExpertDispatch, "_route", lambda *given: route(*given)))
        step = workload.peers[system].build(workload.model(), workload)
        connection.send(None)
        number = 0
        while num_steps := connection.recv():
            found: list[Times] = []
            for _ in range(num_steps):
                times.clear()
                timed("step", step)(workload.tokens(number, rank))
                found.append(dict(times))
                number += 1
            connection.send(found)


def shares(by_rank: list[Times]) -> dict[str, float]:
    """What parts of a step take, over the whole of it, as a mean over the ranks; and the skew of the rows.

    An exchange ends on all ranks at once. The rank that comes last does not wait, so its time is that of the sending.
    """
    whole = sum(times["step"][0] for times in by_rank)
    waiting = 0.0
    for part in ("counts", "rows on the wire"):
        calls = list(zip(*(times[part] for times in by_rank), strict=True))
        waiting += sum(sum(call) - len(call) * min(call) for call in calls)
    sent = sum(sum(times[part]) for times in by_rank for part in ("counts", "rows on the wire")) - waiting
    rows = list(zip(*(times["rows"] for times in by_rank), strict=True))
    return {
        "products": sum(sum(times["products"]) for times in by_rank) / whole,
        "sorting": sum(sum(times["route"]) - sum(times["counts"]) for times in by_rank) / whole,
        "moving rows": sum(sum(times["order"]) for times in by_rank) / whole,
        "sending": sent / whole,
        "waiting": waiting / whole,
        "skew": sum(max(layer) for layer in rows) * len(by_rank) / sum(map(sum, rows)),
    }
