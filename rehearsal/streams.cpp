// Streams, events, graphs and what a capture refuses.
#include "device.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

namespace rehearsal
{
// Nodes in the order in which they were captured, which is one that their dependencies allow.
struct Graph {
    std::vector<std::function<void(Stream *)>> nodes;
    std::vector<std::function<void(Stream *)>> accesses; // noted when it is launched
    std::vector<std::shared_ptr<void>> kept;             // user objects
};

struct Capture {
    uint64_t id;
    Stream *origin;
    cudaStreamCaptureMode mode;
    std::thread::id thread;
    bool is_valid = true;
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    // Nodes of each stream that takes part, and those that each has waited for: all must have come
    // back to the origin when the capture ends.
    std::map<Stream *, Clock> waited{};
    Clock last{};
};

namespace
{
struct Event {
    Stream *stream = nullptr;
    uint64_t count = 0;
    double time = 0; // milliseconds, when it was reached
    int queries = 0;
    Clock clock;
    std::weak_ptr<Capture> capture; // in which it was recorded last
    bool captured = false;
};

std::vector<Stream *> streams;
std::vector<std::weak_ptr<Capture>> captures;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Never freed, since events may name it.
Stream *new_stream(int device, int priority, bool waits_for_default)
{
    streams.push_back(new Stream{uint32_t(streams.size()), device, priority, waits_for_default});
    return streams.back();
}

Stream *default_stream(int device)
{
    static std::map<int, Stream *> all;
    Stream *&s = all[device];
    return s ? s : s = new_stream(device, 0, true);
}

void run_to(Stream *s, uint64_t count)
{
    while (s->done < count) {
        const auto self = std::this_thread::get_id();
        if (s->runner != std::thread::id() && s->runner != self) {
            mutex.without([] { std::this_thread::sleep_for(std::chrono::microseconds(100)); });
            continue;
        }
        const Stream::Work work = std::move(s->queue.front());
        s->queue.pop_front();
        const auto outer = std::exchange(s->runner, self);
        if (work.after)
            run_to(work.after, work.count);
        s->at = work.at;
        work.run(s);
        s->runner = outer;
        s->done++;
    }
}

void wait_for(Stream *s, Stream *other, uint64_t count, const Clock &clock)
{
    join(s->clock, clock);
    if (other->done >= count)
        return;
    s->queue.push_back({[](Stream *) {}, 0, other, count});
    s->queued++;
}

// The default stream and those that are not "non-blocking" come one after another.
void order_with_default(Stream *s)
{
    if (!s->waits_for_default)
        return;
    Stream *const standard = default_stream(s->device);
    if (s != standard)
        return wait_for(s, standard, standard->queued, standard->clock);
    for (Stream *const other : streams)
        if (other != s && other->waits_for_default && other->device == s->device)
            wait_for(s, other, other->queued, other->clock);
}

// Waits, on the host, for what an event was recorded behind, whatever it is recorded for meanwhile.
void wait_on_host(const Event &event)
{
    const Clock clock = event.clock;
    if (event.stream)
        run_to(event.stream, event.count);
    host_waits(clock);
}

// Calls a function of the host in the order of the device.
template <typename... Arguments> void call_host(void (*function)(Arguments...), Arguments... given)
{
    end_copies(nullptr, SIZE_MAX); // all that have run
    mutex.without([&] { function(given...); });
}

double now()
{
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}
} // namespace

void join(Clock &into, const Clock &other)
{
    for (const auto &[stream, count] : other)
        into[stream] = std::max(into[stream], count);
}

Stream *stream_of(cudaStream_t stream)
{
    return uintptr_t(stream) <= 2 ? default_stream(current_device())
                                  : reinterpret_cast<Stream *>(stream);
}

void tick(Stream *s)
{
    if (s->capture)
        return;
    order_with_default(s);
    join(s->clock, host_clock);
    s->clock[s->number]++;
}

void enqueue(Stream *s, std::function<void(Stream *)> run, bool is_now)
{
    if (s->capture) {
        s->capture->graph->nodes.push_back(std::move(run));
        s->capture->waited[s][s->number] = ++s->capture->last[s->number];
        return;
    }
    s->queue.push_back({std::move(run), s->clock[s->number]});
    s->queued++;
    if (is_now || !settings().late)
        run_to(s, s->queued);
}

void note_at_launch(Stream *s, std::function<void(Stream *)> access)
{
    s->capture->graph->accesses.push_back(std::move(access));
}

void synchronize(Stream *s)
{
    const Clock clock = s->clock; // other threads may queue more meanwhile
    run_to(s, s->queued);
    host_waits(clock);
}

void synchronize_all(int device)
{
    for (size_t i = 0; i < streams.size(); i++) // work may make streams
        if (device < 0 || streams[i]->device == device)
            synchronize(streams[i]);
}

cudaError_t refused_in_capture(const char *call)
{
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return cudaSuccess;
    for (const auto &weak : captures)
        if (const auto capture = weak.lock()) {
            const bool own = capture->thread == std::this_thread::get_id();
            if (own ? capture->mode != cudaStreamCaptureModeRelaxed
                    : capture->mode == cudaStreamCaptureModeGlobal &&
                          thread_mode == cudaStreamCaptureModeGlobal) {
                capture->is_valid = false;
                return fail(cudaErrorStreamCaptureUnsupported, call);
            }
        }
    return cudaSuccess;
}
} // namespace rehearsal

