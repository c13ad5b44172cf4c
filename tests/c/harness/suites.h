// suites.h: what is asked of every op on lists of tensors, written once. An op describes itself:
//
//     struct Op {
//         using Case = ...;                            // what can be varied: `numel`, and more
//         using Run = ...;                             // a call on made-up data: Run(backend, case)
//         static void expect(Backend &, const Case &); // makes the call, and checks what it leaves
//         static std::vector<Case> list_cases();       // to be called on lists of every shape,
//         static std::vector<int64_t> many();          // of so many tensors too: see one launch
//         static Case everything();                    // a call with every argument, in three
//                                                      // tensors, of which the last has 300 elements
//         static std::vector<ListRule<Run>> rules();   // what it says of its lists
//         static BadInputs<Run> refused();             // and what else it refuses
//         static std::vector<Case> bit_cases();
//     };
//
// LISTS_SUITE(Op), BAD_INPUTS_SUITE(Op) and BITS_SUITE(Op) make tests of it on every backend.
// list_op.h describes the plainest ops in a few lines.
//
// A Run has call(), image(), whole() and lists(), the lists that it was given; and `config`,
// `config_argument`, `exec` and `exec_argument`, which a test may spoil.
#pragma once

#include <iterator>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"

// ---- Lists -------------------------------------------------------------------------------------------

