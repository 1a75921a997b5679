"""Cores: which this process may use, how they lie, and each rank's share: each core once, near ones together."""

from __future__ import annotations

from itertools import pairwise

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.launch import host as cores
from shardwise.launch.host import (
    CorePlace,
    check_cores,
    num_cores,
    parse_list,
    read_places,
    share_of_cores,
    show_list,
)

USABLE = st.sets(st.integers(0, 300), min_size=1, max_size=64).map(sorted)
TWO_NODES = {
    "sys/devices/system/node/node0/cpulist": "0-3,8-11",
    "sys/devices/system/node/node1/cpulist": "4-7,12-15",
    **{f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 8},{n % 8 + 8}" for n in range(16)},
}

V2 = {
    "proc/self/cgroup": "0::/jobs/one",
    "sys/fs/cgroup/jobs/cpu.max": "150000 100000",
    "sys/fs/cgroup/jobs/memory.max": "700000",
    "sys/fs/cgroup/jobs/one/cpu.max": "max 100000",
    "sys/fs/cgroup/jobs/one/memory.max": "max",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/jobs\n4:memory:/jobs\n1:name=systemd:/jobs",
    "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "150000",
    "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "700000",
}
UNLIMITED = {
    "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
}


@pytest.fixture
def root(tmp_path):
    """A place for files as proc and sys have them."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text + "\n")
        return tmp_path

    return write


@given(USABLE, st.integers(1, 80), st.randoms(use_true_random=False))
def test_every_core_goes_to_one_rank_and_every_rank_has_some(usable, num_ranks, random) -> None:
    places = {core: CorePlace(random.randrange(4), random.randrange(40)) for core in usable if random.random() < 0.8}
    shares = [share_of_cores(usable, num_ranks, rank, places) for rank in range(num_ranks)]
    given_out = [core for share in shares for core in share]
    assert set(given_out) == set(usable)
    assert all(share == tuple(sorted(share)) for share in shares)
    if num_ranks <= len(usable):
        assert len(given_out) == len(usable)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {len(share) for share in shares} == {1}
        counts = [given_out.count(core) for core in usable]
        assert max(counts) - min(counts) <= 1, "no core is shared by many while another has one rank"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(1, 16))
def test_few_ranks_lie_on_two_nodes_or_halve_a_core(num_nodes, cores_of_node, threads_of_core, num_ranks) -> None:
    num_physical = num_nodes * cores_of_node
    places = {
        thread * num_physical + core: CorePlace(core // cores_of_node, core)
        for thread in range(threads_of_core)
        for core in range(num_physical)
    }
    shares = [share_of_cores(list(places), num_ranks, rank, places) for rank in range(num_ranks)]
    nodes = [sorted({places[core].node for core in share}) for share in shares]
    assert all(left[-1] <= right[0] for left, right in pairwise(nodes)), "in the order of the nodes"
    if num_ranks % num_nodes == 0 and num_ranks <= len(places):
        assert all(len(each) == 1 for each in nodes)
    if num_physical % num_ranks == 0:
        whole = {rank: {places[core].physical for core in share} for rank, share in enumerate(shares)}
        assert all(len(whole[rank]) * threads_of_core == len(shares[rank]) for rank in whole)


def test_cores_lie_where_the_system_says(root) -> None:
    places = read_places(range(16), root(TWO_NODES))
    assert places[11] == CorePlace(node=0, physical=3)
    assert places[4] == places[12] == CorePlace(node=1, physical=4)
    shares = [show_list(share_of_cores(range(16), 4, rank, places)) for rank in range(4)]
    assert shares == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]


def test_a_system_that_says_nothing_gives_shares_by_number(tmp_path) -> None:
    places = read_places(range(4), tmp_path)
    assert places == {core: CorePlace(0, core) for core in range(4)}
    assert [share_of_cores(range(4), 2, rank, places) for rank in range(2)] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("files", "quota_cores", "limit_bytes"),
    [(V2, 1.5, 700_000), (V1, 1.5, 700_000), (UNLIMITED, None, None), ({}, None, None)],
    ids=["v2", "v1", "unlimited", "none"],
)
def test_cgroups_limit_cores_and_memory(root, files, quota_cores, limit_bytes) -> None:
    folder = root(files)
    assert cores.quota_cores(folder) == quota_cores
    assert cores.cgroup_limit_bytes(folder) == limit_bytes
    assert cores.usable_bytes(folder) == (limit_bytes or psutil.virtual_memory().total)


@pytest.mark.parametrize(("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_a_cgroup_limits_how_many_cores_count(root, monkeypatch, quota, expected) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: (0, 1, 2, 3))
    folder = root({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": quota})
    assert num_cores(folder) == expected


def test_cores_that_may_not_be_used_are_refused_with_those_that_may() -> None:
    check_cores((2, 3), range(2, 8))
    with refused("cores-not-usable", "tiers.cores=[1, 2, 9]", "1,9 of them", "2-7"):
        check_cores((1, 2, 9), range(2, 8))
    with refused("cores-not-usable", "tiers.cores=[]", "2-7"):
        check_cores((), range(2, 8))


@given(st.sets(st.integers(0, 70)))
def test_lists_are_read_as_they_are_shown(some) -> None:
    assert set(parse_list(show_list(list(some)))) == some
