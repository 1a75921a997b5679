"""Why predictions of some published runs are far off: what is known, and what is only supposed.

An explanation belongs to rows by their source and what their model, device and layout are, not by any one's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner_scores import Scored


@dataclass(frozen=True)
class Outlier:
    """An explanation.

    Attributes:
        group: the source of the rows.
        mark: that their ids hold.
        of: the figure that is off.
        is_checked: whether it was checked, by the row's own data or its source's words; else it is a hypothesis.
    """

    group: str
    mark: str
    words: str
    of: Literal["time", "memory"] = "time"
    is_checked: bool = False


OUTLIERS = (
    Outlier(
        "sailor_sosp25_validation",
        "GPT-NEO",
        "The row's vocabulary of 128,256 makes the last stage's head as heavy as several blocks, which would unbalance "
        "the 7/9/9/9 blocks that are written; the real vocabulary was presumably GPT-Neo's own 50,257.",
    ),
    Outlier(
        "sailor_sosp25_validation",
        "OPT-350",
        "Bound by the host: about 3 ms a layer for kernels of one small slice, which the planner launches faster.",
    ),
    Outlier(
        "nanotron_best_configs",
        "1.34B-64nodes",
        "The best of a sweep at a few percent of the peak: one micro-batch on 512 devices, 0.4 s where kernels take a "
        "tenth of a second. What the rest is, is not published.",
    ),
    Outlier(
        "nanotron_best_configs",
        "80B",
        "Presumably tensor parallelism whose collectives wait for each other, on a network that is not described.",
    ),
    Outlier(
        "torchtitan",
        "b200-8b-bf16",
        "Its source says that the devices were limited in power; the runs compared dtypes, and were not tuned.",
        is_checked=True,
    ),
    Outlier(
        "torchtitan",
        "405b",
        "fp8 at 500 W a device, and as many micro-batches as stages, so that the bubble is half of the step and each "
        "error of a stage counts twice.",
    ),
    Outlier("torchtitan", "asynctp", "Asynchronous tensor parallelism takes multiprocessors from matrix products."),
    Outlier(
        "internevo",
        "1024",
        "States sharded over 1,024 ranks: presumably one collective a tensor, too small for the network's bandwidth.",
    ),
    Outlier(
        "internevo",
        "mem-",
        "19 to 29 GiB above the states whatever the layout, which looks like a reserved pool.",
        of="memory",
    ),
    Outlier(
        "nanotron_best_configs",
        "B-",
        "Its code presumably cuts by cost: the last stage has fewer blocks for its head, the first, which logs, more. "
        "The row does not say so; cut so, the rows of this source would be off by 9.5%.",
        of="memory",
    ),
    Outlier(
        "sailor_sosp25_validation",
        "OPT-350",
        "About 5 GiB above the tensors whatever the layout, on a device whose context and communicators, as another "
        "tool's logs of the same cluster have them, take 3 to 4.",
        of="memory",
    ),
    Outlier(
        "bigscience_bloom_sweep",
        "L65",
        "One node: presumably DeepSpeed's buckets of 500 million elements, and gradients that its step copies to fp32.",
        of="memory",
    ),
    Outlier(
        "narayanan2021_table2",
        "zero3",
        "Presumably the DeepSpeed of 2021 hid less of stage 3's gathers than the planner assumes.",
    ),
    Outlier(
        "megatron_readme_2020", "dp-8B", "Presumably gradients were already reduced while the backward ran, which the "
        "planner does not assume of code of that time."
    ),
    Outlier("megatron_readme_2020", "V100", "V100 has default constants: too few rows to fit any.",
        is_checked=True,),
    Outlier(
        "fms_fsdp", "70b", "`selective` there is every k-th block, and k is not published; every block is assumed."
    ),
    Outlier(
        "nemo_2407_h100_fp8", "sft-70b", "Fine-tuning on packed sequences: scores are taken only within each sample, "
        "while the planner prices one long sequence; and recomputation may have been partial."
    ),
    Outlier(
        "megatron_bridge",
        "LLAMA3_70B-DGX-GB",
        "How much was recomputed, or held on the host, is not published; the planner takes the least that fits.",
    ),
    Outlier(
        "llm_foundry", "13b-s2048-n16", "Without recomputation the caching allocator is presumably near its limit, and "
        "retries."
    ),
    Outlier(
        "kempnerforge", "weak-70b-8",
        "Its source says that memory bounds it, at 128.5 of 141 GB, and takes it for no baseline.",
        is_checked=True,
    ),
    Outlier(
        "kempnerforge", "mfu-01",
        "One H200 presumably holds more of its clock than the H100 of which most of the family's rows are: at the "
        "speed that is fitted, matrix products alone would take as long as the whole step did.",
    ),
    Outlier(
        "kempnerforge", "175b-360",
        "Collectives of tensor ranks presumably hide beside products this large.",
    ),
    Outlier(
        "xtuner", "8k-sp1",
        "Stage 3 over nodes whose network is not described, with one sequence of 8,192 tokens to hide each gather.",
    ),
    Outlier(
        "xtuner", "k-sp",
        "Presumably near the device's memory, where the allocator retries; from 16 ranks on sequences are split over "
        "nodes whose network is not described.",
    ),
    Outlier(
        "olmo_core", "",
        "Norms of queries and keys, and a second loss over logits in fp32, are not priced.",
    ),
    Outlier(
        "bloomberggpt", "",
        "Presumably scores that pass through memory several times: its attention is fused in the softmax alone, and "
        "adds biases of positions.",
    ),
    Outlier(
        "nemotron4_15b", "",
        "Presumably tensor-parallel collectives run beside products, and gradients are sent in bf16; neither is said.",
    ),
)  # fmt: skip


def explanation(each: Scored, of: Literal["time", "memory"]) -> str:
    """Of a row's figure; that none is known where none is."""
    for outlier in OUTLIERS:
        if (outlier.group, outlier.of) == (each.case.group, of) and outlier.mark in each.case.id:
            return outlier.words if outlier.is_checked else f"Hypothesis: {outlier.words}"
    return "Not explained."
