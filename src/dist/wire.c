/* The wire over MPI: the pump thread, signs of life, and the one reduction. See wire.h.
 *
 * MPI calls never block here (Isend, Irecv, Iallgather, Iallreduce, Test), so the pump always comes back to look at the
 * clock. Errors are returned, not fatal (MPI_ERRORS_RETURN), and break the wire. A broken wire leaves its requests and
 * their memory alone: nothing says that MPI is done with them. */
#include "dist/wire.h"

#include "dist/rows.h"

#include <mpi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PIECE_BYTES ((int64_t)1 << 26) /* MPI counts are ints */
#define BEAT_MS 500.0
#define NAP_WAITED_NS 20000    /* between two looks at MPI, when the caller has nothing else to do */
#define NAP_COMPUTING_NS 60000 /* and when it computes */
#define IDLE_MS 50.0           /* nothing under way: only signs of life */

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

static void deadline(struct timespec *at, double ms)
{
    clock_gettime(CLOCK_REALTIME, at);
    const int64_t ns = at->tv_nsec + (int64_t)(ms * 1e6);
    at->tv_sec += (time_t)(ns / 1000000000);
    at->tv_nsec = (long)(ns % 1000000000);
}

/* With the lock held. The first fault is the one that is told. */
static void break_wire(apa_dist_wire *wire, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void break_wire(apa_dist_wire *wire, const char *format, ...)
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
    break_wire(wire, "rank %d: %s: %.180s", wire->rank, call, text);
    pthread_mutex_unlock(&wire->lock);
    return false;
}

/* ------------------------------------------------------------------------------- the state merge as an operator */

/* inout = in ∘ inout, row by row; in comes from the lower ranks. */
static void merge_states(void *in, void *inout, int *count, MPI_Datatype *type)
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
        break_wire(wire, "rank %d has given no sign of life for %.0f s while rank %d %s%s", wire->left, silent * 1e-3,
                   wire->rank, wire->what == NULL ? "computed" : "waited for ", wire->what == NULL ? "" : wire->what);
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
        deadline(&until, IDLE_MS);
        pthread_cond_timedwait(&wire->wake, &wire->lock, &until);
    }
    return !wire->stop;
}

static void *pump(void *argument)
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

/* ------------------------------------------------------------------------------- posting and waiting */

apa_status apa_dist_wire_post(apa_dist_wire *wire, apa_dist_op *op)
{
    op->next = NULL;
    op->done = op->bytes == 0 && op->kind != APA_DIST_OP_REDUCE;
    op->posted = true;
    op->begun_ms = op->ended_ms = 0.0;
    op->pieces = 1;
    if (op->done)
        return APA_STATUS_OK;
    if (op->kind == APA_DIST_OP_SEND || op->kind == APA_DIST_OP_RECEIVE)
        op->pieces = (int32_t)((op->bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    op->requests = malloc((size_t)op->pieces * sizeof(MPI_Request));
    pthread_mutex_lock(&wire->lock);
    if (op->requests == NULL)
        break_wire(wire, "rank %d: no memory for %d requests", wire->rank, (int)op->pieces);
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
        break_wire(wire, "MPI has not come back for %.0f s while rank %d waited for %s", (now - ticked) * 1e-3,
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
        deadline(&until, 100.0);
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
        deadline(&until, 100.0);
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
        MPI_Op_create(merge_states, 0, &wire->merge) != MPI_SUCCESS) /* 0: order of ranks is kept */
        return false;
    wire->left = (wire->rank + wire->ranks - 1) % wire->ranks;
    wire->right = (wire->rank + 1) % wire->ranks;
    return wire->ranks == 1 || MPI_Irecv(&wire->beat_from, 1, MPI_BYTE, wire->left, 0, wire->beats, &wire->beat_in) ==
                                   MPI_SUCCESS;
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
        return refuse(message, message_size, APA_STATUS_UNSUPPORTED,
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
    if (pthread_create(&wire->pump, NULL, pump, wire) != 0) {
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
