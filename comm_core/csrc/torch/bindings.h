// The parts of the Python module comm_core._C that other files define.
#pragma once

#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include "engine/interrupts.h"

namespace commsched {

// Lets Python's handlers of signals run, and throws what they raise: for Ctrl-C a KeyboardInterrupt.
void run_signal_handlers();

// Python runs them in its main thread alone. Another thread has nothing to take the GIL for, which ends it while Python does.
inline bool is_main_thread() { return syscall(SYS_gettid) == getpid(); }

// For calls that may wait for other ranks: the GIL is free, and signals are looked for.
struct WaitsWithoutGil {
  const py::gil_scoped_release no_gil{};
  const Interruptible interruptible{is_main_thread() ? run_signal_handlers : nullptr};
};
using MayWait = py::call_guard<WaitsWithoutGil>;

// The engine, its channels and transports, and rows of gradients; translates the engine's exceptions.
void bind_engine(py::module_& m);

// Memory that user code may keep, and who keeps it: see bindings_memory.cpp.
void bind_memory(py::module_& m);

}  // namespace commsched
