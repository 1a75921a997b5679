"""Published training runs: how their rows are read, and what the planner says of them."""
