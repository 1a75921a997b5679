"""Put under the keys that are read what a row says in its tool's own words: its code, adapters, sharding and switches.

A row that names no `framework` may still name its tool elsewhere. What a tool does where a row is silent is the default
of its public code.

>>> row = {"group": "ms_swift_docs", "parallel": {"train_type": "lora", "deepspeed": "zero2"}}
>>> row["hardware"] = {"num_gpus": 8}
>>> said = in_our_words(row)["parallel"]
>>> said["framework"], said["zero_stage"], said["recompute"], said["lora"]["rank"], said["lora"]["targets"]
('ms-swift, DeepSpeed', 2, 'full', 8, 'all-linear')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from planner_eval.rows import flag, number


@dataclass(frozen=True, kw_only=True)
class Tool:
    """State the defaults of a tool's public code.

    Attributes:
        marks: a pattern of its name, in lower case, with blanks for punctuation.
        framework: as `codes.code_of` reads it.
        silent: values of keys of `parallel` that a row leaves out.
        lora: the same of its adapters.
        shards: the ZeRO stage of several ranks that share their samples.
        engine: DeepSpeed where that shards by default, "" where others do, None where the code cannot be of it.
        is_early: whether rows of the older tables, which are read without a code, were made by it too.
    """

    marks: str
    framework: str
    silent: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    shards: int | None = None
    engine: str | None = None
    is_early: bool = False


# ms-swift: swift/arguments/tuner_args.py, swift/megatron/arguments/megatron_args.py. TRL: trl/trainer/base_config.py,
# trl/trainer/model_config.py. torchtune: recipes/configs. Qwen: finetune.py and finetune/*.sh. prime-rl: setup_fsdp of
# trainer/model.py and configs/trainer.py. MaxText: configs/base.yml. LLaMA-Factory: hparams/finetuning_args.py.
_FULL: Final = MappingProxyType({"recompute": "full"})
_ALL: Final = "all-linear"
_TOOLS: Final = (
    Tool(
        marks=r"megatron swift",
        framework="Megatron-SWIFT (Megatron-LM)",
        silent={"recompute": "selective modules: core_attn"},
        lora={"rank": 8, "targets": _ALL, "dropout": 0.05},
        shards=1,
    ),
    Tool(
        marks=r"(ms|model ?scope)? ?swift",
        framework="ms-swift",
        engine="DeepSpeed",
        silent=_FULL,
        lora={"rank": 8, "targets": _ALL, "dropout": 0.05},
        shards=0,
    ),
    Tool(marks=r"unsloth", framework="unsloth", silent=_FULL, lora={"rank": 16, "targets": _ALL}, shards=0),
    Tool(marks=r"axolotl", framework="Axolotl (HF Trainer)", engine="", lora={"rank": 8, "targets": _ALL}),
    Tool(
        marks=r"llama ?factory",
        framework="LLaMA-Factory (HF Trainer)",
        silent=_FULL,
        lora={"rank": 8, "targets": _ALL},
        engine="DeepSpeed",
    ),
    Tool(marks=r"trl|sft ?trainer", framework="TRL (HF Trainer)", engine="", silent=_FULL, lora={"rank": 16}, shards=0),
    Tool(
        marks=r"torch ?tune",
        framework="torchtune",
        silent=_FULL,
        lora={"rank": 8, "targets": "q_proj,v_proj,output_proj,mlp"},
        shards=3,
    ),
    Tool(
        marks=r"prime ?rl",
        framework="prime-rl",
        silent={"compile": True, "loss": "LM head and loss in chunks of tokens, fused with lm_head"},
        lora={"rank": 16, "targets": _ALL, "base": "fp32, sharded"},
        shards=3,
    ),
    Tool(marks=r"max ?text", framework="MaxText", silent=_FULL, shards=3),
    Tool(marks=r"primus", framework="Primus (Megatron-LM)", shards=1),
    Tool(
        marks=r"qwenlm qwen|qwen readme|qwen finetune|^qwen(?! ?\d| ?moe)",
        framework="HF Trainer of 2023-12 (Qwen's finetune.py)",
        engine="DeepSpeed",
        silent=_FULL,
        lora={"rank": 64, "targets": _ALL, "dropout": 0.05},
        shards=0,
    ),
    Tool(marks=r"fsdp qlora", framework="fsdp_qlora train.py, FSDP1", lora={"rank": 64, "dropout": 0.1}),
    Tool(marks=r"peft", framework="PEFT (HF Trainer)", engine="", lora={"rank": 8}),
    Tool(marks=r"megatron moe|moe model ?zoo|model ?zoo", framework="Megatron-LM", shards=1),
    Tool(marks=r"gpu recipes", framework="NVIDIA NeMo", shards=1),
    Tool(marks=r"lit ?gpt", framework="LitGPT"),
    Tool(marks=r"fms (hf )?(acceleration|tuning)", framework="HF Trainer"),
    Tool(marks=r"torch ?titan", framework="torchtitan", shards=3, is_early=True),
    Tool(marks=r"auto ?model", framework="NeMo Automodel", shards=3, is_early=True),
    Tool(marks=r"megatron bridge|nemo", framework="NVIDIA NeMo", shards=1, is_early=True),
    Tool(marks=r"megatron( lm| core)?", framework="Megatron-LM", shards=1, is_early=True),
    Tool(
        marks=r"(hf|hugging ?face)( trainer)?|transformers|accelerate", framework="HF Trainer", engine="", is_early=True
    ),
)
_USUAL: Final = Tool(marks="hf", framework="HF Trainer", engine="")
# The older tables' tiers, and how their groups of such codes are named.
_EARLY_TIERS: Final = ("core", "bulk", "unseen")
_EARLY_GROUPS: Final = re.compile(
    r"megatron_(bridge|llama_fp8|readme_\w+)|nemo_(2407_h100_fp8|automodel_fsdp2|framework|long_sequence)|nemotron4_15b"
    r"|torchtitan|mlperf_training_logs"
)
# Other names of what a row says; the first that it has counts.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "framework": ("software", "code", "codebase", "trainer", "library", "stack", "tool", "engine"),
        "recompute": ("remat_policy", "remat", "activation_checkpointing", "gradient_checkpointing", "ac"),
        "loss": ("loss_type", "loss_impl", "cross_entropy", "cross_entropy_impl", "ce"),
        "optimizer": ("optim", "optimizer_type"),
        "attention_kernel": ("attn_impl", "attn_implementation", "attention_backend", "attn"),
        "micro_batch": ("micro_batch_size", "per_device_train_batch_size", "local_batch_size"),
        "grad_accum": ("gradient_accumulation_steps", "gradient_accumulation"),
        "global_batch": ("global_batch_size",),
        "compile": ("torch_compile",),
        "packed": ("packing", "sample_packing", "padding_free"),
        "dispatcher": ("moe_token_dispatcher_type", "moe_dispatcher", "ep_comm_backend"),
        "precision": ("dtype", "torch_dtype", "mixed_precision"),
        "sharding": ("deepspeed", "fsdp", "strategy", "distributed"),
        "offload": ("cpu_offload", "optimizer_offload"),
    }
)
_LORA_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "rank": ("r", "lora_rank", "lora_r"),
        "targets": (
            *("target_modules", "lora_targets", "lora_target", "lora_target_modules", "lora_attn_modules", "modules"),
        ),
        "dropout": ("lora_dropout",),
        "base": ("base_dtype", "quantization", "quant", "base_precision"),
    }
)
_TUNING: Final = ("training", "train_type", "tuner_type", "finetuning_type", "method", "peft", "adapter", "recipe")


def in_our_words(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tidy row with what it says of its code under the keys of `parallel` that are read."""
    p = dict(row.get("parallel") or {})
    for key, others in _NAMES.items():
        places: list[tuple[Mapping[str, Any], str]] = [(p, name) for name in others]
        places += [(row, name) for name in (key, *others)] if key == "framework" else []
        found = next((place[name] for place, name in places if place.get(name) not in (None, "")), None)
        if p.get(key) is None and found is not None:
            p[key] = found if isinstance(found, bool | int | float) else _words(found)
    for key in ("framework", "loss", "optimizer", "sharding", "dispatcher"):
        if p.get(key) is not None and not isinstance(p[key], bool):
            p[key] = _words(p[key])
    tool = _tool_of(row, p)
    _say_switches(p)
    if tool is None:
        stage = _stage(p) if p.get("zero_stage") is None and _has_data_ranks(row, p) else None
        return {**row, "parallel": p if stage is None else p | {"zero_stage": stage}}
    # Where another tool runs it, as its first name says, that sets the arguments.
    is_own = not p.get("framework") or re.match(tool.marks, _plain(p["framework"])) is not None
    p["framework"] = p.get("framework") or tool.framework
    p["lora"] = _adapters(p, tool)
    if p["lora"]:
        p["training"] = f"{p.get('training') or ''} lora".strip()
    if p.get("zero_stage") is None:
        stage = _stage(p) if _has_data_ranks(row, p) else 0
        p |= {"zero_stage": tool.shards if stage is None else stage, "is_stage_open": stage is None}
    engine = _plain(f"{p.get('sharding')} {p.get('offload')}")
    is_sharded = bool(p["zero_stage"]) and tool.engine and not re.search("fsdp|zero_group", engine)
    if is_sharded or (tool.engine is not None and re.search(r"deepspeed|zero ?[0-3]|\bz[23]\b", engine)):
        p["framework"] += ", DeepSpeed"
    for key, value in tool.silent.items():
        if is_own and p.get(key) is None:
            p[key] = value
    is_plain = re.fullmatch(r"bf16|bfloat16|none", str(p.get("precision")).lower()) is not None
    if is_plain and flag(p.get("bf16")) and _is_trainers(p["framework"]):
        p["precision"] = "bf16, autocast of the Trainer"  # which its argument `bf16` asks for
    if is_own and is_plain and tool.framework == "ms-swift" and not re.search("zero", _plain(p.get("sharding"))):
        p["precision"] = "bf16 parameters, autocast"  # models are loaded in their own dtype
    return {**row, "parallel": p}


