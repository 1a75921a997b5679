"""What is expected of every cell of the zoo, as data: a change fails, for the better too, but where a row says `!`.

A row has one sign for each of `CELLS`:

    =   equal to one plain process, to 1e-9 in float64
    -   refused in one line that names another layout, which trains the model, as its stage 3 shows
    p   refused in one line that names `propose_plan`; the proposal is equal
    c   refused in one line that names what `FIXES` has; that is equal
    !   a defect that is known, wrong or an error of another library: nothing is asked of it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        "jamba": "====-=",
        "mixtral": "====c=",
        "qwen2_moe": "======",
        "qwen2_moe/window": "====c=",
        "qwen3_moe": "======",
        "deepseek_v2": "======",
        "deepseek_v3": "======",
        "phimoe": "====c=",
        "gpt_oss": "====-=",
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
        "qwen2_5_vl": "==-=-=",
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


@dataclass(frozen=True)
class Fix:
    """A cell that trains in place of one that is refused, and the word by which the error must name it."""

    word: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Any] = field(default_factory=dict)


def _pipeline(key: str, *names: str) -> Fix:
    return Fix(f"pipeline.{key}", sections={"pipeline": {key: [*names]}})


_FULL: Final = {"layer_types": ["full_attention"] * 2}
FIXES: Final[Mapping[tuple[str, str], Fix]] = MappingProxyType(
    {
        **{
            (each, "context"): Fix("sliding_window=None", options={"sliding_window": None})
            for each in ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
        },
        **{
            (each, "context"): Fix("layer_types of full attention", options=_FULL)
            for each in ("gemma3_text", "olmo3", "modernbert", "qwen2_moe/window")
        },
        **{
            (name, "pipeline"): _pipeline("replicate", module)
            for name, module in (
                ("ibert", "ibert.embeddings"),
                ("roformer", "roformer.encoder.embed_positions"),
                ("deberta-v2", "deberta.encoder.rel_embeddings"),
                ("torch pair", "embed"),
                ("cross decoder", "embed"),
            )
        },
        ("albert", "pipeline"): _pipeline("units", "albert.encoder", "predictions"),
        ("lstm", "pipeline"): _pipeline("units", "embed", "lstm", "head"),
        ("gemma2", "context"): Fix("softcap", options={**_FULL, "attn_logit_softcapping": None}),
    }
)
# What trains wherever a layout is refused: stage 3, or without the axis.
_ELSEWHERE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "own plan": ("zero.stage=3",),
        "proposal": ("zero.stage=3",),
        "pipeline": ("zero.stage=3",),
        "context": ("zero.stage=3", "mesh.cp=1"),
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
    found = FIXES[family, name]
    return Cell(name, target=cell.target, options=found.options, sections=found.sections)


def words(family: str, name: str) -> tuple[str, ...]:
    """The words of which the error of a refused cell must have one: what they name is tried, and trains the model."""
    if sign(family, name) == "c":
        return (FIXES[family, name].word,)
    return ("propose_plan",) if sign(family, name) == "p" else _ELSEWHERE[name]


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
