/* The wire from inside: what the caller's side (wire.c) and the thread that calls MPI (pump.c) share. */
#ifndef APA_DIST_PUMP_H
#define APA_DIST_PUMP_H

#include "dist/wire.h"

#include <mpi.h>
#include <pthread.h>
#include <time.h>

struct apa_dist_wire {
    MPI_Comm messages, beats;
    int rank, ranks, left, right;
    double silence_ms;

    pthread_t pump;
    pthread_mutex_t lock; /* everything below */
    pthread_cond_t wake, change;
    int inside, kept; /* calls, nested; other reasons for signs of life */
    const char *what; /* what the caller waits for, NULL: it computes */
    bool parked, stop;
    apa_dist_op *posted, **posted_end;
    double last_heard_ms, last_tick_ms;
    bool broken;
    char fault[256];
    void (*lost)(void *user, const char *message);
    void *user;

    /* the pump's own */
    apa_dist_op *active;
    MPI_Request beat_out, beat_in;
    char beat_to, beat_from;
    double last_beat_ms;
    MPI_Datatype state_type;
    int state_width;
    MPI_Op merge;
};

/* MPI requests that an operation takes. */
int32_t apa_dist_pump_pieces(const apa_dist_op *op);

/* The thread; argument: the wire. */
void *apa_dist_pump(void *argument);

/* The state merge as MPI's operator: MPI_User_function, for MPI_Op_create(). */
void apa_dist_pump_merge(void *in, void *inout, int *count, MPI_Datatype *type);

/* With the lock held. The first fault is the one that is told. */
void apa_dist_pump_break(apa_dist_wire *wire, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Now + ms, for pthread_cond_timedwait(). */
void apa_dist_pump_deadline(struct timespec *at, double ms);

#endif
