// Memory, calls, warps and barriers of PTX on the emulator's machine, and what it reports: a fault in
// each kernel, beside its corrected twin.
#include "tests/ptx/try.h"

#include "tests/c/emulator/caught.h"

namespace
{
using Words = Device<uint32_t>;

uint64_t at(const Words &words)
{
    return reinterpret_cast<uint64_t>(static_cast<uint32_t *>(words));
}

// %r0 is the first parameter, %r1 the thread, %r2 the address of its word.
const char *const kStart =
    "ld.param.u64 %r0, [p]; cvta.to.global.u64 %r0, %r0;\n"
    "mov.u32 %r1, %tid.x; mul.wide.u32 %r2, %r1, 4; add.s64 %r2, %r0, %r2;\n";

std::string kernel(const std::string &body)
{
    return kStart + body;
}

// The report of a launch of 64 threads on 256 zeroed words, "" if there is none.
std::string report(const std::string &body, uint32_t threads = 64)
{
    const Text text(kernel(body));
    const Words words(256);
    text.launch({at(words)}, 1, threads, 64);
    (void)cudaGetLastError();
    return hr_emu::take_report();
}

#define EXPECT_REPORT(body, pattern)                                                               \
    for (uint64_t seed = 1; seed <= 3; seed++) {                                                   \
        hr_emu::set_seed(seed);                                                                    \
        const std::string said = report(body);                                                     \
        EXPECT_TRUE(std::string(pattern).empty() ? said.empty() : matches(said, pattern)) << said; \
    }
// Runs a kernel of a module with several functions, whose one parameter is where it writes two words.
void expect_words(const std::string &text, uint32_t first, uint32_t second)
{
    char why[256] = "";
    ptx_module *const module = ptx_parse(text.data(), text.size(), "calls", why, sizeof why);
    ASSERT_NE(module, nullptr) << why;
    ptx_machine::add_module(module);
    const Words words(2);
    alignas(16) uint64_t parameters[1] = {at(words)};
    ptx_machine::launch(ptx_find(module, "kernel"), 1, 1, reinterpret_cast<char *>(parameters), 0);
    EXPECT_EQ(words[0], first);
    EXPECT_EQ(words[1], second);
    ptx_machine::forget_module(module);
    ptx_free(module);
}

} // namespace

TEST(PtxMachine, VectorsAndParts)
{
    const Text text(kernel("ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%r0];\n"
                           "mov.b64 %r8, {%r4, %r5}; mov.b64 {%r9, %r10}, %r8;\n"
                           "mov.b32 {%r11, %r12}, %r6;\n"
                           "st.global.v2.u32 [%r0+16], {%r10, %r9};\n"
                           "st.global.u64 [%r0+24], %r8; st.global.u16 [%r0+32], %r12;\n"
                           "ld.global.s8 %r13, [%r0+3]; st.global.u32 [%r0+36], %r13;"));
    const uint32_t given[4] = {0x80000001, 2, 0x00030004, 5};
    const Words words(16);
    cudaMemcpy(words, given, sizeof given, cudaMemcpyHostToDevice);
    text.launch({at(words)}, 1, 1);
    EXPECT_EQ(words[4], 2u);
    EXPECT_EQ(words[5], 0x80000001u);
    EXPECT_EQ(words[6], 0x80000001u);
    EXPECT_EQ(words[7], 2u);
    EXPECT_EQ(words[8], 3u);
    EXPECT_EQ(words[9], 0xFFFFFF80u);
}

TEST(PtxMachine, CallsCopyParameters)
{
    const std::string text =
        ".version 9.0\n.target sm_90\n.address_size 64\n"
        ".func (.param .align 4 .b8 out[8]) twice(.param .b32 x, .param .align 4 .b8 y[4]);\n"
        ".entry kernel(.param .u64 p) { .reg .b64 %r<9>;\n"
        "ld.param.u64 %r0, [p];\n"
        "{ .param .b32 param0; st.param.b32 [param0+0], 5;\n"
        ".param .align 4 .b8 param1[4]; st.param.b32 [param1], 7;\n"
        ".param .align 4 .b8 retval0[8];\n"
        "call.uni (retval0), twice, (param0, param1);\n"
        "ld.param.b32 %r1, [retval0]; ld.param.b32 %r2, [retval0+4]; }\n"
        "st.global.v2.u32 [%r0], {%r1, %r2}; ret; }\n"
        ".func (.param .align 4 .b8 out[8]) twice(.param .b32 x, .param .align 4 .b8 y[4])\n"
        "{ .reg .b32 %r<9>; ld.param.u32 %r0, [x]; ld.param.u32 %r1, [y];\n"
        "add.s32 %r0, %r0, %r0; mul.lo.s32 %r1, %r1, 2;\n"
        "st.param.b32 [out], %r0; st.param.b32 [out+4], %r1; ret; }\n";
    expect_words(text, 10u, 14u);
}

