"""Says which slice of each state every rank holds, as pure values: no process group and no storage."""
