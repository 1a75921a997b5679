"""Torn, emptied, swapped, flipped: a checkpoint that is not what was written is named, and an older one is used."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from harness.checkpoints import flip
from harness.faults import (
    KEEP_LAST,
    NUM_RANKS,
    NUM_STEPS,
    SAVE_EVERY,
    Ended,
    Whole,
    check_tidy,
    make_engine,
    resume,
    run_to_end,
    stored,
    take_step,
)
from harness.pool import WorkerPool
from shardwise.checkpoint import offline
from shardwise.checkpoint.commit import LATEST_NAME, read_manifest, step_folders, step_name
from shardwise.checkpoint.manifest import MANIFEST_NAME, CheckpointError

NEWEST, OLDER = NUM_STEPS - SAVE_EVERY, NUM_STEPS - 2 * SAVE_EVERY
FILES = [f"rank-{rank:05d}-of-{NUM_RANKS:05d}.safetensors" for rank in range(NUM_RANKS)]
NUM_SEEDS = 4

# Damages a step folder, by what is drawn; returns a pattern of what must be said of it.
Damage = Callable[[Path, random.Random], str]


def truncate(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice(FILES)
    size = path.stat().st_size
    left = draw.randrange(1, size)
    os.truncate(path, left)
    return f"{path.name} has {left} bytes and the manifest says {size}"


def empty(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice(FILES)
    os.truncate(path, 0)
    return f"{path.name} has 0 bytes and the manifest says"


def lengthen(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice(FILES)
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randrange(1, 5000)))
    return rf"{path.name} has \d+ bytes and the manifest says"


def remove_file(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice(FILES)
    path.unlink()
    return f"{path.name} is missing"


def replace_by_folder(folder: Path, draw: random.Random) -> str:
    path = folder / draw.choice(FILES)
    path.unlink()
    path.mkdir()
    return f"{path.name}: Is a directory"


def flip_data(folder: Path, draw: random.Random) -> str:
    """One bit of a state of a tensor."""
    entries = [each for some in offline.entries_by_file(read_manifest(folder)).values() for each in some]
    entry = draw.choice(entries)
    byte = draw.randrange(entry.piece.offset, entry.stop)
    flip(folder / entry.piece.file, byte, draw.randrange(8))
    label = f"{entry.tensor.name} {entry.state}"
    return (
        rf"{entry.piece.file}: {label} does not match its checksum at bytes {entry.piece.offset} to {entry.stop};"
        " use an older checkpoint"
    )


def zero_page(folder: Path, draw: random.Random) -> str:
    """What a disk leaves that has lost a write."""
    path = folder / draw.choice(FILES)
    data = bytearray(path.read_bytes())
    start = draw.randrange(1, len(data) // 4096) * 4096
    data[start : start + 4096] = bytes(4096)
    path.write_bytes(data)
    return rf"{path.name}: \S+ \w+ does not match its checksum"


def swap_files(folder: Path, draw: random.Random) -> str:
    paths = [folder / name for name in FILES]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    return "|".join(rf"{name}(: \S+ \w+ does not match its checksum| has \d+ bytes)" for name in FILES)


def put_older_file(folder: Path, draw: random.Random) -> str:
    name = draw.choice(FILES)
    shutil.copy(folder.with_name(step_name(OLDER)) / name, folder / name)
    return rf"{name}(: \S+ \w+ does not match its checksum| has \d+ bytes)"


def remove_manifest(folder: Path, draw: random.Random) -> str:
    (folder / MANIFEST_NAME).unlink()
    return f"{folder.name} is no whole checkpoint: it has no {MANIFEST_NAME}"


def truncate_manifest(folder: Path, draw: random.Random) -> str:
    path = folder / MANIFEST_NAME
    os.truncate(path, draw.randrange(path.stat().st_size))
    return f"{MANIFEST_NAME} does not match its checksum"


def flip_manifest(folder: Path, draw: random.Random) -> str:
    path = folder / MANIFEST_NAME
    flip(path, draw.randrange(path.stat().st_size), draw.randrange(8))
    return f"{MANIFEST_NAME} does not match its checksum"


def put_older_manifest(folder: Path, draw: random.Random) -> str:
    shutil.copy(folder.with_name(step_name(OLDER)) / MANIFEST_NAME, folder / MANIFEST_NAME)
    return f"{folder.name}.* is of step {OLDER}"


def lose_all(folder: Path, draw: random.Random) -> str:
    for each in folder.iterdir():
        each.unlink()
    return f"{folder.name} is no whole checkpoint: it has no {MANIFEST_NAME}"


DAMAGES: list[Damage] = [
    truncate, empty, lengthen, remove_file, replace_by_folder, flip_data, zero_page, swap_files, put_older_file,
    remove_manifest, truncate_manifest, flip_manifest, put_older_manifest, lose_all,
]  # fmt: skip
OF_DATA = (flip_data, zero_page)
# By their names these always do the same.
FIXED = (swap_files, remove_manifest, put_older_manifest, lose_all)


def cases() -> list[Any]:
    return [
        pytest.param(damage, seed, id=f"{damage.__name__}-{seed}", marks=() if is_quick else pytest.mark.full)
        for damage in DAMAGES
        for seed in range(1 if damage in FIXED else 4 * NUM_SEEDS if damage is flip_data else NUM_SEEDS)
        for is_quick in [seed == 0 and damage in (truncate, flip_data, flip_manifest)]
    ]


@pytest.fixture(scope="module")
def begun(ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run has left that came as far as `NEWEST`."""
    root = tmp_path_factory.mktemp("begun") / "checkpoints"
    ranks(NUM_RANKS).run(run_to_end, root, False, None, NEWEST)
    assert [each.name for each in step_folders(root)] == [step_name(NEWEST), step_name(OLDER)]
    return root


