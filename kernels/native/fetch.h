// Fetching data some time before its use, into the level of the cache that suits the machine.
#pragma once

namespace kvrelay {

// Whether the first-level cache holds 48 KiB or more. There it is the level to fetch into; where it is smaller, what
// comes early drives out what is in use, and the second level is.
extern const bool kLargeFirstLevel;

namespace {

inline __attribute__((always_inline)) void fetch(const void* at, bool into_first_level) {
    if (into_first_level) {
        __builtin_prefetch(at, 0, 3);
    } else {
        __builtin_prefetch(at, 0, 2);
    }
}

}  // namespace
}  // namespace kvrelay
