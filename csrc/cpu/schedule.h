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

// Few queries are decoded: their keys are split, always at the same places, which leaves every thread some.
inline bool decodes(const Problem& p) {
  return p.n_q * p.group() <= kDecodeRows && !p.dropout.drops && !p.bias.data && !p.alibi_slopes && !p.ranges.gaps;
}

inline int64_t decode_parts_of_head(const Problem& p) {
  constexpr int64_t kKeysOfPart = 512;
  return std::max<int64_t>((p.n_k + kKeysOfPart - 1) / kKeysOfPart, 1);
}

inline std::vector<DecodeItem> decode_items(const Problem& p) {
  const int64_t n_parts = decode_parts_of_head(p);
  std::vector<DecodeItem> items;
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t keys = p.keys[b].count;
    for (int64_t h_kv = 0; h_kv < p.H_kv; ++h_kv) {
      for (int64_t part = 0; part < n_parts; ++part) {
        items.push_back({b, h_kv, part, n_parts, part * keys / n_parts, (part + 1) * keys / n_parts});
      }
    }
  }
  return items;
}

// One item for all heads that share keys and values computes S and dP once for all gradients: 5 products. Where that
// leaves threads without work, dq has its own items, and dk with dv too, which can be smaller: 7 products. Gradients of
// what is added to scores come with dq, or in its place. The items are those of samples first_b, ..., last_b - 1.
inline std::vector<BackwardItem> backward_items(const Problem& p, const Kernels& kernels, int64_t first_b,
                                                int64_t last_b, bool wants_dq, bool wants_dkv, bool wants_d_added,
                                                int64_t threads) {
  const int64_t heads = (last_b - first_b) * p.H_kv, rounds = (heads + threads - 1) / threads;
  const bool by_query = wants_dq || wants_d_added;
  const bool joint = by_query && wants_dkv && 5 * rounds * threads <= 7 * heads;
  const int64_t queries = 4 * kernels.block_queries, keys = 4 * kernels.block_keys;  // of a smaller item

  std::vector<BackwardItem> items;
  for (int64_t b = first_b; b < last_b; ++b) {
    const int64_t all_keys = p.keys[b].count;
    for (int64_t h_kv = 0; h_kv < p.H_kv; ++h_kv) {
      const int64_t first_head = h_kv * p.group(), last_head = first_head + p.group();
      if (joint) {
        items.push_back({b, h_kv, first_head, last_head, 0, p.n_q, 0, all_keys, wants_dq, true, wants_d_added});
        continue;
      }
      for (int64_t key = 0; wants_dkv && key < std::max<int64_t>(all_keys, 1); key += keys) {
        const int64_t last_key = std::min(key + keys, all_keys);
        items.push_back({b, h_kv, first_head, last_head, 0, p.n_q, key, last_key, false, true, false});
      }
      for (int64_t h = first_head; by_query && h < last_head; ++h) {
        for (int64_t query = 0; query < p.n_q; query += queries) {
          const int64_t last_query = std::min(query + queries, p.n_q);
          items.push_back({b, h_kv, h, h + 1, query, last_query, 0, all_keys, wants_dq, false, wants_d_added});
        }
      }
    }
  }
  const auto keys_of = [](const BackwardItem& item) { return item.last_key - item.first_key; };
  std::stable_sort(items.begin(), items.end(),
                   [&](const BackwardItem& a, const BackwardItem& b) { return keys_of(a) > keys_of(b); });
  return items;
}

// A block of queries of every head, or of all heads together; the last ones first, as in forward_items.
inline std::vector<WeightsItem> weights_items(const Problem& p, const Kernels& kernels, bool heads_together) {
  const int64_t block = kernels.block_queries, heads = heads_together ? p.H : 1;
  std::vector<WeightsItem> items;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; h += heads) {
      for (int64_t first = (p.n_q - 1) / block * block; first >= 0; first -= block) {
        items.push_back({b, h, h + heads, h / heads, first, std::min(first + block, p.n_q), 0});
      }
    }
  }
  return items;
}

// All queries of a head, and a chunk of its keys.
inline std::vector<WeightsItem> received_items(const Problem& p, const Kernels& kernels) {
  std::vector<WeightsItem> items;
  for (int64_t b = 0; b < p.B; ++b) {
    for (int64_t h = 0; h < p.H; ++h) {
      int64_t first = 0;
      do {
        items.push_back({b, h, h + 1, h, 0, p.n_q, first});
        first += kernels.weights->chunk_keys;
      } while (first < p.keys[b].count);
    }
  }
  return items;
}

}  // namespace fastattn
