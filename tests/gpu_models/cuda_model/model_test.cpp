// The model of a GPU itself: each instruction against a formula of its own, and each mistake that it is there to find.
#include <sys/wait.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <set>

#include "../../../csrc/cuda/instructions.cuh"
#include "../../../csrc/cuda/launch.cuh"
#include "../../cpu_kernels/tensor.h"

namespace fastattn::cuda {
namespace {

using model::counters;
using model::Order;
using model::settings;

int wrong = 0;

void expect(bool holds, const std::string& what) {
  constexpr int kShown = 20;
  if (holds) return;
  if (++wrong <= kShown) std::printf("%s\n", what.c_str());
}

// kernel() in each thread.
template <class Kernel>
void run(int threads, int shared_bytes, Kernel kernel, int64_t blocks = 1) {
  model::run({blocks, threads, shared_bytes, kernel});
}

// What the model says of a mistake.
template <class Kernel>
std::string mistake_of(int threads, int shared_bytes, Kernel kernel) {
  try {
    run(threads, shared_bytes, kernel);
  } catch (const model::Mistake& mistake) {
    return mistake.what();
  }
  return "no mistake";
}

void expect_mistake(const std::string& actual, const std::string& part) {
  expect(actual.find(part) != std::string::npos, "the mistake must be '" + part + "', got '" + actual + "'");
}

// In every order, which is left ascending.
template <class Run>
void in_every_order(Run run) {
  for (const Order order : {Order::descending, Order::random, Order::ascending}) {
    settings.order = order;
    run();
  }
}

bool same(double x, double y) { return std::isnan(x) ? std::isnan(y) : x == y && std::signbit(x) == std::signbit(y); }

// What 16 bits stand for, with that many of them for the exponent.
double value_of(uint32_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1, hidden = 1 << fraction_bits;
  const int exponent = int(bits & 0x7fff) >> fraction_bits, fraction = int(bits) & (hidden - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == 2 * bias + 1) return fraction ? NAN : sign * HUGE_VAL;
  return std::ldexp(sign * (exponent ? fraction + hidden : fraction), std::max(exponent, 1) - bias - fraction_bits);
}

template <class Element>
void test_conversions(const char* name, DType dtype, int exponent_bits, double largest) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double value = value_of(bits, exponent_bits), actual = to_float(Element{uint16_t(bits)});
    expect(same(actual, value), name + (" " + std::to_string(bits)));
  }
  if constexpr (!kHasTensorCores<Element>) return;
  const uint32_t one = pack<Element>(1, 1) & 0xffff;
  expect(value_of(one, exponent_bits) == 1, "1");
  const auto check = [=](float x) {
    double nearest = test::rounded(x, dtype);
    if (std::fabs(nearest) > largest) nearest = std::copysign(HUGE_VAL, nearest);
    const uint32_t bits = pack<Element>(x, 1) & 0xffff;
    const double value = value_of(bits, exponent_bits);
    const bool right = std::isnan(x) ? bits == 0x7fff : same(value, nearest);
    expect(right, std::string(name) + " of fp32 " + std::to_string(std::bit_cast<uint32_t>(x)));
    expect(pack<Element>(x, 1) == (one << 16 | bits) && pack<Element>(1, x) == (bits << 16 | one), "order of a pair");
  };
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) check(std::bit_cast<float>(uint32_t(random())));
  for (uint32_t bits = 0; value_of(bits, exponent_bits) < HUGE_VAL; ++bits) {
    // Each number, the middles to its neighbours, and the fp32 numbers beside both.
    const auto x = float(value_of(bits, exponent_bits));
    const auto below = float(value_of(bits == 0 ? 0 : bits - 1, exponent_bits));
    for (const float y : {x, below + (x - below) / 2, x + (x - below) / 2}) {
      for (const float z : {y, std::nextafter(y, INFINITY), std::nextafter(y, -INFINITY)}) check(z), check(-z);
    }
  }
  for (const float x : {INFINITY, -INFINITY, NAN, -NAN, 3.4e38f, 1e-45f, 0.0f, -0.0f}) check(x);
}

void test_exp2() {
  for (float x = -126; x < 128; x += 0.37f) {
    expect(std::fabs(exp2_fast(x) / std::exp2(double(x)) - 1) < 0x1p-22, "exp2 of " + std::to_string(x));
  }
  expect(exp2_fast(-126.5f) == 0 && exp2_fast(-INFINITY) == 0, "exp2 must be 0 below 2^-126");
  expect(exp2_fast(INFINITY) == INFINITY && exp2_fast(1e-40f) == 1 && std::isnan(exp2_fast(NAN)),
         "exp2 of inf, 0, NaN");
}

