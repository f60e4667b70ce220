/* Version and status names. */
#include "apa/status.h"
#include "apa/version.h"

uint32_t apa_version_number(void)
{
    return APA_VERSION_MAJOR * 10000u + APA_VERSION_MINOR * 100u + APA_VERSION_PATCH;
}

const char *apa_version_string(void)
{
    return APA_VERSION_STRING;
}

const char *apa_status_name(apa_status status)
{
    switch (status) {
    case APA_STATUS_OK:
        return "APA_STATUS_OK";
    case APA_STATUS_INVALID_ARGUMENT:
        return "APA_STATUS_INVALID_ARGUMENT";
    case APA_STATUS_UNSUPPORTED:
        return "APA_STATUS_UNSUPPORTED";
    case APA_STATUS_OUT_OF_MEMORY:
        return "APA_STATUS_OUT_OF_MEMORY";
    case APA_STATUS_IO:
        return "APA_STATUS_IO";
    case APA_STATUS_BAD_FILE:
        return "APA_STATUS_BAD_FILE";
    case APA_STATUS_INTERNAL:
        return "APA_STATUS_INTERNAL";
    }
    return "APA_STATUS_UNKNOWN";
}
