/* A pool of threads that share the units of a kernel's call.
 *
 * In:       a KernelCall and the addresses of the parameters.
 * Out:      the written parameters; 1 if the op rejects a value, otherwise 0.
 * Must hold: one caller at a time. Units depend only on the call, so that bits do not depend on threads.
 * Callers:  call.c and loop.c, without the interpreter lock for long calls; built steps have another
 *           pool, build/src/threads.c.
 * Locks:    the mutex only to sleep and wake. `number` announces a job, compare-and-exchange of
 *           `begun` claims a share, and `done` marks the end of a share.
 *
 * Idle threads spin for some microseconds, since the next call mostly follows, and then sleep. A call is
 * divided evenly. After its share, the caller takes the shares that no thread has begun, so a
 * thread without a processor does not delay the call. After fork() the child starts new threads. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, nbytes) ((void)(memory), (void)(nbytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, nbytes) ((void)(memory), (void)(nbytes))
#endif

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum {
    MOST_THREADS = 256,
    ALIGNMENT = 64,
    SPINS = 20000, /* about 50 microseconds before an idle thread sleeps */
};

typedef struct {
    _Alignas(64) atomic_uint begun; /* number of the last job whose share was started */
    atomic_uint done;               /* number of the last job whose share is finished */
    char *scratch;
    int result;
    pthread_t thread;
    Pool *pool;
    int index;
} Member;

struct Pool {
    int threads;
    int pinned;
    double worth_sharing;
    int started;             /* `processes` when the threads started; 0 before */
    int64_t scratch, shared; /* bytes reserved */
    char *shared_bytes;
    Member *members; /* members[0] is the caller */
    /* The job: written by the caller, then published by a new number. */
    const KernelCall *call;
    char *const *p;
    _Alignas(64) atomic_uint number;
    atomic_int sleeping, ending;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

/* Number of forks + 1: a forked process inherits the pools, but not their threads. */
static int processes = 0;

static void count_process(void)
{
    processes++;
}

static void first_process(void)
{
    processes = 1;
    pthread_atfork(NULL, NULL, count_process);
}

int process_number(void)
{
    return processes;
}

/* Round up to the size of an allocation. */
static int64_t whole(int64_t nbytes)
{
    return nbytes <= 0 ? ALIGNMENT : (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void *aligned(int64_t nbytes)
{
    void *memory = NULL;
    return posix_memalign(&memory, ALIGNMENT, (size_t)whole(nbytes)) ? NULL : memory;
}

Pool *pool_new(int threads, int pinned, double worth_sharing)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, first_process);
    Pool *pool = aligned(sizeof *pool);
    if (!pool)
        return NULL;
    memset(pool, 0, sizeof *pool);
    pool->threads = threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads;
    pool->pinned = pinned;
    pool->worth_sharing = worth_sharing;
    pool->members = aligned((int64_t)sizeof(Member) * pool->threads);
    if (!pool->members) {
        free(pool);
        return NULL;
    }
    memset(pool->members, 0, sizeof(Member) * (size_t)pool->threads);
    for (int i = 0; i < pool->threads; i++) {
        pool->members[i].pool = pool;
        pool->members[i].index = i;
    }
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    return pool;
}

int pool_threads(const Pool *pool)
{
    return pool->threads;
}

int pool_reserve(Pool *pool, int64_t scratch, int64_t shared)
{
    if (scratch > pool->scratch) {
        for (int i = 0; i < pool->threads; i++) {
            char *memory = aligned(scratch);
            if (!memory)
                return -1;
            free(pool->members[i].scratch);
            pool->members[i].scratch = memory;
        }
        pool->scratch = scratch;
    }
    if (shared > pool->shared) {
        char *memory = aligned(shared);
        if (!memory)
            return -1;
        free(pool->shared_bytes);
        pool->shared_bytes = memory;
        pool->shared = shared;
    }
    return 0;
}

/* Run units, or `finish` after all of them. Under the address sanitizer a call sees only the
 * scratch memory that it requested. */
static int run_units(KernelFn run, const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                     char *scratch, int64_t reserved)
{
    size_t rest = scratch ? (size_t)(whole(reserved) - call->scratch) : 0;
    ASAN_POISON_MEMORY_REGION(scratch + call->scratch, rest);
    int result = run(call, p, begin, end, scratch);
    ASAN_UNPOISON_MEMORY_REGION(scratch + call->scratch, rest);
    return result;
}

static void do_share(Member *member, char *scratch)
{
    const Pool *pool = member->pool;
    const KernelCall *call = pool->call;
    int64_t begin = call->units * member->index / pool->threads;
    int64_t end = call->units * (member->index + 1) / pool->threads;
    member->result = 0;
    if (begin < end)
        member->result = run_units(call->kernel->run, call, pool->p, begin, end, scratch, pool->scratch);
}

/* Try to start the member's share of this job; return whether it was not started before. The
 * next job begins only after all shares are finished. */
static int begin_share(Member *member, unsigned number)
{
    unsigned before = number - 1;
    return atomic_compare_exchange_strong(&member->begun, &before, number);
}

static void stay_on_processor(int index)
{
#ifdef __linux__
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed))
        return;
    int skip = index % CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && !skip--) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one);
            return;
        }
