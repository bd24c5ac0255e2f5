"""Memory and images per second of ResNet under FSDP.

python scripts/machine/benchmark_resnet50_fsdp.py --batch-size 64 --iterations 100
torchrun --nproc_per_node=8 scripts/machine/benchmark_resnet50_fsdp.py --model resnet101 --amp --batch-size 128
"""

import sys

from common.machine import throughput

if __name__ == "__main__":
    sys.argv[1:1] = ["--strategy", "fsdp"]
    throughput.start()
