/* libapa: version at compile time and at run time. */
#ifndef APA_VERSION_H
#define APA_VERSION_H

#include <stdint.h>

#define APA_VERSION_MAJOR 0
#define APA_VERSION_MINOR 1
#define APA_VERSION_PATCH 0
#define APA_VERSION_STRING "0.1.0"

/* Marks what the shared library exports. */
#if defined(__GNUC__)
#define APA_EXPORT __attribute__((visibility("default")))
#else
#define APA_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that is linked, major·10000 + minor·100 + patch.
 * A program compares it with its compile-time APA_VERSION_* to find a mismatch. Thread-safe. */
APA_EXPORT uint32_t apa_version_number(void);

/* The same as text, "major.minor.patch". Static storage. Thread-safe. */
APA_EXPORT const char *apa_version_string(void);

#ifdef __cplusplus
}
#endif
#endif
