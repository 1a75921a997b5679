"""Runs the command line as `python -m shardwise.cli`, for torchrun and srun."""

from shardwise.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