def _is_trainers(framework: str) -> bool:
    return re.search(r"trainer|axolotl|factory|swift|\btrl\b|peft", framework.lower()) is not None


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _plain(value: Any) -> str:
    return re.sub(r"[^a-z0-9]+", " ", _words(value).lower()).strip()


def _tool_of(row: Mapping[str, Any], p: Mapping[str, Any]) -> Tool | None:
    """Return the tool that a row names as its framework, else in its group, its source, its id or its notes."""
    source = row.get("source")
    places = (p.get("framework"), row.get("group"), source, row.get("id"), row.get("notes"))
    is_early = row.get("tier") in _EARLY_TIERS
    is_early_group = is_early and _EARLY_GROUPS.fullmatch(str(row.get("group"))) is not None
    for index, place in enumerate(places):
        text = _plain(place) if place else ""
        for tool in _TOOLS:
            # Older rows name such codes too: their sources do, and the notes of all.
            if tool.is_early and {0: False, 1: is_early_group, 2: is_early}.get(index, True):
                continue
            if re.search(rf"(?<![a-z])(?:{tool.marks})(?![a-z])", text):
                return tool
        if index == 0 and place:
            return Tool(marks="", framework=str(place))
    tuning = " ".join(_words(p[key]) for key in _TUNING if p.get(key)).lower()
    tuning += " lora" * any(bool(p.get(key)) for key in ("lora", *_LORA_NAMES["rank"][1:]))
    # Who fine-tunes, splits no model and names no tool has most likely taken the usual one.
    is_split = any((number(p.get(key)) or 1) > 1 for key in ("tp", "pp", "cp"))
    return None if is_early or is_split or not re.search(r"lora|\bsft\b|fine.?tun|\bdpo\b", tuning) else _USUAL


