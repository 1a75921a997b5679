"""Checkpoints without an engine: every damage is found and named, differences are seen."""

import math
import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoints import SHAPES, STATES, flip, save, values_of
from harness.refusals import refused
from shardwise.checkpoint import offline
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.compare import ChangedState, ChangedValues, compare, compare_values
from shardwise.checkpoint.find import find, newest_whole, survey
from shardwise.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    DamagedError,
    Manifest,
    StoredChunk,
    StoredState,
    StoredTensor,
)
from shardwise.checkpoint.offline import verify
from shardwise.layout.slicing import Rect


def messages(folder: Path) -> list[str]:
    return [str(damage) for damage in verify(folder).damages]


# ---------------------------------------------------------------- verify


def test_a_whole_checkpoint_is_found_whole_and_read_to_its_last_byte(tmp_path):
    folder = save(tmp_path, values_of(), num_ranks=3)
    seen = []
    found = verify(folder, lambda *progress: seen.append(progress))
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found.damages == ()
    assert found.num_read_bytes == total
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_every_damage_is_named_and_those_after_it_are_found(tmp_path):
    folder = save(tmp_path, values_of())
    up = next(tensor for tensor in read_manifest(folder).tensors if tensor.name == "up.weight")
    param, exp_avg = (up.states[state].pieces for state in STATES)
    flip(folder / param[0].file, param[0].offset + BLOCK_BYTES + 5)
    flip(folder / exp_avg[1].file, exp_avg[1].offset)
    middle, end = param[0].offset + BLOCK_BYTES, param[0].offset + up.shape[1] * 300 * 4
    first = exp_avg[1].offset
    differs = "does not match its checksum at bytes"
    assert messages(folder) == [
        f"step-00000100/rank-00000-of-00002.safetensors: up.weight param {differs} {middle} to {end}",
        f"step-00000100/rank-00001-of-00002.safetensors: up.weight exp_avg {differs} {first} to {first + BLOCK_BYTES}",
    ]


def test_a_checkpoint_of_another_step_than_its_folders_name_is_named(tmp_path):
    folder = save(tmp_path, values_of(), step=100)
    (message,) = messages(folder.rename(tmp_path / "step-00000200"))
    assert "manifest.json is of step 100, which is not what its folder's name says" in message


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_the_data_is_found(tmp_path_factory, data):
    folder = save(tmp_path_factory.mktemp("flip"), values_of({"a": (3, 5), "b": (2,)}))
    path = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    bit = data.draw(st.integers(8 * start, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    (damage,) = verify(folder).damages
    assert damage.file == path.name
    assert "does not match its checksum" in damage.what


def test_torn_and_missing_files_and_a_torn_manifest_are_named(tmp_path):
    folder = save(tmp_path, values_of())
    first, second = sorted(folder.glob("*.safetensors"))
    num_bytes = first.stat().st_size
    with first.open("r+b") as file:
        file.truncate(num_bytes - 1)
    second.unlink()
    assert messages(folder) == [
        f"{first} has {num_bytes - 1} bytes and the manifest says {num_bytes}",
        f"{second} is missing",
    ]
    (folder / MANIFEST_NAME).write_text((folder / MANIFEST_NAME).read_text()[:-9])
    assert messages(folder) == [f"{folder / MANIFEST_NAME} does not match its checksum"]
    (folder / MANIFEST_NAME).unlink()
    assert messages(folder) == [f"{folder} is no whole checkpoint: it has no manifest.json"]


def test_a_block_that_cannot_be_read_does_not_hide_those_after_it(tmp_path, monkeypatch):
    folder = save(tmp_path, values_of(), num_ranks=1)
    (piece,) = next(each for each in read_manifest(folder).tensors if each.name == "up.weight").states["param"].pieces
    flip(folder / piece.file, piece.offset + BLOCK_BYTES)

    preadv = os.preadv

    def read(descriptor: int, buffers, offset: int) -> int:
        if offset == piece.offset:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    unreadable, changed = messages(folder)
    middle = piece.offset + BLOCK_BYTES
    assert unreadable.endswith(f"up.weight param cannot be read at byte {piece.offset}: Input/output error")
    assert changed.endswith(f"up.weight param does not match its checksum at bytes {middle} to {middle + BLOCK_BYTES}")


def test_what_is_appended_to_a_file_is_found(tmp_path):
    folder = save(tmp_path, values_of())
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b"more")
    (message,) = messages(folder)
    assert "and the manifest says" in message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            b'"up.bias[',
            b'"up.bios[',
            "its own header has up.bios[0:3], F32 of shape (3,), the manifest up.bias[0:3], F32",
        ),
        (b'"F32","shape":[3]', b'"I32","shape":[3]', "has up.bias[0:3], I32 of shape (3,), the manifest"),
        (b'"up.bias[', b'"u\\nbias[', "has u\\nbias[0:3], F32"),  # one line, whatever the names of others
        (b'"shape":[3]', b'"shape":[4]', "by its shape"),
        (b'"__metadata__"', b'\x00__metadata__"', "not of safetensors"),
    ],
)
def test_headers_are_compared_with_the_manifest(tmp_path, old, new, message):
    folder = save(tmp_path, values_of())
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    found = messages(folder)
    assert any(message in each for each in found), found
    assert all(path.name in each and each.isprintable() for each in found)


