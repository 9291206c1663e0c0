// The main function of every test program.
#define CATCH_CONFIG_RUNNER
#include "test/support/catch.h"

int main(int argc, char** argv) { return Catch::Session().run(argc, argv); }
