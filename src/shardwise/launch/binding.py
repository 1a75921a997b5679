"""Which cores the host work of this rank keeps to: those of the config, or its share of the machine's.

The ranks of a machine tell each other through the store what they may use. So a launcher that has bound its ranks
already (Slurm's `--cpu-bind`, torchrun's `--numa-binding`) is found out, and its shares are not shared once more.

    config = with_own_cores(config, store, rank, usable_cores(), quota_cores())
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from shardwise.agreement import Meeting
from shardwise.comm import CommError
from shardwise.comm_books import AbsentError
from shardwise.config import Config
from shardwise.launch.cores import machine_name, read_places, share_of_cores, show_list


def with_own_cores(
    config: Config, store: dist.Store | None, rank: int, usable: Sequence[int], quota: float | None
) -> Config:
    """The config with this rank's `tiers.cores` filled in, if `tiers.bind_cores` is set; every rank calls it.

    Args:
        config: of the run; `tiers.cores` that are given stay.
        store: of the engine; None where there is one rank.
        rank: of this process in the world.
        usable: cores that this process may run on.
        quota: how many cores' time its cgroup allows; more cores than that would stall each other.

    Raises:
        CommError: not all ranks have come in time.
    """
    tiers = config.tiers
    if not tiers.bind_cores:
        return config
    place, num_sharing = _meet(config, store, rank, usable)
    if tiers.cores is not None:  # the others have met this rank all the same
        return config
    share = share_of_cores(usable, num_sharing, place, read_places(usable))
    num_allowed = len(share) if quota is None else max(1, int(quota / num_sharing))
    return config.model_copy(update={"tiers": tiers.model_copy(update={"cores": share[:num_allowed]})})


def places_among_sharers(notes: Mapping[int, str]) -> dict[int, tuple[int, int]]:
    """By rank: its place among the ranks that have given the same note, and their number.

    >>> places_among_sharers({0: "node1: 0-7", 1: "node1: 0-7", 2: "node2: 0-7"})
    {0: (0, 2), 1: (1, 2), 2: (0, 1)}
    """
    sharers: dict[str, list[int]] = {}
    for rank in sorted(notes):
        sharers.setdefault(notes[rank], []).append(rank)
    return {rank: (sharers[note].index(rank), len(sharers[note])) for rank, note in sorted(notes.items())}


def _meet(config: Config, store: dist.Store | None, rank: int, usable: Sequence[int]) -> tuple[int, int]:
    if store is None:
        return 0, 1
    meeting = Meeting(store, tuple(range(dist.get_world_size())), rank, config.run.timeout_s)
    note = f"{machine_name()}: {show_list(usable)}"
    try:
        text = meeting.verdict("cores", note, lambda notes: json.dumps(places_among_sharers(notes)), "share cores")
    except AbsentError as error:
        raise CommError(f"{error}; see its log, or allow more time with run.timeout_s") from None
    place, num_sharing = json.loads(text)[str(rank)]
    return place, num_sharing
