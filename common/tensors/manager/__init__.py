"""Managers and functions for programs that hold whole tensors on rank 0."""

from common.tensors.manager.cluster import ClusterConfig as ClusterConfig
from common.tensors.manager.cluster import CostModel as CostModel
from common.tensors.manager.functions import distributed_add as distributed_add
from common.tensors.manager.functions import distributed_batch_matmul as distributed_batch_matmul
from common.tensors.manager.functions import distributed_conv2d as distributed_conv2d
from common.tensors.manager.functions import distributed_conv3d as distributed_conv3d
from common.tensors.manager.functions import distributed_einsum as distributed_einsum
from common.tensors.manager.functions import distributed_fft as distributed_fft
from common.tensors.manager.functions import distributed_fft2d as distributed_fft2d
from common.tensors.manager.functions import distributed_ifft as distributed_ifft
from common.tensors.manager.functions import distributed_matmul as distributed_matmul
from common.tensors.manager.functions import distributed_max as distributed_max
from common.tensors.manager.functions import distributed_mean as distributed_mean
from common.tensors.manager.functions import distributed_min as distributed_min
from common.tensors.manager.functions import distributed_rfft as distributed_rfft
from common.tensors.manager.functions import distributed_sum as distributed_sum
from common.tensors.manager.functions import distributed_tensordot as distributed_tensordot
from common.tensors.manager.functions import distributed_transpose as distributed_transpose
from common.tensors.manager.gpu_manager import GPUManager as GPUManager
from common.tensors.manager.mpi_manager import MPIManager as MPIManager
from common.tensors.manager.profiler import Profiler as Profiler
from common.tensors.manager.tensor_distributor import TensorDistributor as TensorDistributor
