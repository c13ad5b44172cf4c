// What hr_gemm() makes of a cuBLASLt that is not there or fails, what it asks of it, and how often.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "capi/headroom.h"
#include "kernels/core/cublas.cuh"
#include "tests/c/emulator/caught.h"
#include "tests/c/emulator/cublasLt.h"

namespace
{
using hr_emu::cublas;

void *stray;

// Device memory of floats, all of them 1.
struct Ones {
    explicit Ones(size_t count)
    {
        const std::vector<float> ones(count, 1.0f);
        EXPECT_EQ(cudaMalloc(&data, count * 4), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(data, ones.data(), count * 4, cudaMemcpyHostToDevice), cudaSuccess);
    }
    ~Ones()
    {
        cudaFree(data);
    }
    float operator[](size_t i) const
    {
        float x = 0;
        EXPECT_EQ(cudaMemcpy(&x, data + i, 4, cudaMemcpyDeviceToHost), cudaSuccess);
        return x;
    }
    float *data = nullptr;
};

class Cublas : public testing::Test
{
  protected:
    void SetUp() override
    {
        cublas.refuses_one_in = 0;
    }
    void TearDown() override
    {
        cublas.fails = cublas.missing = nullptr;
        cublas.is_there = true;
        cublas.refuses_one_in = hr_emu::Cublas{}.refuses_one_in;
        EXPECT_EQ(cublas.descriptors, 0);
    }
    // C = A B, of k terms that are 1. Sizes are new in each test, so that nothing is known of them.
    hr_status multiply(int64_t k, const Ones *workspace = nullptr)
    {
        const hr_rows ra{a.data, 64}, rb{b.data, 8}, rc{c.data, 8};
        const hr_exec exec = {0, stream};
        return hr_gemm(&rc, &ra, &rb, nullptr, 8, 8, k, &config,
                       workspace ? workspace->data : nullptr, workspace ? 1024 : 0, &exec);
    }
    Ones a{512}, b{512}, c{64};
    hr_stream stream = nullptr;
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
};
} // namespace

TEST_F(Cublas, IsLookedForWhereItMayBe)
{
    cublas_api api;
    cublas.is_there = false;
    ASSERT_EQ(cublas_find(&api), HR_UNSUPPORTED);
    const std::string message = hr_last_error();
    for (const char *place : {"libcublasLt.so.13", "LD_LIBRARY_PATH", "CUDA_HOME",
                              "/usr/local/cuda/lib64", "nvidia-cublas"})
        EXPECT_NE(message.find(place), std::string::npos) << message;
    cublas.is_there = true;
    cublas.missing = "cublasLtMatmul";
    ASSERT_EQ(cublas_find(&api), HR_UNSUPPORTED);
    EXPECT_NE(std::string(hr_last_error()).find("has no cublasLtMatmul"), std::string::npos);
    cublas.missing = nullptr;
    EXPECT_EQ(cublas_find(&api), HR_OK) << hr_last_error();
}

TEST_F(Cublas, EachCallMayFail)
{
    int64_t k = 1;
    ASSERT_EQ(multiply(k), HR_OK) << hr_last_error(); // the handle exists from here on
    for (const char *function : {"cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute",
                                 "cublasLtMatrixLayoutCreate", "cublasLtMatmulPreferenceCreate",
                                 "cublasLtMatmulPreferenceSetAttribute",
                                 "cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"}) {
        cublas.fails = function;
        cublas.status = CUBLAS_STATUS_ALLOC_FAILED;
        k++;
        EXPECT_EQ(multiply(k), HR_CUDA_ERROR) << function;
        const std::string message = hr_last_error();
        EXPECT_NE(message.find(std::string(function) + " failed: allocation failed"),
                  std::string::npos)
            << message;
        EXPECT_EQ(c[0], 1) << function;
        cublas.fails = nullptr;
        EXPECT_EQ(multiply(k), HR_OK) << hr_last_error(); // a failure leaves nothing behind
        EXPECT_EQ(c[0], float(k));
        const float one = 1;
        cudaMemcpy(c.data, &one, 4, cudaMemcpyHostToDevice);
    }
    config.batch = 2, config.batch_stride_c = 32;
    const hr_rows ra{a.data, 64}, rb{b.data, 8}, rc{c.data, 8};
    const hr_exec exec = {0, nullptr};
    cublas.fails = "cublasLtMatrixLayoutSetAttribute";
    EXPECT_EQ(hr_gemm(&rc, &ra, &rb, nullptr, 4, 8, 9, &config, nullptr, 0, &exec), HR_CUDA_ERROR);
}

