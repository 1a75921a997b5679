"""Writes checkpoints, safetensors files with a JSON manifest, atomically, and reads them under any layout."""
