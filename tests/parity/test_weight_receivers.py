"""Receivers that fail at every step, are slow or stop early: the engine stays sound, and the ranks agree."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.hand_over import (
    ReceiverError,
    SglangReceiver,
    VllmReceiver,
    begin,
    deliver_to_vllm,
    digest_of_all,
    send_to_sglang,
    send_to_vllm,
)
from harness.pool import WorkerPool
from shardwise import Engine, initialize
from shardwise.checkpoint.deltas import digest_of
from shardwise.comm.records import CommError
from shardwise.config.errors import CodedError, code_of

Options = Mapping[str, Any]
STAGE_3: Options = {"zero": {"stage": 3}}


def make_engine(options: Options = STAGE_3) -> Engine:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(10, 16), *blocks, nn.Linear(16, 10, bias=False))
    model[-1].weight = model[0].weight
    config = {
        "zero": {"blocks": ["1", "2", "3"]},
        "run": {"device": "cpu", "timeout_s": 20.0},
        "optimizer": {"lr": 0.01},
    }
    config = {**config, **{key: {**config.get(key, {}), **value} for key, value in options.items()}}
    return initialize(model, config, loss_fn=lambda output, batch: (output.logsumexp(-1).sum(), output[..., 0].numel()))


def train(engine: Engine) -> float:
    return engine.train_step([torch.arange(6).view(2, 3) + engine.comm.rank]).loss


def said(act: Callable[[], object]) -> tuple[str, str]:
    """The class and the code of what is raised; empty texts where nothing is."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, code_of(error, "")
    return "", ""


def hand_over(source: Any, protocol: str, is_sender: bool, fails_at: int | None) -> tuple[tuple[str, str], Any]:
    """What is raised on a rank, and its receiver."""
    if protocol == "sglang":
        buckets = SglangReceiver(fails_at) if is_sender else None
        return said(lambda: send_to_sglang(source, buckets, "v1")), buckets
    receiver = VllmReceiver(None if fails_at is None else fails_at + 1) if is_sender else None
    if receiver is not None:
        receiver.init_weight_transfer_engine({})
    send = deliver_to_vllm if protocol == "vllm by deliver" else send_to_vllm
    return said(lambda: send(source, receiver)), receiver


def fail_at_every_step(rank: int, world_size: int, protocol: str) -> list[Any]:
    """What each rank raises, for each step of a receiver; and the losses of the steps between."""
    found: list[Any] = []
    with make_engine() as engine:
        source = engine.weights(to_rank=0, bucket_bytes=1200)
        num_names = len(source.metadata())
        steps = {"sglang": range(4), "vllm": range(2, num_names + 2), "vllm by deliver": range(num_names + 3)}[protocol]
        for step in (*steps, None):
            raised, receiver = hand_over(source, protocol, rank == 0, step)
            digests = source.digests()
            is_there = receiver is None or receiver.weights.keys() == digests.keys()
            if step is None and receiver is not None:
                is_there = {name: digest_of(tensor) for name, tensor in receiver.weights.items()} == digests
            found.append((raised, is_there, train(engine)))
    return found


def plain_losses(rank: int, world_size: int, num_steps: int) -> list[float]:
    with make_engine() as engine:
        return [train(engine) for _ in range(num_steps)]


@pytest.mark.parametrize("protocol", ["vllm", "vllm by deliver", "sglang"])
def test_a_receiver_may_fail_at_every_step(ranks: WorkerPool, protocol: str) -> None:
    first, second = ranks(2).run(fail_at_every_step, protocol)
    losses = ranks(2).run(plain_losses, len(first))[0]
    assert [loss for *_, loss in first] == [loss for *_, loss in second] == losses
    assert first[-1][:2] == second[-1][:2] == (("", ""), True)
    for (own, _, _), (other, _, _) in zip(first[:-1], second[:-1], strict=True):
        if protocol == "vllm by deliver":
            assert own == other == ("CommError", "rank-failed")
        else:
            assert own[0] == "ReceiverError"
            assert other == ("CommError", "walk-stopped")


def deliver_to_failing(rank: int, world_size: int) -> list[Any]:
    found = []
    with make_engine() as engine:
        source = engine.weights(to_rank=1)
        for phase in ("begin", "send", "end", ""):
            sent: list[str] = []
            walk = iter(source)
            next(walk)
            if rank == 0:
                del walk  # the other rank still holds its own

            def act(now: str, names: list[str], phase: str = phase, sent: list[str] = sent) -> None:
                if now == phase and len(sent) >= (3 if now == "send" else 0):
                    raise ReceiverError("out of order")
                sent += names

            try:
                source.deliver(
                    lambda names, tensors: act("send", names), lambda: act("begin", []), lambda: act("end", [])
                )
                found.append(sent)
            except CodedError as error:
                found.append((type(error).__name__, error.code, str(error)))
            train(engine)
        found.append([name for group in source.groups() for name in group])
    return found


