"""What is read from files of other tools: shapes, candidates, and one line for each mistake."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.models.presets import preset
from shardwise.planner.imports.huggingface import is_deepspeed, read_huggingface, shape_of
from shardwise.planner.imports.megatron import read_megatron
from shardwise.planner.job import ModelShape
from shardwise.train.imported_plan import read_deepspeed


def model_of(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": vocab}
    sizes |= {"num_key_value_heads": kv_heads, "intermediate_size": ffn}
    return {"model_type": model_type, **sizes, **more}


LLAMA_3_8B = model_of("llama", 32, 4096, 32, 8, 14336, 128256, max_position_embeddings=8192, tie_word_embeddings=False)
MIXTRAL = model_of("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []}
LATENT = {"kv_lora_rank": 512, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1}
LATENT |= {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
DEEPSEEK_V3 = model_of("deepseek_v3", 61, 7168, 128, 128, 18432, 129280, **LATENT)
GPT2_XL = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "vocab_size": 50257}
OPT = model_of("opt", 32, 4096, 32, 32, 16384, 50272, max_position_embeddings=2048, ffn_dim=16384)
QWEN2 = model_of("qwen2", 28, 3584, 28, 4, 18944, 152064, use_sliding_window=False, sliding_window=131072)


def test_a_llama_is_the_preset(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    imported = read_huggingface(path)
    assert imported.shape == ModelShape.of_decoder(preset("llama-3-8b"), "llama")
    assert (imported.longest, imported.notes) == (8192, ())


@pytest.mark.parametrize(
    ("values", "billions", "share"),
    [
        (GPT2_XL, 1.5576, 0.0005),
        (MIXTRAL, 46.70, 0.0005),
        (model_of("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, **EXPERTS), 30.53, 0.001),
        (DEEPSEEK_V3, 671.0, 0.01),  # latent attention is approximate
        (OPT, 6.658, 0.0005),
        (model_of("gpt_neox", 44, 6144, 64, 64, 24576, 50432), 20.55, 0.001),
        (model_of("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 8.538, 0.0005),
        (QWEN2, 7.616, 0.001),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_shapes_have_the_published_number_of_parameters(values, billions, share):
    assert shape_of(values, "config.json").num_params / 1e9 == pytest.approx(billions, rel=share)


def test_windows_hold_where_every_layer_has_one():
    assert shape_of({**MIXTRAL, "sliding_window": 4096}, "c").window == 4096
    assert shape_of({**MIXTRAL, "sliding_window": 4096, "model_type": "gemma2"}, "c").window is None
    assert shape_of({**MIXTRAL, "sliding_window": 4096, "use_sliding_window": False}, "c").window is None


UNKNOWN = {**LLAMA_3_8B, "model_type": "novel"}  # which nothing completes


def without(values: dict, key: str) -> dict:
    return {name: value for name, value in values.items() if name != key}


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        (without(UNKNOWN, "hidden_size"), "import-key-missing", "hidden_size (or n_embd"),
        ({**without(UNKNOWN, "vocab_size"), "vocab_sise": 5}, "import-key-missing", "vocab_sise?"),
        ({**LLAMA_3_8B, "num_hidden_layers": "32"}, "import-integer", "num_hidden_layers='32'"),
        ({**LLAMA_3_8B, "num_attention_heads": 33}, "heads-divide-hidden", "33 heads"),
    ],
)
def test_what_a_model_misses_is_named(values, code, named):
    with refused(code, "config.json", named) as error:
        shape_of(values, "config.json")
    assert len(str(error.value).splitlines()) == 1


DEEPSPEED = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "stage3_prefetch_bucket_size": 5e7,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/scratch"},
    },
}


def test_a_deepspeed_config_is_ours(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    imported = read_deepspeed(path)
    config = Config().override(imported.assignments)
    assert (config.zero.stage, config.tiers.optimizer, config.tiers.params) == (3, "host", "nvme")
    assert (config.tiers.nvme_path, config.precision.param, config.batch.micro_size) == ("/scratch", "bf16", 4)
    assert imported.global_batch == 512
    assert any("steps_per_print" in note for note in imported.notes)
    assert is_deepspeed(DEEPSPEED)
    assert not is_deepspeed(LLAMA_3_8B)


@pytest.mark.parametrize(
    ("values", "code", "named"),
    [
        ({"zero_optimization": {"stage": 4}}, "out-of-range", "stage=4"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "deepspeed-two-dtypes", "bf16 and fp16"),
        ({"bf16": True}, "deepspeed-section", "bf16=True"),
    ],
)
def test_what_deepspeed_would_not_take_is_refused_with_the_files_name(tmp_path, values, code, named):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(values))
    with refused(code, "ds.json: ", named) as error:
        read_deepspeed(path)
    assert len(str(error.value).splitlines()) == 1


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


def test_flags_and_yaml_say_the_same(tmp_path):
    line = "--num-layers 8 --hidden-size 512 --num-attention-heads=8 --seq-length 1024 --bf16 --num-experts 4"
    yaml = "model:\n  num_layers: 8\n  hidden_size: 512 # wide\n  num_attention_heads: 8\n"
    yaml += "  seq_length: 1024\n  bf16: true\n  fp16: false\n  num-experts: 4\n"
    path = tmp_path / "the flags.yaml"
    path.write_text(yaml)
    assert read_megatron(path) == read_megatron(f"python pretrain.py {line}")


def test_a_padded_vocabulary_is_megatrons():
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    shape = read_megatron(f"{sizes} --tensor-model-parallel-size 8").shape
    assert shape is not None
    assert shape.vocab_size == 51200  # the next multiple of 128 x 8 above 50,257
    assert shape.num_positions == 32


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ("--tensor-model-paralel-size 8", "megatron-unknown-flag", "--tensor-model-parallel-size?"),
        ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-len 8", "megatron-flag-missing", "--seq-len?"),
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


def test_files_that_cannot_be_read_are_named(tmp_path):
    for read in (read_huggingface, read_deepspeed, read_megatron):
        with refused("file-unreadable", "none.json"):
            read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{")
    with refused("not-json", "broken.json"):
        read_huggingface(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with refused("json-not-object", "list.json"):
        read_deepspeed(tmp_path / "list.json")


def test_what_a_script_does_and_a_run_refuses_is_priced_all_the_same(tmp_path):
    path = tmp_path / "ds.json"
    checkpointing = {"cpu_checkpointing": True}
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True, "ofload_param": {"device": "cpu"}}
    path.write_text(json.dumps({"zero_optimization": zero, "activation_checkpointing": checkpointing}))
    imported = read_deepspeed(path)
    assert (imported.settings["recompute.mode"], imported.settings["tiers.activations"]) == ("full", "host")
    assert Config().override(imported.assignments).tiers.params == "device"
    for words in ("refused in a run: zero_optimization.zero_quantized_nontrainable_weights=True", "did you mean"):
        assert any(words in note for note in imported.notes)


@pytest.mark.parametrize(
    ("bf16", "fp16", "param"),
    [
        ("auto", "auto", "bf16"),  # as templates have it
        ("auto", True, "fp16"),
        (False, "auto", "fp16"),
        (True, False, "bf16"),
        (False, False, "fp32"),
    ],
)
def test_a_precision_that_is_left_open_is_taken_where_none_is_said(tmp_path, bf16, fp16, param):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}))
    assert read_deepspeed(path).settings["precision.param"] == param


SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"model_type": "gpt_bigcode", "multi_query": True}, {"num_kv_heads": 1, "ffn_size": 2048}),
        (
            {"model_type": "falcon", "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4},
            {"num_kv_heads": 4, "is_tied": True},
        ),
        ({"model_type": "mpt", "attn_config": {"kv_n_heads": 8, "num_kv_heads": 2}}, {"num_kv_heads": 2}),
        ({"model_type": "opt", "max_position_embeddings": 64}, {"num_positions": 66}),
        ({"model_type": "gpt2", "n_positions": 64}, {"num_positions": 64}),
        ({"model_type": "novel", "expansion_ratio": 3}, {"ffn_size": 1536}),
        ({"model_type": "gemma", "intermediate_size": 64}, {"is_tied": True}),
        ({"model_type": "mistral", "intermediate_size": 64, "sliding_window": 32}, {"window": 32}),
        (
            {"model_type": "mistral", "intermediate_size": 64, "sliding_window": 32, "layer_types": ["full"]},
            {"window": None},
        ),
        ({"model_type": "llama", "intermediate_size": 64, "_name_or_path": "org/some-7b/"}, {"name": "some-7b"}),
    ],
)
def test_fields_of_other_families(values, expected):
    shape = shape_of({**SIZES, **values}, "config.json")
    assert {name: getattr(shape, name) for name in expected} == expected


def test_the_tie_of_a_model_with_parts_may_stand_outside():
    text = {**SIZES, "model_type": "llama", "intermediate_size": 64}
    assert shape_of({"text_config": text, "tie_word_embeddings": True}, "config.json").is_tied


FLAGS = "--num-layers 8 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 32000"


def test_experts_of_megatron():
    sizes = "--num-experts 8 --moe-ffn-hidden-size 256 --moe-shared-expert-intermediate-size 512"
    imported = read_megatron(f"{FLAGS} {sizes} --expert-model-parallel-size 4")
    assert imported.settings["mesh.ep"] == 4
    assert imported.shape is not None
    experts = imported.shape.experts
    assert experts is not None
    assert (experts.num_chosen, experts.ffn_size, experts.num_shared) == (2, 256, 2)


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
    for name in ("a.sh", "a.yaml"):
        (tmp_path / name).write_text(script)
        with pytest.raises(ConfigError) as caught:
            read_megatron(tmp_path / name)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", [10**400, -1, "1\x1b[31m", [1], {"a": 1}, 1e400, True, "x" * 10_000])
@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "train_batch_size", "gradient_clipping", "lr"])
def test_senseless_values_are_refused_in_one_line(tmp_path: Path, key: str, value: object) -> None:
    model = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    model |= {"intermediate_size": 64}
    config = {"zero_optimization": {"stage": 1}, "optimizer": {"params": {key: value}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**config, key: value}))
    refusals: list[str] = []
    for read in (
        lambda: shape_of({**model, key: value}, "config.json"),
        lambda: read_deepspeed(path),
    ):
        try:
            read()
        except ConfigError as error:
            refusals.append(str(error))
    assert all(each.isprintable() and len(each) < 300 for each in refusals)
