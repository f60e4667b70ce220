/* What tests/cuda/plan.c catches of a call, for its own tests and those of calls.c. */
#ifndef APA_TESTS_CUDA_PLAN_H
#define APA_TESTS_CUDA_PLAN_H

#include "apa/cuda.h"

#include "cuda/device.h"
#include "cuda/gather.h"
#include "cuda/job.h"

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

enum { EXACT, KEYS, QUERIES, COLD, JUDGE, FIX, HOT, FINISH, RECHECK, BOTH, STEPS }; /* BOTH: passes in one kernel */
enum { MOST_SPANS = 32, MOST_SEQUENCES = 8 };

/* Addresses that nobody reads, the device's for whoever asks. */
#define BASE ((char *)(UINT64_C(1) << 40)) /* of the workspace; tensors from 2^42 behind it on */
#define KEPT (BASE + (INT64_C(5) << 42))   /* prepared keys between calls */
#define TABLE (BASE + (INT64_C(6) << 42))
#define DEVICE_END (BASE + (INT64_C(7) << 42))

typedef struct shape {
    int64_t B, Hq, Hkv, Sq, Skv, D;
    int causal;
    int64_t left;
} shape;

typedef struct span {
    const char *name;
    uintptr_t first, end;
} span;

typedef struct plan_call {
    apa_cuda_target target;
    size_t bytes, kept_bytes; /* of the workspace, and of memory at KEPT (0: prepared keys are in the workspace) */
    bool hopper;
    int64_t next_unit[STEPS]; /* of the batches so far */
    int64_t sequences[STEPS];
    shape shape;
    apa_cuda_job early; /* of the launch for rows that see few tiles */
    int64_t early_at;   /* units of pass 1 that had been launched before it */
    int early_launches, both_launches;
    int launches;
    span spans[MOST_SPANS];
    int count;
    apa_cuda_job job[MOST_SEQUENCES]; /* of each sequence's pass 1 or exact kernel */
    apa_cuda_pages pages[MOST_SEQUENCES];
    int gathers;
    int32_t prepared_window; /* of a bounded copy: first tile of the window that was prepared last */
    int preps;               /* and how often one was */
} plan_call;

extern plan_call at; /* the call under test */

extern const apa_cuda_target h200, rtx_4090;

/* f16 tensors at made-up addresses. */
apa_problem problem_of(const shape *s);

/* Sequences so far: of the exact kernel, or of pass 1, by blocks that do both passes or not. */
int64_t plan_sequences(bool exact);

/* Families, sequences that differ, kept keys. Returns the number of tests that failed. */
int apa_test_calls(void);

#endif
