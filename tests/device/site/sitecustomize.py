"""Gives each process that starts with this folder in PYTHONPATH a virtual device: Python imports it by its name."""

import device.process  # noqa: F401
