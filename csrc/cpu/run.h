// A call of the kernels from beginning to end, for any way to use several threads: for_each(n, scratch_floats, run)
// calls run(i, next, scratch) for every i < n, with scratch that no two calls use at the same time. `next` is the i
// that comes after it in the same thread; n or more if none does.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "dispatch.h"
#include "params.h"
#include "schedule.h"

namespace fastattn {

template <class Item>
const Item* item_or_null(const std::vector<Item>& items, int64_t i) {
  return i < int64_t(items.size()) ? &items[i] : nullptr;
}

// The thread that ends the last part of a head joins all of them, in order: no thread works on the others then.
template <class ForEach>
void run_decode(const DecodeKernels& kernels, const Params& p, const ForwardOutputs& out, ForEach for_each) {
  auto items = decode_items(p);
  const std::unique_ptr<float[]> parts(new float[items.size() * kernels.parts_size(p)]);
  std::vector<std::atomic<int64_t>> ended(p.B * p.H_kv);  // parts of each head
  for_each(int64_t(items.size()), kernels.scratch(p), [&](int64_t i, int64_t next, float* scratch) {
    const DecodeItem& item = items[i];
    kernels.attend(p, item, next < int64_t(items.size()) ? &items[next] : nullptr, parts.get(), scratch);
    if (ended[item.b * p.H_kv + item.h_kv].fetch_add(1) + 1 == item.n_parts) {
      kernels.combine(p, out, item, parts.get());
    }
  });
}

// `for_each_share` hands out items that follow each other to the same thread.
template <class ForEach, class ForEachShare>
void run_forward(const Capability& capability, const Params& p, const ForwardOutputs& out, int64_t threads,
                 ForEach for_each, ForEachShare for_each_share) {
  const Kernels& kernels = capability.kernels_for(p.k.dtype == DType::i8 ? DType::f32 : p.q.dtype);
  if (decodes(p)) return run_decode(*kernels.decode, p, out, for_each_share);
  const auto items = forward_items(p, kernels, threads);
  for_each(int64_t(items.size()), kernels.forward_scratch(p), [&](int64_t i, int64_t next, float* scratch) {
    kernels.forward(p, out, items[i], item_or_null(items, next), scratch);
  });
}

// Gradients that are null in `t` are not computed.
template <class ForEach>
void run_backward(const Capability& capability, const Params& p, BackwardTensors t, int64_t threads, ForEach for_each) {
  const Kernels& kernels = capability.kernels_for(p.q.dtype);
  const auto run = [&](const Params& p, const BackwardTensors& t) {
    for (const Step& items : backward_steps(p, kernels, t, threads)) {
      for_each(int64_t(items.size()), kernels.backward_scratch(p), [&](int64_t i, int64_t next, float* scratch) {
        kernels.backward(p, t, items[i], item_or_null(items, next), scratch);
      });
    }
  };
  const std::unique_ptr<SharedMeasure[]> measures(new SharedMeasure[p.B * p.H * p.n_q]());
  t.measures = measures.get();
  if (t.d_weights.data) {
    Params without_values = p;
    without_values.d_v = 0;
    BackwardTensors of_weights{};
    of_weights.lse = t.lse, of_weights.measures = t.measures;
    of_weights.d_weights = t.d_weights, of_weights.d_weights_dtype = t.d_weights_dtype;
    of_weights.d_row = t.delta_of_weights;
    run(without_values, of_weights);
  }
  run(p, t);
}

// The Measure of every query, [B, H, n_q]: from its lse, or by a forward pass where `lse` is null. p.d_v is 0, as in
// all calls that compute weights.
template <class ForEach>
std::unique_ptr<Measure[]> run_measure(const Capability& capability, const Params& p, const float* lse, int64_t threads,
                                       ForEach for_each) {
  std::unique_ptr<Measure[]> measures(new Measure[p.B * p.H * p.n_q]);
  if (!lse) {
    const std::unique_ptr<float[]> unused(new float[p.B * p.H * p.n_q]);
    Params undropped = p;
    undropped.dropout = {};
    run_forward(capability, undropped, {Output{}, unused.get(), measures.get()}, threads, for_each, for_each);
    return measures;
  }
  const Kernels& kernels = capability.kernels_for(p.q.dtype);
  const auto items = weights_items(p, kernels, false);
  for_each(int64_t(items.size()), kernels.backward_scratch(p), [&](int64_t i, int64_t, float* scratch) {
    kernels.weights->measure(p, lse, items[i], measures.get(), scratch);
  });
  return measures;
}

// out: [B, 1, n_q, n_k] if heads are averaged, else [B, H, n_q, n_k]. `lse` may be null.
template <class ForEach>
void run_weights(const Capability& capability, const Params& p, const float* lse, const Output& out, bool average_heads,
                 int64_t threads, ForEach for_each) {
  const auto measures = run_measure(capability, p, lse, threads, for_each);
  const Kernels& kernels = capability.kernels_for(p.q.dtype);
  const auto items = weights_items(p, kernels, average_heads);
  for_each(int64_t(items.size()), kernels.weights->scratch(p, 0), [&](int64_t i, int64_t, float* scratch) {
    kernels.weights->weights(p, measures.get(), out, items[i], scratch);
  });
}

// What run_forward and run_weights write: in one pass where all keys are a single block.
template <class ForEach, class ForEachShare>
void run_forward_with_weights(const Capability& capability, const Params& p, const ForwardOutputs& out,
                              const Output& weights, bool average_heads, int64_t threads, ForEach for_each,
                              ForEachShare for_each_share) {
  const Kernels& kernels = capability.kernels_for(p.q.dtype);
  const int64_t joint_scratch = decodes(p) ? 0 : kernels.weights->joint_scratch(p);
  if (joint_scratch) {
    const auto items = weights_items(p, kernels, average_heads);
    return for_each(int64_t(items.size()), joint_scratch, [&](int64_t i, int64_t, float* scratch) {
      kernels.weights->attend(p, out, weights, items[i], scratch);
    });
  }
  run_forward(capability, p, out, threads, for_each, for_each_share);
  Params without_values = p;
  without_values.d_v = 0;
  run_weights(capability, without_values, out.lse, weights, average_heads, threads, for_each);
}

// The kernels for results in fp32: with arithmetic in fp32, whatever the dtype of q and k.
inline Capability in_fp32(const Capability& capability) { return {capability.others, capability.others, true}; }

// out: [B, H, n_k].
template <class ForEach>
void run_received(const Capability& capability, const Params& p, float* out, int64_t threads, ForEach for_each) {
  const auto measures = run_measure(in_fp32(capability), p, nullptr, threads, for_each);
  const Kernels& kernels = *capability.others;
  const auto items = received_items(p, kernels);
  for_each(int64_t(items.size()), kernels.weights->scratch(p, 0), [&](int64_t i, int64_t, float* scratch) {
    kernels.weights->received(p, measures.get(), out, items[i], scratch);
  });
}

template <class ForEach>
void run_top_keys(const Capability& capability, const Params& p, const TopKeysOutputs& out, int64_t threads,
                  ForEach for_each) {
  const auto measures = run_measure(in_fp32(capability), p, nullptr, threads, for_each);
  const Kernels& kernels = *capability.others;
  const auto items = weights_items(p, kernels, false);
  for_each(int64_t(items.size()), kernels.weights->scratch(p, out.top_k), [&](int64_t i, int64_t, float* scratch) {
    kernels.weights->top_keys(p, measures.get(), out, items[i], scratch);
  });
}

}  // namespace fastattn
