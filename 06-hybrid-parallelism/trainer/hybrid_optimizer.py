"""AdamW with the settings of language models, and the schedule of its learning rate.

    rate(t) / largest     0 ____/‾‾‾-.__                up in a line for `warm_up` steps, then along half a cosine to
                                       ‾-.___           `final` at the last one (Loshchilov and Hutter,
                            warm_up          steps      arXiv:1608.03983; Brown et al., arXiv:2005.14165, appendix B)

Weight decay (Loshchilov and Hutter, arXiv:1711.05101) acts on the matrices and embeddings, not on norms and
biases: those are one number per feature, and pulling a norm's weight from 1 to 0 would switch its feature
off. The name tells the two kinds apart; the shape cannot, since ZeRO's shards of all parameters are flat.
"""

from __future__ import annotations

import math

import torch

from hybrid_model import Hybrid
from hybrid_options import TrainOptions


def decays(name: str) -> bool:
    """Return True if weight decay acts on the parameter of this name."""
    return name.endswith("weight") and "norm" not in name


def make_optimizer(hybrid: Hybrid, o: TrainOptions) -> torch.optim.AdamW:
    """Return AdamW for the parameters that this rank owns, with decay on matrices and embeddings alone."""
    named = dict(hybrid.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if decays(name)], "weight_decay": o.weight_decay},
        {"params": [p for name, p in named.items() if not decays(name)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.learning_rate, betas=(0.9, 0.95), eps=o.epsilon)


def learning_rate(step: int, o: TrainOptions) -> float:
    """Return the learning rate of step 0, 1, ... of the run."""
    if step < o.warm_up:
        return o.learning_rate * (step + 1) / o.warm_up
    done = (step - o.warm_up) / max(1, o.steps - 1 - o.warm_up)
    return o.learning_rate * (o.final + (1 - o.final) * (1 + math.cos(math.pi * min(done, 1.0))) / 2)
