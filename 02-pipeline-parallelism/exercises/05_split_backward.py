"""Split backward: dx now, dw later.

The backward pass of a product y = x w^T makes two gradients:

      I     dx = dy w       the rank before waits for it, in order to go on with its own backward
      W     dw = dy^T x     nobody needs it before the optimizer's step

Autograd computes both at once. Write a product whose backward returns dx and keeps dw for later, and a schedule that
uses it.

1. `product(x, w, later)`. Write a torch.autograd.Function; its forward takes (ctx, x, w, later) and its backward
   (ctx, dy). The backward returns one value for each argument of the forward: dx, and None for the two others. It
   appends to the list `later` a function without arguments that adds dw to w.grad (which is None at first) when it is
   called. Until then it may keep x and dy, besides w itself, and no other tensor. A tensor from ctx.saved_tensors can
   carry a graph: compute under torch.no_grad(), so that w.grad carries none.
   Shapes: x_bI (b samples of width I), w_OI, y_bO.

2. `zb_h1(rank, ranks, micro_batches)`. Stage s is on rank s. Yield what one rank computes as tuples (op, stage,
   micro-batch) with op "F", "I" or "W"; each takes one unit of time. ZB-H1 is 1F1B with I in the place of the backward,
   in which rank r runs the W of a micro-batch r micro-batches later than its I, and the rest of them at the end. Here
   p = 3, M = 4; digits are F, small letters I, capital letters W, dots are waits:

      rank 0   0 1 2 . . a A 3 b B c C d D
      rank 1   . 0 1 . a 2 b A 3 c B d C D
      rank 2   . . 0 a 1 b 2 c A 3 d B C D

   A rank holds a micro-batch from its F to its W.

Targets: dx right after backward() and w.grad still None, dw right after the functions in `later` have run; one matrix
product in the backward and one in each function of `later`; no more bytes kept than x and dy. Schedules for any p and
M >= p: the checker proves the lists; p micro-batches are held at most; a bubble of (p-1)/(3M+p-1).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Instruction = tuple[str, int, int]


def product(x: Tensor, w: Tensor, later: list[Callable[[], None]]) -> Tensor:
    """Return y_bO = x_bI w_OI^T. Its backward gives dx and appends to `later` a function that adds dw to w.grad."""
    raise NotImplementedError(
        "write a class with torch.autograd.Function as its base, with static methods forward and backward"
    )


def zb_h1(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank computes. ranks: p. micro_batches: M."""
    raise NotImplementedError("begin with 1F1B of exercise 3, with I for B; then place each W")