// Also a plain product may be refused; it is then tried in parts, for which there is no workspace.
TEST_F(Cublas, NoAlgorithmIsSaidSo)
{
    cublas.fails = "cublasLtMatmulAlgoGetHeuristic";
    cublas.status = CUBLAS_STATUS_NOT_SUPPORTED;
    EXPECT_EQ(multiply(20), HR_UNSUPPORTED);
    EXPECT_NE(std::string(hr_last_error()).find("workspace_bytes is 0"), std::string::npos)
        << hr_last_error();
    Ones workspace(256);
    EXPECT_EQ(multiply(20, &workspace), HR_UNSUPPORTED);
    EXPECT_NE(std::string(hr_last_error()).find("no algorithm for m 8, n 8, k 20"),
              std::string::npos)
        << hr_last_error();
    EXPECT_EQ(c[0], 1);
}

// What is refused once is not asked for again.
TEST_F(Cublas, ARefusedProductIsDoneInParts)
{
    cublas.refuses_one_in = 1;
    config.dtype = config.out_dtype = HR_BF16; // in binary32 a plain product is never refused
    Ones workspace(256), bias(8);
    const auto run = [&](const void *vector, size_t bytes) {
        const hr_rows ra{a.data, 64}, rb{b.data, 8}, rc{c.data, 8};
        const hr_exec exec = {0, stream};
        return hr_gemm(&rc, &ra, &rb, vector, 8, 8, 21, &config, workspace.data, bytes, &exec);
    };
    for (const void *vector : {static_cast<const void *>(nullptr), (const void *)bias.data}) {
        const int before = cublas.heuristics;
        ASSERT_EQ(run(vector, 1024), HR_OK) << hr_last_error();
        const int asked = vector ? 1 : 2; // at once, and a part, which is the same with a bias
        EXPECT_EQ(cublas.heuristics, before + asked);
        ASSERT_EQ(run(vector, 1024), HR_OK);
        EXPECT_EQ(cublas.heuristics, before + asked);
    }
}

// Slices of flat parameters begin anywhere, and cuBLASLt reads 16 bytes at a time.
TEST_F(Cublas, ABiasMayLieAnywhere)
{
    Ones workspace(256), bias(12);
    for (const size_t bytes : {size_t{1024}, size_t{512}, size_t{0}})
        for (const int shift : {0, 1, 2, 3}) {
            const hr_rows ra{a.data, 64}, rb{b.data, 8}, rc{c.data, 8};
            const hr_exec exec = {0, stream};
            const hr_status status = hr_gemm(&rc, &ra, &rb, bias.data + shift, 8, 8, 22, &config,
                                             workspace.data, bytes, &exec);
            EXPECT_EQ(status, HR_OK) << hr_last_error();
            EXPECT_EQ(c[63], 23);
        }
}

// The first product of a process makes a handle, which allocates.
TEST(CublasDeathTest, TheFirstProductMayBeCaptured)
{
    GTEST_FLAG_SET(death_test_style, "threadsafe"); // a process of its own, from the beginning
    const auto first = [] {
        const Ones a(64), b(64), c(64);
        const hr_rows ra{a.data, 8}, rb{b.data, 8}, rc{c.data, 8};
        const hr_exec exec = {0, nullptr};
        const hr_gemm_config config = HR_GEMM_CONFIG_INIT;
        hr_emu::pretend_capture(true);
        const hr_status status =
            hr_gemm(&rc, &ra, &rb, nullptr, 8, 8, 8, &config, nullptr, 0, &exec);
        const bool is_refused = cudaMalloc(&stray, 4) != cudaSuccess; // as before the product
        hr_emu::pretend_capture(false);
        hr_emu::take_report();
        std::fprintf(stderr, "%s, %g", hr_status_string(status), c[9]);
        std::exit(status == HR_OK && is_refused ? 0 : 1);
    };
    EXPECT_EXIT(first(), testing::ExitedWithCode(0), "ok, 8");
}

TEST_F(Cublas, AnAlgorithmIsChosenOncePerProblem)
{
    const int before = cublas.heuristics;
    for (int i = 0; i < 3; i++)
        ASSERT_EQ(multiply(30), HR_OK) << hr_last_error();
    EXPECT_EQ(cublas.heuristics, before + 1);
    config.allow_tf32 = 1;
    ASSERT_EQ(multiply(30), HR_OK);
    EXPECT_EQ(cublas.compute, CUBLAS_COMPUTE_32F_FAST_TF32);
    config.allow_tf32 = 0, config.alpha = 2;
    ASSERT_EQ(multiply(30), HR_OK); // alpha does not matter
    EXPECT_EQ(cublas.compute, CUBLAS_COMPUTE_32F);
    EXPECT_EQ(cublas.heuristics, before + 2);
}

