/* Stored frames: header, sealing (bare frame -> stored frame), unsealing (back, checked), verifying in place.
 *
 * Decisions are made on fields in the order in which they can be trusted: magic, the header's own checksum, then what the
 * header says.  Items of a batch fail one by one; a failed item of `unseal` may have left junk in its bare frame.
 */
#include "stored.h"

#include <string.h>

static const char MAGIC[8] = {'A', 'T', 'N', 'X', 'B', 'L', 'K', '1'};

/* The header as it lies in memory; offsets as in kernel/tag.py. */
typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t header_crc;
    uint64_t generation;
    uint32_t payload_bytes;
    uint32_t layers;
    uint8_t identity[16];
    uint8_t zero[16];
    uint8_t tag[AX_CHECKSUM_OFFSET - AX_TAG_OFFSET];
    uint32_t checksums[(AX_HEADER_BYTES - AX_CHECKSUM_OFFSET) / 4];
} header_t;

_Static_assert(sizeof(header_t) == AX_HEADER_BYTES, "header size");
_Static_assert(offsetof(header_t, header_crc) == 12, "header checksum");
_Static_assert(offsetof(header_t, identity) == 32, "identity");
_Static_assert(offsetof(header_t, tag) == AX_TAG_OFFSET, "tag");
_Static_assert(offsetof(header_t, checksums) == AX_CHECKSUM_OFFSET, "checksums");

enum { KEY_BYTES = 16 };

static uint32_t header_crc(const header_t *h)
{
    const uint32_t zero = 0;
    const size_t at = offsetof(header_t, header_crc);
    uint32_t crc = ax_crc32c(0, h, at);
    crc = ax_crc32c(crc, &zero, sizeof zero);
    return ax_crc32c(crc, (const char *)h + at + sizeof zero, AX_HEADER_BYTES - at - sizeof zero);
}

void ax_header_encode(const ax_stored *s, void *header, const void *tag, const uint32_t *checksums, uint64_t generation)
{
    header_t *h = header;
    memset(h, 0, sizeof *h);
    memcpy(h->magic, MAGIC, sizeof MAGIC);
    h->version = AX_STORED_VERSION_NUMBER;
    h->generation = generation;
    h->payload_bytes = (uint32_t)s->frame_bytes;
    h->layers = (uint32_t)s->layers;
    memcpy(h->identity, s->identity, sizeof h->identity);
    memcpy(h->tag, tag, (size_t)s->tag_bytes);
    memcpy(h->checksums, checksums, 4 * (size_t)s->layers);
    h->header_crc = header_crc(h);
}

/* Give a valid header another generation. */
void ax_header_stamp(void *header, uint64_t generation)
{
    header_t *h = header;
    if (h->generation == generation) return;
    h->generation = generation;
    h->header_crc = header_crc(h);
}

/* tag: what the header must carry, or NULL to accept any. */
int ax_header_check(const ax_stored *s, const void *header, const void *tag)
{
    const header_t *h = header;
    if (memcmp(h->magic, MAGIC, sizeof MAGIC)) return AX_STORED_MAGIC;
    if (h->header_crc != header_crc(h)) return AX_STORED_HEADER;
    if (h->version != AX_STORED_VERSION_NUMBER) return AX_STORED_VERSION;
    if (h->payload_bytes != s->frame_bytes || h->layers != (uint32_t)s->layers) return AX_STORED_SHAPE;
    if (memcmp(h->identity, s->identity, sizeof h->identity)) return AX_STORED_IDENTITY;
    if (!tag) return AX_STORED_OK;
    if (memcmp(h->tag, tag, KEY_BYTES)) return AX_STORED_KEY;
    if (memcmp(h->tag, tag, (size_t)s->tag_bytes)) return AX_STORED_TAG;
    return AX_STORED_OK;
}

static int layer_code(int layer)
{
    return AX_STORED_LAYER | layer << 8;
}

/* Copy `count` whole layers, and what their checksums turn out to be. */
void ax_copy_layers(const ax_stored *s, void *to, const void *from, int count, uint32_t *checksums)
{
    for (int l = 0; l < count; l++) {
        int64_t at = l * s->layer_bytes;
        checksums[l] = ax_copy_crc32c(0, (char *)to + at, (const char *)from + at, (size_t)s->layer_bytes);
    }
}

/* Whether layers first .. first + count - 1, whose checksums are given, are those that a checked header was made for. */
int ax_compare_layers(const void *header, const uint32_t *checksums, int first, int count)
{
    for (int l = 0; l < count; l++)
        if (((const header_t *)header)->checksums[first + l] != checksums[l]) return layer_code(first + l);
    return AX_STORED_OK;
}

