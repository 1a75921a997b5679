"""Defines the config: its sections, how it is read from files and arguments, and what is refused."""
