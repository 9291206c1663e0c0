# What the library uses beside LibTorch, and what the options come to with what is there.
#
# Sets REBIND_PRIVATE_LIBRARIES, REBIND_GLOO_INCLUDE_DIR, REBIND_WITH_CUDA, REBIND_WITH_NCCL, REBIND_WITH_CUDA_LIBRARIES.

set(REBIND_PRIVATE_LIBRARIES
    absl::cleanup absl::flat_hash_map absl::flat_hash_set absl::inlined_vector absl::node_hash_map absl::span absl::strings
    absl::synchronization "$<BUILD_INTERFACE:nlohmann_json::nlohmann_json>")

# LibTorch holds Gloo's code but not its headers. Debian's header files fit; its library must not be linked.
find_path(REBIND_GLOO_INCLUDE_DIR gloo/algorithm.h DOC "The folder that has gloo/algorithm.h")
mark_as_advanced(REBIND_GLOO_INCLUDE_DIR)
if(NOT REBIND_GLOO_INCLUDE_DIR)
  message(FATAL_ERROR "Gloo's header files were not found. They are in the package libgloo-dev (apt-get install libgloo-dev), "
                      "or name their folder with -DREBIND_GLOO_INCLUDE_DIR=/path/with/gloo.")
endif()

# rebind_decide(OPTION RESULT condition text ...): AUTO, ON and OFF against the first condition that does not hold.
function(rebind_decide option result)
  set(missing "")
  math(EXPR last "${ARGC} - 1")
  foreach(i RANGE 2 ${last} 2)
    math(EXPR j "${i} + 1")
    if(NOT ARGV${i} AND NOT missing)
      set(missing "${ARGV${j}}")
    endif()
  endforeach()
  if(${option} STREQUAL "OFF")
    set(missing "${option}=OFF")
  elseif(missing AND ${option} STREQUAL "ON")
    message(FATAL_ERROR "${option} is ON, but there is ${missing}.")
  endif()
  if(missing)
    set(${result} FALSE PARENT_SCOPE)
    message(STATUS "${option}: off (${missing})")
  else()
    set(${result} TRUE PARENT_SCOPE)
    message(STATUS "${option}: on")
  endif()
endfunction()

find_program(REBIND_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
mark_as_advanced(REBIND_NVCC)
rebind_decide(REBIND_CUDA REBIND_WITH_CUDA
              "${LibTorch_CUDA_FOUND}" "no CUDA in this LibTorch"
              "${REBIND_NVCC}" "no nvcc")
rebind_decide(REBIND_NCCL REBIND_WITH_NCCL
              "${LibTorch_CUDA_FOUND}" "no CUDA in this LibTorch"
              "${LibTorch_CUDA_INCLUDE_DIR}" "no cuda_runtime_api.h"
              "${LibTorch_NCCL_INCLUDE_DIR}" "no nccl.h")
set(REBIND_WITH_CUDA_LIBRARIES FALSE)
if(REBIND_WITH_CUDA OR REBIND_WITH_NCCL)
  set(REBIND_WITH_CUDA_LIBRARIES TRUE)
endif()
