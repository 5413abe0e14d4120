// SPDX-License-Identifier: Apache-2.0
//
// Kernels of the late device: the processor's, over the device's memory as it lies in host memory. So they have its bits.

#include "late.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <cstring>

namespace late {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

int number_of_device(const Tensor& tensor) { return tensor.device().index() < 0 ? current_device() : tensor.device().index(); }

bool is_late(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLate; }

Range range_of(const Tensor& tensor)
{
    if (tensor.numel() == 0 || tensor.layout() != c10::kStrided) { return {nullptr, nullptr}; }
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) { last += (tensor.size(dim) - 1) * tensor.stride(dim); }
    auto* begin = static_cast<char*>(tensor.unsafeGetTensorImpl()->mutable_data());
    return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

Tensor shaped(Tensor made, const Tensor& like)
{
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return made;
}

// ---- one call of a kernel

// The same memory as the processor's tensor. Its storage may grow, which then is another's memory.
Tensor over_host_memory(const Tensor& tensor)
{
    auto* data = tensor.storage().mutable_data();
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(data, c10::kCPU),
                         c10::GetAllocator(c10::kCPU), true);
    auto made = shaped(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU),
                                                                tensor.dtype()), tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) { made.unsafeGetTensorImpl()->set_wrapped_number(true); }
    return made;
}

class Call {
public:
    explicit Call(const c10::OperatorHandle& op) : name_(op.schema().name()) {}

    void run(const c10::OperatorHandle& op, torch::jit::Stack* stack);

private:
    struct Argument {
        Tensor own;
        Tensor there;
        bool write;
    };
    std::string name_;
    std::vector<Argument> arguments_;
    int device_ = -1;

    Tensor replace(const Tensor& tensor, bool write);
    void replace_argument(c10::IValue& value, const c10::Argument& argument);
    void replace_result(c10::IValue& value);
    Tensor result(const Tensor& found);
    size_t start();
    void settle();
};

Tensor Call::replace(const Tensor& tensor, bool write)
{
    if (!is_late(tensor)) { return tensor; }
    device_ = number_of_device(tensor);
    arguments_.push_back({tensor, over_host_memory(tensor), write});
    return arguments_.back().there;
}

void Call::replace_argument(c10::IValue& value, const c10::Argument& argument)
{
    const bool write = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
        value = replace(value.toTensor(), write);
    } else if (value.isTensorList()) {
        c10::List<Tensor> made;
        for (const Tensor& tensor : value.toTensorVector()) { made.push_back(replace(tensor, write)); }
        value = made;
    } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> made;
        for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
            made.push_back(tensor.has_value() ? std::optional<Tensor>(replace(*tensor, write)) : tensor);
        }
        value = made;
    } else if (value.isDevice() && value.toDevice().type() == kLate) {
        device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
        value = c10::Device(c10::kCPU);
    } else if (value.isNone() && argument.name() == "generator") {
        value = at::detail::getPrivateUse1Hooks().getDefaultGenerator(-1);
    }
}

Tensor Call::result(const Tensor& found)
{
    if (!found.defined() || !found.device().is_cpu()) { return found; }
    for (const auto& argument : arguments_) {
        if (argument.there.is_same(found)) { return argument.own; }
    }
    for (const auto& argument : arguments_) {
        if (argument.there.storage().is_alias_of(found.storage())) {
            return shaped(at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                                   c10::Storage(argument.own.storage()),
                                                                   argument.own.key_set(), found.dtype()), found);
        }
    }
    const int device = device_ < 0 ? current_device() : device_;
    c10::Storage storage(c10::Storage::use_byte_size_t(), found.storage().nbytes(), adopt(found.storage(), device),
                         c10::GetAllocator(kLate), true);
    return shaped(at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1),
                                                           found.dtype()), found);
}

void Call::replace_result(c10::IValue& value)
{
    if (value.isTensor()) {
        value = result(value.toTensor());
    } else if (value.isTensorList()) {
        c10::List<Tensor> made;
        for (const Tensor& tensor : value.toTensorVector()) { made.push_back(result(tensor)); }
        value = made;
    }
}

// All that is ahead in the stream, then the uses. Returns the stream.
size_t Call::start()
{
    auto& world = World::get();
    Guard guard(world.lock);
    const auto number = current_stream(device_);
    const auto time = world.begin_work(number);
    world.run_until(number, time);
    for (const auto& argument : arguments_) { world.use(range_of(argument.own), argument.write, number, time, name_); }
    return number;
}

