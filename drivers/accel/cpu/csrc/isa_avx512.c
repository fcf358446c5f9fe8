/* AVX-512 F, BW, DQ, VL. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#include "engine.h"
#define AX_VL 16
#define AX_PAIRED 0
#define AX_NAME(x) x##_avx512
#include "simd.h"
#include "isa_kernels.h"
#else
typedef int ax_no_avx512;
#endif
