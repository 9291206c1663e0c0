# rebind_suite(NAME [FILE...]): test/NAME/**/*.cpp, test/support and these files become the program rebind_NAME and the CTest entry
#   and label NAME. A folder without tests gives neither.
# rebind_script_test(NAME LABEL label SCRIPT path): a shell script that exits with 0 when it passes.

find_package(Catch2 REQUIRED)

file(GLOB _rebind_support_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/test/support/*.cpp")
add_library(rebind_test_support OBJECT ${_rebind_support_sources})
rebind_compile(rebind_test_support)
target_link_libraries(rebind_test_support PUBLIC rebind_internal Catch2::Catch2)
target_precompile_headers(rebind_test_support PRIVATE <torch/torch.h> "${PROJECT_SOURCE_DIR}/test/support/catch.h")
# It defines what the others only declare.
set_source_files_properties("${PROJECT_SOURCE_DIR}/test/support/main.cpp" PROPERTIES SKIP_PRECOMPILE_HEADERS ON)

set(_rebind_test_environment OMP_NUM_THREADS=1) # ranks are threads; more of them would fight over the cores
if(REBIND_SANITIZE)
  # TSan: LibTorch is not instrumented, so what it does with its own locks looks like a race.
  list(APPEND _rebind_test_environment "ASAN_OPTIONS=detect_leaks=1" "UBSAN_OPTIONS=print_stacktrace=1"
       "TSAN_OPTIONS=ignore_noninstrumented_modules=1:history_size=4")
endif()

function(rebind_suite name)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/test/${name}/*.cpp")
  if(NOT sources)
    return()
  endif()
  add_executable(rebind_${name} ${sources} ${ARGN})
  rebind_compile(rebind_${name})
  target_link_libraries(rebind_${name} PRIVATE rebind_test_support)
  target_precompile_headers(rebind_${name} REUSE_FROM rebind_test_support)
  if(name STREQUAL "tools")
    # For these alone: a definition that names the folder makes the compiler cache useless in another clone.
    set_source_files_properties(${sources} PROPERTIES COMPILE_DEFINITIONS "REBIND_BINARY_DIR=\"${PROJECT_BINARY_DIR}\"")
  endif()
  # The seed is the program's own (test/support/main.cpp): the same for all ranks.
  add_test(NAME ${name} COMMAND rebind_${name} --order rand --warn NoAssertions)
  set_tests_properties(${name} PROPERTIES LABELS ${name} RUN_SERIAL ON TIMEOUT 1500 ENVIRONMENT "${_rebind_test_environment}")
endfunction()

function(rebind_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "LABEL;SCRIPT" "")
  add_test(NAME ${name} COMMAND "${CMAKE_CURRENT_SOURCE_DIR}/${arg_SCRIPT}" "${PROJECT_BINARY_DIR}")
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} RUN_SERIAL ON TIMEOUT 600)
endfunction()
