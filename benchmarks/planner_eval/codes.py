"""Read the words in which a run of this year says its code: its loss, its optimizer, its adapters, its kernels.

Rows that name a `framework` say these themselves, so that nothing is inferred from the device's generation. What a
code does where a row is silent is that code's default, read in its source.

>>> code_of("fms-hf-tuning (HF Trainer/SFTTrainer), accelerate FSDP1").name, code_of("NVIDIA NeMo 25.09").name
('hf', 'megatron')
>>> lora_of({"rank": 8, "targets": "q,k,v and o", "base": "nf4 (bitsandbytes)"})["lora.targets"]
('k_proj', 'o_proj', 'q_proj', 'v_proj')
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from shardwise.planner.hardware import GpuSpec

NARROW, WIDE = 2.0, 4.0
"""Bytes of bf16 and of fp32."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """State what a code does where a row does not say otherwise.

    Attributes:
        is_fused: whether norms, rotation and the gate are kernels of its own.
        is_graphed: whether it launches a step as a graph, from C++.
        is_tuned: whether its attention takes what came with Hopper, where the device has that.
        logits_bytes: bytes of each logit at the peak of its loss.
        splits_logits: whether its loss is split by vocabulary over tensor-parallel ranks.
    """

    name: str
    is_fused: bool = False
    is_graphed: bool = False
    is_tuned: bool = False
    logits_bytes: float = 10.0
    splits_logits: bool = False


# Names in the words of a row, the first that is found counts. Defaults as their code has them: Hugging Face's SDPA
# takes FlashAttention-2 on Hopper too (huggingface/transformers#48163); torchtitan puts cuDNN first
# (models/common/attention.py); Transformer Engine takes cuDNN's fused attention from Hopper on. Losses: see `loss_of`.
_CODES: Final = (
    (r"unsloth", Code(name="unsloth", is_fused=True, logits_bytes=2 * NARROW)),
    (r"llmq|surogate", Code(name="engine", is_fused=True, is_graphed=True, is_tuned=True, logits_bytes=NARROW)),
    (r"automodel", Code(name="automodel", is_fused=True, is_tuned=True)),
    (r"torchtitan|pithtrain", Code(name="torchtitan", is_tuned=True, logits_bytes=2 * NARROW)),
    (
        r"megatron|nemo",
        Code(name="megatron", is_fused=True, is_tuned=True, logits_bytes=2 * NARROW + WIDE, splits_logits=True),
    ),
    (r"litgpt", Code(name="litgpt", logits_bytes=4 * NARROW)),
    (r"deepspeed", Code(name="deepspeed")),
)
_HUGGING_FACE: Final = Code(name="hf")


def code_of(framework: str) -> Code:
    """Return what is known of a framework; Hugging Face's Trainer where none is recognised."""
    text = framework.lower()
    return next((code for mark, code in _CODES if re.search(mark, text)), _HUGGING_FACE)


def loss_of(p: Mapping[str, Any], code: Code) -> float:
    """Return the bytes of each logit at the peak of the loss, by what a row says of it.

    Losses that are fused with the head have none: Liger's and cut cross-entropy work in blocks. Torch's in fp32 has
    the widened logits, their log-softmax and its gradient, and the narrow ones or a shifted copy (transformers'
    `loss_utils.py`; before 4.46 the model widened and copied them itself). Accelerate's mixed precision widens what a
    model returns, the logits too (`convert_outputs_to_fp32`). A compiled loss keeps the narrow logits and writes their
    gradient. Transformer Engine's writes it over the logits; Megatron's own over the fp32 softmax.
    """
    text, framework = str(p.get("loss") or "").lower(), str(p.get("framework") or "").lower()
    if re.search(r"cut.cross|with lm_head|fused linear", text) or ("liger" in text and "only" not in text):
        return 0.0
    if match := re.search(r"in (\d+) chunks", text):
        return NARROW / int(match.group(1))  # the gradient takes the place of the logits
    version = re.search(r"transformers 4\.(\d+)", framework)
    is_early = version is not None and int(version.group(1)) < 46
    widened = WIDE if "autocast" in str(p.get("precision")) and code.name == "hf" else 0.0
    if "triton" in text:  # in place of the fp32 copy
        return 3 * WIDE if is_early else NARROW + WIDE + NARROW + widened
    if "no fp32 upcast" in text:
        return 3 * NARROW
    if re.search(r"\bte\b", text):
        return 2 * NARROW
    if "compiled" in text and "before" not in text:
        return 2 * NARROW
    if "chunk" in text:
        return 4 * NARROW if code.name == "litgpt" else 2 * NARROW
    if "fp32" in text or "plain" in text or code.name in ("hf", "deepspeed"):
        return (3 * WIDE if is_early else NARROW + 2 * WIDE) + widened
    return code.logits_bytes


