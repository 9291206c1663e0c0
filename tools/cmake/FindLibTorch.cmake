# Finds LibTorch: the one in a PyPI wheel (`pip install torch`) or an unpacked LibTorch zip, with or without CUDA.
#
#   list(APPEND CMAKE_MODULE_PATH .../tools/cmake)
#   find_package(LibTorch 2.11 REQUIRED)
#   target_link_libraries(program PRIVATE LibTorch::LibTorch)       # CPU operators, autograd, nn, optim, c10d
#   target_link_libraries(program PRIVATE LibTorch::cuda)           # the same and the CUDA libraries, if LibTorch_CUDA_FOUND
#
# Looked for in this order; a place that is named but holds no LibTorch is an error, not a reason to look further:
#   1. LIBTORCH_ROOT, a CMake or environment variable: the folder that has include/ and lib/
#   2. Torch_DIR, a CMake or environment variable: ROOT/share/cmake/Torch
#   3. CMAKE_PREFIX_PATH
#   4. where it was found by the last configuration of this build folder
#   5. the `torch` package of the Python in VIRTUAL_ENV, else of the python3 on PATH
#
# Sets LibTorch_ROOT, LibTorch_VERSION, LibTorch_CUDA_FOUND, LibTorch_CUDA_INCLUDE_DIRS (cuda_runtime_api.h) and
# LibTorch_NCCL_INCLUDE_DIR (nccl.h, that of the NCCL LibTorch was built with, where the wheel brings it).
#
# LibTorch's own TorchConfig.cmake is not used: with a CUDA build it insists on nvcc and on the CUDA language, although neither is
# needed to link it.

include(FindPackageHandleStandardArgs)

set(_libtorch_header torch/csrc/distributed/c10d/ProcessGroup.hpp)
set(_libtorch_named "")  # how the root was named, for messages
set(_libtorch_root "")
set(_libtorch_problem "")

if(LIBTORCH_ROOT)
  set(_libtorch_root "${LIBTORCH_ROOT}")
  set(_libtorch_named "LIBTORCH_ROOT (a CMake variable)")
elseif(DEFINED ENV{LIBTORCH_ROOT} AND NOT "$ENV{LIBTORCH_ROOT}" STREQUAL "")
  set(_libtorch_root "$ENV{LIBTORCH_ROOT}")
  set(_libtorch_named "LIBTORCH_ROOT (an environment variable)")
elseif(Torch_DIR)
  set(_libtorch_root "${Torch_DIR}/../../..")
  set(_libtorch_named "Torch_DIR (a CMake variable)")
elseif(DEFINED ENV{Torch_DIR} AND NOT "$ENV{Torch_DIR}" STREQUAL "")
  set(_libtorch_root "$ENV{Torch_DIR}/../../..")
  set(_libtorch_named "Torch_DIR (an environment variable)")
endif()

if(NOT _libtorch_named)
  # A prefix may be the root itself or, as `torch.utils.cmake_prefix_path` gives it, its share/cmake.
  string(REPLACE ":" ";" _libtorch_prefixes "$ENV{CMAKE_PREFIX_PATH}")
  foreach(_libtorch_prefix IN LISTS CMAKE_PREFIX_PATH _libtorch_prefixes)
    foreach(_libtorch_candidate "${_libtorch_prefix}" "${_libtorch_prefix}/../..")
      if(NOT _libtorch_root AND EXISTS "${_libtorch_candidate}/include/${_libtorch_header}")
        set(_libtorch_root "${_libtorch_candidate}")
      endif()
    endforeach()
  endforeach()
endif()

if(NOT _libtorch_named AND NOT _libtorch_root AND EXISTS "${LibTorch_FOUND_LAST}/include/${_libtorch_header}")
  set(_libtorch_root "${LibTorch_FOUND_LAST}")
endif()

