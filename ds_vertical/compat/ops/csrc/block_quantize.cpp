// SPDX-License-Identifier: Apache-2.0
//
// Numbers in 8 or 4 bits, block by block: the kernel of ds_vertical/distributed/quantize.py, whose notes say how it rounds and
// what a row of bytes holds. The torch code there gives the same bits. So nothing here may be contracted to a fused multiply-add:
// this file is compiled with -ffp-contract=off.
//
// A row is one segment here. Rows may be parts of longer ones: their stride is the tensor's.

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace {

constexpr int64_t kPiece = 256;              // elements that are worked on at a time, in the first cache
constexpr int64_t kAlone = int64_t(1) << 15;  // elements up to which one thread is enough
constexpr float kLeastScale = FLT_MIN;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a float added to it is rounded to an integer, ties to even
constexpr int32_t kMagicBits = 0x4B400000;

template <typename To, typename From>
inline To bits_of(From value)
{
    To found;
    static_assert(sizeof(To) == sizeof(From), "of one size");
    std::memcpy(&found, &value, sizeof(To));
    return found;
}

// ---- from and to the tensors' dtypes

inline void load(const float* from, float* to, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }

inline void load(const at::BFloat16* from, float* to, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) { to[i] = bits_of<float>(uint32_t(from[i].x) << 16); }
}

inline void load(const at::Half* from, float* to, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) { to[i] = static_cast<float>(from[i]); }
}

inline void store(const float* from, float* to, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }

inline void store(const float* from, at::BFloat16* to, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_of<uint32_t>(from[i]);
        const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        to[i].x = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
    }
}

inline void store(const float* from, at::Half* to, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) { to[i] = from[i]; }
}

// ---- codes

struct Scale {
    float scale;
    float inverse;  // 0 where the scale is nan
};

// `absmax_bits`: of the largest magnitude, which orders as an integer, inf and nan behind all others.
inline Scale scale_of(int32_t absmax_bits, float largest)
{
    if (absmax_bits >= 0x7F800000) { return {std::numeric_limits<float>::quiet_NaN(), 0.0f}; }
    const float most = std::nextafter(FLT_MAX / largest, 0.0f);
    const float scale = std::min(std::max(bits_of<float>(absmax_bits) * (1.0f / largest), kLeastScale), most);
    return {scale, 1.0f / scale};
}

inline void encode(const float* from, float inverse, int32_t largest, int8_t* codes, int64_t count)
{
    for (int64_t i = 0; i < count; ++i) {
        const int32_t code = bits_of<int32_t>(from[i] * inverse + kMagic) - kMagicBits;
        codes[i] = static_cast<int8_t>(std::min(std::max(code, -largest), largest));
    }
}

inline void pack(const int8_t* codes, uint8_t* bytes, int64_t count)  // count is even
{
    for (int64_t i = 0; i < count / 2; ++i) {
        bytes[i] = static_cast<uint8_t>((codes[2 * i] + 8) | ((codes[2 * i + 1] + 8) << 4));
    }
}

inline void unpack(const uint8_t* bytes, int8_t* codes, int64_t count)
{
    for (int64_t i = 0; i < count / 2; ++i) {
        codes[2 * i] = static_cast<int8_t>((bytes[i] & 15) - 8);
        codes[2 * i + 1] = static_cast<int8_t>((bytes[i] >> 4) - 8);
    }
}

template <typename T>
void quantize_block(const T* from, int64_t count, uint8_t* scale_place, uint8_t* bytes, int64_t bits)
{
    float values[kPiece];
    int8_t codes[kPiece];
    const int32_t largest = bits == 8 ? 127 : 7;
    int32_t absmax = 0;
    for (int64_t first = 0; first < count; first += kPiece) {
        const int64_t part = std::min(kPiece, count - first);
        load(from + first, values, part);
        for (int64_t i = 0; i < part; ++i) { absmax = std::max(absmax, bits_of<int32_t>(values[i]) & 0x7FFFFFFF); }
    }
    const Scale found = scale_of(absmax, static_cast<float>(largest));
    std::memcpy(scale_place, &found.scale, sizeof(float));
    for (int64_t first = 0; first < count; first += kPiece) {
        const int64_t part = std::min(kPiece, count - first);
        if (found.inverse == 0.0f) {  // inf and nan have no code
            std::fill_n(codes, part, int8_t(0));
        } else {
            load(from + first, values, part);
            encode(values, found.inverse, largest, codes, part);
        }
        if (bits == 8) {
            std::memcpy(bytes + first, codes, part);
        } else {
            if (part % 2) { codes[part] = 0; }  // part < kPiece
            pack(codes, bytes + first / 2, part + part % 2);
        }
    }
}

template <typename T>
void dequantize_block(const uint8_t* scale_place, const uint8_t* bytes, T* to, int64_t count, int64_t bits, bool add)
{
    float values[kPiece];
    int8_t codes[kPiece];
    float scale;
    std::memcpy(&scale, scale_place, sizeof(float));
    for (int64_t first = 0; first < count; first += kPiece) {
        const int64_t part = std::min(kPiece, count - first);
        if (bits == 8) {
            std::memcpy(codes, bytes + first, part);
        } else {
            unpack(bytes + first / 2, codes, part + part % 2);
        }
        if (add) {
            load(to + first, values, part);
            for (int64_t i = 0; i < part; ++i) { values[i] += static_cast<float>(codes[i]) * scale; }
        } else {
            for (int64_t i = 0; i < part; ++i) { values[i] = static_cast<float>(codes[i]) * scale; }
        }
        store(values, to + first, part);
    }
}

