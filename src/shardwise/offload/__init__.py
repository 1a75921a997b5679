"""States in host memory and on NVMe, and the optimizer's step there."""
