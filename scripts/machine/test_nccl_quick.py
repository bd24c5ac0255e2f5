"""Results and bandwidth of the collectives at 1, 4, 16 and 64 MB, without training.

python scripts/machine/test_nccl_quick.py                                 # starts a rank per GPU itself
torchrun --nproc_per_node=8 scripts/machine/test_nccl_quick.py
"""

from common.machine import communication

if __name__ == "__main__":
    communication.start()