def _adapters(p: Mapping[str, Any], tool: Tool) -> dict[str, Any]:
    """Return a row's adapters: their rank, targets, dropout and base, which it may write as words or as keys."""
    written = p.get("lora")
    found = dict(written) if isinstance(written, Mapping) else {}
    text = " ".join(_words(p[key]) for key in (*_TUNING, "recompute") if p.get(key)).lower()
    text += f" {written}".lower() if isinstance(written, str) else ""
    has_number = isinstance(written, int | float | str) and flag(written)
    if isinstance(written, str) and (match := re.search(r"\d+", written)):
        found["rank"] = int(match.group())
    if not (found or "lora" in text or has_number or number(p.get("lora_rank") or p.get("lora_r") or 0)):
        return {}
    if isinstance(written, int | float) and not isinstance(written, bool):
        found["rank"] = int(written)
    for key, others in _LORA_NAMES.items():
        other = next((place[name] for place in (found, p) for name in others if place.get(name) is not None), None)
        if found.get(key) is None and other is not None:
            found[key] = _words(other) if key in ("targets", "base") else other
    if match := re.search(r"\b(?:r|rank)\D{0,3}(\d+)", text):
        found.setdefault("rank", int(match.group(1)))
    if "all linear" in text or "all-linear" in text or flag(p.get("lora_target_linear")):
        found.setdefault("targets", _ALL)
    if any(flag(place.get("apply_lora_to_mlp")) for place in (found, p)) and found.get("targets"):
        found["targets"] = f"{found['targets']}, mlp"
    said = f"{text} {p.get('precision')} {found.get('base')} {p.get('load_in_4bit') and '4bit'}".lower()
    if re.search(r"q-?lora|nf4|4-?bit|int4|gptq|awq", said) and not re.search(r"fp8|int8|8-?bit base", said):
        found["base"] = f"nf4 {found.get('base') or ''}".strip()
    if re.search(r"(fp32|float32|32-bit) (frozen )?(base|weights)|(base|weights) (in )?(fp32|float32)", said):
        found.setdefault("base", "fp32")
    if re.search(r"\bemb|wte|lm_head|modules_to_save", f"{text} {found.get('modules_to_save')}"):
        found.setdefault("saves_tables", True)
    for key in ("rank", "dropout"):
        if key in found:
            found[key] = number(found[key])
    return {**tool.lora, "base": "bf16", **{key: each for key, each in found.items() if each is not None}} | (
        {"base": tool.lora["base"]} if "base" in tool.lora and not found.get("base") else {}
    )


