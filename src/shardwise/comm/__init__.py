"""Calls torch.distributed's collectives, which no other package does."""
