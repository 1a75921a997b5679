"""The only caller of torch.distributed's collectives."""
