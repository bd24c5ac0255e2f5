"""1F1B: a backward as soon as it can run.

GPipe holds all M micro-batches on every rank. 1F1B has the same bubble and holds at most p - r on rank r: a rank fills
the pipeline with a few forwards, then alternates one forward and one backward, and drains the pipeline at the end. Here
p = 4 ranks and M = 4 micro-batches; a forward takes one unit of time and a backward two:

      rank 0   0 1 2 3 . . . . . . a a . b b . c c . d d      0 1 2 3: forwards     a b c d: backwards
      rank 1   . 0 1 2 . . . . a a 3 b b . c c . d d . .      . the rank waits
      rank 2   . . 0 1 . . a a 2 b b 3 c c . d d . . . .
      rank 3   . . . 0 a a 1 b b 2 c c 3 d d . . . . . .

A rank holds a micro-batch, in which autograd keeps the activations, from its forward to its backward. Rank r of p may
hold p - r: this many are on their way from rank r to the last rank and back.

Stage s is on rank s. Yield what one rank computes, in order, as tuples (op, stage, micro-batch) with op "F" or "B".
The grader adds the messages. M may be smaller than p.

Targets, for any p and M: the checker proves the lists; at most p - r micro-batches are held; the simulator finds a
bubble of (p-1)/(M+p-1) of the time, also if a backward takes five times as long as a forward.
"""

from collections.abc import Iterator

Instruction = tuple[str, int, int]


def one_f_one_b(rank: int, ranks: int, micro_batches: int) -> Iterator[Instruction]:
    """Yield what this rank computes. ranks: p. micro_batches: M."""
    raise NotImplementedError(
        "count in the picture each rank's forwards before its first backward; all but one of them fill the pipeline"
    )
