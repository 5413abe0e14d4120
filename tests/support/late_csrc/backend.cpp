// SPDX-License-Identifier: Apache-2.0
//
// What torch asks of any device, for the late one: guard, hooks, allocators, generators.

#include "late.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace late {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Device device_at(int index) { return {kLate, static_cast<DeviceIndex>(index)}; }

int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }

// ---- streams and events

class LateGuard final : public c10::impl::DeviceGuardImplInterface {
public:
    c10::DeviceType type() const override { return kLate; }
    Device getDevice() const override { return device_at(current_device()); }
    void setDevice(Device device) const override { set_current_device(index_of(device)); }
    void uncheckedSetDevice(Device device) const noexcept override { set_current_device(index_of(device)); }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }

    Device exchangeDevice(Device device) const override
    {
        const auto before = getDevice();
        setDevice(device);
        return before;
    }

    Stream getStream(Device device) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        return world.stream(current_stream(index_of(device)));
    }

    Stream getDefaultStream(Device device) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        return world.stream(static_cast<size_t>(index_of(device)));
    }

    Stream getStreamFromGlobalPool(Device device, bool /*priority*/) const override { return getNewStream(device, 0); }

    Stream getNewStream(Device device, int /*priority*/) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        return world.stream(world.new_stream(index_of(device)));
    }

    Stream exchangeStream(Stream stream) const override
    {
        const auto before = getStream(stream.device());
        auto& world = World::get();
        Guard guard(world.lock);
        set_current_stream(world.number(stream));
        return before;
    }

    bool queryStream(const Stream& stream) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto number = world.number(stream);
        return world.host_knows(number, world.streams[number]->work);
    }

    void synchronizeStream(const Stream& stream) const override { synchronize(World::get().number(stream), "stream"); }

    void synchronizeDevice(const DeviceIndex device) const override
    {
        auto& world = World::get();
        const int index = device < 0 ? current_device() : device;
        bool was_done = true;
        {
            Guard guard(world.lock);
            for (size_t number = 0; number < world.streams.size(); ++number) {
                if (world.streams[number]->device != index) { continue; }
                was_done = was_done && world.host_knows(number, world.streams[number]->work);
                world.host_waits(*world.mark(number));
            }
        }
        if (!was_done) { waited("device", 0); }
    }

    using Held = std::shared_ptr<Mark>;

    void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        if (*event == nullptr) { *event = new Held; }
        *static_cast<Held*>(*event) = world.mark(world.number(stream));
    }

    void block(void* event, const Stream& stream) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        world.wait_for(world.number(stream), *static_cast<Held*>(event));
    }

    bool queryEvent(void* event) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto& mark = **static_cast<Held*>(event);
        const bool is_done = world.is_done(mark);
        if (is_done) { world.host_waits(mark); }  // it knows now
        return is_done;
    }

    void synchronizeEvent(void* event) const override
    {
        auto& world = World::get();
        const auto mark = *static_cast<Held*>(event);
        bool was_done = true;
        {
            Guard guard(world.lock);
            was_done = world.host_knows(mark->stream, mark->time);
            world.host_waits(*mark);
        }
        if (!was_done) { waited("event", 0); }
    }

    void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Held*>(event); }

    void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        if (const auto found = world.find(data.get())) { found->recorded.insert(world.number(stream)); }
    }
};

// ---- memory

c10::CachingDeviceAllocator::StatArray stat_of(int64_t current, int64_t peak)
{
    c10::CachingDeviceAllocator::StatArray found;
    found[0].current = current;
    found[0].peak = peak;
    return found;
}

class LateAllocator final : public c10::DeviceAllocator {
public:
    c10::DataPtr allocate(size_t num_bytes) override { return late::allocate(num_bytes, current_device()); }
    void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}

    void recordStream(const c10::DataPtr& data, Stream stream) override { LateGuard().recordDataPtrOnStream(data, stream); }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto& stats = world.stats[device];
        c10::CachingDeviceAllocator::DeviceStats found;
        found.allocated_bytes = found.requested_bytes = stat_of(stats.allocated, stats.peak);
        found.active_bytes = found.reserved_bytes = stat_of(stats.active, stats.active_peak);
        return found;
    }

    void resetAccumulatedStats(DeviceIndex) override {}

    void resetPeakStats(DeviceIndex device) override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        auto& stats = world.stats[device];
        world.take_back();
        stats.peak = stats.allocated;
        stats.active_peak = stats.active;
    }

    std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        world.take_back();
        const auto& stats = world.stats[device];
        return {static_cast<size_t>(std::max<int64_t>(0, stats.capacity - stats.active)), static_cast<size_t>(stats.capacity)};
    }
};

class PageLocked final : public c10::Allocator {
public:
    c10::DataPtr allocate(size_t num_bytes) override { return late::allocate(num_bytes, kHost); }
    void copy_data(void* dest, const void* src, size_t count) const override { std::memcpy(dest, src, count); }
};

LateAllocator allocator;
PageLocked page_locked;

// ---- hooks

class LateHooks final : public at::PrivateUse1HooksInterface {
public:
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
    void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }

    DeviceIndex exchangeDevice(DeviceIndex device) const override
    {
        const auto before = getCurrentDevice();
        set_current_device(device);
        return before;
    }

    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override
    {
        return device < 0 ? getCurrentDevice() : exchangeDevice(device);
    }

    bool isPinnedPtr(const void* data) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto found = world.find(data);
        return found != nullptr && found->device == kHost;
    }

    c10::Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }

    Device getDeviceFromPtr(void* data) const override
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto found = world.find(data);
        TORCH_CHECK(found != nullptr && found->device != kHost, "no memory of the late device");
        return device_at(found->device);
    }

    // The device draws with the processor's generator, of its own state.
    const at::Generator& getDefaultGenerator(DeviceIndex device) const override
    {
        static std::array<at::Generator, kDevices> made{at::detail::createCPUGenerator(), at::detail::createCPUGenerator(),
                                                        at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
        return made[device < 0 ? current_device() : device];
    }

    at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override
    {
        auto made = late::allocate(num_bytes, storage.device().index());
        if (const auto kept = std::min(num_bytes, storage.nbytes()); kept != 0) {
            auto& world = World::get();
            Guard guard(world.lock);
            const auto number = current_stream(storage.device().index());
            const auto time = world.begin_work(number);
            world.run_until(number, time);
            auto* source = static_cast<char*>(storage.mutable_data());
            auto* target = static_cast<char*>(made.get());
            world.use({source, source + kept}, false, number, time, "a resize");
            world.use({target, target + kept}, true, number, time, "a resize");
            std::memcpy(target, source, kept);
        }
        storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
        storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
    }
};

}  // namespace

void register_backend()
{
    c10::SetAllocator(kLate, &allocator);
    static LateGuard guard;
    c10::impl::device_guard_impl_registry[static_cast<size_t>(kLate)].store(&guard);
    static LateHooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace late
