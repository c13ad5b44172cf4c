/*
 * adafactor_phases.c: Adafactor on a matrix whose rows are sharded over two ranks. Between the
 * phases of a step the ranks add the sums that cross them. Here both ranks are in one process; a
 * real program would call its all-reduce instead.
 *
 *     cc -std=c99 adafactor_phases.c $(pkg-config --cflags --libs headroom) -lm -o adafactor_phases
 */
#include "problem.h"

enum { ROWS = 32, COLS = 24, RANKS = 2, LOCAL = ROWS / RANKS, STEPS = 20 };

/* The part of a matrix that one call works on. */
typedef struct part {
    hr_adafactor_shape shape;
    float *param, *grad;
    float row_var[ROWS], col_var[COLS];
    double *workspace;
    size_t bytes;
} part;

static void part_init(part *p, hr_adafactor_shape shape, float *param, float *grad)
{
    p->shape = shape;
    p->param = param;
    p->grad = grad;
    for (int i = 0; i < ROWS; i++)
        p->row_var[i] = 0;
    for (int i = 0; i < COLS; i++)
        p->col_var[i] = 0;
    check(hr_adafactor_workspace(&p->bytes, &shape, 1));
    p->workspace = malloc(p->bytes);
}

static void part_step(part *p, int step, int phases)
{
    const int64_t numel = p->shape.rows * p->shape.cols;
    one_tensor param = {p->param, numel, HR_F32}, grad = {p->grad, numel, HR_F32};
    one_tensor row_var = {p->row_var, p->shape.rows, HR_F32};
    one_tensor col_var = {p->col_var, p->shape.cols, HR_F32};
    const hr_tensor_list params = list_of(&param), grads = list_of(&grad);
    const hr_tensor_list row_vars = list_of(&row_var), col_vars = list_of(&col_var);
    const hr_exec cpu = {HR_CPU, NULL};
    hr_adafactor_config config = HR_ADAFACTOR_HF_INIT;
    config.step.t = step;
    config.phases = phases;
    check(hr_adafactor(&params, &row_vars, &col_vars, NULL, NULL, NULL, NULL, &grads, &p->shape,
                       &config, p->workspace, p->bytes, &cpu));
}

/* Adds the numbers [first, first + count) of the workspaces over the ranks. */
static void all_reduce(part *parts, int first, int count)
{
    for (int i = first; i < first + count; i++) {
        double sum = 0;
        for (int rank = 0; rank < RANKS; rank++)
            sum += parts[rank].workspace[i];
        for (int rank = 0; rank < RANKS; rank++)
            parts[rank].workspace[i] = sum;
    }
}

int main(void)
{
    static float whole_param[ROWS * COLS], param[ROWS * COLS], grad[ROWS * COLS];
    uint32_t seed = 7;
    for (int i = 0; i < ROWS * COLS; i++)
        whole_param[i] = param[i] = next_random(&seed);

    /* The ranks share the rows, so whole_rows is set. Each rank has all columns, so whole_cols is
     * 0. */
    const hr_adafactor_shape of_whole = {1, ROWS, COLS, 1, 0, 0, 0};
    const hr_adafactor_shape of_rank = {1, LOCAL, COLS, 1, ROWS, 0, ROWS * COLS};
    static part whole, parts[RANKS];
    part_init(&whole, of_whole, whole_param, grad);
    for (int rank = 0; rank < RANKS; rank++)
        part_init(&parts[rank], of_rank, param + rank * LOCAL * COLS, grad + rank * LOCAL * COLS);

    /* The numbers in the workspace of one matrix: sums of param^2, u^2 and row_var, then sums of
     * g^2 of each row and each column. */
    enum {
        PARAM_SQUARES,
        UPDATE_SQUARES,
        ROW_VARS,
        ROW_SQUARES,
        COL_SQUARES = ROW_SQUARES + LOCAL
    };
    for (int step = 1; step <= STEPS; step++) {
        for (int i = 0; i < ROWS * COLS; i++)
            grad[i] = next_random(&seed) + whole_param[i];
        part_step(&whole, step, HR_ADAFACTOR_ALL);
        for (int rank = 0; rank < RANKS; rank++)
            part_step(&parts[rank], step, HR_ADAFACTOR_SUMS);
        all_reduce(parts, PARAM_SQUARES, 1);
        all_reduce(parts, COL_SQUARES, COLS);
        for (int rank = 0; rank < RANKS; rank++)
            part_step(&parts[rank], step, HR_ADAFACTOR_STATES);
        all_reduce(parts, ROW_VARS, 1);
        for (int rank = 0; rank < RANKS; rank++)
            part_step(&parts[rank], step, HR_ADAFACTOR_NORM);
        all_reduce(parts, UPDATE_SQUARES, 1);
        for (int rank = 0; rank < RANKS; rank++)
            part_step(&parts[rank], step, HR_ADAFACTOR_APPLY);
    }
    float worst = 0;
    for (int i = 0; i < ROWS * COLS; i++)
        worst = fmaxf(worst, fabsf(param[i] - whole_param[i]));
    printf("largest difference between two ranks and one: %.1e\n", worst);
    free(whole.workspace);
    for (int rank = 0; rank < RANKS; rank++)
        free(parts[rank].workspace);
    return worst < 1e-5f ? 0 : 1;
}
