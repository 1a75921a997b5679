"""Offers DeepSpeed's runtime at DeepSpeed's paths."""
