"""Images per second of ResNet-50, -101 or -152 under DDP.

python scripts/machine/benchmark_resnet50.py --batch-size 64 --iterations 100
torchrun --nproc_per_node=8 scripts/machine/benchmark_resnet50.py --model resnet101 --amp --batch-size 128
"""

from common.machine import throughput

if __name__ == "__main__":
    throughput.start()
