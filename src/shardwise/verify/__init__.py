"""Proves a layout equal to one process in float64 (`shardwise verify`), and simulates ranks (`train --dry-run`).

`job` folds the mesh and shrinks the model; `rank` trains the copy with the engine on local processes; `compare` finds
the first tensor that differs; `run` trains it in one plain process and does all of that. `simulate` runs the engine of
one rank on tensors without memory; `dry_run` shows what the ranks of a job hold and send.
"""
