"""The engine: a model, its optimizer and its ranks, trained step by step."""