// Outputs that the kernel has made larger, or given another shape.
void Call::settle()
{
    for (const auto& [own, there, write] : arguments_) {
        if (!write) { continue; }
        if (there.storage().data() != own.storage().data()) {
            auto* impl = own.storage().unsafeGetStorageImpl();
            impl->set_data_ptr_noswap(adopt(there.storage(), device_));
            impl->set_nbytes(there.storage().nbytes());
        }
        if (there.sizes() != own.sizes() || there.strides() != own.strides()) {
            own.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides(), there.storage_offset());
        }
    }
}

bool is_view(const c10::FunctionSchema& schema)
{
    for (const auto& found : schema.returns()) {
        if (found.alias_info() == nullptr || found.alias_info()->isWrite()) { return false; }
    }
    return !schema.returns().empty();
}

// Whether the host waits for what such a kernel finds: the size of its result, or a number.
bool is_waited_for(const c10::FunctionSchema& schema)
{
    static const std::set<std::string> sizes{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique",
                                             "aten::unique_dim", "aten::bincount"};
    if (sizes.count(schema.name()) != 0) { return true; }
    for (const auto& found : schema.returns()) {
        const auto kind = found.type()->kind();
        if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) { return true; }
    }
    return false;
}

void Call::run(const c10::OperatorHandle& op, torch::jit::Stack* stack)
{
    const auto& schema = op.schema();
    const auto first = stack->size() - schema.arguments().size();
    for (size_t index = 0; index < schema.arguments().size(); ++index) {
        replace_argument((*stack)[first + index], schema.arguments()[index]);
    }
    const bool computes = !is_view(schema) && !arguments_.empty();
    const size_t number = computes ? start() : 0;
    {
        at::AutoDispatchBelowADInplaceOrView below;
        op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    }
    if (computes && is_waited_for(schema)) { synchronize(number, name_); }
    settle();
    for (size_t index = stack->size() - schema.returns().size(); index < stack->size(); ++index) {
        replace_result((*stack)[index]);
    }
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op).run(op, stack); }

// ---- tensors

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kLate),
                                     DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>)
{
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             c10::GetAllocator(kLate), DispatchKeySet(DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

void grow(const Tensor& tensor, size_t num_bytes)
{
    if (tensor.storage().nbytes() < num_bytes) {
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), num_bytes);
    }
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format)
{
    const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    auto* impl = self.unsafeGetTensorImpl();
    if (self.sizes() != sizes) { impl->set_sizes_contiguous(sizes); }
    if (format.has_value()) { impl->empty_tensor_restride(*format); }
    grow(self, static_cast<size_t>(self.storage_offset() + self.numel()) * self.element_size());
    return self;
}

Tensor& set_storage_at(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                       c10::SymIntArrayRef stride)
{
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    if (stride.empty() && !sizes.empty()) {
        impl->set_storage_offset(offset.expect_int());
        impl->set_sizes_contiguous(sizes);
    } else {
        impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
    }
    return self;
}

Tensor& set_storage(Tensor& self, at::Storage source)
{
    const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
    return set_storage_at(self, std::move(source), 0, {c10::SymInt(numel)}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source)
{
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(source.storage());
    impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
    return self;
}

Tensor& set_nothing(Tensor& self)
{
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(c10::Storage(c10::Storage::use_byte_size_t(), 0, allocate(0, number_of_device(self)),
                                              c10::GetAllocator(kLate), true));
    impl->set_sizes_contiguous({0});
    impl->set_storage_offset(0);
    return self;
}

void record_stream(Tensor& self, c10::Stream stream)
{
    auto& world = World::get();
    Guard guard(world.lock);
    if (const auto block = world.find(self.storage().data())) { block->recorded.insert(world.number(stream)); }
}

at::Scalar local_scalar_dense(const Tensor& self)
{
    const auto number = current_stream(number_of_device(self));
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto time = world.begin_work(number);
        world.run_until(number, time);
        world.use(range_of(self), false, number, time, "item");
    }
    const auto found = at::_local_scalar_dense(over_host_memory(self));
    synchronize(number, "item");
    return found;
}

// ---- copies

bool is_dense_like(const Tensor& source, const Tensor& target)
{
    return source.dtype() == target.dtype() && source.sizes() == target.sizes() && source.strides() == target.strides() &&
           source.is_non_overlapping_and_dense();
}

Tensor as_host(const Tensor& tensor) { return is_late(tensor) ? over_host_memory(tensor) : tensor; }

