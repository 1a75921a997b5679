"""Block-sparse attention on GPUs, in Triton."""
