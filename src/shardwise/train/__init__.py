"""Runs the main job: it makes token shards of text, and has the training loop, its metrics and its display."""