// A copy that happens when it is waited for; see late.h.
void queue_copy(const Tensor& source, const Tensor& target, size_t number)
{
    auto& world = World::get();
    Guard guard(world.lock);
    const auto from = range_of(source), to = range_of(target);
    const auto time = world.begin_work(number);
    world.use(from, false, number, time, "a copy");
    world.use(to, true, number, time, "a copy");
    world.run_overlapping(to);  // ahead of the poison: uses that come before this copy
    std::memset(to.begin, kPoison, static_cast<size_t>(to.end - to.begin));
    const std::pair kept{world.find(from.begin), world.find(to.begin)};
    auto run = [from, to, kept] { std::memcpy(to.begin, from.begin, static_cast<size_t>(to.end - to.begin)); };
    world.push(number, {time, to, from, std::move(run)});
}

void copy_now(const Tensor& source, const Tensor& target, size_t number)
{
    {
        auto& world = World::get();
        Guard guard(world.lock);
        const auto time = world.begin_work(number);
        world.run_until(number, time);
        world.use(range_of(source), false, number, time, "a copy");
        world.use(range_of(target), true, number, time, "a copy");
    }
    at::AutoDispatchBelowADInplaceOrView below;
    auto there = as_host(target);
    there.copy_(as_host(source));
}

bool is_page_locked(const Tensor& tensor)
{
    return at::detail::getPrivateUse1Hooks().isPinnedPtr(tensor.storage().data());
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking)
{
    if (dst.numel() == 0) { return dst; }
    const auto source = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
    const bool among = is_late(source) && is_late(dst);
    const auto number = current_stream(number_of_device(is_late(dst) ? dst : source));
    const auto& host = is_late(dst) ? source : dst;
    if (!among && non_blocking && is_page_locked(host)) {
        if (is_dense_like(source, dst)) {
            queue_copy(source, dst, number);
            return dst;
        }
        if (is_late(source) && dst.is_contiguous()) {  // the device converts, ahead of the copy
            const auto converted = at::empty(dst.sizes(), source.options().dtype(dst.dtype()));
            copy_now(source, converted, number);
            queue_copy(converted, dst, number);
            return dst;
        }
    }
    copy_now(source, dst, number);
    if (!among) {
        const char* what = !non_blocking             ? "copy"
                           : is_page_locked(host) ? "copy that converts"
                                                  : "copy of pageable memory";
        synchronize(number, what);
    }
    return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst)
{
    dst.resize_(self.sizes());
    return copy_from(self, dst, false);
}

// ---- kernels that a device has and the processor has not: with the bits of what it computes instead

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train)
{
    if (!train.value_or(true) || p == 0) { return {input.mul(1), at::ones_like(input)}; }
    if (p == 1) { return {at::zeros_like(input), at::zeros_like(input)}; }
    const auto noise = at::empty_like(input);
    noise.bernoulli_(1 - p);
    noise.div_(1 - p);
    return {input.mul(noise), noise};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double) { return grad.mul(mask); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("resize_", &resize_);
    m.impl("set_.source_Storage_storage_offset", &set_storage_at);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("set_", &set_nothing);
    m.impl("record_stream", &record_stream);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("native_dropout", &native_dropout);
    m.impl("native_dropout_backward", &native_dropout_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

}  // namespace

Tensor in_a_kernel(const Tensor& tensor)
{
    auto& world = World::get();
    Guard guard(world.lock);
    const auto number = current_stream(number_of_device(tensor));
    const auto time = world.begin_work(number);
    world.run_until(number, time);
    world.use(range_of(tensor), true, number, time, "a collective");
    return over_host_memory(tensor);
}

// Also what a device may do without a kernel, where the processor has one: other code might give other bits.
void register_kernels()
{
    static std::vector<c10::RegistrationHandleRAII> kept;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        const auto op = dispatcher.findOp(name);
        const bool wanted = op.has_value() && op->hasSchema() && op->hasKernelForDispatchKey(DispatchKey::CPU) &&
                            !op->hasKernelForDispatchKey(DispatchKey::PrivateUse1);
        if (!wanted || name.name.rfind("aten::", 0) != 0) { continue; }
        kept.push_back(dispatcher.registerImpl(name, DispatchKey::PrivateUse1,
                                               c10::KernelFunction::makeFromBoxedFunction<&fall_back>(), std::nullopt,
                                               nullptr, "late device"));
    }
}

}  // namespace late
