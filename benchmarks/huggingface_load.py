"""Memory and seconds of loading a Hugging Face folder straight into the shards of two ranks.

Writes a Llama of random weights (bf16, never whole in memory), starts two ranks under ZeRO-3, and asks the kernel for
the peak of the anonymous memory of each. `train` keeps fp32 masters and Adam states, which one tiny step allocates
before the import; gradients accumulate in bf16, so that 1.1 B parameters fit into 24 GB. `evaluate` is bf16 alone, all
frozen. In both `initialize` takes the folder and draws nothing (`--draw` shows what that saves); the import after it
comes into an engine that has all its states.

    python benchmarks/huggingface_load.py --params-like 150m
    python benchmarks/huggingface_load.py --folder /mnt/big/tiny-llama        # 1.1 B; the folder is kept for next time

The bound is the sum over the ranks of: what the interpreter held after its imports, the Layout's bytes at rest, the
largest group whole in the parameters' dtype, and one read buffer. It is for loading: a step and an evaluation need
activations and gradients of blocks too, and are shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from step_time import machine

NUM_RANKS = 2
BUFFER_BYTES = 4 * 2**20
CHUNK_NUMEL = 2**20
# Layers, hidden size, query heads, KV heads, FFN; 32,000 words.
SHAPES = {"150m": (16, 768, 12, 4, 2048), "1.1b": (22, 2048, 32, 4, 5632)}
MODES = ("train", "evaluate")
LOADING = ("build", "initialize", "import")


def config_of(shape: str) -> dict[str, Any]:
    """The config.json of the model."""
    num_layers, hidden_size, num_heads, num_kv_heads, ffn_size = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make_model(folder: Path) -> Any:
    """The model of transformers, its parameters on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import shardwise

    with shardwise.init(seed=0):
        return LlamaForCausalLM(LlamaConfig(**json.loads((folder / "config.json").read_text())))


def write_folder(folder: Path, shape: str) -> None:
    """Random weights of the shape, the same each time, a few MiB at a time."""
    import torch

    import shardwise
    from shardwise.checkpoint.hf import exporter as hf
    from shardwise.checkpoint.hf.families import decoder_config_of, decoder_names
    from shardwise.layout.slicing import Rect, flat_range_to_rects
    from shardwise.models import Decoder
    from shardwise.runtime.state_shards import StateShard, TensorFlatState

    generator = torch.Generator().manual_seed(0)
    config = config_of(shape)
    with shardwise.init(seed=0):
        model = Decoder(decoder_config_of(config))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

    def parts() -> Iterator[StateShard]:
        for name, shape in shapes.items():
            rect = Rect.whole(shape)
            for start in range(0, rect.numel, CHUNK_NUMEL):
                pieces = flat_range_to_rects(rect, start, min(start + CHUNK_NUMEL, rect.numel))
                values = torch.randn(pieces[-1].local_stop, generator=generator).mul_(0.02)
                yield StateShard(name, (), "param", shape, TensorFlatState(values), pieces, pieces)

    plan = hf.plan_export([hf.ExportTensor(name, (), shape, "BF16") for name, shape in shapes.items()], decoder_names())
    hf.begin_export(plan, folder, {"config.json": json.dumps(config).encode()})
    hf.write_export(plan, folder, hf.stored_blocks(plan, parts()))
    hf.finish_export(folder)


class Phases:
    """Seconds and peak anonymous bytes of each phase of this process, by the kernel's own high-water mark."""

    def __init__(self) -> None:
        self._name, self._start_s, self._file_bytes = "", 0.0, 0
        self.found: dict[str, dict[str, float]] = {}

    def begin(self, name: str) -> None:
        """End the phase before, and start one."""
        status = {key: int(value) * 1024 for key, value in _STATUS.findall(Path("/proc/self/status").read_text())}
        # Pages of files only grow in number, so that the peak is this or less.
        peak_bytes, taken_s = status["VmHWM"] - self._file_bytes, time.perf_counter() - self._start_s
        if self._name:
            self.found[self._name] = {"peak_bytes": peak_bytes, "taken_s": taken_s}
        else:
            self.found["imports"] = {"peak_bytes": status["RssAnon"], "taken_s": time.process_time()}
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
        self._name, self._start_s, self._file_bytes = name, time.perf_counter(), status["RssFile"]


_STATUS = re.compile(r"(VmHWM|RssAnon|RssFile):\s+(\d+)")


