"""Read the words in which a run of this year says its code: its loss, its optimizer, its adapters, its kernels.

Rows that name a `framework` say these themselves, so that nothing is inferred from the device's generation. What a
code does where a row is silent is that code's default, read in its source.

>>> code_of("fms-hf-tuning (HF Trainer/SFTTrainer), accelerate FSDP1").name, code_of("NVIDIA NeMo 25.09").name
('hf', 'megatron')
>>> lora_of({"rank": 8, "targets": "q,k,v and o", "base": "nf4 (bitsandbytes)"})["lora.targets"]
('k_proj', 'o_proj', 'q_proj', 'v_proj')
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from planner_eval.rows import flag
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
        groups_experts: whether experts run in one grouped product, not in a loop over them.
        wraps_adapters: whether its sharded data parallelism gathers each matrix of an adapter by itself.
        year: in which the row's version of it is.
    """

    name: str
    year: int = 2025
    wraps_adapters: bool = False
    is_fused: bool = False
    is_graphed: bool = False
    is_tuned: bool = False
    logits_bytes: float = 10.0
    splits_logits: bool = False
    groups_experts: bool = False


# Names in the words of a row, the first that is found counts. Defaults are those of the code: Hugging Face's SDPA is
# FlashAttention-2 on Hopper too (huggingface/transformers#48163); Transformer Engine takes cuDNN's fused attention from
# Hopper on. Losses: see `loss_of`.
_CODES: Final = (
    (r"unsloth", Code(name="unsloth", is_fused=True, logits_bytes=2 * NARROW)),
    (r"llmq|surogate", Code(name="engine", is_fused=True, is_graphed=True, is_tuned=True, logits_bytes=NARROW)),
    (r"automodel", Code(name="automodel", is_fused=True, is_tuned=True)),
    (r"torchtitan|pithtrain", Code(name="torchtitan", is_tuned=True, logits_bytes=2 * NARROW)),
    # XLA fuses what is element-wise and launches a step at once; its loss widens the logits, and its attention is TE's.
    (
        r"maxtext|paxml|\bjax\b|levanter|easydel|axlearn",
        Code(name="maxtext", is_fused=True, is_graphed=True, is_tuned=True, groups_experts=True),
    ),
    # An eighth of the logits at a time, whose log-softmax waits for the backward (LinearCrossEntropyLoss).
    (r"torchtune", Code(name="torchtune", logits_bytes=WIDE + (NARROW + 2 * WIDE) / 8)),
    (r"prime-rl", Code(name="prime-rl", is_tuned=True, groups_experts=True)),
    (
        r"megatron|nemo|primus",
        Code(name="megatron", is_fused=True, is_tuned=True, logits_bytes=2 * NARROW + WIDE, splits_logits=True),
    ),
    # Its own layers in a loop of their own: those of Megatron without its loss.
    (r"transformer ?engine", Code(name="te", is_fused=True, is_tuned=True, logits_bytes=NARROW + 2 * WIDE)),
    (r"litgpt", Code(name="litgpt", logits_bytes=4 * NARROW)),
    (r"deepspeed", Code(name="deepspeed")),
)
_HUGGING_FACE: Final = Code(name="hf")
TORCHTITANS: Final = ("torchtitan", "prime-rl")
"""Names of the codes whose experts and units are torchtitan's (prime-rl's trainer/models/layers/moe.py, model.py)."""


def code_of(framework: str) -> Code:
    """Return what is known of a framework; Hugging Face's Trainer where none is recognised."""
    text = framework.lower()
    return next((code for mark, code in _CODES if re.search(mark, text)), _HUGGING_FACE)


