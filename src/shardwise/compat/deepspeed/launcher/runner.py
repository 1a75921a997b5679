"""Offers the program `deepspeed` and the name of the file that it exports on every node."""

from shardwise.launch.deepspeed import ENV_FILE_NAME as DEEPSPEED_ENVIRONMENT_NAME
from shardwise.launch.deepspeed import main

__all__ = ["DEEPSPEED_ENVIRONMENT_NAME", "main"]
