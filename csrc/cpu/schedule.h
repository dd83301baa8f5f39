// Cuts a call into items that threads take one after the other. How it is cut never changes a bit of the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "params.h"

namespace fastattn {

// The strips of a head follow each other, so that its keys stay in the cache, the last one first: with a causal mask it
// sees the most keys, and the last items to be taken should be short. Strips are long, but so that each thread gets
// several. Isolated runs share no keys: there the heads of a strip follow each other, whose rows may be parts of longer
// rows in memory.
inline std::vector<ForwardItem> forward_items(const Params& p, const Kernels& kernels, int64_t threads) {
  constexpr int64_t kItemsPerThread = 4;
  const int64_t block = kernels.block_queries, blocks = (p.n_q + block - 1) / block;
  const int64_t fair = p.B * p.H * blocks / (kItemsPerThread * threads);
  const int64_t strip = block * std::clamp<int64_t>(fair, 1, p.isolated_runs ? 1 : kernels.strip_queries / block);
  const int64_t strips = (p.n_q + strip - 1) / strip;
  std::vector<ForwardItem> items;
  const auto add = [&](int64_t b, int64_t h, int64_t i) {
    items.push_back({b, h, i * strip, std::min((i + 1) * strip, p.n_q)});
  };
  for (int64_t b = 0; b < p.B; ++b) {
    if (p.isolated_runs) {
      for (int64_t i = strips - 1; i >= 0; --i) {
        for (int64_t h = 0; h < p.H; ++h) add(b, h, i);
      }
    } else {
      for (int64_t h = 0; h < p.H; ++h) {
        for (int64_t i = strips - 1; i >= 0; --i) add(b, h, i);
      }
    }
  }
  return items;
}

// Whether the kernels of decode.h take the call: with few queries each thread gets some of the keys, which are always
// split at the same places.
inline bool decodes(const Params& p) {
  constexpr int64_t kFewQueries = 4, kFewRows = 8;  // more are faster as lanes, where keys are few
  const int64_t rows = p.n_q * p.group();
  return !p.dropout.drops && rows <= (p.n_q <= kFewQueries ? kDecodeRows : kFewRows);
}

// The parts of a head follow each other; on pages the heads of a part do, whose rows are nearer there. Their number is
// that of the keys of its own sample, so that the bits of a sample do not depend on others.
inline std::vector<DecodeItem> decode_items(const Params& p) {
  constexpr int64_t kKeysOfPart = 512;
  constexpr int64_t kWhole = 64;  // all parts but the last are whole vectors of keys, which are read where they lie
  std::vector<DecodeItem> items;
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t keys = p.keys[b].count, n_parts = std::max<int64_t>((keys + kKeysOfPart - 1) / kKeysOfPart, 1);
    const auto begin = [&](int64_t part) { return part == n_parts ? keys : part * keys / n_parts / kWhole * kWhole; };
    const auto first_of_sample = int64_t(items.size());
    const int64_t items_of_sample = p.H_kv * n_parts;
    for (int64_t i = 0; i < items_of_sample; ++i) {
      const int64_t h_kv = p.k.table ? i % p.H_kv : i / n_parts, part = p.k.table ? i / p.H_kv : i % n_parts;
      items.push_back({b, h_kv, first_of_sample + h_kv * n_parts, part, n_parts, begin(part), begin(part + 1)});
    }
  }
  return items;
}

// Isolated runs of a sample that follow each other, and the part of the key list that no others see.
struct Piece {
  int64_t first_query, last_query;
  int64_t first_key, last_key;

  int64_t work() const { return (last_query - first_query) * (last_key - first_key); }
};

// Cuts a sample into pieces of about `queries` queries or more, and of at least one key.
inline std::vector<Piece> pieces_of(const Params& p, int64_t b, int64_t queries) {
  const IndexList &list = p.queries[b], &keys = p.keys[b];
  std::vector<Piece> pieces{{0, p.n_q, 0, keys.count}};
  const IsolatedRunList isolated_runs = p.isolated_runs ? p.isolated_runs[b] : IsolatedRunList{nullptr, 0};
  for (int64_t i = 1; i < isolated_runs.count; ++i) {
    const IsolatedRun& isolated_run = isolated_runs.data[i];
    const int64_t first_query = list.at(isolated_run.first), first_key = keys.lower_bound(isolated_run.keys.begin);
    const bool large = first_query - pieces.back().first_query >= queries && first_key > pieces.back().first_key;
    if (isolated_run.keys.empty() || !large) continue;
    pieces.back().last_query = first_query, pieces.back().last_key = first_key;
    pieces.push_back({first_query, p.n_q, first_key, keys.count});
  }
  return pieces;
}

// Items that may be computed in any order and at the same time, since each owns what it writes.
using Step = std::vector<BackwardItem>;

