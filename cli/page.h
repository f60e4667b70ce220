/* The page of apa report without its data: HTML with style and scripts inside, made by the build from cli/page/ and
 * cli/vendor/ (cmake/page.cmake). */
#ifndef APA_CLI_PAGE_H
#define APA_CLI_PAGE_H

#include <stddef.h>

/* Where the data goes: these bytes, once. */
#define CLI_PAGE_MARK "@APA_DATA@"

extern const unsigned char cli_page_html[];
extern const size_t cli_page_size;

#endif
