"""Run ZeRO stages 0 to 3: parameter groups unshard, reshard and reduce, and the optimizer steps shards.

These are the nouns, for one group of N elements over n ranks:

- `full`: one flat buffer of N elements in the parameters' dtype; the parameters are views of it. Where parameters are
  stored as shards, its storage is freed between uses.
- `shard`: this rank's contiguous slice, in the parameters' dtype; where parameters are stored whole, a view of `full`.
- `master`: the optimizer's copy of the slice, in fp32; where the parameters are fp32 themselves, `shard` is the master.
- `bucket`: one flat buffer of N elements that a backward fills with gradients.
- `accumulator`: the reduced gradients of this rank's slice, summed over micro-batches.
"""
