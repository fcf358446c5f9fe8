/* Stored frames in C: CRC-32C, and copying between bare frames and stored frames with their checksums.
 *
 * The layout is kernel/tag.py's; the constants below repeat it and drivers/stored.py checks at import that they agree.
 * Everything is safe to call from several threads at once: no state but tables that are filled when the module loads.
 */
#ifndef ATTNIX_STORED_H
#define ATTNIX_STORED_H

#include <stddef.h>
#include <stdint.h>

/* CDEF */
enum { AX_CRC_TABLE = 0, AX_CRC_INSTRUCTION = 1, AX_CRC_FOLDING = 2 };

/* Why a stored frame was refused.  A code is reason | layer << 8; the layer counts for AX_STORED_LAYER alone. */
enum {
    AX_STORED_OK = 0,
    AX_STORED_RANGE = 1,     /* an index outside the arena: nothing was touched */
    AX_STORED_MAGIC = 2,     /* never written, or not ours */
    AX_STORED_HEADER = 3,    /* the header's own checksum */
    AX_STORED_VERSION = 4,
    AX_STORED_SHAPE = 5,     /* another frame size or number of layers */
    AX_STORED_IDENTITY = 6,  /* another model, dtype, ... */
    AX_STORED_KEY = 7,       /* another block */
    AX_STORED_TAG = 8,       /* the same key, but another parent, root, depth, length, domain or other tokens */
    AX_STORED_LAYER = 9      /* a layer's checksum */
};

typedef struct {
    int64_t frame_bytes;   /* of a bare frame: layers x layer_bytes */
    int64_t layer_bytes;
    int64_t stored_bytes;  /* of a stored frame */
    int32_t layers;
    int32_t tag_bytes;     /* of one packed tag */
    uint8_t identity[16];
} ax_stored;

int ax_crc_best(void);
uint32_t ax_crc32c(uint32_t crc, const void *data, size_t n);
uint32_t ax_crc32c_with(int way, uint32_t crc, const void *data, size_t n);
uint32_t ax_copy_crc32c(uint32_t crc, void *to, const void *from, size_t n);
uint32_t ax_copy_crc32c_with(int way, uint32_t crc, void *to, const void *from, size_t n);

void ax_header_encode(const ax_stored *s, void *header, const void *tag, const uint32_t *checksums, uint64_t generation);
void ax_header_stamp(void *header, uint64_t generation);
int ax_header_check(const ax_stored *s, const void *header, const void *tag);

int ax_seal(const ax_stored *s, const void *bare, int64_t bare_bytes, void *stored, int64_t stored_bytes,
            const int32_t *pairs, int n, const void *tags, int32_t *codes);
int ax_unseal(const ax_stored *s, void *bare, int64_t bare_bytes, const void *stored, int64_t stored_bytes,
              const int32_t *pairs, int n, const void *tags, int32_t *codes);
int ax_unseal_gated(const ax_stored *s, void *bare, int64_t bare_bytes, const void *stored, int64_t stored_bytes,
                    const int32_t *pairs, int n, const void *tags, int32_t *codes, int64_t *gate, int64_t ticket,
                    int group);
int ax_verify(const ax_stored *s, const void *stored, int64_t stored_bytes, const int32_t *indices, int n,
              const void *tags, int32_t *codes);
int ax_verify_layers(const ax_stored *s, const void *stored, int64_t stored_bytes, const int32_t *indices, int n,
                     const void *tags, int32_t *codes, int first, int count);
int ax_void(const ax_stored *s, void *stored, int64_t stored_bytes, const int32_t *indices, int n, int32_t *codes);
void ax_seal_placed(const ax_stored *s, void *stored, const int32_t *indices, int n, const void *tags, const int32_t *codes);
int ax_verify_one(const ax_stored *s, const void *header, const void *payload, const void *tag);
void ax_copy_layers(const ax_stored *s, void *to, const void *from, int count, uint32_t *checksums);
int ax_compare_layers(const void *header, const uint32_t *checksums, int first, int count);
void ax_gate_store(int64_t *gate, int64_t value);
int64_t ax_gate_load(const int64_t *gate);
/* END */

enum { AX_HEADER_BYTES = 4096, AX_TAG_OFFSET = 64, AX_CHECKSUM_OFFSET = 2048, AX_TAG_HEAD_BYTES = 128 };
enum { AX_STORED_VERSION_NUMBER = 1, AX_GATE_FAILED = 1023 };

#endif
