"""Tensor and sequence parallelism: every layer's matrices split over the `tp` axis, from outside of a plain module."""