def test_what_only_the_header_knows_is_found(tmp_path):
    folder = save(tmp_path, values_of(), num_ranks=1)
    manifest = read_manifest(folder)
    known = tuple(tensor for tensor in manifest.tensors if tensor.name != "up.bias")
    (folder / MANIFEST_NAME).write_text(replace(manifest, tensors=known).to_text())
    for message, name in zip(messages(folder), ("up.bias", "up.bias/exp_avg"), strict=True):
        assert message.endswith(f"its own header has {name}, F32 of shape (7,), the manifest nothing")


def whole_and_parts(draw) -> tuple[tuple[int, ...], list[Rect]]:
    """A tensor and rectangles that cover it once: cut along any dim, again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    parts = [Rect.whole(shape)]
    for _ in range(draw(st.integers(0, 5))):
        rect = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dims = [dim for dim, size in enumerate(rect.shape) if size > 1]
        if not dims:
            parts.append(rect)
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(rect.start[dim] + 1, rect.stop[dim] - 1))
        stop = tuple(at if d == dim else each for d, each in enumerate(rect.stop))
        start = tuple(at if d == dim else each for d, each in enumerate(rect.start))
        parts += [Rect(rect.start, stop), Rect(start, rect.stop)]
    return shape, parts


def cover_of(shape, rects) -> list[str]:
    """What is said of a manifest whose tensor has these pieces, one after the other in a file."""
    offsets = [0, *accumulate(4 * rect.numel for rect in rects)]
    pieces = [StoredChunk(rect, "a", offset) for rect, offset in zip(rects, offsets, strict=False)]
    tensor = StoredTensor("weight", (), shape, {"exp_avg": StoredState("F32", tuple(pieces))})
    return refusals(Manifest(1, (tensor,), {"a": offsets[-1]}))


def refusals(manifest: Manifest) -> list[str]:
    try:
        return [] if Manifest.from_text(manifest.to_text(), "manifest.json") == manifest else ["other"]
    except DamagedError as error:
        return [str(error).removeprefix("manifest.json is not what version 1 writes: ")]


@given(data=st.data())
def test_pieces_that_do_not_cover_once_are_found(data):
    shape, parts = whole_and_parts(data.draw)
    assert cover_of(shape, parts) == []
    place = data.draw(st.integers(0, len(parts) - 1))
    (doubled,) = cover_of(shape, [*parts, parts[place]])
    assert doubled.startswith("weight/exp_avg: its pieces have ")
    (lost,) = cover_of(shape, [part for part in parts if part is not parts[place]])
    assert f"have {math.prod(shape) - parts[place].numel} of {math.prod(shape)} elements" in lost
    # As many elements as the tensor has, and yet neither all nor each once.
    equal = [other for other in parts if other is not parts[place] and other.shape == parts[place].shape]
    if equal:
        swapped = [equal[0] if part is parts[place] else part for part in parts]
        assert len(cover_of(shape, swapped)) == 1


def test_pieces_outside_of_the_tensor_and_unknown_forms_are_found():
    assert "not within shape (4, 3)" in cover_of((4, 3), [Rect((0, 0), (5, 3))])[0]
    assert "not within shape (4,)" in cover_of((4,), [Rect((0, 0), (4, 1))])[0]
    for form, rule in ((("F5", ()), "dtype: Input should be 'F64'"), (("F32", (), None, "zip"), "codec 'zip' is none")):
        (what,) = refusals(Manifest(1, (StoredTensor("a", (), (1,), {"param": StoredState(*form)}),), {}))
        assert rule in what


@pytest.mark.parametrize("shape", [(20_000,), (4, 20_000)])
def test_many_pieces_are_checked_in_one_pass(shape):
    """As many elements as the tensor has, in pieces that all meet in some dim: a look at each pair takes minutes."""
    dim, whole = shape.index(max(shape)), Rect.whole(shape)
    rects = [
        Rect((*whole.start[:dim], at, *whole.start[dim + 1 :]), (*shape[:dim], at + 1, *shape[dim + 1 :]))
        for at in range(shape[dim])
    ]
    assert cover_of(shape, rects) == []
    (what,) = cover_of(shape, [rects[7]] * len(rects))
    assert "its pieces overlap" in what


def test_overlapping_pieces_hide_no_row(tmp_path):
    """Two pieces that have row 0 and none that has row 5: as many elements as wanted, once taken for all."""
    folder = save(tmp_path, values_of({"a": (6,)}), num_ranks=1)
    manifest = read_manifest(folder)
    (tensor, *others) = manifest.tensors
    (piece,) = tensor.states["param"].pieces
    pieces = tuple(replace(piece, rect=Rect((0,), (stop,)), crcs=()) for stop in (5, 1))
    forged = replace(tensor, states={**tensor.states, "param": StoredState("F32", pieces)})
    (folder / MANIFEST_NAME).write_text(replace(manifest, tensors=(forged, *others)).to_text())
    with refused("manifest-malformed"):
        read_manifest(folder)
    assert "overlap" in messages(folder)[0]


def test_small_chunks_read_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "CHUNK_NUMEL", BLOCK_BYTES // 4)
    values = values_of()
    folder = save(tmp_path / "a", values)
    changed = dict(values)
    changed["up.weight", "param"] = values["up.weight", "param"].clone()
    changed["up.weight", "param"][599, 999] += 2
    changed["up.weight", "param"][0, 0] += 1
    (difference,) = compare(folder, save(tmp_path / "c", changed)).values
    assert (difference.name, difference.num_different) == ("up.weight", 2)
    assert difference.max_abs == pytest.approx(2, rel=1e-5)


# ---------------------------------------------------------------- compare


def test_layouts_do_not_matter(tmp_path):
    found = compare(save(tmp_path / "a", values_of(), 3), save(tmp_path / "b", values_of(), 2))
    assert not found
    assert found.num_states == 2 * len(SHAPES) + 3


def test_differences_are_listed_by_kind(tmp_path):
    shapes = {"same": (4, 3), "moved": (8, 8), "shape": (2, 3), "gone": (5,)}
    a_values, b_values = values_of(shapes), values_of(shapes)
    b_values["moved", "exp_avg"][3, 4] += 0.5
    b_values["moved", "exp_avg"][0, 0] -= 0.25
    b_values["shape", "param"] = b_values["shape", "param"].reshape(3, 2)
    b_values["shape", "exp_avg"] = b_values["shape", "exp_avg"].reshape(3, 2)
    b_values["same", "param"] = b_values["same", "param"].double()
    b_values["new", "param"] = torch.zeros(2)
    b_values["same", "other"] = torch.zeros(4, 3)
    b_values["rng of rank 1", "param"] = a_values["rng of rank 1", "param"] ^ 1
    del b_values["gone", "param"], b_values["gone", "exp_avg"]
    a = save(tmp_path / "a", a_values, config={"zero": {"stage": 2}, "run": {"seed": 1}})
    b = save(tmp_path / "b", b_values, 1, step=200, config={"zero": {"stage": 3}, "run": {"seed": 1}})
    found = compare(a, b)
    assert found.tensors == (
        ChangedState("same param", "F32", "F64"),
        ChangedState("same step", "100.0 (F32)", "200.0 (F32)"),
        ChangedState("same other", None, "F32"),
        ChangedState("moved step", "100.0 (F32)", "200.0 (F32)"),
        ChangedState("shape shape", (2, 3), (3, 2)),
        ChangedState("shape step", "100.0 (F32)", "200.0 (F32)"),
        ChangedState("gone", "there", None),
        ChangedState("new", None, "there"),
    )
    assert found.values == (
        ChangedValues("moved", "exp_avg", 64, 2, pytest.approx(0.5, rel=1e-5)),
        ChangedValues("rng of rank 1", "param", 50, 50, 1.0),
    )
    assert found.config == (ChangedState("zero.stage", 2, 3),)
    assert found.run == (ChangedState("step", 100, 200),)
    weights = compare(a, b, weights_only=True)
    assert weights.values == weights.config == weights.run == ()
    assert [change.key for change in weights.tensors] == ["same param", "shape shape", "gone", "new"]


def test_a_damaged_checkpoint_cannot_be_compared(tmp_path):
    a, b = save(tmp_path / "a", values_of()), save(tmp_path / "b", values_of())
    path = min(b.glob("*.safetensors"))
    flip(path, path.stat().st_size - 1)
    with refused("checksum-differs", path.name):
        compare(a, b)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint8, torch.bool],
)
def test_values_of_every_width_are_compared(dtype):
    a = torch.tensor([0, 1, 1, 0]).to(dtype)
    b = torch.tensor([0, 1, 0, 1]).to(dtype)
    assert compare_values(a, a.clone()) == (0, 0.0)
    assert compare_values(a, b) == (2, 1.0)


def test_values_of_different_dtypes_are_compared_as_numbers():
    a = torch.tensor([1.0, math.nan, 0.1])
    assert compare_values(a, a.bfloat16())[0] == 1
    assert compare_values(a[:2], a[:2].double()) == (0, 0.0)
    num, largest = compare_values(torch.tensor([math.nan, 1.0]), torch.tensor([1.0, 2.0]))
    assert num == 2
    assert math.isnan(largest)


def test_nan_in_a_later_chunk_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "CHUNK_NUMEL", 4)
    a, b = torch.zeros(12), torch.zeros(12)
    b[1], b[6], b[11] = 3.0, math.nan, 5.0
    found = compare(save(tmp_path / "a", {("w", "param"): a}), save(tmp_path / "b", {("w", "param"): b}))
    assert found.values[0].num_different == 3
    assert math.isnan(found.values[0].max_abs)


# ---------------------------------------------------------------- find


def test_what_is_meant_by_a_path(tmp_path):
    folders = [
        save(tmp_path / "run" / "checkpoints", {("w", "param"): torch.ones(2)}, step=step) for step in (9, 20, 100)
    ]
    root = tmp_path / "run" / "checkpoints"
    assert find(root) == folders[::-1]
    assert find(root, 20) == [folders[1]]
    assert find(folders[0]) == [folders[0]]
    with refused("no-such-step", "step 21", "100, 20, 9"):
        find(root, 21)
    assert find(tmp_path / "run") == folders[::-1]
    with refused("no-such-path", "mean checkpoints"):
        find(tmp_path / "run" / "checkpoint")
    min(folders[2].glob("*.safetensors")).unlink()
    assert newest_whole(root)[0] == folders[1]
    with refused("file-torn"):
        newest_whole(root, 100)
    found = survey(root)
    assert [(each.folder, bool(each.damage), each.is_latest) for each in found] == [
        (folders[2], True, True),
        (folders[1], False, False),
        (folders[0], False, False),
    ]
    assert found[1].num_bytes == sum(path.stat().st_size for path in folders[1].glob("*.safetensors"))
