// Starting the kernels that were compiled in. Plain C: no CUDA header is needed to call it.
#pragma once

// Starts `blocks` blocks of a kernel on a stream of a device. Returns a message, or null when all is well.
extern "C" const char* commsched_cuda_launch(const char* kernel, int device, long long blocks, const unsigned long long* arguments,
                                             int count, void* stream);

// Why the device cannot run the kernels that were compiled in, or null where it can.
extern "C" const char* commsched_cuda_unfit(int device);
