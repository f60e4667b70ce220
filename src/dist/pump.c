/* The pump: the one thread that calls MPI while the caller is inside the library. See wire.h.
 *
 * MPI calls never block here (Isend, Irecv, Iallgather, Iallreduce, Test), so the pump always comes back to look at the
 * clock. Errors are returned, not fatal (MPI_ERRORS_RETURN), and break the wire. A broken wire leaves its requests and
 * their memory alone: nothing says that MPI is done with them. */
#include "dist/pump.h"

#include "dist/rows.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define PIECE_BYTES ((int64_t)1 << 26) /* MPI counts are ints */
#define BEAT_MS 500.0
#define NAP_WAITED_NS 20000    /* between two looks at MPI, when the caller has nothing else to do */
#define NAP_COMPUTING_NS 60000 /* and when it computes */
#define IDLE_MS 50.0           /* nothing under way: only signs of life */

double apa_dist_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static void nap(long ns)
{
    const struct timespec time = {0, ns};
    nanosleep(&time, NULL);
}

void apa_dist_pump_deadline(struct timespec *at, double ms)
{
    clock_gettime(CLOCK_REALTIME, at);
    const int64_t ns = at->tv_nsec + (int64_t)(ms * 1e6);
    at->tv_sec += (time_t)(ns / 1000000000);
    at->tv_nsec = (long)(ns % 1000000000);
}

void apa_dist_pump_break(apa_dist_wire *wire, const char *format, ...)
{
    if (wire->broken)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(wire->fault, sizeof wire->fault, format, arguments);
    va_end(arguments);
    wire->broken = true;
    pthread_cond_broadcast(&wire->change);
    if (wire->lost != NULL)
        wire->lost(wire->user, wire->fault);
}

/* Without the lock. */
static bool check(apa_dist_wire *wire, int code, const char *call)
{
    if (code == MPI_SUCCESS)
        return true;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    pthread_mutex_lock(&wire->lock);
    apa_dist_pump_break(wire, "rank %d: %s: %.180s", wire->rank, call, text);
    pthread_mutex_unlock(&wire->lock);
    return false;
}

/* ------------------------------------------------------------------------------- the state merge as an operator */

/* inout = in ∘ inout, row by row; in comes from the lower ranks. */
void apa_dist_pump_merge(void *in, void *inout, int *count, MPI_Datatype *type)
{
    MPI_Aint low, extent;
    MPI_Type_get_extent(*type, &low, &extent);
    const int64_t width = (int64_t)extent / (int64_t)sizeof(double);
    for (int64_t row = 0; row < *count; row++)
        apa_dist_row_merge((const double *)in + row * width, (double *)inout + row * width, width);
}

static bool set_state_width(apa_dist_wire *wire, int width)
{
    if (wire->state_width == width)
        return true;
    if (wire->state_width != 0)
        MPI_Type_free(&wire->state_type);
    wire->state_width = 0;
    if (!check(wire, MPI_Type_contiguous(width, MPI_DOUBLE, &wire->state_type), "MPI_Type_contiguous") ||
        !check(wire, MPI_Type_commit(&wire->state_type), "MPI_Type_commit"))
        return false;
    wire->state_width = width;
    return true;
}

/* ------------------------------------------------------------------------------- the pump */

int32_t apa_dist_pump_pieces(const apa_dist_op *op)
{
    if (op->kind != APA_DIST_OP_SEND && op->kind != APA_DIST_OP_RECEIVE)
        return 1;
    return (int32_t)((op->bytes + PIECE_BYTES - 1) / PIECE_BYTES);
}

static bool start_pieces(apa_dist_wire *wire, apa_dist_op *op)
{
    MPI_Request *request = op->requests;
    for (int32_t i = 0; i < op->pieces; i++) {
        const int64_t at = i * PIECE_BYTES, rest = op->bytes - at;
        const int n = (int)(rest < PIECE_BYTES ? rest : PIECE_BYTES);
        char *data = (char *)op->data + at;
        const int code = op->kind == APA_DIST_OP_SEND
                             ? MPI_Isend(data, n, MPI_BYTE, op->peer, op->tag, wire->messages, &request[i])
                             : MPI_Irecv(data, n, MPI_BYTE, op->peer, op->tag, wire->messages, &request[i]);
        if (!check(wire, code, op->kind == APA_DIST_OP_SEND ? "MPI_Isend" : "MPI_Irecv"))
            return false;
    }
    return true;
}

static bool start(apa_dist_wire *wire, apa_dist_op *op)
{
    MPI_Request *request = op->requests;
    op->begun_ms = apa_dist_now_ms();
    switch (op->kind) {
    case APA_DIST_OP_SEND:
    case APA_DIST_OP_RECEIVE:
        return start_pieces(wire, op);
    case APA_DIST_OP_GATHER:
        return check(wire,
                     MPI_Iallgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, op->data, (int)op->bytes, MPI_BYTE,
                                    wire->messages, request),
                     "MPI_Iallgather");
    case APA_DIST_OP_REDUCE:
        return set_state_width(wire, op->width) &&
               check(wire,
                     MPI_Iallreduce(MPI_IN_PLACE, op->data, op->rows, wire->state_type, wire->merge, wire->messages,
                                    request),
                     "MPI_Iallreduce");
    }
    return false;
}

