"""What one step of the engine asks of the virtual device: how many kernels, and where the host waits for it.

    python -m device.budgets            # a JSON line a case

The batch is on the device already but in one case, and the loss is read once, at the end of the step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from device import orders
from device.orders import DEVICE, WIDE, Case, make_engine, model_case, working_folder, zero
from device.virtual import install
from device.virtual.streams import Scheduler
from harness.echo import EchoFactory, cancel_deviations
from shardwise.comm.loss import NonFiniteLossError
from shardwise.dropout import KeyedDraws
from shardwise.engine.engine import Engine
from shardwise.optim.elementwise import AdEMAMix, Lion
from shardwise.runtime import kernels, pinned_memory
from shardwise.train.rank_watch import RankWatch

NUM_WARMUP = 1
BF16 = {"param": "bf16"}
FP32 = {"param": "fp32"}
ON_HOST = "batches on the host"
CASES = (
    *(Case(f"stage {stage}", 2, zero(stage, precision=BF16), "decoder") for stage in (0, 1, 3)),
    Case("one rank", 1, zero(0, precision=FP32), "decoder"),
    Case("tp", 2, {"mesh": {"tp": 2}, "precision": FP32}, "decoder"),
    Case("sgd", 2, zero(2, precision=FP32, optimizer={"name": "sgd", "momentum": 0.9}), "decoder"),
    Case("states in bf16", 2, zero(2, precision={**FP32, "states": "bf16"}), "decoder"),
    Case("lockstep", 2, {"zero": {"stage": 3, "lockstep": True}, "precision": FP32}, "decoder"),
    Case("lion", 2, zero(2, precision=FP32, optimizer={"name": "lion"}), "decoder"),
    Case("muon", 2, zero(2, precision=FP32, optimizer={"name": "muon"}), "decoder"),
    Case(ON_HOST, 2, zero(2, precision=FP32), "decoder"),
)
REFUSED = ("stage 3", "sgd")


CODED = Case("in int8", 2, zero(3, precision={**FP32, "gather": "int8", "reduce": "int8"}), WIDE.name)
# Where what encodes and decodes is launched.
CODING = ("layout/wire_codec.py", "comm/encoded.py", "runtime/kernels.py")


@dataclass(frozen=True)
class Budget:
    """What a step took once states and buffers are there.

    Attributes:
        waits: where the host waited, and whether the optimizer had been enqueued by then.
        num_groups: flat buffers of the parameters.
        num_pass_kernels: of the forwards and backwards.
        kernels: of the optimizer's part of the step, from the last gradient on, by operator.
        num_copies: of the forwards and backwards, within the device: by `copy_` one by one, by `_foreach_copy_` a list.
    """

    name: str
    waits: list[tuple[str, bool]]
    num_parameters: int
    num_groups: int
    num_pass_kernels: int
    num_copies: int
    kernels: dict[str, int]


def by_operator(scheduler: Scheduler) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, number in scheduler.kernels.items():
        name = key.split(" ")[0]
        found[name] = found.get(name, 0) + number
    return found


@contextmanager
def noting_waits(scheduler: Scheduler, engine: Engine) -> Iterator[list[tuple[str, bool]]]:
    """Note each wait of the host, and whether the optimizer's step had returned by then."""
    waits: list[tuple[str, bool]] = []
    was_enqueued = False
    plain_step = engine.parts.sharded.step

    def step(*args: Any) -> Any:
        nonlocal was_enqueued
        stepping = plain_step(*args)
        was_enqueued = True
        return stepping

    with (
        mock.patch.object(scheduler, "on_wait", lambda why, _: waits.append((why, was_enqueued))),
        mock.patch.object(engine.parts.sharded, "step", step),
    ):
        yield waits


def on_device(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(DEVICE) if isinstance(leaf, Tensor) else leaf, tree)


