/* Vectors of AX_VL floats for one instruction set, through GCC's vector extensions: the same source gives SSE/NEON
 * (AX_VL 4), AVX2 (8) and AVX-512 (16).  Only what the extensions lack (max, horizontal max) is written per set.
 * Included by isa_*.c after their target pragma. */
#include <string.h>
#if AX_VL > 4
#include <immintrin.h>
#endif

#define AX_INLINE static inline __attribute__((always_inline, unused))

typedef float vf __attribute__((vector_size(AX_VL * 4)));
typedef int32_t vi __attribute__((vector_size(AX_VL * 4)));
typedef float vf_any __attribute__((vector_size(AX_VL * 4), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(AX_VL * 4), aligned(4), may_alias));

AX_INLINE vf vload(const float *p) { return *(const vf_any *)p; }
AX_INLINE void vstore(float *p, vf x) { *(vf_any *)p = x; }
AX_INLINE vf vsplat(float x) { return x - (vf){0}; }

AX_INLINE vf vmax(vf a, vf b) {
#if AX_VL == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif AX_VL == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    vi wins = a > b;
    return (vf)(((vi)a & wins) | ((vi)b & ~wins));
#endif
}

AX_INLINE float vhmax(vf a) { /* exact in any order */
#if AX_VL == 16
    return _mm512_reduce_max_ps((__m512)a);
#else
    float best = a[0];
    for (int i = 1; i < AX_VL; i++) best = a[i] > best ? a[i] : best;
    return best;
#endif
}

AX_INLINE float vhsum(vf a) { /* one fixed tree */
    float lane[AX_VL];
    memcpy(lane, &a, sizeof lane);
    for (int half = AX_VL / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

/* a where x > limit, else 0 */
AX_INLINE vf vkeep_above(vf a, vf x, float limit) {
#if AX_VL == 16
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ), (__m512)a);
#else
    return (vf)((vi)a & (vi)(x > vsplat(limit)));
#endif
}

/* 2^x for x <= 127; exactly 0 below -126 (so also for -inf).  Round to an integer by the magic-number addition, a
 * Taylor polynomial of degree 6 on [-1/2, 1/2] (relative error 1.2e-7), the integer added into the exponent bits. */
AX_INLINE vf vexp2(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    vf y = vmax(x, vsplat(-126.0f));
    vf shifted = y + magic;
    vf f = y - (shifted - magic);
    vf p = vsplat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    vi n = (vi)shifted << 23;
    return vkeep_above((vf)((vi)p + n), x, -126.0f);
}
