/* libapa_dist_nccl: attention over keys that lie on several GPUs. A library of its own (-lapa_dist_nccl), over NCCL and
 * the CUDA engine.
 *
 * Every rank (a GPU) has all queries and a run of the keys. It attends to its own keys; each rank then gets the states
 * of its part of the rows from all others, merges them in order of rank, and gives the result to all: two exchanges of
 * Sq·Hq·(Dv + 1) numbers, whatever the number of keys. No key moves. docs/distributed.md says when that is the way. */
#ifndef APA_DIST_NCCL_H
#define APA_DIST_NCCL_H

#include "apa/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct apa_dist_nccl_options {
    size_t size;        /* sizeof(apa_dist_nccl_options), set by apa_dist_nccl_options_init() */
    void *communicator; /* an ncclComm_t of the current device; its rank and size are those of the call */
    void *stream;       /* a cudaStream_t of the current device; NULL = the default stream */
    /* Device memory, 256-byte aligned, at least apa_dist_nccl_workspace_bytes(). It belongs to the call until the
     * stream has passed it. */
    void *workspace;
    size_t workspace_bytes;
    int64_t Skv;     /* keys of all ranks */
    int64_t k_first; /* position of this rank's first key; k and v of the problem are its own keys (Skv may be 0) */
    /* With a communicator that does not block (ncclConfig_t.blocking = 0): seconds after which ranks that have not come
     * count as lost, default 20. One that blocks waits for them in NCCL itself, for ever. */
    double meeting_s;
    /* NULL, or where one line goes when CUDA or NCCL fail or an argument of these options is wrong; other errors are
     * told by the context. */
    char *message;
    size_t message_size;
} apa_dist_nccl_options;

APA_EXPORT void apa_dist_nccl_options_init(apa_dist_nccl_options *options);

/* Device memory that a call needs on this rank. Reads options.communicator, Skv and k_first. Errors: as below. */
APA_EXPORT apa_status apa_dist_nccl_workspace_bytes(apa_context *context, const apa_problem *problem,
                                                    const apa_recipe *recipe, const apa_dist_nccl_options *options,
                                                    size_t *bytes);

/* Collective: puts the call on the stream and returns. problem: as for apa_cuda_attention(), but k and v are this
 * rank's keys, and q_offset is the position of query 0 among all keys (default Skv - Sq, Skv of the options). q must be
 * the same on every rank; so must recipe, masks and shapes: what differs is not noticed here. The recipe is resolved
 * for all Skv keys, on each rank for its device: the same on devices of one kind. out and lse are complete on every
 * rank. Deterministic for a number of ranks and a cut of the keys. Errors: INVALID_ARGUMENT, UNSUPPORTED (nothing was
 * put on the stream), INTERNAL (CUDA or NCCL; text in the context).
 */
APA_EXPORT apa_status apa_dist_nccl_attention(apa_context *context, const apa_problem *problem,
                                              const apa_recipe *recipe, const apa_dist_nccl_options *options);

/* Waits for the stream, at most `seconds`. A communicator that reports an error, or is not done by then, is aborted
 * (ncclCommAbort; the caller must not use it again) and the answer is IO, with the reason in options->message. */
APA_EXPORT apa_status apa_dist_nccl_wait(const apa_dist_nccl_options *options, double seconds);

#ifdef __cplusplus
}
#endif
#endif
