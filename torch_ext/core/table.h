// table.h: the layout of a table of lists: int64 [lists, ROWS, count], with the address, the number
// of elements and the type of every tensor. headroom._C writes it and the ops read it in place. The
// row of types is an array of hr_dtype, of 32 bits each, in the first half of the row.
#pragma once

#include <cstdint>

namespace headroom
{

enum TableRow { DATA, NUMEL, DTYPE, ROWS };

} // namespace headroom
