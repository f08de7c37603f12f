// How the operating system treats the engine's thread.
#pragma once

namespace commsched {

// Asks for short turns at once instead of long ones later. The engine's thread works for microseconds at a time, and the link
// is idle while it waits for a core that is busy with the computation. Where the system does not know of it, nothing happens.
void prefer_short_turns() noexcept;

}  // namespace commsched
