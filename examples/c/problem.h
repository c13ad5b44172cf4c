/* problem.h: a small least-squares problem, y = X w, and helpers that the examples share. */
#ifndef PROBLEM_H
#define PROBLEM_H

#include <headroom.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { EXAMPLES = 96, FEATURES = 64 };

typedef struct problem {
    float x[EXAMPLES][FEATURES], y[EXAMPLES], weight[FEATURES];
} problem;

/* Uniform in [-1, 1), the same on every machine. */
static inline float next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static inline void problem_fill(problem *p)
{
    uint32_t seed = 1;
    for (int j = 0; j < FEATURES; j++)
        p->weight[j] = next_random(&seed);
    for (int i = 0; i < EXAMPLES; i++) {
        p->y[i] = 0;
        for (int j = 0; j < FEATURES; j++) {
            p->x[i][j] = next_random(&seed);
            p->y[i] += p->x[i][j] * p->weight[j];
        }
    }
}

/* Half the mean squared error, and `scale` times its gradient. */
static inline float problem_loss(const problem *p, const float *weight, float scale, float *grad)
{
    float sum = 0;
    for (int j = 0; j < FEATURES; j++)
        grad[j] = 0;
    for (int i = 0; i < EXAMPLES; i++) {
        float error = -p->y[i];
        for (int j = 0; j < FEATURES; j++)
            error += p->x[i][j] * weight[j];
        sum += error * error / (2 * EXAMPLES);
        for (int j = 0; j < FEATURES; j++)
            grad[j] += scale * error * p->x[i][j] / EXAMPLES;
    }
    return sum;
}

/* A tensor that list_of() makes a list of. It must outlive the list, which points to its
 * members. */
typedef struct one_tensor {
    void *data;
    int64_t numel;
    hr_dtype dtype;
} one_tensor;

static inline hr_tensor_list list_of(one_tensor *tensor)
{
    const hr_tensor_list list = {1, &tensor->data, &tensor->numel, &tensor->dtype};
    return list;
}

/* Ends the program with the library's message if a call failed. */
static inline void check(hr_status status)
{
    if (status == HR_OK)
        return;
    fprintf(stderr, "%s: %s\n", hr_status_string(status), hr_last_error());
    exit(1);
}

#endif
