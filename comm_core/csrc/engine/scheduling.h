// How the operating system treats the engine's thread.
#pragma once

namespace commsched {

// Requests short time slices with low latency. The engine's thread runs for microseconds at a time, and the link is idle while
// the thread waits for a core that computes. Does nothing on kernels without this setting.
void prefer_short_turns() noexcept;

}  // namespace commsched