@pytest.fixture
def root(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "checkpoints"))


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (CheckpointError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def load_damaged(rank: int, world_size: int, root: Path) -> tuple[list[str], tuple[str, ...]]:
    """Ask for the damaged checkpoint itself, and train and save in spite of that; then resume from what is whole.

    Returns:
        What was said; and what the load that went well said of the damaged one.
    """
    engine = make_engine()
    said = [
        refused(lambda: engine.load(root / step_name(NEWEST))),
        refused(lambda: take_step(engine, rank)),
        refused(lambda: engine.save(root.with_name("mixed"))),
    ]
    damaged = resume(engine, rank, root)
    assert engine.num_steps == OLDER
    take_step(engine, rank)
    return said, damaged


@pytest.mark.parametrize(("damage", "seed"), cases())
def test_a_damaged_checkpoint_is_named_and_an_older_one_used(
    ranks: WorkerPool, root: Path, whole_run: Whole, damage: Damage, seed: int
) -> None:
    pattern = damage(root / step_name(NEWEST), random.Random(seed))
    ended = ranks(NUM_RANKS).run(run_to_end, root, bool(seed % 2))
    assert {each.first_step for each in ended} == {OLDER}
    assert {len(each.damaged) for each in ended} == {1}
    assert {each.damaged for each in ended} == {ended[0].damaged}
    assert re.search(pattern, ended[0].damaged[0])
    assert "\n" not in ended[0].damaged[0]
    assert ended[0].loss == whole_run.end.loss
    assert stored(root) == whole_run.stored
    check_tidy(root)
    assert [each.name for each in root.glob("*.aside-*")] == [f"{step_name(NEWEST)}.aside-1"]


@pytest.mark.parametrize(
    "damage", [flip_data, *(pytest.param(each, marks=pytest.mark.full) for each in DAMAGES if each is not flip_data)]
)
def test_a_damaged_checkpoint_that_is_asked_for(ranks: WorkerPool, root: Path, damage: Damage) -> None:
    folder = root / step_name(NEWEST)
    pattern = damage(folder, random.Random(0))
    (said, damaged), other = ranks(NUM_RANKS).run(load_damaged, root)
    assert (said, damaged) == other
    load, step, save = said
    assert load == f"DamagedError: no checkpoint in {folder} is whole: {damaged[0]}"
    assert re.search(pattern, load)
    if damage in OF_DATA:
        why = "states are mixed, since the last load or step was cut off midway"
        mixed = f"EngineError: {why}; load a checkpoint that is whole"
        assert (step, save) == (mixed, mixed)
        assert not root.with_name("mixed").exists()


def load_and_save_again(rank: int, world_size: int, root: Path) -> tuple[str, str]:
    """As a loop of one's own would, which does not rename checkpoints."""
    engine = make_engine()
    assert engine.load(root).step == OLDER
    while engine.num_steps < NUM_STEPS:
        take_step(engine, rank)
        if engine.num_steps % SAVE_EVERY == 0:
            engine.save(root, keep_last=KEEP_LAST)
    engine.load(root / step_name(NEWEST))  # it is whole by now
    other = make_engine()
    other.load(root / step_name(NEWEST))
    return refused(lambda: engine.save(root)), refused(lambda: other.save(root))


def test_a_damaged_checkpoint_makes_way_for_a_new_one_of_its_step_and_a_whole_one_does_not(
    ranks: WorkerPool, root: Path, whole_run: Whole
) -> None:
    flip_data(root / step_name(NEWEST), random.Random(1))
    said = ranks(NUM_RANKS).run(load_and_save_again, root)
    assert said[0] == said[1]
    pattern = rf"CheckpointError: .*{step_name(NEWEST)} exists and a checkpoint is never overwritten"
    assert all(re.match(pattern, each) for each in said[0])
    assert stored(root) == whole_run.stored
    check_tidy(root)
    assert [each.name for each in root.glob("*.aside-*")] == [f"{step_name(NEWEST)}.aside-1"]


def test_all_checkpoints_damaged(ranks: WorkerPool, root: Path) -> None:
    patterns = [
        flip_data(root / step_name(NEWEST), random.Random(0)),
        truncate(root / step_name(OLDER), random.Random(0)),
    ]
    said = ranks(NUM_RANKS).run(load_all_damaged, root)
    assert said[0] == said[1]
    assert said[0].startswith(f"DamagedError: no checkpoint in {root} is whole: ")
    assert all(re.search(pattern, said[0]) for pattern in patterns)


def load_all_damaged(rank: int, world_size: int, root: Path) -> str:
    engine = make_engine()
    return refused(lambda: engine.load(root))


LATESTS = {
    "missing": None, "empty": b"", "garbage": b"\xff\x00 /etc", "nowhere": b"step-99999999\n",
    "older": f"{step_name(OLDER)}\n".encode(), "elsewhere": b"../../step-00000001\n",
}  # fmt: skip


@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=() if each in ("garbage",) else pytest.mark.full) for each in LATESTS]
)
def test_nothing_is_found_by_what_latest_says(ranks: WorkerPool, root: Path, whole_run: Whole, what: str) -> None:
    text = LATESTS[what]
    (root / LATEST_NAME).unlink()
    if text is not None:
        (root / LATEST_NAME).write_bytes(text)
    ended = ranks(NUM_RANKS).run(run_to_end, root, False)
    assert ended == [Ended(NEWEST, whole_run.end.loss)] * NUM_RANKS
    assert stored(root) == whole_run.stored
    check_tidy(root)


