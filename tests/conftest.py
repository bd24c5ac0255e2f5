"""Ranks fork from a server that has already imported what test modules and torch's lazy corners import."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks and their baseline alike

from common import spawn

spawn.PRELOAD += ["pytest", "common.collectives", "common.placement", "dp_basic", "small_models"]
spawn.PRELOAD += ["dp_matrix_multiply", "dp_data_parallel"]
spawn.PRELOAD += ["torch.fx.experimental.symbolic_shapes"]  # backward(dy) imports it: 2 s a rank
spawn.PRELOAD += ["dp_compression", "dp_local_sgd"]
