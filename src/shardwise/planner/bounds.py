"""What outlines take at least, in closed form.

>>> round(bubble_share("1f1b", 4, 8, 1), 3)
0.375
"""

from __future__ import annotations

from typing import Final

from shardwise.planner.candidates import Outline

# Forward, and gradients of inputs and of weights, do not take quite the same.
_OF_THIRDS: Final = 0.9


def bubble_share(schedule: str, pp: int, num_micro_batches: int, virtual_stages: int) -> float:
    """The least bubble of a pipeline, by what its ranks compute.

    With p ranks, m micro-batches and v stages a rank: (p - 1) / (m v) by Narayanan et al. 2021 (arXiv 2104.04473),
    section 2.2, a third of it for zero-bubble H1 and nothing for H2 and V, were F = B = W (Qi et al. 2023, arXiv
    2401.10241, sections 2.3 and 6). With few micro-batches the first rank waits for the first of them to come back,
    p (F + B) or with W, and has the other backwards to do behind it, of V half of them.

    >>> bubble_share("interleaved", 4, 8, 3), bubble_share("zb-h2", 4, 8, 1)
    (0.125, 0.0)
    >>> bubble_share("interleaved", 4, 1, 3), round(bubble_share("zb-h2", 4, 1, 1), 3)
    (3.0, 1.8)
    """
    p, m = pp, num_micro_batches
    if schedule == "zb-v":
        return _OF_THIRDS * max(0.0, 2 * p - 2 * m - 0.5) / (3 * m)
    if schedule.startswith("zb-"):
        # Less than the third, since W may be longer than the others.
        filled = (p - 1) / (4 * m) if schedule == "zb-h1" else 0.0
        return max(filled, _OF_THIRDS * (2 * p - m - 1) / (3 * m))
    return max((p - 1) / (m * virtual_stages), (p - m) / m)


def pipeline_of(outline: Outline) -> tuple[str, int, int, int]:
    return outline.schedule, outline.pp, outline.num_micro_batches, outline.virtual_stages