def open_engine(case: Case) -> tuple[Engine, list[Any]]:
    """An engine and its batches."""
    engine = make_engine(case, lambda mesh: EchoFactory(mesh, 0))
    cancel_deviations(engine.parts.losses)
    batches = [model_case(case).batch(seed, 2, case.dtype) for seed in range(case.num_micro_batches)]
    return engine, batches if case.name == ON_HOST else [on_device(batch) for batch in batches]


def measure(case: Case, scheduler: Scheduler) -> Budget:
    engine, batches = open_engine(case)
    for _ in range(NUM_WARMUP):
        engine.train_step(batches)
    scheduler.finish_all()
    scheduler.kernels.clear()
    with noting_waits(scheduler, engine) as waits:
        for batch in batches:
            engine.backward(engine(batch))
        num_pass_kernels, copies = scheduler.kernels.total(), by_operator(scheduler).get("copy_", 0)
        scheduler.kernels.clear()
        engine.step()
    specs = engine.layout.groups
    budget = Budget(
        case.name,
        waits,
        sum(len(spec.params) for spec in specs),
        len(specs),
        num_pass_kernels,
        copies,
        by_operator(scheduler),
    )
    engine.close()
    return budget


def watch_ranks(scheduler: Scheduler) -> dict[str, Any]:
    """Where the host waits while `shardwise train` compares the ranks after a step, for what is still to be done."""
    scheduler.restart("lazy")
    engine, batches = open_engine(CASES[0])
    watch = RankWatch(engine)
    waits: list[str] = []
    with mock.patch.object(scheduler, "on_wait", lambda why, is_over: is_over or waits.append(why)):
        for step in range(3):
            engine.train_step(batches)
            waits.clear()
            watch.see(step, 0.1, None)
    engine.close()
    scheduler.restart("eager")
    return {"name": "ranks compared", "waits": waits}


def count_pins() -> dict[str, Any]:
    """How often host memory is pinned in a step whose sequences have two lengths, once it has had both."""
    (case,) = [case for case in orders.CASES if case.name == "activations on the host"]
    engine, batches = open_engine(case)
    for _ in range(NUM_WARMUP):
        engine.train_step(batches)
    with mock.patch.object(pinned_memory, "pin_pages", wraps=pinned_memory.pin_pages) as pin:
        engine.train_step(batches)
    engine.close()
    return {"name": case.name, "num_pins": pin.call_count, "lengths": sorted(batch[0].shape[1] for batch in batches)}


def step_lists(scheduler: Scheduler) -> Iterator[dict[str, Any]]:
    """How optimizers of the library step lists of tensors on the device: kernels, and what tensors alone do else."""
    for kind in (Lion, AdEMAMix):
        torch.manual_seed(0)
        alone = [nn.Parameter(torch.randn(shape)) for shape in ((7,), (5, 3), (40, 30), (1,))]
        together = [nn.Parameter(param.detach().to(DEVICE)) for param in alone]
        ours, expected = (
            kind(together, lr=1e-2, weight_decay=0.1),
            [kind([param], lr=1e-2, weight_decay=0.1) for param in alone],
        )
        for _ in range(3):
            for param, moved in zip(alone, together, strict=True):
                param.grad = torch.randn_like(param)
                moved.grad = param.grad.to(DEVICE)
            scheduler.finish_all()
            scheduler.kernels.clear()
            ours.step()
            kernels = by_operator(scheduler)
            for optimizer in expected:
                optimizer.step()
        same = [torch.equal(param, moved.cpu()) for param, moved in zip(alone, together, strict=True)]
        yield {"name": f"lists of {kind.__name__}", "kernels": kernels, "are_same": same}


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Masters, parameters and states as they are, on the host."""
    found = {}
    for piece in engine.parts.sharded.pieces:
        found[piece.name] = piece.view.detach().cpu().clone()
        states: Mapping[str, Any] = engine.optimizer.state[piece.view]
        found |= {f"{piece.name}.{name}": value.detach().cpu().clone() for name, value in states.items()}
    return found


def spoil(model: nn.Module) -> Callable[[], None]:
    """Make the gradients of a model's first module NaN, until the returned function is called."""
    module = next(each for each in model.modules() if any(True for _ in each.parameters(recurse=False)))
    handle = module.register_forward_hook(lambda module, args, output: output * float("nan"))
    return handle.remove