using namespace rehearsal;

#define REFUSE_IN_CAPTURE(call)                                          \
    do {                                                                 \
        const cudaError_t refused = rehearsal::refused_in_capture(call); \
        if (refused != cudaSuccess)                                      \
            return refused;                                              \
    } while (0)

// What asks whether a stream is done may not ask one that is captured, in whichever mode.
#define REFUSE_OF_CAPTURED(stream)                          \
    do {                                                    \
        if ((stream)->capture) {                            \
            (stream)->capture->is_valid = false;            \
            return fail(cudaErrorStreamCaptureUnsupported); \
        }                                                   \
    } while (0)

// ---- Streams ------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    Lock lock(mutex);
    *stream = reinterpret_cast<cudaStream_t>(
        new_stream(current_device(), priority, !(flags & cudaStreamNonBlocking)));
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, 0, 0);
}
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    Lock lock(mutex);
    synchronize(stream_of(stream)); // "once it is done": this one is now, as it may be
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    Lock lock(mutex);
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    Lock lock(mutex);
    Stream *const s = stream_of(stream);
    REFUSE_OF_CAPTURED(s);
    REFUSE_IN_CAPTURE("cudaStreamSynchronize");
    synchronize(s);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    Lock lock(mutex);
    Stream *const s = stream_of(stream);
    REFUSE_OF_CAPTURED(s);
    REFUSE_IN_CAPTURE("cudaStreamQuery");
    if (s->done < s->queued)
        return fail(cudaErrorNotReady);
    host_waits(s->clock);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize()
{
    Lock lock(mutex);
    REFUSE_IN_CAPTURE("cudaDeviceSynchronize");
    synchronize_all(current_device());
    return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    Lock lock(mutex);
    tick(stream_of(stream));
    enqueue(stream_of(stream), [=](Stream *) { call_host(function, data); });
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                         void *data, unsigned)
{
    Lock lock(mutex);
    if (stream_of(stream)->capture)
        return fail(cudaErrorStreamCaptureUnsupported);
    tick(stream_of(stream));
    enqueue(stream_of(stream), [=](Stream *) { call_host(function, stream, cudaSuccess, data); });
    return cudaSuccess;
}

