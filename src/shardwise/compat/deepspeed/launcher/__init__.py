"""Starts ranks under DeepSpeed's names."""
