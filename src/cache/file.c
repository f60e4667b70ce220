/* Saving and loading a cache.
 *
 *   magic | format version, byte order | sizes | recipe as text | sequences: number, keys, pages
 *         | pages that are used: number, rows, K [Hkv][rows][D], V [Hkv][rows][Dv] | checksum of all before
 *
 * Numbers are 64 bits in the byte order of the machine, which is written down; another one is refused. Quantised tiles
 * are not in the file: they are a function of the keys. The checksum is read first, so that what is parsed is what was
 * written; it is parsed as if it were not, with every number held against what is left of the file. */
#include "cache/file.h"

#include "cache/cache.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char magic[8] = {'A', 'P', 'A', 'K', 'V', 'C', '\r', '\n'};
#define FORMAT_VERSION ((int64_t)1)
#define BYTE_ORDER_MARK ((int64_t)0x0102030405060708)
#define RECIPE_TEXT 8192
#define STEP ((size_t)1 << 16)

/* ---- numbers ---- */

static void put_number(apa_cache_file *file, int64_t number)
{
    apa_cache_put(file, &number, sizeof number);
}

static int64_t get_number(apa_cache_file *file)
{
    int64_t number;
    apa_cache_get(file, &number, sizeof number);
    return number;
}

/* A number that must be within least … most. */
static int64_t get_within(apa_cache_file *file, int64_t least, int64_t most, const char *what)
{
    const int64_t number = get_number(file);
    if (file->status == APA_STATUS_OK && (number < least || number > most))
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, what);
    return file->status == APA_STATUS_OK ? number : least;
}

/* ---- recipe ---- */

static apa_status recipe_text(const apa_recipe *recipe, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "%s\n", recipe->name);
    for (size_t i = 0; apa_recipe_knob_at(i) != NULL; i++) {
        const char *name = apa_recipe_knob_at(i)->name;
        char value[64];
        if (apa_recipe_get(recipe, name, value, sizeof value) != APA_STATUS_OK)
            return APA_STATUS_INTERNAL;
        used += (size_t)snprintf(text + used, size - used, "%s=%s\n", name, value);
        if (used >= size)
            return APA_STATUS_INTERNAL;
    }
    return APA_STATUS_OK;
}

/* Starts from the preset of that name, or from the default one, and sets every knob. */
static bool parse_recipe(char *text, apa_recipe *recipe)
{
    char *end = strchr(text, '\n');
    if (end == NULL)
        return false;
    *end = '\0';
    if (apa_recipe_init(recipe, text) != APA_STATUS_OK)
        apa_recipe_init(recipe, NULL);
    for (char *line = end + 1; *line != '\0'; line = end + 1) {
        char *value = strchr(line, '=');
        end = strchr(line, '\n');
        if (value == NULL || end == NULL || value > end)
            return false;
        *value = *end = '\0';
        if (apa_recipe_set(recipe, line, value + 1, NULL, 0) != APA_STATUS_OK)
            return false;
    }
    return true;
}

/* ---- saving ---- */

/* Rows of every page that some sequence uses: [pages], 0 where none does. */
static int64_t *rows_used(const apa_kv_cache *cache, int64_t *pages_used)
{
    int64_t *rows = apa_aligned_allocate((size_t)cache->fresh_page, sizeof *rows);
    if (rows == NULL)
        return NULL;
    memset(rows, 0, sizeof *rows * (size_t)cache->fresh_page);
    *pages_used = 0;
    for (int64_t i = 0; i < cache->room; i++) {
        const apa_cache_sequence *s = cache->sequence[i];
        for (int64_t p = 0; s != NULL && p * cache->page_size < s->keys; p++) {
            const int64_t rest = s->keys - p * cache->page_size, n = rest < cache->page_size ? rest : cache->page_size;
            int64_t *at = &rows[s->page[p]];
            *pages_used += *at == 0;
            *at = n > *at ? n : *at;
        }
    }
    return rows;
}

