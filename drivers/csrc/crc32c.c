/* CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, as in iSCSI: RFC 3720 section 12.1 and appendix B.4), four ways,
 * the best of which is chosen when the module loads:
 *
 * folding      carry-less multiplication on 512-bit vectors (V. Gopal et al., "Fast CRC Computation for Generic
 *              Polynomials Using PCLMULQDQ Instruction", Intel 2009).  Its loop leaves load and store ports almost idle, so
 *              the copying form stores each vector it has loaded, past the caches, and runs at the memory's speed.
 * instruction  the processor's CRC instruction answers after some cycles but takes 8 bytes in each, so three independent
 *              streams run side by side and are joined: crc(A B) = shift(crc(A), |B|) ^ crc(B), where appending |B| zero
 *              bytes is linear over GF(2): four 256-entry tables for a fixed |B| (as Mark Adler has described it).
 * table        slicing-by-8 (Kounavis and Berry, "A systematic approach to building high performance software-based CRC
 *              generators", ISCC 2005).
 */
#include "stored.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "stored frames are little-endian and read in place"
#endif

#define POLYNOMIAL 0x82F63B78u
#define LONG_BYTES 1024  /* per stream: a multiple of 64 */
#define SHORT_BYTES 128

static uint32_t slice[8][256];
static uint32_t long_shift[4][256];   /* appends LONG_BYTES zeros */
static uint32_t short_shift[4][256];
static int best = AX_CRC_TABLE;

static uint32_t append_zeros(uint32_t crc, int n)
{
    while (n--) crc = crc >> 8 ^ slice[0][crc & 255];
    return crc;
}

static void fill_shift(uint32_t table[4][256], int n)
{
    for (int byte = 0; byte < 4; byte++) {
        table[byte][0] = 0;
        for (int bit = 0; bit < 8; bit++) {
            uint32_t image = append_zeros(1u << (8 * byte + bit), n);
            for (int low = 0; low < 1 << bit; low++) table[byte][1 << bit | low] = image ^ table[byte][low];
        }
    }
}

static inline uint32_t shift(uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 255] ^ table[1][crc >> 8 & 255] ^ table[2][crc >> 16 & 255] ^ table[3][crc >> 24];
}

__attribute__((constructor)) static void fill_tables(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        slice[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) slice[k][i] = slice[k - 1][i] >> 8 ^ slice[0][slice[k - 1][i] & 255];
    fill_shift(long_shift, LONG_BYTES);
    fill_shift(short_shift, SHORT_BYTES);
}

static inline uint64_t load8(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static uint32_t by_table(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = ~crc;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t v = load8(p) ^ crc;
        crc = slice[7][v & 255] ^ slice[6][v >> 8 & 255] ^ slice[5][v >> 16 & 255] ^ slice[4][v >> 24 & 255]
            ^ slice[3][v >> 32 & 255] ^ slice[2][v >> 40 & 255] ^ slice[1][v >> 48 & 255] ^ slice[0][v >> 56];
    }
    for (; n; p++, n--) crc = crc >> 8 ^ slice[0][(crc ^ *p) & 255];
    return ~crc;
}

#if defined(__x86_64__)
#define HAVE_INSTRUCTION 1
#define INSTRUCTION __attribute__((target("sse4.2")))
#define CRC8(crc, v) ((uint32_t)_mm_crc32_u64(crc, v))
#define CRC1(crc, v) _mm_crc32_u8(crc, v)
#elif defined(__aarch64__)
#define HAVE_INSTRUCTION 1
#define INSTRUCTION __attribute__((target("+crc")))
#define CRC8(crc, v) __crc32cd(crc, v)
#define CRC1(crc, v) __crc32cb(crc, v)
#endif

#ifdef HAVE_INSTRUCTION
/* 3 x SIZE bytes from *p: three streams, joined.  Updates crc and p. */
#define THREE_STREAMS(SIZE, TABLE)                                                                                     \
    {                                                                                                                  \
        uint32_t a = crc, b = 0, c = 0;                                                                                \
        for (const uint8_t *end = p + (SIZE); p < end; p += 8) {                                                       \
            a = CRC8(a, load8(p));                                                                                     \
            b = CRC8(b, load8(p + (SIZE)));                                                                            \
            c = CRC8(c, load8(p + 2 * (SIZE)));                                                                        \
        }                                                                                                              \
        crc = shift(TABLE, shift(TABLE, a) ^ b) ^ c;                                                                   \
        p += 2 * (SIZE);                                                                                               \
    }

INSTRUCTION static uint32_t by_instruction(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = ~crc;
    for (; n >= 3 * LONG_BYTES; n -= 3 * LONG_BYTES) THREE_STREAMS(LONG_BYTES, long_shift)
    for (; n >= 3 * SHORT_BYTES; n -= 3 * SHORT_BYTES) THREE_STREAMS(SHORT_BYTES, short_shift)
    for (; n >= 8; p += 8, n -= 8) crc = CRC8(crc, load8(p));
    for (; n; p++, n--) crc = CRC1(crc, *p);
    return ~crc;
}
#endif

#if defined(__x86_64__)
#define HAVE_FOLDING 1
#define FOLDING __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,vpclmulqdq")))

/* fold_by[i]: moves a 512-bit vector forward by 64 * (i + 1) bytes.  Bit i of a 64-bit half stands for x^(63 - i), so a
 * carry-less product comes out one power short, which is why the exponents are odd-looking. */
