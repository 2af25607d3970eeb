// Shapes of CTAs for sm_75 in the place of those that an entry header for sm_80 has (gemm_entry.h here, entry.h of grouped_linear).
//
// Those headers instantiate GM_OPERANDS(K), which a source for sm_80 defines as K(type of x, type of scales, class) ...: K
// makes all their shapes of an operand. Here it is a list of GM_SM75_SHAPES for each operand of GM_SM75_OPERANDS, by the
// macros that make one kernel, or its entry in the host's table. All have two slots of x and one of weights.
#pragma once
#define GM_OPERANDS(K) GM_SM75_##K
#define GM_SM75_GM_KERNELS GM_SM75_OPERANDS(GM_SM75_KERNELS)
#define GM_SM75_GM_INSTANCES GM_SM75_OPERANDS(GM_SM75_INSTANCES)
#define GM_SM75_KERNELS(...) GM_SM75_SHAPES(GM_SM75_KERNEL, __VA_ARGS__)
#define GM_SM75_INSTANCES(...) GM_SM75_SHAPES(GM_SM75_INSTANCE, __VA_ARGS__)
#define GM_SM75_KERNEL(mt, warps, ctas, ...) GM_KERNEL(mt, warps, 2, 1, ctas, fp16, __VA_ARGS__)
#define GM_SM75_INSTANCE(mt, warps, ctas, ...) GM_INSTANCE(mt, warps, 2, 1, ctas, fp16, __VA_ARGS__)
