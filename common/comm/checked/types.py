"""Types of a tensor along a mesh axis, and the rules by which an operation's result gets its type.

    I    the same on all ranks, and used by all in the same way: its gradient is the same on all ranks, too
    R    the same on all ranks, but each uses it on other numbers: its gradient is partial
    S    this rank's shard of a whole; S(-1): cut on its last dimension
    V    differs between ranks: anything that was computed from shards or from this rank's tokens
    P    this rank's term of a sum
    Q    the norm of a shard: a root of one term of a sum of squares

    type of y               I  R  S  V  P
    type of its gradient    I  P  S  V  I

A constant has no type (None) and goes with every other. Four rules follow.

    mix      I goes with I alone: its gradient would be partial where the ranks use it on different numbers.
             `copy` makes it R, `reduce` made it from a P that someone forgot to sum.
    linear   P goes into linear operations alone: sums of P, products with R, views. gelu(p0 + p1) is not
             gelu(p0) + gelu(p1).
    once     P is not added to I, R or S: the sum over the ranks would count those once per rank.
    root     Q can only be squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Kind(NamedTuple):
    """A type along one axis; dim: the cut dimension of a shard, counted from the last, -1; None: not known."""

    letter: str
    dim: int | None = None

    def __str__(self) -> str:
        return self.letter if self.dim is None else f"{self.letter}({self.dim})"


I, R, S, V, P, Q = (Kind(letter) for letter in "IRSVPQ")  # noqa: E741
DUAL = {"I": I, "R": P, "V": V, "P": I, "S": S, "Q": V}


def dual(kind: Kind) -> Kind:
    """Return the type of the gradient of a tensor of type `kind`."""
    return kind if kind.letter == "S" else DUAL[kind.letter]


class Broken(Exception):
    """A rule of this file does not hold; the arguments are the rule's name and what is wrong."""


# Functions of torch by what they do to a sum over ranks; `join` reads these names.
VIEWS = set(
    "view reshape flatten unflatten transpose movedim permute t T mT squeeze unsqueeze narrow split chunk unbind "
    "tensor_split select view_as expand expand_as roll ravel split_with_sizes index_select __getitem__ gather "
    "flip".split()
)
SAME = set(
    "detach detach_ clone contiguous to double float half bfloat16 type type_as cpu cuda data neg __neg__ "
    "requires_grad_ real alias view_as_self".split()
)
SUMS = set(
    "add sub rsub __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ add_ sub_ cat stack concat where __setitem__ "
    "index_add_ index_add _foreach_add_ masked_fill masked_fill_".split()
)
PRODUCTS = set("mul __mul__ __rmul__ __imul__ mul_ _foreach_mul_".split())
QUOTIENTS = set("div __truediv__ __itruediv__ __div__ div_ true_divide _foreach_div_".split())
TESTS = set(
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isfinite isnan isinf isclose allclose equal".split()
)
NORMS = set("vector_norm linalg_vector_norm norm _foreach_norm linalg_norm".split())
SQUARES = {"square", "pow", "__pow__"}
ADDS_UP = {"sum", "mean"}
MATRIX = set("linear matmul __matmul__ __rmatmul__ mm bmm addmm".split())
LINEAR = VIEWS | SAME | SUMS | PRODUCTS | QUOTIENTS | ADDS_UP | MATRIX


def join(name: str, kinds: Sequence[Kind | None], gradients: Sequence[bool]) -> Kind | None:
    """Return the type of an operation's result along one axis. Raises Broken.

    kinds: of the operands. gradients: True for operands into which a gradient will flow.
    """
    known = [k for k in kinds if k is not None]
    letters = {k.letter for k in known}
    if not letters:
        return None
    needed = any(g and k is not None and k.letter == "I" for k, g in zip(kinds, gradients, strict=True))
    if needed and letters - {"I"}:
        other = next(k for k in known if k.letter != "I")
        raise Broken("mix", f"goes with one of type {other}", next(i for i, k in enumerate(kinds) if k == I))
    if "Q" in letters:
        return _root(name, kinds, letters)
    if "P" in letters:
        return _partial(name, kinds, letters)
    if name in NORMS and letters == {"S"}:
        return Q
    if len(known) == 1 and len(kinds) == 1:
        (kind,) = known
        return kind if name not in VIEWS or kind.dim is None else Kind(kind.letter)
    if letters == {"I"}:
        return I
    if letters <= {"R", "I"}:
        return R if len(known) == len(kinds) else V
    shards = {k for k in known if k.letter == "S"}
    if letters <= {"S", "R", "I"} and name not in MATRIX and len(shards) == 1:
        return next(iter(shards)) if name not in ("where", "gather", "index_select") else V
    return V


def _root(name: str, kinds: Sequence[Kind | None], letters: set[str]) -> Kind:
    if letters == {"Q"} and name in VIEWS | SAME | ADDS_UP | MATRIX | NORMS | {"stack", "cat"}:
        return Q
    if name in SQUARES:
        return P
    raise Broken("root", f"goes into {name} before it is squared and summed", kinds.index(Q))


def _partial(name: str, kinds: Sequence[Kind | None], letters: set[str]) -> Kind:
    at = next(i for i, k in enumerate(kinds) if k == P)
    if name in TESTS:
        return V
    if name not in LINEAR or (name in QUOTIENTS and at > 0):
        raise Broken("linear", f"goes into {name} before it is summed over the ranks", at)
    others = letters - {"P"}
    if name in PRODUCTS | QUOTIENTS | MATRIX and (others - {"R", "I"} or kinds.count(P) > 1):
        raise Broken("linear", f"is multiplied by one that is not replicated, in {name}", at)
    if name in SUMS and others - {"V"}:
        raise Broken("once", f"is added to one of type {sorted(others - {'V'})[0]}, in {name}", at)
    return P


def product(x: Kind | None, w: Kind | None, inner: int, outer: int) -> Kind | None:
    """Return the type of x w if w is cut, else None.

    inner: the dimension of w that the product contracts; outer: the other. Both count from the last, -1.
    """
    if w is not None and w.letter == "S" and w.dim == inner and (x is None or x.letter in "SVRI"):
        return P
    if x is not None and x == Kind("S", -1) and (w is None or w.letter in "RIV"):
        return P
    if w is not None and w.letter == "S" and w.dim == outer and (x is None or x.letter in "RI"):
        return Kind("S", -1)
    return None
