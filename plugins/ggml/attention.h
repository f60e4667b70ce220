/* One FLASH_ATTN_EXT node of a ggml graph as a problem of the library. */
#ifndef APA_GGML_ATTENTION_H
#define APA_GGML_ATTENTION_H

#include <apa/apa.h>
#include <ggml.h>

/* What the user has set (docs/llama-cpp.md): APA_METHOD, APA_EPS, APA_SET, APA_MIN_QUERIES, APA_MIN_KEYS,
 * APA_STATISTICS. */
typedef struct apa_ggml_settings {
    apa_recipe recipe;   /* for nodes with at least min_queries rows and min_keys keys */
    apa_recipe exact;    /* for all others */
    int64_t min_queries; /* query positions of a node */
    int64_t min_keys;
    bool statistics; /* one line on stderr when a backend goes */
} apa_ggml_settings;

/* Reads the environment. On an error `message` holds one line. */
bool apa_ggml_settings_load(apa_ggml_settings *settings, char *message, size_t size);

/* Memory that a backend keeps between nodes: K and V of types that the library does not read, widened. */
typedef struct apa_ggml_scratch {
    void *memory[2];
    size_t bytes[2];
    float *slopes;
    int64_t slope_count;
} apa_ggml_scratch;

void apa_ggml_scratch_free(apa_ggml_scratch *scratch);

/* Could the library run the node? Looks at types and shapes only. */
bool apa_ggml_supports(apa_context *context, const apa_ggml_settings *settings, const struct ggml_tensor *node);

/* What a backend has done, for APA_STATISTICS. */
typedef struct apa_ggml_totals {
    int64_t nodes, bands, masks; /* nodes run; those whose mask was a band; those with another mask */
    int64_t visible, hot, skipped;
    double prep_ms, attention_ms, all_ms; /* all: reading masks and widening K and V too */
    char kernel[64];                      /* of the node with most visible tiles */
    int64_t kernel_visible;
} apa_ggml_totals;

/* Runs it and adds to the totals. */
enum ggml_status apa_ggml_run(apa_context *context, const apa_ggml_settings *settings, apa_ggml_scratch *scratch,
                              const struct ggml_tensor *node, apa_ggml_totals *totals);

#endif
