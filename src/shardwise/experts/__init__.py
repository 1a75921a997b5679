"""Mixtures of experts over several ranks: each rank has some experts, and tokens are sent to them."""
