"""The runtime package has what the parts of the engine need of torch: hooks, class swapping, recomputation, buffers,
memory, streams.
"""
