"""What cannot be split over the cp axis is refused in one line, before anything is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from harness.refusals import refused
from shardwise import simulate
from shardwise.cli import main as cli

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
SEQUENCE = {"tensor": {"sequence_parallel": True}}
# Of `shardwise train`: the assignments, the number of ranks, and what the message names.
JOBS = {
    "length": (
        ["mesh.cp=3", "data.seq_len=256"],
        3,
        ["mesh.cp=3", "256 tokens", "255, 258"],
    ),
    "length of a token layout": (
        ["mesh.cp=2", "data.seq_len=254", "context.token_layout=zigzag"],
        2,
        ["mesh.cp=2", "context.token_layout=zigzag", "254 tokens", "252, 256"],
    ),
    "typo": (
        ["mesh.cp=2", "context.transport=ulyses"],
        2,
        ["context.transport='ulyses'", "ring or all-gather or ulysses", "did you mean ulysses?"],
    ),
    "key": (
        ["mesh.cp=2", "context.layout=zigzag"],
        2,
        ["context.layout", "did you mean context.token_layout?"],
    ),
    "heads of teams": (
        ["mesh.cp=6", "context.heads_over=3", "data.seq_len=384"],
        6,
        ["context.heads_over=3", "4 query heads", "legal: 2"],
    ),
    "world size": (
        ["mesh.cp=2"],
        3,
        ["world size 3", "cp 2", "multiple of 2 ranks"],
    ),
    "one rank": (
        ["context.heads_over=2"],
        2,
        ["context.heads_over=2", "mesh.cp=1"],
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_refused_before_any_process_starts(
    job: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assignments, num_ranks, values = JOBS[job]
    device = ["run.device=cpu", f"run.num_procs={num_ranks}"]
    assert cli.main(["train", "model.preset=tiny", *assignments, *device]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"shardwise: .*\n", said)
    assert not [value for value in values if value not in said], said
    assert not list(tmp_path.iterdir())


class Plain(nn.Module):
    """It attends to nothing that could be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [B, S]
        return self.embedding(tokens)


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "vocab_size": 32}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes))


# The model, the length of its sequences, what is set beside mesh.cp, and the error's code and values.
MODELS: dict[str, tuple[Any, int, dict[str, Any], list[str]]] = {
    "position bias": (
        t5,
        32,
        {},
        ["cp-encoder-decoder", "T5ForConditionalGeneration"],
    ),
    "router": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, output_router_logits=True)),
        32,
        {},
        ["cp-router-loss", "config.output_router_logits=False", "mesh.cp=1"],
    ),
    "window": (
        lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)),
        32,
        {},
        ["sliding-window", "MistralAttention", "sliding_window=16", "32 keys", "config.sliding_window=None"],
    ),
    "plain": (
        Plain,
        32,
        {},
        ["cp-model", "mesh.cp=2", "Plain", "docs/context.md"],
    ),
    "length": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        33,
        {},
        ["cp-divides-tokens", "mesh.cp=2", "33 tokens", "32, 34"],
    ),
    "length under sequence parallelism": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        34,
        {"mesh": {"cp": 2, "tp": 2}, **SEQUENCE},
        ["tp-divides-tokens", "length 34", "tp=2 x cp=2", "32, 36", "tensor.sequence_parallel=false"],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_or_a_batch_is_refused(case: str) -> None:
    build, length, overrides, refusal = MODELS[case]
    tokens = torch.zeros(2, length, dtype=torch.int64)
    config = {"mesh": {"cp": 2}, "batch": {"micro_size": 2}, **overrides}
    with refused(*refusal) as caught:
        simulate(build, config, lambda: {"input_ids": tokens, "labels": tokens}, rank=0, world_size=4)
    assert "\n" not in str(caught.value)
