/* The thread team: the only file with threads in it. (At the end: the same by OpenMP, and by nobody.)
 *
 * A team lives as long as the backend that made it. Its caller hands it a job cut into pieces, takes pieces
 * itself, and so does every worker that is awake:
 *
 *     ticket    | number of the job : 32 | pieces that nobody has taken : 32 |    one word, so one swap takes a piece
 *     caller    write the job, then the ticket -> take pieces until there are none -> wait until `done` = pieces
 *     worker    look at the ticket (spin, then sleep) -> read the job, swap the ticket, run the piece, count it done
 *
 * The caller waits only for pieces that were taken. A worker that sleeps, or that the system has not let run
 * before it took one, is not waited for: the others do its work. Between the jobs of one step the workers spin, so that handing a job
 * over takes about a microsecond (to wake a sleeping one takes 10 to 50, and starting threads for each job more);
 * after SPINS looks at the ticket they sleep, because a thread that spins takes the processor from others.
 *
 * Which thread does which piece never changes a result, because no sum crosses two pieces. (It could if the caller
 * rounded in another way than the workers do, which took over what was set when the team was made.)
 */
#define _POSIX_C_SOURCE 200809L /* pthread_sigmask, getpid */
#include "core.h"

#if MS_THREADS
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

enum { SPINS = 10000 }; /* 100 to 300 microseconds */

typedef struct {
    ms_team *team;
    int thread; /* 1, 2, ...: the caller of a job is 0 */
    pthread_t id;
} worker;

struct ms_team {
    _Alignas(64) atomic_uint_least64_t ticket;
    _Alignas(64) atomic_int_least64_t done;
    /* The job. A worker may read it while it is written, for a piece that is gone: then the swap of the ticket
     * fails, and what was read is not used. */
    _Alignas(64) _Atomic(ms_task *) task;
    _Atomic(const void *) job;
    atomic_int_least64_t n, chunk;
    atomic_int threads; /* that may take pieces of it */
    _Alignas(64) atomic_int sleeping; /* not 0: somebody may sleep; at worst, one broadcast too many */
    atomic_flag busy;                 /* somebody's job is running */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    int stop; /* under the lock */
    int workers;
    pid_t process;
    worker worker[];
};

#if MS_X86
static void relax(void) { _mm_pause(); }
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
static void relax(void) { __asm__ volatile("yield"); }
#else
static void relax(void) {}
#endif

/* Takes a piece of the current job, if there is one, and runs it. `seen` becomes the ticket that was looked at. */
static int take(ms_team *team, int thread, uint64_t *seen) {
    uint64_t ticket = atomic_load_explicit(&team->ticket, memory_order_acquire);
    *seen = ticket;
    int64_t left = (int64_t)(ticket & 0xffffffff);
    if (left == 0) return 0;
    ms_task *task = atomic_load_explicit(&team->task, memory_order_relaxed);
    const void *job = atomic_load_explicit(&team->job, memory_order_relaxed);
    int64_t n = atomic_load_explicit(&team->n, memory_order_relaxed);
    int64_t chunk = atomic_load_explicit(&team->chunk, memory_order_relaxed);
    if (thread >= atomic_load_explicit(&team->threads, memory_order_relaxed)) return 0;
    if (!atomic_compare_exchange_strong_explicit(&team->ticket, &ticket, ticket - 1, memory_order_acq_rel,
                                                 memory_order_relaxed))
        return 1; /* somebody else took it; there may be more */
    int64_t piece = ms_ceil_div(n, chunk) - left;
    task(job, piece * chunk, ms_min(n, (piece + 1) * chunk), thread);
    atomic_fetch_add_explicit(&team->done, 1, memory_order_release);
    return 1;
}

/* Sleeps until the ticket is another one than `seen`; 0 if the team is to end. */
static int sleep_until_new(ms_team *team, uint64_t seen) {
    pthread_mutex_lock(&team->lock);
    while (!team->stop) {
        /* First say so, then look once more: whoever changes the ticket does it in the other order. */
        atomic_fetch_add(&team->sleeping, 1);
        if (atomic_load(&team->ticket) != seen) break;
        pthread_cond_wait(&team->wake, &team->lock);
    }
    int stop = team->stop;
    pthread_mutex_unlock(&team->lock);
    return !stop;
}

static void *work(void *argument) {
    worker *me = argument;
    uint64_t seen;
    for (int spins = 0;;) {
        if (take(me->team, me->thread, &seen)) {
            spins = 0;
        } else if (++spins < SPINS) {
            relax();
        } else {
            if (!sleep_until_new(me->team, seen)) return NULL;
            spins = 0;
        }
    }
}

