"""Other libraries' names, over this one's engine."""
