/*
 * scaler_loop.c: f16 gradients with a dynamic loss scale. One pass measures the gradients and looks
 * for an overflow, the step is skipped if there was one, and then the scale is updated. Nothing
 * waits for the device: on CUDA the same loop would use pointers to device memory.
 *
 *     cc -std=c99 scaler_loop.c $(pkg-config --cflags --libs headroom) -lm -o scaler_loop
 */
#include "problem.h"

enum { STEPS = 400 };

/* Rounds f32 to f16, with the call that splits weights: C99 has no type for f16. */
static void to_f16(uint16_t *half, float *values, const hr_exec *exec)
{
    one_tensor half_tensor = {half, FEATURES, HR_F16}, value_tensor = {values, FEATURES, HR_F32};
    const hr_tensor_list halves = list_of(&half_tensor), list = list_of(&value_tensor);
    const hr_weights nearest = HR_WEIGHTS_INIT;
    check(hr_split_weights(&halves, &list, &nearest, exec));
}

int main(void)
{
    static problem p;
    problem_fill(&p);
    const hr_exec cpu = {HR_CPU, NULL};

    float weight[FEATURES] = {0}, m[FEATURES] = {0}, v[FEATURES] = {0}, wide[FEATURES];
    uint16_t grad[FEATURES];
    one_tensor weight_tensor = {weight, FEATURES, HR_F32}, grad_tensor = {grad, FEATURES, HR_F16};
    one_tensor m_tensor = {m, FEATURES, HR_F32}, v_tensor = {v, FEATURES, HR_F32};
    const hr_tensor_list weights = list_of(&weight_tensor), grads = list_of(&grad_tensor);
    const hr_tensor_list ms = list_of(&m_tensor), vs = list_of(&v_tensor);

    float scale = 1048576.0f, norm, found_inf, clip_coef;
    int32_t growth_tracker = 0;
    double step_count = 0; /* of the steps that were not skipped */
    one_tensor step_tensor = {&step_count, 1, HR_F64};
    const hr_tensor_list steps = list_of(&step_tensor);

    hr_unscale_norm_config unscale = HR_UNSCALE_NORM_CONFIG_INIT;
    unscale.grad_scale = &scale;
    unscale.max_norm = 1.0;
    const hr_unscale_norm_result result = {&norm, NULL, &found_inf, NULL, &clip_coef};
    size_t bytes = 0;
    check(hr_unscale_norm_workspace(&bytes, &grads));
    void *const workspace = malloc(bytes);

    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.weight_decay = 0;
    config.step.grad_scale = &scale; /* AdamW unscales the gradients as it reads them */
    config.step.found_inf = &found_inf;
    config.step.clip_coef = &clip_coef;
    hr_update_scale_config update = HR_UPDATE_SCALE_CONFIG_INIT;
    update.growth_interval = 50;

    float first = 0, loss = 0;
    int skipped = 0;
    for (int step = 1; step <= STEPS; step++) {
        loss = problem_loss(&p, weight, scale, wide);
        first = step == 1 ? loss : first;
        to_f16(grad, wide, &cpu);
        found_inf = 0;
        check(hr_unscale_norm(&grads, &result, &unscale, workspace, bytes, &cpu));
        config.step.lr = 0.05 * (1.0 - (double)step / (STEPS + 1));
        check(hr_adamw(&weights, &ms, &vs, NULL, &steps, &grads, &config, &cpu));
        check(hr_update_scale(&scale, &growth_tracker, NULL, &found_inf, &update, &cpu));
        skipped += found_inf != 0;
        if (step == 1 || step % 100 == 0)
            printf("step %3d  loss %.3e  norm %.2e  scale %g\n", step, loss, norm, scale);
    }
    printf("%d steps were skipped, %g taken\n", skipped, step_count);
    free(workspace);
    return loss < first / 1000 && skipped > 0 && skipped + (int)step_count == STEPS ? 0 : 1;
}
