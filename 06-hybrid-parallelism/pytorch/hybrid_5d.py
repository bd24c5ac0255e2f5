"""Five dimensions at once: layers over pp, samples over dp and ep, experts over ep, tokens over sp, matrices over tp.

    loss = sum over dp, ep and sp of the losses of a rank's tokens / the tokens of the global batch

                 pp              dp           ep                 sp            tp
    tokens       pass all        split        split              split         the same
    weights      of a stage      whole*       whole              whole         split (norms whole)
    experts      of a stage      whole*       split              whole         split
    gradients    complete        sum          sum (experts: no)  sum           complete (routers, norms*: sum)
    messages     point to point  all-reduce   all-to-all         ring          all-reduce

    * ZeRO splits them along dp; with Megatron's sequence parallelism norms see a slice of the tokens

The last rows are not written down anywhere in the code: each parameter carries its placement on the mesh, and
a gradient is summed over exactly the axes along which tokens are split and its parameter is whole. A version
of the table with one wrong cell trains without an error; tests/test_museum_hybrid.py holds such versions.

Cost: --explain prints the bytes that a step sends along each axis. Memory: weights, gradients and states are
divided over pp and tp, and for experts over ep; activations over sp and tp, and over dp and ep, which split
the batch.

    python hybrid_5d.py --nproc 8 --pp 2 --dp 2 --tp 2 --explain
    torchrun --nproc_per_node=8 hybrid_5d.py --pp 2 --sp 2 --ep 2
    mpirun -np 8 python hybrid_5d.py --dp 2 --ep 2 --tp 2 --sequence-parallel
    torchrun --nproc_per_node=32 hybrid_5d.py --pp 2 --dp 2 --ep 2 --sp 2 --tp 2
"""

from __future__ import annotations

from common.launch.runtime import Runtime
from common.lesson.runner import run

from hybrid_training import HybridOptions, lesson


def main(rt: Runtime, o: HybridOptions) -> bool:
    """Compare five dimensions with one device; with --benchmark only time them."""
    return lesson(rt, o)


if __name__ == "__main__":
    run(main, HybridOptions)
