/* libcupti: torch.profiler asks it to trace the GPU, hears that it cannot, and traces the CPU. */
#include "export.h"

EXPORT int cuptiGetResultString(int result, const char **text)
{
    *text = result ? "the software device is not traced" : "success";
    return 0;
}
