"""The words for styles that tables and Hugging Face's plans use, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from shardwise.layout.tensor_plan import LayerStyle

NO_TENSOR: Final = "use mesh.dp_shard with zero.stage=3 in place of mesh.tp"


@dataclass(frozen=True)
class Style:
    """What a word says of a module.

    Attributes:
        kind: a layer's style; replicate: it stays whole; partial: it stays whole, and its gradient is summed.
        gathers_output: see `LayerSplit`.
        splits_input: see `LayerSplit`.
        num_parts: equal logical tensors in its weight, one behind the other.
    """

    kind: LayerStyle | Literal["replicate", "partial"]
    gathers_output: bool = False
    splits_input: bool = False
    num_parts: int = 1


_COLUMN_GATHER = Style("column", gathers_output=True)
_ROW_SPLIT = Style("row", splits_input=True)

OUR_WORDS: Mapping[str, Style] = {
    "column": Style("column"),
    "row": Style("row"),
    "column-gather": _COLUMN_GATHER,
    "row-split": _ROW_SPLIT,
    "vocab": Style("vocab"),
    "head": Style("head"),
    "column-embedding": Style("column-embedding"),
    "replicate": Style("replicate"),
    "partial": Style("partial"),
}

HUGGING_FACE_WORDS: Mapping[str, Style] = {
    "colwise": Style("column"),
    "rowwise": Style("row"),
    "colwise_gather_output": _COLUMN_GATHER,
    "colwise_rep": _COLUMN_GATHER,
    "rowwise_split_input": _ROW_SPLIT,
    "rowwise_rep": _ROW_SPLIT,
    "packed_colwise": Style("column", num_parts=2),
    "packed_rowwise": Style("row", num_parts=2),
    "embedding_rowwise": Style("vocab"),
    # There the output is gathered: the same values as from a vocabulary split by rows, which also suits a tied head.
    "embedding_colwise": Style("vocab"),
    "replicated_with_grad_allreduce": Style("partial"),
    "replicate": Style("replicate"),
}
