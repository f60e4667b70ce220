/* libapa on CUDA devices: attention on device pointers, in a stream.
 *
 * apa_attention() with engine "cuda" takes tensors in host memory and moves the data itself; the functions here are for
 * data that already lies on the device. They exist in every build: one without CUDA returns UNSUPPORTED and says so. */
#ifndef APA_CUDA_H
#define APA_CUDA_H

#include "apa/attention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A device and what this build can do with it. */
typedef struct apa_cuda_device {
    size_t size;        /* sizeof(apa_cuda_device), set by apa_cuda_device_init() */
    char name[96];      /* as the driver calls it */
    int32_t capability; /* 10·major + minor: 90 */
    int32_t multiprocessors;
    int64_t memory_bytes;
    char kernels[16];     /* "warp-mma", "wgmma, warp-mma", or "" when the device is too old */
    char cold_format[16]; /* what recipes with cold_format=auto run: "int8", "e4m3" */
    char reason[160];     /* why, one line */
} apa_cuda_device;

APA_EXPORT void apa_cuda_device_init(apa_cuda_device *device);

/* Devices that the process can see. Errors: UNSUPPORTED (no CUDA in this build, no driver, no device: *count is 0 and
 * the context, if not NULL, says why). Thread-safe for different contexts. */
APA_EXPORT apa_status apa_cuda_device_count(apa_context *context, int32_t *count);

/* Describes device `index`. Errors: INVALID_ARGUMENT, UNSUPPORTED. */
APA_EXPORT apa_status apa_cuda_device_describe(apa_context *context, int32_t index, apa_cuda_device *device);

/* Order of options.counts: pairs of (row, tile) that are visible, of these hot, hot by the running sum before the
 * second look, and skipped. */
enum {
    APA_CUDA_COUNT_VISIBLE = 0,
    APA_CUDA_COUNT_HOT = 1,
    APA_CUDA_COUNT_CANDIDATES = 2,
    APA_CUDA_COUNT_SKIPPED = 3,
    APA_CUDA_COUNT_NUMBER = 4
};

typedef struct apa_cuda_options {
    size_t size;  /* sizeof(apa_cuda_options), set by apa_cuda_options_init() */
    void *stream; /* a cudaStream_t of the current device; NULL = the default stream */
    /* Device memory, 256-byte aligned, at least apa_cuda_plan.workspace_bytes. It belongs to the call until the stream
     * has passed it; calls in one stream may share it. */
    void *workspace;
    size_t workspace_bytes;
    uint64_t *counts;  /* device memory, APA_CUDA_COUNT_NUMBER elements, or NULL */
    uint8_t *verdicts; /* device memory, [B][Hq][Sq][ceil(Skv/64)] of apa_verdict, or NULL; as options.verdicts of
                          apa_attention() it is refused where sequences differ */

    /* Kernel family: "auto" (NULL too) is the best that takes the call; "warp" and "wgmma" (compute capability 9.0) are
     * that one or a refusal. */
    const char *family;

    /* Keys that stay prepared between calls, for prompts that come in chunks: codes and scales of the tiles lie in
     * memory of the caller's, and a call makes only those of the keys that are new to it. Out and LSE are, bit for bit,
     * those of a call with prepared_keys 0 and prepared_mean 1, which makes all tiles anew about the same mean; but
     * after a call with fewer keys than are kept the largest key of those given up stays in the bound that tells rows
     * beyond the formats, so more rows may be exact.
     *
     * The same in all calls on one memory: device, family (by name, not "auto"), recipe, dtype, B, Hkv, D and
     * prepared_room. Refused where a scale is not a tile's own (cuda:warp: all but qk_scale_granularity=row), and for
     * more than one sequence where they differ. Where all tiles are hot nothing is prepared: prepared_bytes is 0 and
     * the memory is left alone. */

    /* Device memory, 256-byte aligned, at least apa_cuda_plan.prepared_bytes; read and written in stream order. What it
     * holds does not matter where prepared_keys and prepared_mean are 0. */
    void *prepared;
    size_t prepared_bytes;
    /* Keys of a sequence that it is laid out for, at least Skv; 0 (the default): nothing is kept. */
    int64_t prepared_room;
    /* Keys of a sequence that the call before has seen, its Skv; fewer to have those after them made anew; 0 in the
     * first call. k and v still hold them. */
    int64_t prepared_keys;
    /* With smooth_k the mean of the first call's keys is what is taken off K in all of them: legal for any keys, but a
     * poor mean leaves larger codes. prepared_keys 0 takes a new one, unless this is other than 0. */
    int32_t prepared_mean;

    /* Most bytes of the workspace that prepared keys may take; 0 (the default): as many as they are, half to three
     * quarters of what K and V take. With less the bits are the same, for a smaller workspace and more time
     * (docs/cuda.md). Refused with prepared_room. Family "warp" prepares them window by window of the keys, several
     * times over: 8-bit cold tiles and skip=off; refused under two tiles of every KV head. Family "wgmma" works on some
     * KV heads at a time: refused under one of them. With "auto" the bound is that of the family that runs. */
    size_t copy_bytes;
} apa_cuda_options;

