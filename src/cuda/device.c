/* Device detection. */
#include "cuda/device.h"

#include "apa/cuda.h"
#include "cuda/trait.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#define LOWEST_CAPABILITY 80 /* m16n8k32 on bytes, cp.async */
#define HOPPER 90            /* wgmma runs on 9.0 alone */

void apa_cuda_device_init(apa_cuda_device *device)
{
    memset(device, 0, sizeof *device);
    device->size = sizeof *device;
}

static apa_status fail(apa_context *context, apa_status status, const char *text)
{
    return context == NULL ? status : apa_fail(context, status, "%s", text);
}

apa_status apa_cuda_device_count(apa_context *context, int32_t *count)
{
    if (count == NULL)
        return fail(context, APA_STATUS_INVALID_ARGUMENT, "count: NULL");
    int n = 0;
    const cudaError_t error = cudaGetDeviceCount(&n);
    (void)cudaGetLastError(); /* the absence of a device must not be found again by a later call */
    *count = error == cudaSuccess ? n : 0;
    if (*count > 0)
        return APA_STATUS_OK;
    char text[256];
    snprintf(text, sizeof text, "cuda: no device (%s)",
             error == cudaSuccess ? "the driver shows none" : cudaGetErrorString(error));
    return fail(context, APA_STATUS_UNSUPPORTED, text);
}

static int32_t attribute(enum cudaDeviceAttr which, int index)
{
    int value = 0;
    return cudaDeviceGetAttribute(&value, which, index) == cudaSuccess ? value : 0;
}

static int32_t capability_of(int index)
{
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
           attribute(cudaDevAttrComputeCapabilityMinor, index);
}

apa_status apa_cuda_device_describe(apa_context *context, int32_t index, apa_cuda_device *device)
{
    int32_t count;
    if (device == NULL || device->size != sizeof *device)
        return fail(context, APA_STATUS_INVALID_ARGUMENT, "device: NULL or not set up by apa_cuda_device_init()");
    apa_status status = apa_cuda_device_count(context, &count);
    if (status != APA_STATUS_OK)
        return status;
    struct cudaDeviceProp properties;
    if (index < 0 || index >= count || cudaGetDeviceProperties(&properties, index) != cudaSuccess)
        return fail(context, APA_STATUS_INVALID_ARGUMENT, "index: no such device");
    snprintf(device->name, sizeof device->name, "%.95s", properties.name);
    device->capability = capability_of(index);
    device->multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
    device->memory_bytes = (int64_t)properties.totalGlobalMem;
    if (device->capability < LOWEST_CAPABILITY) {
        snprintf(device->reason, sizeof device->reason, "needs compute capability 8.0 or later");
        return APA_STATUS_OK;
    }
    snprintf(device->kernels, sizeof device->kernels, "warp-mma");
    const char *why;
    const apa_cuda_trait *trait = apa_cuda_trait_of_device(device->capability, &why);
    snprintf(device->cold_format, sizeof device->cold_format, "%s",
             trait->cold_format == APA_COLD_FORMAT_INT8 ? "int8" : trait->name);
    snprintf(device->reason, sizeof device->reason, "%s", why);
    if (device->capability == HOPPER) {
        snprintf(device->kernels, sizeof device->kernels, "wgmma, warp-mma");
        snprintf(device->cold_format, sizeof device->cold_format, "e4m3");
        snprintf(
            device->reason, sizeof device->reason,
            "cuda:wgmma: E4M3 products with FP16 sums of scores are the fastest here (D 64 and 128); cuda:warp: %s",
            trait->name);
    }
    return APA_STATUS_OK;
}

apa_status apa_cuda_current(apa_context *context, apa_cuda_target *target)
{
    int32_t count;
    apa_status status = apa_cuda_device_count(context, &count);
    if (status != APA_STATUS_OK)
        return status;
    int index = 0;
    if (cudaGetDevice(&index) != cudaSuccess)
        return apa_fail(context, APA_STATUS_UNSUPPORTED, "cuda: no current device");
    target->index = index;
    target->capability = capability_of(index);
    target->multiprocessors = attribute(cudaDevAttrMultiProcessorCount, index);
    target->shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    target->shared_bytes_of_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
    if (target->capability < LOWEST_CAPABILITY)
        return apa_fail(context, APA_STATUS_UNSUPPORTED,
                        "cuda: device %d has compute capability %d.%d, the engine needs 8.0 or later", index,
                        (int)target->capability / 10, (int)target->capability % 10);
    return APA_STATUS_OK;
}