if(NOT _libtorch_named AND NOT _libtorch_root)
  if(DEFINED ENV{VIRTUAL_ENV} AND EXISTS "$ENV{VIRTUAL_ENV}/bin/python3")
    set(_libtorch_python "$ENV{VIRTUAL_ENV}/bin/python3")
  else()
    # Not cached: another environment on PATH must be seen by the next configuration.
    find_program(_libtorch_python NAMES python3 NO_CACHE)
  endif()
  if(_libtorch_python)
    # Finding the package's folder is quick; importing torch takes seconds.
    execute_process(
      COMMAND "${_libtorch_python}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE _libtorch_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
endif()

if(_libtorch_root)
  get_filename_component(_libtorch_root "${_libtorch_root}" REALPATH)
  foreach(_libtorch_part "include/${_libtorch_header}" include/torch/csrc/api/include/torch/torch.h lib/libtorch.so
          lib/libtorch_cpu.so lib/libc10.so)
    if(NOT EXISTS "${_libtorch_root}/${_libtorch_part}")
      if(_libtorch_named)
        set(_libtorch_problem "${_libtorch_named} is '${_libtorch_root}', which has no ${_libtorch_part}.")
      else()
        set(_libtorch_problem "The LibTorch in '${_libtorch_root}' has no ${_libtorch_part}.")
      endif()
      break()
    endif()
  endforeach()
else()
  set(_libtorch_problem "No LibTorch was found.")
endif()

if(NOT _libtorch_problem)
  set(LibTorch_ROOT "${_libtorch_root}")
  set(LibTorch_FOUND_LAST "${_libtorch_root}" CACHE INTERNAL "")
  foreach(_libtorch_file torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT LibTorch_VERSION AND EXISTS "${LibTorch_ROOT}/include/${_libtorch_file}")
      file(STRINGS "${LibTorch_ROOT}/include/${_libtorch_file}" _libtorch_lines
           REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
      string(REGEX REPLACE "[^0-9;]" "" LibTorch_VERSION "${_libtorch_lines}")
      string(REPLACE ";" "." LibTorch_VERSION "${LibTorch_VERSION}")
    endif()
  endforeach()
endif()

string(CONCAT _libtorch_help
       "${_libtorch_problem}\n"
       "rebind needs LibTorch 2.11. Get it by one of:\n"
       "  source tools/env          (after tools/run_tests or tools/quickstart, which install it)\n"
       "  python3 -m venv venv && venv/bin/pip install torch==2.11.0 && export VIRTUAL_ENV=$PWD/venv\n"
       "  a LibTorch zip from pytorch.org (C++/Java, Linux), unpacked, and -DLIBTORCH_ROOT=/path/to/libtorch\n")
find_package_handle_standard_args(LibTorch REQUIRED_VARS LibTorch_ROOT VERSION_VAR LibTorch_VERSION
                                  REASON_FAILURE_MESSAGE "${_libtorch_help}")

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  find_package(Threads REQUIRED)

  foreach(_libtorch_library c10 torch_cpu torch c10_cuda torch_cuda)
    if(EXISTS "${LibTorch_ROOT}/lib/lib${_libtorch_library}.so")
      add_library(LibTorch::${_libtorch_library} SHARED IMPORTED)
      set_target_properties(LibTorch::${_libtorch_library} PROPERTIES
                            IMPORTED_LOCATION "${LibTorch_ROOT}/lib/lib${_libtorch_library}.so")
    endif()
  endforeach()

  # NDEBUG: the libraries are built with it, and without it some inline code disagrees with them about class layouts.
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  target_include_directories(LibTorch::LibTorch SYSTEM INTERFACE "${LibTorch_ROOT}/include"
                             "${LibTorch_ROOT}/include/torch/csrc/api/include")
  target_compile_definitions(LibTorch::LibTorch INTERFACE NDEBUG _GLIBCXX_USE_CXX11_ABI=1)
  target_compile_features(LibTorch::LibTorch INTERFACE cxx_std_17)
  target_link_libraries(LibTorch::LibTorch INTERFACE LibTorch::torch_cpu LibTorch::c10 Threads::Threads)
endif()

set(LibTorch_CUDA_FOUND FALSE)
if(TARGET LibTorch::torch_cuda AND TARGET LibTorch::c10_cuda)
  # The wheel has CUDA's and NCCL's headers beside it, those LibTorch was built with; a zip relies on an installed toolkit.
  find_path(LibTorch_CUDA_INCLUDE_DIR cuda_runtime_api.h
            HINTS "${LibTorch_ROOT}/../nvidia/cu13/include" "${LibTorch_ROOT}/../nvidia/cuda_runtime/include"
                  "$ENV{CUDA_HOME}/include" /usr/local/cuda/include)
  find_path(LibTorch_NCCL_INCLUDE_DIR nccl.h
            HINTS "${LibTorch_ROOT}/../nvidia/nccl/include" "$ENV{CUDA_HOME}/include" /usr/local/cuda/include)
  mark_as_advanced(LibTorch_CUDA_INCLUDE_DIR LibTorch_NCCL_INCLUDE_DIR)
  set(LibTorch_CUDA_INCLUDE_DIRS "")
  if(LibTorch_CUDA_INCLUDE_DIR)
    set(LibTorch_CUDA_INCLUDE_DIRS "${LibTorch_CUDA_INCLUDE_DIR}")
  endif()
  set(LibTorch_CUDA_FOUND TRUE)

  if(NOT TARGET LibTorch::cuda)
    add_library(LibTorch::cuda INTERFACE IMPORTED)
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::LibTorch LibTorch::torch LibTorch::torch_cuda LibTorch::c10_cuda)
    target_include_directories(LibTorch::cuda SYSTEM INTERFACE ${LibTorch_CUDA_INCLUDE_DIRS})
    # Nothing refers to a symbol of libtorch_cuda, yet loading it is what registers the CUDA operators. Some distributions' linkers
    # drop such libraries by default.
    target_link_options(LibTorch::cuda INTERFACE "LINKER:--no-as-needed")
  endif()
endif()
