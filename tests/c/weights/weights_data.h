// hr_weights for a list of parameters, with made-up residuals, for the runs of optimizers.
#pragma once

#include "tests/c/harness/backend.h"

struct WeightsData {
    struct Ask {
        hr_weights_mode mode = HR_WEIGHTS_NEAREST;
        bool places = false, stalled = false; // cut from wholes; count
        size_t shift = 0;                     // elements past an aligned address
        bool zero_residuals = false;
    };

    WeightsData(Backend &backend, const Ask &ask, const std::vector<int64_t> &numel,
                const std::vector<hr_dtype> &params);
    WeightsData(const WeightsData &) = delete;

    // The residuals, and the counter if it was asked for.
    std::vector<Buffer> buffers;
    std::vector<void *> data;
    std::vector<int64_t> numel;
    std::vector<hr_dtype> dtype;
    hr_tensor_list residuals;
    std::vector<uint64_t> seeds;
    std::vector<hr_place> places;
    hr_weights weights = HR_WEIGHTS_INIT;
};
