/* Threads that wait for a job by spinning for a while, and then sleep. */
#define _POSIX_C_SOURCE 200809L
#include "step_threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { SPINS = 20000 };

typedef struct {
    struct step_threads public;
    void (*share)(void *job, int index);
    void *job;
    int count;
    atomic_uint number; /* number of the job */
    atomic_int next, running;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
} Crew;

typedef struct {
    Crew *crew;
    int index;
} Member;

static void *serve(void *argument)
{
    Member *member = argument;
    Crew *crew = member->crew;
    unsigned last_number = 0;
    for (;;) {
        for (int spins = 0; atomic_load(&crew->number) == last_number && spins < SPINS; spins++)
            ;
        if (atomic_load(&crew->number) == last_number) {
            pthread_mutex_lock(&crew->mutex);
            while (atomic_load(&crew->number) == last_number)
                pthread_cond_wait(&crew->wake, &crew->mutex);
            pthread_mutex_unlock(&crew->mutex);
        }
        last_number = atomic_load(&crew->number);
        if (member->index < crew->count)
            crew->share(crew->job, member->index);
        atomic_fetch_sub(&crew->running, 1);
    }
    return NULL;
}

static void run(void *context, void (*share)(void *job, int index), void *job, int count)
{
    Crew *crew = context;
    crew->share = share;
    crew->job = job;
    crew->count = count;
    atomic_store(&crew->running, crew->public.count - 1);
    pthread_mutex_lock(&crew->mutex);
    atomic_fetch_add(&crew->number, 1);
    pthread_cond_broadcast(&crew->wake);
    pthread_mutex_unlock(&crew->mutex);
    share(job, 0);
    while (atomic_load(&crew->running))
        sched_yield();
}

const struct step_threads *step_threads(int count)
{
    Crew *crew = calloc(1, sizeof *crew);
    Member *members = count > 1 ? calloc((size_t)count, sizeof *members) : NULL;
    if (!crew || (count > 1 && !members)) {
        free(crew);
        free(members);
        return NULL;
    }
    pthread_mutex_init(&crew->mutex, NULL);
    pthread_cond_init(&crew->wake, NULL);
    crew->public = (struct step_threads){1, crew, run};
    for (int i = 1; i < count; i++) {
        pthread_t thread;
        members[i] = (Member){crew, i};
        if (pthread_create(&thread, NULL, serve, &members[i]))
            break;
        pthread_detach(thread);
        crew->public.count = i + 1;
    }
    return &crew->public;
}
