"""The program `shardwise`: its command line, and one line where Ctrl-C comes while that is still imported."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit code."""
    try:
        from shardwise.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
