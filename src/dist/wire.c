/* The caller's side of the wire: posting, waiting, entering and leaving; opening and closing. See wire.h; MPI's side is
 * pump.c. */
#include "dist/pump.h"

#include <stdio.h>
#include <stdlib.h>

/* ------------------------------------------------------------------------------- posting and waiting */

apa_status apa_dist_wire_post(apa_dist_wire *wire, apa_dist_op *op)
{
    op->next = NULL;
    op->done = op->bytes == 0 && op->kind != APA_DIST_OP_REDUCE;
    op->posted = true;
    op->begun_ms = op->ended_ms = 0.0;
    if (op->done)
        return APA_STATUS_OK;
    op->pieces = apa_dist_pump_pieces(op);
    op->requests = malloc((size_t)op->pieces * sizeof(MPI_Request));
    pthread_mutex_lock(&wire->lock);
    if (op->requests == NULL)
        apa_dist_pump_break(wire, "rank %d: no memory for %d requests", wire->rank, (int)op->pieces);
    const bool broken = wire->broken;
    for (int32_t i = 0; i < op->pieces && !broken; i++)
        ((MPI_Request *)op->requests)[i] = MPI_REQUEST_NULL;
    if (!broken) {
        *wire->posted_end = op;
        wire->posted_end = &op->next;
        pthread_cond_signal(&wire->wake);
    }
    pthread_mutex_unlock(&wire->lock);
    return broken ? APA_STATUS_IO : APA_STATUS_OK;
}

/* With the lock held: MPI may be stuck in a call, and the pump with it. */
static void look_at_pump(apa_dist_wire *wire, double since)
{
    const double now = apa_dist_now_ms(), ticked = wire->last_tick_ms > since ? wire->last_tick_ms : since;
    if (now - ticked > wire->silence_ms)
        apa_dist_pump_break(wire, "MPI has not come back for %.0f s while rank %d waited for %s", (now - ticked) * 1e-3,
                            wire->rank, wire->what);
}

apa_status apa_dist_wire_wait(apa_dist_wire *wire, apa_dist_op *op, const char *what, double *wait_ms)
{
    if (!op->posted)
        return APA_STATUS_OK;
    const double since = apa_dist_now_ms();
    pthread_mutex_lock(&wire->lock);
    wire->what = what;
    while (!op->done && !wire->broken) {
        struct timespec until;
        apa_dist_pump_deadline(&until, 100.0);
        if (pthread_cond_timedwait(&wire->change, &wire->lock, &until) != 0)
            look_at_pump(wire, since);
    }
    wire->what = NULL;
    const bool done = op->done;
    pthread_mutex_unlock(&wire->lock);
    if (wait_ms != NULL)
        *wait_ms += apa_dist_now_ms() - since;
    if (done)
        op->posted = false;
    return done ? APA_STATUS_OK : APA_STATUS_IO;
}

apa_status apa_dist_wire_do(apa_dist_wire *wire, apa_dist_op *op, const char *what, double *wait_ms)
{
    apa_status status = apa_dist_wire_post(wire, op);
    return status == APA_STATUS_OK ? apa_dist_wire_wait(wire, op, what, wait_ms) : status;
}

apa_status apa_dist_wire_enter(apa_dist_wire *wire)
{
    pthread_mutex_lock(&wire->lock);
    const bool broken = wire->broken;
    if (!broken && wire->inside++ == 0) {
        wire->last_heard_ms = wire->last_tick_ms = apa_dist_now_ms();
        pthread_cond_signal(&wire->wake);
    }
    pthread_mutex_unlock(&wire->lock);
    return broken ? APA_STATUS_IO : APA_STATUS_OK;
}

/* With the lock held: MPI is the caller's again once the pump rests. */
static void park(apa_dist_wire *wire)
{
    const double since = apa_dist_now_ms();
    pthread_cond_signal(&wire->wake);
    while (wire->inside + wire->kept == 0 && !wire->parked && apa_dist_now_ms() - since < wire->silence_ms) {
        struct timespec until;
        apa_dist_pump_deadline(&until, 100.0);
        pthread_cond_timedwait(&wire->change, &wire->lock, &until);
    }
}

void apa_dist_wire_leave(apa_dist_wire *wire)
{
    pthread_mutex_lock(&wire->lock);
    wire->inside -= wire->inside > 0;
    park(wire);
    pthread_mutex_unlock(&wire->lock);
}

void apa_dist_wire_keep(apa_dist_wire *wire, bool on)
{
    pthread_mutex_lock(&wire->lock);
    wire->kept = on;
    if (on)
        pthread_cond_signal(&wire->wake);
    else
        park(wire);
    pthread_mutex_unlock(&wire->lock);
}

/* ------------------------------------------------------------------------------- opening and closing */

static apa_status refuse(char *message, size_t size, apa_status status, const char *text)
{
    if (message != NULL && size > 0)
        snprintf(message, size, "%s", text);
    return status;
}

