"""What 15 minutes of one GPU are spent on, in two calls: `correctness` within 300 s, `figures` within 560 s.

Each part is a process with its own limit, writes NAME.json and NAME.txt into the folder, and stops no other part; the
most wanted answer comes first. plan.json says how each ended, and a table at the end what was found.
`benchmarks/gpu.sh` prepares the machine and calls this. With --tiny it rehearses on torch's CPU build: every program of
the plan runs, with tiny sizes, on the virtual device of tests/device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CALL_LIMITS_S: Mapping[str, float] = {"correctness": 300.0, "figures": 560.0}
TINY_FACTOR = 4.0  # a rehearsal computes on the CPU, beside other work
TINY_ATTENTION = "--lengths 256 --head-dims 32 --heads 1 --directions causal"


@dataclass(frozen=True)
class Part:
    """A program and its arguments, in full and in a rehearsal; `{out}` is the folder of the results."""

    name: str
    call: str
    limit_s: float
    command: str
    tiny: str
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a part ended: `ok`, `failed` with its exit code, or `out of time`."""

    name: str
    how: str
    took_s: float
    limit_s: float


SMOKE, TESTS = "benchmarks/gpu_smoke.py", "-m pytest -n0 -p no:cacheprovider --timeout 60 --maxfail 12 -rs"
PARTS = (
    Part("nccl", "correctness", 30, f"{SMOKE} nccl waits", f"{SMOKE} nccl waits --quick"),
    Part(
        "sanitizer",
        "correctness",
        75,
        f"{SMOKE} orders",
        f"{SMOKE} orders --quick",
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part("saves", "correctness", 45, f"{SMOKE} saves", f"{SMOKE} saves --quick"),
    Part(
        "tests",
        "correctness",
        130,
        f"{TESTS} --junit-xml {{out}}/tests.xml tests/gpu/test_cuda.py tests/gpu/test_encoded_cuda.py "
        "tests/gpu/test_activation_store_cuda.py tests/gpu/test_checkpoints_cuda.py tests/gpu/test_tiers_cuda.py "
        "tests/gpu/test_tensor_cuda.py tests/gpu/test_context_cuda.py tests/gpu/test_attention_cuda.py "
        "tests/gpu/test_doctor_cuda.py",
        f"{TESTS} --junit-xml {{out}}/tests.xml -p device.plugin tests/gpu/test_encoded_cuda.py",
    ),
    Part(
        "step-350m",
        "figures",
        130,
        "benchmarks/gpu_step.py --models 350m:2048:8 --systems plain,fsdp2,shardwise-3,shardwise-0,ddp,shardwise-2 "
        "--rounds 2 --steps 8 --json {out}/step-350m.json",
        "benchmarks/gpu_step.py --models tiny:16:1 --systems plain,fsdp2,shardwise-3,shardwise-0,ddp,shardwise-2 "
        "--rounds 1 --steps 1 --warmup 1 --json {out}/step-350m.json",
    ),
    Part(
        "step-1b",
        "figures",
        110,
        "benchmarks/gpu_step.py --models 1b:2048:4 --systems plain,fsdp2,shardwise-3,shardwise-0 --rounds 1 --steps 8 "
        "--json {out}/step-1b.json",
        "benchmarks/gpu_step.py --models tiny:16:1 --systems plain,fsdp2,shardwise-3,shardwise-0 --rounds 1 --steps 1 "
        "--warmup 1 --json {out}/step-1b.json",
    ),
    Part(
        "offload",
        "figures",
        120,
        "benchmarks/gpu_offload.py --cases 1b:plain,1b:optimizer,1b:all+act --steps 2 --minutes 1.9 "
        "--json {out}/offload.json",
        "benchmarks/gpu_offload.py --cases tiny:plain,tiny:optimizer,tiny:all+act --load 16:1:1 --steps 1 --minutes 4 "
        "--json {out}/offload.json",
    ),
    Part(
        "attention",
        "figures",
        105,
        "benchmarks/gpu_attention.py --lengths 16384,32768 --head-dims 128 --directions causal --densities 0.1,0.25 "
        "--blocks 128 --rounds 3 --minutes 1.6 --json {out}/attention.json",
        f"benchmarks/gpu_attention.py {TINY_ATTENTION} --densities 0.5 --blocks 64 --rounds 1 --runs 1 "
        "--json {out}/attention.json",
    ),
    Part(
        "int8-states",
        "figures",
        50,
        "benchmarks/gpu_optimizer.py --json {out}/int8-states.json",
        "benchmarks/gpu_optimizer.py --numel 20000 --pieces 1,2 --runs 1 --json {out}/int8-states.json",
    ),
    Part(
        "passes",
        "figures",
        30,
        "benchmarks/gpu_passes.py --json {out}/passes.json",
        "benchmarks/gpu_passes.py --numel 4096 --runs 1 --json {out}/passes.json",
    ),
)


def run_part(part: Part, out: Path, *, is_tiny: bool) -> Ended:
    """Run a part until it ends or its time does; what it started ends with it."""
    words = (part.tiny if is_tiny else part.command).format(out=out).split()
    if words[0] == SMOKE:
        words += ["--json", str(out / f"{part.name}.json")]
    environ = {**os.environ, **part.environ, "PYTHONUNBUFFERED": "1"}
    folders = [str(ROOT / "src"), str(ROOT / "tests")]
    if is_tiny:
        folders.insert(0, str(ROOT / "tests" / "device" / "site"))
    environ["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [environ.get("PYTHONPATH")])])
    limit_s = part.limit_s * (TINY_FACTOR if is_tiny else 1.0)
    start_s = time.monotonic()
    with (out / f"{part.name}.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    how = "ok" if code == 0 else "out of time" if code is None else f"failed ({code})"
    return Ended(part.name, how, round(time.monotonic() - start_s, 1), limit_s)


def keep_json(part: Part, ended: Ended, out: Path) -> None:
    """Leave a JSON of each part, also of one that was stopped before it wrote one."""
    path = out / f"{part.name}.json"
    if not path.exists():
        text = (out / f"{part.name}.txt").read_text(errors="replace")
        path.write_text(json.dumps({"ended": asdict(ended), "last_lines": text.splitlines()[-40:]}, indent=2))


def findings(name: str, found: Mapping[str, Any], log: Sequence[str]) -> Iterator[str]:
    """What a part's results say, a line each."""
    for part, values in found.items():
        if isinstance(values, dict) and "failed" in values and "took_s" in values:
            yield f"{part}: {len(values['failed'])} failed {'; '.join(values['failed'])[:160]}".rstrip()
        if isinstance(values, dict) and values.get("waits"):
            yield f"waits a step: { {layout: sum(lines.values()) for layout, lines in values['waits'].items()} }"
    for result in found.get("results", ()):
        times: dict[str, list[float]] = {}
        for timing in result["timings"]:
            times.setdefault(timing["system"], []).append(timing["step_s"])
        best = {system: min(seconds) for system, seconds in times.items()}
        base = "fsdp2" if "fsdp2" in best else "plain"
        for system, seconds in best.items():
            ratio = f", {seconds / best[base]:.3f} of {base}" if base in best else ""
            yield f"{system}: {seconds * 1e3:.1f} ms a step{ratio}"
        yield from (f"{system} failed: {why[:120]}" for system, why in result["failed"].items())
    for case in found.get("cases", ()):
        yield from (f"{note['system']} failed: {note['failed'][:120]}" for note in case["notes"] if "failed" in note)
    if "decision" in found:
        yield f"sparse kernels: {found['decision']['verdict']} ({found['decision']['num_masks']} masks)"
    for row in found.get("rows", ()):
        if "ms" in row:
            yield f"{row['system']}, {row['num_pieces']} pieces: {row['ms']:.2f} ms, host {row['host_ms']:.2f} ms"
        elif "mode" in row:
            rate = f"{row['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in row else str(row.get("failed"))
            yield f"{row['model']} {row['mode']}: {rate}"
    if name == "tests" and log:
        yield log[-1].strip("= ")


def table(ended: Sequence[Ended], out: Path) -> list[str]:
    """A line a part, and what it found."""
    lines = [f"{'part':<14}{'ended':<16}{'seconds':>8}{'limit':>7}"]
    for each in ended:
        lines.append(f"{each.name:<14}{each.how:<16}{each.took_s:>8.1f}{each.limit_s:>7.0f}")
        found = json.loads((out / f"{each.name}.json").read_text())
        log = [line for line in (out / f"{each.name}.txt").read_text(errors="replace").splitlines() if line.strip()]
        lines += [f"    {line}" for line in findings(each.name, found, log)]
    return lines


def main() -> int:
    """Run the parts of a call one after another; 1 where one did not end well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=[*CALL_LIMITS_S, "all"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", help="parts, comma-separated")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in PARTS if options.call in ("all", part.call)]
    if options.only:
        wanted = options.only.split(",")
        if unknown := {*wanted} - {part.name for part in chosen}:
            parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(part.name for part in chosen)}")
        chosen = [part for part in chosen if part.name in wanted]
    ended: list[Ended] = []
    for part in chosen:
        ended.append(run_part(part, out, is_tiny=options.tiny))
        keep_json(part, ended[-1], out)
        print(f"{part.name}: {ended[-1].how}, {ended[-1].took_s:.0f} s of {ended[-1].limit_s:.0f}", flush=True)
        (out / "plan.json").write_text(json.dumps([asdict(each) for each in ended], indent=2))
    lines = table(ended, out)
    (out / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(any(each.how != "ok" for each in ended))


if __name__ == "__main__":
    sys.exit(main())
