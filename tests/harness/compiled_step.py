"""A program that compiles the step of encoded states for sm_90, where no GPU need be, and prints what each spills."""

from __future__ import annotations

import torch
from torch import nn
from triton.runtime import driver

from harness.compiled_kernels import NoGpu, spilled_bytes
from shardwise.layout.codec import codec_of
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.offload.cpu_optimizer import StepPiece
from shardwise.optim.elementwise import Lion
from shardwise.optim.rules import rule_of
from shardwise.zero.triton_step import launch_of

if __name__ == "__main__":
    driver.set_active(NoGpu())
    values = torch.zeros(BLOCK_NUMEL)
    params = [nn.Parameter(values)]
    spilled = {}
    for optimizer in (
        torch.optim.Adam(params),
        torch.optim.SGD(params, momentum=0.9),
        torch.optim.Adagrad(params),
        Lion(params),
    ):
        options = optimizer.param_groups[0]
        codecs = {name: codec_of(name, "int8") for name in rule_of(optimizer).first_values(options)}
        states = {name: codec.empty(BLOCK_NUMEL, values.device) for name, codec in codecs.items() if codec is not None}
        piece = StepPiece(options, values, values, states, 1.0, False, None)
        spilled[type(optimizer).__name__] = spilled_bytes(launch_of(type(optimizer), piece, 1.0))
    print(spilled)
