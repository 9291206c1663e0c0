# The build's options. Each has a default that works; `cmake -LH -B build` lists them.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
# Line numbers for stack traces, without the types: those of LibTorch's headers cost half the compile time and 10 MB a file.
if(CMAKE_CXX_FLAGS_RELWITHDEBINFO STREQUAL "-O2 -g -DNDEBUG")
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1 -DNDEBUG")
endif()

option(BUILD_SHARED_LIBS "Build librebind.so instead of librebind.a" OFF)
option(REBIND_BUILD_TESTS "Build the tests (needs Catch2)" ${PROJECT_IS_TOP_LEVEL})
option(REBIND_BUILD_BENCH "Build the benchmarks (needs Google Benchmark)" ${PROJECT_IS_TOP_LEVEL})
option(REBIND_BUILD_TOOLS "Build the programs in tools/, train_gpt among them" ${PROJECT_IS_TOP_LEVEL})

# AUTO: on when what it needs is found. ON: an error when something is missing.
set(REBIND_CUDA AUTO CACHE STRING "Use CUDA: needs nvcc and a LibTorch with CUDA (AUTO, ON, OFF)")
set(REBIND_NCCL AUTO CACHE STRING "Build the NCCL backend: needs a LibTorch with CUDA and CUDA's and NCCL's headers (AUTO, ON, OFF)")
set(REBIND_SANITIZE "" CACHE STRING "Sanitizers for our own code: \"address;undefined\" or \"thread\"")
set_property(CACHE REBIND_CUDA REBIND_NCCL PROPERTY STRINGS AUTO ON OFF)

foreach(_rebind_option REBIND_CUDA REBIND_NCCL)
  string(TOUPPER "${${_rebind_option}}" ${_rebind_option})
  if(NOT ${_rebind_option} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${_rebind_option} is '${${_rebind_option}}'; it must be AUTO, ON or OFF.")
  endif()
endforeach()
foreach(_rebind_sanitizer IN LISTS REBIND_SANITIZE)
  if(NOT _rebind_sanitizer MATCHES "^(address|undefined|leak|thread)$")
    message(FATAL_ERROR "REBIND_SANITIZE is '${REBIND_SANITIZE}'; it must be empty or a list (with ';') of address, undefined, "
                        "leak, or thread alone.")
  endif()
endforeach()

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Installed and built programs find LibTorch where it was when they were linked.
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
