// A block of threads that executes a program: warps, their registers, and the order in which they run.
//
// What the PTX manual leaves open is drawn at random from a seed (which warp runs next and for how long), and what it
// leaves undefined is a fault.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"

namespace ptx {

using Lanes = uint32_t;  // one bit for each lane of a warp
constexpr int kLanes = 32;
constexpr Lanes kAllLanes = ~0u;

struct Warp;
struct Instruction;

// How an instruction is written and what it does. `operands`: as parse.h says. `run`: true where the warp goes on to
// the next instruction; a, b and c are its parameters.
struct Rule {
  std::string operands;
  bool (*run)(Warp&, const Instruction&, Lanes);
  int a = 0, b = 0, c = 0;
};
using Rules = std::map<std::string, Rule>;

struct Operand {
  int at = 0;         // of a register, or of a constant, in the registers of a warp
  int bits = 0;       // of the register
  int64_t value = 0;  // an immediate integer, or what is added to an address
};

struct Instruction {
  const Rule* rule = nullptr;
  int guard = -1;  // the register of its predicate
  bool guard_is = true;
  std::vector<Operand> operands;
  std::vector<int> targets;   // of a branch
  uint32_t used_bytes = ~0u;  // of what it loads
  int line = 0;
  std::string text;
};

// Counted for each instruction: how often warps and lanes executed it, the bytes that lanes moved, and the sectors of
// global memory and wavefronts of shared memory, each beside the fewest that so many bytes take.
struct Counts {
  uint64_t warps = 0, lanes = 0, global_bytes = 0, sectors = 0, fewest_sectors = 0;
  uint64_t shared_bytes = 0, wavefronts = 0, fewest_wavefronts = 0;
};

struct Variable {
  std::string name;
  uint64_t at;  // offset in the parameters or in shared memory, or the address of a global variable
  int bytes;
};

struct Program {
  std::string name;
  std::vector<Instruction> instructions;
  std::vector<char> registers;                       // as each warp begins: constants are among them
  std::vector<std::pair<int, std::string>> names;    // of registers, in the order of their offsets
  std::vector<std::pair<std::string, int>> special;  // registers, and their offsets
  std::vector<Variable> parameters;
  std::vector<std::unique_ptr<std::vector<char>>> globals;
  int arch = 0;  // as in sm_80
  int parameter_bytes = 0, static_shared = 0, threads = 0, most_threads = 1024, registers_of_thread = 0;
  std::vector<Counts> counts;
};

struct Launch {
  uint32_t grid[3];
  uint32_t threads, shared;
  uint64_t seed;
  uint32_t counting;  // whether bytes, wavefronts and sectors are counted
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {}
  uint32_t below(uint32_t n) {  // Steele, Lea, Flood: SplitMix, 2014
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9, z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return uint32_t(((z ^ z >> 31) >> 32) * n >> 32);
  }

 private:
  uint64_t state_;
};

// A register of a warp; the values of its lanes follow, and those of a predicate are one word.
struct alignas(16) Register {
  Lanes written;       // by something that was defined itself
  uint32_t in_flight;  // the last group of products that reads or writes it and was not waited for; 0 for none
  uint32_t source;     // whether they read it alone
  uint32_t stamp;      // how many wgmma.fence there were before it was written
  template <class T>
  T* lanes() {
    return reinterpret_cast<T*>(this + 1);
  }
};

template <class T>
inline T lane_of(const T* values, int lane) {
  return values[lane];
}
inline bool lane_of(const bool* values, int lane) { return *reinterpret_cast<const Lanes*>(values) >> lane & 1; }

// PTX ISA 9.7.9.25.3 cp.async: a copy that a lane has begun.
struct Copy {
  int lane;
  uint64_t group;
  uint32_t to;
  int bytes;
  uint8_t data[16];
};

struct Block;

struct Warp {
  Block& block;
  const int index;
  std::vector<char> registers;
  struct Group {
    int pc;
    Lanes lanes;
  };
  std::vector<Group> groups;  // of lanes at the same instruction; the last is where the least is, and runs
  Clock seen;                 // what happened before
  Clock fenced;               // what of it the async proxy may see
  bool waits = false;
  int instruction = 0;  // that runs
  std::deque<Copy> copies;
  std::array<uint64_t, kLanes> copy_groups{};                        // that each lane has committed
  uint32_t product_fences = 0, product_groups = 0, bulk_groups = 0;  // see hopper.h
  std::deque<std::pair<uint32_t, int>> lent;                         // registers, each with the group that uses it
  uint32_t leader;                                                   // that elect.sync elects
  int register_limit;

  Warp(Block& block, int index);

  char* file() { return registers.data(); }
  Register& at(int offset) { return *reinterpret_cast<Register*>(file() + offset); }

