"""Offer the names of DeepSpeed's experts that programs without experts import."""

from shardwise.compat import submodules

__getattr__ = submodules(__name__)
