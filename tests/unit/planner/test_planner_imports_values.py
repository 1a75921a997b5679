"""Files of other tools, read whole: every field that is not the default, and what is noted."""

from __future__ import annotations

from typing import Any

import pytest

from harness.refusals import refused
from shardwise.planner.imports import huggingface
from shardwise.planner.imports.huggingface import is_deepspeed, source_of
from shardwise.planner.imports.megatron import read_megatron, script_words, yaml_words
from shardwise.planner.job import Experts, ModelShape, ModelSource

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
FLAGS = "--num-layers 8 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 32000"
FLAGS_SHAPE: dict[str, Any] = {
    "num_layers": 8, "hidden_size": 768, "num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "ffn_size": 3072,
    "vocab_size": 32000, "name": "the flags",
}  # fmt: skip


def test_a_model_of_latent_attention_and_experts() -> None:
    values = SIZES | {
        "model_type": "deepseek_v3", "kv_lora_rank": 64, "v_head_dim": 96, "num_key_value_heads": 8,
        "intermediate_size": 2048, "moe_intermediate_size": 256, "n_routed_experts": 16, "n_shared_experts": 2,
        "num_experts_per_tok": 4, "first_k_dense_replace": 3, "max_position_embeddings": 4096,
    }  # fmt: skip
    experts = Experts(num_experts=16, num_chosen=4, ffn_size=256, num_shared=2, num_dense_layers=3)
    shape = ModelShape(
        num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=1, head_dim=96, ffn_size=2048, vocab_size=1000,
        experts=experts, name="deepseek_v3",
    )  # fmt: skip
    notes = ("latent attention is priced as attention with one head of keys and values",)
    assert source_of(values, "c") == ModelSource(shape=shape, longest=4096, notes=notes)


def test_a_model_of_learned_positions_in_parts() -> None:
    text = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
    shape = ModelShape(
        num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=100,
        ffn="plain", is_tied=True, has_biases=True, num_positions=32, name="a-model",
    )  # fmt: skip
    whole = {"model_type": "seeing", "text_config": text, "_name_or_path": "someone/a-model"}
    notes = ("of a model with several parts, that of text alone is planned",)
    assert source_of(whole, "c") == ModelSource(shape=shape, longest=32, notes=notes)
    assert source_of(text | {"text_config": {}}, "c").notes == ()


