"""Offers the names of `deepspeed.utils`."""
