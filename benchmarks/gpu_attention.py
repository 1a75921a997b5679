"""Block-sparse attention on one GPU: our kernels and FlexAttention on the same mask, beside dense SDPA.

All systems of a case run alternately. Forward and backward lie between events after a kernel that keeps the GPU busy
until the host has enqueued them, so that the GPU's time alone is measured. A mask is a window of blocks with as many
global ones as asked for, of the density nearest to the one asked for: the share of the scores that dense attention
computes, those of the lower triangle where it is causal. Efficiency (`eff`) is density x speed-up over SDPA by flash: 1
where a score costs what it costs there. `flex` is our time / FlexAttention's, `diff` how far their outputs differ.

`--longest` finds the longest sequence that a 1B decoder trains on this GPU, dense and sparse, with full recomputation,
by doubling and halving. `--tune` times our kernels with other tiles: of each (head size, block) the fastest are shown,
for queries (forward, and the backward as a whole) and for keys. What the time left does not allow is skipped.

    python benchmarks/gpu_attention.py --minutes 9 --json gpu_attention.json
    python benchmarks/gpu_attention.py --quick
    python benchmarks/gpu_attention.py --lengths '' --longest --minutes 9
    python benchmarks/gpu_attention.py --lengths 16384 --tune --directions causal --densities 0.1
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.attention.block_layout import BlockLayout

DEVICE = torch.device("cuda", 0)
DENSE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SPARSE = ("triton", "flex")
WITHIN = 1.1  # FlexAttention's time over that of our kernels, up to which they bring nothing
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """The tensors, bf16, of one sample; and whether attention is causal."""

    num_tokens: int
    head_dim: int
    num_heads: int
    causal: bool


@dataclass(frozen=True)
class Mask:
    """A layout asked for, and the density that it has."""

    block: int
    wanted: float
    density: float


@dataclass(frozen=True)
class Row:
    """One system's medians; `mask` is None for dense attention."""

    system: str
    mask: Mask | None
    forward_s: float
    backward_s: float
    peak_gib: float


