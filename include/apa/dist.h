/* libapa_dist: attention over queries and keys that lie on several ranks. A library of its own (-lapa_dist), over MPI.
 *
 * Every rank holds *runs*, ranges of positions of the whole sequence. Scores of disjoint keys make states that merge
 * exactly, so a rank attends to what it has, to what comes from the others, and adds up. docs/distributed.md has the
 * algorithms, their cost, and how to start a job.
 *
 * Every function that takes an apa_dist is collective where it says so: all ranks call it, in the same order, with
 * problems that agree. What does not agree is refused on every rank before any key is sent or read.
 *
 * No rank waits for ever. While ranks are in a call each gives signs of life to the next one; a rank that is silent for
 * `silence_s` breaks the apa_dist of its neighbour, whose call fails with APA_STATUS_IO, at the latest when it needs a
 * message; every later call fails at once, and the caller should end the job with apa_dist_abort(). Outputs of a failed
 * call are unspecified. */
#ifndef APA_DIST_H
#define APA_DIST_H

#include "apa/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct apa_dist apa_dist;

typedef struct apa_dist_options {
    size_t size;      /* sizeof(apa_dist_options), set by apa_dist_options_init() */
    double silence_s; /* seconds without a sign of life after which a rank counts as lost; default 20, at least 1 */
    /* NULL, or called once when the apa_dist breaks, from any thread and perhaps while the caller's own is deep in
     * computing: the place to say `message` and to end the job. It must not call into the apa_dist but for
     * apa_dist_abort(). */
    void (*lost)(void *user, const char *message);
    void *user;
} apa_dist_options;

APA_EXPORT void apa_dist_options_init(apa_dist_options *options);

/* Collective. communicator: the address of an MPI_Comm (passed so, this header needs no mpi.h); NULL is MPI_COMM_WORLD.
 * It is duplicated. MPI must be initialised with MPI_THREAD_SERIALIZED or more: a thread of the apa_dist makes MPI
 * calls while, and only while, the caller is inside a function of this header. options NULL: the defaults. message (may
 * be NULL) gets one line on an error. Errors: INVALID_ARGUMENT, UNSUPPORTED (thread level), OUT_OF_MEMORY, IO (MPI). */
APA_EXPORT apa_status apa_dist_create(apa_dist **dist, const void *communicator, const apa_dist_options *options,
                                      char *message, size_t message_size);

/* Collective unless broken; before MPI_Finalize(). NULL is allowed. A broken apa_dist keeps its memory: MPI may still
 * write to it. */
APA_EXPORT void apa_dist_destroy(apa_dist *dist);

/* Ends all processes of the communicator (MPI_Abort). Does not return. */
APA_EXPORT void apa_dist_abort(apa_dist *dist, int exit_code);

APA_EXPORT int32_t apa_dist_rank(const apa_dist *dist);
APA_EXPORT int32_t apa_dist_ranks(const apa_dist *dist);

/* What went wrong in the last call that failed: one line. Mistakes that only some ranks made are told on all. */
APA_EXPORT const char *apa_dist_message(const apa_dist *dist);

/* ---- Who holds what --------------------------------------------------------------------------------------------- */

#define APA_DIST_RUNS 8 /* runs of a rank, at most */

/* Positions first … first+count-1 of the whole sequence are rows at … at+count-1 of the rank's tensor. */
typedef struct apa_dist_run {
    int64_t first, count, at;
} apa_dist_run;

typedef struct apa_dist_shard {
    int32_t count; /* 0: nothing */
    apa_dist_run run[APA_DIST_RUNS];
} apa_dist_shard;

/* Pieces of equal length, a multiple of `granule` but for the last; rank r gets piece r. */
APA_EXPORT apa_dist_shard apa_dist_split_blocks(int64_t length, int32_t ranks, int32_t rank, int64_t granule);

/* For causal work: 2·ranks pieces, rank r gets pieces r and 2·ranks-1-r, an early one with few visible keys and a late
 * one with many, so that all ranks have the same. In both, `at` counts on from run to run (a tensor of the shard
 * alone); set at = first for a tensor of the whole sequence. */
APA_EXPORT apa_dist_shard apa_dist_split_zigzag(int64_t length, int32_t ranks, int32_t rank, int64_t granule);

/* Rows of a shard. */
APA_EXPORT int64_t apa_dist_shard_rows(const apa_dist_shard *shard);

/* ---- Attention -------------------------------------------------------------------------------------------------- */

typedef enum apa_dist_queries {
    APA_DIST_QUERIES_SHARDED =
        0,                     /* prefill: keys come to the queries, in ranks-1 shifts; out and lse are of q's rows */
    APA_DIST_QUERIES_WHOLE = 1 /* decode: every rank has all queries; nothing but states moves, in one reduction
                                  whose operator is the state merge; every rank gets the result */
} apa_dist_queries;

