"""Minutes on one GPU that say whether the library is right there, before anything is timed.

    python benchmarks/gpu_smoke.py nccl --json nccl.json          # NCCL's functions on one rank
    TORCH_CUDA_SANITIZER=1 python benchmarks/gpu_smoke.py orders  # each layout beside echoes of this rank
    python benchmarks/gpu_smoke.py waits saves

`orders` trains with and without overlap: both must have the same bits, and CUDA's sanitizer, where it is on, reports
what two streams use without an event between them. `waits` counts where a step waits for the device. `saves` saves and
loads each kind of states, each in a process of its own. It ends with 1 where something failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
import torch.distributed as dist

from harness.echo import EchoFactory, cancel_deviations
from shardwise.config.resolve import Config
from shardwise.engine.build import EngineInputs
from shardwise.engine.engine import Engine
from shardwise.launch.process_group import ensure_process_group
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.tensor.plan_layout import plan_layout

DEVICE = torch.device("cuda", 0)
SHAPE = DecoderConfig(
    vocab_size=256,
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    ffn_size=256,
    max_seq_len=64,
)
Sections = Mapping[str, Mapping[str, Any]]
HOST = {"params": "host", "grads": "host", "optimizer": "host"}
# By name: how many ranks there are, and what differs from the defaults.
LAYOUTS: Mapping[str, tuple[int, Sections]] = {
    **{
        f"stage {stage}, recompute {mode}": (2, {"zero": {"stage": stage}, "recompute": {"mode": mode}})
        for stage in (3, 2, 1, 0)
        for mode in ("none", "full")
    },
    "stage 3, four ranks": (4, {"zero": {"stage": 3}}),
    "stage 3, gathers in int8": (2, {"zero": {"stage": 3}, "precision": {"gather": "int8", "reduce": "int8"}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "tp, sequence parallel, stage 3": (
        4,
        {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "zero": {"stage": 3}},
    ),
    "cp ring": (2, {"mesh": {"cp": 2}, "context": {"transport": "ring"}, "zero": {"stage": 3}}),
    "cp ulysses": (2, {"mesh": {"cp": 2}, "context": {"transport": "ulysses"}, "zero": {"stage": 3}}),
    "optimizer on the host": (2, {"zero": {"stage": 2}, "tiers": {"optimizer": "host"}}),
    "everything on the host": (
        2,
        {"zero": {"stage": 3}, "tiers": {**HOST, "activations": "host"}, "recompute": {"mode": "full"}},
    ),
    "states in int8": (2, {"zero": {"stage": 2}, "precision": {"states": "int8"}}),
    "Muon": (2, {"zero": {"stage": 3}, "optimizer": {"name": "muon", "lr": 1e-2}}),
}
QUICK = ("stage 3, recompute full", "stage 2, recompute none", "tp", "everything on the host")
WAITED = ("stage 3, recompute none", "states in int8", "optimizer on the host")


def make_engine(num_ranks: int, sections: Sections) -> Engine:
    """An engine of rank 0 beside echoes; its weights are always the same."""
    merged: dict[str, dict[str, Any]] = {
        "batch": {"accumulation": 2},
        "precision": {"param": "bf16"},
        "optimizer": {"clip_norm": 1.0},
        "scheduler": {"name": "constant"},
        "run": {"device": "cuda"},
    }
    for name, values in sections.items():
        merged[name] = {**merged.get(name, {}), **values}
    config = Config.from_dict(merged).resolve(world_size=num_ranks)
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    layout = plan_layout(model, config)
    inputs = EngineInputs(
        model,
        config,
        layout,
        MemoryTracker(DEVICE),
        EchoFactory(layout.mesh, 0),
        loss_fn=lambda output, batch: lm_loss(output, batch[1]),
    )
    engine = Engine(inputs)
    cancel_deviations(engine.parts.losses)
    return engine


def take_steps(engine: Engine, num_steps: int) -> list[float]:
    """Losses and norms of a few steps."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SHAPE.vocab_size, (2, SHAPE.max_seq_len + 1), generator=generator).to(DEVICE)
    trace: list[float] = []
    for _ in range(num_steps):
        result = engine.train_step([(tokens[:, :-1], tokens[:, 1:])] * 2)
        trace += [result.loss, result.grad_norm]
    return trace


