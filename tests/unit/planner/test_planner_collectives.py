"""Times of collectives: what no network does, whatever its links, and the table's own figures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.planner.collectives import (
    CALL_S,
    COLLISIONS,
    LINK_HOP_S,
    NETWORK_HOP_S,
    OPS,
    PCIE_HOP_S,
    NetworkModel,
    Op,
)
from shardwise.planner.hardware import Cluster, FittedConstants, GpuSpec, find_gpu
from shardwise.planner.profile import CollectiveTime, Profile

PLAIN = GpuSpec(name="plain", memory_bytes=24e9, memory_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e14})

powers = st.integers(0, 6).map(lambda exponent: 2**exponent)
ops = st.sampled_from(OPS)
sizes = st.floats(1, 1e10)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    device = draw(
        st.sampled_from(
            (
                find_gpu("h100"),
                find_gpu("a100-80"),
                replace(find_gpu("h100"), link_domain=72),
                replace(find_gpu("h100"), has_pairwise_links=True),
                replace(find_gpu("h100"), link_domain=2),
                replace(PLAIN, host_bytes_per_s=2.5e10),
                PLAIN,
            )
        )
    )
    nic = draw(st.sampled_from((0.0, 3e9, 5e10)))
    return Cluster(gpu=device, num_gpus=4096, gpus_per_node=draw(st.sampled_from((1, 4, 8, 16))), nic_bytes_per_s=nic)


@given(clusters(), ops, sizes, sizes, powers, powers)
def test_more_bytes_are_never_faster(
    cluster: Cluster, op: Op, one: float, other: float, num_ranks: int, stride: int
) -> None:
    network = NetworkModel(cluster)
    fewer, more = sorted((one, other))
    assert network.collective_s(op, fewer, num_ranks, stride) <= network.collective_s(op, more, num_ranks, stride)


@given(clusters(), ops, sizes, powers, powers, st.floats(1, 10))
def test_more_bandwidth_is_never_slower(
    cluster: Cluster, op: Op, num_bytes: float, num_ranks: int, stride: int, factor: float
) -> None:
    device = cluster.gpu
    faster = replace(
        cluster,
        nic_bytes_per_s=factor * cluster.nic_bytes_per_s,
        gpu=replace(
            device,
            link_bytes_per_s=factor * device.link_bytes_per_s,
            host_bytes_per_s=factor * device.host_bytes_per_s,
        ),
    )
    before, after = (NetworkModel(each).collective_s(op, num_bytes, num_ranks, stride) for each in (cluster, faster))
    assert after <= before


@given(clusters(), ops, sizes, powers)
def test_one_rank_and_no_bytes_take_no_time(cluster: Cluster, op: Op, num_bytes: float, stride: int) -> None:
    network = NetworkModel(cluster)
    assert network.collective_s(op, num_bytes, 1, stride) == 0
    assert network.collective_s(op, 0, 8, stride) == 0


@given(clusters(), sizes, powers, powers)
def test_gathering_takes_as_long_as_scattering_and_a_sum_at_most_both(
    cluster: Cluster, num_bytes: float, num_ranks: int, stride: int
) -> None:
    network = NetworkModel(cluster)
    gather, scatter, total = (
        network.collective_s(op, num_bytes, num_ranks, stride) for op in ("all_gather", "reduce_scatter", "all_reduce")
    )
    assert gather == scatter
    assert total <= gather + scatter


@given(clusters(), sizes, powers, powers)
def test_levels_join_all_ranks_and_are_never_slower_than_one_flat_ring(
    cluster: Cluster, num_bytes: float, num_ranks: int, stride: int
) -> None:
    network = NetworkModel(cluster)
    levels = network.levels(num_ranks, stride)
    assert math.prod(level.num_ranks for level in levels) == num_ranks
    if num_ranks == 1:
        return
    # Every hop as slow as the slowest, whose rails all the inner ranks share.
    rails, slowest = 1, math.inf
    for level in levels:
        slowest = min(slowest, level.bytes_per_s * rails)
        rails *= level.num_ranks
    hop_s = max(level.hop_s for level in levels)
    flat_s = (num_ranks - 1) * hop_s + (num_ranks - 1) / num_ranks * num_bytes / slowest
    assert network.collective_s("all_gather", num_bytes, num_ranks, stride) <= (CALL_S + flat_s) * (1 + 1e-9)


def test_a_group_within_a_node_moves_over_links_alone() -> None:
    cluster = Cluster(gpu=find_gpu("h100"), num_gpus=16, gpus_per_node=8, nic_bytes_per_s=5e10)
    slow_network = replace(cluster, nic_bytes_per_s=1e8)
    for num_ranks, stride, same in ((8, 1, True), (4, 2, True), (4, 4, False), (16, 1, False), (2, 8, False)):
        fast, slow = (
            NetworkModel(each).collective_s("all_reduce", 2**28, num_ranks, stride) for each in (cluster, slow_network)
        )
        assert (fast == slow) is same


def test_ranks_of_a_node_share_its_rails() -> None:
    cluster = Cluster(gpu=find_gpu("h100"), num_gpus=64, gpus_per_node=8, nic_bytes_per_s=5e9)
    network = NetworkModel(cluster)
    dense = network.collective_s("all_gather", 2**32, 64)
    alone = network.collective_s("all_gather", 2**32, 8, stride=8)
    assert 7 < alone / dense < 9


def test_few_ranks_reach_few_of_pairwise_links() -> None:
    def rate(*, is_pairwise: bool, num_ranks: int) -> float:
        device = replace(find_gpu("h100"), has_pairwise_links=is_pairwise)
        network = NetworkModel(Cluster(gpu=device, num_gpus=8, gpus_per_node=8, nic_bytes_per_s=5e10))
        return 2**30 * (1 - 1 / num_ranks) / network.collective_s("all_gather", 2**30, num_ranks)

    assert rate(is_pairwise=True, num_ranks=8) == rate(is_pairwise=False, num_ranks=8)
    assert rate(is_pairwise=True, num_ranks=2) < rate(is_pairwise=False, num_ranks=2) / 6


def test_a_tree_sums_few_bytes_over_many_nodes_in_fewer_hops_than_a_ring() -> None:
    network = NetworkModel(Cluster(gpu=find_gpu("h100"), num_gpus=8192, gpus_per_node=8, nic_bytes_per_s=5e10))
    assert network.collective_s("all_reduce", 4, 8192) < network.collective_s("all_gather", 4, 8192) / 10


def measured(*times: CollectiveTime) -> Cluster:
    profile = Profile(device="cpu", num_ranks=4, num_threads=1, memory_bytes=1e9, collectives=times)
    return Cluster(gpu=PLAIN, num_gpus=8, gpus_per_node=4, nic_bytes_per_s=1e9, profile=profile)


def test_what_was_measured_is_asked_first() -> None:
    network = NetworkModel(
        measured(
            CollectiveTime(op="all_gather", num_ranks=2, num_bytes=1000, seconds=1.0),
            CollectiveTime(op="all_gather", num_ranks=2, num_bytes=100000, seconds=4.0),
        )
    )
    assert network.collective_s("all_gather", 1000, 2) == pytest.approx(1.0)
    assert network.collective_s("all_gather", 10000, 2) == pytest.approx(2.0)  # log-log between both
    assert network.collective_s("all_gather", 10, 2) == pytest.approx(1.0)
    assert network.collective_s("all_gather", 200000, 2) == pytest.approx(8.0)
    assert network.collective_s("all_gather", 1000, 4) == pytest.approx(1.5)  # (3/4) / (1/2)
    assert network.collective_s("all_gather", 1000, 4, stride=2) < 0.1  # over nodes, which were never measured
    assert network.collective_s("reduce_scatter", 1000, 2) < 0.1


@given(st.lists(st.tuples(st.integers(1, 2**30), st.floats(1e-6, 10)), min_size=1), sizes, sizes)
def test_a_noisy_table_is_monotone_all_the_same(points: list[tuple[int, float]], one: float, other: float) -> None:
    network = NetworkModel(
        measured(*(CollectiveTime(op="send", num_ranks=2, num_bytes=size, seconds=s) for size, s in points))
    )
    fewer, more = sorted((one, other))
    assert network.collective_s("send", fewer, 2) <= network.collective_s("send", more, 2) * (1 + 1e-12)


def test_an_unknown_collective_is_named() -> None:
    network = NetworkModel(measured())
    with refused("unknown-collective", "op='scan'"):
        network.collective_s("scan", 8, 2)  # type: ignore[arg-type]


# Half of each speed is reached: 50 GB/s over links of 4 devices, 10 GB/s a device over the network.
BY_HAND = Cluster(
    gpu=replace(
        PLAIN, link_bytes_per_s=1e11, link_domain=4, host_bytes_per_s=3.2e10, fitted=FittedConstants(network_share=0.5)
    ),
    num_gpus=64,
    gpus_per_node=4,
    nic_bytes_per_s=2e10,
)


def test_times_of_8_gb_over_2_nodes_of_4_are_those_worked_out_by_hand() -> None:
    network, meeting = NetworkModel(BY_HAND), 1 + COLLISIONS
    links_s, nodes_s = 6e9 / 5e10, 1e9 * meeting / 1e10  # 3/4 over links, of which a fourth, halved, over the network
    assert links_s > nodes_s
    around_s, tree_s = 6 * LINK_HOP_S + NETWORK_HOP_S, 3 * LINK_HOP_S + NETWORK_HOP_S
    for op, expected_s in {
        "all_gather": around_s + links_s,
        "reduce_scatter": around_s + links_s,
        "all_reduce": 2 * (tree_s + links_s),
        "all_to_all": NETWORK_HOP_S + 4e9 * meeting / 1e10,  # half of all goes to the other node
    }.items():
        assert network.collective_s(op, 8e9, 8) == pytest.approx(CALL_S + expected_s, rel=1e-12), op  # type: ignore[arg-type]
    for stride, expected_s in ((1, LINK_HOP_S + 8e9 / 5e10), (4, NETWORK_HOP_S + 8e9 * meeting / 1e10)):
        assert network.collective_s("send", 8e9, 2, stride) == pytest.approx(CALL_S + expected_s, rel=1e-12)
    # From any rank of a node to the same of the next one, a send crosses the network.
    over_all_s = CALL_S + NETWORK_HOP_S + 8e9 * meeting / 1e10
    assert network.collective_s("send", 8e9, 8) == pytest.approx(over_all_s, rel=1e-12)


def test_a_sum_of_few_bytes_goes_up_and_down_a_tree_of_16_nodes() -> None:
    tree_s = 3 * LINK_HOP_S + 4 * NETWORK_HOP_S
    assert NetworkModel(BY_HAND).collective_s("all_reduce", 8, 64) == pytest.approx(CALL_S + 2 * tree_s, rel=1e-3)


def test_devices_without_links_meet_in_the_memory_of_their_host() -> None:
    device = replace(BY_HAND.gpu, link_bytes_per_s=0.0, link_domain=1)
    gather_s = NetworkModel(replace(BY_HAND, gpu=device)).collective_s("all_gather", 8e9, 4)
    # Up and down: half of 32 GB/s, of which half is reached.
    assert gather_s == pytest.approx(CALL_S + 3 * PCIE_HOP_S + 6e9 / 8e9, rel=1e-12)


def test_a_larger_buffer_that_was_measured_faster_takes_as_long_as_the_smaller_one() -> None:
    times = ((1000, 2.0), (2000, 1.0), (4000, 4.0))
    network = NetworkModel(
        measured(*(CollectiveTime(op="send", num_ranks=2, num_bytes=size, seconds=s) for size, s in times))
    )
    assert [network.collective_s("send", size, 2) for size, _ in times] == [2.0, 2.0, 4.0]
