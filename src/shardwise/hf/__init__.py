"""What is known of the models of transformers alone: their losses and masks. It imports nothing of a parallel axis.

What else has their names stands where it is used: `attention.huggingface` registers attention, `tensor.hf_plans` has
plans, `context.huggingface` splits inputs, `checkpoint.hf` reads and writes folders.
"""
