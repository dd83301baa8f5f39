// Rules of instructions for sm_90: PTX ISA 9.7.13.15 mbarrier, 9.7.9.27 bulk copies of tensors, 9.7.15 wgmma.
#pragma once

#include "arithmetic.h"
#include "matrix.h"

namespace ptx {

// What the async proxy has seen: of what warps wrote, only what was fenced for it (PTX ISA 8.7 and 9.7.13.4
// fence.proxy).
template <class Do>
void by_async_proxy(Warp& warp, Do access) {
  Clock visible = warp.seen;
  std::copy_n(warp.fenced.begin(), kProducts, visible.begin());
  try {
    access(visible);
  } catch (const Fault& x) {
    access(warp.seen);  // which says so where there is no order at all
    fault(x.what + "; there is an order, but no fence.proxy.async");
  }
}

// 9.7.13.4 fence.proxy.async
inline bool fence_for_async_proxy(Warp& warp, const Instruction&, Lanes) {
  warp.fenced = warp.seen;
  warp.tick();
  return true;
}

// Of one lane, which a fault names.
inline int only(Warp& warp, Lanes lanes) {
  if (__builtin_popcount(lanes) != 1) fault("begun by the lanes " + hex(lanes) + ", not by one");
  return warp.block.lane = __builtin_ctz(lanes);
}

inline MBarrier& barrier_at(Warp& warp, uint64_t at) {
  const auto found = warp.block.mbarriers.find(uint32_t(at));
  if (found == warp.block.mbarriers.end()) fault("there is no mbarrier at " + hex(at));
  warp.block.shared.may_read(warp.seen, at, 8);
  return found->second;
}

// Ends the phase where nothing is awaited any more: PTX ISA 9.7.13.15.5.
inline void may_complete(MBarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  if (!includes(barrier.clock, barrier.waits))
    fault("the phase may also end before all have passed a wait for the one before");
  barrier.phase++, barrier.pending = barrier.count, barrier.waits = {};
  barrier.passed_before = barrier.passed;
  barrier.passed = barrier.clock, barrier.passed_fenced = barrier.fenced;
  for (Warp* warp : std::exchange(barrier.waiting, {})) warp->waits = false;
}

// 9.7.13.15.9 mbarrier.init
inline bool init_barrier(Warp& warp, const Instruction& x, Lanes lanes) {
  const int lane = only(warp, lanes);
  const uint64_t at = Access(warp, x.operands[0], lanes, kShared, 8, 8).at[lane];
  const uint64_t count = warp.integer(x.operands[1], lane, lanes);
  if (count == 0 || count >= 1 << 20) fault("a count of " + std::to_string(count));
  warp.block.shared.writes(warp.seen, at, 8, warp.epoch());
  if (warp.block.loaders == kAgents) fault("more mbarriers than the clocks have room for");
  warp.block.mbarriers[uint32_t(at)] = {
      .count = uint32_t(count), .pending = int64_t(count), .loader = warp.block.loaders++};
  return true;
}

// 9.7.13.15.13 mbarrier.arrive; a: whether it expects bytes before.
inline bool arrive_at_barrier(Warp& warp, const Instruction& x, Lanes lanes) {
  each(warp, lanes, [&](int i) {
    MBarrier& barrier = barrier_at(warp, Access(warp, x.operands[0], Lanes(1) << i, kShared, 8, 8).at[i]);
    if (!includes(warp.seen, barrier.passed)) fault("may also arrive in the phase before");
    if (x.rule->a) barrier.bytes += int64_t(warp.integer(x.operands[1], i, lanes));
    if (--barrier.pending < 0) fault("more arrivals than the phase has");
    join(barrier.fenced, warp.fenced);
    warp.happens_before(barrier.clock);
    may_complete(barrier);
  });
  return true;
}

// 9.7.13.15.16 mbarrier.try_wait.parity: a warp that would have to try again sleeps until the phase ends.
inline bool wait_at_barrier(Warp& warp, const Instruction& x, Lanes lanes) {
  const Access access(warp, x.operands[1], lanes, kShared, 8, 8);
  const int first = __builtin_ctz(lanes);
  MBarrier& barrier = barrier_at(warp, access.at[first]);
  const uint32_t* parity = warp.read<uint32_t>(x.operands[2], lanes);
  each(warp, lanes, [&](int i) {
    if (access.at[i] != access.at[first] || parity[i] != parity[first]) fault("lanes wait for different phases");
  });
  if (parity[first] > 1) fault("a parity of " + std::to_string(parity[first]));
  const bool over = (barrier.phase & 1) != parity[first];
  if (!over && warp.block.random.below(4)) {
    barrier.waiting.push_back(&warp), warp.waits = true;
    return false;
  }
  if (over) {
    if (!includes(warp.seen, barrier.passed_before)) fault("the wait may also pass two phases before");
    join(warp.seen, barrier.passed), join(warp.fenced, barrier.passed_fenced);
    barrier.waits[warp.index] = warp.seen[warp.index];
  }
  bool done[kLanes];  // false where its time was over before
  std::fill_n(done, kLanes, over);
  warp.write(x.operands[0], lanes, done);
  return true;
}

// As launch.py packs it; dimension 0 is the innermost, whose stride is 1.
struct TensorMap {
  uint64_t base;
  uint32_t sizes[5], box[5];
  uint64_t strides[4];  // in bytes
  uint32_t rank, element, swizzle, type;
};
constexpr uint32_t kFloat32 = 7;  // CUtensorMapDataType

inline uint64_t swizzled(uint64_t at, uint32_t mode) {  // 0 to 3: none, 32, 64 or 128 bytes
  return at ^ ((at >> 7 & ((1u << mode) - 1)) << 4);
}

// 9.7.9.27.1 Bulk copy of a box of a tensor; 5.5 tensors. Chunks of 16 bytes, of which those outside are 0.
struct Box {
  const TensorMap& map;
  struct Chunk {
    uint64_t shared, global;
    int inside;  // bytes that belong to the tensor
  };
  std::vector<Chunk> chunks;

