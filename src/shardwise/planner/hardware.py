"""Describe a cluster as values: devices, links, hosts, and what has been measured of them.

Speeds are in bytes or FLOPs a second, in one direction of a link, of one device. `catalogue.toml` lists devices for
sale; `profile` holds what a machine was measured to do, and `cluster_of` makes a cluster of it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError, create_model

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import read_toml
from shardwise.config.sections import NotNegative, Section
from shardwise.config.untrusted_files import mismatch
from shardwise.planner.profile import Profile

CPU: Final = "cpu"
"""The device name of a rank that computes on its share of a host."""
GIB: Final = 2**30
_UNKNOWN_BYTES_PER_S: Final = 1e9
# Devices of a node, and where links join more than one node.
_USUAL_NODE, _NODE_OF_RACKS = 8, 4
_NO_PROFILE: Final = Profile(device="", num_ranks=1, num_threads=1, memory_bytes=0.0)
# How figures end in files, how their fields end, and what their units are there.
_UNITS: Final = (("_gib", "_bytes", GIB), ("_gb_per_s", "_bytes_per_s", 1e9), ("_tflops", "_flops_per_s", 1e12))


@dataclass(frozen=True, kw_only=True)
class FittedConstants:
    """Hold what is fitted to published runs: at most these three constants for each device, and none for a source.

    Attributes:
        matmul_share: share of the measured ceiling that large matrix products reach in training.
        memory_share: share of the device's memory bandwidth that element-wise kernels reach.
        network_share: share of a link's bandwidth that collectives reach while a model trains.
    """

    matmul_share: float = 0.8
    memory_share: float = 0.7
    network_share: float = 0.7


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    """Describe a device as its data sheet does; a field that is not known is 0 or missing.

    Attributes:
        memory_bytes: all that a process can use.
        peak_flops_per_s: dense, by dtype of the matrix product: fp32, tf32, fp16, bf16, fp8, fp4.
        ceiling_flops_per_s: rate of the best matrix product that was measured, by dtype; a missing dtype takes the
            share of the peak that another reached.
        link_bytes_per_s: to the devices of its domain (NVLink and the like), of all links; 0 where there is none.
        link_domain: number of devices that such links join.
        has_pairwise_links: whether each link leads to one other device, so that few ranks reach only some of them.
        host_bytes_per_s: bandwidth of its way to the host's memory.
        nic_bytes_per_s: its share of the network, as it is usually built.
        num_cores: streaming multiprocessors of NVIDIA's devices, compute units of AMD's.
        price_per_hour: dollars for one rented device; 0 where none is known.
        fitted: constants that are fitted to published runs.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    ceiling_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float = 0.0
    link_domain: int = 8
    has_pairwise_links: bool = False
    host_bytes_per_s: float = 0.0
    nic_bytes_per_s: float = 0.0
    num_cores: int = 0
    price_per_hour: float = 0.0
    fitted: FittedConstants = FittedConstants()

    @property
    def is_cpu(self) -> bool:
        """Say whether it stands for a rank's share of the host and not for a device."""
        return self.name == CPU

    @property
    def run_device(self) -> str:
        """Return the `run.device` of a run on it: the catalogue's are NVIDIA's and AMD's."""
        return "cpu" if self.is_cpu else "cuda"


