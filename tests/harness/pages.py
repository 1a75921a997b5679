"""The pages of the documentation as blocks of code, and the names that their Python expects to be there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from harness.paths import ROOT

PAGES: Final = tuple(sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/*.md")]))
_FENCE: Final = re.compile(r"^( *)```(\S*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        line: the line of the page on which its code begins.
        language: the first word of its fence.
        note: what the fence says after it; `no-run: why` keeps Python from being run.
        text: without the indentation of the fence.
    """

    line: int
    language: str
    note: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            text.count("\n", 0, found.start(4)) + 1,
            found[2],
            found[3].strip(),
            re.sub(f"^{found[1]}", "", found[4], flags=re.M),
        )
        for found in _FENCE.finditer(text)
    ]


def outside_blocks(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def commands_in(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block of `sh` or `console`, split at `&&` and `|`, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        command: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word not in ("&&", "|"):
                command.append(word)
            elif command:
                yield command
                command = []


def arguments_of_shardwise(command: list[str]) -> list[str] | None:
    """Return the arguments of `shardwise`, alone or as `-m shardwise` under a launcher; None for another program."""
    if command[0].rpartition("/")[2] == "shardwise":
        return command[1:]
    for at in range(len(command) - 1):
        if command[at] == "-m" and command[at + 1].startswith("shardwise"):
            return command[at + 2 :]
    return None


_SMALL: Final = """
from pathlib import Path
import torch, shardwise

model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(2)])
loss_fn = lambda output, batch: (output.float().square().sum(), output.numel())
config = {"zero": {"stage": 3}}
"""
_ENGINE: Final = """
engine = shardwise.initialize(model, config, loss_fn=loss_fn)
engine.train_step([torch.randn(2, 16)])
"""
# What docs/clusters.md trains on; its loop watches signals of this process, which get their handlers back after it.
_CLUSTER: Final = """
import signal

handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
stream = [torch.randn(16) for _ in range(8)]
config = {"zero": {"stage": 3}, "batch": {"global_size": 2, "micro_size": 2}}
with shardwise.initialize(model, config, loss_fn=loss_fn) as sized:
    loader = shardwise.stream_loader(sized, stream)
"""
_HUGGING_FACE: Final = """
from transformers import AutoConfig, AutoModelForCausalLM
"""
# A model whose weights have other names than those of a Llama folder, which gets no others than its.
_OTHER_NAMES: Final = """
class OtherNames(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for block in self.blocks:
            block.query = torch.nn.Linear(32, 32, bias=False)
            block.gate_up = torch.nn.Linear(32, 128, bias=False)

from safetensors.torch import load_file, save_file
weights = load_file("Llama-3.2-1B/model.safetensors")
kept = {name: weight for name, weight in weights.items() if ".q_" in name or ".gate_" in name or ".up_" in name}
save_file(kept, "Llama-3.2-1B/model.safetensors")
model = OtherNames()
"""
# The model whose modules the table of docs/tensor-parallel.md names.
_NET: Final = """
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.num_heads, self.width = 8, width
        self.qkv, self.out = nn.Linear(width, width + width // 2), nn.Linear(width, width)

    def forward(self, x):
        head = self.width // 8
        q, k, v = self.qkv(x).split([self.num_heads * head, self.num_heads // 4 * head, self.num_heads // 4 * head], -1)
        q, k, v = (each.unflatten(-1, (-1, head)).transpose(1, 2) for each in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, dropout_p=0.1 * self.training)
        return self.out(y.transpose(1, 2).flatten(2))

class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x).relu())

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn, self.ffn = Attention(width), FeedForward(width)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.ffn(x)

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(64, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

batch = torch.randint(64, (2, 16))
"""
_GENERATION: Final = """
engine = shardwise.initialize(AutoModelForCausalLM.from_pretrained("my-llama"), {})
input_ids = torch.tensor([[2, 3, 4]])
"""
_POLICY: Final = """
from types import SimpleNamespace
import torch, shardwise
from shardwise.models.decoder import Decoder
from shardwise.models.presets import preset

engine = shardwise.initialize(Decoder(preset("tiny")), {"zero": {"stage": 3}})
inputs = torch.randint(64, (2, 8))
targets, mask, sampled = inputs.roll(-1, 1), torch.ones(2, 8), torch.zeros(2, 8)
run, result, reward = SimpleNamespace(log=lambda *args, **values: None), None, 0.5
"""
# What a page's Python has at its start, or before its block of that number.
_SERVER: Final = """
from types import SimpleNamespace
server = SimpleNamespace(**dict.fromkeys(("announce", "load", "start", "finish"), lambda *_: None))
loader = []
"""
PRELUDES: Final[Mapping[str, Mapping[int, str]]] = MappingProxyType(
    {
        "checkpoints": {0: _SMALL + _ENGINE, 1: _HUGGING_FACE, 2: _OTHER_NAMES},
        "clusters": {
            0: _SMALL + _CLUSTER,
            1: """
for each, handler in handlers.items():
    signal.signal(each, handler)
engine = shardwise.initialize(model, config, loss_fn=loss_fn)
engine.save("shared/job7", data=loader)
""",
        },
        "elastic": {0: _SMALL + "number = 8"},
        "experts": {
            0: """
import torch
from harness.listed_experts import ListedModel, ListedMoe as RemoteMoe

model = ListedModel()
"""
        },
        "extending": {
            0: """
from shardwise.schedule.pipelines import ScheduleRecipe, ScheduleRows, StagePlacement, _B, _F, _Pattern
"""
        },
        "hand-over": {0: _SMALL + _ENGINE + _SERVER},
        "index": {0: "import torch\nmicro_batches = torch.arange(16).view(2, 1, 8)"},
        "models": {
            0: _SMALL + _HUGGING_FACE + 'hf_config = AutoConfig.from_pretrained("my-llama")\nMyModel = lambda: model'
        },
        "optimizers": {0: _SMALL},
        "offload": {0: _SMALL, 1: _ENGINE.splitlines()[-1]},
        "rl": {0: _POLICY},
        "tensor-parallel": {0: _SMALL + _HUGGING_FACE + _NET, 2: _GENERATION},
        "timeline": {
            0: """
import json
from pathlib import Path
from shardwise.report.chrome_trace import chrome_trace
from shardwise.schedule import one_f_one_b, simulate
Path("trace.json").write_text(json.dumps(chrome_trace(simulate(one_f_one_b(2, 2).schedule(), lambda *_: 1.0))))
"""
        },
        "zero": {0: _SMALL},
    }
)
