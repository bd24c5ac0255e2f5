"""Paged cache of keys and values: a pool of blocks per layer, and a table of blocks for each sequence.

    blocks of P = 4 tokens          block 0    block 1    block 2    block 3
                                  | a a a a  | b b b .  | a a . .  | free     |

    tables                          a: 0 2     b: 1          token t of a: block table[t // P], row t % P

A sequence takes a block when its last one is full, and returns all of its blocks when it ends. At most P - 1 rows per
sequence are unused, where a cache of one row of memory per sequence must reserve the longest possible one (Kwon et al.,
"Efficient memory management for large language model serving with PagedAttention", 2023, arXiv:2309.06180).

A rank holds the keys and values of its own layers (pp) and of the key-value heads that its query heads read (tp). The
tables are the same on all ranks. A token takes 2 * layers * G * K numbers on a rank.

    N blocks  P tokens per block  G key-value heads of this rank  K width of a head
    T tokens of a step  R sequences  L rows of a sequence's blocks
"""

from __future__ import annotations

import psutil
import torch
from torch import Tensor

from common.errors import UsageError


class Blocks:
    """Free and taken blocks of the cache. Raises UsageError for none, and for blocks of none."""

    def __init__(self, count: int, size: int) -> None:
        if min(count, size) < 1:
            raise UsageError(f"{count} blocks of {size} tokens: give at least 1 of 1")
        self.count, self.size = count, size
        self.free = list(reversed(range(count)))

    @property
    def taken(self) -> int:
        return self.count - len(self.free)

    def needed(self, tokens: int) -> int:
        """Return the number of blocks for that many tokens of a sequence."""
        return -(-tokens // self.size)

    def lengthen(self, table: list[int], tokens: int) -> bool:
        """Add blocks to the table until it holds that many tokens; False, and no change, if too few are free."""
        more = self.needed(tokens) - len(table)
        if more > len(self.free):
            return False
        table += [self.free.pop() for _ in range(more)]
        return True

    def release(self, table: list[int]) -> None:
        """Return the blocks of a table, which is empty afterwards."""
        self.free += reversed(table)
        table.clear()


class Cache:
    """Keys and values of this rank's layers: a row of 2 G K numbers per token. A slot is a row's number: block P + row.

    Raises UsageError if the memory does not suffice.
    """

    def __init__(
        self, layers: int, blocks: Blocks, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (layers, blocks.count * blocks.size, 2, kv_heads, width)
        self.kv_heads = kv_heads
        self.token_bytes = 2 * layers * kv_heads * width * dtype.itemsize
        needed = self.token_bytes * blocks.count * blocks.size
        # a system may promise more than it has, and fail when the memory is written
        there = (
            torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        )
        if needed > there:
            raise UsageError(
                f"a cache of {blocks.count} blocks needs {needed / 2**30:.1f} GiB of {there / 2**30:.1f}; give fewer"
            )
        self.rows = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def write(self, layer: int, slots_T: Tensor, kv_T2GK: Tensor) -> None:
        """Store the keys and values of the tokens in their slots."""
        self.rows[layer].index_copy_(0, slots_T, kv_T2GK)

    def read(self, layer: int, slots_RL: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the sequences with these slots, [R, G, L, K] each."""
        # several times as fast as rows[slots_RL]
        rows_X2GK = self.rows[layer].index_select(0, slots_RL.flatten())
        rows_R2GLK = rows_X2GK.unflatten(0, slots_RL.shape).permute(0, 2, 3, 1, 4)
        return rows_R2GLK[:, 0], rows_R2GLK[:, 1]