  static const TensorMap& map_at(Warp& warp, uint64_t at) {
    if (!(at & kParameterSpace) || at % 64 || (at ^ kParameterSpace) + 128 > warp.block.parameters.size())
      fault("no tensor map at " + hex(at));
    return *reinterpret_cast<const TensorMap*>(&warp.block.parameters[at ^ kParameterSpace]);
  }

  // `operands`: the map and the coordinates.
  Box(Warp& warp, const Operand* operands, uint32_t rank, uint64_t shared, int lane, Lanes lanes)
      : map(map_at(warp, warp.integer(operands[0], lane, lanes))) {
    if (map.rank != rank) fault("a tensor map of rank " + std::to_string(map.rank));
    if (shared % 128) fault("shared address " + hex(shared) + " is no multiple of 128");
    int64_t rows = 1, at[5];
    for (uint32_t d = 0; d < rank; d++) at[d] = int32_t(warp.integer(operands[1 + d], lane, lanes));
    for (uint32_t d = 1; d < rank; d++) rows *= map.box[d];
    const int64_t row_bytes = int64_t(map.box[0]) * map.element;
    for (int64_t row = 0; row < rows; row++) {
      bool inside = true;
      uint64_t from = map.base;
      int64_t rest = row;
      for (uint32_t d = 1; d < rank; d++) {
        const int64_t i = at[d] + rest % map.box[d];
        rest /= map.box[d];
        inside &= i >= 0 && i < map.sizes[d];
        from += uint64_t(i) * map.strides[d - 1];
      }
      for (int64_t byte = 0; byte < row_bytes; byte += 16) {
        const int64_t first = at[0] * map.element + byte, end = int64_t(map.sizes[0]) * map.element;
        if (first < 0 && first > -16) fault("a box that begins within 16 bytes before its tensor");
        const int n = inside && first >= 0 ? int(std::clamp<int64_t>(end - first, 0, 16)) : 0;
        chunks.push_back({swizzled(shared + uint64_t(row * row_bytes + byte), map.swizzle), from + uint64_t(first), n});
        warp.block.shared.check_bounds(chunks.back().shared, 16, 16);
        if (n) warp.block.global.check_bounds(chunks.back().global, n, 1);
      }
    }
    if (!warp.block.counting) return;
    Counts& counts = warp.block.counts();
    for (const Chunk& chunk : chunks) counts.shared_bytes += 16, counts.global_bytes += uint64_t(chunk.inside);
  }
};

// cp.async.bulk.tensor to shared memory: it lands when the phase of its barrier can end, which it is counted for.
inline bool load_tensor(Warp& warp, const Instruction& x, Lanes lanes) {
  Block& block = warp.block;
  const int lane = only(warp, lanes);
  const uint64_t to = warp.address(x.operands[0], lane, lanes);
  const uint64_t barrier = Access(warp, x.operands.back(), lanes, kShared, 8, 8).at[lane];
  const Box box(warp, &x.operands[1], x.rule->a, to, lane, lanes);
  const MBarrier& told = barrier_at(warp, barrier);
  if (!includes(warp.seen, told.passed)) fault("may also be begun in the phase before of its mbarrier");
  Transfer transfer{barrier, told.phase, {}};
  by_async_proxy(warp, [&](const Clock& visible) { block.shared.may_read(visible, barrier, 8); });
  for (const Box::Chunk& chunk : box.chunks) {
    Transfer::Piece piece{chunk.shared, {}};
    if (chunk.inside) read_global(warp, chunk.global, chunk.inside, piece.data);
    // Of what warps only read there, an order without a fence will do, as in CUTLASS's pipelines.
    by_async_proxy(warp, [&](const Clock& visible) {
      block.shared.writes(visible, chunk.shared, 16, kUnderWay, nullptr, &warp.seen);
    });
    transfer.pieces.push_back(piece);
  }
  block.transfers.push_back(std::move(transfer));
  return true;
}

inline void Block::land(Transfer transfer) {
  const uint32_t clock = ++loads;
  MBarrier& barrier = mbarriers.at(uint32_t(transfer.barrier));
  for (const Transfer::Piece& x : transfer.pieces) shared.lands(x.at, 16, x.data, epoch(barrier.loader, clock));
  if (barrier.phase != transfer.phase) fault("a load by TMA lands after the phase in which it began");
  barrier.bytes -= int64_t(16 * transfer.pieces.size());
  barrier.clock[barrier.loader] = clock;
  may_complete(barrier);
}

// cp.async.bulk.tensor and cp.reduce.async.bulk.tensor to global memory. a: the rank, b: whether it adds.
inline bool store_tensor(Warp& warp, const Instruction& x, Lanes lanes) {
  Block& block = warp.block;
  const int lane = only(warp, lanes);
  const Box box(warp, &x.operands[0], x.rule->a, warp.address(x.operands.back(), lane, lanes), lane, lanes);
  if (x.rule->b && box.map.type != kFloat32) fault("adds what is no fp32");
  const Epoch as = epoch(kBulk + warp.index, warp.bulk_clock());
  for (const Box::Chunk& chunk : box.chunks) {
    by_async_proxy(warp, [&](const Clock& visible) { block.shared.reads(visible, chunk.shared, 16, as); });
    if (!chunk.inside) continue;
    block.global.writes(block.number(), warp.epoch(), warp.seen, chunk.global, chunk.inside, x.rule->b);
    const uint8_t* from = block.shared.data(chunk.shared);
    if (!x.rule->b) std::memcpy(reinterpret_cast<void*>(chunk.global), from, chunk.inside);
    for (int i = 0; x.rule->b && i < chunk.inside / 4; i++) {
      reinterpret_cast<float*>(chunk.global)[i] += reinterpret_cast<const float*>(from)[i];
    }
  }
  return true;
}
// 9.7.9.25.4 cp.async.bulk.commit_group and wait_group, of which .read waits for the reads alone.
inline bool commit_bulk(Warp& warp, const Instruction&, Lanes) { return warp.bulk_groups++, true; }
inline bool wait_for_bulk(Warp& warp, const Instruction& x, Lanes) {
  const uint32_t others = uint32_t(x.operands[0].value), start = warp.block.shared.start();
  uint32_t& seen = warp.seen[kBulk + warp.index];
  seen = std::max(seen, start + warp.bulk_groups - std::min(others, warp.bulk_groups));
  return true;
}

// 9.7.15.5.1.2 A matrix in shared memory, by its descriptor: rows of M or N, and 32 bytes of K. Here `k` counts pairs
// of bytes, which are columns of 16 bits. `mn_major`: M or N lies contiguous, else K. CUTLASS's
// include/cute/arch/mma_sm90_desc.hpp draws these layouts.
struct Descriptor {
  uint64_t start, leading, stride;
  uint32_t swizzle;

