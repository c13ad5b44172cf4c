/*
 * mlp.c: learns to guess the next character of a text from the six before it, with two MLP blocks,
 * from the characters to the step of the optimizer. The text is the file that is named, or else this
 * one.
 *
 *     cc -std=c99 mlp.c $(pkg-config --cflags --libs headroom) -lm -o mlp && ./mlp book.txt
 *
 * A block keeps its input and its gate and up between the passes, as HR_MLP_SAVE_GATE_UP says.
 */
#define HR_EXPERIMENTAL /* the MLP block */
#include "device.h"

enum { CONTEXT = 6, CHARS = 128, ROWS = 256, HIDDEN = 64, INNER = 128, LAYERS = 2, STEPS = 160 };
enum { ONE_HOT = CONTEXT * CHARS };

/* The weights, in one list for the optimizer. */
enum { EMBEDDING, HEAD, FIRST_LAYER };
enum { NORM, GATE_UP, DOWN, PER_LAYER };
enum { TENSORS = FIRST_LAYER + LAYERS * PER_LAYER };

typedef struct tensors {
    void *data[TENSORS];
    int64_t numel[TENSORS];
    hr_dtype dtype[TENSORS];
} tensors;

static tensors zeros(void)
{
    const int64_t layer[PER_LAYER] = {HIDDEN, 2 * INNER * HIDDEN, HIDDEN * INNER};
    tensors t;
    for (int i = 0; i < TENSORS; i++) {
        t.numel[i] = i == EMBEDDING ? ONE_HOT * HIDDEN
                     : i == HEAD    ? CHARS * HIDDEN
                                    : layer[(i - FIRST_LAYER) % PER_LAYER];
        t.dtype[i] = HR_F32;
        t.data[i] = device_zeros((size_t)t.numel[i] * sizeof(float));
    }
    return t;
}

static hr_tensor_list list(const tensors *t)
{
    const hr_tensor_list all = {TENSORS, t->data, t->numel, t->dtype};
    return all;
}

static void make_weights(const tensors *t)
{
    uint32_t seed = 7;
    for (int i = 0; i < TENSORS; i++) {
        float *const values = malloc((size_t)t->numel[i] * sizeof(float));
        if (!values)
            exit(1);
        const int is_norm = i >= FIRST_LAYER && (i - FIRST_LAYER) % PER_LAYER == NORM;
        for (int64_t k = 0; k < t->numel[i]; k++)
            values[k] = is_norm ? 1.0f : 0.2f * next_random(&seed);
        to_device(t->data[i], values, (size_t)t->numel[i] * sizeof(float));
        free(values);
    }
}

static hr_rows rows(void *data, int64_t cols)
{
    const hr_rows matrix = {data, cols};
    return matrix;
}

static hr_mlp_params layer_of(const tensors *t, int layer)
{
    void *const *const data = t->data + FIRST_LAYER + layer * PER_LAYER;
    hr_mlp_params params = {0};
    params.norm_weight = data[NORM];
    params.gate_up = rows(data[GATE_UP], HIDDEN);
    params.down = rows(data[DOWN], INNER);
    return params;
}

/* C = op(A) op(B) */
static void multiply(void *c, void *a, void *b, int64_t m, int64_t n, int64_t k, int transpose_a,
                     int transpose_b, const hr_exec *exec)
{
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.transpose_a = transpose_a;
    config.transpose_b = transpose_b;
    const hr_rows to = rows(c, n), left = rows(a, transpose_a ? m : k);
    const hr_rows right = rows(b, transpose_b ? k : n);
    check(hr_gemm(&to, &left, &right, NULL, m, n, k, &config, NULL, 0, exec));
}

static unsigned char *read_text(const char *path, long *length)
{
    FILE *const file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) != 0 || (*length = ftell(file)) <= CONTEXT ||
        fseek(file, 0, SEEK_SET) != 0) {
        fprintf(stderr, "%s: no such file, or it is too short\n", path);
        exit(1);
    }
    unsigned char *const text = malloc((size_t)*length);
    if (!text || fread(text, 1, (size_t)*length, file) != (size_t)*length)
        exit(1);
    fclose(file);
    for (long i = 0; i < *length; i++)
        text[i] = text[i] < CHARS ? text[i] : '?';
    return text;
}

/* Each row: a one for each of the characters before a place of the text, and the one at it. */
static void next_batch(float *one_hot, int64_t *target, const unsigned char *text, long length,
                       uint32_t *seed)
{
    memset(one_hot, 0, sizeof(float) * ROWS * ONE_HOT);
    for (int i = 0; i < ROWS; i++) {
        const float chance = next_random(seed) / 2 + 0.5f;
        const long at = (long)(chance * (float)(length - CONTEXT - 1));
        for (int k = 0; k < CONTEXT; k++)
            one_hot[i * ONE_HOT + k * CHARS + text[at + k]] = 1;
        target[i] = text[at + CONTEXT];
    }
}

