// Which kernels a call takes, and how they are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "backward.cuh"
#include "bias_gradient.cuh"
#include "decoding.cuh"
#include "forward.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "params.h"
#include "preparation.cuh"
#include "tiling.h"

namespace fastattn::cuda {

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Calls run(head dim that the kernels are compiled for, whether they are those of general scores), both as constants.
template <class Run>
cudaError_t with_kernels_for(const Params& p, Run run) {
  const auto of_head_dim = [&](auto head_dim) {
    return p.is_general() ? run(head_dim, std::true_type()) : run(head_dim, std::false_type());
  };
  const int head_dim = compiled_head_dim(p.d_qk > p.d_v ? p.d_qk : p.d_v);
  return head_dim == 64    ? of_head_dim(Constant<64>())
         : head_dim == 128 ? of_head_dim(Constant<128>())
                           : of_head_dim(Constant<256>());
}

// Launches one after the other, up to the first that fails.
class Launches {
  cudaStream_t stream_;

 public:
  cudaError_t error = cudaSuccess;

  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  template <class Kernel, class... Arguments>
  void add(Kernel kernel, int64_t blocks, int threads, int shared_bytes, const Arguments&... arguments) {
    if (error == cudaSuccess) error = launch(kernel, blocks, threads, shared_bytes, stream_, arguments...);
  }

  void add_token_groups(const Params& p) {
    for (const Side* side : {&p.queries, &p.keys}) {
      if (!side->groups) continue;
      add(token_groups_kernel, tiles_of(p.B * side->group_count(), kThreadsOfPreparation), kThreadsOfPreparation, 0,
          *side, p.B);
    }
  }
};

template <class Element, int kHeadDim, bool kGeneral>
constexpr auto forward_tiling() {
  constexpr Shape shape = forward_shape(sizeof(Element), kHeadDim, kGeneral);
  return Tiling<Element, kHeadDim, shape.warps, shape.row_blocks, shape.columns>();
}

template <class Element, int kHeadDim>
constexpr auto decoding_tiling() {
  constexpr Shape shape = decoding_shape(sizeof(Element), kHeadDim);
  return DecodingTiling<Element, kHeadDim, shape.warps, shape.columns>();
}

template <class Element, int kHeadDim, bool kGeneral, bool kRowsAreQueries>
constexpr auto backward_tiling() {
  constexpr Shape shape = backward_shape(sizeof(Element), kHeadDim, kGeneral, kRowsAreQueries);
  return Tiling<Element, kHeadDim, shape.warps, shape.row_blocks, shape.columns>();
}

template <class Element>
cudaError_t Kernels<Element>::forward(const ForwardParams& f, cudaStream_t stream) {
  return with_kernels_for(f.params, [&](auto head_dim, auto general) {
    using Tiling = decltype(forward_tiling<Element, head_dim, general>());
    const Params& p = f.params;
    Launches launches(stream);
    launches.add_token_groups(p);
    if (p.queries.n <= kFewQueries) {
      using Decoding = decltype(decoding_tiling<Element, head_dim>());
      const int64_t row_tiles = tiles_of(int64_t(p.queries.n) * p.group(), Decoding::kRows);
      launches.add(decoding_kernel<Decoding, general>, row_tiles * p.H_kv * f.parts.count * p.B, Decoding::kThreads,
                   Decoding::kSharedBytes, f);
      if (f.parts.count > 1) {
        launches.add(combining_kernel<Element>, int64_t(p.queries.n) * p.H * p.B, kThreadsOfCombining, 0, f);
      }
      return launches.error;
    }
    const auto add = [&](auto kernel) {
      launches.add(kernel, tiles_of(p.queries.n, Tiling::kRows) * p.H * p.B, Tiling::kThreads,
                   Tiling::shared_bytes(1, 2), f);
    };
    if (f.paged_k.table) {
      add(forward_kernel<Tiling, true, general>);
    } else {
      add(forward_kernel<Tiling, false, general>);
    }
    return launches.error;
  });
}

template <class Element>
cudaError_t Kernels<Element>::backward(const BackwardParams& g, cudaStream_t stream) {
  return with_kernels_for(g.params, [&](auto head_dim, auto general) {
    using OfQueries = decltype(backward_tiling<Element, head_dim, general, true>());
    using OfKeys = decltype(backward_tiling<Element, head_dim, general, false>());
    const Params& p = g.params;
    Launches launches(stream);
    launches.add_token_groups(p);
    launches.add(query_stats_kernel<Element>, tiles_of(padded(p.queries.n) * p.H * p.B, kThreadsOfPreparation / kWarp),
                 kThreadsOfPreparation, 0, g);
    launches.add(measure_kernel<OfQueries, general>, tiles_of(p.queries.n, OfQueries::kRows) * p.H * p.B,
                 OfQueries::kThreads, OfQueries::shared_bytes(1, 1), g);
    if (g.dq.data) {
      launches.add(backward_kernel<OfQueries, true, Wanted::of_scores, general>,
                   tiles_of(p.queries.n, OfQueries::kRows) * p.H * p.B, OfQueries::kThreads,
                   kBytesOfBackward<OfQueries>, g);
    }
    if (g.dk.data) {
      const auto add = [&](auto kernel) {
        launches.add(kernel, tiles_of(p.keys.n, OfKeys::kRows) * p.H_kv * p.B, OfKeys::kThreads,
                     kBytesOfBackward<OfKeys>, g);
      };
      if constexpr (head_dim * sizeof(Element) <= 256) {
        add(backward_kernel<OfKeys, false, Wanted::both, general>);
      } else {
        add(backward_kernel<OfKeys, false, Wanted::of_scores, general>);
        add(backward_kernel<OfKeys, false, Wanted::of_values, general>);
      }
    }
    if constexpr (general) {
      if (g.d_bias) {
        const Diagonals diagonals = OfQueries::diagonals(p.queries.n, p.keys.n);
        const int64_t tables =
            p.bias_by_distance ? diagonals.count() : int64_t(diagonals.query_tiles) * diagonals.key_tiles;
        launches.add(bias_gradient_kernel<OfQueries>, tables * g.bias_H * g.bias_B, OfQueries::kThreads,
                     OfQueries::shared_bytes(2, 2), g);
      }
    }
    return launches.error;
  });
}

}  // namespace fastattn::cuda
