"""A row in another reasonable form reads as its plain form does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_eval.cases import Case, read_case
from planner_eval.forms import usual_form
from planner_eval.rows import tidied

LLAMA_8B = {
    "name": "Llama-3.1-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
    "seq": 4096, "tied_embeddings": False,
}  # fmt: skip
MIXTRAL = LLAMA_8B | {"name": "Mixtral", "vocab": 32000, "moe": {"experts": 8, "top_k": 2, "moe_ffn": 14336}}
OF_HUGGING_FACE = {
    "name": "Llama-3.1-8B", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_seq_length": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
EIGHT = {"gpu": "H100-SXM5-80GB", "num_gpus": 8}
MEGATRON = {
    "framework": "Megatron-LM", "tp": 2, "pp": 2, "ep": 2, "zero_stage": 1, "micro_batch": 1, "global_batch": 64,
    "precision": "bf16", "recompute": "selective modules: moe_act layernorm", "sequence_parallel": True,
}  # fmt: skip
FLAGS = """--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --expert-model-parallel-size 2 \\
    --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 64 --bf16 --sequence-parallel \\
    --recompute-granularity selective --recompute-modules moe_act layernorm"""
TUNED = {
    "framework": "TRL", "zero_stage": 3, "micro_batch": 2, "grad_accum": 8, "global_batch": 128, "precision": "bf16",
    "recompute": "full", "lora": {"rank": 16, "targets": "q_proj,v_proj"},
}  # fmt: skip


def row(model: Any, hardware: Any, parallel: Any, **others: Any) -> dict[str, Any]:
    return {"id": "x", "model": model, "hardware": hardware, "parallel": parallel, **others}


def without(section: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


PLAIN_MEGATRON, PLAIN_TUNED = row(MIXTRAL, EIGHT, MEGATRON), row(LLAMA_8B, EIGHT, TUNED)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Megatron's flags in a string": (
        PLAIN_MEGATRON,
        row(MIXTRAL, EIGHT, {"framework": "Megatron-LM", "flags": FLAGS}),
    ),
    "its flags in a list": (
        PLAIN_MEGATRON,
        row(MIXTRAL, EIGHT, {"framework": "Megatron-LM", "args": FLAGS.replace("\\\n", " ").split()}),
    ),
    "its flags alone": (PLAIN_MEGATRON, row(MIXTRAL, EIGHT, FLAGS, framework="Megatron-LM")),
    "its sizes among the flags": (
        PLAIN_MEGATRON,
        row(without(MIXTRAL, "seq"), EIGHT, {"framework": "Megatron-LM", "flags": f"{FLAGS} --seq-length 4096"}),
    ),
    "its arguments as keys": (
        PLAIN_MEGATRON,
        row(
            MIXTRAL,
            EIGHT,
            {
                "framework": "Megatron-LM", "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                "expert_model_parallel_size": 2, "use_distributed_optimizer": True, "micro_batch_size": 1,
                "global_batch_size": 64, "bf16": True, "sequence_parallel": True,
                "recompute_granularity": "selective", "recompute_modules": ["moe_act", "layernorm"],
            },
        ),
    ),
    "heads of a table": (
        PLAIN_MEGATRON,
        row(
            MIXTRAL,
            EIGHT,
            without(MEGATRON, "tp", "pp", "ep", "micro_batch", "global_batch")
            | {"TP": 2, "PP": 2, "EP": 2, "MBS": 1, "GBS": 64},
        ),
    ),
    "nested parts": (
        PLAIN_MEGATRON,
        row(
            MIXTRAL,
            EIGHT,
            without(MEGATRON, "tp", "pp", "ep", "micro_batch", "global_batch")
            | {"parallelism": {"tp": 2, "pp": 2, "ep": 2}, "batch": {"micro_batch": 1, "global_batch": 64}},
        ),
    ),
    "sections of other names": (
        PLAIN_TUNED,
        row(
            LLAMA_8B,
            EIGHT,
            without(TUNED, "micro_batch", "grad_accum", "global_batch", "recompute"),
            training={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "global_batch_size": 128,
                      "gradient_checkpointing": True},
        ),
    ),
    "experts as Hugging Face's config has them": (
        PLAIN_MEGATRON,
        row(
            without(MIXTRAL, "moe")
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 14336},
            EIGHT,
            MEGATRON,
        ),
    ),
    "Hugging Face's names of sizes": (PLAIN_TUNED, row(OF_HUGGING_FACE, EIGHT, TUNED)),
    "zero: 3": (PLAIN_TUNED, row(LLAMA_8B, EIGHT, without(TUNED, "zero_stage") | {"zero": 3})),
    "zero in words": (PLAIN_TUNED, row(LLAMA_8B, EIGHT, TUNED | {"zero_stage": "ZeRO-3"})),
    "FSDP's strategy": (
        PLAIN_TUNED,
        row(LLAMA_8B, EIGHT, without(TUNED, "zero_stage") | {"fsdp": "full_shard auto_wrap"}),
    ),
    "FSDP on": (PLAIN_TUNED, row(LLAMA_8B, EIGHT, without(TUNED, "zero_stage") | {"fsdp": True})),
    "FSDP's version": (PLAIN_TUNED, row(LLAMA_8B, EIGHT, without(TUNED, "zero_stage") | {"fsdp_version": 1})),
    "lora: {r}": (
        PLAIN_TUNED,
        row(LLAMA_8B, EIGHT, TUNED | {"lora": {"r": 16, "target_modules": ["q_proj", "v_proj"]}}),
    ),
    "lora_rank": (
        PLAIN_TUNED,
        row(LLAMA_8B, EIGHT, without(TUNED, "lora") | {"lora_rank": 16, "lora_targets": "q_proj,v_proj"}),
    ),
    "peft_config": (
        PLAIN_TUNED,
        row(
            LLAMA_8B,
            EIGHT,
            without(TUNED, "lora") | {"peft_config": {"r": 16, "target_modules": ["q_proj", "v_proj"]}},
        ),
    ),
    "a word for the dtype": (PLAIN_TUNED, row(LLAMA_8B, EIGHT, without(TUNED, "precision") | {"dtype": "bfloat16"})),
    "checkpointing on": (
        PLAIN_TUNED,
        row(LLAMA_8B, EIGHT, without(TUNED, "recompute") | {"gradient_checkpointing": True}),
    ),
    "numbers as words": (
        PLAIN_TUNED,
        row(LLAMA_8B, EIGHT | {"num_gpus": "8"}, TUNED | {"micro_batch": "2", "global_batch": "128"}),
    ),
}  # fmt: skip
FORMS |= {
    # Without the steps of accumulation, from which it would follow.
    f"micro-batch as {name}": (
        row(LLAMA_8B, EIGHT, without(TUNED, "grad_accum")),
        row(LLAMA_8B, EIGHT, without(TUNED, "grad_accum", "micro_batch") | {name: 2}),
    )
    for name in (
        *("mbs", "micro_bs", "micro_batch_size", "per_device_train_batch_size", "per_device_batch_size", "batch_size"),
        *("batch_size_per_gpu", "train_micro_batch_size_per_gpu", "device_batch_size", "local_batch_size"),
    )
}
FORMS |= {
    f"sequence as {name}": (PLAIN_TUNED, row(without(LLAMA_8B, "seq") | {name: 4096}, EIGHT, TUNED))
    for name in ("seq_len", "seq_length", "sequence_len", "max_seq_len", "max_length", "context_length", "cutoff_len")
}
DEVICES: dict[str, tuple[str, int, Any]] = {
    str(hardware): (gpu, num_gpus, hardware)
    for gpu, num_gpus, hardware in (
        ("h100", 8, "8xH100-80GB-SXM"),
        ("h100", 8, {"gpu": "8x H100 SXM5 80GB"}),
        ("h100", 16, "2x8 H100"),
        ("h100", 16, "H100-SXM5-80GB x 16"),
        ("h100", 64, {"gpu": "NVIDIA H100 80GB HBM3", "nodes": 8, "gpus_per_node": 8}),
        ("h100", 16, {"gpus": 16, "gpu_type": "H100"}),
        ("h100", 8, {"gpus": "8x H100"}),
        ("mi300x", 8, "MI300X x 8"),
        ("mi300x", 8, {"accelerator": "AMD Instinct MI300X", "count": 8}),
        ("rtx-4090", 1, {"gpu": "NVIDIA GeForce RTX 4090", "num_gpus": 1}),
        ("rtx-4090", 1, "1 x RTX 4090"),
        ("rtx-4090", 4, {"device": "GeForce RTX 4090", "num_devices": 4}),
        ("a100-40", 8, {"gpu_name": "NVIDIA A100-SXM4-40GB", "world_size": 8}),
        ("a100-80", 4, "4x NVIDIA A100-SXM4-80GB"),
        ("rtx-5090", 2, {"gpu": "2x NVIDIA RTX 5090"}),
        ("gb200", 72, {"gpu": "GB200 NVL72", "num_gpus": 72}),
        ("l40s", 8, {"gpu": "NVIDIA L40S (8 GPUs)"}),
    )
}


def read(written: Mapping[str, Any]) -> Case:
    case = read_case(written)
    assert case.refusal is None, case.refusal
    return dataclasses.replace(case, guesses=())


@pytest.mark.parametrize("name", sorted(FORMS))
def test_another_form_reads_as_the_plain_one(name: str) -> None:
    plain, other = FORMS[name]
    assert read(other) == read(plain)


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_devices_are_read_in_any_order_of_words(name: str) -> None:
    gpu, num_gpus, hardware = DEVICES[name]
    job = read(row(LLAMA_8B, hardware, {"zero_stage": 3, "global_batch": 8 * num_gpus})).job
    assert job is not None
    assert (job.cluster.gpu.name, job.cluster.num_gpus) == (gpu, num_gpus)


def test_deepspeeds_config_is_read_where_a_row_holds_it() -> None:
    config = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
    }
    found = read(row(LLAMA_8B, EIGHT, {"framework": "HF Trainer", "deepspeed": config, "recompute": "full"})).config
    assert found is not None
    assert (found.zero.stage, found.batch.micro_size, found.batch.accumulation) == (2, 4, 2)
    assert (found.tiers.optimizer, found.tiers.params, found.precision.param) == ("host", "device", "bf16")


NAMES: dict[str, dict[str, list[str]]] = {
    "model": {
        "layers": ["layers", "num_layers", "num_hidden_layers", "n_layer"],
        "hidden": ["hidden", "hidden_size", "d_model", "n_embd"],
        "kv_heads": ["kv_heads", "num_key_value_heads", "num_query_groups"],
        "ffn": ["ffn", "intermediate_size", "ffn_hidden_size"],
        "seq": ["seq", "seq_len", "max_seq_length", "sequence_length"],
    },
    "hardware": {"gpu": ["gpu", "gpu_type", "accelerator", "GPU"], "num_gpus": ["num_gpus", "n_gpus", "world_size"]},
    "parallel": {
        "micro_batch": ["micro_batch", "mbs", "micro-batch-size", "per_device_train_batch_size"],
        "global_batch": ["global_batch", "GBS", "total_batch_size"],
        "grad_accum": ["grad_accum", "gas", "gradient_accumulation_steps"],
        "zero_stage": ["zero_stage", "zero"],
        "recompute": ["recompute", "activation_checkpointing", "gradient_checkpointing"],
        "precision": ["precision", "dtype", "torch_dtype"],
    },
}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_of_a_keys_names_reads_as_the_usual_one(data: st.DataObject) -> None:
    # Of three figures of the batch two say all; each pair is drawn.
    left_out = data.draw(st.sampled_from(["micro_batch", "global_batch", "grad_accum"]))
    plain = row(LLAMA_8B, EIGHT, without(TUNED, left_out))
    written: dict[str, Any] = {}
    for section, names in NAMES.items():
        items = plain[section].items()
        written[section] = {
            data.draw(st.sampled_from(names[key])) if key in names else key: each for key, each in items
        }
    assert read(plain | written) == read(plain)


@pytest.mark.parametrize(
    ("written", "mode"),
    [
        ("w/o recompute", "none"),
        ("not used", "none"),
        ("every layer", "full"),
        ("per-layer", "full"),
        ("nothing_saveable", "full"),
        ("save_nothing", "full"),
        ("dots_saveable", "selective"),
        ("attention", "selective"),
        ("GC", "full"),
    ],
)
def test_recomputation_in_words(written: str, mode: str) -> None:
    found = read(row(LLAMA_8B, EIGHT, TUNED | {"recompute": written})).config
    assert found is not None
    assert found.recompute.mode == mode


@pytest.mark.parametrize(
    ("written", "stage", "tiers"),
    [
        ("cpu", 2, ("device", "host", "host")),
        ("ZeRO-Offload", 2, ("device", "host", "host")),
        ("FSDP cpu_offload", 3, ("host", "host", "host")),
        (True, 3, ("host", "host", "host")),
        ("nvme", 3, ("nvme", "host", "nvme")),
        ("ds_z3_offload_config.json", 3, ("host", "host", "host")),
        ("activation offloading", 3, ("device", "device", "device")),
        ("no", 3, ("device", "device", "device")),
    ],
)
def test_offload_that_names_no_state_takes_what_the_stage_shards(
    written: Any, stage: int, tiers: tuple[str, str, str]
) -> None:
    found = read(row(LLAMA_8B, EIGHT, TUNED | {"zero_stage": stage, "offload": written})).config
    assert found is not None
    assert (found.tiers.params, found.tiers.grads, found.tiers.optimizer) == tiers


ATTENTION, MLP = ("k_proj", "o_proj", "q_proj", "v_proj"), ("down_proj", "gate_proj", "up_proj")


@pytest.mark.parametrize(
    ("written", "targets"),
    [
        ("attention", ATTENTION),
        ("attn+mlp", (*MLP[:2], *ATTENTION[:3], "up_proj", "v_proj")),
        ("qkvo", ATTENTION),
        ("qv", ("q_proj", "v_proj")),
        ("wq,wk,wv,wo", ATTENTION),
        ("linear_qkv, linear_proj", ATTENTION),
        ("linear_fc1, linear_fc2", MLP),
        ("self_attn q,v", ("q_proj", "v_proj")),
        ("all", ("all-linear",)),
    ],
)
def test_targets_of_adapters_in_other_codes_names(written: str, targets: tuple[str, ...]) -> None:
    found = read(row(LLAMA_8B, EIGHT, TUNED | {"lora": {"rank": 16, "targets": written}})).config
    assert found is not None
    assert found.lora.targets == targets


def test_torchtunes_switch_adapts_the_feed_forward_too() -> None:
    said = {"lora_rank": 8, "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True}
    found = read(row(LLAMA_8B, EIGHT, without(TUNED, "lora") | said)).config
    assert found is not None
    assert found.lora.targets == (*MLP[:2], "q_proj", "up_proj", "v_proj")


def test_a_fraction_of_the_optimizer_is_read() -> None:
    found = read(row(LLAMA_8B, EIGHT, TUNED | {"offload": "0.8 of the optimizer"})).config
    assert found is not None
    assert found.tiers.optimizer_on_device == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ({"step_time_ms": 250}, "iteration_time_s", 0.25),
        ({"train_steps_per_second": 0.5}, "iteration_time_s", 2.0),
        ({"hours": 1, "steps": 100}, "iteration_time_s", 36.0),
        ({"samples_per_s": 3}, "samples_per_s_total", 3),
        ({"tokens_per_second": 1000}, "tokens_per_s_total", 1000),
        ({"TGS": 800}, "tokens_per_s_per_gpu", 800),
        ({"mfu": 41.0}, "mfu", 0.41),
        ({"memory_mib": 2048}, "memory_gib_per_gpu", 2.0),
        ({"step_time_s": 3, "iteration_time_s": 2}, "iteration_time_s", 2),
    ],
)
def test_figures_are_read_in_the_units_that_people_write(written: dict[str, float], key: str, value: float) -> None:
    assert tidied(row(LLAMA_8B, EIGHT, TUNED, outputs=written))["outputs"][key] == pytest.approx(value)


def test_a_row_in_its_usual_form_stays_as_it_is() -> None:
    assert (
        tidied(usual_form(PLAIN_MEGATRON))
        == tidied(PLAIN_MEGATRON)
        == usual_form(tidied(PLAIN_MEGATRON)) | {"outputs": {}}
    )
