"""Store states in host memory and on NVMe, and run the optimizer's step there."""
