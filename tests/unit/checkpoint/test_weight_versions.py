"""Versions of weights on disk: what has changed comes back bit for bit; what is torn or out of order is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from harness.refusals import refused
from shardwise.checkpoint.deltas import VersionWriter, digest_of, read_weights
from shardwise.checkpoint.manifest import DamagedError

Weights = dict[str, Tensor]


def drawn(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        "half": torch.randn(64, 33, generator=generator).bfloat16(),
        "single": torch.randn(7, 5, generator=generator),
        "number": torch.randn((), generator=generator),
        "none": torch.empty(0, 3),
        "codes": torch.randint(0, 255, (301,), dtype=torch.uint8, generator=generator),
        "count": torch.tensor(3 + seed),
    }


def check(root: Path, expected: Weights) -> None:
    _, found = read_weights(root)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert digest_of(found[name]) == digest_of(tensor), name


@settings(max_examples=25)
@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.001, 0.1, 1.0]))
def test_any_share_of_changes_comes_back_bit_for_bit(seed: int, share: float) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as root:
        weights, writer = drawn(seed), VersionWriter(root, file_bytes=3000)
        writer.write(weights.items())
        for step in range(2):
            generator = torch.Generator().manual_seed(seed + step)
            for tensor in weights.values():
                changed = torch.rand(tensor.shape, generator=generator) < share
                tensor[changed] = drawn(seed + step + 1)["half"].float().flatten()[0].to(tensor.dtype)
            version = writer.write(weights.items())
            assert version is not None
            assert version.num_bytes <= version.num_whole_bytes
            check(Path(root), weights)


def test_values_that_are_no_numbers_and_both_zeros_are_kept(tmp_path: Path) -> None:
    weights, writer = {"w": torch.tensor([0.0, math.nan, 1.0] * 20)}, VersionWriter(tmp_path)
    writer.write(weights.items())
    weights["w"][0] = -0.0
    assert writer.write(weights.items()).num_bytes > 0
    check(tmp_path, weights)
    assert writer.write(weights.items()).num_bytes == 0


def test_a_whole_version_is_a_folder_of_safetensors_with_its_index(tmp_path: Path) -> None:
    weights = drawn(1)
    VersionWriter(tmp_path, file_bytes=1000).write(weights.items())
    folder = tmp_path / "version-00000000"
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for name, file in index.items():
        assert torch.equal(load_file(folder / file)[name], weights[name])


def test_a_reader_that_has_a_version_takes_only_the_later_ones(tmp_path: Path) -> None:
    weights, writer = drawn(1), VersionWriter(tmp_path)
    writer.write(weights.items())
    version, held = read_weights(tmp_path)
    weights["single"][1] += 1
    writer.write(weights.items())
    (tmp_path / "version-00000000" / "model-00001.safetensors").unlink()
    later, found = read_weights(tmp_path, version, held)
    assert later.number == 1
    assert torch.equal(found["single"], weights["single"])
    assert not torch.equal(held["single"], weights["single"])
    assert read_weights(tmp_path, later, found)[0] == later


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["delta-00001.safetensors", "version.json"])
def test_a_damaged_version_is_taken_neither_whole_nor_in_part(
    tmp_path: Path, file: str, harm: Callable[[Path], None]
) -> None:
    weights, writer = drawn(1), VersionWriter(tmp_path)
    writer.write(weights.items())
    version, held = read_weights(tmp_path)
    before = {name: digest_of(tensor) for name, tensor in held.items()}
    for tensor in weights.values():
        tensor += 1
    writer.write(weights.items())
    harm(tmp_path / "version-00000001" / file)
    for call in (lambda: read_weights(tmp_path), lambda: read_weights(tmp_path, version, held)):
        with pytest.raises(DamagedError):
            call()
    assert {name: digest_of(tensor) for name, tensor in held.items()} == before


def test_versions_are_taken_in_their_order_alone(tmp_path: Path) -> None:
    weights, writer = drawn(1), VersionWriter(tmp_path)
    for _ in range(3):
        weights["single"] += 1
        writer.write(weights.items())
    (tmp_path / "version-00000001").rename(tmp_path / "gone")
    with refused("version-chain"):
        read_weights(tmp_path)


def test_what_fails_leaves_nothing_and_the_next_version_is_whole(tmp_path: Path) -> None:
    weights, writer = drawn(1), VersionWriter(tmp_path)
    writer.write(weights.items())

    def failing() -> object:
        yield from list(weights.items())[:2]
        raise RuntimeError("the walk has failed")

    with pytest.raises(RuntimeError, match="walk"):
        writer.write(failing())
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000000"]
    weights["single"] += 1
    version = writer.write(weights.items())
    assert version.num_bytes == version.num_whole_bytes
    check(tmp_path, weights)


def test_old_versions_may_be_removed_and_what_a_dead_writer_has_left_is(tmp_path: Path) -> None:
    weights = drawn(1)
    for _ in range(2):
        VersionWriter(tmp_path).write(weights.items())
    shutil.rmtree(tmp_path / "version-00000000")
    left = tmp_path / ".version-00000002.unfinished"
    left.mkdir()
    (left / "model-00001.safetensors").touch()
    weights["single"] += 1
    assert VersionWriter(tmp_path).write(weights.items()).number == 2
    check(tmp_path, weights)
    assert not left.exists()


def test_a_change_of_what_was_not_there_is_refused(tmp_path: Path) -> None:
    weights, writer = drawn(1), VersionWriter(tmp_path)
    writer.write(weights.items())
    version, held = read_weights(tmp_path)
    weights["half"][0, 0] += 1
    writer.write(weights.items())
    del held["half"]
    with refused("version-torn"):
        read_weights(tmp_path, version, held)


def test_there_may_be_no_version(tmp_path: Path) -> None:
    assert VersionWriter(tmp_path / "a").write([("w", None)]) is None
    with refused("no-version"):
        read_weights(tmp_path / "a")
