/* One call of apa_dist_attention(), from inside: what every part of it shares.
 *
 * A call goes  check (cards of all ranks, one gather) → shifts or whole → finish.  A card is what a rank asks for, in
 * bytes; all ranks hold all cards, so each knows who holds what, who needs what, and comes to the same verdict about
 * what does not agree. */
#ifndef APA_DIST_JOB_H
#define APA_DIST_JOB_H

#include "apa/dist.h"

#include "dist/rows.h"
#include "dist/wire.h"

#define APA_DIST_TILE 64 /* keys */

/* What a rank asks for. Compared byte for byte where it must agree, so it has no padding that is not zeroed. */
typedef struct apa_dist_card {
    int32_t status; /* of the rank's own checks */
    char message[256];
    int64_t B, Hq, Hkv, D, Dv, Sq, Skv, q_offset, window_left, window_right;
    double scale;
    int32_t dtype, out_dtype, lse_dtype, causal, queries, exchange;
    char engine[16];
    apa_recipe recipe; /* as asked for */
    apa_dist_shard q, k;
    uint64_t q_hash; /* of the queries, where every rank must have the same */
} apa_dist_card;

struct apa_dist {
    apa_dist_wire *wire;
    char message[512];
};

typedef struct apa_dist_job {
    apa_dist *dist;
    apa_dist_wire *wire;
    apa_context *context;
    const apa_dist_problem *problem;
    apa_tensor q, k, v, out, lse;
    int32_t rank, ranks;
    apa_dist_card *card; /* of all ranks */
    const apa_dist_card *mine;
    int64_t G, element; /* query heads per KV head; bytes */
    const char *engine;
    apa_recipe recipe;          /* resolved for the whole problem */
    int64_t rows;               /* of this rank's queries, run after run */
    int64_t width;              /* of a row's state */
    double *state;              /* [B][Hq][rows][width] */
    float *out_part, *lse_part; /* what one engine call gives: [part_rows][Dv], [part_rows] */
    int64_t part_rows;
    /* Exchange codes alone. */
    float *rotated; /* [B][Hq][rows][D]: queries in FP32, as the codes' keys are */
    double *known;  /* [B][Hq][rows][2]: frame and sum of all that a row has met, in whatever form */
    apa_dist_statistics *statistics;
} apa_dist_job;

apa_status apa_dist_fail(apa_dist *dist, apa_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The wire's fault as the call's error. */
apa_status apa_dist_lost(apa_dist *dist);

/* ---- check.c: fills in job->card, ->mine, ->recipe and refuses, on all ranks alike. Frees nothing. */
apa_status apa_dist_check(apa_dist_job *job, const apa_recipe *recipe, const apa_dist_call *call);
/* The descriptor of the whole problem, without data. */
apa_problem apa_dist_whole_problem(const apa_dist_card *card);

/* ---- job.c */
apa_status apa_dist_job_allocate(apa_dist_job *job);
void apa_dist_job_free(apa_dist_job *job);

/* Does some query of q see some key of k? */
bool apa_dist_sees(const apa_dist_card *card, const apa_dist_run *q, const apa_dist_run *k);
/* Does every query of q see every key of k? */
bool apa_dist_sees_all(const apa_dist_card *card, const apa_dist_run *q, const apa_dist_run *k);

/* Rows at … at+count-1 of a tensor; one batch and heads head … head+heads-1 of it. */
apa_tensor apa_dist_view(const apa_tensor *tensor, int64_t at, int64_t count);
apa_tensor apa_dist_view_heads(const apa_tensor *tensor, int64_t batch, int64_t head, int64_t heads);

/* A row's state. */
double *apa_dist_state(const apa_dist_job *job, int64_t batch, int64_t head, int64_t row);

/* Counts of an engine call into the statistics. */
void apa_dist_count(apa_dist_job *job, const apa_statistics *statistics);

/* Runs the engine on q against k and v, whose first key has the given position; out_part and lse_part receive
 * [q batch][q heads][q rows]. q_position: of q's first row among the whole queries. masked 0: everything is seen. */
apa_status apa_dist_attend(apa_dist_job *job, const apa_tensor *q, int64_t q_position, const apa_tensor *k,
                           const apa_tensor *v, int64_t k_position, int masked, const apa_recipe *recipe,
                           uint8_t *verdicts, apa_statistics *statistics);

/* All of this rank's queries against a run of keys in tensors k and v [B, Hkv, count, …] of the inputs' dtype: engine
 * calls, whose states are added. */
apa_status apa_dist_attend_run(apa_dist_job *job, const apa_tensor *k, const apa_tensor *v, const apa_dist_run *run);
/* The same with the rank's own keys. */
apa_status apa_dist_attend_own(apa_dist_job *job);

/* States → out and lse. Uses the states up. */
apa_status apa_dist_finish(apa_dist_job *job);

/* ---- whole.c, exact.c, adaptive.c: the three ways */
apa_status apa_dist_run_whole(apa_dist_job *job);
apa_status apa_dist_run_exact(apa_dist_job *job);
apa_status apa_dist_run_codes(apa_dist_job *job);

#endif