def dated(code: Code, p: Mapping[str, Any]) -> Code:
    """Return the code of the last year that a row's words name, with the experts' kernel that it names.

    Hugging Face's models loop over experts until transformers 5, of 2026.

    >>> dated(code_of("torchtitan"), {"framework": "torchtitan 2026-07"}).year
    2026
    """
    years = [int(each) for each in re.findall(r"20[12]\d", str(p.get("framework")))]
    year = max(years, default=code.year)
    return dataclasses.replace(
        code,
        year=year,
        groups_experts=bool(p.get("experts_kernel")) or year >= 2026,
        wraps_adapters=code.name == "hf" and "fsdp2" not in str(p.get("sharding")).lower(),
    )


_TRL_RELEASES: Final = (("2026-07", (1, 7)), ("2025-12", (0, 26)), ("2025-09", (0, 22)), ("", (0, 0)))


def trl_release(framework: str) -> tuple[int, int] | None:
    """Return the release of TRL that a framework's words name, by its number, else by its date; None without TRL.

    From 0.22 on SFTTrainer logs entropy and accuracy of all logits, from 0.26 on adapters of a packed base are bf16,
    from 1.7 on it computes the loss in chunks that run again in the backward (trl/trainer/sft_trainer.py).

    >>> trl_release("TRL 0.24"), trl_release("x (trl, 2025-12)"), trl_release("TRL"), trl_release("peft")
    ((0, 24), (0, 26), (0, 22), None)
    """
    text = framework.lower()
    if not re.search(r"\btrl\b", text):
        return None
    if match := re.search(r"trl\D{0,3}(\d+)\.(\d+)", text):
        return int(match.group(1)), int(match.group(2))
    dates = re.findall(r"20[12]\d(?:-\d\d)?", text)
    return next(release for date, release in _TRL_RELEASES if max(dates, default="2025-09") >= date)


def is_of_early_2024(words: str) -> bool:
    """Say whether a framework's version is of 2024 at the latest, and not named as of its second half.

    >>> is_of_early_2024("LitGPT of 2024"), is_of_early_2024("train.py (2024-03)"), is_of_early_2024("trl (2024-10)")
    (True, True, False)
    """
    found = re.findall(r"20[12]\d(?:-\d\d)?", words)
    return bool(found) and max(found) < "2024-07"


def has_torchs_norm(p: Mapping[str, Any], code: Code) -> bool:
    """Say whether norms are torch's own, which is one kernel since pytorch/pytorch#153666 of July 2025."""
    found = re.findall(r"20[12]\d(?:-\d\d)?", str(p.get("framework")))
    return code.name == "torchtitan" and bool(found) and max(found) >= "2025-08"


def runs_all_experts(framework: str, model: str) -> bool:
    """Say whether each expert is run on each token, with scores of 0 for most (transformers' `modeling_llama4.py`)."""
    return code_of(framework).name == "hf" and "llama-4" in model.lower()


def num_sharers(p: Mapping[str, Any]) -> int:
    """Return how many ranks that divide the experts get the same samples, and sum what their experts give.

    So transformers does by a plan of tensor parallelism (its `integrations/tensor_parallel.py`, `RouterParallel`): each
    rank runs the dense part whole, and its own experts on all tokens.
    """
    is_trainers = bool(p.get("framework")) and code_of(str(p["framework"])).name in ("hf", "deepspeed")
    words = f"{p.get('dispatcher')} {p.get('experts_kernel')} {p.get('framework')} {p.get('sharding')}".lower()
    has_exchange = re.search(r"all.?to.?all|a2a|deepep|hybridep|scattermoe|megablocks|deepspeed", words)
    return 1 if has_exchange or not is_trainers else int(p.get("ep") or 1)


def recompute_words(p: Mapping[str, Any]) -> str | None:
    """Return a row's words of recomputation, or those of torchtitan's train_configs: all of them select ops."""
    written = p.get("recompute")
    if code_of(str(p.get("framework"))).name == "torchtitan" and (not written or "default" in str(written)):
        return "selective, per op"
    return written


