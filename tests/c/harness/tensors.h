// A list of tensors in the memory of a backend, filled by a function, as an argument of a call.
#pragma once

#include <deque>
#include <functional>
#include <string>

#include "tests/c/harness/backend.h"
#include "tests/c/harness/elements.h"

class Tensors
{
  public:
    using Value = std::function<double(size_t tensor, size_t i)>;

    // Tensor k has the type types[k % types.size()] and begins `shift` elements past an aligned
    // address.
    Tensors(Backend &backend, const std::vector<int64_t> &numel, const std::vector<hr_dtype> &types,
            size_t shift, const Value &value);
    Tensors(const Tensors &) = delete;

    std::vector<double> values(size_t tensor) const; // as they are now
    void put(size_t tensor, const std::vector<double> &values) const;

    // The argument, for a test to spoil.
    std::vector<void *> data;
    std::vector<int64_t> numel;
    std::vector<hr_dtype> dtype;
    hr_tensor_list list;
    const hr_tensor_list *argument = &list;

    std::vector<Buffer> buffers;
};

// Those whose argument is not NULL.
std::vector<Tensors *> given_lists(std::deque<Tensors> &all);

// The shift of one list of a case: `shifted` has a bit for each list, in the order of the call.
template <class Case> size_t shift_of(const Case &c, int list)
{
    return c.shifted >> list & 1 ? c.shift : 0;
}

// The bytes of all of them, one after another, and whether all guards are whole.
std::vector<uint8_t> image_of(const std::vector<const std::vector<Buffer> *> &groups);
bool intact(const std::vector<const std::vector<Buffer> *> &groups);
// Copies the content of all, from whatever backend.
void take(const std::vector<const std::vector<Buffer> *> &to,
          const std::vector<const std::vector<Buffer> *> &from);

// Uniform in [-1, 1), the same on every machine.
double noise(uint64_t a, uint64_t b);

// |got - exact| in units in the last place of binary32 at the exact value. 0 where both are NaN, or
// the exact value rounds to the infinity that was got; infinite where only one is such.
double ulps(float got, long double exact);

// Noise in [-size, size), different for each list; `special`: with NaN, infinities, denormals, huge
// and tiny values among it.
Tensors::Value made_up(size_t list, bool special, double size);

std::vector<hr_dtype> float_types();
std::string words_of(const std::vector<hr_dtype> &types); // "f32, bf16 or f16"
