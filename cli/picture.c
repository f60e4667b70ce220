/* Pictures of a few colours: drawing, and PNG by libpng's simplified interface (palette, 4 bits a pixel). */
#include "picture.h"

#include <png.h>
#include <stdlib.h>
#include <string.h>

/* Red, green, blue. Hot against the rest differs in lightness, too, so the picture can be read without colours. */
static const uint8_t palette[CLI_COLOURS][3] = {
    [CLI_COLOUR_PAPER] = {255, 255, 255},     [CLI_COLOUR_INK] = {31, 41, 51},  [CLI_COLOUR_FRAME] = {154, 165, 177},
    [CLI_COLOUR_COLD] = {168, 200, 232},      [CLI_COLOUR_HOT] = {196, 50, 10}, [CLI_COLOUR_SKIPPED] = {224, 236, 247},
    [CLI_COLOUR_INVISIBLE] = {245, 246, 247},
};

typedef struct glyph {
    char character;
    const char *rows; /* seven of five dots, from the top */
} glyph;

#define GLYPH(character, a, b, c, d, e, f, g)                                                                          \
    {                                                                                                                  \
        character, a b c d e f g                                                                                       \
    }

static const glyph glyphs[] = {
#include "glyphs.def"
};

bool cli_picture_make(cli_picture *picture, int64_t width, int64_t height)
{
    picture->width = width;
    picture->height = height;
    picture->pixels = calloc((size_t)width, (size_t)height);
    return picture->pixels != NULL;
}

void cli_picture_free(cli_picture *picture)
{
    free(picture->pixels);
    memset(picture, 0, sizeof *picture);
}

void cli_picture_fill(cli_picture *picture, int64_t x, int64_t y, int64_t width, int64_t height, cli_colour colour)
{
    const int64_t right = x + width < picture->width ? x + width : picture->width;
    const int64_t bottom = y + height < picture->height ? y + height : picture->height;
    for (int64_t at = y; at < bottom && x < right; at++)
        memset(picture->pixels + at * picture->width + x, colour, (size_t)(right - x));
}

static const char *rows_of(char character)
{
    const char upper = character >= 'a' && character <= 'z' ? (char)(character - 'a' + 'A') : character;
    const char *dash = glyphs[0].rows;
    for (size_t i = 0; i < sizeof glyphs / sizeof glyphs[0]; i++)
        if (glyphs[i].character == upper)
            return glyphs[i].rows;
    return dash;
}

void cli_picture_text(cli_picture *picture, int64_t x, int64_t y, const char *text)
{
    for (; *text != '\0' && x + CLI_TEXT_STEP <= picture->width; text++, x += CLI_TEXT_STEP) {
        const char *rows = *text != ' ' ? rows_of(*text) : NULL;
        for (int64_t i = 0; rows != NULL && i < 35; i++)
            if (rows[i] == '#')
                cli_picture_fill(picture, x + i % 5 * CLI_TEXT_SCALE, y + i / 5 * CLI_TEXT_SCALE, CLI_TEXT_SCALE,
                                 CLI_TEXT_SCALE, CLI_COLOUR_INK);
    }
}

char *cli_picture_png(const cli_picture *picture, size_t *size)
{
    png_image image;
    memset(&image, 0, sizeof image);
    image.version = PNG_IMAGE_VERSION;
    image.width = (png_uint_32)picture->width;
    image.height = (png_uint_32)picture->height;
    image.format = PNG_FORMAT_RGB_COLORMAP;
    image.colormap_entries = CLI_COLOURS;
    png_alloc_size_t bytes = PNG_IMAGE_PNG_SIZE_MAX(image);
    char *memory = malloc(bytes);
    if (memory == NULL ||
        !png_image_write_to_memory(&image, memory, &bytes, 0, picture->pixels, (png_int_32)picture->width, palette)) {
        png_image_free(&image);
        free(memory);
        return NULL;
    }
    *size = bytes;
    return memory;
}
