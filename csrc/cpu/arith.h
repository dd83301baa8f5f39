// The arithmetic of the instruction set that is compiled: units of one float, or of two bf16.
#pragma once

#if FASTATTN_BF16
#include "arith_bf16.h"
#else
#include "arith_fp32.h"
#endif
