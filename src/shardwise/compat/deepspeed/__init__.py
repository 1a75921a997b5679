"""Offers DeepSpeed's names at DeepSpeed's paths."""