def loss_of(p: Mapping[str, Any], code: Code) -> float:
    """Return the bytes of each logit at the peak of the loss, by what a row says of it.

    Losses that are fused with the head have none: Liger's and cut cross-entropy work in blocks. Torch's backward in
    fp32 has the log-softmax, the gradient that the mean gives it, and that of the logits, which we measure; Trainers
    have let the model's logits go by then, loops of their own have not (narrow ones; before transformers 4.46 wide
    ones). Of Triton's, accelerate's mixed precision widens what a model returns, the logits too
    (`convert_outputs_to_fp32`). A compiled loss keeps the narrow logits and writes their gradient. Transformer Engine's
    writes it over the logits; Megatron's own over the fp32 softmax.
    """
    text, framework = str(p.get("loss") or "").lower(), str(p.get("framework") or "").lower()
    if re.search(r"cut.cross|\bcce\b|with lm_head|fused[ _]linear", text) or ("liger" in text and "only" not in text):
        return 0.0
    if runs_head_again(p):
        return 0.0
    if match := re.search(r"in (\d+) chunks", text):
        return NARROW / int(match.group(1))  # the gradient takes the place of the logits
    version = re.search(r"transformers 4\.(\d+)", framework)
    date = re.search(r"20\d\d-\d\d", framework)
    is_dated_early = date is not None and date.group() < "2024-10"  # of 4.46
    is_early = int(version.group(1)) < 46 if version is not None else is_dated_early
    widened = WIDE if "autocast" in str(p.get("precision")) and code.name == "hf" else 0.0
    if (
        "triton" in text
    ):  # over the fp32 copy; the model's own is gone by the backward, which pads the shifted one again
        return 2 * WIDE if is_early else NARROW + WIDE + NARROW + widened
    if re.search(r"no (fp32 )?upcast|without upcast|(on|of|in) (whole )?bf16 logits|bf16 logits kept", text):
        return 3 * NARROW
    if re.search(r"\bte\b", text):
        return 2 * NARROW
    if "compiled" in text and "before" not in text:
        return 2 * NARROW
    if code.name == "torchtune":
        if "chunkedoutput" in text or (not text and code.year < 2025):  # the logits exist whole, too
            return NARROW + WIDE + 2 * WIDE / 8
        return NARROW + (NARROW + 2 * WIDE) / 8 if p.get("compile") else code.logits_bytes
    if "chunk" in text:
        return 4 * NARROW if code.name == "litgpt" else 2 * NARROW
    if code.name in ("hf", "deepspeed"):
        is_kept = re.search(r"fsdp_qlora|own loop", framework) is not None
        return 3 * WIDE + is_kept * (WIDE if is_early else NARROW)
    if "fp32" in text or "plain" in text:
        return NARROW + 2 * WIDE
    # Torchtitan compiles its loss with the model, and in its configs of mixtures the loss alone.
    return NARROW + 2 * WIDE if code.name == "torchtitan" and p.get("compile") is False else code.logits_bytes


def runs_head_again(p: Mapping[str, Any]) -> bool:
    """Say whether the loss is TRL's in chunks, each with its part of the head, which run again in the backward."""
    text = str(p.get("loss") or "").lower()
    is_usual = not text and (trl_release(str(p.get("framework"))) or (0, 0)) >= (1, 7)
    return "chunked_nll" in text or is_usual


def optimizer_share(p: Mapping[str, Any], code: Code) -> float:
    """Return the share of 12 bytes a parameter, of a master and two moments in fp32, that an optimizer really stores.

    Models that are loaded in bf16 whole train without a master, with moments in bf16. Moments of 8 bits have a scale
    of fp32 for each 256 (bitsandbytes' `optimizer.py`), those of 4 bits one for each 128 (torchao).
    """
    text, precision = str(p.get("optimizer") or "").lower(), str(p.get("precision") or "").lower()
    moment = WIDE
    if "paged" in text:  # by CUDA's managed memory, which no allocator counts and the host can take
        return 0.0
    if "8-bit" in text or "8bit" in text:
        moment = 1 + 4 / 256
    elif "4-bit" in text:
        moment = 0.5 + 4 / 128
    elif is_narrow(p):
        moment = NARROW
    num_moments = 0 if re.search(r"\bsgd\b|signsgd|adafactor|lomo", text) else 1 if re.search("lion|muon", text) else 2
    master = 0.0 if is_narrow(p) or (moment < NARROW and "fp32" not in precision and code.name != "engine") else WIDE
    return (num_moments * moment + master) / (3 * WIDE)