// An op whose tensors do not touch each other leaves each as it does alone, on the CPU.
template <class Op> void expect_independent(Backend &backend, const typename Op::Case &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const typename Op::Run together(backend, c);
    ASSERT_EQ(together.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(together.whole());
    typename Op::Run one_by_one(cpu_backend(), c);
    for (size_t k = 0; k < c.numel.size(); k++) {
        Op::narrow(one_by_one, k);
        ASSERT_EQ(one_by_one.call(), HR_OK) << hr_last_error();
    }
    EXPECT_EQ(together.image(), one_by_one.image());
}

// Leaves only tensor k in every list of a run.
template <class Run> void narrow_lists(Run &run, size_t k)
{
    for (Tensors *t : run.lists())
        t->list = {1, &t->data[k], &t->numel[k], &t->dtype[k]};
}

template <class Op> void empty_tensors_anywhere(Backend &backend)
{
    for (typename Op::Case c : Op::list_cases())
        for (int empty = 0; empty < 16; empty++) {
            c.numel = {5, 300, 16385, 9};
            for (size_t k = 0; k < 4; k++)
                if (empty >> k & 1)
                    c.numel[k] = 0;
            Op::expect(backend, c);
        }
}

template <class Op> void an_empty_tensor_may_be_null(Backend &backend)
{
    for (typename Op::Case c : Op::list_cases())
        for (size_t empty = 0; empty < 3; empty++) {
            c.numel = {4, 4, 4};
            c.numel[empty] = 0;
            typename Op::Run with(backend, c), without(backend, c);
            for (Tensors *list : without.lists())
                if (list->numel[empty] == 0)
                    list->data[empty] = nullptr;
            ASSERT_EQ(with.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(without.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(with.image(), without.image());
        }
}

template <class Op> void an_empty_list_needs_no_arrays(Backend &backend)
{
    for (typename Op::Case c : Op::list_cases()) {
        c.numel = {};
        Op::expect(backend, c);
        typename Op::Run run(backend, c);
        for (Tensors *list : run.lists())
            list->list = {0, nullptr, nullptr, nullptr};
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    }
}

// More than one launch holds: where most are empty or few, where whole launches are, and where the
// first and the last begin or end with tensors that are not.
template <class Op> void many_tensors(Backend &backend)
{
    using Size = int64_t (*)(int64_t k, int64_t count);
    const Size sizes[] = {
        [](int64_t k, int64_t) -> int64_t { return k * 7 % 11; },
        [](int64_t k, int64_t) -> int64_t { return k * 7 % 11 < 3 ? k % 37 : 0; },
        [](int64_t k, int64_t count) -> int64_t { return k == 0 || k + 1 == count ? 16385 : 0; },
        [](int64_t, int64_t) -> int64_t { return 0; },
    };
    const std::vector<typename Op::Case> cases = Op::list_cases();
    size_t turn = 0; // of the cases: where few are empty all are made, elsewhere one
    for (const int64_t count : Op::many()) {
        turn++;
        for (size_t s = 0; s < std::size(sizes); s++)
            for (size_t i = 0; i < cases.size(); i++) {
                if (s > 0 && (count < 100 || (s + turn) % cases.size() != i))
                    continue;
                typename Op::Case c = cases[i];
                c.numel.clear();
                for (int64_t k = 0; k < count; k++)
                    c.numel.push_back(sizes[s](k, count));
                Op::expect(backend, c);
            }
    }
}

template <class Op> void large_and_small_together(Backend &backend)
{
    for (typename Op::Case c : Op::list_cases()) {
        c.numel = {3, 40001, 0, 16383, 16384, 16385, 1, 511, 513};
        Op::expect(backend, c);
    }
}

#define LISTS_SUITE(Op)                              \
    using Op##Lists = OnBackend;                     \
    ON_EVERY_BACKEND(Op##Lists);                     \
    TEST_P(Op##Lists, EmptyTensorsAnywhere)          \
    {                                                \
        empty_tensors_anywhere<Op>(*backend);        \
    }                                                \
    TEST_P(Op##Lists, AnEmptyTensorMayBeNull)        \
    {                                                \
        an_empty_tensor_may_be_null<Op>(*backend);   \
    }                                                \
    TEST_P(Op##Lists, AnEmptyListNeedsNoArrays)      \
    {                                                \
        an_empty_list_needs_no_arrays<Op>(*backend); \
    }                                                \
    TEST_P(Op##Lists, ManyTensors)                   \
    {                                                \
        many_tensors<Op>(*backend);                  \
    }                                                \
    TEST_P(Op##Lists, LargeAndSmallTogether)         \
    {                                                \
        large_and_small_together<Op>(*backend);      \
    }                                                \
    static_assert(true, "takes the semicolon")

// ---- Bad inputs ------------------------------------------------------------------------------------

#define BAD_INPUTS_SUITE(Op)                                                           \
    using Op##BadInputs = OnBackend;                                                   \
    ON_EVERY_BACKEND(Op##BadInputs);                                                   \
    TEST_P(Op##BadInputs, TheCallIsGoodBefore)                                         \
    {                                                                                  \
        Op::expect(*backend, Op::everything());                                        \
    }                                                                                  \
    TEST_P(Op##BadInputs, Lists)                                                       \
    {                                                                                  \
        expect_all_refused(*backend, Op::everything(), bad_lists(Op::rules()));        \
    }                                                                                  \
    TEST_P(Op##BadInputs, Arguments)                                                   \
    {                                                                                  \
        expect_all_refused(*backend, Op::everything(), bad_config_or_exec<Op::Run>()); \
        expect_all_refused(*backend, Op::everything(), Op::refused());                 \
    }                                                                                  \
    TEST(Op##BadInputsOnTheCpu, ADeviceThatDoesNotExist)                               \
    {                                                                                  \
        Op::Run run(cpu_backend(), Op::everything());                                  \
        expect_no_such_device(run);                                                    \
    }                                                                                  \
    static_assert(true, "takes the semicolon")

// ---- Bits -------------------------------------------------------------------------------------------

// Of the op's Run on `cases`.
#define BITS_SUITE(Op, Run, cases)                                \
    TEST(Op##Bits, AreTheSameOnEveryInstructionSetAndThreadCount) \
    {                                                             \
        expect_bits_on_the_cpu<Run>(cases);                       \
    }                                                             \
    TEST(Op##Bits, AreTheSameOnCuda)                              \
    {                                                             \
        expect_bits_of_the_cpu<Run>(cases);                       \
    }                                                             \
    static_assert(true, "takes the semicolon")
