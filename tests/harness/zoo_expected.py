"""What is expected of every cell of the zoo, as data: a change fails, for the better too, but where a row says `!`.

A row has one sign for each of `CELLS`:

    =   equal to one plain process, to 1e-9 in float64
    -   refused in one line; another layout trains the model, as its stage 3 shows
    p   refused in one line that names `propose_plan`; the proposal is equal
    c   refused in one line; what it names, in `FIXES`, is equal
    !   a defect that is known, wrong or an error of another library: nothing is asked of it
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from harness.zoo import ZOO
from harness.zoo_cells import CELLS, Cell

EXPECTED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "======",
        "llama/tied": "======",
        "mistral": "====c=",
        "qwen2": "======",
        "qwen3": "======",
        "gemma": "======",
        "gemma2": "====c=",
        "gemma3_text": "====c=",
        "phi": "======",
        "phi3": "====c=",
        "olmo2": "======",
        "olmo3": "====c=",
        "granite": "======",
        "starcoder2": "====c=",
        "cohere": "======",
        "stablelm": "=p====",
        "smollm3": "======",
        "glm4": "======",
        "gpt2": "======",
        "gptj": "=p==-=",
        "gpt_neo": "=p==-=",
        "gpt_neox": "======",
        "codegen": "=p==-=",
        "opt": "======",
        "bloom": "=p==-=",
        "falcon": "=p==-=",
        "falcon/new": "=p==-=",
        "mpt": "=p==-=",
        "mamba": "=p==-=",
        "falcon_mamba": "=p==-=",
        "recurrent_gemma": "=p==-=",
        "lfm2": "=p==-=",
        "jamba": "=p==-=",
        "mixtral": "=p==c=",
        "qwen2_moe": "=p====",
        "qwen2_moe/window": "=p==c=",
        "qwen3_moe": "=p====",
        "deepseek_v2": "=p====",
        "deepseek_v3": "=p====",
        "phimoe": "=p==c=",
        "dbrx": "=p====",
        "bert": "======",
        "roberta": "======",
        "electra": "=p====",
        "distilbert": "=p====",
        "albert": "=p=c==",
        "roformer": "=p=c-=",
        "mobilebert": "=p==-=",
        "ibert": "=--c-=",
        "modernbert": "=p==c=",
        "deberta-v2": "=p=c-=",
        "t5": "====-=",
        "bart": "=p==-=",
        "pegasus": "=p==-=",
        "mbart": "=p==-=",
        "m2m_100": "=p==-=",
        "marian": "=p==-=",
        "blenderbot": "=p==-=",
        "vit": "=p==-=",
        "dinov2": "=p==-=",
        "whisper": "=p==-=",
        "wav2vec2": "=--=-=",
        "blip": "=p=--=",
        "llava": "==-=-=",
        "qwen2_vl": "==-=-=",
        "clip": "=p==-=",
        "siglip": "=p==-=",
        "patchtst": "=p==-=",
        "residual net": "=p=--=",
        "torch encoder": "=p==-=",
        "torch encoder, norm first": "=p==-=",
        "torch pair": "=p=c-=",
        "nano gpt": "=p==-=",
        "experts": "=p==-=",
        "rotary decoder": "=p==-=",
        "cross decoder": "=p=c-=",
        "conv net": "=p==-=",
        "unet": "=--=-=",
        "lstm": "=p=c-=",
        "adversaries": "=p==-=",
        "patches": "=p==-=",
        "adapters": "=p==-=",
    }
)
FIXES: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = MappingProxyType(
    {
        **{
            (each, "context"): {"options": {"sliding_window": None}}
            for each in ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
        },
        **{
            (each, "context"): {"options": {"layer_types": ["full_attention"] * 2}}
            for each in ("gemma3_text", "olmo3", "modernbert", "qwen2_moe/window")
        },
        **{
            (name, "pipeline"): {"sections": {"pipeline": {"replicate": [module]}}}
            for name, module in (
                ("ibert", "ibert.embeddings"),
                ("roformer", "roformer.encoder.embed_positions"),
                ("deberta-v2", "deberta.encoder.rel_embeddings"),
                ("torch pair", "embed"),
                ("cross decoder", "embed"),
            )
        },
        ("albert", "pipeline"): {"sections": {"pipeline": {"units": ["albert.encoder", "predictions"]}}},
        ("lstm", "pipeline"): {"sections": {"pipeline": {"units": ["embed", "lstm", "head"]}}},
        ("gemma2", "context"): {"options": {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}},
    }
)
# Where statistics run along, a plan that splits is to load them.
_TARGETS: Final[Mapping[str, str]] = MappingProxyType({"conv net": "proposal", "patchtst": "proposal"})
# What was wrong once, or no line at all.
_ONCE_WRONG: Final = frozenset(
    {
        *((each, "own plan") for each in ("gemma", "gemma2", "gemma3_text", "olmo2")),
        *((each, "proposal") for each in ("bart", "gptj", "falcon", "adapters")),
        *((each, "context") for each in ("mobilebert", "deepseek_v3")),
        *((each, "pipeline") for each in ("ibert", "llava", "experts")),
        *((each, "reload") for each in ("conv net", "patchtst")),
    }
)


def sign(family: str, cell: str) -> str:
    """What is expected of a cell."""
    return EXPECTED[family][CELLS.index(cell)]


def make_cell(family: str, name: str) -> Cell:
    """A cell; a reload goes on in the first layout that splits the model and is equal."""
    found = (each for each in ("own plan", "context", "pipeline", "proposal") if sign(family, each) == "=")
    # A stage that refuses leaves the others waiting for what it would have sent; it refuses however soon they give up.
    sections = {"run": {"timeout_s": 3.0}} if name == "pipeline" and sign(family, name) != "=" else {}
    return Cell(name, target=_TARGETS.get(family) or next(found, "stage 3"), sections=sections)


def fix(family: str, name: str) -> Cell:
    """What the error of a cell names instead."""
    cell = make_cell(family, name)
    return Cell(name, target=cell.target, **FIXES[family, name])


def quick_cells(family: str) -> list[str]:
    """One that trains, of every third family one more, and what was wrong once: every layout meets many families.

    A reload is enough alone: it trains in two layouts.
    """
    number = list(ZOO).index(family)
    # Tracing for a proposal takes as long as five other cells; a stage that refuses is waited for.
    is_slow = {"proposal": number % 8 != 0, "pipeline": sign(family, "pipeline") != "="}
    names = [each for each in CELLS if not is_slow.get(each)]
    trains = [each for each in names if sign(family, each) == "="]
    chosen = {trains[number % len(trains)], *names[(number // 2) % len(names) :][: number % 3 == 0]}
    chosen = {"reload"} if "reload" in chosen else chosen
    return [each for each in CELLS if each in chosen or (family, each) in _ONCE_WRONG]


def table() -> str:
    """All cells as a table of Markdown."""
    words = {"=": "equal", "!": "**not right yet**"}
    rows = [
        f"| {name} | " + " | ".join(words.get(each, "refused") for each in row) + " |" for name, row in EXPECTED.items()
    ]
    return "\n".join(["| | " + " | ".join(CELLS) + " |", "|---" * (len(CELLS) + 1) + "|", *rows])
