"""What offload brings and costs on one GPU: tokens/s with and without, the GPU's busy share, and the largest model.

Each row is a process of its own, so that one that runs out of memory ends alone. Weights are random numbers drawn on
the device, recomputation is full and the same for all. `busy` is the share of a step in which a kernel runs, and the
rates are those of the copies while they run, both from one more step under torch's profiler. `of plain` is the ratio of
tokens/s to the same model without offload; where that does not fit, to what the GPU would do if it were always busy
(marked ~). The largest model has the layers of a 13B decoder, as many as device and host hold by the layout's formula,
then as many as really train, found by halving the step. A row that the time left does not allow is skipped.

    python benchmarks/gpu_offload.py --minutes 8.5 --json gpu_offload.json
    python benchmarks/gpu_offload.py --device cpu --cases tiny:plain,tiny:optimizer --steps 1   # does it run?
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from shardwise import Engine, initialize
from shardwise.config.resolve import Config
from shardwise.construction.values import ParamInitializer
from shardwise.launch.host import cgroup_limit_bytes
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig, preset
from shardwise.models.shape import flops_per_token, num_params
from shardwise.offload.step_pipeline import CHUNK_NUMEL

HOST = {"params": "host", "grads": "host", "optimizer": "host"}
# What is asked for: stage and tiers. `activations` needs recomputation, which all have.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),
    "optimizer": (2, {"optimizer": "host"}),
    "optimizer+clip": (2, {"optimizer": "host"}),
    "opt+grads": (2, {"optimizer": "host", "grads": "host"}),
    "all": (3, HOST),
    "all+act": (3, {**HOST, "activations": "host"}),
    "nvme": (2, {"optimizer": "nvme"}),
    "all-nvme": (3, {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}),
}
# In the order of what is asked first: what comes last may find no time left.
CASES = (
    "1b:plain,1b:optimizer,1b:all+act,1b:nvme,llama-3-8b:plain,llama-3-8b:optimizer,largest:optimizer,largest:plain,"
    "llama-3-8b:optimizer+clip,1b:all,1b:all-nvme"
)
# Of the time that is left, at most so much goes into one search.
SEARCH_SHARE = 0.6
LARGEST = "llama-13b"
# Beside parameters and gradients: activations, a block gathered or reduced, what the allocator cannot use.
DEVICE_SHARE, DEVICE_MARGIN_BYTES = 0.9, 8e9
# Beside the states: this process, its buffers, the rest of the machine.
HOST_SHARE, HOST_MARGIN_BYTES = 0.92, 4e9
PARAM_AND_GRAD_BYTES, OPTIMIZER_BYTES = 4, 12  # an element: bf16 and bf16; master and two moments in fp32
SECONDS_TO_START = 45.0


@dataclass(frozen=True)
class Case:
    """One row: `num_layers` and `optimizer_on_device` where they are not the preset's and 0."""

    model: str
    mode: str
    num_layers: int | None = None
    optimizer_on_device: float = 0.0


@dataclass(frozen=True)
class Load:
    """What a step is: `accumulation` micro-batches of `micro_size` samples."""

    seq_len: int
    micro_size: int
    accumulation: int

    @property
    def num_tokens(self) -> int:
        return self.seq_len * self.micro_size * self.accumulation


def shape_of(case: Case, load: Load) -> DecoderConfig:
    shape = preset(case.model)
    return replace(shape, max_seq_len=load.seq_len, num_layers=case.num_layers or shape.num_layers)


def config_of(case: Case, load: Load, device: str, folder: str | None) -> Config:
    stage, tiers = MODES[case.mode]
    if "optimizer" in tiers:
        tiers = {**tiers, "optimizer_on_device": case.optimizer_on_device}
    return Config.from_dict(
        {
            "zero": {"stage": stage},
            "precision": {"param": "bf16", "accumulate": "param"},
            "batch": {"micro_size": load.micro_size, "accumulation": load.accumulation},
            "recompute": {"mode": "full"},
            "tiers": {**tiers, "nvme_path": folder if "nvme" in tiers.values() else None},
            "optimizer": {"clip_norm": 1.0 if case.mode.endswith("clip") else None},
            "scheduler": {"name": "constant"},
            "run": {"device": device},
        }
    )


def make_engine(shape: DecoderConfig, config: Config) -> Engine:
    """An engine with random weights that the device draws: the host would take minutes."""
    model = Decoder(shape, device="meta", dtype=torch.float32)
    without_values = partial(ParamInitializer, has_values=False)
    with mock.patch("shardwise.engine.build.ParamInitializer", lambda model, seed, _: without_values(model, seed)):
        engine = initialize(model, config, loss_fn=lambda output, batch: lm_loss(output, batch[1]))
    generator = torch.Generator(engine.device).manual_seed(0)
    with torch.no_grad():
        for group in engine.parts.sharding.groups:
            params = group
            for start in range(0, params.master.numel, CHUNK_NUMEL):
                numel = min(CHUNK_NUMEL, params.master.numel - start)
                values = torch.randn(numel, device=engine.device, generator=generator) * 0.02
                for storage in {params.master, params.shard}:
                    storage.write(start, values)
    return engine


