# LibTorch for the chapters' libtorch/ folders. The one inside torch's wheel is linked library by library, as
# torch.utils.cpp_extension does: find_package(Torch) on a CUDA wheel refuses to configure without the CUDA
# toolkit. A LibTorch named by CMAKE_PREFIX_PATH or Torch_DIR goes through find_package.
include_guard(GLOBAL)

# Makes the target fived_torch and, with it, the one precompiled header that all torch targets share. Found only
# when the first target asks, so that the MPI parts build where there is no torch.
function(fived_find_torch)
  if(TARGET fived_torch)
    return()
  endif()
  add_library(fived_torch INTERFACE)
  set(named "${CMAKE_PREFIX_PATH}${Torch_DIR}")
  if(named AND NOT named STREQUAL "${FIVED_TORCH}/share/cmake") # the wheel's own folder is no other LibTorch
    find_package(Torch REQUIRED CONFIG)
    set(FIVED_TORCH_FOLDER "${TORCH_INSTALL_PREFIX}")
    target_link_libraries(fived_torch INTERFACE ${TORCH_LIBRARIES})
    target_include_directories(fived_torch SYSTEM INTERFACE ${TORCH_INCLUDE_DIRS})
    separate_arguments(flags UNIX_COMMAND "${TORCH_CXX_FLAGS}")
  else()
    if(NOT FIVED_TORCH)
      fived_stop("No torch in ${FIVED_PREFIX}: ${Python_EXECUTABLE} -m pip install torch, or "
        "-DCMAKE_PREFIX_PATH=<your LibTorch>, or -DFIVED_LIBTORCH=OFF to build the MPI parts alone.")
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
  set(FIVED_TORCH_PYTHON "${FIVED_TORCH_FOLDER}/lib/libtorch_python.so" CACHE INTERNAL "")
  if(FIVED_PYTHON AND NOT EXISTS "${FIVED_TORCH_PYTHON}") # a LibTorch without Python, as the zip of pytorch.org is
    message(STATUS "No libtorch_python.so in ${FIVED_TORCH_FOLDER}/lib: building the LibTorch binaries, not their Python modules")
  endif()

  # No Python in it: what a stand-alone binary is made of shares it with the modules, whose bindings add Python.
  file(CONFIGURE OUTPUT "${CMAKE_BINARY_DIR}/torch_pch/unit.cpp" CONTENT "")
  add_library(fived_torch_pch OBJECT "${CMAKE_BINARY_DIR}/torch_pch/unit.cpp")
  target_precompile_headers(fived_torch_pch PRIVATE "${FIVED_ROOT}/cpp/include/fived/torch/torch.hpp")
  fived_torch_target(fived_torch_pch)
endfunction()

# The same flags for all that use the precompiled header.
function(fived_torch_target name)
  target_link_libraries(${name} PRIVATE fived_torch fived)
  set_target_properties(${name} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  if(NOT name STREQUAL fived_torch_pch)
    target_precompile_headers(${name} REUSE_FROM fived_torch_pch)
  endif()
endfunction()

# Objects on LibTorch that know nothing of Python, for a module, a binary or both.
function(fived_add_torch_objects name)
  fived_find_torch()
  add_library(${name} OBJECT ${ARGN})
  fived_torch_target(${name})
endfunction()

# A stand-alone binary of objects: fived_add_torch_binary(name objects...).
function(fived_add_torch_binary name)
  list(TRANSFORM ARGN REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_executable(${name} ${objects})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PRIVATE fived_torch fived)
endfunction()

# A chapter's libtorch/ folder: name.cpp and `ARGN` without Python, main.cpp -> bin/, bindings.cpp -> python/. These two
# compute nothing themselves, so they are optimised less and compile faster.
function(fived_torch_chapter name)
  if(NOT TARGET fived_c10d_core)
    add_subdirectory("${FIVED_ROOT}/cpp/c10d" "${CMAKE_BINARY_DIR}/c10d")
  endif()
  set_source_files_properties(main.cpp bindings.cpp PROPERTIES COMPILE_OPTIONS -O1)
  fived_add_torch_objects(${name}_core ${name}.cpp ${ARGN})
  fived_add_torch_module(${name}_module $<TARGET_OBJECTS:${name}_core> bindings.cpp)
  if(TARGET ${name}_module)
    set_target_properties(${name}_module PROPERTIES OUTPUT_NAME ${name})
  endif()
  fived_add_torch_objects(${name}_main main.cpp)
  target_include_directories(${name}_main PRIVATE "${FIVED_ROOT}/cpp/c10d")
  fived_add_torch_binary(${name} ${name}_main ${name}_core fived_c10d_core)
endfunction()

# A Python module on LibTorch, where that has Python. pybind11 is the one in torch's include folder: a module that takes a
# c10d::ProcessGroup must be compiled with the pybind11 that torch was.
function(fived_add_torch_module name)
  if(NOT FIVED_PYTHON)
    return()
  endif()
  fived_find_torch()
  if(NOT EXISTS "${FIVED_TORCH_PYTHON}")
    return()
  endif()
  fived_add_module(${name} "${FIVED_TORCH_FOLDER}/include" ${ARGN})
  fived_torch_target(${name})
  target_link_libraries(${name} PRIVATE "${FIVED_TORCH_PYTHON}")
endfunction()
