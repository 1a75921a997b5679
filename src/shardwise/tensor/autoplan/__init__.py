"""Propose tensor-parallel plans from a trace, for models that have none."""
