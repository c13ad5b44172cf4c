/*
 * least_squares.c: fits y = X w + b by least squares with AdamW on the CPU: a complete program that
 * uses headroom.h.
 *
 *     cc -std=c99 least_squares.c $(pkg-config --cflags --libs headroom) -lm -o least_squares
 */
#include <headroom.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>

enum { ROWS = 64, COLS = 4, STEPS = 600 };

static const float true_weight[COLS] = {1.5f, -2.0f, 0.5f, 3.0f};
static const float true_bias = -1.0f;

/* Uniform in [-1, 1), the same on every machine. */
static float next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static float predict(const float *row, const float *weight, float bias)
{
    float y = bias;
    for (int j = 0; j < COLS; j++)
        y += row[j] * weight[j];
    return y;
}

/* Half the mean squared error, and its gradients. */
static float loss(float x[ROWS][COLS], const float *y, const float *weight, float bias,
                  float *weight_grad, float *bias_grad)
{
    float sum = 0.0f;
    *bias_grad = 0.0f;
    for (int j = 0; j < COLS; j++)
        weight_grad[j] = 0.0f;
    for (int i = 0; i < ROWS; i++) {
        float error = predict(x[i], weight, bias) - y[i];
        sum += error * error / (2 * ROWS);
        *bias_grad += error / ROWS;
        for (int j = 0; j < COLS; j++)
            weight_grad[j] += error * x[i][j] / ROWS;
    }
    return sum;
}

int main(void)
{
    float x[ROWS][COLS], y[ROWS];
    uint32_t seed = 1;
    for (int i = 0; i < ROWS; i++) {
        for (int j = 0; j < COLS; j++)
            x[i][j] = next_random(&seed);
        y[i] = predict(x[i], true_weight, true_bias);
    }

    /* Two parameters, each with a gradient and two moments that start at zero. */
    float weight[COLS] = {0}, weight_grad[COLS], weight_m[COLS] = {0}, weight_v[COLS] = {0};
    float bias = 0, bias_grad, bias_m = 0, bias_v = 0;

    void *params[] = {weight, &bias}, *grads[] = {weight_grad, &bias_grad};
    void *ms[] = {weight_m, &bias_m}, *vs[] = {weight_v, &bias_v};
    const int64_t numel[] = {COLS, 1};
    const hr_dtype dtype[] = {HR_F32, HR_F32};
    const hr_tensor_list param_list = {2, params, numel, dtype};
    const hr_tensor_list grad_list = {2, grads, numel, dtype};
    const hr_tensor_list m_list = {2, ms, numel, dtype};
    const hr_tensor_list v_list = {2, vs, numel, dtype};

    const hr_exec cpu = {HR_CPU, NULL};
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.weight_decay = 0.0;

    printf("headroom %d: %s\n", (int)hr_version(), hr_build_info());
    for (int step = 1; step <= STEPS; step++) {
        float value = loss(x, y, weight, bias, weight_grad, &bias_grad);
        if (step == 1 || step % 100 == 0)
            printf("step %3d  loss %.3e\n", step, value);

        config.step.t = step;
        config.step.lr = 0.05 * (1.0 - (double)step / (STEPS + 1));
        hr_status status =
            hr_adamw(&param_list, &m_list, &v_list, NULL, NULL, &grad_list, &config, &cpu);
        if (status != HR_OK) {
            fprintf(stderr, "%s: %s\n", hr_status_string(status), hr_last_error());
            return 1;
        }
    }

    float worst = fabsf(bias - true_bias);
    for (int j = 0; j < COLS; j++)
        worst = fmaxf(worst, fabsf(weight[j] - true_weight[j]));
    printf("largest error of a coefficient: %.1e\n", worst);
    return worst < 1e-3f ? 0 : 1;
}
