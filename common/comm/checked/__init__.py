"""Checker of placements while a lesson runs: `with checked(mesh):` around training on small tensors.

    with checked(mesh):                    # a Mesh, or the Group of one axis
        loss = model(tokens_BS) ...        # a forgotten `copy` raises Misplaced here, naming tensor, axis, rank, line
        loss.backward()
        sum_gradients(model.parameters(), mesh)
        optimizer.step()                   # a gradient that is still partial raises here

Every tensor has a type along each axis. Read the files in this order:

    types          the types, and the rules by which the operands' types give the result's
    table          types of the tensors; a parameter's follows from its placement
    operations     every operation of torch: its result gets a type
    traffic        every collective: what it takes and gives; gradients arrive with the dual type
    meeting        ranks compare what they are about to do, and what is said to be the same on all of them
    block          `checked` itself, and the step of an optimizer
    asked          --check of a lesson

Types that a program must say itself: `declare` and `own`.
"""

from common.comm.checked.block import checked as checked
from common.comm.checked.block import declare as declare
from common.comm.checked.block import own as own
from common.comm.checked.report import RULES as RULES
from common.comm.checked.report import Misplaced as Misplaced
