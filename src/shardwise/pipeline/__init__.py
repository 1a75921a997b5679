"""Runs the pipeline: the stages of a model, the boundary values sent between them, and the actions of a schedule."""
