// y = x Wᵀ + b for a few vectors x, at the speed at which memory delivers W. Sums are float32.
//
// W is read once, in order, a cache line at a time. Lines are prefetched AHEAD rows early, into L2, because L1 allows too few
// outstanding misses. On Intel's Xeons with AMX, `tiles` multiplies bfloat16.

#include <ATen/core/Tensor.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/Utils.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LINE = 64;                        // bytes of W that are read at a time
constexpr int64_t PAIR = 2, AHEAD = 4, ROWS = 32;   // rows: read in turns; to the line to request; per block
constexpr int64_t VECTORS = 8;                      // multiplied at a time; the next eight find the block in the cache
typedef float Floats __attribute__((vector_size(LINE), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(LINE), aligned(4)));

inline Floats add_product(Floats sum, const float* w, const float* x) {
    return sum + *reinterpret_cast<const Floats*>(w) * *reinterpret_cast<const Floats*>(x);
}

inline Floats add_product(Floats sum, const at::BFloat16* w, const at::BFloat16* x) {
    const Words a = *reinterpret_cast<const Words*>(w), b = *reinterpret_cast<const Words*>(x);
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    constexpr uint32_t UPPER = 0xffff0000;                          // a bfloat16 is the upper half of a float32
    return sum + (Floats)(a << 16) * (Floats)(b << 16) + (Floats)(a & UPPER) * (Floats)(b & UPPER);
#endif
}

