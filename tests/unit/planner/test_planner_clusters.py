"""Clusters as users write them, and one line for each mistake."""

from dataclasses import replace

import pytest

from harness.refusals import refused
from shardwise.planner.hardware import KEYS, Cluster, Host, cluster_words, find_gpu, parse_cluster, usual_node


@pytest.mark.parametrize(
    ("text", "num_gpus", "gpus_per_node", "name"),
    [
        ("h100:512", 512, 8, "h100"),
        ("h100:64x8", 512, 8, "h100"),
        ("H100:4", 4, 4, "h100"),
        ("a100-80:2x6", 12, 6, "a100-80"),
        ("A100-SXM4-80GB:16", 16, 8, "a100-80"),
        ("gb200:72", 72, 4, "gb200"),
        ("gb200:2", 2, 2, "gb200"),
        ("h100:1x1", 1, 1, "h100"),
    ],
)
def test_names_and_counts(text, num_gpus, gpus_per_node, name):
    cluster = parse_cluster(text)
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.gpu.name) == (num_gpus, gpus_per_node, name)
    assert cluster.nic_bytes_per_s == find_gpu(name).nic_bytes_per_s


def test_every_key_of_a_file_has_its_field_in_its_unit(tmp_path):
    values = {key: number for number, key in enumerate(KEYS, 2) if key not in ("gpu", "num_gpus", "num_nodes")}
    path = tmp_path / "mine.toml"
    path.write_text('gpu = "h100"\nnum_nodes = 3\n' + "".join(f"{key} = {value}\n" for key, value in values.items()))
    gpu = replace(
        find_gpu("h100"),
        memory_bytes=values["memory_gib"] * 2**30,
        memory_bytes_per_s=values["memory_gb_per_s"] * 1e9,
        link_bytes_per_s=values["link_gb_per_s"] * 1e9,
        link_domain=values["link_domain"],
        host_bytes_per_s=values["host_link_gb_per_s"] * 1e9,
        price_per_hour=values["price_per_hour"],
    )
    host = Host(
        memory_bytes=values["host_memory_gib"] * 2**30,
        memory_bytes_per_s=values["host_memory_gb_per_s"] * 1e9,
        num_cores=values["host_cores"],
        nvme_bytes=values["nvme_gib"] * 2**30,
        nvme_read_bytes_per_s=values["nvme_read_gb_per_s"] * 1e9,
        nvme_write_bytes_per_s=values["nvme_write_gb_per_s"] * 1e9,
    )
    each = values["gpus_per_node"]
    nic = values["nic_gbps"] * 1e9 / 8
    assert parse_cluster(str(path)) == Cluster(
        gpu=gpu, num_gpus=3 * each, gpus_per_node=each, nic_bytes_per_s=nic, host=host
    )


@pytest.mark.parametrize(
    ("text", "num_gpus", "gpus_per_node"),
    [
        ("num_gpus = 3", 3, 3),
        ("num_gpus = 16", 16, 8),
        ("num_nodes = 2", 16, 8),
        ("num_nodes = 2\nnum_gpus = 16", 16, 8),
        ("num_nodes = 3\ngpus_per_node = 5", 15, 5),
    ],
)
def test_a_node_is_the_usual_one_where_a_file_does_not_say(text, num_gpus, gpus_per_node, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'gpu = "h100"\n{text}\n')
    cluster = parse_cluster(str(path))
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.host) == (num_gpus, gpus_per_node, Host())
    assert cluster.nic_bytes_per_s == cluster.gpu.nic_bytes_per_s


def test_a_usual_node_has_half_as_many_where_links_leave_it():
    h100 = find_gpu("h100")
    assert [usual_node(replace(h100, link_domain=each)) for each in (1, 8, 9, 72)] == [8, 8, 4, 4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h200:8x4", 4), ("h200:8x8", 8), ("h200:4x16", 8), ("gb200:18x4", 72), ("a40:4x8", 2), ("h200:8x1", 1)],
)
def test_links_end_with_the_node_unless_they_join_racks(text, expected):
    assert parse_cluster(text).gpu.link_domain == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("gpus_per_node = 4", 4), ("gpus_per_node = 4\nlink_domain = 8", 8), ("", 8)],
)
def test_links_are_as_a_file_says_where_it_says(text, expected, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'gpu = "h200"\nnum_gpus = 16\n{text}\n')
    assert parse_cluster(str(path)).gpu.link_domain == expected