static void wake_all(ms_team *team, int stop) {
    pthread_mutex_lock(&team->lock);
    team->stop |= stop;
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

int ms_team_new(int threads, ms_team **team) {
    if (!team) return MS_NULL_POINTER;
    if (threads < 1 || threads > 1024) return MS_BAD_THREADS;
    size_t bytes = ms_round_up(sizeof(ms_team) + (size_t)threads * sizeof(worker), 64);
    ms_team *t = aligned_alloc(64, bytes);
    if (!t) return MS_NO_THREADS;
    memset(t, 0, bytes);
    atomic_flag_clear(&t->busy);
    t->process = getpid();
    if (pthread_mutex_init(&t->lock, NULL)) {
        free(t);
        return MS_NO_THREADS;
    }
    if (pthread_cond_init(&t->wake, NULL)) {
        pthread_mutex_destroy(&t->lock);
        free(t);
        return MS_NO_THREADS;
    }
    /* A signal is for the threads that Python knows: Ctrl-C has to interrupt the main one. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0;
    for (int i = 1; i < threads && !failed; i++) {
        worker *w = &t->worker[i - 1];
        w->team = t, w->thread = i;
        failed = pthread_create(&w->id, NULL, work, w);
        if (!failed) t->workers = i;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        ms_team_free(t);
        return MS_NO_THREADS;
    }
    *team = t;
    return MS_OK;
}

void ms_team_free(ms_team *team) {
    if (!team) return;
    if (team->process != getpid()) return; /* a forked child: the workers stayed with its parent, and so does this */
    wake_all(team, 1);
    for (int i = 0; i < team->workers; i++) pthread_join(team->worker[i].id, NULL);
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->lock);
    free(team);
}

void ms_parallel(const ms_exec *exec, int64_t n, int64_t chunk, ms_task *task, const void *job) {
    int64_t pieces = ms_ceil_div(n, chunk);
    ms_team *team = exec->team;
    if (n <= 0) return;
    /* Alone: if there is nobody to help, or the team has another caller's job (of another Python thread). */
    if (exec->threads <= 1 || pieces <= 1 || pieces > INT32_MAX || !team ||
        atomic_flag_test_and_set_explicit(&team->busy, memory_order_acquire)) {
        task(job, 0, n, 0);
        return;
    }
    uint64_t seen, number = atomic_load_explicit(&team->ticket, memory_order_relaxed) >> 32;
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    atomic_store_explicit(&team->task, task, memory_order_relaxed);
    atomic_store_explicit(&team->job, job, memory_order_relaxed);
    atomic_store_explicit(&team->n, n, memory_order_relaxed);
    atomic_store_explicit(&team->chunk, chunk, memory_order_relaxed);
    atomic_store_explicit(&team->threads, exec->threads, memory_order_relaxed);
    atomic_store(&team->ticket, (number + 1) << 32 | (uint64_t)pieces);
    if (atomic_load(&team->sleeping)) {
        atomic_store(&team->sleeping, 0);
        wake_all(team, 0);
    }
    while (take(team, 0, &seen)) {}
    for (int spins = 0; atomic_load_explicit(&team->done, memory_order_acquire) < pieces;) {
        if (spins < SPINS) spins++, relax();
        else sched_yield(); /* a worker holds a piece and does not run: let it */
    }
    atomic_flag_clear_explicit(&team->busy, memory_order_release);
}

int ms_has_threads(void) { return 1; }

#else /* no POSIX threads: MSVC, say. OpenMP forks and joins for each job, which costs what short jobs gain. */
#ifdef _OPENMP
#include <omp.h>
#endif

int ms_team_new(int threads, ms_team **team) {
    if (!team) return MS_NULL_POINTER;
    if (threads < 1 || threads > 1024) return MS_BAD_THREADS;
    *team = NULL;
    return MS_OK;
}

void ms_team_free(ms_team *team) { (void)team; }

void ms_parallel(const ms_exec *exec, int64_t n, int64_t chunk, ms_task *task, const void *job) {
#ifdef _OPENMP
    int64_t piece, pieces = ms_ceil_div(n, chunk);
    int threads = (int)ms_min(exec->threads, pieces);
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (piece = 0; piece < pieces; piece++)
            task(job, piece * chunk, ms_min(n, (piece + 1) * chunk), omp_get_thread_num());
        return;
    }
#endif
    (void)exec, (void)chunk;
    if (n > 0) task(job, 0, n, 0);
}

int ms_has_threads(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
#endif