#else
    (void)index;
#endif
}

static void *serve(void *argument)
{
    Member *member = argument;
    Pool *pool = member->pool;
    unsigned last_number = atomic_load_explicit(&member->done, memory_order_relaxed);
    if (pool->pinned)
        stay_on_processor(member->index);
    for (;;) {
        unsigned number;
        int spins = 0;
        while ((number = atomic_load_explicit(&pool->number, memory_order_acquire)) == last_number) {
            if (atomic_load_explicit(&pool->ending, memory_order_relaxed))
                return NULL;
            if (++spins < SPINS) {
                PAUSE();
                continue;
            }
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleeping, 1);
            while (atomic_load(&pool->number) == last_number && !atomic_load(&pool->ending))
                pthread_cond_wait(&pool->wake, &pool->mutex);
            atomic_fetch_sub(&pool->sleeping, 1);
            pthread_mutex_unlock(&pool->mutex);
            spins = 0;
        }
        last_number = number;
        if (!begin_share(member, number))
            continue;
        do_share(member, member->scratch);
        atomic_store_explicit(&member->done, last_number, memory_order_release);
    }
}

/* Block signals in pool threads, except those that the thread itself causes; the program's own
 * threads handle signals. */
static void block_signals(sigset_t *before)
{
    sigset_t signals;
    sigfillset(&signals);
    sigdelset(&signals, SIGSEGV);
    sigdelset(&signals, SIGBUS);
    sigdelset(&signals, SIGFPE);
    sigdelset(&signals, SIGILL);
    pthread_sigmask(SIG_SETMASK, &signals, before);
}

/* Start the threads, also in a forked process, which does not inherit them. */
static int start(Pool *pool)
{
    unsigned number = atomic_load(&pool->number);
    sigset_t before;
    block_signals(&before); /* a thread inherits the signal mask of its creator */
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    atomic_store(&pool->sleeping, 0);
    for (int i = 1; i < pool->threads; i++) {
        atomic_store(&pool->members[i].begun, number);
        atomic_store(&pool->members[i].done, number);
        if (pthread_create(&pool->members[i].thread, NULL, serve, &pool->members[i])) {
            for (int k = i; k < pool->threads; k++)
                free(pool->members[k].scratch);
            pool->threads = i; /* the number that the system could create */
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool->started = processes;
    return pool->threads > 1;
}

int run_alone(const KernelCall *call, char **p)
{
    char *scratch = aligned(call->scratch), *shared = aligned(call->shared);
    int result = -1;
    if (scratch && shared) {
        p[call->nparams] = shared;
        result = run_units(call->kernel->run, call, p, 0, call->units, scratch, call->scratch);
        if (!result && call->kernel->finish)
            result = run_units(call->kernel->finish, call, p, 0, call->units, scratch, call->scratch);
    }
    free(scratch);
    free(shared);
    return result;
}

int pool_run(Pool *pool, const KernelCall *call, char **p)
{
    Member *caller = &pool->members[0];
    int result;
    p[call->nparams] = pool->shared_bytes;
    if (pool->threads == 1 || call->units == 1 || call->work < pool->worth_sharing ||
        (pool->started != processes && !start(pool))) {
        result = run_units(call->kernel->run, call, p, 0, call->units, caller->scratch, pool->scratch);
    } else {
        pool->call = call;
        pool->p = p;
        if (call->shared && !call->kernel->finish) { /* units wait for each other */
            memset(pool->shared_bytes, 0, (size_t)call->shared);
            *(int64_t *)pool->shared_bytes = pool->threads;
        }
        unsigned number = atomic_load_explicit(&pool->number, memory_order_relaxed) + 1;
        atomic_store(&pool->number, number);
        if (atomic_load(&pool->sleeping)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_broadcast(&pool->wake);
            pthread_mutex_unlock(&pool->mutex);
        }
        do_share(caller, caller->scratch);
        result = caller->result;
        for (int i = 1; i < pool->threads; i++) {
            Member *member = &pool->members[i];
            int spins = 0;
            if (begin_share(member, number)) {
                do_share(member, caller->scratch);
                result |= member->result;
                continue;
            }
            while (atomic_load_explicit(&member->done, memory_order_acquire) != number) {
                PAUSE();
                if (++spins >= SPINS) { /* the other thread may be waiting for this processor */
                    sched_yield();
                    spins = SPINS - 100;
                }
            }
            result |= member->result;
        }
    }
    if (!result && call->kernel->finish)
        result = run_units(call->kernel->finish, call, p, 0, call->units, caller->scratch, pool->scratch);
    return result;
}

void pool_free(Pool *pool)
{
    if (pool->started == processes) {
        atomic_store(&pool->ending, 1);
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
        for (int i = 1; i < pool->threads; i++)
            pthread_join(pool->members[i].thread, NULL);
    }
    for (int i = 0; i < pool->threads; i++)
        free(pool->members[i].scratch);
    free(pool->shared_bytes);
    free(pool->members);
    if (!pool->started || pool->started == processes) { /* else these are the parent's threads */
        pthread_mutex_destroy(&pool->mutex);
        pthread_cond_destroy(&pool->wake);
    }
    free(pool);
}
