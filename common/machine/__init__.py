"""Test kit for a machine with several GPUs: is everything right, how fast is it, and will it stay up.

    python -m common.machine check             driver, GPUs, links, limits, and whether they fit one another
    python -m common.machine communication     collectives: right, and how fast
    python -m common.machine training          DDP and FSDP equal to one process
    python -m common.machine throughput        images or tokens per second of a real model
    python -m common.machine stress            full load: wrong numbers, heat, falling clocks
    python -m common.machine monitor           the load now
    python -m common.machine report            one page of all results

Every tool runs on a machine without a GPU too, and says what it skips. docs/machine-kit.md explains the lines.
"""
