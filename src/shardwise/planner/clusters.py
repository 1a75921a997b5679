"""A cluster from what a user writes: `h100:512`, `h100:64x8`, or a TOML file.

>>> cluster = parse_cluster("h100:64x8")
>>> cluster.num_gpus, cluster.gpus_per_node, cluster.gpu.name
(512, 8, 'h100')
>>> parse_cluster("h100:512x")
Traceback (most recent call last):
    ...
shardwise.config.ConfigError: h100:512x names no number of GPUs; write h100:512, or h100:64x8 for 64 nodes of 8
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardwise.config import ConfigError, read_toml
from shardwise.planner.catalogue import GPUS, find_gpu
from shardwise.planner.hardware import GIB, Cluster, Gpu, Host

_COUNT: Final = re.compile(r"(?:(\d+)x)?(\d+)")
# Of a device whose links join more than a node has.
_NODE_OF_RACKS: Final = 4
_USUAL_NODE: Final = 8

# By key of a cluster's file: the field, and what its unit is in the field's.
_GPU_KEYS: Final = (
    ("memory_gib", "memory_bytes", GIB),
    ("memory_gb_per_s", "memory_bytes_per_s", 1e9),
    ("link_gb_per_s", "link_bytes_per_s", 1e9),
    ("link_domain", "link_domain", 1),
    ("host_link_gb_per_s", "host_bytes_per_s", 1e9),
    ("price_per_hour", "price_per_hour", 1),
)
_HOST_KEYS: Final = (
    ("host_memory_gib", "memory_bytes", GIB),
    ("host_memory_gb_per_s", "memory_bytes_per_s", 1e9),
    ("host_cores", "num_cores", 1),
    ("nvme_gib", "nvme_bytes", GIB),
    ("nvme_read_gb_per_s", "nvme_read_bytes_per_s", 1e9),
    ("nvme_write_gb_per_s", "nvme_write_bytes_per_s", 1e9),
)
_COUNT_KEYS: Final = ("gpu", "num_gpus", "num_nodes", "gpus_per_node", "nic_gbps")
KEYS: Final = (*_COUNT_KEYS, *(key for key, _, _ in (*_GPU_KEYS, *_HOST_KEYS)))
"""What a cluster's file may say; `nic_gbps` is one GPU's share of the network, in gigabits a second."""


def parse_cluster(text: str) -> Cluster:
    """The cluster that a user means.

    Args:
        text: `GPU:NUM_GPUS`, `GPU:NUM_NODESxGPUS_PER_NODE`, or the path of a TOML file.

    Raises:
        ConfigError: there is no such device or file, or a number cannot be.
    """
    if text.endswith(".toml"):
        return _read_cluster(Path(text))
    name, _, count = text.partition(":")
    device = find_gpu(name)
    found = _COUNT.fullmatch(count)
    if found is None:
        usual = f"{device.name}:512, or {device.name}:64x8 for 64 nodes of 8"
        raise ConfigError(f"{text} names no number of GPUs; write {usual}")
    last = int(found[2])
    if found[1] is not None:
        return _cluster(in_nodes_of(last, device), int(found[1]) * last, last, text)
    return _cluster(device, last, min(last, usual_node(device)), text)


def usual_node(gpu: Gpu) -> int:
    """Devices of a node as it is usually built.

    >>> usual_node(find_gpu("h100")), usual_node(find_gpu("gb200"))
    (8, 4)
    """
    return _NODE_OF_RACKS if gpu.link_domain > _USUAL_NODE else _USUAL_NODE


def in_nodes_of(gpus_per_node: int, gpu: Gpu) -> Gpu:
    """The device, its links joining no more than its node, unless they are of those that leave it.

    >>> [in_nodes_of(4, find_gpu(name)).link_domain for name in ("h200", "gb200", "a40")]
    [4, 72, 2]
    """
    if gpu.link_domain > _USUAL_NODE:
        return gpu
    return replace(gpu, link_domain=min(gpu.link_domain, max(1, gpus_per_node)))


def _cluster(device: Gpu, num_gpus: int, gpus_per_node: int, source: str) -> Cluster:
    if num_gpus < 1 or gpus_per_node < 1:
        raise ConfigError(f"{source} holds no GPU; give at least 1")
    if num_gpus % gpus_per_node:
        below = num_gpus // gpus_per_node * gpus_per_node
        nearest = ", ".join(str(each) for each in (below, below + gpus_per_node) if each)
        raise ConfigError(
            f"{source}: {num_gpus} GPUs do not fill nodes of {gpus_per_node}; nearest: {nearest}, or say nodes x GPUs, "
            f"as in {device.name}:2x{max(1, num_gpus // 2)}"
        )
    return Cluster(gpu=device, num_gpus=num_gpus, gpus_per_node=gpus_per_node, nic_bytes_per_s=device.nic_bytes_per_s)


def _read_cluster(path: Path) -> Cluster:
    values = read_toml(path)
    for key, value in values.items():
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            cure = f"did you mean {close[0]}?" if close else f"keys are {', '.join(KEYS)}"
            raise ConfigError(f"{path.name}: {key} is no key of a cluster; {cure}")
        if key == "gpu":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{path.name}: {key}={value!r} must be a number >= 0; mend it there")
    if not isinstance(values.get("gpu"), str):
        raise ConfigError(f'{path.name} names no device; add gpu = "h100", or another of {", ".join(GPUS)}')
    device = find_gpu(values["gpu"])
    per_node = _whole(values, "gpus_per_node", path, usual_node(device))
    num_nodes = _whole(values, "num_nodes", path, 0)
    num_gpus = _whole(values, "num_gpus", path, num_nodes * per_node)
    if not num_gpus:
        raise ConfigError(f"{path.name} names no number of GPUs; add num_gpus = 512, or num_nodes = 64")
    if num_nodes and num_gpus != num_nodes * per_node:
        raise ConfigError(
            f"{path.name}: num_gpus={num_gpus} is not num_nodes {num_nodes} x gpus_per_node {per_node} = "
            f"{num_nodes * per_node}; leave one of them out"
        )
    if "gpus_per_node" not in values:
        per_node = min(per_node, num_gpus)
    elif "link_domain" not in values:
        device = in_nodes_of(per_node, device)
    cluster = _cluster(replace(device, **_fields(values, _GPU_KEYS)), num_gpus, per_node, path.name)
    nic = values["nic_gbps"] * 1e9 / 8 if "nic_gbps" in values else cluster.nic_bytes_per_s
    return replace(cluster, nic_bytes_per_s=nic, host=replace(Host(), **_fields(values, _HOST_KEYS)))


def _fields(values: Mapping[str, Any], keys: tuple[tuple[str, str, float], ...]) -> dict[str, Any]:
    return {name: values[key] * unit for key, name, unit in keys if key in values}


def _whole(values: Mapping[str, Any], key: str, path: Path, default: int) -> int:
    value = values.get(key, default)
    if not isinstance(value, int):
        raise ConfigError(f"{path.name}: {key}={value!r} must be a whole number; mend it there")
    return value


def cluster_words(cluster: Cluster) -> str:
    """A cluster in a few words.

    >>> cluster_words(parse_cluster("h100:64x8"))
    '512 x h100 in 64 nodes of 8, 79 GiB each, links 450 GB/s, network 400 Gb/s a GPU'
    """
    gpu, num_nodes = cluster.gpu, cluster.num_gpus // cluster.gpus_per_node
    if gpu.is_cpu:
        ranks = "1 process" if cluster.num_gpus == 1 else f"{cluster.num_gpus} processes"
        return f"{ranks} on this machine's CPU, {gpu.memory_bytes / GIB:.1f} GiB each"
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes:,} nodes of {cluster.gpus_per_node}"
    words = [f"{cluster.num_gpus:,} x {gpu.name} in {nodes}", f"{gpu.memory_bytes / GIB:.0f} GiB each"]
    if gpu.link_bytes_per_s:
        words.append(f"links {gpu.link_bytes_per_s / 1e9:.0f} GB/s")
    if num_nodes > 1 and cluster.nic_bytes_per_s:
        words.append(f"network {cluster.nic_bytes_per_s * 8 / 1e9:.0f} Gb/s a GPU")
    return ", ".join(words)
