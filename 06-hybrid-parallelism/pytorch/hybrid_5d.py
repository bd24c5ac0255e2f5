"""Five dimensions at once: layers over pp, samples over dp and ep, experts over ep, tokens over sp, matrices over tp.

    loss = sum over dp, ep and sp of the losses of a rank's tokens / the tokens of the global batch

                 pp              dp           ep                 sp            tp
    tokens       pass all        split        split              split         the same
    weights      of a stage      whole*       whole              whole         split (norms whole)
    experts      of a stage      whole*       split              whole         split
    gradients    complete        sum          sum (experts: no)  sum           complete (routers, norms*: sum)
    messages     point to point  all-reduce   all-to-all         ring          all-reduce

    * ZeRO splits them along dp; with Megatron's sequence parallelism norms see a slice of the tokens

The last rows are not written down anywhere in the code: each parameter says how it lies on the mesh, and a gradient is
summed over exactly the axes along which tokens are split and its parameter is whole. Every version of that table that
is wrong in one cell trains, too; tests/test_museum_hybrid.py has them.

Cost: --explain prints what a step sends along each axis. Memory: weights, gradients and states over pp, tp, and for
experts ep; activations over sp and tp, and a rank's part of the batch over dp and ep.

    python hybrid_5d.py --nproc 8 --pp 2 --dp 2 --tp 2 --explain
    torchrun --nproc_per_node=8 hybrid_5d.py --pp 2 --sp 2 --ep 2
    mpirun -np 8 python hybrid_5d.py --dp 2 --ep 2 --tp 2 --sequence-parallel
    torchrun --nproc_per_node=32 hybrid_5d.py --pp 2 --dp 2 --ep 2 --sp 2 --tp 2
"""

from __future__ import annotations

from hybrid_training import HybridOptions, lesson

from common.lesson import run
from common.runtime import Runtime


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Five dimensions against one device; with --benchmark their time alone."""
    return lesson(rt, o)


if __name__ == "__main__":
    run(main, HybridOptions)