static void put_page(apa_cache_file *file, const apa_kv_cache *cache, int32_t page, int64_t number, int64_t rows)
{
    const size_t bytes = apa_dtype_bytes(cache->dtype);
    put_number(file, number);
    put_number(file, rows);
    for (int64_t h = 0; h < cache->Hkv; h++)
        apa_cache_put(file, apa_cache_row(cache, false, page, h, 0), (size_t)(rows * cache->D) * bytes);
    for (int64_t h = 0; h < cache->Hkv; h++)
        apa_cache_put(file, apa_cache_row(cache, true, page, h, 0), (size_t)(rows * cache->Dv) * bytes);
}

/* Pages are numbered anew, without gaps, so that a reader needs no more memory than the file is long. */
static void put_page_list(apa_cache_file *file, const apa_kv_cache *cache, const apa_cache_sequence *s,
                          const int32_t *number)
{
    for (int64_t i = 0; i < apa_cache_pages_for(cache, s->keys); i++)
        apa_cache_put(file, &number[s->page[i]], sizeof *number);
}

static void number_pages(const apa_kv_cache *cache, const int64_t *rows, int32_t *number)
{
    int32_t next = 0;
    for (int64_t page = 0; page < cache->fresh_page; page++)
        number[page] = rows[page] > 0 ? next++ : -1;
}

static void put_cache(apa_cache_file *file, const apa_kv_cache *cache, const int64_t *rows, const int32_t *number,
                      int64_t pages_used)
{
    char text[RECIPE_TEXT];
    if (recipe_text(&cache->recipe, text, sizeof text) != APA_STATUS_OK)
        apa_cache_file_fail(file, APA_STATUS_INTERNAL, "the recipe does not fit");
    apa_cache_put(file, magic, sizeof magic);
    const int64_t numbers[] = {FORMAT_VERSION, BYTE_ORDER_MARK, cache->Hkv,       cache->D,           cache->Dv,
                               cache->dtype,   cache->pages,    cache->page_size, cache->window_tiles};
    apa_cache_put(file, numbers, sizeof numbers);
    apa_cache_put(file, &cache->growth, sizeof cache->growth);
    put_number(file, (int64_t)strlen(text));
    apa_cache_put(file, text, strlen(text));
    put_number(file, cache->sequences);
    for (int64_t i = 0; i < cache->room; i++) {
        const apa_cache_sequence *s = cache->sequence[i];
        if (s == NULL)
            continue;
        put_number(file, i);
        put_number(file, s->keys);
        put_page_list(file, cache, s, number);
    }
    put_number(file, pages_used);
    for (int64_t page = 0; page < cache->fresh_page; page++)
        if (rows[page] > 0)
            put_page(file, cache, (int32_t)page, number[page], rows[page]);
    const uint64_t checksum = file->checksum;
    apa_cache_put(file, &checksum, sizeof checksum);
}

apa_status apa_kv_cache_save(apa_context *context, const apa_kv_cache *cache, const char *path)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (cache == NULL || path == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: NULL", cache == NULL ? "cache" : "path");
    apa_cache_file file = {.context = context, .path = path};
    int64_t pages_used;
    int64_t *rows = rows_used(cache, &pages_used);
    int32_t *number = apa_aligned_allocate((size_t)cache->fresh_page, sizeof *number);
    char *temporary = malloc(strlen(path) + 32);
    if (rows == NULL || number == NULL || temporary == NULL) {
        apa_cache_file_fail(&file, APA_STATUS_OUT_OF_MEMORY, "no memory");
    } else {
        number_pages(cache, rows, number);
        snprintf(temporary, strlen(path) + 32, "%s.apa-tmp-%ld", path, (long)getpid());
        file.stream = fopen(temporary, "wbx");
        if (file.stream == NULL)
            apa_cache_file_fail(&file, APA_STATUS_IO, strerror(errno));
        else
            put_cache(&file, cache, rows, number, pages_used);
    }
    if (file.stream != NULL) {
        if (file.status == APA_STATUS_OK && (fflush(file.stream) != 0 || fsync(fileno(file.stream)) != 0))
            apa_cache_file_fail(&file, APA_STATUS_IO, strerror(errno));
        if (fclose(file.stream) != 0)
            apa_cache_file_fail(&file, APA_STATUS_IO, strerror(errno));
        if (file.status == APA_STATUS_OK && rename(temporary, path) != 0)
            apa_cache_file_fail(&file, APA_STATUS_IO, strerror(errno));
        if (file.status != APA_STATUS_OK)
            (void)unlink(temporary);
    }
    free(temporary);
    apa_aligned_free(number);
    apa_aligned_free(rows);
    return file.status;
}