int ax_verify_one(const ax_stored *s, const void *header, const void *payload, const void *tag)
{
    int code = ax_header_check(s, header, tag);
    for (int l = 0; !code && l < s->layers; l++) {
        uint32_t crc = ax_crc32c(0, (const char *)payload + l * s->layer_bytes, (size_t)s->layer_bytes);
        if (crc != ((const header_t *)header)->checksums[l]) code = layer_code(l);
    }
    return code;
}

static int in_range(int64_t index, int64_t size, int64_t bytes)
{
    return index >= 0 && index < bytes / size;
}

static const void *tag_of(const ax_stored *s, const void *tags, int i)
{
    return tags ? (const char *)tags + (size_t)i * (size_t)s->tag_bytes : NULL;
}

/* Whether both frames of pair i exist. */
static int pair_exists(const ax_stored *s, const int32_t *pairs, int i, int64_t bare_bytes, int64_t stored_bytes)
{
    return in_range(pairs[2 * i], s->frame_bytes, bare_bytes) && in_range(pairs[2 * i + 1], s->stored_bytes, stored_bytes);
}

/* pairs: (bare frame, stored frame).  Returns how many failed; codes[i] says why (only AX_STORED_RANGE here). */
int ax_seal(const ax_stored *s, const void *bare, int64_t bare_bytes, void *stored, int64_t stored_bytes,
            const int32_t *pairs, int n, const void *tags, int32_t *codes)
{
    int failed = 0;
    for (int i = 0; i < n; i++) {
        if (!pair_exists(s, pairs, i, bare_bytes, stored_bytes)) {
            codes[i] = AX_STORED_RANGE;
            failed++;
            continue;
        }
        uint32_t checksums[(AX_HEADER_BYTES - AX_CHECKSUM_OFFSET) / 4];
        const char *from = (const char *)bare + pairs[2 * i] * s->frame_bytes;
        char *header = (char *)stored + pairs[2 * i + 1] * s->stored_bytes, *to = header + AX_HEADER_BYTES;
        /* Void until the new header is there: a crash in between must not leave an old header over new bytes. */
        memset(header, 0, sizeof MAGIC);
        for (int l = 0; l < s->layers; l++, from += s->layer_bytes, to += s->layer_bytes)
            checksums[l] = ax_copy_crc32c(0, to, from, (size_t)s->layer_bytes);
        memset(to, 0, (size_t)(s->stored_bytes - AX_HEADER_BYTES - s->frame_bytes));
        ax_header_encode(s, header, tag_of(s, tags, i), checksums, 0);
        codes[i] = AX_STORED_OK;
    }
    return failed;
}

/* Copy layer l of pair i out and compare its checksum. */
static int unseal_layer(const ax_stored *s, void *bare, const void *stored, const int32_t *pair, int l)
{
    const char *header = (const char *)stored + pair[1] * s->stored_bytes;
    const char *from = header + AX_HEADER_BYTES + l * s->layer_bytes;
    char *to = (char *)bare + pair[0] * s->frame_bytes + l * s->layer_bytes;
    uint32_t crc = ax_copy_crc32c(0, to, from, (size_t)s->layer_bytes);
    return crc == ((const header_t *)header)->checksums[l] ? AX_STORED_OK : layer_code(l);
}

static int check_pair(const ax_stored *s, int64_t bare_bytes, const void *stored, int64_t stored_bytes,
                      const int32_t *pairs, int i, const void *tags)
{
    if (!pair_exists(s, pairs, i, bare_bytes, stored_bytes)) return AX_STORED_RANGE;
    return ax_header_check(s, (const char *)stored + pairs[2 * i + 1] * s->stored_bytes, tag_of(s, tags, i));
}

int ax_unseal(const ax_stored *s, void *bare, int64_t bare_bytes, const void *stored, int64_t stored_bytes,
              const int32_t *pairs, int n, const void *tags, int32_t *codes)
{
    int failed = 0;
    for (int i = 0; i < n; i++) {
        int code = check_pair(s, bare_bytes, stored, stored_bytes, pairs, i, tags);
        for (int l = 0; !code && l < s->layers; l++) code = unseal_layer(s, bare, stored, pairs + 2 * i, l);
        codes[i] = code;
        failed += code != 0;
    }
    return failed;
}

/* The same in layer order over all items, telling a gate after every `group` layers how far it has come.  With the first
 * failure the gate says so and stays that way: whoever waits there must not run on. */