def window_layout(num_tokens: int, block: int, window: int, num_global: int, *, causal: bool) -> BlockLayout:
    """Blocks at most `window` from the diagonal, and the first rows and columns."""
    index = torch.arange(-(-num_tokens // block))
    blocks = (index[:, None] - index).abs() <= window  # [blocks, blocks]
    blocks[:num_global] = blocks[:, :num_global] = True
    return BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens)


def density_of(layout: BlockLayout) -> float:
    """Scores that one pattern's blocks have, over those of dense attention, of the lower triangle if it is causal."""
    (pattern,) = layout.patterns
    num_blocks = pattern.blocks.shape[-1]
    sizes = torch.full((num_blocks,), pattern.block, dtype=torch.float64)
    sizes[-1] = pattern.num_tokens - (num_blocks - 1) * pattern.block
    scores = sizes[:, None] * sizes  # [blocks, blocks]
    if pattern.causal:
        scores = scores.tril(-1) + torch.diag(sizes * (sizes + 1) / 2)
    return float((pattern.blocks * scores).sum() / (pattern.blocks.shape[0] * scores.sum()))


def layout_of_density(case: Case, block: int, density: float, num_global: int) -> BlockLayout:
    """The layout of a window whose density is nearest to the one asked for, found by halving."""

    def of(window: int) -> BlockLayout:
        return window_layout(case.num_tokens, block, window, num_global, causal=case.causal)

    low, high = 0, -(-case.num_tokens // block) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if density_of(of(middle)) <= density else (low, middle)
    return min((of(low), of(high)), key=lambda layout: abs(density_of(layout) - density))


def dense_attend(backend: str, causal: bool) -> Attend:
    """SDPA by one of torch's back ends."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(DENSE[backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def sparse_attend(backend: str, layout: BlockLayout) -> Attend:
    """Our entry, by one of its back ends."""
    from shardwise.attention.api import attention_backend, block_sparse_attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attention_backend(backend):
            return block_sparse_attention(q, k, v, layout)

    return attend


def tensors(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output, each [1, heads, tokens, head size]."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (1, case.num_heads, case.num_tokens, case.head_dim)
    made = [torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    return [each.requires_grad_() for each in made[:3]] + made[3:]


def occupy() -> None:
    """Keep a real GPU busy for longer than the host takes to enqueue a forward and a backward."""
    if not (torch.version.cuda or torch.version.hip):
        return
    x = torch.ones(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(4):
        x @ x


def timed(attend: Attend, given: Sequence[Tensor], num_runs: int) -> tuple[list[float], list[float]]:
    """Seconds of forward and of backward of each run."""
    q, k, v, grad = given
    forwards, backwards = [], []
    for _ in range(num_runs):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        occupy()
        marks[0].record()
        out = attend(q, k, v)
        marks[1].record()
        torch.autograd.grad(out, (q, k, v), grad)
        marks[2].record()
        torch.cuda.synchronize()
        forwards.append(marks[0].elapsed_time(marks[1]) / 1e3)
        backwards.append(marks[1].elapsed_time(marks[2]) / 1e3)
    return forwards, backwards


def peak_gib(attend: Attend, given: Sequence[Tensor]) -> float:
    """Peak memory of a forward and backward beyond its tensors; what is compiled or planned once is made before."""
    q, k, v, grad = given
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def systems_of(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, Mask | None, Attend]]:
    """Each system's name, mask and function: first dense ones."""
    for backend in DENSE:
        if backend in options.systems:
            yield backend, None, dense_attend(backend, case.causal)
    for block, density in itertools.product(options.blocks, options.densities):
        layout = layout_of_density(case, block, density, options.num_global)
        for backend in SPARSE:
            if backend in options.systems:
                yield backend, Mask(block, density, density_of(layout)), sparse_attend(backend, layout)


def measure(case: Case, options: argparse.Namespace) -> tuple[list[Row], list[dict[str, Any]]]:
    """All systems of a case by turns; and what failed, and how the outputs of one mask differ."""
    torch.compiler.reset()  # or FlexAttention's kernels would be made for any length
    given = tensors(case)
    runnable, notes, outs = [], [], {}
    for name, mask, attend in systems_of(case, options):
        try:
            peak = peak_gib(attend, given)
            with torch.no_grad():
                out = attend(*given[:3])
        except Exception as error:  # what a system cannot do is a result
            notes.append({"system": name, "mask": mask and asdict(mask), "failed": f"{type(error).__name__}: {error}"})
            continue
        if mask is not None and mask in outs:
            notes.append({"mask": asdict(mask), "diff": (outs.pop(mask) - out).abs().max().item()})
        elif mask is not None:
            outs[mask] = out
        runnable.append((name, mask, attend, peak))
        del out
    outs.clear()
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in runnable]
    for turn in range(options.rounds):
        for step in range(len(runnable)):
            index = (step + turn) % len(runnable)
            forwards, backwards = timed(runnable[index][2], given, options.runs)
            times[index][0].extend(forwards)
            times[index][1].extend(backwards)
    medians = [[statistics.median(each) for each in pair] for pair in times]
    rows = [Row(name, mask, *pair, peak) for (name, mask, _, peak), pair in zip(runnable, medians, strict=True)]
    return rows, notes


def table(case: Case, rows: Sequence[Row], notes: Sequence[dict[str, Any]]) -> list[str]:
    """A line a system: milliseconds, speed-ups over both dense ones, efficiency over flash, and our time / flex's."""
    dense = {row.system: row for row in rows if row.mask is None}
    flex = {row.mask: row for row in rows if row.system == "flex"}
    diffs = {json.dumps(note["mask"]): note["diff"] for note in notes if "diff" in note}
    kind = "causal" if case.causal else "bidirectional"
    lines = [f"\nN {case.num_tokens}, {case.num_heads} heads of {case.head_dim}, {kind}, bf16"]
    columns = ("fwd ms", "bwd ms", "fwd/flash", "bwd/flash", "fwd/cudnn", "bwd/cudnn", "fwd eff", "bwd eff")
    head = "".join(f"{name:>11}" for name in (*columns, "fwd flex", "bwd flex", "peak GiB", "diff"))
    lines.append(f"{'system':<10}{'block':>6}{'density':>9}{head}")
    for row in rows:
        cells = [f"{row.forward_s * 1e3:.3f}", f"{row.backward_s * 1e3:.3f}"]
        for name in DENSE:
            base = dense.get(name) if row.mask else None
            cells += _pair(base, row, 1.0, "x")
        cells += _pair(dense.get("flash") if row.mask else None, row, row.mask.density if row.mask else 0.0)
        peer = flex.get(row.mask) if row.system == "triton" else None
        cells += ["", ""] if peer is None else [f"{1 / float(each):.3f}" for each in _ratios(peer, row)]
        diff = diffs.get(json.dumps(asdict(row.mask))) if row.mask else None
        cells += [f"{row.peak_gib:.2f}", "" if diff is None else f"{diff:.4f}"]
        block, density = (str(row.mask.block), f"{row.mask.density:.1%}") if row.mask else ("", "")
        lines.append(f"{row.system:<10}{block:>6}{density:>9}" + "".join(f"{cell:>11}" for cell in cells))
    lines += [f"{note['system']} failed: {note['failed'][:200]}" for note in notes if "failed" in note]
    return lines


def _ratios(base: Row, row: Row) -> tuple[float, float]:
    return base.forward_s / row.forward_s, base.backward_s / row.backward_s


def _pair(base: Row | None, row: Row, factor: float, unit: str = "") -> list[str]:
    return ["", ""] if base is None else [f"{factor * each:.2f}{unit}" for each in _ratios(base, row)]


def decide(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Apply the rule that docs/attention.md wrote down before anything was measured.

    Our kernels go where FlexAttention takes at most `WITHIN` of their time on every mask, forward and backward.

    >>> mask = {"block": 128, "wanted": 0.1, "density": 0.1}
    >>> rows = [{"system": "triton", "mask": mask, "forward_s": 1.0, "backward_s": 2.0}]
    >>> decide([{"rows": [*rows, {"system": "flex", "mask": mask, "forward_s": 1.05, "backward_s": 2.2}]}])["verdict"]
    'ours go'
    >>> decide([{"rows": [*rows, {"system": "flex", "mask": mask, "forward_s": 1.05, "backward_s": 2.3}]}])["verdict"]
    'ours stay'
    >>> decide([{"rows": rows}])["verdict"]
    'not decided: no mask was measured with both'
    """
    pairs = []
    for case in cases:
        flex = [row for row in case["rows"] if row["system"] == "flex"]
        for ours in (row for row in case["rows"] if row["system"] == "triton"):
            for theirs in (row for row in flex if row["mask"] == ours["mask"]):
                ratios = [theirs[key] / ours[key] for key in ("forward_s", "backward_s")]
                pairs.append(
                    {"case": case.get("case"), "mask": ours["mask"], "forward": ratios[0], "backward": ratios[1]}
                )
    slower = [pair for pair in pairs if max(pair["forward"], pair["backward"]) > WITHIN + 1e-9]
    verdict = "ours stay" if slower else "ours go" if pairs else "not decided: no mask was measured with both"
    return {"verdict": verdict, "num_masks": len(pairs), "num_slower": len(slower), "flex_over_ours": pairs}


def trains(model: str, num_tokens: int, attention: dict[str, Any]) -> tuple[float, float] | None:
    """Seconds and peak GiB of the second step with full recomputation; None if memory does not suffice."""
    from shardwise import initialize
    from shardwise.config.resolve import AttentionConfig
    from shardwise.models.decoder import Decoder, lm_loss
    from shardwise.models.presets import preset

    config = replace(preset(model), max_seq_len=num_tokens, attention=AttentionConfig(**attention))
    sections = {
        "precision": {"param": "bf16"},
        "recompute": {"mode": "full"},
        "optimizer": {"clip_norm": None},
        "scheduler": {"name": "constant"},
        "run": {"device": "cuda"},
    }
    engine = None
    try:
        with DEVICE:
            built = Decoder(config)
        engine = initialize(built, sections, loss_fn=lambda output, batch: lm_loss(output, batch[1]))
        del built
        tokens = torch.randint(config.vocab_size, (1, num_tokens + 1), device=DEVICE)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start_s = time.perf_counter()
            engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
            torch.cuda.synchronize()
        return time.perf_counter() - start_s, torch.cuda.max_memory_allocated() / 2**30
    except torch.OutOfMemoryError:
        return None
    finally:
        if engine is not None:
            engine.close()


def longest(attempt: Callable[[int], object | None], first: int, step: int, has_time: Callable[[], bool]) -> int:
    """The most tokens, a multiple of `step` from `first` on, of which an attempt succeeds; 0 if none did."""
    low, high = 0, None
    while has_time() and (high is None or high - low > step):
        middle = (first if not low else 2 * low) if high is None else (low + high) // 2 // step * step
        if middle == 0 or attempt(middle) is None:
            high = middle
        else:
            low = middle
    return low


def longest_rows(options: argparse.Namespace, ends_s: float) -> list[dict[str, Any]]:
    """The longest sequence of the model, dense and with a window, and what its step takes."""
    rows = []
    window = {"kind": "sliding-window", "block": 128, "num_sliding_window_blocks": 2 * (options.window // 128) + 1}
    kinds = {"dense flash": ({}, sdpa_kernel(SDPBackend.FLASH_ATTENTION)), "sparse": (window, nullcontext())}
    for turn, (name, (attention, context)) in enumerate(kinds.items()):
        found: dict[int, tuple[float, float]] = {}

        def attempt(num_tokens: int, attention: dict[str, Any] = attention, found: dict = found) -> object | None:
            result = trains(options.model, num_tokens, attention)
            gc.collect()  # by now nothing of the attempt is on the stack
            torch.cuda.empty_cache()
            if result is not None:
                found[num_tokens] = result
            return result

        deadline_s = time.monotonic() + (ends_s - time.monotonic()) / (len(kinds) - turn)
        with context:
            most = longest(attempt, 16_384, 4096, lambda limit_s=deadline_s: time.monotonic() < limit_s)
        step_s, peak = found.get(most, (float("nan"), float("nan")))
        print(f"{options.model}, {name:<12} longest {most:>8} tokens, {step_s:.2f} s a step, peak {peak:.1f} GiB")
        rows.append({"attention": name, "num_tokens": most, "tried": found})
    return rows


@dataclass(frozen=True)
class Tiling:
    """What a kernel is launched with: the widest tile, tokens of an entry, warps, and entries in flight."""

    tile: int
    entry: int
    num_warps: int
    num_stages: int


def tilings() -> list[Tiling]:
    """Those worth a try; of wide entries and tiles, what does not fit fails and is left out."""
    widths = ((128, 128), (128, 64), (128, 32), (64, 128), (64, 64), (64, 32), (32, 64))
    return [Tiling(*width, warps, stages) for width in widths for warps in (4, 8) for stages in (2, 3)]


@contextmanager
def tiled(tiling: Tiling, of_queries: bool) -> Iterator[None]:
    """Launch the kernels of one side so; plans are the layout's, so that a tiling needs a layout of its own."""
    from shardwise.attention.triton import launch as launches
    from shardwise.attention.triton import plan as plans

    widest, others = plans.widest, launches.warps_and_stages

    def width(head_dim: int, dtype: torch.dtype, asked: bool) -> tuple[int, int]:
        return (tiling.entry, tiling.tile) if asked == of_queries else widest(head_dim, dtype, asked)

    def warps(tile: int, head_dim: int, dtype: torch.dtype, of_keys: bool = False) -> tuple[int, int]:
        is_other = of_keys == of_queries
        return others(tile, head_dim, dtype, of_keys) if is_other else (tiling.num_warps, tiling.num_stages)

    with mock.patch.object(plans, "widest", width), mock.patch.object(launches, "warps_and_stages", warps):
        yield


def tune(case: Case, options: argparse.Namespace, ends_s: float) -> list[dict[str, Any]]:
    """Seconds of forward and backward with each tiling of each side, the fastest of each printed."""
    given, found = tensors(case), []
    for block, density, of_queries in itertools.product(options.blocks, options.densities, (True, False)):
        rows = []
        for tiling in tilings():
            if time.monotonic() > ends_s:
                break
            attend = sparse_attend("triton", layout_of_density(case, block, density, options.num_global))
            try:
                with tiled(tiling, of_queries):
                    peak_gib(attend, given)  # compiles and plans
                    forward_s, backward_s = (statistics.median(each) for each in timed(attend, given, 5))
            except Exception as error:  # shared memory that does not suffice
                print(f"{tiling} failed: {type(error).__name__}")
                continue
            side = "queries" if of_queries else "keys"
            sizes = {"head_dim": case.head_dim, "block": block, "density": density, "side": side}
            rows.append(sizes | asdict(tiling) | {"forward_s": forward_s, "backward_s": backward_s})
        for key in ("forward_s", "backward_s") if of_queries else ("backward_s",):
            print(f"head size {case.head_dim}, block {block}, {'queries' if of_queries else 'keys'}, by {key}:")
            for row in sorted(rows, key=lambda row: row[key])[:3]:
                shown = {name: row[name] for name in ("tile", "entry", "num_warps", "num_stages")}
                print(f"  {row[key] * 1e3:.3f} ms {shown}", flush=True)
        found += rows
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with lists split."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="16384,32768,65536,131072")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--directions", default="causal,bidirectional")
    parser.add_argument("--blocks", default="128,64")
    parser.add_argument("--densities", default="0.05,0.1,0.25")
    parser.add_argument("--global", type=int, default=1, dest="num_global", help="global blocks")
    parser.add_argument("--systems", default=",".join([*DENSE, *SPARSE]))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="in a turn")
    parser.add_argument("--longest", action="store_true", help="search the longest sequence of --model")
    parser.add_argument("--tune", action="store_true", help="time our kernels' tiles, and nothing else")
    parser.add_argument("--model", default="1b")
    parser.add_argument("--window", type=int, default=4096, help="tokens before it that a query sees, with --longest")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no case after so long")
    parser.add_argument("--quick", action="store_true", help="16k tokens, block 128, 10 %%, two rounds: does it run?")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.lengths, options.blocks, options.densities, options.rounds = "16384", "128", "0.1", 2
    for name, kind in (("lengths", int), ("head_dims", int), ("blocks", int), ("densities", float)):
        setattr(options, name, [kind(each) for each in getattr(options, name).split(",") if each])
    options.directions, options.systems = options.directions.split(","), options.systems.split(",")
    if unknown := {*options.systems} - {*DENSE, *SPARSE} | {*options.directions} - {"causal", "bidirectional"}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join([*DENSE, *SPARSE])}; causal, bidirectional")
    return options


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Cases in the order in which they run: short ones first."""
    return [
        Case(num_tokens, head_dim, options.heads, direction == "causal")
        for num_tokens, head_dim, direction in itertools.product(options.lengths, options.head_dims, options.directions)
    ]


def main() -> None:
    """Measure case by case until the time is up; what was measured is on the disk after each."""
    options = parsed()
    ends_s = time.monotonic() + options.minutes * 60
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "host": platform.machine()}
    print(f"{machine['gpu']}, torch {machine['torch']}")
    results: dict[str, Any] = {"machine": machine, "cases": [], "longest": [], "tilings": []}

    def keep() -> None:
        results["decision"] = decide(results["cases"])
        if options.json:
            options.json.write_text(json.dumps(results, indent=2))

    for case in cases_of(options):
        if time.monotonic() > ends_s:
            print(f"no time left for {case}")
            continue
        if options.tune:
            results["tilings"] += tune(case, options, ends_s)
            keep()
            continue
        rows, notes = measure(case, options)
        print("\n".join(table(case, rows, notes)), flush=True)
        results["cases"].append({"case": asdict(case), "rows": [asdict(row) for row in rows], "notes": notes})
        torch.cuda.empty_cache()
        keep()
    if options.longest:
        results["longest"] = longest_rows(options, ends_s)
        keep()
    if results["cases"]:
        print(f"\nthe rule of docs/attention.md: {results['decision']['verdict']}")


if __name__ == "__main__":
    main()
