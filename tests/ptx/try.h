// One instruction, or a kernel of a few, for the executor's own tests.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "tests/ptx/machine.h"

// Text of PTX as a module, which knows its first entry.
class Text
{
  public:
    explicit Text(const std::string &body, int parameters = 8)
    {
        std::string text = ".version 9.0\n.target sm_90\n.address_size 64\n";
        text += ".entry kernel(.param .align 8 .b8 p[" + std::to_string(8 * parameters) + "])\n{\n";
        text += ".reg .pred %p<8>; .reg .b64 %r<24>;\n" + body + "\nret;\n}\n";
        char why[256] = "";
        module_ = ptx_parse(text.data(), text.size(), "test", why, sizeof why);
        EXPECT_NE(module_, nullptr) << why << "\n" << text;
        ptx_machine::add_module(module_);
        entry_ = ptx_find(module_, "kernel");
    }
    ~Text()
    {
        ptx_machine::forget_module(module_);
        ptx_free(module_);
    }
    Text(const Text &) = delete;

    // On the emulator's machine, on device memory.
    void launch(std::vector<uint64_t> parameters, dim3 grid = 1, dim3 block = 32,
                size_t dynamic_bytes = 0) const
    {
        alignas(16) char bytes[8 * 16] = {};
        memcpy(bytes, parameters.data(), 8 * parameters.size());
        ptx_machine::launch(entry_, grid, block, bytes, dynamic_bytes);
    }

    // One thread, away from the machine, which may touch memory of the host.
    void run(const uint64_t *parameters, uint64_t seed = 1) const
    {
        ptx_launch launch{};
        launch.entry = entry_;
        launch.parameters = const_cast<char *>(reinterpret_cast<const char *>(parameters));
        launch.seed = seed;
        ptx_thread thread{};
        thread.launch = &launch;
        ptx_run(&thread);
    }

  private:
    ptx_module *module_;
    const ptx_function *entry_;
};

// The 64 bits that an instruction makes of up to four registers of 64 bits. A source or the result
// whose type is pred is a predicate.
class Instruction
{
  public:
    explicit Instruction(const std::string &name, int sources, bool predicate = false)
        : text_(body(name, sources, predicate), 6)
    {
    }
    uint64_t operator()(uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0) const
    {
        alignas(16) uint64_t parameters[6] = {a, b, c, d, 0, 0};
        uint64_t result = 0x5A5A5A5A5A5A5A5A;
        parameters[4] = reinterpret_cast<uint64_t>(&result);
        text_.run(parameters, seed);
        return result;
    }
    uint64_t seed = 1;

  private:
    static std::string body(const std::string &name, int sources, bool predicate)
    {
        std::string text;
        for (int k = 0; k < 5; k++)
            text +=
                "ld.param.b64 %r" + std::to_string(k) + ", [p+" + std::to_string(8 * k) + "];\n";
        text += "setp.ne.b64 %p1, %r2, 0;\n"; // c as a predicate
        text += name + (predicate ? " %p0" : " %r10");
        for (int k = 0; k < sources; k++)
            text +=
                name.compare(0, 4, "selp") == 0 && k == 2 ? ", %p1" : ", %r" + std::to_string(k);
        text += ";\n";
        text += predicate ? "selp.b64 %r10, 1, 0, %p0;\n" : "";
        return text + "st.global.b64 [%r4], %r10;";
    }
    Text text_;
};

inline uint64_t bits(float x)
{
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}
inline uint64_t bits(double x)
{
    uint64_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}
inline float number32(uint64_t b)
{
    const uint32_t low = uint32_t(b);
    float x;
    memcpy(&x, &low, sizeof x);
    return x;
}
inline double number64(uint64_t b)
{
    double x;
    memcpy(&x, &b, sizeof x);
    return x;
}
