/* See uring.h.  One thread uses a ring; at most `depth` operations are under way, which the caller sees to. */
#include "uring.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <sys/uio.h>

struct ax_ring {
    struct io_uring ring;
    unsigned depth;
    struct iovec vectors[]; /* two per operation of one submit; the kernel has copied them when submit returns */
};

/* NULL, and *error an errno: ENOSYS or EPERM where the system does not allow io_uring. */
ax_ring *ax_ring_open(unsigned depth, int *error)
{
    ax_ring *r = calloc(1, sizeof *r + 2 * (size_t)depth * sizeof(struct iovec));
    if (!r) {
        *error = ENOMEM;
        return NULL;
    }
    int failed = io_uring_queue_init(depth, &r->ring, 0);
    if (!failed && !(r->ring.features & IORING_FEAT_SUBMIT_STABLE)) {
        io_uring_queue_exit(&r->ring);
        failed = -ENOSYS;
    }
    if (failed) {
        free(r);
        *error = -failed;
        return NULL;
    }
    r->depth = depth;
    *error = 0;
    return r;
}

void ax_ring_close(ax_ring *r)
{
    io_uring_queue_exit(&r->ring);
    free(r);
}

int ax_ring_fd(const ax_ring *r)
{
    return r->ring.ring_fd;
}

/* Room for registered buffers, none of them there yet: 0 or a negative errno. */
int ax_ring_table(ax_ring *r, unsigned buffers)
{
    return io_uring_register_buffers_sparse(&r->ring, buffers);
}

/* 0, or a negative errno (ENOMEM: more than RLIMIT_MEMLOCK), and then that buffer is not registered. */
int ax_ring_register(ax_ring *r, unsigned index, uint64_t address, uint64_t bytes)
{
    struct iovec vector = {.iov_base = (void *)(uintptr_t)address, .iov_len = bytes};
    int done = io_uring_register_buffers_update_tag(&r->ring, index, &vector, NULL, 1);
    return done == 1 ? 0 : done < 0 ? done : -EIO;
}

static void prepare(struct io_uring_sqe *sqe, struct iovec *vectors, const ax_io *io)
{
    void *payload = (void *)(uintptr_t)io->address;
    if (io->verb == AX_IO_SYNC) {
        io_uring_prep_fsync(sqe, io->fd, IORING_FSYNC_DATASYNC);
    } else if (io->head) {
        vectors[0].iov_base = (void *)(uintptr_t)io->head;
        vectors[0].iov_len = AX_HEAD_BYTES;
        vectors[1].iov_base = payload;
        vectors[1].iov_len = io->bytes;
        if (io->verb == AX_IO_WRITE) io_uring_prep_writev(sqe, io->fd, vectors, 2, (uint64_t)io->offset);
        else io_uring_prep_readv(sqe, io->fd, vectors, 2, (uint64_t)io->offset);
    } else if (io->buffer >= 0) {
        if (io->verb == AX_IO_WRITE) io_uring_prep_write_fixed(sqe, io->fd, payload, io->bytes, (uint64_t)io->offset, io->buffer);
        else io_uring_prep_read_fixed(sqe, io->fd, payload, io->bytes, (uint64_t)io->offset, io->buffer);
    } else {
        if (io->verb == AX_IO_WRITE) io_uring_prep_write(sqe, io->fd, payload, io->bytes, (uint64_t)io->offset);
        else io_uring_prep_read(sqe, io->fd, payload, io->bytes, (uint64_t)io->offset);
    }
    sqe->user_data = io->user;
}

/* All n are submitted: 0.  Otherwise a negative errno, and the ring is of no further use. */
int ax_ring_submit(ax_ring *r, const ax_io *ios, int n)
{
    if (n < 0 || (unsigned)n > r->depth) return -E2BIG;
    for (int i = 0; i < n; i++) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&r->ring);
        if (!sqe) return -EBUSY;
        prepare(sqe, r->vectors + 2 * i, ios + i);
    }
    for (int left = n; left > 0;) {
        int took = io_uring_submit(&r->ring);
        if (took == -EINTR || took == -EAGAIN) continue;
        if (took <= 0) return took < 0 ? took : -EIO;
        left -= took;
    }
    return 0;
}

/* How many results were stored; waits for the first one if `wait`.  A result is a number of bytes or a negative errno. */
int ax_ring_reap(ax_ring *r, uint64_t *users, int32_t *results, int room, int wait)
{
    int n = 0;
    struct io_uring_cqe *cqe;
    if (wait) {
        int failed;
        while ((failed = io_uring_wait_cqe(&r->ring, &cqe)) == -EINTR) {}
        if (failed) return failed;
    }
    while (n < room && io_uring_peek_cqe(&r->ring, &cqe) == 0) {
        users[n] = cqe->user_data;
        results[n++] = cqe->res;
        io_uring_cqe_seen(&r->ring, cqe);
    }
    return n;
}
