// How the lanes of a warp share the matrices of a product.
#pragma once

#include <cstdint>

namespace fastattn::cuda {

// What a warp holds of a 16 x 8 matrix of sums: lane l has in [0] and [1] the columns 2 * (l % 4) and the one after it
// of row l / 4, in [2] and [3] those of row l / 4 + 8.
using Sums = float[4];

// What a warp holds of a 16 x 16 matrix of 16-bit elements, two to a word, as the left factor of a product: the four 8
// x 8 quarters [rows 0-7 | columns 0-7], [8-15 | 0-7], [0-7 | 8-15], [8-15 | 8-15], in each of which lane l has the
// columns 2 * (l % 4) and the one after it of row l / 4. The right factor, 16 x 8 and transposed, has two: columns 0-7
// and 8-15.
using Left = uint32_t[4];
using Right = uint32_t[2];

constexpr int kWarp = 32;  // lanes

}  // namespace fastattn::cuda
