/* AVX2 and FMA. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#include "engine.h"
#define AX_VL 8
#define AX_PAIRED 0
#define AX_NAME(x) x##_avx2
#include "simd.h"
#include "isa_kernels.h"
#else
typedef int ax_no_avx2;
#endif
