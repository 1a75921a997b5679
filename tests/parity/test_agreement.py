"""Agreement: what one rank reports reaches all, whatever its length, and no rank is waited for without end."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise.checkpoint.manifest import AbsentRankError, CheckpointError, DamagedError, agreed
from shardwise.comm.agreement import Agreement, Judge
from shardwise.comm.mesh import open_store

SUBJECT = "checkpoint of step 7"
# Ranks that show progress are not given up where the machine stalls for a while.
SHORT_S = 3.0


def make_agreement(rank: int, world_size: int, timeout_s: float = 20.0) -> Agreement:
    return Agreement(open_store(), range(world_size), rank, timeout_s)


def run(agreement: Agreement, work: Callable[[], str], judge: Judge = lambda reports: "all") -> str:
    return agreed(agreement.run("write", work, judge, SUBJECT))


def count_characters(rank: int, world_size: int, num_characters: int) -> tuple[list[int], list[int]]:
    """The length of the verdict, which is all that was said; and the keys in the store after each of three saves."""
    store, lengths, nums_keys = open_store(), [], []
    for number in range(3):
        agreement = Agreement(store, range(world_size), rank, 20.0, str(number))
        for _ in range(2):
            verdict = run(agreement, lambda: "ü" * num_characters, lambda said: "".join(said.values()))
            lengths.append(len(verdict))
        nums_keys.append(store.num_keys() if store and rank == 0 else 0)
        if store:
            dist.barrier()
    return lengths, nums_keys


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_characters", [0, 5 * 2**20])
def test_texts_of_any_length_pass_and_leave_nothing(ranks: WorkerPool, num_ranks: int, num_characters: int) -> None:
    """torch's store takes no value of more than 8 MiB."""
    results = ranks(num_ranks).run(count_characters, num_characters)
    assert [lengths for lengths, _ in results] == [[num_ranks * num_characters] * 6] * num_ranks
    # The first barrier leaves keys of its own.
    _, second, third = results[0][1]
    assert second == third


def fail(rank: int, world_size: int, failing: list[int]) -> tuple[str, str]:
    def work() -> str:
        if rank in failing:
            raise OSError(f"of rank {rank}\nand more \udcff")
        return "done"

    try:
        run(make_agreement(rank, world_size), work)
    except CheckpointError as error:
        return f"{error.code}: {error}", str(error.__cause__)
    return "", ""


@pytest.mark.parametrize(
    ("failing", "others"), [([0], ""), ([2], ""), ([1, 2], " (and on rank 2)"), ([0, 1, 2], " (and on ranks 1, 2)")]
)
def test_all_raise_the_first_error(ranks: WorkerPool, failing: list[int], others: str) -> None:
    results = ranks(3).run(fail, failing)
    first = failing[0]
    assert {text for text, _ in results} == {
        f"rank-failed: {SUBJECT} failed on rank {first}: OSError: of rank {first}{others}"
    }
    assert [cause.startswith("of rank") for _, cause in results] == [rank in failing for rank in range(3)]


def refuse(rank: int, world_size: int) -> str:
    """Rank 1 refuses with a code of its own: it is what the error of every rank has."""

    def work() -> str:
        if rank == 1:
            raise DamagedError("file-torn", "a file is torn")
        return "done"

    try:
        run(make_agreement(rank, world_size), work)
    except CheckpointError as error:
        return f"{error.code}: {error}"
    return ""


def test_a_code_reaches_all(ranks: WorkerPool) -> None:
    assert ranks(2).run(refuse) == [f"file-torn: {SUBJECT} failed on rank 1: a file is torn"] * 2


def disagree(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 0 meets damage, and rank 1 what no other checkpoint would help: that is the error of both."""

    def work() -> str:
        raise (CheckpointError("parameters-differ", "no fit") if rank else DamagedError("file-torn", "a file is torn"))

    try:
        run(make_agreement(rank, world_size), work)
    except CheckpointError as error:
        return type(error).__name__, f"{error.code}: {error}"
    return "", ""


def test_damage_counts_less_than_a_misfit(ranks: WorkerPool) -> None:
    text = f"parameters-differ: {SUBJECT} failed on rank 1: no fit (and on rank 0)"
    assert ranks(2).run(disagree) == [("CheckpointError", text)] * 2


def judge_badly(rank: int, world_size: int) -> str:
    try:
        run(make_agreement(rank, world_size), lambda: "done", lambda said: said[7])
    except CheckpointError as error:
        return f"{error.code}: {error}"
    return ""


def test_a_judgement_that_fails_reaches_all(ranks: WorkerPool) -> None:
    assert ranks(2).run(judge_badly) == [f"rank-failed: {SUBJECT} failed on rank 0: KeyError: 7"] * 2


def stay_away(rank: int, world_size: int, absent: int, timeout_s: float) -> str:
    """One rank works on and shows nothing of it, as if it were dead, until the others have given it up."""
    store = open_store()
    assert store is not None
    dist.barrier()
    agreement = Agreement(store, range(world_size), rank, timeout_s)

    def work() -> str:
        while rank == absent and store.add("num_gone", 0) < world_size - 1:
            time.sleep(0.02)
        return "done"

    try:
        run(agreement, work)
    except AbsentRankError as error:
        return f"{error.code}: {error}"
    finally:
        store.add("num_gone", 1)
    return ""


@pytest.mark.quick(1)
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_without_progress_is_given_up(ranks: WorkerPool, absent: int) -> None:
    texts = ranks(3).run(stay_away, absent, SHORT_S)
    expected = (
        f"rank-absent: {SUBJECT} failed on rank {absent}: it has shown no progress for {SHORT_S:g} s; see its log"
    )
    assert texts == [expected] * 3  # also where it comes back


def work_slowly(rank: int, world_size: int, timeout_s: float) -> str:
    agreement = make_agreement(rank, world_size, timeout_s)

    def work() -> str:
        end_s = time.monotonic() + (1.4 * timeout_s if rank == 1 else 0)
        while time.monotonic() < end_s:
            agreement.show_progress()
            time.sleep(0.05)
        return "done"

    return run(agreement, work)


def test_a_slow_rank_with_progress_is_not_given_up(ranks: WorkerPool) -> None:
    """Rank 0 waits for rank 1, and rank 2 for rank 0, for longer than the time-out."""
    assert ranks(3).run(work_slowly, SHORT_S) == ["all"] * 3


def test_a_store_that_is_gone_is_said() -> None:
    class GoneStore(dist.Store):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Broken pipe")

    agreement = Agreement(dist.PrefixStore("test", GoneStore()), (0, 1), 1, 5.0)
    with refused("store-gone", "step 7"):
        run(agreement, lambda: "done")
    with refused("store-gone", "ranks 0, 1", "the door"):
        agreement.compare("the door", "", lambda notes: "")
