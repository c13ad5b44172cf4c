/* mlp_steps.c: the steps that both passes of the MLP block take. */
#include "capi/nn/mlp_call.h"

uint32_t mlp_kept_in(const mlp_call *call)
{
    const hr_mlp_saved *const saved = &call->saved;
    if (call->sizes.tokens == 0) /* nothing has no address */
        return MLP_STATISTICS | MLP_NORMED | MLP_GATE_UP | MLP_ACTIVATED;
    return (saved->rstd ? MLP_STATISTICS : 0) | (saved->normed ? MLP_NORMED : 0) |
           (saved->gate_up ? MLP_GATE_UP : 0) | (saved->activated ? MLP_ACTIVATED : 0);
}

void *mlp_at(const mlp_call *call, size_t place)
{
    return place == HR_NO_PART ? NULL : call->workspace + place;
}

hr_rows mlp_rows_from(const mlp_call *call, const hr_rows *rows, int64_t first)
{
    if (!rows->data)
        return *rows;
    const int64_t bytes = first * rows->stride * (int64_t)call->sizes.element;
    return (hr_rows){(char *)rows->data + bytes, rows->stride};
}

hr_rows mlp_tile_rows(const mlp_call *call, void *kept, size_t place, int64_t cols, int64_t first)
{
    if (!kept)
        return (hr_rows){mlp_at(call, place), cols};
    const hr_rows all = {kept, cols};
    return mlp_rows_from(call, &all, first);
}

hr_rows mlp_columns_from(const mlp_call *call, const hr_rows *rows, int64_t first)
{
    return (hr_rows){(char *)rows->data + first * (int64_t)call->sizes.element, rows->stride};
}

float *mlp_from_row(float *values, int64_t first)
{
    return values ? values + first : NULL;
}

int mlp_is_apart(const mlp_call *call)
{
    return call->params.up.data || call->config.up;
}

int mlp_parts(const mlp_call *call, const hr_mlp_params *grads, gate_up_part parts[2])
{
    static const hr_mlp_params none;
    const hr_mlp_params *const p = &call->params, *const g = grads ? grads : &none;
    const hr_mlp_config *const c = &call->config;
    const int count = mlp_is_apart(call) ? 2 : 1;
    const int64_t width = call->sizes.width / count;
    parts[0] = (gate_up_part){{p->gate_up, c->gate_up}, g->gate_up, p->gate_up_bias,
                              g->gate_up_bias,          0,          width};
    parts[1] = (gate_up_part){{p->up, c->up}, g->up, p->up_bias, g->up_bias, width, width};
    return count;
}

hr_status mlp_product(const mlp_call *call, const hr_rows *c, const hr_rows *a, const mlp_factor *b,
                      const void *bias, int64_t m, int64_t n, int64_t k,
                      const hr_gemm_config *config)
{
    const size_t bytes = call->layout.product_bytes;
    void *const workspace = mlp_at(call, call->layout.product);
    if (!b->few_bits)
        return hr_gemm(c, a, &b->rows, bias, m, n, k, config, workspace, bytes, call->exec);
    hr_linear_config linear = mlp_linear_config(&call->config);
    if (config->beta != 0.0)
        linear.addend = config->addend.data ? config->addend : *c;
    return config->transpose_b
               ? hr_linear_forward(c, a, b->few_bits, bias, m, &linear, workspace, bytes,
                                   call->exec)
               : hr_linear_backward(c, a, b->few_bits, m, &linear, workspace, bytes, call->exec);
}

hr_status mlp_gate_up(const mlp_call *call, const hr_rows *gate_up, const hr_rows *normed,
                      int64_t rows)
{
    gate_up_part parts[2];
    const int count = mlp_parts(call, NULL, parts);
    hr_gemm_config config = mlp_gemm_config(&call->config);
    config.transpose_b = 1;
    for (int i = 0; i < count; i++) {
        const hr_rows to = mlp_columns_from(call, gate_up, parts[i].first);
        HR_RUN(mlp_product(call, &to, normed, &parts[i].matrix, parts[i].bias, rows, parts[i].width,
                           call->sizes.hidden, &config));
    }
    return HR_OK;
}

hr_glu_config mlp_glu_config(const mlp_call *call)
{
    hr_glu_config config = HR_GLU_CONFIG_INIT;
    config.activation = call->config.activation;
    config.dtype = call->config.dtype;
    return config;
}

hr_status mlp_activate(const mlp_call *call, const hr_rows *activated, const hr_rows *gate_up,
                       int64_t rows)
{
    const hr_glu_config config = mlp_glu_config(call);
    const hr_rows up = mlp_columns_from(call, gate_up, call->sizes.features);
    return hr_glu_forward(activated, gate_up, call->config.gated ? &up : NULL, rows,
                          call->sizes.features, &config, call->exec);
}