@dataclass(frozen=True, kw_only=True)
class Host:
    """Describe the machine around the devices, which all of them share."""

    memory_bytes: float = 1e12
    memory_bytes_per_s: float = 2e11
    num_cores: int = 64
    nvme_read_bytes_per_s: float = 0.0
    nvme_write_bytes_per_s: float = 0.0
    nvme_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Describe devices of one kind in nodes of one kind.

    Attributes:
        nic_bytes_per_s: a device's share of its node's network.
        profile: what was measured here; where it has a table, that table comes first.
    """

    gpu: GpuSpec
    num_gpus: int
    gpus_per_node: int
    nic_bytes_per_s: float
    host: Host = Host()
    profile: Profile | None = None

    @property
    def measured(self) -> Profile:
        """Return the profile, or one in which nothing was measured."""
        return self.profile or _NO_PROFILE


# Words of a device's name that do not identify it, those of its form, and its size; a larger one is of the host's half
# of a superchip.
_NOISE: Final = frozenset(
    {"nvidia", "amd", "instinct", "geforce", "tesla", "quadro", "rtx", "gpu", "generation", "gb", "superchip", "nvl72"}
    | {"blackwell", "edition"}
)
_FORMS: Final = re.compile(r"sxm\d?|pcie|nvl|hbm\d\w?|oam|leonardo|workstation|server|maxq")
_APPLE: Final = re.compile(r"(apple\b.*|m[1-9]([ -]?(pro|max|ultra))?|mps|metal)")
_SIZE: Final = re.compile(r"(\d{1,3})(?:gb|gib|g)?")
_MAX_SIZE_GB: Final = 300


@dataclass(frozen=True)
class CatalogueEntry:
    """Describe one device of `catalogue.toml`.

    Attributes:
        model: the words that a name must have, and no others but noise, a size and forms.
        sold_gb: the memory that its name gives.
        forms: words that distinguish it from others of its model.
        host: the machine around it, with the memory for one device.
    """

    gpu: GpuSpec
    model: frozenset[str]
    sold_gb: int
    forms: frozenset[str]
    host: Host


def find_gpu(name: str) -> GpuSpec:
    """Return the device that a name means, such as `h100`, `A100-80GB` or `NVIDIA GeForce RTX 4090`.

    Where the name leaves the size or the form open, the usual one is taken.

    Raises:
        ConfigError: no such device is known.
    """
    gpu = known_gpu(name)
    if gpu is not None:
        return gpu
    if _APPLE.fullmatch(name.lower().strip()):
        reason = "is Apple's, of which no speeds in training are known"
        raise ConfigError("apple-device", f"{name} {reason}; plan for another device")
    close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
    fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(GPUS)}"
    raise ConfigError("unknown-device", f"{name} is no device that the planner knows; {fix}")


def known_gpu(name: str) -> GpuSpec | None:
    """Return the device that a name means, or None where none is known.

    >>> known_gpu("NVIDIA RTX A4000") is None
    True
    """
    if name in ENTRIES:
        return ENTRIES[name].gpu
    # Without what stands in brackets and the count of `8xA100`.
    bare = re.sub(r"\(.*?\)|^\s*\d+\s*x\s*", " ", name.lower())
    bare = re.sub(r"rtx(?=\d)", "rtx ", re.sub(r"max[- ]q", "maxq", bare))
    name_words = [word for word in re.findall(r"[a-z0-9]+", bare) if word not in _NOISE]
    forms = {word for word in name_words if _FORMS.fullmatch(word)}
    sizes = {word: int(size_match[1]) for word in name_words if (size_match := _SIZE.fullmatch(word))}
    size = next((size for size in sizes.values() if size <= _MAX_SIZE_GB), None)

    def distance(entry: CatalogueEntry) -> tuple[float, bool, int]:
        """Rank by size, then by whether a named form fits, then by forms that do not."""
        off = 0.0 if size is None else abs(entry.sold_gb / size - 1)
        return off, bool(forms) and not forms & entry.forms, len(forms - entry.forms)

    of_model = [entry for entry in ENTRIES.values() if entry.model == set(name_words) - forms - sizes.keys()]
    return min(of_model, key=distance).gpu if of_model else None


def _read_entries(path: Path) -> Mapping[str, CatalogueEntry]:
    """Read all devices of a file, in its order; where each figure is from is for people."""
    tables, entries = tomllib.loads(path.read_text(encoding="utf-8")), {}
    del tables["sources"]
    machines = tables.pop("hosts")
    for table in (*machines.values(), *tables.values()):
        del table["source"]
    for name, table in tables.items():
        model, sold_gb, forms = (table.pop(key) for key in ("model", "sold_gb", "forms"))
        host = Host(**_in_si(machines[table.pop("host")])) if "host" in table else Host()
        fitted = FittedConstants(**table.pop("fitted", {}))
        gpu = GpuSpec(name=name, fitted=fitted, **{"link_domain": 1, **_in_si(table)})
        entries[name] = CatalogueEntry(gpu, frozenset(model.split()), sold_gb, frozenset(forms), host)
    return MappingProxyType(entries)


def _in_si(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by the names of fields, whose units are bytes, FLOPs and seconds.

    >>> _in_si({"memory_gib": 2, "peak_tflops": {"bf16": 1.0}, "num_cores": 8})
    {'memory_bytes': 2147483648, 'peak_flops_per_s': {'bf16': 1000000000000.0}, 'num_cores': 8}
    """
    found = {}
    for key, value in values.items():
        end, name, unit = next((unit_row for unit_row in _UNITS if key.endswith(unit_row[0])), ("", "", 1))
        scaled = {number: n * unit for number, n in value.items()} if isinstance(value, Mapping) else value * unit
        found[key.removesuffix(end) + name] = scaled if unit != 1 else value
    return found