def test_all_ranks_raise_what_a_delivery_raises_on_one(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(deliver_to_failing)
    assert first[:3] == second[:3]
    for kind, code, text in first[:3]:
        assert (kind, code) == ("CommError", "rank-failed")
        assert "rank 1" in text
        assert "out of order" in text
    assert (first[3], second[3]) == ([], second[4])


def stop_in_many_ways(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with make_engine({**STAGE_3, "run": {"timeout_s": 3.0}}) as engine:
        source = engine.weights()
        names = [info.name for info in source.metadata()]

        def all_of_them() -> None:
            found["fresh"] = found.get("fresh", True) and [name for name, _ in source] == names

        def break_early() -> None:
            for index, _ in enumerate(source):
                if rank == 1 and index == 2:
                    break

        def break_together() -> None:
            for _ in source:
                break

        def interrupt() -> None:
            for index, _ in enumerate(source.iter_groups()):
                if rank == 0 and index == 1:
                    raise KeyboardInterrupt

        def be_slow(seconds: float) -> None:
            for index, _ in enumerate(source):
                if rank == 0 and index == 1:
                    time.sleep(seconds)

        def train_within() -> None:
            for index, _ in enumerate(source):
                if index == 2:
                    train(engine)

        def differ() -> None:
            for _ in engine.weights(dtype="bf16" if rank else None):
                pass

        def held() -> None:
            walk = iter(source)
            next(walk)
            train(engine)
            next(walk)

        acts: dict[str, Callable[[], object]] = {
            "early": break_early,
            "together": break_together,
            "slow": lambda: be_slow(1.0),
            "too slow": lambda: be_slow(6.0),
            "train": train_within,
            "held": held,
            "differ": differ,
        }
        for name, act in acts.items():
            found[name] = said(act)
            all_of_them()
            train(engine)
        try:
            interrupt()
        except KeyboardInterrupt:
            found["interrupt"] = "interrupted"
        except CommError as error:
            found["interrupt"] = error.code
        all_of_them()
        found["loss"] = train(engine)
    return found


def test_a_walk_that_is_stopped_leaves_the_engine_sound_and_the_next_one_fresh(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(stop_in_many_ways)
    assert first["fresh"]
    assert second["fresh"]
    assert first["loss"] == second["loss"]
    assert (first["early"], second["early"]) == (("CommError", "walk-stopped"), ("", ""))
    assert first["together"] == second["together"] == ("", "")
    assert first["slow"] == second["slow"] == ("", "")
    assert second["too slow"] == ("MissingRankError", "rank-missing")
    assert first["too slow"][0] == "MissingRankError"
    assert first["train"] == second["train"] == ("EngineError", "walk-ended")
    assert first["held"] == second["held"] == ("EngineError", "walk-ended")
    assert first["differ"] == second["differ"] == ("CommError", "walks-differ")
    assert (first["interrupt"], second["interrupt"]) == ("interrupted", "walk-stopped")


def skip(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Rank 0 skips walks, and makes another call in their place; between them all take part."""
    found: dict[str, Any] = {"skipped": [], "fresh": [], "losses": []}
    with make_engine({**STAGE_3, "run": {"timeout_s": 4.0}}) as engine:
        source = engine.weights()
        names = [info.name for info in source.metadata()]

        def walk_and_train() -> None:
            dist.barrier()
            found["fresh"].append([name for name, _ in source] == names)
            found["losses"].append(train(engine))

        for num_walks in (1, 2):
            for _ in range(num_walks * rank):
                with pytest.raises(CommError) as caught:
                    list(source)
                found["skipped"].append(f"{caught.value.code}: {caught.value}")
            walk_and_train()
        found["mixed"] = said(source.digests if rank else lambda: engine.export_weights(folder / "first"))
        walk_and_train()
        found["skipped"] += [] if rank == 0 else [":".join(said(source.digests))]
        dist.barrier()
        engine.export_weights(folder / "second")  # another call than the one that was given up
        walk_and_train()
    return found


def test_a_rank_that_skips_walks_is_named_and_takes_part_in_the_next_one(ranks: WorkerPool, tmp_path: Path) -> None:
    first, second = ranks(2).run(skip, tmp_path)
    assert first["skipped"] == []
    for text in second["skipped"][:-1]:
        assert text.startswith("rank-missing")
        assert "rank 0" in text
        assert "weights" in text
    assert second["skipped"][-1] == "MissingRankError:rank-missing"
    assert first["fresh"] == second["fresh"] == [True] * 4
    assert first["losses"] == second["losses"] == ranks(2).run(plain_losses, 4)[0]
    assert (first["mixed"][1], second["mixed"][1]) == ("calls-differ", "calls-differ")
    assert (tmp_path / "second").is_dir()
    assert not (tmp_path / "first").exists()


def interrupt_delivery(rank: int, world_size: int) -> list[Any]:
    """What each rank raises where a delivery is interrupted in each phase on each rank, and the seconds."""
    found = []
    with make_engine({**STAGE_3, "run": {"timeout_s": 60.0}}) as engine:
        source = engine.weights()
        for phase, where in itertools.product(("begin", "send", "end"), range(world_size)):

            def act(now: str, phase: str = phase, where: int = where) -> None:
                if (now, rank) == (phase, where):
                    raise KeyboardInterrupt

            start_s = time.monotonic()
            try:
                source.deliver(lambda *_: act("send"), lambda: act("begin"), lambda: act("end"))
            except (KeyboardInterrupt, CommError) as error:
                found.append((type(error).__name__, code_of(error, "")))
            found.append(time.monotonic() - start_s < 50.0)  # it has not waited for the time-out
            found.append(sorted(source.digests().values()))
            found.append(train(engine))
    return found


def test_a_delivery_that_is_interrupted_ends_at_once_on_all_ranks(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(interrupt_delivery)
    interrupted, other = ("KeyboardInterrupt", ""), ("CommError", "rank-interrupted")
    assert first[::4] == [interrupted, other] * 3
    assert second[::4] == [other, interrupted] * 3
    assert first[1::4] == second[1::4] == [True] * 6
    assert first[2::4] == second[2::4]
    assert first[3::4] == second[3::4]


def answer_between_deliveries(rank: int, world_size: int) -> list[str]:
    """What the server says, and would say without a cache, after each delivery; the second of them fails once."""
    said_by_server: list[str] = []
    server = VllmReceiver()
    with make_engine() as engine:
        source = engine.weights(to_rank=0)

        def end() -> None:
            server.finish_weight_update()
            server.reset_prefix_cache()

        def send(names: list[str], tensors: list[Tensor], fails: bool) -> None:
            for name, tensor in zip(names, tensors, strict=True):
                server.load_weight(name, tensor)
            if fails and "2.0.weight" in names:
                raise ReceiverError("no memory")

        if rank == 0:
            server.init_weight_transfer_engine({})
        for turn in range(4):
            fails = turn == 1
            if turn == 2 and rank == 0:
                server.phase = "ready"  # it is begun again
            deliver = partial(source.deliver, partial(send, fails=fails), partial(begin, source, server), end)
            said_by_server.append(said(deliver)[1])
            weights = {name: tensor.clone() for name, tensor in source if tensor is not None}
            if rank == 0 and fails:
                said_by_server += [said(lambda: server.answer("sum"))[0], "ValueError"]
            elif rank == 0:
                said_by_server += [server.answer("sum"), "sum" + digest_of_all(weights)]
            train(engine)
    return said_by_server


def test_a_server_answers_by_new_weights_alone_and_never_by_mixed_ones(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(answer_between_deliveries)
    assert second == first[::3] == ["", "rank-failed", "", ""]
    assert first[1::3] == first[2::3]
    assert len(set(first[1::3])) == 4  # no two turns have the same weights


def take_merged_shards(rank: int, world_size: int) -> list[Any]:
    """What each rank raises where one stops in shards whose adapters are merged, or does not take them."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "2"]))
    config = {**STAGE_3, "run": {"device": "cpu", "timeout_s": 4.0}}
    loss_fn = lambda output, batch: (output.square().sum(), len(batch))  # noqa: E731
    found: list[Any] = []
    with initialize(adapted, config, loss_fn=loss_fn) as engine:
        source = engine.weights()
        names = {info.name for info in source.metadata()}

        def stop_early() -> None:
            for _ in source.shards(once=True):
                if rank == 1:
                    break

        def train_once() -> None:
            dist.barrier()
            found.append(engine.train_step([torch.ones(2, 8) + rank]).loss)

        found.append(said(stop_early))
        train_once()
        found.append(said(lambda: list(source.shards() if rank else source)))
        train_once()
        found.append(said(lambda: list(source.shards())) if rank else ("", ""))
        train_once()
        found.append({name for name, *_ in source.shards()} <= names)
        train_once()
    return found


def test_ranks_agree_on_shards_for_which_they_gather(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(take_merged_shards)
    assert (first[0], second[0]) == (("CommError", "walk-stopped"), ("", ""))
    assert first[2] == second[2] == ("CommError", "walks-differ")
    assert (first[4], second[4]) == (("", ""), ("MissingRankError", "rank-missing"))
    assert first[6] is second[6] is True
    assert first[1::2] == second[1::2]


def walk_offloaded(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    with make_engine({**STAGE_3, "precision": {"param": "bf16"}}) as engine:
        train(engine)
        source = engine.weights()
        digests = source.digests()
        with engine.offloaded(["optimizer", "master"]):
            found.append(source.digests() == digests)
            found.append(said(engine.weights(dtype="fp32").digests))
        with engine.offloaded():
            found.append(said(source.digests))
            found.append(said(lambda: engine.export_weights("nothing is written")))
        found.append(source.digests() == digests)
    return found


def test_states_that_are_away_are_refused_unless_they_are_not_needed(ranks: WorkerPool) -> None:
    away = ("EngineError", "states-offloaded")
    for found in ranks(2).run(walk_offloaded):
        assert found == [True, away, away, away, True]
