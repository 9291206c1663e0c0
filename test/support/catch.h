// Catch2, version 2 (Debian 12) or 3 (Ubuntu 24.04), under one name.
//
//   #include "test/support/catch.h"
//
// Tests use only what both versions have: TEST_CASE, SECTION, CHECK, REQUIRE, CHECK_THAT, INFO, CAPTURE, GENERATE, Catch::Approx.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>

namespace Catch {
using Detail::Approx;  // where version 3 has it
}
#endif