inline float total(const Floats& sums) {
    float parts[LINE / sizeof(float)];
    __builtin_memcpy(parts, &sums, LINE);
    for (int half = LINE / sizeof(float) / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

// Rows of W times T vectors: W [rows, K], x [T, K], b [rows] or null → y [T, rows] of [T, N].
template <typename Number, int T>
void block(const Number* w, const Number* x, const Number* b, Number* y, int64_t rows, int64_t K, int64_t N) {
    for (int64_t pair = 0; pair < rows; pair += PAIR) {
        const int64_t n = std::min(pair, rows - PAIR);              // if their number is odd, one row is computed twice
        Floats sums[PAIR][T] = {};
        for (int64_t k = 0; k < K; k += LINE / sizeof(Number))
            for (int row = 0; row < PAIR; row++) {
                const Number* line = w + (n + row) * K + k;
                __builtin_prefetch(line + AHEAD * K, 0, 2);
                for (int t = 0; t < T; t++) sums[row][t] = add_product(sums[row][t], line, x + t * K + k);
            }
        for (int row = 0; row < PAIR; row++)
            for (int t = 0; t < T; t++) y[t * N + n + row] = total(sums[row][t]) + (b ? float(b[n + row]) : 0);
    }
}

template <typename Number>
void lines(const Number* w, const Number* x, const Number* b, Number* y, int64_t T, int64_t K, int64_t N) {
    constexpr decltype(&block<Number, 1>) PRODUCTS[VECTORS] = {
        block<Number, 1>, block<Number, 2>, block<Number, 3>, block<Number, 4>,
        block<Number, 5>, block<Number, 6>, block<Number, 7>, block<Number, 8>};
    at::parallel_for(0, (N + ROWS - 1) / ROWS, 1, [&](int64_t first, int64_t end) {
        for (int64_t n = first * ROWS; n < std::min(end * ROWS, N); n += ROWS)
            for (int64_t t = 0; t < T; t += VECTORS)
                PRODUCTS[std::min(T - t, VECTORS) - 1](w + n * K, x + t * K, b ? b + n : nullptr, y + t * N + n,
                                                       std::min(ROWS, N - n), K, N);
    });
}

#ifdef __AMX_BF16__
constexpr int64_t TILE = 16, COLUMNS = 32;

struct Tiles {                                              // operand of LDTILECFG: the shape of each tile
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};                                // of a row
    uint8_t rows[16] = {};
};

// 16 rows and 32 columns of W are a tile. The vectors are the other tile, in VNNI layout: pairs, vector by vector.
void tiles(const at::BFloat16* w, const at::BFloat16* x, const at::BFloat16* b, at::BFloat16* y, int64_t T, int64_t K,
           int64_t N) {
    const int64_t stride = T <= TILE ? T : (T + TILE - 1) / TILE * TILE;
    const auto* words = reinterpret_cast<const int32_t*>(x);
    std::vector<int32_t> vnni(K / 2 * stride);
    for (int64_t k = 0; k < K / 2; k++)
        for (int64_t v = 0; v < T; v++) vnni[k * stride + v] = words[v * K / 2 + k];
    const int32_t* p = vnni.data();

    at::parallel_for(0, T ? (N + TILE - 1) / TILE : 0, 1, [&](int64_t first, int64_t end) {
        Tiles shapes;
        for (int i = 0; i < 5; i++) {
            shapes.rows[i] = TILE;
            shapes.bytes[i] = 4 * std::min(stride, TILE);
        }
        shapes.bytes[2] = 2 * COLUMNS;                      // 0 and 1: sums, 2: of W, 3 and 4: of x
        _tile_loadconfig(&shapes);
        alignas(64) float sums[2][TILE][TILE];
        for (int64_t block = first; block < end; block++) {
            const int64_t n = std::min(block * TILE, N - TILE);             // the last rows may be done twice
            const auto* rows = w + n * K;
            for (int64_t t = 0; t < T; t += 2 * TILE) {
                const bool two = t + TILE < T;
                _tile_zero(0);
                _tile_zero(1);
                for (int64_t k = 0; k < K; k += COLUMNS) {
                    if (t == 0)
                        for (int i = 0; i < TILE; i++)      // the next 16 rows
                            __builtin_prefetch(rows + (TILE + i) * K + k, 0, 2);
                    _tile_loadd(2, rows + k, 2 * K);
                    _tile_loadd(3, p + k / 2 * stride + t, 4 * stride);
                    _tile_dpbf16ps(0, 2, 3);
                    if (two) {
                        _tile_loadd(4, p + k / 2 * stride + t + TILE, 4 * stride);
                        _tile_dpbf16ps(1, 2, 4);
                    }
                }
                _tile_stored(0, sums[0], 4 * TILE);
                _tile_stored(1, sums[1], 4 * TILE);
                for (int64_t v = 0; v < std::min(T - t, 2 * TILE); v++)
                    for (int i = 0; i < TILE; i++)
                        y[(t + v) * N + n + i] = sums[v / TILE][i][v % TILE] + (b ? float(b[n + i]) : 0);
            }
        }
        _tile_release();
    });
}
#endif

template <typename Number>
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    const int64_t N = weight.size(0), K = weight.size(1), T = x.numel() / K;
    at::Tensor y = at::empty({T, N}, x.options());
    const at::Tensor vectors = x.contiguous();
    const auto *w = weight.const_data_ptr<Number>(), *v = vectors.const_data_ptr<Number>();
    const auto* b = bias ? bias->const_data_ptr<Number>() : nullptr;
    auto* out = y.mutable_data_ptr<Number>();
#ifdef __AMX_BF16__
    static const bool amx = at::cpu::init_amx();
    if constexpr (std::is_same_v<Number, at::BFloat16>)
        if (amx && N >= TILE) {
            tiles(w, v, b, out, T, K, N);
            return y;
        }
#endif
    lines(w, v, b, out, T, K, N);
    return y;
}

// x […, K], W [N, K], b [N] or none, all float32 or all bfloat16 → […, N]. A row of W is whole lines.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    const auto number = weight.scalar_type();
    TORCH_CHECK(number == at::kFloat || number == at::kBFloat16, "float32 or bfloat16 is needed, not ", number);
    TORCH_CHECK(x.scalar_type() == number && (!bias || bias->scalar_type() == number), "numbers of one type are needed");
    TORCH_CHECK(weight.is_contiguous() && (!bias || bias->is_contiguous()), "W and b have to be contiguous");
    TORCH_CHECK(x.size(-1) == weight.size(1) && weight.size(1) * weight.itemsize() % LINE == 0 && weight.size(0) >= PAIR,
                "x ", x.sizes(), " by W ", weight.sizes());
    auto shape = x.sizes().vec();
    shape.back() = weight.size(0);
    return (number == at::kFloat ? product<float> : product<at::BFloat16>)(x, weight, bias).view(shape);
}

}  // namespace

TORCH_LIBRARY(decore, m) { m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor"); }
TORCH_LIBRARY_IMPL(decore, CPU, m) { m.impl("linear", linear); }
