// gm_rms_norm_quant and gm_silu_and_mul_quant under the sanitizers against float64: rows of every width
// around a vector and around a group, padded rows, with and without a residual, scales that are given, of
// rows and of groups, e4m3 and int8, every dtype and level.
#include "asan.h"
#include "asan_values.h"
#include "calls/silu_and_mul_quant.h"
#include "calls/rms_norm_quant.h"

#include <algorithm>
#include <iterator>
#include <vector>

// The number of a format, columns of a group (0: the row), least amax (0: the scale is given), largest code.
struct Form {
  GmRmsNormQuantCall::Format format;
  int64_t group;
  float least, top;
};
int64_t groups_of(const Form& form, int64_t cols) {
  const int64_t group = form.group ? form.group : cols;
  return group ? (cols + group - 1) / group : 0;
}
int64_t scale_stride(const Form& form, int64_t cols) { return groups_of(form, cols) + 2; }  // padded rows
GM_LEVELS(gm_rms_norm_quant, (const GmRmsNormQuantCall&));
GM_LEVELS(gm_silu_and_mul_quant, (const GmSiluAndMulQuantCall&));
struct Norm {  // by position
  decltype(gm_rms_norm_quant_levels[0].call) entry;
  int operator()(const void* x, int64_t x_stride, void* residual, int64_t residual_stride, const void* weight,
                 void* codes, int64_t codes_stride, float* scales, int64_t m, int64_t n, float eps,
                 const Form& form, int type) const {
    const GmRmsNormQuantCall call{.x = x,
                                  .x_stride = {x_stride},
                                  .residual = residual,
                                  .residual_stride = {residual_stride},
                                  .weight = weight,
                                  .eps = eps,
                                  .codes = codes,
                                  .codes_stride = {codes_stride},
                                  .scales = scales,
                                  .scales_stride = {scale_stride(form, n), 1},
                                  .format = form.format,
                                  .m = m,
                                  .n = n,
                                  .x_type = type,
                                  .q_type = form.top == 127 ? 5 : 3};
    return entry(call);
  }
};
struct Gate {  // by position
  decltype(gm_silu_and_mul_quant_levels[0].call) entry;
  int operator()(const void* x, int64_t x_stride, void* codes, int64_t codes_stride, float* scales, int64_t m,
                 int64_t n, const Form& form, int type) const {
    const GmSiluAndMulQuantCall call{.x = x,
                                     .x_stride = {x_stride},
                                     .codes = codes,
                                     .codes_stride = {codes_stride},
                                     .scales = scales,
                                     .scales_stride = {scale_stride(form, n), 1},
                                     .format = GmSiluAndMulQuantCall::Format(form.format),
                                     .m = m,
                                     .n = n,
                                     .x_type = type,
                                     .q_type = form.top == 127 ? 5 : 3};
    return entry(call);
  }
};

// Codes and scales of values that the kernel may have rounded to its dtype.
void check(const std::vector<double>& values, int64_t rows, int64_t cols, Buffer<uint8_t>& codes,
           Buffer<float>& scales, const Form& f, double eps) {
  const int64_t group = f.group ? f.group : cols, groups = groups_of(f, cols);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      double amax = f.least;
      const int64_t end = std::min((g + 1) * group, cols);
      for (int64_t c = g * group; c < end; ++c) amax = std::fmax(amax, std::fabs(values[r * cols + c]));
      const float scale = f.least == 0 ? scales.data()[0] : scales(r, g);
      if (f.least != 0) CHECK(std::fabs(scale * f.top - amax) <= (eps + 1e-6) * amax);
      for (int64_t c = g * group; c < end; ++c) {
        const double wanted = values[r * cols + c],
                     code = f.top == 127 ? double(int8_t(codes(r, c))) : e4m3(codes(r, c));
        const double step = f.top == 127 ? 0.5 : std::fmax(std::fabs(wanted / scale) / 16, 1.0 / 1024);
        CHECK(std::fabs(code * scale - wanted) <= 1.02 * step * scale + (2 * eps + 1e-6) * std::fabs(wanted));
      }
    }
}