  template <class T>
  const T* read(const Operand& x, Lanes lanes) {
    Register& r = at(x.at);
    if ((lanes & ~r.written) || r.in_flight) fault_of_register(x.at, r, lanes & ~r.written);
    return r.lanes<T>();
  }
  // Which lanes of a register are defined. What is computed from others may not be stored, nor steer anything.
  Lanes defined(const Operand& x, Lanes lanes) {
    const Register& r = at(x.at);
    if (r.in_flight) fault_of_register(x.at, r, lanes);
    return r.written & lanes;
  }
  template <class T>
  void write(const Operand& x, Lanes lanes, const T* values, Lanes defined = kAllLanes) {
    Register& r = at(x.at);
    if (r.in_flight) fault_of_register(x.at, r, lanes);
    r.written = (r.written & ~lanes) | (lanes & defined), r.stamp = product_fences;
    T* to = r.lanes<T>();
    if (lanes == kAllLanes) {
      std::memcpy(to, values, sizeof(T) * kLanes);
    } else {
      for (int i = 0; i < kLanes; i++) to[i] = lanes >> i & 1 ? values[i] : to[i];
    }
  }
  void write(const Operand& x, Lanes lanes, const bool* values, Lanes defined = kAllLanes) {
    Lanes word = 0;
    for (int i = 0; i < kLanes; i++) word |= Lanes(values[i]) << i;
    Register& r = at(x.at);
    r.written = (r.written & ~lanes) | (lanes & defined);
    Lanes& to = *r.lanes<Lanes>();
    to = (word & lanes) | (to & ~lanes);
  }
  [[noreturn]] void fault_of_register(int offset, const Register& r, Lanes lanes);

  // Integer value of an operand of 16, 32 or 64 bits.
  uint64_t integer(const Operand& x, int lane, Lanes lanes) {
    read<uint16_t>(x, lanes);
    return value(x, lane);
  }
  uint64_t value(const Operand& x, int lane) {
    Register& r = at(x.at);
    if (x.bits == 16) return r.lanes<uint16_t>()[lane];
    return x.bits == 32 ? r.lanes<uint32_t>()[lane] : r.lanes<uint64_t>()[lane];
  }
  uint64_t address(const Operand& x, int lane, Lanes lanes) { return integer(x, lane, lanes) + x.value; }

  // PTX ISA 9.7 of instructions that are .aligned: all threads of the warp execute them together.
  void wants_whole(Lanes lanes) {
    if (lanes != kAllLanes) fault("executed by a part of the warp, lanes " + hex(lanes));
  }
  bool done() const { return groups.empty(); }
  void run(int instructions);
  void leave(Lanes lanes);
  void branch(Lanes lanes, int target);
  Epoch epoch() const { return ptx::epoch(index, seen[index]); }
  uint32_t bulk_clock() const, product_clock() const;  // of the groups that are not committed yet
  void happens_before(Clock& later) { join(later, seen), tick(); }
  void tick() { seen[index]++; }
};

// PTX ISA 9.7.13.1 bar: what a barrier of the block knows. Of bar.red: whether a predicate is true of any thread, and
// where each warp wants to know.
struct Barrier {
  uint32_t arrived = 0, wanted = 0;
  Clock clock{}, fenced{}, passed{};
  std::vector<Warp*> waiting;
  bool any = false;
  std::vector<Operand> answers;
};

// PTX ISA 9.7.13.15 mbarrier: what is awaited in this phase, and what happened before those that have passed.
//
// One order of warps and loads stands for all of them if in it
// - who arrives, or begins a load, has seen the end of the phase before: it can count for no earlier phase;
// - who has waited for a phase has seen the end of the one before: it cannot have passed by one of the same parity;
// - a phase ends after all waits for the one before: none of them can find its parity turned again.
// Proof: take another order, and the first event of it that is not as in this one. All that happens before the event
// here has happened there, and alike. So an arrival counts for its phase, which cannot end without it; and a wait ends
// with its own phase. Where all wait in the other order, take an event that is still to come there while all that
// happens before it here is over: it is no wait, since its phase has ended. What happens before what is the same in
// both, and with it the races. This takes warps that go the same way in every order: they repeat a wait that fails.
struct MBarrier {
  uint32_t count = 0;
  int64_t pending = 0, bytes = 0;
  uint64_t phase = 0;
  int loader = 0;  // the agent of the loads that it is told of
  Clock clock{}, fenced{}, passed{}, passed_fenced{};
  Clock passed_before{};  // as `passed` was in the phase before
  Clock waits{};          // that have passed since this phase began
  std::vector<Warp*> waiting;
};

// A load by TMA that has not landed.
struct Transfer {
  struct Piece {
    uint64_t at;
    uint8_t data[16];
  };
  uint64_t barrier, phase;
  std::vector<Piece> pieces;
};

struct Block {
  Program& program;
  const Launch& launch;
  Global& global;
  Shared& shared;
  Random& random;
  const std::vector<char>& parameters;
  uint32_t index, position[3];
  std::vector<Warp> warps;
  std::array<Barrier, 16> barriers{};
  std::map<uint32_t, MBarrier> mbarriers;
  std::vector<Transfer> transfers;
  uint32_t loads;  // that have landed, since the first block
  int loaders = kLoaders;
  int spare_registers = 0;
  std::vector<Warp*> want_registers;
  bool counting = launch.counting;
  Warp* running = nullptr;
  int lane = -1;  // that is looked at, for faults

