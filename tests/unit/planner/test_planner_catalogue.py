"""The catalogue: devices found by the names that drivers, papers and people use, each figure with a source."""

import json
import tomllib
from pathlib import Path

import pytest

from harness.paths import DATA
from harness.refusals import refused
from shardwise.planner import hardware
from shardwise.planner.hardware import ENTRIES, GPUS, find_gpu, known_gpu, parse_cluster

CATALOGUE = tomllib.loads(Path(hardware.__file__).with_name("catalogue.toml").read_text())
CASES = json.loads((DATA / "planner_cases.json").read_text())["cases"]


NAMES = {
    "h100": ["h100", "H100", "H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"],
    "h100-pcie": ["NVIDIA H100 PCIe"],
    "h100-nvl": ["NVIDIA H100 NVL"],
    "h100-96": ["H100-96GB-HBM2e(2.4TB/s,500W)", "H100 SXM 96GB"],
    "h200": ["NVIDIA H200", "H200-SXM-141GB"],
    "gh200": ["NVIDIA GH200 480GB", "GH200-96GB"],
    "gh200-144": ["NVIDIA GH200 144G HBM3e"],
    "gb200": ["GB200-NVL72"],
    "gb300": ["NVIDIA GB300"],
    "b200": ["B200-180GB"],
    "b300": ["B300"],
    "a100-80": ["A100", "8xA100"],
    "a100-40": ["a100-40", "A100-40GB", "NVIDIA A100-SXM4-40GB"],
    "a100-64": ["A100-SXM4-64GB"],
    "a100-80-pcie": ["NVIDIA A100 80GB PCIe"],
    "a100-40-pcie": ["NVIDIA A100-PCIE-40GB"],
    "a800": ["A800-SXM4-80GB"],
    "v100-32": ["Tesla V100-SXM2-32GB", "V100-SXM3-32GB"],
    "v100-16": ["Tesla V100-SXM2-16GB"],
    "t4": ["Tesla T4"],
    "l4": ["NVIDIA L4"],
    "l40s": ["NVIDIA L40S"],
    "a10g": ["NVIDIA A10G"],
    "a6000": ["NVIDIA RTX A6000"],
    "rtx-4090": ["RTX4090"],
    "rtx-3090": ["NVIDIA GeForce RTX 3090"],
    "rtx-6000-ada": ["NVIDIA RTX 6000 Ada Generation"],
    "rtx-pro-6000": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"],
    "rtx-pro-6000-max-q": ["NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
    "rtx-pro-6000-server": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"],
    "rtx-5090": ["NVIDIA GeForce RTX 5090"],
    "h20": ["NVIDIA H20"],
    "mi355x": ["AMD Instinct MI355X"],
    "titan-rtx": ["Titan-RTX"],
    "mi300x": ["AMD Instinct MI300X"],
    "mi250x": ["MI250X"],
}


@pytest.mark.parametrize(("expected", "names"), NAMES.items(), ids=list(NAMES))
def test_names_of_drivers_papers_and_people(expected, names):
    assert {find_gpu(name).name for name in names} == {expected}


@pytest.mark.parametrize(
    "name",
    ["any", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 3090 Ti", "RTX-3090+Titan-RTX (heterogeneous)", "80GB", "", "L400"],
)
def test_a_device_is_never_taken_for_another(name):
    assert known_gpu(name) is None
    with refused("unknown-device", name):
        find_gpu(name)


@pytest.mark.parametrize("name", ["m3", "M4 Max", "m2-ultra", "Apple M3 Pro", "mps"])
def test_apples_chips_are_refused_by_name(name):
    with refused("apple-device", name):
        find_gpu(name)
    assert known_gpu(name) is None


@pytest.mark.parametrize(
    ("cluster", "host_gib"),
    [("rtx-4090:1", 64), ("rtx-4090:2", 128), ("rtx-5090:2x4", 256), ("t4:4", 192), ("gb200:72", 892), ("h100:8", 931)],
)
def test_hosts_have_the_memory_of_their_class_of_machine(cluster, host_gib, tmp_path):
    host = parse_cluster(cluster).host
    assert host.memory_bytes / 2**30 == pytest.approx(host_gib, rel=1e-3)
    name = cluster.partition(":")[0]
    (file := tmp_path / "mine.toml").write_text(f'gpu = "{name}"\nnum_gpus = 2\nhost_memory_gib = 500\n')
    assert parse_cluster(str(file)).host.memory_bytes == 500 * 2**30, "a file's own figure counts"


def test_every_device_of_the_published_runs_is_known():
    names = {case["hardware"]["gpu"] for case in CASES}
    assert {name for name in names if known_gpu(name) is None} == {
        "any",
        "RTX-2080+RTX-3090+Titan-RTX (heterogeneous)",
        "RTX-3090+Titan-RTX (heterogeneous)",
    }


def test_every_figure_has_a_source():
    for name, entry in ENTRIES.items():
        device = entry.gpu
        figures = {"memory_gib", "memory_gb_per_s", "peak_tflops", "host_gb_per_s", "nic_gb_per_s", "num_cores"}
        figures |= {"ceiling_tflops"} if device.ceiling_flops_per_s else set()
        figures |= {"link_gb_per_s"} if device.link_bytes_per_s else set()
        figures |= {"price_per_hour"} if device.price_per_hour else set()
        assert {
            figure: CATALOGUE["sources"][key] for figure, key in CATALOGUE[name]["source"].items()
        }.keys() == figures


@pytest.mark.parametrize("device", GPUS.values(), ids=list(GPUS))
def test_figures_agree_with_each_other(device):
    peaks = device.peak_flops_per_s
    clocks_higher = 1.2 if device.name.startswith("rtx-") else 1.0
    assert all(ceiling < clocks_higher * peaks[dtype] for dtype, ceiling in device.ceiling_flops_per_s.items())
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]
    assert peaks["fp32"] <= peaks.get("tf32", peaks["fp16"]) <= peaks["fp16"]
    assert device.memory_bytes <= ENTRIES[device.name].sold_gb * 2**30
    assert device.link_bytes_per_s == 0 or device.link_bytes_per_s > device.nic_bytes_per_s
    assert (device.link_domain > 1) == (device.link_bytes_per_s > 0)
    assert find_gpu(device.name) is device
