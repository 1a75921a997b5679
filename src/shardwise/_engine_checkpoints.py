"""Saving and loading an engine's states: the methods; `Engine` has the attributes. See `shardwise.checkpoint`."""