  Block(Program& program, const Launch& launch, Global& global, Shared& shared, Random& random,
        const std::vector<char>& parameters, uint32_t index)
      : program(program),
        launch(launch),
        global(global),
        shared(shared),
        random(random),
        parameters(parameters),
        index(index) {
    position[0] = index % launch.grid[0], position[1] = index / launch.grid[0] % launch.grid[1];
    position[2] = index / launch.grid[0] / launch.grid[1];
    shared.begin_block();
    loads = shared.start();
    warps.reserve(launch.threads / kLanes);
    for (int i = 0; i < int(launch.threads / kLanes); i++) warps.emplace_back(*this, i);
  }

  uint32_t number() const { return index + 1; }  // for global memory, which no block wrote is 0 of
  Counts& counts() { return program.counts[running->instruction]; }

  void run() {
    std::vector<Warp*> ready;
    while (true) {
      ready.clear();
      for (Warp& warp : warps) {
        if (!warp.done() && !warp.waits) ready.push_back(&warp);
      }
      if (!transfers.empty() && std::all_of(warps.begin(), warps.end(), [](const Warp& x) { return x.done(); })) {
        fault("all warps have ended, and loads by TMA have not");
      }
      if (!transfers.empty() && (ready.empty() || random.below(8) == 0)) {
        std::swap(transfers[random.below(uint32_t(transfers.size()))], transfers.back());
        Transfer transfer = std::move(transfers.back());
        transfers.pop_back();
        land(std::move(transfer));
        continue;
      }
      if (ready.empty()) break;
      running = ready[random.below(uint32_t(ready.size()))];
      running->run(1 << random.below(8));
    }
    running = nullptr;
    for (Warp& warp : warps)
      shared.happened(warp.seen), shared.happened({loads, warp.bulk_clock(), warp.product_clock()});
    std::string where;
    for (Warp& warp : warps) {
      if (!warp.done()) where += "\n    warp " + std::to_string(warp.index) + " at " + text_of(warp.instruction);
    }
    if (!where.empty()) fault("deadlock: all wait" + where);
    for (const auto& [at, barrier] : mbarriers) {
      const int loader = barrier.loader;
      if (std::all_of(warps.begin(), warps.end(),
                      [&](const Warp& x) { return x.seen[loader] < barrier.clock[loader]; }))
        fault("nobody has waited for a load by TMA");
    }
    for (const Warp& x : warps) {
      if (!x.copies.empty() || !x.lent.empty() || x.seen[kBulk + x.index] < x.bulk_clock() - 1)
        fault("warp " + std::to_string(x.index) + " ends and has not waited for what it has begun");
    }
  }

  void land(Transfer transfer);

  std::string text_of(int instruction) const {
    const Instruction& x = program.instructions[instruction];
    return "line " + std::to_string(x.line) + ": " + x.text;
  }
  std::string place() const {
    std::string result = program.name + ", block";
    for (uint32_t x : position) result += " " + std::to_string(x);
    if (running == nullptr) return result;
    result += ", warp " + std::to_string(running->index);
    if (lane >= 0) result += ", lane " + std::to_string(lane);
    return result + ", " + text_of(running->instruction);
  }

