/*
 * adamw_cuda.c: AdamW on a CUDA stream. The step is queued behind the copy of the gradient, and the
 * host waits only when it reads the weights. Returns 77, which means "skipped", if there is no CUDA
 * device.
 *
 *     cc -std=c99 adamw_cuda.c $(pkg-config --cflags --libs headroom) -lcudart -lm -o adamw_cuda
 */
#include "problem.h"

#include <cuda_runtime_api.h>

enum { STEPS = 400, SKIPPED = 77 };

static void check_cuda(cudaError_t error)
{
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
}

static void *device_zeros(size_t bytes)
{
    void *memory = NULL;
    check_cuda(cudaMalloc(&memory, bytes));
    check_cuda(cudaMemset(memory, 0, bytes));
    return memory;
}

int main(void)
{
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("skipped: no CUDA device\n");
        return SKIPPED;
    }
    static problem p;
    problem_fill(&p);
    cudaStream_t stream;
    check_cuda(cudaStreamCreate(&stream));
    const hr_exec gpu = {0, stream};

    const size_t bytes = FEATURES * sizeof(float);
    float weight[FEATURES] = {0}, grad[FEATURES];
    one_tensor weight_tensor = {device_zeros(bytes), FEATURES, HR_F32};
    one_tensor grad_tensor = {device_zeros(bytes), FEATURES, HR_F32};
    one_tensor m_tensor = {device_zeros(bytes), FEATURES, HR_F32};
    one_tensor v_tensor = {device_zeros(bytes), FEATURES, HR_F32};
    const hr_tensor_list weights = list_of(&weight_tensor), grads = list_of(&grad_tensor);
    const hr_tensor_list ms = list_of(&m_tensor), vs = list_of(&v_tensor);

    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.weight_decay = 0;
    float first = 0, loss = 0;
    for (int step = 1; step <= STEPS; step++) {
        loss = problem_loss(&p, weight, 1.0f, grad);
        first = step == 1 ? loss : first;
        if (step == 1 || step % 100 == 0)
            printf("step %3d  loss %.3e\n", step, loss);
        config.step.t = step;
        config.step.lr = 0.05 * (1.0 - (double)step / (STEPS + 1));
        check_cuda(cudaMemcpyAsync(grad_tensor.data, grad, bytes, cudaMemcpyHostToDevice, stream));
        check(hr_adamw(&weights, &ms, &vs, NULL, NULL, &grads, &config, &gpu));
        check_cuda(
            cudaMemcpyAsync(weight, weight_tensor.data, bytes, cudaMemcpyDeviceToHost, stream));
        check_cuda(cudaStreamSynchronize(stream)); /* the next loss needs the weights */
    }
    one_tensor *const all[] = {&weight_tensor, &grad_tensor, &m_tensor, &v_tensor};
    for (int i = 0; i < 4; i++)
        check_cuda(cudaFree(all[i]->data));
    check_cuda(cudaStreamDestroy(stream));
    return loss < first / 1000 ? 0 : 1;
}
