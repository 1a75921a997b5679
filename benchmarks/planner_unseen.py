"""Writes the section about published runs of sources from which no rule or constant of the planner was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner_document import far_off_table, sources_table
from planner_scores import Scored
from planner_spread import within_interval

WORDS = """## Sources never seen

These {rows} rows of {sources} other sources were read after the models were made, and priced once before any of them
was studied. `first priced` is the error to expect for runs that the planner was not calibrated for. Where a row then
showed that the planner was wrong by physics or by its source's own words, the planner was corrected, and no constant
was fitted:

- devices in nodes of four were priced as if links joined eight of them, so half of what data ranks exchange used no
  network;
- gradients that stay whole between micro-batches were priced as reduced after each of them, though they are reduced
  after the last one only;
- a row could not say that gradients are reduced in fp32 where parameters are bf16, nor that the optimizer keeps no
  master in fp32 (`fp32_grad_reduce`, `fp32_master`);
- a row could not say that tensor-parallel ranks gather the logits and each hold the whole table of tokens, nor that the
  loss is taken in the logits' own dtype (`gathers_logits`, `whole_embedding`, `narrow_loss`). The one source with
  memory does all three: `kempnerforge/distributed/tensor_parallel.py` and `scripts/train.py`;
- where sharded gradients are whole between micro-batches, their shards were counted too, which come with the last one.

`now` is the error after these corrections, so it is no longer a figure of unseen rows.
"""


def unseen_section(
    rows: Sequence[Scored], first_priced: Mapping[str, float | None], now: Mapping[str, float | None]
) -> str:
    """Return the section: both figures, errors by source, and what is far off."""
    names = [name for name in first_priced if now.get(name) is not None]
    lines = ["| figure | first priced | now |", "|---|---|---|"]
    lines += [f"| {name} | {_share(first_priced[name])} | {_share(now[name])} |" for name in names]
    words = WORDS.format(rows=len(rows), sources=len({each.case.group for each in rows}))
    return "\n".join(
        [
            words,
            *lines,
            f"\nOf them {within_interval(rows):.0%} are within the interval of their prediction, which is meant to "
            "contain 80%.",
            "\nErrors by source, as the rows are priced now:\n",
            sources_table(rows, {}),
            "\nRows whose time is off by more than 20%:\n",
            far_off_table(rows, "time"),
            "\nRows whose memory is off by more than 20%:\n",
            far_off_table(rows, "memory") + "\n",
        ]
    )


def _share(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.1%}"