int main(int argc, char **argv)
{
    const hr_exec exec = device_exec();
    long length = 0;
    unsigned char *const text = read_text(argc > 1 ? argv[1] : __FILE__, &length);
    const tensors weights = zeros(), grads = zeros(), m = zeros(), v = zeros();
    make_weights(&weights);
    const hr_tensor_list weight_list = list(&weights), grad_list = list(&grads);
    const hr_tensor_list m_list = list(&m), v_list = list(&v);

    /* Every block keeps its own buffers; the workspace is shared. */
    const hr_mlp_config mlp = HR_MLP_CONFIG_INIT;
    const uint32_t wanted = HR_MLP_X | HR_MLP_NORM_WEIGHT | HR_MLP_GATE_UP | HR_MLP_DOWN;
    hr_mlp_needs needs;
    check(hr_mlp_query(&needs, ROWS, HIDDEN, INNER, HR_MLP_SAVE_GATE_UP, wanted, &mlp, &exec));
    hr_mlp_saved saved[LAYERS] = {{0}};
    for (int i = 0; i < LAYERS; i++) {
        saved[i].rstd = device_zeros(needs.rstd);
        saved[i].gate_up = device_zeros(needs.gate_up);
    }
    const size_t bytes = needs.forward_workspace > needs.backward_workspace
                             ? needs.forward_workspace
                             : needs.backward_workspace;
    void *const workspace = device_zeros(bytes);

    const size_t row_bytes = sizeof(float) * ROWS * HIDDEN;
    void *x[LAYERS + 1], *dx[2];
    for (int i = 0; i <= LAYERS; i++)
        x[i] = device_zeros(row_bytes);
    for (int i = 0; i < 2; i++)
        dx[i] = device_zeros(row_bytes);
    static float one_hot_host[ROWS * ONE_HOT];
    int64_t target_host[ROWS];
    void *const one_hot = device_zeros(sizeof one_hot_host);
    void *const target = device_zeros(sizeof target_host);
    void *const logits = device_zeros(sizeof(float) * ROWS * CHARS);
    float *const loss = device_zeros(sizeof(float) * ROWS),
                 *lse = device_zeros(sizeof(float) * ROWS);
    float *const mean = device_zeros(sizeof(float)), *factors = device_zeros(2 * sizeof(float));
    float *const one = device_zeros(sizeof(float));
    const float one_host = 1;
    to_device(one, &one_host, sizeof one_host);

    hr_adamw_config adamw = HR_ADAMW_CONFIG_INIT;
    const hr_cross_entropy_config cross_entropy = HR_CROSS_ENTROPY_CONFIG_INIT;
    const hr_rows logit_rows = rows(logits, CHARS);
    uint32_t seed = 1;
    float first = 0, last = 0;
    for (int step = 1; step <= STEPS; step++) {
        next_batch(one_hot_host, target_host, text, length, &seed);
        to_device(one_hot, one_hot_host, sizeof one_hot_host);
        to_device(target, target_host, sizeof target_host);

        multiply(x[0], one_hot, weights.data[EMBEDDING], ROWS, HIDDEN, ONE_HOT, 0, 0, &exec);
        for (int i = 0; i < LAYERS; i++) {
            const hr_mlp_params params = layer_of(&weights, i);
            const hr_rows from = rows(x[i], HIDDEN), to = rows(x[i + 1], HIDDEN);
            check(hr_mlp_forward(&to, &saved[i], &from, &params, ROWS, HIDDEN, INNER, &mlp,
                                 workspace, bytes, &exec));
        }
        multiply(logits, x[LAYERS], weights.data[HEAD], ROWS, CHARS, HIDDEN, 0, 1, &exec);
        check(hr_cross_entropy_forward(loss, lse, NULL, NULL, &logit_rows, target, NULL, ROWS,
                                       CHARS, &cross_entropy, &exec));
        check(hr_cross_entropy_reduce(mean, factors, loss, NULL, target, NULL, ROWS, CHARS,
                                      &cross_entropy, &exec));

        /* The gradient of the logits takes their place. */
        check(hr_cross_entropy_backward(&logit_rows, one, 0, factors, &logit_rows, target, NULL,
                                        lse, NULL, ROWS, CHARS, &cross_entropy, &exec));
        multiply(grads.data[HEAD], logits, x[LAYERS], CHARS, HIDDEN, ROWS, 1, 0, &exec);
        multiply(dx[0], logits, weights.data[HEAD], ROWS, HIDDEN, CHARS, 0, 0, &exec);
        for (int i = LAYERS - 1; i >= 0; i--) {
            const hr_mlp_params params = layer_of(&weights, i), gradients = layer_of(&grads, i);
            const hr_rows dy = rows(dx[(LAYERS - 1 - i) % 2], HIDDEN);
            const hr_rows to = rows(dx[(LAYERS - i) % 2], HIDDEN), from = rows(x[i], HIDDEN);
            check(hr_mlp_backward(&to, &gradients, &dy, &from, &params, &saved[i], ROWS, HIDDEN,
                                  INNER, &mlp, workspace, bytes, &exec));
        }
        multiply(grads.data[EMBEDDING], one_hot, dx[LAYERS % 2], ONE_HOT, HIDDEN, ROWS, 1, 0,
                 &exec);

        adamw.step.t = step;
        adamw.step.lr = 0.01 * (1.0 - (double)step / (STEPS + 1));
        check(hr_adamw(&weight_list, &m_list, &v_list, NULL, NULL, &grad_list, &adamw, &exec));
        to_host(&last, mean, sizeof last);
        first = step == 1 ? last : first;
        if (step == 1 || step % 40 == 0)
            printf("step %3d  loss %.3f\n", step, last);
    }

    const tensors *const all[] = {&weights, &grads, &m, &v};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < TENSORS; k++)
            device_free(all[i]->data[k]);
    for (int i = 0; i < LAYERS; i++) {
        device_free(saved[i].rstd);
        device_free(saved[i].gate_up);
    }
    for (int i = 0; i <= LAYERS; i++)
        device_free(x[i]);
    void *const rest[] = {dx[0], dx[1], one_hot, target, logits,   loss,
                          lse,   mean,  factors, one,    workspace};
    for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++)
        device_free(rest[i]);
    free(text);
    return last < 0.6f * first ? 0 : 1;
}