template <class Element>
Element element(float x) {
  return {uint16_t(pack<Element>(x, 0))};
}

template <class Element>
uint32_t word(Element low, Element high) {
  return low.bits | uint32_t(high.bits) << 16;
}

// Fragments by the tables of the PTX ISA for mma.m16n8k16: groupID is lane / 4, threadID_in_group is lane % 4.
template <class Element>
void test_multiply_add(const char* name) {
  std::mt19937 random(2);
  std::uniform_int_distribution<int> integers(-8, 8);
  Element a[16][16], b[16][8];
  float c[16][8], d[16][8];
  for (auto& row : a) {
    for (Element& x : row) x = element<Element>(integers(random));
  }
  for (auto& row : b) {
    for (Element& x : row) x = element<Element>(integers(random) / 4.0f);
  }
  for (auto& row : c) {
    for (float& x : row) x = integers(random) / 8.0f;
  }
  b[3][1] = element<Element>(NAN), b[5][2] = element<Element>(INFINITY), a[7][5] = element<Element>(1);
  for (int i = 0; i < 16; ++i) b[i][4] = element<Element>(i == 9 ? 0x1p-24f : 0), c[i][4] = 0;  // subnormal as f16

  counters = {};
  in_every_order([&] {
    run(64, 0, [&] {
      const int lane = threadIdx.x % 32, group = lane / 4, thread = lane % 4;
      uint32_t left[4], right[2];
      float sums[4];
      for (int i = 0; i < 8; i += 2) {
        const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8, column = thread * 2 + (i >= 4 ? 8 : 0);
        left[i / 2] = word(a[row][column], a[row][column + 1]);
      }
      for (int i = 0; i < 4; i += 2) {
        const int k = thread * 2 + (i >= 2 ? 8 : 0);
        right[i / 2] = word(b[k][group], b[k + 1][group]);
      }
      for (int i = 0; i < 4; ++i) sums[i] = c[i < 2 ? group : group + 8][thread * 2 + i % 2];
      multiply_add<Element>(sums, left, right);
      if (threadIdx.x < 32) {
        for (int i = 0; i < 4; ++i) d[i < 2 ? group : group + 8][thread * 2 + i % 2] = sums[i];
      }
    });
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) {
        double sum = c[i][j];
        for (int k = 0; k < 16; ++k) sum += double(to_float(a[i][k])) * to_float(b[k][j]);
        expect(same(d[i][j], float(sum)),
               std::string("multiply_add of ") + name + ", " + std::to_string(i) + ", " + std::to_string(j));
      }
    }
  });
  expect(counters.products == 6, "two warps multiply in three orders");
}

// Words that tell where they lie: the row's number in the high byte, the column's in the low one.
void test_load(bool transposed) {
  in_every_order([&] {
    run(32, 32 * 16, [&] {
      const int lane = threadIdx.x;
      auto* row = reinterpret_cast<uint16_t*>(shared_memory() + lane * 16);
      for (int i = 0; i < 8; ++i) row[i] = uint16_t(lane << 8 | i);
      __syncwarp();
      uint32_t words[4];
      if (transposed) {
        load_transposed(words, row);
      } else {
        load_matrices(words, row);
      }
      for (int m = 0; m < 4; ++m) {
        for (int half = 0; half < 2; ++half) {
          const int row_of_word = transposed ? 2 * (lane % 4) + half : lane / 4;
          const int column = transposed ? lane / 4 : 2 * (lane % 4) + half;
          expect(uint16_t(words[m] >> 16 * half) == ((8 * m + row_of_word) << 8 | column),
                 transposed ? "load_transposed" : "load_matrices");
        }
      }
    });
  });
}

