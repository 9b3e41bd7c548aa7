// y = x Wᵀ + b in bfloat16 for a few vectors x, by the matrix unit (AMX) of Intel's Xeons from the fourth generation on.
//
// W is read once, as it lies in memory: 16 rows and 32 columns are a tile. The vectors are the other tile, in the order that
// the unit wants: pairs of numbers, one vector beside the other. Sums are float32.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/Utils.h>
#include <immintrin.h>
#include <torch/library.h>

namespace {

constexpr int64_t ROWS = 16, COLUMNS = 32, VECTORS = 16;

struct Tiles {                                              // what the processor reads: how large each tile is
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};                                // of a row
    uint8_t rows[16] = {};
};

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
    const int64_t N = weight.size(0), K = weight.size(1);
    TORCH_CHECK(x.size(-1) == K && K > 0 && K % COLUMNS == 0 && N >= ROWS, "x ", x.sizes(), " by W ", weight.sizes());
    TORCH_CHECK(x.scalar_type() == at::kBFloat16 && weight.scalar_type() == at::kBFloat16 && weight.is_contiguous()
                && (!bias || (bias->scalar_type() == at::kBFloat16 && bias->is_contiguous())), "plain bfloat16 is needed");
    const int64_t T = x.numel() / K, stride = T <= VECTORS ? T : (T + VECTORS - 1) / VECTORS * VECTORS;
    const at::Tensor vectors = x.contiguous();
    const auto* words = static_cast<const int32_t*>(vectors.const_data_ptr());
    std::vector<int32_t> pairs(K / 2 * stride);
    for (int64_t k = 0; k < K / 2; k++)
        for (int64_t v = 0; v < T; v++) pairs[k * stride + v] = words[v * K / 2 + k];
    at::Tensor y = at::empty({T, N}, x.options());
    const auto* w = weight.const_data_ptr<at::BFloat16>();
    const auto* b = bias ? bias->const_data_ptr<at::BFloat16>() : nullptr;
    const int32_t* p = pairs.data();
    auto* out = y.mutable_data_ptr<at::BFloat16>();

    at::parallel_for(0, T ? (N + ROWS - 1) / ROWS : 0, 1, [&](int64_t first, int64_t end) {
        Tiles tiles;
        for (int i = 0; i < 5; i++) {
            tiles.rows[i] = 16;
            tiles.bytes[i] = 4 * std::min(stride, VECTORS);
        }
        tiles.bytes[2] = 2 * COLUMNS;                       // 0 and 1: sums, 2: of W, 3 and 4: of x
        _tile_loadconfig(&tiles);
        alignas(64) float sums[2][ROWS][VECTORS];
        for (int64_t block = first; block < end; block++) {
            const int64_t n = std::min(block * ROWS, N - ROWS);             // the last rows may be done twice
            const auto* rows = w + n * K;
            for (int64_t t = 0; t < T; t += 2 * VECTORS) {
                const bool two = t + VECTORS < T;
                _tile_zero(0);
                _tile_zero(1);
                for (int64_t k = 0; k < K; k += COLUMNS) {
                    if (t == 0)
                        for (int i = 0; i < ROWS; i++)      // ask for the next 16 rows; else the memory waits for us
                            _mm_prefetch(reinterpret_cast<const char*>(rows + (ROWS + i) * K + k), _MM_HINT_T1);
                    _tile_loadd(2, rows + k, 2 * K);
                    _tile_loadd(3, p + k / 2 * stride + t, 4 * stride);
                    _tile_dpbf16ps(0, 2, 3);
                    if (two) {
                        _tile_loadd(4, p + k / 2 * stride + t + VECTORS, 4 * stride);
                        _tile_dpbf16ps(1, 2, 4);
                    }
                }
                _tile_stored(0, sums[0], 4 * VECTORS);
                _tile_stored(1, sums[1], 4 * VECTORS);
                for (int64_t v = 0; v < std::min(T - t, 2 * VECTORS); v++)
                    for (int i = 0; i < ROWS; i++)
                        out[(t + v) * N + n + i] = sums[v / VECTORS][i][v % VECTORS] + (b ? float(b[n + i]) : 0);
            }
        }
        _tile_release();
    });
    auto shape = x.sizes().vec();
    shape.back() = N;
    return y.view(shape);
}

}  // namespace

TORCH_LIBRARY(decore, m) {
    m.def("ready() -> bool", [] { return at::cpu::init_amx(); });
    m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", linear);
}
