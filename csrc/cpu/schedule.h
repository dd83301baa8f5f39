// Cuts a call into items that threads take one after the other. How it is cut never changes a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "problem.h"

namespace fastattn {

// The strips of a head follow each other, so that its keys stay in the cache, the last one first: with a causal mask it
// sees the most keys, and the last items to be taken should be short. Strips are as long as leaves every thread several.
inline std::vector<ForwardItem> forward_items(const Problem& p, const Kernels& kernels, int64_t threads) {
  constexpr int64_t kItemsPerThread = 4;
  const int64_t block = kernels.block_queries, blocks = (p.n_q + block - 1) / block;
  const int64_t fair = p.B * p.H * blocks / (kItemsPerThread * threads);
  const int64_t strip = block * std::clamp<int64_t>(fair, 1, kernels.strip_queries / block);
  std::vector<ForwardItem> items;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) {
      for (int64_t first = (blocks * block - 1) / strip * strip; first >= 0; first -= strip) {
        items.push_back({b, h, first, std::min(first + strip, p.n_q)});
      }
    }
  }
  return items;
}

// One item for all heads that share keys and values computes S and dP once for all gradients: 5 products. Where that
// leaves threads without work, dq has its own items, and dk with dv too, which can be smaller: 7 products.
inline std::vector<BackwardItem> backward_items(const Problem& p, const Kernels& kernels, bool wants_dq, bool wants_dkv,
                                                int64_t threads) {
  const int64_t heads = p.B * p.H_kv, rounds = (heads + threads - 1) / threads;
  const bool joint = wants_dq && wants_dkv && 5 * rounds * threads <= 7 * heads;
  const int64_t queries = 4 * kernels.block_queries, keys = 4 * kernels.block_keys;  // of a smaller item

  std::vector<BackwardItem> items;
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t all_keys = p.keys[b].count;
    for (int64_t h_kv = 0; h_kv < p.H_kv; ++h_kv) {
      const int64_t first_head = h_kv * p.group(), last_head = first_head + p.group();
      if (joint) {
        items.push_back({b, h_kv, first_head, last_head, 0, p.n_q, 0, all_keys, true, true});
        continue;
      }
      for (int64_t key = 0; wants_dkv && key < std::max<int64_t>(all_keys, 1); key += keys) {
        const int64_t last_key = std::min(key + keys, all_keys);
        items.push_back({b, h_kv, first_head, last_head, 0, p.n_q, key, last_key, false, true});
      }
      for (int64_t h = first_head; wants_dq && h < last_head; ++h) {
        for (int64_t query = 0; query < p.n_q; query += queries) {
          items.push_back({b, h_kv, h, h + 1, query, std::min(query + queries, p.n_q), 0, all_keys, true, false});
        }
      }
    }
  }
  const auto keys_of = [](const BackwardItem& item) { return item.last_key - item.first_key; };
  std::stable_sort(items.begin(), items.end(),
                   [&](const BackwardItem& a, const BackwardItem& b) { return keys_of(a) > keys_of(b); });
  return items;
}

}  // namespace fastattn
