// The part of CUDA that this project's kernels need, for a C++17 compiler and a CPU.
//
// Found in the place of CUDA's own header where a .cu file is compiled by g++ or clang++ with this folder among its
// include folders. Kernels are launched by LAUNCH(kernel, grid, block)(arguments), since C++ has no <<< >>>.
#pragma once

#include "warp.h"

#include <chrono>
#include <mutex>

namespace cuda_on_cpu {

inline std::mutex one_launch;

// Take launches again after one that failed.
MS_UNTRACED inline void forget_failure() { state.failed = false; }

// Run a kernel, block after block. What is wrong with it is in state.message.
template <class F> MS_UNTRACED void launch(dim3 grid, dim3 block, F kernel)
{
    const std::lock_guard<std::mutex> lock(one_launch); // several Python threads may be here
    const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
    gridDim = grid;
    blockDim = block;
    blockIdx = {0, 0, 0};
    if (state.failed) return; // as on a GPU: after a fault nothing runs, whoever looks at the error
    if (threads < 1 || threads > MOST_THREADS)
        return fail(0, {"", 0}, "cannot be launched: a block may have 1 to %d threads", MOST_THREADS);
    if (block.z > 64) return fail(0, {"", 0}, "cannot be launched: a block may be 64 threads deep");
    if (grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535)
        return fail(0, {"", 0}, "cannot be launched: a grid may have 65535 blocks in y and in z");
    if (!grid.x || !grid.y || !grid.z) return fail(0, {"", 0}, "cannot be launched: the grid has no block");
    if (!state.stacks) state.stacks = static_cast<char *>(aligned_alloc(64, MOST_THREADS * STACK_BYTES));
    if (!state.stacks) return fail(0, {"", 0}, "cannot be launched: no memory for the threads' stacks");
    state.num_threads = static_cast<int>(threads);
    state.body = [](void *f) { (*static_cast<F *>(f))(); };
    state.arguments = &kernel;
    account_for_launch();
#ifdef MS_TSAN
    state.scheduler_stack.thread = __tsan_get_current_fiber();
#endif
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                run_block();
                if (state.failed) return;
            }
}

} // namespace cuda_on_cpu

#define LAUNCH(kernel, grid, block)                                                                                   \
    [&](auto... arguments) { cuda_on_cpu::launch(grid, block, [=] { (kernel)(arguments...); }); }

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNoDevice = 100,
    cudaErrorLaunchFailure = 719
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
};

// "Device" memory is memory, of exactly that size, so that AddressSanitizer sees each step over its end.
inline cudaError_t cudaMalloc(void **p, size_t size)
{
    return posix_memalign(p, 256, size ? size : 1) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
template <class T> cudaError_t cudaMalloc(T **p, size_t size) { return cudaMalloc(reinterpret_cast<void **>(p), size); }
inline cudaError_t cudaFree(void *p)
{
    free(p);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind)
{
    if (size) memcpy(to, from, size);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void *p, int value, size_t size)
{
    if (size) memset(p, value, size);
    return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    *available = *total = 0; // not known
    return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int)
{
    *properties = {"this CPU", 0, 0, 1, 0};
    return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 0;
    return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = 0;
    return cudaSuccess;
}

inline void __threadfence() {}
inline void __threadfence_block() {}

// A launch is over when it returns, so what was wrong with it is known at once. It is not forgotten by asking.
inline cudaError_t cudaPeekAtLastError() { return cuda_on_cpu::state.failed ? cudaErrorLaunchFailure : cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cuda_on_cpu::state.failed ? cudaErrorLaunchFailure : cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaGetLastError(); }
inline const char *cudaGetErrorString(cudaError_t error)
{
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNoDevice: return "no device";
    default: return cuda_on_cpu::state.message;
    }
}

using cudaEvent_t = std::chrono::steady_clock::time_point *;
inline cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    *event = new std::chrono::steady_clock::time_point;
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    delete event;
    return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event)
{
    *event = std::chrono::steady_clock::now();
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    *milliseconds = std::chrono::duration<float, std::milli>(*to - *from).count();
    return cudaSuccess;
}