ENTRIES: Final = _read_entries(Path(__file__).with_name("catalogue.toml"))
GPUS: Final[Mapping[str, GpuSpec]] = MappingProxyType({name: entry.gpu for name, entry in ENTRIES.items()})

_COUNT: Final = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})")
_COUNTS: Final = ("num_gpus", "num_nodes", "gpus_per_node", "link_domain", "host_cores")
_OF_GPU: Final = ("memory_gib", "memory_gb_per_s", "link_gb_per_s", "host_link_gb_per_s", "price_per_hour")
_OF_HOST: Final = (
    "host_memory_gib", "host_memory_gb_per_s", "nvme_gib", "nvme_read_gb_per_s", "nvme_write_gb_per_s",
)  # fmt: skip
# What these are called without the prefix of their section.
_FIELD_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"host_link_gb_per_s": "host_gb_per_s", "host_cores": "num_cores", "host_memory_gib": "memory_gib",
     "host_memory_gb_per_s": "memory_gb_per_s"}
)  # fmt: skip
_Speed = Annotated[float, Field(ge=0.0, le=1e12)]
_FIELDS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "gpu": (str, ...),
        **dict.fromkeys(_COUNTS, (NotNegative | None, None)),
        **dict.fromkeys((*_OF_GPU, *_OF_HOST, "nic_gbps"), (_Speed | None, None)),
    }
)
_ClusterFile = create_model("_ClusterFile", __base__=Section, **_FIELDS)
KEYS: Final = tuple(_ClusterFile.model_fields)
"""What a cluster's file may say; `nic_gbps` is one GPU's share of the network, in gigabits a second."""


def parse_cluster(text: str) -> Cluster:
    """Return the cluster of `GPU:NUM_GPUS`, of `GPU:NUM_NODESxGPUS_PER_NODE`, or of the path of a TOML file.

    Raises:
        ConfigError: there is no such device or file, or a number cannot be.
    """
    if text.endswith(".toml"):
        return _read_cluster(Path(text))
    name, _, count = text.partition(":")
    device = find_gpu(name)
    match = _COUNT.fullmatch(count)
    if match is None:
        usual = f"{device.name}:512, or {device.name}:64x8 for 64 nodes of 8"
        raise ConfigError("gpu-count-missing", f"{text} names no number of GPUs; write {usual}")
    last = int(match[2])
    if match[1] is not None:
        return _cluster(in_nodes_of(last, device), int(match[1]) * last, last, text)
    return _cluster(device, last, min(last, usual_node(device)), text)


def usual_node(gpu: GpuSpec) -> int:
    """Return how many of these devices a node usually has.

    >>> usual_node(find_gpu("h100")), usual_node(find_gpu("gb200"))
    (8, 4)
    """
    return _NODE_OF_RACKS if gpu.link_domain > _USUAL_NODE else _USUAL_NODE


def usual_host(gpu: GpuSpec, gpus_per_node: int) -> Host:
    """Return the machine around so many devices, as it is usually built.

    >>> [round(usual_host(find_gpu(name), 2).memory_bytes / GIB) for name in ("rtx-4090", "a10g", "h100")]
    [128, 192, 931]
    """
    host = ENTRIES[gpu.name].host if gpu.name in ENTRIES else Host()
    return host if host == Host() else replace(host, memory_bytes=host.memory_bytes * gpus_per_node)


def in_nodes_of(gpus_per_node: int, gpu: GpuSpec) -> GpuSpec:
    """Return the device with its links limited to its node, unless its links leave the node.

    >>> [in_nodes_of(4, find_gpu(name)).link_domain for name in ("h200", "gb200", "a40")]
    [4, 72, 2]
    """
    if gpu.link_domain > _USUAL_NODE:
        return gpu
    return replace(gpu, link_domain=min(gpu.link_domain, max(1, gpus_per_node)))


