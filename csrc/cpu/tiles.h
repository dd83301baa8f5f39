// The micro-kernel of arith_bf16.h on AMX: eight tile registers of 16 rows of 16 units, and one instruction that
// multiplies two of them.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "matrix.h"
#include "vector.h"

namespace fastattn::FASTATTN_ISA {
namespace {

constexpr int kTile = 16;  // rows of a tile, and units in each

template <int... I, class Visit>
FASTATTN_INLINE void each_constant(std::integer_sequence<int, I...>, Visit visit) {
  (visit(std::integral_constant<int, I>{}), ...);
}
template <int N, class Visit>
FASTATTN_INLINE void each_constant(Visit visit) {
  each_constant(std::make_integer_sequence<int, N>{}, visit);
}

// The compiler knows nothing of tile registers: they are named by number, and every access to memory is declared.
template <int T>
FASTATTN_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
FASTATTN_INLINE void tile_load(const float* from, int64_t row) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(row * 4) : "memory");
}
template <int T>
FASTATTN_INLINE void tile_store(float* to, int64_t row) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(row * 4) : "memory");
}
template <int Sum, int A, int B>
FASTATTN_INLINE void tile_multiply_add() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
}

// Switches the tile registers on, all of full size, as long as it lives.
class MultiplierInUse {
 public:
  MultiplierInUse() {
    alignas(64) uint8_t configuration[64] = {1};  // palette 1
    for (int tile = 0; tile < 8; ++tile) {
      configuration[16 + 2 * tile] = kTile * sizeof(float);  // bytes in a row
      configuration[48 + tile] = kTile;                      // rows
    }
    asm volatile("ldtilecfg %0" : : "m"(configuration));
  }
  ~MultiplierInUse() { asm volatile("tilerelease"); }
  MultiplierInUse(const MultiplierInUse&) = delete;
  MultiplierInUse& operator=(const MultiplierInUse&) = delete;
};

// to = a * b, or to += a * b, for T * C = 4 tiles, which hide the latency of an instruction. The steps are a multiple
// of 16.
template <int T, int C, bool kAdd>
FASTATTN_INLINE void tile_product(Target to, int64_t steps, Rows a, Right b) {
  constexpr int kFirst = T * C;  // of the registers of the factors
  constexpr int kRotating = 8 - kFirst - (T < C ? T : C);
  const auto each_sum = [&](auto visit) {
    each_constant<T>([&](auto t) {
      each_constant<C>([&](auto c) { visit(std::integral_constant<int, t * C + c>{}, to.at(t * kTile, c)); });
    });
  };
  each_sum([&](auto sum, const float* at) {
    if constexpr (kAdd) {
      tile_load<sum>(at, to.stride);
    } else {
      tile_zero<sum>();
    }
  });
  for (int64_t k = 0; k < steps; k += kTile) {
    const auto load_a = [&](auto t, auto reg) { tile_load<reg>(a.data + t * kTile * a.stride + k, a.stride); };
    const auto load_b = [&](auto c, auto reg) { tile_load<reg>(b.data + k * b.stride + c * kTile, b.stride); };
    if constexpr (T <= C) {  // all of a stays, b passes by
      each_constant<T>([&](auto t) { load_a(t, std::integral_constant<int, kFirst + t>{}); });
      each_constant<C>([&](auto c) {
        constexpr int kB = kFirst + T + c % kRotating;
        load_b(c, std::integral_constant<int, kB>{});
        each_constant<T>([&](auto t) { tile_multiply_add<t * C + c, kFirst + t, kB>(); });
      });
    } else {
      each_constant<C>([&](auto c) { load_b(c, std::integral_constant<int, kFirst + c>{}); });
      each_constant<T>([&](auto t) {
        constexpr int kA = kFirst + C + t % kRotating;
        load_a(t, std::integral_constant<int, kA>{});
        each_constant<C>([&](auto c) { tile_multiply_add<t * C + c, kA, kFirst + c>(); });
      });
    }
  }
  each_sum([&](auto sum, float* at) { tile_store<sum>(at, to.stride); });
}

// As in product.h. Whole tiles of rows are computed: a and `to` have rows up to a multiple of 16.
template <int C, bool kAdd>
FASTATTN_ONCE void tile_products(Target to, int64_t rows, int64_t steps, Rows a, Right b) {
  constexpr int kTilesOfRows = C == 1 ? 4 : C == 2 ? 2 : 1;
  each_tile<kTilesOfRows>(0, (rows + kTile - 1) / kTile, [&](auto tiles, int64_t tile) {
    tile_product<tiles, C, kAdd>(to.at_row(tile * kTile), steps, a.at_row(tile * kTile), b);
  });
}
template <int C>
FASTATTN_INLINE void assign_product(float* to, int64_t rows, int64_t steps, Rows a, Right b) {
  tile_products<C, false>({to, C * kLanes}, rows, steps, a, b);
}
template <int C>
FASTATTN_INLINE void add_product(Target to, int64_t rows, int64_t steps, Rows a, Right b) {
  tile_products<C, true>(to, rows, steps, a, b);
}

}  // namespace
}  // namespace fastattn::FASTATTN_ISA
