/* A pool of threads made once: one pass of the model is one call into it, phases are separated by barriers.
 *
 * Between passes the workers sleep on a futex, so that other processes (the daemon, torch in this process) have the
 * cores; within a pass a barrier spins, because two spinning threads meet in a tenth of a microsecond and a futex
 * wake-up costs tens.  A spin that lasts longer than SPINS turns into a sleep: then somebody else has the core.
 *
 * Work within a phase is taken from an atomic counter in shrinking shares (guided self-scheduling, Polychronopoulos
 * and Kuck 1987): long runs keep the memory streams sequential, short ones at the end level the threads.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPINS = 2000, SHARES = 4, SLOTS = 4 };

typedef struct { _Alignas(AX_ALIGN) atomic_long next; } slot_t;

struct ax_pool {
    int threads;
    pthread_t *thread;
    ax_work work;
    void *arg;
    _Alignas(AX_ALIGN) atomic_uint epoch;    /* grows when a pass starts */
    _Alignas(AX_ALIGN) atomic_uint phase;    /* grows when a barrier opens */
    atomic_uint sleepers;
    _Alignas(AX_ALIGN) atomic_int arrived;
    atomic_int stop;
    slot_t slot[SLOTS];
};

typedef struct { ax_pool *pool; int thread; } seat_t;

static void futex_wait(atomic_uint *word, unsigned seen) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void futex_wake(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

/* Wait for every thread; the last to come does `last` (may be NULL) before the others go on. */
void ax_pool_barrier(ax_pool *p, int thread, ax_work last, void *arg) {
    if (p->threads == 1) {
        if (last != NULL) last(arg, thread);
        unsigned now = atomic_load_explicit(&p->phase, memory_order_relaxed);
        atomic_store_explicit(&p->slot[(now + 2) % SLOTS].next, 0, memory_order_relaxed);
        atomic_store_explicit(&p->phase, now + 1, memory_order_relaxed);
        return;
    }
    unsigned now = atomic_load_explicit(&p->phase, memory_order_acquire);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        if (last != NULL) last(arg, thread);
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&p->slot[(now + 2) % SLOTS].next, 0, memory_order_relaxed);
        atomic_store(&p->phase, now + 1);
        if (atomic_load(&p->sleepers) > 0) futex_wake(&p->phase);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&p->phase, memory_order_acquire) != now) return;
        ax_pause();
    }
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(&p->phase) == now) futex_wait(&p->phase, now);
    atomic_fetch_sub(&p->sleepers, 1);
}

int ax_pool_take(ax_pool *p, int thread, long total, long least, long *from, long *to) {
    (void)thread;
    atomic_long *next = &p->slot[atomic_load_explicit(&p->phase, memory_order_relaxed) % SLOTS].next;
    long at = atomic_load_explicit(next, memory_order_relaxed);
    for (;;) {
        long left = total - at;
        if (left <= 0) return 0;
        long share = left / (SHARES * p->threads);
        if (share < least) share = least;
        if (share > left) share = left;
        if (atomic_compare_exchange_weak_explicit(next, &at, at + share, memory_order_relaxed, memory_order_relaxed)) {
            *from = at;
            *to = at + share;
            return 1;
        }
    }
}

static void *worker(void *arg) {
    seat_t *seat = arg;
    ax_pool *p = seat->pool;
    int thread = seat->thread;
    free(seat);
    prctl(PR_SET_NAME, "attnix-cpu", 0, 0, 0);
    unsigned seen = 0;
    for (;;) {
        while (atomic_load(&p->epoch) == seen) futex_wait(&p->epoch, seen);
        seen++;
        if (atomic_load(&p->stop)) return NULL;
        p->work(p->arg, thread);
        ax_pool_barrier(p, thread, NULL, NULL);
    }
}

ax_pool *ax_pool_new(int threads) {
    ax_pool *p = NULL;
    if (posix_memalign((void **)&p, AX_ALIGN, sizeof *p) != 0) return NULL;
    *p = (ax_pool){.threads = threads};
    p->thread = calloc((size_t)threads, sizeof *p->thread);
    if (p->thread == NULL) { free(p); return NULL; }
    for (int i = 1; i < threads; i++) {
        seat_t *seat = malloc(sizeof *seat);
        if (seat != NULL) *seat = (seat_t){p, i};
        if (seat == NULL || pthread_create(&p->thread[i], NULL, worker, seat) != 0) {
            free(seat);
            p->threads = i;
            ax_pool_free(p);
            return NULL;
        }
    }
    return p;
}

void ax_pool_free(ax_pool *p) {
    if (p == NULL) return;
    atomic_store(&p->stop, 1);
    atomic_fetch_add(&p->epoch, 1);
    futex_wake(&p->epoch);
    for (int i = 1; i < p->threads; i++) pthread_join(p->thread[i], NULL);
    free(p->thread);
    free(p);
}

/* Run `work` on every thread, the caller included, and return when all have finished. */
void ax_pool_run(ax_pool *p, ax_work work, void *arg) {
    p->work = work;
    p->arg = arg;
    for (int i = 0; i < SLOTS; i++) atomic_store_explicit(&p->slot[i].next, 0, memory_order_relaxed);
    atomic_fetch_add(&p->epoch, 1);
    if (p->threads > 1) futex_wake(&p->epoch);
    work(arg, 0);
    ax_pool_barrier(p, 0, NULL, NULL);
}
