"""What cannot be split over the cp axis is said in one line, with value, rule and cure, before anything is started."""

from __future__ import annotations

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

from shardwise import simulate
from shardwise.cli import main as cli
from shardwise.config.resolve import ConfigError

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
SEQUENCE = {"tensor": {"sequence_parallel": True}}
# Of `shardwise train`: the assignments, the number of ranks, and the message.
JOBS = {
    "length": (
        ["mesh.cp=3", "data.seq_len=256"],
        3,
        "mesh.cp=3 does not divide a sequence of 256 tokens into 3 equal parts; nearest legal: 255, 258",
    ),
    "length of a token layout": (
        ["mesh.cp=2", "data.seq_len=254", "context.token_layout=zigzag"],
        2,
        "mesh.cp=2 with context.token_layout=zigzag does not divide a sequence of 254 tokens into 4 equal parts; "
        "nearest legal: 252, 256",
    ),
    "typo": (
        ["mesh.cp=2", "context.transport=ulyses"],
        2,
        "context.transport='ulyses' must be ring or all-gather or ulysses; did you mean ulysses?",
    ),
    "key": (
        ["mesh.cp=2", "context.layout=zigzag"],
        2,
        "context.layout is not a config key; did you mean context.token_layout?",
    ),
    "heads of teams": (
        ["mesh.cp=6", "context.heads_over=3", "data.seq_len=384"],
        6,
        "context.heads_over=3 does not divide 4 query heads; nearest legal: 2",
    ),
    "world size": (
        ["mesh.cp=2"],
        3,
        "world size 3 is not a multiple of pp 1 x dp_replicate 1 x cp 2 x tp 1 = 2; start a multiple of 2 ranks",
    ),
    "one rank": (
        ["context.heads_over=2"],
        2,
        "context.heads_over=2 says how sequences are split over ranks, and mesh.cp=1 splits none; set mesh.cp to 2 or "
        "more, or leave the key out",
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_refused_before_any_process_starts(
    job: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assignments, num_ranks, message = JOBS[job]
    device = ["run.device=cpu", f"run.num_procs={num_ranks}"]
    assert cli.main(["train", "model.preset=tiny", *assignments, *device]) == 2
    assert capsys.readouterr().err == f"shardwise: {message}\n"
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


# The model, the length of its sequences, what is set beside mesh.cp, and the message.
MODELS: dict[str, tuple[Any, int, dict[str, Any], str]] = {
    "position bias": (
        t5,
        32,
        {},
        "mesh.cp splits sequences, and T5ForConditionalGeneration is an encoder with a decoder; set mesh.cp=1",
    ),
    "router": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, output_router_logits=True)),
        32,
        {},
        "has a loss of its router, which is no mean over tokens; set config.output_router_logits=False; or set "
        "mesh.cp=1",
    ),
    "window": (
        lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16)),
        32,
        {},
        "MistralAttention has a window of sliding_window=16 tokens, less than the 32 keys; set "
        "config.sliding_window=None",
    ),
    "plain": (
        Plain,
        32,
        {},
        "mesh.cp=2 needs a model whose attention the library can reach: one of transformers, Decoder, or one whose "
        "forward takes positions and hands them to modules with an attend, and this Plain is none; set mesh.cp=1, and "
        "see docs/context.md",
    ),
    "length": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        33,
        {},
        "mesh.cp=2 does not divide a sequence of 33 tokens into 2 equal parts; nearest legal: 32, 34",
    ),
    "length under sequence parallelism": (
        lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        34,
        {"mesh": {"cp": 2, "tp": 2}, **SEQUENCE},
        "sequence length 34 does not divide by tp=2 x cp=2, as tensor.sequence_parallel needs; nearest legal: 32, 36; "
        "pad the batch or set tensor.sequence_parallel=false",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_or_a_batch_is_refused(case: str) -> None:
    build, length, overrides, message = MODELS[case]
    tokens = torch.zeros(2, length, dtype=torch.int64)
    config = {"mesh": {"cp": 2}, "batch": {"micro_size": 2}, **overrides}
    with pytest.raises(ConfigError) as caught:
        simulate(build, config, lambda: {"input_ids": tokens, "labels": tokens}, rank=0, world_size=4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