APA_EXPORT void apa_cuda_options_init(apa_cuda_options *options);

/* What a call would do on the current device. */
typedef struct apa_cuda_plan {
    size_t size;     /* sizeof(apa_cuda_plan), set by apa_cuda_plan_init() */
    char engine[16]; /* "cuda:warp", "cuda:wgmma" */
    char kernel[64]; /* which kernels, for people */
    size_t workspace_bytes;
    size_t prepared_bytes; /* for options.prepared_room keys a sequence */
    apa_recipe recipe;     /* resolved; where sequences differ, for the longest */
} apa_cuda_plan;

APA_EXPORT void apa_cuda_plan_init(apa_cuda_plan *plan);

/* Validates a call of apa_cuda_attention() and says how it would run. Of the options family, copy_bytes, prepared_room,
 * prepared_keys and whether verdicts are asked for count; NULL = defaults. Data pointers of the tensors may be NULL; no
 * device memory is read. Errors: as apa_cuda_attention(). */
APA_EXPORT apa_status apa_cuda_attention_plan(apa_context *context, const apa_problem *problem,
                                              const apa_recipe *recipe, const apa_cuda_options *options,
                                              apa_cuda_plan *plan);

/* apa_cuda_plan.workspace_bytes with default options. */
APA_EXPORT apa_status apa_cuda_workspace_bytes(apa_context *context, const apa_problem *problem,
                                               const apa_recipe *recipe, size_t *bytes);

/* Puts one attention call on the stream and returns; every tensor of the problem is in device memory. No
 * synchronisation and no allocation happens inside, so the call can be captured into a CUDA graph. Deterministic: the
 * same bits for the same inputs on the same kind of device. q, k, v: f16 or bf16; data 16-byte aligned, strides
 * multiples of 8 elements; D = Dv = 64, 128 or 256; out f16, bf16 or f32; lse f32. recipe NULL = preset "apa".
 *
 * Ragged and paged problems: cu_seqlens_q, cu_seqlens_k, seqused_k and q_offsets are in host memory, read before the
 * function returns: lengths decide what is launched, one sequence after the other. A graph keeps those of its capture.
 * block_table is in device memory and is read when the stream gets there: a graph follows it. A page number that is
 * negative, or k's number of pages and more, is not read: its keys and values are NaN, so rows that see them come out
 * NaN and others do not. Pages are laid flat in the workspace first; the bits are those of the flat call.
 *
 * resolved, if not NULL, receives the recipe as it runs (where sequences differ, that of the longest). Errors:
 * INVALID_ARGUMENT, UNSUPPORTED (nothing was put on the stream), INTERNAL (a CUDA error; its text in the context). */
APA_EXPORT apa_status apa_cuda_attention(apa_context *context, const apa_problem *problem, const apa_recipe *recipe,
                                         const apa_cuda_options *options, apa_recipe *resolved);

#ifdef __cplusplus
}
#endif
#endif
