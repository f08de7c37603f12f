// The Python module comm_core._cuda: launches compiled kernels. It is built only where nvcc is found.
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "launch.h"

namespace py = pybind11;

namespace {

// Every argument of every kernel is eight bytes: an address or an integer as it is, a double by its bits.
unsigned long long as_argument(const py::handle& value) {
  if (!py::isinstance<py::float_>(value)) return value.cast<unsigned long long>();
  const double number = value.cast<double>();
  unsigned long long bits;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

void launch(const std::string& kernel, int device, long long blocks, const py::tuple& arguments, unsigned long long stream) {
  std::vector<unsigned long long> values;
  for (const auto& value : arguments) values.push_back(as_argument(value));
  const char* problem = commsched_cuda_launch(kernel.c_str(), device, blocks, values.data(), static_cast<int>(values.size()),
                                              reinterpret_cast<void*>(stream));
  if (problem != nullptr) throw std::runtime_error("CUDA kernel " + kernel + ": " + problem);
}

py::object unfit(int device) {
  const char* problem = commsched_cuda_unfit(device);
  return problem == nullptr ? py::object(py::none()) : py::object(py::str(problem));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("launch", &launch, py::arg("kernel"), py::arg("device"), py::arg("blocks"), py::arg("arguments"), py::arg("stream"));
  m.def("unfit", &unfit, py::arg("device"));
}
