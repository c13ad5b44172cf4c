// module.cpp: headroom._C, host-side objects for Python. Nothing here computes on tensors; torch
// ops do.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>

#include "torch_ext/python/describe.h"
#include "capi/headroom.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, m, py::mod_gil_not_used())
{
    m.doc() = "Host-side objects of Headroom.";
    m.attr("version") = hr_version();
    m.def("describe", &headroom::describe, py::arg("table"), py::arg("exchange"), py::arg("types"),
          py::arg("lists"), py::arg("state"), py::arg("param_like"), py::arg("extra"),
          "Writes addresses, sizes and dtypes of tensors to a table. False if a tensor is missing, "
          "has "
          "gaps in memory, or is of a type, a device or a layout that needs the op's lists.");
    py::native_enum<hr_cpu_level>(m, "CpuLevel", "enum.IntEnum",
                                  "Instruction sets that CPU kernels are compiled for.")
        .value("BASELINE", HR_CPU_BASELINE)
        .value("AVX2", HR_CPU_AVX2)
        .value("AVX512", HR_CPU_AVX512)
        .value("AVX512_VBMI", HR_CPU_AVX512_VBMI)
        .finalize();
    m.def("get_cpu_level", &hr_get_cpu_level, "The instruction set that CPU kernels use now.");
    m.def(
        "set_cpu_level",
        [](hr_cpu_level level) {
            if (hr_set_cpu_level(level) != HR_OK)
                throw py::value_error(hr_last_error());
        },
        py::arg("level"),
        "Chooses the instruction set of CPU kernels, for the whole process. All give the same "
        "bits. "
        "Raises ValueError if the CPU lacks it.");
}
