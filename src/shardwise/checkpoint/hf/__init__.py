"""Reads Hugging Face folders straight into shards (`importer`), and writes them from all ranks (`exporter`)."""
