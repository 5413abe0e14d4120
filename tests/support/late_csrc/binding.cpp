// SPDX-License-Identifier: Apache-2.0
//
// The late device for Python: see late_device.py.

#include "late.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace late {
at::Tensor in_a_kernel(const at::Tensor& tensor);  // the memory as the processor's tensor, for a kernel that begins now
}

namespace {

using late::Guard;
using late::World;

std::vector<std::string> take_violations()
{
    auto& world = World::get();
    Guard guard(world.lock);
    std::vector<std::string> found;
    found.swap(world.violations);
    return found;
}

void set_raises(bool raises)
{
    auto& world = World::get();
    Guard guard(world.lock);
    world.raises = raises;
    try {
        world.raise_pending();
    } catch (const std::exception&) {  // it stands in the list
    }
}

void set_on_wait(const py::object& tell)
{
    auto& world = World::get();
    if (tell.is_none()) {
        world.on_wait = nullptr;
        return;
    }
    auto* kept = new py::object(tell);  // never freed: a thread of torch may be inside
    world.on_wait = [kept](const std::string& what, size_t num_bytes) {
        py::gil_scoped_acquire acquire;
        (*kept)(what, num_bytes);
    };
}

void set_capacity(int device, int64_t num_bytes)
{
    auto& world = World::get();
    Guard guard(world.lock);
    world.stats[device].capacity = num_bytes;
}

std::pair<int64_t, int64_t> page_locked_bytes()
{
    auto& world = World::get();
    Guard guard(world.lock);
    return {world.registered, world.from_torch};
}

void register_host(uintptr_t address, size_t num_bytes)
{
    auto& world = World::get();
    Guard guard(world.lock);
    world.add_host(reinterpret_cast<char*>(address), num_bytes, false);
}

bool unregister_host(uintptr_t address)
{
    auto& world = World::get();
    Guard guard(world.lock);
    const auto found = world.find(reinterpret_cast<const void*>(address));
    if (found == nullptr || found->owned || found->device != late::kHost) { return false; }
    world.remove(found);
    return true;
}

std::pair<size_t, int64_t> point(int64_t stream_id, int device)
{
    auto& world = World::get();
    Guard guard(world.lock);
    const auto number = stream_id == 0 ? static_cast<size_t>(device) : static_cast<size_t>(stream_id);
    return {number, static_cast<int64_t>(world.streams[number]->issued)};
}

bool is_behind(size_t stream, int64_t time)
{
    auto& world = World::get();
    Guard guard(world.lock);
    const auto& current = *world.streams[late::current_stream(late::current_device())];
    return current.clock.of(stream) >= static_cast<late::Time>(time);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    m.def("register", [] {
        late::register_backend();
        late::register_kernels();
    });
    m.attr("num_devices") = late::kDevices;
    m.def("default_generator", [](int device) -> at::Generator {
        return at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(device));
    });
    m.def("in_a_kernel", &late::in_a_kernel);
    m.def("take_violations", &take_violations);
    m.def("set_raises", &set_raises);
    m.def("set_on_wait", &set_on_wait);
    m.def("set_capacity", &set_capacity);
    m.def("page_locked_bytes", &page_locked_bytes);  // that others have registered; that torch has allocated
    m.def("point", &point);  // how far a stream's work goes by now: its number, and a time
    m.def("is_behind", &is_behind);  // whether such a point is ahead of all that the current stream is given from now on
    m.def("register_host", &register_host);
    m.def("unregister_host", &unregister_host);
}