def test_words_of_a_cluster_leave_out_what_it_has_not():
    h100 = parse_cluster("h100:1024x8")
    assert cluster_words(h100) == (
        "8,192 x h100 in 1,024 nodes of 8, 79 GiB each, links 450 GB/s, network 400 Gb/s a GPU"
    )
    assert cluster_words(parse_cluster("h100:8")) == "8 x h100 in 1 node, 79 GiB each, links 450 GB/s"
    bare = replace(h100, gpu=replace(h100.gpu, link_bytes_per_s=0.0), nic_bytes_per_s=0.0)
    assert cluster_words(bare) == "8,192 x h100 in 1,024 nodes of 8, 79 GiB each"
    cpu = replace(h100, gpu=replace(h100.gpu, name="cpu", memory_bytes=1.5 * 2**30), num_gpus=2, gpus_per_node=2)
    assert cluster_words(cpu) == "2 processes on this machine's CPU, 1.5 GiB each"


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("h10:8", "unknown-device", "h100?"),
        ("h100", "gpu-count-missing", "h100:512"),
        ("h100:many", "gpu-count-missing", "h100:many"),
        ("NVIDIA H100:", "gpu-count-missing", "h100:512, or h100:64x8"),
        ("h100-96:8y", "gpu-count-missing", "h100-96:512"),
        ("h100:8x", "gpu-count-missing", "h100:8x"),
        ("h100:0x8", "gpu-count-positive", "h100:0x8"),
        ("h100:2x0", "gpu-count-positive", "h100:2x0"),
        ("gb200:6", "nodes-not-filled", "say nodes x GPUs, as in gb200:2x3"),
        ("h100:0", "gpu-count-positive", "h100:0"),
        ("h100:12", "nodes-not-filled", "say nodes x GPUs, as in h100:2x6"),
        ("none.toml", "file-unreadable", "none.toml"),
    ],
)
def test_what_is_no_cluster_is_named(text, code, named):
    with refused(code, named) as error:
        parse_cluster(text)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        ("num_gpus = 8", "cluster-value", "mine.toml"),
        ('gpu = "h100"', "gpu-count-missing", "mine.toml"),
        ('gpu = "h100"\nnum_gpu = 8', "cluster-value", "num_gpu"),
        ('gpu = "h100"\nnum_gpus = "8"', "cluster-value", "num_gpus"),
        ('gpu = "h100"\nnum_gpus = 8.5', "cluster-value", "num_gpus"),
        ('gpu = "h100"\nnum_gpus = 8\nnum_nodes = 2', "gpu-count-of-nodes", "num_nodes 2 x gpus_per_node 8 = 16"),
        ("gpu = 100\nnum_gpus = 8", "cluster-value", "mine.toml"),
        ('gpu = "h10"\nnum_gpus = 8', "unknown-device", "h100?"),
        ('gpu = "h100"\nxyz = 8', "cluster-value", "gpu, num_gpus"),
        ('gpu = "h100"\nnum_gpus = -8', "cluster-value", "num_gpus"),
        ('gpu = "h100"\nnum_gpus = true', "cluster-value", "num_gpus"),
        ('gpu = "h100"\nnum_gpus = 5\ngpus_per_node = 8', "nodes-not-filled", "say nodes x GPUs"),
        ('gpu = "h100"\nnum_gpus = 8\ngpus_per_node = 0', "gpu-count-positive", "mine.toml"),
        ('gpu = "h100', "not-toml", "mine.toml"),
    ],
)
def test_what_a_file_cannot_say_is_named(text, code, named, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with refused(code, named) as error:
        parse_cluster(str(path))
    assert len(str(error.value).splitlines()) == 1
