// SPDX-License-Identifier: Apache-2.0
//
// What every forward of a block does many times, without the interpreter:
// - a tensor as it is, behind a node of its own in the graph: what [Note: joints] in module_hooks.py needs;
// - a module's call with such nodes at its ends, as torch makes it of the hooks there: see [Note: short calls] there;
// - the host's part of what torch keeps per thread, captured and put back (`thread_state.HostState` in Python gives the same).

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

struct Joint : torch::autograd::Function<Joint> {
    // Detached as stock's own nodes do it: the memory and the count of writes stay the tensor's, and it is no view to autograd.
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) { return tensor.detach(); }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grads)
    {
        return grads;
    }
};

// ---- a module's call

// The tables of a module's hooks, by their names in its dict, and those of all modules.
struct Tables {
    PyObject* forward_pre = PyUnicode_InternFromString("_forward_pre_hooks");
    PyObject* forward = PyUnicode_InternFromString("_forward_hooks");
    PyObject* backward = PyUnicode_InternFromString("_backward_hooks");
    PyObject* backward_pre = PyUnicode_InternFromString("_backward_pre_hooks");
    PyObject* call_impl = PyUnicode_InternFromString("_call_impl");
    PyObject* own_forward = PyUnicode_InternFromString("forward");
    PyObject* compiling = PyUnicode_InternFromString("_is_compiling_flag");
    PyObject* compiler = nullptr;             // the dict of torch.compiler
    std::array<PyObject*, 4> of_all{};        // forward's first
};

Tables& tables()
{
    static Tables made = [] {
        Tables found;
        THPObjectPtr modules(PyImport_ImportModule("torch.nn.modules.module"));
        THPObjectPtr compiler(PyImport_ImportModule("torch.compiler"));
        if (!modules || !compiler) throw python_error();
        found.compiler = PyModule_GetDict(compiler.get());
        Py_INCREF(found.compiler);
        const char* names[] = {
            "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"};
        for (size_t i = 0; i < found.of_all.size(); ++i) {
            found.of_all[i] = PyObject_GetAttrString(modules.get(), names[i]);
            if (!found.of_all[i]) throw python_error();
        }
        return found;
    }();
    return made;
}

bool is_empty(PyObject* table) { return table && PyDict_Check(table) && PyDict_GET_SIZE(table) == 0; }

// Whether the table under a name holds one hook, and that is `hook`.
bool holds_alone(PyObject* dict, PyObject* name, PyObject* hook)
{
    PyObject* table = PyDict_GetItemWithError(dict, name);
    if (!table || !PyDict_Check(table) || PyDict_GET_SIZE(table) != 1) return false;
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t place = 0;
    return PyDict_Next(table, &place, &key, &value) && value == hook;
}

bool is_plain_tensor(PyObject* value)
{
    return Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(THPVariableClass) && !THPVariable_Unpack(value).is_nested();
}

bool is_no_tensor(PyObject* value)
{
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
        PyUnicode_CheckExact(value);
}

bool all_known(PyObject* values)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); ++i) {
        PyObject* value = PyTuple_GET_ITEM(values, i);
        if (!is_plain_tensor(value) && !is_no_tensor(value)) return false;
    }
    return true;
}

PyObject* behind_node(PyObject* value)
{
    HANDLE_TH_ERRORS
    return is_no_tensor(value) ? Py_NewRef(value) : THPVariable_Wrap(Joint::apply(THPVariable_Unpack(value)));
    END_HANDLE_TH_ERRORS
}

// A tuple of known values, the tensors among them behind nodes. nullptr and an error of Python's where that cannot be.
PyObject* all_behind_nodes(PyObject* values)
{
    THPObjectPtr made(PyTuple_New(PyTuple_GET_SIZE(values)));
    if (!made) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); ++i) {
        PyObject* value = behind_node(PyTuple_GET_ITEM(values, i));
        if (!value) return nullptr;
        PyTuple_SET_ITEM(made.get(), i, value);
    }
    return made.release();
}

// Called with the arguments of a module's call, (args, kwargs). Where the module has `hook` at both ends and no other hook, and
// all values are of known kinds, it does what torch's `_call_impl` does. Else it calls that, or behind the forward `behind`.
// Nothing of torch's may be open around the module's forward, such as a handler of warnings: a forward parks in there, and what
// torch keeps per thread would point into the stack of a coroutine that is away.
struct NodesAround {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject* module;
    PyObject* hook;
    PyObject* behind;
};

bool can_be_short(const NodesAround* own, PyObject* dict, PyObject* args)
{
    const Tables& names = tables();
    for (PyObject* table : names.of_all) {
        if (!is_empty(table)) return false;
    }
    return PyDict_GetItemWithError(names.compiler, names.compiling) == Py_False && !torch::jit::tracer::isTracing() &&
        holds_alone(dict, names.forward_pre, own->hook) && holds_alone(dict, names.forward, own->hook) &&
        is_empty(PyDict_GetItemWithError(dict, names.backward)) &&
        is_empty(PyDict_GetItemWithError(dict, names.backward_pre)) && all_known(args);
}

PyObject* what_hooks_make(const NodesAround* own, PyObject* dict, PyObject* args, PyObject* kwargs, PyObject* result)
{
    const Tables& names = tables();
    if (!holds_alone(dict, names.forward, own->hook) || !is_empty(names.of_all[0])) {  // the forward has put one on
        return PyObject_CallFunctionObjArgs(own->behind, own->module, args, kwargs, result, nullptr);
    }
    if (is_plain_tensor(result) || is_no_tensor(result)) return behind_node(result);
    if (PyTuple_CheckExact(result) && all_known(result)) return all_behind_nodes(result);
    THPObjectPtr made(PyObject_CallFunctionObjArgs(own->hook, own->module, args, result, nullptr));
    return made && made.get() == Py_None ? Py_NewRef(result) : made.release();
}

