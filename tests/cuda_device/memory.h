#pragma once

// Memory that host and device share under one address: while a test runs, everything that it
// allocates. Pinned memory of the host, not managed memory, which can hang a GPU.

#include <cstddef>

namespace cuda_test {

/// From now on operator new gives memory that the device sees. `exact`: each allocation is one of
/// the driver's own, so that compute-sanitizer knows where it ends; slow. Else they come out of one
/// large one, each between stretches of 0xFF that are looked at when it is freed.
void share_memory(bool exact);

/// Allocations whose surroundings were written to, so far.
std::size_t overruns();

}  // namespace cuda_test
