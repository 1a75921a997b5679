"""Plans of tensor parallelism: pure values, made from a model's names and shapes; no process group, no storage.

>>> from shardwise.models.decoder import Decoder
>>> from shardwise.models.presets import preset
>>> plan = find_plan(Decoder(preset("tiny"), device="meta"), 2, None, sequence_parallel=True)
>>> plan.layers[2].module, plan.layers[2].style
('blocks.0.attention.query', 'column')
"""

from shardwise.tensor.hf_plans import find_plan

__all__ = ["find_plan"]
