"""The section about published runs of sources that no rule or constant of the planner was made by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner_document import far_off_table, sources_table
from planner_scores import Scored
from planner_spread import within_interval

WORDS = """## Sources never seen

{rows} rows of {sources} other sources, read after the models were made, and priced once before any of them was looked
into: that is the figure to expect of runs that nobody has calibrated for. Where a row then showed the planner to be
wrong by physics or by its source's own words, that was mended, and no constant was fitted:

- devices in nodes of four were priced as if links joined eight of them, so that half of what data ranks exchange took
  no network;
- gradients that stay whole between micro-batches were priced as reduced after each of them, though they are after the
  last alone;
- a row could not say that gradients are reduced in fp32 where parameters are bf16, nor that the optimizer keeps no
  master in fp32 (`fp32_grad_reduce`, `fp32_master`).

`now` is after these. It is no longer a figure of unseen rows, which `first priced` stays.
"""


def unseen_section(
    rows: Sequence[Scored], first_priced: Mapping[str, float | None], now: Mapping[str, float | None]
) -> str:
    """Both figures, errors by source, and what is far off."""
    told = [name for name in first_priced if now.get(name) is not None]
    lines = ["| figure | first priced | now |", "|---|---|---|"]
    lines += [f"| {name} | {_share(first_priced[name])} | {_share(now[name])} |" for name in told]
    words = WORDS.format(rows=len(rows), sources=len({each.case.group for each in rows}))
    return "\n".join(
        [
            words,
            *lines,
            f"\nOf them {within_interval(rows):.0%} lie in the interval of their prediction, meant to hold 80%.",
            "\nBy source, as they are priced now.\n",
            sources_table(rows, {}),
            "\nThose whose time is off by more than 20%.\n",
            far_off_table(rows, "time"),
            "\nThose whose memory is.\n",
            far_off_table(rows, "memory") + "\n",
        ]
    )


def _share(figure: float | None) -> str:
    return "–" if figure is None else f"{figure:.1%}"