static uint64_t fold_by[4][2];

static uint64_t power(int n) /* x^n mod P */
{
    uint32_t crc = 0x80000000u;
    while (n--) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
    return (uint64_t)crc << 32;
}

__attribute__((constructor)) static void fill_folds(void)
{
    for (int i = 0; i < 4; i++) {
        fold_by[i][0] = power(512 * (i + 1) + 63);
        fold_by[i][1] = power(512 * (i + 1) - 1);
    }
}

FOLDING static inline __m512i factor(int i)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)fold_by[i]));
}

FOLDING static inline __m512i fold(__m512i x, __m512i k, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00), _mm512_clmulepi64_epi128(x, k, 0x11), next, 0x96);
}

/* What is left of the 256 bytes in four vectors is 64 bytes with the same remainder, so their CRC is the state. */
#define DEFINE_FOLDING(NAME, STORE, FENCE)                                                                             \
    FOLDING static uint32_t NAME(uint32_t crc, uint8_t *to, const uint8_t *p, size_t n)                                \
    {                                                                                                                  \
        crc = ~crc;                                                                                                    \
        if (n >= 512) {                                                                                                \
            __m512i k = factor(3), a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);                          \
            __m512i c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);                                  \
            STORE(0, a) STORE(64, b) STORE(128, c) STORE(192, d)                                                       \
            a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));                              \
            for (p += 256, to += 256, n -= 256; n >= 256; p += 256, to += 256, n -= 256) {                             \
                __m512i w = _mm512_loadu_si512(p), x = _mm512_loadu_si512(p + 64);                                     \
                __m512i y = _mm512_loadu_si512(p + 128), z = _mm512_loadu_si512(p + 192);                              \
                STORE(0, w) STORE(64, x) STORE(128, y) STORE(192, z)                                                   \
                a = fold(a, k, w), b = fold(b, k, x), c = fold(c, k, y), d = fold(d, k, z);                            \
            }                                                                                                          \
            d = fold(c, factor(0), fold(b, factor(1), fold(a, factor(2), d)));                                         \
            uint64_t rest[8], state = 0;                                                                               \
            _mm512_storeu_si512(rest, d);                                                                              \
            for (int i = 0; i < 8; i++) state = _mm_crc32_u64(state, rest[i]);                                         \
            crc = (uint32_t)state;                                                                                     \
            FENCE;                                                                                                     \
        }                                                                                                              \
        return by_instruction(~crc, p, n);                                                                             \
    }

#define NO_STORE(at, v)
#define STORE_PAST_CACHES(at, v) _mm512_stream_si512((__m512i *)(to + (at)), v);
DEFINE_FOLDING(by_folding, NO_STORE, (void)to)
DEFINE_FOLDING(copy_by_folding, STORE_PAST_CACHES, _mm_sfence()) /* the fence: a gate stored later must not overtake */
#endif

__attribute__((constructor)) static void choose(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2")) best = AX_CRC_INSTRUCTION;
    if (best == AX_CRC_INSTRUCTION && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul"))
        best = AX_CRC_FOLDING;
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) best = AX_CRC_INSTRUCTION;
#endif
}

int ax_crc_best(void)
{
    return best;
}

/* The `way`, or the best one that this processor has below it. */
uint32_t ax_crc32c_with(int way, uint32_t crc, const void *data, size_t n)
{
    if (way > best) way = best;
#ifdef HAVE_FOLDING
    if (way == AX_CRC_FOLDING) return by_folding(crc, NULL, data, n);
#endif
#ifdef HAVE_INSTRUCTION
    if (way == AX_CRC_INSTRUCTION) return by_instruction(crc, data, n);
#endif
    return by_table(crc, data, n);
}

uint32_t ax_crc32c(uint32_t crc, const void *data, size_t n)
{
    return ax_crc32c_with(best, crc, data, n);
}

/* Without folding: a chunk is checksummed, which brings it into the nearest cache, and copied from there. */
#define CHUNK_BYTES (3 * LONG_BYTES)

uint32_t ax_copy_crc32c_with(int way, uint32_t crc, void *to, const void *from, size_t n)
{
    uint8_t *d = to;
    const uint8_t *s = from;
    if (way > best) way = best;
#ifdef HAVE_FOLDING
    if (way == AX_CRC_FOLDING && n >= 512) {
        size_t head = -(uintptr_t)d & 63, whole = (n - head) & ~(size_t)255; /* streaming stores want 64-byte alignment */
        memcpy(d, s, head);
        memcpy(d + head + whole, s + head + whole, n - head - whole);
        crc = by_instruction(crc, s, head);
        if (whole < 512) { /* too short to fold */
            memcpy(d + head, s + head, whole);
            crc = by_instruction(crc, s + head, whole);
        } else {
            crc = copy_by_folding(crc, d + head, s + head, whole);
        }
        return by_instruction(crc, s + head + whole, n - head - whole);
    }
#endif
    while (n) {
        size_t chunk = n < CHUNK_BYTES ? n : CHUNK_BYTES;
        crc = ax_crc32c_with(way, crc, s, chunk);
        memcpy(d, s, chunk);
        d += chunk;
        s += chunk;
        n -= chunk;
    }
    return crc;
}

uint32_t ax_copy_crc32c(uint32_t crc, void *to, const void *from, size_t n)
{
    return ax_copy_crc32c_with(best, crc, to, from, n);
}