// ---- Events -------------------------------------------------------------------------------------

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    *event = reinterpret_cast<cudaEvent_t>(new Event);
    return cudaSuccess;
}
CALL(cudaError_t cudaEventCreate(cudaEvent_t *event), return cudaEventCreateWithFlags(event, 0);)
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t)
{
    return cudaSuccess; // a queue may still write its time
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    Lock lock(mutex);
    auto *const e = reinterpret_cast<Event *>(event);
    Stream *const s = stream_of(stream);
    const auto reached = [e](Stream *now_on) {
        e->time = now();
        e->stream = now_on;
        e->count = now_on->done + 1;
        join(e->clock, now_on->clock);
    };
    if (s->capture && !(flags & cudaEventRecordExternal)) {
        e->capture = s->capture;
        e->captured = true;
        e->clock = s->capture->waited[s];
        return cudaSuccess;
    }
    e->captured = false;
    if (s->capture) {
        enqueue(s, reached);
        return cudaSuccess;
    }
    tick(s);
    e->clock = s->clock;
    e->stream = s;
    e->queries = 0;
    e->count = s->queued + 1;
    enqueue(
        s, [e](Stream *) { e->time = now(); }, s->done == s->queued);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, 0);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event)
{
    Lock lock(mutex);
    auto *const e = reinterpret_cast<Event *>(event);
    if (e->captured)
        return fail(cudaErrorCapturedEvent);
    REFUSE_IN_CAPTURE("cudaEventQuery");
    // What is asked again and again is reached some time.
    if (e->stream && e->stream->done < e->count && e->queries++ < 2)
        return fail(cudaErrorNotReady);
    wait_on_host(*e);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    Lock lock(mutex);
    auto *const e = reinterpret_cast<Event *>(event);
    if (e->captured)
        return fail(cudaErrorCapturedEvent);
    REFUSE_IN_CAPTURE("cudaEventSynchronize");
    wait_on_host(*e);
    return cudaSuccess;
}
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end)
{
    Lock lock(mutex);
    const auto *const from = reinterpret_cast<Event *>(begin);
    const auto *const to = reinterpret_cast<Event *>(end);
    if (!from->stream || !to->stream)
        return fail(cudaErrorInvalidResourceHandle);
    if (from->stream->done < from->count || to->stream->done < to->count)
        return fail(cudaErrorNotReady);
    *milliseconds = float(to->time - from->time);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    Lock lock(mutex);
    auto *const e = reinterpret_cast<Event *>(event);
    Stream *const s = stream_of(stream);
    const auto capture = e->captured ? e->capture.lock() : nullptr;
    if (capture) { // the stream takes part from now on
        if (s->capture && s->capture != capture)
            return fail(cudaErrorStreamCaptureIsolation);
        s->capture = capture;
        join(capture->waited[s], e->clock);
        return cudaSuccess;
    }
    if (s->capture && e->stream && !(flags & cudaEventWaitExternal)) {
        s->capture->is_valid = false;
        return fail(cudaErrorStreamCaptureIsolation);
    }
    if (!s->capture && e->stream)
        wait_for(s, e->stream, e->count, e->clock);
    return cudaSuccess;
}

// ---- Captures and graphs ------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    static uint64_t made = 0;
    Lock lock(mutex);
    if (uintptr_t(stream) <= 2 || stream_of(stream)->capture)
        return fail(cudaErrorStreamCaptureUnsupported);
    Stream *const s = stream_of(stream);
    s->capture = std::make_shared<Capture>(Capture{++made, s, mode, std::this_thread::get_id()});
    captures.push_back(s->capture);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    Lock lock(mutex);
    Stream *const s = stream_of(stream);
    const auto capture = s->capture;
    *graph = nullptr;
    if (!capture || capture->origin != s)
        return fail(cudaErrorStreamCaptureUnmatched);
    bool is_joined = true;
    for (const auto &[number, last] : capture->last)
        is_joined = is_joined && capture->waited[s][number] >= last;
    for (Stream *const other : streams)
        if (other->capture == capture)
            other->capture.reset();
    captures.erase(
        std::remove_if(captures.begin(), captures.end(),
                       [&](const auto &c) { return c.lock() == capture || c.expired(); }),
        captures.end());
    if (!capture->is_valid)
        return fail(cudaErrorStreamCaptureInvalidated);
    if (!is_joined)
        return fail(cudaErrorStreamCaptureUnjoined);
    *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture->graph));
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status)
{
    Lock lock(mutex);
    const auto &capture = stream_of(stream)->capture;
    *status = !capture            ? cudaStreamCaptureStatusNone
              : capture->is_valid ? cudaStreamCaptureStatusActive
                                  : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}