TEST(PtxMachine, CallsMayWriteLocalMemoryOfTheCaller)
{
    const std::string text =
        ".version 9.0\n.target sm_90\n.address_size 64\n"
        ".func fill(.param .b64 to) { .reg .b64 %r<3>; ld.param.u64 %r0, [to];\n"
        "st.u32 [%r0], 3; cvta.to.local.u64 %r1, %r0; st.local.u32 [%r1+4], 4; ret; }\n"
        ".entry kernel(.param .u64 p) { .reg .b64 %r<9>; .local .align 8 .b8 depot[8];\n"
        "ld.param.u64 %r0, [p]; mov.u64 %r1, depot; cvta.local.u64 %r2, %r1;\n"
        "{ .param .b64 param0; st.param.b64 [param0], %r2; call.uni fill, (param0); }\n"
        "ld.local.v2.u32 {%r3, %r4}, [%r1]; st.global.v2.u32 [%r0], {%r3, %r4}; ret; }\n";
    expect_words(text, 3u, 4u);
}

TEST(PtxMachine, WarpsExchange)
{
    const Text text(
        kernel("shfl.sync.bfly.b32 %r4|%p1, %r1, 5, 31, -1;\n"
               "shfl.sync.down.b32 %r5|%p2, %r1, 3, 0x181f, -1;\n" // of 8 lanes
               "selp.b32 %r6, 1000, 0, %p2; add.s32 %r5, %r5, %r6;\n"
               "shfl.sync.idx.b32 %r9, %r1, 9, 31, -1;\n"
               "shfl.sync.up.b32 %r10, %r1, 2, 0, -1;\n"
               "setp.lt.u32 %p3, %r1, 7; vote.sync.ballot.b32 %r7, %p3, -1;\n"
               "vote.sync.any.pred %p4, %p3, -1; vote.sync.all.pred %p5, %p3, -1;\n"
               "selp.b32 %r8, 1, 0, %p4; selp.b32 %r6, 2, 0, %p5; add.s32 %r8, %r8, %r6;\n"
               "mul.wide.u32 %r3, %r1, 20; add.s64 %r2, %r2, %r3;\n"
               "st.global.v2.u32 [%r2], {%r4, %r5}; st.global.v2.u32 [%r2+8], {%r7, %r8};\n"
               "st.global.v2.u32 [%r2+16], {%r9, %r10}; bar.warp.sync -1;"));
    const Words words(6 * 32);
    text.launch({at(words)});
    EXPECT_EQ(hr_emu::take_report(), "");
    for (uint32_t lane = 0; lane < 32; lane++) {
        EXPECT_EQ(words[6 * lane], lane ^ 5);
        EXPECT_EQ(words[6 * lane + 1], lane % 8 < 5 ? lane + 3 + 1000 : lane);
        EXPECT_EQ(words[6 * lane + 2], 0x7Fu);
        EXPECT_EQ(words[6 * lane + 3], 1u);
        EXPECT_EQ(words[6 * lane + 4], 9u);
        EXPECT_EQ(words[6 * lane + 5], lane < 2 ? lane : lane - 2);
    }
}

TEST(PtxMachine, AtomicsOfAllThreads)
{
    const Text text(
        kernel("atom.global.add.u32 %r4, [%r0], 3; red.global.max.u32 [%r0+4], %r1;\n"
               "atom.global.min.s32 %r5, [%r0+8], -7; atom.global.cas.b32 %r6, [%r0+12], 0, 9;\n"
               "red.global.or.b32 [%r0+16], %r1; atom.global.exch.b32 %r7, [%r0+20], 4;\n"
               "red.global.add.f32 [%r0+24], 0f3F800000;"));
    const Words words(8);
    text.launch({at(words)}, 2, 64);
    EXPECT_EQ(hr_emu::take_report(), "");
    const uint32_t wanted[] = {3 * 128, 63, uint32_t(-7), 9, 63, 4, uint32_t(bits(128.0f))};
    for (int k = 0; k < 7; k++)
        EXPECT_EQ(words[k], wanted[k]) << k;
}

TEST(PtxMachine, SharedMemoryHasAWindowAndGenericAddresses)
{
    EXPECT_REPORT(
        ".shared .align 4 .b8 s[256]; mov.u64 %r4, s; mul.wide.u32 %r5, %r1, 4;\n"
        "add.s64 %r4, %r4, %r5; cvta.shared.u64 %r6, %r4; st.u32 [%r6], %r1; bar.sync 0;\n"
        "xor.b64 %r4, %r4, 4; ld.shared.u32 %r7, [%r4]; xor.b32 %r8, %r7, %r1;\n"
        "setp.eq.u32 %p1, %r8, 1; @%p1 bra $fine; trap;\n$fine:",
        "");
}

