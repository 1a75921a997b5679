"""Make the two locks, or check that they resolve on every platform and Python, from the public package index alone.

uv does both, from metadata: no wheel is downloaded. Neither a config file nor a variable of this machine reaches it, so
that a local folder of wheels cannot hide what the index lacks.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

USER, DEVELOPMENT = Path("requirements.lock"), Path("requirements-dev.lock")
EXTRAS: Final = {USER: "tensorboard", DEVELOPMENT: "dev"}
PLATFORMS: Final = {
    "Linux x86-64": "x86_64-manylinux_2_28",
    "Linux arm64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
}
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
# torch pins these itself in its CUDA builds, and a CPU build needs none of them.
OF_TORCH: Final = re.compile(r"(nvidia|cuda)-|triton$")
HEADS: Final = {
    USER: "# What `make train` installs, shardwise[tensorboard], pinned.",
    DEVELOPMENT: "# What `make test` and `make check` install over requirements.lock, shardwise[dev], pinned.",
}
HEAD: Final = """\
# Made by `make lock`, never by hand; `make check-locks` proves that it resolves on Linux x86-64, Linux arm64 and
# macOS arm64 with Python 3.11 to 3.14. torch pins its CUDA packages itself: they are not here, and a CPU build does.
"""
UNREACHABLE: Final = re.compile(r"Failed to fetch|error sending request|Could not connect|dns error|Connect\b.*error")


class UnreachableError(Exception):
    """The package index does not answer."""


def uv_pip_compile(uv: str, index: str, *arguments: str) -> tuple[list[str], str]:
    """Return the requirements that uv resolves, or none and what it says of why there are none."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))}
    # torch's wheels for macOS are for 14 and later.
    own["MACOSX_DEPLOYMENT_TARGET"] = "14.0"
    command = [uv, "--no-config", "--no-python-downloads", "pip", "compile", "--python", sys.executable, "--quiet"]
    command += ["--default-index", index, "--no-header", "--no-annotate", "--no-emit-package", "shardwise"]
    command += ["pyproject.toml", *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.splitlines(), ""
    if UNREACHABLE.search(done.stderr):
        raise UnreachableError(done.stderr.strip())
    return [], done.stderr.strip()


def name_of(requirement: str) -> str:
    return re.split(r"[=<>~!;\s\[]", requirement, maxsplit=1)[0]


def write(uv: str, index: str, held: Sequence[str]) -> int:
    """Write both locks: the newest versions that pyproject.toml allows, for all platforms at once."""
    held_file, resolved = Path(".held.txt"), {}
    held_file.write_text("\n".join(held) + "\n")
    universal = ["--universal", "--python-version", PYTHONS[0], "--fork-strategy", "fewest", "-c", str(held_file)]
    try:
        for lock in (DEVELOPMENT, USER):
            lines, reason = uv_pip_compile(uv, index, *universal, "--extra", EXTRAS[lock])
            if not lines:
                print(f"{lock} does not resolve:\n{reason}", file=sys.stderr)
                return 1
            resolved[lock] = lines
            # Both locks pin alike what both hold.
            held_file.write_text("\n".join(lines) + "\n")
    finally:
        held_file.unlink()
    for lock, lines in resolved.items():
        # A CPU build of torch has no Triton, and the kernels' tests need it: at torch's own pin, here alone.
        keep = "triton" if lock == DEVELOPMENT else None
        pins = [line for line in lines if name_of(line) == keep or not OF_TORCH.match(name_of(line))]
        lock.write_text(f"{HEADS[lock]}\n{HEAD}" + "\n".join(pins) + "\n")
    return 0


def check(uv: str, index: str, locks: Sequence[Path]) -> int:
    """Print what each lock does on each platform and Python, and return 1 where one does not resolve."""
    places = [(lock, name, python) for lock in locks for name in PLATFORMS for python in PYTHONS]
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(places, pool.map(lambda place: verdict(uv, index, *place), places), strict=True))
    failed = {place: said for place, said in found.items() if said.startswith("fails")}
    print(f"{index}, no other source")
    for lock in locks:
        print(f"\n{lock!s:24}" + "".join(f"{python:>15}" for python in PYTHONS))
        for name in PLATFORMS:
            cells = [found[lock, name, python].partition(":")[0] for python in PYTHONS]
            print(f"{name:24}" + "".join(f"{cell:>15}" for cell in cells))
            if all(cell == "no torch wheel" for cell in cells):
                failed[lock, name, "any"] = "fails: torch has no wheel for any Python"
    for (lock, name, python), said in failed.items():
        print(f"\n{lock} on {name}, Python {python}, {said}", file=sys.stderr)
    return 1 if failed else 0


def verdict(uv: str, index: str, lock: Path, name: str, python: str) -> str:
    """Return whether pyproject.toml with this lock resolves to wheels there, and to nothing that is not pinned."""
    place = ["--only-binary", ":all:", "--python-platform", PLATFORMS[name], "--python-version", python]
    # The development lock is installed over the user's, so that both must agree.
    locks = [str(USER), str(lock)] if lock == DEVELOPMENT else [str(lock)]
    lines, reason = uv_pip_compile(uv, index, *place, "--extra", EXTRAS.get(lock, EXTRAS[USER]), *locks)
    pins = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    if lines:
        loose = {name_of(line) for line in lines} - {name_of(pin) for pin in pins}
        loose = {each for each in loose if not OF_TORCH.match(each)}
        return f"fails: {', '.join(sorted(loose))} not pinned; run make lock" if loose else "resolves"
    torch = next(pin for pin in pins if name_of(pin) == "torch")
    return "no torch wheel" if f"{torch} has no wheels with a matching Python" in reason else f"fails:\n{reason}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--index", default="https://pypi.org/simple")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write").add_argument("--hold", action="append", default=[], metavar="NAME==VERSION")
    commands.add_parser("check").add_argument("locks", nargs="*", type=Path, default=[USER, DEVELOPMENT])
    given = parser.parse_args()
    try:
        if given.command == "write":
            return write(given.uv, given.index, given.hold)
        return check(given.uv, given.index, given.locks)
    except UnreachableError as error:
        print(f"{given.index} cannot be reached, so nothing was checked:\n{error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
