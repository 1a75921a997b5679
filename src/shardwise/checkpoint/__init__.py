"""Checkpoints: safetensors files and a JSON manifest, written atomically, read under any layout. See `manifest`."""
