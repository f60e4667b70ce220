/* libapa: status codes.
 *
 * Every function that can fail returns an apa_status; results go through out parameters, which are
 * written only on APA_STATUS_OK unless a contract says otherwise. Values are stable: new ones fill
 * the gaps, old ones are never renumbered. */
#ifndef APA_STATUS_H
#define APA_STATUS_H

#include "apa/version.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum apa_status {
    APA_STATUS_OK = 0,
    /* The caller's mistake: a value out of range, shapes that disagree, a null pointer. */
    APA_STATUS_INVALID_ARGUMENT = 10,
    /* Valid, but no engine here can do it (the message says what and why). */
    APA_STATUS_UNSUPPORTED = 20,
    /* A memory request failed. */
    APA_STATUS_OUT_OF_MEMORY = 30,
    /* A file could not be opened, read or written. */
    APA_STATUS_IO = 40,
    /* A file was read, and its content is not what its format says. */
    APA_STATUS_BAD_FILE = 41,
    /* A bug in the library. */
    APA_STATUS_INTERNAL = 90
} apa_status;

/* "APA_STATUS_OK" and so on; "APA_STATUS_UNKNOWN" for a number that is none of them. Static storage. Thread-safe. */
APA_EXPORT const char *apa_status_name(apa_status status);

#ifdef __cplusplus
}
#endif
#endif
