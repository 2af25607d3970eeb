// Split-KV reduction of attention: parts of a context are added in the order of the keys, with the same
// rounding in every kernel, and written to the output.
#pragma once
#include "_attention_types_sm90.cuh"
#include "sm90/ptx.cuh"
#include "sm90/store_16.cuh"

#ifdef __CUDACC__
namespace gm {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// top: the maximum that the sum of weights refers to, log2-scaled. A row without keys has the sum 0; that of a query which is
// not a number is NaN, as is the result.
__device__ __forceinline__ float log_sum_exp(float top, float sum) {
  return sum == 0.f ? -INFINITY : (top + __log2f(sum)) * kLn2;
}

// Epilogue of a row: log-sum-exp and normalization, from the maximum of its raw scores and its sum of weights.
struct RowEpilogue {
  float top, sum, factor = 1.f;  // maximum, log2-scaled; sum of weights; factor of both sums after add_sink
  __device__ __forceinline__ RowEpilogue(float m, float l, float scale_log2)
      : top(m == -INFINITY ? -INFINITY : m * scale_log2), sum(l) {}
  // Attention sink: a score that has a weight and no value.
  __device__ __forceinline__ void add_sink(float score) {
    const float sink = score * kLog2e, largest = fmaxf(top, sink);
    if (largest > -INFINITY) {
      factor = exp2_approx(top - largest);
      sum = sum * factor + exp2_approx(sink - largest);
      top = largest;
    }
  }
  // Factor that normalizes the sums of values.
  __device__ __forceinline__ float inverse() const { return sum == 0.f ? 0.f : factor / sum; }
  __device__ __forceinline__ float lse() const { return log_sum_exp(top, sum); }
};

// Stores row lane / 4 + 8 r of 16 rows of accumulators, times `by`, in 16-byte chunks that a quad transposes
// among its lanes. columns: of the tensor.
template <typename T, int N>
__device__ __forceinline__ void store_row(T* to, const float (&o)[N], int r, float by, bool exists,
                                          int columns) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int b = 0; b < N / 16; ++b) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = (b * 4 + j) * 4 + r * 2;
      w[j] = packed<T>(o[i] * by, o[i + 1] * by);
    }
    transpose_quad(w, lane);
    const int column = (b * 4 + (lane & 3)) * 8;
    if (exists && column < columns) store_16(to + column, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

// Partial result of a row over some keys: four elements, maximum of the raw scores and sum of weights.
struct RowPart {
  float4 o;
  float m, l;
};

// Rescaling factors of two parts of a row, the earlier one first; m becomes the maximum of both.
__device__ __forceinline__ float2 part_factors(float before, float& m, float scale_log2) {
  const float mine = m;
  m = fmaxf(before, m);
  const float base = m == -INFINITY ? 0.f : __fmul_rn(m, scale_log2);
  return make_float2(exp2_approx(__fmaf_rn(before, scale_log2, -base)),
                     exp2_approx(__fmaf_rn(mine, scale_log2, -base)));
}
__device__ __forceinline__ float add_scaled(float before, float mine, float2 factors) {
  return __fmaf_rn(before, factors.x, __fmul_rn(mine, factors.y));
}

// part = before + part.
__device__ __forceinline__ void add_before(RowPart& part, const RowPart& before, float scale_log2) {
  const float2 by = part_factors(before.m, part.m, scale_log2);
  part.o.x = add_scaled(before.o.x, part.o.x, by), part.o.y = add_scaled(before.o.y, part.o.y, by);
  part.o.z = add_scaled(before.o.z, part.o.z, by), part.o.w = add_scaled(before.o.w, part.o.w, by);
  part.l = add_scaled(before.l, part.l, by);
}

// Writes elements `element` .. + 3 of a row of a KV head, and the row's log-sum-exp. token: of row 0.
template <typename T, typename P>
__device__ __forceinline__ void write_part(const P& p, int64_t token, int kv_head, int row, int element,
                                           const RowPart& part) {
  if (element >= p.head_dim) return;  // padding of the head
  const int in = row * p.by_group >> 16, head = kv_head * p.group + row - in * p.group;
  token += in;
  RowEpilogue epilogue(part.m, part.l, p.scale_log2);
  if (p.sinks != nullptr) epilogue.add_sink(p.sinks[head]);
  const float by = epilogue.inverse();
  if (p.lse != nullptr && element == 0) p.lse[token * p.heads + head] = epilogue.lse();
  using Element = typename Stored<T>::type;
  *reinterpret_cast<uint2*>(static_cast<Element*>(p.out) + token * p.out_token + head * p.out_head +
                            element) = make_uint2(packed_as<T>(p, part.o.x * by, part.o.y * by),
                                                  packed_as<T>(p, part.o.z * by, part.o.w * by));
}

// Reduces `count` parts of the rows of a KV head and writes them. By `threads` threads, of which this is
// `thread`. AHEAD: parts that are loaded at a time. place(part, row): addresses of the D sums of a row, and
// of its statistics (maximum and sum of weights).
struct PartAddress {
  const float* o;
  const float2* stats;
};
template <typename T, int D, int AHEAD, typename P, typename Place>
__device__ __forceinline__ void write_parts(const P& p, int64_t token, int kv_head, int rows, int count,
                                            int thread, int threads, Place place) {
#pragma unroll 1
  for (int i = thread; i < rows * (D / 4); i += threads) {
    const int row = i / (D / 4), element = i % (D / 4) * 4;
    RowPart sum;
#pragma unroll 1
    for (int c = 0; c < count; c += AHEAD) {
      RowPart read[AHEAD];
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        if (c + a >= count) break;
        const PartAddress at = place(c + a, row);
        read[a].o = __ldcg(reinterpret_cast<const float4*>(at.o + element));
        const float2 stats = __ldcg(at.stats);
        read[a].m = stats.x, read[a].l = stats.y;
      }
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        if (c + a >= count) break;
        if (c + a > 0) add_before(read[a], sum, p.scale_log2);
        sum = read[a];
      }
    }
    write_part<T>(p, token, kv_head, row, element, sum);
  }
}

}  // namespace gm
#endif
