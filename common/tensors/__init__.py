"""Distributed tensors: plain tensors that are split over ranks, and operations whose results stay split."""

from common.tensors.convolution import conv1d as conv1d
from common.tensors.convolution import conv2d as conv2d
from common.tensors.convolution import conv3d as conv3d
from common.tensors.explain import explain as explain
from common.tensors.grid import Grid as Grid
from common.tensors.layout import Layout as Layout
from common.tensors.layout import Partial as Partial
from common.tensors.layout import Replicate as Replicate
from common.tensors.layout import Shard as Shard
from common.tensors.make import from_dtensor as from_dtensor
from common.tensors.make import from_full as from_full
from common.tensors.make import from_function as from_function
from common.tensors.make import from_pieces as from_pieces
from common.tensors.make import from_root as from_root
from common.tensors.make import full as full
from common.tensors.make import load as load
from common.tensors.make import normal as normal
from common.tensors.make import to_dtensor as to_dtensor
from common.tensors.make import uniform as uniform
from common.tensors.products import bmm as bmm
from common.tensors.products import matmul as matmul
from common.tensors.rates import Rates as Rates
from common.tensors.tensor import DistributedTensor as DistributedTensor
from common.tensors.tensor import pointwise as pointwise