/* ---- loading ---- */

/* The whole file against its checksum; leaves it at its start. */
static void check_sum(apa_cache_file *file)
{
    static const char what[] = "is no cache that is whole: its checksum differs";
    unsigned char piece[STEP];
    struct stat info;
    if (fstat(fileno(file->stream), &info) != 0 || !S_ISREG(info.st_mode)) {
        apa_cache_file_fail(file, APA_STATUS_IO, "is no regular file");
        return;
    }
    if (info.st_size < (off_t)(sizeof magic + sizeof(uint64_t))) {
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "is too short for a cache");
        return;
    }
    const int64_t body = (int64_t)info.st_size - (int64_t)sizeof(uint64_t);
    uint64_t checksum = 0, expected;
    file->left = (int64_t)info.st_size;
    for (int64_t at = 0; at < body && file->status == APA_STATUS_OK;) {
        const size_t n = body - at < (int64_t)STEP ? (size_t)(body - at) : STEP;
        apa_cache_get(file, piece, n);
        if (at == 0 && file->status == APA_STATUS_OK && memcmp(piece, magic, sizeof magic) != 0)
            apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "is no cache: expected APAKVC at its start");
        checksum = apa_cache_crc(checksum, piece, n);
        at += (int64_t)n;
    }
    apa_cache_get(file, &expected, sizeof expected);
    if (file->status == APA_STATUS_OK && checksum != expected)
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, what);
    if (file->status == APA_STATUS_OK && fseek(file->stream, 0, SEEK_SET) != 0)
        apa_cache_file_fail(file, APA_STATUS_IO, strerror(errno));
    file->left = body;
}

/* Sizes and recipe; makes the empty cache. */
static void get_header(apa_cache_file *file, apa_kv_cache **cache)
{
    apa_kv_cache_options options;
    char found[sizeof magic], text[RECIPE_TEXT];
    apa_recipe recipe;
    apa_kv_cache_options_init(&options);
    apa_cache_get(file, found, sizeof found);
    get_within(file, FORMAT_VERSION, FORMAT_VERSION, "is of another format version, expected 1");
    get_within(file, BYTE_ORDER_MARK, BYTE_ORDER_MARK, "was written on a machine of another byte order");
    options.heads = get_number(file);
    options.dim = get_number(file);
    options.dim_v = get_number(file);
    options.dtype = (apa_dtype)get_within(file, APA_DTYPE_F16, APA_DTYPE_F32, "holds an unknown dtype");
    options.pages = get_number(file);
    options.page_size = get_number(file);
    options.window_tiles = get_number(file);
    apa_cache_get(file, &options.growth, sizeof options.growth);
    const int64_t size = get_within(file, 1, RECIPE_TEXT - 1, "holds a recipe of an impossible size");
    apa_cache_get(file, text, (size_t)size);
    text[size] = '\0';
    if (file->status == APA_STATUS_OK && !parse_recipe(text, &recipe))
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "holds a recipe that this version does not know");
    if (file->status != APA_STATUS_OK)
        return;
    options.recipe = &recipe;
    const apa_status status = apa_kv_cache_create(file->context, &options, cache);
    char message[256];
    snprintf(message, sizeof message, "%s", apa_context_message(file->context));
    if (status != APA_STATUS_OK)
        apa_cache_file_fail(file, status == APA_STATUS_OUT_OF_MEMORY ? status : APA_STATUS_BAD_FILE, message);
}

