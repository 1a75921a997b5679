"""Implements context parallelism: one sequence over the ranks of the `cp` axis, each with its own queries."""