def refuse(case: Case, scheduler: Scheduler, on_nonfinite: str) -> dict[str, Any]:
    """What is left of a step whose values are not finite, and of the one after it."""
    sections = {**case.sections, "run": {"device": "cuda", "on_nonfinite": on_nonfinite}}
    engine, batches = open_engine(Case(case.name, case.world_size, sections, case.model))
    for _ in range(NUM_WARMUP):
        engine.train_step(batches)
    before = state_of(engine)
    restore = spoil(engine.module)
    error, skipped = "", False
    with noting_waits(scheduler, engine) as waits:
        try:
            skipped = engine.train_step(batches).skipped
        except NonFiniteLossError as raised:
            error = raised.code
    restore()
    after = state_of(engine)
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    result = engine.train_step(batches)
    moved = [name for name, value in state_of(engine).items() if not torch.equal(value, after[name])]
    engine.close()
    return {
        "name": f"{case.name}, {on_nonfinite}",
        "error": error,
        "skipped": skipped,
        "changed": changed,
        "is_finite_after": result.loss == result.loss,
        "share_moved": len(moved) / len(after),
        "was_enqueued_before": bool(waits) and waits[0][1],
    }


@contextmanager
def without_triton(is_without: bool) -> Iterator[None]:
    """Let the library find no Triton inside the context."""
    with mock.patch.object(kernels, "find_spec", return_value=None) if is_without else nullcontext():
        yield


def code(scheduler: Scheduler) -> dict[str, int]:
    """The kernels of a step's forwards and backwards that encode and decode, by operator."""
    engine, batches = open_engine(CODED)
    for _ in range(NUM_WARMUP):
        engine.train_step(batches)
    scheduler.finish_all()
    scheduler.kernels.clear()
    for batch in batches:
        engine.backward(engine(batch))
    found: dict[str, int] = {}
    for key, number in scheduler.kernels.items():
        name, _, place = key.partition(" ")
        if place.startswith(CODING):
            found[name] = found.get(name, 0) + number
    engine.step()
    engine.close()
    return found


def drop(scheduler: Scheduler) -> dict[str, int]:
    """The kernels of a keyed dropout, and of its backward, where another one has hashed the indices."""
    draws, values = KeyedDraws(0, DEVICE), torch.ones(4, 8, 64, device=DEVICE, requires_grad=True)
    gradient = torch.ones_like(values)
    with draws.at(0, 0, 0, 4):
        draws.drop("first", values, 0.1, None)
        scheduler.kernels.clear()
        dropped = draws.drop("second", values, 0.1, None)
    num_forward = scheduler.kernels.total()
    torch.autograd.grad(dropped, values, gradient)
    return {"forward": num_forward, "backward": scheduler.kernels.total() - num_forward}


def main() -> int:
    scheduler = install()
    with working_folder():
        for case in CASES:
            print(json.dumps(asdict(measure(case, scheduler))), flush=True)
        for line in (watch_ranks(scheduler), count_pins(), *step_lists(scheduler)):
            print(json.dumps(line), flush=True)
        for case in (case for case in CASES if case.name in REFUSED):
            for on_nonfinite in ("raise", "skip"):
                print(json.dumps(refuse(case, scheduler, on_nonfinite)), flush=True)
        for is_without in (False, True):
            how = "torch" if is_without else "triton"
            with without_triton(is_without):
                for name, count in (("coded", code), ("dropout", drop)):
                    print(json.dumps({"name": f"{name}, {how}", "kernels": count(scheduler)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
