/*
 * adamw8bit.c: AdamW with 8-bit moments. With blocks of 256 the state takes 2.03 bytes per weight
 * instead of 8.
 *
 *     cc -std=c99 adamw8bit.c $(pkg-config --cflags --libs headroom) -lm -o adamw8bit
 */
#include "problem.h"

enum { STEPS = 600, BLOCK_SIZE = 64 };

int main(void)
{
    static problem p;
    problem_fill(&p);
    const hr_exec cpu = {HR_CPU, NULL};

    /* Each moment has a code per weight and a scale per block. Scales of zero make all moments
     * zero. */
    float weight[FEATURES] = {0}, grad[FEATURES];
    uint8_t m[FEATURES] = {0}, v[FEATURES] = {0};
    const int64_t blocks = hr_block_count(FEATURES, BLOCK_SIZE);
    float *const m_scales = calloc((size_t)blocks, sizeof *m_scales);
    float *const v_scales = calloc((size_t)blocks, sizeof *v_scales);

    one_tensor weight_tensor = {weight, FEATURES, HR_F32}, grad_tensor = {grad, FEATURES, HR_F32};
    one_tensor m_tensor = {m, FEATURES, HR_U8}, v_tensor = {v, FEATURES, HR_U8};
    one_tensor m_scale_tensor = {m_scales, blocks, HR_F32};
    one_tensor v_scale_tensor = {v_scales, blocks, HR_F32};
    const hr_tensor_list weights = list_of(&weight_tensor), grads = list_of(&grad_tensor);
    const hr_tensor_list ms = list_of(&m_tensor), m_scale_list = list_of(&m_scale_tensor);
    const hr_tensor_list vs = list_of(&v_tensor), v_scale_list = list_of(&v_scale_tensor);

    hr_adamw8bit_config config = HR_ADAMW8BIT_CONFIG_INIT;
    config.block_size = BLOCK_SIZE;
    config.adamw.weight_decay = 0;
    float first = 0, loss = 0;
    for (int step = 1; step <= STEPS; step++) {
        loss = problem_loss(&p, weight, 1.0f, grad);
        first = step == 1 ? loss : first;
        if (step == 1 || step % 100 == 0)
            printf("step %3d  loss %.3e\n", step, loss);
        config.adamw.step.t = step;
        config.adamw.step.lr = 0.05 * (1.0 - (double)step / (STEPS + 1));
        check(hr_adamw8bit(&weights, &ms, &m_scale_list, &vs, &v_scale_list, NULL, &grads, &config,
                           &cpu));
    }

    /* Decodes the second moments. */
    float moment[FEATURES];
    one_tensor moment_tensor = {moment, FEATURES, HR_F32};
    const hr_tensor_list moments = list_of(&moment_tensor);
    hr_quantize_config quantize = HR_QUANTIZE_CONFIG_INIT;
    quantize.is_signed = 0;
    quantize.block_size = BLOCK_SIZE;
    check(hr_dequantize_blocks(&moments, &vs, &v_scale_list, &quantize, &cpu));
    printf("second moment of weight 0: code %d of scale %.3e is %.3e\n", v[0], v_scales[0],
           moment[0]);
    free(m_scales);
    free(v_scales);
    return loss < first / 1000 ? 0 : 1;
}
