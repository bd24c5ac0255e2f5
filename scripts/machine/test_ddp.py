"""Collectives, DDP and FSDP compared with one process, gradients compared between ranks.

python scripts/machine/test_ddp.py                                 # starts a rank per GPU itself
torchrun --nproc_per_node=8 scripts/machine/test_ddp.py
"""

from common.machine import training

if __name__ == "__main__":
    training.start()
