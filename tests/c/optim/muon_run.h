// Calls of hr_muon_momentum() and hr_muon_update() on made-up data: what to vary, and everything a
// test wants to look at or spoil.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>

#include "tests/c/harness/tensors.h"
#include "tests/c/optim/one_moment.h"
#include "tests/c/weights/weights_data.h"

struct MuonCase {
    std::vector<std::array<int64_t, 2>> shapes = {{3, 5}}; // rows and columns
    bool turned = false; // matrices with more rows than columns are columns of the update
    int64_t gap = 0;     // elements between its lines
    hr_dtype grad = HR_F32, moment = HR_F32, update = HR_F32, param = HR_F32; // moment u8: codes
    bool nesterov = true, maximize = false, row_vars = false;
    double momentum = 0.95;
    int32_t block_size = 256;
    std::optional<hr_dtype> steps, lr_on_device;
    std::optional<float> grad_scale, found_inf, clip_coef;
    std::optional<WeightsData::Ask> weights;
    size_t shift = 0; // elements past an aligned address
    bool special = false;
};

inline std::ostream &operator<<(std::ostream &out, const MuonCase &c)
{
    for (const auto &[rows, cols] : c.shapes)
        out << rows << " x " << cols << ", ";
    out << name_of(c.grad) << " gradients, " << name_of(c.moment) << " moments, "
        << name_of(c.update) << " updates, " << name_of(c.param) << " params, gap " << c.gap
        << ", shift " << c.shift << ", momentum " << c.momentum << ", blocks of " << c.block_size;
    if (c.weights)
        out << ", weights mode " << c.weights->mode << (c.weights->stalled ? ", counted" : "");
    return out << (c.turned ? ", turned" : "") << (c.nesterov ? ", nesterov" : "")
               << (c.maximize ? ", maximize" : "") << (c.row_vars ? ", row_vars" : "")
               << (c.special ? ", special values" : "");
}

inline std::vector<hr_muon_matrix> matrices_of(const MuonCase &c)
{
    std::vector<hr_muon_matrix> all;
    for (const auto &[rows, cols] : c.shapes) {
        const bool turned = c.turned && rows > cols;
        all.push_back({rows, cols, (turned ? rows : cols) + c.gap, turned});
    }
    return all;
}

// The offset of element (i / cols, i % cols) of an update.
inline size_t place_of(const hr_muon_matrix &m, size_t i)
{
    const int64_t row = int64_t(i) / m.cols, col = int64_t(i) % m.cols;
    return size_t(m.transposed ? col * m.stride + row : row * m.stride + col);
}

// What both calls have.
class MuonCall
{
  public:
    enum List { UPDATES, SQUARES, MOMENTS, ABSMAXS, GRADS, PARAMS, ROW_VARS, STEPS, LISTS };

    MuonCall(Backend &backend, const MuonCase &c) : matrices(matrices_of(c)), exec(backend.exec())
    {
        const hr_dtype types[LISTS] = {c.update, HR_F32,  c.moment, HR_F32,
                                       c.grad,   c.param, HR_F32,   c.steps.value_or(HR_F64)};
        std::vector<int64_t> numel;
        for (const hr_muon_matrix &m : matrices)
            numel.push_back(m.rows * m.cols);
        for (int l = 0; l < LISTS; l++) {
            std::vector<int64_t> own;
            for (size_t k = 0; k < numel.size(); k++) {
                const hr_muon_matrix &m = matrices[k];
                own.push_back(l == UPDATES    ? (m.transposed ? m.cols : m.rows) * m.stride
                              : l == SQUARES  ? 1
                              : l == ABSMAXS  ? hr_block_count(numel[k], c.block_size)
                              : l == ROW_VARS ? m.rows
                              : l == STEPS    ? 1
                                              : numel[k]);
            }
            if (l == SQUARES)
                own = {int64_t(numel.size())};
            const auto values = made_up(size_t(l), c.special && l != UPDATES, 1);
            tensors.emplace_back(backend, own, std::vector<hr_dtype>{types[l]},
                                 l == SQUARES ? 0 : c.shift, [&](size_t k, size_t i) {
                                     return l == ABSMAXS    ? 0.25 + double(i % 7)
                                            : l == ROW_VARS ? 0.5 + double(i % 5)
                                            : l == STEPS    ? double(k) + 2
                                            : l == MOMENTS && c.moment == HR_U8
                                                ? double((i * 37 + k * 11) % 256)
                                                : values(k, i);
                                 });
        }
        tensors[UPDATES].numel = numel;
        tensors[UPDATES].list.numel = tensors[UPDATES].numel.data();
        if (c.moment != HR_U8)
            tensors[ABSMAXS].argument = nullptr;
        if (!c.row_vars)
            tensors[ROW_VARS].argument = nullptr;
        if (!c.steps)
            tensors[STEPS].argument = nullptr;
        size_t bytes = 0;
        EXPECT_EQ(hr_muon_workspace(&bytes, matrices.data(), int64_t(matrices.size())), HR_OK);
        workspace_bytes = bytes;
        workspaces.emplace_back(backend, std::vector<uint8_t>(bytes, 0x77));
        workspace = workspaces[0].data();
        for (size_t k = 0; k < matrices.size(); k++)
            scales.push_back(0.5 + double(k));
    }
    MuonCall(const MuonCall &) = delete;

