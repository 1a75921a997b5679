"""Split every layer's matrices over the `tp` axis (tensor and sequence parallelism), from outside of a plain module."""
