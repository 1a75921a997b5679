"""The main job: text to token shards, the training loop, its metrics and its progress display."""
