/* Synthetic inputs. docs/command.md states the constructions; this file is their definition.
 *
 * Every row of every tensor has its own SplitMix64 sequence, seeded from (seed, tensor, row), so a row's values depend
 * neither on the other sizes nor on the order of generation. Normals come from Box-Muller in double.
 * SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TAU 6.283185307179586476925

enum { STREAM_Q = 1, STREAM_K, STREAM_V, STREAM_DIRECTION, STREAM_VALUE, STREAM_CHOICE, STREAM_TOPIC_MEAN };

/* ------------------------------------------------------------------------------- random numbers */

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return mix(*state);
}

static uint64_t row_state(uint64_t seed, uint64_t stream, int64_t row)
{
    return mix(mix(seed * 0x9e3779b97f4a7c15u + stream) + (uint64_t)row * 0xd1342543de82ef95u);
}

static void normals(uint64_t seed, uint64_t stream, int64_t row, int64_t n, double *to)
{
    uint64_t state = row_state(seed, stream, row);
    for (int64_t i = 0; i < n; i += 2) {
        const double u = (double)((next(&state) >> 11) + 1) * 0x1p-53,
                     angle = (double)(next(&state) >> 11) * 0x1p-53 * TAU;
        const double radius = sqrt(-2 * log(u)); /* u is in (0, 1] */
        to[i] = radius * cos(angle);
        if (i + 1 < n)
            to[i + 1] = radius * sin(angle);
    }
}

static void signs(uint64_t seed, uint64_t stream, int64_t row, int64_t n, double *to)
{
    uint64_t state = row_state(seed, stream, row);
    for (int64_t i = 0; i < n; i++)
        to[i] = next(&state) >> 63 ? -1 : 1;
}

/* x without its component along the unit vector signs/sqrt(n). */
static void project_out(double *x, const double *sign, int64_t n)
{
    double along = 0;
    for (int64_t i = 0; i < n; i++)
        along += x[i] * sign[i];
    for (int64_t i = 0; i < n; i++)
        x[i] -= along / (double)n * sign[i];
}

/* ------------------------------------------------------------------------------- rows of each kind */

/* One row to be made: which tensor, where, and room for two helper vectors. */
typedef struct row_job {
    const cli_synthetic *shape;
    int64_t batch, head, position; /* head: of q, or of K and V */
    int64_t kv_head, row;          /* kv_head: batch·Hkv + KV head; row: number of the row in its tensor */
    int64_t n;                     /* D or Dv */
    double *to, *helper, *other;   /* n values; max(D, Dv) each */
} row_job;

static void randn_row(const row_job *job, char tensor)
{
    normals(job->shape->seed,
            tensor == 'q'   ? STREAM_Q
            : tensor == 'k' ? STREAM_K
                            : STREAM_V,
            job->row, job->n, job->to);
}

/* Unit normals, and per KV head h with c = (3 + 5h) mod n: K has +8, -8, +6 added in channels c, c + n/2, c + n/4; Q is
 * 20 times as large in channels c + 1 and c + 1 + n/2, V in c + 2 and c + 2 + n/2 (all mod n). */
static void outliers_row(const row_job *job, char tensor)
{
    const int64_t n = job->n, c = (3 + 5 * (job->kv_head % job->shape->Hkv)) % n, shift = tensor == 'q' ? 1 : 2;
    randn_row(job, tensor);
    if (tensor == 'k') {
        job->to[c] += 8;
        job->to[(c + n / 2) % n] -= 8;
        job->to[(c + n / 4) % n] += 6;
    } else {
        const int64_t first = (c + shift) % n, second = (c + shift + n / 2) % n;
        job->to[first] *= 20;
        if (second != first)
            job->to[second] *= 20;
    }
}

/* Per KV head a direction e (±1/sqrt(D)) and signs u (±1). Key 0 is sqrt(D)·e, every other key unit normal noise r_j
 * without its e part. A query is a·e plus .25 of such noise, a = ln(9·(Skv-1)) + .25²/2: its score is a on key 0 and
 * about N(0, .25²) elsewhere, so key 0 holds .9 of a row that sees all keys. Values: u at key 0, -11.7·u + 8·r_j at the
 * others (channels taken around): .9 - .1·11.7 = -.27, the output points away from the sink's value. */
static void sink_tail_row(const row_job *job, char tensor)
{
    const cli_synthetic *s = job->shape;
    const int64_t n = job->n;
    const double noise = 0.25, tails = s->Skv > 1 ? (double)(s->Skv - 1) : 1, a = log(9 * tails) + noise * noise / 2;
    signs(s->seed, STREAM_DIRECTION, job->kv_head, s->D, job->helper);
    if (tensor == 'q') {
        normals(s->seed, STREAM_Q, job->row, n, job->to);
        project_out(job->to, job->helper, n);
        for (int64_t i = 0; i < n; i++)
            job->to[i] = a * job->helper[i] / sqrt((double)n) + noise * job->to[i];
        return;
    }
    double *r = tensor == 'k' ? job->to : job->other; /* the key's noise, also for V */
    normals(s->seed, STREAM_K, job->row, s->D, r);
    project_out(r, job->helper, s->D);
    if (tensor == 'k') {
        if (job->position == 0)
            memcpy(job->to, job->helper, (size_t)n * sizeof *job->to);
        return;
    }
    signs(s->seed, STREAM_VALUE, job->kv_head, n, job->helper);
    for (int64_t i = 0; i < n; i++)
        job->to[i] = job->position == 0 ? job->helper[i] : -11.7 * job->helper[i] + 8 * r[(i + 1) % s->D];
}

