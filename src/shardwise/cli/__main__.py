"""`python -m shardwise.cli`: the command line, for torchrun and srun."""

from shardwise.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
