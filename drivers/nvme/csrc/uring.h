/* A thin layer over liburing: whole batches in one call, and no callbacks. */
#ifndef ATTNIX_URING_H
#define ATTNIX_URING_H

#include <stdint.h>

/* CDEF */
typedef struct ax_ring ax_ring;

typedef struct {
    uint64_t user;      /* comes back with the result */
    uint64_t address;   /* of the payload */
    uint64_t head;      /* of HEAD bytes that come before it in the file, or 0 */
    int64_t offset;     /* in the file, of the first byte */
    uint32_t bytes;     /* of the payload */
    int32_t buffer;     /* index of the registered buffer around the payload, or -1; unused with a head */
    int32_t verb;       /* AX_IO_* */
    int32_t fd;
} ax_io;

enum { AX_IO_READ = 0, AX_IO_WRITE = 1, AX_IO_SYNC = 2 };

ax_ring *ax_ring_open(unsigned depth, int *error);
void ax_ring_close(ax_ring *ring);
int ax_ring_fd(const ax_ring *ring);
int ax_ring_table(ax_ring *ring, unsigned buffers);
int ax_ring_register(ax_ring *ring, unsigned index, uint64_t address, uint64_t bytes);
int ax_ring_submit(ax_ring *ring, const ax_io *ios, int n);
int ax_ring_reap(ax_ring *ring, uint64_t *users, int32_t *results, int room, int wait);
/* END */

enum { AX_HEAD_BYTES = 4096 };

#endif
