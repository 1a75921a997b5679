"""Turn the words in which people describe a published run into values: devices, networks, dtypes, recomputation.

Each reader takes what is written, or None, and is lenient: what it cannot read is as if it were not written.

>>> nic_bytes_per_s("NVLink + 4x100Gb Omni-Path per node", gpus_per_node=8) / 1e9
6.25
>>> matmul_dtype("fp8-cs"), matmul_dtype("amp_bf16"), recompute_of("selective(every 2nd layer)")
('fp8', 'bf16', ('full', 2))
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from planner_eval.bubbles import SEARCHED
from shardwise.planner.hardware import GpuSpec, find_gpu, known_gpu
from shardwise.planner.job import MatmulDtype

Attention = Literal["flash", "fused-softmax", "unfused"]
"""Flash saves no scores; the fused softmax saves them once; unfused code saves scores, softmax and masks."""

Recompute = Literal["none", "selective", "full"]


def gpu_of(written: str | None) -> GpuSpec | None:
    """Return the catalogue's device that is meant; None where none is.

    Of devices of several kinds the slowest is taken, since the others wait for it. Other words in a name, such as that
    of a machine, are ignored.

    >>> gpu_of("DGX A100 80GB").name, gpu_of("RTX-3090+Titan-RTX (heterogeneous)").name, gpu_of("abacus")
    ('a100-80', 'rtx-3090', None)
    """
    found = [each for part in re.split(r"[+/,](?![^(]*\))", written or "") if (each := _one_gpu(part)) is not None]
    return min(found, key=lambda each: max(each.peak_flops_per_s.values()), default=None)


def find_written_gpu(written: str) -> GpuSpec:
    """Return the device of a name that must mean one.

    Raises:
        ConfigError: no such device is known.
    """
    return gpu_of(written) or find_gpu(written)


def _one_gpu(written: str) -> GpuSpec | None:
    known = known_gpu(written)
    if known is not None:
        return known
    size = re.search(r"\d+\s*gi?b\b", written.lower())
    words = re.findall(r"[a-z]+[- ]?\d+[a-z]?|\d{4}(?: ?ti)?", written.lower())
    return next((each for word in words if (each := known_gpu(f"{word} {size.group() if size else ''}"))), None)


def nic_bytes_per_s(written: str | None, gpus_per_node: int) -> float | None:
    """Return a device's share of its node's network; None where no speed is written.

    A single number of 400 Gb/s or less without `per node` is a device's own, as such networks are built.
    """
    text = (written or "").lower()
    if "dgx-2" in text:
        return 8 * 100e9 / 8 / 16
    if match := re.search(r"(\d+)\s*x\s*(\d+)\s*gb", text):
        return int(match.group(1)) * int(match.group(2)) * 1e9 / 8 / gpus_per_node
    if match := re.search(r"(\d+)\s*gb(?:ps|/s|it)?", text):
        gigabits = int(match.group(1))
        is_of_node = "per node" in text or ("per gpu" not in text and gigabits > 400)
        return gigabits * 1e9 / 8 / (gpus_per_node if is_of_node else 1)
    if "slingshot" in text:
        return 25e9
    if "ethernet" in text and "lab" in text:
        return 10e9 / 8 / gpus_per_node
    return None


def matmul_dtype(written: str | None) -> MatmulDtype:
    """Return the narrowest dtype of matrix products that is written, of linear layers where they have their own and of
    products where their base has its own; bf16 where none is.

    >>> matmul_dtype("bf16 linears, mxfp8 grouped gemms"), experts_dtype("bf16 linears, mxfp8 grouped gemms")
    ('bf16', 'fp8')
    """
    text = (written or "bf16").lower()
    if match := re.search(r"(\w+)(?: hybrid)? (?:linears|matmuls)", text):
        text = match.group(1)
    for mark, dtype in _DTYPES:
        if mark in text:
            return dtype
    return "bf16"


def experts_dtype(written: str | None) -> MatmulDtype | None:
    """Return the dtype of experts' products where it is written beside that of linear layers; None elsewhere."""
    match = re.search(r"(\w+) (?:linears and )?(?:experts|grouped)", (written or "").lower())
    return matmul_dtype(match.group(1)) if match else None


_DTYPES: Final[tuple[tuple[str, MatmulDtype], ...]] = (
    ("fp4", "fp4"),
    ("float4", "fp4"),
    ("fp8", "fp8"),
    ("float8", "fp8"),
    ("e4m3", "fp8"),
    ("bf16", "bf16"),
    ("bfloat16", "bf16"),
    ("fp16", "fp16"),
    ("float16", "fp16"),
    ("half", "fp16"),
    ("16-mixed", "fp16"),
    ("tf32", "tf32"),
    ("fp32", "fp32"),
    ("float32", "fp32"),
    ("32-true", "fp32"),
)


