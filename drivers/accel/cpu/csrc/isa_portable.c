/* Plain C: whatever the compiler's baseline has (SSE2, NEON). */
#include "engine.h"
#define AX_VL 4
#define AX_PAIRED 0
#define AX_NAME(x) x##_portable
#include "simd.h"
#include "isa_kernels.h"