// ---- tensors

// Blocks of all rows, numbered row by row.
struct Blocks {
    int64_t rows, numel, bits, block, per_row, scale_bytes;

    Blocks(const at::Tensor& values, const at::Tensor& packed, int64_t code_bits, int64_t block_numel)
        : rows(0), numel(0), bits(code_bits), block(block_numel), per_row(0), scale_bytes(0)
    {
        if (!values.device().is_cpu() || !packed.device().is_cpu() || values.dim() != 2 || packed.dim() != 2 ||
            values.size(0) != packed.size(0) || packed.scalar_type() != at::kByte) {
            throw std::invalid_argument("quantizing takes rows of values and as many rows of bytes, in host memory");
        }
        if ((bits != 8 && bits != 4) || block_numel < 2 || block_numel % 2) {
            throw std::invalid_argument("quantizing takes 8 or 4 bits, and blocks of an even number of elements");
        }
        rows = values.size(0);
        numel = values.size(1);
        per_row = (numel + block - 1) / block;
        scale_bytes = per_row * 4;
        if (packed.size(1) != scale_bytes + (code_bytes() + 3) / 4 * 4) {
            throw std::invalid_argument("quantizing takes rows of bytes for the scales and codes of a row of values");
        }
        if ((numel > 1 && values.stride(1) != 1) || (packed.size(1) > 1 && packed.stride(1) != 1)) {
            throw std::invalid_argument("quantizing takes rows whose elements are neighbours in memory");
        }
    }
    int64_t count() const { return rows * per_row; }
    int64_t code_bytes() const { return bits == 8 ? numel : (numel + 1) / 2; }
};

// Calls work(values, numel, scale, codes) for each block.
template <typename Value, typename Byte, typename Work>
void for_each_block(const Blocks& blocks, Value* values, int64_t stride, Byte* packed, int64_t packed_stride, int threads,
                    const Work& work)
{
    const bool alone = threads < 2 || blocks.rows * blocks.numel <= kAlone;
#pragma omp parallel for schedule(static) num_threads(alone ? 1 : threads)
    for (int64_t number = 0; number < blocks.count(); ++number) {
        const int64_t row = number / blocks.per_row, place = number % blocks.per_row;
        const int64_t first = place * blocks.block;
        Byte* bytes = packed + row * packed_stride;
        work(values + row * stride + first, std::min(blocks.block, blocks.numel - first), bytes + place * 4,
             bytes + blocks.scale_bytes + first * blocks.bits / 8);
    }
}

void quantize(const at::Tensor& values, at::Tensor& packed, int64_t bits, int64_t block, int threads)
{
    const Blocks blocks(values, packed, bits, block);
    uint8_t* bytes = packed.data_ptr<uint8_t>();
    for (int64_t row = 0; row < blocks.rows; ++row) {
        uint8_t* end = bytes + row * packed.stride(0);
        std::fill(end + blocks.scale_bytes + blocks.code_bytes(), end + packed.size(1), uint8_t(0));
    }
    const auto run = [&](auto* from) {
        for_each_block(blocks, from, values.stride(0), bytes, packed.stride(0), threads,
                       [bits](auto* block_values, int64_t count, uint8_t* scale, uint8_t* codes) {
                           quantize_block(block_values, count, scale, codes, bits);
                       });
    };
    switch (values.scalar_type()) {
        case at::kFloat: return run(static_cast<const float*>(values.data_ptr<float>()));
        case at::kBFloat16: return run(static_cast<const at::BFloat16*>(values.data_ptr<at::BFloat16>()));
        case at::kHalf: return run(static_cast<const at::Half*>(values.data_ptr<at::Half>()));
        default: throw std::invalid_argument("quantizing takes fp32, bf16 or fp16");
    }
}

void dequantize(const at::Tensor& packed, at::Tensor& values, int64_t bits, int64_t block, int threads, bool add)
{
    const Blocks blocks(values, packed, bits, block);
    const uint8_t* bytes = packed.data_ptr<uint8_t>();
    if (add && values.scalar_type() != at::kFloat) { throw std::invalid_argument("totals are fp32"); }
    const auto run = [&](auto* to) {
        for_each_block(blocks, to, values.stride(0), bytes, packed.stride(0), threads,
                       [bits, add](auto* block_values, int64_t count, const uint8_t* scale, const uint8_t* codes) {
                           dequantize_block(scale, codes, block_values, count, bits, add);
                       });
    };
    switch (values.scalar_type()) {
        case at::kFloat: return run(values.data_ptr<float>());
        case at::kBFloat16: return run(values.data_ptr<at::BFloat16>());
        case at::kHalf: return run(values.data_ptr<at::Half>());
        default: throw std::invalid_argument("quantizing takes fp32, bf16 or fp16");
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    using without_lock = pybind11::call_guard<pybind11::gil_scoped_release>;
    m.def("quantize", &quantize, "Rows of values to rows of bytes, outside the interpreter lock", without_lock());
    m.def("dequantize", &dequantize, "Rows of bytes to rows of values, or added to rows of fp32", without_lock());
}
