"""The relation on rows small enough to read: each case names, by text, what an action must follow."""

import pytest

from shardwise.schedule import Action, ActionKind, Schedule, dependencies


def followed(text: str, action: str, rank: int = 0) -> set[str]:
    """What the last such action of a rank follows, as `rank:action`; the rows must name each action once."""
    schedule = Schedule.parse(text)
    index = max(i for i, each in enumerate(schedule.ranks[rank]) if str(each) == action)
    return {f"{r}:{schedule.ranks[r][i]}" for r, i in dependencies(schedule)[rank, index]}


GATHERED = "rank 0: 0UNSHARD[a] 0UNSHARD[b] 0F0[a] 0F0[b] 0RESHARD[b] 0B0[b] 0REDUCE[b] 0B0[a] 0REDUCE[a] 0STEP[b]"


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("0UNSHARD[b]", {"0:0UNSHARD[a]"}),  # its stream
        ("0F0[a]", {"0:0UNSHARD[a]"}),  # not b's: overlap
        ("0F0[b]", {"0:0UNSHARD[b]", "0:0F0[a]"}),
        ("0RESHARD[b]", {"0:0F0[b]", "0:0UNSHARD[b]"}),
        ("0REDUCE[b]", {"0:0B0[b]"}),  # not the backward after it: overlap
        ("0B0[a]", {"0:0UNSHARD[a]", "0:0F0[a]", "0:0B0[b]"}),
        ("0REDUCE[a]", {"0:0B0[a]", "0:0REDUCE[b]"}),
        ("0STEP[b]", {"0:0B0[a]", "0:0REDUCE[a]"}),  # written after all REDUCEs: the global norm
    ],
)
def test_groups_of_a_data_parallel_row(action: str, expected: set[str]) -> None:
    assert followed(GATHERED, action) == expected


def test_step_written_early_waits_for_no_later_reduce() -> None:
    early = "rank 0: 0F0[a] 0F0[b] 0B0[b] 0REDUCE[b] 0STEP[b] 0B0[a] 0REDUCE[a] 0STEP[a]"
    assert followed(early, "0STEP[b]") == {"0:0B0[b]", "0:0REDUCE[b]"}


def test_unshard_takes_the_memory_of_earlier_reshards_and_the_update_of_its_step() -> None:
    row = "rank 0: 0UNSHARD[a] 0F0[a] 0RESHARD[a] 0UNSHARD[b]"
    assert followed(row, "0UNSHARD[b]") == {"0:0UNSHARD[a]", "0:0RESHARD[a]"}
    row = "rank 0: 0F0 0B0 0REDUCE 0STEP 0UNSHARD"
    assert followed(row, "0UNSHARD") == {"0:0STEP"}


def test_whole_stage_computations_use_every_group() -> None:
    row = "rank 0: 0UNSHARD[a] 0UNSHARD[b] 0F0 0B0 0REDUCE[b] 0REDUCE[a]"
    assert followed(row, "0F0") == {"0:0UNSHARD[a]", "0:0UNSHARD[b]"}
    assert followed(row, "0REDUCE[b]") == {"0:0B0"}


def test_recompute_and_split_backward_follow_their_forward() -> None:
    row = "rank 0: 0F0 0F1 0RECOMPUTE0 0B0 0I1 0W1 0REDUCE"
    assert followed(row, "0RECOMPUTE0") == {"0:0F0", "0:0F1"}
    assert followed(row, "0B0") == {"0:0F0", "0:0RECOMPUTE0"}
    assert followed(row, "0W1") == {"0:0I1"}
    assert followed(row, "0REDUCE") == {"0:0W1", "0:0B0"}


def test_stages_exchange_data_through_transfers_where_they_are_written() -> None:
    bare = "rank 0: 0F0 0B0\nrank 1: 1F0 1B0"
    assert followed(bare, "1F0", rank=1) == {"0:0F0"}
    assert followed(bare, "0B0") == {"0:0F0", "1:1B0"}
    sent = "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0"
    assert followed(sent, "0SEND_F0") == {"0:0F0"}
    assert followed(sent, "1RECV_F0", rank=1) == {"0:0SEND_F0"}
    assert followed(sent, "1F0", rank=1) == {"1:1RECV_F0"}
    assert followed(sent, "0RECV_B0") == {"1:1SEND_B0"}
    assert followed(sent, "0B0") == {"0:0F0", "0:0RECV_B0"}