/* Moves what was posted to what is under way; then tests that. Returns whether something was finished. */
static bool progress(apa_dist_wire *wire)
{
    pthread_mutex_lock(&wire->lock);
    apa_dist_op *fresh = wire->posted;
    wire->posted = NULL;
    wire->posted_end = &wire->posted;
    pthread_mutex_unlock(&wire->lock);
    apa_dist_op **end = &wire->active;
    while (*end != NULL)
        end = &(*end)->next;
    for (apa_dist_op *op = fresh; op != NULL; op = op->next)
        if (!start(wire, op))
            return false;
    *end = fresh;
    bool finished = false;
    for (apa_dist_op **at = &wire->active; *at != NULL;) {
        apa_dist_op *op = *at;
        int flag = 0;
        if (!check(wire, MPI_Testall(op->pieces, op->requests, &flag, MPI_STATUSES_IGNORE), "MPI_Testall"))
            return false;
        if (!flag) {
            at = &op->next;
            continue;
        }
        *at = op->next;
        finished = true;
        free(op->requests);
        op->requests = NULL;
        op->ended_ms = apa_dist_now_ms();
        pthread_mutex_lock(&wire->lock);
        op->done = true;
        pthread_cond_broadcast(&wire->change);
        pthread_mutex_unlock(&wire->lock);
    }
    return finished;
}

/* Has the rank before been silent for too long? */
static bool watch(apa_dist_wire *wire, double now)
{
    pthread_mutex_lock(&wire->lock);
    const double silent = now - wire->last_heard_ms;
    if (wire->inside > 0 && silent > wire->silence_ms)
        apa_dist_pump_break(wire, "rank %d has given no sign of life for %.0f s while rank %d %s%s", wire->left,
                            silent * 1e-3, wire->rank, wire->what == NULL ? "computed" : "waited for ",
                            wire->what == NULL ? "" : wire->what);
    const bool broken = wire->broken;
    pthread_mutex_unlock(&wire->lock);
    return !broken;
}

/* Signs of life: one to the right when the last is gone and half a second has passed; from the left whatever came. */
static bool beat(apa_dist_wire *wire)
{
    const double now = apa_dist_now_ms();
    int flag = 0;
    if (wire->ranks == 1)
        return true;
    for (;;) {
        if (!check(wire, MPI_Test(&wire->beat_in, &flag, MPI_STATUS_IGNORE), "MPI_Test"))
            return false;
        if (!flag)
            break;
        pthread_mutex_lock(&wire->lock);
        wire->last_heard_ms = now;
        pthread_mutex_unlock(&wire->lock);
        if (!check(wire, MPI_Irecv(&wire->beat_from, 1, MPI_BYTE, wire->left, 0, wire->beats, &wire->beat_in),
                   "MPI_Irecv"))
            return false;
    }
    if (!watch(wire, now))
        return false;
    if (now - wire->last_beat_ms < BEAT_MS)
        return true;
    if (!check(wire, MPI_Test(&wire->beat_out, &flag, MPI_STATUS_IGNORE), "MPI_Test"))
        return false;
    if (!flag)
        return true;
    wire->last_beat_ms = now;
    return check(wire, MPI_Isend(&wire->beat_to, 1, MPI_BYTE, wire->right, 0, wire->beats, &wire->beat_out),
                 "MPI_Isend");
}

/* With the lock held: sleeps until there is something to do. False: the end. */
static bool rest(apa_dist_wire *wire)
{
    wire->last_tick_ms = apa_dist_now_ms();
    while (!wire->stop && (wire->inside + wire->kept == 0 || wire->broken)) {
        wire->parked = true;
        pthread_cond_broadcast(&wire->change);
        pthread_cond_wait(&wire->wake, &wire->lock);
    }
    wire->parked = false;
    if (!wire->stop && wire->posted == NULL && wire->active == NULL) {
        struct timespec until;
        apa_dist_pump_deadline(&until, IDLE_MS);
        pthread_cond_timedwait(&wire->wake, &wire->lock, &until);
    }
    return !wire->stop;
}

void *apa_dist_pump(void *argument)
{
    apa_dist_wire *wire = argument;
    pthread_mutex_lock(&wire->lock);
    while (rest(wire)) {
        const bool waited = wire->what != NULL, go = wire->inside + wire->kept > 0 && !wire->broken;
        pthread_mutex_unlock(&wire->lock);
        const bool finished = go && beat(wire) && progress(wire);
        if (!finished && wire->active != NULL)
            nap(waited ? NAP_WAITED_NS : NAP_COMPUTING_NS);
        pthread_mutex_lock(&wire->lock);
    }
    pthread_mutex_unlock(&wire->lock);
    return NULL;
}
