// SPDX-License-Identifier: Apache-2.0
//
// An fp32 master as its low half and its rounding to bf16, and back: the kernel of ds_vertical/offload/masters/halves.py, whose
// note says which high half follows from a rounded number. The torch code there gives the same bits. Each way memory is gone
// through once, outside the interpreter lock.

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kBlock = 4096;              // elements that are worked on at a time, in the first cache
constexpr int64_t kAlone = int64_t(1) << 17;  // elements up to which one thread is enough
constexpr int64_t kLine = 64;                 // elements: threads part where a line of the cache begins, if the tensors do

// The high half, but of exceptions: one less than the rounded number where the low half is 0x8000 or more.
inline uint32_t high_of(uint16_t low, uint16_t rounded) { return (uint32_t(rounded) - (low >> 15)) & 0xFFFFu; }

// Rounded numbers, one tensor behind the other.
class Rounded {
public:
    explicit Rounded(const std::vector<at::Tensor>& tensors)
    {
        for (const auto& tensor : tensors) {
            if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kBFloat16 || !tensor.is_contiguous()) {
                throw std::invalid_argument("halves take rounded numbers in bf16, contiguous in host memory");
            }
            data_.push_back(reinterpret_cast<const uint16_t*>(tensor.data_ptr<at::BFloat16>()));
            starts_.push_back(numel_);
            numel_ += tensor.numel();
        }
        starts_.push_back(numel_);
    }
    int64_t numel() const { return numel_; }

    // Calls work(start, values, count) for each block of elements [first, last), in order, until it returns false.
    template <typename Work>
    void for_each_block(int64_t first, int64_t last, const Work& work) const
    {
        size_t index = std::upper_bound(starts_.begin(), starts_.end(), first) - starts_.begin() - 1;
        while (first < last) {
            while (starts_[index + 1] <= first) { ++index; }  // a tensor may be empty
            const int64_t end = std::min({last, starts_[index + 1], first + kBlock});
            if (!work(first, data_[index] + (first - starts_[index]), end - first)) { return; }
            first = end;
        }
    }

private:
    std::vector<const uint16_t*> data_;
    std::vector<int64_t> starts_;
    int64_t numel_ = 0;
};

void check_tensors(const at::Tensor& master, const Rounded& rounded, const at::Tensor& low)
{
    if (!master.device().is_cpu() || master.scalar_type() != at::kFloat || !master.is_contiguous()) {
        throw std::invalid_argument("halves take masters in fp32, contiguous in host memory");
    }
    if (!low.device().is_cpu() || low.scalar_type() != at::kShort || !low.is_contiguous()) {
        throw std::invalid_argument("halves take low halves in int16, contiguous in host memory");
    }
    if (low.numel() != master.numel() || rounded.numel() != master.numel()) {
        throw std::invalid_argument("halves take as many low halves and rounded numbers as masters");
    }
    if (master.numel() > std::numeric_limits<int32_t>::max()) {
        throw std::invalid_argument("halves take fewer than 2^31 masters");
    }
}

bool overlap(const at::Tensor& first, const at::Tensor& second)
{
    const auto* a = static_cast<const char*>(first.data_ptr());
    const auto* b = static_cast<const char*>(second.data_ptr());
    return a < b + second.nbytes() && b < a + first.nbytes();
}

// Cuts elements [first, last) into parts, one a thread, and calls work(part, first, last) for each.
template <typename Work>
void for_each_part(int64_t first, int64_t last, int threads, const Work& work)
{
    const int64_t numel = last - first, parts = numel <= kAlone ? 1 : std::max(threads, 1);
    const auto edge = [=](int64_t part) { return part == parts ? last : first + numel * part / parts / kLine * kLine; };
#pragma omp parallel for schedule(static) num_threads(int(parts))
    for (int64_t part = 0; part < parts; ++part) { work(part, edge(part), edge(part + 1)); }
}

// ---- split

struct Found {
    std::vector<int32_t> places;
    std::vector<int16_t> high;
};

// Returns whether the high half of any element of a block does not follow.
inline bool split_block(const uint32_t* __restrict master, const uint16_t* __restrict values, uint16_t* __restrict low,
                        int64_t count)
{
    uint32_t odd = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint16_t half = uint16_t(master[i]);
        low[i] = half;
        odd |= high_of(half, values[i]) ^ (master[i] >> 16);
    }
    return odd != 0;
}