def test_transfers_of_one_channel_stay_in_order_and_channels_run_side_by_side() -> None:
    text = (
        "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0B0\n"
        "rank 1: 1RECV_F0 1RECV_B0 1RECV_F1 1F0 1F1 1SEND_F0 1B0 1SEND_B0\nrank 2: 2RECV_F0 2F0 2B0 2SEND_B0"
    )
    assert followed(text, "0SEND_F1") == {"0:0SEND_F0", "0:0F1"}
    assert followed(text, "1RECV_F1", rank=1) == {"0:0SEND_F1", "1:1RECV_F0"}
    assert followed(text, "1RECV_B0", rank=1) == {"2:2SEND_B0"}
    assert followed(text, "1SEND_B0", rank=1) == {"1:1B0"}


def test_only_the_first_group_waits_for_the_stage_before_and_for_its_last() -> None:
    text = "rank 0: 0F0[a] 0F0[b]\nrank 1: 1F0[c] 1F0[d]"
    assert followed(text, "1F0[c]", rank=1) == {"0:0F0[b]"}
    assert followed(text, "1F0[d]", rank=1) == {"1:1F0[c]"}


def test_replicas_of_stages_pair_in_order_of_rank() -> None:
    text = "rank 0: 0F0\nrank 1: 0F0\nrank 2: 1F0\nrank 3: 1F0"
    assert dependencies(Schedule.parse(text))[2, 0] == ((0, 0),)
    assert dependencies(Schedule.parse(text))[3, 0] == ((1, 0),)


def test_stages_on_one_rank_need_no_transfer() -> None:
    assert followed("rank 0: 0F0 1F0 1B0 0B0", "0B0") == {"0:0F0", "0:1B0"}


def test_fetch_and_evict_keep_the_actions_of_their_group_in_order() -> None:
    row = "rank 0: 0FETCH[a] 0UNSHARD[a] 0F0[a] 0F0[b] 0EVICT[a]"
    assert followed(row, "0UNSHARD[a]") == {"0:0FETCH[a]"}
    assert followed(row, "0EVICT[a]") == {"0:0FETCH[a]", "0:0UNSHARD[a]", "0:0F0[a]"}
    assert followed(row, "0F0[b]") == {"0:0F0[a]"}


OWN_STREAMS = {kind: kind.name for kind in ActionKind}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0UNSHARD 0F0", "0UNSHARD"),
        ("0UNSHARD 0F0 0RECOMPUTE0", "0F0 0UNSHARD"),
        ("0UNSHARD 0F0 0B0", "0F0 0UNSHARD"),
        ("0UNSHARD 0F0 0RECOMPUTE0 0B0", "0F0 0RECOMPUTE0 0UNSHARD"),
        ("0UNSHARD 0F0 0RECOMPUTE0 0I0", "0F0 0RECOMPUTE0 0UNSHARD"),
        ("0F0 0I0 0W0", "0I0"),
        ("0F0 0F1 0B0 0REDUCE 0B1", "0B0 0F1 0REDUCE"),  # gradients are free again, and B0 is in B1's stream
        ("0F0 0I0 0REDUCE 0W0", "0I0 0REDUCE"),
        ("0UNSHARD 0F0 0RECOMPUTE0 0B0 0I1 0RESHARD", "0B0 0F0 0I1 0RECOMPUTE0 0UNSHARD"),
        ("0F0 0B0 0I1 0W1 0REDUCE", "0B0 0W1"),
        ("0F0 0B0 0REDUCE 0STEP", "0REDUCE"),
        ("0STEP 0UNSHARD", "0STEP"),
        ("0F0 0STEP 0EVICT 0FETCH", "0EVICT 0F0 0STEP"),
        ("0F0 0STEP 0FETCH 0EVICT", "0F0 0FETCH 0STEP"),
        ("0EVICT 0FETCH 0STEP", "0EVICT 0FETCH"),
    ],
)
def test_what_a_kind_follows_beside_its_stream(row: str, expected: str) -> None:
    """With a stream for each kind, only rules 2 to 4 are left: they may not lean on the order of streams."""
    schedule = Schedule.parse(f"rank 0: {row}")
    last = len(schedule.ranks[0]) - 1
    earlier = dependencies(schedule, OWN_STREAMS)[0, last]
    assert sorted(str(schedule.ranks[0][index]) for _, index in earlier) == expected.split()


def test_streams_are_a_parameter() -> None:
    row = (
        Action(ActionKind.FORWARD, micro_batch=0),
        Action(ActionKind.FORWARD, micro_batch=1),
        Action(ActionKind.UNSHARD),
    )
    one_stream = dict.fromkeys(ActionKind, "all")
    assert dependencies(Schedule((row,)), one_stream)[0, 2] == ((0, 1),)
    assert dependencies(Schedule((row,)))[0, 2] == ()
    sent = Schedule.parse("rank 0: 0F0 0SEND_F0 0F1\nrank 1: 1RECV_F0 1F0 1F1")
    assert (0, 1) in dependencies(sent, one_stream)[0, 2]  # a stream of other kinds too keeps its transfers in line
