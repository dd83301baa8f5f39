// One head of plain attention on Arm, forward and backward, with `hint #100` where count_instructions.cpp shall print.
#include <functional>

#include "../csrc/cpu/dispatch.h"
#include "../csrc/cpu/run.h"
#include "../tests/cpu_kernels/cases.h"
#include "../tests/cpu_kernels/for_each.h"

namespace fastattn::test {
namespace {

constexpr Placement kPlacement = Placement::heap;

void run(DType dtype) {
  const Case c{.name = "plain", .why = "", .B = 1, .H = 1, .H_kv = 1, .n_q = 512, .n_k = 512, .d_qk = 64, .d_v = 64};
  const Inputs in(c, dtype);
  const Tensor q(kPlacement, dtype, in.q), k(kPlacement, dtype, in.k), v(kPlacement, dtype, in.v),
      d_o(kPlacement, dtype, in.d_o), o(kPlacement, dtype, in.q), lse(kPlacement, DType::f32, in.d_lse),
      dq(kPlacement, DType::f32, in.q), dk(kPlacement, dtype, in.k), dv(kPlacement, dtype, in.v);
  std::vector<int32_t> table;
  const IndexList every_row = index_list(c.n_q, table, [](int64_t) { return true; });
  Params p{};
  p.B = p.H = p.H_kv = 1, p.n_q = c.n_q, p.n_k = c.n_k, p.d_qk = c.d_qk, p.d_v = c.d_v, p.scale = c.scale;
  p.band = make_band(false, kNoLimit, kNoLimit), p.q_offset = c.q_offset.data();
  p.queries = p.keys = &every_row;
  p.q = q.input(), p.k = k.input(), p.v = v.input();
  p.dropout = make_dropout(0, 0);
  BackwardTensors t{};
  t.o = o.input(), t.lse = lse.floats(), t.d_o = d_o.input();
  t.dq = dq.output(), t.dk = dk.output(), t.dv = dv.output();
  ForEach for_each(kPlacement);
  asm volatile("hint #100" ::: "memory");
  run_forward(choose_capability(), p, {o.output(), lse.floats()}, 1, std::ref(for_each), std::ref(for_each));
  asm volatile("hint #100" ::: "memory");
  run_backward(choose_capability(), p, t, 1, std::ref(for_each));
  asm volatile("hint #100" ::: "memory");
}

}  // namespace
}  // namespace fastattn::test

int main(int count, char**) { fastattn::test::run(count > 1 ? fastattn::DType::bf16 : fastattn::DType::f32); }