template <class D>
void run(Norm norm, Gate gate, int dtype, int64_t cols, const Form& f, bool residual) {
  using T = typename D::T;
  const int64_t rows = 3, groups = groups_of(f, cols);
  Numbers numbers;
  Buffer<T> x(rows, cols, cols + 3), sum(rows, cols, cols + 1), w(cols), both(rows, 2 * cols, 2 * cols + 3);
  Buffer<uint8_t> codes(rows, cols, cols + 5);
  Buffer<float> scales(f.least == 0 ? 1 : rows, groups, scale_stride(f, cols));
  for (int64_t c = 0; c < cols; ++c) w(0, c) = D::put(numbers.eighths());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < 2 * cols; ++c) {
      both(r, c) = D::put(numbers.eighths());
      if (c < cols) x(r, c) = D::put(numbers.eighths()), sum(r, c) = D::put(numbers.eighths());
    }
  std::vector<double> values(rows * cols);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < cols; ++c) {
      double& v = values[r * cols + c];
      v = D::get(x(r, c)) + (residual ? D::get(sum(r, c)) : 0);  // eighths up to 4: exact in every dtype
      squares += v * v;
    }
    for (int64_t c = 0; c < cols; ++c)
      values[r * cols + c] *= D::get(w(0, c)) / std::sqrt(squares / double(cols) + 0.25);
  }
  scales.data()[0] = 0.0625f;
  CHECK(norm(x.data(), cols + 3, residual ? sum.data() : nullptr, cols + 1, w.data(), codes.data(), cols + 5,
             scales.data(), rows, cols, 0.25f, f, dtype) == 0);
  check(values, rows, cols, codes, scales, f, D::kEps);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const double g = D::get(both(r, c));
      values[r * cols + c] = g / (1 + std::exp(-g)) * D::get(both(r, cols + c));
    }
  scales.data()[0] = 0.0625f;
  CHECK(gate(both.data(), 2 * cols + 3, codes.data(), cols + 5, scales.data(), rows, cols, f, dtype) == 0);
  check(values, rows, cols, codes, scales, f, D::kEps);
}

template <class D>
void all(Norm norm, Gate gate, int dtype) {
  using Format = GmRmsNormQuantCall::Format;
  const Form forms[] = {{Format::fp8, 0, 0, 448},
                        {Format::fp8_token, 0, 1e-10f, 448},
                        {Format::fp8_g128, 128, 1e-4f, 448},
                        {Format::int8_token, 0, 1e-10f, 127},
                        {Format::int8_g32, 32, 1e-10f, 127},
                        {Format::int8_g128, 128, 1e-10f, 127}};
  for (int64_t cols : {1, 3, 8, 15, 16, 17, 31, 33, 64, 127, 129, 257})
    for (const Form& f : forms)
      for (bool residual : {false, true}) run<D>(norm, gate, dtype, cols, f, residual);
  const auto empty = [&](int64_t cols, int type) {
    const int a = norm(nullptr, 0, nullptr, 0, nullptr, nullptr, 0, nullptr, 0, cols, 0, forms[1], type);
    CHECK(a == gate(nullptr, 0, nullptr, 0, nullptr, 0, cols, forms[1], type));
    return a;
  };
  CHECK(empty(4, dtype) == 0 && empty(0, dtype) == -2 && empty(4, 99) == -1);
}

int main() {
  int ran = 0;
  for (size_t i = 0; i < std::size(gm_rms_norm_quant_levels); ++i) {
    const auto& norm = gm_rms_norm_quant_levels[i];
    const auto& gate = gm_silu_and_mul_quant_levels[i];
    if (norm.call == nullptr || gate.call == nullptr) continue;
    const bool runs = runs_here(norm.name);
    if (!runs_here(gate.name) || !runs) continue;  // both say whether they run
    all<Dtype<0>>({norm.call}, {gate.call}, 0), all<Dtype<1>>({norm.call}, {gate.call}, 1);
    all<Dtype<2>>({norm.call}, {gate.call}, 2);
    ++ran;
  }
  CHECK(ran > 0);
  std::printf("quantized_rows: %d level(s)\n", ran);
}
