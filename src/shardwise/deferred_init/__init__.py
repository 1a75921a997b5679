"""Construction of a model without holding it whole."""
