// SPDX-License-Identifier: Apache-2.0
//
// What torch keeps per thread on the host, and settings of the process, captured and put back without the interpreter. `HostState`
// of ds_vertical/model/thread_state.py gives the same in Python.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

constexpr std::array<const char*, 3> kPrecisions{"highest", "high", "medium"};

struct Settings {
    at::ScalarType dtype;
    std::array<bool, 2> deterministic;
    std::array<bool, 4> attention;
    int precision;  // of products in fp32; -1: torch has none, as where the script has set its newer keys for it

    static Settings now()
    {
        const at::Context& context = at::globalContext();
        return {
            at::typeMetaToScalarType(at::get_default_dtype()),
            {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly()},
            {context.userEnabledFlashSDP(), context.userEnabledMemEfficientSDP(), context.userEnabledMathSDP(),
             context.userEnabledCuDNNSDP()},
            precision_now(context),
        };
    }

    static int precision_now(const at::Context& context)
    {
        try {
            switch (context.float32MatmulPrecision()) {
                case at::Float32MatmulPrecision::HIGHEST: return 0;
                case at::Float32MatmulPrecision::HIGH: return 1;
                case at::Float32MatmulPrecision::MEDIUM: return 2;
            }
        } catch (const c10::Error&) {
        }
        return -1;
    }

    bool operator==(const Settings& other) const
    {
        return dtype == other.dtype && deterministic == other.deterministic && attention == other.attention &&
            precision == other.precision;
    }
};

struct Autocast {
    at::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
};

int autocast_nesting()
{
    const int depth = at::autocast::increment_nesting() - 1;
    at::autocast::decrement_nesting();
    return depth;
}

// Of the host's random numbers: what torch's `get_rng_state` gives, without its form of bytes.
struct RandomStream {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;

    static RandomStream of(at::Generator generator)
    {
        std::lock_guard<std::mutex> lock(generator.mutex());
        auto* own = at::check_generator<at::CPUGeneratorImpl>(generator);
        return {own->engine(), own->next_float_normal_sample(), own->next_double_normal_sample()};
    }

    static RandomStream from_bytes(const at::Tensor& bytes)
    {
        at::Generator made = at::detail::createCPUGenerator();
        made.set_state(bytes);
        return of(made);
    }

    at::Tensor to_bytes() const
    {
        at::Generator made = at::detail::createCPUGenerator();
        put_into(made);
        return made.get_state();
    }

    void put_into(at::Generator generator) const
    {
        std::lock_guard<std::mutex> lock(generator.mutex());
        auto* own = at::check_generator<at::CPUGeneratorImpl>(generator);
        own->set_engine(engine);
        own->set_next_float_normal_sample(next_float);
        own->set_next_double_normal_sample(next_double);
    }
};

struct HostState {
    bool grad;
    bool inference;
    std::vector<Autocast> autocast;
    bool autocast_cache;
    int nesting;
    RandomStream random;
    Settings settings;

    static HostState capture(const std::vector<at::DeviceType>& kinds)
    {
        std::vector<Autocast> autocast;
        autocast.reserve(kinds.size());
        for (const auto kind : kinds) {
            autocast.push_back({kind, at::autocast::is_autocast_enabled(kind), at::autocast::get_autocast_dtype(kind)});
        }
        return {
            c10::GradMode::is_enabled(),
            c10::InferenceMode::is_enabled(),
            std::move(autocast),
            at::autocast::is_autocast_cache_enabled(),
            autocast_nesting(),
            RandomStream::of(at::detail::getDefaultCPUGenerator()),
            Settings::now(),
        };
    }

    // Puts all back but inference mode and the settings. Returns whether the process's settings are those of then.
    bool apply() const
    {
        for (const auto& each : autocast) {
            at::autocast::set_autocast_enabled(each.type, each.enabled);
            at::autocast::set_autocast_dtype(each.type, each.dtype);
        }
        at::autocast::set_autocast_cache_enabled(autocast_cache);
        const int now = autocast_nesting();
        for (int depth = now; depth < nesting; ++depth) at::autocast::increment_nesting();
        for (int depth = nesting; depth < now; ++depth) at::autocast::decrement_nesting();
        apply_rng();
        c10::GradMode::set_enabled(grad);
        return settings == Settings::now();
    }

    void apply_rng() const { random.put_into(at::detail::getDefaultCPUGenerator()); }

    // `other`: one of these, or one in Python.
    HostState with_rng_of(const py::object& other) const
    {
        HostState made = *this;
        made.random = py::isinstance<HostState>(other) ? other.cast<const HostState&>().random
                                                       : RandomStream::from_bytes(other.attr("rng").cast<at::Tensor>());
        return made;
    }

    HostState without_autocast_cache() const
    {
        HostState made = *this;
        made.autocast_cache = false;
        return made;
    }

    std::vector<std::tuple<std::string, bool, at::ScalarType>> autocast_values() const
    {
        std::vector<std::tuple<std::string, bool, at::ScalarType>> made;
        for (const auto& each : autocast) made.emplace_back(c10::DeviceTypeName(each.type, true), each.enabled, each.dtype);
        return made;
    }

    py::tuple settings_values() const
    {
        const auto& [flash, efficient, math, cudnn] = settings.attention;
        py::object precision = py::none();
        if (settings.precision >= 0) precision = py::str(kPrecisions[settings.precision]);
        return py::make_tuple(
            settings.dtype, py::make_tuple(settings.deterministic[0], settings.deterministic[1]),
            py::make_tuple(flash, efficient, math, cudnn), precision);
    }
};

// What captures the state of the calling thread, for these kinds of device.
class StateReader {
public:
    explicit StateReader(const std::vector<at::Device>& devices)
    {
        for (const auto& device : devices) kinds_.push_back(device.type());
    }

    HostState capture() const { return HostState::capture(kinds_); }

private:
    std::vector<at::DeviceType> kinds_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    py::class_<HostState>(module, "HostState", py::module_local())
        .def_readonly("grad", &HostState::grad)
        .def_readonly("inference", &HostState::inference)
        .def_property_readonly("autocast", &HostState::autocast_values)
        .def_readonly("autocast_cache", &HostState::autocast_cache)
        .def_readonly("autocast_nesting", &HostState::nesting)
        .def_property_readonly("rng", [](const HostState& state) { return state.random.to_bytes(); })
        .def_property_readonly("settings", &HostState::settings_values)
        .def("apply", &HostState::apply)
        .def("apply_rng", &HostState::apply_rng)
        .def("with_rng_of", &HostState::with_rng_of)
        .def("without_autocast_cache", &HostState::without_autocast_cache);
    py::class_<StateReader>(module, "StateReader", py::module_local())
        .def(py::init<const std::vector<at::Device>&>())
        .def("capture", &StateReader::capture);
}