    const hr_tensor_list *list(List l) const
    {
        return tensors[l].argument;
    }
    std::vector<double> values(List l, size_t tensor) const
    {
        return tensors[l].values(tensor);
    }
    // Those of an update, in the order of the parameter.
    std::vector<double> update(size_t k) const
    {
        const std::vector<double> stored = values(UPDATES, k);
        std::vector<double> all(size_t(tensors[UPDATES].numel[k]));
        for (size_t i = 0; i < all.size(); i++)
            all[i] = stored[place_of(matrices[k], i)];
        return all;
    }
    std::vector<uint8_t> image() const // all but the workspace
    {
        return image_of(buffers(false));
    }
    bool whole() const
    {
        return intact(buffers(true));
    }
    const float *scalar(Backend &backend, std::optional<float> value)
    {
        if (!value)
            return nullptr;
        scalars.emplace_back(backend, encode({double(*value)}, HR_F32));
        return static_cast<const float *>(scalars.back().data());
    }

    std::vector<hr_muon_matrix> matrices;
    std::deque<Tensors> tensors;
    std::vector<Buffer> workspaces, scalars;
    std::vector<double> scales;
    void *workspace;
    size_t workspace_bytes;
    std::optional<WeightsData> weights;
    hr_exec exec;
    const hr_exec *exec_argument = &exec;
    const hr_muon_matrix *matrices_argument = matrices.data();

  private:
    std::vector<const std::vector<Buffer> *> buffers(bool with_workspace) const
    {
        std::vector<const std::vector<Buffer> *> all = {&scalars};
        for (const Tensors &list : tensors)
            all.push_back(&list.buffers);
        if (weights)
            all.push_back(&weights->buffers);
        if (with_workspace)
            all.push_back(&workspaces);
        return all;
    }
};

struct MuonMomentumRun : MuonCall {
    MuonMomentumRun(Backend &backend, const MuonCase &c) : MuonCall(backend, c)
    {
        config.step.maximize = c.maximize;
        config.step.grad_scale = scalar(backend, c.grad_scale);
        config.step.found_inf = scalar(backend, c.found_inf);
        config.step.clip_coef = scalar(backend, c.clip_coef);
        config.momentum = c.momentum;
        config.nesterov = c.nesterov;
        config.block_size = c.block_size;
        squares = static_cast<float *>(tensors[SQUARES].data[0]);
    }
    hr_status call() const
    {
        return hr_muon_momentum(list(UPDATES), squares, list(MOMENTS), list(ABSMAXS), list(GRADS),
                                matrices_argument, config_argument, workspace, workspace_bytes,
                                exec_argument);
    }

    float *squares;
    hr_muon_momentum_config config = HR_MUON_MOMENTUM_CONFIG_INIT;
    const hr_muon_momentum_config *config_argument = &config;
};

struct MuonUpdateRun : MuonCall {
    MuonUpdateRun(Backend &backend, const MuonCase &c) : MuonCall(backend, c)
    {
        config.step.lr = 0.25;
        config.step.t = 3;
        config.step.found_inf = scalar(backend, c.found_inf);
        if (c.lr_on_device) {
            scalars.emplace_back(backend, encode({0.25}, *c.lr_on_device));
            config.step.lr_ptr = scalars.back().data();
            config.step.lr_dtype = *c.lr_on_device;
            config.step.lr = -1; // not looked at
        }
        if (c.weights) {
            const Tensors &params = tensors[PARAMS];
            weights.emplace(backend, *c.weights, params.numel, params.dtype, params.buffers);
            config.step.weights = &weights->weights;
        }
        scales_argument = scales.data();
    }
    hr_status call() const
    {
        return hr_muon_update(list(PARAMS), list(ROW_VARS), list(STEPS), list(UPDATES),
                              matrices_argument, scales_argument, config_argument, workspace,
                              workspace_bytes, exec_argument);
    }

    hr_muon_update_config config = HR_MUON_UPDATE_CONFIG_INIT;
    const hr_muon_update_config *config_argument = &config;
    const double *scales_argument;
};

// Shapes of every path: runs and tiles, whole and cut, of one row, column and of none.
inline std::vector<std::array<int64_t, 2>> muon_shapes()
{
    return {{7, 300}, {70, 33}, {0, 4}, {1, 600}, {40, 256}, {300, 1}, {45, 264}, {33, 31}, {4, 0}};
}

// The types and layouts of both passes, over all shapes.
inline std::vector<MuonCase> muon_cases()
{
    std::vector<MuonCase> all;
    int turn = 0;
    for (const bool turned : {false, true})
        for (const int64_t gap : {0, 3, 8})
            for (const hr_dtype type : {HR_F32, HR_BF16, HR_F16}) {
                MuonCase c;
                c.shapes = muon_shapes();
                c.turned = turned;
                c.gap = gap;
                c.update = type;
                c.grad = turn % 2 ? HR_BF16 : HR_F32;
                c.moment = turn % 5 == 4 ? HR_BF16 : HR_F32;
                c.param = turn % 4 == 3 ? HR_F16 : turn % 4 == 1 ? HR_BF16 : HR_F32;
                c.nesterov = turn % 3 != 2;
                c.momentum = turn % 7 == 3 ? 0.25 : 0.95;
                c.maximize = turn % 6 == 5;
                c.shift = turn % 4 == 2;
                turn++;
                all.push_back(c);
            }
    return all;
}
