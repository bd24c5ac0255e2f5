"""Two stages by hand.

Rank 0 has the first half of a model, rank 1 the second half and the loss. One step on a batch that is cut into M
micro-batches, m = 0 .. M-1: all micro-batches pass forward, then their gradients come back.

      rank 0    h = stage(x)  ── h_m ──►                             ◄── dh_m ──  backward from h with dh
      rank 1                             loss of stage(h), backward,
                                         dh = gradient of the loss with respect to h

      time ─►   rank 0   F0 F1 F2 .  .  B0 B1 B2      Fm: forward of micro-batch m, Bm: its backward
                rank 1   .  F0 F1 F2 B0 B1 B2 .       rank 0 computes F1 while rank 1 computes F0;
                                                      rank 1 may also run B0 right after F0

Autograd ends at the border. On rank 1 the received h is a new tensor: make it a leaf that has a gradient with
`h.requires_grad_()`, and find dh in `h.grad` after `backward()`. On rank 0 `h.backward(dh)` starts a backward pass at
h with the gradient dh. Send a tensor without its graph: `h.detach()`.

The loss of the batch is the sum of squares over all samples, divided ONCE by the number of samples of the batch:

      loss = sum over m of  ((stage(h_m) - y_m) ** 2).sum()  /  (samples of all micro-batches together)

Letters: b, samples of one micro-batch (they differ from one micro-batch to the next); I, D, O, widths of the input,
of h and of the output.

Communication:
    comm.send(tensor, group, dst)   send a tensor to rank dst; wait until it is delivered
    comm.recv(tensor, group, src)   wait for a tensor of this shape and type from rank src, and fill `tensor` with it
`group.rank` is this rank, 0 or 1. As a send waits for its receiver, two ranks that both send first wait for ever.

Targets: loss and gradients of one device (1e-12), for one micro-batch and for uneven ones; M messages from each rank
with the bytes of h; all forwards of rank 0 before its first backward.
"""

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group


def train_step(
    stage: nn.Module, parts: list[tuple[Tensor, Tensor]], width: int, group: Group
) -> Tensor | None:
    """Run forward and backward of a batch; leave the gradients in `.grad` of the stage's parameters.

    stage: this rank's half. parts: (x_bI, y_bO) of each micro-batch, the same on both ranks; rank 0 uses x, rank 1
    uses y. width: D, so that rank 1 knows the shape (b, D) of what it receives; all tensors have the type of y.
    Return the loss of the batch on rank 1, None on rank 0.
    """
    raise NotImplementedError(
        "begin with rank 0: for each micro-batch compute h, keep it for later, and send h.detach() to rank 1"
    )
