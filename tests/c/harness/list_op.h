// list_op.h: an element-wise op on lists of tensors describes itself once, and gets every suite: its
// formula in binary64, lists of every shape, factors, bad inputs, equal bits everywhere.
//
//     struct Accumulate : ListOp<Accumulate, hr_accumulate_config> { ... }; // see accumulate_test.cpp
//     LIST_OP_SUITES(Accumulate);
#pragma once

#include <cmath>
#include <deque>
#include <optional>

#include "tests/c/harness/suites.h"

// One list of the op, in the order of its arguments.
struct ListOf {
    const char *name;
    std::vector<hr_dtype> types; // that it takes
    double size = 1;             // the values lie in [-size, size)
    unsigned flag = 0;           // the argument is NULL without this flag
    bool leads = false;          // the C interface measures the others against it
};

struct ListCase {
    std::vector<int64_t> numel = {5};
    std::optional<hr_dtype> type; // of all lists that take it; else tensors have every combination,
    size_t first = 0;             // beginning with this one
    unsigned flags = 0;           // a set of the op's own
    std::optional<double> factor; // absent: what the config has from the beginning
    bool on_device = false;       // the factor
    size_t shift = 0;             // elements past an aligned address,
    uint32_t shifted = ~0u;       // of these lists: one bit each
    bool special = false;         // NaN, infinities, denormals, huge and tiny values among the data
};

std::ostream &operator<<(std::ostream &out, const ListCase &c);

// The types of the tensors of a list. Each of them comes `before` times in a row, which is how many
// combinations the lists before it have.
std::vector<hr_dtype> types_of(const ListCase &c, const ListOf &list, size_t before);

// Whether `got` is what was wanted: to the bit if `ulps` is 0, else to that many units in the last
// place of its type. Any NaN is like any other.
testing::AssertionResult is_close(double got, double wanted, hr_dtype dtype, double ulps);

template <class Op>
constexpr bool has_factor = !std::is_null_pointer_v<std::remove_cv_t<decltype(Op::kFactor)>>;

template <class Op> class ListRun
{
  public:
    ListRun(Backend &backend, const ListCase &c) : exec(backend.exec())
    {
        size_t combinations = 1;
        for (const ListOf &list : Op::lists()) {
            const int l = int(tensors.size());
            const bool given = (c.flags & list.flag) == list.flag;
            tensors.emplace_back(backend, given ? c.numel : std::vector<int64_t>(),
                                 types_of(c, list, combinations), shift_of(c, l),
                                 made_up(size_t(l), c.special, list.size));
            if (!given)
                tensors.back().argument = nullptr;
            combinations *= list.types.size();
        }
        Op::configure(config, c.flags);
        if constexpr (has_factor<Op>) {
            if (c.factor && !c.on_device)
                config.*Op::kFactor = *c.factor;
            if (c.on_device) {
                scalars_.emplace_back(backend, encode({c.factor.value_or(1)}, HR_F32));
                config.*Op::kFactorPtr = static_cast<const float *>(scalars_.back().data());
                config.*Op::kFactor = NAN; // not looked at
            }
        }
    }
    ListRun(const ListRun &) = delete;

    hr_status call() const
    {
        return Op::call(*this);
    }
    const hr_tensor_list *operator[](size_t list) const // the argument
    {
        return tensors[list].argument;
    }
    std::vector<Tensors *> lists()
    {
        return given_lists(tensors);
    }
    std::vector<uint8_t> image() const // every byte that the call can reach
    {
        return image_of(buffers());
    }
    bool whole() const // the guards
    {
        return intact(buffers());
    }

    std::deque<Tensors> tensors; // one for each list
    typename Op::Config config = Op::config();
    hr_exec exec;
    const typename Op::Config *config_argument = &config;
    const hr_exec *exec_argument = &exec;

  private:
    std::vector<const std::vector<Buffer> *> buffers() const
    {
        std::vector<const std::vector<Buffer> *> all = {&scalars_};
        for (const Tensors &t : tensors)
            all.push_back(&t.buffers);
        return all;
    }

    std::vector<Buffer> scalars_;
};