// As an attention kernel does it: left rows from load_matrices, right ones of [8, 16] from load_matrices (two products)
// and of [16, 8] from load_transposed.
void test_loads_and_products() {
  constexpr int kSize = 16, kRow = 2 * kSize;  // bytes
  f16 a[kSize][kSize], b[kSize][kSize];
  std::mt19937 random(3);
  std::uniform_int_distribution<int> integers(-8, 8);
  for (int i = 0; i < kSize; ++i) {
    for (int j = 0; j < kSize; ++j) a[i][j] = element<f16>(integers(random)), b[i][j] = element<f16>(integers(random));
  }
  float by_rows[kSize][kSize], by_columns[kSize][kSize];  // a b^T and a b
  run(32, 2 * sizeof a, [&] {
    const int lane = threadIdx.x;
    char *of_a = shared_memory(), *of_b = of_a + sizeof a;
    if (lane == 0) std::memcpy(of_a, a, sizeof a), std::memcpy(of_b, b, sizeof b);
    __syncwarp();
    uint32_t left[4], rows[4], columns[4];
    load_matrices(left, of_a + lane % 16 * kRow + lane / 16 * 16);
    load_matrices(rows, of_b + (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 16);
    load_transposed(columns, of_b + lane % 16 * kRow + lane / 16 * 16);
    for (int half = 0; half < 2; ++half) {
      Sums of_rows = {}, of_columns = {};
      multiply_add<f16>(of_rows, left, {rows[2 * half], rows[2 * half + 1]});
      multiply_add<f16>(of_columns, left, {columns[2 * half], columns[2 * half + 1]});
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = 8 * half + 2 * (lane % 4) + i % 2;
        by_rows[row][column] = of_rows[i], by_columns[row][column] = of_columns[i];
      }
    }
  });
  for (int i = 0; i < kSize; ++i) {
    for (int j = 0; j < kSize; ++j) {
      float of_rows = 0, of_columns = 0;
      for (int k = 0; k < kSize; ++k) {
        of_rows += to_float(a[i][k]) * to_float(b[j][k]), of_columns += to_float(a[i][k]) * to_float(b[k][j]);
      }
      expect(by_rows[i][j] == of_rows, "a product with rows");
      expect(by_columns[i][j] == of_columns, "a product with columns");
    }
  }
}

void test_shuffles() {
  in_every_order([] {
    run(64, 0, [] {
      const int lane = threadIdx.x % 32;
      const int value = int(threadIdx.x) * 10, warp = value - lane * 10;
      constexpr unsigned kAll = 0xffffffff;
      expect(__shfl_sync(kAll, value, 5) == warp + 50, "__shfl_sync");
      expect(__shfl_sync(kAll, value, 3, 8) == warp + (lane / 8 * 8 + 3) * 10, "__shfl_sync of parts");
      expect(__shfl_xor_sync(kAll, value, 9) == warp + (lane ^ 9) * 10, "__shfl_xor_sync");
      expect(__shfl_down_sync(kAll, value, 3) == warp + (lane < 29 ? lane + 3 : lane) * 10, "__shfl_down_sync");
      expect(__shfl_up_sync(kAll, value, 3, 4) == warp + (lane % 4 < 3 ? lane : lane - 3) * 10,
             "__shfl_up_sync of parts");
      expect(__shfl_xor_sync(kAll, -0.5 * lane, 31) == -0.5 * (31 - lane), "__shfl_xor_sync of doubles");
      expect(__shfl_xor_sync(kAll, 0.5f * lane, 1) == 0.5f * (lane ^ 1), "__shfl_xor_sync of floats");
      expect(__ballot_sync(kAll, lane % 3 == 0) == 0x49249249, "__ballot_sync");
      expect(__any_sync(kAll, lane == 7) && !__any_sync(kAll, 0), "__any_sync");
      expect(__all_sync(kAll, 2) && !__all_sync(kAll, lane != 7), "__all_sync");
      expect(__syncthreads_or(threadIdx.x == 40) && !__syncthreads_or(0), "__syncthreads_or");
      expect(__popc(0x1013) == 4 && __ffs(8) == 4 && __ffs(0) == 0 && __clz(1) == 31, "bits");
    });
  });
}

// Every thread of every block once, in every order, and barriers between what they do.
void test_threads() {
  constexpr int kBlocks = 7, kThreads = 96;
  in_every_order([] {
    std::atomic<int> visits[kBlocks][kThreads] = {};
    counters = {};
    run(
        kThreads, 4 * kThreads,
        [&] {
          expect(blockDim.x == kThreads && gridDim.x == kBlocks, "blockDim, gridDim");
          ++visits[blockIdx.x][threadIdx.x];
          auto* numbers = reinterpret_cast<int*>(shared_memory());
          for (int i = 0; i < 3; ++i) {
            numbers[threadIdx.x] = int(threadIdx.x + i);
            __syncthreads();
            expect(numbers[kThreads - 1 - threadIdx.x] == int(kThreads - 1 - threadIdx.x + i), "a barrier");
            __syncthreads();
          }
        },
        kBlocks);
    for (const auto& block : visits) {
      for (const auto& visit : block) expect(visit == 1, "a thread must run once");
    }
    expect(counters.barriers == 6 * kBlocks, "barriers must be counted");
  });
}