TEST(PtxMachine, WhatIsNotPtxIsRefused)
{
    for (const char *const line :
         {"add.rn.f16 %r1, %r1, %r1;", "bra $nowhere;", "mov.u32 %r99, 1;",
          "mov.u32 %undeclared, 1;", "add.s32 %r1, %r2;", "setp.ltu.s32 %p1, 1, 2;"}) {
        const std::string text =
            std::string(".version 9.0\n.target sm_90\n.address_size 64\n"
                        ".entry kernel() { .reg .b64 %r<4>; .reg .pred %p<2>;\n") +
            line + "\nret; }";
        char why[256] = "";
        ptx_module *const module = ptx_parse(text.data(), text.size(), "test", why, sizeof why);
        EXPECT_EQ(module, nullptr) << line;
        EXPECT_TRUE(matches(why, "^test:[56]: ")) << why;
    }
}

// ---- What is reported ---------------------------------------------------------------------------

TEST(PtxReports, MisalignedAccess)
{
    EXPECT_REPORT("ld.global.u32 %r4, [%r0+2];",
                  "misaligned access to 4 bytes at .*\n.*test:[0-9]+: ld");
    EXPECT_REPORT("ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%r0+8];",
                  "misaligned access to 16 bytes");
    EXPECT_REPORT("ld.global.v2.u32 {%r4, %r5}, [%r0+8];", "");
}

TEST(PtxReports, OutOfBounds)
{
    EXPECT_REPORT("ld.global.u32 %r4, [%r0+1024];", "out-of-bounds access");
    EXPECT_REPORT("st.global.u32 [%r0+-4], 1;", "out-of-bounds access");
    EXPECT_REPORT("mov.u64 %r3, 64; st.shared.u32 [%r3], 1;",
                  "out-of-bounds access .* shared memory");
    EXPECT_REPORT("mov.u64 %r3, p; ld.param.u32 %r4, [%r3+64];", "not of the instruction's space");
    EXPECT_REPORT("mov.u64 %r3, p; st.u32 [%r3], 1;", "constant");
    EXPECT_REPORT("mov.u64 %r3, 0; cvta.shared.u64 %r3, %r3; ld.global.u32 %r4, [%r3];",
                  "not of the instruction's space");
}

TEST(PtxReports, WhatWasNeverWritten)
{
    EXPECT_REPORT("st.global.u32 [%r2], %r9;", "a register that was never written\n.*st.global");
    EXPECT_REPORT("add.s64 %r8, %r9, %r0; ld.global.u32 %r4, [%r8];", "never written");
    EXPECT_REPORT("setp.eq.u32 %p1, %r9, 0; @%p1 bra $end;\n$end:", "branch on a register");
    EXPECT_REPORT("mov.u32 %r8, %r9; setp.lt.u32 %p1, %r1, 99; selp.b32 %r8, 1, %r8, %p1;\n"
                  "st.global.u32 [%r2], %r8;",
                  "");
    EXPECT_REPORT("mov.u64 %r3, 0; ld.shared.u32 %r4, [%r3];",
                  "uninitialized read of shared memory");
    EXPECT_REPORT(".local .align 4 .b8 l[4]; mov.u64 %r3, l; ld.local.u32 %r4, [%r3];",
                  "local memory");
    EXPECT_REPORT("{ .param .b32 q; ld.param.b32 %r4, [q]; }", "parameter of a call");
}

TEST(PtxReports, Races)
{
    const std::string start =
        "and.b32 %r4, %r1, 15; mul.wide.u32 %r4, %r4, 4;\n"
        "setp.gt.u32 %p1, %r1, 15; @%p1 bra $wait; st.shared.u32 [%r4], %r1;\n$wait:\n";
    const std::string end = "xor.b64 %r4, %r4, 4; ld.shared.u32 %r5, [%r4];";
    EXPECT_REPORT(start + end, "race on shared memory|uninitialized read of shared memory");
    EXPECT_REPORT(start + "bar.sync 0;" + end, "");
    EXPECT_REPORT("st.global.u32 [%r0], 1;", "race on device memory");
    EXPECT_REPORT("ld.global.u32 %r4, [%r2]; st.global.u32 [%r2], %r4;", "");
}

TEST(PtxReports, BarriersAndWarps)
{
    EXPECT_REPORT("setp.lt.u32 %p1, %r1, 9; @%p1 bra $out; bar.sync 0;\n$out:",
                  "divergent barrier");
    EXPECT_REPORT(
        "setp.lt.u32 %p1, %r1, 9; @%p1 bra $out; shfl.sync.bfly.b32 %r4, %r1, 1, 31, 0xF;\n$out:",
        "bad warp mask: lane");
    EXPECT_REPORT("and.b32 %r4, %r1, 31; setp.gt.u32 %p1, %r4, 15; @%p1 bra $out;\n"
                  "shfl.sync.bfly.b32 %r4, %r1, 16, 31, 0xFFFF;\n$out:",
                  "bad warp mask: .* reads lane");
    EXPECT_REPORT("setp.eq.u32 %p1, %r1, 9; @%p1 bra $other; bar.warp.sync -1; bra $out;\n"
                  "$other: vote.sync.any.pred %p2, %p1, -1;\n$out:",
                  "deadlock");
    EXPECT_REPORT("div.u32 %r4, %r1, 0;", "division of an integer by zero");
}
