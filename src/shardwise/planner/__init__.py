"""The planner: what a layout of a job takes in memory and time, which one is best, and why the others lose."""
