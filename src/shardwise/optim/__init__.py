"""Optimizers: what each keeps of a parameter and how it steps an element, one row for each, and schedules."""