def run_case(case: Case, load: Load, device: str, num_steps: int, end_s: float) -> dict[str, Any]:
    """Train a few steps, and say how that went; in a process of its own."""
    shape = shape_of(case, load)
    start_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardwise-offload-") as folder:
        engine = make_engine(shape, config_of(case, load, device, folder))
        generator = torch.Generator().manual_seed(0)
        size = (load.micro_size, load.seq_len + 1)

        def step() -> float:
            drawn = [torch.randint(shape.vocab_size, size, generator=generator) for _ in range(load.accumulation)]
            began_s = time.perf_counter()
            loss = engine.train_step([(tokens[:, :-1], tokens[:, 1:]) for tokens in drawn]).loss
            assert loss == loss, "the loss is nan"
            return time.perf_counter() - began_s

        built_s = time.perf_counter() - start_s
        # The first makes memory and learns; the end of a step that runs later shows in the next one.
        warmup = [step() for _ in range(2)]
        times: list[float] = []
        while len(times) < num_steps and (not times or time.time() + 2.5 * times[-1] < end_s):
            times.append(step())
        step_s = statistics.median(times)
        engine.tiers.traffic.reset()
        has_profiler = device == "cuda" and (torch.version.cuda or torch.version.hip) is not None
        seen = profile(step, folder) if has_profiler and time.time() + 2.5 * step_s < end_s else {}
        host_bytes = engine.tiers.memory.snapshot().total_bytes
        result = {
            "parameters": num_params(shape),
            "built_s": built_s,
            "first_step_s": warmup[0],
            "step_s": step_s,
            "tokens_per_s": load.num_tokens / step_s,
            "flops_per_s": flops_per_token(shape, load.seq_len) * load.num_tokens / step_s,
            "host_gib": host_bytes / 2**30,
            "device_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
            **seen,
        }
        engine.tiers.close()
    return result


def profile(step: Any, folder: str) -> dict[str, float]:
    """The share of one more step in which kernels run, and how fast copies are while they run."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step_s = step()
        torch.cuda.synchronize()
    path = Path(folder, "trace.json")
    profiler.export_chrome_trace(str(path))
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("ph") == "X"]
    path.unlink()
    kernels = [(each["ts"], each["ts"] + each["dur"]) for each in events if each.get("cat") == "kernel"]
    found = {"busy": union(kernels) / 1e6 / step_s} if kernels else {}
    for name, key in (("HtoD", "to_device_gb_s"), ("DtoH", "to_host_gb_s")):
        copies = [each for each in events if each.get("cat") == "gpu_memcpy" and name in each["name"]]
        large = [each for each in copies if each.get("args", {}).get("bytes", 0) >= 2**20]
        if large:
            num_bytes = sum(each["args"]["bytes"] for each in large)
            found[key] = num_bytes / 1e9 / (union((each["ts"], each["ts"] + each["dur"]) for each in large) / 1e6)
            found[f"{key}_pageable"] = sum("Pageable" in each["name"] for each in large)
    return found


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length that intervals cover.

    >>> union([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def host_bytes() -> float:
    """What states may take of the host's memory."""
    available_bytes = psutil.virtual_memory().available
    return HOST_SHARE * min(available_bytes, cgroup_limit_bytes() or available_bytes) - HOST_MARGIN_BYTES


def largest_case(mode: str, load: Load, device_bytes: float) -> Case:
    """As many layers as fit by the formula."""
    space = DEVICE_SHARE * device_bytes - DEVICE_MARGIN_BYTES
    on_host = host_bytes() if mode == "optimizer" else 0.0
    most = (space + on_host) / (PARAM_AND_GRAD_BYTES + OPTIMIZER_BYTES)
    one, two = (num_params(shape_of(Case(LARGEST, mode, layers), load)) for layers in (1, 2))
    return with_layers(Case(LARGEST, mode), max(1, int((most - one) / (two - one)) + 1), load, on_host)


def with_layers(case: Case, num_layers: int, load: Load, on_host: float) -> Case:
    """The case with so many layers, and of the optimizer as much on the device as the host does not hold."""
    numel = num_params(shape_of(replace(case, num_layers=num_layers), load))
    share = max(0.0, 1.0 - on_host / (OPTIMIZER_BYTES * numel)) if on_host else 0.0
    return replace(case, num_layers=num_layers, optimizer_on_device=round(share, 3))


def spawn(case: Case, load: Load, options: argparse.Namespace, end_s: float) -> dict[str, Any]:
    """A row by a process of its own: what it measured, or `failed`: why it did not."""
    spec = json.dumps({"case": asdict(case), "load": asdict(load), "end_s": end_s})
    command = [sys.executable, __file__, "--run", spec, "--device", options.device, "--steps", str(options.steps)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(5.0, end_s + 15.0 - time.time()))
    except subprocess.TimeoutExpired:
        return {"failed": "no time left"}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            return json.loads(line)
    if done.returncode == -9:
        return {"failed": "killed: no host memory"}
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    is_full = any("out of memory" in line.lower() or "MemoryError" in line for line in lines)
    return {"failed": "out of memory" if is_full else (lines or ["no reason given"])[-1][:90]}


