/* A persistent team of threads for the native kernels.
 *
 * team_run(job, ctx, chunks) calls job(ctx, chunk, member) once for each chunk. Each member begins with a range of
 * adjacent chunks, so that it reads memory in one stream. A member that has finished its range takes half of what
 * another member has left. So a worker that still sleeps, or that the system has stopped, costs little: the others do
 * its share.
 *
 * If several threads call, they take turns. Workers spin for a short time after a job, and the caller before the end
 * of a job. Then they sleep, so that BLAS, MLX and other processes find the cores free. After fork() the child
 * starts a new team.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#define MAX_TEAM 64
/* Longer than the gap between two kernels of a step (about a hundred microseconds), and short compared with a BLAS
 * call that needs the core (milliseconds). */
#define SPIN_NS 300000
#define END_SPINS 4000 /* about fifty microseconds: longer than a chunk takes */

typedef void Job(void *ctx, ptrdiff_t chunk, int member);

/* The chunks that a member has left: the first one in the upper 32 bits, the end in the lower 32 bits. Each range
 * has its own cache line. */
typedef struct {
    _Alignas(64) atomic_ullong left;
} Range;

static struct {
    pthread_mutex_t turn, lock;
    pthread_cond_t wake, end;
    Job *job;
    void *ctx;
    Range range[MAX_TEAM];
    atomic_uint generation;
    atomic_int open, active, sleepers, waiting, size;
    int started;
} team = {.turn = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .end = PTHREAD_COND_INITIALIZER, .size = 1};

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static unsigned long long range_of(uint32_t first, uint32_t end) { return (unsigned long long)first << 32 | end; }

/* Takes the first chunk of a member's range and returns it, or -1 if the range is empty. */
static ptrdiff_t team_take(int member) {
    atomic_ullong *left = &team.range[member].left;
    unsigned long long seen = atomic_load(left);
    for (;;) {
        uint32_t first = (uint32_t)(seen >> 32), end = (uint32_t)seen;
        if (first >= end) return -1;
        if (atomic_compare_exchange_weak(left, &seen, range_of(first + 1, end))) return first;
    }
}

/* Moves the later half of what another member has left to the range of `member`. Returns 0 if nobody has any chunks
 * left. A range that was read cannot return with a different meaning, because no chunk is given out twice. */
static int team_steal(int member) {
    int size = atomic_load(&team.size);
    for (int i = 1; i < size; i++) {
        atomic_ullong *left = &team.range[(member + i) % size].left;
        unsigned long long seen = atomic_load(left);
        for (;;) {
            uint32_t first = (uint32_t)(seen >> 32), end = (uint32_t)seen, middle = first + (end - first) / 2;
            if (first >= end) break;
            if (!atomic_compare_exchange_weak(left, &seen, range_of(first, middle))) continue;
            atomic_store(&team.range[member].left, range_of(middle, end));
            return 1;
        }
    }
    return 0;
}

static void team_work(int member) {
    do
        for (ptrdiff_t chunk; (chunk = team_take(member)) >= 0;) team.job(team.ctx, chunk, member);
    while (team_steal(member));
}

/* Waits until the generation differs from `seen`, and returns it. The wait spins, then sleeps. */
static unsigned team_wait(unsigned seen, int member) {
    int64_t end = nanoseconds() + (member < atomic_load(&team.size) ? SPIN_NS : 0);
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load(&team.generation) != seen) return atomic_load(&team.generation);
            relax();
        }
    } while (nanoseconds() < end);
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.sleepers, 1);
    while (atomic_load(&team.generation) == seen) pthread_cond_wait(&team.wake, &team.lock);
    atomic_fetch_sub(&team.sleepers, 1);
    pthread_mutex_unlock(&team.lock);
    return atomic_load(&team.generation);
}

static void *team_worker(void *arg) {
    int member = (int)(intptr_t)arg;
    unsigned seen = 0;
    for (;;) {
        seen = team_wait(seen, member);
        /* A worker increments `active` before it reads `open`, and the caller clears `open` before it reads
         * `active`. So either this worker sees that the job is closed, or the caller waits for it. */
        atomic_fetch_add(&team.active, 1);
        if (atomic_load(&team.open) && member < atomic_load(&team.size)) team_work(member);
        if (atomic_fetch_sub(&team.active, 1) == 1 && atomic_load(&team.waiting)) {
            pthread_mutex_lock(&team.lock);
            pthread_cond_signal(&team.end);
            pthread_mutex_unlock(&team.lock);
        }
    }
    return NULL;
}

/* Starts missing workers. If the system refuses a thread, the team stays smaller. */
static void team_start(int size) {
    pthread_attr_t detached;
    if (team.started >= size - 1 || pthread_attr_init(&detached)) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* Python's threads handle signals */
    for (; team.started < size - 1; team.started++) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, team_worker, (void *)(intptr_t)(team.started + 1))) break;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

/* Waits until no worker is active. The wait spins, then sleeps. If another process has taken the core of a worker,
 * the system can move that worker to the caller's core only while the caller sleeps. */
static void team_end(void) {
    for (int spins = 0; spins < END_SPINS; spins++) {
        if (!atomic_load(&team.active)) return;
        relax();
    }
    pthread_mutex_lock(&team.lock);
    atomic_store(&team.waiting, 1);
    while (atomic_load(&team.active)) pthread_cond_wait(&team.end, &team.lock);
    atomic_store(&team.waiting, 0);
    pthread_mutex_unlock(&team.lock);
}

static void team_share(Job *job, void *ctx, ptrdiff_t chunks, int size) {
    team.job = job, team.ctx = ctx;
    for (int i = 0; i < size; i++)
        atomic_store(&team.range[i].left, range_of((uint32_t)(chunks * i / size), (uint32_t)(chunks * (i + 1) / size)));
    atomic_store(&team.open, 1);
    atomic_fetch_add(&team.generation, 1);
    if (atomic_load(&team.sleepers)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.wake);
        pthread_mutex_unlock(&team.lock);
    }
    team_work(0);
    atomic_store(&team.open, 0);
    team_end();
}

static void team_run(Job *job, void *ctx, ptrdiff_t chunks) {
    int size = atomic_load(&team.size);
    if (size == 1 || chunks < 2) {
        for (ptrdiff_t chunk = 0; chunk < chunks; chunk++) job(ctx, chunk, 0);
        return;
    }
    pthread_mutex_lock(&team.turn);
    team_start(size);
    team_share(job, ctx, chunks, size);
    pthread_mutex_unlock(&team.turn);
}

/* The child has no workers, and it may have inherited locks that are held by threads which it does not have. */
static void team_after_fork(void) {
    pthread_mutex_init(&team.turn, NULL);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.wake, NULL);
    pthread_cond_init(&team.end, NULL);
    team.started = 0;
    atomic_store(&team.generation, 0);
    atomic_store(&team.open, 0);
    atomic_store(&team.active, 0);
    atomic_store(&team.sleepers, 0);
    atomic_store(&team.waiting, 0);
}