def optimizer_share(p: Mapping[str, Any], code: Code) -> float:
    """Return the share of 12 bytes a parameter, of a master and two moments in fp32, that an optimizer really stores.

    Models that are loaded in bf16 whole train without a master, with moments in bf16. Moments of 8 bits have a scale
    of fp32 for each 256 (bitsandbytes' `optimizer.py`), those of 4 bits one for each 128 (torchao).
    """
    text, precision = str(p.get("optimizer") or "").lower(), str(p.get("precision") or "").lower()
    moment = WIDE
    if "8-bit" in text:
        moment = 1 + 4 / 256
    elif "4-bit" in text:
        moment = 0.5 + 4 / 128
    elif is_narrow(p):
        moment = NARROW
    master = 0.0 if is_narrow(p) or (moment < NARROW and "fp32" not in precision and code.name != "engine") else WIDE
    return (2 * moment + master) / (3 * WIDE)


def is_narrow(p: Mapping[str, Any]) -> bool:
    """Say whether parameters, gradients and states are all of bf16."""
    words = f"{p.get('precision')} {p.get('optimizer')}".lower()
    return bool(
        re.search(
            r"gradients and states bf16|bf16 parameters|bf16 whole|bf16-true|pure bf16|bf16 m and v|\(bf16\)", words
        )
    )


def params_share(p: Mapping[str, Any]) -> float:
    """Return the bytes of a stored parameter over those of bf16: twice for a base in fp32, half for one in 8 bits."""
    base = str((p.get("lora") or {}).get("base") or "").lower()
    if not base:
        return 1.0
    if base.startswith("fp32"):
        return 2.0
    if re.match(r"nvfp4", base):
        return 0.5 * (0.5 + 1 / 16)  # a scale of one byte for each 16
    return 0.5 if re.match(r"fp8|int8|8-bit", base) else 1.0


_TARGETS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        r"\bq\b|q_proj|query|qkv|\*_proj": ("q_proj",),
        r"\bk\b|k_proj|\bkey|qkv|\*_proj": ("k_proj",),
        r"\bv\b|v_proj|value|qkv|\*_proj": ("v_proj",),
        r"\bo\b|o_proj|projection|\*_proj": ("o_proj",),
        r"\bgate\b|gate_proj|\bmlp\b|\*_proj": ("gate_proj",),
        r"\bup\b|up_proj|\bmlp\b|\*_proj": ("up_proj",),
        r"\bdown\b|down_proj|\bmlp\b|\*_proj": ("down_proj",),
    }
)


def lora_of(written: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of the adapters that a row writes; PEFT adapts queries and values where no target is named."""
    if not written:
        return {}
    text = str(written.get("targets") or "q_proj,v_proj").lower()
    found = {name for mark, names in _TARGETS.items() if re.search(mark, text) for name in names}
    targets = ("all-linear",) if "all lin" in text or not found else tuple(sorted(found))
    base = str(written.get("base") or "").lower()
    stored = "nf4" if base.startswith("nf4") else "keep"
    return {"lora.rank": int(written.get("rank") or 16), "lora.targets": targets, "lora.base": stored}


def is_tuned_on(gpu: GpuSpec, p: Mapping[str, Any], code: Code) -> bool:
    """Say whether the attention kernel uses what the device has beyond Ampere's: by the row's words, else the code."""
    text = str(p.get("attention_kernel") or "").lower()
    if "fp8" not in gpu.peak_flops_per_s:
        return False
    if re.search(r"cudnn|\bfa[34]\b|attention[ -]?[34]|flash-attn3|\bte\b|\bck\b", text):
        return True
    if re.search(r"flash|xformers|flex|hf sdpa", text):
        return False
    return code.is_tuned