std::optional<std::pair<at::Tensor, at::Tensor>> split(const at::Tensor& master, const std::vector<at::Tensor>& values,
                                                       at::Tensor& low, int64_t most, int threads)
{
    const Rounded rounded(values);
    check_tensors(master, rounded, low);
    if (overlap(master, low)) { throw std::invalid_argument("the low halves would overwrite the masters"); }
    for (const auto& each : values) {
        if (overlap(each, low)) { throw std::invalid_argument("the low halves would overwrite the rounded numbers"); }
    }
    const auto* from = static_cast<const uint32_t*>(master.data_ptr());
    auto* to = static_cast<uint16_t*>(low.data_ptr());
    std::atomic<int64_t> count{0};
    std::vector<Found> parts(std::max(threads, 1));
    for (auto& part : parts) {  // so that no thread of the team takes memory
        const size_t room = std::max<int64_t>(std::min(most, master.numel()) + 1, 0);
        part.places.reserve(room);
        part.high.reserve(room);
    }
    for_each_part(0, master.numel(), threads, [&](int64_t part, int64_t first, int64_t last) {
        Found& found = parts[part];
        rounded.for_each_block(first, last, [&](int64_t start, const uint16_t* block, int64_t numel) {
            if (!split_block(from + start, block, to + start, numel)) { return true; }
            for (int64_t i = start; i < start + numel && int64_t(found.places.size()) <= most; ++i) {
                if (high_of(to[i], block[i - start]) == from[i] >> 16) { continue; }
                found.places.push_back(int32_t(i));
                found.high.push_back(int16_t(from[i] >> 16));
                count.fetch_add(1, std::memory_order_relaxed);
            }
            return count.load(std::memory_order_relaxed) <= most;
        });
    });
    if (count > most) { return std::nullopt; }
    at::Tensor places = at::empty({count}, at::kInt), high = at::empty({count}, at::kShort);
    auto* next_place = places.data_ptr<int32_t>();
    auto* next_high = high.data_ptr<int16_t>();
    for (const auto& part : parts) {
        next_place = std::copy(part.places.begin(), part.places.end(), next_place);
        next_high = std::copy(part.high.begin(), part.high.end(), next_high);
    }
    return std::make_pair(places, high);
}

// ---- join

inline void join_block(const uint16_t* __restrict low, const uint16_t* __restrict values, uint32_t* __restrict master,
                       int64_t count)
{
    for (int64_t i = 0; i < count; ++i) { master[i] = high_of(low[i], values[i]) << 16 | low[i]; }
}

// Elements [first, last), of which no low half may lie in their masters.
void join_apart(const uint16_t* low, const Rounded& rounded, uint32_t* master, int64_t first, int64_t last, int threads)
{
    for_each_part(first, last, threads, [&](int64_t, int64_t start, int64_t end) {
        rounded.for_each_block(start, end, [&](int64_t place, const uint16_t* values, int64_t count) {
            join_block(low + place, values, master + place, count);
            return true;
        });
    });
}

// The low halves begin where the masters do. Those of the second half of all elements lie ahead of their masters: so second
// halves are joined, until a block is left, whose low halves are copied.
void join_in_place(const uint16_t* low, const Rounded& rounded, uint32_t* master, int threads)
{
    int64_t last = rounded.numel();
    while (last > kBlock) {
        const int64_t first = last - last / 2;
        join_apart(low, rounded, master, first, last, threads);
        last = first;
    }
    uint16_t copied[kBlock];
    std::memcpy(copied, low, last * sizeof(uint16_t));
    join_apart(copied, rounded, master, 0, last, 1);
}

void join(const at::Tensor& low, const std::vector<at::Tensor>& values, const at::Tensor& places, const at::Tensor& high,
          at::Tensor& master, int threads)
{
    const Rounded rounded(values);
    check_tensors(master, rounded, low);
    if (places.scalar_type() != at::kInt || high.scalar_type() != at::kShort || places.numel() != high.numel() ||
        !places.is_contiguous() || !high.is_contiguous()) {
        throw std::invalid_argument("halves take places in int32, and as many high halves in int16");
    }
    const auto* place = places.data_ptr<int32_t>();
    const auto* half = high.data_ptr<int16_t>();
    if (std::any_of(place, place + places.numel(), [&](int32_t each) { return each < 0 || each >= master.numel(); })) {
        throw std::invalid_argument("an exception's place lies behind the masters");
    }
    for (const auto& each : values) {
        if (overlap(each, master)) { throw std::invalid_argument("the masters would overwrite the rounded numbers"); }
    }
    auto* to = static_cast<uint32_t*>(master.data_ptr());
    const auto* from = static_cast<const uint16_t*>(low.data_ptr());
    if (!overlap(master, low)) {
        join_apart(from, rounded, to, 0, rounded.numel(), threads);
    } else if (low.data_ptr() == master.data_ptr()) {
        join_in_place(from, rounded, to, threads);
    } else {
        throw std::invalid_argument("low halves that lie in the masters begin where these do");
    }
    for (int64_t i = 0; i < places.numel(); ++i) {
        to[place[i]] = uint32_t(uint16_t(half[i])) << 16 | (to[place[i]] & 0xFFFFu);
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    using without_lock = pybind11::call_guard<pybind11::gil_scoped_release>;
    m.def("split", &split, "Low halves of masters, and exceptions; outside the interpreter lock", without_lock());
    m.def("join", &join, "Masters from what split has made of them; outside the interpreter lock", without_lock());
}
