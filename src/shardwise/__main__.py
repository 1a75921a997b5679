"""Runs the program `shardwise`: its command line, and one line where Ctrl-C comes while that is still imported."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command and return its exit code."""
    _open_standard_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("shardwise: the current folder is gone; change to one that is there", file=sys.stderr)
        return 2
    try:
        from shardwise.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _open_standard_streams() -> None:
    """Give streams that the caller has closed somewhere to go, or the next files opened would take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