def is_narrow(p: Mapping[str, Any]) -> bool:
    """Say whether parameters, gradients and states are all of bf16, as torch's Adam keeps those of a bf16 model.

    NeMo Automodel's recipes load models so (`torch_dtype: bf16`).
    """
    name = code_of(str(p.get("framework"))).name
    if name == "automodel":
        return "torch.optim" in str(p.get("optimizer"))
    if name == "torchtune":  # `dtype` is that of all it holds
        return "fp32" not in str(p.get("precision")).lower()
    words, optimizer = f"{p.get('precision')} {p.get('optimizer')}".lower(), str(p.get("optimizer")).lower()
    whole = (
        r"gradients and states bf16|bf16 parameters|bf16 whole|bf16-true|pure[ _-]?bf16|(all|fully) (in )?bf16"
        r"|bf16 m and v"
    )
    # Of a precision, `amp (bf16)` names the products' dtype alone.
    return bool(flag(p.get("pure_bf16")) or re.search(whole, words) or re.search(r"\(bf16\)", optimizer))


def overlaps_tensor(p: Mapping[str, Any]) -> bool:
    """Say whether tensor-parallel collectives overlap with products where sequences are split.

    Recipes of NeMo and Megatron Bridge turn Transformer Engine's `tp_comm_overlap` on; Megatron-LM's own default is off
    (megatron/training/arguments.py).
    """
    code, written = code_of(str(p.get("framework"))), flag(p.get("tp_comm_overlap"))
    is_on = re.search(r"nemo|bridge|mlperf", str(p.get("framework")).lower()) is not None
    return code.name == "megatron" and (is_on if p.get("tp_comm_overlap") is None else bool(written))


def left_open(p: Mapping[str, Any]) -> list[str]:
    """Return what a row of a code that lets its user choose leaves open: the loss, and the dtype of trained states."""
    if not p.get("framework") or code_of(str(p["framework"])).name not in ("hf", "deepspeed", "unsloth"):
        return []
    words = f"{p.get('precision')} {p.get('optimizer')}".lower()
    is_said = re.search(r"fp32|master|gradients|states|whole|-true|8-bit|4-bit|pure|autocast(?! of the trainer)", words)
    return ["loss"] * (not p.get("loss")) + ["states"] * (not is_said and not p.get("lora"))


def is_wide(p: Mapping[str, Any]) -> bool:
    """Say whether frozen weights are fp32 under autocast; a model without a dtype is loaded so before transformers 5.

    >>> is_wide({"lora": {"rank": 8, "base": "bf16 or fp32"}}), is_wide({"lora": {"base": "nf4"}})
    (True, False)
    """
    base = str((p.get("lora") or {}).get("base"))
    return "fp32" in base and "sharded" not in base


def params_share(p: Mapping[str, Any]) -> float:
    """Return the bytes of a stored parameter over those of bf16: twice for a base in fp32, half for one in 8 bits."""
    base = str((p.get("lora") or {}).get("base") or "").lower()
    if not base:
        return 1.0
    if is_wide(p):
        return 3.0  # with the copies in bf16 that autocast saves for the backward
    if "fp32" in base:
        return 2.0  # FSDP2 casts its shard before it gathers
    if re.match(r"nvfp4", base):
        return 0.5 * (0.5 + 1 / 16)  # a scale of one byte for each 16
    return 0.5 if re.match(r"fp8|int8|8-bit", base) else 1.0


