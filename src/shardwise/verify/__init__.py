"""Prove a layout equal to one process in float64 (`shardwise verify`), and simulate ranks (`train --dry-run`).

`job` folds the mesh and shrinks the model; `run` trains the copy with the engine on local processes and in one plain
process; `compare` finds the first tensor that differs. `simulate` runs the engine of one rank on tensors without
memory; `dry_run` shows what the ranks of a job hold and send; `finalists` asks it for the best of a plan.
"""