/* Page numbers have no gaps, and every page has at least its number and its rows in the file. */
static void get_sequence(apa_cache_file *file, apa_kv_cache *cache, int64_t most_pages)
{
    apa_cache_sequence *s;
    const int64_t number = get_within(file, 0, APA_CACHE_SEQUENCES_MAX - 1, "holds an impossible sequence number");
    const int64_t most = file->left / (int64_t)sizeof(int32_t);
    const int64_t keys = get_number(file);
    const int64_t row = cache->Hkv * (cache->D + cache->Dv) * (int64_t)apa_dtype_bytes(cache->dtype);
    if (file->status == APA_STATUS_OK &&
        (keys < 0 || apa_cache_pages_for(cache, keys) > most || (keys > 0 && row > file->left)))
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "holds a sequence longer than itself");
    if (file->status == APA_STATUS_OK && number < cache->room && cache->sequence[number] != NULL)
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "holds a sequence twice");
    if (file->status != APA_STATUS_OK)
        return;
    file->status = apa_cache_sequence_make(file->context, cache, number, &s);
    if (file->status == APA_STATUS_OK)
        file->status = apa_cache_reserve_tables(file->context, cache, s, keys);
    if (file->status != APA_STATUS_OK)
        return;
    const int64_t pages = apa_cache_pages_for(cache, keys);
    apa_cache_get(file, s->page, sizeof *s->page * (size_t)pages);
    for (int64_t i = 0; i < pages && file->status == APA_STATUS_OK; i++)
        if (s->page[i] < 0 || s->page[i] >= most_pages)
            apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "holds a page number beyond its pages");
    if (file->status == APA_STATUS_OK)
        s->keys = keys; /* from here on its pages are counted, below */
}

/* References of pages as the sequences have them; what lies between them is free. */
static void count_references(apa_kv_cache *cache)
{
    cache->fresh_page = 0;
    for (int64_t i = 0; i < cache->room; i++)
        for (int64_t p = 0; cache->sequence[i] != NULL && p * cache->page_size < cache->sequence[i]->keys; p++)
            if (cache->sequence[i]->page[p] >= cache->fresh_page)
                cache->fresh_page = (int64_t)cache->sequence[i]->page[p] + 1;
    memset(cache->references, 0, sizeof *cache->references * (size_t)cache->fresh_page);
    for (int64_t i = 0; i < cache->room; i++)
        for (int64_t p = 0; cache->sequence[i] != NULL && p * cache->page_size < cache->sequence[i]->keys; p++)
            cache->references[cache->sequence[i]->page[p]]++;
    cache->returned_pages = 0;
    for (int64_t page = 0; page < cache->fresh_page; page++)
        if (cache->references[page] == 0)
            cache->returned[cache->returned_pages++] = (int32_t)page;
}

static void get_pages(apa_cache_file *file, apa_kv_cache *cache)
{
    const size_t bytes = apa_dtype_bytes(cache->dtype);
    int64_t expected = 0;
    int64_t *rows = rows_used(cache, &expected);
    if (rows == NULL) {
        apa_cache_file_fail(file, APA_STATUS_OUT_OF_MEMORY, "no memory");
        return;
    }
    const int64_t n = get_within(file, expected, expected, "holds other pages than its sequences use");
    for (int64_t i = 0; i < n && file->status == APA_STATUS_OK; i++) {
        const int64_t page = get_within(file, 0, cache->fresh_page - 1, "holds a page that no sequence uses");
        const int64_t count = get_number(file);
        if (file->status == APA_STATUS_OK && (count < 1 || rows[page] != count))
            apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "holds a page of another length than its sequences use");
        for (int set = 0; set < 2; set++)
            for (int64_t h = 0; h < cache->Hkv && file->status == APA_STATUS_OK; h++)
                apa_cache_get(file, apa_cache_row(cache, set == 1, (int32_t)page, h, 0),
                              (size_t)(count * (set == 1 ? cache->Dv : cache->D)) * bytes);
        if (file->status == APA_STATUS_OK)
            rows[page] = 0; /* a second time is one too many */
    }
    if (file->status == APA_STATUS_OK && file->left != 0)
        apa_cache_file_fail(file, APA_STATUS_BAD_FILE, "goes on behind its last page");
    apa_aligned_free(rows);
}

