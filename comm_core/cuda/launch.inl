// Included at the end of kernels.cu: what needs the runtime's own headers and is not for NVRTC.
#include <cuda_runtime.h>

#include <cstring>

#include "launch.h"

namespace {

constexpr int kMostArguments = 5;

struct Kernel {
  const char* name;
  const void* function;
  int arguments;
};

#define COPY_ENTRIES(NAME, FROM, TO) {"pack_" #NAME, reinterpret_cast<const void*>(&pack_##NAME), 4},
#define CODE_ENTRIES(NAME, CODE)                                           \
  {"quantise_" #NAME, reinterpret_cast<const void*>(&quantise_##NAME), 5}, \
      {"sum_" #NAME, reinterpret_cast<const void*>(&sum_##NAME), 5},

const Kernel kKernels[] = {COMMSCHED_COPIES(COPY_ENTRIES)
                               COMMSCHED_CODES(CODE_ENTRIES){"hold", reinterpret_cast<const void*>(&hold), 1}};

const Kernel* find(const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(kernel.name, name) == 0) return &kernel;
  }
  return nullptr;
}

}  // namespace

extern "C" const char* commsched_cuda_launch(const char* name, int device, long long blocks, const unsigned long long* arguments,
                                             int count, void* stream) {
  const Kernel* kernel = find(name);
  if (kernel == nullptr) return "there is no kernel of this name";
  if (count != kernel->arguments) return "the kernel takes another number of arguments";
  if (blocks < 1 || blocks > 0x7fffffff) return "a launch has 1 to 2147483647 blocks";
  void* pointers[kMostArguments];
  for (int i = 0; i < count; ++i) pointers[i] = const_cast<unsigned long long*>(arguments + i);
  // torch has its own copy of the runtime, and this one's idea of the current device may be another.
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    const int threads = std::strcmp(name, "hold") == 0 ? 1 : kThreads;
    error = cudaLaunchKernel(kernel->function, dim3(static_cast<unsigned>(blocks)), dim3(threads), pointers, 0,
                             static_cast<cudaStream_t>(stream));
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

extern "C" const char* commsched_cuda_unfit(int device) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaSetDevice(device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kKernels[0].function);
  cudaGetLastError();  // the next launch must not report it
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
