// table.h: the lists of a call as plain numbers, int64 [lists, ROWS, count], which headroom._C writes
// and the ops read in place. Its row of dtypes holds hr_dtype, of 32 bits, in its first half.
#pragma once

#include <cstdint>

namespace headroom
{

enum TableRow { DATA, NUMEL, DTYPE, ROWS };

} // namespace headroom