def _cluster(device: GpuSpec, num_gpus: int, gpus_per_node: int, source: str) -> Cluster:
    if num_gpus < 1 or gpus_per_node < 1:
        raise ConfigError("gpu-count-positive", f"{source} holds no GPU; give at least 1")
    if num_gpus % gpus_per_node:
        fix = f"say nodes x GPUs, as in {device.name}:2x{max(1, num_gpus // 2)}"
        raise ConfigError("nodes-not-filled", f"{source}: {num_gpus} GPUs do not fill nodes of {gpus_per_node}; {fix}")
    host, nic = usual_host(device, gpus_per_node), device.nic_bytes_per_s
    return Cluster(gpu=device, num_gpus=num_gpus, gpus_per_node=gpus_per_node, nic_bytes_per_s=nic, host=host)


def _read_cluster(path: Path) -> Cluster:
    try:
        file = _ClusterFile(**read_toml(path)).model_dump(exclude_none=True)
    except ValidationError as error:
        fix = f'keys are {", ".join(KEYS)}, and gpu = "h100" or another device is needed'
        raise ConfigError("cluster-value", f"{path.name}: {mismatch(error)}; {fix}") from None
    device = find_gpu(file["gpu"])
    per_node, num_nodes = file.get("gpus_per_node", usual_node(device)), file.get("num_nodes", 0)
    whole = num_nodes * per_node
    num_gpus = file.get("num_gpus", whole)
    if not num_gpus and per_node:
        fix = "add num_gpus = 512, or num_nodes = 64"
        raise ConfigError("gpu-count-missing", f"{path.name} names no number of GPUs; {fix}")
    if num_nodes and num_gpus != whole:
        counts = f"num_gpus={num_gpus} is not num_nodes {num_nodes} x gpus_per_node {per_node} = {whole}"
        raise ConfigError("gpu-count-of-nodes", f"{path.name}: {counts}; leave one of them out")
    if "gpus_per_node" not in file:
        per_node = min(per_node, num_gpus)
    elif "link_domain" not in file:
        device = in_nodes_of(per_node, device)
    of_gpu, of_host = (
        _in_si({_FIELD_NAMES.get(key, key): file[key] for key in keys if key in file})
        for keys in ((*_OF_GPU, "link_domain"), (*_OF_HOST, "host_cores"))
    )
    cluster = _cluster(replace(device, **of_gpu), num_gpus, per_node, path.name)
    nic = file["nic_gbps"] * 1e9 / 8 if "nic_gbps" in file else cluster.nic_bytes_per_s
    return replace(cluster, nic_bytes_per_s=nic, host=replace(cluster.host, **of_host))


def cluster_words(cluster: Cluster) -> str:
    """Describe a cluster in a few words.

    >>> cluster_words(parse_cluster("h100:64x8"))
    '512 x h100 in 64 nodes of 8, 79 GiB each, links 450 GB/s, network 400 Gb/s a GPU'
    """
    gpu, num_nodes = cluster.gpu, cluster.num_gpus // cluster.gpus_per_node
    if gpu.is_cpu:
        ranks = "1 process" if cluster.num_gpus == 1 else f"{cluster.num_gpus} processes"
        return f"{ranks} on this machine's CPU, {gpu.memory_bytes / GIB:.1f} GiB each"
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes:,} nodes of {cluster.gpus_per_node}"
    texts = [f"{cluster.num_gpus:,} x {gpu.name} in {nodes}", f"{gpu.memory_bytes / GIB:.0f} GiB each"]
    if gpu.link_bytes_per_s:
        texts.append(f"links {gpu.link_bytes_per_s / 1e9:.0f} GB/s")
    if num_nodes > 1 and cluster.nic_bytes_per_s:
        texts.append(f"network {cluster.nic_bytes_per_s * 8 / 1e9:.0f} Gb/s a GPU")
    return ", ".join(texts)


