// SPDX-License-Identifier: Apache-2.0
//
// The late device, see late_device.py: streams and events, and memory that knows who uses it.
//
// A copy to or from page-locked host memory happens when somebody waits for it: the host, or a kernel behind it in its stream.
// Until then its target holds poison. A kernel computes at once, once all is done that its stream has ahead of it.
//
// Besides, every use of memory has a time, a stream and a vector clock: two uses that no wait orders are a race, whichever
// comes first. A block that is given up may be used by its own stream next, so that all its uses must come before that.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace late {

constexpr auto kLate = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr int kHost = -1;
constexpr unsigned char kPoison = 0xFF;  // a NaN in every floating dtype

using Time = uint64_t;

// By stream: the last of its times that has been waited for.
class Clock {
public:
    Time of(size_t stream) const { return stream < times_.size() ? times_[stream] : 0; }
    void raise(size_t stream, Time time);
    void join(const Clock& other);

private:
    std::vector<Time> times_;
};

struct Range {
    char* begin;
    char* end;
    bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
    bool contains(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

struct Use {
    size_t stream;
    Time time;
    Range range;
    bool write;
    std::string what;
};

// A piece of memory: a device's, or page-locked (kHost).
struct Block {
    Range range{};
    int device = kHost;
    size_t stream = 0;  // on which it was made
    bool owned = false;
    std::optional<c10::Storage> adopted;  // what a CPU kernel made
    std::vector<Use> uses;
    std::set<size_t> recorded;
    Block() = default;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block();
    size_t size() const { return static_cast<size_t>(range.end - range.begin); }
};

// A point in a stream's work.
struct Mark {
    size_t stream;
    Time time;
    Clock clock;
};

struct Op {
    Time time;
    Range target;
    Range source;
    std::function<void()> run;
};

struct StreamState {
    int device;
    Time issued = 0;
    Time work = 0;  // the last that was a kernel or a copy
    Time done = 0;
    Clock clock;
    std::deque<Op> queue;
};

struct Stats {
    int64_t allocated = 0;  // by tensors
    int64_t peak = 0;
    int64_t active = 0;  // and by what streams have yet to be done with
    int64_t active_peak = 0;
    int64_t capacity = int64_t{1} << 40;
};

// One for the process. All members are to be used under `lock`, which no code holds while it needs Python's.
class World {
public:
    static World& get();

    std::recursive_mutex lock;
    std::vector<std::unique_ptr<StreamState>> streams;
    std::vector<std::string> violations;
    bool raises = true;
    std::function<void(const std::string&, size_t)> on_wait;  // what the host has waited for, bytes; without `lock`
    Stats stats[kDevices];
    int64_t registered = 0;  // bytes of page-locked memory that others have made
    int64_t from_torch = 0;  // and of our own, as torch's allocator has it: in powers of two, which it keeps

    size_t number(const c10::Stream& stream) const;
    c10::Stream stream(size_t number) const;
    size_t new_stream(int device);

    // ---- work
    Time begin(size_t stream);  // the next point of a stream, behind all that the host has waited for
    Time begin_work(size_t stream) { return streams[stream]->work = begin(stream); }
    void run_until(size_t stream, Time time);
    void run_overlapping(const Range& range);  // whatever is queued that uses it
    void push(size_t stream, Op op) { streams[stream]->queue.push_back(std::move(op)); }
    std::shared_ptr<Mark> mark(size_t stream);
    void wait_for(size_t stream, const std::shared_ptr<Mark>& mark);
    bool is_done(const Mark& mark) const { return streams[mark.stream]->done >= mark.time; }
    bool host_knows(size_t stream, Time time) const { return host_.of(stream) >= time; }
    void host_waits(const Mark& mark);

    // ---- memory
    std::shared_ptr<Block> make(size_t num_bytes, int device);
    std::shared_ptr<Block> adopt(const c10::Storage& storage, int device);
    std::shared_ptr<Block> find(const void* pointer) const;
    std::shared_ptr<Block> add_host(char* begin, size_t num_bytes, bool owned);
    void remove(const std::shared_ptr<Block>& block) noexcept;
    void use(const Range& range, bool write, size_t stream, Time time, const std::string& what);
    void take_back();  // memory whose recorded streams are done with it

    void violation(const std::string& what, bool now);
    void raise_pending();

private:
    struct Left {
        std::shared_ptr<Block> block;
        std::vector<std::pair<size_t, Time>> until;
    };
    Clock host_;
    std::map<char*, std::shared_ptr<Block>> blocks_;  // by their ends
    std::vector<Left> left_;
    std::vector<std::string> unraised_;
    std::map<int64_t, int> spare_;  // by size: page-locked memory that is kept
    World();
    void enter(const std::shared_ptr<Block>& block);
};

using Guard = std::lock_guard<std::recursive_mutex>;

int current_device();
void set_current_device(int device);
size_t current_stream(int device);
void set_current_stream(size_t number);

c10::DataPtr allocate(size_t num_bytes, int device);
c10::DataPtr adopt(const c10::Storage& storage, int device);

// The host has waited: tell whoever counts. Not under the lock.
void waited(const std::string& what, size_t num_bytes);

void synchronize(size_t stream, const std::string& what);
void register_backend();  // hooks, guard, allocator: in backend.cpp
void register_kernels();  // in kernels.cpp

}  // namespace late
