"""Block-sparse attention: layouts, one functional entry, back ends for CPUs and GPUs, and ways into models."""