// What an op inherits, and may say otherwise. It has to say:
//
//     static Config config();                                 // HR_..._CONFIG_INIT
//     static std::vector<ListOf> lists();
//     static hr_status call(const ListRun<Op> &);
//     static void formula(double *x, double factor, unsigned flags);   // x[l]: an element of list l
template <class Op, class Config_> struct ListOp {
    using Config = Config_;
    using Case = ListCase;
    using Run = ListRun<Op>;
    using Bad = BadInputs<Run>;

    static constexpr unsigned kFlags = 0;              // all of them
    static constexpr double kUlps = 0;                 // how far from the formula, rounded
    static constexpr std::nullptr_t kFactor = nullptr; // or the members of the config that hold a
    static constexpr std::nullptr_t kFactorPtr = nullptr; // number, or point to one on the device

    static void configure(Config &, unsigned) {}
    static Bad refused()
    {
        return {};
    }
    static std::vector<int64_t> many()
    {
        return {1, 900, 1500, 3000};
    }

    static Case with(unsigned flags, std::vector<int64_t> numel = {5})
    {
        Case c;
        c.flags = flags;
        c.numel = std::move(numel);
        return c;
    }
    static std::vector<Case> list_cases()
    {
        std::vector<Case> all = {with(0)};
        if (Op::kFlags)
            all.push_back(with(Op::kFlags));
        return all;
    }
    static Case everything()
    {
        Case c = with(Op::kFlags, {5, 0, 300});
        c.factor = 0.5;
        c.on_device = has_factor<Op>;
        return c;
    }
    static std::vector<ListRule<Run>> rules();
    static Bad bad_factors();
    static std::vector<Case> bit_cases();
    static void expect(Backend &backend, const Case &c);
};

template <class Op, class Config> std::vector<ListRule<ListRun<Op>>> ListOp<Op, Config>::rules()
{
    using Rule = ListRule<Run>;
    std::vector<Rule> all;
    const std::vector<ListOf> lists = Op::lists();
    for (size_t l = 0; l < lists.size(); l++)
        all.push_back({lists[l].name, [l](Run &r) -> Tensors & { return r.tensors[l]; },
                       lists[l].types,
                       lists.size() == 1 ? Rule::ALONE
                       : lists[l].leads  ? Rule::LEADS
                                         : Rule::MEASURED,
                       lists[l].flag != 0});
    return all;
}

template <class Op, class Config> BadInputs<ListRun<Op>> ListOp<Op, Config>::bad_factors()
{
    if constexpr (!has_factor<Op>) {
        return {};
    } else {
        Bad all = {{": factor_ptr is at .* not a multiple of 4",
                    [](Run &r) { r.config.*Op::kFactorPtr = moved(r.config.*Op::kFactorPtr, 2); }}};
        for (const double factor : {double(NAN), double(INFINITY), 1e39, -1e300})
            all.push_back({": factor is .*, wanted a finite", [=](Run &r) {
                               r.config.*Op::kFactorPtr = nullptr;
                               r.config.*Op::kFactor = factor;
                           }});
        return all;
    }
}

template <class Op, class Config> std::vector<ListCase> ListOp<Op, Config>::bit_cases()
{
    std::vector<Case> all;
    const auto add = [&](Case c) {
        c.factor = 0.3;
        all.push_back(std::move(c));
    };
    for (unsigned flags = 0; flags <= Op::kFlags; flags++)
        for (int kind = 0; kind < 4; kind++) {
            Case c = with(flags, {1, 3, 7, 255, 256, 257, 4097, 0, 64, 40001});
            if (kind & 1)
                c.type = HR_BF16;
            c.special = kind & 2;
            c.shift = size_t(flags + unsigned(kind)) % 3;
            add(c);
        }
    // Every list alone at an odd address, by 4 or 8 bytes of f32 and 2, 4 or 8 of the others.
    unsigned optional = 0;
    for (const ListOf &list : Op::lists())
        optional |= list.flag;
    for (size_t list = 0; list < Op::lists().size(); list++)
        for (const size_t shift : {1, 2, 4})
            for (const hr_dtype type : {HR_F32, HR_BF16}) {
                Case c = with(shift == 2 ? Op::kFlags : optional, {257, 64, 40001});
                c.type = type;
                c.shift = type == HR_F32 && shift == 4 ? 3 : shift;
                c.shifted = 1u << list;
                add(c);
            }
    // Larger than a chunk of any kernel, and than the least that is worth a second thread.
    add(with(Op::kFlags, {100003, 7, 70001}));
    return all;
}