def test_a_model_that_is_unknown() -> None:
    values = {
        "d_model": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 10,
        "hidden_act": "GELU", "seq_length": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    shape = ModelShape(
        num_layers=2, hidden_size=96, num_heads=6, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=10,
        ffn="plain", is_tied=True,
    )  # fmt: skip
    notes = ("model_type none is read by its fields' names: check the number of parameters",)
    assert source_of(values, "c") == ModelSource(shape=shape, longest=64, notes=notes)


@pytest.mark.parametrize("is_installed", [True, False])
@pytest.mark.parametrize(
    ("kinds", "is_gated", "has_biases", "is_tied", "num_positions"),
    [
        ("llama mistral qwen2 qwen3 phi3 olmo olmo2 stablelm granite smollm3", True, False, False, 0),
        ("gemma gemma2 gemma3_text cohere cohere2", True, False, True, 0),
        ("gpt2 gpt_neo", False, True, True, 16),
        ("opt", False, True, True, 18),
        ("gptj phi gpt_neox", False, True, False, 0),
        ("bloom starcoder2", False, True, True, 0),
        ("falcon", False, False, True, 0),
    ],
)
def test_what_no_file_says(
    kinds: str, is_gated: bool, has_biases: bool, is_tied: bool, num_positions: int, is_installed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if is_installed:
        pytest.importorskip("transformers")
    else:
        monkeypatch.setattr(huggingface, "find_spec", lambda name: None)
    for kind in kinds.split():
        values = SIZES | {
            "model_type": kind, "max_position_embeddings": 16, "intermediate_size": 2048, "num_key_value_heads": 8,
            "head_dim": 64, "multi_query": False, "ffn_dim": 2048, "tie_word_embeddings": is_tied, "max_seq_len": 16,
            "sliding_window": None,
        }  # fmt: skip
        assert source_of(values, "c").shape == ModelShape(
            num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=2048, vocab_size=1000,
            ffn="gated" if is_gated else "plain", is_tied=is_tied, has_biases=has_biases, num_positions=num_positions,
            name=kind,
        )  # fmt: skip


def test_transformers_completes_what_a_file_leaves_out() -> None:
    pytest.importorskip("transformers")
    values = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "intermediate_size": 10240}
    shape = source_of(values, "c").shape
    assert shape is not None
    # What Gemma 3's files leave out: 8 heads of 256, 4 of keys, and a tied head of 262,208 tokens.
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.is_tied) == (8, 4, 256, True)
    assert shape.vocab_size == 262_208


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"hidden_act": "SwiGLU"}, {"ffn": "gated"}),
        ({"hidden_activation": "gelu"}, {"ffn": "plain"}),
        ({"activation_function": "relu"}, {"ffn": "plain"}),
        ({}, {"ffn": "gated", "is_tied": False, "has_biases": False}),
        ({"model_type": "falcon", "multi_query": True}, {"num_kv_heads": 1, "has_biases": False, "ffn": "plain"}),
        ({"model_type": "falcon", "multi_query": False}, {"num_kv_heads": 8}),
        ({"model_type": "mpt", "attn_config": "flash"}, {"num_kv_heads": 8}),
        ({"model_type": "mpt", "attn_config": {"num_kv_heads": 2}, "num_kv_heads": 4}, {"num_kv_heads": 4}),
        ({"head_dim": 128}, {"head_dim": 128}),
        ({"head_dim": 64, "num_attention_heads": 7}, {"head_dim": 64, "num_heads": 7}),
        ({"text_config": "none"}, {"hidden_size": 512}),
        (
            {"num_experts": 4, "moe_topk": 1, "moe_intermediate_size": 100, "shared_expert_intermediate_size": 180},
            {"experts": Experts(num_experts=4, num_chosen=1, ffn_size=100, num_shared=2)},
        ),
        (
            {
                "model_type": "qwen2_moe",
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0, 1],
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 384,
                "num_key_value_heads": 8,
            },
            {"experts": Experts(num_experts=8, num_chosen=2, ffn_size=128, num_shared=3, num_dense_layers=2)},
        ),
        (
            {"num_experts": 4, "moe_topk": 1, "n_shared_experts": 1, "shared_expert_intermediate_size": 640},
            {"experts": Experts(num_experts=4, num_chosen=1, ffn_size=64, num_shared=1)},
        ),
        ({"sliding_window": 32, "sliding_window_pattern": 6}, {"window": None}),
        ({"sliding_window": 0}, {"window": None}),
        ({"sliding_window": "32"}, {"window": None}),
        ({"sliding_window": 32, "model_type": "gpt_oss"}, {"window": None}),
        ({"sliding_window": 32, "model_type": "gemma"}, {"window": 32}),
        ({"num_experts": 1}, {"experts": None}),
        ({"num_local_experts": 4, "moe_top_k": 2}, {"experts": Experts(num_experts=4, num_chosen=2, ffn_size=64)}),
        (
            {"num_experts": 4, "moe_topk": 1, "moe_intermediate_size": 100, "shared_expert_intermediate_size": 40},
            {"experts": Experts(num_experts=4, num_chosen=1, ffn_size=100, num_shared=1)},
        ),
        ({"_name_or_path": ""}, {"name": "model"}),
    ],
)
def test_fields_of_models(values: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = source_of(SIZES | {"intermediate_size": 64} | values, "c").shape
    assert {name: getattr(shape, name) for name in expected} == expected


@pytest.mark.parametrize("key", ["zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"])
def test_each_of_these_keys_is_deepspeeds(key: str) -> None:
    assert is_deepspeed({key: None})
    assert not is_deepspeed({"gradient_clipping": 1})


def test_flags_alone_are_a_job() -> None:
    imported = read_megatron(f"{FLAGS} --micro-batch-size 2 --nproc-per-node 8 --nnodes 4 --bf16")
    shape = ModelShape(**FLAGS_SHAPE, ffn="plain", is_tied=True, has_biases=True, num_positions=1024)
    settings = {"zero.stage": 0, "precision.param": "bf16", "precision.reduce": "fp32", "batch.micro_size": 2}
    assert imported == ModelSource(shape=shape, settings=settings, seq_len=1024)
    # A flag that is like one that is there, too, is another's.
    both = read_megatron(f"{FLAGS} --tensor-model-parallel-sizes 4 --tensor-model-parallel-size 2")
    assert both.settings["mesh.tp"] == 2


@pytest.mark.parametrize(
    ("flags", "code", "named"),
    [
        ("--num-layers 2", "megatron-flag-missing", "--hidden-size"),
        ("--num-attention-heads --hidden-size 64", "megatron-flag-refused", "--num-attention-heads"),
        ("--hidden-size \u00b2", "megatron-flag-refused", "--hidden-size: \u00b2"),
        (f"{FLAGS} --data-parallel-sharding-strategy most", "megatron-flag-refused", "no-shard"),
    ],
)
def test_flags_that_cannot_be_are_named(flags: str, code: str, named: str) -> None:
    with refused(code, named):
        read_megatron(flags)
    assert read_megatron(f"{FLAGS} --global-batch-size 64").global_batch == 64


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
        (
            "--recompute-granularity selective --recompute-method block --recompute-num-layers 2",
            {"recompute.mode": "selective"},
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
            {"recompute.mode": "full"},
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8", {"recompute.mode": "full"}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            {"recompute.mode": "full", "recompute.every": 3},
        ),
        ("--recompute-granularity full --recompute-method uniform", {"recompute.mode": "full"}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            {"recompute.mode": "full", "recompute.every": 4},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 7",
            {"recompute.mode": "full", "recompute.every": 1},
        ),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", {"recompute.mode": "full"}),
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
        ("--num-experts 4", {"experts": Experts(num_experts=4, num_chosen=2, ffn_size=3072)}),
        (
            "--num-experts 4 --moe-router-topk 1 --ffn-hidden-size 500 --moe-shared-expert-intermediate-size 900",
            {"experts": Experts(num_experts=4, num_chosen=1, ffn_size=500, num_shared=2)},
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
        ("ARGS=(--a 1\n --b)", "ARGS=(--a 1 --b"),
        ("echo don't\nrun --a 1 # --b", "echo don t run --a 1"),
    ],
)
def test_scripts_say_flags(script: str, words: str) -> None:
    assert " ".join(script_words(script)).split() == words.split()


