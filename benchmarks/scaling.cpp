// How the work list of a call spreads over more threads than this machine has: simulated, not measured. Threads take
// the items in turn, as csrc/cpu/threads.h has them do, and an item takes as long as its multiplications. Printed is
// the time of the last thread over that of an equal share of the useful work: 1 is ideal.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <queue>
#include <random>
#include <vector>

#include "../csrc/cpu/dispatch.h"
#include "../csrc/cpu/schedule.h"

namespace fastattn {
namespace {

constexpr int64_t kThreads[] = {4, 8, 16, 32, 64, 128};

struct Shape {
  const char* name;
  bool backward;
  int64_t B, H, n_q, n_k, D;
  bool causal, padded;
};

constexpr Shape kShapes[] = {
    {"forward   B8 H12 L128", false, 8, 12, 128, 128, 64, false, false},
    {"forward   B4 H12 L512 padded", false, 4, 12, 512, 512, 64, false, true},
    {"forward   B1 H16 L2048 causal", false, 1, 16, 2048, 2048, 64, true, false},
    {"forward   B1 H8 L4096 D128", false, 1, 8, 4096, 4096, 128, false, false},
    {"forward   B1 H32 n_q 1 n_k 4096", false, 1, 32, 1, 4096, 128, false, false},
    {"backward  B8 H12 L128", true, 8, 12, 128, 128, 64, false, false},
    {"backward  B4 H12 L512 padded", true, 4, 12, 512, 512, 64, false, true},
    {"backward  B1 H16 L2048 causal", true, 1, 16, 2048, 2048, 64, true, false},
    {"backward  B1 H8 L4096 D128", true, 1, 8, 4096, 4096, 128, false, false},
    {"backward  B1 H4 L2048", true, 1, 4, 2048, 2048, 64, false, false},
};

// The visible pairs of the queries and of the keys at these places of the lists.
int64_t visible_pairs(const Params& p, int64_t b, int64_t first_query, int64_t last_query, int64_t first_key,
                      int64_t last_key) {
  int64_t pairs = 0;
  for (int64_t i = first_query; i < std::min(last_query, p.queries[b].count); ++i) {
    const KeyRange seen = p.visible(b, 0, p.queries[b].at(i));
    const int64_t begin = greater(first_key, p.keys[b].lower_bound(seen.begin));
    pairs += greater(0, lesser(last_key, p.keys[b].lower_bound(seen.end)) - begin);
  }
  return pairs;
}

// Multiplications of every item: S and O.
std::vector<int64_t> forward_work(const Params& p, const Kernels& kernels, int64_t threads) {
  std::vector<int64_t> work;
  if (decodes(p)) {
    for (const DecodeItem& item : decode_items(p)) {
      const int64_t pairs = visible_pairs(p, item.b, 0, p.n_q, item.first_key, item.last_key);
      work.push_back(p.group() * pairs * (p.d_qk + p.d_v));
    }
    return work;
  }
  for (const ForwardItem& item : forward_items(p, kernels, threads)) {
    const int64_t n_keys = p.keys[item.b].count;
    work.push_back(visible_pairs(p, item.b, item.first_query, item.last_query, 0, n_keys) * (p.d_qk + p.d_v));
  }
  return work;
}

// S and dP for every item, dQ, and dK and dV, where it wants them.
std::vector<int64_t> backward_work(const Params& p, const Kernels& kernels, int64_t threads) {
  std::vector<int64_t> work;
  char somewhere;
  BackwardTensors t{};
  t.dq.data = t.dk.data = t.dv.data = &somewhere;
  const std::vector<Step> steps = backward_steps(p, kernels, t, threads);
  for (const BackwardItem& item : steps.front()) {
    const IndexList& queries = p.queries[item.b];
    const int64_t pairs = visible_pairs(p, item.b, queries.lower_bound(item.first_query),
                                        queries.lower_bound(item.last_query), item.first_key, item.last_key);
    const int64_t per_pair = p.d_qk + p.d_v + item.wanted.dq * p.d_qk + item.wanted.dkv * (p.d_qk + p.d_v);
    work.push_back((item.last_head - item.first_head) * pairs * per_pair);
  }
  return work;
}

// When the last thread is done: whoever is free first takes the next item.
int64_t makespan(const std::vector<int64_t>& work, int64_t threads) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at;
  for (int64_t i = 0; i < threads; ++i) free_at.push(0);
  int64_t last = 0;
  for (const int64_t item : work) {
    const int64_t end = free_at.top() + item;
    free_at.pop();
    free_at.push(end);
    last = std::max(last, end);
  }
  return last;
}

void print_row(const Shape& shape, const Kernels& kernels) {
  std::mt19937 random(0);
  std::vector<IndexList> queries, keys;
  for (int64_t b = 0; b < shape.B; ++b) {  // as in fastattn/testing.py: lengths in [L/4, L], one sample is full
    const bool full = !shape.padded || b == shape.B - 1;
    const int64_t shortest = (shape.n_k + 3) / 4;
    const int64_t length = full ? shape.n_k : shortest + int64_t(random() % (shape.n_k - shortest + 1));
    queries.push_back({nullptr, 0, shape.n_q});
    keys.push_back({nullptr, 0, length});
  }
  const std::vector<int64_t> q_offset(shape.B);
  Params p{};
  p.B = shape.B, p.H = p.H_kv = shape.H, p.n_q = shape.n_q, p.n_k = shape.n_k, p.d_qk = p.d_v = shape.D;
  p.band = make_band(shape.causal, kNoLimit, kNoLimit);
  p.q_offset = q_offset.data(), p.queries = queries.data(), p.keys = keys.data();

  int64_t useful = 0;
  for (int64_t b = 0; b < p.B; ++b) useful += p.H * visible_pairs(p, b, 0, p.n_q, 0, p.n_k);
  useful *= (shape.backward ? 5 : 2) * shape.D;

  std::printf("%-34s", shape.name);
  for (const int64_t threads : kThreads) {
    const auto work = (shape.backward ? backward_work : forward_work)(p, kernels, threads);
    std::printf("%8.2f", double(makespan(work, threads)) * threads / useful);
  }
  std::printf("\n");
}

}  // namespace
}  // namespace fastattn

int main() {
  using namespace fastattn;
  const Kernels& kernels = choose_capability().kernels_for(DType::f32);
  std::printf("%-34s", kernels.name);
  for (const int64_t threads : kThreads) std::printf("%8ld", long(threads));
  std::printf("  threads\n");
  for (const Shape& shape : kShapes) print_row(shape, kernels);
}
