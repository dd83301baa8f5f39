// The C interface of the machine, for machine.py: a program is parsed once and launched many times.
#include <numeric>

#include "arithmetic.h"
#include "hopper.h"
#include "matrix.h"
#include "movement.h"
#include "parse.h"

namespace {

using namespace ptx;

const Rules& rules() {
  static const Rules all = [] {
    Rules result;
    add_arithmetic(result), add_vectors(result), add_movement(result), add_matrices(result), add_hopper(result);
    return result;
  }();
  return all;
}

void say(const std::string& what, char* to, size_t size) {
  std::strncpy(to, what.c_str(), size - 1);
  to[size - 1] = 0;
}

}  // namespace

extern "C" {

// A program, or null, of which `error` says why.
void* ptx_parse(const char* text, const char* kernel, char* error, size_t size) {
  Parser parser(text, rules());
  try {
    return parser.parse(kernel).release();
  } catch (const Fault& x) {
    say(parser.place() + ": " + x.what, error, size);
    return nullptr;
  }
}
void ptx_free(void* program) { delete static_cast<Program*>(program); }
size_t ptx_parameter_bytes(void* program, size_t i) {
  const auto& all = static_cast<Program*>(program)->parameters;
  return i < all.size() ? all[i].bytes : 0;
}
// The counts since it was parsed of one instruction, and its text; null past the last one.
const char* ptx_counts(void* program, size_t i, Counts* to) {
  Program& x = *static_cast<Program*>(program);
  if (i >= x.instructions.size()) return nullptr;
  *to = x.counts[i];
  return x.instructions[i].text.c_str();
}

// 0, or 1 where `error` says what went wrong. `ranges`: the beginnings and ends of the tensors, all aligned.
int ptx_launch(void* of, const Launch* launch, const void* const* values, const uint64_t* ranges, size_t n_ranges,
               char* error, size_t size) {
  Program& program = *static_cast<Program*>(of);
  const std::string who = "in a launch with seed " + std::to_string(launch->seed) + ": " + program.name;
  std::string place;
  try {
    if (program.threads && program.threads != int(launch->threads)) fault(who + " wants other threads");
    if (int(launch->threads) > program.most_threads) fault(who + " wants fewer threads");
    if (launch->threads == 0 || launch->threads % kLanes) fault(who + " has no whole warps");
    std::vector<char> parameters(program.parameter_bytes);
    for (size_t i = 0; i < program.parameters.size(); i++) {
      std::memcpy(&parameters[program.parameters[i].at], values[i], program.parameters[i].bytes);
    }
    std::vector<Global::Range> all;
    for (size_t i = 0; i < n_ranges; i++) all.push_back({ranges[2 * i], ranges[2 * i + 1]});
    for (const auto& x : program.globals) all.push_back({uint64_t(x->data()), uint64_t(x->data() + x->size())});
    Global global(std::move(all));
    Shared shared(program.static_shared + launch->shared);
    Random random(launch->seed);
    std::vector<uint32_t> order(size_t(launch->grid[0]) * launch->grid[1] * launch->grid[2]);
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random.below(uint32_t(i))]);
    for (const uint32_t i : order) {
      Block block(program, *launch, global, shared, random, parameters, i);
      try {
        block.run();
      } catch (const Fault&) {
        place = block.place();
        throw;
      }
    }
    return 0;
  } catch (const Fault& x) {
    say(x.what + "\n  in " + place + "\n  seed " + std::to_string(launch->seed), error, size);
    return 1;
  }
}

}  // extern "C"