static bool join_mpi(apa_dist_wire *wire, MPI_Comm communicator)
{
    wire->messages = wire->beats = MPI_COMM_NULL;
    wire->beat_out = wire->beat_in = MPI_REQUEST_NULL;
    if (MPI_Comm_dup(communicator, &wire->messages) != MPI_SUCCESS ||
        MPI_Comm_set_errhandler(wire->messages, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_dup(wire->messages, &wire->beats) != MPI_SUCCESS ||
        MPI_Comm_set_errhandler(wire->beats, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
        MPI_Comm_rank(wire->messages, &wire->rank) != MPI_SUCCESS ||
        MPI_Comm_size(wire->messages, &wire->ranks) != MPI_SUCCESS ||
        MPI_Op_create(apa_dist_pump_merge, 0, &wire->merge) != MPI_SUCCESS) /* 0: order of ranks is kept */
        return false;
    wire->left = (wire->rank + wire->ranks - 1) % wire->ranks;
    wire->right = (wire->rank + 1) % wire->ranks;
    return wire->ranks == 1 ||
           MPI_Irecv(&wire->beat_from, 1, MPI_BYTE, wire->left, 0, wire->beats, &wire->beat_in) == MPI_SUCCESS;
}

apa_status apa_dist_wire_open(apa_dist_wire **made, const void *communicator, double silence_s,
                              void (*lost)(void *user, const char *message), void *user, char *message,
                              size_t message_size)
{
    int initialised = 0, level = 0;
    *made = NULL;
    if (MPI_Initialized(&initialised) != MPI_SUCCESS || !initialised)
        return refuse(message, message_size, APA_STATUS_INVALID_ARGUMENT, "MPI is not initialised");
    if (MPI_Query_thread(&level) != MPI_SUCCESS || level < MPI_THREAD_SERIALIZED)
        return refuse(
            message, message_size, APA_STATUS_UNSUPPORTED,
            "MPI's thread level is under MPI_THREAD_SERIALIZED, expected that or more from MPI_Init_thread()");
    apa_dist_wire *wire = calloc(1, sizeof *wire);
    if (wire == NULL)
        return refuse(message, message_size, APA_STATUS_OUT_OF_MEMORY, "no memory for a communicator");
    wire->silence_ms = silence_s * 1e3;
    wire->lost = lost;
    wire->user = user;
    wire->posted_end = &wire->posted;
    pthread_mutex_init(&wire->lock, NULL);
    pthread_cond_init(&wire->wake, NULL);
    pthread_cond_init(&wire->change, NULL);
    if (!join_mpi(wire, communicator == NULL ? MPI_COMM_WORLD : *(const MPI_Comm *)communicator)) {
        free(wire); /* what MPI may hold of it is gone with the job */
        return refuse(message, message_size, APA_STATUS_IO, "MPI could not duplicate the communicator");
    }
    if (pthread_create(&wire->pump, NULL, apa_dist_pump, wire) != 0) {
        free(wire);
        return refuse(message, message_size, APA_STATUS_OUT_OF_MEMORY, "no thread to be had for MPI");
    }
    *made = wire;
    return APA_STATUS_OK;
}

void apa_dist_wire_close(apa_dist_wire *wire)
{
    if (wire == NULL)
        return;
    pthread_mutex_lock(&wire->lock);
    wire->stop = true;
    const bool broken = wire->broken;
    pthread_cond_signal(&wire->wake);
    pthread_mutex_unlock(&wire->lock);
    if (broken)
        return;
    pthread_join(wire->pump, NULL);
    if (wire->beat_in != MPI_REQUEST_NULL) {
        MPI_Cancel(&wire->beat_in);
        MPI_Wait(&wire->beat_in, MPI_STATUS_IGNORE);
    }
    if (wire->beat_out != MPI_REQUEST_NULL)
        MPI_Request_free(&wire->beat_out); /* one byte, eager: gone already, or the neighbour does not care */
    if (wire->state_width != 0)
        MPI_Type_free(&wire->state_type);
    MPI_Op_free(&wire->merge);
    MPI_Comm_free(&wire->beats);
    MPI_Comm_free(&wire->messages);
    pthread_cond_destroy(&wire->wake);
    pthread_cond_destroy(&wire->change);
    pthread_mutex_destroy(&wire->lock);
    free(wire);
}

void apa_dist_wire_abort(apa_dist_wire *wire, int exit_code)
{
    MPI_Abort(wire->messages, exit_code);
}

int32_t apa_dist_wire_rank(const apa_dist_wire *wire)
{
    return wire->rank;
}

int32_t apa_dist_wire_ranks(const apa_dist_wire *wire)
{
    return wire->ranks;
}

const char *apa_dist_wire_fault(const apa_dist_wire *wire)
{
    return wire->fault;
}

bool apa_dist_wire_is_broken(const apa_dist_wire *wire)
{
    return wire->broken;
}
