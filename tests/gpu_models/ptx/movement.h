// Rules of instructions that move data or steer: PTX ISA 9.7.9 data movement, 9.7.12 control flow, 9.7.13
// synchronisation.
#pragma once

#include <cmath>
#include <set>

#include "machine.h"

namespace ptx {

enum Space { kGlobal, kShared, kParameters, kGeneric };
constexpr uint64_t kParameterSpace = 1ull << 60;  // of generic addresses, which are those of global memory otherwise

// Wavefronts that lanes need for so many bytes of shared memory each: 128 bytes at most at a time, and of each of the
// 32 banks one word of 4 bytes.
inline void count_shared(Counts& counts, const uint64_t* at, Lanes lanes, int bytes) {
  const int together = std::min(kLanes, 128 / std::max(bytes, 4));
  counts.shared_bytes += uint64_t(bytes) * __builtin_popcount(lanes);
  for (int first = 0; first < kLanes; first += together) {
    std::array<std::vector<uint64_t>, 32> words;
    size_t most = 0;
    for (int i = first; i < first + together; i++) {
      if (!(lanes >> i & 1)) continue;
      for (uint64_t word = at[i] / 4; word <= (at[i] + bytes - 1) / 4; word++) {
        auto& bank = words[word % 32];
        if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
        most = std::max(most, bank.size());
      }
    }
    counts.wavefronts += most, counts.fewest_wavefronts += most > 0;
  }
}

// Sectors of 32 bytes of global memory; what lanes read of the same address counts once among the fewest.
inline void count_global(Counts& counts, const uint64_t* at, Lanes lanes, int bytes) {
  std::set<uint64_t> sectors, addresses;
  for (int i = 0; i < kLanes; i++) {
    if (lanes >> i & 1) addresses.insert(at[i]), sectors.insert({at[i] / 32, (at[i] + bytes - 1) / 32});
  }
  counts.global_bytes += uint64_t(bytes) * __builtin_popcount(lanes);
  counts.sectors += sectors.size(), counts.fewest_sectors += (bytes * addresses.size() + 31) / 32;
}

template <class Each>
void each(Warp& warp, Lanes lanes, Each f) {
  for (int i = 0; i < kLanes; i++) {
    if (lanes >> i & 1) warp.block.lane = i, f(i);
  }
}

// Addresses of an access by these lanes, of `bytes` each, checked and counted.
struct Access {
  std::array<uint64_t, kLanes> at{};
  std::array<Space, kLanes> spaces{};  // which generic addresses differ in

