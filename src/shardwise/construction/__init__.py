"""Build a model without holding it whole."""
