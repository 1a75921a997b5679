"""Tensor-parallel plans for models that nobody wrote one for: proposed from a trace."""
