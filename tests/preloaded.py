"""Imported by the server that ranks fork from: what each of them would otherwise load for itself."""

from __future__ import annotations

import gc
import importlib
import importlib.util

import pytest  # noqa: F401
import small_models  # noqa: F401
import torch.distributed.fsdp
import torch.fx.experimental.symbolic_shapes  # backward(dy) imports it: 2 s a rank
import torch.testing._internal.distributed.fake_pg
import torch.utils.tensorboard  # noqa: F401
from hypothesis import strategies  # noqa: F401
from mpi.launch import ROOT
from transformers.models.bert import modeling_bert  # noqa: F401  3 s for each rank of a test that imports it
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401

from common.data.text import load_text

for folder in ("pytorch", "inference", "trainer"):
    for file in sorted(ROOT.glob(f"0*/{folder}/*.py")):
        # a chapter that came after `make setup` is not on the path yet
        if importlib.util.find_spec(file.stem):
            importlib.import_module(file.stem)
load_text()  # it is kept
gc.freeze()  # a rank's collector would touch, and so copy, all that was imported
