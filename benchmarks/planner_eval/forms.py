"""Put what a row writes in another reasonable form under the keys that are read: names, flags, sections, devices.

People write one run in many ways: as Megatron's flags, as DeepSpeed's config, with the names of Hugging Face's config,
or with its devices in one string. A key that is read already stays as it is.

>>> row = {"hardware": "8xH100-80GB-SXM", "parallel": "--tensor-model-parallel-size 2 --bf16 --micro-batch-size 1"}
>>> found = usual_form(row)
>>> found["hardware"]["num_gpus"], [found["parallel"][key] for key in ("tp", "micro_batch", "precision")]
(8, [2, 1, 'bf16'])
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

_SECTIONS: Final = ("model", "hardware", "parallel")
_OTHER_SECTIONS: Final = ("training", "train", "batch", "config", "settings", "parallelism", "run", "data", "layout")
_READ_APART: Final = frozenset({"model", "hardware", "parallel", "outputs", "source", "moe", "lora", "op_times_ms"})
_FLAG_KEYS: Final = ("flags", "args", "arguments", "command", "cmd", "extra_args", "cli", "script")

# Other names of a key. Those of a model are Hugging Face's and Megatron's, those of a layout Megatron's, torchtitan's,
# DeepSpeed's and those that tables have in their heads.
_MODEL: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "name": ("model_name", "model_name_or_path", "base_model", "model_id"),
        "layers": ("num_layers", "num_hidden_layers", "n_layers", "n_layer"),
        "hidden": ("hidden_size", "d_model", "n_embd", "hidden_dim"),
        "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
        "kv_heads": ("num_key_value_heads", "num_kv_heads", "num_query_groups", "n_kv_heads"),
        "head_dim": ("kv_channels", "d_head"),
        "ffn": ("intermediate_size", "ffn_hidden_size", "ffn_size", "ffn_dim", "d_ff"),
        "vocab": ("vocab_size", "padded_vocab_size"),
        "tied_embeddings": ("tie_word_embeddings", "tie_embeddings"),
        "seq": (
            *("seq_len", "seq_length", "sequence_length", "sequence_len", "max_seq_len", "max_seq_length"),
            *("max_length", "max_target_length", "context_length", "cutoff_len", "block_size", "encoder_seq_length"),
        ),
    }
)
_MOE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "experts": ("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts"),
        "top_k": ("num_experts_per_tok", "moe_router_topk", "num_chosen", "router_topk", "active_experts"),
        "moe_ffn": ("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn", "expert_size"),
        "shared": ("n_shared_experts", "num_shared_experts"),
        "first_dense_layers": ("first_k_dense_replace", "num_dense_layers"),
    }
)
_HARDWARE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "gpu": ("gpu_type", "gpu_name", "gpu_model", "accelerator", "device", "gpus"),
        "num_gpus": ("n_gpus", "ngpus", "gpu_count", "num_devices", "world_size", "total_gpus", "gpus", "count"),
        "gpus_per_node": ("nproc_per_node", "gpus_per_host", "devices_per_node", "num_gpus_per_node"),
    }
)
_NODES: Final = ("nodes", "num_nodes", "nnodes", "hosts")
_PARALLEL: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "tp": (
            *("tensor_parallel", "tensor_parallel_size", "tp_size", "tensor_model_parallel_size"),
            "tensor_parallel_degree",
        ),
        "pp": (
            *("pipeline_parallel", "pipeline_parallel_size", "pp_size", "pipeline_model_parallel_size"),
            "pipeline_parallel_degree",
        ),
        "vpp": (
            *("vp", "vp_size", "virtual_pipeline_parallel_size", "virtual_pipeline_model_parallel_size"),
            "num_virtual_stages_per_pipeline_rank",
        ),
        "cp": ("context_parallel", "context_parallel_size", "cp_size", "context_parallel_degree"),
        "ep": (
            *("expert_parallel", "expert_parallel_size", "ep_size", "expert_model_parallel_size"),
            "expert_parallel_degree",
        ),
        "etp": ("expert_tensor_parallel_size",),
        "dp": ("data_parallel", "data_parallel_size", "dp_size"),
        "zero_stage": ("zero", "zero_level"),
        "micro_batch": (
            *("mbs", "micro_bs", "micro_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size_per_gpu"),
            *("per_device_train_batch_size", "per_device_batch_size", "per_gpu_batch_size", "batch_size_per_gpu"),
            *("batch_size_per_device", "device_batch_size", "local_batch_size", "batch_size"),
        ),
        "global_batch": ("gbs", "global_bs", "global_batch_size", "total_batch_size", "train_batch_size"),
        "grad_accum": (
            *("ga", "gas", "gradient_accumulation_steps", "gradient_accumulation", "grad_acc", "accumulation_steps"),
            *("grad_accum_steps", "accumulate_grad_batches"),
        ),
        "recompute": (
            *("activation_checkpointing", "gradient_checkpointing", "activation_recompute", "recomputation"),
            *("use_gradient_checkpointing", "remat_policy", "remat", "checkpoint_activations", "ac"),
        ),
        "precision": ("compute_dtype", "param_dtype", "torch_dtype", "dtype", "mixed_precision"),
        "cuda_graphs": ("cuda_graph", "enable_cuda_graph", "external_cuda_graph"),
        "lora": ("lora_config", "peft_config"),
        "interconnect": ("network",),
    }
)
# Of what was measured: the key, and by what a value of that name is multiplied, or -1 where it is one over the key.
_OUTPUTS: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("step_time_s", "step_time", "iteration_time", "s_per_it", "s_per_step"), ("iteration_time_s", 1.0)
        ),
        **dict.fromkeys(("step_time_ms", "iteration_time_ms", "ms_per_step"), ("iteration_time_s", 1e-3)),
        **dict.fromkeys(("it_per_s", "steps_per_s", "train_steps_per_second"), ("iteration_time_s", -1.0)),
        **dict.fromkeys(("tokens_per_s", "tokens_per_second", "tok_per_s"), ("tokens_per_s_total", 1.0)),
        **dict.fromkeys(("tokens_per_second_per_gpu", "tokens_per_gpu_per_s", "tgs"), ("tokens_per_s_per_gpu", 1.0)),
        **dict.fromkeys(("samples_per_s", "train_samples_per_second"), ("samples_per_s_total", 1.0)),
        **dict.fromkeys(("tflops", "tflops_per_s_per_gpu"), ("tflops_per_gpu", 1.0)),
        **dict.fromkeys(("peak_memory_gib", "memory_gib", "peak_memory_gib_per_gpu"), ("memory_gib_per_gpu", 1.0)),
        **dict.fromkeys(("peak_memory_gb", "memory_gb", "memory_gb_per_gpu"), ("memory_gib_per_gpu", 1.0)),
        **dict.fromkeys(("peak_memory_mib", "memory_mib"), ("memory_gib_per_gpu", 1 / 1024)),
    }
)
_SECONDS: Final = MappingProxyType(
    {"seconds": 1.0, "runtime_s": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}
)
_STEPS: Final = ("num_steps", "steps", "max_steps", "iterations")
_STAGE_WORDS: Final = re.compile(r"(?:zero|stage|\bz)[ _-]*([0-3])\b")
# A count before or after a device's name: `8x`, `2x8`, `x 16`, but not that of `RTX 4090`.
_BEFORE: Final = re.compile(
    r"^\s*(?:(\d+)\s*(?:nodes?\s*)?[x×*]\s*)?(\d+)\s*[x×*]?\s+(?=[a-z])|^\s*(\d+)[x×*]\s*(?=[a-z])", re.I
)
_AFTER: Final = re.compile(r"(?<![a-z])[x×*]\s*(\d+)\s*(?:gpus?)?\s*$|\(\s*(\d+)\s*gpus?\s*\)\s*$", re.I)


def usual_outputs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured under the keys and in the units that are read.

    >>> usual_outputs({"it_per_s": 4, "mfu": 41.5})
    {'mfu': 0.415, 'iteration_time_s': 0.25}
    >>> usual_outputs({"hours": 2, "num_steps": 1000})["iteration_time_s"]
    7.2
    """
    found = {key: each for key, each in outputs.items() if str(key).lower() not in _OUTPUTS}
    for name, value in outputs.items():
        key, factor = _OUTPUTS.get(str(name).lower(), ("", 1.0))
        if key and found.get(key) is None and _is_number(value):
            found[key] = 1 / value if factor < 0 else value if factor == 1 else factor * value
    for share in ("mfu", "hfu"):  # in per cent
        if _is_number(found.get(share)) and found[share] > 1:
            found[share] = found[share] / 100
    steps = next((outputs[name] for name in _STEPS if _is_number(outputs.get(name))), None)
    unit = next((name for name in _SECONDS if _is_number(outputs.get(name))), None)
    if steps and unit and found.get("iteration_time_s") is None:
        found["iteration_time_s"] = _SECONDS[unit] * outputs[unit] / steps
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def usual_form(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with what it says in other forms under the keys that are read."""
    found = dict(row)
    hardware, model, parallel = (found.get(name) for name in ("hardware", "model", "parallel"))
    found["hardware"] = {"gpu": hardware} if isinstance(hardware, str) and hardware else hardware
    found["model"] = {"name": model} if isinstance(model, str) and model else model
    found["parallel"] = dict(_flags(parallel)) if isinstance(parallel, str) and "--" in parallel else parallel
    if isinstance(found.get("outputs"), Mapping):
        found["outputs"] = usual_outputs(found["outputs"])
    sections = {name: _flat(found[name]) for name in _SECTIONS if isinstance(found.get(name), Mapping)}
    if len(sections) < 2:
        return found
    for name in _SECTIONS:
        sections.setdefault(name, {})
    for name in _OTHER_SECTIONS:
        if isinstance(row.get(name), Mapping):
            sections["parallel"] = _flat(row[name]) | sections["parallel"]
    p = sections["parallel"]
    for key in _FLAG_KEYS:
        if isinstance(p.get(key), str | list) and "--" in str(p[key]):
            p |= {name: value for name, value in _flags(p.pop(key)) if p.get(name) is None}
    places = [sections["model"], sections["hardware"], p, row]
    _rename(sections["model"], _MODEL, [places[0], p, row])
    _say_experts(sections["model"], p)
    _rename(sections["hardware"], _HARDWARE, places[1:])
    _say_devices(sections["hardware"], p)
    _rename(p, _PARALLEL, [p])
    _say_stage(p)
    _say_precision(p)
    return found | sections


def _rename(target: dict[str, Any], names: Mapping[str, tuple[str, ...]], places: list[Any]) -> None:
    """Fill the keys of a section that are empty with the first value that another name has, where it can be theirs."""
    for key, others in names.items():
        if target.get(key) not in (None, ""):
            continue
        for place in places:
            other = next((name for name in (key, *others) if _is_of(key, place, name)), None)
            if other is not None:
                target[key] = place[other]
                if place is target and other != key:
                    del place[other]
                break


def _is_of(key: str, place: Mapping[str, Any], name: str) -> bool:
    value = place.get(name)
    if value in (None, "") or (name == key and name in _READ_APART and key != "lora"):
        return False
    if key == "lora":
        return isinstance(value, Mapping)
    if name == "gpus" or key == "gpu":  # a device or a number of them
        return isinstance(value, str) and not value.strip().isdigit() if key == "gpu" else not _is_word(value)
    return not isinstance(value, Mapping)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and not value.strip().isdigit()


def _flat(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section with plain keys, and what its parts say beside its own."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        key = re.sub(r"[\s-]+", "_", str(name).strip())
        key = key.lower() if key.lower() in _KNOWN else key
        if isinstance(value, Mapping) and key in (
            *_OTHER_SECTIONS,
            *_FLAG_KEYS,
            "parallel",
            "deepspeed",
            "fsdp_config",
        ):
            found |= {each: one for each, one in _parts(key, value).items() if each not in section}
        else:
            found[key] = value
    return found


def _parts(key: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a part of a section says: DeepSpeed's config its stage, batches, dtype and offload."""
    if key != "deepspeed":
        return _flat(value)
    zero = value.get("zero_optimization") or {}
    found = {name: each for name, each in value.items() if not isinstance(each, Mapping)}
    found |= {"deepspeed": "DeepSpeed", "zero_stage": zero.get("stage", value.get("stage"))}
    tiers = {"offload_optimizer": "optimizer", "offload_param": "params"}
    offload = [word for name, word in tiers.items() if (zero.get(name) or {}).get("device") in ("cpu", "nvme")]
    is_nvme = any((zero.get(name) or {}).get("device") == "nvme" for name in tiers)
    if offload:
        found["offload"] = ", ".join(["nvme"] * is_nvme + offload)
    for dtype in ("bf16", "fp16"):
        if (value.get(dtype) or {}).get("enabled") is True:
            found["precision"] = dtype
    return found


def _flags(written: str | list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what flags say under the keys that are read; a flag without a value is true.

    >>> dict(_flags("--num-layers 32 --recompute-activations --no-bias-gelu-fusion"))
    {'num_layers': 32, 'recompute': 'selective'}
    """
    text = " ".join(map(str, written)) if isinstance(written, list) else written
    words = shlex.split(text.replace("\\\n", " "), comments=False, posix=True)
    for index, word in enumerate(words):
        if not word.startswith("--") or word.startswith("--no-"):
            continue
        name, _, value = word.removeprefix("--").partition("=")
        values = [value] if value else list(_until_flag(words[index + 1 :]))
        key = name.replace("-", "_").lower()
        if key == "recompute_activations":
            yield "recompute", "selective"
            continue
        known = next((usual for usual, others in _PARALLEL.items() if key == usual or key in others), key)
        typed: Any = True if not values else " ".join(values)
        yield known, int(typed) if isinstance(typed, str) and typed.isdigit() else typed


def _until_flag(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.startswith("--"):
            return
        yield word


def _say_experts(model: dict[str, Any], p: Mapping[str, Any]) -> None:
    """Gather what a model says of its experts under `moe`."""
    written = model.get("moe")
    moe = dict(written) if isinstance(written, Mapping) else {}
    _rename(moe, _MOE, [moe, {key: each for key, each in model.items() if key != "moe"}, p])
    if moe.get("experts") and written is not False:
        model["moe"] = moe


def _say_devices(hardware: dict[str, Any], p: Mapping[str, Any]) -> None:
    """Take the number of devices out of their name, or from the nodes."""
    gpu = hardware.get("gpu")
    if isinstance(gpu, str) and hardware.get("num_gpus") in (None, ""):
        before, after = _BEFORE.search(gpu), _AFTER.search(gpu)
        if before or after:
            counts = [int(each) for match in (before, after) if match for each in match.groups() if each]
            hardware["num_gpus"] = counts[0] * (counts[1] if before and len(counts) > 1 else 1)
            hardware["gpu"] = _AFTER.sub("", gpu[before.end() :] if before else gpu).strip()
    written = hardware.get("num_gpus")
    if isinstance(written, str) and (match := re.fullmatch(r"\s*(\d+)\s*[x×*]\s*(\d+)\s*", written)):
        hardware["num_gpus"] = int(match.group(1)) * int(match.group(2))
        hardware.setdefault("gpus_per_node", int(match.group(2)))
    nodes = next((place[name] for place in (hardware, p) for name in _NODES if place.get(name)), None)
    if hardware.get("num_gpus") in (None, "") and str(nodes).isdigit():
        hardware["num_gpus"] = int(str(nodes)) * int(hardware.get("gpus_per_node") or 8)


def _say_stage(p: dict[str, Any]) -> None:
    """Read a stage of ZeRO in words, and switches that mean one."""
    written = p.get("zero_stage")
    if isinstance(written, str) and not written.strip().isdigit():
        match = _STAGE_WORDS.search(written.lower())
        p["zero_stage"] = int(match.group(1)) if match else written
    if p.get("fsdp") is True:
        p["fsdp"] = "FSDP"
    elif _is_word(p.get("fsdp")) and "fsdp" not in str(p["fsdp"]).lower():
        p["fsdp"] = f"FSDP {p['fsdp']}".replace("_", " ")
    if p.get("fsdp_version") and not p.get("fsdp") and not p.get("sharding"):
        p["sharding"] = f"FSDP{p['fsdp_version']}"
    if p.get("use_distributed_optimizer") is True and p.get("zero_stage") is None:
        p["zero_stage"] = 1


def _say_precision(p: dict[str, Any]) -> None:
    """Read switches of dtypes; Hugging Face's `bf16` is autocast, which `tools` says by the code."""
    if p.get("precision"):
        return
    is_on = {name: str(p.get(name)).lower() in ("true", "1", "auto") for name in ("bf16", "fp16", "fp8")}
    narrow = p.get("fp8_format") or is_on["fp8"]
    name = next((each for each in ("bf16", "fp16") if is_on[each]), "bf16" if narrow else None)
    if name:
        p["precision"] = (
            f"{name} with fp8 {'' if p.get('fp8_format') in (None, True) else p['fp8_format']}".strip()
            if narrow
            else name
        )


_KNOWN: Final = frozenset(
    each for names in (_MODEL, _MOE, _HARDWARE, _PARALLEL) for key, others in names.items() for each in (key, *others)
)