def cluster_of(profile: Profile, num_ranks: int | None = None) -> Cluster:
    """Return the machine of a profile as a cluster of `num_ranks`, by default those that were measured.

    Raises:
        ConfigError: not even a matrix product was measured, so that nothing is known of a device.
    """
    ranks = num_ranks or profile.num_ranks
    gpu = _cpu(profile, ranks) if profile.device == CPU else _gpu(profile)
    copied = 2 * profile.copy_bytes_per_s("host", "host") * profile.num_ranks
    host = Host(
        memory_bytes=profile.host_memory_bytes or profile.memory_bytes,
        memory_bytes_per_s=copied or Host().memory_bytes_per_s,
        num_cores=profile.num_threads * profile.num_ranks,
        nvme_read_bytes_per_s=profile.disk_read_bytes_per_s * profile.num_ranks,
        nvme_write_bytes_per_s=profile.disk_write_bytes_per_s * profile.num_ranks,
    )
    nic = gpu.link_bytes_per_s if profile.device == CPU else gpu.nic_bytes_per_s
    return Cluster(gpu=gpu, num_gpus=ranks, gpus_per_node=ranks, nic_bytes_per_s=nic, host=host, profile=profile)


def reached_flops_per_s(profile: Profile) -> Mapping[str, float]:
    """Return the rate of the best product that was measured, by dtype."""
    reached: dict[str, float] = {}
    for row in profile.matmuls:
        reached[row.dtype] = max(reached.get(row.dtype, 0.0), 2.0 * row.m * row.n * row.k / row.seconds)
    return reached


def _cpu(profile: Profile, num_ranks: int) -> GpuSpec:
    """Describe a rank's share of the host as a device; its measured rates are reached in full."""
    reached, links = reached_flops_per_s(profile), _link_bytes_per_s(profile)
    if not reached:
        raise ConfigError("profile-no-products", "the profile has no matrix product; run shardwise doctor --calibrate")
    copied = profile.copy_bytes_per_s("host", "host") or profile.stream_bytes_per_s or _UNKNOWN_BYTES_PER_S
    return GpuSpec(
        name=CPU,
        memory_bytes=profile.memory_bytes / num_ranks,
        memory_bytes_per_s=profile.stream_bytes_per_s or copied,
        peak_flops_per_s=reached,
        ceiling_flops_per_s=reached,
        link_bytes_per_s=links,
        link_domain=num_ranks,
        host_bytes_per_s=copied,
        nic_bytes_per_s=links,
        num_cores=profile.num_threads,
        fitted=FittedConstants(matmul_share=1.0, memory_share=1.0, network_share=1.0),
    )


def _gpu(profile: Profile) -> GpuSpec:
    """Return the catalogue's device with what was measured of it; an unknown device has only what was measured."""
    reached = reached_flops_per_s(profile)
    gpu = known_gpu(profile.device)
    if gpu is None and not reached:
        fix = "run shardwise doctor --calibrate"
        raise ConfigError("device-not-measured", f"{profile.device} is not known and was not measured; {fix}")
    gpu = gpu or GpuSpec(
        name=profile.device,
        memory_bytes=profile.memory_bytes,
        memory_bytes_per_s=profile.stream_bytes_per_s or _UNKNOWN_BYTES_PER_S,
        peak_flops_per_s=reached,
        link_domain=profile.num_ranks,
        fitted=FittedConstants(matmul_share=0.9, memory_share=1.0, network_share=0.9),
    )
    return replace(
        gpu,
        memory_bytes=profile.memory_bytes or gpu.memory_bytes,
        ceiling_flops_per_s={**gpu.ceiling_flops_per_s, **reached},
        link_bytes_per_s=_link_bytes_per_s(profile) if profile.collectives else gpu.link_bytes_per_s,
        host_bytes_per_s=profile.copy_bytes_per_s("host", "device") or gpu.host_bytes_per_s,
    )


def _link_bytes_per_s(profile: Profile) -> float:
    """Return what each rank sends a second, as a ring, in the best all-gather; else the speed of a copy."""
    gathers = (row for row in profile.collectives if row.op == "all_gather")
    rates = [row.num_bytes * (row.num_ranks - 1) / row.num_ranks / row.seconds for row in gathers]
    return max(rates, default=profile.copy_bytes_per_s("host", "host") or _UNKNOWN_BYTES_PER_S)