def test_yaml_says_flags() -> None:
    text = "- --a: 1 # one\n- 'b_c': \"x\"\n- section:\n    d: True\n    e: ~\n    f: False\n    g: [h: 2]\n"
    assert yaml_words(text) == ["--a", "1", "--b-c", "x", "--d", "--h", "2"]
    # What contains itself is read once.
    assert yaml_words("&all\na: 1\nb: *all\n") == ["--a", "1"]
    with refused("not-yaml"):
        yaml_words("a: [")


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


def test_padding_and_experts_of_flags_count_something() -> None:
    with refused("megatron-flag-refused", "--padded-vocab-size: 0", ">= 1"):
        read_megatron(f"{FLAGS} --padded-vocab-size 0")
    none = "--num-layers-per-virtual-pipeline-stage 0 --recompute-num-layers 0 --recompute-granularity full"
    imported = read_megatron(f"{FLAGS} {none} --num-experts 4 --moe-shared-expert-intermediate-size 0")
    assert imported.shape is not None
    assert imported.shape.experts == Experts(num_experts=4, num_chosen=2, ffn_size=3072)
    assert "pipeline.virtual_stages" not in imported.settings


def test_heads_of_flags_divide_the_hidden_size_or_say_theirs() -> None:
    with refused("heads-divide-hidden", "7 heads", "768", "--kv-channels"):
        read_megatron(f"{FLAGS} --num-attention-heads 7")
    shape = read_megatron(f"{FLAGS} --num-attention-heads 7 --kv-channels 64").shape
    assert shape is not None
    assert (shape.num_heads, shape.head_dim) == (7, 64)


@pytest.mark.parametrize("value", [-1, 0.5, "x", True, [1], {"of": 1}])
@pytest.mark.parametrize(
    "key",
    [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "intermediate_size", "max_position_embeddings", "num_local_experts", "num_experts_per_tok",
        "moe_intermediate_size", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
    ],
)  # fmt: skip
def test_a_size_of_a_model_that_is_none_is_refused(key: str, value: object) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    many = ("n_shared", "shared", "first", "max_position", "num_local")
    of_layers = ("num_experts_per", "moe_")  # other readers take 0, and a list
    least = 0 if key.startswith(many) or (key.startswith(of_layers) and not isinstance(value, list)) else 1
    with refused("import-integer", f"c.json: {key}={value!r}", f">= {least}"):
        source_of(SIZES | {"intermediate_size": 2048} | experts | {key: value}, "c.json")


def test_one_number_for_each_layer_is_read_where_all_are_equal() -> None:
    experts = {"intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2}
    one, each = (source_of(SIZES | experts | {"moe_intermediate_size": size}, "c") for size in (512, [512, 512]))
    assert one.shape == each.shape
    with refused("import-integer", "c: moe_intermediate_size=[512, 256]"):
        source_of(SIZES | experts | {"moe_intermediate_size": [512, 256]}, "c")


def test_layers_without_experts_are_a_list_and_a_ratio_a_number() -> None:
    experts = {"intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2}
    with refused("mlp-only-layers", "c: mlp_only_layers=3"):
        source_of(SIZES | experts | {"mlp_only_layers": 3}, "c")
    with refused("import-integer", "c: expansion_ratio='four'"):
        source_of(SIZES | {"expansion_ratio": "four"}, "c")
