"""Draws dropout by keys: every layout draws the numbers that one process draws for the whole model and batch.

A bit of a mask is a hash of (run seed, step, site, number of the call) and (global sample, index in the unsplit
tensor), in integers only, so that ranks, devices and dtypes agree. A site is a module: each `nn.Dropout`, and each
module whose first training forward drops by function, in attention too. Sites draw keyed numbers inside
`KeyedDraws.at` and in the recomputations of such a forward; elsewhere, as when a user calls the model or a copy of it,
they drop as torch does.

All else that torch draws in such a forward, from its own generators, is keyed too, element by element; the
streams of Python and NumPy begin again in each module that draws from them.

Some always draw as torch does: compiled blocks, into which the host's part of the key cannot be traced, and the
functions of modules around them; kernels that are not torch's. Inside `KeyedDraws.at` torch's generators have the same
seed on all ranks that share a micro-batch, so these agree where no tensor is split.

Half of a tensor, as a second rank holds it, draws the same bits as that half of the whole tensor:

>>> import torch
>>> from torch import nn
>>> whole, half, ones = nn.Dropout(0.5), nn.Dropout(0.5), torch.ones(2, 8)
>>> draws = KeyedDraws(seed=0)
>>> undo = [*key_dropouts(whole, draws), *key_dropouts(half, draws, {"": ShardRegion(dim=1, index=1, degree=2)})]
>>> with draws.at(step=0, micro_batch=0, first_sample=0, num_samples=2):
...     expected = whole(ones)
>>> draws.forget()
>>> with draws.at(step=0, micro_batch=0, first_sample=0, num_samples=2):
...     torch.equal(half(ones[:, 4:]), expected[:, 4:])
True
"""

from shardwise.dropout.apply import key_dropouts, may_drop_by_function
from shardwise.dropout.draws import KeyedDraws
from shardwise.dropout.hash_rng import ShardRegion, Tokens, probability_hashes

__all__ = ["KeyedDraws", "ShardRegion", "Tokens", "key_dropouts", "may_drop_by_function", "probability_hashes"]
