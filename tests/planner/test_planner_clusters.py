"""Clusters as users write them, and one line for each mistake."""

import pytest

from shardwise.config import ConfigError
from shardwise.planner.catalogue import find_gpu
from shardwise.planner.clusters import cluster_words, parse_cluster


@pytest.mark.parametrize(
    ("text", "num_gpus", "gpus_per_node", "name"),
    [
        ("h100:512", 512, 8, "h100"),
        ("h100:64x8", 512, 8, "h100"),
        ("H100:4", 4, 4, "h100"),
        ("a100-80:2x6", 12, 6, "a100-80"),
        ("A100-SXM4-80GB:16", 16, 8, "a100-80"),
        ("gb200:72", 72, 4, "gb200"),
    ],
)
def test_names_and_counts(text, num_gpus, gpus_per_node, name):
    cluster = parse_cluster(text)
    assert (cluster.num_gpus, cluster.gpus_per_node, cluster.gpu.name) == (num_gpus, gpus_per_node, name)
    assert cluster.nic_bytes_per_s == find_gpu(name).nic_bytes_per_s


def test_a_file_says_what_differs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'gpu = "h100"\nnum_nodes = 4\nnic_gbps = 200\nmemory_gib = 94\nprice_per_hour = 2.5\n'
        "host_memory_gib = 2048\nnvme_read_gb_per_s = 20\n"
    )
    cluster = parse_cluster(str(path))
    assert (cluster.num_gpus, cluster.gpus_per_node) == (32, 8)
    assert cluster.nic_bytes_per_s == 25e9
    assert (cluster.gpu.memory_bytes, cluster.gpu.price_per_hour) == (94 * 2**30, 2.5)
    assert (cluster.host.memory_bytes, cluster.host.nvme_read_bytes_per_s) == (2048 * 2**30, 20e9)
    assert cluster.gpu.memory_bytes_per_s == find_gpu("h100").memory_bytes_per_s
    assert cluster_words(cluster).startswith("32 x h100 in 4 nodes of 8, 94 GiB each")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", "did you mean h100"),
        ("h100", "h100 names no number of GPUs; write h100:512"),
        ("h100:many", "names no number of GPUs"),
        ("h100:0", "holds no GPU; give at least 1"),
        ("h100:12", "12 GPUs do not fill nodes of 8; nearest: 8, 16, or say nodes x GPUs, as in h100:2x6"),
        ("none.toml", "cannot read config none.toml"),
    ],
)
def test_what_is_no_cluster_is_named(text, message):
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        parse_cluster(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_gpus = 8", "names no device; add gpu"),
        ('gpu = "h100"', "names no number of GPUs; add num_gpus = 512"),
        ('gpu = "h100"\nnum_gpu = 8', "num_gpu is no key of a cluster; did you mean num_gpus?"),
        ('gpu = "h100"\nnum_gpus = "8"', "num_gpus='8' must be a number"),
        ('gpu = "h100"\nnum_gpus = 8.5', "num_gpus=8.5 must be a whole number"),
        ('gpu = "h100"\nnum_gpus = 8\nnum_nodes = 2', "num_gpus=8 is not num_nodes 2 x gpus_per_node 8 = 16"),
        ('gpu = "h100', "not valid TOML"),
    ],
)
def test_what_a_file_cannot_say_is_named(text, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        parse_cluster(str(path))
    assert message in str(error.value)
