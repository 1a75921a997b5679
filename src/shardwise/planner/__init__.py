"""Plans a job: what a layout takes in memory and time, which one is best, and why the others lose."""
