"""Every stage on one rank, looped and in a V."""

import pytest

from harness.refusals import refused
from shardwise.schedule import StagePlacement

PLACEMENTS = [StagePlacement(p, v) for p in (1, 2, 5) for v in (1, 2, 3)]
PLACEMENTS += [StagePlacement(p, 2, is_v_shaped=True) for p in (1, 2, 5)]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_stage_is_on_one_rank_which_holds_as_many_as_any_other(placement: StagePlacement) -> None:
    held = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    assert sorted(stage for stages in held for stage in stages) == list(range(placement.num_stages))
    assert {len(stages) for stages in held} == {placement.stages_per_rank}
    for rank, stages in enumerate(held):
        assert list(stages) == sorted(stages)
        assert [placement.rank_of(stage) for stage in stages] == [rank] * len(stages)


def test_looped_and_v() -> None:
    assert [StagePlacement(3, 2).rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [StagePlacement(3, 2, is_v_shaped=True).rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_refusals() -> None:
    with refused("count-below-one", "num_ranks=0"):
        StagePlacement(0)
    with refused("count-below-one", "stages_per_rank=0"):
        StagePlacement(1, 0)
    with refused("v-has-two-stages", "stages_per_rank=3"):
        StagePlacement(2, 3, is_v_shaped=True)
    for stage in (-1, 4):
        with refused("stage-out-of-range", f"stage={stage}", "4"):
            StagePlacement(2, 2).rank_of(stage)
    for rank in (-1, 2):
        with refused("rank-out-of-range", f"rank={rank}", "2"):
            StagePlacement(2, 2).stages_of(rank)
