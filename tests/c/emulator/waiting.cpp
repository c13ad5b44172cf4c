// Barriers and warp operations: a thread that waits suspends its fiber; when everyone has run as
// far as they can, whatever is complete is released.
#include "tests/c/emulator/machine.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace hr_emu
{
namespace
{
uint64_t meetings = 1; // operations completed, as numbers

void release(Thread &t, uint64_t meeting)
{
    t.offered = t.brought;
    t.met = meeting;
    t.operation = nullptr;
    t.clock++;
    machine.ready.push_back(&t);
}

// A warp operation is complete when every lane of the mask that has not exited takes part in it.
bool release_warp(uint32_t first)
{
    Thread *const lanes = &machine.threads[first];
    const uint32_t end = std::min<uint32_t>(warpSize, machine.threads.size() - first);
    bool released = false;
    for (uint32_t i = 0; i < end; i++) {
        const Thread &leader = lanes[i];
        if (!leader.operation || leader.mask == 0)
            continue;
        std::vector<Thread *> group;
        bool complete = true;
        for (uint32_t j = 0; j < end; j++) {
            if (!(leader.mask >> j & 1) || lanes[j].done)
                continue;
            complete = complete && lanes[j].operation && lanes[j].mask == leader.mask &&
                       strcmp(lanes[j].operation, leader.operation) == 0;
            group.push_back(&lanes[j]);
        }
        if (!complete)
            continue;
        uint32_t seen[warpSize] = {};
        for (const Thread *t : group)
            for (uint32_t j = 0; j < end; j++)
                seen[j] = std::max(seen[j], &lanes[j] == t ? t->clock : t->seen[j]);
        for (Thread *t : group) {
            std::copy(seen, seen + warpSize, t->seen);
            release(*t, meetings);
        }
        meetings++;
        released = true;
    }
    return released;
}

bool release_block()
{
    const Thread &first = machine.threads[0];
    int count = 0;
    for (const Thread &t : machine.threads) {
        if (t.done || t.mask != 0 || t.site.line != first.site.line ||
            strcmp(t.site.file, first.site.file) != 0)
            return false;
        count += t.brought.bytes[0];
    }
    for (Thread &t : machine.threads)
        t.at_barrier = t.clock;
    for (Thread &t : machine.threads) {
        const uint32_t warp = t.rank / warpSize * warpSize;
        for (uint32_t j = 0; j < warpSize && warp + j < machine.threads.size(); j++)
            t.seen[j] = machine.threads[warp + j].at_barrier;
        t.count = count;
        release(t, meetings);
    }
    meetings++;
    return true;
}

void wait(const char *operation, unsigned mask, Site site)
{
    Thread &me = *machine.current;
    me.operation = operation;
    me.mask = mask;
    me.site = site;
    Fiber::suspend();
}

void wait_for_lanes(const char *operation, unsigned mask, Site site)
{
    if (!(mask >> lane() & 1))
        report("bad warp mask: lane " + std::to_string(lane()) + " calls " + operation + " at " +
               site.file + ":" + std::to_string(site.line) + " but is not in its mask");
    stop_if_failed();
    wait(operation, mask, site);
}
} // namespace

bool release_waiting()
{
    bool released = false;
    for (uint32_t first = 0; first < machine.threads.size(); first += warpSize)
        released = release_warp(first) || released;
    return released || release_block();
}

// A line per place and operation.
std::string who_waits()
{
    std::map<std::string, std::vector<uint32_t>> groups;
    for (const Thread &t : machine.threads) {
        std::string place = "exited";
        if (!t.done) {
            place = std::string("at ") + t.operation + ", " + t.site.file + ":" +
                    std::to_string(t.site.line);
            char mask[32];
            std::snprintf(mask, sizeof mask, ", mask 0x%08x", t.mask);
            place += t.mask ? mask : "";
        }
        groups[place].push_back(t.rank);
    }
    std::string text;
    for (const auto &[place, ranks] : groups) {
        text += "\n    " + std::to_string(ranks.size()) + " " + place + ": threads";
        for (size_t i = 0; i < ranks.size() && i < 8; i++)
            text += " " + std::to_string(ranks[i]);
        text += ranks.size() > 8 ? " ..." : "";
    }
    return text;
}

int lane()
{
    return int(machine.current->rank % warpSize);
}

int sync_block(const char *operation, bool predicate, Site site)
{
    const OutOfKernel out;
    machine.current->brought.bytes[0] = predicate;
    wait(operation, 0, site);
    return machine.current->count;
}

Value exchange(const char *operation, unsigned mask, Value mine, int source, Site site)
{
    const OutOfKernel out;
    Thread &me = *machine.current;
    me.brought = mine;
    wait_for_lanes(operation, mask, site);
    const uint32_t from = me.rank / warpSize * warpSize + uint32_t(source);
    if (!(mask >> source & 1) || from >= machine.threads.size() ||
        machine.threads[from].met != me.met)
        report(std::string("bad warp mask: ") + operation + " at " + site.file + ":" +
               std::to_string(site.line) + " reads lane " + std::to_string(source) +
               ", which takes no part");
    stop_if_failed();
    return machine.threads[from].offered;
}

unsigned vote(const char *operation, unsigned mask, bool predicate, Site site)
{
    const OutOfKernel out;
    Thread &me = *machine.current;
    me.brought.bytes[0] = predicate;
    wait_for_lanes(operation, mask, site);
    const uint32_t first = me.rank / warpSize * warpSize;
    unsigned ballot = 0;
    for (uint32_t i = 0; i < warpSize && first + i < machine.threads.size(); i++) {
        const Thread &other = machine.threads[first + i];
        if (other.met == me.met && other.offered.bytes[0])
            ballot |= 1u << i;
    }
    return ballot;
}

void fence()
{
    machine.current->fenced = true;
}
} // namespace hr_emu