  Access(Warp& warp, const Operand& address, Lanes lanes, Space space, int bytes, int alignment) {
    Block& block = warp.block;
    each(warp, lanes, [&](int i) {
      at[i] = warp.address(address, i, lanes), spaces[i] = space;
      if (space == kGeneric) {
        spaces[i] = at[i] & kParameterSpace ? kParameters : kGlobal;
        at[i] &= ~kParameterSpace;
      }
      if (space == kShared) block.shared.check_bounds(at[i], bytes, alignment);
      if (spaces[i] == kGlobal) block.global.check_bounds(at[i], bytes, alignment);
      if (spaces[i] != kParameters) return;
      if (at[i] + bytes > block.parameters.size() || at[i] + bytes < at[i]) fault("outside of the parameters");
      if (at[i] % alignment) fault("parameter " + hex(at[i]) + " is no multiple of " + std::to_string(alignment));
    });
    if (!block.counting) return;
    if (space == kShared) count_shared(block.counts(), at.data(), lanes, bytes);
    for (int i = 0; i < kLanes; i++) lanes &= ~(Lanes(spaces[i] != kGlobal) << i);
    if (lanes) count_global(block.counts(), at.data(), lanes, bytes);
  }
};

inline void read_global(Warp& warp, uint64_t at, int bytes, void* to) {
  warp.block.global.reads(warp.block.number(), warp.epoch(), warp.seen, at, bytes);
  std::memcpy(to, reinterpret_cast<const void*>(at), bytes);
}
inline void write_global(Warp& warp, uint64_t at, int bytes, const void* from) {
  warp.block.global.writes(warp.block.number(), warp.epoch(), warp.seen, at, bytes);
  std::memcpy(reinterpret_cast<void*>(at), from, bytes);
}
inline void read_shared(Warp& warp, uint64_t at, int bytes, void* to) {
  warp.block.shared.reads(warp.seen, at, bytes, warp.epoch());
  std::memcpy(to, warp.block.shared.data(at), bytes);
}
inline void write_shared(Warp& warp, uint64_t at, int bytes, const void* from) {
  warp.block.shared.writes(warp.seen, at, bytes, warp.epoch(), static_cast<const uint8_t*>(from));
  std::memcpy(warp.block.shared.data(at), from, bytes);
}

// Writes what is left of integers in a register of any size.
inline void write_integers(Warp& warp, const Operand& to, Lanes lanes, const uint64_t* values,
                           Lanes defined = kAllLanes) {
  uint16_t half[kLanes];
  uint32_t word[kLanes];
  for (int i = 0; i < kLanes; i++) half[i] = uint16_t(values[i]), word[i] = uint32_t(values[i]);
  if (to.bits == 16) warp.write(to, lanes, half, defined);
  if (to.bits == 32) warp.write(to, lanes, word, defined);
  if (to.bits == 64) warp.write(to, lanes, values, defined);
}

// 9.7.9.8 ld; a: the space, generic where none is written, b: bytes of each element, c: whether its sign is extended.
inline bool load(Warp& warp, const Instruction& x, Lanes lanes) {
  const int space = x.rule->a, size = x.rule->b, with_sign = x.rule->c;
  const int count = int(x.operands.size()) - 1, bytes = size * count;
  const int used = x.used_bytes == ~0u ? bytes : std::min(bytes, 32 - __builtin_clz(x.used_bytes));
  const Access access(warp, x.operands.back(), lanes, Space(space), bytes, bytes);
  uint8_t data[kLanes][16]{};
  each(warp, lanes, [&](int i) {
    if (access.spaces[i] == kGlobal) read_global(warp, access.at[i], used, data[i]);
    if (access.spaces[i] == kShared) read_shared(warp, access.at[i], used, data[i]);
    if (access.spaces[i] == kParameters) std::memcpy(data[i], &warp.block.parameters[access.at[i]], used);
  });
  for (int k = 0; k < count; k++) {
    uint64_t values[kLanes]{};
    for (int i = 0; i < kLanes; i++) {
      std::memcpy(&values[i], &data[i][k * size], size);
      if (with_sign) values[i] = uint64_t(int64_t(values[i] << (64 - 8 * size)) >> (64 - 8 * size));
    }
    write_integers(warp, x.operands[k], lanes, values);
    if ((k + 1) * size > used) warp.at(x.operands[k].at).written &= ~lanes;
  }
  return true;
}

// 9.7.9.11 st; a: the space, b: bytes of each element.
inline bool store(Warp& warp, const Instruction& x, Lanes lanes) {
  const int space = x.rule->a, size = x.rule->b, count = int(x.operands.size()) - 1, bytes = size * count;
  const Access access(warp, x.operands[0], lanes, Space(space), bytes, bytes);
  uint8_t data[kLanes][16];
  for (int k = 0; k < count; k++) {
    const Operand& from = x.operands[k + 1];
    for (int i = 0; i < kLanes; i++) {
      if (!(lanes >> i & 1)) continue;
      const uint64_t value = warp.integer(from, i, lanes);
      std::memcpy(&data[i][k * size], &value, size);
    }
  }
  // Of lanes that write to one address any may be the last: CUDA C++ Programming Guide, SIMT architecture.
  for (int k = 0, first = int(warp.block.random.below(kLanes)); k < kLanes; k++) {
    const int i = warp.block.lane = (first + k) % kLanes;
    if (lanes >> i & 1) (space == kGlobal ? write_global : write_shared)(warp, access.at[i], bytes, data[i]);
  }
  return true;
}

// 9.7.9.25.3.1 cp.async: the bytes land where the lane waits for them, and until then nobody may touch them. With a
// source size of 0 they are 0, and nothing is read. a: whether only 16 bytes may be copied.
inline bool copy(Warp& warp, const Instruction& x, Lanes lanes) {
  const int bytes = int(x.operands[2].value);
  if (bytes != 16 && (x.rule->a || (bytes != 4 && bytes != 8))) fault("copies " + std::to_string(bytes) + " bytes");
  const Access to(warp, x.operands[0], lanes, kShared, bytes, bytes);
  Lanes reading = 0;
  each(warp, lanes, [&](int i) {
    const uint64_t size = x.operands.size() < 4 ? bytes : warp.integer(x.operands[3], i, lanes);
    if (size && size != uint64_t(bytes)) fault("copies of a part are not modelled: " + std::to_string(size) + " bytes");
    reading |= Lanes(size != 0) << i;
  });
  const Access from(warp, x.operands[1], reading, kGlobal, bytes, bytes);
  each(warp, lanes, [&](int i) {
    Copy copy{i, warp.copy_groups[i], uint32_t(to.at[i]), bytes, {}};
    if (reading >> i & 1) read_global(warp, from.at[i], bytes, copy.data);
    warp.block.shared.writes(warp.seen, copy.to, bytes, kUnderWay);
    warp.copies.push_back(copy);
  });
  return true;
}
// 9.7.9.25.3.2 cp.async.commit_group
inline bool commit_copies(Warp& warp, const Instruction&, Lanes lanes) {
  each(warp, lanes, [&](int i) { warp.copy_groups[i]++; });
  return true;
}
// 9.7.9.25.3.3 cp.async.wait_group: all but the last N groups of each lane land. a: whether copies of no group do, too.
inline bool wait_for_copies(Warp& warp, const Instruction& x, Lanes lanes) {
  const uint64_t others = x.rule->a ? 0 : uint64_t(x.operands[0].value);
  std::erase_if(warp.copies, [&](const Copy& copy) {
    if (!(lanes >> copy.lane & 1)) return false;
    if (!x.rule->a && copy.group + others >= warp.copy_groups[copy.lane]) return false;
    warp.block.shared.lands(copy.to, copy.bytes, copy.data, warp.epoch());
    return true;
  });
  return true;
}

// Instructions of a warp that name the lanes that take part: all of them, in what compilers emit here.
inline void wants_members(Warp& warp, const Operand& mask, Lanes lanes) {
  const uint32_t* members = warp.read<uint32_t>(mask, lanes);
  each(warp, lanes, [&](int i) {
    if (members[i] != kAllLanes) fault("only the members " + hex(members[i]));
  });
  warp.wants_whole(lanes);
}

enum Shuffle { kUp, kDown, kButterfly, kIndex };

// 9.7.9.6 shfl.sync; a: which Shuffle.
inline bool shuffle(Warp& warp, const Instruction& x, Lanes lanes) {
  wants_members(warp, x.operands[5], lanes);
  const Lanes defined = warp.defined(x.operands[2], lanes);
  const uint32_t *values = warp.at(x.operands[2].at).lanes<uint32_t>(), *by = warp.read<uint32_t>(x.operands[3], lanes);
  const uint32_t* bounds = warp.read<uint32_t>(x.operands[4], lanes);
  uint32_t result[kLanes];
  bool inside[kLanes];
  Lanes still = 0;
  for (int i = 0; i < kLanes; i++) {
    const int b = int(by[i] & 31), segment = int(bounds[i] >> 8 & 31), clamp = int(bounds[i] & 31);
    const int last = (i & segment) | (clamp & ~segment), first = i & segment;
    const int from[] = {i - b, i + b, i ^ b, first | (b & ~segment)};
    const int j = from[x.rule->a];
    inside[i] = x.rule->a == kUp ? j >= last : j <= last;
    result[i] = values[inside[i] ? j : i];
    still |= (defined >> (inside[i] ? j : i) & 1) << i;
  }
  warp.write(x.operands[0], lanes, result, still);
  warp.write(x.operands[1], lanes, inside);
  return true;
}

// 9.7.13.9 vote.sync.ballot
inline bool ballot(Warp& warp, const Instruction& x, Lanes lanes) {
  wants_members(warp, x.operands[2], lanes);
  warp.read<bool>(x.operands[1], lanes);
  uint32_t result[kLanes];
  std::fill_n(result, kLanes, *warp.at(x.operands[1].at).lanes<uint32_t>());
  warp.write(x.operands[0], lanes, result);
  return true;
}

// 9.7.13.8 redux.sync
template <class T, class F>
bool reduce(Warp& warp, const Instruction& x, Lanes lanes) {
  wants_members(warp, x.operands[2], lanes);
  const Lanes defined = warp.defined(x.operands[1], lanes);
  const T* values = warp.at(x.operands[1].at).lanes<T>();
  T result[kLanes];
  result[0] = values[0];
  for (int i = 1; i < kLanes; i++) result[0] = F{}(result[0], values[i]);
  std::fill(result + 1, result + kLanes, result[0]);
  warp.write(x.operands[0], lanes, result, defined == kAllLanes ? kAllLanes : 0);
  return true;
}
template <class T, class F>
void add_reduction(Rules& rules, const char* name, F) {
  rules[std::string("redux.sync.") + name] = {"d32 s32 s32", reduce<T, F>};
}

// 9.7.13.2 bar.warp.sync
inline bool meet_in_warp(Warp& warp, const Instruction& x, Lanes lanes) {
  wants_members(warp, x.operands[0], lanes);
  return true;
}

// What is the same in all lanes.
inline uint64_t same(Warp& warp, const Operand& x, Lanes lanes) {
  const uint64_t value = warp.integer(x, 0, lanes);
  each(warp, lanes, [&](int i) {
    if (warp.integer(x, i, lanes) != value) fault("lanes come to different barriers");
  });
  return value;
}

// 9.7.13.1 bar.sync and bar.arrive, barrier.sync and barrier.arrive; a: whether it waits.
inline bool meet(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  const uint64_t wanted = x.operands.size() > 1 ? same(warp, x.operands[1], lanes) : 0;
  warp.block.arrive(warp, same(warp, x.operands[0], lanes), uint32_t(wanted), x.rule->a);
  return true;
}
// bar.red.or.pred: all threads of the block meet, and know whether the predicate is true of any of them.
inline bool meet_and_ask(Warp& warp, const Instruction& x, Lanes lanes) {
  warp.wants_whole(lanes);
  const bool any = *reinterpret_cast<const Lanes*>(warp.read<bool>(x.operands[2], lanes)) != 0;
  warp.block.arrive(warp, same(warp, x.operands[1], lanes), 0, true, &x.operands[0], any);
  return true;
}

// 9.7.12 control flow
inline bool branch(Warp& warp, const Instruction& x, Lanes lanes) { return warp.branch(lanes, x.targets[0]), false; }
inline bool branch_together(Warp& warp, const Instruction& x, Lanes lanes) {  // .uni
  if (lanes != warp.groups.back().lanes) fault("bra.uni, but only the lanes " + hex(lanes) + " branch");
  return branch(warp, x, lanes);
}
inline bool branch_by_table(Warp& warp, const Instruction& x, Lanes lanes) {
  const uint32_t* index = warp.read<uint32_t>(x.operands[0], lanes);
  const uint32_t i = index[__builtin_ctz(lanes)];
  each(warp, lanes, [&](int lane) {
    if (index[lane] != i) fault("lanes branch to different places");
  });
  if (i >= x.targets.size())
    fault("branches to entry " + std::to_string(i) + " of " + std::to_string(x.targets.size()));
  return warp.branch(lanes, x.targets[i]), false;
}
inline bool leave(Warp& warp, const Instruction&, Lanes lanes) { return warp.leave(lanes), false; }

inline void add_movement(Rules& rules) {
  const std::pair<const char*, Space> spaces[] = {
      {"global.", kGlobal}, {"shared.", kShared}, {"shared::cta.", kShared}, {"param.", kParameters}, {"", kGeneric}};
  for (const auto& [space, a] : spaces) {
    for (const char* type : {"b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64"}) {
      for (const int n : {1, 2, 4}) {
        const int bits = std::atoi(type + 1);
        if (n * bits > 128) continue;
        const std::string vector = n == 1 ? "" : std::to_string(n),
                          bits_text = std::to_string(std::max(bits, 16)) + "+";
        const std::string name = space + (n == 1 ? "" : "v" + vector + ".") + type;
        rules["ld." + name] = {vector + "d" + bits_text + " a", load, a, bits / 8, type[0] == 's'};
        if (a == kGlobal || a == kShared) rules["st." + name] = {"a " + vector + "s" + bits_text, store, a, bits / 8};
      }
    }
  }
  rules["cp.async.ca.shared.global 3"] = {"a a i", copy, 0},
  rules["cp.async.ca.shared.global 4"] = {"a a i s32", copy, 0};
  rules["cp.async.cg.shared.global 3"] = {"a a i", copy, 1},
  rules["cp.async.cg.shared.global 4"] = {"a a i s32", copy, 1};
  rules["cp.async.commit_group"] = {"", commit_copies};
  rules["cp.async.wait_group"] = {"i", wait_for_copies, 0}, rules["cp.async.wait_all"] = {"", wait_for_copies, 1};

  const std::string of_shuffle = "d32|d1 s32 s32 s32 s32";
  rules["shfl.sync.up.b32"] = {of_shuffle, shuffle, kUp}, rules["shfl.sync.down.b32"] = {of_shuffle, shuffle, kDown};
  rules["shfl.sync.bfly.b32"] = {of_shuffle, shuffle, kButterfly};
  rules["shfl.sync.idx.b32"] = {of_shuffle, shuffle, kIndex};
  add_reduction<uint32_t>(rules, "add.s32", [](uint32_t a, uint32_t b) { return a + b; });
  add_reduction<uint32_t>(rules, "add.u32", [](uint32_t a, uint32_t b) { return a + b; });
  add_reduction<int32_t>(rules, "min.s32", [](int32_t a, int32_t b) { return std::min(a, b); });
  add_reduction<int32_t>(rules, "max.s32", [](int32_t a, int32_t b) { return std::max(a, b); });
  add_reduction<uint32_t>(rules, "min.u32", [](uint32_t a, uint32_t b) { return std::min(a, b); });
  add_reduction<uint32_t>(rules, "max.u32", [](uint32_t a, uint32_t b) { return std::max(a, b); });
  add_reduction<uint32_t>(rules, "or.b32", [](uint32_t a, uint32_t b) { return a | b; });
  add_reduction<uint32_t>(rules, "and.b32", [](uint32_t a, uint32_t b) { return a & b; });

  rules["vote.sync.ballot.b32"] = {"d32 s1 s32", ballot};
  rules["bar.warp.sync"] = {"s32", meet_in_warp};
  rules["bar.red.or.pred"] = {"d1 s32 s1", meet_and_ask};
  for (const std::string name : {"bar", "barrier"}) {
    rules[name + ".sync 1"] = {"s32", meet, 1}, rules[name + ".sync 2"] = {"s32 s32", meet, 1};
    rules[name + ".arrive"] = {"s32 s32", meet, 0};
  }
  rules["bra"] = {"l", branch}, rules["bra.uni"] = {"l", branch_together},
  rules["brx.idx"] = {"s32 t", branch_by_table};
  rules["ret"] = {"", leave}, rules["exit"] = {"", leave};
}

}  // namespace ptx
