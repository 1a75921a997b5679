"""A profile is read back as it was written, is replaced as a whole, and makes a cluster of the machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.profiles import PROFILE as MEASURED
from harness.refusals import refused
from shardwise.config.errors import ConfigError
from shardwise.planner.hardware import cluster_of, find_gpu
from shardwise.planner.profile import CollectiveTime, MatmulTime, Profile, find_profile, profile_path, write_profile

PROFILE = replace(
    MEASURED,
    matmuls=(*MEASURED.matmuls, MatmulTime(dtype="bf16", m=512, n=512, k=512, seconds=0.02)),
    collectives=(
        CollectiveTime(op="all_gather", num_ranks=2, num_bytes=2**20, seconds=1e-3),
        CollectiveTime(op="all_gather", num_ranks=2, num_bytes=2**10, seconds=1e-3),
    ),
    copies_bytes_per_s=(("host->host", 3e9),),
    hidden_share=0.25,
)
SECONDS = st.floats(1e-7, 1e3)
SIZES = st.integers(1, 2**20)
PROFILES = st.builds(
    Profile,
    device=st.text(min_size=1),
    num_ranks=st.integers(1, 64),
    num_threads=st.integers(1, 64),
    memory_bytes=st.floats(1, 1e13),
    matmuls=st.lists(
        st.builds(MatmulTime, dtype=st.sampled_from(["fp32", "bf16"]), m=SIZES, n=SIZES, k=SIZES, seconds=SECONDS)
    ).map(tuple),
    collectives=st.lists(
        st.builds(CollectiveTime, op=st.text(), num_ranks=SIZES, num_bytes=SIZES, seconds=SECONDS)
    ).map(tuple),
    copies_bytes_per_s=st.lists(st.tuples(st.text(), SECONDS)).map(tuple),
    hidden_share=st.none() | st.floats(0, 1),
)


@given(PROFILES)
def test_a_profile_is_read_as_it_was_written(profile):
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "profile-not-object"),
        ("[]", "profile-not-object"),
        ("null", "profile-not-object"),
        ("{}", "profile-schema"),
        ('{"schema": 99}', "profile-schema"),
        ('{"schema": 1, "device": "cpu"}', "profile-damaged"),
        (
            '{"schema": 1, "device": "cpu", "num_ranks": 1, "num_threads": 1, "memory_bytes": 1, "matmuls": [{}]}',
            "profile-damaged",
        ),
        (json.dumps({**json.loads(PROFILE.to_json()), "colour": "red"}), "profile-damaged"),
    ],
)
def test_a_damaged_profile_names_the_fix(text, code):
    with refused(code, "shardwise doctor --calibrate"):
        Profile.from_json(text)


def test_a_profile_is_found_where_it_was_written_and_nothing_else_is_left(tmp_path):
    path = write_profile(PROFILE, tmp_path)
    newer = replace(PROFILE, call_s=1.0)
    assert write_profile(newer, tmp_path) == path
    assert [each.name for each in path.parent.iterdir()] == ["cpu-2.json"]
    assert find_profile(tmp_path, "cpu", 2) == newer


def test_the_nearest_number_of_ranks_stands_in(tmp_path):
    assert find_profile(tmp_path, "cpu", 2) is None
    for num_ranks in (1, 4):
        write_profile(replace(PROFILE, num_ranks=num_ranks), tmp_path)
    (profile_path(tmp_path, "cpu", 1).parent / "cpu-notes.json").write_text("mine")
    for wanted, given_ranks in ((1, 1), (2, 1), (3, 4), (64, 4)):
        found = find_profile(tmp_path, "cpu", wanted)
        assert found is not None
        assert found.num_ranks == given_ranks
    assert find_profile(tmp_path, "NVIDIA H200", 1) is None


def test_a_damaged_file_is_named(tmp_path):
    path = profile_path(tmp_path, "cpu", 2)
    path.parent.mkdir()
    path.write_text("{")
    with refused("profile-not-object", str(path)):
        find_profile(tmp_path, "cpu", 2)


def test_a_cpu_rank_is_a_device_with_its_share_of_the_host():
    cluster = cluster_of(PROFILE)
    assert (cluster.num_gpus, cluster.gpus_per_node) == (2, 2)
    assert cluster.gpu.memory_bytes == 4e9
    assert cluster.gpu.peak_flops_per_s == {"fp32": 2 * 512**3 / 0.004, "bf16": 2 * 512**3 / 0.02}
    assert cluster.gpu.ceiling_flops_per_s == cluster.gpu.peak_flops_per_s
    assert cluster.gpu.link_bytes_per_s == pytest.approx(2**20 / 2 / 1e-3)
    assert cluster.gpu.host_bytes_per_s == 3e9
    assert cluster.host.memory_bytes == 8e9
    assert cluster.profile is PROFILE
    assert cluster_of(PROFILE, num_ranks=4).gpu.memory_bytes == 2e9


def test_a_gpu_keeps_what_its_data_sheet_says_and_was_not_measured():
    measured = replace(PROFILE, device="NVIDIA H200", memory_bytes=139e9, copies_bytes_per_s=(("host->device", 5e10),))
    cluster = cluster_of(measured)
    sheet = find_gpu("h200")
    assert cluster.gpu.memory_bytes == 139e9
    assert cluster.gpu.host_bytes_per_s == 5e10
    assert cluster.gpu.peak_flops_per_s == sheet.peak_flops_per_s
    assert cluster.gpu.ceiling_flops_per_s["bf16"] == 2 * 512**3 / 0.02
    assert cluster.nic_bytes_per_s == sheet.nic_bytes_per_s


def test_an_unmeasured_machine_says_how_to_measure():
    with refused("profile-no-products"):
        cluster_of(Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=8e9))
    with refused("device-not-measured", "GPU of tomorrow"):
        cluster_of(Profile(device="GPU of tomorrow", num_ranks=2, num_threads=1, memory_bytes=8e9))


def test_what_ranks_share_is_counted_of_all_of_them():
    measured = replace(
        PROFILE, num_threads=3, host_memory_bytes=9e9, disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9
    )
    cluster = cluster_of(measured)
    host = cluster.host
    assert host.memory_bytes == 9e9
    assert host.memory_bytes_per_s == 2 * 3e9 * 2  # a copy reads and writes, on each of 2 ranks
    assert (host.nvme_read_bytes_per_s, host.nvme_write_bytes_per_s) == (4e9, 2e9)
    assert host.num_cores == 6
    assert (cluster.gpu.memory_bytes_per_s, cluster.gpu.link_domain, cluster.gpu.num_cores) == (2e9, 2, 3)


def test_links_of_a_gpu_are_as_fast_as_they_were_measured():
    gpu = replace(PROFILE, device="NVIDIA H200")
    assert cluster_of(gpu).gpu.link_bytes_per_s == pytest.approx(2**20 / 2 / 1e-3)
    assert cluster_of(replace(gpu, collectives=())).gpu.link_bytes_per_s == find_gpu("h200").link_bytes_per_s


def test_a_profile_of_another_schema_or_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    values = json.loads(PROFILE.to_json())
    with refused("profile-schema", "schema 2"):
        Profile.from_json(json.dumps(values | {"schema": 2}))
    for num_ranks in (1, 3):
        write_profile(replace(PROFILE, num_ranks=num_ranks), tmp_path)
    found = find_profile(tmp_path, "cpu", 2)
    assert found is not None
    assert found.num_ranks == 1  # of two as near the smaller one
    monkeypatch.setattr("os.fsync", lambda file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_profile(replace(PROFILE, num_ranks=8), tmp_path)
    assert sorted(each.name for each in (tmp_path / "profiles").iterdir()) == ["cpu-1.json", "cpu-3.json"]


@pytest.mark.parametrize("bad", [None, "x", -1, [], True, math.inf, math.nan, 10**400], ids=str)
def test_a_value_that_nothing_measures_is_refused(bad: object) -> None:
    """Of any key; where it is taken, a cluster is made of it."""
    values = json.loads(MEASURED.to_json())
    for key in ["device", "num_ranks", "memory_bytes", "stream_bytes_per_s", "call_s", "copies_bytes_per_s", "matmuls"]:
        if (key == "device" and bad == "x") or (key in ("copies_bytes_per_s", "matmuls") and bad == []):
            continue
        with pytest.raises(ConfigError) as caught:
            Profile.from_json(json.dumps({**values, key: bad}))
        assert caught.value.code.startswith("profile-"), key
