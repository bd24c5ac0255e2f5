"""Managers and functions for programs that hold whole tensors on rank 0."""

from common.tensors.manager.cluster import ClusterConfig as ClusterConfig
from common.tensors.manager.cluster import CostModel as CostModel
from common.tensors.manager.gpu_manager import GPUManager as GPUManager
from common.tensors.manager.mpi_manager import MPIManager as MPIManager
from common.tensors.manager.profiler import Profiler as Profiler
from common.tensors.manager.tensor_distributor import TensorDistributor as TensorDistributor
