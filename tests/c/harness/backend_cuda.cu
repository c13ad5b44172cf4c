// The CUDA device of a test. backend_emulated.cpp adds what only an emulated one can do.
#include <cuda_runtime.h>

#include "tests/c/harness/backend.h"

class CudaBackend : public Backend
{
  public:
    hr_exec exec() const override
    {
        return {0, nullptr};
    }
    void *allocate(size_t bytes) override
    {
        void *memory = nullptr;
        EXPECT_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
        return memory;
    }
    void release(void *memory) override
    {
        EXPECT_EQ(cudaFree(memory), cudaSuccess);
    }
    void upload(void *to, const void *from, size_t bytes) override
    {
        EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
    void download(void *to, const void *from, size_t bytes) override
    {
        EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    }
    bool sees_overruns() const override
    {
        return false;
    }
};

#if !defined(HR_EMULATE)
Backend *cuda_backend()
{
    static CudaBackend cuda;
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? &cuda : nullptr;
}
#endif
