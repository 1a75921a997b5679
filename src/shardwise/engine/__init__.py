"""Trains a model step by step, with its optimizer, over its ranks."""
