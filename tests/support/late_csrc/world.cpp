// SPDX-License-Identifier: Apache-2.0
//
// Streams, events and memory of the late device; see late.h.

#include "late.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace late {

namespace {

constexpr size_t kAlignment = 512;

thread_local int device_of_thread = 0;
thread_local size_t stream_of_thread[kDevices] = {0, 1, 2, 3};

std::string name_of(size_t stream)
{
    return stream < kDevices ? "the default stream" : "stream " + std::to_string(stream);
}

size_t rounded(size_t num_bytes) { return (num_bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t power_of_two(size_t num_bytes)
{
    int64_t found = 1;
    while (found < static_cast<int64_t>(num_bytes)) { found *= 2; }
    return found;
}

}  // namespace

void Clock::raise(size_t stream, Time time)
{
    if (times_.size() <= stream) { times_.resize(stream + 1, 0); }
    times_[stream] = std::max(times_[stream], time);
}

void Clock::join(const Clock& other)
{
    for (size_t stream = 0; stream < other.times_.size(); ++stream) { raise(stream, other.times_[stream]); }
}

Block::~Block()
{
    if (device != kHost && range.begin != nullptr && owned) { std::memset(range.begin, kPoison, size()); }
    if (owned) { std::free(range.begin); }
}

World::World()
{
    for (int device = 0; device < kDevices; ++device) { new_stream(device); }
}

World& World::get()
{
    static World* world = new World;  // threads of torch may outlive what is static
    return *world;
}

size_t World::number(const c10::Stream& stream) const
{
    return stream.id() == 0 ? static_cast<size_t>(stream.device_index()) : static_cast<size_t>(stream.id());
}

c10::Stream World::stream(size_t number) const
{
    const c10::Device device(kLate, static_cast<c10::DeviceIndex>(streams[number]->device));
    const auto id = number < kDevices ? 0 : static_cast<c10::StreamId>(number);
    return c10::Stream(c10::Stream::UNSAFE, device, id);
}

size_t World::new_stream(int device)
{
    streams.push_back(std::make_unique<StreamState>());
    streams.back()->device = device;
    return streams.size() - 1;
}

// ---- work

Time World::begin(size_t stream)
{
    raise_pending();
    auto& state = *streams[stream];
    state.clock.join(host_);
    state.clock.raise(stream, ++state.issued);
    return state.issued;
}

void World::run_until(size_t stream, Time time)
{
    auto& state = *streams[stream];
    while (!state.queue.empty() && state.queue.front().time <= time) {
        const Op op = std::move(state.queue.front());
        state.queue.pop_front();
        op.run();
        state.done = std::max(state.done, op.time);
    }
    state.done = std::max(state.done, std::min(time, state.issued));
}

void World::run_overlapping(const Range& range)
{
    for (size_t stream = 0; stream < streams.size(); ++stream) {
        Time last = 0;
        for (const auto& op : streams[stream]->queue) {
            if (op.target.overlaps(range) || op.source.overlaps(range)) { last = op.time; }
        }
        if (last != 0) { run_until(stream, last); }
    }
}

std::shared_ptr<Mark> World::mark(size_t stream)
{
    const Time time = begin(stream);
    return std::make_shared<Mark>(Mark{stream, time, streams[stream]->clock});
}

void World::wait_for(size_t stream, const std::shared_ptr<Mark>& mark)
{
    const Time time = begin(stream);
    streams[stream]->clock.join(mark->clock);
    push(stream, {time, {}, {}, [this, mark] { run_until(mark->stream, mark->time); }});
}

void World::host_waits(const Mark& mark)
{
    run_until(mark.stream, mark.time);
    host_.join(mark.clock);
    take_back();
}

// ---- memory

void World::enter(const std::shared_ptr<Block>& block)
{
    if (block->size() == 0) { return; }
    blocks_[block->range.end] = block;
    if (block->device == kHost) { return; }
    auto& stats_of = stats[block->device];
    const auto size = static_cast<int64_t>(rounded(block->size()));
    stats_of.allocated += size;
    stats_of.active += size;
    stats_of.peak = std::max(stats_of.peak, stats_of.allocated);
    stats_of.active_peak = std::max(stats_of.active_peak, stats_of.active);
    // its own stream may have used the same memory for something else until now
    block->stream = current_stream(block->device);
    const Time time = begin(block->stream);
    block->uses.push_back({block->stream, time, block->range, true, "its allocation"});
}

std::shared_ptr<Block> World::make(size_t num_bytes, int device)
{
    take_back();
    if (device != kHost) {
        const auto& found = stats[device];
        const bool fits = found.active + static_cast<int64_t>(rounded(num_bytes)) <= found.capacity;
        TORCH_CHECK_WITH(OutOfMemoryError, fits, "the late device is out of memory: ", num_bytes, " bytes more than the ",
                         found.active, " in use, of ", found.capacity);
    }
    if (device == kHost && num_bytes != 0) {
        auto& spare = spare_[power_of_two(num_bytes)];
        if (spare != 0) {
            --spare;
        } else {
            from_torch += power_of_two(num_bytes);
        }
    }
    auto block = std::make_shared<Block>();
    block->device = device;
    block->owned = true;
    if (num_bytes != 0) {
        auto* begin = static_cast<char*>(std::aligned_alloc(kAlignment, rounded(num_bytes)));
        TORCH_CHECK(begin != nullptr, "no host memory for ", num_bytes, " bytes of the late device");
        std::memset(begin, kPoison, num_bytes);
        block->range = {begin, begin + num_bytes};
    }
    enter(block);
    return block;
}

std::shared_ptr<Block> World::adopt(const c10::Storage& storage, int device)
{
    auto block = std::make_shared<Block>();
    block->device = device;
    auto* begin = static_cast<char*>(storage.mutable_data());
    block->range = {begin, begin + storage.nbytes()};
    block->adopted = storage;
    enter(block);
    return block;
}

std::shared_ptr<Block> World::add_host(char* begin, size_t num_bytes, bool owned)
{
    auto block = std::make_shared<Block>();
    block->range = {begin, begin + num_bytes};
    block->owned = owned;
    registered += static_cast<int64_t>(num_bytes);
    enter(block);
    return block;
}

std::shared_ptr<Block> World::find(const void* pointer) const
{
    auto* address = const_cast<char*>(static_cast<const char*>(pointer));
    const auto found = blocks_.upper_bound(address);
    return found != blocks_.end() && found->second->range.begin <= address ? found->second : nullptr;
}

void World::remove(const std::shared_ptr<Block>& block) noexcept
{
    if (block->size() == 0) { return; }
    blocks_.erase(block->range.end);
    if (block->device == kHost) {
        if (block->owned) {
            ++spare_[power_of_two(block->size())];
        } else {
            registered -= static_cast<int64_t>(block->size());
            for (const auto& use : block->uses) {
                if (streams[use.stream]->done < use.time) {
                    violation("host memory is unregistered while " + use.what + " may use it", false);
                }
            }
        }
        return;  // what is queued keeps page-locked memory
    }
    auto& own = *streams[block->stream];
    Clock known = own.clock;
    known.join(host_);
    Left left{block, {}};
    for (const auto& use : block->uses) {
        if (use.stream == block->stream || known.of(use.stream) >= use.time) { continue; }
        if (block->recorded.count(use.stream) != 0) {
            left.until.emplace_back(use.stream, use.time);
            continue;
        }
        std::ostringstream text;
        text << "memory of " << name_of(block->stream) << " is freed while " << use.what << " on " << name_of(use.stream)
             << " may still use it: neither waited for nor recorded (record_stream)";
        violation(text.str(), false);
    }
    const auto size = static_cast<int64_t>(rounded(block->size()));
    stats[block->device].allocated -= size;
    if (left.until.empty()) {
        stats[block->device].active -= size;
    } else {
        left_.push_back(std::move(left));
    }
}

void World::take_back()
{
    auto over = [this](const Left& left) {
        return std::all_of(left.until.begin(), left.until.end(),
                           [this](const auto& point) { return host_knows(point.first, point.second); });
    };
    for (const auto& left : left_) {
        if (over(left)) { stats[left.block->device].active -= static_cast<int64_t>(rounded(left.block->size())); }
    }
    left_.erase(std::remove_if(left_.begin(), left_.end(), over), left_.end());
}

void World::use(const Range& range, bool write, size_t stream, Time time, const std::string& what)
{
    if (range.begin == range.end) { return; }
    const auto block = find(range.begin);
    if (block == nullptr) { return; }  // pageable host memory
    const auto& clock = streams[stream]->clock;
    auto& uses = block->uses;
    for (const auto& use : uses) {
        const bool conflicts = (use.write || write) && use.range.overlaps(range) && use.stream != stream;
        if (conflicts && clock.of(use.stream) < use.time) {
            std::ostringstream text;
            text << "a race: " << what << (write ? " writes on " : " reads on ") << name_of(stream) << " what " << use.what
                 << (use.write ? " writes on " : " reads on ") << name_of(use.stream) << ", and neither waits for the other";
            violation(text.str(), true);
            break;
        }
    }
    auto is_covered = [&](const Use& use) {
        const bool same = use.stream == stream && use.write == write;
        return range.contains(use.range) && (same || (write && clock.of(use.stream) >= use.time));
    };
    uses.erase(std::remove_if(uses.begin(), uses.end(), is_covered), uses.end());
    uses.push_back({stream, time, range, write, what});
}

// ---- what is wrong

void World::violation(const std::string& what, bool now)
{
    violations.push_back(what);
    if (!raises) { return; }
    if (now) { TORCH_CHECK(false, "late device: ", what); }
    unraised_.push_back(what);
}

void World::raise_pending()
{
    if (unraised_.empty()) { return; }
    const std::string what = unraised_.front();
    unraised_.clear();
    TORCH_CHECK(false, "late device: ", what);
}

// ---- of the calling thread

int current_device() { return device_of_thread; }

void set_current_device(int device)
{
    TORCH_CHECK(0 <= device && device < kDevices, "there is no late device ", device);
    device_of_thread = device;
}

size_t current_stream(int device) { return stream_of_thread[device]; }

void set_current_stream(size_t number) { stream_of_thread[World::get().streams[number]->device] = number; }

void waited(const std::string& what, size_t num_bytes)
{
    const auto& tell = World::get().on_wait;
    if (tell) { tell(what, num_bytes); }
}

void synchronize(size_t stream, const std::string& what)
{
    auto& world = World::get();
    bool was_done = true;
    {
        Guard guard(world.lock);
        was_done = world.host_knows(stream, world.streams[stream]->work);
        world.host_waits(*world.mark(stream));
    }
    if (!was_done) { waited(what, 0); }
}

// ---- storage

namespace {

void give_up(void* context)
{
    auto* block = static_cast<std::shared_ptr<Block>*>(context);
    auto& world = World::get();
    {
        Guard guard(world.lock);
        world.remove(*block);
    }
    delete block;
}

c10::DataPtr pointer_to(std::shared_ptr<Block> block)
{
    const c10::Device device = block->device == kHost ? c10::Device(c10::DeviceType::CPU)
                                                      : c10::Device(kLate, static_cast<c10::DeviceIndex>(block->device));
    auto* begin = block->range.begin;
    return {begin, new std::shared_ptr<Block>(std::move(block)), &give_up, device};
}

}  // namespace

c10::DataPtr allocate(size_t num_bytes, int device)
{
    auto& world = World::get();
    Guard guard(world.lock);
    return pointer_to(world.make(num_bytes, device));
}

c10::DataPtr adopt(const c10::Storage& storage, int device)
{
    auto& world = World::get();
    Guard guard(world.lock);
    return pointer_to(world.adopt(storage, device));
}

}  // namespace late
