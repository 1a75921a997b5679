"""Read the rows of published training runs, and compare the planner's predictions with them."""
