"""Jobs of Megatron's flags: every field and key that is not the default, what is noted, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.refusals import refused
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.models.megatron_flags import read_megatron, script_words, yaml_words
from shardwise.models.presets import preset
from shardwise.models.shape import ExpertsShape, ModelShape, ModelSource

FLAGS = "--num-layers 8 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 32000"
FULL = "--recompute-granularity full"
FLAGS_SHAPE: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "ffn_size": 3072,
    "vocab_size": 32000, "name": "the flags",
}  # fmt: skip


SCRIPT = """
#!/bin/bash
# Runs Llama 70B; --not-a-flag in a comment
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-16}
TP=8  # NVLink
PP=4
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --vocab-size 32000
)
torchrun --nproc-per-node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size ${PP} \\
    --num-layers-per-virtual-pipeline-stage 5 \\
    --sequence-parallel --use-distributed-optimizer \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
    --micro-batch-size 1 --global-batch-size 1024 \\
    --lr 1.5e-4 --bf16
"""


def test_a_script_of_megatron_is_a_job(tmp_path):
    path = tmp_path / "llama.sh"
    path.write_text(SCRIPT)
    imported = read_megatron(path)
    padded = replace(preset("llama-70b"), vocab_size=32 * 128 * 8)
    assert imported.shape == ModelShape.of_decoder(padded, "llama")
    assert (imported.seq_len, imported.global_batch) == (4096, 1024)
    config = Config().override(imported.assignments).resolve(128)
    assert (config.mesh.tp, config.mesh.pp, config.mesh.dp_shard) == (8, 4, 4)
    assert (config.pipeline.schedule, config.pipeline.virtual_stages) == ("interleaved", 4)
    assert (config.zero.stage, config.precision.reduce, config.recompute.mode) == (1, "fp32", "full")
    assert config.tensor.sequence_parallel


def test_flags_alone_are_a_job() -> None:
    imported = read_megatron(f"{FLAGS} --micro-batch-size 2 --nproc-per-node 8 --nnodes 4 --bf16")
    shape = ModelShape(**FLAGS_SHAPE, ffn="plain", is_tied=True, has_biases=True, num_positions=1024)
    settings = {"zero.stage": 0, "precision.param": "bf16", "precision.reduce": "fp32", "batch.micro_size": 2}
    assert imported == ModelSource(shape=shape, settings=settings, seq_len=1024)
    # A flag that is like one that is there, too, is another's.
    both = read_megatron(f"{FLAGS} --tensor-model-parallel-sizes 4 --tensor-model-parallel-size 2")
    assert both.settings["mesh.tp"] == 2


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--tensor-model-parallel-size 2", {"mesh.tp": 2}),
        ("--tensor-model-parallel-size 1 --sequence-parallel", {}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"mesh.tp": 2, "tensor.sequence_parallel": True}),
        ("--num-layers-per-virtual-pipeline-stage 3", {}),
        ("--pipeline-model-parallel-size 4", {"mesh.pp": 4}),
        ("--num-virtual-stages-per-pipeline-rank 2", {}),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            {"mesh.pp": 2, "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2},
        ),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4", {"mesh.pp": 2}),
        ("--context-parallel-size 2", {"mesh.cp": 2, "context.transport": "ring"}),
        ("--context-parallel-size 2 --cp-comm-type all_gather", {"mesh.cp": 2, "context.transport": "all-gather"}),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", {"mesh.cp": 2, "context.transport": "ring"}),
        ("--context-parallel-size 1 --cp-comm-type a2a", {}),
        ("--use-distributed-optimizer", {"zero.stage": 1}),
        ("--data-parallel-sharding-strategy no_shard --use-torch-fsdp2", {}),
        ("--data-parallel-sharding-strategy optim", {"zero.stage": 1}),
        ("--use-torch-fsdp2", {"zero.stage": 3}),
        ("--data-parallel-sharding-strategy optim_grads", {"zero.stage": 2}),
        ("--data-parallel-sharding-strategy optim_grads_params", {"zero.stage": 3}),
        ("--use-distributed-optimizer --optimizer-cpu-offload", {"zero.stage": 1, "tiers.optimizer": "host"}),
        ("--optimizer-cpu-offload", {}),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"mesh.cp": 2, "context.transport": "ulysses"}),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", {"precision.param": "fp16", "precision.reduce": "fp32"}),
        ("--fp16", {"precision.param": "fp16", "precision.reduce": "param"}),
        ("--recompute-activations", {"recompute.mode": "selective"}),
        ("--recompute-granularity selective --recompute-num-layers 2", {"recompute.mode": "selective"}),
        (f"{FULL} --recompute-method uniform --recompute-num-layers 2", {"recompute.mode": "full"}),
        (f"{FULL} --recompute-method block --recompute-num-layers 8", {"recompute.mode": "full"}),
        (f"{FULL} --recompute-method block --recompute-num-layers 3", {"recompute.mode": "full", "recompute.every": 3}),
        (f"{FULL} --recompute-method block --recompute-num-layers 0", {"recompute.mode": "full"}),
    ],
)
def test_each_flag_of_a_layout_has_its_keys(more: str, expected: dict[str, Any]) -> None:
    assert read_megatron(f"{FLAGS} {more}").settings == {"zero.stage": 0, "precision.param": "fp32"} | expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--swiglu", {"ffn": "gated", "ffn_size": 2048}),
        ("--swiglu --ffn-hidden-size 100", {"ffn_size": 100}),
        ("--untie-embeddings-and-output-weights", {"is_tied": False}),
        ("--disable-bias-linear", {"has_biases": False}),
        ("--position-embedding-type rope", {"num_positions": 0}),
        ("--position-embedding-type none", {"num_positions": 0}),
        ("--use-rotary-position-embeddings", {"num_positions": 0}),
        ("--position-embedding-type learned_absolute --max-position-embeddings 2048", {"num_positions": 2048}),
        ("--kv-channels 96", {"head_dim": 96}),
        ("--num-query-groups 4", {"num_kv_heads": 12}),
        ("--group-query-attention --num-query-groups 4", {"num_kv_heads": 4}),
        ("--group-query-attention", {"num_kv_heads": 12}),
        ("--padded-vocab-size 777", {"vocab_size": 777}),
        ("--vocab-size 32001", {"vocab_size": 32128}),
        ("--make-vocab-size-divisible-by 1000 --tensor-model-parallel-size 3", {"vocab_size": 33000}),
        ("--num-experts 4", {"experts": ExpertsShape(num_experts=4, num_chosen=2, ffn_size=3072)}),
        (
            "--num-experts 4 --moe-router-topk 1 --ffn-hidden-size 500 --moe-shared-expert-intermediate-size 900",
            {"experts": ExpertsShape(num_experts=4, num_chosen=1, ffn_size=500, num_shared=2)},
        ),
    ],
)
def test_each_flag_of_a_shape_has_its_field(more: str, expected: dict[str, Any]) -> None:
    shape = read_megatron(f"{FLAGS} {more}").shape
    assert {name: getattr(shape, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--recompute-activations", "selective recomputation here repeats"),
        ("--recompute-granularity selective", "selective recomputation here repeats"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "every block's input"),
        ("--fp8-format hybrid", "fp8 products are precision.linears=fp8 here"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", None),
        ("--recompute-granularity full --recompute-method uniform", None),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", None),
    ],
)
def test_what_megatron_does_otherwise_is_noted(more: str, words: str | None) -> None:
    notes = read_megatron(f"{FLAGS} {more}").notes
    assert len(notes) == (words is not None)
    assert words is None or notes[0].startswith(words)
    bare = FLAGS.replace("--vocab-size 32000", "")
    assert read_megatron(bare).notes == ("the flags name no vocabulary; GPT-2's 50,257 tokens are taken",)
    assert read_megatron(f"{bare} --padded-vocab-size 128").notes == ()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run --a=1 --b = --c x", "run --a=1 --b = --c x"),
        ("run -- --a --b-c_d 'x y'", "run --a --b-c-d x y"),
        ("run --a \\\n 3 # --b", "run --a 3"),
        ("N=2\nexport M='4'\nrun --n $N --m ${M} --z ${Z}", "N=2 export M=4 run --n 2 --m 4 --z ${Z}"),
        ("run --a ${A:-7} --b ${B-8}", "run --a 7 --b 8"),
        ("A=9\nrun --a ${A:-7}", "A=9 run --a 9"),
        ('ARGS="\n  --a 1\n  --b"', "ARGS=" + '" --a 1 --b'.strip('"')),
        ("ARGS=(--a 1\n --b)", "--a 1 --b"),
        ("ARGS='--a 1 --b'\nrun $ARGS", "--a 1 --b run --a 1 --b"),
        ("echo don't\nrun --a 1 # --b", "echo don t run --a 1"),
    ],
)
def test_scripts_say_flags(script: str, words: str) -> None:
    assert " ".join(script_words(script)).split() == words.split()


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ("--tensor-model-paralel-size 8", "megatron-unknown-flag", "--tensor-model-parallel-size?"),
        (
            "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-len 8",
            "megatron-flag-missing",
            "--seq-length",
        ),
        ("--hidden-size $HIDDEN --num-attention-heads 4", "megatron-flag-refused", "$HIDDEN is a variable"),
        ("--hidden-size 64 --num-attention-heads four", "megatron-flag-refused", "four must be a whole number"),
        ("--num-layers 4 --hidden-size 8 --recompute-granularity most", "megatron-flag-refused", "'most'"),
        (
            "--num-layers 10 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
            "megatron-virtual-layers",
            "a divisor of 5",
        ),
    ],
)
def test_wrong_flags_are_named(flags, code, named):
    with refused(code, named) as error:
        read_megatron(flags)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    "flag",
    [
        "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
        "seq-length", "max-position-embeddings", "vocab-size", "make-vocab-size-divisible-by", "micro-batch-size",
        "global-batch-size", "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
        "num-virtual-stages-per-pipeline-rank", "expert-model-parallel-size", "num-experts", "moe-router-topk",
        "moe-ffn-hidden-size",
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["0", "-1", "1.5"])
def test_a_flag_that_counts_nothing_is_refused(flag: str, value: str) -> None:
    experts = "--num-experts 4 " if flag.startswith("moe") else ""
    with refused("megatron-flag-refused", f"the flags: argument --{flag}: {value}", ">= 1"):
        read_megatron(f"{FLAGS} --group-query-attention {experts}--{flag} {value}")


def test_heads_of_flags_divide_the_hidden_size_or_say_theirs() -> None:
    with refused("heads-divide-hidden", "7 heads", "768", "--kv-channels"):
        read_megatron(f"{FLAGS} --num-attention-heads 7")
    shape = read_megatron(f"{FLAGS} --num-attention-heads 7 --kv-channels 64").shape
    assert shape is not None
    assert (shape.num_heads, shape.head_dim) == (7, 64)


@pytest.mark.parametrize("script", ["A=$((64 / 8))\nrun {} --num-layers $A", "run {} --num-layers $((64 / 8))"])
def test_a_script_that_calculates_is_asked_for_the_value(script):
    flags = FLAGS.replace("--num-layers", "--was-num-layers")
    with refused("megatron-flag-refused", "--num-layers"):
        read_megatron(script.format(flags))


@pytest.mark.parametrize(
    "script",
    [
        "A0=aaaaaaaaaa\n" + "\n".join(f"A{i + 1}=" + f"${{A{i}}}" * 10 for i in range(9)) + "\nrun --tp $A9",
        "A=a\n" + "A=$A$A\n" * 60,
        '"${a-' * 20_000,
        "run --num-layers " + "9" * 5000,
        "A=" + " " * 100_000 + "x",
        "run " + " ".join(f"--a{i} 1" for i in range(20_000)),
        "run --hidden-size 9" + "0" * 400 + " --num-layers 2",
    ],
    ids=range(7),
)
def test_a_script_that_is_made_to_hurt_is_refused_at_once(tmp_path: Path, script: str) -> None:
    (tmp_path / "a.sh").write_text(script)
    with pytest.raises(ConfigError) as caught:
        read_megatron(tmp_path / "a.sh")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_flags_and_yaml_say_the_same(tmp_path: Path) -> None:
    line = "--num-layers 8 --hidden-size 512 --num-attention-heads=8 --seq-length 1024 --bf16 --num-experts 4"
    yaml = "model:\n  num_layers: 8\n  hidden_size: 512 # wide\n  num_attention_heads: 8\n"
    yaml += "  seq_length: 1024\n  bf16: true\n  fp16: false\n  num-experts: 4\n"
    path = tmp_path / "the flags.yaml"
    path.write_text(yaml)
    assert read_megatron(path) == read_megatron(f"python pretrain.py {line}")


def test_yaml_says_flags() -> None:
    text = "- --a: 1 # one\n- 'b_c': \"x\"\n- section:\n    d: True\n    e: ~\n    f: False\n    g: [h: 2]\n"
    assert yaml_words(text) == ["--a", "1", "--b-c", "x", "--d", "--h", "2"]
    # What contains itself is read once.
    assert yaml_words("&all\na: 1\nb: *all\n") == ["--a", "1"]
    with refused("not-yaml"):
        yaml_words("a: [")
