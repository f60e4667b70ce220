/* A picture of few colours in memory: rectangles, small capitals, and the bytes of a PNG. */
#ifndef APA_CLI_PICTURE_H
#define APA_CLI_PICTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Indices into the palette of picture.c. */
typedef enum cli_colour {
    CLI_COLOUR_PAPER = 0,
    CLI_COLOUR_INK = 1,
    CLI_COLOUR_FRAME = 2,
    CLI_COLOUR_COLD = 3,
    CLI_COLOUR_HOT = 4,
    CLI_COLOUR_SKIPPED = 5,
    CLI_COLOUR_INVISIBLE = 6,
    CLI_COLOURS = 7
} cli_colour;

typedef struct cli_picture {
    int64_t width, height;
    uint8_t *pixels; /* a cli_colour each, row by row */
} cli_picture;

/* All paper. False: no memory. */
bool cli_picture_make(cli_picture *picture, int64_t width, int64_t height);
void cli_picture_free(cli_picture *picture);

void cli_picture_fill(cli_picture *picture, int64_t x, int64_t y, int64_t width, int64_t height, cli_colour colour);

/* Text in capitals, CLI_TEXT_HEIGHT pixels tall and CLI_TEXT_STEP a character; what does not fit is cut off. A
 * character that the letters lack is a dash. */
enum { CLI_TEXT_SCALE = 2, CLI_TEXT_HEIGHT = 7 * CLI_TEXT_SCALE, CLI_TEXT_STEP = 6 * CLI_TEXT_SCALE };
void cli_picture_text(cli_picture *picture, int64_t x, int64_t y, const char *text);

/* The PNG file, to be freed; NULL: no memory. */
char *cli_picture_png(const cli_picture *picture, size_t *size);

#endif