def search(mode: str, load: Load, options: argparse.Namespace, end_s: float) -> list[tuple[Case, dict[str, Any]]]:
    """Rows of the largest model: from the formula's guess up or down, by steps that halve."""
    on_host = host_bytes() if mode == "optimizer" else 0.0
    case = largest_case(mode, load, torch.cuda.mem_get_info()[1] if options.device == "cuda" else 2e9)
    step, rows = max(1, (case.num_layers or 1) // 8), []
    lowest, highest = 0, 10**6
    while step >= 1 and time.time() + SECONDS_TO_START < end_s:
        result = spawn(case, load, options, end_s)
        rows.append((case, result))
        show(case, result, ratio_of(case, result, {}))
        fits, layers = "failed" not in result, case.num_layers or 1
        if result.get("failed") == "no time left":
            break
        lowest, highest = (max(lowest, layers), highest) if fits else (lowest, min(highest, layers))
        step = step if len(rows) == 1 or fits == ("failed" not in rows[-2][1]) else step // 2
        following = layers + step if fits else layers - step
        if not lowest < following < highest:
            break
        case = with_layers(case, following, load, on_host)
    return rows


def show(case: Case, result: dict[str, Any], ratio: str | None) -> None:
    """One row of the table."""
    name = case.model + (f" x{case.num_layers}" if case.num_layers else "")
    mode = case.mode + (f" ({case.optimizer_on_device:.0%} dev)" if case.optimizer_on_device else "")
    if "failed" in result:
        print(f"{name:<16}{mode:<22}{result['failed']}", flush=True)
        return

    def number(key: str, form: str) -> str:
        value = result.get(key)
        return "-" if value is None else format(value, form)

    print(
        f"{name:<16}{mode:<22}{result['parameters'] / 1e9:>8.2f}{result['step_s']:>8.2f}{result['tokens_per_s']:>9.0f}"
        f"{result['flops_per_s'] / 1e12:>8.0f}{ratio or '-':>10}{number('busy', '.0%'):>7}"
        f"{number('device_gib', '.1f'):>8}{number('host_gib', '.1f'):>8}"
        f"{number('to_device_gb_s', '.1f'):>8}{number('to_host_gb_s', '.1f'):>8}",
        flush=True,
    )


def ratio_of(case: Case, result: dict[str, Any], plain: dict[str, dict[str, Any]]) -> str | None:
    """Tokens/s beside those without offload, or beside a GPU that is always busy."""
    base = plain.get(case.model, {})
    if case.mode != "plain" and "tokens_per_s" in base and "tokens_per_s" in result:
        return f"{result['tokens_per_s'] / base['tokens_per_s']:.2f}"
    return f"~{result['busy']:.2f}" if "busy" in result and case.mode != "plain" else None


def main() -> None:
    """Run the rows one after another, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=CASES, help="model:mode, comma-separated; model may be `largest`")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--load", default="4096:1:4", help="seq_len:micro_size:accumulation")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        spec = json.loads(options.run)
        case, load = Case(**spec["case"]), Load(**spec["load"])
        print(json.dumps(run_case(case, load, options.device, options.steps, spec["end_s"])), flush=True)
        os._exit(0)  # whole parameters, which closing gives back, may be more than the device holds
    end_s = time.time() + 60.0 * options.minutes
    load = Load(*map(int, options.load.split(":")))
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{load.accumulation} x {load.micro_size} x {load.seq_len} tokens, bf16, {name}, torch {torch.__version__}")
    print(
        f"{'model':<16}{'offloaded':<22}{'1e9 par':>8}{'s/step':>8}{'tokens/s':>9}{'TFLOP/s':>8}{'of plain':>10}",
        end="",
    )
    print(f"{'busy':>7}{'dev GiB':>8}{'host':>8}{'H2D GB/s':>9}{'D2H':>7}")
    plain: dict[str, dict[str, Any]] = {}
    rows: list[tuple[Case, dict[str, Any]]] = []
    for text in options.cases.split(","):
        model, mode = text.split(":")
        if model == "largest":
            rows += search(mode, load, options, time.time() + SEARCH_SHARE * (end_s - time.time()))
            continue
        case = Case(model, mode)
        has_time = time.time() + SECONDS_TO_START < end_s or options.device == "cpu"
        result = spawn(case, load, options, end_s) if has_time else {"failed": "no time left"}
        if mode == "plain":
            plain[model] = result
        show(case, result, ratio_of(case, result, plain))
        rows.append((case, result))
    if options.json:
        kept = [{**asdict(case), **result} for case, result in rows]
        options.json.write_text(json.dumps({"device": name, "load": asdict(load), "rows": kept}, indent=2))


if __name__ == "__main__":
    main()