def _say_switches(p: dict[str, Any]) -> None:
    """Put switches of their own into the words that are read: of recomputation, of offload and of the loss."""
    recompute = " ".join(_recompute_words(p))
    if recompute:
        p["recompute"] = recompute
    elif p.get("recompute") is True:
        p["recompute"] = "full"
    elif p.get("recompute") is False:
        p["recompute"] = "none"
    if flag(p.get("use_liger_kernel")) or flag(p.get("use_liger")) or (p.get("liger") and not p.get("loss")):
        p["loss"] = "Liger fused linear cross-entropy"
    offload = [_words(p["offload"])] if p.get("offload") not in (None, "none", False) else []
    for key, word in (
        ("optimizer_cpu_offload", "optimizer"),
        ("optimizer_offload_fraction", "optimizer"),
        ("optim_cpu_offload", "optimizer"),
        ("activation_offloading", "activations"),
        ("enable_activation_offloading", "activations"),
        ("ac_offloading", "activations"),
        ("fsdp_cpu_offload", "params, grads, optimizer"),
    ):
        if flag(p.get(key)):
            share = str(p[key]).rstrip(" %") if "fraction" in key else ""
            scale = 1 if "%" in str(p[key]) else 100
            offload.append(f"{word} {scale * (number(share) or 0):.0f}%" if number(share) is not None else word)
    if re.search(r"offload(ing|ed)?\b|^unsloth", re.sub(r"_offloaded", "", str(p.get("recompute")).lower())):
        offload.append("activations")
    if offload:
        p["offload"] = ", ".join(offload)


def _recompute_words(p: Mapping[str, Any]) -> Iterator[str]:
    """Yield what keys besides `recompute` say of it, as Megatron's and torchtitan's arguments do."""
    granularity, modules = p.get("recompute_granularity"), p.get("recompute_modules")
    others = [p.get(key) for key in ("recompute_method", "recompute_num_layers", "selective_ac_option", "ac_freq")]
    if not (granularity or modules or any(others)):
        return
    if p.get("recompute") not in (None, True):
        yield _words(p["recompute"])
    if granularity:
        yield str(granularity)
    if modules:
        yield f"modules: {_words(modules)}"
    yield from (_words(each) for each in others if each)


def _has_data_ranks(row: Mapping[str, Any], p: Mapping[str, Any]) -> bool:
    num_gpus = number((row.get("hardware") or {}).get("num_gpus")) or 1
    split = [number(p.get(key)) or 1 for key in ("tp", "pp", "cp")]
    return (number(p.get("dp")) or num_gpus / (split[0] * split[1] * split[2])) > 1


def _stage(p: Mapping[str, Any]) -> int | None:
    """Return the ZeRO stage that words of sharding mean; None where there are none."""
    text = f"{p.get('sharding')} {p.get('framework')} {p.get('offload')}".lower()
    if match := re.search(r"(?:zero|stage|\bz|ds_z)[ _-]*([0-3])\b", text):
        return int(match.group(1))
    if re.search(r"distributed.optimizer", text):
        return 1
    if re.search(r"fsdp|full.shard|fully_shard|hsdp", text):
        return 3
    return 0 if re.search(r"\bddp\b", text) else None
