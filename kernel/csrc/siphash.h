/* SipHash-2-4 with a 128-bit result (Aumasson and Bernstein, INDOCRYPT 2012; the 128-bit variant of their reference
 * code), for any bytes and for the one shape that is hot: a 16-byte key followed by the tokens of a block. */
#ifndef ATTNIX_SIPHASH_H
#define ATTNIX_SIPHASH_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "attnix needs a little-endian machine: tokens and keys are stored as they travel"
#endif

typedef struct {
    uint64_t lo, hi;
} Key;

typedef struct {
    uint64_t v0, v1, v2, v3;
} Sip;

static inline uint64_t sip_rotl(uint64_t x, int n) { return x << n | x >> (64 - n); }

static inline void sip_round(Sip *s) {
    s->v0 += s->v1;
    s->v2 += s->v3;
    s->v1 = sip_rotl(s->v1, 13) ^ s->v0;
    s->v3 = sip_rotl(s->v3, 16) ^ s->v2;
    s->v0 = sip_rotl(s->v0, 32) + s->v3;
    s->v2 += s->v1;
    s->v3 = sip_rotl(s->v3, 21) ^ s->v0;
    s->v1 = sip_rotl(s->v1, 17) ^ s->v2;
    s->v2 = sip_rotl(s->v2, 32);
}

static inline void sip_word(Sip *s, uint64_t m) {
    s->v3 ^= m;
    sip_round(s);
    sip_round(s);
    s->v0 ^= m;
}

static inline Sip sip_begin(uint64_t k0, uint64_t k1) {
    return (Sip){0x736f6d6570736575ULL ^ k0, 0x646f72616e646f6dULL ^ k1 ^ 0xee, 0x6c7967656e657261ULL ^ k0,
                 0x7465646279746573ULL ^ k1};
}

static inline Key sip_end(Sip *s) {
    Key key;
    s->v2 ^= 0xee;
    for (int i = 0; i < 4; i++) sip_round(s);
    key.lo = s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
    s->v1 ^= 0xdd;
    for (int i = 0; i < 4; i++) sip_round(s);
    key.hi = s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
    return key;
}

/* The rest of a message of `total_bytes`, of which `size_bytes` are left at `data`. */
static inline Key sip_finish(Sip *s, const uint8_t *data, size_t size_bytes, size_t total_bytes) {
    uint64_t m;
    for (; size_bytes >= 8; data += 8, size_bytes -= 8) {
        memcpy(&m, data, 8);
        sip_word(s, m);
    }
    m = 0;
    if (size_bytes) memcpy(&m, data, size_bytes);
    sip_word(s, m | (uint64_t)(total_bytes & 0xff) << 56);
    return sip_end(s);
}

#endif
