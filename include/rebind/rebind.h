// Everything public. See README.md for the user's loop before and after.
#pragma once

#include "rebind/fsdp.h"
#include "rebind/launch.h"
#include "rebind/options.h"
#include "rebind/plan.h"
#include "rebind/prepare_fsdp.h"
#include "rebind/process_group.h"
