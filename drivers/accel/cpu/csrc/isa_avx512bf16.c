/* AVX-512 with BF16: products of bfloat16 pairs. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#include "engine.h"
#define AX_VL 16
#define AX_PAIRED 1
#define AX_NAME(x) x##_avx512bf16
#include "simd.h"
#include "isa_kernels.h"
#else
typedef int ax_no_avx512bf16;
#endif
