/* The wire: every byte between ranks, over MPI. pump.c and wire.c alone know MPI.
 *
 * A thread of the wire (the pump) makes all MPI calls while the caller is inside the library: it starts what was
 * posted, tests what is under way, and gives a sign of life to the next rank, so that messages move while the caller
 * computes and a silent rank is noticed while the caller waits. Outside the library's calls the pump is parked and MPI
 * is the caller's.
 *
 * Who watches whom: rank r sends signs of life to rank r + 1, twice a second; a rank that is in a call while rank r - 1
 * is silent for too long breaks its wire, whether it waits or computes. Calls end together, so whoever is in a call has
 * a neighbour in it; and a lost rank is noticed by that neighbour at least, whoever misses its message. */
#ifndef APA_DIST_WIRE_H
#define APA_DIST_WIRE_H

#include "apa/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct apa_dist_wire apa_dist_wire;

typedef enum apa_dist_op_kind {
    APA_DIST_OP_SEND,
    APA_DIST_OP_RECEIVE,
    APA_DIST_OP_GATHER, /* data: `bytes` of every rank, in order of rank; one's own are in place already */
    APA_DIST_OP_REDUCE  /* data: `rows` states of `width` doubles, merged over all ranks in order of rank, for all */
} apa_dist_op_kind;

/* One message, the caller's memory until it is done. */
typedef struct apa_dist_op {
    apa_dist_op_kind kind;
    void *data;
    int64_t bytes;
    int32_t peer, tag;
    int32_t rows, width;
    /* the wire's own */
    struct apa_dist_op *next;
    void *requests;
    int32_t pieces;
    bool posted, done;
    double begun_ms, ended_ms;
} apa_dist_op;

/* Messages between two ranks in one direction with one tag arrive in the order in which they are posted.
 *
 * Two ranks that give each other long messages post the one that goes before the one that comes. An MPI over one stream
 * (TCP) announces a long message, waits for the other's consent, and then queues all of it; a consent that is given
 * behind such a queue comes when the queue is empty, and the two directions take turns. Announcements that leave first
 * are answered before. */
enum { APA_DIST_TAG_KEYS = 1, APA_DIST_TAG_LIST = 2, APA_DIST_TAG_TILES = 3, APA_DIST_TAG_ROWS = 4 };

/* lost (may be NULL) is called once, by the pump or by the caller's thread, when the wire breaks. */
apa_status apa_dist_wire_open(apa_dist_wire **wire, const void *communicator, double silence_s,
                              void (*lost)(void *user, const char *message), void *user, char *message,
                              size_t message_size);
void apa_dist_wire_close(apa_dist_wire *wire);
void apa_dist_wire_abort(apa_dist_wire *wire, int exit_code);

int32_t apa_dist_wire_rank(const apa_dist_wire *wire);
int32_t apa_dist_wire_ranks(const apa_dist_wire *wire);

/* Between enter and leave the pump runs, and watches the rank before. They nest. enter fails when the wire is broken.
 */
apa_status apa_dist_wire_enter(apa_dist_wire *wire);
void apa_dist_wire_leave(apa_dist_wire *wire);
/* The pump runs, for its signs of life alone: nobody is watched. */
void apa_dist_wire_keep(apa_dist_wire *wire, bool on);

/* Hands an operation to the pump; an operation of 0 bytes is done at once. Not on memory: IO when the wire broke. */
apa_status apa_dist_wire_post(apa_dist_wire *wire, apa_dist_op *op);

/* Waits for a posted operation. `what` completes "... while rank 2 waited for WHAT" and is static. wait_ms (may be
 * NULL) grows by the time spent. On IO the wire is broken and the operation's memory stays the wire's for good. */
apa_status apa_dist_wire_wait(apa_dist_wire *wire, apa_dist_op *op, const char *what, double *wait_ms);

/* post and wait. */
apa_status apa_dist_wire_do(apa_dist_wire *wire, apa_dist_op *op, const char *what, double *wait_ms);

/* Why the wire is broken; "" while it is not. */
const char *apa_dist_wire_fault(const apa_dist_wire *wire);
bool apa_dist_wire_is_broken(const apa_dist_wire *wire);

/* Monotonic milliseconds. */
double apa_dist_now_ms(void);

#endif
