"""Device, host and NVMe: where states rest, what moves between, and the step on the host."""
