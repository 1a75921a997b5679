"""Pipeline parallelism at run time: stages of a model, what travels between them, and the execution of a schedule."""
