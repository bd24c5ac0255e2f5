"""Ranks fork from a server that has already imported what test modules and torch's lazy corners import."""

from common import spawn

spawn.PRELOAD += ["pytest", "common.collectives", "common.placement"]
spawn.PRELOAD += [
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
]  # backward(dy), optimizers: 2 s a rank
