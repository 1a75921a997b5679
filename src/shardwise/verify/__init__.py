"""`shardwise verify`: a config's layout on a scaled-down copy of its model, proved equal to one process in float64.

`fold` makes the mesh small and `shrink` the model, `job` both together; `rank` trains it with the engine on local
processes, `reference` in one process without it; `compare` finds the first tensor that differs, `run` does all of that.
"""