def fuses_adapters(p: Mapping[str, Any], code: Code) -> bool:
    """Say whether adapters run in kernels of their own, as Unsloth's and those of fms-acceleration for a base of nf4.

    Liger's fuse none. PEFT's adapters are of fp32 otherwise (`autocast_adapter_dtype`).
    """
    is_foak = "foak" in str(p.get("loss")) and str((p.get("lora") or {}).get("base")).startswith("nf4")
    return bool(p.get("compile")) or is_foak or code.is_fused


def frees_grads(p: Mapping[str, Any]) -> bool:
    """Say whether the optimizer steps in the backward (torchtune's `optimizer_in_bwd`), or the optimizer is LOMO."""
    words = f"{p.get('optimizer')} {p.get('training')}".lower()
    return bool(p.get("optimizer_in_bwd")) or bool(re.search(r"in_bwd|in (the )?backward|into backward|\blomo", words))


def holds_inputs(p: Mapping[str, Any], code: Code) -> bool:
    """Say whether FSDP1 wraps blocks whose checkpoints are reentrant, as those of transformers are before release 5."""
    words = str(p.get("framework")).lower()
    is_trainers = re.search(r"trainer|\btrl\b|transformers|axolotl|swift|factory", words)
    return bool(is_trainers) and dated(code, p).wraps_adapters and not re.search(r"transformers 5", words)


def fuses_step(p: Mapping[str, Any]) -> bool:
    """Say whether AdamW is one kernel: torch's own where asked for, and the Trainer's by default from torch 2.8 on."""
    text, version = str(p.get("optimizer")).lower(), re.search(r"torch 2\.(\d+)", str(p.get("framework")))
    is_late = "hf" in text and version is not None and int(version.group(1)) >= 8
    return is_late or bool(re.search("fused|8-?bit|4-?bit", text))


def is_graphed(p: Mapping[str, Any], code: Code, *, has_experts: bool) -> bool:
    """Say whether a step is launched as a graph, as Surogate does but for experts and a packed base.

    See its graph_executor.cpp and core/config/sft_config.py, `create_runtime_config`.
    """
    return bool(p.get("cuda_graphs")) or (code.is_graphed and not has_experts and not is_packed(p))


def is_packed(p: Mapping[str, Any]) -> bool:
    """Say whether the frozen base is stored in 8 bits or fewer."""
    base = str((p.get("lora") or {}).get("base")).lower()
    return base.startswith("nf4") or params_share({"lora": {"base": base}}) < 1


def unpacked_bytes(p: Mapping[str, Any], code: Code) -> float:
    """Return the bytes of a stored weight that is unpacked for each pass by other code than bitsandbytes, 0 for none.

    Surogate unpacks what it stores in 8 or 4 bits (runtime/qlora); Transformer Engine multiplies it as it is.
    """
    return NARROW * params_share(p) if code.name == "engine" and params_share(p) < 1 else 0.0


def permutation_of(p: Mapping[str, Any], code: Code, num_experts: int = 0) -> tuple[float, float] | None:
    """Return the reads and writes of tokens' copies for their experts, forward and backward, by a code's source.

    Hugging Face's loop gathers (2), weighs (2) and sums by `index_add` (3). Torchtitan's moe.py of 2025 gathers (2),
    weighs in fp32 (10, compiled 2), stacks a row of zeros and pads (4), undoes it (2) and scatters (3); its later code
    and DeepEP copy less, as Hugging Face's grouped product does. Megatron's fused kernels permute and unpermute (2
    each), and sort the chunks of several experts once more each way after an all-to-all (token_dispatcher.py,
    `sort_chunks_by_idxs`); DeepEP writes them in order. Axolotl's Llama 4 gathers and weighs (2 each), writes each
    expert's result into a part of a tensor of zeros (3), whose backward clones all of it for each, and sums (3). Each
    reads its part, whose backward fills a tensor as large as all with zeros and adds it to the others' (4 for each).
    """
    if "linearized" in str((p.get("lora") or {}).get("base")):
        return (10.0, 8.0 + 6.0 * num_experts)
    if code.name in ("hf", "deepspeed", "litgpt", "unsloth"):
        return (11.0, 15.0) if code.groups_experts else (7.0, 11.0)
    has_deepep = bool(re.search("deepep|hybridep", str(p.get("dispatcher")).lower()))
    if code.name in (*TORCHTITANS, "torchtune"):
        if has_deepep or code.year > 2025:
            return (11.0, 15.0)
        return (13.0, 18.0) if p.get("compile") else (21.0, 28.0)
    is_ordered = int(p.get("ep") or 1) == 1 or has_deepep
    return (4.0, 4.0) if is_ordered else (8.0, 8.0)


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