template <class Op, class Config> void ListOp<Op, Config>::expect(Backend &backend, const Case &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const Run run(backend, c);
    double factor = 1;
    if constexpr (has_factor<Op>)
        factor = double(float(c.factor.value_or(Op::config().*Op::kFactor)));
    const size_t count = run.tensors.size();
    const auto values = [&](size_t k) {
        std::vector<std::vector<double>> all(count);
        for (size_t l = 0; l < count; l++)
            if (run[l])
                all[l] = run.tensors[l].values(k);
        return all;
    };
    std::vector<std::vector<std::vector<double>>> wanted;
    for (size_t k = 0; k < c.numel.size(); k++)
        wanted.push_back(values(k));
    for (int call = 0; call < 2; call++) {
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        for (size_t k = 0; k < c.numel.size(); k++) {
            const auto got = values(k);
            for (size_t i = 0; i < size_t(c.numel[k]); i++) {
                std::vector<double> x(count);
                for (size_t l = 0; l < count; l++)
                    x[l] = run[l] ? wanted[k][l][i] : 0;
                Op::formula(x.data(), factor, c.flags);
                for (size_t l = 0; l < count; l++)
                    if (run[l]) {
                        const hr_dtype type = run.tensors[l].dtype[k];
                        uint8_t stored[8];
                        encode(x[l], stored, type);
                        ASSERT_TRUE(is_close(got[l][i], decode(stored, type), type, Op::kUlps))
                            << Op::lists()[l].name << "[" << k << "], element " << i;
                        wanted[k][l][i] = got[l][i];
                    }
            }
        }
    }
    EXPECT_TRUE(run.whole());
}

// ---- Values ------------------------------------------------------------------------------------------

template <class Op> void every_type_flag_and_factor(Backend &backend)
{
    for (unsigned flags = 0; flags <= Op::kFlags; flags++)
        for (const bool special : {false, true})
            for (int factor = 0; factor < (has_factor<Op> ? 3 : 1); factor++)
                for (size_t shift = 0; shift < 3; shift++) {
                    ListCase c = Op::with(flags, {1, 3, 31, 32, 33, 0, 255, 256, 257});
                    c.first = c.shift = shift;
                    c.special = special;
                    c.on_device = factor == 2;
                    if (factor)
                        c.factor = factor == 1 ? 1.0 / 3 : double(-0.1f);
                    Op::expect(backend, c);
                }
}

template <class Op> void every_address(Backend &backend)
{
    for (const hr_dtype type : float_types())
        for (size_t shift = 0; shift < 9; shift++)
            for (const unsigned flags : {0u, Op::kFlags}) {
                ListCase c = Op::with(flags, {2063, 7});
                c.type = type;
                c.shift = shift;
                Op::expect(backend, c);
            }
}

template <class Op> void factors_are_rounded_to_binary32(Backend &backend)
{
    for (const double factor : {0.1, 0.0, -1.0, 1e-45, 3e38, 1 + 0x1p-30}) {
        ListCase c = Op::with(0, {40});
        c.type = HR_BF16;
        c.factor = factor;
        if (has_factor<Op>)
            Op::expect(backend, c);
    }
}

// A config that is cut anywhere has the defaults for what it lacks; only one without its first member
// may be too short.
template <class Op> void older_configs_have_defaults()
{
    for (size_t size = sizeof(size_t); size < sizeof(typename Op::Config); size += 4) {
        typename Op::Run a(cpu_backend(), ListCase()), b(cpu_backend(), ListCase());
        a.config = b.config = Op::config();
        cut(b.config, size);
        ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
        if (b.call() == HR_OK)
            EXPECT_EQ(a.image(), b.image()) << size;
        else
            EXPECT_LT(size, 2 * sizeof(size_t)) << hr_last_error();
    }
}

#define LIST_OP_SUITES(Op)                                                 \
    using Op##Values = OnBackend;                                          \
    ON_EVERY_BACKEND(Op##Values);                                          \
    TEST_P(Op##Values, EveryTypeFlagAndFactor)                             \
    {                                                                      \
        every_type_flag_and_factor<Op>(*backend);                          \
    }                                                                      \
    TEST_P(Op##Values, EveryAddress)                                       \
    {                                                                      \
        every_address<Op>(*backend);                                       \
    }                                                                      \
    TEST_P(Op##Values, FactorsAreRoundedToBinary32)                        \
    {                                                                      \
        factors_are_rounded_to_binary32<Op>(*backend);                     \
    }                                                                      \
    TEST(Op##ConfigsOnTheCpu, OfAnOlderHeaderHaveDefaults)                 \
    {                                                                      \
        older_configs_have_defaults<Op>();                                 \
    }                                                                      \
    LISTS_SUITE(Op);                                                       \
    BAD_INPUTS_SUITE(Op);                                                  \
    TEST_P(Op##BadInputs, Factors)                                         \
    {                                                                      \
        expect_all_refused(*backend, Op::everything(), Op::bad_factors()); \
    }                                                                      \
    BITS_SUITE(Op, Op::Run, Op::bit_cases())
