"""Offers other libraries' names over this one's engine."""
