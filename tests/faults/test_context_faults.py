"""Ranks of one sequence that die, raise or go another way: the others say who and in which exchange, and in time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.pool import RankError, WorkerPool
from harness.reference import check_parity
from harness.split_sequences import make_case, train_split, train_whole
from harness.tensor import batches_of
from harness.time_outs import answers_may_be_late, fail_after
from harness.training import make_config, merge_ranks
from harness.waiting import PATIENCE_S
from shardwise import Engine, initialize
from shardwise.comm.collectives import Comm

pytestmark = pytest.mark.begin

TIMEOUT_S, SHORT_S = 60.0, 5.0


def make_engine(num_ranks: int, transport: str = "ring", **run: Any) -> Engine:
    case = make_case("bigbird")
    overrides = {
        "mesh": {"cp": num_ranks},
        "context": {"transport": transport},
        "run": {"device": "cpu", "timeout_s": TIMEOUT_S, "watchdog_s": 1.0, **run},
    }
    return initialize(case.build(torch.float64), make_config(1, overrides), loss_fn=case.loss)


def error_of_a_step(engine: Engine) -> str:
    """Its first line."""
    try:
        engine.train_step(batches_of(engine, make_case("bigbird"), 0, 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def die_in_an_exchange(rank: int, world_size: int, transport: str, number: int, folder: Path) -> None:
    """The last rank is killed in the midst of an exchange, whose messages may be on their way; the others write."""
    engine = make_engine(world_size, transport)
    exchange, num_exchanges = Comm.exchange, 0

    def exchange_or_die(comm: Comm, *args: Any) -> Any:
        nonlocal num_exchanges
        num_exchanges += 1
        pending = exchange(comm, *args)
        if rank == world_size - 1 and num_exchanges == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return pending

    start_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "exchange", exchange_or_die)
        text = error_of_a_step(engine)
    is_in_time = time.monotonic() - start_s < TIMEOUT_S
    (folder / str(rank)).write_text(text if is_in_time else f"late: {text}")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("num_ranks", "transport", "number", "names"),
    [(2, "ring", 1, "keys"), (4, "ring", 8, "keys|gradients"), (2, "ulysses", 3, "heads|tokens")],
    ids=["forward", "backward", "heads"],
)
def test_a_rank_killed_in_an_exchange_is_named_by_the_others(
    ranks: WorkerPool, tmp_path: Path, num_ranks: int, transport: str, number: int, names: str
) -> None:
    last = num_ranks - 1
    with pytest.raises(RankError, match=f"rank {last} of {num_ranks} died"):
        ranks(num_ranks).run(die_in_an_exchange, transport, number, tmp_path, grace_s=PATIENCE_S)
    texts = [each.read_text() for each in tmp_path.iterdir()]
    # The first of several to report ends too, and those that report after it may find it dead.
    named = str(last) if num_ranks == 2 else r"\d"
    expected = (
        rf"CommError: rank \d failed in exchange #\d+ of context ({names}) over cp .*: rank {named} does not answer"
    )
    assert len(texts) == last
    assert all(re.match(expected, each) for each in texts), texts


def raise_in_a_layer(engine: Engine) -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("a bad layer")

    engine.model.blocks[1].attention.register_forward_pre_hook(fail)


def skip_attention(engine: Engine) -> None:
    def skip(q: Tensor, *_: object) -> Tensor:
        return q

    engine.model.blocks[0].attention.attend = skip


def go_another_way(rank: int, world_size: int, alter: Callable[[Engine], None], checks: bool, folder: Path) -> None:
    """Rank 1's model is another; both write what they say, and fail, so that the pool ends them with all under way."""
    engine = make_engine(world_size, check_collectives=checks)
    if rank == 1:  # which waits on while the other's time is over
        alter(engine)
    else:
        fail_after(engine.comm.comm_log, SHORT_S)
    with answers_may_be_late():
        (folder / f"{rank}.part").write_text(error_of_a_step(engine))
    (folder / f"{rank}.part").rename(folder / str(rank))
    while not (folder / "0").exists():
        time.sleep(0.05)
    raise RuntimeError("both wrote")


def texts_of(ranks: WorkerPool, alter: Callable[[Engine], None], checks: bool, folder: Path) -> dict[str, str]:
    """Return what each rank wrote."""
    with pytest.raises(RankError, match="both wrote"):
        ranks(2).run(go_another_way, alter, checks, folder)
    return {each.name: each.read_text() for each in folder.iterdir()}


def test_a_rank_that_raises_amid_a_layer_is_named_by_the_other(ranks: WorkerPool, tmp_path: Path) -> None:
    texts = texts_of(ranks, raise_in_a_layer, False, tmp_path)
    waiting = texts["0"]
    assert texts["1"] == "RuntimeError: a bad layer"
    assert re.match(r"CommError: rank 0 failed in exchange #\d+ of context keys over cp", waiting), waiting
    assert "rank 1 has failed: RuntimeError: a bad layer" in waiting, waiting


@pytest.mark.quick(1)
@pytest.mark.parametrize("checks", [True, False])
def test_ranks_that_go_different_ways_learn_where(ranks: WorkerPool, checks: bool, tmp_path: Path) -> None:
    first = texts_of(ranks, skip_attention, checks, tmp_path)["0"]
    compared = r"rank 1 is at \w+ #\d+ of .*, rank 0 at exchange #\d+ of context keys "
    waiting = r"rank 0 waits in exchange #\d+ of context keys .*; rank 1 waits in \w+ #\d+ of "
    assert re.search(compared if checks else waiting, first), first


@pytest.mark.quick(1)
@pytest.mark.parametrize("transport", ["ring", "ulysses"])
def test_checked_collectives_train_the_same(ranks: WorkerPool, transport: str) -> None:
    overrides = {
        "mesh": {"cp": 2, "tp": 2},
        "run": {"check_collectives": True},
        "context": {"transport": transport},
        "zero": {"stage": 3},
    }
    check_parity(merge_ranks(ranks(4).run(train_split, "bigbird", overrides)), train_whole("bigbird", 1))
