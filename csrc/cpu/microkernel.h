// The matrix products of the instruction set that is compiled: by vectors, or by AMX.
#pragma once

#if FASTATTN_TILES
#include "tiles.h"
#else
#include "product.h"
#endif
