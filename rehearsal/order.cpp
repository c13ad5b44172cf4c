// Who touched which bytes last, and whether the next access comes after it: vector clocks. A stream's
// clock says how far every stream had got when its newest operation began.
#include "device.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

namespace rehearsal
{
namespace
{
struct Access {
    uint32_t stream;
    uint64_t at; // the stream's own clock
    std::string name;
};
struct Range {
    const char *end;
    std::vector<Access> writes, reads; // at most one write
};
std::map<const char *, Range> ranges; // by their first byte; they do not overlap
uint64_t reported = 0;
std::string reports;

// Makes `at` the begin of a range if one holds it.
void split(const char *at)
{
    auto r = ranges.upper_bound(at);
    if (r == ranges.begin() || (--r)->first == at || r->second.end <= at)
        return;
    Range tail = r->second;
    r->second.end = at;
    ranges.emplace(at, std::move(tail));
}

bool is_ordered(const Access &access, const Stream &stream)
{
    const auto known = stream.clock.find(access.stream);
    return access.stream == stream.number ||
           (known != stream.clock.end() && known->second >= access.at);
}

void report(const Stream &stream, const char *name, bool write, const Access &other,
            bool other_wrote, const char *at)
{
    char text[512];
    snprintf(text, sizeof text,
             "%s %s %p on stream %u, in no order with %s, which %s it on stream %u", name,
             write ? "writes" : "reads", static_cast<const void *>(at), stream.number,
             other.name.c_str(), other_wrote ? "wrote" : "read", other.stream);
    rehearsal::report(text);
}
} // namespace

void report(const std::string &text)
{
    if (!settings().ordered || reported++ >= 50)
        return;
    reports += text + "\n";
    fprintf(stderr, "software device: %s\n", text.c_str());
}

void touch(Stream *stream, const void *address, size_t bytes, bool write, const char *name)
{
    if (!settings().ordered || bytes == 0 || is_pageable(address))
        return;
    if (stream->capture)
        return note_at_launch(stream, [=, text = std::string(name)](Stream *replays) {
            touch(replays, address, bytes, write, text.c_str());
        });
    // Memory of a result may have been freed by a thread that has waited since the operation began.
    join(stream->clock, host_clock);
    const char *const begin = static_cast<const char *>(address), *const end = begin + bytes;
    split(begin);
    split(end);
    const Access own{stream->number, stream->clock[stream->number], name};
    const char *at = begin; // up to here ranges are known
    bool told = false;      // of this access, once
    std::vector<std::pair<const char *, const char *>> gaps;
    for (auto r = ranges.lower_bound(begin); r != ranges.end() && r->first < end; ++r) {
        if (r->first > at)
            gaps.emplace_back(at, r->first);
        at = r->second.end;
        const auto check = [&](const std::vector<Access> &others, bool wrote) {
            for (const Access &other : others)
                if (!told && !is_ordered(other, *stream)) {
                    report(*stream, name, write, other, wrote, r->first);
                    told = true;
                }
        };
        check(r->second.writes, true);
        auto &reads = r->second.reads;
        if (write) {
            check(reads, false);
            r->second.writes = {own};
            reads.clear();
        } else {
            reads.erase(std::remove_if(reads.begin(), reads.end(),
                                       [&](const Access &a) { return a.stream == own.stream; }),
                        reads.end());
            reads.push_back(own);
        }
    }
    if (at < end)
        gaps.emplace_back(at, end);
    for (const auto &[from, to] : gaps)
        ranges[from] = write ? Range{to, {own}, {}} : Range{to, {}, {own}};
}

void forget(const void *address, size_t bytes)
{
    if (!settings().ordered || bytes == 0)
        return;
    const char *const begin = static_cast<const char *>(address);
    split(begin);
    split(begin + bytes);
    ranges.erase(ranges.lower_bound(begin), ranges.lower_bound(begin + bytes));
}
} // namespace rehearsal

using namespace rehearsal;

CALL(int rehearsal_ordered(), return settings().ordered;)
EXPORT void rehearsal_touch(void *stream, const void *address, size_t bytes, int write,
                            const char *name)
{
    Lock lock(mutex);
    touch(stream_of(static_cast<cudaStream_t>(stream)), address, bytes, write, name);
}
EXPORT void rehearsal_report(const char *text)
{
    Lock lock(mutex);
    report(text);
}
// Returns what was reported since the last call, "" if nothing was.
EXPORT const char *rehearsal_take_reports()
{
    static std::string taken;
    Lock lock(mutex);
    taken = std::exchange(reports, "");
    reported = 0;
    return taken.c_str();
}
