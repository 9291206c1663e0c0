# How our own code is compiled. Nothing here reaches a user of the installed package.

find_program(REBIND_CCACHE ccache DOC "Compiler cache; empty: none")
mark_as_advanced(REBIND_CCACHE)
if(REBIND_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Sloppiness: what precompiled headers need. Paths below the source folder count relative to it, so another clone hits as well.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}" CCACHE_NOHASHDIR=1
      "${REBIND_CCACHE}")
endif()

# Warnings are errors. LibTorch's headers are system headers and exempt.
function(rebind_compile target)
  set_target_properties(${target} PROPERTIES CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
  target_compile_options(
    ${target}
    PRIVATE -Wall
            -Wextra
            -Werror
            -Wshadow
            -Wnon-virtual-dtor
            -Woverloaded-virtual
            -Wno-missing-field-initializers # designated initializers leave out what has a default
            # GCC 12 and 13 see overlaps and overflows in inlined std::string code that are none (GCC bugs 105329, 105651)
            "$<$<CXX_COMPILER_ID:GNU>:-Wno-restrict;-Wno-stringop-overflow;-Wno-stringop-overread;-Wno-array-bounds>"
            # ccache must see that a precompiled header is used
            $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  if(REBIND_SANITIZE)
    string(REPLACE ";" "," list "${REBIND_SANITIZE}")
    # vptr: LibTorch hides the type information it would compare.
    target_compile_options(${target} PRIVATE -fsanitize=${list} -fno-sanitize=vptr -fno-sanitize-recover=all
                                             -fno-omit-frame-pointer
                                             # instrumented code confuses GCC's flow analysis, as its manual says
                                             $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    target_compile_definitions(${target} PRIVATE _GLIBCXX_ASSERTIONS)
    target_link_options(${target} PUBLIC -fsanitize=${list})
  endif()
endfunction()