  // PTX ISA 9.7.13.1 bar: `wanted` threads meet at barrier i; 0 of them are all of the block.
  void arrive(Warp& warp, uint64_t i, uint32_t wanted, bool waits, const Operand* answer = nullptr, bool any = false) {
    if (i >= barriers.size()) fault("barrier " + std::to_string(i) + " of 16");
    Barrier& barrier = barriers[i];
    if (wanted == 0) wanted = launch.threads;
    if (wanted % kLanes || wanted > launch.threads) fault("a barrier for " + std::to_string(wanted) + " threads");
    if (barrier.arrived && barrier.wanted != wanted) fault("threads disagree how many meet at the barrier");
    if (std::count(barrier.waiting.begin(), barrier.waiting.end(), &warp)) fault("arrives twice");
    if (barrier.arrived && barrier.answers.empty() != (answer == nullptr)) fault("bar.red meets another instruction");
    if (!includes(warp.seen, barrier.passed)) fault("may also come to the barrier before others have passed it");
    barrier.wanted = wanted;
    barrier.arrived += kLanes;
    barrier.any |= any;
    if (answer) barrier.answers.push_back(*answer);
    join(barrier.fenced, warp.fenced);
    warp.happens_before(barrier.clock);
    if (waits) barrier.waiting.push_back(&warp), warp.waits = true;
    if (barrier.arrived < wanted) return;
    bool values[kLanes];
    std::fill_n(values, kLanes, barrier.any);
    for (size_t k = 0; k < barrier.waiting.size(); k++) {
      Warp* other = barrier.waiting[k];
      join(other->seen, barrier.clock), join(other->fenced, barrier.fenced);
      other->waits = false;
      if (answer) other->write(barrier.answers[k], kAllLanes, values);
    }
    barrier = Barrier{.passed = barrier.clock};
  }
};

inline Warp::Warp(Block& block, int index)
    : block(block),
      index(index),
      registers(block.program.registers),
      leader(block.random.below(kLanes)),
      register_limit(block.program.registers_of_thread) {
  groups.push_back({0, kAllLanes});
  seen.fill(block.shared.start()), fenced.fill(block.shared.start());
  tick();
  for (const auto& [name, offset] : block.program.special) {
    Register& r = at(offset);
    r.written = kAllLanes;
    for (int i = 0; i < kLanes; i++) {
      const uint32_t axis = uint32_t(name.back() - 'x'), thread = uint32_t(index * kLanes + i);
      uint32_t value = 0;
      if (name == "%laneid")
        value = uint32_t(i);
      else if (name.starts_with("%tid."))
        value = axis == 0 ? thread : 0;
      else if (name.starts_with("%ntid."))
        value = axis == 0 ? block.launch.threads : 1;
      else if (name.starts_with("%ctaid."))
        value = block.position[axis];
      else
        value = block.launch.grid[axis];  // %nctaid
      r.lanes<uint32_t>()[i] = value;
    }
  }
}

inline uint32_t Warp::bulk_clock() const { return block.shared.start() + 1 + bulk_groups; }
inline uint32_t Warp::product_clock() const { return block.shared.start() + 1 + product_groups; }

inline void Warp::fault_of_register(int offset, const Register& r, Lanes lanes) {
  std::string name = "a constant";
  for (const auto& [at, text] : block.program.names) name = at == offset ? text : name;
  block.lane = __builtin_ctz(lanes);
  fault(name + (r.in_flight ? " is used before what was begun with it is waited for" : " is undefined here"));
}

// Lanes at the least instruction run until they are where others are, so that they meet again after a branch.
inline void Warp::run(int quantum) {
  const std::vector<Instruction>& code = block.program.instructions;
  while (quantum-- > 0 && !groups.empty() && !waits) {
    const size_t level = groups.size();
    const Group group = groups.back();
    instruction = group.pc;
    block.lane = -1;
    const Instruction& x = code[instruction];
    Lanes lanes = group.lanes;
    if (x.guard >= 0) {
      const Lanes value = *reinterpret_cast<const Lanes*>(read<bool>({x.guard, 1}, lanes));
      lanes &= x.guard_is ? value : ~value;
    }
    bool goes_on = true;
    if (lanes) {
      Counts& counts = block.program.counts[instruction];
      counts.warps++, counts.lanes += __builtin_popcount(lanes);
      goes_on = x.rule->run(*this, x, lanes);
    }
    if (!goes_on) continue;  // a branch, or the end, or to be tried again
    groups.back().pc++;
    if (level > 1) branch(0, 0);
  }
}

// Moves these lanes of the running group to another instruction, and the others to the next one.
inline void Warp::branch(Lanes lanes, int target) {
  Group group = groups.back();
  groups.pop_back();
  auto put = [this](Group x) {
    auto there = std::find_if(groups.begin(), groups.end(), [&](const Group& y) { return y.pc <= x.pc; });
    if (x.lanes == 0) return;
    if (there != groups.end() && there->pc == x.pc)
      there->lanes |= x.lanes;
    else
      groups.insert(there, x);
  };
  put({lanes ? group.pc + 1 : group.pc, group.lanes & ~lanes});
  put({target, lanes});
}

// The end of these lanes.
inline void Warp::leave(Lanes lanes) {
  groups.back().lanes &= ~lanes;
  if (groups.back().lanes == 0)
    groups.pop_back();
  else
    groups.back().pc++;
}

}  // namespace ptx
