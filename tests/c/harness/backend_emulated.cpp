// The same calls on the emulator's runtime, and what only the emulator can do.
#include "tests/c/harness/backend_cuda.cu"
#include "tests/c/emulator/emulator.h"

namespace
{
class Emulated : public CudaBackend
{
  public:
    bool sees_overruns() const override
    {
        return true;
    }
    bool is_emulated() const override
    {
        return true;
    }
    void set_seed(uint64_t seed) override
    {
        hr_emu::set_seed(seed);
    }
    void set_default_seed() override
    {
        hr_emu::set_seed(hr_emu::default_seed());
    }
    bool pretend_capture(bool on) override
    {
        hr_emu::pretend_capture(on);
        return true;
    }
    std::string take_report() override
    {
        return hr_emu::take_report();
    }
};
} // namespace

Backend *cuda_backend()
{
    static Emulated emulated;
    return &emulated;
}
