/* The knob table from inside: one entry per row of knobs.def, typed access to the fields. */
#ifndef APA_RECIPE_RECIPE_INTERNAL_H
#define APA_RECIPE_RECIPE_INTERNAL_H

#include "apa/recipe.h"

#include <stdbool.h>

typedef enum apa_knob_kind { APA_KNOB_IS_CHOICE, APA_KNOB_IS_NUMBER, APA_KNOB_IS_INTEGER } apa_knob_kind;

#define APA_KNOB_NO_AUTO INT32_MIN

typedef struct apa_knob {
    apa_recipe_knob text; /* what the public sees */
    const char *initial;
    size_t offset; /* of the field in apa_recipe */
    apa_knob_kind kind;
    int32_t first;           /* choice: value of the first name in text.range */
    bool number_auto;        /* number: NaN stands for auto */
    double least, most;      /* number */
    int32_t integer_auto;    /* integer: the value that stands for auto, or APA_KNOB_NO_AUTO */
    int32_t low, high, step; /* integer */
} apa_knob;

/* Knob number i; NULL past the last. */
const apa_knob *apa_knob_at(size_t i);
/* By name; NULL when there is none. */
const apa_knob *apa_knob_find(const char *name);

/* Text → field. False, and the recipe unchanged, when the text is not in the knob's range. */
bool apa_knob_parse(const apa_knob *knob, const char *text, apa_recipe *recipe);
/* Field → text that apa_knob_parse() takes back. False when the field is out of range or the text doesn't fit. */
bool apa_knob_print(const apa_knob *knob, const apa_recipe *recipe, char *text, size_t size);
/* Is the field in the knob's range? */
bool apa_knob_valid(const apa_knob *knob, const apa_recipe *recipe);
/* The field as text, whatever it holds, for error messages. */
void apa_knob_print_raw(const apa_knob *knob, const apa_recipe *recipe, char *text, size_t size);

/* Writes one line, where there is room for one, and gives the status back. */
apa_status apa_recipe_fail(char *message, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* check.c: the rules between knobs that are in range by themselves. */
apa_status apa_recipe_check_pairs(const apa_recipe *recipe, char *message, size_t size);

#endif