# Other names of layers: torchtune's, Megatron's, GPT-2's, Meta's, and those of all four of attention.
_TARGET_WORDS: Final = (
    (r"output_proj|linear_proj|\bwo\b", "o_proj"),
    (r"linear_fc1|\bw[12]\b", "gate_proj, up_proj"),
    ("linear_fc2", "down_proj"),
    ("c_proj", "o_proj, down_proj"),
    (r"c_attn|\bwqkv\b", "qkv"),
    (r"\bqkvo\b", "qkv, o_proj"),
    (r"\bqv\b", "q_proj, v_proj"),
    (r"\bw([qkv])\b", r"\1_proj"),
    (r"\bffn\b|feed.forward", "mlp"),
)


def lora_of(written: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keys of the adapters that a row writes; PEFT adapts queries and values where no target is named."""
    if not written:
        return {}
    text = str(written.get("targets") or "q_proj,v_proj").lower()
    for name, ours in _TARGET_WORDS:
        text = re.sub(name, ours, text)
    if re.search("attn|attention", text) and not re.search(r"\bq\b|q_proj|query|qkv", text):
        text += " q_proj, k_proj, v_proj, o_proj"
    found = {name for mark, names in _TARGETS.items() if re.search(mark, text) for name in names}
    targets = ("all-linear",) if re.search("all[ _-]lin", text) or not found else tuple(sorted(found))
    base = str(written.get("base") or "").lower()
    return {
        "lora.rank": int(written.get("rank") or 16),
        "lora.targets": targets,
        "lora.base": "nf4" if base.startswith("nf4") else "keep",
        "lora.dropout": float(written.get("dropout") or 0.0),
    }


def is_tuned_on(gpu: GpuSpec, p: Mapping[str, Any], code: Code, model: str = "") -> bool:
    """Say whether the attention kernel uses what came with Hopper, by the row's words, else by the code.

    Torchtitan puts cuDNN first on B200 (its pull request 1196), on Hopper too from October 2025 (1776). Its DeepSeek
    (1610) and Llama 4 have FlexAttention, whose kernel is Triton's: on B200 2.7 times as slow as FlashAttention-4
    (arXiv 2603.05451).

    Args:
        model: its name and its attention, as the row has them.
    """
    text = str(p.get("attention_kernel") or "").lower()
    if "fp8" not in gpu.peak_flops_per_s:
        return False
    if re.search(r"cudnn|\bfa[34]\b|att(?:entio)?n[ _-]*v?[34]|\bte\b|\bck\b|aiter", text):
        return True
    if re.search(r"flash|xformers|flex|hf sdpa", text):
        return False
    if code.name == "torchtitan":
        is_late = max(re.findall(r"20[12]\d-\d\d", str(p.get("framework"))), default="") >= "2025-10"
        return ("fp4" in gpu.peak_flops_per_s or is_late) and not re.search(r"mla|llama-4", model.lower())
    is_early = gpu.name.startswith("mi") and dated(code, p).year < 2025  # AMD's own kernels came with aiter
    return code.is_tuned and not is_early
