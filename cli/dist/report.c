/* Figures of all ranks, as text and as JSON. */
#include "ranks.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

double ranks_overlap(const apa_dist_statistics *s)
{
    if (!(s->transfer_ms > 0.0))
        return NAN;
    const double hidden = 1.0 - s->wait_ms / s->transfer_ms;
    return hidden < 0.0 ? 0.0 : hidden;
}

static const char *exchange_name(apa_dist_exchange exchange)
{
    return exchange == APA_DIST_EXCHANGE_CODES ? "codes" : "exact";
}

json_t *ranks_json(const apa_dist_statistics *all, int32_t n)
{
    json_t *list = json_array();
    for (int32_t i = 0; i < n; i++) {
        const apa_dist_statistics *s = &all[i];
        json_t *object = json_object();
        const struct {
            const char *key;
            double value;
        } number[] = {
            {"total_ms", s->total_ms}, {"compute_ms", s->compute_ms},   {"pack_ms", s->pack_ms},
            {"wait_ms", s->wait_ms},   {"transfer_ms", s->transfer_ms}, {"overlap", ranks_overlap(s)},
        };
        const struct {
            const char *key;
            int64_t value;
        } whole[] = {
            {"rank", s->rank},
            {"sent_bytes", s->sent},
            {"received_bytes", s->received},
            {"sent_codes_bytes", s->sent_codes},
            {"sent_tiles_bytes", s->sent_tiles},
            {"sent_lists_bytes", s->sent_lists},
            {"sent_states_bytes", s->sent_states},
            {"f16_bytes", s->sent_f16},
            {"remote_tiles", s->remote_tiles},
            {"wanted_tiles", s->wanted_tiles},
            {"visible", s->visible},
            {"hot", s->hot},
            {"skipped", s->skipped},
        };
        for (size_t j = 0; j < sizeof whole / sizeof whole[0]; j++)
            json_object_set_new(object, whole[j].key, json_integer((json_int_t)whole[j].value));
        for (size_t j = 0; j < sizeof number / sizeof number[0]; j++)
            json_object_set_new(object, number[j].key, cli_json_number(number[j].value));
        json_array_append_new(list, object);
    }
    return list;
}

void ranks_json_totals(json_t *object, const apa_dist_statistics *all, int32_t n)
{
    int64_t sent = 0, f16 = 0, remote = 0, wanted = 0, visible = 0, hot = 0, skipped = 0;
    for (int32_t i = 0; i < n; i++) {
        sent += all[i].sent;
        f16 += all[i].sent_f16;
        remote += all[i].remote_tiles;
        wanted += all[i].wanted_tiles;
        visible += all[i].visible;
        hot += all[i].hot;
        skipped += all[i].skipped;
    }
    json_object_set_new(object, "exchange", json_string(exchange_name(all[0].exchange)));
    json_object_set_new(object, "exchange_reason", json_string(all[0].reason));
    json_object_set_new(object, "sent_bytes", json_integer((json_int_t)sent));
    json_object_set_new(object, "f16_bytes", json_integer((json_int_t)f16));
    json_object_set_new(object, "bytes_ratio", cli_json_number(f16 > 0 ? (double)sent / (double)f16 : NAN));
    json_object_set_new(object, "wanted_share", cli_json_number(remote > 0 ? (double)wanted / (double)remote : NAN));
    json_object_set_new(object, "hot_share", cli_json_number(visible > 0 ? (double)hot / (double)visible : 0));
    json_object_set_new(object, "skip_share", cli_json_number(visible > 0 ? (double)skipped / (double)visible : 0));
}

void ranks_print(const apa_dist_statistics *all, int32_t n)
{
    double sent = 0, f16 = 0, remote = 0, wanted = 0;
    printf("\n%-5s %10s %10s %9s %9s %9s %8s %12s %12s %12s\n", "rank", "total ms", "compute", "pack", "wait",
           "transfer", "overlap", "sent MB", "f16 MB", "tiles wanted");
    for (int32_t i = 0; i < n; i++) {
        const apa_dist_statistics *s = &all[i];
        char overlap[16] = "-", tiles[32] = "-";
        if (!isnan(ranks_overlap(s)))
            snprintf(overlap, sizeof overlap, "%.0f %%", 100 * ranks_overlap(s));
        if (s->remote_tiles > 0)
            snprintf(tiles, sizeof tiles, "%.1f %%", 100.0 * (double)s->wanted_tiles / (double)s->remote_tiles);
        printf("%-5d %10.2f %10.2f %9.2f %9.2f %9.2f %8s %12.3f %12.3f %12s\n", (int)s->rank, s->total_ms,
               s->compute_ms, s->pack_ms, s->wait_ms, s->transfer_ms, overlap, (double)s->sent * 1e-6,
               (double)s->sent_f16 * 1e-6, tiles);
        sent += (double)s->sent;
        f16 += (double)s->sent_f16;
        remote += (double)s->remote_tiles;
        wanted += (double)s->wanted_tiles;
    }
    printf("\nexchange   %s%s%s%s: %.3f MB", exchange_name(all[0].exchange), all[0].reason[0] == '\0' ? "" : " (",
           all[0].reason, all[0].reason[0] == '\0' ? "" : ")", sent * 1e-6);
    if (f16 > 0)
        printf(", %.1f %% of the %.3f MB of all keys in 16 bits", 100 * sent / f16, f16 * 1e-6);
    if (remote > 0)
        printf("; %.2f %% of remote tiles wanted exactly", 100 * wanted / remote);
    printf("\n");
}