def call_nccl(is_quick: bool) -> dict[str, Any]:
    """Call each function that `comm.backends` calls, as it calls it, on a side stream; and see what torch warns of."""
    x = torch.arange(1024.0, device=DEVICE)
    stream, failed = torch.cuda.Stream(), []
    out, got = torch.zeros_like(x), torch.zeros_like(x)

    def exchange() -> None:
        pairs = (dist.P2POp(dist.isend, x, group_peer=0), dist.P2POp(dist.irecv, got, group_peer=0))
        for work in dist.batch_isend_irecv(list(pairs)):
            work.wait()
        out.copy_(got)

    # torch 2.13 has new names for two of them.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: gather(out, x),
        "reduce_scatter": lambda: scatter(out, x),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x),
        "all_reduce": lambda: (out.copy_(x), dist.all_reduce(out, op=dist.ReduceOp.MAX)),
        "broadcast": lambda: (out.copy_(x), dist.broadcast(out, src=0)),
        "batch_isend_irecv": exchange,
    }
    with warnings.catch_warnings(record=True) as found, torch.cuda.stream(stream):
        warnings.simplefilter("always")
        for name, call in calls.items():
            stream.wait_stream(torch.cuda.default_stream())
            try:
                out.zero_()
                call()
                if not torch.equal(out, x):
                    failed.append(f"{name}: wrong values")
            except Exception as error:  # one that is missing must not hide the others
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    return {"called": [*calls], "failed": failed, "warned": Counter(str(each.message)[:120] for each in found)}


def compare_orders(is_quick: bool) -> dict[str, Any]:
    """Train each layout with and without overlap: the bits must be the same, and finite."""
    traces, failed = {}, []
    for name in QUICK if is_quick else LAYOUTS:
        num_ranks, sections = LAYOUTS[name]
        found = []
        for overlap in (True, False):
            try:
                engine = make_engine(num_ranks, {**sections, "zero": {**sections.get("zero", {}), "overlap": overlap}})
                found.append(take_steps(engine, 1 if is_quick else 3))
                engine.close()
            except Exception as error:  # the sanitizer's too
                failed.append(f"{name}, overlap {overlap}: {type(error).__name__}: {str(error)[:2000]}")
        traces[name] = found
        if len(found) == 2 and (found[0] != found[1] or any(each != each for each in found[0])):
            failed.append(f"{name}: {found[0]} with overlap, {found[1]} without")
        print(f"{name}: {'ok' if not failed or not failed[-1].startswith(name) else failed[-1]}", flush=True)
    sanitizer = sys.modules.get("torch.cuda._sanitizer")
    return {"sanitizer": sanitizer is not None, "traces": traces, "failed": failed}


def count_waits(is_quick: bool) -> dict[str, Any]:
    """Count, by line, where a step waits for the device, as torch sees it."""
    waits = {}
    for name in WAITED[:1] if is_quick else WAITED:
        engine = make_engine(*LAYOUTS[name])
        take_steps(engine, 1 if is_quick else 2)
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            take_steps(engine, 1)
        torch.cuda.set_sync_debug_mode("default")
        places = (f"{each.filename.rpartition('shardwise/')[2]}:{each.lineno}" for each in found)
        waits[name] = dict(Counter(places).most_common(12))
        engine.close()
    return {"waits": waits, "failed": []}


def save_each(is_quick: bool) -> dict[str, Any]:
    """Save and load each kind of states, in a process of its own: what crashes ends alone."""
    seconds, failed = {}, []
    for states in ("int8",) if is_quick else ("int8", "bf16", "master"):
        for wait in (True, False):
            start_s = time.perf_counter()
            command = [sys.executable, __file__, "--save", states, "--wait", str(int(wait))]
            done = subprocess.run(command, capture_output=True, text=True)  # the part of the plan has a limit
            name = f"states {states}, wait={wait}"
            seconds[name] = time.perf_counter() - start_s
            if done.returncode:
                failed.append(f"{name}: exit code {done.returncode}: {done.stderr[-400:]}")
    return {"seconds": seconds, "failed": failed}


def save_once(states: str, wait: bool) -> None:
    """Save while training goes on, load, and train as before."""
    engine = make_engine(1, {"precision": {"states": states}})
    take_steps(engine, 1)
    with tempfile.TemporaryDirectory() as folder:
        engine.save(folder, wait=wait)
        expected = take_steps(engine, 1)
        engine.finish_saves()
        engine.load(folder)
        found = take_steps(engine, 1)
    engine.close()
    if found != expected:
        raise SystemExit(f"{found} after a load, {expected} before")


PARTS: Mapping[str, Callable[[bool], dict[str, Any]]] = {
    "nccl": call_nccl,
    "orders": compare_orders,
    "waits": count_waits,
    "saves": save_each,
}


def main() -> int:
    """Run the parts, print them and keep them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a few layouts, few steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--wait", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    ensure_process_group("cuda", timeout_s=60.0)
    if options.save:
        save_once(options.save, bool(options.wait))
        return 0
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}
    results: dict[str, Any] = {"machine": machine}
    for name in options.parts or PARTS:
        start_s = time.perf_counter()
        try:
            results[name] = PARTS[name](options.quick)
        except Exception as error:
            results[name] = {"failed": [f"{type(error).__name__}: {str(error)[:2000]}"]}
        results[name]["took_s"] = round(time.perf_counter() - start_s, 1)
        print(name, json.dumps(results[name]), flush=True)
        if options.json:  # what was found stays, whatever the next part does
            options.json.write_text(json.dumps(results, indent=2))
    return int(any(results[name]["failed"] for name in results if name != "machine"))


if __name__ == "__main__":
    sys.exit(main())