def recompute_of(written: str | None) -> tuple[Recompute, int] | None:
    """Return what is recomputed, and of every how many layers; None where that is not written.

    Selective with a number of layers is full recomputation of every n-th layer, as some frameworks name it.
    """
    text = (written or "").lower()
    if re.search(r"(?<![a-z])(none|no|false|off|without|w/o|disabled?|not (used|enabled))(?![a-z])", text):
        return "none", 1
    if re.search(r"nothing.sav(e|ed)|save.nothing|(per|every|each)[- ]?(layer|block)\b|^\s*(gc|1)\s*$", text):
        return "full", 1
    if re.search(r"dots?_save|^\s*attention( only)?\s*$", text):
        return "selective", 1
    if "every second layer" in text:
        return "full", 2
    if match := re.search(r"every (\d+)", text):
        return ("selective" if "matmul" in text else "full"), int(match.group(1))
    if re.search(r"recompute-(ffn|norm|att|qkv|swiglu)", text) and "block" not in text:
        return "selective", 1
    if "intermediates within a block" in text or re.search(r"\bminimal|\bsave_|_offloaded", text):
        return "selective", 1
    modules = r"\bsac\b|core_?attn|moe_act|layernorm|\bmoe\b|\bmlp\b|mla_up_proj|routed_experts|attn_proj"
    if "selective" in text or "op" in text.split() or re.search(modules, text):
        return "selective", 1
    # Unsloth's, and activations that are sent to the host, are the inputs of blocks that run again.
    if re.search(
        r"full|true|uniform|block|\bac\b|\bon\b|\byes\b|\ball\b|checkpoint|granular|recompute|offload|unsloth", text
    ):
        return "full", 1
    return None


def num_of_block(written: str | None) -> int | None:
    """Return how many layers of each stage run again, as Megatron's method `block` says; None where nothing does.

    >>> num_of_block("full, block, 5 layers"), num_of_block("full/uniform/1"), num_of_block("recompute-block")
    (5, None, None)
    """
    match = re.search(r"(?<![a-z-])block\D{0,24}(\d+)|(\d+) layers?\D{0,24}(?<![a-z-])block", (written or "").lower())
    return int(match.group(1) or match.group(2)) if match else None


def is_adapter(parallel: Mapping[str, Any]) -> bool:
    """Say whether adapters alone are trained."""
    return "lora" in f"{parallel.get('training')} {parallel.get('recompute')}".lower()


def attention_of(written: str | None) -> Attention | None:
    """Return what the attention's kernel saves; None where no kernel is written."""
    text = (written or "").lower()
    if not text:
        return None
    if re.search(r"flash|\bfa\d?\b|cudnn|sdpa|triton|mem|\bte\b|engine|xformers|flex|aiter|\bck\b", text):
        return "flash"
    if re.fullmatch(r"none|default|auto|unknown|n/?a", text.strip()):
        return None
    if "fused" in text:
        return "fused-softmax"
    return "unfused"


def is_tuned_attention(written: str | None) -> bool:
    """Say whether the named kernel was written for Hopper or a later device.

    >>> is_tuned_attention("FA3"), is_tuned_attention("flash_attention2 + RMS kernel")
    (True, False)
    """
    return bool(re.search(r"\bfa[34]\b|flash_?attention-?[34]|cudnn", (written or "").lower()))


def is_first_flash(written: str | None) -> bool:
    """Say whether the first FlashAttention is named; it was called so without a number until there was a second.

    >>> is_first_flash("flash_attentionv1.0.8"), is_first_flash("FA2"), is_first_flash("flash"), is_first_flash(None)
    (True, False, True, False)
    """
    text = (written or "").lower()
    return bool(re.search(r"\bfa1\b|flash[ _-]?(attention|attn)?[ _-]?v?1|^\s*flash[ _-]?(attention|attn)?\s*$", text))


def is_masked(written: str | None) -> bool:
    """Say whether scaled dot-product attention gets a mask of padding, or the kernel that it then takes is named.

    >>> is_masked("SDPA with a padding mask"), is_masked("SDPA (memory-efficient)"), is_masked("SDPA"), is_masked(None)
    (True, True, False, False)
    """
    return bool(re.search(r"(padding|4d|additive|explicit) mask|mem(ory)?[- _]?eff", (written or "").lower()))


def schedule_of(written: str | None, num_stages: int, virtual_stages: int) -> str:
    """Return our name of a pipeline schedule, or of the nearest; 1f1b where none is written, or there is no pipeline.

    DualPipe is two pipelines that go through each other, which its V cuts in half (the README of DualPipe).

    Args:
        written: the row's words; None where there are none.
        num_stages: ranks of the pipeline.
        virtual_stages: stages a rank.
    """
    text = (written or "").lower()
    if num_stages == 1:
        return "1f1b"
    for mark, name in _SCHEDULES:
        if mark in text:
            return name
    return "interleaved" if virtual_stages > 1 or "interleav" in text else "1f1b"


_SCHEDULES: Final = (
    ("zb-v", "zb-v"),
    ("zbv", "zb-v"),
    ("dualpipe", "zb-v"),
    ("zb-2p", "zb-h2"),
    ("zb-h2", "zb-h2"),
    ("zb-1p", "zb-h1"),
    ("zb-h1", "zb-h1"),
    ("zb1p", "zb-h1"),
    ("gpipe", "gpipe"),
    ("afab", "gpipe"),
    ("naive", "naive"),
)


def searched_schedule_of(written: str | None) -> str | None:
    """Return the zero-bubble schedule that is made for its times, if it is one of these."""
    text = (written or "").lower()
    return next((name for name in SEARCHED if name in text), None)