/* Tiles that an earlier sequence has of the same pages are shared again. */
static void share_tiles(apa_kv_cache *cache, int64_t number)
{
    apa_cache_sequence *s = cache->sequence[number], *best = NULL;
    int64_t most = 0;
    for (int64_t i = 0; i < number; i++) {
        apa_cache_sequence *other = cache->sequence[i];
        const int64_t keys = other == NULL ? 0 : other->keys < s->keys ? other->keys : s->keys;
        int64_t same = 0;
        while (same < keys && other->page[same / cache->page_size] == s->page[same / cache->page_size])
            same = (same / cache->page_size + 1) * cache->page_size;
        same = same < keys ? same : keys;
        if (same > most) {
            most = same;
            best = other;
        }
    }
    for (int64_t t = 0; t < apa_cache_whole(most); t++) {
        s->tile[t] = best->tile[t];
        apa_cache_tile_share(best->tile[t]);
    }
}

/* Tiles are made sequence by sequence, so that the next one can share them. */
static void make_tiles(apa_cache_file *file, apa_kv_cache *cache)
{
    for (int64_t i = 0; cache->keeps && i < cache->room && file->status == APA_STATUS_OK; i++) {
        apa_cache_sequence *s = cache->sequence[i];
        if (s == NULL || s->keys == 0)
            continue;
        share_tiles(cache, i);
        const int64_t keys = s->keys;
        s->keys = 0;
        file->status = apa_cache_reserve(file->context, cache, s, keys);
        s->keys = keys;
        const apa_cache_growth grown = {s, 0};
        if (file->status == APA_STATUS_OK)
            apa_cache_quantise(file->context, cache, &grown, 1);
    }
}

apa_status apa_kv_cache_load(apa_context *context, const char *path, apa_kv_cache **cache)
{
    if (context == NULL)
        return APA_STATUS_INVALID_ARGUMENT;
    if (cache == NULL || path == NULL)
        return apa_fail(context, APA_STATUS_INVALID_ARGUMENT, "%s: NULL", cache == NULL ? "cache" : "path");
    *cache = NULL;
    apa_kv_cache *made = NULL;
    apa_cache_file file = {.context = context, .path = path, .stream = fopen(path, "rb")};
    if (file.stream == NULL)
        apa_cache_file_fail(&file, APA_STATUS_IO, strerror(errno));
    else
        check_sum(&file);
    if (file.status == APA_STATUS_OK)
        get_header(&file, &made);
    int64_t sequences = 0;
    if (file.status == APA_STATUS_OK)
        sequences = get_within(&file, 0, file.left / 16, "holds more sequences than it has room for");
    const int64_t most_pages = file.left / 16;
    for (int64_t i = 0; i < sequences && file.status == APA_STATUS_OK; i++)
        get_sequence(&file, made, most_pages < made->pages ? most_pages : made->pages);
    if (made != NULL)
        count_references(made);
    if (file.status == APA_STATUS_OK)
        get_pages(&file, made);
    if (file.status == APA_STATUS_OK)
        make_tiles(&file, made);
    if (file.stream != NULL)
        fclose(file.stream);
    if (file.status != APA_STATUS_OK)
        apa_kv_cache_destroy(made);
    else
        *cache = made;
    return file.status;
}
