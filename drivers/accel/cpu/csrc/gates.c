/* A pass that uses frames which are still being loaded waits at gates, layer by layer (kernel/tag.py, "gates").
 *
 * A gate is one int64 in memory that the loading driver shares with us: ticket << 10 | layers that have landed, where
 * 1023 layers mean that the load failed.  Tickets grow, so a larger value of the same gate is a later load through it,
 * and ours is over.  The writer only stores: nobody would wake us, so we look again, at first without letting the core
 * go (a layer of a running load is often microseconds away), then with short sleeps, because the loader and the threads
 * of this pool may need the core that we spin on.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <sys/prctl.h>
#include <time.h>

enum { GATE_BITS = 10, GATE_FAILED = 1023, LOOKS = 200, SLEEP_NS = 10000 };

int64_t ax_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Layers of one load that have landed; -1 when it failed, INT32_MAX when it is over. */
static int landed(const ax_engine *e, const int64_t *wait) {
    int64_t value = atomic_load_explicit(&e->gates[wait[0]], memory_order_acquire), ticket = value >> GATE_BITS;
    if (ticket != wait[1]) return ticket > wait[1] ? INT32_MAX : 0;
    int layers = (int)(value & ((1 << GATE_BITS) - 1));
    return layers == GATE_FAILED ? -1 : layers;
}

/* Whether some load of the pass has not landed whole (failed ones included). */
int ax_gates_closed(const ax_engine *e) {
    for (int i = 0; i < e->nwaits; i++)
        if (landed(e, e->waits + 2 * i) < e->s.layers) return 1;
    return 0;
}

/* Return when every load of the pass has brought `layer`: AX_OK, or AX_ELOAD or AX_ELATE with the gate in e->detail. */
int ax_gates_wait(ax_engine *e, int layer) {
    int64_t began = 0, now = 0;
    int result = AX_OK;
    for (int i = 0; i < e->nwaits && result == AX_OK; i++) {
        const int64_t *wait = e->waits + 2 * i;
        for (long looks = 0;; looks++) {
            int layers = landed(e, wait);
            if (layers > layer) break;
            if (began == 0) began = now = ax_now_ns();
            if (layers < 0) result = AX_ELOAD;
            else if (now >= e->gate_deadline_ns) result = AX_ELATE;
            if (result != AX_OK) {
                e->detail = (int32_t)wait[0];
                break;
            }
            if (looks < LOOKS) {
                ax_pause();
                continue;
            }
            if (looks == LOOKS) prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* else a short sleep takes 50 us more */
            nanosleep(&(struct timespec){0, SLEEP_NS}, NULL);
            now = ax_now_ns();
        }
    }
    if (began != 0) e->waited_ns += ax_now_ns() - began;
    return result;
}
