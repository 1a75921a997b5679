"""Offers DeepSpeed's operators at DeepSpeed's paths."""
