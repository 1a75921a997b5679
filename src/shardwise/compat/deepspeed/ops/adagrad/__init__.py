"""Offer DeepSpeed's Adagrad, which is torch's."""

from torch.optim import Adagrad as DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