int ax_unseal_gated(const ax_stored *s, void *bare, int64_t bare_bytes, const void *stored, int64_t stored_bytes,
                    const int32_t *pairs, int n, const void *tags, int32_t *codes, int64_t *gate, int64_t ticket,
                    int group)
{
    int failed = 0;
    for (int i = 0; i < n; i++) {
        codes[i] = check_pair(s, bare_bytes, stored, stored_bytes, pairs, i, tags);
        failed += codes[i] != 0;
    }
    if (failed) ax_gate_store(gate, ticket << 10 | AX_GATE_FAILED);
    for (int first = 0; first < s->layers; first += group) {
        int end = first + group < s->layers ? first + group : s->layers;
        for (int i = 0; i < n; i++)
            for (int l = first; !codes[i] && l < end; l++)
                if ((codes[i] = unseal_layer(s, bare, stored, pairs + 2 * i, l))) failed++;
        ax_gate_store(gate, ticket << 10 | (failed ? AX_GATE_FAILED : end));
    }
    return failed;
}

/* Look at stored frames where they lie. */
int ax_verify(const ax_stored *s, const void *stored, int64_t stored_bytes, const int32_t *indices, int n,
              const void *tags, int32_t *codes)
{
    int failed = 0;
    for (int i = 0; i < n; i++) {
        if (!in_range(indices[i], s->stored_bytes, stored_bytes)) {
            codes[i] = AX_STORED_RANGE;
        } else {
            const char *header = (const char *)stored + indices[i] * s->stored_bytes;
            codes[i] = ax_verify_one(s, header, header + AX_HEADER_BYTES, tag_of(s, tags, i));
        }
        failed += codes[i] != 0;
    }
    return failed;
}

/* The same for layers first .. first + count - 1; the call that begins with layer 0 looks at headers and tags too, and clears
 * codes.  What an earlier call found stays found. */
int ax_verify_layers(const ax_stored *s, const void *stored, int64_t stored_bytes, const int32_t *indices, int n,
                     const void *tags, int32_t *codes, int first, int count)
{
    int failed = 0;
    for (int i = 0; i < n; i++) {
        const char *header = (const char *)stored + indices[i] * s->stored_bytes, *payload = header + AX_HEADER_BYTES;
        if (first == 0)
            codes[i] = !in_range(indices[i], s->stored_bytes, stored_bytes) ? AX_STORED_RANGE
                                                                            : ax_header_check(s, header, tag_of(s, tags, i));
        for (int l = first; !codes[i] && l < first + count && l < s->layers; l++) {
            uint32_t crc = ax_crc32c(0, payload + l * s->layer_bytes, (size_t)s->layer_bytes);
            if (crc != ((const header_t *)header)->checksums[l]) codes[i] = layer_code(l);
        }
        failed += codes[i] != 0;
    }
    return failed;
}

/* Void stored frames, before a device writes payloads into them: an old header must not stand over new bytes. */
int ax_void(const ax_stored *s, void *stored, int64_t stored_bytes, const int32_t *indices, int n, int32_t *codes)
{
    int failed = 0;
    for (int i = 0; i < n; i++) {
        codes[i] = in_range(indices[i], s->stored_bytes, stored_bytes) ? AX_STORED_OK : AX_STORED_RANGE;
        if (!codes[i]) memset((char *)stored + indices[i] * s->stored_bytes, 0, sizeof MAGIC);
        failed += codes[i] != 0;
    }
    return failed;
}

/* Make stored frames out of payloads that lie where they belong: checksums, padding, header.  Only items whose code is 0. */
void ax_seal_placed(const ax_stored *s, void *stored, const int32_t *indices, int n, const void *tags, const int32_t *codes)
{
    for (int i = 0; i < n; i++) {
        if (codes[i]) continue;
        uint32_t checksums[(AX_HEADER_BYTES - AX_CHECKSUM_OFFSET) / 4];
        char *header = (char *)stored + indices[i] * s->stored_bytes, *payload = header + AX_HEADER_BYTES;
        for (int l = 0; l < s->layers; l++)
            checksums[l] = ax_crc32c(0, payload + l * s->layer_bytes, (size_t)s->layer_bytes);
        memset(payload + s->frame_bytes, 0, (size_t)(s->stored_bytes - AX_HEADER_BYTES - s->frame_bytes));
        ax_header_encode(s, header, tag_of(s, tags, i), checksums, 0);
    }
}

/* Gates are written by one process and read by another.  A value below the one that is there (a late writer of an earlier
 * ticket) is not stored. */
void ax_gate_store(int64_t *gate, int64_t value)
{
    if (__atomic_load_n(gate, __ATOMIC_RELAXED) < value) __atomic_store_n(gate, value, __ATOMIC_RELEASE);
}

int64_t ax_gate_load(const int64_t *gate)
{
    return __atomic_load_n(gate, __ATOMIC_ACQUIRE);
}