PyObject* call(PyObject* self, PyObject* const* given, size_t num_given, PyObject* names_given)
{
    const auto* own = reinterpret_cast<NodesAround*>(self);
    if (PyVectorcall_NARGS(num_given) != 2 || names_given || !PyTuple_CheckExact(given[0]) || !PyDict_CheckExact(given[1])) {
        PyErr_SetString(PyExc_TypeError, "a tuple of arguments and a dict are expected");
        return nullptr;
    }
    PyObject *args = given[0], *kwargs = given[1];
    THPObjectPtr dict(PyObject_GenericGetDict(own->module, nullptr));
    if (!dict) return nullptr;
    if (!can_be_short(own, dict, args)) {
        if (PyErr_Occurred()) return nullptr;
        THPObjectPtr whole(PyObject_GetAttr(own->module, tables().call_impl));
        return whole ? PyObject_Call(whole, args, kwargs) : nullptr;
    }
    THPObjectPtr behind_nodes(all_behind_nodes(args));
    if (!behind_nodes) return nullptr;
    THPObjectPtr forward(PyObject_GetAttr(own->module, tables().own_forward));
    if (!forward) return nullptr;
    THPObjectPtr result(PyObject_Call(forward, behind_nodes, PyDict_GET_SIZE(kwargs) ? kwargs : nullptr));
    return result ? what_hooks_make(own, dict, behind_nodes, kwargs, result) : nullptr;
}

PyObject* new_nodes_around(PyTypeObject* type, PyObject* args, PyObject*)
{
    PyObject *module = nullptr, *hook = nullptr, *behind = nullptr;
    if (!PyArg_ParseTuple(args, "OOO", &module, &hook, &behind)) return nullptr;
    auto* own = reinterpret_cast<NodesAround*>(type->tp_alloc(type, 0));
    if (!own) return nullptr;
    own->vectorcall = call;
    own->module = Py_NewRef(module);
    own->hook = Py_NewRef(hook);
    own->behind = Py_NewRef(behind);
    return reinterpret_cast<PyObject*>(own);
}

int traverse(PyObject* self, visitproc visit, void* arg)
{
    auto* own = reinterpret_cast<NodesAround*>(self);
    Py_VISIT(own->module);
    Py_VISIT(own->hook);
    Py_VISIT(own->behind);
    return 0;
}

int clear(PyObject* self)
{
    auto* own = reinterpret_cast<NodesAround*>(self);
    Py_CLEAR(own->module);
    Py_CLEAR(own->hook);
    Py_CLEAR(own->behind);
    return 0;
}

void dealloc(PyObject* self)
{
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free(self);
}

PyTypeObject* nodes_around_type()
{
    static PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "ds_vertical.NodesAround";
    type.tp_basicsize = sizeof(NodesAround);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    type.tp_vectorcall_offset = offsetof(NodesAround, vectorcall);
    type.tp_call = PyVectorcall_Call;
    type.tp_new = new_nodes_around;
    type.tp_traverse = traverse;
    type.tp_clear = clear;
    type.tp_dealloc = dealloc;
    if (PyType_Ready(&type) < 0) throw python_error();
    return &type;
}

// ---- what torch keeps per thread

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

    static RandomStream now()
    {
        at::Generator generator = at::detail::getDefaultCPUGenerator();
        std::lock_guard<std::mutex> lock(generator.mutex());
        auto* own = at::check_generator<at::CPUGeneratorImpl>(generator);
        return {own->engine(), own->next_float_normal_sample(), own->next_double_normal_sample()};
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
            RandomStream::now(),
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

    at::Tensor rng() const
    {
        at::Generator made = at::detail::createCPUGenerator();
        random.put_into(made);
        return made.get_state();
    }

    HostState with_rng_of(const HostState& other) const
    {
        HostState made = *this;
        made.random = other.random;
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

    pybind11::tuple settings_values() const
    {
        namespace py = pybind11;
        const auto& [flash, efficient, math, cudnn] = settings.attention;
        py::object precision = py::none();
        if (settings.precision >= 0) precision = py::str(kPrecisions[settings.precision]);
        return py::make_tuple(
            settings.dtype, py::make_tuple(settings.deterministic[0], settings.deterministic[1]),
            py::make_tuple(flash, efficient, math, cudnn), precision);
    }
};

// What captures the state of a thread, for these kinds of device.
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
    namespace py = pybind11;
    tables();
    module.def("joint", [](const at::Tensor& tensor) { return Joint::apply(tensor); });
    module.attr("NodesAround") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(nodes_around_type()));
    py::class_<HostState>(module, "HostState", py::module_local())
        .def_readonly("grad", &HostState::grad)
        .def_readonly("inference", &HostState::inference)
        .def_property_readonly("autocast", &HostState::autocast_values)
        .def_readonly("autocast_cache", &HostState::autocast_cache)
        .def_readonly("autocast_nesting", &HostState::nesting)
        .def_property_readonly("rng", &HostState::rng)
        .def_property_readonly("settings", &HostState::settings_values)
        .def("apply", &HostState::apply)
        .def("apply_rng", &HostState::apply_rng)
        .def("with_rng_of", &HostState::with_rng_of)
        .def("without_autocast_cache", &HostState::without_autocast_cache);
    py::class_<StateReader>(module, "StateReader", py::module_local())
        .def(py::init<const std::vector<at::Device>&>())
        .def("capture", &StateReader::capture);
}