#define TOPICS 16
#define SEGMENT 256 /* keys that share a topic */
#define RUN 64      /* positions of one query head that share a topic */

/* Sixteen unit directions e_t per KV head. Keys come in segments of 256 with a topic each: half of sqrt(D)·e_t plus
 * unit normals. Runs of 64 queries of a head have a topic: 12·e_t plus half unit normals, so a key of the topic scores
 * 6 above the others on average: e^6/16 against 15/16, some .96 of the mass. Values: the topic's mean (unit normals)
 * plus half unit normals. */
static void topics_row(const row_job *job, char tensor)
{
    const cli_synthetic *s = job->shape;
    const bool query = tensor == 'q';
    const int64_t units = query ? (s->Sq + RUN - 1) / RUN : (s->Skv + SEGMENT - 1) / SEGMENT;
    const int64_t head = query ? job->batch * s->Hq + job->head : job->kv_head;
    const uint64_t draw = row_state(s->seed, query ? STREAM_CHOICE + 100 : STREAM_CHOICE,
                                    head * units + job->position / (query ? RUN : SEGMENT));
    const int64_t topic = job->kv_head * TOPICS + (int64_t)(draw >> 60);
    randn_row(job, tensor);
    if (tensor == 'v') {
        normals(s->seed, STREAM_TOPIC_MEAN, topic, job->n, job->helper);
        for (int64_t i = 0; i < job->n; i++)
            job->to[i] = job->helper[i] + 0.5 * job->to[i];
        return;
    }
    double norm = 0;
    normals(s->seed, STREAM_DIRECTION, topic, job->n, job->helper);
    for (int64_t i = 0; i < job->n; i++)
        norm += job->helper[i] * job->helper[i];
    const double strength = (query ? 12 : 0.5 * sqrt((double)job->n)) / sqrt(norm);
    for (int64_t i = 0; i < job->n; i++)
        job->to[i] = strength * job->helper[i] + (query ? 0.5 : 1) * job->to[i];
}

static const struct {
    const char *name, *about;
    void (*row)(const row_job *job, char tensor);
} kinds[] = {
    {"randn", "unit normals: scores have sigma 1", randn_row},
    {"outliers", "normals with large channels in Q and V and constant ones in K", outliers_row},
    {"sink-tail", "key 0 holds .9 of the mass, the thin tail turns the output around (use Skv >= 16384, Sq << Skv)",
     sink_tail_row},
    {"topics", "segments of keys on 16 topics, queries near one of them", topics_row},
};
#define KINDS (sizeof kinds / sizeof kinds[0])

const char *cli_synthetic_kind(size_t i)
{
    return i < KINDS ? kinds[i].name : NULL;
}

const char *cli_synthetic_about(size_t i)
{
    return i < KINDS ? kinds[i].about : NULL;
}

/* ------------------------------------------------------------------------------- tensors */

static void fill(const cli_synthetic *shape, size_t kind, char tensor, apa_array *array, double *room)
{
    const int64_t H = array->shape[1], S = array->shape[2], n = array->shape[3],
                  widest = shape->D > shape->Dv ? shape->D : shape->Dv;
    for (int64_t row = 0; row < shape->B * H * S; row++) {
        const int64_t batch = row / S / H, head = row / S % H;
        const int64_t kv_head = tensor == 'q' ? head / (shape->Hq / shape->Hkv) : head;
        const row_job job = {shape, batch, head, row % S,       batch * shape->Hkv + kv_head,
                             row,   n,     room, room + widest, room + 2 * widest};
        kinds[kind].row(&job, tensor);
        apa_array_set_f64(array, row * n, n, room);
        if (row % 4096 == 0)
            cli_progress(NULL, "generating", (double)row / (double)(shape->B * H * S));
    }
}

bool cli_synthetic_fill(const cli_synthetic *shape, apa_array *q, apa_array *k, apa_array *v)
{
    const size_t widest = (size_t)(shape->D > shape->Dv ? shape->D : shape->Dv);
    size_t kind = 0;
    while (kind < KINDS && strcmp(kinds[kind].name, shape->kind) != 0)
        kind++;
    double *room = kind < KINDS ? malloc(3 * widest * sizeof *room) : NULL;
    if (room == NULL)
        return false;
    fill(shape, kind, 'q', q, room);
    fill(shape, kind, 'k', k, room);
    fill(shape, kind, 'v', v, room);
    cli_progress(NULL, "generating", 1);
    free(room);
    return true;
}
