"""GPipe as a schedule.

A schedule says what each rank does, as a list of instructions. Stage s of the model is on rank s. GPipe runs all
micro-batches forward, then all backward; here p = 3 ranks and M = 3 micro-batches, a forward takes one unit of time
and a backward two:

      rank 0   0 1 2 . . . . . . a a b b c c      0 1 2: forwards      a b c: backwards      . the rank waits
      rank 1   . 0 1 2 . . . a a b b c c . .
      rank 2   . . 0 1 2 a a b b c c . . . .

Yield the instructions of one rank, in order, as tuples (op, stage, micro-batch):

      ("F", s, m)    forward of stage s for micro-batch m         ("B", s, m)    its backward
      ("SX", s, m)   send the activation that F s m made, to stage s+1
      ("RX", s, m)   receive the activation that F s m reads, from stage s-1
      ("SG", s, m)   send the gradient that B s m made, to stage s-1
      ("RG", s, m)   receive the gradient that B s m reads, from stage s+1

A message has two ends, and each end names its own stage: SX 0 0 on rank 0 and RX 1 0 on rank 1 are one message. Sends
and receives start a message and do not wait; F and B wait for what they read. A send stands after the computation that
made its tensor, a receive before the one that reads it. Messages from one rank to another arrive in the order in which
they were sent, so both ranks must list them in the same order. The first stage reads the batch and the last one
computes the loss: neither needs a message for it.

With two ranks and one micro-batch the lists are
      rank 0    F 0 0, SX 0 0, RG 0 0, B 0 0
      rank 1    RX 1 0, F 1 0, B 1 0, SG 1 0

Targets, for any p and M: the checker proves the lists (every computation once, all messages matched, no rank waits for
ever); all forwards of a rank stand before its backwards; the simulator finds a bubble of (p-1)/(M+p-1) of the time.
"""

from collections.abc import Iterator

Instruction = tuple[str, int, int]


def gpipe(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank does. ranks: p. micro_batches: M."""
    raise NotImplementedError(
        "for each micro-batch: yield RX if there is a stage before, then F, then SX if there is a stage after"
    )
