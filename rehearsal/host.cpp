// The host's side of copies that do not wait: until the host has waited for one, what it copied down
// is not there, however early the device was, and what it copied up must stay as it was.
#include "device.h"

#include <algorithm>
#include <cstring>
#include <list>
#include <utility>

namespace rehearsal
{
Clock host_clock;

namespace
{
struct Copy {
    char *host;
    std::string bytes; // what came down, or what was there when it went up
    bool down;
    uint32_t stream;
    uint64_t at; // the stream's own clock
    std::string name;
};
std::list<Copy> copies; // in the order in which they ran, that the host has not waited for

void end(const Copy &copy)
{
    if (copy.down)
        memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    else if (memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0)
        report(copy.name + " reads memory of the host on stream " + std::to_string(copy.stream) +
               " that was written before the host had waited for it");
}

template <typename Condition> void end_if(Condition is_met)
{
    for (auto copy = copies.begin(); copy != copies.end();) {
        if (is_met(*copy)) {
            end(*copy);
            copy = copies.erase(copy);
        } else {
            ++copy;
        }
    }
}
} // namespace

void host_waits(const Clock &clock)
{
    join(host_clock, clock);
    end_if([](const Copy &copy) { return host_clock[copy.stream] >= copy.at; });
}

void end_copies(const void *host, size_t bytes)
{
    const char *const begin = static_cast<const char *>(host);
    end_if([=](const Copy &copy) {
        return copy.host < begin + bytes && begin < copy.host + copy.bytes.size();
    });
}

void note_copy(Stream *stream, void *to, const void *from, size_t bytes, const char *name)
{
    const bool up = is_device(to), down = is_device(from);
    if (up == down || !settings().late || is_pageable(up ? from : to))
        return;
    char *const host = static_cast<char *>(up ? const_cast<void *>(from) : to);
    copies.push_back({host, std::string(host, bytes), down, stream->number, stream->at, name});
    if (down)
        memset(host, 0xFF, bytes);
}
} // namespace rehearsal
