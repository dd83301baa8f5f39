// The arithmetic of the instruction set that is compiled: units of one float, or of two bf16.
#pragma once

#if FASTATTN_PAIRS
#include "pairs.h"
#else
#include "single.h"
#endif