@pytest.mark.parametrize("num_bits", [30, pytest.param(600, marks=pytest.mark.full)])
def test_a_flipped_header_is_found_by_verify_or_changes_nothing(root: Path, num_bits: int) -> None:
    """The loader reads by the manifest alone; the header of a file is for other readers."""
    folder = root / step_name(NEWEST)
    path = folder / FILES[1]
    whole = load_file(path)
    num_header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    bits = [(byte, bit) for byte in range(8 + num_header_bytes) for bit in range(8)]
    num_found = 0
    chosen = random.Random(num_bits).sample(bits, num_bits)
    for byte, bit in chosen:
        flip(path, byte, bit)
        read_manifest(folder)
        damages = offline.verify(folder).damages
        num_found += bool(damages)
        assert all(damage.file == path.name for damage in damages)
        if not damages:
            read = load_file(path)
            assert read.keys() == whole.keys()
            assert all((read[name] == whole[name]).all() for name in whole)
        flip(path, byte, bit)
    assert num_found > len(chosen) / 2
    assert load_file(path).keys() == whole.keys()


def test_a_run_goes_on_over_a_flipped_header(ranks: WorkerPool, root: Path, whole_run: Whole) -> None:
    for name in FILES:
        flip(root / step_name(NEWEST) / name, 20, 3)
        with pytest.raises(SafetensorError):
            load_file(root / step_name(NEWEST) / name)
    ended = ranks(NUM_RANKS).run(run_to_end, root, False)
    assert ended == [Ended(NEWEST, whole_run.end.loss)] * NUM_RANKS
    assert stored(root) == whole_run.stored