// Each difference to the first product is a problem of its own.
TEST_F(Cublas, AllThatAChoiceDependsOnIsAskedFor)
{
    struct Call {
        int64_t m = 4, n = 4, k = 4, lda = 16, ldb = 16, ldc = 16, batch = 2;
        int64_t stride_a = 64, stride_b = 64, stride_c = 64;
        size_t shift_a = 0, shift_b = 0, shift_c = 0, workspace = 512;
        int transpose_a = 0, transpose_b = 0;
        float *bias = nullptr;
    };
    Ones out(512), workspace(256), bias(8);
    const auto run = [&](const Call &call) {
        const hr_rows ra{a.data + call.shift_a, call.lda}, rb{b.data + call.shift_b, call.ldb};
        const hr_rows rc{out.data + call.shift_c, call.ldc};
        const hr_exec exec = {0, nullptr};
        config.batch = call.batch, config.batch_stride_a = call.stride_a;
        config.batch_stride_b = call.stride_b, config.batch_stride_c = call.stride_c;
        config.transpose_a = call.transpose_a, config.transpose_b = call.transpose_b;
        const int before = cublas.heuristics;
        EXPECT_EQ(hr_gemm(&rc, &ra, &rb, call.bias, call.m, call.n, call.k, &config, workspace.data,
                          call.workspace, &exec),
                  HR_OK)
            << hr_last_error();
        return cublas.heuristics - before;
    };
    const Call first;
    EXPECT_EQ(run(first), 1);
    EXPECT_EQ(run(first), 0);
    const std::vector<void (*)(Call &)> changes = {
        [](Call &c) { c.m = 3; },           [](Call &c) { c.n = 3; },
        [](Call &c) { c.k = 3; },           [](Call &c) { c.lda = 8; },
        [](Call &c) { c.ldb = 8; },         [](Call &c) { c.ldc = 8; },
        [](Call &c) { c.batch = 3; },       [](Call &c) { c.stride_a = 32; },
        [](Call &c) { c.stride_b = 32; },   [](Call &c) { c.stride_c = 128; },
        [](Call &c) { c.shift_a = 1; },     [](Call &c) { c.shift_b = 1; },
        [](Call &c) { c.shift_c = 1; },     [](Call &c) { c.workspace = 256; },
        [](Call &c) { c.transpose_a = 1; }, [](Call &c) { c.transpose_b = 1; },
    };
    for (size_t i = 0; i < changes.size(); i++) {
        Call other;
        changes[i](other);
        EXPECT_EQ(run(other), 1) << i;
    }
    Call with_bias;
    with_bias.bias = bias.data;
    EXPECT_EQ(run(with_bias), 1);
    with_bias.bias = bias.data + 4; // also at a multiple of 16 bytes
    EXPECT_EQ(run(with_bias), 0);
}

TEST_F(Cublas, SettingsAreThoseOfTheCall)
{
    ASSERT_EQ(multiply(40), HR_OK);
    const uint32_t whole = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    EXPECT_EQ(cublas.reductions, whole); // never in place: the order of those changes
    config.allow_reduced_precision_reduction = 1;
    ASSERT_EQ(multiply(40), HR_OK);
    EXPECT_EQ(cublas.reductions, whole | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE);
    config.deterministic = 1;
    ASSERT_EQ(multiply(40), HR_OK);
    EXPECT_EQ(cublas.reductions, uint32_t(CUBLASLT_REDUCTION_SCHEME_NONE));
    EXPECT_EQ(cublas.most_workspace, 0u);
    int somewhere = 0;
    stream = reinterpret_cast<hr_stream>(&somewhere);
    ASSERT_EQ(multiply(40), HR_OK);
    EXPECT_EQ(cublas.stream, stream);
}

// The stand-in sees what a GPU would let pass.
TEST_F(Cublas, MistakesAreReported)
{
    const hr_rows ra{a.data, 64}, rb{b.data + 500, 8}, rc{c.data, 8}; // B ends beyond its memory
    const hr_exec exec = {0, nullptr};
    EXPECT_EQ(hr_gemm(&rc, &ra, &rb, nullptr, 8, 8, 8, &config, nullptr, 0, &exec), HR_CUDA_ERROR);
    EXPECT_NE(hr_emu::take_report().find("is not in one allocation"), std::string::npos);
    cudaGetLastError();
}
