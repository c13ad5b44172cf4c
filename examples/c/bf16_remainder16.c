/*
 * bf16_remainder16.c: bf16 weights without loss. With a residual of 16 bits per weight, AdamW takes
 * the same steps, bit for bit, as with binary32 weights. Param and residual take 4 bytes together,
 * and the model reads only the 2 bytes of the param.
 *
 *     cc -std=c99 bf16_remainder16.c $(pkg-config --cflags --libs headroom) -lm -o bf16_remainder16
 */
#include "problem.h"

#include <string.h>

enum { STEPS = 300 };

int main(void)
{
    static problem p;
    problem_fill(&p);
    const hr_exec cpu = {HR_CPU, NULL};

    /* One run has binary32 weights; the other has a bf16 param and a residual. */
    float f32_weight[FEATURES] = {0}, grad[FEATURES], joined[FEATURES];
    uint16_t param[FEATURES] = {0};
    int16_t residual[FEATURES] = {0};
    float m[2][FEATURES] = {{0}}, v[2][FEATURES] = {{0}};

    one_tensor f32_tensor = {f32_weight, FEATURES, HR_F32}, grad_tensor = {grad, FEATURES, HR_F32};
    one_tensor param_tensor = {param, FEATURES, HR_BF16};
    one_tensor residual_tensor = {residual, FEATURES, HR_I16};
    one_tensor joined_tensor = {joined, FEATURES, HR_F32};
    one_tensor m_tensor[] = {{m[0], FEATURES, HR_F32}, {m[1], FEATURES, HR_F32}};
    one_tensor v_tensor[] = {{v[0], FEATURES, HR_F32}, {v[1], FEATURES, HR_F32}};
    const hr_tensor_list params = list_of(&param_tensor), residuals = list_of(&residual_tensor);
    const hr_tensor_list f32s = list_of(&f32_tensor), grads = list_of(&grad_tensor);
    const hr_tensor_list values = list_of(&joined_tensor);
    const hr_tensor_list ms[] = {list_of(&m_tensor[0]), list_of(&m_tensor[1])};
    const hr_tensor_list vs[] = {list_of(&v_tensor[0]), list_of(&v_tensor[1])};

    hr_weights weights = HR_WEIGHTS_INIT;
    weights.mode = HR_WEIGHTS_REMAINDER16;
    weights.residuals = &residuals;
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.step.lr = 0.02;

    for (int step = 1; step <= STEPS; step++) {
        /* Both runs take the same gradients, so that their weights can be compared. */
        const float loss = problem_loss(&p, f32_weight, 1.0f, grad);
        if (step == 1 || step % 100 == 0)
            printf("step %3d  loss %.3e\n", step, loss);
        config.step.t = step;
        config.step.weights = NULL;
        check(hr_adamw(&f32s, &ms[0], &vs[0], NULL, NULL, &grads, &config, &cpu));
        config.step.weights = &weights;
        check(hr_adamw(&params, &ms[1], &vs[1], NULL, NULL, &grads, &config, &cpu));
    }
    check(hr_join_weights(&values, &params, &weights, &cpu));
    const int same = memcmp(joined, f32_weight, sizeof f32_weight) == 0;
    printf("the weights are %s\n", same ? "the same bit for bit" : "different");
    return same ? 0 : 1;
}