def run_rank(folder: Path, mode: str, is_drawn: bool) -> None:
    """What each rank does; a line of JSON at the end."""
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401

    import shardwise
    from shardwise.checkpoint.reader import ChunkReader  # noqa: F401
    from shardwise.runtime.memory_tracker import trim_host_memory

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).step()  # imports what it needs
    trim_host_memory()
    phases = Phases()
    phases.begin("build")
    model = make_model(folder)
    is_training = mode == "train"
    model.requires_grad_(is_training)
    config = {
        "zero": {"stage": 3},
        "precision": {"param": "bf16", "accumulate": "param"},
        "run": {"device": "cpu", "timeout_s": 600.0},
    }
    phases.begin("initialize")
    engine = shardwise.initialize(model, config, weights=None if is_drawn else folder)
    tokens = torch.arange(8).view(1, 8)  # [B, S]
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if is_training:
        phases.begin("step")
        engine.train_step([batch])
        trim_host_memory()  # what the step has freed and the C library keeps
    phases.begin("import")
    report = engine.import_weights(folder)
    phases.begin("evaluate")
    engine.eval_step([batch])
    phases.begin("")
    layout = engine.layout
    facts = {
        "phases": phases.found,
        "at_rest_bytes": sum(layout.bytes_at_rest(engine.comm.rank).values()),
        "group_bytes": max(group.padded_numel for group in layout.groups) * 2,
        "num_read_bytes": report.num_read_bytes,
        "num_params": sum(place.numel for group in layout.groups for place in group.params),
    }
    print(json.dumps(facts), flush=True)


def measure(folder: Path, mode: str, is_drawn: bool) -> list[dict[str, Any]]:
    """Start the ranks; what each has found."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", mode, "--folder", str(folder), *(["--draw"] if is_drawn else [])]
    ranks = []
    for rank in range(NUM_RANKS):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": NUM_RANKS, "LOCAL_WORLD_SIZE": NUM_RANKS}
        values = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{key: str(value) for key, value in values.items()}}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    printed = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(f"the ranks ended with {[process.returncode for process in ranks]}")
    return [json.loads(text.splitlines()[-1]) for text in printed]


def report(console: Console, folder: Path, mode: str, is_drawn: bool) -> bool:
    """Measure one mode and print it; whether loading keeps within its bound."""
    ranks = measure(folder, mode, is_drawn)
    own = sum(each["phases"]["imports"]["peak_bytes"] for each in ranks)
    at_rest = sum(each["at_rest_bytes"] for each in ranks)
    extra = sum(each["group_bytes"] + BUFFER_BYTES for each in ranks)
    bound = own + at_rest + extra
    parts = {"interpreters": own, "at rest": at_rest, "a group and a buffer each": extra}
    title = f"{mode}: {ranks[0]['num_params'] / 1e9:.3f} B parameters on {NUM_RANKS} ranks; bound {bound / 1e6:,.0f} MB"
    title += " = " + " + ".join(f"{name} {value / 1e6:,.0f}" for name, value in parts.items())
    table = Table("phase", title=title, title_justify="left")
    for heading in ("s", "peak MB, sum of ranks", "of the bound", "read MB"):
        table.add_column(heading, justify="right")
    peaks = {name: sum(each["phases"][name]["peak_bytes"] for each in ranks) for name in ranks[0]["phases"]}
    for name, peak in peaks.items():
        taken_s = max(each["phases"][name]["taken_s"] for each in ranks)
        read = f"{sum(each['num_read_bytes'] for each in ranks) / 1e6:,.0f}" if name == "import" else ""
        table.add_row(name, f"{taken_s:.1f}", f"{peak / 1e6:,.0f}", f"{peak / bound:.1%}", read)
    console.print(table)
    return all(peaks[name] <= bound for name in LOADING)


def main(arguments: Sequence[str]) -> int:
    """Print a table a mode; exit code 1 where loading takes more than its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--params-like", choices=SHAPES, default="1.1b", help="the shape of the model")
    parser.add_argument("--folder", type=Path, help="of the model: written if it is not there, and kept")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--draw", action="store_true", help="draw initial values before the import")
    parser.add_argument("--rank-of", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of:
        run_rank(options.folder, options.rank_of, options.draw)
        return 0
    console = Console()
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False)
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place) / "llama"
        if not folder.exists():
            write_folder(folder, options.params_like)
        kept = [report(console, folder, mode, options.draw) for mode in options.modes]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