/* In which form keys and values travel. */
typedef enum apa_dist_exchange {
    APA_DIST_EXCHANGE_AUTO = 0,  /* exact */
    APA_DIST_EXCHANGE_EXACT = 1, /* as they are */
    /* INT8 codes, 268 bytes a key and head at D 128 where f16 has 512, then the exact form of tiles that hold more than
     * eps of some row that a rank owns. For recipes with int8 cold tiles, one Q term, V not smoothed. A call whose
     * scores could be off by more than 8 log2 units in INT8, or whose queries are not finite, is exchanged exactly;
     * the statistics say so. */
    APA_DIST_EXCHANGE_CODES = 2
} apa_dist_exchange;

typedef struct apa_dist_problem {
    size_t size; /* sizeof(apa_dist_problem), set by apa_dist_problem_init() */
    /* q, k, v: what this rank holds (seq may be 0; batch, heads and dims are everywhere the same). out, lse: of the
     * rows of q. softmax_scale, causal, window: as always; q_offset: position of query 0 of the *whole* queries among
     * the whole keys, APA_Q_OFFSET_DEFAULT = Skv - Sq. Anything else that a problem can have is refused. */
    apa_problem local;
    int64_t Sq, Skv; /* of the whole */
    apa_dist_queries queries;
    apa_dist_shard q_shard; /* not read with QUERIES_WHOLE: rows 0 … Sq-1 of q, the same numbers on every rank */
    apa_dist_shard k_shard; /* the shards of all ranks must cover every position once */
} apa_dist_problem;

APA_EXPORT void apa_dist_problem_init(apa_dist_problem *problem);

typedef struct apa_dist_call {
    size_t size;        /* sizeof(apa_dist_call), set by apa_dist_call_init() */
    const char *engine; /* as apa_attention_options.engine */
    apa_dist_exchange exchange;
} apa_dist_call;

APA_EXPORT void apa_dist_call_init(apa_dist_call *call);

/* What a call did, on this rank. */
typedef struct apa_dist_statistics {
    size_t size; /* sizeof(apa_dist_statistics), set by apa_dist_statistics_init() */
    int32_t rank, ranks;
    apa_dist_exchange exchange; /* as it was */
    char reason[96];            /* why it was not the one asked for; else empty */
    char engine[16], kernel[64];
    apa_recipe recipe; /* resolved for the whole problem */
    /* (row, tile) pairs as in apa_statistics, tiles counted within runs. */
    int64_t visible, hot, skipped;
    /* Bytes of this rank: keys and values, in whatever form; of these in codes and in exact tiles; lists of wanted
     * tiles; states. sent_f16: what the same keys and values would have cost in 16 bits. */
    int64_t sent, received, sent_codes, sent_tiles, sent_lists, sent_states, sent_f16;
    /* (KV head, tile) pairs that came as codes, and those whose exact form was asked for: tiles that are hot for some
     * row of this rank. */
    int64_t remote_tiles, wanted_tiles;
    /* Wall time: the whole call; attention; packing, unpacking and merging; waiting for messages; and how long messages
     * of keys and values were under way, whatever else went on. 1 - wait/transfer is what overlap hid. */
    double total_ms, compute_ms, pack_ms, wait_ms, transfer_ms;
} apa_dist_statistics;

APA_EXPORT void apa_dist_statistics_init(apa_dist_statistics *statistics);

/* Collective. Runs attention over all ranks. recipe NULL: preset "apa"; call NULL: the defaults; statistics may be
 * NULL. The recipe is resolved once for the whole problem (so eps is that of all Skv keys). Tiles start at the first
 * key of a run. Each rank judges a tile against the row sums that it knows by then, which are at most those of all
 * keys: what is hot against all keys is hot here.
 * Deterministic: the same shards on the same number of ranks give the same bits, whatever the threads and the order in
 * which messages come. Sums over ranks are made in double and rounded once.
 * Errors: INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY (on all ranks, before anything is sent), IO (broken). */
APA_EXPORT apa_status apa_dist_attention(apa_dist *dist, apa_context *context, const apa_dist_problem *problem,
                                         const apa_recipe *recipe, const apa_dist_call *call,
                                         apa_dist_statistics *statistics);

/* Collective. Brings out and lse of all ranks (QUERIES_SHARDED) to rank `root`: whole_out [B,Hq,Sq,Dv] and whole_lse
 * (dtype NONE: not wanted; the same on every rank), dtypes those of local.out and local.lse; read on root only. */
APA_EXPORT apa_status apa_dist_collect(apa_dist *dist, const apa_dist_problem *problem, int32_t root,
                                       const apa_tensor *whole_out, const apa_tensor *whole_lse);

/* Collective. The statistics of every rank, in order of rank, to all: `all` has room for apa_dist_ranks(). */
APA_EXPORT apa_status apa_dist_statistics_gather(apa_dist *dist, const apa_dist_statistics *mine,
                                                 apa_dist_statistics *all);

/* Collective. Returns when all ranks have called it, and says whether `code` was 0 on all of them: the largest. */
APA_EXPORT apa_status apa_dist_agree(apa_dist *dist, int32_t code, int32_t *largest);

/* With on = 1 the rank goes on giving signs of life while it works outside of this library's calls, until on = 0. The
 * application must then make no MPI call of its own, unless MPI has MPI_THREAD_MULTIPLE. */
APA_EXPORT void apa_dist_keep_alive(apa_dist *dist, int on);

#ifdef __cplusplus
}
#endif
#endif