  explicit Descriptor(uint64_t x)
      : start((x & 0x3fff) << 4),
        leading((x >> 16 & 0x3fff) << 4),
        stride((x >> 32 & 0x3fff) << 4),
        swizzle((4 - (x >> 62)) % 4) {
    if (x >> 49 & 7) fault("a base offset");
    if (x & 0x3ffc0000c000c000) fault("bits of a descriptor that mean nothing: " + hex(x));
  }
  // Address of the 16 bytes from there on, which lie side by side: along K, or along M or N.
  uint64_t at(uint32_t mn, uint32_t k, bool mn_major) const {
    const uint32_t span = 16u << swizzle;  // bytes of a row of the swizzle
    uint64_t at = start;
    if (!mn_major) {
      at += mn / 8 * stride + mn % 8 * span + (swizzle ? k * 2 : k / 8 * leading);
    } else if (swizzle) {
      at += mn * 2 / span * leading + k / 8 * stride + k % 8 * span + mn * 2 % span;
    } else {
      at += mn / 8 * stride + k / 8 * leading + k % 8 * 16;
    }
    return swizzled(at, swizzle);
  }
};

// 9.7.15.5.2 wgmma.mma_async: 64 rows of A, 16 of them of each warp, times N columns of B. a: N, b: the Element, c:
// whether A is in registers. TF32 is never transposed. Until it is waited for, its registers may not be touched, nor
// its shared memory be written.
inline bool multiply_async(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  Block& block = warp.block;
  const int N = x.rule->a;
  const Element element = Element(x.rule->b);
  const Operand *sums = x.operands.data(), *rest = sums + N / 2;
  const Operand* of_a = rest;
  rest += x.rule->c ? 4 : 1;
  const auto same = [&](const Operand& y) {
    const uint64_t value = warp.integer(y, 0, lanes);
    for (int i = 0; i < kLanes; i++) {
      if (warp.value(y, i) != value) fault("lanes disagree about a descriptor");
    }
    return value;
  };
  const Lanes adds = *reinterpret_cast<const Lanes*>(warp.read<bool>(rest[1], lanes));
  if (adds != 0 && adds != kAllLanes) fault("lanes disagree whether to add");
  if (rest[2].value != 1 || rest[3].value != 1) fault("negated operands are not modelled");
  const bool is_tf32 = element == kTF32;
  const int K = is_tf32 ? 8 : 16;
  const bool a_transposed = !is_tf32 && !x.rule->c && rest[4].value;
  const bool b_transposed = !is_tf32 && rest[x.rule->c ? 4 : 5].value;

  const uint32_t clock = warp.product_clock();
  const uint32_t bytes = is_tf32 ? 4 : 2;  // of an element
  const auto fetch = [&](const Descriptor& d, uint32_t first, uint32_t rows, bool transposed, auto put) {
    by_async_proxy(warp, [&](const Clock& visible) {
      for (uint32_t mn = 0; mn < rows; mn += transposed ? 8 : 1) {
        for (uint32_t k = 0; k < 16; k += transposed ? 1 : 8) {
          const uint64_t at = d.at(first + mn, k, transposed);
          block.shared.check_bounds(at, 16, 16);
          block.shared.reads(visible, at, 16, epoch(kProducts + warp.index, clock));
          const uint8_t* data = block.shared.data(at);
          for (uint32_t e = 0; e < 16 / bytes; e++) {
            uint32_t bits = 0;
            std::memcpy(&bits, data + bytes * e, bytes);
            put(transposed ? mn + e : mn, transposed ? k : k * 2 / bytes + e, value_of(element, bits));
          }
        }
      }
    });
  };
  float a[16][16], b[16][256];
  const auto lend = [&](const Operand& y, bool as_source) {
    Register& r = warp.at(y.at);
    if (r.in_flight && r.source != as_source) fault("uses a register that another product computes or reads");
    // LLVM moves what computes fragments of A behind the fence, and ptxas sees that they are ready all the same.
    if (!as_source && !r.in_flight && r.stamp >= warp.product_fences)
      fault("uses a register that was written since the last wgmma.fence");
    r.in_flight = clock, r.source = as_source;
    warp.lent.emplace_back(clock, y.at);
  };
  if (x.rule->c) {
    for (int r = 0; r < 4; r++) {
      Register& from = warp.at(of_a[r].at);
      if (from.written != kAllLanes) warp.fault_of_register(of_a[r].at, from, ~from.written);
      lend(of_a[r], true);
      for (int i = 0; is_tf32 && i < kLanes; i++)
        a[i / 4 + 8 * (r % 2)][i % 4 + 4 * (r / 2)] = value_of(element, from.lanes<uint32_t>()[i]);
      for (int i = 0; !is_tf32 && i < 2 * kLanes; i++)
        a[i / 8 + 8 * (r % 2)][2 * (i / 2 % 4) + 8 * (r / 2) + i % 2] = value_of(element, from.lanes<uint16_t>()[i]);
    }
  } else {
    fetch(Descriptor(same(of_a[0])), 16 * (warp.index % 4), 16, a_transposed,
          [&](uint32_t m, uint32_t k, float v) { a[m][k] = v; });
  }
  fetch(Descriptor(same(rest[0])), 0, N, b_transposed, [&](uint32_t n, uint32_t k, float v) { b[k][n] = v; });

  float c[16][256]{};
  for (int r = 0; r < N / 2; r++) {
    Register& sum = warp.at(sums[r].at);
    if (adds && sum.written != kAllLanes) warp.fault_of_register(sums[r].at, sum, ~sum.written);
    lend(sums[r], false);
    for (int i = 0; adds && i < kLanes; i++)
      c[i / 4 + 8 * (r / 2 % 2)][8 * (r / 4) + 2 * (i % 4) + r % 2] = sum.lanes<float>()[i];
  }
  const Adder adder(block.program.arch, element);
  for (int i = 0; i < 16; i++) add_products(a[i], b, c[i], N, K, adder);
  for (int r = 0; r < N / 2; r++) {
    Register& sum = warp.at(sums[r].at);
    sum.written = kAllLanes;
    for (int i = 0; i < kLanes; i++)
      sum.lanes<float>()[i] = c[i / 4 + 8 * (r / 2 % 2)][8 * (r / 4) + 2 * (i % 4) + r % 2];
  }
  return true;
}
// 9.7.15.7.1 wgmma.fence: registers that were written before may be used by products after it.
inline bool fence_products(Warp& warp, const Instruction&, Lanes lanes) {
  warp.wants_whole(lanes);
  return warp.product_fences++, true;
}
// 9.7.15.7.2 wgmma.commit_group and 9.7.15.7.3 wgmma.wait_group
inline bool commit_products(Warp& warp, const Instruction&, Lanes lanes) {
  warp.wants_whole(lanes);
  return warp.product_groups++, true;
}
inline bool wait_for_products(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  const uint32_t others = uint32_t(x.operands[0].value);
  const uint32_t done = warp.block.shared.start() + warp.product_groups - std::min(others, warp.product_groups);
  uint32_t& seen = warp.seen[kProducts + warp.index];
  seen = std::max(seen, done);
  for (; !warp.lent.empty() && warp.lent.front().first <= done; warp.lent.pop_front()) {
    Register& r = warp.at(warp.lent.front().second);
    if (r.in_flight <= done) r.in_flight = 0;
  }
  return true;
}

// 9.7.13.14 elect.sync: any lane may be elected, always the same.
inline bool elect(Warp& warp, const Instruction& x, Lanes lanes) {
  wants_members(warp, x.operands[2], lanes);
  uint32_t leader[kLanes];
  bool leads[kLanes]{};
  std::fill_n(leader, kLanes, warp.leader), leads[warp.leader] = true;
  warp.write(x.operands[0], lanes, leader), warp.write(x.operands[1], lanes, leads);
  return true;
}

// 9.7.20.5 setmaxnreg: .inc waits until the block has as many registers to spare. a: whether it is .inc.
inline bool set_registers(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  Block& block = warp.block;
  const int wanted = int(x.operands[0].value), more = wanted - warp.register_limit;
  if (wanted < 24 || wanted > 256 || wanted % 8) fault("a limit of " + std::to_string(wanted) + " registers");
  if (x.rule->a ? more < 0 : more > 0) fault("the warp has " + std::to_string(warp.register_limit) + " registers");
  if (more > block.spare_registers) {
    block.want_registers.push_back(&warp), warp.waits = true;
    return false;
  }
  block.spare_registers -= more, warp.register_limit = wanted;
  for (Warp* other : std::exchange(block.want_registers, {})) other->waits = false;
  return true;
}

inline void add_hopper(Rules& rules) {
  rules["fence.proxy.async.shared::cta"] = {"", fence_for_async_proxy};
  for (const std::string space : {"shared", "shared::cta"}) {
    rules["mbarrier.init." + space + ".b64"] = {"a s32", init_barrier};
    rules["mbarrier.arrive." + space + ".b64"] = {"_ a", arrive_at_barrier, 0};
    rules["mbarrier.arrive.expect_tx." + space + ".b64"] = {"_ a s32", arrive_at_barrier, 1};
    rules["mbarrier.try_wait.parity." + space + ".b64"] = {"d1 a s32", wait_at_barrier};
  }
  for (const int rank : {1, 2, 3, 4, 5}) {
    const std::string d = "." + std::to_string(rank) + "d.", map = std::to_string(rank) + "m";
    for (const std::string space : {"shared::cta", "shared::cluster"})  // of one block
      rules["cp.async.bulk.tensor" + d + space + ".global.mbarrier::complete_tx::bytes"] = {"a " + map + " a",
                                                                                            load_tensor, rank};
    rules["cp.async.bulk.tensor" + d + "global.shared::cta.bulk_group"] = {map + " a", store_tensor, rank, 0};
    rules["cp.reduce.async.bulk.tensor" + d + "global.shared::cta.add.bulk_group"] = {map + " a", store_tensor, rank,
                                                                                      1};
  }
  rules["cp.async.bulk.commit_group"] = {"", commit_bulk};
  rules["cp.async.bulk.wait_group.read"] = rules["cp.async.bulk.wait_group"] = {"i", wait_for_bulk};
  for (int n = 8; n <= 256; n += 8) {
    for (const auto& [types, element] :
         {std::pair{"k16.f32.f16.f16", kF16}, {"k16.f32.bf16.bf16", kBF16}, {"k8.f32.tf32.tf32", kTF32}}) {
      const std::string name = "wgmma.mma_async.sync.aligned.m64n" + std::to_string(n) + types;
      const std::string d = std::to_string(n / 2) + "d32 ", end = element == kTF32 ? "" : " i";  // which is transposed
      rules[name] = {d + "s64 s64 s1 i i" + end + end, multiply_async, n, element, 0};
      rules[name + " of registers"] = {d + "4s32 s64 s1 i i" + end, multiply_async, n, element, 1};
    }
  }
  rules["wgmma.fence.sync.aligned"] = {"", fence_products};
  rules["wgmma.commit_group.sync.aligned"] = {"", commit_products};
  rules["wgmma.wait_group.sync.aligned"] = {"i", wait_for_products};
  rules["elect.sync"] = {"d32|d1 s32", elect};
  rules["setmaxnreg.inc.sync.aligned.u32"] = {"i", set_registers, 1};
  rules["setmaxnreg.dec.sync.aligned.u32"] = {"i", set_registers, 0};
}

}  // namespace ptx