EXPORT int rehearsal_capturing(void *stream)
{
    Lock lock(mutex);
    return stream_of(static_cast<cudaStream_t>(stream))->capture != nullptr;
}
// CUDA 12 has the same call without edges, and a header that gives it another name.
#if CUDART_VERSION >= 13000
#define EDGES const cudaGraphEdgeData **edges,
#else
#define EDGES
#endif
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **dependencies,
                                            EDGES size_t *count)
{
    Lock lock(mutex);
    const auto &capture = stream_of(stream)->capture;
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = nullptr;
    if (dependencies)
        *dependencies = nullptr;
#if CUDART_VERSION >= 13000
    if (edges)
        *edges = nullptr;
#endif
    if (count)
        *count = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode)
{
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

using Kept = std::shared_ptr<Graph>; // what a handle of a graph points to
EXPORT cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned)
{
    *graph = reinterpret_cast<cudaGraph_t>(new Kept(new Graph));
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    Lock lock(mutex);
    delete reinterpret_cast<Kept *>(graph);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    Lock lock(mutex);
    const size_t all = (*reinterpret_cast<Kept *>(graph))->nodes.size();
    for (size_t i = 0; nodes && i < std::min(*count, all); i++)
        nodes[i] = reinterpret_cast<cudaGraphNode_t>(i + 1);
    *count = all;
    return cudaSuccess;
}
// An executable graph keeps the nodes of the graph as they were.
EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                        unsigned long long)
{
    Lock lock(mutex);
    REFUSE_IN_CAPTURE("cudaGraphInstantiate");
    *exec =
        reinterpret_cast<cudaGraphExec_t>(new Kept(new Graph(**reinterpret_cast<Kept *>(graph))));
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                                 unsigned long long flags)
{
    return cudaGraphInstantiate(exec, graph, flags);
}
EXPORT cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph,
                                       cudaGraphExecUpdateResultInfo *result)
{
    Lock lock(mutex);
    Kept &to = *reinterpret_cast<Kept *>(exec);
    const Graph &from = **reinterpret_cast<Kept *>(graph);
    const bool is_alike = to->nodes.size() == from.nodes.size();
    result->result =
        is_alike ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
    if (is_alike)
        to = std::make_shared<Graph>(from); // launches that are queued keep what they had
    return is_alike ? cudaSuccess : fail(cudaErrorGraphExecUpdateFailure);
}
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    Lock lock(mutex);
    delete reinterpret_cast<Kept *>(exec);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    Lock lock(mutex);
    Stream *const s = stream_of(stream);
    tick(s);
    const Kept graph = *reinterpret_cast<Kept *>(exec);
    for (const auto &access : graph->accesses) // events recorded from now on come after them
        access(s);
    enqueue(s, [graph](Stream *now_on) {
        for (const auto &node : graph->nodes)
            node(now_on);
    });
    return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer,
                                        cudaHostFn_t destroy, unsigned, unsigned)
{
    *object = reinterpret_cast<cudaUserObject_t>(new std::shared_ptr<void>(pointer, destroy));
    return cudaSuccess;
}
EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned)
{
    delete reinterpret_cast<std::shared_ptr<void> *>(object);
    return cudaSuccess;
}
EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned,
                                             unsigned flags)
{
    Lock lock(mutex);
    auto *const given = reinterpret_cast<std::shared_ptr<void> *>(object);
    (*reinterpret_cast<Kept *>(graph))->kept.push_back(*given);
    if (flags & cudaGraphUserObjectMove)
        delete given;
    return cudaSuccess;
}

// ---- For what runs on the host in the order of a stream -----------------------------------------

// Work that is done at once begins: what is queued before it on the stream runs.
EXPORT void rehearsal_begin(void *stream)
{
    Lock lock(mutex);
    Stream *const s = stream_of(static_cast<cudaStream_t>(stream));
    if (s->capture)
        return;
    tick(s);
    run_to(s, s->queued);
    s->queued++, s->done++;
}
namespace
{
void enqueue_kernel(void *stream, std::function<void(Stream *)> run)
{
    Stream *const s = stream_of(static_cast<cudaStream_t>(stream));
    if (s->device != current_device()) {
        fail(cudaErrorInvalidResourceHandle);
        return;
    }
    tick(s);
    enqueue(s, std::move(run));
}
auto &dropped = *new std::vector<void *>; // graphs may be destroyed at the very end
} // namespace

// Work in the order of the stream. Its data are destroyed after the last run: a graph runs it in each
// replay.
EXPORT void rehearsal_enqueue_owned(void *stream, void (*run)(void *), void *data,
                                    void (*destroy)(void *))
{
    Lock lock(mutex);
    const std::shared_ptr<void> owned(data, destroy);
    enqueue_kernel(stream, [run, owned](Stream *) { run(owned.get()); });
}
// The same for a function that may wait for other threads.
EXPORT void rehearsal_enqueue(void *stream, void (*run)(void *), void *key)
{
    Lock lock(mutex);
    const std::shared_ptr<void> owned(key, [](void *last) {
        Lock again(mutex);
        dropped.push_back(last);
    });
    enqueue_kernel(stream, [run, owned](Stream *) { mutex.without([&] { run(owned.get()); }); });
}
// Returns a key that rehearsal_enqueue() was given and that will not be run any more, or NULL.
EXPORT void *rehearsal_take_dropped()
{
    Lock lock(mutex);
    if (dropped.empty())
        return nullptr;
    void *const key = dropped.back();
    dropped.pop_back();
    return key;
}
CALL(int rehearsal_late(), return settings().late;)
EXPORT uint64_t rehearsal_pending() // functions that wait in queues
{
    Lock lock(mutex);
    uint64_t count = 0;
    for (const Stream *const s : streams)
        count += s->queue.size();
    return count;
}