// What the sanitizers, the guard page and the marks beside the memory find ends the process, or is a mistake.
template <class Kernel>
bool survives(int shared_bytes, Kernel kernel) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    _exit(mistake_of(32, shared_bytes, kernel) == "no mistake" ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void test_shared_memory() {
  for (int round = 0; round < 2; ++round) {  // the second block finds nothing of the first one
    run(
        32, 100,
        [] {
          expect(reinterpret_cast<uintptr_t>(shared_memory()) % 128 == 0, "shared memory must be aligned");
          if (threadIdx.x > 0) return;
          for (int i = 0; i < 100; ++i) expect(shared_memory()[i] == char(0xff), "shared memory must begin as NaN");
          std::memset(shared_memory(), 0, 100);
        },
        3);
  }
  expect(survives(100, [] { *static_cast<volatile char*>(shared_memory() + 99) = 1; }), "the last byte is there");
  expect(!survives(100, [] { *static_cast<volatile char*>(shared_memory() + 100) = 1; }), "a byte more is not");
  expect(!survives(128, [] { *static_cast<volatile char*>(shared_memory() + 128) = 1; }), "nor after whole lines");
  expect(!survives(128, [] { *static_cast<volatile char*>(shared_memory() - 1) = 1; }), "nor a byte before");
  expect(!survives(0, [] { *static_cast<volatile char*>(shared_memory()) = 1; }), "nor where there is none");

  const auto load_at = [](int offset) {
    return mistake_of(32, 512, [=] {
      uint32_t words[4];
      load_matrices(words, shared_memory() + (threadIdx.x == 9 ? offset : 0));
    });
  };
  expect_mistake(load_at(8),
                 "load_matrices of byte 8 of shared memory, which is not a multiple of 16 (model_test.cpp:");
  expect_mistake(load_at(512), "block 0, warp 0: load_matrices of byte 512 of 512 bytes");
  expect_mistake(load_at(-16), "load_matrices of byte -16 of 512 bytes");
  expect(load_at(496) == "no mistake", "the last row is there");
}

alignas(16) const float kSource[] = {1, 2, 3, 4, 5, 6, 7, 8};

void test_copies() {
  const float* source = kSource;
  run(32, 32 * 32, [=] {
    auto* own = reinterpret_cast<float*>(shared_memory()) + 8 * threadIdx.x;
    const auto has_not_arrived = [&](int i) { return std::isnan(own[i]) == model::kCopiesLater; };
    std::fill_n(own, 8, 0.0f);
    copy_16_bytes(own, source, true);
    commit_copies();
    copy_16_bytes(own + 4, source + 4, true);
    commit_copies();
    expect(has_not_arrived(0) && has_not_arrived(7), "a copy must not be there before the wait");
    wait_for_copies<2>();
    expect(has_not_arrived(0), "two groups may run");
    wait_for_copies<1>();
    expect(own[0] == 1 && own[3] == 4, "the first group must be there");
    expect(has_not_arrived(4), "the second may run");
    commit_copies();  // an empty group is one too
    wait_for_copies<1>();
    expect(own[4] == 5 && own[7] == 8, "the second group must be there");
    copy_16_bytes(own, nullptr, false);
    copy_16_bytes(own + 4, source + 4, false);
    wait_for_copies<0>();
    expect(own[0] == 1 || std::isnan(own[0]) || !model::kCopiesLater, "a copy of no group");
    commit_copies();
    wait_for_copies<0>();
    for (int i = 0; i < 8; ++i) expect(own[i] == 0, "zeros where nothing is readable");
  });
  const auto copy = [=](int to, int from, bool waits) {
    return mistake_of(32, 512, [=] {
      copy_16_bytes(shared_memory() + to, reinterpret_cast<const char*>(source) + from, true);
      commit_copies();
      if (waits) wait_for_copies<0>();
    });
  };
  expect(copy(0, 0, true) == "no mistake", "a copy without a mistake");
  expect_mistake(copy(4, 0, true), "block 0, thread 0: copy_16_bytes of byte 4 of shared memory");
  expect_mistake(copy(512, 0, true), "copy_16_bytes of byte 512 of 512 bytes");
  expect_mistake(copy(0, 4, true), "copy_16_bytes from an address that is not a multiple of 16");
  expect_mistake(copy(0, 0, false), model::kCopiesLater ? "ended before its copies have arrived" : "no mistake");
}

void test_divergence() {
  constexpr unsigned kAll = 0xffffffff;
  expect_mistake(mistake_of(64, 512,
                            [] {
                              uint32_t words[4];
                              Sums sums = {};
                              if (threadIdx.x < 40) {
                                load_matrices(words, shared_memory());
                              } else {
                                multiply_add<f16>(sums, {}, {});
                              }
                            }),
                 "block 0, warp 1: lanes 0-7 wait at load_matrices (model_test.cpp:");
  expect_mistake(mistake_of(32, 0, [] { threadIdx.x == 31 ? void() : __syncwarp(); }), "lane 31 has ended");
  expect_mistake(mistake_of(32, 0, [] { threadIdx.x == 3 ? __syncwarp() : void(); }),
                 "lanes 0-2 have ended, lane 3 waits at __syncwarp (model_test.cpp:");
  expect_mistake(mistake_of(32, 0,
                            [] {
                              if (threadIdx.x % 2) {
                                __shfl_xor_sync(kAll, 1, 1);
                              } else {
                                __shfl_xor_sync(kAll, 1, 1);
                              }
                            }),
                 "lane 0 waits at a shuffle");
  expect_mistake(mistake_of(32, 0, [] { __shfl_xor_sync(0xffffu, 1, 1); }),
                 "the mask of lanes must be 0xffffffff, got 65535");
  expect_mistake(mistake_of(96, 0, [] { threadIdx.x < 64 ? __syncthreads() : void(); }),
                 "block 0: warps 0-1 wait at __syncthreads (model_test.cpp:");
  expect_mistake(mistake_of(96, 0, [] { threadIdx.x < 32 ? __syncthreads() : void(__syncthreads_or(1)); }),
                 "warps 1-2 wait at __syncthreads_or");
  expect_mistake(mistake_of(64, 0, [] { threadIdx.x < 40 ? __syncthreads() : void(); }),
                 "warp 1: lanes 0-7 wait at __syncthreads");
}

// Results that differ between the orders; with the barrier that is missing they do not.
template <class Barrier>
bool has_race(int threads, int partner, Barrier barrier) {
  std::set<std::vector<float>> results;
  in_every_order([&] {
    std::vector<float> received(threads);
    run(threads, 4 * threads, [&] {
      auto* numbers = reinterpret_cast<float*>(shared_memory());
      numbers[threadIdx.x] = 0;
      __syncthreads();
      numbers[threadIdx.x] = threadIdx.x + 1.0f;
      barrier();
      received[threadIdx.x] = numbers[threadIdx.x ^ partner];
    });
    results.insert(received);
  });
  return results.size() > 1;
}

void test_races() {
  expect(has_race(64, 32, [] {}), "a race between warps");
  expect(has_race(64, 32, [] { __syncwarp(); }), "a race between warps that __syncwarp does not end");
  expect(!has_race(64, 32, [] { __syncthreads(); }), "no race between warps after a barrier");
  expect(has_race(32, 1, [] {}), "a race between lanes");
  expect(!has_race(32, 1, [] { __syncwarp(); }), "no race between lanes after __syncwarp");

  // What others have copied is there after a barrier alone.
  const auto copied_by_others = [](bool barrier) {
    bool all = true;
    in_every_order([&] {
      run(64, 64 * 16, [&] {
        copy_16_bytes(shared_memory() + 16 * threadIdx.x, kSource, true);
        commit_copies();
        wait_for_copies<0>();
        if (barrier) __syncthreads();
        all = all && *reinterpret_cast<float*>(shared_memory() + 16 * (threadIdx.x ^ 32)) == 1;
      });
    });
    return all;
  };
  expect(!copied_by_others(false), "a race between warps that copy");
  expect(copied_by_others(true), "no race between warps that copy after a barrier");

  std::vector<int> blocks;
  settings.order = Order::descending;
  std::mutex lock;
  const auto note = [&] {
    const std::lock_guard guard(lock);
    if (threadIdx.x == 0) blocks.push_back(blockIdx.x);
  };
  run(32, 0, note, 50);
  settings.order = Order::ascending;
  expect(blocks[0] > 40, "the last blocks must begin in descending order");
}

// Rows of 128 bytes: the same columns of 8 rows lie in the same banks, unless they are swizzled.
void test_bank_conflicts() {
  const auto conflicts_of = [](auto offset_of_lane) {
    counters = {};
    run(32, 32 * 144, [=] {
      uint32_t words[4];
      load_matrices(words, shared_memory() + offset_of_lane(int(threadIdx.x)));
    });
    expect(counters.loads == 1, "loads must be counted");
    return counters.load_conflicts;
  };
  expect(conflicts_of([](int lane) { return 128 * lane; }) == 4 * 7, "8 rows in the same banks");
  expect(conflicts_of([](int lane) { return 64 * lane; }) == 4 * 3, "8 rows in two places");
  expect(conflicts_of([](int lane) { return 128 * lane + 16 * (lane % 8); }) == 0, "swizzled rows");
  expect(conflicts_of([](int lane) { return 144 * lane; }) == 0, "rows with a gap");
  expect(conflicts_of([](int) { return 16; }) == 0, "the same row for all");
  expect(conflicts_of([](int lane) { return 128 * (lane % 2); }) == 4, "two rows in the same banks");

  const auto copy_conflicts_of = [](int stride, int lanes) {
    counters = {};
    run(64, 32 * 128, [=] {
      for (int round = 0; round < 2; ++round) {
        if (int(threadIdx.x) < lanes) copy_16_bytes(shared_memory() + stride * threadIdx.x, kSource, true);
      }
      commit_copies();
      wait_for_copies<0>();
    });
    return counters.copy_conflicts;
  };
  expect(copy_conflicts_of(16, 64) == 0 && counters.copies == 2 * 8, "copies of whole lines");
  expect(copy_conflicts_of(128, 32) == 2 * 4 * 7 && counters.copies == 2 * 4, "copies to the same banks");
  expect(copy_conflicts_of(128, 11) == 2 * (7 + 2) && counters.copies == 2 * 2, "copies of some lanes");
}

void test_capability() {
  const std::string product = mistake_of(32, 0, [] {
    Sums sums = {};
    multiply_add<bf16>(sums, {}, {});
  });
  expect_mistake(product, kHasTensorCores<bf16> ? "no mistake" : "this GPU has no tensor cores for the elements");
  const std::string word = mistake_of(32, 0, [] { pack<bf16>(1, 1); });
  expect_mistake(word, kHasTensorCores<bf16> ? "no mistake" : "this GPU has no tensor cores for the elements");
  expect(kHasTensorCores<f16> && kHasTensorCores<bf16> == (FASTATTN_MODEL_CAPABILITY >= 80), "kHasTensorCores");
}

__global__ void add(int64_t* sum, int64_t x, float y) { atomicAdd(sum, x + int64_t(y)); }

void test_launch() {
  int64_t sum = 0;
  const auto add_with = [&](int64_t blocks, int threads, int shared_bytes) {
    return launch(add, blocks, threads, shared_bytes, nullptr, &sum, 2, 3);
  };
  expect(add_with(0, 64, 0) == cudaSuccess && sum == 0, "no blocks");
  expect(add_with(5, 64, 16) == cudaSuccess && sum == 5 * 64 * 5, "five blocks");
  expect(add_with(1, 64, int(settings.shared_bytes) + 1) == cudaErrorInvalidValue, "too much shared memory");
  expect(add_with(1, 1056, 0) == cudaErrorInvalidConfiguration, "too many threads");
  expect(add_with(int64_t(1) << 31, 64, 0) == cudaErrorInvalidConfiguration, "too many blocks");
  expect(sum == 5 * 64 * 5, "what cannot be launched does not run");
  bool refused = false;
  try {
    add_with(1, 33, 0);
  } catch (const model::Mistake&) {
    refused = true;
  }
  expect(refused, "a part of a warp");
}

int test_all() {
  test_conversions<f16>("f16", DType::f16, 5, 65504);
  test_conversions<bf16>("bf16", DType::bf16, 8, 0x1.fep127);
  test_exp2();
  test_multiply_add<f16>("f16");
  if constexpr (kHasTensorCores<bf16>) test_multiply_add<bf16>("bf16");
  test_load(false);
  test_load(true);
  test_loads_and_products();
  test_shuffles();
  test_threads();
  test_shared_memory();
  test_copies();
  test_divergence();
  test_races();
  test_bank_conflicts();
  test_capability();
  test_launch();
  std::printf("the model of a GPU of capability %d.%d: %d wrong\n", model::kCapability / 10, model::kCapability % 10,
              wrong);
  return wrong > 0;
}

}  // namespace
}  // namespace fastattn::cuda

int main() {
  try {
    return fastattn::cuda::test_all();
  } catch (const fastattn::cuda::model::Mistake& mistake) {
    std::printf("a mistake where there is none: %s\n", mistake.what());
    return 1;
  }
}