// An item for all heads that share keys and values, and for whole isolated runs, computes S and dP once for all
// gradients: 5 products. Where that leaves threads without work, gradients with rows of queries and gradients with rows
// of keys have items of their own, which can be smaller: 7 products. Samples and heads that share entries of a bias add
// to its gradient in steps, one after the other, and all queries of a head to one by distance in one item.
inline std::vector<Step> backward_steps(const Params& p, const Kernels& kernels, const BackwardTensors& t,
                                        int64_t threads) {
  const Wanted wanted = Wanted::in(t);
  const bool whole = t.d_bias.data && t.d_bias.is_by_distance();
  const bool samples_share = t.d_bias.data && t.d_bias.batch_stride == 0;
  const int64_t heads = std::max<int64_t>(t.d_bias.data ? std::min(t.d_bias.heads, p.H) : p.H, 1);  // of a step
  const int64_t steps_of_samples = samples_share ? p.B : 1, steps_of_heads = (p.H + heads - 1) / heads;
  const bool groups_together = heads == p.H || p.group() == 1;
  const bool by_query = wanted.rows_of_queries(), by_key = wanted.rows_of_keys();
  std::vector<std::vector<Piece>> pieces;
  int64_t n_pieces = 0, work = 0, most_work = 0;
  for (int64_t b = 0; b < p.B; ++b) {
    pieces.push_back(whole ? std::vector<Piece>{{0, p.n_q, 0, p.keys[b].count}}
                           : pieces_of(p, b, kernels.block_queries));
    n_pieces += int64_t(pieces.back().size());
    for (const Piece& piece : pieces.back()) work += piece.work(), most_work = std::max(most_work, piece.work());
  }
  const int64_t groups = heads / p.group();  // of heads, in a step
  const int64_t joint_items = n_pieces / std::max<int64_t>(steps_of_samples, 1) * groups;
  const int64_t rounds = (joint_items + threads - 1) / threads;
  const bool joint = by_query && by_key && groups_together && 5 * rounds * threads <= 7 * joint_items &&
                     5 * most_work * threads * steps_of_samples <= 7 * work * groups;
  const int64_t queries = whole ? std::max<int64_t>(p.n_q, 1) : 4 * kernels.block_queries,
                keys = 4 * kernels.block_keys;  // of a smaller item

  std::vector<Step> steps(steps_of_samples * steps_of_heads);
  const auto step_of = [&](int64_t b, int64_t h) -> Step& {
    return steps[(samples_share ? b : 0) * steps_of_heads + h / heads];
  };
  for (int64_t b = 0; b < p.B; ++b) {
    const int64_t all_keys = p.keys[b].count;
    for (const Piece& piece : pieces[b]) {
      for (int64_t h = 0; joint && h < p.H; h += p.group()) {
        step_of(b, h).push_back({b, h / p.group(), h, h + p.group(), piece.first_query, piece.last_query,
                                 piece.first_key, piece.last_key, wanted});
      }
    }
    for (int64_t h_kv = 0; !joint && h_kv < p.H_kv; ++h_kv) {
      const int64_t first_head = h_kv * p.group(), last_head = first_head + p.group();
      for (const Piece& piece : pieces[b]) {
        const Wanted rows_of_keys{false, wanted.dkv, false, wanted.by_key};
        int64_t key = piece.first_key;
        do {
          const int64_t last_key = std::min(key + keys, piece.last_key);
          if (by_key) {
            step_of(b, first_head)
                .push_back(
                    {b, h_kv, first_head, last_head, piece.first_query, piece.last_query, key, last_key, rows_of_keys});
          }
          key += keys;
        } while (key < piece.last_key);
      }
      for (int64_t h = first_head; by_query && h < last_head; ++h) {
        for (int64_t query = 0; query < p.n_q; query += queries) {
          const int64_t last_query = std::min(query + queries, p.n_q);
          const Wanted rows_of_queries{wanted.dq, false, wanted.by_query, false};
          step_of(b, h).push_back({b, h_kv, h, h + 1, query, last_query, 0, all_keys, rows_of_queries});
        }
      }
    }
  }
  const auto keys_of = [](const BackwardItem& item) { return item.last_key - item.first_key; };
  for (Step& step : steps) {
    std::stable_sort(step.begin(), step.end(),
                     [&](const BackwardItem& a, const BackwardItem& b) { return keys_of(a) > keys_of(b); });
  }
  return steps;
}

// A block of queries of every head, or of all heads together; the last ones first, as in forward_items.
inline std::vector<WeightsItem> weights_items(const Params& p, const Kernels& kernels, bool heads_together) {
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
inline std::vector<WeightsItem> received_items(const Params& p, const Kernels& kernels) {
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
