# LibTorch for the chapters' libtorch/ folders. The one inside torch's wheel is linked library by library, as
# torch.utils.cpp_extension does: find_package(Torch) on a CUDA wheel refuses to configure without the CUDA
# toolkit. A LibTorch named by CMAKE_PREFIX_PATH or Torch_DIR goes through find_package.
include_guard(GLOBAL)

# Makes the target fived_torch and, with it, the one precompiled header that all torch targets share. Found only
# when the first chapter asks, so that the MPI parts build where there is no torch.
function(fived_find_torch)
  if(TARGET fived_torch)
    return()
  endif()
  add_library(fived_torch INTERFACE)
  if(CMAKE_PREFIX_PATH OR Torch_DIR)
    find_package(Torch REQUIRED CONFIG)
    set(FIVED_TORCH_FOLDER "${TORCH_INSTALL_PREFIX}")
    target_link_libraries(fived_torch INTERFACE ${TORCH_LIBRARIES})
    target_include_directories(fived_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
    separate_arguments(flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")
  else()
    if(NOT FIVED_TORCH)
      fived_stop("No torch in ${FIVED_PREFIX}: ${Python_EXECUTABLE} -m pip install torch, or "
        "-DCMAKE_PREFIX_PATH=<your LibTorch>.")
    endif()
    set(FIVED_TORCH_FOLDER "${FIVED_TORCH}")
    foreach(library torch torch_cpu c10 torch_cuda c10_cuda)
      if(EXISTS "${FIVED_TORCH}/lib/lib${library}.so")
        target_link_libraries(fived_torch INTERFACE "${FIVED_TORCH}/lib/lib${library}.so")
      endif()
    endforeach()
    target_include_directories(fived_torch SYSTEM INTERFACE
      "${FIVED_TORCH}/include" "${FIVED_TORCH}/include/torch/csrc/api/include")
    # Wheels up to 2.6 may be built with the old std::string; their CMake file says which.
    file(STRINGS "${FIVED_TORCH}/share/cmake/Torch/TorchConfig.cmake" flags REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
    string(REGEX MATCH "-D_GLIBCXX_USE_CXX11_ABI=[01]" flags "${flags}")
  endif()
  target_compile_options(fived_torch INTERFACE ${flags})
  set(FIVED_TORCH_FOLDER "${FIVED_TORCH_FOLDER}" CACHE INTERNAL "")

  file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/torch_pch/unit.cpp" CONTENT "")
  add_library(fived_torch_pch OBJECT "${CMAKE_BINARY_DIR}/torch_pch/unit.cpp")
  target_link_libraries(fived_torch_pch PRIVATE fived_torch fived Python::Module)
  set_target_properties(fived_torch_pch PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_precompile_headers(fived_torch_pch PRIVATE <torch/extension.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)
endfunction()

# A Python module on LibTorch. pybind11 is the one in torch's include folder: a module that takes a
# c10d::ProcessGroup must be compiled with the pybind11 that torch was.
function(fived_add_torch_module name)
  if(NOT FIVED_PYTHON)
    return()
  endif()
  fived_find_torch()
  fived_add_module(${name} "${FIVED_TORCH_FOLDER}/include" ${ARGN})
  target_link_libraries(${name} PRIVATE fived_torch "${FIVED_TORCH_FOLDER}/lib/libtorch_python.so")
  target_precompile_headers(${name} REUSE_FROM fived_torch_pch)
endfunction()
